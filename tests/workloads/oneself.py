"""What a process asks of itself; apart from `processes`, for a runner has to start fast."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path


def on_sigterm(act: Callable[[], None]) -> None:
    """Call before any thread starts. `act` runs in a thread of its own.

    A Python signal handler would not do: one that comes as the main thread is about to block in a
    queue or a read is noticed only when that returns.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        act()

    threading.Thread(target=wait, daemon=True).start()


def end_of_input() -> None:
    """Waits for the end of stdin, which comes when whoever started this process has ended."""
    while os.read(0, 4096):
        pass


def share_signals() -> None:
    """In a forked worker: SIGTERM ends it again, whatever its parent made of it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def name_oneself(title: str) -> None:
    """What setproctitle does: the title in place of the command line, and as the thread's name."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: proc_pid_stat(5)
    name = title.encode()[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, name, len(name))
    Path("/proc/self/comm").write_text(title[:15])


def own_counters() -> dict[str, int]:
    """What the kernel counts of this process: faults, reads, bytes it had storage read."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    lines = Path("/proc/self/io").read_text().splitlines()
    io = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return {
        "major_faults": usage.ru_majflt,
        "minor_faults": usage.ru_minflt,
        "read_calls": io["syscr"],
        "called_bytes": io["rchar"],
        "storage_bytes": io["read_bytes"],
    }
