// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* Reads of followed files through io_uring, which makes no system call a read. */
#include "shared.bpf.h"

#define IORING_OP_READV 1
#define IORING_OP_READ_FIXED 4
#define IORING_OP_READ 22
#define REQ_F_FIXED_FILE 1

struct uring_read {
	u64 start_ns;
	u64 ino;
	u32 dev;
	u32 tid;
	u32 tgid;
	u32 direct;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64);
	__type(value, struct uring_read);
} uring_reads SEC(".maps");

static __always_inline int submit(struct io_kiocb *req)
{
	u8 op = req->opcode;

	if (op != IORING_OP_READ && op != IORING_OP_READV && op != IORING_OP_READ_FIXED)
		return 0;
	/* A registered file is a slot of the ring's own table: its reads are seen by the
	 * page cache only. */
	if (BPF_CORE_READ(req, flags) & REQ_F_FIXED_FILE || !current_slot())
		return 0;
	/* The file itself is looked up only when the request is issued. */
	struct file *file = fd_file(BPF_CORE_READ(req, cqe.fd));
	struct inode_facts facts;
	if (file_mode(file) != MODE_REGULAR)
		return 0;
	inode_read(file_cache_inode(file), &facts);
	if (facts.size_bytes < settings.min_file_bytes)
		return 0;
	u64 key = (u64)req, id = bpf_get_current_pid_tgid();
	struct uring_read r = {
		.start_ns = bpf_ktime_get_ns(),
		.ino = facts.ino,
		.dev = facts.dev,
		.tid = (u32)id,
		.tgid = id >> 32,
		.direct = BPF_CORE_READ(file, f_flags) & O_DIRECT_FLAG ? READ_DIRECT : 0,
	};
	file_follow(facts.dev, facts.ino, facts.size_bytes);
	bpf_map_update_elem(&uring_reads, &key, &r, BPF_ANY);
	return 0;
}

/* Two shapes of each hook; the loader keeps the one that the kernel has. Submission
 * was renamed in 6.4, and completion passed its result itself until 6.14. */
SEC("tp_btf/io_uring_submit_req")
int BPF_PROG(uring__submit, struct io_kiocb *req)
{
	return submit(req);
}

SEC("tp_btf/io_uring_submit_sqe")
int BPF_PROG(uring__submit_sqe, struct io_kiocb *req, bool must_not_block)
{
	return submit(req);
}

static __always_inline int complete(void *req, s32 bytes)
{
	u64 key = (u64)req;
	struct uring_read *r = bpf_map_lookup_elem(&uring_reads, &key);

	if (!r)
		return 0;
	struct file_slot *f = file_find(r->dev, r->ino);
	if (f && bytes >= 0) {
		__sync_fetch_and_add(&f->reads, 1);
		__sync_fetch_and_add(&f->read_bytes, bytes);
		if (r->direct)
			__sync_fetch_and_add(&f->direct_bytes, bytes);
	}
	struct event *e = event_begin(EVENT_READ, r->start_ns);
	if (e) {
		e->duration_ns = bpf_ktime_get_ns() - r->start_ns;
		e->tid = r->tid;
		e->tgid = r->tgid;
		e->dev = r->dev;
		e->ino = r->ino;
		e->a = bytes > 0 ? bytes : 0;
		e->flags = READ_IO_URING | r->direct;
		event_end(e);
	}
	bpf_map_delete_elem(&uring_reads, &key);
	return 0;
}

SEC("tp_btf/io_uring_complete")
int BPF_PROG(uring__complete, struct io_ring_ctx *ring, void *req, struct io_uring_cqe *cqe)
{
	return complete(req, cqe->res);
}

SEC("tp_btf/io_uring_complete")
int BPF_PROG(uring__complete_result, void *ring, void *req, u64 user_data, int result)
{
	return complete(req, result);
}
