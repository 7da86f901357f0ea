"""The recording of the last moments, in memory: for who watches for days and keeps nothing.

Takes what a recorder writes and shows any interval that is still there as the recording that a
recorder started at its beginning would have made: what came before is known as such a recorder
finds it when it begins (who runs, what they hold, how counters stand). So the one analysis serves
both. Guarantees: what no pending request needs is let go, but for that state; the rest is bounded
by `MAX_BYTES`, and what that pushes out is counted as lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ttftprof.clock import NS_PER_S, now_ns
from ttftprof.columns import Columns, of_records
from ttftprof.events import EVENT, Kind, Records
from ttftprof.recording import STREAMS, Source, Writer

KEEP_NS = 30 * NS_PER_S  # a restart's old server ends before anything tells that one has begun
MAX_BYTES = 256 << 20
PUSHED_OUT = "records pushed out of memory"

Interval = tuple[int, int]
"""[since_ns, until_ns]"""

Fact = tuple[str, int, Mapping[str, Any]]

# What tells one thing's rows, and facts, from another's; of what has no identity nothing stays.
_ROW_OF = {
    "threads": ("tid", "since_ns"),
    "files": ("dev", "ino"),
    "gpu_processes": ("device", "tgid"),
}
_FACT_OF = {
    "process": ("pid",),
    "file": ("dev", "ino"),
    "library": ("path",),
    "gpu": ("index",),
    "gpu_lost": ("index",),
    "gpu_refused": ("device", "call"),
}


@dataclass(frozen=True, slots=True)
class _Batch:
    """What came in between two looks at the kernel."""

    stream: str
    from_ns: int
    to_ns: int
    records: Records

    def meets(self, interval: Interval) -> bool:
        return self.from_ns <= interval[1] and self.to_ns >= interval[0]


class Rolling:
    """A `recording.Sink` that forgets, and a source of `recording.Facts` (`view`)."""

    # Never on a mount that is measured, and always there.
    path = Path("/proc")
    filesystem = "memory"

    def __init__(self) -> None:
        self.committed_ns = 0
        # Until somebody takes them: exchanges, and (process, when) of executions and exits.
        self.ended: list[Mapping[str, Any]] = []
        self.executed: list[tuple[int, int]] = []
        self.exited: list[int] = []
        self._meta: dict[str, Any] = {}
        self._sources: dict[str, Source] = {}
        self._lost: dict[str, int] = {}
        self._batches: list[_Batch] = []
        self._passing: dict[str, Records] = {}
        self._facts: list[Fact] = []
        self._state = _State()

    # -- what a recorder writes -----------------------------------------------------------------

    def set_meta(self, key: str, value: Any) -> None:
        self._meta[key] = value

    def add_batch(self, stream: str, records: Records) -> None:
        if len(records):
            self._batches.append(_Batch(stream, self.committed_ns, now_ns(), records))
        if stream == "events":
            self.executed += _last_by_tgid(records, Kind.EXEC).items()
            self.exited += _last_by_tgid(records, Kind.PROCESS_EXIT)

    def set_passing(self, stream: str, records: Records) -> None:
        self._passing[stream] = records

    def add_fact(self, kind: str, ns: int, fact: Mapping[str, Any]) -> None:
        self._facts.append((kind, ns, fact))
        if kind == "exchange":
            self.ended.append(fact)

    def set_source(self, source: Source) -> None:
        self._sources[source.name] = source

    def set_lost(self, place: str, count: int) -> None:
        self._lost[place] = count

    def commit(self) -> None:
        self.committed_ns = now_ns()

    def close(self, complete: bool) -> None:
        self.commit()

    # -- what stays -----------------------------------------------------------------------------

    @property
    def lost(self) -> Mapping[str, int]:
        return {place: count for place, count in self._lost.items() if count}

    @property
    def size_bytes(self) -> int:
        """Of the records; the rest is small."""
        return sum(b.records.nbytes for b in self._batches) + self._state.size_bytes

    def prune(self, needed: Iterable[Interval]) -> None:
        """Forgets what is older than `KEEP_NS` and outside these intervals."""
        wanted = [(now_ns() - KEEP_NS, now_ns()), *needed]
        kept = [b for b in self._batches if any(map(b.meets, wanted))]
        dropped = [b for b in self._batches if not any(map(b.meets, wanted))]
        while kept and sum(b.records.nbytes for b in kept) > MAX_BYTES:
            dropped.append(kept.pop(0))
            before = self._lost.get(PUSHED_OUT, 0)
            self._lost[PUSHED_OUT] = before + len(dropped[-1].records)
        old = [f for f in self._facts if not _meets(f, wanted)]
        if dropped or old:
            self._state = self._state.after(dropped, old)
            self._batches = kept
            self._facts = [f for f in self._facts if _meets(f, wanted)]

    def view(self, interval: Interval, pending: Sequence[Mapping[str, Any]] = ()) -> View:
        """The recording of an interval. `pending`: exchanges that have not ended."""
        inside = [b for b in self._batches if b.meets(interval)]
        before = [b for b in self._batches if b.to_ns < interval[0]]
        old = [f for f in self._facts if _over_ns(f) < interval[0]]
        state = self._state.after(before, old)
        first_ns = min((b.from_ns for b in inside), default=interval[0])
        began_ns = max(int(self._meta.get("armed_ns", 0)), first_ns)
        meta = self._meta | {
            "start_ns": began_ns,
            "armed_ns": began_ns,
            "end_ns": max([interval[1], *(b.to_ns for b in inside)]),
            "complete": True,
        }
        facts = [
            *state.facts,
            *(f for f in self._facts if _meets(f, [(interval[0], meta["end_ns"])])),
        ]
        facts += [("exchange", int(e["start_ns"]), e) for e in pending]
        passing = [_Batch(name, *interval, rows) for name, rows in self._passing.items()]
        batches = [*state.batches(), *inside, *passing]
        return View(meta, batches, facts, list(self._sources.values()), dict(self.lost))


def _over_ns(fact: Fact) -> int:
    """When what it tells of was over; exchanges are stamped with their beginning."""
    kind, ns, told = fact
    return max(int(told.get("end_ns") or ns), ns) if kind == "exchange" else ns


def _meets(fact: Fact, intervals: Iterable[Interval]) -> bool:
    return any(since <= _over_ns(fact) and fact[1] <= until for since, until in intervals)


class View:
    """A `recording.Facts` of some interval; it can also be kept as a file."""

    path = Path("memory")

    def __init__(
        self,
        meta: dict[str, Any],
        batches: Sequence[_Batch],
        facts: Sequence[Fact],
        sources: list[Source],
        lost: dict[str, int],
    ) -> None:
        self.meta = meta
        self._batches, self._facts = batches, facts
        self._sources, self._lost = sources, lost

    def stream(self, stream: str) -> Records:
        parts = [b.records for b in self._batches if b.stream == stream]
        return np.concatenate(parts) if parts else np.empty(0, STREAMS[stream])

    def pages(self, stream: str) -> list[Columns]:
        return [of_records(self.stream(stream))]

    def has_field(self, stream: str, field: str) -> bool:
        return field in (STREAMS[stream].names or ())

    def facts(self, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
        for name, ns, fact in self._facts:
            if name == kind:
                yield ns, dict(fact)

    def sources(self) -> list[Source]:
        return self._sources

    def lost(self) -> dict[str, int]:
        return self._lost

    def save(self, path: Path, why: str) -> None:
        """As a recording like any other. Raises `OutputError`."""
        writer = Writer(path)
        try:
            for key, value in (self.meta | {"ended_because": why}).items():
                writer.set_meta(key, value)
            for batch in self._batches:
                writer.add_batch(batch.stream, batch.records)
            for kind, ns, fact in self._facts:
                writer.add_fact(kind, ns, fact)
            for source in self._sources:
                writer.set_source(source)
            for place, count in self._lost.items():
                writer.set_lost(place, count)
            writer.close(complete=True)
        except BaseException:
            writer.discard()
            raise


# -- how things stood before ----------------------------------------------------------------------


def _no_rows() -> dict[str, Records]:
    return {stream: np.empty(0, STREAMS[stream]) for stream in _ROW_OF}


@dataclass(frozen=True, slots=True)
class _State:
    """What a recorder that begins finds: the last row of each counter, who runs, what they hold."""

    rows: Mapping[str, Records] = field(default_factory=_no_rows)
    held: Records = field(default_factory=lambda: np.empty(0, EVENT))
    facts: tuple[Fact, ...] = ()

    @property
    def size_bytes(self) -> int:
        return self.held.nbytes + sum(rows.nbytes for rows in self.rows.values())

    def batches(self) -> list[_Batch]:
        streams = {"events": self.held, **self.rows}
        return [_Batch(name, 0, 0, records) for name, records in streams.items() if len(records)]

    def after(self, batches: Sequence[_Batch], facts: Sequence[Fact]) -> _State:
        """How things stood once this had happened, too."""
        events = _joined([b.records for b in batches if b.stream == "events"], EVENT)
        gone = _last_by_tgid(events, Kind.PROCESS_EXIT)
        rows = {}
        for stream, names in _ROW_OF.items():
            parts = [self.rows[stream], *(b.records for b in batches if b.stream == stream)]
            rows[stream] = _last_of_each(_joined(parts, STREAMS[stream]), names)
        rows["threads"] = _of_the_living(rows["threads"], "ns", gone)
        rows["threads"] = _without_ended(rows["threads"], events)
        return _State(rows, self._held_after(events, gone), self._facts_after(facts, gone))

    def _held_after(self, events: Records, gone: Mapping[int, int]) -> Records:
        """Files that were opened are held from then on; a new program holds none of the old's."""
        opened = events[np.isin(events["kind"], [Kind.OPEN, Kind.HELD])].copy()
        opened["kind"] = Kind.HELD
        held = _last_of_each(_joined([self.held, opened], EVENT), ("tgid", "dev", "ino"))
        held = _of_the_living(held, "start_ns", gone)
        return _of_the_living(held, "start_ns", _last_by_tgid(events, Kind.EXEC))

    def _facts_after(self, facts: Sequence[Fact], gone: Mapping[int, int]) -> tuple[Fact, ...]:
        found: dict[tuple[Any, ...], Fact] = {}
        for kind, ns, fact in (*self.facts, *facts):
            if kind == "exchange":
                if fact.get("first_token_ns"):
                    # That a process has answered once tells its load from a switch.
                    known = {**fact, "generates": False, "notes": []}
                    found.setdefault((kind, fact["tgid"]), (kind, ns, known))
            elif kind in _FACT_OF:
                found[kind, *(fact.get(name) for name in _FACT_OF[kind])] = (kind, ns, fact)
        owners = {"process": "pid", "exchange": "tgid"}
        return tuple(
            (kind, ns, fact)
            for kind, ns, fact in found.values()
            if kind not in owners or ns > gone.get(int(fact[owners[kind]]), -1)
        )


def _joined(parts: Sequence[Records], dtype: np.dtype[Any]) -> Records:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _last_of_each(records: Records, names: Sequence[str]) -> Records:
    """The last record of each identity, in their order."""
    backwards = records[::-1]
    _, first = np.unique(backwards[list(names)], return_index=True)
    return backwards[np.sort(first)][::-1]


def _last_by_tgid(events: Records, kind: Kind) -> dict[int, int]:
    found = events[events["kind"] == kind]
    return dict(zip(found["tgid"].tolist(), found["start_ns"].tolist(), strict=True))


def _of_the_living(records: Records, stamp: str, gone: Mapping[int, int]) -> Records:
    """Without what was so before its process ended; a pid may be another's after that."""
    for tgid in set(np.unique(records["tgid"]).tolist()) & gone.keys():
        records = records[(records["tgid"] != tgid) | (records[stamp] > gone[tgid])]
    return records


def _without_ended(rows: Records, events: Records) -> Records:
    ends = events[events["kind"] == Kind.THREAD_END]
    dead = set(zip(ends["tid"].tolist(), ends["start_ns"].tolist(), strict=True))
    pairs = zip(rows["tid"].tolist(), rows["since_ns"].tolist(), strict=True)
    return rows[[pair not in dead for pair in pairs]] if dead and len(rows) else rows
