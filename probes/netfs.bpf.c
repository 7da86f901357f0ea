// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Reads that go through the kernel's library of network file systems: 9P, Ceph and
 * AFS. SMB uses it too on new kernels and has hooks of its own (smb.bpf.c).
 */
#include "remote.bpf.h"

static __always_inline bool has_own_hooks(struct inode *inode)
{
	u64 magic = inode->i_sb->s_magic;

	return magic == MAGIC_SMB2 || magic == MAGIC_CIFS;
}

SEC("tp_btf/netfs_sreq")
int BPF_PROG(netfs__part, struct netfs_io_subrequest *part, u32 what)
{
	struct remote_key key = {.what = (u64)part};

	if (!part)
		return 0;
	if (what == bpf_core_enum_value(enum netfs_sreq_trace, netfs_sreq_trace_terminated)) {
		short error = BPF_CORE_READ(part, error);

		remote_end(&key, part->transferred, error < 0 ? REMOTE_FAILED : 0);
		return 0;
	}
	if (what != bpf_core_enum_value(enum netfs_sreq_trace, netfs_sreq_trace_submit))
		return 0;
	/* One byte wide on some kernels, and on the others the low one says it. */
	if (((u32)BPF_CORE_READ(part, source) & 0xff) !=
	    bpf_core_enum_value(enum netfs_io_source, NETFS_DOWNLOAD_FROM_SERVER))
		return 0;
	struct inode *inode = part->rreq->inode;
	struct inode_facts file = {.ino = inode->i_ino, .dev = inode->i_sb->s_dev};
	if (has_own_hooks(inode) || !remote_wanted(file.dev, file.ino))
		return 0;
	remote_begin(&key, &file, part->start, part->len, REMOTE_NETFS);
	return 0;
}
