/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Every kernel difference the probes meet, each with what caused it. */
#pragma once

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>

#define TASK_DEAD_BIT 0x80
#define TASK_UNINTERRUPTIBLE_BIT 0x02
#define TASK_ASLEEP_BITS 0x03
#define PF_IO_WORKER 0x10 /* a worker or poller of io_uring, a thread of its process (5.12) */

/* task_struct::state became __state in 5.14 (2f064a59a11f). */
struct task_struct___before_5_14 {
	long state;
} __attribute__((preserve_access_index));

static __always_inline u32 task_state(struct task_struct *task)
{
	if (bpf_core_field_exists(task->__state))
		return task->__state;
	return BPF_CORE_READ((struct task_struct___before_5_14 *)task, state);
}

static __always_inline unsigned long folio_flags(struct folio *folio)
{
	unsigned long flags = 0;

	/* The flags are the first word; their type changed in 6.18 (memdesc_flags_t). */
	bpf_probe_read_kernel(&flags, sizeof(flags), folio);
	return flags;
}

/* Whether its content is there: storage has delivered it, or it was written. */
static __always_inline bool folio_is_filled(struct folio *folio)
{
	return folio_flags(folio) & (1UL << bpf_core_enum_value(enum pageflags, PG_uptodate));
}

/* The order of a large folio sits in the low byte of _flags_1 since 6.6
 * (ebc1baf5c9b4); before, in _folio_order. A page without PG_head has order 0. */
struct folio___before_6_6 {
	unsigned char _folio_order;
} __attribute__((preserve_access_index));

static __always_inline u64 folio_pages(struct folio *folio)
{
	unsigned long flags = folio_flags(folio);
	u32 order = 0;

	if (!(flags & (1UL << bpf_core_enum_value(enum pageflags, PG_head))))
		return 1;
	if (bpf_core_field_exists(folio->_flags_1))
		order = BPF_CORE_READ(folio, _flags_1) & 0xff;
	else if (bpf_core_field_exists(((struct folio___before_6_6 *)folio)->_folio_order))
		order = BPF_CORE_READ((struct folio___before_6_6 *)folio, _folio_order);
	return order < 20 ? 1UL << order : 1;
}

/* The head of a compound page, so that its mapping can be trusted. */
static __always_inline struct page *page_head(struct page *page)
{
	unsigned long head = BPF_CORE_READ(page, compound_head);

	return head & 1 ? (struct page *)(head - 1) : page;
}

/* FUSE keeps folios since 6.13, pages before. */
struct fuse_args_pages___before_6_13 {
	struct page **pages;
} __attribute__((preserve_access_index));

static __always_inline struct address_space *fuse_mapping(struct fuse_args_pages *ap)
{
	struct page *first = 0;
	void *all = 0;

	if (bpf_core_field_exists(ap->folios))
		all = BPF_CORE_READ(ap, folios);
	else
		all = BPF_CORE_READ((struct fuse_args_pages___before_6_13 *)ap, pages);
	bpf_probe_read_kernel(&first, sizeof(first), all);
	return first ? BPF_CORE_READ(page_head(first), mapping) : 0;
}

/* file::f_count became f_ref in 6.13 (90ee6ed776c0); that one is 0 while one holds it. */
struct file___before_6_13 {
	struct file_reference f_count;
} __attribute__((preserve_access_index));

/* Whether the file has another holder: a duplicate, a forked process, a call under way. */
static __always_inline bool file_is_shared(struct file *file)
{
	s64 count = 0;

	if (bpf_core_field_exists(file->f_ref)) {
		bpf_core_read(&count, sizeof(count), &file->f_ref);
		return count > 0;
	}
	bpf_core_read(&count, sizeof(count), &((struct file___before_6_13 *)file)->f_count);
	return count > 1;
}

/* kernfs_node::parent became __parent in 6.15 (633488947ef6). */
struct kernfs_node___before_6_15 {
	struct kernfs_node *parent;
} __attribute__((preserve_access_index));

static __always_inline struct kernfs_node *cgroup_above(struct kernfs_node *node)
{
	if (bpf_core_field_exists(node->__parent))
		return BPF_CORE_READ(node, __parent);
	return BPF_CORE_READ((struct kernfs_node___before_6_15 *)node, parent);
}

/* System call number and arguments, as they still stand in the registers when
 * the call returns. */
#if defined(__TARGET_ARCH_x86)
#define REGS_NR(regs) ((s64)(regs)->orig_ax)
#define REGS_ARG0(regs) ((regs)->di)
#define REGS_ARG1(regs) ((regs)->si)
#define REGS_ARG2(regs) ((regs)->dx)
#define REGS_ARG3(regs) ((regs)->r10)
#define REGS_ARG4(regs) ((regs)->r8)
#define REGS_ARG5(regs) ((regs)->r9)
#define O_DIRECT_FLAG 040000
#elif defined(__TARGET_ARCH_arm64)
#define REGS_NR(regs) ((s64)(regs)->syscallno)
#define REGS_ARG0(regs) ((regs)->orig_x0)
#define REGS_ARG1(regs) ((regs)->regs[1])
#define REGS_ARG2(regs) ((regs)->regs[2])
#define REGS_ARG3(regs) ((regs)->regs[3])
#define REGS_ARG4(regs) ((regs)->regs[4])
#define REGS_ARG5(regs) ((regs)->regs[5])
#define O_DIRECT_FLAG 0200000
#endif

/* A thread outside any system call (a fault, an interrupt) shows -1. So does a
 * worker of io_uring, whose registers are a copy of those of the call that made it. */
static __always_inline s64 task_syscall(struct task_struct *task)
{
	if (task->flags & PF_IO_WORKER)
		return -1;
	struct pt_regs *regs = (struct pt_regs *)bpf_task_pt_regs(task);

	return regs ? REGS_NR(regs) : -1;
}
