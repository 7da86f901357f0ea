// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Reads of the target's files through a FUSE daemon (sshfs, rclone, mergerfs,
 * gcsfuse) or virtiofs, from the kernel's queue to the answer.
 *
 * The request ends in the daemon's own context. Its address names it: the protocol's
 * number is not set yet when some kernels call the hook.
 */
#include "remote.bpf.h"

#define FUSE_READ 15

/* The pages that the answer is for: of the file, unless the read is direct. */
static __always_inline struct inode *inode_of_pages(struct fuse_args *args)
{
	struct fuse_args_pages *ap =
		(void *)args - bpf_core_field_offset(struct fuse_args_pages, args);
	struct address_space *mapping = fuse_mapping(ap);

	/* The low bits mark anonymous and movable pages. */
	if (!mapping || (u64)mapping & 3)
		return 0;
	return BPF_CORE_READ(mapping, host);
}

static __always_inline struct inode *inode_of_call(struct fuse_args *args)
{
	struct fuse_io_args *io_args = (void *)args - bpf_core_field_offset(struct fuse_args_pages, args) -
				       bpf_core_field_offset(struct fuse_io_args, ap);
	struct fuse_io_priv *io = BPF_CORE_READ(io_args, io);

	return io ? BPF_CORE_READ(io, iocb, ki_filp, f_inode) : 0;
}

/* What names a request: itself, or, where only its arguments are at hand yet, those. */
static __always_inline int begin(u64 name, struct fuse_args *args)
{
	struct remote_key key = {.what = name};
	struct fuse_read_in in = {};
	struct inode_facts file;
	u16 flags = REMOTE_FUSE;

	if (BPF_CORE_READ(args, opcode) != FUSE_READ)
		return 0;
	struct inode *inode = inode_of_call(args);
	if (inode)
		flags |= REMOTE_DIRECT;
	else
		inode = inode_of_pages(args);
	if (!inode)
		return 0;
	inode_read(inode, &file);
	if (!remote_wanted(file.dev, file.ino))
		return 0;
	if (bpf_probe_read_kernel(&in, sizeof(in), BPF_CORE_READ(args, in_args[0].value)))
		return 0;
	remote_begin(&key, &file, in.offset, in.size, flags);
	return 0;
}

static __always_inline int answered(u64 name, struct fuse_req *req)
{
	struct remote_key key = {.what = name};
	u32 length = BPF_CORE_READ(req, out.h.len);
	u32 head = bpf_core_type_size(struct fuse_out_header);

	remote_end(&key, length > head ? length - head : 0,
		   BPF_CORE_READ(req, out.h.error) ? REMOTE_FAILED : 0);
	return 0;
}

TRACEPOINT(fuse_request_send)
int BPF_PROG(fuse__send, struct fuse_req *req)
{
	return req ? begin((u64)req, FIELD(req, args)) : 0;
}

TRACEPOINT(fuse_request_end)
int BPF_PROG(fuse__end, struct fuse_req *req)
{
	return req ? answered((u64)req, req) : 0;
}

/* Before 6.11: what waits for its answer, and what does not. */
ON_ENTRY(fuse_simple_request, fuse__wait)
{
	return begin(second, (struct fuse_args *)second);
}

ON_ENTRY(fuse_simple_background, fuse__send)
{
	return begin(second, (struct fuse_args *)second);
}

ON_ENTRY(fuse_request_end, fuse__end)
{
	struct fuse_req *req = (struct fuse_req *)first;

	return answered((u64)BPF_CORE_READ(req, args), req);
}

TRACEPOINT(page_cache_ra_unbounded)
int BPF_PROG(fuse__readahead, struct inode *inode, unsigned long index, unsigned long pages)
{
	if (FIELD(inode, i_sb, s_magic) == MAGIC_FUSE)
		count_readahead(FIELD(inode, i_sb, s_dev), FIELD(inode, i_ino), pages);
	return 0;
}
