"""Python stacks as a flame chart: each frame from the look that first found it to the look that
missed it, callers around what they call.

Pure. A frame that two looks in a row find is taken for one call, which may be wrong: what returned
and was called again in between is not seen. Lines are left out, for they split what is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from ttftprof.model import ProcessTrack
from ttftprof.python_facts import Segment, Stack
from ttftprof.timeline import Timeline

Frame = tuple[int, int, str]
"""(start_ns, end_ns, `module:function`)"""


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of one thread within [since_ns, until_ns], made anew each time they are gone
    through: nested, in the order in which a stack sees them begin."""

    tid: int
    segments: Sequence[Segment]
    since_ns: int
    until_ns: int

    def __iter__(self) -> Iterator[Frame]:
        since_ns = self.since_ns
        for segment in self.segments:
            found = sorted(_frames(segment, self.tid, since_ns, self.until_ns))
            yield from ((start_ns, end_ns, name) for start_ns, _, end_ns, name in found)
            since_ns = max(since_ns, segment.end_ns)


def _frames(
    segment: Segment, tid: int, since_ns: int, until_ns: int
) -> Iterator[tuple[int, int, int, str]]:
    """(start_ns, depth, end_ns, name) of each frame, in the order in which they end."""
    until_ns = min(until_ns, segment.end_ns)
    names = [_names(stack) for stack in segment.stacks]
    under_way: list[tuple[int, str]] = []  # (start_ns, name), the outermost first
    last_ns = since_ns

    def ended(kept: int) -> Iterator[tuple[int, int, int, str]]:
        while len(under_way) > kept:
            start_ns, name = under_way.pop()
            yield start_ns, len(under_way), last_ns, name

    spans = segment.threads[tid]
    stamps = np.clip([spans.start_ns, spans.end_ns], since_ns, until_ns).tolist()
    for start_ns, end_ns, number in zip(*stamps, spans.stack.tolist(), strict=True):
        if end_ns <= start_ns:
            continue
        yield from ended(_common(under_way, names[number]) if start_ns <= last_ns else 0)
        under_way += [(start_ns, name) for name in names[number][len(under_way) :]]
        last_ns = end_ns
    yield from ended(0)


def threads(timeline: Timeline, process: ProcessTrack) -> Iterator[tuple[int, int, Frames]]:
    """(tid, looks a second, its frames) of each thread of a process that has Python stacks."""
    start_ns, end_ns = process.start_ns, process.end_ns
    segments = [
        segment
        for segment in timeline.python.get(process.tgid, ())
        if segment.start_ns < end_ns and segment.end_ns > start_ns
    ]
    for tid in sorted({tid for segment in segments for tid in segment.threads}):
        own = [segment for segment in segments if tid in segment.threads]
        yield tid, own[0].rate_hz, Frames(tid, own, start_ns, end_ns)


def _names(stack: Stack) -> tuple[str, ...]:
    return tuple(f"{module}:{function}" for module, function, _ in stack)


def _common(under_way: Sequence[tuple[int, str]], found: Sequence[str]) -> int:
    """How many of the frames, from the outermost on, the next look found again."""
    pairs = zip(under_way, found, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0][1] == pair[1], pairs))
