// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Calls into a server's libraries (llama_decode, ...). What to probe is a table
 * of the collector; the cookie of each attachment is the row. Rare calls only: a
 * hit traps into the kernel and costs microseconds.
 */
#include "shared.bpf.h"

/* Bits of the cookie beside the row: which arguments are worth keeping. */
#define COOKIE_ROW 0xffff
#define COOKIE_STACK_INT 0x10000 /* first field of a struct passed on the stack */
#define COOKIE_FIRST(cookie) ((cookie) >> 20 & 0xf) /* argument by number from 1, 0 = none */
#define COOKIE_SECOND(cookie) ((cookie) >> 24 & 0xf)

#if defined(__TARGET_ARCH_x86)
#define STACK_STRUCT(regs) ((regs)->sp + 8)
#elif defined(__TARGET_ARCH_arm64)
#define STACK_STRUCT(regs) ((regs)->regs[1]) /* large structs go by reference */
#endif

static __always_inline void mark(u16 kind, u64 cookie, u64 value, u64 second)
{
	struct event *e = event_begin(kind, bpf_ktime_get_ns());

	if (!e)
		return;
	e->flags = cookie & COOKIE_ROW;
	e->a = value;
	e->b = second;
	event_end(e);
}

struct mark_regs {
#if defined(__TARGET_ARCH_x86)
	unsigned long before_ax[10], ax, cx, dx, si, di, orig_ax, ip, cs, flags, sp;
#elif defined(__TARGET_ARCH_arm64)
	u64 regs[31], sp;
#endif
};

#if defined(__TARGET_ARCH_x86)
#define ARGUMENT_1(regs) ((regs)->di)
#define ARGUMENT_2(regs) ((regs)->si)
#define ARGUMENT_3(regs) ((regs)->dx)
#define ARGUMENT_4(regs) ((regs)->cx)
#elif defined(__TARGET_ARCH_arm64)
#define ARGUMENT_1(regs) ((regs)->regs[0])
#define ARGUMENT_2(regs) ((regs)->regs[1])
#define ARGUMENT_3(regs) ((regs)->regs[2])
#define ARGUMENT_4(regs) ((regs)->regs[3])
#endif

struct arguments {
	u64 by_number[5]; /* from 1; 0 is none */
};

/* Each is read at a fixed offset first: the verifier lets nothing else read the
 * registers, and clang would fold a choice of them into one computed address. */
static __always_inline void arguments_of(struct mark_regs *regs, struct arguments *out)
{
	volatile u64 *by_number = out->by_number;

	by_number[0] = 0;
	by_number[1] = ARGUMENT_1(regs);
	by_number[2] = ARGUMENT_2(regs);
	by_number[3] = ARGUMENT_3(regs);
	by_number[4] = ARGUMENT_4(regs);
}

static __always_inline u64 argument(struct arguments *all, u64 number)
{
	return number < 5 ? all->by_number[number] : 0;
}

static __always_inline int called(struct mark_regs *regs)
{
	if (!current_slot())
		return 0;
	u64 cookie = bpf_get_attach_cookie(regs);
	struct arguments all;
	arguments_of(regs, &all);
	u64 value = argument(&all, COOKIE_FIRST(cookie));
	if (cookie & COOKIE_STACK_INT) {
		int first = 0;

		bpf_probe_read_user(&first, sizeof(first), (void *)STACK_STRUCT(regs));
		value = first;
	}
	mark(EVENT_MARK_ENTER, cookie, value, argument(&all, COOKIE_SECOND(cookie)));
	return 0;
}

static __always_inline int returned(struct mark_regs *regs)
{
	if (!current_slot())
		return 0;
#if defined(__TARGET_ARCH_x86)
	u64 result = regs->ax;
#else
	u64 result = regs->regs[0];
#endif
	mark(EVENT_MARK_EXIT, bpf_get_attach_cookie(regs), result, 0);
	return 0;
}

SEC("uprobe")
int marks__call(struct mark_regs *regs)
{
	return called(regs);
}

SEC("uretprobe")
int marks__return(struct mark_regs *regs)
{
	return returned(regs);
}

/* The same for one link with all places of a library (6.6, 89ae89f53d20); the
 * collector sets their attach type, which decides where the cookie is read. */
SEC("uprobe")
int marks__calls(struct mark_regs *regs)
{
	return called(regs);
}

SEC("uretprobe")
int marks__returns(struct mark_regs *regs)
{
	return returned(regs);
}
