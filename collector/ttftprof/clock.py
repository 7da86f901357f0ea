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


def boottime_ns() -> int:
    """CLOCK_BOOTTIME: as CLOCK_MONOTONIC, but it goes on while the machine is suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Jump:
    """How the machine's other clocks moved against CLOCK_MONOTONIC. `suspended_ns`: the machine
    slept so long, which CLOCK_MONOTONIC leaves out; `set_ns`: the wall clock was set by so much
    besides, backward if negative."""

    suspended_ns: int
    set_ns: int


class OtherClocks:
    """Notices when the machine was suspended, and when its wall clock was set. Slewing, as NTP
    does, moves CLOCK_MONOTONIC along and is none of both."""

    NOTABLE_NS = 50 * NS_PER_MS

    def __init__(
        self,
        boot: Callable[[], int] = boottime_ns,
        wall: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], int] = now_ns,
    ) -> None:
        self._clocks = boot, wall
        self._monotonic = monotonic
        self._offsets = self._measured()

    def moved(self) -> Jump | None:
        """What moved since the last call, or None. A look takes a microsecond."""
        now = self._monotonic()
        looks = zip(self._clocks, self._offsets, strict=True)
        if all(abs(clock() - now - offset) < self.NOTABLE_NS for clock, offset in looks):
            return None
        # Or this process only waited for a core between two readings.
        boot_before, wall_before = self._offsets
        self._offsets = boot, wall = self._measured()
        suspended_ns = self._notable(boot - boot_before)
        set_ns = self._notable(wall - wall_before - (boot - boot_before))
        return Jump(suspended_ns, set_ns) if suspended_ns or set_ns else None

    def _notable(self, ns: int) -> int:
        return ns if abs(ns) >= self.NOTABLE_NS else 0

    def _measured(self) -> tuple[int, int]:
        boot, wall = (measure_offset(clock, self._monotonic).offset_ns for clock in self._clocks)
        return boot, wall
