/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The few kernel types the probes read, by name only.
 *
 * Every struct carries preserve_access_index: libbpf rewrites the offsets from
 * the running kernel's BTF when it loads the object, so nothing here states a
 * layout and the objects build on a machine without BTF. A field listed here
 * and absent from a kernel must be read through compat.bpf.h.
 */
#pragma once

typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef unsigned long long __u64;
typedef signed char __s8;
typedef short __s16;
typedef int __s32;
typedef long long __s64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u64 __be64;
typedef __u32 __wsum;
typedef __u8 u8;
typedef __u16 u16;
typedef __u32 u32;
typedef __u64 u64;
typedef __s32 s32;
typedef __s64 s64;
typedef _Bool bool;

#define true 1
#define false 0

/* enum bpf_map_type and friends: uapi numbers, stable by contract. */
enum {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PROG_ARRAY = 3,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_QUEUE = 22,
	BPF_MAP_TYPE_RINGBUF = 27,
	BPF_MAP_TYPE_TASK_STORAGE = 29,
};
enum {
	BPF_ANY = 0,
	BPF_NOEXIST = 1,
	BPF_F_NO_PREALLOC = 1 << 0,
	BPF_F_MMAPABLE = 1 << 10,
	BPF_LOCAL_STORAGE_GET_F_CREATE = 1 << 0,
	BPF_RB_NO_WAKEUP = 1,
	BPF_RB_FORCE_WAKEUP = 2,
	BPF_RB_AVAIL_DATA = 0,
	BPF_RB_RING_SIZE = 1,
};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

#if defined(__TARGET_ARCH_x86)
struct pt_regs {
	unsigned long r15, r14, r13, r12, bp, bx, r11, r10, r9, r8;
	unsigned long ax, cx, dx, si, di, orig_ax, ip;
	unsigned short cs;
	unsigned long flags, sp;
};
#elif defined(__TARGET_ARCH_arm64)
struct user_pt_regs {
	__u64 regs[31];
	__u64 sp;
	__u64 pc;
	__u64 pstate;
};
struct pt_regs {
	__u64 regs[31];
	__u64 sp;
	__u64 pc;
	__u64 pstate;
	__u64 orig_x0;
	__s32 syscallno;
};
#endif

struct super_block {
	u32 s_dev;
	unsigned long s_magic;
};

struct address_space;

struct inode {
	unsigned short i_mode;
	struct super_block *i_sb;
	struct address_space *i_mapping;
	unsigned long i_ino;
	u32 i_generation;
	u32 i_rdev;
	long long i_size;
};

struct address_space {
	struct inode *host;
	unsigned long nrpages;
};

enum bpf_func_id {
	BPF_FUNC_loop = 181,
};

struct page {
	unsigned long compound_head;
	struct address_space *mapping;
};

struct folio {
	struct address_space *mapping;
	unsigned long index;
	unsigned long _flags_1;
};

struct file_reference {
	s64 count;
};

struct file {
	struct file_reference f_ref;
	struct address_space *f_mapping;
	void *private_data;
	struct inode *f_inode;
	unsigned int f_flags;
	long long f_pos;
};

/* Of overlayfs, since 6.13: what it reads a file from. */
struct ovl_file {
	struct file *realfile;
	struct file *upperfile;
};

struct fdtable {
	unsigned int max_fds;
	struct file **fd;
};

struct files_struct {
	struct fdtable *fdt;
};

struct sched_entity {
	u64 sum_exec_runtime;
};

typedef struct {
	int counter;
} atomic_t;

struct list_head {
	struct list_head *next;
};

struct signal_struct {
	struct list_head thread_head;
	atomic_t live;
	unsigned int flags;
};

struct mm_struct {
	unsigned long arg_start, arg_end;
};

struct kernfs_node {
	const char *name;
	struct kernfs_node *__parent;
};

struct cgroup {
	struct kernfs_node *kn;
};

struct css_set {
	struct cgroup *dfl_cgrp;
};

struct task_struct {
	void *stack;
	struct list_head tasks;
	struct list_head thread_node;
	unsigned int __state;
	unsigned int flags;
	int on_rq;
	struct sched_entity se;
	struct mm_struct *mm;
	int exit_code;
	int pid;
	int tgid;
	unsigned int in_iowait : 1;
	struct task_struct *real_parent;
	u64 start_time;
	struct task_struct *group_leader;
	unsigned long min_flt;
	unsigned long maj_flt;
	struct files_struct *files;
	struct signal_struct *signal;
	struct css_set *cgroups;
	char comm[16];
};

struct linux_binprm {
	const char *filename;
};

struct bpf_iter_meta;
struct bpf_iter__task {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
};

struct vm_area_struct {
	struct file *vm_file;
};

struct vm_fault {
	struct vm_area_struct *vma;
};

struct bpf_iter__task_vma {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
	struct vm_area_struct *vma;
};

struct bpf_iter__task_file {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
	u32 fd;
	struct file *file;
};

struct bio_vec {
	struct page *bv_page;
	unsigned int bv_len;
	unsigned int bv_offset;
};

struct request_queue;

struct bvec_iter {
	u64 bi_sector;
	unsigned int bi_size;
};

struct bio {
	struct block_device *bi_bdev;
	unsigned int bi_opf;
	struct bvec_iter bi_iter;
	struct bio_vec *bi_io_vec;
};

struct block_device_operations {
	void (*submit_bio)(struct bio *bio);
};

struct gendisk {
	const struct block_device_operations *fops;
};

struct block_device {
	u32 bd_dev;
	struct gendisk *bd_disk;
};

struct request {
	unsigned int cmd_flags;
	unsigned int __data_len;
	u64 __sector;
	struct bio *bio;
	struct block_device *part;
};

struct sock_common {
	__be16 skc_dport;
	u16 skc_num;
	u16 skc_family;
	unsigned char skc_state;
};

struct sock {
	struct sock_common __sk_common;
	u16 sk_type;
};

struct tcp_sock {
	u32 copied_seq;
	u32 rcv_nxt;
	u32 snd_nxt;
	u32 write_seq;
	u8 nonagle : 4;
};

struct sk_buff {
	unsigned char *data;
};

struct unix_address;
struct unix_sock {
	struct unix_address *addr;
	struct sock *peer;
};

struct socket {
	short type;
	struct sock *sk;
};

struct io_cqe {
	int fd; /* until the request completes */
};

struct io_kiocb {
	struct file *file;
	u8 opcode;
	u32 flags; /* the low half where it is 64 bits wide */
	struct io_cqe cqe;
};

struct io_uring_cqe {
	u64 user_data;
	s32 res;
	u32 flags;
};

struct kernel_siginfo;
struct io_ring_ctx;
struct bpf_perf_event_data;

/* Of modules: sunrpc, nfs, fuse, netfs. */
struct rpc_xprt {
	unsigned int id;
};

struct rpc_rqst {
	struct rpc_xprt *rq_xprt;
	int rq_ntrans;
};

struct rpc_task {
	void *tk_calldata;
	struct rpc_rqst *tk_rqstp;
};

struct nfs_pgio_args {
	u64 offset;
	u32 count;
};

struct nfs_pgio_res {
	u32 count; /* the low half where it is 64 bits wide */
};

struct nfs_direct_req;
struct nfs_pgio_header {
	struct inode *inode;
	struct nfs_direct_req *dreq;
	int error;
	struct nfs_pgio_args args;
	struct nfs_pgio_res res;
};

struct fuse_in_arg {
	unsigned int size;
	const void *value;
};

struct fuse_args {
	u32 opcode;
	struct fuse_in_arg in_args[3];
};

struct fuse_args_pages {
	struct fuse_args args;
	struct folio **folios;
};

struct kiocb {
	struct file *ki_filp;
};

struct fuse_io_priv {
	struct kiocb *iocb;
};

struct fuse_io_args {
	struct fuse_args_pages ap;
	struct fuse_io_priv *io;
};

struct fuse_out_header {
	u32 len;
	s32 error;
};

struct fuse_req {
	struct fuse_args *args;
	struct {
		struct fuse_out_header h;
	} out;
};

/* Only the names matter: the values are those of the running kernel. */
enum netfs_sreq_trace {
	netfs_sreq_trace_added = 1,
	netfs_sreq_trace_prepare = 2,
	netfs_sreq_trace_submit = 4,
	netfs_sreq_trace_terminated = 5,
};
enum netfs_io_source { NETFS_DOWNLOAD_FROM_SERVER = 1 };

struct netfs_io_request {
	struct inode *inode;
};

struct netfs_io_subrequest {
	struct netfs_io_request *rreq;
	long long start;
	unsigned long len;
	unsigned long transferred;
	short error;
	enum netfs_io_source source;
};

enum pageflags { PG_uptodate,
	PG_head = 6 };

#pragma clang attribute pop

/* User-space layouts passed to system calls: fixed by the ABI. */
struct iovec {
	void *iov_base;
	unsigned long iov_len;
};

struct user_msghdr {
	void *msg_name;
	int msg_namelen;
	struct iovec *msg_iov;
	unsigned long msg_iovlen;
};

/* The body of a FUSE read: fixed by the protocol. */
struct fuse_read_in {
	u64 fh;
	u64 offset;
	u32 size;
};
