"""How the old model made room: which process ended or freed it, and what that began with."""

from __future__ import annotations

from ttftprof.events import Kind
from ttftprof.model import Evidence
from ttftprof.phases.edges import INFERRED, OBSERVED, Edge
from ttftprof.phases.holders import held_a_model
from ttftprof.phases.served import Served, children_of
from ttftprof.phases.startup import StartUp, first_answered_ns
from ttftprof.timeline import Call, Process, Timeline

RESTART_NS = 120_000_000_000  # an older end belongs to no restart


def evicted(timeline: Timeline, served: Served, start: StartUp) -> Process | None:
    """The process whose end made room: the last to go between arrival and launch. On a busy machine
    its parent may be told of its end, and start the next, before it has left the CPU for good."""
    assert start.began is not None
    ours = {served.front.tgid, served.server}
    gone = [
        life
        for lives in timeline.processes.values()
        for life in lives
        if life.tgid not in ours
        and served.front.start_ns <= life.gone_ns
        and life.left_ns <= start.began.ns
        and (
            held_a_model(timeline, life)
            or _is_runner_of(served.front.tgid, life)
            or _launched_a_holder(timeline, life)
        )
    ]
    return max(gone, key=lambda p: p.gone_ns, default=None)


def _is_runner_of(front: int, process: Process) -> bool:
    """A child of the front that was there before the request: what it held was freed unseen."""
    return process.parent_pid == front and process.fork_ns is None


def _launched_a_holder(timeline: Timeline, process: Process) -> bool:
    """An engine's process that started the one with the weights is told to end, and goes last."""
    engine = timeline.engine_of(process.tgid)
    return engine is not None and any(
        timeline.engine_of(child.tgid) is engine and held_a_model(timeline, child)
        for child in children_of(timeline, process.tgid)
    )


def replaced(timeline: Timeline, process: Process) -> Process | None:
    """The process of the same name that ended last before this one began."""
    name = process.facts.get("comm")
    gone = [
        life
        for lives in timeline.processes.values()
        for life in lives
        if life.facts.get("comm") == name
        and process.start_ns - RESTART_NS <= life.left_ns <= (process.exec_ns or 0)
        and held_a_model(timeline, life)
    ]
    return max(gone, key=lambda p: p.gone_ns, default=None)


def first_act(timeline: Timeline, after_ns: int, old: Process) -> Edge | None:
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
    # What is freed before the last load was the memory-fit pass.
    loads = timeline.calls_of(old.tgid, "model_load", 0, old.gone_ns)
    loaded_ns = loads[-1].start_ns if loads else 0
    for name in ("context_free", "model_free"):
        for call in timeline.calls_of(old.tgid, name, loaded_ns):
            acts.append(
                Edge(call.start_ns, INFERRED, Evidence("call", f"pid {old.tgid} freed its model"))
            )
    inside = [a for a in acts if after_ns <= a.ns <= old.gone_ns]
    return min(inside, key=lambda a: a.ns, default=None)


def was_serving(timeline: Timeline, served: Served, process: Process, load_ns: int) -> bool:
    """Whether the process had another model when the request came, which made room for its own:
    it had answered with it, or freed what it had loaded before recording began."""
    if load_ns <= served.front.start_ns:
        return False
    if first_answered_ns(timeline, process, process.exec_ns or 0) < served.front.start_ns:
        return True
    freed = frees(timeline, served, load_ns)
    loads = timeline.calls_of(process.tgid, "model_load")
    # A start-up's memory-fit pass frees what it has just loaded.
    return process.exec_ns is None and any(c.start_ns < loads[0].start_ns for c in freed)


def frees(timeline: Timeline, served: Served, load_ns: int) -> list[Call]:
    """The calls that freed a model between the request's arrival and its load."""
    return [
        c
        for name in ("context_free", "model_free")
        for c in timeline.calls_of(served.server, name)
        if served.front.start_ns <= c.start_ns < load_ns
    ]
