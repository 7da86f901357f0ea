// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Calls into a server's libraries (llama_decode, ...). What to probe is a table
 * of the collector; the cookie of each attachment is the row. Rare calls only: a
 * hit traps into the kernel and costs microseconds.
 */
#include "shared.bpf.h"

/* Bits of the cookie beside the row: how to find the argument worth keeping. */
#define COOKIE_ROW 0xffff
#define COOKIE_STACK_INT 0x10000 /* first field of a struct passed on the stack */

#if defined(__TARGET_ARCH_x86)
#define STACK_STRUCT(regs) ((regs)->sp + 8)
#elif defined(__TARGET_ARCH_arm64)
#define STACK_STRUCT(regs) ((regs)->regs[1]) /* large structs go by reference */
#endif

static __always_inline void mark(u16 kind, u64 cookie, u64 value)
{
	struct event *e = event_begin(kind, bpf_ktime_get_ns());

	if (!e)
		return;
	e->flags = cookie & COOKIE_ROW;
	e->a = value;
	event_end(e);
}

struct mark_regs {
#if defined(__TARGET_ARCH_x86)
	unsigned long before_ax[10], ax, cx, dx, si, di, orig_ax, ip, cs, flags, sp;
#elif defined(__TARGET_ARCH_arm64)
	u64 regs[31], sp;
#endif
};

SEC("uprobe")
int marks__call(struct mark_regs *regs)
{
	if (!current_slot())
		return 0;
	u64 cookie = bpf_get_attach_cookie(regs);
	int value = 0;
	if (cookie & COOKIE_STACK_INT)
		bpf_probe_read_user(&value, sizeof(value), (void *)STACK_STRUCT(regs));
	mark(EVENT_MARK_ENTER, cookie, value);
	return 0;
}

SEC("uretprobe")
int marks__return(struct mark_regs *regs)
{
	if (!current_slot())
		return 0;
#if defined(__TARGET_ARCH_x86)
	u64 result = regs->ax;
#else
	u64 result = regs->regs[0];
#endif
	mark(EVENT_MARK_EXIT, bpf_get_attach_cookie(regs), result);
	return 0;
}
