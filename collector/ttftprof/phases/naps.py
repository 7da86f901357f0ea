"""Engines that are put to sleep and woken, in place of being ended and started.

vLLM: POST /sleep, /wake_up (level 1 keeps the weights in the host's memory, level 2 nothing).
SGLang: /release_memory_occupation, /resume_memory_occupation. Such a call is answered when it is
done, so its span on the socket is what it took.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ttftprof.model import Evidence, Part, Phase
from ttftprof.phases.edges import INFERRED, OBSERVED, Edge
from ttftprof.phases.served import Served
from ttftprof.timeline import Exchange, Timeline

SLEEPS = ("/sleep", "/release_memory_occupation")
WAKES = ("/wake_up", "/resume_memory_occupation")
ASLEEP = "the engine was asleep: the request lay there until somebody woke it"
_LEVEL = "?level="  # the only query that sources/http keeps
_DEFAULT_LEVEL = 1  # vllm/entrypoints/serve/dev/sleep/api_router.py


@dataclass(frozen=True, slots=True)
class Nap:
    """One call that put an engine to sleep, or woke it. `level`: vLLM's, of a sleep."""

    tgid: int
    start_ns: int
    end_ns: int
    level: int | None = None

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Woken:
    """How a request's engine was woken while it waited: the calls that did it (memory may be asked
    back in parts), the sleep it was woken from, and the one that made room for it, if seen."""

    calls: tuple[Nap, ...]
    slept: Nap | None
    made_room: Nap | None

    def words(self) -> str:
        """`the engine was woken from sleep level 1 in 2.19 s; the other fell asleep (level 1) in
        10.57 s before`"""
        level = f" level {self.slept.level}" if self.slept and self.slept.level else ""
        took_s = (self.calls[-1].end_ns - self.calls[0].start_ns) / 1e9
        text = f"the engine was woken from sleep{level} in {took_s:.2f} s"
        if self.made_room is not None:
            level = f" (level {self.made_room.level})" if self.made_room.level else ""
            before_s = self.made_room.duration_ns / 1e9
            text += f"; another was put to sleep{level} in {before_s:.2f} s before"
        return text

    def asleep_until(self) -> Edge:
        """For a request that the engine had already: it goes on when somebody wakes it."""
        known = OBSERVED if self.slept is not None else INFERRED
        first = self.calls[0]
        return Edge(first.start_ns, known, Evidence("sockets", ASLEEP, first.tgid, "pid"))

    def edges(self) -> tuple[Edge, Edge, Edge]:
        """Load begins, weights are in place, able to serve: where it took several calls, the last
        is that for the KV cache."""
        first, last = self.calls[0], self.calls[-1]
        begin = Evidence("sockets", "the engine was told to wake up", first.tgid, "pid")
        done = Evidence("sockets", "it answered that it is awake", last.duration_ns, "ns")
        cache = Evidence("sockets", "the rest of its memory was asked back", last.tgid, "pid")
        ready = Edge(last.end_ns, OBSERVED, done)
        loaded = Edge(last.start_ns, OBSERVED, cache) if len(self.calls) > 1 else ready
        return Edge(first.start_ns, OBSERVED, begin), loaded, ready


def woken(timeline: Timeline, served: Served) -> Woken | None:
    """None if nobody woke the engine between the request's arrival and its work on it."""
    front, mine = served.front, served.last_hop
    until_ns = mine.first_token_ns or served.last_ns
    calls = tuple(
        nap
        for nap in timeline.derived(_naps, WAKES)
        if nap.tgid == mine.tgid and nap.end_ns > front.start_ns and nap.start_ns < until_ns
    )
    if not calls:
        return None
    begin_ns = calls[0].start_ns
    sleeps = [nap for nap in timeline.derived(_naps, SLEEPS) if nap.start_ns <= begin_ns]
    own = [nap for nap in sleeps if nap.tgid == mine.tgid]
    others = [nap for nap in sleeps if nap.tgid != mine.tgid and nap.end_ns > front.start_ns]
    return Woken(calls, own[-1] if own else None, others[-1] if others else None)


def _naps(timeline: Timeline, endpoints: tuple[str, ...]) -> list[Nap]:
    """The calls to these endpoints that were answered, in order of time."""
    found = []
    for exchange in timeline.exchanges:
        path, _, level = exchange.endpoint.partition(_LEVEL)
        done_ns = _done_ns(exchange)
        if path in endpoints and done_ns is not None and exchange.status == 200:
            told = int(level) if level.isdecimal() else _DEFAULT_LEVEL if path == "/sleep" else None
            found.append(Nap(exchange.tgid, exchange.start_ns, done_ns, told))
    return sorted(found, key=lambda nap: nap.start_ns)


def _done_ns(exchange: Exchange) -> int | None:
    return exchange.headers_ns or exchange.end_ns


def with_naps(phases: Sequence[Phase], woken: Woken | None) -> tuple[Phase, ...]:
    """The phases with each such call as a part of those that it reaches into."""
    if woken is None:
        return tuple(phases)
    spans = [("engine_wake", nap) for nap in woken.calls]
    spans += [("engine_sleep", woken.made_room)] if woken.made_room else []
    return tuple(
        replace(phase, parts=(*phase.parts, *_reaching_into(phase, spans))) for phase in phases
    )


def _reaching_into(phase: Phase, spans: Sequence[tuple[str, Nap]]) -> Iterator[Part]:
    for name, nap in spans:
        begin_ns, end_ns = max(nap.start_ns, phase.start_ns), min(nap.end_ns, phase.end_ns)
        if begin_ns < end_ns:
            who = Evidence("sockets", f"pid {nap.tgid} was asked, and answered", nap.tgid, "pid")
            yield Part(name, begin_ns, end_ns, end_ns - begin_ns, OBSERVED, (who,))
