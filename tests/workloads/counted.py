"""Small programs that do an exact, prime number of things, and say what the kernel counted of them.

    with started("reads", path) as program:      # it has started and does nothing yet
        attach_profiler(program.pid)
        summary = program.go()                   # done; it lives until the block ends

As a program: `python -m workloads.counted MODE FILE` prints {"pid": N}, waits for a line on stdin,
works, prints its summary, and ends when stdin does.  `did` holds what was done, `counted` the
kernel's own differences over the work (getrusage, /proc/self/io), less what looking at them costs.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import processes
from .cache import drop_cache
from .oneself import own_counters

READS, READ_BYTES = 23, 65537
MMAPS = 29
FORKS = 31
OPENS = 37
THREADS, STORM_THREADS, THREADS_AT_ONCE = 1009, 6007, 16
THREAD_SLEEP_S = 20e-6
FILE_PAGES = 997
ANONYMOUS_PAGES = 499
STORM_FORKS, STORM_BATCH = 10_000, 40
IDLE_S = 1.0
SLEEPS, BUSY_S = 41, 0.02
GO_TIMEOUT_S = 120.0
START_TIMEOUT_S = 60.0

Counts = dict[str, int]


def _reads(path: Path) -> Counts:
    fd = os.open(path, os.O_RDONLY)
    read_bytes = sum(len(os.pread(fd, READ_BYTES, index * READ_BYTES)) for index in range(READS))
    os.close(fd)
    return {"opens": 1, "reads": READS, "read_bytes": read_bytes}


def _mmaps(path: Path) -> Counts:
    fd = os.open(path, os.O_RDONLY)
    size_bytes = os.fstat(fd).st_size
    for _ in range(MMAPS):
        mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ).close()
    os.close(fd)
    return {"opens": 1, "mmaps": MMAPS, "munmaps": MMAPS}


def _opens(path: Path) -> Counts:
    for _ in range(OPENS):
        os.close(os.open(path, os.O_RDONLY))
    return {"opens": OPENS}


def _forks(_path: Path) -> Counts:
    for _ in range(FORKS):
        os.waitpid(_forked(), 0)
    return {"forks": FORKS}


def _fork_storm(_path: Path) -> Counts:
    """In batches, so that never more than a few live at once."""
    left = STORM_FORKS
    while left:
        batch = min(left, STORM_BATCH)
        for pid in [_forked() for _ in range(batch)]:
            os.waitpid(pid, 0)
        left -= batch
    return {"forks": STORM_FORKS}


def _threads(path: Path, count: int = THREADS) -> Counts:
    """Each opens the file once, sleeps once, and is gone within a millisecond or so."""

    def life() -> None:
        os.close(os.open(path, os.O_RDONLY))
        time.sleep(THREAD_SLEEP_S)

    left = count
    while left:
        together = [threading.Thread(target=life) for _ in range(min(left, THREADS_AT_ONCE))]
        for thread in together:
            thread.start()
        for thread in together:
            thread.join()
        left -= len(together)
    return {"threads": count, "opens": count, "sleeps": count}


def _thread_storm(path: Path) -> Counts:
    return _threads(path, STORM_THREADS)


def _preempted(_path: Path) -> Counts:
    """Computes on one core beside a child that does the same, and sleeps now and then."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    child = os.fork()
    if child == 0:
        while True:
            pass
    for _ in range(SLEEPS):
        until = time.monotonic() + BUSY_S
        while time.monotonic() < until:
            pass
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return {"sleeps": SLEEPS}


def _faults(path: Path) -> Counts:
    """One major fault a file page, for the file is cold and MADV_RANDOM keeps readahead off it."""
    drop_cache(path)
    fd = os.open(path, os.O_RDONLY)
    weights = mmap.mmap(fd, FILE_PAGES * mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ)
    weights.madvise(mmap.MADV_RANDOM)
    touched = sum(weights[index * mmap.PAGESIZE] >= 0 for index in range(FILE_PAGES))
    memory = mmap.mmap(-1, ANONYMOUS_PAGES * mmap.PAGESIZE, mmap.MAP_PRIVATE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for index in range(ANONYMOUS_PAGES):
        memory[index * mmap.PAGESIZE] = 1
    os.close(fd)
    return {"file_pages": touched, "anonymous_pages": ANONYMOUS_PAGES}


def _idle(_path: Path) -> Counts:
    time.sleep(IDLE_S)
    return {}


MODES: dict[str, Callable[[Path], Counts]] = {
    "reads": _reads,
    "mmaps": _mmaps,
    "opens": _opens,
    "forks": _forks,
    "forkstorm": _fork_storm,
    "threads": _threads,
    "threadstorm": _thread_storm,
    "preempted": _preempted,
    "faults": _faults,
    "idle": _idle,
}


def _forked() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    return pid


def _counted(looked: Counts, before: Counts, after: Counts) -> Counts:
    """after - before, less the reads that looking itself made; looking makes no faults."""
    difference = {name: after[name] - before[name] for name in after}
    for name in ("read_calls", "called_bytes"):
        difference[name] -= before[name] - looked[name]
    return difference


def run_mode(mode: str, path: Path) -> dict[str, Any]:
    """The summary: mode, pid, what was done, what the kernel counted, when (CLOCK_MONOTONIC ns)."""
    own_counters()  # the first look costs more than later ones
    looked = own_counters()
    before = own_counters()
    start_ns = time.monotonic_ns()
    did = MODES[mode](path)
    end_ns = time.monotonic_ns()
    after = own_counters()
    return {
        "mode": mode,
        "pid": os.getpid(),
        "did": did,
        "counted": _counted(looked, before, after),
        "start_ns": start_ns,
        "end_ns": end_ns,
    }


@dataclass(frozen=True)
class Program:
    """A started counted program, seen from outside."""

    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    def go(self) -> dict[str, Any]:
        """Let it work; its summary."""
        processes.say(self.process, go=True)
        return processes.hear(self.process, GO_TIMEOUT_S)


@contextmanager
def started(mode: str, path: Path) -> Iterator[Program]:
    """`path` is the file that it works on, where it works on one; at least 4 MiB."""
    with processes.started("counted", mode, str(path)) as process:
        processes.hear(process, START_TIMEOUT_S)
        yield Program(process)


def main() -> None:
    parser = argparse.ArgumentParser(prog="workloads.counted")
    parser.add_argument("mode", choices=sorted(MODES))
    parser.add_argument("path", type=Path)
    options = parser.parse_args()
    print(json.dumps({"pid": os.getpid()}), flush=True)
    if sys.stdin.readline():
        print(json.dumps(run_mode(options.mode, options.path)), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
