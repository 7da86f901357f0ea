"""When a shared machine stood still, as a process on each core saw it that only sleeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

# Below this it is the timer and the switch to the process, not a stall.
NOTICED_NS = 1_000_000

_WITNESS = """
import json, os, sys, threading, time
os.sched_setaffinity(0, {int(sys.argv[1])})
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
step, noticed, late = 2_000_000, int(sys.argv[2]), []
print(flush=True)
last = time.monotonic_ns()
while not over.is_set():
    time.sleep(step / 1e9)
    now = time.monotonic_ns()
    if now - last > step + noticed:
        late.append((last + step, now))
    last = now
print(json.dumps(late))
"""


@dataclass
class Stalls:
    """Spans, CLOCK_MONOTONIC ns, in which a core did not run who was due; told when all is over."""

    spans: list[tuple[int, int]] = field(default_factory=list)

    def longest_ns(self, start_ns: int, end_ns: int) -> int:
        """The longest one in a span of time."""
        inside = (min(b, end_ns) - max(a, start_ns) for a, b in self.spans)
        return max(0, *inside, 0)


@contextmanager
def watch_for_stalls() -> Iterator[Stalls]:
    stalls = Stalls()
    watchers = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", _WITNESS, str(core), str(NOTICED_NS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for core in sorted(os.sched_getaffinity(0))
    ]
    try:
        for watcher in watchers:
            assert watcher.stdout
            watcher.stdout.readline()
        yield stalls
    finally:
        told = [watcher.communicate()[0] for watcher in watchers]
    stalls.spans = [tuple(span) for text in told for span in json.loads(text)]
