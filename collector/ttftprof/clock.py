"""The one clock: CLOCK_MONOTONIC in integer nanoseconds, as the kernel's bpf_ktime_get_ns.

Every other clock enters through `Offset`, which is measured by sandwiching and keeps its error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000


def now_ns() -> int:
    """CLOCK_MONOTONIC, in nanoseconds."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


_CLOCK_MONOTONIC_COARSE = 6  # linux/time.h; Python has no name for it


def tick_ns() -> int:
    """How long one of the kernel's jiffies lasts, in nanoseconds."""
    return round(time.clock_getres(_CLOCK_MONOTONIC_COARSE) * NS_PER_S)


@dataclass(frozen=True, slots=True)
class Offset:
    """`other clock = monotonic + offset_ns`, true within ± `error_ns`."""

    offset_ns: int
    error_ns: int

    def to_monotonic(self, other_ns: int) -> int:
        return other_ns - self.offset_ns


def measure_offset(
    other: Callable[[], int] = time.time_ns,
    monotonic: Callable[[], int] = now_ns,
    attempts: int = 9,
) -> Offset:
    """Reads `other` between two monotonic readings; the tightest of `attempts` wins.

    The error is half the sandwich: the other reading fell somewhere inside it.
    """
    best: Offset | None = None
    for _ in range(attempts):
        before = monotonic()
        reading = other()
        after = monotonic()
        error = (after - before + 1) // 2
        if best is None or error < best.error_ns:
            best = Offset(reading - (before + after) // 2, error)
    assert best is not None
    return best
