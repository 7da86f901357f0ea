// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Page faults on files, by thread and file. Totals, major and minor, come free
 * from the task itself (min_flt, maj_flt, copied at every switch and sample);
 * what is not on a file is anonymous. Nothing is recorded per fault.
 */
#include "shared.bpf.h"

static __always_inline int fault(struct address_space *mapping)
{
	struct thread_slot *t = current_slot();

	if (!t)
		return 0;
	t->file_faults++;
	struct file_slot *f = file_wanted(t, FIELD(mapping, host));
	if (f) {
		__sync_fetch_and_add(&f->faults, 1);
		file_touch(f);
	}
	return 0;
}

static __always_inline int around(struct address_space *mapping)
{
	struct thread_slot *t = current_slot();

	if (!t)
		return 0;
	t->map_arounds++;
	struct file_slot *f = file_wanted(t, FIELD(mapping, host));
	if (f) {
		__sync_fetch_and_add(&f->map_arounds, 1);
		file_touch(f);
	}
	return 0;
}

/* The tracepoints came with 6.12; before, the functions that they are in. */
TRACEPOINT(mm_filemap_fault)
int BPF_PROG(faults__fault, struct address_space *mapping)
{
	return fault(mapping);
}

FUNCTION(filemap_fault)
int faults__fault_entry(void *ctx)
{
	struct vm_fault *vmf = (struct vm_fault *)PASSED_1(ctx);

	return fault(FIELD(vmf, vma, vm_file, f_mapping));
}

TRACEPOINT(mm_filemap_map_pages)
int BPF_PROG(faults__around, struct address_space *mapping)
{
	return around(mapping);
}

FUNCTION(filemap_map_pages)
int faults__around_entry(void *ctx)
{
	struct vm_fault *vmf = (struct vm_fault *)PASSED_1(ctx);

	return around(FIELD(vmf, vma, vm_file, f_mapping));
}
