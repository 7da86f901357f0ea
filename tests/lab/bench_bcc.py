"""What a user would write with bcc for the same facts, from the same tracepoints.

    /usr/bin/python3 bench_bcc.py PID OUT [HOOK...]

Waits from 0.1 ms on, block requests, writes, executions and ends become lines of OUT; the rest is
counted, and on the other hooks given each member's hits are. Prints `armed`, and at its end how
many events were lost. For the system's Python, where
Debian has bcc.
"""

import ctypes
import os
import signal
import sys

from bcc import BPF  # Debian's python3-bpfcc, not in the venv

PROGRAM = r"""
struct event { u64 began; u64 spent; u64 value; u32 tid; u32 kind; };
struct asked { u64 dev; u64 sector; };
struct call { u32 tgid; u32 id; };
struct sums { u64 count; u64 spent; u64 bytes; };

BPF_PERF_OUTPUT(events);
BPF_HASH(members, u32, u8, 10240);
BPF_HASH(off, u32, u64, 10240);
BPF_HASH(enter, u32, u64, 10240);
BPF_HASH(short_waits, u32, u64, 10240);
BPF_HASH(calls, struct call, struct sums, 10240);
BPF_HASH(faults, u32, u64, 10240);
BPF_HASH(cached, u64, u64, 10240);
BPF_HASH(requests, struct asked, u64, 10240);

static int member(void)
{
	u32 tgid = bpf_get_current_pid_tgid() >> 32;
	return members.lookup(&tgid) != 0;
}

static void tell(void *ctx, u64 began, u64 spent, u32 tid, u32 kind, u64 value)
{
	struct event e = {.began = began, .spent = spent, .value = value, .tid = tid, .kind = kind};
	events.perf_submit(ctx, &e, sizeof(e));
}

TRACEPOINT_PROBE(sched, sched_process_fork)
{
	u32 child = args->child_pid;
	u8 one = 1;
	if (member())
		members.update(&child, &one);
	return 0;
}

TRACEPOINT_PROBE(sched, sched_process_exec)
{
	if (member())
		tell(args, bpf_ktime_get_ns(), 0, bpf_get_current_pid_tgid(), 3, 0);
	return 0;
}

TRACEPOINT_PROBE(sched, sched_process_exit)
{
	if (member())
		tell(args, bpf_ktime_get_ns(), 0, bpf_get_current_pid_tgid(), 4, 0);
	return 0;
}

TRACEPOINT_PROBE(sched, sched_switch)
{
	u64 now = bpf_ktime_get_ns(), *began;
	u32 prev = args->prev_pid, next = args->next_pid;
	if (member())
		off.update(&prev, &now);
	began = off.lookup(&next);
	if (!began)
		return 0;
	if (now - *began >= 100000)
		tell(args, *began, now - *began, next, 0, 0);
	else
		short_waits.increment(next, now - *began);
	off.delete(&next);
	return 0;
}

TRACEPOINT_PROBE(raw_syscalls, sys_enter)
{
	u64 now = bpf_ktime_get_ns();
	u32 tid = bpf_get_current_pid_tgid();
	if (member())
		enter.update(&tid, &now);
	return 0;
}

TRACEPOINT_PROBE(raw_syscalls, sys_exit)
{
	u64 id = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns();
	u32 tid = id;
	u64 *began = enter.lookup(&tid);
	if (!began)
		return 0;
	struct call key = {.tgid = id >> 32, .id = args->id};
	struct sums none = {}, *sums = calls.lookup_or_try_init(&key, &none);
	if (sums) {
		sums->count++;
		sums->spent += now - *began;
		sums->bytes += args->ret;
	}
	if (args->id == 1 || args->id == 44)
		tell(args, *began, now - *began, tid, 1, args->ret);
	enter.delete(&tid);
	return 0;
}

TRACEPOINT_PROBE(exceptions, page_fault_user)
{
	if (member())
		faults.increment((u32)bpf_get_current_pid_tgid());
	return 0;
}

TRACEPOINT_PROBE(filemap, mm_filemap_add_to_page_cache)
{
	if (member())
		cached.increment(args->i_ino);
	return 0;
}

TRACEPOINT_PROBE(block, block_rq_issue)
{
	struct asked key = {.dev = args->dev, .sector = args->sector};
	u64 now = bpf_ktime_get_ns();
	requests.update(&key, &now);
	return 0;
}

TRACEPOINT_PROBE(block, block_rq_complete)
{
	struct asked key = {.dev = args->dev, .sector = args->sector};
	u64 *began = requests.lookup(&key);
	if (!began)
		return 0;
	tell(args, *began, bpf_ktime_get_ns() - *began, 0, 2, args->nr_sector);
	requests.delete(&key);
	return 0;
}
"""
COUNTED = r"""
BPF_HASH(hits_%(hook)s, u32, u64, 10240);

RAW_TRACEPOINT_PROBE(%(hook)s)
{
	if (member())
		hits_%(hook)s.increment((u32)bpf_get_current_pid_tgid());
	return 0;
}
"""
KINDS = ("wait", "write", "block", "exec", "exit")


def main() -> None:
    pid, out = int(sys.argv[1]), open(sys.argv[2], "w")  # noqa: SIM115, PTH123  it lives as long
    bpf = BPF(text=PROGRAM + "".join(COUNTED % {"hook": hook} for hook in sys.argv[3:]))
    bpf["members"][ctypes.c_uint32(pid)] = ctypes.c_uint8(1)
    lost = 0

    def take(_cpu: int, data: int, _size: int) -> None:
        e = bpf["events"].event(data)
        out.write(f"{e.began} {KINDS[e.kind]} {e.tid} {e.spent} {e.value}\n")

    def miss(count: int) -> None:
        nonlocal lost
        lost += count

    def end(_number: int, _frame: object) -> None:
        bpf.perf_buffer_poll(timeout=0)
        for name in ("short_waits", "faults", "cached"):
            for key, value in bpf[name].items():
                out.write(f"{name} {key.value} {value.value}\n")
        for key, sums in bpf["calls"].items():
            out.write(f"call {key.tgid} {key.id} {sums.count} {sums.spent} {sums.bytes}\n")
        out.close()
        print(f"lost {lost}", flush=True)
        os._exit(0)

    signal.signal(signal.SIGINT, end)
    bpf["events"].open_perf_buffer(take, page_cnt=256, lost_cb=miss)
    print("armed", flush=True)
    while True:
        bpf.perf_buffer_poll(timeout=100)


if __name__ == "__main__":
    main()
