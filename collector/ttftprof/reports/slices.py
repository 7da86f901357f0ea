"""Tracks of nested slices and counters: what trace viewers show, for every trace format alike.

Guarantees: the slices of a track nest (each ends no later than the one it lies in) and come in the
order in which a stack sees them begin; every track comes after its parent; names are harmless;
slices are made as they are asked for, never all of a recording at once. Pure; nothing is condensed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count

import numpy as np
import numpy.typing as npt

from ttftprof import python_frames
from ttftprof.activities import ACTIVITY_OF_WAIT
from ttftprof.events import Kind, Records, Wait, duration_end
from ttftprof.gpu_facts import DriverSpan
from ttftprof.model import Part, Phase, ProcessTrack, Report, Request, Series
from ttftprof.reports import html_data, words
from ttftprof.reports.safe import plain
from ttftprof.threads import Waits
from ttftprof.timeline import Timeline
from ttftprof.windows import Ints

_IO_LANES = 32
_NO_LANE = _IO_LANES
_AT_ONCE = 4_096  # slices whose numbers are made into Python's
_NAME = 200
_WAITS = [(ACTIVITY_OF_WAIT[wait], dict[str, str | int]()) for wait in Wait]


@dataclass(frozen=True, slots=True)
class Slice:
    start_ns: int
    end_ns: int
    name: str
    facts: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Slices:
    """Slices that are made anew each time they are gone through."""

    make: Callable[[], Iterator[Slice]]

    def __iter__(self) -> Iterator[Slice]:
        return self.make()


Named = tuple[str, Mapping[str, str | int]]
"""The name and the facts of a slice."""


@dataclass(frozen=True, slots=True)
class Run:
    """Slices as columns, by start; `named[what[i]]` is what the one of `start_ns[i]` is called."""

    start_ns: Ints
    end_ns: Ints
    what: Ints
    named: Sequence[Named]

    def __iter__(self) -> Iterator[Slice]:
        columns = (self.start_ns.tolist(), self.end_ns.tolist(), self.what.tolist())
        for start_ns, end_ns, what in zip(*columns, strict=True):
            yield Slice(start_ns, end_ns, *self.named[what])


@dataclass(frozen=True, slots=True)
class Runs:
    """Slices by the million, some thousand at a time. `apart`: none begins before the one before it
    has ended, so that they can be written as they stand."""

    make: Callable[[], Iterator[Run]]
    apart: bool

    def __iter__(self) -> Iterator[Slice]:
        for run in self.make():
            yield from run


@dataclass(frozen=True, slots=True)
class Track:
    """`number` is unique and not 0; `parent` is another's. `kind`: group, request, process,
    thread, calls, python, io."""

    number: int
    parent: int | None
    name: str
    kind: str
    slices: Iterable[Slice] = ()
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
        for part, pieces in sorted(_parts(request).items()):
            yield Track(next(numbers), number, f"{part} of {name}", "request", pieces)


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


def _parts(request: Request) -> dict[str, list[Slice]]:
    """{part: a slice for each phase that has it}: parts overlap, so each has a track."""
    found: dict[str, list[Slice]] = {}
    for phase in request.phases:
        for part in phase.parts:
            facts = {"in": phase.phase, "spent ns": part.spent_ns, **_evidence(part)}
            found.setdefault(part.part, []).append(
                Slice(part.start_ns, part.end_ns, part.part, facts)
            )
    return found


def _evidence(phase: Phase | Part) -> dict[str, str | int]:
    told = {f"evidence {n}": html_data.evidence_text(e) for n, e in enumerate(phase.evidence, 1)}
    return {"basis": phase.basis, **told}


# -- processes and threads ------------------------------------------------------------------------


def _process(process: ProcessTrack, timeline: Timeline, numbers: Iterator[int]) -> Iterator[Track]:
    number = next(numbers)
    label = plain(process.label, _NAME)
    life = Slice(process.start_ns, process.end_ns, label, {"argv": plain(" ".join(process.argv))})
    yield Track(number, None, label, "process", [life], process.tgid)
    threads = timeline.threads.waits_of(process.tgid, process.start_ns, process.end_ns)
    for waits in threads.by_thread():
        slices = _waits(waits, process.start_ns, process.end_ns)
        name = f"thread {waits.tid}"
        yield Track(next(numbers), number, name, "thread", slices, process.tgid, waits.tid)
    yield from _calls(process, timeline, number, numbers)
    for tid, rate_hz, frames in python_frames.threads(timeline, process):
        name = f"Python of thread {tid}, {rate_hz} looks a second"
        looks = Slices(partial(_frames, frames))
        yield Track(next(numbers), number, name, "python", looks, process.tgid, tid)


def _frames(frames: python_frames.Frames) -> Iterator[Slice]:
    for start_ns, end_ns, name in frames:
        yield Slice(start_ns, end_ns, plain(name, _NAME))


def _waits(waits: Waits, start_ns: int, end_ns: int) -> Runs:
    """What a thread waited for, cut to the life of its process."""
    begins, ends = np.maximum(waits.start_ns, start_ns), np.minimum(waits.end_ns, end_ns)
    apart = bool((begins[1:] >= ends[:-1]).all())

    def make() -> Iterator[Run]:
        for first in range(0, len(begins), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            real = ends[part] > begins[part]
            what = waits.reason[part][real].astype(np.int64)
            yield Run(begins[part][real], ends[part][real], what, _WAITS)

    return Runs(make, apart)


def _calls(
    process: ProcessTrack, timeline: Timeline, parent: int, numbers: Iterator[int]
) -> Iterator[Track]:
    """A track for each thread that called into the engine, and for each that called the driver."""
    engine = [
        (c.tid, Slice(c.start_ns, c.end_ns, plain(c.name, _NAME), {"value": c.value}))
        for c in timeline.calls_of(process.tgid)
    ]
    driver = [
        (c.tid, Slice(c.start_ns, c.end_ns, plain(c.name, _NAME), _driver_facts(c)))
        for c in timeline.gpu.calls.get(process.tgid, ())
    ]
    for kind, calls in (("calls", engine), ("driver calls", driver)):
        for tid, slices in sorted(_by_thread(process, calls).items()):
            name = f"{kind} of thread {tid}"
            yield Track(next(numbers), parent, name, "calls", _nested(slices), process.tgid, tid)


def _by_thread(process: ProcessTrack, calls: Iterable[tuple[int, Slice]]) -> dict[int, list[Slice]]:
    """The calls that began while the process lived, cut to its life, the outer before the inner."""
    found: dict[int, list[Slice]] = {}
    for tid, call in sorted(calls, key=lambda c: (c[1].start_ns, -c[1].end_ns)):
        if process.start_ns <= call.start_ns < process.end_ns:
            piece = replace(call, end_ns=min(call.end_ns, process.end_ns))
            found.setdefault(tid, []).append(piece)
    return found


def _driver_facts(call: DriverSpan) -> dict[str, str | int]:
    result = "not returned" if call.result is None else call.result
    return {"bytes": call.size_bytes, "result": result, "stage": call.group}


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
    asked = _asked(timeline)
    lanes = _lanes(asked)
    used = np.unique(lanes[lanes != _NO_LANE]).tolist()
    if used:
        paths = _paths_by_inode(timeline)
        group = next(numbers)
        yield Track(group, None, "requests to storage", "group")
        for lane in used:
            where = np.flatnonzero(lanes == lane).astype(np.int32)
            slices = Runs(partial(_reads, asked, where, paths), apart=True)
            yield Track(next(numbers), group, f"in flight {lane + 1}", "io", slices)


def _paths_by_inode(timeline: Timeline) -> dict[int, str]:
    """A request to a disk names an inode, not its file system: one of two files names neither."""
    files = timeline.files.values()
    times = Counter(file.ino for file in files)
    return {file.ino: plain(file.path, _NAME) for file in files if times[file.ino] == 1}


_ASKED = np.dtype([("start_ns", "<i8"), ("end_ns", "<i8"), ("ino", "<u8"), ("bytes", "<i8")])


def _asked(timeline: Timeline) -> Records:
    """Requests to storage of all kinds by start, then end."""
    blocks, remote = timeline.blocks.everything(), timeline.of_kind(Kind.REMOTE)
    found = np.empty(len(blocks["ino"]) + len(remote), _ASKED)
    of_disks, of_remote = found[: len(blocks["ino"])], found[len(blocks["ino"]) :]
    for name in ("start_ns", "end_ns", "ino"):
        of_disks[name] = blocks[name]
    of_disks["bytes"] = blocks["a"]
    of_remote["start_ns"], of_remote["end_ns"] = remote["start_ns"], duration_end(remote)
    of_remote["ino"], of_remote["bytes"] = remote["ino"], remote["a"] >> np.uint64(32)
    ordered: Records = found[np.lexsort((found["end_ns"], found["start_ns"]))]
    return ordered


def _lanes(asked: Records) -> Records:
    """The lane of each request; `_NO_LANE` for what is deeper than any queue worth drawing."""
    lanes = np.full(len(asked), _NO_LANE, np.uint8)
    free: list[tuple[int, int]] = []
    used = 0
    for first in range(0, len(asked), _AT_ONCE):
        part = asked[first : first + _AT_ONCE]
        stamps = zip(part["start_ns"].tolist(), part["end_ns"].tolist(), strict=True)
        for number, (start_ns, end_ns) in enumerate(stamps, first):
            if free and free[0][0] <= start_ns:
                lane = heappop(free)[1]
            elif used < _IO_LANES:
                lane, used = used, used + 1
            else:
                continue
            lanes[number] = lane
            heappush(free, (max(end_ns, start_ns + 1), lane))
    return lanes


def _reads(asked: Records, where: npt.NDArray[np.int32], paths: Mapping[int, str]) -> Iterator[Run]:
    for first in range(0, len(where), _AT_ONCE):
        part = asked[where[first : first + _AT_ONCE]]
        places: dict[tuple[int, int], int] = {}  # of what was asked for, by inode and size
        pairs = zip(part["ino"].tolist(), part["bytes"].tolist(), strict=True)
        what = [places.setdefault(pair, len(places)) for pair in pairs]
        named: list[Named] = [
            ("read", {"bytes": size, "file": paths.get(ino, "")}) for ino, size in places
        ]
        yield Run(part["start_ns"], part["end_ns"], np.array(what, np.int64), named)
