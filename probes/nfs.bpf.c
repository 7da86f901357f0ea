// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Reads of the target's files over NFS, from the client's hand-over to the RPC
 * layer until the answer, with the RPC layer's own split: waiting to be sent, on
 * the wire and in the server, all of it.
 *
 * The header that NFS keeps of a read is also the RPC task's call data, so one
 * pointer ties both layers together. A read may be sent again, by either layer:
 * its times then add up.
 */
#include "remote.bpf.h"

static __always_inline void begin_read(struct nfs_pgio_header *hdr, u64 done)
{
	struct remote_key key = {.what = (u64)hdr};

	if (!hdr)
		return;
	struct inode *inode = FIELD(hdr, inode);
	struct inode_facts file = {.ino = FIELD(inode, i_ino), .dev = FIELD(inode, i_sb, s_dev)};

	if (remote_wanted(file.dev, file.ino))
		remote_begin(&key, &file, FIELD(hdr, args.offset) + done, FIELD(hdr, args.count) - done,
			     REMOTE_NFS | (FIELD(hdr, dreq) ? REMOTE_DIRECT : 0));
}

TRACEPOINT(nfs_initiate_read)
int BPF_PROG(nfs__initiate, struct nfs_pgio_header *hdr)
{
	begin_read(hdr, 0);
	return 0;
}

/* The connection that carried a request, by the number that the kernel gives it (5.13),
 * plus one; 0 where it has none. */
static __always_inline u16 carried_by(struct rpc_rqst *rqst)
{
	struct rpc_xprt *transport = FIELD(rqst, rq_xprt);

	if (!transport || !bpf_core_field_exists(transport->id))
		return 0;
	u32 number = BPF_CORE_READ(transport, id);
	return number < 0xffff ? number + 1 : 0;
}

/* Told of every RPC; only reads that are followed are in the map. Comes before the
 * read's own end. */
TRACEPOINT(rpc_stats_latency)
int BPF_PROG(nfs__latency, struct rpc_task *task, u64 backlog, u64 rtt, u64 execute)
{
	struct remote_key key = {};

	if (!task)
		return 0;
	key.what = (u64)FIELD(task, tk_calldata);
	struct remote_request *r = bpf_map_lookup_elem(&remotes, &key);
	if (!r)
		return 0;
	struct rpc_rqst *rqst = FIELD(task, tk_rqstp);
	r->queue_ns += backlog;
	r->wire_ns += rtt;
	r->execute_ns += execute;
	if (rqst) {
		r->times_sent += FIELD(rqst, rq_ntrans);
		r->connection = carried_by(rqst);
	}
	return 0;
}

TRACEPOINT(nfs_readpage_done)
int BPF_PROG(nfs__done, struct rpc_task *task, struct nfs_pgio_header *hdr)
{
	struct remote_key key = {.what = (u64)hdr};

	if (hdr)
		remote_end(&key, FIELD(hdr, res.count), FIELD(hdr, error) ? REMOTE_FAILED : 0);
	return 0;
}

/* The server gave less than asked for: the rest is asked again, without the hook
 * that began it. Comes right after the read's end. */
TRACEPOINT(nfs_readpage_short)
int BPF_PROG(nfs__short, struct rpc_task *task, struct nfs_pgio_header *hdr)
{
	u32 got = hdr ? FIELD(hdr, res.count) : 0;

	if (got && got < FIELD(hdr, args.count))
		begin_read(hdr, got);
	return 0;
}

TRACEPOINT(nfs_aop_readahead)
int BPF_PROG(nfs__readahead, struct inode *inode, long long position, unsigned int pages)
{
	if (inode)
		count_readahead(FIELD(inode, i_sb, s_dev), FIELD(inode, i_ino), pages);
	return 0;
}
