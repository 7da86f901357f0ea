"""The watcher, beside a recorder of ours and on a clock of ours: days pass, tables fill up."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from ttftprof import watch
from ttftprof.clock import NS_PER_S
from ttftprof.recorder import Progress, Recorder
from ttftprof.watch import Ended, Watcher
from unit.recordings import ARMED_NS, B_GGUF, FRONT, MS, NEW, Scene, ns, two_models
from unit.replays import Clock, Replay

SLOTS = 1_000
HOUR_MS = 3_600_000


@dataclass
class Session:
    """The kernel's table of files, as far as the watcher looks at it."""

    files_used: int = 0
    files: range = range(SLOTS)

    @property
    def control(self) -> Any:
        return {"files_used": np.array([self.files_used])}


@dataclass
class Exchange:
    """A request that has not ended."""

    fact: Mapping[str, Any]

    def as_fact(self) -> Mapping[str, Any]:
        return self.fact


@dataclass
class FakeRecorder:
    session: Session = field(default_factory=Session)
    open: list[Exchange] = field(default_factory=list)
    stopped: int = 0

    def unfinished(self) -> list[Exchange]:
        return self.open

    def write_states(self) -> None: ...

    def stop(self) -> None:
        self.stopped += 1


@dataclass
class Beside:
    """A watcher with what it told and said."""

    clock: Clock
    recorder: FakeRecorder = field(default_factory=FakeRecorder)
    told: list[Ended] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watcher = Watcher(self.told.append, self.said.append)
        self.watcher.follow(cast(Recorder, self.recorder))

    def step(self) -> None:
        """A look of the recorder; an analysis that it starts is over by the next."""
        self.watcher.step(Progress(ARMED_NS))
        job = self.watcher._job
        while job is not None and not job.is_done():
            time.sleep(0.002)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Beside:
    return Beside(Clock(monkeypatch))


def test_days_of_requests_are_told_once_each_and_leave_nothing_behind(beside: Beside) -> None:
    """One an hour for two days: every one is told with its own numbers; memory stays as it was."""
    asked = 48
    scene = Scene(end=asked * HOUR_MS).process(FRONT, "llama-server", engine="llama.cpp")
    for number in range(asked):
        at = number * HOUR_MS + 1_000
        scene.request(FRONT, at, token=at + 40 + number, ports=(8080, 40_000 + number))
    written = Replay(scene, beside.clock, beside.watcher.rolling)
    sizes, facts = [], []
    for number in range(asked):
        for after_ms in (1_500, 2_500, 60_000, 120_000):
            written.to(ns(number * HOUR_MS + after_ms))
            beside.step()
        sizes.append(beside.watcher.rolling.size_bytes)
        facts.append(len(beside.watcher.rolling._facts))
    assert beside.said == []
    assert [e.request.ttft_ns for e in beside.told] == [(40 + n) * MS for n in range(asked)]
    assert max(sizes[1:]) <= sizes[0]
    assert max(facts) <= 2


def test_a_server_that_loads_for_long_is_looked_at_ever_less_often_until_it_serves(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    job = watch._Job

    def counted(*arguments: Any) -> Any:
        looks.append(beside.clock.ns)
        return job(*arguments)

    monkeypatch.setattr(watch, "_Job", counted)
    scene = (
        two_models()
        .meta(end_ns=ns(80_000))
        .forked(NEW, 162, parent=FRONT)
        .executed(NEW, 163)
        .opened(NEW, B_GGUF, 195)
        .mapped(NEW, B_GGUF, 200)
        .call(NEW, "model_load", 200, 60_000)
        .call(NEW, "context_init", 60_001, 60_300)
        .call(NEW, "decode", 60_310, 60_500, value=2)
        .log(NEW, "model_loaded", 60_600)
    )
    written = Replay(scene, beside.clock, beside.watcher.rolling)
    for second in range(1, 120):
        written.to(ARMED_NS + second * NS_PER_S)
        beside.step()
    (start,) = beside.told
    assert start.request.switched
    assert not start.request.endpoint
    totals = start.request.phase_totals()
    assert totals["load"] == pytest.approx(59_800 * MS, rel=0.01)
    assert beside.said == []
    gaps = np.diff(looks)
    assert 3 <= len(looks) <= 12
    assert (gaps[1:] >= gaps[:-1] - NS_PER_S).all()  # ever less often, in steps of a second


def test_a_process_that_is_no_server_is_soon_looked_at_no_more(beside: Beside) -> None:
    scene = two_models().meta(end_ns=ns(10_000)).forked(NEW, 162, parent=FRONT).executed(NEW, 163)
    written = Replay(scene, beside.clock, beside.watcher.rolling)
    for second in range(1, 200):
        written.to(ARMED_NS + second * NS_PER_S)
        beside.step()
    assert beside.told == []
    assert beside.said == []
    assert not beside.watcher._young
    kept = beside.watcher.rolling.view((0, beside.clock.ns)).stream("events")
    assert NEW not in kept["tgid"], "what it needed is let go"


def test_a_full_table_of_files_ends_the_recorder_once_nobody_waits(beside: Beside) -> None:
    session = beside.recorder.session

    def later() -> None:
        beside.clock.ns += 2 * NS_PER_S
        beside.watcher.rolling.commit()
        beside.step()

    session.files_used = SLOTS * 3 // 4
    later()
    assert not beside.watcher.is_worn
    session.files_used += 1
    waiting = {"socket": 7, "start_ns": beside.clock.ns, "first_token_ns": None, "end_ns": None}
    beside.recorder.open = [Exchange({**waiting, "generates": True})]
    later()
    assert not beside.watcher.is_worn, "somebody waits for a first token"
    beside.recorder.open = []
    later()
    later()
    assert beside.watcher.is_worn
    assert beside.recorder.stopped == 1


def test_losses_are_said_as_they_happen(beside: Beside) -> None:
    for lost in (0, 3, 3, 10):
        beside.watcher.rolling.set_lost("events ring full", lost)
        beside.clock.ns += 2 * NS_PER_S
        beside.step()
    assert beside.said == ["lost 3 × events ring full", "lost 7 × events ring full"]
