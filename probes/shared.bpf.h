/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Maps and helpers that all probes share.
 *
 * The build compiles all sources as one, so the kernel's types are read once and the
 * maps exist once; names that a source keeps to itself must be its own all the same.
 * A program is called <stem>__<what>, which says what probe it is part of. Membership is task storage: a
 * thread is a target exactly if it has one, which costs a stranger one pointer
 * test and cannot outlive the thread, so a reused pid is never mistaken.
 */
#pragma once

#include "compat.bpf.h"
#include "events.h"

#define EVENT_RING_BYTES (8 << 20)
#define TEXT_RING_BYTES (8 << 20)
#define END_RING_BYTES (1 << 20)
#define THREADS 8192
#define FILES 4096
#define TOUCH_GAP_JIFFIES 4

struct membership {
	u32 slot;
	u32 pad;
};

struct file_key {
	u64 ino;
	u32 dev;
	u32 pad;
};

struct scratch {
	struct text head;
	u8 bytes[TEXT_PIECE];
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, EVENT_RING_BYTES);
} events SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, TEXT_RING_BYTES);
} texts SEC(".maps");

/* Slots of threads that ended, `struct thread_slot` each. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, END_RING_BYTES);
} ends SEC(".maps");

#ifdef NO_KERNEL_BTF
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, THREADS);
	__type(key, u32);
	__type(value, struct membership);
} members SEC(".maps");
#else
struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct membership);
} members SEC(".maps");
#endif

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, THREADS);
	__type(key, u32);
	__type(value, struct thread_slot);
} threads SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__uint(max_entries, THREADS);
	__type(value, u32);
} free_threads SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, FILES);
	__type(key, u32);
	__type(value, struct file_slot);
} files SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, FILES);
	__type(key, struct file_key);
	__type(value, u32);
} file_index SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct control);
} control SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct scratch);
} scratches SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, HANDLERS);
	__type(key, u32);
	__type(value, u32);
} handlers SEC(".maps");

/* All that .rodata holds: the collector writes it whole before the load. */
const volatile struct settings settings = {};

char LICENSE[] SEC("license") = "Dual BSD/GPL";

static __always_inline struct control *the_control(void)
{
	u32 zero = 0;

	return bpf_map_lookup_elem(&control, &zero);
}

static __always_inline void lose(u32 what)
{
	struct control *c = the_control();

	if (c && what < LOST_KINDS)
		__sync_fetch_and_add(&c->lost[what], 1);
}

/* The collector drains on a schedule; it is only woken when a quarter is full,
 * so that recording an event never costs a wake-up. */
static __always_inline struct event *event_begin(u16 kind, u64 start_ns)
{
	struct event *e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);

	if (!e) {
		lose(LOST_EVENTS);
		return 0;
	}
	e->start_ns = start_ns;
	e->duration_ns = 0;
	e->kind = kind;
	e->flags = 0;
	e->dev = 0;
	e->ino = 0;
	e->a = 0;
	e->b = 0;
	u64 id = bpf_get_current_pid_tgid();
	e->tid = (u32)id;
	e->tgid = id >> 32;
	return e;
}

static __always_inline void event_end(struct event *e)
{
	u64 waiting = bpf_ringbuf_query(&events, BPF_RB_AVAIL_DATA);
	u64 flags = waiting > settings.ring_bytes / 4 ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP;

	bpf_ringbuf_submit(e, flags);
}

/* Whether log lines are in the ring that nobody was woken for. */
u32 lines_wait = 0;

/* Log lines are stamped here and wait for the next look; what a connection carried does not, for
 * the collector may have to ask for quiet. By itself the kernel wakes only for the first of what
 * nobody has read yet. */
static __always_inline u64 text_wakes(u16 kind)
{
	if (kind != TEXT_LOG) {
		u64 flags = lines_wait ? BPF_RB_FORCE_WAKEUP : 0;

		lines_wait = 0;
		return flags;
	}
	u64 waiting = bpf_ringbuf_query(&texts, BPF_RB_AVAIL_DATA);
	if (waiting > bpf_ringbuf_query(&texts, BPF_RB_RING_SIZE) / 4)
		return BPF_RB_FORCE_WAKEUP;
	lines_wait = 1;
	return BPF_RB_NO_WAKEUP;
}

/* A record of `bytes` with its header; false if it is lost. */
static __always_inline bool text_output(void *record, u64 bytes, u16 kind)
{
	if (!bpf_ringbuf_output(&texts, record, bytes, text_wakes(kind)))
		return true;
	lose(LOST_TEXTS);
	return false;
}

/* The scratch buffer, of whose bytes it takes so many. */
static __always_inline void scratch_output(struct scratch *s, u64 bytes)
{
	text_output(s, sizeof(s->head) + (bytes & (PATH_BYTES * 2 - 1)), s->head.kind);
}

#ifdef NO_KERNEL_BTF
static __always_inline struct membership *membership_of(struct task_struct *task)
{
	u32 tid = FIELD(task, pid);

	return bpf_map_lookup_elem(&members, &tid);
}

static __always_inline bool membership_begin(struct task_struct *task, struct membership *fresh)
{
	u32 tid = FIELD(task, pid);

	return !bpf_map_update_elem(&members, &tid, fresh, BPF_NOEXIST);
}

static __always_inline void membership_end(struct task_struct *task)
{
	u32 tid = FIELD(task, pid);

	bpf_map_delete_elem(&members, &tid);
}

/* A thread that executes a program takes its process's id, whoever had it. */
static __always_inline void membership_moves(struct task_struct *task, u32 old_tid)
{
	u32 tid = FIELD(task, pid);
	struct membership *m = bpf_map_lookup_elem(&members, &old_tid);

	if (!m || tid == old_tid)
		return;
	struct membership moved = *m;
	bpf_map_update_elem(&members, &tid, &moved, BPF_ANY);
	bpf_map_delete_elem(&members, &old_tid);
}
#else
static __always_inline struct membership *membership_of(struct task_struct *task)
{
	return bpf_task_storage_get(&members, task, 0, 0);
}

static __always_inline bool membership_begin(struct task_struct *task, struct membership *fresh)
{
	return bpf_task_storage_get(&members, task, fresh, BPF_LOCAL_STORAGE_GET_F_CREATE) != 0;
}

static __always_inline void membership_end(struct task_struct *task)
{
	bpf_task_storage_delete(&members, task);
}

static __always_inline void membership_moves(struct task_struct *task, u32 old_tid)
{
}
#endif

static __always_inline struct thread_slot *slot_of(struct task_struct *task)
{
	struct membership *m = membership_of(task);

	if (!m)
		return 0;
	u32 slot = m->slot;
	return bpf_map_lookup_elem(&threads, &slot);
}

static __always_inline struct thread_slot *current_slot(void)
{
	return slot_of(current_task());
}

static __always_inline struct file_slot *file_find(u32 dev, u64 ino)
{
	struct file_key key = {.ino = ino, .dev = dev};
	u32 *index = bpf_map_lookup_elem(&file_index, &key);

	if (!index)
		return 0;
	u32 slot = *index;
	return bpf_map_lookup_elem(&files, &slot);
}

/* The slot of a file, made if need be. Racing makers: one wins, the slot of the
 * other stays unused. */
static __always_inline struct file_slot *file_follow(u32 dev, u64 ino, u64 size_bytes)
{
	struct file_key key = {.ino = ino, .dev = dev};
	struct file_slot *found = file_find(dev, ino);
	struct control *c = the_control();

	if (found || !c)
		return found;
	u32 slot = __sync_fetch_and_add(&c->files_used, 1);
	struct file_slot *f = bpf_map_lookup_elem(&files, &slot);
	if (!f) {
		lose(LOST_FILES);
		return 0;
	}
	f->dev = dev;
	f->ino = ino;
	f->size_bytes = size_bytes;
	f->since_ns = bpf_ktime_get_ns();
	if (bpf_map_update_elem(&file_index, &key, &slot, BPF_NOEXIST)) {
		f->since_ns = 0;
		return file_find(dev, ino);
	}
	return f;
}

/* Marks the first activity after a pause: an edge the counters cannot give. */
static __always_inline void file_touch(struct file_slot *f)
{
	u64 now = bpf_jiffies64();
	u64 last = f->touch_jiffies;

	f->touch_jiffies = now;
	if (now - last < TOUCH_GAP_JIFFIES)
		return;
	struct event *e = event_begin(EVENT_TOUCH, bpf_ktime_get_ns());
	if (!e)
		return;
	e->dev = f->dev;
	e->ino = f->ino;
	e->a = now;
	event_end(e);
}

/* The thread asks for pages of this file: what it waits for next is its. */
static __always_inline struct file_slot *file_wanted(struct thread_slot *t, struct inode *host)
{
	t->file_ino = FIELD(host, i_ino);
	t->file_dev = FIELD(host, i_sb, s_dev);
	return file_find(t->file_dev, t->file_ino);
}

/* The same for an inode that is only a number. */
static __always_inline struct file_slot *file_wanted_at(struct thread_slot *t, u64 inode)
{
	struct inode *host = (struct inode *)inode;

	t->file_ino = BPF_CORE_READ(host, i_ino);
	t->file_dev = BPF_CORE_READ(host, i_sb, s_dev);
	return file_find(t->file_dev, t->file_ino);
}

static __always_inline struct file *fd_file(u64 fd)
{
	struct task_struct *task = current_task();
	struct fdtable *table = FIELD(task, files, fdt);
	struct file *file = 0;

	if (fd >= FIELD(table, max_fds))
		return 0;
	bpf_probe_read_kernel(&file, sizeof(file), FIELD(table, fd) + fd);
	return file;
}

static __always_inline u16 file_mode(struct file *file)
{
	return file ? PEEK(struct file, file, f_inode, i_mode) & 0170000 : 0;
}

/* Of a file that is a socket. */
static __always_inline struct sock *file_sock(struct file *file)
{
	struct socket *socket = PEEK(struct file, file, private_data);

	return PEEK(struct socket, socket, sk);
}

#define MODE_REGULAR 0100000
#define MODE_SOCKET 0140000
#define MODE_FIFO 0010000
#define MODE_CHAR 0020000

struct inode_facts {
	u64 ino;
	u64 size_bytes;
	u64 cached_pages;
	u32 dev;
};

static __always_inline void inode_read(struct inode *inode, struct inode_facts *out)
{
	out->ino = PEEK(struct inode, inode, i_ino);
	out->size_bytes = PEEK(struct inode, inode, i_size);
	out->dev = PEEK(struct inode, inode, i_sb, s_dev);
	out->cached_pages = PEEK(struct inode, inode, i_mapping, nrpages);
}

#define MAGIC_OVERLAY 0x794c7630
#define OVERLAYS_DEEP 2 /* more the kernel does not stack */

/* The inode whose pages the file reads: a block device's own differs from that of
 * its node, and the pages of an overlayfs file are those of the file beneath. */
static __always_inline struct inode *file_cache_inode(struct file *file)
{
	struct inode *inode = PEEK(struct file, file, f_mapping, host);

	for (int depth = 0; depth < OVERLAYS_DEEP; depth++) {
		if (PEEK(struct inode, inode, i_sb, s_magic) != MAGIC_OVERLAY)
			break;
		file = overlay_reads(file);
		if (!file)
			break;
		inode = PEEK(struct file, file, f_mapping, host);
	}
	return inode;
}

/* Reads of files that a process has under way in its io_uring rings. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, u32);
	__type(value, s64);
} uring_reading SEC(".maps");

/* Adds to the count of a key, which may have none yet; gives what it was. */
static __always_inline s64 count_change(void *counts, u32 key, s64 by)
{
	s64 none = 0;
	s64 *count = bpf_map_lookup_elem(counts, &key);

	if (!count) {
		bpf_map_update_elem(counts, &key, &none, BPF_NOEXIST);
		count = bpf_map_lookup_elem(counts, &key);
		if (!count)
			return 0;
	}
	return __sync_fetch_and_add(count, by);
}

static __always_inline void uring_reads_change(u32 tgid, s64 by)
{
	count_change(&uring_reading, tgid, by);
}

/* Asleep in io_uring_enter: for storage if it has reads under way, else as in poll. The
 * kernel marks either as I/O. */
static __always_inline u32 uring_wait_reason(u32 tgid)
{
	s64 *reading = bpf_map_lookup_elem(&uring_reading, &tgid);

	return reading && *reading > 0 ? WAIT_STORAGE : WAIT_NETWORK;
}

/* The kernel marks a task that sleeps for I/O (in_iowait), whether a fault, a read
 * or a direct read put it there, so no fault hook is needed for the waits. A wait
 * that the mark misses is told by the system call it happened in. */
static __always_inline u32 wait_reason_of(struct task_struct *task, u32 state, s64 nr)
{
	bool is_call = nr >= 0 && nr < 512;
	u32 at = nr;

	barrier_var(at); /* or the compiler leaves out the mask, and the verifier misses it */
	at &= 511;
	if (is_call && settings.call_class[at] == CALL_URING &&
	    !(FIELD(task, flags) & PF_IO_WORKER) && !(state & TASK_UNINTERRUPTIBLE_BIT))
		return uring_wait_reason(FIELD(task, tgid));
	if (FIELD_BITS(task, in_iowait))
		return WAIT_STORAGE;
	if (FIELD(task, flags) & PF_IO_WORKER) /* at work it cannot be interrupted; idle, it can */
		return state & TASK_UNINTERRUPTIBLE_BIT ? WAIT_STORAGE : WAIT_OTHER;
	u32 by_call = is_call ? settings.call_wait[at] : WAIT_OTHER;
	if (state & TASK_UNINTERRUPTIBLE_BIT)
		/* Asleep in D without I/O: a kernel lock (mmap_lock, inode lock), unless
		 * the call itself is one that waits for a server (direct NFS, FUSE). */
		return by_call == WAIT_STORAGE || by_call == WAIT_DEVICE ? by_call : WAIT_LOCK;
	return by_call;
}
