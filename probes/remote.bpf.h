/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Reads that leave the machine, or the kernel: asked of a server or a FUSE daemon,
 * answered, or not. Each file system has its own hooks; what is kept of a read and
 * how it is told is the same.
 *
 * The hooks are of modules. Since 6.13 (and in 6.12's stable series) the verifier
 * holds that a module's hook may pass NULL: each pointer is tested before it is used.
 */
#pragma once

#include "shared.bpf.h"

#define REMOTE_REQUESTS 4096

#define MAGIC_FUSE 0x65735546
#define MAGIC_SMB2 0xfe534d42
#define MAGIC_CIFS 0xff534d42

/* What names a read while it is under way: a kernel object, or what the protocol
 * names it by. */
struct remote_key {
	u64 what;
	u64 where;
	u64 offset;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, REMOTE_REQUESTS);
	__type(key, struct remote_key);
	__type(value, struct remote_request);
} remotes SEC(".maps");

static __always_inline bool remote_wanted(u32 dev, u64 ino)
{
	return current_slot() || file_find(dev, ino);
}

/* A read is handed over. The caller has seen that it is wanted. */
static __always_inline void remote_begin(struct remote_key *key, struct inode_facts *file, u64 offset,
					 u32 bytes, u16 flags)
{
	u64 id = bpf_get_current_pid_tgid();
	struct remote_request r = {
		.start_ns = bpf_ktime_get_ns(),
		.ino = file->ino,
		.dev = file->dev,
		.offset = offset,
		.bytes = bytes,
		.flags = flags,
		.tid = (u32)id,
		.tgid = id >> 32,
	};

	if (bpf_map_update_elem(&remotes, key, &r, BPF_ANY)) {
		lose(LOST_REMOTE);
		return;
	}
	struct thread_slot *t = current_slot();
	if (!t)
		return;
	t->asked_what = key->what;
	t->asked_where = key->where;
	t->asked_offset = key->offset;
}

/* Whether the answer to the thread's last remote read is still to come. */
static __always_inline bool is_waiting_for_answer(struct thread_slot *t)
{
	struct remote_key key = {
		.what = t->asked_what,
		.where = t->asked_where,
		.offset = t->asked_offset,
	};

	return key.what && bpf_map_lookup_elem(&remotes, &key);
}

static __always_inline void remote_split(struct remote_request *r)
{
	struct event *e = event_begin(EVENT_REMOTE_SPLIT, r->start_ns);

	if (!e)
		return;
	e->duration_ns = r->wire_ns;
	e->tid = r->tid;
	e->tgid = r->tgid;
	e->dev = r->dev;
	e->ino = r->ino;
	e->flags = r->times_sent;
	e->a = r->queue_ns;
	e->b = (u64)r->connection << 48 | (r->execute_ns & ((1ULL << 48) - 1));
	event_end(e);
}

static __always_inline void remote_end(struct remote_key *key, u32 got, u16 flags)
{
	struct remote_request *r = bpf_map_lookup_elem(&remotes, key);

	if (!r)
		return;
	u64 now = bpf_ktime_get_ns();
	struct event *e = event_begin(EVENT_REMOTE, r->start_ns);
	if (e) {
		e->duration_ns = now - r->start_ns;
		e->tid = r->tid;
		e->tgid = r->tgid;
		e->flags = r->flags | flags;
		e->dev = r->dev;
		e->ino = r->ino;
		e->a = (u64)r->bytes << 32 | got;
		e->b = r->offset;
		event_end(e);
	}
	if (r->wire_ns || r->execute_ns || r->times_sent)
		remote_split(r);
	bpf_map_delete_elem(&remotes, key);
}

static __always_inline void count_readahead(u32 dev, u64 ino, u64 pages)
{
	struct file_slot *f = file_find(dev, ino);

	if (!f)
		return;
	__sync_fetch_and_add(&f->readahead_asks, 1);
	__sync_fetch_and_add(&f->readahead_pages, pages);
}
