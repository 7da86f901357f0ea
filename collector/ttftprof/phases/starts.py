"""Starts of a server that no request of the recording waited for: a restart with another model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ttftprof.model import Evidence, Phase
from ttftprof.phases.edges import INFERRED, Cutter
from ttftprof.phases.holders import loaders
from ttftprof.phases.room import RESTART_NS, first_act, replaced
from ttftprof.phases.served import Served
from ttftprof.phases.startup import StartUp, first_answered_ns, start_up_of
from ttftprof.timeline import Process, Timeline


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
    for tgid in loaders(timeline) & timeline.processes.keys():
        for life in timeline.processes[tgid]:
            started = _started(timeline, life) if life.exec_ns is not None else None
            if started is not None and not _waited_for(started, everyone):
                found.append(started)
    return sorted(found, key=lambda s: s.start.process.start_ns)


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
    before_ns = min(first_answered_ns(timeline, process), process.gone_ns, timeline.end_ns)
    start = start_up_of(timeline, process, before_ns)
    if start.began is None or start.load_begin is None:
        return None
    old = replaced(timeline, process)
    first = first_act(timeline, process.start_ns - RESTART_NS, old) if old else None
    begin_ns = first.ns if first else start.began.ns
    end = start.ready or start.load_end
    cutter = Cutter(begin_ns, end.ns if end else before_ns)
    cutter.until("evict", start.began)
    cutter.until("launch", start.load_begin)
    cutter.until("load", start.load_end)
    cutter.until("init", start.ready)
    cutter.rest("unexplained", INFERRED, Evidence("analysis", "the start was not seen to its end"))
    return Started(start, old, tuple(cutter.phases)) if cutter.phases else None
