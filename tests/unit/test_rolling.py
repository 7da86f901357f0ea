"""What is kept in memory: any interval reads as the recording of a recorder begun just before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ttftprof import analysis, rolling
from ttftprof.events import EVENT, FILE_ROW, THREAD_ROW, Kind, Wait
from ttftprof.model import Request
from ttftprof.rolling import KEEP_NS, PUSHED_OUT, Rolling
from ttftprof.timeline import build
from unit.recordings import A_GGUF, ARMED_NS, DEV, MS, NEW, OLD, Scene, ns, router_switch
from unit.replays import Clock, Replay

STEP_NS = 200 * MS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def replay(scene: Scene, clock: Clock) -> Rolling:
    """The whole scene."""
    memory = Rolling()
    written = Replay(scene, clock, memory)
    while clock.ns < written.end_ns:
        written.to(clock.ns + STEP_NS)
    return memory


def only(memory: Rolling, request: Request) -> Request:
    """The request as concluded from the moments around it alone."""
    view = memory.view((request.start_ns - 2000 * MS, request.end_ns or ns(60_000)))
    ((_, found),) = analysis.concluded(build(view))
    return found


def test_a_switch_reads_as_from_the_whole_recording(clock: Clock) -> None:
    scene = router_switch()
    (whole,) = scene.report().requests
    found = only(replay(scene, clock), whole)
    assert found.phases == whole.phases
    assert found.activities == whole.activities
    assert found.files == whole.files
    assert found.verdict == whole.verdict


def test_what_is_kept_is_a_recording(clock: Clock, tmp_path: Path) -> None:
    scene = router_switch()
    (whole,) = scene.report().requests
    memory = replay(scene, clock)
    path = tmp_path / "kept.ttft"
    memory.view((whole.start_ns - 2000 * MS, whole.end_ns or 0)).save(path, "it was slow")
    report = analysis.analyse(path)
    assert report.complete
    assert report.ended_because == "it was slow"
    assert [r.phases for r in report.requests] == [whole.phases]


def later(memory: Rolling, clock: Clock, by_ns: int) -> None:
    clock.ns += by_ns
    memory.commit()
    memory.prune([])


def test_of_long_ago_only_the_state_is_known(clock: Clock) -> None:
    """An hour later: who runs and what it holds, not how it came about; the dead are forgotten."""
    scene = router_switch()
    memory = replay(scene, clock)
    later(memory, clock, 3_600_000 * MS)
    timeline = build(memory.view((clock.ns - 1000 * MS, clock.ns)))
    assert NEW in timeline.processes
    assert OLD not in timeline.processes
    assert timeline.processes[NEW][0].exec_ns is None
    assert timeline.processes[NEW][0].facts["comm"]
    held = timeline.of_kind(Kind.HELD)
    assert NEW in held["tgid"]
    assert not len(timeline.waits)
    assert not analysis.concluded(timeline)  # and no request of then is told of again
    assert not analysis.starts(timeline)
    assert any(e.tgid == NEW and e.first_token_ns for e in timeline.exchanges)


def test_counters_go_on_from_where_they_stood(clock: Clock) -> None:
    memory = Rolling()
    row = np.zeros(1, FILE_ROW)
    row["dev"], row["ino"], row["ns"], row["added_pages"] = DEV, A_GGUF, clock.ns, 700
    memory.add_batch("files", row)
    later(memory, clock, 2 * KEEP_NS)
    row = row.copy()
    row["ns"], row["added_pages"] = clock.ns, 703
    memory.add_batch("files", row)
    memory.commit()
    file = build(memory.view((clock.ns - MS, clock.ns + MS))).files[DEV, A_GGUF]
    assert file.delta("added_pages", ARMED_NS, clock.ns) == 3


def test_what_a_pending_request_needs_stays(clock: Clock) -> None:
    memory = Rolling()
    wait = np.zeros(1, EVENT)
    wait["kind"], wait["start_ns"], wait["flags"] = Kind.OFFCPU, clock.ns, Wait.STORAGE
    memory.add_batch("events", wait)
    memory.commit()
    needed = (clock.ns, clock.ns + 10 * MS)
    clock.ns += 100 * KEEP_NS
    memory.prune([needed])
    assert len(memory.view(needed).stream("events")) == 1
    memory.prune([])
    assert len(memory.view(needed).stream("events")) == 0


def test_days_take_no_more_than_minutes(clock: Clock) -> None:
    """A request a second for half an hour of its clock: neither records nor facts pile up."""
    memory = Rolling()
    sizes, facts = [], []
    for number in range(1_800):
        clock.ns += 1_000 * MS
        waits = np.zeros(50, EVENT)
        waits["kind"], waits["start_ns"], waits["tgid"] = Kind.OFFCPU, clock.ns, 7
        rows = np.zeros(4, THREAD_ROW)
        rows["ns"], rows["tgid"], rows["tid"], rows["since_ns"] = clock.ns, 7, range(4), 1
        memory.add_batch("events", waits)
        memory.add_batch("threads", rows)
        exchange = {"tgid": 7, "start_ns": clock.ns, "end_ns": clock.ns + 1, "first_token_ns": 1}
        memory.add_fact("exchange", clock.ns, exchange)
        memory.add_fact("mark", clock.ns, {"name": "slot_start", "tgid": 7})
        memory.commit()
        memory.prune([])
        sizes.append(memory.size_bytes)
        if number % 60 == 59:
            facts.append(len(memory.view((0, clock.ns))._facts))
        memory.ended.clear()
        assert number < 60 or sizes[-1] <= max(sizes[:60])
    assert max(facts) < 2 * (KEEP_NS // (1_000 * MS)) + 10


def test_what_is_pushed_out_is_counted(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolling, "MAX_BYTES", 100 * EVENT.itemsize)
    memory = Rolling()
    for _ in range(5):
        events = np.zeros(40, EVENT)
        events["start_ns"] = clock.ns
        memory.add_batch("events", events)
    memory.prune([])
    assert memory.lost == {PUSHED_OUT: 120}
    assert memory.size_bytes <= 100 * EVENT.itemsize
