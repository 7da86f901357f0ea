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
#define AT_FDCWD (u32)-100

/* Reads at least this big, or slow ones, are recorded; all are counted. Smaller ones
 * that follow each other within this time are recorded together. */
#define READ_EVENT_BYTES (64 << 10)
#define RUN_EVENT_BYTES (256 << 10)
#define RUN_PAUSE_NS 10000000

static __always_inline struct event *call_event(u16 kind, struct thread_slot *t)
{
	u64 now = bpf_ktime_get_ns();
	u64 began = t->enter_ns ? t->enter_ns : now;
	struct event *e = event_begin(kind, began);

	if (e)
		e->duration_ns = now - began;
	return e;
}

/* `folder`: the descriptor that a relative path starts from. */
static __always_inline void send_path(const void *user_path, u32 folder, struct inode_facts *facts)
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
	s->head.skipped = folder;
	s->head.total = s->head.length = n - 1;
	scratch_output(s, n);
}

static __always_inline int note_held(u32 tid, u32 tgid, struct file *file, u16 is_open)
{
	struct inode_facts facts;

	if (file_mode(file) != MODE_REGULAR)
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
	e->tid = tid;
	e->tgid = tgid;
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
#ifdef NO_KERNEL_BTF
/* The collector finds such a file in /proc, takes hold of it without opening it
 * (O_PATH), and runs this for its own descriptor. */
SEC("raw_tp")
int BPF_PROG(files__held, u64 fd, u64 tgid, u64 is_open)
{
	return note_held(tgid, tgid, fd_file(fd), is_open);
}
#else
SEC("iter/task_vma")
int files__held_maps(struct bpf_iter__task_vma *ctx)
{
	struct task_struct *task = ctx->task;
	struct vm_area_struct *vma = ctx->vma;

	if (task && vma && slot_of(task))
		note_held(task->pid, task->tgid, vma->vm_file, 0);
	return 0;
}

SEC("iter/task_file")
int files__held_files(struct bpf_iter__task_file *ctx)
{
	struct task_struct *task = ctx->task;

	if (task && slot_of(task))
		note_held(task->pid, task->tgid, ctx->file, 1);
	return 0;
}
#endif

/* Eight characters of a path as a number; every target is little-endian. */
#define WORD(a, b, c, d, e, f, g, h)                                                     \
	((u64)(a) | (u64)(b) << 8 | (u64)(c) << 16 | (u64)(d) << 24 | (u64)(e) << 32 |   \
	 (u64)(f) << 40 | (u64)(g) << 48 | (u64)(h) << 56)
#define HALF_WORD(a, b, c, d) ((u32)(a) | (u32)(b) << 8 | (u32)(c) << 16 | (u32)(d) << 24)

static __always_inline u16 device_of(u64 head)
{
	switch (head) {
	case WORD('/', 'd', 'e', 'v', '/', 'n', 'v', 'i'):
		return DEVICE_NVIDIA;
	case WORD('/', 'd', 'e', 'v', '/', 'k', 'f', 'd'):
		return DEVICE_KFD;
	case WORD('/', 'd', 'e', 'v', '/', 'd', 'r', 'i'):
		return DEVICE_DRI;
	}
	return 0;
}

/* A device that cannot be opened tells as much as one that can: the server goes on
 * without it. */
static __always_inline void note_device_open(struct thread_slot *t, u16 family, long ret)
{
	struct event *e = call_event(EVENT_DEVICE, t);

	if (!e)
		return;
	e->flags = family;
	e->b = ret;
	if (ret >= 0)
		e->dev = BPF_CORE_READ(fd_file(ret), f_inode, i_rdev);
	event_end(e);
}

/* Where compiled kernels are kept: a folder by its name, or one of ~/.cache. Files
 * of Python packages of the same names lie elsewhere. */
static __always_inline bool is_cache(u64 word, u32 after)
{
	switch (word) {
	case WORD('/', '.', 'n', 'v', '/', 'C', 'o', 'm'): /* ComputeCache */
	case WORD('/', '.', 't', 'r', 'i', 't', 'o', 'n'):
	case WORD('/', 't', 'o', 'r', 'c', 'h', 'i', 'n'): /* torchinductor_USER */
	case WORD('/', '.', 'd', 'e', 'e', 'p', '_', 'g'):
	case WORD('/', '.', 'f', 'l', 'a', 's', 'h', 'i'):
	case WORD('/', '.', 'm', 'i', 'o', 'p', 'e', 'n'):
		return true;
	case WORD('/', '.', 'c', 'a', 'c', 'h', 'e', '/'):
		return after == HALF_WORD('v', 'l', 'l', 'm') ||
		       after == HALF_WORD('f', 'l', 'a', 's') ||
		       after == HALF_WORD('d', 'e', 'e', 'p') ||
		       after == HALF_WORD('t', 'r', 'i', 't') ||
		       after == HALF_WORD('t', 'o', 'r', 'c') ||
		       after == HALF_WORD('m', 'i', 'o', 'p') ||
		       after == HALF_WORD('c', 'o', 'm', 'g');
	}
	return false;
}

#define CACHE_PATH_BYTES 256

struct path_scan {
	u32 length;
	bool found;
};

/* One place of the path in the scratch buffer. */
static long scan_path(u32 at, struct path_scan *scan)
{
	u32 zero = 0;
	struct scratch *s = bpf_map_lookup_elem(&scratches, &zero);

	if (!s || at >= CACHE_PATH_BYTES || at + 12 > scan->length)
		return 1;
	if (s->bytes[at] != '/')
		return 0;
	scan->found = is_cache(*(u64 *)(s->bytes + at), *(u32 *)(s->bytes + at + 8));
	return scan->found;
}

LOOPED(scan_path, CACHE_PATH_BYTES)

/* Opens of a kernel cache, whatever the size of the file: a miss is written, a hit
 * is only read. About a microsecond for an open that is none. */
static __always_inline void note_cache(const void *user_path, u64 open_flags, long ret)
{
	u32 zero = 0;
	struct scratch *s = bpf_map_lookup_elem(&scratches, &zero);
	struct path_scan scan = {};

	if (!s)
		return;
	long n = bpf_probe_read_user_str(s->bytes, PATH_BYTES, user_path);
	if (n < 16 || n > PATH_BYTES)
		return;
	scan.length = n;
	LOOP(CACHE_PATH_BYTES, scan_path, &scan);
	if (!scan.found)
		return;
	struct inode_facts facts = {};
	if (ret >= 0)
		inode_read(file_cache_inode(fd_file(ret)), &facts);
	__builtin_memset(&s->head, 0, sizeof(s->head));
	u64 id = bpf_get_current_pid_tgid();
	s->head.start_ns = s->head.end_ns = bpf_ktime_get_ns();
	s->head.tid = (u32)id;
	s->head.tgid = id >> 32;
	s->head.kind = TEXT_CACHE;
	s->head.flags = (open_flags & 3 ? CACHE_WRITE : 0) | (ret < 0 ? CACHE_MISSING : 0);
	s->head.key = facts.ino;
	s->head.dev = facts.dev;
	s->head.skipped = facts.size_bytes > 0xffffffff ? 0xffffffff : facts.size_bytes;
	s->head.total = s->head.length = n - 1;
	scratch_output(s, n);
}

TRACEPOINT(sys_exit)
int BPF_PROG(files__open, struct pt_regs *regs, long ret)
{
	struct thread_slot *t = current_slot();
	bool plain = settings.call_class[REGS_NR(regs) & 511] == CALL_OPEN;
	const void *path = (void *)(plain ? REGS_ARG0(regs) : REGS_ARG1(regs));
	u64 head = 0;

	if (!t)
		return 0;
	bpf_probe_read_user(&head, sizeof(head), path);
	u16 family = device_of(head);
	if (family)
		note_device_open(t, family, ret);
	else
		note_cache(path, plain ? REGS_ARG1(regs) : REGS_ARG2(regs), ret);
	if (ret < 0)
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
	f->run_bytes = 0; /* another look at the file */
	f->cached_pages = facts.cached_pages;
	f->size_bytes = facts.size_bytes;
	struct event *e = call_event(EVENT_OPEN, t);
	if (e) {
		e->dev = facts.dev;
		e->ino = facts.ino;
		e->a = facts.size_bytes;
		e->b = facts.cached_pages;
		e->flags = PEEK(struct file, file, f_flags) & O_DIRECT_FLAG ? 1 : 0;
		event_end(e);
	}
	send_path(path, plain ? AT_FDCWD : (u32)REGS_ARG0(regs), &facts);
	return 0;
}

/* Character devices that everybody has: memory, terminals. */
static __always_inline bool is_common(u32 dev)
{
	u32 major = dev >> 20;

	return major == 1 || major == 4 || major == 5 || (major >= 136 && major <= 143);
}

/* A slow ioctl on a device: what a driver without tracepoints or symbols shows. */
TRACEPOINT(sys_exit)
int BPF_PROG(files__device, struct pt_regs *regs, long ret)
{
	struct thread_slot *t = current_slot();
	struct file *file = fd_file(REGS_ARG0(regs));

	if (!t || !file || !t->enter_ns)
		return 0;
	if (bpf_ktime_get_ns() - t->enter_ns < settings.short_wait_ns)
		return 0;
	u32 dev = BPF_CORE_READ(file, f_inode, i_rdev);
	if (is_common(dev))
		return 0;
	struct event *e = call_event(EVENT_DEVICE, t);
	if (!e)
		return 0;
	e->flags = DEVICE_IOCTL;
	e->dev = dev;
	e->a = REGS_ARG1(regs);
	e->b = ret;
	event_end(e);
	return 0;
}

/* Files that were mapped as code already, by any process of the target. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct file_key);
	__type(value, u32);
} known_code SEC(".maps");

static __always_inline bool is_new_code(struct inode_facts *facts)
{
	struct file_key key = {.ino = facts->ino, .dev = facts->dev};
	u32 known = 1;

	return !bpf_map_update_elem(&known_code, &key, &known, BPF_NOEXIST);
}

TRACEPOINT(sys_exit)
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
	/* Code of any size is told, and at once if it is new: it may hold calls to be marked. */
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
	if (prot & PROT_EXEC && is_new_code(&facts))
		bpf_ringbuf_submit(e, BPF_RB_FORCE_WAKEUP);
	else
		event_end(e);
	return 0;
}

TRACEPOINT(sys_exit)
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

TRACEPOINT(sys_exit)
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

/* Adds a small read to the run of the file. Gives the bytes of the run once they are
 * enough for an event, else 0. Reads on two CPUs at once may lose a few. */
static __always_inline u64 add_to_run(struct file_slot *f, u64 bytes, u64 began, u64 now)
{
	if (!f->run_bytes || began > f->run_end_ns + RUN_PAUSE_NS) {
		f->run_bytes = 0;
		f->run_start_ns = began;
	}
	f->run_end_ns = now;
	u64 before = __sync_fetch_and_add(&f->run_bytes, bytes);
	u64 run = before + bytes;
	/* Only who crosses the limit sends it. */
	if (before >= RUN_EVENT_BYTES || run < RUN_EVENT_BYTES)
		return 0;
	f->run_bytes = 0;
	return run;
}

TRACEPOINT(sys_exit)
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
	bool direct = PEEK(struct file, file, f_flags) & O_DIRECT_FLAG;
	bool positioned = call == CALL_PREAD || call == CALL_PREADV;
	u64 offset = positioned ? REGS_ARG3(regs) : PEEK(struct file, file, f_pos) - ret;
	count_read(f, offset, ret, direct);
	u64 now = bpf_ktime_get_ns();
	u64 began = t->enter_ns ? t->enter_ns : now;
	u64 bytes = ret;
	u16 flags = direct ? READ_DIRECT : 0;
	if (bytes < READ_EVENT_BYTES && now - t->enter_ns < settings.short_wait_ns) {
		bytes = add_to_run(f, bytes, began, now);
		if (!bytes)
			return 0;
		began = f->run_start_ns;
		flags |= READ_RUN;
	}
	struct event *e = event_begin(EVENT_READ, began);
	if (!e)
		return 0;
	e->duration_ns = now - began;
	e->dev = facts.dev;
	e->ino = facts.ino;
	e->a = bytes;
	e->b = offset + ret - bytes;
	e->flags = flags;
	event_end(e);
	return 0;
}
