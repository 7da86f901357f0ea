"""When a process was launched, loaded and able to serve: markers first, files and sockets else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

import numpy as np

from ttftprof.activities import process_activities
from ttftprof.events import Kind, MmapFlag, ReadFlag, Records, duration_end
from ttftprof.grouping import split_by
from ttftprof.model import Evidence, Phase
from ttftprof.phases.edges import INFERRED, OBSERVED, Edge
from ttftprof.phases.holders import files_used, has_weights, on_files, weights_of
from ttftprof.phases.naps import Woken, woken
from ttftprof.phases.python_edges import began_to_run, load_ended
from ttftprof.phases.served import Served, ancestors, children_of
from ttftprof.threads import FOREVER
from ttftprof.timeline import Call, Exchange, FileFacts, Process, Timeline
from ttftprof.windows import Ints

# llama.cpp's empty run decodes the tokens that begin and end a text: two at most.
WARM_UP_TOKENS = 2


@dataclass(frozen=True, slots=True)
class StartUp:
    """How one process came to serve one model; None where nothing shows it.

    `shards`: all files of the weights, the biggest (`weights`) first. `beside`: other processes
    of the same engine that load a part of them. `servers`: those that have none of them and were
    started beside it (TGI's router). `woken`: it was asleep, with its weights put away.
    """

    process: Process
    began: Edge | None  # executed, or for a load inside a running process None
    load_begin: Edge | None
    load_end: Edge | None
    ready: Edge | None
    shards: tuple[FileFacts, ...] = ()
    launchers: tuple[Process, ...] = ()  # of the same engine, each started to start the next
    beside: tuple[Process, ...] = ()
    servers: tuple[Process, ...] = ()
    woken: Woken | None = None

    @property
    def weights(self) -> FileFacts | None:
        return self.shards[0] if self.shards else None

    def launching(self) -> list[tuple[Edge, int]]:
        """Who holds a launch up until when: each launcher until the next process is started."""
        chain = (*self.launchers, self.process)
        return [
            (Edge(after.runs_ns, OBSERVED, _was_started(after)), before.tgid)
            for before, after in pairwise(chain)
        ]

    def who_launches(self, phase: Phase) -> int | None:
        """The process that held up a part of a launch; None if that was the one with the weights,
        or it is no launch."""
        if phase.phase != "launch":
            return None
        return next((tgid for edge, tgid in self.launching() if phase.end_ns <= edge.ns), None)

    @property
    def members(self) -> set[int]:
        """The processes that have the weights."""
        return {self.process.tgid, *(other.tgid for other in self.beside)}


def start_up(timeline: Timeline, served: Served) -> StartUp | None:
    """When the serving process was launched, loaded and able to serve this request's model."""
    return timeline.derived(_start_up, served)


def _start_up(timeline: Timeline, served: Served) -> StartUp | None:
    at_ns = served.last_ns if served.worker else served.received_ns
    process = timeline.process_at(served.server, at_ns)
    if process is None:
        return None
    front = served.front.tgid
    in_hand_ns = _weights_taken_up_in_hand(timeline, served, process)
    if in_hand_ns is not None:
        return start_up_of(timeline, process, served.last_ns, in_hand_ns, front)
    begins_ns = _work_begins(timeline, served, process)
    start = start_up_of(timeline, process, begins_ns, front=front)
    nap = woken(timeline, served)
    if nap is not None:
        begin, loaded, ready = nap.edges()
        return StartUp(process, None, begin, loaded, ready, start.shards, woken=nap)
    beside = _beside(timeline, process) if served.worker is not None else ()
    return _all_of(start, [start_up_of(timeline, p, begins_ns, front=front) for p in beside])


def _beside(timeline: Timeline, process: Process) -> tuple[Process, ...]:
    """Its sisters with weights: an engine's workers, each with a part of the model."""
    engine, parent = timeline.engine_of(process.tgid), process.parent_pid
    if engine is None or parent is None:
        return ()
    return tuple(
        life
        for lives in timeline.processes.values()
        for life in lives
        if life is not process
        and life.parent_pid == parent
        and life.start_ns < process.gone_ns
        and life.gone_ns > process.start_ns
        and timeline.engine_of(life.tgid) is engine
        and has_weights(timeline, life)
    )


def _all_of(start: StartUp, others: Sequence[StartUp]) -> StartUp:
    """One start of all workers: the load begins with the first and ends with the last, whose start
    is the one that was waited for."""
    loaded = [s for s in (start, *others) if s.load_begin is not None]
    if len(loaded) < 2:
        return start
    last = max(loaded, key=lambda s: s.load_end.ns if s.load_end else FOREVER)
    begins = [s.load_begin for s in loaded if s.load_begin is not None]
    shards = {file.key: file for s in loaded for file in s.shards}
    ends = [s.ready for s in loaded if s.ready is not None]
    return replace(
        last,
        load_begin=min(begins, key=lambda edge: edge.ns),
        ready=max(ends, key=lambda edge: edge.ns, default=None),
        shards=tuple(sorted(shards.values(), key=lambda f: -f.size_bytes)),
        beside=tuple(s.process for s in loaded if s is not last),
    )


def start_up_of(
    timeline: Timeline,
    process: Process,
    before_ns: int,
    in_hand_ns: int | None = None,
    front: int | None = None,
) -> StartUp:
    """How a process came to serve what it loaded last before a moment.

    `in_hand_ns`: when it took the request with which in hand it took up the weights; `front`: who
    passed the request on, and so was there before.
    """
    load = _weights_call(timeline, process, before_ns)
    shards = weights_of(timeline, process, load, before_ns, in_hand_ns)
    load_begin, load_end = _load_edges(timeline, process, load, shards, before_ns)
    if in_hand_ns is not None and load_begin is not None:
        load_end = load_ended(timeline, process, load_begin.ns, before_ns) or load_end
    launchers = _launchers(timeline, process, front)
    first = launchers[0] if launchers else process
    began = None
    if first.execs:
        began = Edge(
            _launched_ns(timeline, first),
            OBSERVED,
            Evidence("process", f"pid {first.tgid} was executed", first.tgid, "pid"),
        )
    family = _family(timeline, process, launchers, front)
    ready = _ready(timeline, family, load_end or load_begin or began, before_ns)
    if in_hand_ns is not None and load_end is not None:
        ready = began_to_run(timeline, process, load_end.ns, before_ns) or ready
    return StartUp(
        process, began, load_begin, load_end, ready, shards, launchers, servers=family.servers
    )


def _launched_ns(timeline: Timeline, process: Process) -> int:
    """Its last execution, or the first of a row in which it did nothing but execute the next."""
    at = process.execs[-1]
    for earlier in reversed(process.execs[:-1]):
        used = timeline.calls_of(process.tgid, None, earlier, at) or any(
            e.tgid == process.tgid and earlier <= e.start_ns < at for e in timeline.exchanges
        )
        if used:
            break
        at = earlier
    return at


def _was_started(process: Process) -> Evidence:
    return Evidence("process", f"pid {process.tgid} was started", process.tgid, "pid")


def _launchers(timeline: Timeline, process: Process, front: int | None) -> tuple[Process, ...]:
    """The processes of an engine that start others of its own to hold the weights (an API server,
    its engine core), from the first that was executed while recording."""
    found: list[Process] = []
    known, engine = 0, timeline.engine_of(process.tgid)
    for tgid in ancestors(timeline, process):
        parent = timeline.process_at(tgid, process.start_ns)
        if parent is None or tgid == front or not (parent.execs or parent.is_worker):
            break
        if engine is None or timeline.engine_of(tgid) is not engine:
            break
        found.append(parent)
        known = len(found) if parent.execs else known
    return tuple(reversed(found[:known]))


def _weights_taken_up_in_hand(timeline: Timeline, served: Served, process: Process) -> int | None:
    """When a server without marked calls took the request for which it first mapped or read a file
    of weights; None if it did not."""
    if served.back is not None or served.worker is not None or timeline.calls_of(served.server):
        return None
    taken = taken_ns(timeline, served.front)
    used = files_used(timeline, process, taken, served.last_ns)
    touched = (
        _first_touch(timeline, process, file, served.last_ns) for file in used if file.is_weights
    )
    return taken if any(edge is not None and edge.ns >= taken for edge in touched) else None


def _work_begins(timeline: Timeline, served: Served, process: Process) -> int:
    """The latest moment at which the server can have become able to serve this request."""
    if served.worker is not None:
        first = first_prompt_call(timeline, process, served)
        if first is not None or served.back is None:
            return first.start_ns if first else served.last_ns
    begins_ns = (
        served.back.start_ns if served.back is not None else taken_ns(timeline, served.front)
    )
    # A load that goes on with the request in hand is what the request waits for.
    reloads = any(
        begins_ns < c.end_ns and c.start_ns < served.last_ns
        for c in timeline.calls_of(served.server, "model_load")
    )
    return served.last_ns if reloads else begins_ns


def first_prompt_call(timeline: Timeline, process: Process, served: Served) -> Call | None:
    """Where no request was seen to reach the process: its first decode inside the wait, after its
    last load, that is no empty run."""
    loads = timeline.calls_of(process.tgid, "context_init", 0, served.last_ns)
    after_ns = max(served.front.start_ns, loads[-1].start_ns if loads else 0)
    decodes = timeline.calls_of(process.tgid, "decode", after_ns, served.last_ns)
    return next((c for c in decodes if c.value > WARM_UP_TOKENS), None)


def taken_ns(timeline: Timeline, exchange: Exchange) -> int:
    """When the server itself took the request, perhaps long after it had arrived."""
    return max(accepted_ns(timeline, exchange) or 0, exchange.start_ns)


def accepted_ns(timeline: Timeline, exchange: Exchange) -> int | None:
    mine = timeline.derived(_accepted, None).get(exchange.socket)
    if mine is None:
        return None
    early = int(np.searchsorted(mine, exchange.first_token_ns or FOREVER, side="right"))
    return int(mine[early - 1]) if early else None


def _accepted(timeline: Timeline, _: None) -> dict[int, Ints]:
    """{socket: when it was accepted, in order}: its address is given out again."""
    accepts = timeline.of_kind(Kind.ACCEPT)
    return {
        ino: own["start_ns"].astype(np.int64) for (ino,), own in split_by(accepts, "ino").items()
    }


# -- the load -------------------------------------------------------------------------------------


def _weights_call(timeline: Timeline, process: Process, before_ns: int) -> Call | None:
    """The last model load begun before the request was worked on: an earlier one in the same
    process is the memory-fit pass, or another model."""
    loads = [
        c
        for c in timeline.calls_of(process.tgid, "model_load")
        if process.start_ns <= c.start_ns < before_ns
    ]
    return loads[-1] if loads else None


def _load_edges(
    timeline: Timeline,
    process: Process,
    call: Call | None,
    shards: Sequence[FileFacts],
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
    if under_way is not None or not shards:
        return None, under_way
    return _load_edges_by_files(timeline, process, shards, before_ns)


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


# What a server says when it goes on to something else, though pages of weights may come yet.
_AFTER_LOAD = ("context_begin", "warmup", "graphs_begin")


def _load_edges_by_files(
    timeline: Timeline, process: Process, shards: Sequence[FileFacts], before_ns: int
) -> tuple[Edge | None, Edge | None]:
    """Without marked calls: from the first map or bulk read of any shard to the server's word that
    they are loaded, or else to the last activity on them before the request was worked on."""
    begins = [_first_touch(timeline, process, shard, before_ns) for shard in shards]
    begin = min((b for b in begins if b is not None), key=lambda b: b.ns, default=None)
    if begin is None:
        return None, None
    told = [
        m.ns for m in timeline.marks_of(process.tgid, "load_end") if begin.ns < m.ns <= before_ns
    ]
    if told:
        said = Evidence("log", "the server said that the weights are loaded")
        return begin, Edge(told[-1], OBSERVED, said)
    after = [
        m.ns
        for name in _AFTER_LOAD
        for m in timeline.marks_of(process.tgid, name)
        if m.ns > begin.ns
    ]
    return begin, _last_touch(timeline, process, shards, begin.ns, min([before_ns, *after]))


def _first_touch(
    timeline: Timeline, process: Process, file: FileFacts, before_ns: int
) -> Edge | None:
    """Where the last session that took up the file began; a session lasts from one opening of it to
    the next. A header-only pass opens, reads a little and closes: that takes up nothing."""
    maps = on_files(timeline, Kind.MMAP, process, [file], before_ns)
    maps = maps[(maps["a"] >= file.size_bytes // 2) & ((maps["flags"] & MmapFlag.FAILED) == 0)]
    reads = on_files(timeline, Kind.READ, process, [file], before_ns)
    opens = on_files(timeline, Kind.OPEN, process, [file], before_ns)["start_ns"]
    for opened, until in reversed(list(pairwise([0, *map(int, opens), FOREVER]))):
        mapped, read = (_begun_within(records, opened, until) for records in (maps, reads))
        if len(mapped):
            what = Evidence("files", "the weights were mapped", int(mapped[-1]["a"]), "bytes")
            return Edge(int(mapped[-1]["start_ns"]), OBSERVED, what)
        for again in reversed(_passes(read, file.size_bytes)):
            read_bytes = int(again["a"].sum())
            if read_bytes >= file.size_bytes // 10:
                what = Evidence("files", "the weights were first read", read_bytes, "bytes")
                return Edge(int(again[0]["start_ns"]), OBSERVED, what)
    return None


def _passes(reads: Records, size_bytes: int) -> list[Records]:
    """The reads of one opening, cut where most of the file had been read and its front is read
    again: a server that keeps its files open loads from them more than once. (A read by io_uring
    does not say where.)"""
    known = (reads["flags"] & ReadFlag.IO_URING) == 0
    fronts = np.flatnonzero(known & (reads["b"] < size_bytes // 100))
    before = np.cumsum(reads["a"]) - reads["a"]
    cuts = [0]
    for earlier, at in pairwise(fronts.tolist()):
        if earlier >= cuts[-1] and before[at] - before[cuts[-1]] > size_bytes // 2:
            cuts.append(at)
    return [reads[begin:end] for begin, end in pairwise([*cuts, len(reads)]) if end > begin]


def _begun_within(records: Records, start_ns: int, end_ns: int) -> Records:
    found: Records = records[(records["start_ns"] >= start_ns) & (records["start_ns"] < end_ns)]
    return found


def _last_touch(
    timeline: Timeline,
    process: Process,
    shards: Sequence[FileFacts],
    after_ns: int,
    before_ns: int,
) -> Edge:
    reads, maps = (
        _begun_within(on_files(timeline, kind, process, shards, before_ns), after_ns, FOREVER)
        for kind in (Kind.READ, Kind.MMAP)
    )
    ends = [after_ns, *duration_end(reads).tolist(), *duration_end(maps).tolist()]
    if len(maps) or not len(reads):
        ends += [_last_growth_ns(file, after_ns, before_ns) for file in shards]
    return Edge(
        max(ends),
        INFERRED,
        Evidence("files", "last activity on the weights before the server was able to serve"),
    )


def _last_growth_ns(file: FileFacts, after_ns: int, before_ns: int) -> int:
    """When pages of a file last came or were mapped in an interval; 0 if never."""
    first = int(np.searchsorted(file.looks_ns, after_ns, side="right"))
    last = max(int(np.searchsorted(file.looks_ns, before_ns)), first)
    rows = file.rows[max(first - 1, 0) : last]  # with the one before, if there is one
    activity = (rows["added_pages"] + rows["faults"] + rows["map_arounds"]).astype(np.int64)
    grew = np.flatnonzero(np.diff(activity) if first else np.diff(activity, prepend=0))
    return int(file.looks_ns[first + grew[-1]]) if len(grew) else 0


# -- able to serve --------------------------------------------------------------------------------


def first_answered_ns(timeline: Timeline, process: Process, after_ns: int = 0) -> int:
    """When the process took the first request that it answered with text after a moment; FOREVER
    if it answered none."""
    after_ns = max(after_ns, process.start_ns)
    first_text_ns, taken = timeline.derived(_answers_of, process.tgid)
    inside = (first_text_ns >= after_ns) & (first_text_ns <= process.gone_ns)
    return int(taken[inside].min(initial=FOREVER))


def _answers_of(timeline: Timeline, tgid: int) -> tuple[Ints, Ints]:
    """(first text, when it was taken) of each request that a process answered with text."""
    answered = [e for e in timeline.exchanges if e.tgid == tgid and e.first_token_ns]
    first_text_ns = np.array([e.first_token_ns for e in answered], np.int64)
    return first_text_ns, np.array([taken_ns(timeline, e) for e in answered], np.int64)


@dataclass(frozen=True, slots=True)
class _Family:
    """A process and those that share its start: by pid, it first. `above`: all it descends from."""

    process: Process
    launchers: tuple[int, ...]  # nearest first
    servers: tuple[Process, ...]  # without weights, started beside it
    above: tuple[int, ...]

    @property
    def tgids(self) -> tuple[int, ...]:
        return (self.process.tgid, *(s.tgid for s in self.servers), *self.launchers)


def _family(
    timeline: Timeline, process: Process, launchers: Sequence[Process], front: int | None
) -> _Family:
    """Of one engine, one process may compute and another serve: an API server above its core, or a
    router beside it, started by the same launcher. A front that was there before and starts servers
    of its own kind is no part of their start."""
    above = tuple(ancestors(timeline, process))
    if launchers or process.execs:
        own = [launcher.tgid for launcher in reversed(launchers)]
    else:
        engine = timeline.engine_of(process.tgid)
        near = takewhile(lambda tgid: tgid != front, above)
        own = [tgid for tgid in near if engine is not None and timeline.engine_of(tgid) is engine]
    servers = tuple(
        life
        for tgid in own
        for life in children_of(timeline, tgid)
        if life is not process
        and life.start_ns < process.gone_ns
        and life.gone_ns > process.start_ns
        and timeline.engine_of(life.tgid) is timeline.engine_of(process.tgid)
        and life.tgid not in own
        and not has_weights(timeline, life)
    )
    return _Family(process, tuple(own), servers, above)


def _ready(timeline: Timeline, family: _Family, after: Edge | None, before_ns: int) -> Edge | None:
    """When a process became able to serve after `after`, best fact first; None if it was able
    before recording began."""
    if after is None:
        return None
    ways = (_said_ready, _last_empty_run, _began_to_listen, _passed_a_check)
    found = (way(timeline, family, after.ns, before_ns) for way in ways)
    return next((edge for edge in found if edge is not None), None)


def _said_ready(timeline: Timeline, family: _Family, after_ns: int, before_ns: int) -> Edge | None:
    """By its own log line, or that of the process in front of it that shares its start."""
    for tgid, name in _who_may_say_it(family):
        for mark in timeline.marks_of(tgid, name):
            if after_ns <= mark.ns <= before_ns:
                said = Evidence("log", "the server said that the model is loaded")
                return Edge(mark.ns, OBSERVED, said)
    return None


def _who_may_say_it(family: _Family) -> Iterator[tuple[int, str]]:
    """In order: of one engine, whose server may listen before it is able, first what that says."""
    yield from ((tgid, "model_loaded") for tgid in family.tgids)
    yield family.process.tgid, "serving"
    yield from ((server.tgid, "serving") for server in family.servers)
    yield from ((parent, "serving") for parent in family.above)


def _last_empty_run(
    timeline: Timeline, family: _Family, after_ns: int, before_ns: int
) -> Edge | None:
    """Contexts are made and run empty. Once a request was taken, a decode is somebody's answer."""
    process = family.process
    first_ns = first_answered_ns(timeline, process, after_ns)
    begun_by = {"context_init": before_ns, "decode": first_ns, "encode": first_ns}
    calls = [
        c
        for name, until in begun_by.items()
        for c in timeline.calls_of(process.tgid, name, after_ns, min(until, before_ns))
        if c.end_ns <= before_ns
    ]
    if not calls:
        return None
    last = max(calls, key=lambda c: c.end_ns)
    said = Evidence("call", f"last call before it could serve: {last.name} returned")
    return Edge(last.end_ns, INFERRED, said)


def _began_to_listen(
    timeline: Timeline, family: _Family, after_ns: int, before_ns: int
) -> Edge | None:
    listens = timeline.of_kind(Kind.LISTEN)
    own = np.isin(listens["tgid"], family.tgids)
    mine = listens[own & (listens["start_ns"] <= before_ns)]
    late = mine["start_ns"][mine["start_ns"] >= after_ns]
    if not len(late):
        return None
    looks = _looks(timeline, family, int(late[-1]), before_ns)
    if any(look.status != 200 for look in looks):
        return None  # it listened before it was able to serve
    return Edge(int(late[-1]), OBSERVED, Evidence("sockets", "it began to listen"))


def _looks(timeline: Timeline, family: _Family, after_ns: int, before_ns: int) -> list[Exchange]:
    """The looks of others at a server that were answered in an interval."""
    return [
        e
        for e in timeline.derived(_other_questions, None)
        if e.tgid in family.tgids and e.headers_ns and after_ns <= e.headers_ns <= before_ns
    ]


def _other_questions(timeline: Timeline, _: None) -> list[Exchange]:
    """What generates nothing."""
    return [e for e in timeline.exchanges if not e.generates]


def _passed_a_check(
    timeline: Timeline, family: _Family, after_ns: int, before_ns: int
) -> Edge | None:
    """A look at it that it passed; it was able to before, from when it had nothing more to do."""
    looks = _looks(timeline, family, after_ns, before_ns)
    asked_by_itself = _ports_of(timeline, family.tgids)
    passed = next(
        (e for e in looks if e.status == 200 and e.remote_port not in asked_by_itself), None
    )
    if passed is None or passed.headers_ns is None:
        return None
    refused = [e.headers_ns for e in looks if e.status != 200 and e.start_ns < passed.start_ns]
    idle_ns = idle_since_ns(
        timeline, family.process, max([after_ns, *(r for r in refused if r)]), passed.start_ns
    )
    if idle_ns is not None:
        at_rest = "it had nothing more to do until the first health check, which it passed"
        return Edge(idle_ns, INFERRED, Evidence("scheduler", at_rest))
    found = Evidence("sockets", "first health check that it passed")
    return Edge(passed.headers_ns, INFERRED, found)


def _ports_of(timeline: Timeline, tgids: Sequence[int]) -> set[int]:
    """The local ports of connections that these processes opened."""
    connects = timeline.of_kind(Kind.CONNECT)
    return {int(a) >> 16 for a in connects["a"][np.isin(connects["tgid"], tgids)]}


_AT_REST = ("idle", "lock")
_REST_NS = 20_000_000  # a shorter pause is no rest
_STIR_NS = 1_000_000  # nor is this an end of one: a timer, a thread that looks about


def idle_since_ns(timeline: Timeline, process: Process, after_ns: int, until_ns: int) -> int | None:
    """Since when a process has only waited for others, up to a moment; None if it has not."""
    since = until_ns
    for piece in reversed(process_activities(timeline, process.tgid, after_ns, until_ns)):
        if piece.activity not in _AT_REST and piece.duration_ns > _STIR_NS:
            break
        since = piece.start_ns
    return since if until_ns - since >= _REST_NS else None
