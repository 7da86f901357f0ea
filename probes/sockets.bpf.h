/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Connections of the target, and how one ends. In a header because a Unix socket
 * has no state that a tracepoint shows: its end is the last close(), which syscalls.bpf.c sees.
 */
#pragma once

#include "text.bpf.h"

#define AF_UNIX 1
#define AF_INET 2
#define AF_INET6 10
#define TCP_CLOSE 7

enum role { ROLE_UNKNOWN, ROLE_SERVER, ROLE_CLIENT, ROLE_OTHER };

struct conn {
	u64 arrival_ns; /* data waits unread since */
	u64 inode;	/* of the socket; its address goes to the next one, this does not */
	u32 ports;	/* local << 16 | remote; 0 of a Unix socket */
	u32 skipped;	/* bytes of quiet writes not reported yet */
	u32 first;	/* the first bytes read, while they are too few to tell the role */
	u16 turn;	/* counts reads and response heads: what ends a quiet */
	u8 role;
	u8 firsts;   /* bytes in `first` */
	u8 accepted; /* the target's own: it took this connection */
	u8 pad[7];
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, u64);
	__type(value, struct conn);
} conns SEC(".maps");

/*
 * A small write is not sent while an earlier one is unacknowledged, unless the server
 * sets TCP_NODELAY; the client may take 40 ms to acknowledge. Kept from the write that
 * was held back until it left.
 */
struct held_back {
	u64 start_ns;
	u32 end_seq;
	u32 ports;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, u64);
	__type(value, struct held_back);
} held SEC(".maps");

/* Tells that what was held leaves now; once, whoever sees it. */
static __always_inline void has_left(u64 key, struct held_back *h)
{
	struct text head = {
		.start_ns = h->start_ns,
		.end_ns = bpf_ktime_get_ns(),
		.key = key,
		.dev = h->ports,
		.kind = TEXT_LEFT,
	};

	if (!bpf_map_delete_elem(&held, &key))
		text_output(&head, sizeof(head), head.kind);
}

#define TAIL_WRITES 8
#define TAIL_BYTES 512

/*
 * A connection in quiet: its small writes are counted, and the last of them kept,
 * because what ends an answer (token counts, timings) is small too. Made by the
 * collector for the turn in which it saw a first token; that turn's end hands over
 * what is kept and takes the quiet away.
 */
struct kept_text {
	struct text head;
	u8 bytes[TAIL_BYTES];
};

struct tail {
	u32 turn;
	u32 held; /* writes since quiet began; the last TAIL_WRITES are here */
	struct kept_text writes[TAIL_WRITES];
	u8 rest[TAIL_BYTES]; /* never used; the verifier adds the longest to the last */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096);
	__type(key, u64);
	__type(value, struct tail);
} quiet SEC(".maps");

static __always_inline struct sock *unix_peer(const struct sock *sk)
{
	const struct unix_sock *unix_sock = (const struct unix_sock *)sk;

	if (!bpf_core_field_exists(unix_sock->peer) ||
	    PEEK(struct sock, sk, __sk_common.skc_family) != AF_UNIX)
		return 0;
	return PEEK(struct unix_sock, sk, peer);
}

static __always_inline void conn_event(u16 kind, u64 key, u32 ports, u16 flags, u64 peer)
{
	struct event *e = event_begin(kind, bpf_ktime_get_ns());

	if (!e)
		return;
	e->ino = key;
	e->a = ports;
	e->b = peer;
	e->flags = flags;
	event_end(e);
}

struct handing_over {
	u64 key;
	u32 from;
	u32 skipped;
	u32 turn;
	u32 count;
};

/* One kept write. */
static long send_kept(u32 index, struct handing_over *job)
{
	struct tail *q = bpf_map_lookup_elem(&quiet, &job->key);

	if (!q || index >= job->count)
		return 1;
	struct kept_text *kept = &q->writes[(job->from + index) & (TAIL_WRITES - 1)];
	kept->head.end_ns = bpf_ktime_get_ns();
	kept->head.flags = job->turn;
	kept->head.skipped = job->skipped;
	job->skipped = 0;
	u64 bytes = sizeof(kept->head) + (kept->head.length & (TAIL_BYTES - 1));
	if (!text_output(kept, bytes, TEXT_SENT))
		job->skipped = kept->head.skipped + kept->head.total;
	return 0;
}

LOOPED(send_kept, TAIL_WRITES)

/* Hands over the last writes of a quiet, oldest first. */
static __always_inline void end_quiet(u64 key, struct conn *c)
{
	struct tail *q = bpf_map_lookup_elem(&quiet, &key);

	if (!q)
		return;
	u32 count = q->held < TAIL_WRITES ? q->held : TAIL_WRITES;
	struct handing_over job = {
		.key = key, .from = q->held - count, .skipped = c->skipped, .turn = c->turn, .count = count};
	LOOP(count, send_kept, &job);
	c->skipped = job.skipped;
	bpf_map_delete_elem(&quiet, &key);
}

static __always_inline void conn_gone(u64 key, struct conn *c)
{
	if (c->role == ROLE_SERVER || c->firsts) {
		end_quiet(key, c);
		conn_event(EVENT_CONN, key, c->ports, TCP_CLOSE, 0);
	}
	bpf_map_delete_elem(&conns, &key);
}
