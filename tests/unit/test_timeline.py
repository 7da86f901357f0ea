"""Facts put in order: lives of processes and threads, calls, requests, files."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttftprof.errors import RecordingError
from ttftprof.events import Kind, Wait, kernel_dev
from ttftprof.recording import Reader
from ttftprof.sources.http import BEGAN_BEFORE
from ttftprof.threads import FOREVER, Waits
from ttftprof.timeline import Timeline, build
from unit.recordings import (
    ARMED_NS,
    B_GGUF,
    DEV,
    FRONT,
    MS,
    NEW,
    PAGE,
    Scene,
    ms,
    ns,
    router_switch,
)

PID = 70


# -- processes ------------------------------------------------------------------------------------


def test_a_life_from_fork_to_the_return_of_its_memory() -> None:
    scene = Scene().forked(PID, 10, parent=FRONT).executed(PID, 12, "llama-server")
    (life,) = scene.exited(PID, 90, gone=95, since=10).timeline().processes[PID]
    assert (life.parent, life.fork_ns, life.exec_ns) == (FRONT, ns(10), ns(12))
    assert (life.exit_ns, life.end_ns, life.gone_ns) == (ns(90), ns(95), ns(95))
    assert (life.start_ns, life.argv) == (ns(10), ["llama-server"])


def test_one_that_was_there_before_began_never() -> None:
    (life,) = Scene().process(PID).timeline().processes[PID]
    assert (life.start_ns, life.gone_ns) == (0, FOREVER)
    assert (life.fork_ns, life.exec_ns, life.exit_ns) == (None, None, None)


def test_a_thread_that_ends_before_its_process_is_not_its_end() -> None:
    scene = Scene().forked(PID, 10).thread(PID, PID + 1, 20)
    scene.thread_ended(PID, PID + 1, 30, since=20).exited(PID, 90)
    (life,) = scene.timeline().processes[PID]
    assert (life.end_ns, life.gone_ns) == (None, ns(90))


def test_memory_is_back_with_the_last_thread() -> None:
    scene = Scene().forked(PID, 10).thread(PID, PID + 1, 20).exited(PID, 90, gone=92, since=10)
    (life,) = scene.thread_ended(PID, PID + 1, 99, since=20).timeline().processes[PID]
    assert life.gone_ns == ns(99)


def reused() -> Scene:
    """A pid with a life that ends at 100 and another that begins at 200."""
    return (
        Scene()
        .process(PID, "old")
        .wait(PID, 10, 90, Wait.TIMER)
        .exited(PID, 99, gone=100)
        .forked(PID, 200, parent=FRONT)
        .executed(PID, 201, "new")
        .wait(PID, 210, 290, Wait.STORAGE)
        .thread_row(PID, 300, since=200)
    )


@pytest.mark.parametrize(
    ("at", "comm"), [(-1, "old"), (50, "old"), (150, "old"), (200, "new"), (900, "new")]
)
def test_a_moment_tells_the_lives_of_a_reused_pid_apart(at: float, comm: str) -> None:
    process = reused().timeline().process_at(PID, ns(at))
    assert process is not None
    assert process.facts["comm"] == comm


def test_a_pid_is_reused_though_no_exit_was_seen() -> None:
    scene = Scene().process(PID, "old").forked(PID, 200).executed(PID, 201, "new")
    first, second = scene.timeline().processes[PID]
    assert (first.exit_ns, second.fork_ns) == (None, ns(200))
    assert first.gone_ns <= ns(200)


def test_an_unknown_process_is_none() -> None:
    assert Scene().timeline().process_at(PID, ns(0)) is None


# -- threads --------------------------------------------------------------------------------------


def threads(timeline: Timeline, pid: int = PID) -> list[Waits]:
    return sorted(timeline.threads.waits_of(pid).by_thread(), key=lambda w: (w.born_ns, w.tid))


def spans(waits: Waits) -> list[tuple[int, int, Wait]]:
    """(start, end, reason) in ms."""
    both = zip(waits.start_ns, waits.end_ns, waits.reason, strict=True)
    return [(int(b - ARMED_NS) // MS, int(e - ARMED_NS) // MS, Wait(int(r))) for b, e, r in both]


def test_a_threads_waits_are_in_order_with_their_file() -> None:
    scene = Scene().wait(PID, 50, 60, Wait.STORAGE, ino=9).wait(PID, 10, 20, Wait.LOCK)
    (only,) = threads(scene.timeline())
    assert spans(only) == [(10, 20, Wait.LOCK), (50, 60, Wait.STORAGE)]
    assert (only.dev.tolist(), only.ino.tolist()) == ([0, DEV], [0, 9])
    assert (only.born_ns, only.dead_ns) == (0, FOREVER)


def test_a_thread_is_born_and_dies() -> None:
    scene = Scene().thread(PID, 71, 20).wait(PID, 30, 40, Wait.LOCK, tid=71)
    (only,) = threads(scene.thread_ended(PID, 71, 50, since=20).timeline())
    assert (only.born_ns, only.dead_ns) == (ns(20), ns(50))


def test_a_thread_that_never_waited_is_known_by_its_rows() -> None:
    (only,) = threads(Scene().thread_row(PID, 100, tid=77).timeline())
    assert (only.tid, len(only.start_ns)) == (77, 0)


def test_the_wait_that_recording_did_not_see_the_end_of_is_open() -> None:
    scene = Scene(end=500).wait(PID, 10, 20, Wait.LOCK)
    scene.thread_row(PID, 400, off_ns=ns(300), off_reason=int(Wait.TIMER))
    (only,) = threads(scene.timeline())
    assert spans(only) == [(10, 20, Wait.LOCK), (300, 500, Wait.TIMER)]


def test_an_open_wait_for_storage_has_its_file() -> None:
    scene = Scene().thread_row(
        PID, 400, off_ns=ns(300), off_reason=int(Wait.STORAGE), file_dev=DEV, file_ino=9
    )
    (only,) = threads(scene.timeline())
    assert (only.dev.tolist(), only.ino.tolist()) == ([DEV], [9])


def test_a_wait_that_an_event_ended_is_not_open() -> None:
    scene = Scene().wait(PID, 300, 450, Wait.TIMER)
    scene.thread_row(PID, 400, off_ns=ns(300), off_reason=int(Wait.TIMER))
    assert spans(threads(scene.timeline())[0]) == [(300, 450, Wait.TIMER)]


def test_a_dead_thread_waits_for_nothing() -> None:
    scene = Scene().thread_row(PID, 400, off_ns=ns(300), off_reason=int(Wait.LOCK))
    (only,) = threads(scene.thread_ended(PID, PID, 410).timeline())
    assert (len(only.start_ns), only.dead_ns) == (0, ns(410))


def test_the_lives_of_a_reused_thread_id_are_kept_apart() -> None:
    first, second = threads(reused().timeline())
    assert spans(first) == [(10, 90, Wait.TIMER)]
    assert spans(second) == [(210, 290, Wait.STORAGE)]
    assert (first.born_ns, first.dead_ns) == (0, ns(100))
    assert (second.born_ns, second.dead_ns) == (ns(200), FOREVER)


def test_a_thread_id_moves_to_another_process() -> None:
    scene = Scene().thread(PID, 71, 20).wait(PID, 30, 40, Wait.LOCK, tid=71)
    scene.thread_ended(PID, 71, 50, since=20)
    scene.thread(NEW, 71, 100).wait(NEW, 110, 120, Wait.TIMER, tid=71)
    timeline = scene.thread_row(NEW, 150, tid=71, since=100).timeline()
    assert spans(threads(timeline)[0]) == [(30, 40, Wait.LOCK)]
    assert spans(threads(timeline, NEW)[0]) == [(110, 120, Wait.TIMER)]


def test_rows_are_given_by_process() -> None:
    scene = (
        Scene().thread_row(PID, 20, min_flt=1).thread_row(NEW, 20).thread_row(PID, 40, min_flt=2)
    )
    rows = scene.timeline().thread_rows
    assert [own["min_flt"].tolist() for own in rows[PID]] == [[1, 2]]
    assert [len(own) for own in rows[NEW]] == [1]


# -- calls ----------------------------------------------------------------------------------------


def calls(scene: Scene) -> list[tuple[str, int, int, int]]:
    """(name, start, end, value), in ms; -1 for one that never returned."""
    return [
        (c.name, (c.start_ns - ARMED_NS) // MS, -1 if c.end_ns == FOREVER else
         (c.end_ns - ARMED_NS) // MS, c.value)
        for c in scene.timeline().calls
    ]  # fmt: skip


def test_a_call_has_its_argument() -> None:
    assert calls(Scene().call(PID, "decode", 10, 20, value=512)) == [("decode", 10, 20, 512)]


def test_of_nested_calls_the_outermost_is_kept() -> None:
    scene = Scene().call(PID, "model_load", 10, 90).call(PID, "model_load", 11, 89)
    assert calls(scene) == [("model_load", 10, 90, 0)]


def test_rows_of_one_name_nest_too() -> None:
    """llama_decode counts its tokens, what it calls in turn does not."""
    scene = Scene().event(Kind.MARK_ENTER, 10, PID, flags=3, a=38)
    scene.event(Kind.MARK_ENTER, 11, PID, flags=7).event(Kind.MARK_EXIT, 20, PID, flags=7)
    scene.event(Kind.MARK_EXIT, 21, PID, flags=3)
    assert calls(scene) == [("decode", 10, 21, 38)]


def test_calls_of_other_threads_and_names_do_not_nest() -> None:
    scene = Scene().call(PID, "decode", 10, 30).call(PID, "decode", 15, 25, tid=71)
    scene.call(PID, "encode", 16, 20)
    assert sorted(calls(scene)) == [
        ("decode", 10, 30, 0),
        ("decode", 15, 25, 0),
        ("encode", 16, 20, 0),
    ]


def test_a_call_that_never_returned() -> None:
    assert calls(Scene().call(PID, "model_load", 10, None)) == [("model_load", 10, -1, 0)]


def test_a_return_without_its_call_is_nothing() -> None:
    assert calls(Scene().event(Kind.MARK_EXIT, 10, PID, flags=3)) == []


def test_a_thread_that_died_in_a_call_does_not_swallow_its_successors_calls() -> None:
    scene = Scene().call(PID, "decode", 10, None).call(NEW, "decode", 50, 60, tid=PID)
    assert sorted(calls(scene)) == [("decode", 10, -1, 0), ("decode", 50, 60, 0)]


def test_an_unknown_mark_keeps_its_number() -> None:
    scene = Scene().event(Kind.MARK_ENTER, 10, PID, flags=99)
    assert calls(scene.event(Kind.MARK_EXIT, 20, PID, flags=99)) == [("mark 99", 10, 20, 0)]


def test_calls_and_marks_are_found_by_process_and_name() -> None:
    timeline = router_switch().timeline()
    assert [c.name for c in timeline.calls_of(NEW, "model_load")] == ["model_load"]
    assert len(timeline.calls_of(NEW)) == 6
    assert not timeline.calls_of(FRONT)
    decodes = timeline.calls_of(NEW, "decode", ns(575), ns(701))
    assert [c.start_ns for c in decodes] == [ns(575), ns(641)]
    (mark,) = timeline.marks_of(NEW, "model_loaded")
    assert (mark.ns, mark.values) == (ns(560), {})
    assert timeline.marks_of(FRONT, "model_loaded") == []


# -- requests -------------------------------------------------------------------------------------


def test_requests_are_in_the_order_of_their_arrival() -> None:
    scene = Scene().request(PID, 200).request(PID, 100)
    assert [e.start_ns for e in scene.timeline().exchanges] == [ns(100), ns(200)]


def test_a_request_over_the_targets_own_connection_is_not_a_clients() -> None:
    front, back = router_switch().timeline().exchanges
    assert (front.from_target, back.from_target) == (False, True)


def test_a_client_may_have_a_port_that_the_target_uses_elsewhere() -> None:
    """Two hosts, or two destinations, give out the same port numbers."""
    scene = Scene().connected(FRONT, 5, local=40_001, remote=9_001)
    scene.request(NEW, 10, token=20, ports=(9_001, 40_001))
    scene.request(FRONT, 30, token=40, ports=(8_080, 40_001))
    inner, outer = scene.timeline().exchanges
    assert (inner.from_target, outer.from_target) == (True, False)


def test_a_connection_whose_port_is_translated_is_still_the_targets() -> None:
    """A published port of a container: the target connects to 5801, the server sees 8000."""
    scene = Scene().connected(FRONT, 5, local=40_001, remote=5_801)
    (only,) = scene.request(NEW, 10, token=20, ports=(8_000, 40_001)).timeline().exchanges
    assert only.from_target


def test_a_request_from_before_recording_waited_from_its_beginning() -> None:
    scene = Scene().request(PID, 50, token=60, notes=[BEGAN_BEFORE], generates=False, endpoint="")
    (only,) = scene.timeline().exchanges
    assert (only.start_ns, only.generates) == (ns(0), True)


def test_a_first_token_before_the_request_is_none() -> None:
    (only,) = Scene().request(PID, 100, token=90).timeline().exchanges
    assert only.first_token_ns is None


def test_an_outcome_that_no_version_knows_is_incomplete() -> None:
    scene = Scene().process(PID, "llama-server").request(PID, 10, token=20, outcome="teleported")
    assert [e.outcome for e in scene.timeline().exchanges] == ["incomplete"]


# -- files ----------------------------------------------------------------------------------------


def test_a_file_has_its_rows_and_its_mount() -> None:
    scene = Scene().file(B_GGUF, "/nas/b.gguf", fstype="nfs4", mount="/nas", read_ahead_kb=15)
    scene.file_row(B_GGUF, 20, reads=1).file_row(99, 20).file_row(B_GGUF, 40, reads=3)
    timeline = scene.timeline()
    file = timeline.files[DEV, B_GGUF]
    assert (file.fstype, file.mount, file.read_ahead_kb) == ("nfs4", "/nas", 15)
    assert file.is_weights
    assert [(ms(int(r["ns"])), int(r["reads"])) for r in file.rows] == [
        (20, 1),
        (40, 3),
        (10_000, 3),
    ]
    unnamed = timeline.files[DEV, 99]
    assert (unnamed.path, unnamed.fstype, unnamed.is_weights) == ("inode 99", None, False)


def test_what_a_file_system_reads_of_its_own_is_called_so() -> None:
    disk, none = kernel_dev(254, 0), kernel_dev(0, 3)
    scene = Scene().file(B_GGUF, "/srv/b.gguf", dev=disk, source="/dev/vda")
    scene.file_row(disk, 20, dev=none).file_row(disk + 1, 20, dev=none).file_row(disk, 20, dev=disk)
    files = scene.timeline().files
    assert files[none, disk].path == "/dev/vda: directories and tables of its file system"
    assert files[none, disk + 1].path == f"inode {disk + 1}"
    assert files[disk, disk].path == f"inode {disk}"


@pytest.mark.parametrize(
    ("at", "reads"), [(0, 0), (19.9, 0), (20, 100), (30, 150), (39, 195), (40, 200), (99, 200)]
)
def test_a_counter_is_linear_between_its_snapshots(at: float, reads: float) -> None:
    scene = Scene().file(9).file_row(9, 20, reads=100).file_row(9, 40, reads=200)
    file = scene.timeline().files[DEV, 9]
    assert file.at("reads", ns(at)) == pytest.approx(reads)
    assert file.delta("reads", ns(0), ns(at)) == round(reads)


def test_a_counter_grows_between_two_looks_not_since_its_last_row() -> None:
    """A row is written when it changed; the looks between left none."""
    scene = Scene().file(9).file_row(9, 20, reads=100).file_row(9, 1_020, reads=200)
    for look in (20, 1_000, 1_020):
        scene.thread_row(PID, look, cpu_ns=look)
    file = scene.timeline().files[DEV, 9]
    assert [file.at("reads", ns(at)) for at in (20, 500, 1_000, 1_010)] == [100, 100, 100, 150]


def test_a_counter_grows_between_its_files_first_and_last_activity() -> None:
    """Looks come late; the first activity has an event, and the last a stamp in jiffies."""
    host = {"page_bytes": 4096, "tick_ns": 4 * MS}
    zero = ns(0) // (4 * MS)  # of that jiffy
    scene = Scene().meta(host=host).file(9).file_row(9, 20, reads=100, touch_jiffies=zero + 2)
    scene.file_row(9, 1_320, reads=200, touch_jiffies=zero + 275)  # over at 1,104 ms
    for look in (20, 1_000, 1_320):
        scene.thread_row(PID, look, cpu_ns=look)
    for jiffy in (1, 251, 400):
        scene.event(Kind.TOUCH, 4 * jiffy, PID, dev=DEV, ino=9, a=zero + jiffy)
    file = scene.timeline().files[DEV, 9]
    counted = {at: file.at("reads", ns(at)) for at in (10, 13, 1_003, 1_054, 1_104, 1_320)}
    # The first is over with the second jiffy, at 12 ms, and not only at the look.
    assert counted == {10: 0, 13: 100, 1_003: 100, 1_054: 150, 1_104: 200, 1_320: 200}


@pytest.mark.parametrize(("rested", "half_way"), [(True, 0), (False, 50)])
def test_what_comes_after_a_rest_begins_with_its_event(rested: bool, half_way: float) -> None:
    """The row before was written for something else (an open); or it was not at rest by then."""
    host = {"page_bytes": 4096, "tick_ns": 4 * MS}
    zero = ns(0) // (4 * MS)
    before = zero + (1 if rested else 249)
    scene = Scene().meta(host=host).file(9).file_row(9, 1_000, opens=1, touch_jiffies=before)
    scene.file_row(9, 1_200, reads=100, touch_jiffies=zero + 300)
    for look in (1_000, 1_200):
        scene.thread_row(PID, look, cpu_ns=look)
    scene.event(Kind.TOUCH, 1_120, PID, dev=DEV, ino=9, a=zero + 280)
    file = scene.timeline().files[DEV, 9]
    assert file.at("reads", ns(1_100)) == half_way
    assert file.at("reads", ns(1_200)) == 100


def test_stamps_in_jiffies_that_make_no_sense_do_no_harm() -> None:
    host = {"page_bytes": 4096, "tick_ns": 4 * MS}
    scene = Scene().meta(host=host).file(9).file_row(9, 20, reads=100, touch_jiffies=2**63)
    scene.file_row(9, 40, reads=200, touch_jiffies=2**64 - 1)
    scene.event(Kind.TOUCH, 4, PID, dev=DEV, ino=9, a=2**64 - 1)
    file = scene.timeline().files[DEV, 9]
    assert [file.at("reads", ns(at)) for at in (20, 40)] == [100, 200]
    curve = [file.at("reads", ns(at)) for at in range(-10, 50)]
    assert curve == sorted(curve)


def test_a_counter_without_rows_is_zero() -> None:
    file = Scene().file(9).timeline().files[DEV, 9]
    assert (file.at("reads", ns(5)), file.delta("reads", ns(0), ns(5))) == (0.0, 0)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 2**40)), min_size=1, max_size=20),
    st.lists(st.integers(-100, 1100), min_size=2, max_size=6),
)
def test_growth_adds_up(steps: list[tuple[int, int]], moments: list[int]) -> None:
    """A counter's growth over neighbouring intervals is its growth over all, but for rounding."""
    scene, total = Scene().file(9), 0
    for at, more in sorted(steps):
        total += more
        scene.file_row(9, at, read_bytes=total)
    file = scene.timeline().files[DEV, 9]
    stamps = sorted(ns(m) for m in moments)
    parts = [file.delta("read_bytes", a, b) for a, b in pairwise(stamps)]
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(file.delta("read_bytes", stamps[0], stamps[-1]), abs=6)


# -- the recording --------------------------------------------------------------------------------


def test_what_the_recording_says_of_itself() -> None:
    scene = Scene(end=700).source("marks", "absent", "none", "less").loss("events ring full", 3)
    timeline = scene.timeline()
    assert (timeline.start_ns, timeline.armed_ns, timeline.end_ns) == (ns(-10), ns(0), ns(700))
    assert (timeline.complete, timeline.page_bytes) == (True, PAGE)
    assert timeline.lost == {"events ring full": 3}
    assert [(s.name, s.state) for s in timeline.sources] == [("marks", "absent")]


def test_records_that_no_clock_stamped_are_counted_as_lost() -> None:
    scene = Scene().wait(PID, 10, 20, Wait.LOCK).record(Kind.OFFCPU, 2**63, tid=PID, tgid=PID)
    timeline = scene.record(Kind.OFFCPU, ns(5), 2**64 - 1, tid=PID, tgid=PID).timeline()
    assert timeline.lost == {"records with impossible stamps": 2}
    assert spans(threads(timeline)[0]) == [(10, 20, Wait.LOCK)]


def test_a_recording_that_was_killed_ends_with_its_last_fact() -> None:
    scene = Scene().meta(end_ns=None, start_ns=None, armed_ns=None, host=None)
    timeline = scene.wait(PID, 10, 90, Wait.LOCK).thread_row(PID, 80).timeline()
    assert (timeline.start_ns, timeline.armed_ns, timeline.end_ns) == (ns(10), ns(10), ns(90))
    assert timeline.page_bytes == 4096


def test_an_empty_recording_is_a_timeline() -> None:
    timeline = Scene().timeline()
    assert (timeline.processes, timeline.threads.lives, timeline.files) == ({}, [], {})
    assert not any(map(len, timeline.events.values()))
    assert not len(timeline.waits)
    assert not len(timeline.blocks)


@pytest.mark.parametrize(
    ("kind", "fact"),
    [
        ("process", {}),
        ("process", {"pid": "x"}),
        ("exchange", {}),
        ("exchange", {"start_ns": None}),
        ("exchange", {"start_ns": 1, "tgid": [], "tid": 1, "socket": 1, "local_port": 1}),
        ("mark", {"name": "x", "tgid": "y"}),
        ("file", {"dev": 1}),
        ("file", {"dev": {}, "ino": 1}),
    ],
)
def test_a_fact_that_makes_no_sense_is_a_damaged_recording(
    kind: str, fact: dict[str, Any], tmp_path: Path
) -> None:
    path = Scene().fact(kind, ns(0), fact).write(tmp_path / "x.ttft")
    with Reader(path) as reader, pytest.raises(RecordingError, match="damaged"):
        build(reader)


@pytest.mark.parametrize(
    "meta",
    [{"start_ns": "x"}, {"armed_ns": ["x"]}, {"host": 3}, {"marks": 7}, {"marks": {"x": "y"}}],
)
def test_a_head_that_makes_no_sense_is_a_damaged_recording(
    meta: dict[str, Any], tmp_path: Path
) -> None:
    path = Scene().meta(**meta).write(tmp_path / "x.ttft")
    with Reader(path) as reader, pytest.raises(RecordingError, match="damaged"):
        build(reader)


@pytest.mark.parametrize("wrong", ["soon", [], {}, 1.5, 10**30, -1])
@pytest.mark.parametrize("name", ["first_token_ns", "end_ns", "headers_ns", "prompt_tokens"])
def test_a_number_of_a_request_that_is_none_is_unknown(name: str, wrong: Any) -> None:
    facts: dict[str, Any] = {name: wrong}
    (only,) = Scene().request(PID, 100, token=150, **facts).timeline().exchanges
    assert getattr(only, name) is None


def test_stamps_are_signed_sixty_four_bits() -> None:
    (only,) = threads(Scene().wait(PID, 10, 20, Wait.LOCK).timeline())
    assert only.start_ns.dtype == only.end_ns.dtype == np.int64
