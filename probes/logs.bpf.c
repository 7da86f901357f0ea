// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* Log lines of the target, stamped as they are written: engines log without
 * times, or with times of a clock of their own. */
#include "text.bpf.h"

TRACEPOINT(sys_exit)
int BPF_PROG(logs__write, struct pt_regs *regs, long ret)
{
	struct thread_slot *t = current_slot();

	if (!t || ret <= 0)
		return 0;
	u64 id = bpf_get_current_pid_tgid();
	struct sending *job = sending_begin(regs, settings.call_class[REGS_NR(regs) & 511]);
	if (!job)
		return 0;
	job->head.start_ns = t->enter_ns;
	job->head.end_ns = bpf_ktime_get_ns();
	job->head.tid = (u32)id;
	job->head.tgid = id >> 32;
	job->head.kind = TEXT_LOG;
	job->head.flags = REGS_ARG0(regs);
	/* The start of a line is what markers are found by. */
	job->head.total = ret > TEXT_PIECE ? TEXT_PIECE : ret;
	send_text();
	return 0;
}
