"""Threads and their waits: who lived when, and what each was off the CPU for in some window.

Pure. A thread's id may be another's before and after: a life is told by its id and when it began.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ttftprof.columns import Columns
from ttftprof.events import Kind, Records, Wait
from ttftprof.grouping import distinct
from ttftprof.windows import Ints, Windowed

FOREVER = int(np.iinfo(np.int64).max)
_KNOWN, _MOST_KNOWN = 8, 1 << 14  # answers that are kept, and waits in each: 5 MB at most


@dataclass(frozen=True, slots=True)
class Life:
    """One thread, of one process. `since_ns`: when it began, perhaps long before recording did."""

    tid: int
    tgid: int
    since_ns: int
    born_ns: int  # 0: before recording began
    dead_ns: int  # FOREVER: alive at its end


@dataclass(frozen=True, slots=True)
class Waits:
    """The off-CPU intervals of one thread, oldest first: parallel arrays."""

    tid: int
    tgid: int
    start_ns: Ints
    end_ns: Ints
    reason: npt.NDArray[np.uint16]
    dev: npt.NDArray[np.uint32]
    ino: npt.NDArray[np.uint64]
    born_ns: int  # 0: before recording began
    dead_ns: int  # FOREVER: alive at its end


@dataclass(frozen=True)
class ProcessWaits:
    """The off-CPU intervals of a process's threads that reach into a window: parallel arrays, by
    thread and then by start. `thread`: the place of whose it is in `lives`."""

    lives: Sequence[Life]
    thread: npt.NDArray[np.intp]
    start_ns: Ints
    end_ns: Ints
    reason: npt.NDArray[np.uint16]
    dev: npt.NDArray[np.uint32]
    ino: npt.NDArray[np.uint64]

    @cached_property
    def born_ns(self) -> Ints:
        """Of each life."""
        return np.array([life.born_ns for life in self.lives], np.int64)

    @cached_property
    def dead_ns(self) -> Ints:
        """Of each life."""
        return np.array([life.dead_ns for life in self.lives], np.int64)

    def by_thread(self) -> list[Waits]:
        edges = np.searchsorted(self.thread, np.arange(len(self.lives) + 1)).tolist()
        return [
            Waits(
                tid=life.tid,
                tgid=life.tgid,
                start_ns=self.start_ns[first:end],
                end_ns=self.end_ns[first:end],
                reason=self.reason[first:end],
                dev=self.dev[first:end],
                ino=self.ino[first:end],
                born_ns=life.born_ns,
                dead_ns=life.dead_ns,
            )
            for life, (first, end) in zip(self.lives, pairwise(edges), strict=True)
        ]


class LastWaits:
    """A `windows.Note`: of each thread that waited the last start, and whose thread it was then."""

    def __init__(self) -> None:
        self.start_ns: dict[int, int] = {}
        self.tgid: dict[int, int] = {}

    def add(self, records: Columns) -> None:
        tids = distinct(records["tid"])
        last = np.zeros(len(tids), np.intp)
        # Of what is written to one place more than once, the last stays.
        last[np.searchsorted(tids, records["tid"])] = np.arange(len(records["tid"]))
        starts, tgids = records["start_ns"][last].tolist(), records["tgid"][last].tolist()
        for tid, start_ns, tgid in zip(tids.tolist(), starts, tgids, strict=True):
            if start_ns >= self.start_ns.get(tid, -1):
                self.start_ns[tid], self.tgid[tid] = start_ns, tgid


class Threads:
    """Every thread that was followed, and what it waited for."""

    def __init__(
        self,
        waits: Windowed,
        last: LastWaits,
        by_kind: Mapping[Kind, Records],
        rows: Mapping[int, Sequence[Records]],
        armed_ns: int,
        end_ns: int,
    ) -> None:
        """`rows`: the snapshots of each thread, by process."""
        self._waits = waits
        last_rows = _last_rows(rows)
        self.lives = _lives(by_kind, last_rows, last.tgid, armed_ns)
        self._tid = np.array([life.tid for life in self.lives], np.uint32)
        self._since_ns = np.array([life.since_ns for life in self.lives], np.int64)
        self._most_lives = int(np.unique(self._tid, return_counts=True)[1].max(initial=1))
        self._open = _Open.of(self.lives, last_rows, last.start_ns, end_ns)
        # What a process did in a phase, and for how long it lacked cores, is asked one by one.
        self._known: dict[tuple[int, int, int], ProcessWaits] = {}
        self._of_process: dict[int, list[int]] = {}
        for number, life in enumerate(self.lives):
            self._of_process.setdefault(life.tgid, []).append(number)

    def lives_of(self, tgid: int) -> list[Life]:
        """By thread id, of one the earlier before the later."""
        return [self.lives[number] for number in self._of_process.get(tgid, ())]

    def waits_of(self, tgid: int, start_ns: int = 0, end_ns: int = FOREVER) -> ProcessWaits:
        """Of the threads of a process that lived in [start, end), the waits that reach into it."""
        asked = tgid, start_ns, end_ns
        known = self._known.get(asked)
        if known is None:
            known = self._waits_of(*asked)
            if len(self._known) >= _KNOWN:
                self._known.clear()
            if len(known.reason) <= _MOST_KNOWN:
                self._known[asked] = known
        return known

    def _waits_of(self, tgid: int, start_ns: int, end_ns: int) -> ProcessWaits:
        alive = [
            number
            for number in self._of_process.get(tgid, ())
            if self.lives[number].born_ns < end_ns and self.lives[number].dead_ns > start_ns
        ]
        found = self._waits.within(start_ns, end_ns) if alive else self._waits.within(0, 0)
        life, columns = self._with_open(alive, found, start_ns, end_ns)
        place = np.searchsorted(np.array(alive, np.intp), life)
        order = np.lexsort((columns["start_ns"], place))
        reason = columns["flags"][order]
        reason[reason >= len(Wait)] = Wait.OTHER  # one that this version does not know
        return ProcessWaits(
            lives=[self.lives[number] for number in alive],
            thread=place[order],
            start_ns=columns["start_ns"][order],
            end_ns=columns["end_ns"][order],
            reason=reason,
            dev=columns["dev"][order],
            ino=columns["ino"][order],
        )

    def _with_open(
        self, alive: Sequence[int], found: Columns, start_ns: int, end_ns: int
    ) -> tuple[npt.NDArray[np.intp], Columns]:
        """(whose, the waits) of those of some lives, with what they still waited for at the end."""
        wanted = np.zeros(len(self.lives), bool)
        wanted[list(alive)] = True
        life = self._life_of(found["tid"], found["start_ns"])
        mine, still = wanted[life], self._open.within(wanted, start_ns, end_ns)
        return np.concatenate([life[mine], self._open.life[still]]), {
            name: np.concatenate([found[name][mine], column[still]])
            for name, column in self._open.columns.items()
        }

    def _life_of(self, tid: npt.NDArray[Any], start_ns: Ints) -> npt.NDArray[np.intp]:
        """The place in `lives` of each of some waits."""
        first = np.searchsorted(self._tid, tid)
        life = first.copy()
        for later in range(1, self._most_lives):
            at = np.minimum(first + later, len(self.lives) - 1)
            life = np.where((self._tid[at] == tid) & (self._since_ns[at] <= start_ns), at, life)
        return life


# -- lives ----------------------------------------------------------------------------------------


_Rows = Mapping[tuple[int, int], Any]  # the last snapshot by thread id and when it began


def _last_rows(rows: Mapping[int, Sequence[Records]]) -> _Rows:
    ends = sorted((own[-1] for mine in rows.values() for own in mine), key=lambda row: row["ns"])
    return {(int(row["tid"]), int(row["since_ns"])): row for row in ends}


def _lives(
    by_kind: Mapping[Kind, Records], last_rows: _Rows, owners: Mapping[int, int], armed_ns: int
) -> list[Life]:
    """By thread id, of one the earlier before the later. Snapshots and ends name a life by when it
    began; a thread of which there is neither is one of the process it waited in, in `owners`."""
    ends: dict[tuple[int, ...], Any] = {
        (int(e["tid"]), int(e["start_ns"])): e for e in by_kind[Kind.THREAD_END]
    }
    births = {int(e["tid"]): int(e["start_ns"]) for e in by_kind[Kind.FORK]}
    told = {*last_rows, *ends}
    silent = owners.keys() - {tid for tid, _ in told}
    lives: list[Life] = []
    for tid, since_ns in sorted(told | {(tid, births.get(tid, 0)) for tid in silent}):
        row, end = last_rows.get((tid, since_ns)), ends.get((tid, since_ns))
        fact: Any = end if row is None else row
        life = Life(
            tid=tid,
            tgid=owners[tid] if fact is None else int(fact["tgid"]),
            since_ns=since_ns,
            born_ns=since_ns if since_ns > armed_ns else 0,
            dead_ns=FOREVER if end is None else since_ns + int(end["duration_ns"]),
        )
        if lives and lives[-1].tid == tid:
            # A life whose end was not seen ended at the latest when its id was another's.
            lives[-1] = replace(lives[-1], dead_ns=min(lives[-1].dead_ns, since_ns))
        lives.append(life)
    return lives


@dataclass(frozen=True, slots=True)
class _Open:
    """The waits that the last snapshots of threads show and no event ended."""

    life: npt.NDArray[np.intp]
    columns: Columns

    @classmethod
    def of(
        cls, lives: Sequence[Life], last_rows: _Rows, last_ns: Mapping[int, int], end_ns: int
    ) -> Self:
        """`last_ns`: when the last recorded wait of each thread began."""
        found = list(_open_waits(lives, last_rows, last_ns, end_ns))
        columns = {
            name: np.array([wait[name] for _, wait in found], dtype)
            for name, dtype in _OPEN_FIELDS.items()
        }
        return cls(np.array([number for number, _ in found], np.intp), columns)

    def within(
        self, wanted: npt.NDArray[np.bool_], start_ns: int, end_ns: int
    ) -> npt.NDArray[np.bool_]:
        """Which are of wanted lives and reach into [start, end)."""
        reaches = (self.columns["start_ns"] < end_ns) & (self.columns["end_ns"] > start_ns)
        of_wanted: npt.NDArray[np.bool_] = wanted[self.life] & reaches
        return of_wanted


_OPEN_FIELDS: Mapping[str, type[np.integer[Any]]] = {
    "start_ns": np.int64,
    "end_ns": np.int64,
    "flags": np.uint16,
    "dev": np.uint32,
    "ino": np.uint64,
}


def _open_waits(
    lives: Sequence[Life], last_rows: _Rows, last_ns: Mapping[int, int], end_ns: int
) -> Iterator[tuple[int, Mapping[str, int]]]:
    for number, life in enumerate(lives):
        row = last_rows.get((life.tid, life.since_ns))
        if row is None or life.dead_ns != FOREVER or not int(row["off_ns"]):
            continue
        began = int(row["off_ns"])
        if last_ns.get(life.tid, -1) >= max(began, life.since_ns):
            continue
        storage = int(row["off_reason"]) == Wait.STORAGE
        yield (
            number,
            {
                "start_ns": began,
                "end_ns": max(end_ns, began),
                "flags": int(row["off_reason"]) & 0xFFFF,
                "dev": int(row["file_dev"]) if storage else 0,
                "ino": int(row["file_ino"]) if storage else 0,
            },
        )
