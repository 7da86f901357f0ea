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
	__type(value, u32);
} successors SEC(".maps");

static __always_inline struct thread_slot *follow(struct task_struct *task)
{
	struct membership *m = bpf_task_storage_get(&members, task, 0, 0);
	struct control *c = the_control();
	u32 slot = 0;

	if (m || !c || task->tgid == settings.own_tgid)
		return 0;
	if (bpf_map_pop_elem(&free_threads, &slot))
		slot = __sync_fetch_and_add(&c->threads_used, 1);
	struct thread_slot *t = bpf_map_lookup_elem(&threads, &slot);
	struct membership fresh = {.slot = slot};
	if (!t || !bpf_task_storage_get(&members, task, &fresh, BPF_LOCAL_STORAGE_GET_F_CREATE)) {
		lose(LOST_THREADS);
		return 0;
	}
	__builtin_memset(t, 0, sizeof(*t));
	t->tid = task->pid;
	t->tgid = task->tgid;
	t->min_flt = task->min_flt;
	t->maj_flt = task->maj_flt;
	t->cpu_ns = task->se.sum_exec_runtime;
	t->off_syscall = -1;
	t->since_ns = bpf_ktime_get_ns();
	return t;
}

/* Run once by the collector after the fork probe is on: a thread made meanwhile
 * is caught by one or the other. */
SEC("iter/task")
int process__seed(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;

	if (!task)
		return 0;
	u32 tgid = task->tgid;
	if (!bpf_map_lookup_elem(&seeds, &tgid))
		return 0;
	struct thread_slot *t = follow(task);
	u32 state = task_state(task);
	if (!t || !(state & TASK_ASLEEP_BITS))
		return 0;
	/* Asleep since before we looked: its wait begins, for us, now. */
	t->off_syscall = task_syscall(task);
	t->off_reason = wait_reason_of(task, state, t->off_syscall);
	t->off_ns = t->since_ns;
	return 0;
}

SEC("tp_btf/sched_process_fork")
int BPF_PROG(process__fork, struct task_struct *parent, struct task_struct *child)
{
	struct thread_slot *p = slot_of(parent);

	if (!p || !follow(child))
		return 0;
	if (child->pid == child->tgid)
		p->forks++;
	struct event *e = event_begin(EVENT_FORK, bpf_ktime_get_ns());
	if (!e)
		return 0;
	e->tid = child->pid;
	e->tgid = child->tgid;
	e->a = parent->tgid;
	e->b = parent->pid;
	event_end(e);
	return 0;
}

static __always_inline void send_exec_name(struct linux_binprm *bprm, u64 now)
{
	u32 zero = 0;
	struct scratch *s = bpf_map_lookup_elem(&scratches, &zero);

	if (!s)
		return;
	__builtin_memset(&s->head, 0, sizeof(s->head));
	long n = bpf_probe_read_kernel_str(s->bytes, PATH_BYTES, bprm->filename);
	if (n < 1 || n > PATH_BYTES)
		return;
	u64 id = bpf_get_current_pid_tgid();
	s->head.start_ns = s->head.end_ns = now;
	s->head.tid = (u32)id;
	s->head.tgid = id >> 32;
	s->head.kind = TEXT_EXEC;
	s->head.total = s->head.length = n - 1;
	if (bpf_ringbuf_output(&texts, s, sizeof(s->head) + (n & (PATH_BYTES * 2 - 1)), 0))
		lose(LOST_TEXTS);
}

SEC("tp_btf/sched_process_exec")
int BPF_PROG(process__exec, struct task_struct *task, int old_pid, struct linux_binprm *bprm)
{
	u16 adopted = 0;

	if (!slot_of(task)) {
		struct comm_key name = {};

		bpf_get_current_comm(name.comm, sizeof(name.comm));
		if (!bpf_map_lookup_elem(&successors, &name) || !follow(task))
			return 0;
		adopted = 1;
	}
	u64 now = bpf_ktime_get_ns();
	struct event *e = event_begin(EVENT_EXEC, now);
	if (e) {
		e->flags = adopted;
		event_end(e);
	}
	send_exec_name(bprm, now);
	return 0;
}

SEC("tp_btf/sched_process_exit")
int BPF_PROG(process__exit, struct task_struct *task)
{
	if (!slot_of(task) || task->signal->live.counter)
		return 0;
	struct event *e = event_begin(EVENT_PROCESS_EXIT, bpf_ktime_get_ns());
	if (!e)
		return 0;
	e->a = task->exit_code;
	event_end(e);
	return 0;
}

SEC("tp_btf/signal_generate")
int BPF_PROG(process__signal, int sig, struct kernel_siginfo *info, struct task_struct *task, int group,
	     int result)
{
	/* Only those that end a process: SIGINT, SIGQUIT, SIGABRT, SIGKILL, SIGTERM. */
	if (sig != 2 && sig != 3 && sig != 6 && sig != 9 && sig != 15)
		return 0;
	if (!slot_of(task))
		return 0;
	struct event *e = event_begin(EVENT_SIGNAL, bpf_ktime_get_ns());
	if (!e)
		return 0;
	e->a = e->tgid;
	e->tid = task->pid;
	e->tgid = task->tgid;
	e->flags = sig;
	event_end(e);
	return 0;
}
