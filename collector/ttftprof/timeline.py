"""Facts put in order: processes, threads, files, calls and requests of one recording.

Pure: a recording in, values out. It joins what belongs together (fork with exec, enter with exit,
connection with request) and concludes nothing. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ttftprof.engines.catalog import looks_like_weights
from ttftprof.events import Kind, Records, Wait
from ttftprof.recording import Reader, Source
from ttftprof.sources.http import BEGAN_BEFORE

Ints = npt.NDArray[np.int64]
FOREVER = np.iinfo(np.int64).max


@dataclass(slots=True)
class Process:
    """One life of a process. `fork_ns` and `exec_ns` are None if it was there before."""

    tgid: int
    parent: int | None = None
    fork_ns: int | None = None
    exec_ns: int | None = None
    exit_ns: int | None = None
    end_ns: int | None = None  # its last thread has left the CPU for good; memory is back
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def start_ns(self) -> int:
        return self.fork_ns or self.exec_ns or 0

    @property
    def gone_ns(self) -> int:
        """When it was gone, or FOREVER."""
        return self.end_ns or self.exit_ns or FOREVER

    @property
    def argv(self) -> list[str]:
        return list(self.facts.get("argv") or [])


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

    @property
    def key(self) -> tuple[int, int]:
        return self.dev, self.ino

    def at(self, name: str, ns: int) -> float:
        """A running counter at a moment: linear between snapshots, 0 before the first."""
        if not len(self.rows):
            return 0.0
        stamps = self.rows["ns"].astype(np.float64)
        return float(np.interp(float(ns), stamps, self.rows[name].astype(np.float64), left=0.0))

    def delta(self, name: str, start_ns: int, end_ns: int) -> int:
        """How much a counter grew in an interval."""
        return round(self.at(name, end_ns) - self.at(name, start_ns))


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
    waits: Mapping[int, Sequence[Waits]]  # by tgid
    calls: Sequence[Call]
    marks: Sequence[Mark]
    exchanges: Sequence[Exchange]
    files: Mapping[tuple[int, int], FileFacts]
    events: Mapping[Kind, Records]
    thread_rows: Mapping[int, Records]  # by tgid, ordered by stamp

    def process_at(self, tgid: int, ns: int) -> Process | None:
        """The life of a pid that a moment falls into; the last one before it otherwise."""
        lives = self.processes.get(tgid, ())
        fitting = [p for p in lives if p.start_ns <= ns]
        return fitting[-1] if fitting else (lives[0] if lives else None)

    def of_kind(self, kind: Kind) -> Records:
        return self.events[kind]

    def calls_of(self, tgid: int, name: str | None = None) -> list[Call]:
        return [c for c in self.calls if c.tgid == tgid and name in (None, c.name)]

    def marks_of(self, tgid: int, name: str) -> list[Mark]:
        return [m for m in self.marks if m.tgid == tgid and m.name == name]


def build(reader: Reader) -> Timeline:
    """Reads a whole recording. Raises `RecordingError` if it cannot be read."""
    meta = reader.meta
    events = reader.stream("events")
    events = events[np.argsort(events["start_ns"], kind="stable")]
    by_kind = {kind: events[events["kind"] == kind] for kind in Kind}
    threads = reader.stream("threads")
    start_ns = int(meta.get("start_ns") or (events["start_ns"][0] if len(events) else 0))
    end_ns = int(meta.get("end_ns") or _last_stamp(events, threads, start_ns))
    return Timeline(
        meta=meta,
        complete=bool(meta.get("complete")),
        sources=tuple(reader.sources()),
        lost=reader.lost(),
        start_ns=start_ns,
        armed_ns=int(meta.get("armed_ns") or start_ns),
        end_ns=end_ns,
        page_bytes=int((meta.get("host") or {}).get("page_bytes") or 4096),
        processes=_processes(reader, by_kind),
        waits=_waits(by_kind, threads, end_ns),
        calls=tuple(_calls(by_kind, {int(k): v for k, v in (meta.get("marks") or {}).items()})),
        marks=tuple(_marks(reader)),
        exchanges=tuple(_exchanges(reader, by_kind)),
        files=_files(reader),
        events=by_kind,
        thread_rows=_by_tgid(threads),
    )


def _last_stamp(events: Records, threads: Records, otherwise: int) -> int:
    stamps = [otherwise]
    if len(events):
        stamps.append(int((events["start_ns"] + events["duration_ns"]).max()))
    if len(threads):
        stamps.append(int(threads["ns"].max()))
    return max(stamps)


def _by_tgid(threads: Records) -> dict[int, Records]:
    return {int(t): threads[threads["tgid"] == t] for t in np.unique(threads["tgid"])}


# -- processes ------------------------------------------------------------------------------------


def _processes(reader: Reader, by_kind: Mapping[Kind, Records]) -> dict[int, Sequence[Process]]:
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
            lives.setdefault(tgid, []).append(Process(tgid, parent=int(event["a"]), fork_ns=ns))
    elif kind == Kind.EXEC:
        _life(lives, tgid).exec_ns = ns
    elif kind == Kind.PROCESS_EXIT:
        _life(lives, tgid).exit_ns = ns
    else:
        life = _life(lives, tgid)
        if life.exit_ns is not None:
            life.end_ns = ns + int(event["duration_ns"])


# -- threads --------------------------------------------------------------------------------------


def _waits(
    by_kind: Mapping[Kind, Records], threads: Records, end_ns: int
) -> dict[int, Sequence[Waits]]:
    """Every tracked thread, with the wait it was still in when recording ended."""
    offcpu = by_kind[Kind.OFFCPU]
    ended = {
        int(e["tid"]): (int(e["start_ns"]), int(e["start_ns"] + e["duration_ns"]))
        for e in by_kind[Kind.THREAD_END]
    }
    births = {int(e["tid"]): int(e["start_ns"]) for e in by_kind[Kind.FORK]}
    owners = {int(r["tid"]): int(r["tgid"]) for r in threads}
    owners |= {int(e["tid"]): int(e["tgid"]) for e in offcpu}
    last_rows = {int(r["tid"]): r for r in threads}
    order = np.argsort(offcpu["tid"], kind="stable")
    offcpu = offcpu[order]
    tids, firsts = np.unique(offcpu["tid"], return_index=True)
    parts = dict(zip(tids.tolist(), np.split(offcpu, firsts[1:]), strict=True)) if len(tids) else {}
    found: dict[int, list[Waits]] = {}
    for tid, tgid in owners.items():
        own = parts.get(tid, offcpu[:0])
        own = _with_open_wait(own, last_rows.get(tid), tid not in ended, end_ns)
        found.setdefault(tgid, []).append(
            Waits(
                tid=tid,
                tgid=tgid,
                start_ns=own["start_ns"].astype(np.int64),
                end_ns=(own["start_ns"] + own["duration_ns"]).astype(np.int64),
                reason=own["flags"].astype(np.uint16),
                dev=own["dev"].astype(np.uint32),
                ino=own["ino"].astype(np.uint64),
                born_ns=births.get(tid, 0),
                dead_ns=ended[tid][1] if tid in ended else FOREVER,
            )
        )
    return {tgid: tuple(ws) for tgid, ws in found.items()}


def _with_open_wait(own: Records, row: Any, alive: bool, end_ns: int) -> Records:
    """Adds the wait that the thread's last snapshot shows and no event ended."""
    if row is None or not alive or not int(row["off_ns"]):
        return own
    began = int(row["off_ns"])
    if len(own) and int(own["start_ns"][-1]) >= began:
        return own
    extra = np.zeros(1, own.dtype)
    extra["start_ns"] = began
    extra["duration_ns"] = max(end_ns - began, 0)
    extra["flags"] = row["off_reason"]
    if int(row["off_reason"]) == Wait.STORAGE:
        extra["dev"], extra["ino"] = row["file_dev"], row["file_ino"]
    return np.concatenate([own, extra])


# -- marks ----------------------------------------------------------------------------------------


def _calls(by_kind: Mapping[Kind, Records], names: Mapping[int, str]) -> Iterator[Call]:
    """Pairs enters with exits by thread and mark; of nested ones the outermost is kept."""
    both = np.concatenate([by_kind[Kind.MARK_ENTER], by_kind[Kind.MARK_EXIT]])
    both = both[np.argsort(both["start_ns"], kind="stable")]
    open_calls: dict[tuple[int, int], list[Any]] = {}
    for event in both:
        key = (int(event["tid"]), int(event["flags"]))
        stack = open_calls.setdefault(key, [])
        if int(event["kind"]) == Kind.MARK_ENTER:
            stack.append(event)
        elif stack:
            enter = stack.pop()
            if not stack:
                yield _call(enter, names, int(event["start_ns"]))
    for stack in open_calls.values():
        if stack:
            yield _call(stack[0], names, FOREVER)


def _call(enter: Any, names: Mapping[int, str], end_ns: int) -> Call:
    row = int(enter["flags"])
    return Call(
        name=names.get(row, f"mark {row}"),
        tgid=int(enter["tgid"]),
        tid=int(enter["tid"]),
        start_ns=int(enter["start_ns"]),
        end_ns=end_ns,
        value=int(np.int64(enter["a"])),
    )


def _marks(reader: Reader) -> Iterator[Mark]:
    for ns, fact in reader.facts("mark"):
        values = {k: v for k, v in fact.items() if k not in ("name", "tgid", "tid")}
        yield Mark(str(fact.get("name")), ns, int(fact.get("tgid", 0)), values)


# -- requests -------------------------------------------------------------------------------------

_CARRIED = (
    "request_end_ns", "headers_ns", "first_token_ns", "end_ns", "model", "streamed", "status",
    "prompt_tokens", "cached_tokens", "completion_tokens",
)  # fmt: skip


def _exchanges(reader: Reader, by_kind: Mapping[Kind, Records]) -> Iterator[Exchange]:
    clients = client_ports(by_kind)
    armed_ns = int(reader.meta.get("armed_ns") or 0)
    facts = sorted((fact for _, fact in reader.facts("exchange")), key=lambda f: int(f["start_ns"]))
    for fact in facts:
        unseen = BEGAN_BEFORE in (fact.get("notes") or ())
        yield Exchange(
            tgid=int(fact["tgid"]),
            tid=int(fact["tid"]),
            socket=int(fact["socket"]),
            local_port=int(fact["local_port"]),
            remote_port=int(fact["remote_port"]),
            # It was under way when recording began: all that is known is that it waited from then.
            start_ns=min(armed_ns, int(fact["start_ns"])) if unseen else int(fact["start_ns"]),
            method=str(fact.get("method", "")),
            endpoint=str(fact.get("endpoint", "")),
            generates=bool(fact.get("generates")) or (unseen and bool(fact.get("first_token_ns"))),
            prompt_bytes=int(fact.get("prompt_bytes") or 0),
            timings=dict(fact.get("timings") or {}),
            outcome=str(fact.get("outcome", "incomplete")),
            notes=tuple(fact.get("notes") or ()),
            from_target=int(fact["remote_port"]) in clients,
            **{name: fact.get(name) for name in _CARRIED},
        )


def client_ports(by_kind: Mapping[Kind, Records]) -> set[int]:
    """Local ports of the connections that processes of the target opened."""
    both = np.concatenate([by_kind[Kind.CONNECT]["a"], by_kind[Kind.FORWARD]["a"]])
    return {int(ports) >> 16 for ports in both if int(ports) >> 16}


# -- files ----------------------------------------------------------------------------------------


def _files(reader: Reader) -> dict[tuple[int, int], FileFacts]:
    rows = reader.stream("files")
    named = {(int(f["dev"]), int(f["ino"])): f for _, f in reader.facts("file")}
    found: dict[tuple[int, int], FileFacts] = {}
    for key in sorted({*named, *((int(r["dev"]), int(r["ino"])) for r in _one_each(rows))}):
        own = rows[(rows["dev"] == key[0]) & (rows["ino"] == key[1])]
        fact = named.get(key, {})
        path = str(fact.get("path") or f"inode {key[1]}")
        size = int(own["size_bytes"].max()) if len(own) else int(fact.get("size_bytes") or 0)
        found[key] = FileFacts(
            dev=key[0],
            ino=key[1],
            path=path,
            size_bytes=size,
            fstype=fact.get("fstype"),
            mount=fact.get("mount"),
            options=fact.get("options"),
            read_ahead_kb=fact.get("read_ahead_kb"),
            rows=own,
            is_weights=looks_like_weights(path),
        )
    return found


def _one_each(rows: Records) -> Iterable[Any]:
    """One row of every file."""
    if not len(rows):
        return []
    _, first = np.unique(rows[["dev", "ino"]], return_index=True)
    return list(rows[first])
