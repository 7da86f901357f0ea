// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * What the target's threads do while they run: user code, page faults, or other
 * kernel work. A clock tick on each CPU looks once; nothing is added to the
 * fault path itself, which a probe there would double.
 */
#include "shared.bpf.h"

#define FRAMES 48

struct stack {
	u64 ip[FRAMES];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct stack);
} stacks SEC(".maps");

static __always_inline u32 kernel_mode(void *ctx)
{
	u32 zero = 0;
	struct stack *s = bpf_map_lookup_elem(&stacks, &zero);

	if (!s)
		return CPU_KERNEL;
	long bytes = bpf_get_stack(ctx, s->ip, sizeof(s->ip), 0);
	/* No kernel frames: the tick found user code. */
	if (bytes <= 0)
		return CPU_USER;
	u32 frames = bytes / 8;
	for (u32 i = 0; i < FRAMES; i++) {
		if (i >= frames)
			break;
		u64 ip = s->ip[i];
		if (ip >= settings.fault_begin && ip < settings.fault_end)
			return CPU_FAULT;
	}
	return CPU_KERNEL;
}

SEC("perf_event")
int cpu__tick(struct bpf_perf_event_data *ctx)
{
	struct task_struct *task = current_task();
	struct thread_slot *t = slot_of(task);

	if (!t)
		return 0;
	t->min_flt = FIELD(task, min_flt);
	t->maj_flt = FIELD(task, maj_flt);
	if (!t->off_ns) /* or going_off could not tell when it came on */
		t->cpu_ns = FIELD(task, se.sum_exec_runtime);
	u32 mode = kernel_mode(ctx);
	if (mode < CPU_MODES)
		t->samples[mode]++;
	return 0;
}
