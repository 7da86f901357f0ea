"""Partitions a request's wait, from its arrival to its first token, into phases.

Pure: a timeline in, phases out. The phases of a request abut and cover its interval exactly; what
nothing observed explains is `unexplained`. Definitions of the phases: see `model.PHASES` and the
design; each edge names the rule and the fact it rests on, and says whether both were observed.

The method: find which process served the request, when that process was launched, loaded and able
to serve, and what the request waited for on either side; put these moments in order; cut them to
the request's interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ttftprof.events import Kind, MmapFlag, Records
from ttftprof.model import Evidence, Phase
from ttftprof.sources.http import BEGAN_BEFORE
from ttftprof.timeline import FOREVER, Call, Exchange, FileFacts, Process, Timeline

OBSERVED, INFERRED = "observed", "inferred"


@dataclass(frozen=True, slots=True)
class Edge:
    """A moment and what it rests on."""

    ns: int
    basis: str
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class StartUp:
    """How one process came to serve one model; None where nothing shows it."""

    process: Process
    began: Edge | None  # executed, or for a load inside a running process None
    load_begin: Edge | None
    load_end: Edge | None
    ready: Edge | None
    weights: FileFacts | None


@dataclass(frozen=True, slots=True)
class Served:
    """A client's request, the one its server passed on (None if it served it itself)."""

    front: Exchange
    back: Exchange | None

    @property
    def server(self) -> int:
        return (self.back or self.front).tgid

    @property
    def received_ns(self) -> int:
        return (self.back or self.front).start_ns

    @property
    def last_ns(self) -> int:
        """First token, or the end of what was seen."""
        front = self.front
        return front.first_token_ns or front.end_ns or front.start_ns


# -- requests -------------------------------------------------------------------------------------


def requests_of(timeline: Timeline) -> list[Served]:
    """Every request a client outside the target made for text, with the one behind it."""
    fronts = [e for e in timeline.exchanges if e.generates and not e.from_target]
    backs = [e for e in timeline.exchanges if e.generates and e.from_target]
    taken: set[int] = set()
    found: list[Served] = []
    for front in fronts:
        back = _behind(timeline, front, [b for b in backs if id(b) not in taken])
        if back is not None:
            taken.add(id(back))
        found.append(Served(front, back))
    return found


def _behind(timeline: Timeline, front: Exchange, backs: Sequence[Exchange]) -> Exchange | None:
    """The request that the front's process sent on for this one: after it, over a connection of
    its own, the same body size if possible; the earliest of those. A front may try again until the
    server takes it: if it got an answer, the one that was answered."""
    ports = _ports_opened_by(timeline, front.tgid)
    ended = front.end_ns or FOREVER
    fitting = [
        b
        for b in backs
        if front.start_ns <= b.start_ns <= ended and b.remote_port in ports and b.tgid != front.tgid
    ]
    same = [b for b in fitting if b.prompt_bytes == front.prompt_bytes] or fitting
    same = [b for b in same if b.model == front.model] or same
    if front.first_token_ns is not None:
        same = [b for b in same if b.first_token_ns is not None] or same
    return min(same, key=lambda b: b.start_ns, default=None)


def _ports_opened_by(timeline: Timeline, tgid: int) -> set[int]:
    ports: set[int] = set()
    for kind in (Kind.CONNECT, Kind.FORWARD):
        records = timeline.of_kind(kind)
        ports |= {int(a) >> 16 for a in records["a"][records["tgid"] == tgid]}
    return ports


# -- start-up -------------------------------------------------------------------------------------


def start_up(timeline: Timeline, served: Served) -> StartUp | None:
    """When the serving process was launched, loaded and able to serve this request's model."""
    process = timeline.process_at(served.server, served.received_ns)
    if process is None:
        return None
    return start_up_of(timeline, process, _work_begins(timeline, served))


def start_up_of(timeline: Timeline, process: Process, before_ns: int) -> StartUp:
    """How a process came to serve what it loaded last before a moment."""
    load = _weights_call(timeline, process, before_ns)
    weights = _weights_file(timeline, process, load, before_ns)
    load_begin, load_end = _load_edges(timeline, process, load, weights, before_ns)
    began = None
    if process.exec_ns is not None:
        began = Edge(
            process.exec_ns,
            OBSERVED,
            Evidence("process", f"pid {process.tgid} was executed", process.tgid, "pid"),
        )
    ready = _ready(timeline, process, load_end or load_begin or began, before_ns)
    return StartUp(process, began, load_begin, load_end, ready, weights)


def _work_begins(timeline: Timeline, served: Served) -> int:
    """The latest moment at which the server can have become able to serve this request."""
    if served.back is not None:
        return served.back.start_ns
    begins_ns = _taken_ns(timeline, served.front)
    # A load that goes on with the request in hand is what the request waits for.
    reloads = any(
        begins_ns < c.end_ns and c.start_ns < served.last_ns
        for c in timeline.calls_of(served.server, "model_load")
    )
    return served.last_ns if reloads else begins_ns


def _taken_ns(timeline: Timeline, exchange: Exchange) -> int:
    """When the server itself took the request, perhaps long after it had arrived."""
    return max(_accepted_ns(timeline, exchange) or 0, exchange.start_ns)


def _accepted_ns(timeline: Timeline, exchange: Exchange) -> int | None:
    accepts = timeline.of_kind(Kind.ACCEPT)
    mine = accepts[accepts["ino"] == exchange.socket]
    early = mine["start_ns"][mine["start_ns"] <= (exchange.first_token_ns or FOREVER)]
    return int(early[-1]) if len(early) else None


def _weights_call(timeline: Timeline, process: Process, before_ns: int) -> Call | None:
    """The last model load begun before the request was worked on: an earlier one in the same
    process is the memory-fit pass, or another model."""
    loads = [
        c
        for c in timeline.calls_of(process.tgid, "model_load")
        if process.start_ns <= c.start_ns < before_ns
    ]
    return loads[-1] if loads else None


def _weights_file(
    timeline: Timeline, process: Process, load: Call | None, before_ns: int
) -> FileFacts | None:
    """The biggest file of weights the process opened or mapped, in its load if that is known; else
    the biggest file at all, if it is no library."""
    inside = (
        _files_used(timeline, process, load.start_ns, min(load.end_ns, before_ns)) if load else []
    )
    files = [f for f in inside if f.is_weights]
    files = files or _files_used(timeline, process, process.start_ns, before_ns)
    named = [f for f in files if f.is_weights]
    plain = [f for f in files if _may_be_weights(f)]
    return max(named or plain, key=lambda f: f.size_bytes, default=None)


def _may_be_weights(file: FileFacts) -> bool:
    return file.is_weights or (".so" not in file.path and file.size_bytes >= 8 << 20)


def _files_used(
    timeline: Timeline, process: Process, start_ns: int, end_ns: int
) -> list[FileFacts]:
    """The followed files that a process opened, mapped as data or read in an interval."""
    used: dict[tuple[int, int], int] = {}
    for kind in _FILE_USES:
        records = timeline.of_kind(kind)
        mask = (records["tgid"] == process.tgid) & (records["start_ns"] < end_ns)
        mask &= records["start_ns"] >= start_ns
        if kind == Kind.MMAP:
            mask &= (records["flags"] & MmapFlag.EXEC) == 0
        for dev, ino in np.unique(records[mask][["dev", "ino"]]):
            used[int(dev), int(ino)] = 1
    return [timeline.files[key] for key in used if key in timeline.files]


_FILE_USES = (Kind.OPEN, Kind.MMAP, Kind.READ, Kind.HELD)


def _load_edges(
    timeline: Timeline,
    process: Process,
    call: Call | None,
    weights: FileFacts | None,
    before_ns: int,
) -> tuple[Edge | None, Edge | None]:
    if call is not None:
        begin = Edge(
            call.start_ns, OBSERVED, Evidence("call", "llama_model_load began", call.tid, "tid")
        )
        if call.end_ns == FOREVER:
            return begin, None
        took = call.end_ns - call.start_ns
        return begin, Edge(
            call.end_ns, OBSERVED, Evidence("call", "llama_model_load returned", took, "ns")
        )
    under_way = _load_before_recording(timeline, process, before_ns)
    if under_way is not None or weights is None:
        return None, under_way
    return _load_edges_by_file(timeline, process, weights, before_ns)


def _load_before_recording(timeline: Timeline, process: Process, before_ns: int) -> Edge | None:
    """The end of a load that was under way when recording began: a context was made, though no
    load was seen to begin."""
    if process.exec_ns is not None:
        return None
    made = [c for c in timeline.calls_of(process.tgid, "context_init") if c.start_ns < before_ns]
    if not made:
        return None
    return Edge(
        made[0].start_ns,
        INFERRED,
        Evidence("call", "a context was made; its load began before recording did"),
    )


def _load_edges_by_file(
    timeline: Timeline, process: Process, weights: FileFacts, before_ns: int
) -> tuple[Edge | None, Edge | None]:
    """Without marked calls: from the first map or bulk read of the weights to the last activity
    on them before the request was worked on."""
    begin = _first_weight_touch(timeline, process, weights, before_ns)
    if begin is None:
        return None, None
    last = _last_weight_touch(timeline, process, weights, begin.ns, before_ns)
    return begin, last


def _records(
    timeline: Timeline, kind: Kind, process: Process, weights: FileFacts, until: int
) -> Records:
    """The events of a kind that one life of a process caused on one file before `until`."""
    records = timeline.of_kind(kind)
    mask = (records["tgid"] == process.tgid) & (records["ino"] == weights.ino)
    mask &= (records["dev"] == weights.dev) & (records["start_ns"] < until)
    mask &= records["start_ns"] >= process.start_ns
    found: Records = records[mask]
    return found


def _first_weight_touch(
    timeline: Timeline, process: Process, weights: FileFacts, before_ns: int
) -> Edge | None:
    maps = _records(timeline, Kind.MMAP, process, weights, before_ns)
    maps = maps[(maps["a"] >= weights.size_bytes // 2) & ((maps["flags"] & MmapFlag.FAILED) == 0)]
    if len(maps):
        first = maps[-1]
        return Edge(
            int(first["start_ns"]),
            OBSERVED,
            Evidence("files", "the weights were mapped", int(first["a"]), "bytes"),
        )
    reads = _records(timeline, Kind.READ, process, weights, before_ns)
    opens = _records(timeline, Kind.OPEN, process, weights, before_ns)["start_ns"]
    # A header-only pass opens, reads a little and closes; the load is the last session that reads
    # a good part of the file.
    for opened, until in reversed(list(pairwise([*map(int, opens), FOREVER]))):
        session = reads[(reads["start_ns"] >= opened) & (reads["start_ns"] < until)]
        if int(session["a"].sum()) >= weights.size_bytes // 10:
            return Edge(
                int(session["start_ns"][0]),
                OBSERVED,
                Evidence("files", "the weights were first read", int(session["a"].sum()), "bytes"),
            )
    return None


def _last_weight_touch(
    timeline: Timeline, process: Process, weights: FileFacts, after_ns: int, before_ns: int
) -> Edge:
    reads = _records(timeline, Kind.READ, process, weights, before_ns)
    maps = _records(timeline, Kind.MMAP, process, weights, before_ns)
    ends = [after_ns]
    for records in (reads, maps):
        late = records[records["start_ns"] >= after_ns]
        if len(late):
            ends.append(int((late["start_ns"] + late["duration_ns"]).max()))
    rows = weights.rows[(weights.rows["ns"] > after_ns) & (weights.rows["ns"] < before_ns)]
    activity = (rows["added_pages"] + rows["faults"] + rows["map_arounds"]).astype(np.int64)
    earlier = weights.rows[weights.rows["ns"] <= after_ns][-1:]
    before = (earlier["added_pages"] + earlier["faults"] + earlier["map_arounds"]).astype(np.int64)
    grew = np.flatnonzero(np.diff(activity, prepend=before if len(before) else 0))
    if len(grew) and not (len(reads) and not len(maps)):
        ends.append(int(rows["ns"][grew[-1]]))
    return Edge(
        max(ends),
        INFERRED,
        Evidence("files", "last activity on the weights before the server was able to serve"),
    )


def _first_answered_ns(timeline: Timeline, process: Process, after_ns: int = 0) -> int:
    """When the process took the first request that it answered with text after a moment; FOREVER
    if it answered none."""
    after_ns = max(after_ns, process.start_ns)
    taken = (
        _taken_ns(timeline, e)
        for e in timeline.exchanges
        if e.tgid == process.tgid and after_ns <= (e.first_token_ns or -1) <= process.gone_ns
    )
    return min(taken, default=FOREVER)


def _ready(timeline: Timeline, process: Process, after: Edge | None, before_ns: int) -> Edge | None:
    """When the process became able to serve after `after`, best fact first; None if it was able
    before recording began."""
    if after is None:
        return None
    after_ns = after.ns
    for mark in timeline.marks_of(process.tgid, "model_loaded"):
        if after_ns <= mark.ns <= before_ns:
            return Edge(
                mark.ns, OBSERVED, Evidence("log", "the server said that the model is loaded")
            )
    first_answered_ns = _first_answered_ns(timeline, process, after_ns)
    # Contexts are made and run empty. Once a request was taken, a decode is somebody's answer.
    begun_by = {"context_init": before_ns, "decode": first_answered_ns, "encode": first_answered_ns}
    calls = [
        c
        for name, until in begun_by.items()
        for c in timeline.calls_of(process.tgid, name, after_ns, min(until, before_ns))
        if c.end_ns <= before_ns
    ]
    if calls:
        last = max(calls, key=lambda c: c.end_ns)
        return Edge(
            last.end_ns,
            INFERRED,
            Evidence("call", f"last call before it could serve: {last.name} returned"),
        )
    listens = timeline.of_kind(Kind.LISTEN)
    mine = listens[(listens["tgid"] == process.tgid) & (listens["start_ns"] <= before_ns)]
    late = mine["start_ns"][mine["start_ns"] >= after_ns]
    if len(late):
        return Edge(int(late[-1]), OBSERVED, Evidence("sockets", "it began to listen"))
    healthy = [
        e.headers_ns
        for e in timeline.exchanges
        if e.tgid == process.tgid
        and not e.generates
        and e.status == 200
        and e.headers_ns
        and after_ns <= e.headers_ns <= before_ns
    ]
    if healthy:
        return Edge(
            min(healthy), INFERRED, Evidence("sockets", "first health check that it passed")
        )
    return None


# -- the partition --------------------------------------------------------------------------------


class _Cutter:
    """Lays phases one behind the other over [start, end]."""

    def __init__(self, start_ns: int, end_ns: int) -> None:
        self._at = start_ns
        self._end = end_ns
        self.phases: list[Phase] = []

    @property
    def at_ns(self) -> int:
        return self._at

    def until(self, phase: str, edge: Edge | None, basis: str = "") -> None:
        """`phase` lasts until this edge; nothing happens if it lies behind or is unknown."""
        if edge is None:
            return
        end = min(edge.ns, self._end)
        if end > self._at:
            found = Phase(phase, self._at, end, basis or edge.basis, (edge.evidence,))
            self.phases.append(found)
            self._at = end

    def rest(self, phase: str, basis: str, evidence: Evidence) -> None:
        self.until(phase, Edge(self._end, basis, evidence))


@dataclass(frozen=True, slots=True)
class Started:
    """A server that started and loaded a model without any request waiting for it."""

    start: StartUp
    old: Process | None
    phases: tuple[Phase, ...]

    def critical_processes(self) -> list[int]:
        """For each phase, the process whose threads hold it up."""
        new = self.start.process.tgid
        old = self.old.tgid if self.old else new
        return [old if phase.phase == "evict" else new for phase in self.phases]


def starts_of(timeline: Timeline, everyone: Sequence[Served]) -> list[Started]:
    """Start-ups that no request of the recording waited for, oldest first."""
    found = []
    for tgid in _loaders(timeline) & timeline.processes.keys():
        for life in timeline.processes[tgid]:
            started = _started(timeline, life) if life.exec_ns is not None else None
            if started is not None and not _waited_for(started, everyone):
                found.append(started)
    return sorted(found, key=lambda s: s.start.process.start_ns)


def _loaders(timeline: Timeline) -> set[int]:
    """Processes that may have loaded a model: of thousands that come and go, few."""
    found = {c.tgid for c in timeline.calls if c.name == "model_load"}
    inodes = [f.ino for f in timeline.files.values() if _may_be_weights(f)]
    for kind in _FILE_USES:
        records = timeline.of_kind(kind)
        found |= set(np.unique(records["tgid"][np.isin(records["ino"], inodes)]).tolist())
    return found


def _waited_for(started: Started, everyone: Sequence[Served]) -> bool:
    """Whether an answered request has this load inside its wait, and so tells of it itself."""
    load = started.start.load_begin
    return load is not None and any(
        s.server == started.start.process.tgid
        and s.front.first_token_ns is not None
        and s.front.start_ns <= load.ns <= s.front.first_token_ns
        for s in everyone
    )


def _started(timeline: Timeline, process: Process) -> Started | None:
    before_ns = min(_first_answered_ns(timeline, process), process.gone_ns, timeline.end_ns)
    start = start_up_of(timeline, process, before_ns)
    if start.began is None or start.load_begin is None:
        return None
    old = _replaced(timeline, process)
    first = _first_act(timeline, process.start_ns - _RESTART_NS, old) if old else None
    begin_ns = first.ns if first else start.began.ns
    end = start.ready or start.load_end
    cutter = _Cutter(begin_ns, end.ns if end else before_ns)
    cutter.until("evict", start.began)
    cutter.until("launch", start.load_begin)
    cutter.until("load", start.load_end)
    cutter.until("init", start.ready)
    cutter.rest("unexplained", INFERRED, Evidence("analysis", "the start was not seen to its end"))
    return Started(start, old, tuple(cutter.phases)) if cutter.phases else None


_RESTART_NS = 120_000_000_000  # an older end belongs to no restart


def _replaced(timeline: Timeline, process: Process) -> Process | None:
    """The process of the same name that ended last before this one began."""
    name = process.facts.get("comm")
    gone = [
        life
        for lives in timeline.processes.values()
        for life in lives
        if life.facts.get("comm") == name
        and process.start_ns - _RESTART_NS <= life.gone_ns <= (process.exec_ns or 0)
        and _held_a_model(timeline, life)
    ]
    return max(gone, key=lambda p: p.gone_ns, default=None)


def critical_processes(
    timeline: Timeline, served: Served, phases: Sequence[Phase], everyone: Sequence[Served]
) -> list[int]:
    """For each phase, the process whose threads hold it up."""
    start = start_up(timeline, served)
    old = _evicted(timeline, served, start) if start and start.began else None
    front, server = served.front.tgid, served.server
    busy = {
        "evict": old.tgid if old else front,
        "queue": _holder(served, everyone, front),
        "ready_gap": front,
        "unexplained": server,
    }
    return [busy.get(phase.phase, server) for phase in phases]


def _holder(served: Served, everyone: Sequence[Served], otherwise: int) -> int:
    """The server of the request that this one waits behind."""
    ahead = [
        o
        for o in everyone
        if o is not served
        and o.front.start_ns <= served.front.start_ns < (o.front.end_ns or FOREVER)
    ]
    return ahead[-1].server if ahead else otherwise


def partition(timeline: Timeline, served: Served, everyone: Sequence[Served]) -> tuple[Phase, ...]:
    """The phases of one request. Sum of durations = the interval, to the nanosecond."""
    front = served.front
    end_ns = front.first_token_ns or min(front.end_ns or timeline.end_ns, timeline.end_ns)
    cutter = _Cutter(front.start_ns, max(end_ns, front.start_ns))
    start = start_up(timeline, served)
    answered = front.first_token_ns is not None
    if answered or _was_served(timeline, served):
        if start is not None and _switched(start, front):
            _before_ready(timeline, served, start, everyone, cutter)
        _until_work(timeline, served, start, everyone, cutter)
        _work(timeline, served, cutter, answered)
    cutter.rest("unexplained", INFERRED, Evidence("analysis", "nothing observed says what it was"))
    return tuple(cutter.phases)


def _was_served(timeline: Timeline, served: Served) -> bool:
    """Whether the process that took the request loaded or ran a model itself."""
    return bool(timeline.calls_of(served.server)) or served.front.headers_ns is not None


def _switched(start: StartUp, front: Exchange) -> bool:
    """Whether the server was still starting up or loading when the request arrived."""
    ready = start.ready or start.load_end
    return ready is not None and ready.ns > front.start_ns


def is_switch(timeline: Timeline, served: Served) -> bool:
    """Whether this request had to wait for its model to be loaded."""
    start = start_up(timeline, served)
    return start is not None and _switched(start, served.front)


def _before_ready(
    timeline: Timeline,
    served: Served,
    start: StartUp,
    everyone: Sequence[Served],
    cutter: _Cutter,
) -> None:
    """From the arrival to the moment the server is able to serve."""
    front = served.front
    if start.began is not None and start.began.ns > front.start_ns:
        _evict(timeline, served, start, everyone, cutter)
    elif _started_for_another(served, start, everyone):
        cutter.until("queue", start.ready or start.load_end)
        return
    elif start.load_begin is not None and _was_serving(
        timeline, served, start.process, start.load_begin.ns
    ):
        _evict_inside(timeline, served, start.load_begin, everyone, cutter)
    cutter.until("launch", start.load_begin)
    cutter.until("load", start.load_end)
    cutter.until("init", start.ready)


def _started_for_another(served: Served, start: StartUp, everyone: Sequence[Served]) -> bool:
    """The load was under way for an earlier request that waits for the same process."""
    begun = [edge.ns for edge in (start.began, start.load_begin) if edge is not None]
    return any(
        other.front.start_ns <= ns <= min(served.front.start_ns, other.last_ns)
        for other in everyone
        if other is not served and other.server == served.server
        for ns in begun
    )


def _was_serving(timeline: Timeline, served: Served, process: Process, load_ns: int) -> bool:
    """Whether the process had another model when the request came, which made room for its own:
    it had answered with it, or freed what it had loaded before recording began."""
    if load_ns <= served.front.start_ns:
        return False
    if _first_answered_ns(timeline, process) < served.front.start_ns:
        return True
    frees = _frees(timeline, served, load_ns)
    loads = timeline.calls_of(process.tgid, "model_load")
    # A start-up's memory-fit pass frees what it has just loaded.
    return process.exec_ns is None and any(c.start_ns < loads[0].start_ns for c in frees)


def _evict(
    timeline: Timeline,
    served: Served,
    start: StartUp,
    everyone: Sequence[Served],
    cutter: _Cutter,
) -> None:
    """The old model's end, up to the new process's execution."""
    assert start.began is not None
    old = _evicted(timeline, served, start)
    if old is None:
        cutter.until("queue", _blocked_until(served, everyone, start.began.ns))
        if start.began.ns - cutter.at_ns <= _ACTS_WITHIN_NS:
            cutter.until("queue", start.began, INFERRED)
        else:
            cutter.until("unexplained", start.began, INFERRED)
        return
    first = _first_act(timeline, served.front.start_ns, old)
    blocked = _blocked_until(served, everyone, first.ns if first else start.began.ns)
    cutter.until("queue", blocked)
    cutter.until("queue", first, INFERRED)
    cutter.until("evict", start.began)


def _evicted(timeline: Timeline, served: Served, start: StartUp) -> Process | None:
    """The process whose end made room: the last to go between arrival and launch."""
    assert start.began is not None
    ours = {served.front.tgid, served.server}
    gone = [
        life
        for lives in timeline.processes.values()
        for life in lives
        if life.tgid not in ours
        and served.front.start_ns <= life.gone_ns <= start.began.ns
        and (_held_a_model(timeline, life) or _is_runner_of(served.front.tgid, life))
    ]
    return max(gone, key=lambda p: p.gone_ns, default=None)


def _is_runner_of(front: int, process: Process) -> bool:
    """A child of the front that was there before the request: what it held was freed unseen."""
    parent = process.parent if process.parent is not None else process.facts.get("ppid")
    return parent == front and process.fork_ns is None


def _held_a_model(timeline: Timeline, process: Process) -> bool:
    if timeline.calls_of(process.tgid):
        return True
    for kind in (Kind.HELD, Kind.MMAP, Kind.OPEN):
        records = timeline.of_kind(kind)
        for key in np.unique(records[records["tgid"] == process.tgid][["dev", "ino"]]):
            file = timeline.files.get((int(key["dev"]), int(key["ino"])))
            if file is not None and file.is_weights:
                return True
    return any(e.tgid == process.tgid and e.generates for e in timeline.exchanges)


def _first_act(timeline: Timeline, after_ns: int, old: Process) -> Edge | None:
    """What first began to end the old process: a signal, a log line, or its own clean-up."""
    acts: list[Edge] = []
    signals = timeline.of_kind(Kind.SIGNAL)
    for signal in signals[signals["tgid"] == old.tgid]:
        acts.append(
            Edge(
                int(signal["start_ns"]),
                OBSERVED,
                Evidence("process", f"signal to pid {old.tgid}", int(signal["flags"]), "signal"),
            )
        )
    for mark in timeline.marks:
        if mark.name == "evicting":
            acts.append(Edge(mark.ns, OBSERVED, Evidence("log", "the front said it evicts")))
    for name in ("context_free", "model_free"):
        for call in timeline.calls_of(old.tgid, name):
            acts.append(
                Edge(call.start_ns, INFERRED, Evidence("call", f"pid {old.tgid} freed its model"))
            )
    inside = [a for a in acts if after_ns <= a.ns <= old.gone_ns]
    return min(inside, key=lambda a: a.ns, default=None)


def _evict_inside(
    timeline: Timeline,
    served: Served,
    load_begin: Edge,
    everyone: Sequence[Served],
    cutter: _Cutter,
) -> None:
    """A switch within one process: the old model is freed by a call."""
    frees = _frees(timeline, served, load_begin.ns)
    first_ns = min((c.start_ns for c in frees), default=load_begin.ns)
    cutter.until("queue", _blocked_until(served, everyone, first_ns))
    if not frees:
        unseen = Evidence("analysis", "nothing shows how the old model made room")
        cutter.until("unexplained", Edge(load_begin.ns, INFERRED, unseen))
        return
    freed = Evidence("call", "the old model began to be freed")
    cutter.until("queue", Edge(first_ns, INFERRED, freed))
    cutter.until("evict", load_begin)


def _frees(timeline: Timeline, served: Served, load_ns: int) -> list[Call]:
    """The calls that freed a model between the request's arrival and its load."""
    return [
        c
        for name in ("context_free", "model_free")
        for c in timeline.calls_of(served.server, name)
        if served.front.start_ns <= c.start_ns < load_ns
    ]


def _blocked_until(served: Served, everyone: Sequence[Served], limit_ns: int) -> Edge | None:
    """The end of the last earlier request that was still being answered when this one came, if it
    ended before `limit_ns`."""
    front = served.front
    blockers = [
        o.front
        for o in everyone
        if o is not served
        and o.front.start_ns <= front.start_ns < (o.front.end_ns or FOREVER)
        and (o.front.end_ns or FOREVER) <= limit_ns + _SLACK_NS
    ]
    if not blockers:
        return None
    last = max(blockers, key=lambda b: b.end_ns or 0)
    return Edge(
        min(last.end_ns or limit_ns, limit_ns),
        OBSERVED,
        Evidence("sockets", f"an earlier request (for {last.model}) was being answered"),
    )


# A front that has nothing to end acts within this; a longer wait needs an explanation.
_ACTS_WITHIN_NS = 100_000_000
# A blocker's last byte and the next act may be stamped in either order by two threads.
_SLACK_NS = 2_000_000


def _until_work(
    timeline: Timeline,
    served: Served,
    start: StartUp | None,
    everyone: Sequence[Served],
    cutter: _Cutter,
) -> None:
    """From being able to serve to the beginning of the work on this prompt."""
    if served.back is not None:
        received = served.back.start_ns
        cutter.until("queue", _blocked_until(served, everyone, received))
        evidence = Evidence("sockets", f"the front passed the request on to pid {served.server}")
        cutter.until("ready_gap", Edge(received, OBSERVED, evidence))
    else:
        accepted = _accepted_ns(timeline, served.front)
        if accepted is not None and start is not None and _switched(start, served.front):
            evidence = Evidence("sockets", "the server took the connection")
            cutter.until("ready_gap", Edge(accepted, OBSERVED, evidence))
    cutter.until("queue", _slot_wait(timeline, served))


def _slot_wait(timeline: Timeline, served: Served) -> Edge | None:
    """Waiting inside the server for a slot that another request holds."""
    mine = served.back or served.front
    first_token = mine.first_token_ns or served.last_ns
    ahead = [
        e
        for e in timeline.exchanges
        if e is not mine
        and e.tgid == mine.tgid
        and e.generates
        and e.start_ns <= mine.start_ns < (e.end_ns or FOREVER)
        and (e.end_ns or FOREVER) <= first_token
    ]
    if not ahead:
        return None
    given_ns = _slot_given_ns(timeline, mine)
    if given_ns is not None:
        return Edge(given_ns, OBSERVED, Evidence("log", "the server gave the request a slot"))
    end = max(e.end_ns or 0 for e in ahead)
    return Edge(end, INFERRED, Evidence("sockets", "the request ahead in this server was answered"))


def _slot_given_ns(timeline: Timeline, mine: Exchange) -> int | None:
    """When the server gave this request a slot: they are given in the order of arrival."""
    given: list[int] = []
    for mark in timeline.marks_of(mine.tgid, "slot_start"):
        if not given or mark.ns - given[-1] > _SLACK_NS:  # one start may write two lines
            given.append(mark.ns)
    for exchange in timeline.exchanges:
        if exchange.tgid != mine.tgid or not exchange.generates:
            continue
        if BEGAN_BEFORE in exchange.notes:  # and so may have had its slot
            continue
        until = exchange.first_token_ns or exchange.end_ns or FOREVER
        slot = next((ns for ns in given if exchange.start_ns <= ns <= until), None)
        if exchange is mine:
            return slot
        if slot is not None:
            given.remove(slot)
    return None


def _work(timeline: Timeline, served: Served, cutter: _Cutter, answered: bool) -> None:
    """Prefill and the first decode."""
    prefilled = _prefill_end(timeline, served, cutter.at_ns)
    cutter.until("prefill", prefilled)
    if not answered:
        return
    first_token = Evidence("sockets", "the first text left the server")
    if prefilled is None:
        cutter.rest("prefill", INFERRED, first_token)
    else:
        cutter.rest("first_decode", OBSERVED, first_token)


def _prefill_end(timeline: Timeline, served: Served, begin_ns: int) -> Edge | None:
    mine = served.back or served.front
    until = mine.first_token_ns or served.last_ns
    decodes = [
        c
        for name in ("decode", "encode")
        for c in timeline.calls_of(mine.tgid, name, begin_ns, until)
        if c.end_ns <= until
    ]
    if decodes:
        return _last_prompt_decode(sorted(decodes, key=lambda c: c.start_ns), mine)
    prompt_ms = mine.timings.get("prompt_ms")
    if prompt_ms is None and "prompt_eval_duration_ns" in mine.timings:
        prompt_ms = mine.timings["prompt_eval_duration_ns"] / 1e6
    if prompt_ms:
        return Edge(
            begin_ns + round(prompt_ms * 1e6),
            INFERRED,
            Evidence("response", "the server's own figure for the prompt", prompt_ms, "ms"),
        )
    return None


def _last_prompt_decode(decodes: Sequence[Call], mine: Exchange) -> Edge:
    """The call that processed the last prompt token: counted if the number is known, else the last
    call with more than one token."""
    wanted = None
    if mine.prompt_tokens is not None:
        wanted = mine.prompt_tokens - (mine.cached_tokens or 0)
    done = 0
    chosen = next((c for c in reversed(decodes) if c.value > 1), decodes[0])
    if wanted:
        for call in decodes:
            done += call.value
            if done >= wanted:
                chosen = call
                break
    return Edge(
        chosen.end_ns,
        OBSERVED,
        Evidence("call", "llama_decode returned with the last prompt token", wanted, "tokens"),
    )
