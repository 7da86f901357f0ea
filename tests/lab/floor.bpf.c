// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Programs that do nothing, on the hooks given as HOOKS: what no profiler by BPF on them can go
 * below on this kernel. With FILTER they ask whether the thread is the target's, and do nothing then.
 */
#include "kernel.h"
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#ifdef FILTER
struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, u64);
} members SEC(".maps");

const volatile u32 target_tgid = 0;

static __always_inline bool is_member(struct task_struct *task)
{
	return bpf_task_storage_get(&members, task, 0, 0) != 0;
}

static __always_inline void follow(struct task_struct *task)
{
	bpf_task_storage_get(&members, task, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
}

SEC("iter/task")
int seed(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;

	if (task && task->tgid == target_tgid)
		follow(task);
	return 0;
}

SEC("tp_btf/sched_process_fork")
int follow_fork(u64 *passed)
{
	if (is_member((struct task_struct *)passed[0]))
		follow((struct task_struct *)passed[1]);
	return 0;
}

SEC("tp_btf/sched_switch")
int both(u64 *passed)
{
	is_member((struct task_struct *)passed[1]);
	is_member((struct task_struct *)passed[2]);
	return 0;
}

#define ASK is_member(bpf_get_current_task_btf())
#else
#define ASK
#endif

#define HOOK(name)			\
	SEC("tp_btf/" #name)		\
	int empty_##name(void *ctx)	\
	{				\
		ASK;			\
		return 0;		\
	}
HOOKS

SEC("perf_event")
int empty_tick(void *ctx)
{
	ASK;
	return 0;
}
