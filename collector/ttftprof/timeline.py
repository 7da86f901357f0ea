"""Facts put in order: processes, threads, files, calls and requests of one recording.

Pure: a recording in, values out. It joins what belongs together (fork with exec, enter with exit,
connection with request) and concludes nothing. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ttftprof import gpu_facts, python_facts, remote, uncached, windows
from ttftprof.clock import Jump
from ttftprof.columns import Columns
from ttftprof.connections import OwnConnections
from ttftprof.engines.catalog import (
    Engine,
    engine_named,
    is_workers,
    looks_like_weights,
    option_of,
)
from ttftprof.engines.markers import SYMBOL_MARKS
from ttftprof.errors import RecordingError
from ttftprof.events import FILE_ROW, Kind, Records, dev_numbers, duration_end
from ttftprof.gpu_facts import GpuFacts
from ttftprof.grouping import distinct, split_by
from ttftprof.model import OUTCOMES, Relief
from ttftprof.python_facts import PythonFacts
from ttftprof.recording import LOOKED_AT, Facts, Source, is_watched
from ttftprof.sources.http import BEGAN_BEFORE
from ttftprof.sources.mountstats import MountStats, ShareStats
from ttftprof.threads import FOREVER, LastWaits, Threads
from ttftprof.windows import BULKY, IMPOSSIBLE_NS, Ints, Windowed

_Derived = TypeVar("_Derived")
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(slots=True)
class Process:
    """One life of a process. `fork_ns` and `exec_ns` are None if it was there before."""

    tgid: int
    parent: int | None = None
    fork_ns: int | None = None
    execs: tuple[int, ...] = ()  # a shell may execute the server in its own place
    exit_ns: int | None = None
    end_ns: int | None = None  # its last thread has left the CPU for good; memory is back
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def exec_ns(self) -> int | None:
        """When what it runs now was executed."""
        return self.execs[-1] if self.execs else None

    @property
    def runs_ns(self) -> int:
        """When it began to run what it runs: executed, or forked if it never was."""
        return self.exec_ns or self.fork_ns or 0

    @property
    def parent_pid(self) -> int | None:
        """As its fork told it, or /proc."""
        told = self.parent if self.parent is not None else self.facts.get("ppid")
        return None if told is None else int(told)

    @property
    def is_worker(self) -> bool:
        """Whether it runs its parent's program: forked and never executed, or spawned by it."""
        return (self.fork_ns is not None and not self.execs) or is_workers(self.argv)

    @property
    def start_ns(self) -> int:
        return self.fork_ns or self.exec_ns or 0

    @property
    def gone_ns(self) -> int:
        """When it was gone, or FOREVER."""
        return self.end_ns or self.exit_ns or FOREVER

    @property
    def left_ns(self) -> int:
        """When its last thread began to leave, or FOREVER. A process that was reaped had: on a
        busy machine a thread of it may yet wait for a core to leave for good."""
        return self.exit_ns or self.gone_ns

    @property
    def argv(self) -> list[str]:
        return list(self.facts.get("argv") or [])


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a marked function, outermost only. `end_ns` is FOREVER if it never returned."""

    name: str
    tgid: int
    tid: int
    start_ns: int
    end_ns: int
    value: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A log line that means something."""

    name: str
    ns: int
    tgid: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine said it was, in its log or by its metrics. None: it did not say.

    `for_capacity`: of those that wait, how many for room; `cache_use`: 0..1 of its KV cache.
    """

    ns: int
    tgid: int
    running: int
    waiting: int
    for_capacity: int | None
    cache_use: float | None


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request as a server of the target saw it. Fields as in `sources.http.Exchange`."""

    tgid: int
    tid: int
    socket: int
    local_port: int
    remote_port: int
    start_ns: int
    request_end_ns: int | None
    headers_ns: int | None
    first_token_ns: int | None
    end_ns: int | None
    method: str
    endpoint: str
    model: str | None
    streamed: bool | None
    status: int | None
    generates: bool
    prompt_bytes: int
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    timings: Mapping[str, float]
    outcome: str
    notes: tuple[str, ...]
    from_target: bool  # the client is another process of the target


_LEVELS = 16  # moments, of one file


@dataclass(frozen=True, slots=True)
class FileFacts:
    """One followed file. Counter rows: parallel arrays, oldest first."""

    dev: int
    ino: int
    path: str
    size_bytes: int
    fstype: str | None
    mount: str | None
    options: str | None
    read_ahead_kb: int | None
    rows: Records
    is_weights: bool
    max_request_kb: int | None = None
    line_bytes_per_second: float | None = None  # of the narrowest link to its storage
    link: str | None = None
    source: str | None = None  # of its mount: a device, `server:/export`, `//server/share`
    names: tuple[tuple[int, str], ...] = ()  # each since when; the last is `path`
    beneath_unseen: bool = False  # of overlayfs, whose pages are another file's, not known which
    past_cache: bool = False  # its reads went past the page cache, which nobody asked for
    uncounted: bool = False  # and what of it came from storage nobody could count
    looks_ns: Ints = field(init=False, repr=False, compare=False)  # of the rows
    _levels: dict[int, _Level] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "looks_ns", self.rows["ns"].astype(np.int64))

    @property
    def key(self) -> tuple[int, int]:
        return self.dev, self.ino

    def name_at(self, ns: int) -> str:
        """Its path by then: a file that was deleted leaves its inode number to another."""
        return next(
            (path for since, path in reversed(self.names) if since <= ns and path), self.path
        )

    def looks(self, start_ns: int, end_ns: int) -> Records:
        """The rows from a moment to another, both included."""
        first = np.searchsorted(self.looks_ns, start_ns)
        return self.rows[first : np.searchsorted(self.looks_ns, end_ns, side="right")]

    def at(self, counter: str, ns: int) -> float:
        """A running counter at a moment: linear between snapshots, 0 before the first."""
        return self._at(ns).of(counter)

    def delta(self, counter: str, start_ns: int, end_ns: int) -> int:
        """How much a counter grew in an interval."""
        return self.between(start_ns, end_ns).by(counter)

    def between(self, start_ns: int, end_ns: int) -> Growth:
        """What its counters grew by in an interval."""
        return Growth(self._at(start_ns), self._at(end_ns))

    def _at(self, ns: int) -> _Level:
        """Whoever looks at a request asks for the same few moments again and again."""
        level = self._levels.get(ns)
        if level is None:
            if len(self._levels) >= _LEVELS:
                self._levels.clear()
            level = self._levels[ns] = self._find(ns)
        return level

    def _find(self, ns: int) -> _Level:
        after = int(np.searchsorted(self.looks_ns, ns, side="right"))
        if after == 0:
            return _Level(None, None, 0, 1)
        if after == len(self.rows):
            return _Level(self.rows[after - 1].item(), None, 0, 1)
        began, ended = self.looks_ns[after - 1 : after + 1].tolist()
        before, later = self.rows[after - 1 : after + 1].tolist()
        return _Level(before, later, ns - began, ended - began)


@dataclass(frozen=True, slots=True)
class _Level:
    """Running counters at a moment between two rows; None: there is none before, or after."""

    before: tuple[int, ...] | None
    after: tuple[int, ...] | None
    since_ns: int
    apart_ns: int

    def of(self, counter: str) -> float:
        if self.before is None:
            return 0.0
        place = _COUNTER[counter]
        level = _signed(self.before[place])
        if self.after is None:
            return level
        return level + (_signed(self.after[place]) - level) * self.since_ns / self.apart_ns


_COUNTER = {name: place for place, name in enumerate(FILE_ROW.names or ())}


@dataclass(frozen=True, slots=True)
class Growth:
    """How much the counters of a file grew from a moment to another."""

    begin: _Level
    end: _Level

    def by(self, counter: str) -> int:
        return max(round(self.end.of(counter) - self.begin.of(counter)), 0)


def _signed(counter: int) -> float:
    """Pages that readahead gave back are taken off whoever gave them back, perhaps below 0."""
    return float(counter if counter < 1 << 63 else counter - (1 << 64))


class Disks:
    """A `windows.Note`: which disks were asked for pages of which inodes."""

    def __init__(self) -> None:
        self._inodes: dict[int, set[int]] = {}  # by disk

    def add(self, records: Columns) -> None:
        disks = distinct(records["dev"]).tolist()
        for disk in disks:
            own = records["ino"][records["dev"] == disk] if len(disks) > 1 else records["ino"]
            self._inodes.setdefault(disk, set()).update(distinct(own).tolist())

    def of(self, ino: int) -> set[int]:
        return {disk for disk, inodes in self._inodes.items() if ino in inodes}


@dataclass(frozen=True, slots=True)
class Timeline:
    """Everything of one recording that the conclusions rest on."""

    meta: Mapping[str, Any]
    complete: bool
    sources: tuple[Source, ...]
    lost: Mapping[str, int]
    start_ns: int
    armed_ns: int
    end_ns: int
    page_bytes: int
    processes: Mapping[int, Sequence[Process]]
    waits: Windowed
    threads: Threads
    calls: Sequence[Call]
    marks: Sequence[Mark]
    engine_loads: Sequence[EngineLoad]
    exchanges: Sequence[Exchange]
    files: Mapping[tuple[int, int], FileFacts]
    events: Mapping[Kind, Records]  # but those that come by the million, `waits` and `blocks`
    blocks: Windowed  # requests to disks
    disks: Disks
    thread_rows: Mapping[int, Sequence[Records]]  # by tgid; of each thread, oldest first
    remote: Records  # reads asked of servers and daemons, `remote.READ`
    mounts: Mapping[str, MountStats]  # growth of the kernel's NFS counters, by mount point
    shares: Mapping[str, ShareStats]  # and of its SMB counters, by share
    gpu: GpuFacts
    counts_refaults: bool  # whether the recorder that wrote it counted what left the cache and why
    memory: Sequence[Mapping[str, Any]]  # limits of control groups, as recorded
    python: PythonFacts
    reliefs: Sequence[Relief] = ()
    jumps: Sequence[tuple[int, Jump]] = ()  # of the machine's other clocks, when they were noticed
    _calls_of: dict[tuple[int, str | None], list[Call]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def is_probed(self) -> bool:
        """Whether the kernel's probes saw it, or looks at /proc did."""
        settings = self.meta.get("settings")
        return not (isinstance(settings, dict) and settings.get("loader") == LOOKED_AT)

    def derived(self, make: Callable[[Timeline, _Key], _Derived], key: _Key) -> _Derived:
        """What `make` makes of one process, file…, made once: many requests ask for the same."""
        known = make, key
        if known not in self._derived:
            self._derived[known] = make(self, key)
        found: _Derived = self._derived[known]
        return found

    def process_at(self, tgid: int, ns: int) -> Process | None:
        """The life of a pid that a moment falls into; the last one before it otherwise."""
        lives = self.processes.get(tgid, ())
        fitting = [p for p in lives if p.start_ns <= ns]
        return fitting[-1] if fitting else (lives[0] if lives else None)

    def of_kind(self, kind: Kind) -> Records:
        return self.events[kind]

    def calls_of(
        self, tgid: int, name: str | None = None, start_ns: int = 0, end_ns: int = FOREVER
    ) -> Sequence[Call]:
        """The calls of a process (by one name) that began in [start_ns, end_ns), oldest first."""
        if not self._calls_of:
            for call in self.calls:
                self._calls_of.setdefault((call.tgid, None), []).append(call)
                self._calls_of.setdefault((call.tgid, call.name), []).append(call)
        calls = self._calls_of.get((tgid, name), [])
        first, end = (bisect_left(calls, ns, key=_began_ns) for ns in (start_ns, end_ns))
        return calls[first:end]

    def call_under_way(self, tgid: int, names: Sequence[str], ns: int) -> Call | None:
        """The call of a process that a moment falls into; of several, the one that ends last."""
        found = []
        for name in names:
            self.calls_of(tgid, name, ns, ns)  # sorts them, the first time
            calls = self._calls_of.get((tgid, name), [])
            before = bisect_left(calls, ns, key=_began_ns)
            found += [c for c in calls[max(before - 1, 0) : before] if ns < c.end_ns]
        return max(found, key=lambda c: c.end_ns, default=None)

    def marks_of(self, tgid: int, name: str) -> Sequence[Mark]:
        return self.derived(_marks_by_name, None).get((tgid, name), [])

    def engine_of(self, tgid: int) -> Engine | None:
        """What the process was recognised as, the last time it was looked at. A worker that its
        program forked or spawned is of that program's engine."""
        seen: set[int] = set()
        while tgid not in seen:
            seen.add(tgid)
            lives = self.processes.get(tgid, ())
            names = [str(n) for life in reversed(lives) if (n := life.facts.get("engine"))]
            if names:
                return engine_named(names[0])
            if not lives or not lives[-1].is_worker or lives[-1].parent_pid is None:
                return None
            tgid = lives[-1].parent_pid
        return None

    def slots_of(self, tgid: int) -> int | None:
        """How many requests its command line lets it serve at once; None if it does not say."""
        engine, lives = self.engine_of(tgid), self.processes.get(tgid, ())
        told = option_of(lives[-1].argv, engine.slots) if engine and lives else None
        return int(told) if told and told.isdecimal() and int(told) else None


def _marks_by_name(timeline: Timeline, _: None) -> dict[tuple[int, str], list[Mark]]:
    found: dict[tuple[int, str], list[Mark]] = {}
    for mark in timeline.marks:
        found.setdefault((mark.tgid, mark.name), []).append(mark)
    return found


def _began_ns(call: Call) -> int:
    return call.start_ns


def build(reader: Facts) -> Timeline:
    """Reads a whole recording. Raises `RecordingError` if it cannot be read."""
    try:
        return _build(reader)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RecordingError(
            f"{reader.path} is damaged or was cut short (a fact makes no sense: {error!r})",
            f"sqlite3 {reader.path} .recover shows what is left",
        ) from error


def _build(reader: Facts) -> Timeline:
    meta = _sound(reader.meta)
    last_waits, disks = LastWaits(), Disks()
    found = windows.read(reader.pages("events"), {Kind.OFFCPU: last_waits, Kind.BLOCK: disks})
    by_kind = _by_kind(found.rest)
    waits, blocks = found.bulky[Kind.OFFCPU], found.bulky[Kind.BLOCK]
    threads, impossible_rows = windows.possible(
        reader.stream("threads"), "ns", "since_ns", "off_ns"
    )
    damaged = found.impossible + impossible_rows
    reach = _reach(by_kind, [waits, blocks], threads)
    start_ns = _stamp(meta.get("start_ns") or reach[0])
    armed_ns = _stamp(meta.get("armed_ns") or start_ns)
    end_ns = _stamp(meta.get("end_ns") or max(reach[1], start_ns))
    looks = distinct(threads["ns"].astype(np.int64))
    thread_rows = _rows_by_thread(threads)
    del threads  # `thread_rows` is a copy
    marks = tuple(_marks(reader))
    calls = _calls(by_kind, {int(k): v for k, v in (meta.get("marks") or {}).items()})
    asked = remote.reads_of(by_kind)
    return Timeline(
        meta=meta,
        complete=bool(meta.get("complete")),
        sources=tuple(reader.sources()),
        lost=reader.lost() | ({"records with impossible stamps": damaged} if damaged else {}),
        start_ns=start_ns,
        armed_ns=armed_ns,
        end_ns=end_ns,
        page_bytes=int((meta.get("host") or {}).get("page_bytes") or 4096),
        processes=_processes(reader, by_kind),
        waits=waits,
        threads=Threads(waits, last_waits, by_kind, thread_rows, armed_ns, end_ns),
        calls=tuple(sorted(calls, key=_began_ns)),
        marks=marks,
        engine_loads=tuple(sorted(_engine_loads(reader, marks), key=lambda load: load.ns)),
        exchanges=tuple(_exchanges(reader, by_kind, armed_ns)),
        files=_past_the_cache(_files(reader, by_kind, looks, end_ns), reader, by_kind, asked),
        events=by_kind,
        blocks=blocks,
        disks=disks,
        thread_rows=thread_rows,
        remote=asked,
        mounts=remote.mounts_growth(fact for _, fact in reader.facts("mountstats")),
        shares=remote.shares_growth(fact for _, fact in reader.facts("smb_share")),
        counts_refaults=reader.has_field("files", "refaulted_pages"),
        memory=tuple(fact for _, fact in reader.facts("memory")),
        gpu=gpu_facts.read(reader, by_kind),
        python=python_facts.read(reader),
        reliefs=tuple(_reliefs(reader)),
        jumps=tuple(_jumps(reader)),
    )


def _sound(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a recording says of itself, in the shapes that the conclusions take for granted."""
    for key in ("tool", "host", "clock", "own", "probe_costs", "marks"):
        if not isinstance(meta.get(key) or {}, dict):
            raise ValueError(f"{key} is {meta[key]!r}")
    own, clock = meta.get("own") or {}, meta.get("clock") or {}
    known = (*own.values(), clock.get("realtime_offset_ns"))
    for number in (n for n in known if n is not None):
        int(number)
    for runs, spent_ns in (meta.get("probe_costs") or {}).values():
        float(runs), float(spent_ns)
    return meta


def _by_kind(events: Records) -> dict[Kind, Records]:
    """Events by kind, each ordered by stamp; views of one array."""
    # Both sorts are stable: of one kind and stamp, they stay as they were written.
    order = np.argsort(events["start_ns"], kind="stable").astype(np.int32)
    order = order[np.argsort(events["kind"][order], kind="stable")]
    events = np.take(events, order)  # much faster than an index, for records
    edges = np.searchsorted(events["kind"], [*map(int, Kind), int(max(Kind)) + 1]).tolist()
    views = (events[first:end] for first, end in pairwise(edges))
    return {kind: view for kind, view in zip(Kind, views, strict=True) if kind not in BULKY}


def _stamp(value: Any) -> int:
    if not 0 <= int(value) < IMPOSSIBLE_NS:
        raise ValueError(f"no moment: {value}")
    return int(value)


def _reach(
    by_kind: Mapping[Kind, Records], bulky: Iterable[Windowed], threads: Records
) -> tuple[int, int]:
    """(first start of an event, last end of one or last look), 0 where there is none."""
    starts, ends = [], [0]
    for events in by_kind.values():
        if len(events):
            starts.append(int(events["start_ns"][0]))
            ends.append(int(duration_end(events).max()))
    for first_ns, last_ns in filter(None, (records.reach for records in bulky)):
        starts.append(first_ns)
        ends.append(last_ns)
    if len(threads):
        ends.append(int(threads["ns"].max()))
    return min(starts, default=0), max(ends)


def _in_order(rows: Records) -> Records:
    """Counter rows by stamp, as they are written."""
    stamps = rows["ns"]
    if bool((stamps[1:] >= stamps[:-1]).all()):
        return rows
    return np.take(rows, np.argsort(stamps, kind="stable"))


def _rows_by_thread(threads: Records) -> dict[int, list[Records]]:
    """{process: the rows of each of its threads, oldest first}: views of one array."""
    found: dict[int, list[Records]] = {}
    for (tgid, _, _), rows in split_by(_in_order(threads), "tgid", "tid", "since_ns").items():
        found.setdefault(tgid, []).append(rows)
    return found


# -- processes ------------------------------------------------------------------------------------


def _processes(reader: Facts, by_kind: Mapping[Kind, Records]) -> dict[int, Sequence[Process]]:
    lives: dict[int, list[Process]] = {}
    moments: list[tuple[int, int, str, Any]] = []
    for kind in (Kind.FORK, Kind.EXEC, Kind.PROCESS_EXIT, Kind.THREAD_END):
        moments += [(int(e["start_ns"]), int(kind), "event", e) for e in by_kind[kind]]
    moments += [(ns, 99, "facts", fact) for ns, fact in reader.facts("process")]
    for ns, kind_number, what, item in sorted(moments, key=lambda m: (_end_of(m), m[1])):
        if what == "facts":
            _life(lives, int(item["pid"])).facts = item
        else:
            _apply(lives, Kind(kind_number), item, ns)
    return {tgid: tuple(found) for tgid, found in lives.items()}


def _end_of(moment: tuple[int, int, str, Any]) -> int:
    """A thread's end is stamped with its beginning: order it by when it ended."""
    ns, kind, _, item = moment
    return ns + int(item["duration_ns"]) if kind == Kind.THREAD_END else ns


def _life(lives: dict[int, list[Process]], tgid: int) -> Process:
    found = lives.setdefault(tgid, [])
    if not found:
        found.append(Process(tgid))
    return found[-1]


def _apply(lives: dict[int, list[Process]], kind: Kind, event: Any, ns: int) -> None:
    tgid, tid = int(event["tgid"]), int(event["tid"])
    if kind == Kind.FORK:
        if tid == tgid:
            of_pid = lives.setdefault(tgid, [])
            if of_pid and of_pid[-1].gone_ns == FOREVER:
                of_pid[-1].end_ns = ns  # its exit was not seen; by now its pid is another's
            of_pid.append(Process(tgid, parent=int(event["a"]), fork_ns=ns))
    elif kind == Kind.EXEC:
        life = _life(lives, tgid)
        life.execs = (*life.execs, ns)
    elif kind == Kind.PROCESS_EXIT:
        _life(lives, tgid).exit_ns = ns
    else:
        life = _life(lives, tgid)
        if life.exit_ns is not None:
            life.end_ns = ns + int(event["duration_ns"])


# -- marks ----------------------------------------------------------------------------------------


# How deep calls of one mark can nest: its names may call one another, not themselves.
_DEPTH: Counter[str] = Counter()
for _mark in SYMBOL_MARKS:
    _DEPTH[_mark.name] += len(_mark.symbols)


def _calls(by_kind: Mapping[Kind, Records], names: Mapping[int, str]) -> Iterator[Call]:
    """Pairs enters with exits by thread and mark; of nested ones the outermost is kept."""
    both = gpu_facts.engine_marks(by_kind)
    columns = (both[name] for name in ("kind", "flags", "tgid", "tid", "start_ns", "a"))
    open_calls: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
    for kind, row, tgid, tid, ns, value in zip(
        *(column.astype(np.int64).tolist() for column in columns), strict=True
    ):
        key = names.get(row, f"mark {row}"), tgid, tid
        stack = open_calls.setdefault(key, [])
        if kind == Kind.MARK_ENTER:
            if len(stack) == (_DEPTH[key[0]] or 1):  # the return was lost, or thrown over
                yield _call(key, stack[0], FOREVER)
                stack.clear()
            stack.append((ns, value))
        elif stack:
            enter = stack.pop()
            if not stack:
                yield _call(key, enter, ns)
    for key, stack in open_calls.items():
        if stack:
            yield _call(key, stack[0], FOREVER)


def _call(key: tuple[str, int, int], enter: tuple[int, int], end_ns: int) -> Call:
    name, tgid, tid = key
    start_ns, value = enter
    return Call(name=name, tgid=tgid, tid=tid, start_ns=start_ns, end_ns=end_ns, value=value)


def _marks(reader: Facts) -> Iterator[Mark]:
    for ns, fact in reader.facts("mark"):
        values = {k: v for k, v in fact.items() if k not in ("name", "tgid", "tid")}
        yield Mark(str(fact.get("name")), ns, int(fact.get("tgid", 0)), values)


def _reliefs(reader: Facts) -> Iterator[Relief]:
    for ns, fact in reader.facts("governor"):
        words = {name: str(fact[name]) for name in ("what", "how", "lost")}
        yield Relief(ns=ns, share=float(fact["share"]), budget=float(fact["budget"]), **words)


def _jumps(reader: Facts) -> Iterator[tuple[int, Jump]]:
    for ns, fact in reader.facts("clock_jump"):
        yield ns, Jump(int(fact["suspended_ns"]), int(fact["set_ns"]))


def _engine_loads(reader: Facts, marks: Sequence[Mark]) -> Iterator[EngineLoad]:
    """From the engine's metrics, and from its log lines, which give use in percent or as share."""
    told = [(ns, fact) for ns, fact in reader.facts("engine_load")]
    told += [(m.ns, {**m.values, "tgid": m.tgid}) for m in marks if m.name == "engine_load"]
    for ns, fact in told:
        use, percent = fact.get("cache_use"), fact.get("cache_percent")
        if use is None and percent is not None:
            use = float(percent) / 100
        capacity = fact.get("for_capacity")
        yield EngineLoad(
            ns=ns,
            tgid=int(fact.get("tgid", 0)),
            running=int(fact.get("running") or 0),
            waiting=int(fact.get("waiting") or 0),
            for_capacity=None if capacity is None else int(capacity),
            cache_use=None if use is None else float(use),
        )


# -- requests -------------------------------------------------------------------------------------

_STAMPS = ("request_end_ns", "headers_ns", "first_token_ns", "end_ns")
_COUNTS = ("status", "prompt_tokens", "cached_tokens", "completion_tokens")


def _exchanges(reader: Facts, by_kind: Mapping[Kind, Records], armed_ns: int) -> Iterator[Exchange]:
    facts = [fact for _, fact in reader.facts("exchange")]
    own = OwnConnections(int(fact["local_port"]) for fact in facts)
    for kind in (Kind.LISTEN, Kind.CONN, Kind.CONNECT, Kind.FORWARD):
        own.learn(by_kind[kind])
    for fact in sorted(facts, key=lambda f: int(f["start_ns"])):
        unseen = BEGAN_BEFORE in (fact.get("notes") or ())
        began_ns = _stamp(fact["start_ns"])
        stamps = {name: _whole(fact.get(name), began_ns) for name in _STAMPS}
        local_port, remote_port = int(fact["local_port"]), int(fact["remote_port"])
        yield Exchange(
            tgid=int(fact["tgid"]),
            tid=int(fact["tid"]),
            socket=int(fact["socket"]),
            local_port=local_port,
            remote_port=remote_port,
            # It was under way when recording began: all that is known is that it waited from then.
            start_ns=min(armed_ns, began_ns) if unseen else began_ns,
            method=str(fact.get("method", "")),
            endpoint=str(fact.get("endpoint", "")),
            model=None if fact.get("model") is None else str(fact["model"]),
            streamed=None if fact.get("streamed") is None else bool(fact["streamed"]),
            generates=bool(fact.get("generates")) or (unseen and bool(fact.get("first_token_ns"))),
            prompt_bytes=int(fact.get("prompt_bytes") or 0),
            timings=_timings(fact.get("timings")),
            outcome=_outcome(fact.get("outcome")),
            notes=tuple(map(str, fact.get("notes") or ())),
            from_target=own.has(local_port, remote_port, int(fact["socket"]), began_ns),
            **stamps,
            **{name: _whole(fact.get(name)) for name in _COUNTS},
        )


def _outcome(told: Any) -> str:
    """One of the words that are known: a newer recorder may have others."""
    return told if told in OUTCOMES else "incomplete"


def _timings(told: Any) -> dict[str, float]:
    pairs = told.items() if isinstance(told, dict) else ()
    return {str(k): v for k, v in pairs if isinstance(v, (int, float)) and 0 <= v < 1e18}


def _whole(value: Any, at_least: int = 0) -> int | None:
    """The number if it can be one of this fact's, else None: nothing in a file is trusted."""
    fits = isinstance(value, int) and at_least <= value < IMPOSSIBLE_NS
    return value if fits else None


# -- files ----------------------------------------------------------------------------------------


def _files(
    reader: Facts, by_kind: Mapping[Kind, Records], looks: Ints, end_ns: int
) -> dict[tuple[int, int], FileFacts]:
    """The followed files. `looks`: every moment at which the recorder read the counters."""
    touches = split_by(by_kind[Kind.TOUCH], "dev", "ino")
    ticks = _Ticks.of(reader.meta, by_kind[Kind.TOUCH])
    rows, _ = windows.possible(reader.stream("files"), "ns")
    parts = split_by(_in_order(rows), "dev", "ino")
    named: dict[tuple[int, int], list[tuple[int, dict[str, Any]]]] = {}
    for ns, told in reader.facts("file"):
        named.setdefault((int(told["dev"]), int(told["ino"])), []).append((ns, told))
    disks = {dev: facts[-1][1].get("source") for (dev, _), facts in named.items()}
    found: dict[tuple[int, int], FileFacts] = {}
    for dev, ino in sorted({*named, *parts}):
        own = parts.get((dev, ino), rows[:0])
        begins = touches.get((dev, ino), by_kind[Kind.TOUCH][:0])["start_ns"].astype(np.int64)
        facts = sorted(named.get((dev, ino), []), key=itemgetter(0))
        fact = facts[-1][1] if facts else {}
        path = str(fact.get("path") or _nameless(dev, ino, disks))
        size = int(own["size_bytes"].max()) if len(own) else int(fact.get("size_bytes") or 0)
        found[dev, ino] = FileFacts(
            dev=dev,
            ino=ino,
            path=path,
            size_bytes=size,
            fstype=fact.get("fstype"),
            mount=fact.get("mount"),
            options=fact.get("options"),
            read_ahead_kb=fact.get("read_ahead_kb"),
            rows=_with_edges(own, looks, begins, ticks, end_ns),
            is_weights=looks_like_weights(path),
            max_request_kb=_whole(fact.get("max_request_kb")),
            line_bytes_per_second=_rate(fact.get("line_bytes_per_second")),
            link=None if fact.get("link") is None else str(fact["link"]),
            names=tuple((ns, str(told.get("path") or "")) for ns, told in facts),
            source=None if fact.get("source") is None else str(fact["source"]),
            beneath_unseen=bool(fact.get("beneath_unseen")),
        )
    return found


def _nameless(dev: int, ino: int, disks: Mapping[int, Any]) -> str:
    """What a file is called that no process has a path to.

    A file system reads its own tables and directories as pages of its disk, which is an inode of
    the kernel's: its number is the disk's, its device none of the machine's (major number 0).
    """
    if dev_numbers(dev)[0] == 0 and disks.get(ino):
        return f"{disks[ino]}: directories and tables of its file system"
    return f"inode {ino}"


def _past_the_cache(
    files: dict[tuple[int, int], FileFacts],
    reader: Facts,
    by_kind: Mapping[Kind, Records],
    asked: Records,
) -> dict[tuple[int, int], FileFacts]:
    """The files, those that are read past the page cache counted as what they are: read directly,
    where a server or a daemon is known to have answered. Unchanged where nobody watched it."""
    if not is_watched(reader.sources(), "pagecache"):
        return files
    looks = split_by(np.concatenate([by_kind[Kind.OPEN], by_kind[Kind.HELD]]), "dev", "ino")
    for key, file in files.items():
        if not uncached.is_read_past(file.rows, looks.get(key, by_kind[Kind.OPEN][:0])):
            continue
        if uncached.is_answered(asked, *key):
            files[key] = replace(file, rows=uncached.as_direct(file.rows), past_cache=True)
        else:
            files[key] = replace(file, past_cache=True, uncounted=True)
    return files


def _rate(value: Any) -> float | None:
    fits = isinstance(value, (int, float)) and 0 < value < 1e18
    return float(value) if fits else None


@dataclass(frozen=True, slots=True)
class _Ticks:
    """When a jiffy was over: the kernel stamps a file's last activity with no better clock."""

    zero_ns: int
    tick_ns: int

    @classmethod
    def of(cls, meta: Mapping[str, Any], touches: Records) -> _Ticks | None:
        """From records that carry both clocks; None if there are none."""
        tick_ns = _whole((meta.get("host") or {}).get("tick_ns"), 1)
        known = touches[touches["a"] > 0]
        if tick_ns is None or not len(known):
            return None
        begins = known["start_ns"].astype(np.int64) - known["a"].astype(np.int64) * tick_ns
        return cls(int(begins.min()), tick_ns)

    def over_ns(self, jiffies: Records) -> Ints:
        over: Ints = self.zero_ns + (jiffies.astype(np.int64) + 1) * self.tick_ns
        return over


def _with_edges(
    rows: Records, looks: Ints, begins: Ints, ticks: _Ticks | None, end_ns: int
) -> Records:
    """Rows are written when they change, at a look. Adds the unchanged row where the change began
    (at the first activity after a pause, in `begins`, or else at the look before), and at the end;
    and the changed one when the last activity was over. Between rows a counter grows evenly."""
    if not len(rows):
        return rows
    stamps = rows["ns"].astype(np.int64)
    where = np.searchsorted(looks, stamps[1:], side="left") - 1
    before = np.where(where >= 0, looks[np.maximum(where, 0)], 0) if len(looks) else stamps[1:] * 0
    before = np.maximum(before, stamps[:-1])
    began = np.where(
        (before > stamps[:-1]) | _rests(rows[:-1], ticks), _first_after(begins, before), before
    )
    began = np.where(began < stamps[1:], began, before)
    held = began > stamps[:-1]
    holds = np.concatenate([rows[:-1][held], rows[-1:]])
    holds["ns"] = np.append(began[held], max(end_ns, int(stamps[-1])))
    both = np.concatenate([rows, holds, _when_over(rows, began, ticks)])
    ordered: Records = both[np.argsort(both["ns"], kind="stable")]
    return ordered


def _first_after(moments: Ints, after_ns: Ints) -> Ints:
    """The first of some moments after each of others; FOREVER where none is."""
    found: Ints = np.append(moments, FOREVER)[np.searchsorted(moments, after_ns, side="right")]
    return found


_PAUSE_TICKS = 4  # TOUCH_GAP_JIFFIES of probes/shared.bpf.h


def _rests(rows: Records, ticks: _Ticks | None) -> npt.NDArray[np.bool_]:
    """Whether a file had rested so long, by each row's look, that more activity has an event."""
    if ticks is None:
        return np.zeros(len(rows), bool)
    rested_ns = ticks.over_ns(rows["touch_jiffies"]) + _PAUSE_TICKS * ticks.tick_ns
    rested: npt.NDArray[np.bool_] = rested_ns < rows["ns"].astype(np.int64)
    return rested


def _when_over(rows: Records, began_ns: Ints, ticks: _Ticks | None) -> Records:
    """Each row again, at the moment when the last activity that it counts was over."""
    if ticks is None:
        return rows[:0]
    over_ns = ticks.over_ns(rows["touch_jiffies"])
    stamps = rows["ns"].astype(np.int64)
    earliest = np.append(rows["since_ns"][:1].astype(np.int64), np.maximum(began_ns, stamps[:-1]))
    known = (over_ns > earliest) & (over_ns < stamps)
    early: Records = rows[known]
    early["ns"] = over_ns[known]
    return early
