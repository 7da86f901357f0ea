// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Page faults on files, by thread and file. Totals, major and minor, come free
 * from the task itself (min_flt, maj_flt, copied at every switch and sample);
 * what is not on a file is anonymous. Nothing is recorded per fault.
 */
#include "shared.bpf.h"

static __always_inline int fault(struct thread_slot *t, struct file_slot *f)
{
	t->file_faults++;
	if (f) {
		__sync_fetch_and_add(&f->faults, 1);
		file_touch(f);
	}
	return 0;
}

static __always_inline int around(struct thread_slot *t, struct file_slot *f)
{
	t->map_arounds++;
	if (f) {
		__sync_fetch_and_add(&f->map_arounds, 1);
		file_touch(f);
	}
	return 0;
}

static __always_inline u64 inode_of_fault(u64 fault)
{
	return (u64)BPF_CORE_READ((struct vm_fault *)fault, vma, vm_file, f_mapping, host);
}

/* The tracepoints came with 6.12; before, the functions that they are in. */
TRACEPOINT(mm_filemap_fault)
int BPF_PROG(faults__fault, struct address_space *mapping)
{
	struct thread_slot *t = current_slot();

	return t ? fault(t, file_wanted(t, FIELD(mapping, host))) : 0;
}

ON_ENTRY(filemap_fault, faults__fault)
{
	struct thread_slot *t = current_slot();

	return t ? fault(t, file_wanted_at(t, inode_of_fault(first))) : 0;
}

TRACEPOINT(mm_filemap_map_pages)
int BPF_PROG(faults__around, struct address_space *mapping)
{
	struct thread_slot *t = current_slot();

	return t ? around(t, file_wanted(t, FIELD(mapping, host))) : 0;
}

ON_ENTRY(filemap_map_pages, faults__around)
{
	struct thread_slot *t = current_slot();

	return t ? around(t, file_wanted_at(t, inode_of_fault(first))) : 0;
}
