"""What a recording holds of Python stacks: segments of a process, spans of its threads.

Pure, and part of the timeline. A span is a stack from the look that found it to the look that found
another; between the two it may have changed and come back unseen. Times are CLOCK_MONOTONIC
nanoseconds, true within each segment's `clock_error_ns`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ttftprof.recording import Facts

Frame = tuple[str, str, int]  # module path within its library, function, line
Stack = tuple[Frame, ...]  # the outermost call first
T = TypeVar("T")
_IMPOSSIBLE_NS = 1 << 62


@dataclass(frozen=True, slots=True)
class Spans:
    """The stacks of one thread, oldest first: parallel arrays. `stack`: a number in `stacks`."""

    start_ns: npt.NDArray[np.int64]
    end_ns: npt.NDArray[np.int64]
    stack: npt.NDArray[np.int64]

    def at(self, ns: int) -> int | None:
        """The number of the stack at a moment, None where the thread had none."""
        before = int(np.searchsorted(self.start_ns, ns, side="right")) - 1
        return int(self.stack[before]) if before >= 0 and ns < self.end_ns[before] else None


@dataclass(frozen=True, slots=True)
class Segment:
    """One process watched without a break, `rate_hz` looks a second on average."""

    start_ns: int
    end_ns: int
    rate_hz: int
    clock_error_ns: int
    stacks: Sequence[Stack]
    threads: Mapping[int, Spans]


PythonFacts = Mapping[int, Sequence[Segment]]  # by process


def read(reader: Facts) -> PythonFacts:
    """Raises `ValueError`, `TypeError` or `LookupError` for facts that make no sense."""
    found: dict[int, list[Segment]] = {}
    for ns, fact in reader.facts("python_stacks"):
        found.setdefault(int(fact["pid"]), []).append(segment_of(ns, fact))
    return {pid: tuple(sorted(own, key=lambda s: s.start_ns)) for pid, own in found.items()}


def segment_of(ns: int, fact: Mapping[str, Any]) -> Segment:
    """A recorded segment (written by `sources.python_stacks`) as arrays."""
    frames: list[Frame] = [(str(m), str(f), int(line)) for m, f, line in fact["frames"]]
    stacks = [tuple(_numbered(frames, number) for number in stack) for stack in fact["stacks"]]
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for tid, begin_us, length_us, stack in fact["spans"]:
        _numbered(stacks, stack)
        begin_ns = ns + int(begin_us) * 1000
        spans.setdefault(int(tid), []).append((begin_ns, begin_ns + int(length_us) * 1000, stack))
    end_ns, rate_hz = int(fact["end_ns"]), int(fact["rate_hz"])
    if not 0 <= ns <= end_ns < _IMPOSSIBLE_NS or not 0 < rate_hz <= 10_000:
        raise ValueError(f"no segment of Python stacks: {ns} to {end_ns}, {rate_hz} Hz")
    return Segment(
        start_ns=ns,
        end_ns=end_ns,
        rate_hz=rate_hz,
        clock_error_ns=int(fact.get("clock_error_ns") or 0),
        stacks=tuple(stacks),
        threads={tid: _spans(own) for tid, own in spans.items()},
    )


def _numbered(items: Sequence[T], number: Any) -> T:
    if not 0 <= int(number) < len(items):
        raise ValueError(f"no entry {number} among {len(items)}")
    return items[int(number)]


def _spans(spans: list[tuple[int, int, int]]) -> Spans:
    columns = np.array(sorted(spans), np.int64).reshape(-1, 3)
    return Spans(columns[:, 0], columns[:, 1], columns[:, 2])
