// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * What the target does with files of interest (regular, not small): open, map,
 * advise, read. Handlers of the dispatch in syscalls.bpf.c, run at the return of
 * the call, when its arguments still stand in the registers.
 */
#include "shared.bpf.h"

#define MAP_ANONYMOUS 0x20
#define MAP_POPULATE 0x8000
#define PROT_WRITE 2
#define PROT_EXEC 4

/* Reads at least this big, or slow ones, are recorded; all are counted. */
#define READ_EVENT_BYTES (64 << 10)

static __always_inline struct event *call_event(u16 kind, struct thread_slot *t)
{
	u64 now = bpf_ktime_get_ns();
	u64 began = t->enter_ns ? t->enter_ns : now;
	struct event *e = event_begin(kind, began);

	if (e)
		e->duration_ns = now - began;
	return e;
}

static __always_inline void send_path(const void *user_path, struct inode_facts *facts)
{
	u32 zero = 0;
	struct scratch *s = bpf_map_lookup_elem(&scratches, &zero);

	if (!s)
		return;
	__builtin_memset(&s->head, 0, sizeof(s->head));
	long n = bpf_probe_read_user_str(s->bytes, PATH_BYTES, user_path);
	if (n < 1 || n > PATH_BYTES)
		return;
	u64 id = bpf_get_current_pid_tgid();
	s->head.start_ns = s->head.end_ns = bpf_ktime_get_ns();
	s->head.tid = (u32)id;
	s->head.tgid = id >> 32;
	s->head.kind = TEXT_PATH;
	s->head.key = facts->ino;
	s->head.dev = facts->dev;
	s->head.total = s->head.length = n - 1;
	if (bpf_ringbuf_output(&texts, s, sizeof(s->head) + (n & (PATH_BYTES * 2 - 1)), 0))
		lose(LOST_TEXTS);
}

static __always_inline int note_held(struct task_struct *task, struct file *file, u16 is_open)
{
	struct inode_facts facts;

	if (!task || !file || !slot_of(task) || file_mode(file) != MODE_REGULAR)
		return 0;
	inode_read(file_cache_inode(file), &facts);
	if (facts.size_bytes < settings.min_file_bytes)
		return 0;
	struct file_slot *f = file_follow(facts.dev, facts.ino, facts.size_bytes);
	if (f)
		f->cached_pages = facts.cached_pages;
	struct event *e = event_begin(EVENT_HELD, bpf_ktime_get_ns());
	if (!e)
		return 0;
	e->tid = task->pid;
	e->tgid = task->tgid;
	e->dev = facts.dev;
	e->ino = facts.ino;
	e->a = facts.size_bytes;
	e->b = facts.cached_pages;
	e->flags = is_open;
	event_end(e);
	return 0;
}

/* What the target had mapped and open before recording began, and how much of it
 * is in the page cache. Run once, after the members are seeded. */
SEC("iter/task_vma")
int files__held_maps(struct bpf_iter__task_vma *ctx)
{
	struct vm_area_struct *vma = ctx->vma;

	return vma ? note_held(ctx->task, vma->vm_file, 0) : 0;
}

SEC("iter/task_file")
int files__held_files(struct bpf_iter__task_file *ctx)
{
	return note_held(ctx->task, ctx->file, 1);
}

SEC("tp_btf/sys_exit")
int BPF_PROG(files__open, struct pt_regs *regs, long ret)
{
	struct thread_slot *t = current_slot();

	if (!t || ret < 0)
		return 0;
	t->opens++;
	struct file *file = fd_file(ret);
	if (file_mode(file) != MODE_REGULAR)
		return 0;
	struct inode_facts facts;
	inode_read(file_cache_inode(file), &facts);
	if (facts.size_bytes < settings.min_file_bytes)
		return 0;
	struct file_slot *f = file_follow(facts.dev, facts.ino, facts.size_bytes);
	if (!f)
		return 0;
	__sync_fetch_and_add(&f->opens, 1);
	f->cached_pages = facts.cached_pages;
	f->size_bytes = facts.size_bytes;
	struct event *e = call_event(EVENT_OPEN, t);
	if (e) {
		e->dev = facts.dev;
		e->ino = facts.ino;
		e->a = facts.size_bytes;
		e->b = facts.cached_pages;
		e->flags = BPF_CORE_READ(file, f_flags) & O_DIRECT_FLAG ? 1 : 0;
		event_end(e);
	}
	u32 call = settings.call_class[REGS_NR(regs) & 511];
	send_path((void *)(call == CALL_OPEN ? REGS_ARG0(regs) : REGS_ARG1(regs)), &facts);
	return 0;
}

SEC("tp_btf/sys_exit")
int BPF_PROG(files__mmap, struct pt_regs *regs, long ret)
{
	struct thread_slot *t = current_slot();
	u64 map_flags = REGS_ARG3(regs);

	if (!t)
		return 0;
	t->mmaps++;
	if (map_flags & MAP_ANONYMOUS)
		return 0;
	struct file *file = fd_file(REGS_ARG4(regs));
	if (file_mode(file) != MODE_REGULAR)
		return 0;
	u64 prot = REGS_ARG2(regs);
	struct inode_facts facts;
	inode_read(file_cache_inode(file), &facts);
	if (facts.size_bytes >= settings.min_file_bytes) {
		struct file_slot *f = file_follow(facts.dev, facts.ino, facts.size_bytes);
		if (f)
			__sync_fetch_and_add(&f->mmaps, 1);
	} else if (!(prot & PROT_EXEC)) {
		return 0;
	}
	/* Code of any size is told, and at once: it may hold calls to be marked. */
	struct event *e = call_event(EVENT_MMAP, t);
	if (!e)
		return 0;
	bool failed = ret < 0 && ret > -4096;
	e->dev = facts.dev;
	e->ino = facts.ino;
	e->a = REGS_ARG1(regs);
	e->b = failed ? -ret : ret;
	e->flags = (map_flags & MAP_POPULATE ? MMAP_POPULATE : 0) |
		   (prot & PROT_EXEC ? MMAP_EXEC : 0) | (prot & PROT_WRITE ? MMAP_WRITE : 0) |
		   (failed ? MMAP_FAILED : 0);
	if (prot & PROT_EXEC)
		bpf_ringbuf_submit(e, BPF_RB_FORCE_WAKEUP);
	else
		event_end(e);
	return 0;
}

SEC("tp_btf/sys_exit")
int BPF_PROG(files__munmap, struct pt_regs *regs, long ret)
{
	struct thread_slot *t = current_slot();

	if (!t || ret < 0 || REGS_ARG1(regs) < settings.min_file_bytes)
		return 0;
	struct event *e = call_event(EVENT_MUNMAP, t);
	if (!e)
		return 0;
	e->a = REGS_ARG1(regs);
	e->b = REGS_ARG0(regs);
	event_end(e);
	return 0;
}

/* Advice that changes how storage is read; an allocator's DONTNEED and FREE say
 * nothing about it. */
static __always_inline bool is_telling(u64 advice)
{
	switch (advice) {
	case 1:	 /* MADV_RANDOM */
	case 2:	 /* MADV_SEQUENTIAL */
	case 3:	 /* MADV_WILLNEED */
	case 14: /* MADV_HUGEPAGE */
	case 22: /* MADV_POPULATE_READ */
	case 23: /* MADV_POPULATE_WRITE */
		return true;
	}
	return false;
}

static __always_inline void advise_memory(struct pt_regs *regs, struct thread_slot *t)
{
	u64 length = REGS_ARG1(regs), advice = REGS_ARG2(regs);

	if (length < settings.min_file_bytes || !is_telling(advice))
		return;
	struct event *e = call_event(EVENT_MADVISE, t);
	if (!e)
		return;
	e->a = length;
	e->b = REGS_ARG0(regs);
	e->flags = advice;
	event_end(e);
}

#define ADVICE_READAHEAD 0x100 /* readahead(2) has no advice number of its own */

static __always_inline void advise_file(struct pt_regs *regs, struct thread_slot *t, u16 advice)
{
	struct file *file = fd_file(REGS_ARG0(regs));
	struct inode_facts facts;

	if (file_mode(file) != MODE_REGULAR)
		return;
	inode_read(file_cache_inode(file), &facts);
	if (facts.size_bytes < settings.min_file_bytes)
		return;
	struct event *e = call_event(EVENT_FADVISE, t);
	if (!e)
		return;
	e->dev = facts.dev;
	e->ino = facts.ino;
	e->a = REGS_ARG2(regs);
	e->b = REGS_ARG1(regs);
	e->flags = advice;
	event_end(e);
}

SEC("tp_btf/sys_exit")
int BPF_PROG(files__advise, struct pt_regs *regs, long ret)
{
	struct thread_slot *t = current_slot();

	if (!t || ret < 0)
		return 0;
	u32 call = settings.call_class[REGS_NR(regs) & 511];
	if (call == CALL_MADVISE)
		advise_memory(regs, t);
	else if (call == CALL_FADVISE)
		advise_file(regs, t, REGS_ARG3(regs));
	else
		advise_file(regs, t, ADVICE_READAHEAD);
	return 0;
}

static __always_inline void count_read(struct file_slot *f, u64 offset, u64 bytes, bool direct)
{
	__sync_fetch_and_add(&f->reads, 1);
	__sync_fetch_and_add(&f->read_bytes, bytes);
	if (direct)
		__sync_fetch_and_add(&f->direct_bytes, bytes);
	if (offset == f->next_offset)
		__sync_fetch_and_add(&f->sequential_reads, 1);
	f->next_offset = offset + bytes;
}

SEC("tp_btf/sys_exit")
int BPF_PROG(files__read, struct pt_regs *regs, long ret)
{
	struct thread_slot *t = current_slot();
	struct file *file = fd_file(REGS_ARG0(regs));
	struct inode_facts facts;

	if (!t || !file || ret < 0)
		return 0;
	inode_read(file_cache_inode(file), &facts);
	if (facts.size_bytes < settings.min_file_bytes)
		return 0;
	struct file_slot *f = file_follow(facts.dev, facts.ino, facts.size_bytes);
	if (!f)
		return 0;
	u32 call = settings.call_class[REGS_NR(regs) & 511];
	bool direct = BPF_CORE_READ(file, f_flags) & O_DIRECT_FLAG;
	bool positioned = call == CALL_PREAD || call == CALL_PREADV;
	u64 offset = positioned ? REGS_ARG3(regs) : BPF_CORE_READ(file, f_pos) - ret;
	count_read(f, offset, ret, direct);
	u64 now = bpf_ktime_get_ns();
	if (ret < READ_EVENT_BYTES && now - t->enter_ns < settings.short_wait_ns)
		return 0;
	struct event *e = call_event(EVENT_READ, t);
	if (!e)
		return 0;
	e->dev = facts.dev;
	e->ino = facts.ino;
	e->a = ret;
	e->b = offset;
	e->flags = direct ? READ_DIRECT : 0;
	event_end(e);
	return 0;
}
