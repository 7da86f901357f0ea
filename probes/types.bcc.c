// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * The types of kernel.h as a kernel without BTF has them: bcc compiles this with the
 * kernel's headers, and libbpf takes from the result where each field lies.
 *
 * What is in the map by value is described whole. What these headers do not have is
 * left out, and so are the probes that need it (FUSE keeps its types to itself).
 */
#include <linux/version.h>

/* In place of uapi/linux/bpf.h bcc puts one of its own, maybe an older one, that the
 * kernel's headers about BPF do not fit: they are left out, as if included before. */
#define _LINUX_BPF_H 1
#define __LINUX_FILTER_H__
#define _BPF_CGROUP_H

#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/ptrace.h>
#include <linux/thread_info.h>
#include <linux/mm_types.h>
#include <linux/mm.h>
#include <linux/page-flags.h>
#include <linux/fs.h>
#include <linux/fdtable.h>
#include <linux/kernfs.h>
#include <linux/cgroup-defs.h>
#include <linux/binfmts.h>
#include <linux/bvec.h>
#include <linux/blk_types.h>
#include <linux/blkdev.h>
#include <linux/blk-mq.h>
#include <linux/net.h>
#include <linux/tcp.h>
#include <net/sock.h>
#include <net/af_unix.h>
#include <linux/io_uring.h>
#if __has_include(<linux/io_uring_types.h>) /* 6.0; before, they were io_uring's own */
#include <linux/io_uring_types.h>
#define HAS_URING
#endif
#if __has_include(<linux/nfs_xdr.h>)
#include <linux/sunrpc/sched.h>
#include <linux/sunrpc/xprt.h>
#include <linux/nfs_fs.h>
#include <linux/nfs_xdr.h>
#define HAS_NFS
#endif
#if __has_include(<linux/netfs.h>) && __has_include(<trace/events/netfs.h>)
#include <linux/netfs.h>
#include <trace/events/netfs.h>
#define HAS_NETFS
#endif

#ifndef TOP_OF_KERNEL_STACK_PADDING /* x86's own */
#define TOP_OF_KERNEL_STACK_PADDING 0
#endif

enum kernel_stack {
	KERNEL_STACK_BYTES = THREAD_SIZE,
	KERNEL_STACK_PADDING = TOP_OF_KERNEL_STACK_PADDING,
};

struct kernel_types {
	enum kernel_stack stack;
	enum pageflags flags;
	struct pt_regs regs;
	struct task_struct task;
	struct signal_struct signal;
	struct mm_struct mm;
	struct files_struct files;
	struct fdtable fdtable;
	struct file file;
	struct kiocb kiocb;
	struct inode inode;
	struct super_block super_block;
	struct address_space mapping;
	struct vm_area_struct vma;
	struct vm_fault fault;
	struct page page;
	struct folio folio;
	struct kernfs_node kernfs;
	struct cgroup cgroup;
	struct css_set css_set;
	struct linux_binprm binprm;
	struct bio_vec bio_vec;
	struct bio bio;
	struct request request;
	struct block_device block_device;
	struct gendisk disk;
	struct block_device_operations disk_operations;
	struct socket socket;
	struct tcp_sock tcp;
	struct unix_sock unix_sock;
	struct sk_buff skb;
#ifdef HAS_URING
	struct io_kiocb io_kiocb;
	struct io_uring_cqe io_uring_cqe;
#endif
#ifdef HAS_NFS
	struct rpc_task rpc_task;
	struct rpc_rqst rpc_rqst;
	struct rpc_xprt rpc_xprt;
	struct nfs_pgio_header nfs_read;
#endif
#ifdef HAS_NETFS
	struct netfs_io_request netfs_request;
	struct netfs_io_subrequest netfs_part;
	enum netfs_sreq_trace netfs_step;
	enum netfs_io_source netfs_source;
#endif
};

BPF_ARRAY(kernel_types, struct kernel_types, 1);

/* A map's types are told only beside a function. */
int nothing(void *ctx)
{
	return 0;
}
