// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * The target's process tree: who belongs to it, and its edges.
 *
 * Children of a member are members from the fork on, before they run; seeds are
 * the processes that existed when recording began.
 */
#include "shared.bpf.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u32);
	__type(value, u32);
} seeds SEC(".maps");

#define EEXIST 17
#define FORK_IO_WORKER 1
#define SIGNAL_GROUP_EXIT 4 /* include/linux/sched/signal.h */
#define SIGNAL_IGNORED 1    /* include/trace/events/signal.h */

struct comm_key {
	char comm[16];
};

/* Names whose next process is taken for the target's successor: a server that is
 * stopped and started anew by its supervisor. Empty unless the user named the
 * target by something that outlives a process. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16);
	__type(key, struct comm_key);
	__type(value, struct successor);
} successors SEC(".maps");

/* The target's processes of such a name, by tgid; the value is 1 once one is on its
 * way out. While one is not, a process executed under the name is another server. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, u32);
	__type(value, u32);
} servers SEC(".maps");

struct process_key {
	u64 start_ns;
	u32 tgid;
	u32 pad;
};

/* Processes whose end was told: of threads that end at once, each may see that none is
 * left. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, struct process_key);
	__type(value, u32);
} ended SEC(".maps");

static __always_inline bool is_first_to_tell(struct task_struct *task)
{
	struct process_key key = {.start_ns = FIELD(task, group_leader, start_time), .tgid = FIELD(task, tgid)};
	u32 told = 1;

	return bpf_map_update_elem(&ended, &key, &told, BPF_NOEXIST) != -EEXIST;
}

static __always_inline void note_server(u32 tgid, const char *comm)
{
	struct comm_key name = {};
	u32 leaving = 0;

	bpf_probe_read_kernel(name.comm, sizeof(name.comm), comm);
	if (bpf_map_lookup_elem(&successors, &name))
		bpf_map_update_elem(&servers, &tgid, &leaving, BPF_ANY);
	else
		bpf_map_delete_elem(&servers, &tgid);
}

static __always_inline void note_leaving(u32 tgid)
{
	u32 *leaving = bpf_map_lookup_elem(&servers, &tgid);

	if (leaving)
		*leaving = 1;
}

static __always_inline struct thread_slot *follow(struct task_struct *task)
{
	struct membership *m = membership_of(task);
	struct control *c = the_control();
	u32 slot = 0;

	if (m || !c || FIELD(task, tgid) == settings.own_tgid)
		return 0;
	if (bpf_map_pop_elem(&free_threads, &slot))
		slot = __sync_fetch_and_add(&c->threads_used, 1);
	struct thread_slot *t = bpf_map_lookup_elem(&threads, &slot);
	struct membership fresh = {.slot = slot};
	if (!t || !membership_begin(task, &fresh)) {
		if (t)
			bpf_map_push_elem(&free_threads, &slot, 0);
		lose(LOST_THREADS);
		return 0;
	}
	__builtin_memset(t, 0, sizeof(*t));
	t->tid = FIELD(task, pid);
	t->tgid = FIELD(task, tgid);
	t->min_flt = FIELD(task, min_flt);
	t->maj_flt = FIELD(task, maj_flt);
	t->cpu_ns = FIELD(task, se.sum_exec_runtime);
	t->off_syscall = -1;
	t->since_ns = bpf_ktime_get_ns();
	return t;
}

static __always_inline bool is_seed(struct task_struct *task)
{
	u32 tgid = FIELD(task, tgid);

	return bpf_map_lookup_elem(&seeds, &tgid) != 0;
}

static __always_inline void seed(struct task_struct *task)
{
	u32 tgid = FIELD(task, tgid);
	struct thread_slot *t = follow(task);
	if (FIELD(task, pid) == tgid)
		note_server(tgid, task->comm);
	u32 state = task_state(task);
	if (!t || !(state & TASK_ASLEEP_BITS))
		return;
	/* Asleep since before we looked: its wait begins, for us, now. */
	t->off_syscall = task_syscall(task);
	t->off_reason = wait_reason_of(task, state, t->off_syscall);
	t->off_ns = t->since_ns;
}

/* Run once by the collector after the fork probe is on: a thread made meanwhile
 * is caught by one or the other. */
#ifdef NO_KERNEL_BTF
#define MOST_TASKS (1 << 22) /* PID_MAX_LIMIT */

struct walk {
	struct task_struct *first; /* of the processes */
	struct task_struct *leader;
	struct task_struct *thread;
};

static __always_inline struct task_struct *after_process(struct task_struct *task)
{
	return (void *)FIELD(task, tasks.next) - bpf_core_field_offset(struct task_struct, tasks);
}

/* 0 behind the last thread of the process. */
static __always_inline struct task_struct *after_thread(struct task_struct *task)
{
	struct list_head *next = FIELD(task, thread_node.next);
	void *head = (void *)FIELD(task, signal) + bpf_core_field_offset(struct signal_struct, thread_head);

	if ((void *)next == head)
		return 0;
	return (void *)next - bpf_core_field_offset(struct task_struct, thread_node);
}

/* A callback of bpf_loop: one thread of a seed, or one process that is none. */
static long walk_on(u32 index, struct walk *w)
{
	bool wanted = is_seed(w->leader);

	if (wanted)
		seed(w->thread);
	w->thread = wanted ? after_thread(w->thread) : 0;
	if (w->thread)
		return 0;
	w->leader = w->thread = after_process(w->leader);
	return w->leader == w->first;
}

/* The lists are read under RCU, as the kernel does itself. */
SEC("raw_tp")
int process__seed(void *ctx)
{
	struct task_struct *own = FIELD(current_task(), group_leader);
	struct walk w = {.first = own, .leader = own, .thread = own};

	bpf_loop(MOST_TASKS, walk_on, &w, 0);
	return 0;
}
#else
SEC("iter/task")
int process__seed(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;

	if (task && is_seed(task))
		seed(task);
	return 0;
}
#endif

static __always_inline void send_fork(struct task_struct *parent, struct task_struct *child, u16 flags)
{
	struct event *e = event_begin(EVENT_FORK, bpf_ktime_get_ns());

	if (!e)
		return;
	e->tid = FIELD(child, pid);
	e->tgid = FIELD(child, tgid);
	e->a = FIELD(parent, tgid);
	e->b = FIELD(parent, pid);
	e->flags = flags;
	event_end(e);
}

TRACEPOINT(sched_process_fork)
int BPF_PROG(process__fork, struct task_struct *parent, struct task_struct *child)
{
	struct thread_slot *p = slot_of(parent);

	if (!p || !follow(child))
		return 0;
	u32 tgid = FIELD(child, tgid);
	if (FIELD(child, pid) == tgid) {
		p->forks++;
		note_server(tgid, child->comm);
	}
	send_fork(parent, child, 0);
	return 0;
}

/* io_uring's workers and pollers are threads of their process that no fork makes. */
TRACEPOINT(task_newtask)
int BPF_PROG(process__worker, struct task_struct *child)
{
	struct task_struct *parent = current_task();

	if (FIELD(child, flags) & PF_IO_WORKER && slot_of(parent) && follow(child))
		send_fork(parent, child, FORK_IO_WORKER);
	return 0;
}

static __always_inline void send_exec_name(struct linux_binprm *bprm, u64 now)
{
	u32 zero = 0;
	struct scratch *s = bpf_map_lookup_elem(&scratches, &zero);

	if (!s)
		return;
	__builtin_memset(&s->head, 0, sizeof(s->head));
	long n = bpf_probe_read_kernel_str(s->bytes, PATH_BYTES, FIELD(bprm, filename));
	if (n < 1 || n > PATH_BYTES)
		return;
	u64 id = bpf_get_current_pid_tgid();
	s->head.start_ns = s->head.end_ns = now;
	s->head.tid = (u32)id;
	s->head.tgid = id >> 32;
	s->head.kind = TEXT_EXEC;
	s->head.total = s->head.length = n - 1;
	scratch_output(s, n);
}

#define CGROUPS_ABOVE 4

static __always_inline bool same_name(struct successor *one, struct successor *other)
{
	u64 *a = (u64 *)one->cgroup, *b = (u64 *)other->cgroup;

	for (u32 i = 0; i < sizeof(one->cgroup) / sizeof(u64); i++)
		if (a[i] != b[i])
			return false;
	return true;
}

static __always_inline bool runs_where(struct task_struct *task, struct successor *wanted)
{
	struct kernfs_node *node = BPF_CORE_READ(task, cgroups, dfl_cgrp, kn);

	if (!wanted->cgroup[0])
		return true;
	for (u32 i = 0; i < CGROUPS_ABOVE && node; i++) {
		struct successor here = {};

		bpf_probe_read_kernel_str(here.cgroup, sizeof(here.cgroup), BPF_CORE_READ(node, name));
		if (same_name(&here, wanted))
			return true;
		node = cgroup_above(node);
	}
	return false;
}

/* A callback of bpf_for_each_map_elem (5.13). */
static long find_staying(void *map, u32 *tgid, u32 *leaving, bool *found)
{
	if (*leaving)
		return 0;
	*found = true;
	return 1;
}

/* Whether a stranger that was executed continues the target: it bears the name, and
 * every server of the target is gone or on its way out, that is told to end by a
 * signal it does not ignore, or exiting. A restart may overlap that much: memory of
 * many GB takes the old one seconds to give back. */
static __always_inline bool is_successor(struct task_struct *task)
{
	struct comm_key name = {};
	bool staying = false;

	bpf_probe_read_kernel(name.comm, sizeof(name.comm), task->comm);
	struct successor *wanted = bpf_map_lookup_elem(&successors, &name);
	if (!wanted || !runs_where(task, wanted))
		return false;
	bpf_for_each_map_elem(&servers, find_staying, &staying, 0);
	return !staying;
}

TRACEPOINT(sched_process_exec)
int BPF_PROG(process__exec, struct task_struct *task, int old_pid, struct linux_binprm *bprm)
{
	u16 adopted = 0;

	membership_moves(task, old_pid);
	struct thread_slot *t = slot_of(task);
	if (t) { /* whichever thread calls exec, it is the first from now on */
		t->tid = FIELD(task, pid);
	} else {
		if (!is_successor(task) || !follow(task))
			return 0;
		adopted = 1;
	}
	note_server(FIELD(task, tgid), task->comm);
	u64 now = bpf_ktime_get_ns();
	struct event *e = event_begin(EVENT_EXEC, now);
	if (e) {
		e->flags = adopted;
		event_end(e);
	}
	send_exec_name(bprm, now);
	return 0;
}

TRACEPOINT(sched_process_exit)
int BPF_PROG(process__exit, struct task_struct *task)
{
	u32 tgid = FIELD(task, tgid);

	if (!slot_of(task))
		return 0;
	if (FIELD(task, signal, live.counter)) {
		if (FIELD(task, signal, flags) & SIGNAL_GROUP_EXIT)
			note_leaving(tgid);
		return 0;
	}
	bpf_map_delete_elem(&servers, &tgid);
	if (!is_first_to_tell(task))
		return 0;
	struct event *e = event_begin(EVENT_PROCESS_EXIT, bpf_ktime_get_ns());
	if (!e)
		return 0;
	e->a = FIELD(task, exit_code);
	event_end(e);
	return 0;
}

TRACEPOINT(signal_generate)
int BPF_PROG(process__signal, int sig, struct kernel_siginfo *info, struct task_struct *task, int group,
	     int result)
{
	/* Only those that end a process: SIGINT, SIGQUIT, SIGABRT, SIGKILL, SIGTERM. */
	if (sig != 2 && sig != 3 && sig != 6 && sig != 9 && sig != 15)
		return 0;
	if (!slot_of(task))
		return 0;
	if (result != SIGNAL_IGNORED)
		note_leaving(FIELD(task, tgid));
	struct event *e = event_begin(EVENT_SIGNAL, bpf_ktime_get_ns());
	if (!e)
		return 0;
	e->a = e->tgid;
	e->tid = FIELD(task, pid);
	e->tgid = FIELD(task, tgid);
	e->flags = sig;
	event_end(e);
	return 0;
}
