// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Off-CPU intervals of the target's threads, with the reason and, for storage,
 * the file; and the thread's last words. wait_reason_of in shared.bpf.h says what
 * a wait is for.
 */
#include "remote.bpf.h"

/* read() waits for storage, a pipe or a socket: its file says which. */
static __always_inline u32 refine_read(struct task_struct *task, struct thread_slot *t, u32 reason)
{
	if (reason != WAIT_PIPE)
		return reason;
	struct pt_regs *regs = task_regs(task);
	u16 mode = file_mode(fd_file(REGS_ARG0(regs)));
	if (mode == MODE_SOCKET)
		return WAIT_NETWORK;
	if (mode == MODE_REGULAR)
		return WAIT_STORAGE;
	return WAIT_PIPE;
}

/* A fault that asks a daemon or a server for its page, and waits for it there and
 * then (FUSE, 9P), sleeps without the kernel's mark for I/O and in no call. */
static __always_inline u32 refine_fault(struct thread_slot *t, s64 nr, u32 reason)
{
	bool unclear = reason == WAIT_OTHER || reason == WAIT_LOCK;

	return nr < 0 && unclear && is_waiting_for_answer(t) ? WAIT_STORAGE : reason;
}

/* A read past the page cache names its file by its descriptor only. */
static __always_inline void name_read_file(struct task_struct *task, struct thread_slot *t, s64 nr)
{
	u32 call = nr >= 0 && nr < 512 ? settings.call_class[nr & 511] : CALL_NONE;

	if (call != CALL_READ && call != CALL_PREAD && call != CALL_READV && call != CALL_PREADV)
		return;
	struct pt_regs *regs = task_regs(task);
	struct file *file = fd_file(REGS_ARG0(regs));
	struct inode *host = file ? file_cache_inode(file) : 0;
	if (!host)
		return;
	t->file_ino = PEEK(struct inode, host, i_ino);
	t->file_dev = PEEK(struct inode, host, i_sb, s_dev);
}

static __always_inline void note_counters(struct task_struct *task, struct thread_slot *t)
{
	t->min_flt = FIELD(task, min_flt);
	t->maj_flt = FIELD(task, maj_flt);
	t->cpu_ns = FIELD(task, se.sum_exec_runtime);
}

static __always_inline void ends_submit(struct thread_slot *last)
{
	u64 waiting = bpf_ringbuf_query(&ends, BPF_RB_AVAIL_DATA);

	bpf_ringbuf_submit(last, waiting > END_RING_BYTES / 4 ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP);
}

static __always_inline void last_words(struct task_struct *task, struct thread_slot *t, u64 now)
{
	struct membership *m = membership_of(task);
	struct event *e = event_begin(EVENT_THREAD_END, t->since_ns);

	if (e) {
		e->duration_ns = now - t->since_ns;
		e->tid = t->tid;
		e->tgid = t->tgid;
		e->a = t->min_flt;
		e->b = t->maj_flt;
		e->ino = t->cpu_ns;
		event_end(e);
	}
	struct thread_slot *last = bpf_ringbuf_reserve(&ends, sizeof(*last), 0);
	if (last) {
		*last = *t;
		ends_submit(last);
		t->since_ns = 0; /* told: the slot is not to be told again */
	} else {
		lose(LOST_ENDS);
	}
	if (!m)
		return;
	u32 slot = m->slot;
	membership_end(task);
	bpf_map_push_elem(&free_threads, &slot, BPF_ANY);
}

static __always_inline void coming_on(struct thread_slot *t, u64 now)
{
	u64 began = t->off_ns;
	u32 reason = t->off_reason;

	if (!began)
		return;
	t->off_ns = 0;
	u64 waited = now > began ? now - began : 0;
	if (waited < settings.short_wait_ns) {
		if (reason < WAIT_REASONS) {
			t->short_ns[reason] += waited;
			t->short_count[reason]++;
		}
		if (reason == WAIT_STORAGE) {
			struct file_slot *f = file_find(t->file_dev, t->file_ino);

			if (f)
				__sync_fetch_and_add(&f->short_wait_ns, waited);
		}
		return;
	}
	struct event *e = event_begin(EVENT_OFFCPU, began);
	if (!e)
		return;
	e->duration_ns = waited;
	e->tid = t->tid;
	e->tgid = t->tgid;
	e->flags = reason;
	e->a = (s64)t->off_syscall;
	if (reason == WAIT_STORAGE) {
		e->dev = t->file_dev;
		e->ino = t->file_ino;
	}
	event_end(e);
}

static __always_inline void going_off(struct task_struct *task, struct thread_slot *t,
				      u32 state, u64 now)
{
	u64 cpu_ns = t->cpu_ns;

	note_counters(task, t);
	if (t->off_ns) /* no hook told when it came on: it has run since for what it ran since */
		coming_on(t, now - (t->cpu_ns - cpu_ns));
	if (state & TASK_DEAD_BIT) {
		last_words(task, t, now);
		return;
	}
	if (!state) {
		t->off_reason = WAIT_RUNNABLE;
		t->off_syscall = -1;
	} else {
		s64 nr = task_syscall(task);

		t->off_syscall = nr;
		u32 reason = refine_fault(t, nr, wait_reason_of(task, state, nr));
		t->off_reason = refine_read(task, t, reason);
		if (t->off_reason == WAIT_STORAGE)
			name_read_file(task, t, nr);
	}
	t->off_ns = now;
}

#define PF_KTHREAD 0x00200000

/* Every other switch is to or from a CPU's idle thread: no member, and no storage to ask for. */
static __always_inline struct thread_slot *slot_of_switched(struct task_struct *task)
{
	return FIELD(task, flags) & PF_KTHREAD ? 0 : slot_of(task);
}

/* `state`: in which prev sleeps; 0 if it wants to go on running. */
static __always_inline int switched(struct task_struct *prev, struct task_struct *next, u32 state)
{
	struct thread_slot *off = slot_of_switched(prev);
	struct thread_slot *on = slot_of_switched(next);

	/* Kept apart from the compiler, which would or the two pointers together. */
	barrier_var(off);
	if (!off) {
		barrier_var(on);
		if (!on)
			return 0;
	}
	u64 now = bpf_ktime_get_ns();
	if (off)
		going_off(prev, off, state, now);
	if (on)
		coming_on(on, now);
	return 0;
}

/* Two shapes of the hook; the loader keeps the one that the kernel has. A wake-up
 * on another CPU may change a task's state while it is switched off, so what it was
 * comes with the hook since 5.18 (fa2c3254d7cf). Before, whether the task was left
 * on the run queue tells a sleep from a preemption. */
TRACEPOINT(sched_switch)
int BPF_PROG(offcpu__switch, bool preempted, struct task_struct *prev, struct task_struct *next,
	     unsigned int prev_state)
{
	return switched(prev, next, preempted ? 0 : prev_state);
}

TRACEPOINT(sched_switch)
int BPF_PROG(offcpu__switch_before_5_18, bool preempted, struct task_struct *prev,
	     struct task_struct *next)
{
	return switched(prev, next, preempted || FIELD(prev, on_rq) ? 0 : task_state(prev));
}
