// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Block requests that serve the target: those for a followed file, whoever
 * submits them, and those a target thread issues itself (direct I/O).
 *
 * Layers that make no requests of their own (device-mapper, LUKS, RAID) are seen by
 * what is submitted to them. What they then ask of the disk below is seen too; the
 * analysis knows one by the other.
 */
#include "shared.bpf.h"

struct in_flight {
	u64 start_ns;
	u64 ino;
	u64 sector;
	u32 file_dev;
	u32 disk;
	u32 tid;
	u32 tgid;
	u32 bytes;
	u32 depth; /* at the disk when it was issued; 0: given back to the host's queue */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64);
	__type(value, struct in_flight);
} requests SEC(".maps");

/* Requests of followed files now at each disk. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 256);
	__type(key, u32);
	__type(value, s64);
} depths SEC(".maps");

/* Submitted to a layer, by the address of the bio. One that is split leaves a part
 * behind whose end no hook tells. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, u64);
	__type(value, struct in_flight);
} submitted SEC(".maps");

static __always_inline void name_file(struct bio *bio, struct in_flight *r)
{
	struct page *page = BPF_CORE_READ(bio, bi_io_vec, bv_page);

	if (!page)
		return;
	u64 mapping = (u64)BPF_CORE_READ(page_head(page), mapping);
	/* The low bits mark anonymous and movable pages. */
	if (!mapping || mapping & 3)
		return;
	struct inode *host = BPF_CORE_READ((struct address_space *)mapping, host);
	if (!host)
		return;
	r->ino = BPF_CORE_READ(host, i_ino);
	r->file_dev = BPF_CORE_READ(host, i_sb, s_dev);
}

static __always_inline s64 depth_change(u32 disk, s64 by)
{
	return count_change(&depths, disk, by);
}

/* It is at its disk no longer. */
static __always_inline void leave_disk(struct in_flight *r)
{
	if (r->depth)
		depth_change(r->disk, -1);
	r->depth = 0;
}

static __always_inline void note_completed(struct in_flight *r)
{
	struct event *e = event_begin(EVENT_BLOCK, r->start_ns);

	if (e) {
		e->duration_ns = bpf_ktime_get_ns() - r->start_ns;
		e->tid = r->tid;
		e->tgid = r->tgid;
		e->dev = r->disk;
		e->ino = r->ino;
		e->a = r->bytes;
		e->b = r->sector;
		e->flags = r->depth > 0xffff ? 0xffff : r->depth;
		event_end(e);
	}
	leave_disk(r);
}

#define REQUEST_OP_MASK 0xff
#define REQUEST_READ 0
#define SECTOR_BYTES 512

TRACEPOINT(block_rq_issue)
int BPF_PROG(block__issue, struct request *rq)
{
	if ((FIELD(rq, cmd_flags) & REQUEST_OP_MASK) != REQUEST_READ)
		return 0;
	struct in_flight r = {};
	name_file(FIELD(rq, bio), &r);
	struct thread_slot *t = current_slot();
	if (!(r.ino && file_find(r.file_dev, r.ino)) && !t)
		return 0;
	u64 key = (u64)rq, id = bpf_get_current_pid_tgid();
	struct in_flight *known = bpf_map_lookup_elem(&requests, &key);
	if (known && known->sector == FIELD(rq, __sector)) { /* issued again: it began the first time */
		if (!known->depth)
			known->depth = depth_change(known->disk, 1) + 1;
		return 0;
	}
	if (known) { /* its end was not seen */
		leave_disk(known);
		lose(LOST_BLOCK);
	}
	r.tid = (u32)id;
	r.tgid = id >> 32;
	r.bytes = FIELD(rq, __data_len);
	r.sector = FIELD(rq, __sector);
	r.disk = BPF_CORE_READ(rq, part, bd_dev);
	r.depth = depth_change(r.disk, 1) + 1;
	r.start_ns = bpf_ktime_get_ns();
	if (bpf_map_update_elem(&requests, &key, &r, BPF_ANY)) {
		depth_change(r.disk, -1);
		lose(LOST_BLOCK);
	}
	return 0;
}

/* The disk, or its driver, could not take it now. */
TRACEPOINT(block_rq_requeue)
int BPF_PROG(block__requeue, struct request *rq)
{
	u64 key = (u64)rq;
	struct in_flight *r = bpf_map_lookup_elem(&requests, &key);

	if (r)
		leave_disk(r);
	return 0;
}

TRACEPOINT(block_rq_complete)
int BPF_PROG(block__complete, struct request *rq, int error, unsigned int bytes)
{
	u64 key = (u64)rq;
	struct in_flight *r = bpf_map_lookup_elem(&requests, &key);

	if (!r)
		return 0;
	/* A request may complete in parts: the last one counts. */
	if (bytes < FIELD(rq, __data_len))
		return 0;
	struct control *c = the_control();
	if (c) {
		__sync_fetch_and_add(&c->block_bytes, r->bytes);
		__sync_fetch_and_add(&c->block_requests, 1);
	}
	note_completed(r);
	bpf_map_delete_elem(&requests, &key);
	return 0;
}

TRACEPOINT(block_bio_queue)
int BPF_PROG(block__submitted, struct bio *bio)
{
	if ((FIELD(bio, bi_opf) & REQUEST_OP_MASK) != REQUEST_READ)
		return 0;
	struct gendisk *disk = BPF_CORE_READ(bio, bi_bdev, bd_disk);
	if (!disk || !BPF_CORE_READ(disk, fops, submit_bio))
		return 0;
	struct in_flight r = {};
	name_file(bio, &r);
	if (!(r.ino && file_find(r.file_dev, r.ino)) && !current_slot())
		return 0;
	u64 key = (u64)bio, id = bpf_get_current_pid_tgid();
	r.bytes = FIELD(bio, bi_iter.bi_size);
	r.sector = FIELD(bio, bi_iter.bi_sector);
	/* What is left of one that was split is submitted again: it keeps its beginning. */
	struct in_flight *whole = bpf_map_lookup_elem(&submitted, &key);
	if (whole && whole->sector < r.sector &&
	    whole->sector + whole->bytes / SECTOR_BYTES == r.sector + r.bytes / SECTOR_BYTES)
		return 0;
	r.tid = (u32)id;
	r.tgid = id >> 32;
	r.disk = BPF_CORE_READ(bio, bi_bdev, bd_dev);
	r.depth = depth_change(r.disk, 1) + 1;
	r.start_ns = bpf_ktime_get_ns();
	if (bpf_map_update_elem(&submitted, &key, &r, BPF_ANY)) {
		depth_change(r.disk, -1);
		lose(LOST_BLOCK);
	}
	return 0;
}

TRACEPOINT(block_bio_complete)
int BPF_PROG(block__done, struct request_queue *queue, struct bio *bio)
{
	u64 key = (u64)bio;
	struct in_flight *r = bpf_map_lookup_elem(&submitted, &key);

	if (!r)
		return 0;
	note_completed(r);
	bpf_map_delete_elem(&submitted, &key);
	return 0;
}
