// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Reads that go through the kernel's library of network file systems: 9P, Ceph and
 * AFS. SMB uses it too on new kernels and has hooks of its own (smb.bpf.c).
 */
#include "remote.bpf.h"

static __always_inline bool has_own_hooks(struct inode *inode)
{
	u64 magic = FIELD(inode, i_sb, s_magic);

	return magic == MAGIC_SMB2 || magic == MAGIC_CIFS;
}

/* Which steps are told differs by kernel and file system (a 9P read on 6.12 is only
 * added): each restarts the clock, so that the last before the answer counts. */
static __always_inline bool is_beginning(u32 what)
{
	if (bpf_core_enum_value_exists(enum netfs_sreq_trace, netfs_sreq_trace_added) &&
	    what == bpf_core_enum_value(enum netfs_sreq_trace, netfs_sreq_trace_added))
		return true;
	return what == bpf_core_enum_value(enum netfs_sreq_trace, netfs_sreq_trace_prepare) ||
	       what == bpf_core_enum_value(enum netfs_sreq_trace, netfs_sreq_trace_submit);
}

/* Not a read of the local cache, a hole, or a write. */
static __always_inline bool is_from_server(struct netfs_io_subrequest *part)
{
	/* One byte wide on some kernels, and on the others the low one says it. */
	return ((u32)BPF_CORE_READ(part, source) & 0xff) ==
	       bpf_core_enum_value(enum netfs_io_source, NETFS_DOWNLOAD_FROM_SERVER);
}

TRACEPOINT(netfs_sreq)
int BPF_PROG(netfs__part, struct netfs_io_subrequest *part, u32 what)
{
	struct remote_key key = {.what = (u64)part};

	if (!part)
		return 0;
	if (what == bpf_core_enum_value(enum netfs_sreq_trace, netfs_sreq_trace_terminated)) {
		short error = BPF_CORE_READ(part, error);
		struct remote_request *r = bpf_map_lookup_elem(&remotes, &key);

		if (!r)
			return 0;
		r->bytes = FIELD(part, len); /* may have been cut since it began */
		if (is_from_server(part))
			remote_end(&key, FIELD(part, transferred), error < 0 ? REMOTE_FAILED : 0);
		else
			bpf_map_delete_elem(&remotes, &key);
		return 0;
	}
	if (!is_beginning(what))
		return 0;
	struct inode *inode = FIELD(part, rreq, inode);
	struct inode_facts file = {.ino = FIELD(inode, i_ino), .dev = FIELD(inode, i_sb, s_dev)};
	if (!has_own_hooks(inode) && remote_wanted(file.dev, file.ino))
		remote_begin(&key, &file, FIELD(part, start), FIELD(part, len), REMOTE_NETFS);
	return 0;
}
