"""Tracks of nested slices and counters: what trace viewers show, for every trace format alike.

Guarantees: the slices of a track nest (each ends no later than the one it lies in) and come in the
order in which a stack sees them begin; every track comes after its parent; names are harmless.
Pure; nothing is condensed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np

from ttftprof.activities import ACTIVITY_OF_WAIT
from ttftprof.events import Kind, Wait
from ttftprof.model import Phase, ProcessTrack, Report, Request, Series
from ttftprof.reports import html_data, words
from ttftprof.reports.safe import plain
from ttftprof.timeline import Timeline, Waits

_IO_LANES = 32
_NAME = 200


@dataclass(frozen=True, slots=True)
class Slice:
    start_ns: int
    end_ns: int
    name: str
    facts: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Track:
    """`number` is unique and not 0; `parent` is another's. `kind`: group, request, thread, io."""

    number: int
    parent: int | None
    name: str
    kind: str
    slices: Sequence[Slice] = ()
    tgid: int = 0
    tid: int = 0


def tracks(report: Report, timeline: Timeline) -> Iterator[Track]:
    numbers = count(1)
    yield from _requests(report, numbers)
    for process in report.tracks.processes:
        yield from _process(process, timeline, numbers)
    yield from _io(timeline, numbers)


def edges(slices: Iterable[Slice]) -> Iterator[tuple[int, Slice | None]]:
    """(ns, slice that begins) and (ns, None) for the end of the innermost open one: balanced."""
    open_ends: list[int] = []
    for piece in slices:
        while open_ends and open_ends[-1] <= piece.start_ns:
            yield open_ends.pop(), None
        yield piece.start_ns, piece
        open_ends.append(piece.end_ns)
    while open_ends:
        yield open_ends.pop(), None


def counters(report: Report) -> list[tuple[str, Series]]:
    """(name, curve): running totals and levels."""
    series = [*report.series, *report.tracks.storage]
    return [(_counter_name(s), s) for s in series if s.ns]


def _counter_name(series: Series) -> str:
    name = series.name.replace("_", " ")
    return plain(f"{name} {series.path}" if series.path else name, _NAME)


# -- requests -------------------------------------------------------------------------------------


def _requests(report: Report, numbers: Iterator[int]) -> Iterator[Track]:
    group = next(numbers)
    yield Track(group, None, "requests", "group")
    for request in html_data.subjects(report):
        number = next(numbers)
        name = plain(f"{html_data.title(request)} {request.model or ''}", _NAME).strip()
        yield Track(number, group, name, "request", list(_phases(request)))
        activities = [Slice(a.start_ns, a.end_ns, a.activity) for a in request.activities]
        yield Track(next(numbers), number, f"activities of {name}", "request", activities)


def _phases(request: Request) -> Iterator[Slice]:
    start_ns, end_ns = words.span(request)
    facts: dict[str, str | int] = {
        "outcome": request.outcome,
        "kind": words.switch_kind(request),
        "cause": plain(words.cause(request.verdict), _NAME),
        "verdict": plain(request.verdict.explanation),
    }
    yield Slice(start_ns, end_ns, html_data.title(request), facts)
    for phase in request.phases:
        yield Slice(phase.start_ns, phase.end_ns, phase.phase, _evidence(phase))


def _evidence(phase: Phase) -> dict[str, str | int]:
    told = {f"evidence {n}": html_data.evidence_text(e) for n, e in enumerate(phase.evidence, 1)}
    return {"basis": phase.basis, **told}


# -- processes and threads ------------------------------------------------------------------------


def _process(process: ProcessTrack, timeline: Timeline, numbers: Iterator[int]) -> Iterator[Track]:
    number = next(numbers)
    label = plain(process.label, _NAME)
    life = Slice(process.start_ns, process.end_ns, label, {"argv": plain(" ".join(process.argv))})
    yield Track(number, None, label, "process", [life], process.tgid)
    for waits in timeline.waits.get(process.tgid, ()):
        if waits.born_ns < process.end_ns and waits.dead_ns > process.start_ns:
            slices = list(_waits(waits, process.start_ns, process.end_ns))
            name = f"thread {waits.tid}"
            yield Track(next(numbers), number, name, "thread", slices, process.tgid, waits.tid)
    yield from _calls(process, timeline, number, numbers)


def _waits(waits: Waits, start_ns: int, end_ns: int) -> Iterator[Slice]:
    begins = np.maximum(waits.start_ns, start_ns).tolist()
    ends = np.minimum(waits.end_ns, end_ns).tolist()
    for begin, end, reason in zip(begins, ends, waits.reason.tolist(), strict=True):
        if end > begin:
            yield Slice(begin, end, ACTIVITY_OF_WAIT[Wait(reason)])


def _calls(
    process: ProcessTrack, timeline: Timeline, parent: int, numbers: Iterator[int]
) -> Iterator[Track]:
    by_thread: dict[int, list[Slice]] = {}
    for call in sorted(timeline.calls_of(process.tgid), key=lambda c: (c.start_ns, -c.end_ns)):
        if process.start_ns <= call.start_ns < process.end_ns:
            end_ns = min(call.end_ns, process.end_ns)
            piece = Slice(call.start_ns, end_ns, plain(call.name, _NAME), {"value": call.value})
            by_thread.setdefault(call.tid, []).append(piece)
    for tid, slices in sorted(by_thread.items()):
        name = f"calls of thread {tid}"
        yield Track(next(numbers), parent, name, "calls", _nested(slices), process.tgid, tid)


def _nested(slices: Iterable[Slice]) -> list[Slice]:
    """Calls of two marks may cross where a return was lost: the inner one is cut short."""
    out: list[Slice] = []
    open_ends: list[int] = []
    for piece in slices:
        while open_ends and open_ends[-1] <= piece.start_ns:
            open_ends.pop()
        end_ns = min(piece.end_ns, open_ends[-1]) if open_ends else piece.end_ns
        open_ends.append(end_ns)
        out.append(Slice(piece.start_ns, end_ns, piece.name, piece.facts))
    return out


# -- requests to storage --------------------------------------------------------------------------


def _io(timeline: Timeline, numbers: Iterator[int]) -> Iterator[Track]:
    """Requests to storage overlap: each goes to the first lane that is free."""
    lanes: list[list[Slice]] = []
    free: list[tuple[int, int]] = []
    for piece in _io_slices(timeline):
        if free and free[0][0] <= piece.start_ns:
            lane = heappop(free)[1]
        elif len(lanes) < _IO_LANES:
            lane = len(lanes)
            lanes.append([])
        else:
            continue  # deeper than any queue worth drawing
        lanes[lane].append(piece)
        heappush(free, (max(piece.end_ns, piece.start_ns + 1), lane))
    if lanes:
        group = next(numbers)
        yield Track(group, None, "requests to storage", "group")
        for number, slices in enumerate(lanes, 1):
            yield Track(next(numbers), group, f"in flight {number}", "io", slices)


def _io_slices(timeline: Timeline) -> list[Slice]:
    names = {f.ino: f.path for f in timeline.files.values()}
    found = [
        _io_slice(event, names, int(event["a"]) >> shift)
        for kind, shift in ((Kind.BLOCK, 0), (Kind.REMOTE, 32))
        for event in timeline.of_kind(kind)
    ]
    return sorted(found, key=lambda piece: (piece.start_ns, piece.end_ns))


def _io_slice(event: Any, names: Mapping[int, str], size_bytes: int) -> Slice:
    start_ns = int(event["start_ns"])
    path = names.get(int(event["ino"]), "")
    facts: dict[str, str | int] = {"bytes": size_bytes, "file": plain(path, _NAME)}
    return Slice(start_ns, start_ns + int(event["duration_ns"]), "read", facts)
