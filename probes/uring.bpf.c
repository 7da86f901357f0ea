// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Reads through io_uring, which makes no system call a read. Who asked is known when
 * a read is submitted; its file for certain only when it completes: by then the
 * kernel has looked it up, in the process's table or the ring's own (registered
 * files).
 */
#include "shared.bpf.h"

#define IORING_OP_READV 1
#define IORING_OP_READ_FIXED 4
#define IORING_OP_READ 22
#define REQ_F_FIXED_FILE 1

struct uring_read {
	u64 start_ns;
	u32 tid;
	u32 tgid;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64);
	__type(value, struct uring_read);
} uring_reads SEC(".maps");

static __always_inline int submit(struct io_kiocb *req)
{
	u8 op = FIELD(req, opcode);

	if (op != IORING_OP_READ && op != IORING_OP_READV && op != IORING_OP_READ_FIXED)
		return 0;
	if (!current_slot())
		return 0;
	/* Pipes and sockets may wait for ever: not those. */
	if (!(BPF_CORE_READ(req, flags) & REQ_F_FIXED_FILE) &&
	    file_mode(fd_file(BPF_CORE_READ(req, cqe.fd))) != MODE_REGULAR)
		return 0;
	u64 key = (u64)req, id = bpf_get_current_pid_tgid();
	struct uring_read r = {.start_ns = bpf_ktime_get_ns(), .tid = (u32)id, .tgid = id >> 32};

	if (bpf_map_update_elem(&uring_reads, &key, &r, BPF_ANY))
		lose(LOST_URING);
	else
		uring_reads_change(r.tgid, 1);
	return 0;
}

/* Two shapes of each hook; the loader keeps the one that the kernel has. Submission
 * was renamed in 6.4, and completion passed its result itself until 6.14. */
TRACEPOINT(io_uring_submit_req)
int BPF_PROG(uring__submit, struct io_kiocb *req)
{
	return submit(req);
}

TRACEPOINT(io_uring_submit_sqe)
int BPF_PROG(uring__submit_sqe, struct io_kiocb *req, bool must_not_block)
{
	return submit(req);
}

static __always_inline void send_read(struct uring_read *r, struct inode_facts *facts, s32 bytes, u16 direct)
{
	struct event *e = event_begin(EVENT_READ, r->start_ns);

	if (!e)
		return;
	e->duration_ns = bpf_ktime_get_ns() - r->start_ns;
	e->tid = r->tid;
	e->tgid = r->tgid;
	e->dev = facts->dev;
	e->ino = facts->ino;
	e->a = bytes;
	e->flags = READ_IO_URING | direct;
	event_end(e);
}

static __always_inline void completed(struct uring_read *r, struct file *file, s32 bytes)
{
	struct inode_facts facts;

	if (bytes < 0 || file_mode(file) != MODE_REGULAR)
		return;
	inode_read(file_cache_inode(file), &facts);
	if (facts.size_bytes < settings.min_file_bytes)
		return;
	u16 direct = BPF_CORE_READ(file, f_flags) & O_DIRECT_FLAG ? READ_DIRECT : 0;
	struct file_slot *f = file_follow(facts.dev, facts.ino, facts.size_bytes);
	if (f) {
		__sync_fetch_and_add(&f->reads, 1);
		__sync_fetch_and_add(&f->read_bytes, bytes);
		if (direct)
			__sync_fetch_and_add(&f->direct_bytes, bytes);
	}
	send_read(r, &facts, bytes, direct);
}

static __always_inline int complete(void *req, s32 bytes)
{
	u64 key = (u64)req;
	struct uring_read *r = bpf_map_lookup_elem(&uring_reads, &key);

	if (!r)
		return 0;
	completed(r, BPF_CORE_READ((struct io_kiocb *)req, file), bytes);
	uring_reads_change(r->tgid, -1);
	bpf_map_delete_elem(&uring_reads, &key);
	return 0;
}

TRACEPOINT(io_uring_complete)
int BPF_PROG(uring__complete, struct io_ring_ctx *ring, void *req, struct io_uring_cqe *cqe)
{
	return complete(req, FIELD(cqe, res));
}

TRACEPOINT(io_uring_complete)
int BPF_PROG(uring__complete_result, void *ring, void *req, u64 user_data, int result)
{
	return complete(req, result);
}
