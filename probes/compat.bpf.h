/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Every kernel difference the probes meet, each with what caused it; and the two
 * dialects that the probes are compiled in.
 *
 * A kernel with BTF checks the types of the objects it passes to a program, so a
 * field is read in place, and a thread's membership lies in the thread. A kernel
 * without (NO_KERNEL_BTF) passes bare numbers: each field is copied out, membership
 * is a table by thread id, and what iterators would walk is walked by hand. The
 * layouts, which BTF would tell, are then compiled from the kernel's headers
 * (types.bcc.c).
 *
 * A third build (CASTS) is the first one for kernels that let a program say what lies at an
 * address that it only has as a number (bpf_rdonly_cast, 6.2, a35b9af4ec2c): what PEEK names
 * is then read in place, too, and not by a call for each field.
 */
#pragma once

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>

#ifdef NO_KERNEL_BTF
#define TRACEPOINT(name) SEC("raw_tp/" #name)
#define FIELD(object, ...) BPF_CORE_READ(object, __VA_ARGS__)
#define FIELD_BITS(object, field) BPF_CORE_READ_BITFIELD_PROBED(object, field)
#define BY_FENTRY(function, program)
#else
#define TRACEPOINT(name) SEC("tp_btf/" #name)
#define FIELD_1(object, a) ((object)->a)
#define FIELD_2(object, a, b) ((object)->a->b)
#define FIELD(object, ...) ___bpf_apply(FIELD_, ___bpf_narg(__VA_ARGS__))(object, __VA_ARGS__)
#define FIELD_3(object, a, b, c) ((object)->a->b->c)
#define FIELD_BITS(object, field) BPF_CORE_READ_BITFIELD(object, field)
#define BY_FENTRY(function, program)				\
	SEC("fentry/" #function)				\
	int program##_entry(u64 *passed)			\
	{							\
		return program##_enters(passed[0], passed[1]);	\
	}
#endif

/* Fields of what lies at an address whose type the kernel does not know. */
#ifdef CASTS
extern void *bpf_rdonly_cast(const void *address, u32 type) __ksym;
#define PEEK(type, address, ...) \
	FIELD((type *)bpf_rdonly_cast(address, bpf_core_type_id_kernel(type)), __VA_ARGS__)
#else
#define PEEK(type, address, ...) BPF_CORE_READ((type *)(address), __VA_ARGS__)
#endif

#if defined(__TARGET_ARCH_x86)
#define REGS_PASSED_1(regs) ((regs)->di)
#define REGS_PASSED_2(regs) ((regs)->si)
#elif defined(__TARGET_ARCH_arm64)
#define REGS_PASSED_1(regs) ((regs)->regs[0])
#define REGS_PASSED_2(regs) ((regs)->regs[1])
#endif

/* A kernel that lacks a tracepoint may let its function be looked at on entry. Where that takes BTF,
 * or an architecture's kernel cannot do it (arm64 before 6.4, 2aa6ac03516d), a kprobe does. What
 * either is passed is a number to this program: it copies fields out. */
#define ON_ENTRY(function, program)						\
	static __always_inline int program##_enters(u64 first, u64 second);	\
	BY_FENTRY(function, program)						\
	SEC("kprobe/" #function)						\
	int program##_kprobe(struct pt_regs *regs)				\
	{									\
		return program##_enters(REGS_PASSED_1(regs), REGS_PASSED_2(regs)); \
	}									\
	static __always_inline int program##_enters(u64 first, u64 second)

/* bpf_loop came in 5.17 (e6f2dd0f8067). Before, a callback is run for each element of an array, which
 * has as many as it is to be run at most. LOOPED(callback, most) stands after a callback that takes
 * an index, and LOOP runs it `count` times, unless it gives 1; where `count` is less than `most`, it
 * has to see to that itself. */
#define LOOPED(callback, most)							\
	struct {								\
		__uint(type, BPF_MAP_TYPE_ARRAY);				\
		__uint(max_entries, most);					\
		__type(key, u32);						\
		__type(value, u32);						\
	} callback##_steps SEC(".maps");					\
	static __attribute__((unused)) long callback##_each(			\
		void *steps, u32 *index, u32 *step, void *of)			\
	{									\
		return callback(*index, of);					\
	}

#define LOOP(count, callback, of)						\
	do {									\
		if (bpf_core_enum_value_exists(enum bpf_func_id, BPF_FUNC_loop))	\
			bpf_loop(count, callback, of, 0);			\
		else								\
			bpf_for_each_map_elem(&callback##_steps, callback##_each, of, 0);	\
	} while (0)

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
		return FIELD(task, __state);
	return BPF_CORE_READ((struct task_struct___before_5_14 *)task, state);
}

/* The page cache kept pages before 5.16 (7b230db3b8d3). */
struct page___before_5_16 {
	struct address_space *mapping;
	unsigned long index;
} __attribute__((preserve_access_index));

static __always_inline struct address_space *folio_mapping(struct folio *folio)
{
	if (bpf_core_field_exists(folio->mapping))
		return FIELD(folio, mapping);
	return FIELD((struct page___before_5_16 *)folio, mapping);
}

static __always_inline u64 folio_index(struct folio *folio)
{
	if (bpf_core_field_exists(folio->index))
		return FIELD(folio, index);
	return FIELD((struct page___before_5_16 *)folio, index);
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

/* page::compound_head is called compound_info by 7.3. Of a tail page it is the head's
 * address plus one, or, then, a mask plus one that makes it of the tail's address; no
 * page of any architecture is described in the last GiB of addresses. */
struct page___with_info {
	unsigned long compound_info;
} __attribute__((preserve_access_index));

#define LEAST_MASK (-1UL << 30)

/* The head of a compound page, so that its mapping can be trusted. */
static __always_inline struct page *page_head(struct page *page)
{
	unsigned long head;

	if (bpf_core_field_exists(page->compound_head))
		head = BPF_CORE_READ(page, compound_head);
	else
		head = BPF_CORE_READ((struct page___with_info *)page, compound_info);
	if (!(head & 1))
		return page;
	return (struct page *)(head >= LEAST_MASK ? (u64)page & (head - 1) : head - 1);
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

/* What overlayfs reads a file from: its private data, or since 6.13 (as f_ref) one of two
 * in there, of which the second is what was copied up while the file was open. The type
 * may be one of a module that was not there when the probes were loaded: then 0. */
static __always_inline struct file *overlay_reads(struct file *file)
{
	void *own = BPF_CORE_READ(file, private_data);

	if (!bpf_core_type_exists(struct ovl_file))
		return bpf_core_field_exists(file->f_ref) ? 0 : own;
	struct file *copied_up = BPF_CORE_READ((struct ovl_file *)own, upperfile);

	return copied_up ?: BPF_CORE_READ((struct ovl_file *)own, realfile);
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

#ifdef NO_KERNEL_BTF
static __always_inline struct task_struct *current_task(void)
{
	return (struct task_struct *)bpf_get_current_task();
}

/* Compiled from the headers: no type tells these. */
enum kernel_stack { KERNEL_STACK_BYTES = 1, KERNEL_STACK_PADDING = 2 };

/* Of its last way into the kernel from user space: they stand at the top of its stack. */
static __always_inline struct pt_regs *task_regs(struct task_struct *task)
{
	u64 top = (u64)FIELD(task, stack) + bpf_core_enum_value(enum kernel_stack, KERNEL_STACK_BYTES);

	return (struct pt_regs *)(top - bpf_core_enum_value(enum kernel_stack, KERNEL_STACK_PADDING) -
				  bpf_core_type_size(struct pt_regs));
}
#else
static __always_inline struct task_struct *current_task(void)
{
	return bpf_get_current_task_btf();
}

static __always_inline struct pt_regs *task_regs(struct task_struct *task)
{
	return (struct pt_regs *)bpf_task_pt_regs(task);
}
#endif

/* System call number and arguments, as they still stand in the registers when
 * the call returns. */
#if defined(__TARGET_ARCH_x86)
#define REGS_NR(regs) ((s64)FIELD(regs, orig_ax))
#define REGS_ARG0(regs) FIELD(regs, di)
#define REGS_ARG1(regs) FIELD(regs, si)
#define REGS_ARG2(regs) FIELD(regs, dx)
#define REGS_ARG3(regs) FIELD(regs, r10)
#define REGS_ARG4(regs) FIELD(regs, r8)
#define REGS_ARG5(regs) FIELD(regs, r9)
#define O_DIRECT_FLAG 040000
#elif defined(__TARGET_ARCH_arm64)
#define REGS_NR(regs) ((s64)FIELD(regs, syscallno))
#define REGS_ARG0(regs) FIELD(regs, orig_x0)
#define REGS_ARG1(regs) FIELD(regs, regs[1])
#define REGS_ARG2(regs) FIELD(regs, regs[2])
#define REGS_ARG3(regs) FIELD(regs, regs[3])
#define REGS_ARG4(regs) FIELD(regs, regs[4])
#define REGS_ARG5(regs) FIELD(regs, regs[5])
#define O_DIRECT_FLAG 0200000
#endif

/* A thread outside any system call (a fault, an interrupt) shows -1. So does a
 * worker of io_uring, whose registers are a copy of those of the call that made it. */
static __always_inline s64 task_syscall(struct task_struct *task)
{
	if (FIELD(task, flags) & PF_IO_WORKER)
		return -1;
	struct pt_regs *regs = task_regs(task);

	return regs ? REGS_NR(regs) : -1;
}
