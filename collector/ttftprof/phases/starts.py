"""Starts of a server that no request of the recording waited for: a restart with another model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ttftprof.model import Evidence, Phase
from ttftprof.phases.edges import INFERRED, Cutter
from ttftprof.phases.holders import loaders
from ttftprof.phases.room import RESTART_NS, first_act, replaced
from ttftprof.phases.served import Served
from ttftprof.phases.startup import StartUp, first_answered_ns, start_up_of
from ttftprof.threads import FOREVER
from ttftprof.timeline import Call, Process, Timeline


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
        return [
            old if phase.phase == "evict" else self.start.who_launches(phase) or new
            for phase in self.phases
        ]


def starts_of(timeline: Timeline, everyone: Sequence[Served]) -> list[Started]:
    """Start-ups that no request of the recording waited for, oldest first."""
    found = []
    for tgid in loaders(timeline) & timeline.processes.keys():
        for life in timeline.processes[tgid]:
            inside = list(_switched_inside(timeline, life))
            until_ns = inside[0].phases[0].start_ns if inside else FOREVER
            started = _started(timeline, life, until_ns) if life.exec_ns is not None else None
            found += [*([started] if started else []), *inside]
    found = [started for started in found if not _waited_for(started, everyone)]
    return sorted(found, key=lambda s: s.phases[0].start_ns)


def _switched_inside(timeline: Timeline, process: Process) -> Iterator[Started]:
    """Loads of a process that could serve another model before, and freed it."""
    loads = timeline.calls_of(process.tgid, "model_load", process.start_ns, process.gone_ns)
    for before, load, after in zip([None, *loads], loads, [*loads[1:], None], strict=False):
        since_ns = before.end_ns if before else process.start_ns
        freed_ns = [
            call.start_ns
            for name in ("context_free", "model_free")
            for call in timeline.calls_of(process.tgid, name, since_ns, load.start_ns)
        ]
        if not freed_ns or not _was_able(timeline, process, before, min(freed_ns)):
            continue
        until_ns = min(
            first_answered_ns(timeline, process, load.start_ns),
            after.start_ns if after else timeline.end_ns,
            process.gone_ns,
            timeline.end_ns,
        )
        start = start_up_of(timeline, process, until_ns)
        alone = replace(start, began=None)
        found = _cut(timeline, alone, min(freed_ns), until_ns, "evict")
        if found:  # none where a request was taken before, and so waited for it
            yield Started(start, None, found)


def _was_able(timeline: Timeline, process: Process, before: Call | None, ns: int) -> bool:
    """Whether a process could serve when it freed its model: what a start-up's memory-fit pass
    loads, it frees at once."""
    if before is None:
        return process.exec_ns is None
    said = any(before.end_ns <= m.ns < ns for m in timeline.marks_of(process.tgid, "model_loaded"))
    return said or first_answered_ns(timeline, process, before.end_ns) < ns


def _waited_for(started: Started, everyone: Sequence[Served]) -> bool:
    """Whether an answered request has this load inside its wait, and so tells of it itself."""
    load = started.start.load_begin
    return load is not None and any(
        s.server == started.start.process.tgid
        and s.front.first_token_ns is not None
        and s.front.start_ns <= load.ns <= s.front.first_token_ns
        for s in everyone
    )


def _started(timeline: Timeline, process: Process, until_ns: int) -> Started | None:
    answered_ns = first_answered_ns(timeline, process)
    before_ns = min(until_ns, answered_ns, process.gone_ns, timeline.end_ns)
    start = start_up_of(timeline, process, before_ns)
    if start.began is None or start.load_begin is None:
        return None
    old = replaced(timeline, process)
    first = first_act(timeline, process.start_ns - RESTART_NS, old) if old else None
    begin_ns = first.ns if first else start.began.ns
    found = _cut(timeline, start, begin_ns, before_ns, "launch")
    return Started(start, old, found) if found else None


def _cut(
    timeline: Timeline, start: StartUp, begin_ns: int, before_ns: int, until_load: str
) -> tuple[Phase, ...]:
    """`until_load`: what goes on until the load begins, after a new process was executed, if so."""
    end = start.ready or start.load_end
    cutter = Cutter(begin_ns, end.ns if end else before_ns, timeline.is_probed)
    cutter.until("evict", start.began)
    for edge, _ in start.launching():
        cutter.until("launch", edge)
    cutter.until(until_load, start.load_begin)
    cutter.until("load", start.load_end)
    cutter.until("init", start.ready)
    cutter.rest("unexplained", INFERRED, Evidence("analysis", "the start was not seen to its end"))
    return tuple(cutter.phases)
