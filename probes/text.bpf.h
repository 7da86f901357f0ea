/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Copies what a system call moved, piece by piece, into the text ring. The
 * collector reads it in memory, keeps the facts and forgets the words. */
#pragma once

#include "shared.bpf.h"

/* Where the bytes of one call lie: one buffer, or a vector of them. */
struct source {
	const struct iovec *vector; /* user address, or 0 */
	u64 count;
	u64 base;
	u64 left; /* in the present buffer */
};

static __always_inline void source_of(struct source *src, struct pt_regs *regs, u32 call)
{
	src->vector = 0;
	src->count = 0;
	src->base = REGS_ARG1(regs);
	src->left = REGS_ARG2(regs);
	if (call == CALL_READV || call == CALL_WRITEV) {
		src->vector = (const struct iovec *)REGS_ARG1(regs);
		src->count = REGS_ARG2(regs);
		src->left = 0;
	} else if (call == CALL_RECVMSG || call == CALL_SENDMSG) {
		struct user_msghdr msg = {};

		bpf_probe_read_user(&msg, sizeof(msg), (void *)REGS_ARG1(regs));
		src->vector = msg.msg_iov;
		src->count = msg.msg_iovlen;
		src->left = 0;
	}
}

static __always_inline bool source_advance(struct source *src)
{
	struct iovec next = {};

	if (src->left)
		return true;
	if (!src->vector || !src->count)
		return false;
	if (bpf_probe_read_user(&next, sizeof(next), src->vector))
		return false;
	src->vector++;
	src->count--;
	src->base = (u64)next.iov_base;
	src->left = next.iov_len;
	return true;
}

/* What is done with the bytes of one call. In a map, not on the stack: the verifier follows
 * each value a stack may have, round by round of a loop, and of a map none. */
struct sending {
	struct text head;
	struct source src;
	struct source ahead; /* the same bytes, for a look before they are sent */
	u64 ahead_bytes;
	u32 offset;
	u32 word; /* the first bytes, so many as `have` */
	u32 have;
	u32 kept;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct sending);
} sendings SEC(".maps");

static __always_inline struct sending *the_sending(void)
{
	u32 zero = 0;

	return bpf_map_lookup_elem(&sendings, &zero);
}

static __always_inline struct sending *sending_begin(struct pt_regs *regs, u32 call)
{
	struct sending *job = the_sending();

	if (!job)
		return 0;
	__builtin_memset(&job->head, 0, sizeof(job->head));
	job->offset = 0;
	source_of(&job->src, regs, call);
	return job;
}

static long send_piece(u32 index, void *unused)
{
	u32 zero = 0;
	struct scratch *s = bpf_map_lookup_elem(&scratches, &zero);
	struct sending *job = the_sending();

	if (!s || !job || job->offset >= job->head.total || !source_advance(&job->src))
		return 1;
	if (!job->src.left) /* an empty buffer of a vector */
		return 0;
	u64 n = job->src.left;
	if (n > job->head.total - job->offset)
		n = job->head.total - job->offset;
	if (n > TEXT_PIECE)
		n = TEXT_PIECE;
	s->head = job->head;
	s->head.offset = job->offset;
	s->head.length = n;
	if (bpf_probe_read_user(s->bytes, n, (void *)job->src.base) ||
	    bpf_ringbuf_output(&texts, s, sizeof(s->head) + n, text_wakes(job->head.kind))) {
		lose(LOST_TEXTS);
		return 1;
	}
	job->head.skipped = 0;
	job->src.base += n;
	job->src.left -= n;
	job->offset += n;
	return 0;
}

LOOPED(send_piece, TEXT_PIECES)

/* Sends up to TEXT_PIECES pieces of `head.total` bytes; the collector sees from
 * offset, length and total what it did not get. */
static __always_inline void send_text(void)
{
	LOOP(TEXT_PIECES, send_piece, 0);
}
