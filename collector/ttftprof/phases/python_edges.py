"""Where a server makes no call that is marked: what samples of its Python code say of its phases.

An edge lies between two looks, and so is inferred: true within half of their distance.
"""

from __future__ import annotations

from collections.abc import Iterator

from ttftprof.engines.python_code import place_of
from ttftprof.model import Evidence
from ttftprof.phases.edges import INFERRED, Edge
from ttftprof.python_facts import Segment
from ttftprof.timeline import Process, Timeline

_LOADING = ("weights", "model_build")
_RUNNING = ("generate",)
_PREPARING = ("imports", "compile", "device", "model_build", "tokenizer", "hub", "weights")


def load_ended(timeline: Timeline, process: Process, after_ns: int, before_ns: int) -> Edge | None:
    """The last look that found it at the weights, before it first ran the model."""
    first = began_to_run(timeline, process, after_ns, before_ns)
    until_ns = first.ns if first else before_ns
    found = _busy_with(timeline, process, _LOADING, after_ns, until_ns)
    last = max(((end, segment) for _, end, segment in found), default=None, key=lambda f: f[0])
    if last is None:
        return None
    return _edge(
        min(last[0], until_ns), last[1], after_ns, "its Python code was done with the weights"
    )


def began_to_run(
    timeline: Timeline, process: Process, after_ns: int, before_ns: int
) -> Edge | None:
    """The first look that found it running the model."""
    found = _busy_with(timeline, process, _RUNNING, after_ns, before_ns)
    first = min(((begin, segment) for begin, _, segment in found), default=None, key=lambda f: f[0])
    if first is None:
        return None
    return _edge(first[0], first[1], after_ns, "its Python code began to run the model")


def prepared_until(
    timeline: Timeline, process: Process, after_ns: int, before_ns: int
) -> Edge | None:
    """The end of an interval for at least half of which it was found preparing a load."""
    spans = [
        (begin, min(end, before_ns))
        for begin, end, _ in _busy_with(timeline, process, _PREPARING, after_ns, before_ns)
    ]
    if 2 * sum(end - begin for begin, end in spans) < before_ns - after_ns or not spans:
        return None
    says = "its Python code, which ran already, was found importing or preparing for most of it"
    return Edge(before_ns, INFERRED, Evidence("python_stacks", says, len(spans), "stacks"))


def _edge(ns: int, segment: Segment, after_ns: int, says: str) -> Edge:
    """Between the look at `ns` and the one before it."""
    period_ns = round(1e9 / segment.rate_hz)
    evidence = Evidence("python_stacks", says, period_ns // 2, "ns, ±")
    return Edge(max(ns - period_ns // 2, after_ns), INFERRED, evidence)


def _busy_with(
    timeline: Timeline, process: Process, categories: tuple[str, ...], after_ns: int, before_ns: int
) -> Iterator[tuple[int, int, Segment]]:
    """(begin, end, segment) of the spans of such stacks that reach into an interval."""
    dead = {life.tid: life.dead_ns for life in timeline.threads.lives_of(process.tgid)}
    for segment in timeline.python.get(process.tgid, ()):
        wanted = {
            number
            for number, stack in enumerate(segment.stacks)
            if place_of(stack).category in categories
        }
        for tid, spans in segment.threads.items():
            for begin, end, number in zip(
                spans.start_ns.tolist(), spans.end_ns.tolist(), spans.stack.tolist(), strict=True
            ):
                until = min(end, dead.get(tid, end))
                if number in wanted and after_ns < until and begin < before_ns:
                    yield max(begin, after_ns), until, segment
