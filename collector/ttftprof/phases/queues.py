"""Waiting behind others: in the front, for a slot of the server, for room in its KV cache."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from ttftprof import scale
from ttftprof.grouping import between
from ttftprof.model import Evidence, Phase
from ttftprof.phases.edges import INFERRED, OBSERVED, Edge
from ttftprof.phases.served import TOGETHER_NS, Served, requests_of
from ttftprof.sources.http import BEGAN_BEFORE
from ttftprof.threads import FOREVER
from ttftprof.timeline import EngineLoad, Exchange, Timeline

LOADED_FOR_ANOTHER = "its model was being loaded for an earlier request"

# A blocker's last byte and the next act may be stamped in either order by two threads.
SLACK_NS = 2_000_000


def blocked_until(
    timeline: Timeline, served: Served, limit_ns: int, old: int | None = None
) -> Edge | None:
    """The end of the last request that was answered before this one's turn came, if it ended before
    `limit_ns`: one that was there already, or one that `old`, who had to make room, still had."""
    front = served.front
    blockers = [
        o.front
        for o in _in_flight(timeline, front.start_ns, limit_ns)
        if o is not served
        and (o.front.start_ns <= front.start_ns or o.server == old)
        and (o.front.end_ns or FOREVER) <= limit_ns + SLACK_NS
        and not _waited_alike(o.front, front)
    ]
    if not blockers:
        return None
    last = max(blockers, key=lambda b: b.end_ns or 0)
    which = "an earlier request" if last.start_ns <= front.start_ns else "a request taken before it"
    return Edge(
        min(last.end_ns or limit_ns, limit_ns),
        OBSERVED,
        Evidence("sockets", f"{which} (for {last.model}) was being answered"),
    )


def never_reached(timeline: Timeline, served: Served) -> Edge | None:
    """Of a request that its front passed to nobody and that ended without a token: how long an
    earlier one was in that front's hands."""
    front = served.front
    if served.back is not None or served.worker is not None or front.first_token_ns is not None:
        return None
    ahead = [
        o.front
        for o in _in_flight(timeline, front.start_ns, front.start_ns)
        if o.front.tgid == front.tgid and o.server != front.tgid
    ]
    if not ahead:
        return None
    last = max(ahead, key=lambda a: a.end_ns or FOREVER)
    found = Evidence("sockets", f"an earlier request (for {last.model}) was being answered")
    return Edge(last.end_ns or FOREVER, INFERRED, found)


def _waited_alike(other: Exchange, mine: Exchange) -> bool:
    """Whether it hung up on the same model before a token: it waited for the same thing."""
    return other.model == mine.model and other.first_token_ns is None


def holder(timeline: Timeline, phase: Phase, served: Served, otherwise: int) -> int:
    """The process that holds up a part of a queue: once its server has the request, that one;
    before, the server of another request in flight, of several the one that lived most of it."""
    if served.last_hop is not served.front and phase.start_ns >= served.received_ns:
        return served.server
    beside = _in_flight(timeline, phase.start_ns, phase.end_ns)
    others = {o.server for o in beside if o is not served}
    lived = {tgid: _lived_ns(timeline, tgid, phase) for tgid in others}
    longest = max(lived.values(), default=0)
    if not longest:
        return otherwise
    fitting = sorted(tgid for tgid, ns in lived.items() if ns == longest)
    return served.server if served.server in fitting else fitting[-1]


@dataclass(frozen=True, slots=True)
class _InFlight:
    """All requests by start, each with its place among all; `latest_end_ns`: up to each."""

    requests: Sequence[tuple[int, Served]]
    starts_ns: list[int]
    latest_end_ns: list[int]

    @classmethod
    def of(cls, timeline: Timeline, _: None) -> Self:
        own = sorted(enumerate(requests_of(timeline)), key=lambda one: one[1].front.start_ns)
        ends = accumulate((served.front.end_ns or FOREVER for _, served in own), max)
        return cls(own, [served.front.start_ns for _, served in own], list(ends))


def _in_flight(timeline: Timeline, start_ns: int, end_ns: int) -> list[Served]:
    """The requests that began before `end_ns` and ended after `start_ns`, in the order of all."""
    known = timeline.derived(_InFlight.of, None)
    first = bisect_right(known.latest_end_ns, start_ns)
    there = known.requests[first : bisect_left(known.starts_ns, end_ns)]
    return [s for _, s in sorted(there, key=_place) if start_ns < (s.front.end_ns or FOREVER)]


def _place(one: tuple[int, Served]) -> int:
    return one[0]


def _lived_ns(timeline: Timeline, tgid: int, phase: Phase) -> int:
    """How much of a phase a process was there for."""
    life = timeline.process_at(tgid, phase.end_ns)
    if life is None:
        return 0
    return min(life.gone_ns, phase.end_ns) - max(life.start_ns, phase.start_ns)


def inside_server(timeline: Timeline, served: Served) -> Edge | None:
    """Waiting inside the server, by the best of what shows it."""
    for_room = _waits_for_cache(timeline, served)
    return for_room if for_room is not None else _slot_wait(timeline, served)


_COMPUTE = ("decode", "encode")


# -- slots ----------------------------------------------------------------------------------------


def _slot_wait(timeline: Timeline, served: Served) -> Edge | None:
    """Waiting for a slot that another request holds, or for the call that computes for another."""
    mine = served.last_hop
    first_token = mine.first_token_ns or served.last_ns
    beside = timeline.derived(_InServer.of, mine.tgid).beside(mine)
    ahead = [e for e in beside if (e.end_ns or FOREVER) <= first_token]
    busy = timeline.call_under_way(served.server, _COMPUTE, mine.start_ns)
    if not ahead and busy is None and all(e.start_ns > mine.start_ns for e in beside):
        return None
    given_ns = _slot_given_ns(timeline, mine)
    if given_ns is not None and given_ns - mine.start_ns <= SLACK_NS:
        return None
    if given_ns is not None:
        call = timeline.call_under_way(served.server, _COMPUTE, given_ns)
        if call is not None and call.start_ns > mine.start_ns:
            given_ns = call.start_ns  # slots are given between calls; the line came late
        return Edge(given_ns, OBSERVED, Evidence("log", "the server gave the request a slot"))
    slots = timeline.slots_of(served.server)
    if ahead and (slots is None or len(beside) >= slots):
        end = max(e.end_ns or 0 for e in ahead)
        answered = Evidence("sockets", "the request ahead in this server was answered")
        return Edge(end, INFERRED, answered)
    if busy is None or busy.end_ns > first_token:
        return None
    computed = Evidence("call", "the call that was under way for others returned", busy.tid, "tid")
    return Edge(busy.end_ns, OBSERVED, computed)


def others_computed_until(timeline: Timeline, served: Served, since_ns: int, own_ns: int) -> bool:
    """Whether, before a server began on this prompt by its own figure, it computed for others: more
    than half of the time since."""
    calls = [
        call
        for name in _COMPUTE
        for call in timeline.calls_of(served.server, name, since_ns, own_ns)
    ]
    first = timeline.call_under_way(served.server, _COMPUTE, since_ns)
    spans = [
        (max(c.start_ns, since_ns), min(c.end_ns, own_ns))
        for c in ([first] if first else []) + calls
    ]
    return 2 * sum(end - begin for begin, end in spans) > own_ns - since_ns


def _slot_given_ns(timeline: Timeline, mine: Exchange) -> int | None:
    """When the server gave this request a slot: they are given by turns."""
    server = timeline.derived(_InServer.of, mine.tgid)
    if not server.given_ns or id(mine) not in server.busy:
        return None
    busy = server.busy[id(mine)]
    begun_ns = min(exchange.start_ns for exchange in busy)
    given = server.given_ns[bisect_left(server.given_ns, begun_ns) :]
    for exchange in busy:
        if BEGAN_BEFORE in exchange.notes:  # and so may have had its slot
            continue
        its = _between(given, exchange.start_ns, _served_by(exchange))
        if exchange is mine:
            return its[0] if its else None
        left = exchange.first_token_ns is None  # perhaps before it had a slot
        if its and not (left and _between(given, mine.start_ns, _served_by(mine)) == its[:1]):
            given.remove(its[0])
    return None


def _served_by(exchange: Exchange) -> int:
    """Until when a request has had its slot, if it ever had one."""
    return exchange.first_token_ns or exchange.end_ns or FOREVER


def _between(given: Sequence[int], start_ns: int, end_ns: int) -> list[int]:
    return [ns for ns in given if start_ns <= ns <= end_ns]


@dataclass(frozen=True, slots=True)
class _InServer:
    """A server's requests by start, and what is asked of them again and again.

    `latest_end_ns`: up to each. `given_ns`: when it gave slots. `busy`: for a request (by id) those
    of the time that it lies in, from when nobody waited on, by turns: who came before has no say
    in who has which slot.
    """

    requests: list[Exchange]
    starts_ns: list[int]
    latest_end_ns: list[int]
    given_ns: list[int]
    busy: dict[int, list[Exchange]]

    @classmethod
    def of(cls, timeline: Timeline, tgid: int) -> Self:
        own = [e for e in timeline.exchanges if e.tgid == tgid and e.generates]
        own.sort(key=lambda e: e.start_ns)
        given: list[int] = []
        for mark in timeline.marks_of(tgid, "slot_start"):
            if not given or mark.ns - given[-1] > SLACK_NS:  # one start may write two lines
                given.append(mark.ns)
        ends = accumulate((e.end_ns or FOREVER for e in own), max)
        return cls(own, [e.start_ns for e in own], list(ends), given, _busy_times(own))

    def beside(self, mine: Exchange) -> list[Exchange]:
        """The others that were there when this one came, or came with it."""
        first = bisect_right(self.latest_end_ns, mine.start_ns)
        last = bisect_right(self.starts_ns, mine.start_ns + TOGETHER_NS)
        there = self.requests[first:last]
        return [e for e in there if e is not mine and mine.start_ns < (e.end_ns or FOREVER)]


def _busy_times(own: Sequence[Exchange]) -> dict[int, list[Exchange]]:
    found: dict[int, list[Exchange]] = {}
    busy: list[Exchange] = []
    until_ns = 0
    for together in _turns(own):
        if together[0].start_ns > until_ns:
            busy = []
        busy += sorted(together, key=_served_by)
        until_ns = max(until_ns, *map(_served_by, together))
        found |= dict.fromkeys(map(id, together), busy)
    return found


def _turns(own: Sequence[Exchange]) -> list[list[Exchange]]:
    """Requests in the order of their arrival; those that came together have their turns in the
    order of their first tokens, or of their ends where somebody hung up."""
    turns: list[list[Exchange]] = []
    for exchange in own:
        if turns and exchange.start_ns - turns[-1][-1].start_ns <= TOGETHER_NS:
            turns[-1].append(exchange)
        else:
            turns.append([exchange])
    return turns


# -- room in the KV cache -------------------------------------------------------------------------

FULL = 0.8  # use of the KV cache from which a new prompt may not fit


def _waits_for_cache(timeline: Timeline, served: Served) -> Edge | None:
    """Waiting for memory of the KV cache, by the engine's own counts: some request waited while
    this one had no token. It went on when an answer ended that had been under way."""
    mine = served.last_hop
    until = mine.first_token_ns or served.last_ns
    sides = _sides(served)
    looks = between(timeline.engine_loads, mine.start_ns, until, _looked_ns)
    waiting = [load for load in looks if load.waiting and load.tgid in sides]
    if not waiting:
        return None
    last = waiting[-1]
    ends = [
        e.end_ns
        for e in timeline.exchanges
        if e is not mine
        and e.tgid == mine.tgid
        and e.generates
        and e.end_ns is not None
        and last.ns - SLACK_NS <= e.end_ns <= until
    ]
    end_ns = min(ends, default=last.ns)
    return Edge(end_ns, INFERRED, _counts(last))


def _looked_ns(load: EngineLoad) -> int:
    return load.ns


def _sides(served: Served) -> set[int]:
    return {served.server, served.last_hop.tgid, served.front.tgid}


def _counts(load: EngineLoad) -> Evidence:
    """The reason, as far as the engine's counts tell it."""
    use = "" if load.cache_use is None else f", KV cache {scale.percent(load.cache_use)} in use"
    full = load.for_capacity or (load.cache_use or 0) >= FULL
    why = "no room in the KV cache" if full else "the engine had not admitted it"
    counts = f"{load.waiting} waiting, {load.running} running{use}"
    return Evidence("engine", f"{why} ({counts})", load.waiting, "requests")
