"""Waiting behind others: in the front, for a slot of the server, for room in its KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from ttftprof.model import Evidence
from ttftprof.phases.edges import INFERRED, OBSERVED, Edge
from ttftprof.phases.served import TOGETHER_NS, Served
from ttftprof.sources.http import BEGAN_BEFORE
from ttftprof.timeline import FOREVER, EngineLoad, Exchange, Timeline

# A blocker's last byte and the next act may be stamped in either order by two threads.
SLACK_NS = 2_000_000


def blocked_until(served: Served, everyone: Sequence[Served], limit_ns: int) -> Edge | None:
    """The end of the last earlier request that was still being answered when this one came, if it
    ended before `limit_ns`."""
    front = served.front
    blockers = [
        o.front
        for o in everyone
        if o is not served
        and o.front.start_ns <= front.start_ns < (o.front.end_ns or FOREVER)
        and (o.front.end_ns or FOREVER) <= limit_ns + SLACK_NS
        and not _waited_alike(o.front, front)
    ]
    if not blockers:
        return None
    last = max(blockers, key=lambda b: b.end_ns or 0)
    return Edge(
        min(last.end_ns or limit_ns, limit_ns),
        OBSERVED,
        Evidence("sockets", f"an earlier request (for {last.model}) was being answered"),
    )


def _waited_alike(other: Exchange, mine: Exchange) -> bool:
    """Whether it hung up on the same model before a token: it waited for the same thing."""
    return other.model == mine.model and other.first_token_ns is None


def holder(served: Served, everyone: Sequence[Served], otherwise: int) -> int:
    """The server of the request that this one waits behind."""
    ahead = [
        o
        for o in everyone
        if o is not served
        and o.front.start_ns <= served.front.start_ns < (o.front.end_ns or FOREVER)
    ]
    return ahead[-1].server if ahead else otherwise


def inside_server(timeline: Timeline, served: Served) -> Edge | None:
    """Waiting inside the server, by the best of what shows it."""
    for_room = _waits_for_cache(timeline, served)
    return for_room if for_room is not None else _slot_wait(timeline, served)


# -- slots ----------------------------------------------------------------------------------------


def _slot_wait(timeline: Timeline, served: Served) -> Edge | None:
    """Waiting for a slot that another request holds."""
    mine = served.last_hop
    first_token = mine.first_token_ns or served.last_ns
    beside = [
        e
        for e in timeline.exchanges
        if e is not mine
        and e.tgid == mine.tgid
        and e.generates
        and e.start_ns <= mine.start_ns + TOGETHER_NS
        and mine.start_ns < (e.end_ns or FOREVER)
    ]
    ahead = [e for e in beside if (e.end_ns or FOREVER) <= first_token]
    if not ahead:
        return None
    given_ns = _slot_given_ns(timeline, mine)
    if given_ns is not None:
        return Edge(given_ns, OBSERVED, Evidence("log", "the server gave the request a slot"))
    slots = timeline.slots_of(served.server)
    if slots is not None and len(beside) < slots:
        return None
    end = max(e.end_ns or 0 for e in ahead)
    return Edge(end, INFERRED, Evidence("sockets", "the request ahead in this server was answered"))


def _slot_given_ns(timeline: Timeline, mine: Exchange) -> int | None:
    """When the server gave this request a slot: they are given by turns."""
    given: list[int] = []
    for mark in timeline.marks_of(mine.tgid, "slot_start"):
        if not given or mark.ns - given[-1] > SLACK_NS:  # one start may write two lines
            given.append(mark.ns)
    for exchange in _by_turns(timeline, mine.tgid):
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


def _by_turns(timeline: Timeline, tgid: int) -> list[Exchange]:
    """A server's requests in the order of their arrival; those that came together, in the order of
    their first tokens, or of their ends where somebody hung up."""
    own = [e for e in timeline.exchanges if e.tgid == tgid and e.generates]
    turns: list[list[Exchange]] = []
    for exchange in sorted(own, key=lambda e: e.start_ns):
        if turns and exchange.start_ns - turns[-1][-1].start_ns <= TOGETHER_NS:
            turns[-1].append(exchange)
        else:
            turns.append([exchange])
    return [exchange for together in turns for exchange in sorted(together, key=_served_by)]


# -- room in the KV cache -------------------------------------------------------------------------

FULL = 0.8  # use of the KV cache from which a new prompt may not fit


def _waits_for_cache(timeline: Timeline, served: Served) -> Edge | None:
    """Waiting for memory of the KV cache, by the engine's own counts: some request waited while
    this one had no token. It went on when an answer ended that had been under way."""
    mine = served.last_hop
    until = mine.first_token_ns or served.last_ns
    waiting = [
        load
        for load in timeline.engine_loads
        if mine.start_ns <= load.ns <= until and load.waiting and load.tgid in _sides(served)
    ]
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


def _sides(served: Served) -> set[int]:
    return {served.server, served.last_hop.tgid, served.front.tgid}


def _counts(load: EngineLoad) -> Evidence:
    """The reason, as far as the engine's counts tell it."""
    use = "" if load.cache_use is None else f", KV cache {load.cache_use:.0%} in use"
    full = load.for_capacity or (load.cache_use or 0) >= FULL
    why = "no room in the KV cache" if full else "the engine had not admitted it"
    counts = f"{load.waiting} waiting, {load.running} running{use}"
    return Evidence("engine", f"{why} ({counts})", load.waiting, "requests")
