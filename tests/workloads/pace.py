"""How fast this machine is just now, for bounds on the processor time that something takes."""

from __future__ import annotations

import time

_REFERENCE_NS = 10_500_000  # of a machine on which such bounds were set


def slowness() -> float:
    """How many times as long as there plain Python takes here, and never less than one."""
    return max(1.0, min(_loop_ns() for _ in range(5)) / _REFERENCE_NS)


def _loop_ns() -> int:
    began_ns, total = time.thread_time_ns(), 0
    for number in range(200_000):
        total += number * number % 7
    return time.thread_time_ns() - began_ns
