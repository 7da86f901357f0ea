"""Kernel records of the kinds that come by the million, read window by window.

A recording of any length is gone through once, to learn what lies where in it. After that a
question about some window reads the pages that reach into it, of which the last few are kept: what
is held in memory grows with the window and not with the recording.

Records stand about in the order in which they ended. One that took long may have begun pages
before; these are few, for a thread has no more than some a second, and are held all the time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from ttftprof.columns import Columns, as_records, chosen, length, of_records
from ttftprof.events import EVENT, Kind, Records
from ttftprof.grouping import distinct

Ints = npt.NDArray[np.int64]

LONG_NS = 250_000_000
IMPOSSIBLE_NS = 1 << 62  # 146 years of uptime: no clock says so, only a damaged record
_KEPT_BYTES = 48 << 20  # of pages, beside those that a question needs
_LENGTH_CLASS_BITS = 2  # long records are kept by length: of one class none is 4 times another's
# What is kept of each kind, beside when it began and ended.
_FIELDS: Mapping[Kind, tuple[str, ...]] = {
    Kind.OFFCPU: ("tid", "tgid", "flags", "dev", "ino"),
    Kind.BLOCK: ("tid", "tgid", "dev", "ino", "a", "b"),
}
BULKY = tuple(_FIELDS)


class Note(Protocol):
    """Something to be learnt of all records of a kind while they pass by."""

    def add(self, records: Columns) -> None: ...


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Records by start, none of which takes longer than `longest_ns`."""

    columns: Columns
    longest_ns: int

    @classmethod
    def of(cls, columns: Columns) -> Self:
        start_ns = columns["start_ns"]
        if not bool((start_ns[1:] >= start_ns[:-1]).all()):
            order = np.argsort(start_ns, kind="stable")
            columns = chosen(columns, order)
        took = columns["end_ns"] - columns["start_ns"]
        return cls(columns, int(took.max(initial=0)))

    def __len__(self) -> int:
        return len(self.columns["start_ns"])

    @property
    def size_bytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())

    def overlapping(self, start_ns: int, end_ns: int) -> Columns:
        part = self._between(start_ns - self.longest_ns, end_ns)
        within = self.columns["end_ns"][part] > start_ns
        if bool(within.all()):
            return {name: column[part] for name, column in self.columns.items()}
        return chosen(self.columns, part.start + np.flatnonzero(within))

    def begun(self, start_ns: int, end_ns: int) -> Columns:
        part = self._between(start_ns, end_ns)
        return {name: column[part] for name, column in self.columns.items()}

    def _between(self, start_ns: int, end_ns: int) -> slice:
        return slice(*np.searchsorted(self.columns["start_ns"], [start_ns, end_ns]).tolist())


_Page = Mapping[Kind, _Stretch]


@dataclass(frozen=True, slots=True)
class _Reach:
    """The first start, the last start and the last end of some records."""

    count: int
    first_ns: int
    last_ns: int
    until_ns: int

    @classmethod
    def of(cls, columns: Columns) -> Self:
        start_ns, end_ns = columns["start_ns"], columns["end_ns"]
        if not len(start_ns):
            return cls(0, IMPOSSIBLE_NS, -1, -1)
        return cls(len(start_ns), int(start_ns.min()), int(start_ns.max()), int(end_ns.max()))


class Windowed:
    """The records of one kind. What its methods return is ordered by start: `start_ns`, `end_ns`
    and the fields of `EVENT` that matter of this kind."""

    def __init__(self, kind: Kind, pages: _Pages, reach: Sequence[_Reach], far: Columns) -> None:
        """`reach`: of each page without those that took long, which are `far`."""
        self._kind, self._pages = kind, pages
        self._far = _by_length(far)
        self._count = sum(r.count for r in reach) + len(far["start_ns"])
        self._first_ns = np.array([r.first_ns for r in reach], np.int64)
        self._last_ns = np.array([r.last_ns for r in reach], np.int64)
        self._until_ns = np.array([r.until_ns for r in reach], np.int64)

    def __len__(self) -> int:
        return self._count

    @property
    def reach(self) -> tuple[int, int] | None:
        """(first start, last end), None if there are none."""
        if not self._count:
            return None
        far = [_Reach.of(stretch.columns) for stretch in self._far]
        return (
            min([*self._first_ns.tolist(), *(f.first_ns for f in far)]),
            max([*self._until_ns.tolist(), *(f.until_ns for f in far)]),
        )

    def within(self, start_ns: int, end_ns: int) -> Columns:
        """Those that reach into [start, end)."""
        hit = (self._first_ns < end_ns) & (self._until_ns > start_ns)
        return self._joined(s.overlapping(start_ns, end_ns) for s in self._stretches(hit))

    def begun(self, start_ns: int, end_ns: int) -> Columns:
        """Those that began in [start, end)."""
        hit = (self._first_ns < end_ns) & (self._last_ns >= start_ns)
        return self._joined(s.begun(start_ns, end_ns) for s in self._stretches(hit))

    def everything(self) -> Columns:
        return self.begun(0, IMPOSSIBLE_NS)

    def records(self) -> Iterator[Records]:
        """All of them as `EVENT`, in parts, as they were written."""
        for page in self._pages.source:
            own = _possible(page)
            yield as_records(chosen(own, own["kind"] == self._kind), EVENT)

    def windows(self, share: float = 1.0) -> Iterator[tuple[int, int]]:
        """[start, end) of windows that together hold all records, some thousand in each; or such a
        share of them, evenly spread."""
        firsts = distinct(self._first_ns[self._last_ns >= 0])
        edges = [0, *firsts[1:].tolist(), IMPOSSIBLE_NS]
        windows = list(pairwise(edges))
        number = max(round(len(windows) * min(share, 1.0)), 1)
        yield from (windows[n * len(windows) // number] for n in range(number))

    def _stretches(self, hit: npt.NDArray[np.bool_]) -> Iterator[_Stretch]:
        for number in np.flatnonzero(hit).tolist():
            yield self._pages[number][self._kind]
        yield from self._far

    def _joined(self, found: Iterable[Columns]) -> Columns:
        pieces = [piece for piece in found if len(piece["start_ns"])]
        if not pieces:
            return _none_of(self._kind)
        if len(pieces) == 1:
            return pieces[0]
        return _Stretch.of(_concatenated(pieces)).columns


class _Pages:
    """The pages of a recording, split by kind; the last ones asked for are kept."""

    def __init__(self, source: Sequence[Columns]) -> None:
        self.source = source
        self._kept: OrderedDict[int, _Page] = OrderedDict()
        self._kept_bytes = 0

    def __getitem__(self, number: int) -> _Page:
        page = self._kept.get(number)
        if page is None:
            page, *_ = _split(self.source[number])
            self.keep(number, page)
        else:
            self._kept.move_to_end(number)
        return page

    def keep(self, number: int, page: _Page) -> None:
        self._kept[number] = page
        self._kept_bytes += _size_bytes(page)
        while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= _size_bytes(self._kept.popitem(last=False)[1])


@dataclass(frozen=True, slots=True)
class Events:
    """All kernel records of a recording. `rest`: those of other kinds, as they were written;
    `impossible`: how many were left out because no clock ever showed their stamps."""

    bulky: Mapping[Kind, Windowed]
    rest: Records
    impossible: int


def read(source: Sequence[Columns], notes: Mapping[Kind, Note] | None = None) -> Events:
    """Goes through all pages of `EVENT` once."""
    pages = _Pages(source)
    near: dict[Kind, list[_Reach]] = {kind: [] for kind in BULKY}
    far: dict[Kind, list[Columns]] = {kind: [_none_of(kind)] for kind in BULKY}
    rest = [np.empty(0, EVENT)]
    impossible = 0
    for number, records in enumerate(source):
        page, took_long, others, left_out = _split(records)
        pages.keep(number, page)
        rest.append(others)
        impossible += left_out
        for kind in BULKY:
            near[kind].append(_Reach.of(page[kind].columns))
            far[kind].append(took_long[kind])
            for columns in (page[kind].columns, took_long[kind]):
                if notes and kind in notes and len(columns["start_ns"]):
                    notes[kind].add(columns)
    bulky = {k: Windowed(k, pages, near[k], _concatenated(far[k])) for k in BULKY}
    return Events(bulky, np.concatenate(rest), impossible)


def _split(records: Columns) -> tuple[_Page, Mapping[Kind, Columns], Records, int]:
    """(by kind what is short, what took long; records of other kinds; how many cannot be)."""
    sound = _possible(records)
    kinds, others = sound["kind"], np.ones(length(sound), bool)
    page, far = {}, {}
    for kind in BULKY:
        own = kinds == kind
        others &= ~own
        columns = _of_kind(sound, np.flatnonzero(own), kind)
        long = columns["end_ns"] - columns["start_ns"] > LONG_NS
        far[kind] = chosen(columns, long)
        page[kind] = _Stretch.of(chosen(columns, ~long) if bool(long.any()) else columns)
    rest = as_records(chosen(sound, others), EVENT)
    return page, far, rest, length(records) - length(sound)


def _possible(records: Columns) -> Columns:
    wrong = _impossible(records, "start_ns", "duration_ns")
    return chosen(records, ~wrong) if bool(wrong.any()) else records


def possible(records: Records, *stamps: str) -> tuple[Records, int]:
    """(the records without those whose stamps no clock ever showed, the number of those)."""
    wrong = _impossible(records, *stamps)
    number = int(np.count_nonzero(wrong))
    return (records[~wrong] if number else records), number


def _impossible(records: Columns | Records, *stamps: str) -> npt.NDArray[np.bool_]:
    wrong = np.zeros(len(records[stamps[0]]), bool)
    for name in stamps:
        wrong |= records[name] >= IMPOSSIBLE_NS
    return wrong


def _of_kind(records: Columns, where: npt.NDArray[np.intp], kind: Kind) -> Columns:
    names = ("start_ns", "duration_ns", *_FIELDS[kind])
    fields = chosen({name: records[name] for name in names}, where)
    start_ns = fields["start_ns"].view(np.int64)
    end_ns = start_ns + fields["duration_ns"].view(np.int64)
    return {"start_ns": start_ns, "end_ns": end_ns, **{n: fields[n] for n in _FIELDS[kind]}}


def _none_of(kind: Kind) -> Columns:
    return _of_kind(of_records(np.empty(0, EVENT)), np.empty(0, np.intp), kind)


def _concatenated(pieces: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _by_length(long: Columns) -> list[_Stretch]:
    """Of each class those that overlap a window began not long before it, whatever others take."""
    took = long["end_ns"] - long["start_ns"]
    classes = np.log2(np.maximum(took / LONG_NS, 1)).astype(np.int64) // _LENGTH_CLASS_BITS
    masks = (classes == number for number in distinct(classes).tolist())
    return [_Stretch.of(chosen(long, own)) for own in masks]


def _size_bytes(page: _Page) -> int:
    return sum(stretch.size_bytes for stretch in page.values())
