"""Who served a request: the front that took it, what it passed it on to, the process that computed.

A front passes a request on over a connection, perhaps to another front. Where the way to the
process that computes is no HTTP that can be read (a Unix socket, a pipe, shared memory: an engine's
child), it is told by the weights it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ttftprof.activities import process_activities
from ttftprof.events import Kind
from ttftprof.grouping import between
from ttftprof.phases.holders import has_weights, loaders
from ttftprof.threads import FOREVER
from ttftprof.timeline import Exchange, Process, Timeline

# Requests that come within it come together: which of them a server's threads take first is luck.
TOGETHER_NS = 2_000_000


@dataclass(frozen=True, slots=True, eq=False)  # each is one request: itself and no other
class Served:
    """A client's request, the last one it was passed on as (None if nobody passed it on), and the
    process that computed if no request was seen to reach it.

    `alone`: nothing shows who computed it. `cut_off`: the client left before the front passed it
    on to `worker`, which it had begun to start for it.
    """

    front: Exchange
    back: Exchange | None
    worker: int | None = None
    alone: bool = False
    cut_off: bool = False

    @property
    def last_hop(self) -> Exchange:
        return self.back or self.front

    @property
    def server(self) -> int:
        return self.worker or self.last_hop.tgid

    @property
    def received_ns(self) -> int:
        return self.last_hop.start_ns

    @property
    def last_ns(self) -> int:
        """First token, or the end of what was seen."""
        front = self.front
        return front.first_token_ns or front.end_ns or front.start_ns


def requests_of(timeline: Timeline) -> Sequence[Served]:
    """Every request a client outside the target made for text, with the one behind it."""
    return timeline.derived(_requests_of, None)


def _requests_of(timeline: Timeline, _: None) -> list[Served]:
    fronts = [e for e in timeline.exchanges if e.generates and not e.from_target]
    passed_on = (e for e in timeline.exchanges if e.generates and e.from_target)
    backs = sorted(passed_on, key=_began)
    candidates = _candidates(timeline)
    taken: set[int] = set()
    found: list[Served] = []
    for front in fronts:
        back: Exchange | None = None
        hop: Exchange | None = front
        while hop is not None:
            during = between(backs, hop.start_ns, hop.end_ns or FOREVER, _began)
            hop = _behind(timeline, hop, [b for b in during if id(b) not in taken])
            if hop is not None:
                taken.add(id(hop))
                back = hop
        found.append(_with_worker(timeline, front, back, candidates))
    first: dict[int, int] = {}  # request of each process
    for served in found:
        first[served.server] = min(first.get(served.server, FOREVER), served.front.start_ns)
    return [_own(served, first) for served in found]


def _began(exchange: Exchange) -> int:
    return exchange.start_ns


def _own(served: Served, first_ns: Mapping[int, int]) -> Served:
    """Without the process that was started for a request that came before."""
    if served.cut_off and first_ns[served.server] < served.front.start_ns:
        return Served(served.front, None, alone=True)
    return served


def _behind(timeline: Timeline, front: Exchange, during: Sequence[Exchange]) -> Exchange | None:
    """The request that the front's process sent on for this one: `during` it, over a connection of
    its own, the same body size if possible; the earliest of those. A front may try again until the
    server takes it: if it got an answer, the one that was answered. Of several that came together,
    the one whose first token is this one's."""
    ports = timeline.derived(_ports_opened_by, front.tgid)
    fitting = [b for b in during if b.remote_port in ports and b.tgid != front.tgid]
    same = [b for b in fitting if b.prompt_bytes == front.prompt_bytes] or fitting
    same = [b for b in same if b.model == front.model] or same
    if front.first_token_ns is not None:
        same = [b for b in same if b.first_token_ns is not None] or same
    earliest = min((b.start_ns for b in same), default=0)
    together = [b for b in same if b.start_ns - earliest <= TOGETHER_NS]
    if front.first_token_ns is not None and all(b.first_token_ns is not None for b in together):
        return min(together, key=lambda b: _apart_ns(front, b), default=None)
    return min(together, key=lambda b: b.start_ns, default=None)


def _apart_ns(front: Exchange, back: Exchange) -> int:
    return abs((front.first_token_ns or 0) - (back.first_token_ns or 0))


def _ports_opened_by(timeline: Timeline, tgid: int) -> set[int]:
    ports: set[int] = set()
    for kind in (Kind.CONNECT, Kind.FORWARD):
        records = timeline.of_kind(kind)
        ports |= {int(a) >> 16 for a in records["a"][records["tgid"] == tgid]}
    return ports


# -- who computed, where no request shows it ------------------------------------------------------


def _candidates(timeline: Timeline) -> list[Process]:
    """Processes that have weights."""
    tgids = loaders(timeline) | {c.tgid for c in timeline.calls}
    lives = (life for tgid in sorted(tgids) for life in timeline.processes.get(tgid, ()))
    return [life for life in lives if has_weights(timeline, life)]


def _with_worker(
    timeline: Timeline, front: Exchange, back: Exchange | None, candidates: Sequence[Process]
) -> Served:
    last = back or front
    until = front.first_token_ns or front.end_ns or front.start_ns
    alive = [c for c in candidates if c.start_ns < until and c.gone_ns > front.start_ns]
    if any(c.tgid == last.tgid for c in alive):
        return Served(front, back)
    own = [c for c in alive if last.tgid in ancestors(timeline, c)]
    own = own or [c for c in alive if _share_a_launcher(timeline, last, c)]
    # Whoever outlived the answer gave it: the old model's process went before.
    served = [c for c in own or alive if c.gone_ns >= until]
    if served and front.first_token_ns is not None:
        return Served(front, back, max(served, key=lambda c: _began_ns(timeline, c, until)).tgid)
    begun = [c for c in own if front.start_ns <= c.start_ns]
    if begun and back is None and front.first_token_ns is None:
        return Served(front, back, min(begun, key=lambda c: c.start_ns).tgid, cut_off=True)
    if front.first_token_ns is not None:
        busy = _busiest_below(timeline, last, until)
        if busy is not None:
            return Served(front, back, busy)
    return Served(front, back, alone=back is None and not _says_itself(front))


def _share_a_launcher(timeline: Timeline, last: Exchange, other: Process) -> bool:
    """Whether an engine's launcher started both the process that took a request and another one:
    TGI's starts the process with the weights, and beside it the router that asks that."""
    engine, server = timeline.engine_of(last.tgid), timeline.process_at(last.tgid, last.start_ns)
    if engine is None or server is None or timeline.engine_of(other.tgid) is not engine:
        return False
    above = set(ancestors(timeline, server)) & set(ancestors(timeline, other))
    return any(timeline.engine_of(tgid) is engine for tgid in above)


def _busiest_below(timeline: Timeline, last: Exchange, until: int) -> int | None:
    """Of a server that had its weights in memory before anybody looked: the process below it that
    was busy while this request waited, if the one that took it was not. Who waits for another may
    spin (vLLM's engine core for its worker), so one that has a busy process below it is not it."""
    if computed(timeline, last.tgid, last.start_ns, until):
        return None
    below = [
        life
        for lives in timeline.processes.values()
        for life in lives
        if life.start_ns <= last.start_ns
        and life.gone_ns >= until
        and last.tgid in ancestors(timeline, life)
        and computed(timeline, life.tgid, last.start_ns, until)
    ]
    above = {tgid for life in below for tgid in ancestors(timeline, life)}
    lowest = (life.tgid for life in below if life.tgid not in above)
    return max(lowest, key=lambda t: busy_ns(timeline, t, last.start_ns, until), default=None)


_BUSY = ("cpu", "fault", "transfer", "gpu")


def busy_ns(timeline: Timeline, tgid: int, start_ns: int, end_ns: int) -> int:
    """How long a process itself had something to do."""
    spent = process_activities(timeline, tgid, start_ns, end_ns).durations_ns()
    return sum(ns for activity, ns in spent.items() if activity in _BUSY)


def computed(timeline: Timeline, tgid: int, start_ns: int, end_ns: int) -> bool:
    """Whether a process was busy itself for most of a wait: then it is no mere front of another."""
    return 2 * busy_ns(timeline, tgid, start_ns, end_ns) >= end_ns - start_ns


def worker_of(timeline: Timeline, tgid: int) -> int:
    """The process below one that has the weights, else that one itself."""
    below = (c.tgid for c in _candidates(timeline) if tgid in ancestors(timeline, c))
    return next(below, tgid)


def ancestors(timeline: Timeline, process: Process) -> Iterator[int]:
    """The processes that a process descends from, nearest first, as far as they are known."""
    seen = {process.tgid}
    at: Process | None = process
    while at is not None:
        parent = at.parent_pid
        if parent is None or parent in seen:
            return
        seen.add(parent)
        yield parent
        at = timeline.process_at(parent, at.start_ns)


def children_of(timeline: Timeline, tgid: int) -> Sequence[Process]:
    """The processes that one started itself."""
    return timeline.derived(_by_parent, None).get(tgid, ())


def _by_parent(timeline: Timeline, _: None) -> dict[int, list[Process]]:
    found: dict[int, list[Process]] = {}
    for lives in timeline.processes.values():
        for life in lives:
            if life.parent_pid is not None:
                found.setdefault(life.parent_pid, []).append(life)
    return found


def _began_ns(timeline: Timeline, process: Process, until: int) -> tuple[int, int]:
    """What tells two candidates apart: the last to call the engine, then the last to start."""
    calls = timeline.calls_of(process.tgid, None, 0, until)
    return (calls[-1].start_ns if calls else 0, process.start_ns)


def _says_itself(front: Exchange) -> bool:
    """The answer has the server's own figures of its work."""
    return any(name.startswith("prompt") for name in front.timings)
