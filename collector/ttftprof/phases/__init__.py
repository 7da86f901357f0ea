"""Partitions a request's wait, from its arrival to its first token, into phases.

Pure: a timeline in, phases out. The phases of a request abut and cover its interval exactly; what
nothing observed explains is `unexplained`. Definitions of the phases: see `model.PHASES` and the
design; each edge names the rule and the fact it rests on, and says whether both were observed.

The method: find which process served the request (`served`), when that process was launched,
loaded and able to serve (`startup`), how the old model made room (`room`), and what the request
waited for on either side (`queues`, `work`); put these moments in order; cut them to the request's
interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ttftprof.model import Evidence, Phase
from ttftprof.phases.edges import INFERRED, OBSERVED, Cutter, Edge
from ttftprof.phases.naps import ASLEEP, Woken, with_naps
from ttftprof.phases.python_edges import prepared_until
from ttftprof.phases.queues import LOADED_FOR_ANOTHER, blocked_until, holder, never_reached
from ttftprof.phases.room import evicted, first_act, frees, was_serving
from ttftprof.phases.served import Served, requests_of, worker_of
from ttftprof.phases.starts import Started, starts_of
from ttftprof.phases.startup import StartUp, accepted_ns, start_up, taken_ns
from ttftprof.phases.work import until_work, work
from ttftprof.timeline import Timeline

__all__ = [
    "ASLEEP",
    "LOADED_FOR_ANOTHER",
    "Served",
    "StartUp",
    "Started",
    "critical_processes",
    "is_switch",
    "partition",
    "requests_of",
    "start_up",
    "starts_of",
    "waited_ns",
    "with_naps",
]

# A front that has nothing to end acts within this; a longer wait needs an explanation.
_ACTS_WITHIN_NS = 100_000_000


def critical_processes(timeline: Timeline, served: Served, phases: Sequence[Phase]) -> list[int]:
    """For each phase, the process whose threads hold it up."""
    start = start_up(timeline, served)
    front, server = served.front.tgid, start.process.tgid if start else served.server
    busy = {
        "evict": _who_makes_room(timeline, served, start) or front,
        "ready_gap": front,
        "unexplained": server,
    }
    launching = start.who_launches if start else lambda _phase: None
    return [
        holder(timeline, phase, served, front)
        if phase.phase == "queue"
        else launching(phase) or busy.get(phase.phase, server)
        for phase in phases
    ]


def _who_makes_room(timeline: Timeline, served: Served, start: StartUp | None) -> int | None:
    if start is None:
        return None
    if start.woken is not None:
        room = start.woken.made_room
        return worker_of(timeline, room.tgid) if room else None
    old = evicted(timeline, served, start) if start.began else None
    return old.tgid if old else None


def partition(timeline: Timeline, served: Served, everyone: Sequence[Served]) -> tuple[Phase, ...]:
    """The phases of one request. Sum of durations = the interval, to the nanosecond."""
    front = served.front
    end_ns = front.start_ns + waited_ns(timeline, served)
    cutter = Cutter(front.start_ns, end_ns, timeline.is_probed)
    start = start_up(timeline, served)
    answered = front.first_token_ns is not None
    if served.cut_off and start is not None:
        _until_cut_off(timeline, served, start, everyone, cutter)
    elif answered or _was_served(timeline, served):
        switched = start is not None and _switched(start, served)
        if switched and start is not None:
            _before_ready(timeline, served, start, everyone, cutter)
        until_work(timeline, served, start, cutter, switched)
        work(timeline, served, start, cutter, answered, switched)
    else:
        cutter.until("queue", never_reached(timeline, served))
    cutter.rest("unexplained", INFERRED, Evidence("analysis", "nothing observed says what it was"))
    return tuple(cutter.phases)


def waited_ns(timeline: Timeline, served: Served) -> int:
    """How long the client waited for its first token, perhaps in vain."""
    front = served.front
    end_ns = front.first_token_ns or min(front.end_ns or timeline.end_ns, timeline.end_ns)
    return max(end_ns - front.start_ns, 0)


def _was_served(timeline: Timeline, served: Served) -> bool:
    """Whether the process that took the request loaded or ran a model itself."""
    return bool(timeline.calls_of(served.server)) or served.front.headers_ns is not None


def _switched(start: StartUp, served: Served) -> bool:
    """Whether the server was still starting up or loading when the request arrived."""
    ready = start.ready or start.load_end
    return served.cut_off or (ready is not None and ready.ns > served.front.start_ns)


def is_switch(timeline: Timeline, served: Served) -> bool:
    """Whether this request had to wait for its model to be loaded."""
    start = start_up(timeline, served)
    return start is not None and _switched(start, served)


def _until_cut_off(
    timeline: Timeline,
    served: Served,
    start: StartUp,
    everyone: Sequence[Served],
    cutter: Cutter,
) -> None:
    """As far as the server got by the time the client left: the next phase was under way."""
    _before_ready(timeline, served, start, everyone, cutter)
    reached = [("ready_gap", start.ready), ("init", start.load_end), ("load", start.load_begin)]
    here = next((phase for phase, edge in reached if edge and edge.ns <= cutter.at_ns), "launch")
    cutter.rest(here, INFERRED, Evidence("sockets", "the client left while this went on"))


def _before_ready(
    timeline: Timeline,
    served: Served,
    start: StartUp,
    everyone: Sequence[Served],
    cutter: Cutter,
) -> None:
    """From the arrival to the moment the server is able to serve."""
    front = served.front
    if _started_for_another(served, start, everyone):
        loaded = start.ready or start.load_end
        for_another = Evidence("sockets", LOADED_FOR_ANOTHER)
        cutter.until("queue", replace(loaded, evidence=for_another) if loaded else None)
        return
    if start.woken is not None and start.woken.calls[0].start_ns > front.start_ns:
        _put_to_sleep(timeline, served, start.woken, cutter)
    elif start.began is not None and start.began.ns > front.start_ns:
        _evict(timeline, served, start, cutter)
    elif (
        start.woken is None
        and start.load_begin is not None
        and was_serving(timeline, served, start.process, start.load_begin.ns)
    ):
        _make_room_inside(timeline, served, start.load_begin, cutter)
    if start.woken is None and _in_hand_before_load(timeline, served, start):
        _running_until_load(timeline, served, start, cutter)
    for edge, _ in start.launching():
        cutter.until("launch", edge)
    cutter.until("launch", start.load_begin, "" if start.began else INFERRED)
    cutter.until("load", start.load_end)
    cutter.until("init", start.ready)


def _started_for_another(served: Served, start: StartUp, everyone: Sequence[Served]) -> bool:
    """The load was, or came, under way for an earlier request that waits for the same process."""
    begun = [edge.ns for edge in (start.began, start.load_begin) if edge is not None]
    return any(
        _began_for(other, served, ns)
        for other in everyone
        if other is not served and other.server == served.server
        for ns in begun
    )


def _began_for(other: Served, served: Served, ns: int) -> bool:
    """Whether what began at a moment was for the other request. Fronts serve the first that comes,
    and go on for one who has hung up: what they pass on for him tells until when."""
    first, mine = other.front, served.front
    if ns <= mine.start_ns:
        return first.start_ns <= ns <= other.last_ns
    if first.model != mine.model or first.start_ns >= mine.start_ns:
        return False
    return ns <= max(other.last_ns, other.received_ns)


def _evict(
    timeline: Timeline,
    served: Served,
    start: StartUp,
    cutter: Cutter,
) -> None:
    """The old model's end, up to the new process's execution."""
    assert start.began is not None
    old = evicted(timeline, served, start)
    if old is None:
        cutter.until("queue", blocked_until(timeline, served, start.began.ns))
        if start.began.ns - cutter.at_ns <= _ACTS_WITHIN_NS:
            cutter.until("queue", start.began, INFERRED)
        else:
            cutter.until("unexplained", start.began, INFERRED)
        return
    first = first_act(timeline, served.front.start_ns, old)
    blocked = blocked_until(timeline, served, first.ns if first else start.began.ns, old.tgid)
    cutter.until("queue", blocked)
    cutter.until("queue", first, INFERRED)
    cutter.until("evict", start.began)


def _put_to_sleep(timeline: Timeline, served: Served, woken: Woken, cutter: Cutter) -> None:
    """Another engine is put to sleep, if that is seen, up to the call that wakes this one."""
    begin, *_ = woken.edges()
    room = woken.made_room
    cutter.until("queue", blocked_until(timeline, served, room.start_ns if room else begin.ns))
    if room is not None:
        told = Evidence("sockets", "another engine was told to sleep", room.tgid, "pid")
        cutter.until("queue", Edge(room.start_ns, OBSERVED, told))
        cutter.until("evict", begin)
    elif served.received_ns < begin.ns:
        cutter.until("queue", woken.asleep_until())
    at_once = begin.ns - cutter.at_ns <= _ACTS_WITHIN_NS
    cutter.until("queue" if at_once else "unexplained", begin, INFERRED)


def _make_room_inside(
    timeline: Timeline,
    served: Served,
    load_begin: Edge,
    cutter: Cutter,
) -> None:
    """A switch within one process: the old model is freed by a call, if that is seen."""
    freed = frees(timeline, served, load_begin.ns)
    first_ns = min((c.start_ns for c in freed), default=load_begin.ns)
    cutter.until("queue", blocked_until(timeline, served, first_ns))
    if freed:
        evidence = Evidence("call", "the old model began to be freed")
        cutter.until("queue", Edge(first_ns, INFERRED, evidence))
        cutter.until("evict", load_begin)
    elif served.server not in timeline.python or timeline.calls_of(served.server):
        unseen = Evidence("analysis", "nothing shows how the old model made room")
        cutter.until("unexplained", Edge(load_begin.ns, INFERRED, unseen))


def _in_hand_before_load(timeline: Timeline, served: Served, start: StartUp) -> bool:
    """A process that takes a request and then loads for it runs: nothing is being started."""
    mine, load = served.last_hop, start.load_begin
    if load is None or served.worker is not None:
        return False
    if mine.first_token_ns is None and accepted_ns(timeline, mine) is None:
        return False  # it was given up in the backlog
    return mine.start_ns < load.ns and taken_ns(timeline, mine) < load.ns


def _running_until_load(
    timeline: Timeline,
    served: Served,
    start: StartUp,
    cutter: Cutter,
) -> None:
    """From the arrival to the load of a process that runs: until it takes the request, and what it
    then does, as far as looks at its Python code tell."""
    assert start.load_begin is not None
    load_ns, pid = start.load_begin.ns, served.server
    cutter.until("queue", blocked_until(timeline, served, load_ns))
    taken = taken_ns(timeline, served.last_hop)
    not_taken = Evidence("sockets", f"pid {pid} had not yet taken the connection", pid, "pid")
    at_once = taken - cutter.at_ns <= _ACTS_WITHIN_NS
    cutter.until("queue" if at_once else "unexplained", Edge(taken, INFERRED, not_taken))
    prepared = prepared_until(timeline, start.process, cutter.at_ns, load_ns)
    cutter.until("launch", prepared)
    unmarked = Evidence("analysis", f"nothing shows what pid {pid} did before it began to load")
    cutter.until("unexplained", Edge(load_ns, INFERRED, unmarked))
