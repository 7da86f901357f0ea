"""What threads did: every rule on threads made for it, and an exact partition for any threads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttftprof.activities import merged, process_activities
from ttftprof.events import CpuMode, Wait
from ttftprof.model import ACTIVITIES, Activities, Activity
from unit.recordings import ARMED_NS, MS, Scene, ms, ns

PID = 70
Span = tuple[str, float, float]


def spans(activities: Sequence[Activity]) -> list[Span]:
    return [(a.activity, ms(a.start_ns), ms(a.end_ns)) for a in activities]


def did(scene: Scene, begin: float = 100, end: float = 200, pid: int = PID) -> list[Span]:
    """What the process did in an interval; checked to be a partition of it."""
    found = process_activities(scene.timeline(), pid, ns(begin), ns(end))
    check_partition(found, ns(begin), ns(end))
    return spans(found)


def check_partition(found: Sequence[Activity], begin_ns: int, end_ns: int) -> None:
    assert all(a.end_ns == b.start_ns for a, b in pairwise(found))
    assert all(a.end_ns > a.start_ns for a in found)
    assert {a.activity for a in found} <= set(ACTIVITIES)
    if end_ns > begin_ns:
        assert (found[0].start_ns, found[-1].end_ns) == (begin_ns, end_ns)
    else:
        assert found == []


def totals(found: list[Span]) -> dict[str, float]:
    summed: dict[str, float] = {}
    for activity, begin, end in found:
        summed[activity] = summed.get(activity, 0) + end - begin
    return {name: round(value, 3) for name, value in summed.items()}


# -- one thread -----------------------------------------------------------------------------------


def test_a_process_that_nothing_is_known_of_did_nobody_knows_what() -> None:
    assert did(Scene()) == [("unknown", 100, 200)]


def test_an_empty_interval_has_no_activity() -> None:
    assert did(Scene().wait(PID, 0, 900, Wait.LOCK), 100, 100) == []
    assert did(Scene(), 200, 100) == []


def test_between_its_waits_a_thread_runs() -> None:
    scene = Scene().wait(PID, 0, 120, Wait.STORAGE).wait(PID, 150, 900, Wait.TIMER)
    assert did(scene) == [("storage_wait", 100, 120), ("cpu", 120, 150), ("sleep", 150, 200)]


@pytest.mark.parametrize(
    ("reason", "activity"),
    [
        (Wait.RUNNABLE, "cpu"),
        (Wait.STORAGE, "storage_wait"),
        (Wait.LOCK, "lock"),
        (Wait.TIMER, "sleep"),
        (Wait.NETWORK, "idle"),
        (Wait.CHILD, "idle"),
        (Wait.PIPE, "idle"),
        (Wait.DEVICE, "gpu"),
        (Wait.RECLAIM, "reclaim"),
        (Wait.OTHER, "idle"),
    ],
)
def test_every_reason_has_its_activity(reason: Wait, activity: str) -> None:
    expected = [("cpu", 100, 120), (activity, 120, 150), ("cpu", 150, 200)]
    joined = merged([Activities.of(Activity(a, ns(b), ns(e)) for a, b, e in expected)])
    assert did(Scene().wait(PID, 120, 150, reason)) == spans(joined)


def test_waits_of_other_times_do_not_count() -> None:
    scene = Scene().wait(PID, 10, 100, Wait.STORAGE).wait(PID, 200, 300, Wait.STORAGE)
    assert did(scene) == [("cpu", 100, 200)]


# -- several threads ------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [Wait.STORAGE, Wait.RECLAIM, Wait.DEVICE])
def test_one_that_waits_for_a_device_holds_up_those_that_run(reason: Wait) -> None:
    scene = Scene().wait(PID, 120, 150, reason).wait(PID, 900, 901, Wait.LOCK, tid=71)
    activity = {"STORAGE": "storage_wait", "RECLAIM": "reclaim", "DEVICE": "gpu"}[reason.name]
    assert did(scene) == [("cpu", 100, 120), (activity, 120, 150), ("cpu", 150, 200)]


@pytest.mark.parametrize("reason", [Wait.LOCK, Wait.TIMER, Wait.NETWORK, Wait.PIPE, Wait.OTHER])
def test_one_that_runs_wins_over_others_that_sleep(reason: Wait) -> None:
    scene = Scene().wait(PID, 0, 900, reason).wait(PID, 900, 901, Wait.LOCK, tid=71)
    assert did(scene) == [("cpu", 100, 200)]


def test_storage_wins_over_reclaim_over_the_device() -> None:
    scene = Scene().wait(PID, 110, 190, Wait.DEVICE).wait(PID, 120, 180, Wait.RECLAIM, tid=71)
    assert did(scene.wait(PID, 130, 170, Wait.STORAGE, tid=72)) == [
        ("cpu", 100, 110),
        ("gpu", 110, 120),
        ("reclaim", 120, 130),
        ("storage_wait", 130, 170),
        ("reclaim", 170, 180),
        ("gpu", 180, 190),
        ("cpu", 190, 200),
    ]


def test_a_moment_when_nobody_runs_belongs_to_the_wait_that_ends_it() -> None:
    scene = Scene().wait(PID, 90, 150, Wait.LOCK).wait(PID, 95, 170, Wait.TIMER, tid=71)
    scene.wait(PID, 160, 300, Wait.LOCK)
    assert did(scene) == [
        ("lock", 100, 150),
        ("cpu", 150, 160),
        ("sleep", 160, 170),
        ("cpu", 170, 200),
    ]


def test_a_preempted_thread_wants_to_run() -> None:
    scene = Scene().wait(PID, 110, 150, Wait.RUNNABLE).wait(PID, 0, 900, Wait.LOCK, tid=71)
    assert did(scene) == [("cpu", 100, 200)]


def test_what_ends_after_the_interval_still_names_the_gap() -> None:
    assert did(Scene().wait(PID, 0, 900, Wait.TIMER)) == [("sleep", 100, 200)]


def test_a_wait_that_never_ended_names_its_gap() -> None:
    scene = Scene().thread_row(PID, 50, off_ns=ns(40), off_reason=int(Wait.TIMER))
    assert did(scene) == [("sleep", 100, 200)]


def test_threads_of_other_processes_do_not_count() -> None:
    scene = Scene().wait(PID, 0, 900, Wait.LOCK).wait(71, 0, 900, Wait.STORAGE)
    assert did(scene) == [("lock", 100, 200)]


# -- born and dying -------------------------------------------------------------------------------


def test_before_its_first_thread_is_born_a_process_is_idle() -> None:
    scene = Scene().forked(PID, 130).wait(PID, 150, 170, Wait.STORAGE)
    assert did(scene) == [
        ("idle", 100, 130),
        ("cpu", 130, 150),
        ("storage_wait", 150, 170),
        ("cpu", 170, 200),
    ]


def test_after_its_last_thread_died_nobody_runs() -> None:
    scene = Scene().wait(PID, 110, 120, Wait.LOCK).thread_ended(PID, PID, 150)
    assert did(scene) == [("cpu", 100, 110), ("lock", 110, 120), ("cpu", 120, 150),
                          ("idle", 150, 200)]  # fmt: skip


def test_a_thread_that_died_before_does_not_run_on() -> None:
    scene = Scene().wait(PID, 0, 900, Wait.TIMER)
    scene.thread(PID, 71, 20).thread_row(PID, 25, tid=71, since=20)
    assert did(scene.thread_ended(PID, 71, 50, since=20)) == [("sleep", 100, 200)]


def test_a_thread_that_died_waiting() -> None:
    scene = Scene().wait(PID, 0, 900, Wait.TIMER).wait(PID, 110, 160, Wait.STORAGE, tid=71)
    scene.thread_row(PID, 105, tid=71).thread_ended(PID, 71, 150)
    assert totals(did(scene))["storage_wait"] == 40


def test_a_reused_thread_id_is_not_its_predecessor() -> None:
    """The first life waits for storage until its end; the second sleeps on a timer."""
    scene = Scene().wait(PID, 0, 900, Wait.NETWORK)
    scene.wait(PID, 105, 120, Wait.STORAGE, tid=71).thread_ended(PID, 71, 120)
    scene.thread(PID, 71, 150).wait(PID, 150, 400, Wait.TIMER, tid=71)
    scene.thread_row(PID, 160, tid=71, since=150)
    assert did(scene) == [
        ("cpu", 100, 105),
        ("storage_wait", 105, 120),
        ("sleep", 120, 200),
    ]


# -- running time ---------------------------------------------------------------------------------


def running() -> Scene:
    """A thread that runs all the time, with snapshots at 100, 150 and 200 ms."""
    scene = Scene().wait(PID, 10, 11, Wait.LOCK)
    return scene.thread_row(PID, 100, ticks={CpuMode.USER: 100, CpuMode.FAULT: 100})


def test_running_time_is_split_by_its_ticks() -> None:
    scene = running().thread_row(PID, 150, ticks={CpuMode.USER: 103, CpuMode.FAULT: 102})
    scene.thread_row(PID, 200, ticks={CpuMode.USER: 113, CpuMode.FAULT: 102})
    assert did(scene) == [("cpu", 100, 130), ("fault", 130, 150), ("cpu", 150, 200)]


def test_kernel_time_outside_faults_is_cpu() -> None:
    scene = running().thread_row(
        PID, 200, ticks={CpuMode.USER: 101, CpuMode.FAULT: 101, CpuMode.KERNEL: 8}
    )
    assert totals(did(scene)) == {"cpu": 90, "fault": 10}


def test_short_waits_are_given_back_to_their_reason() -> None:
    shorts = {Wait.STORAGE: 20.0, Wait.LOCK: 5.0, Wait.RUNNABLE: 5.0}
    scene = running().thread_row(PID, 200, short=shorts, cpu_ns=70 * MS)
    assert totals(did(scene)) == {"cpu": 75, "storage_wait": 20, "lock": 5}


def test_short_waits_and_ticks_share_what_is_left() -> None:
    scene = running().thread_row(
        PID, 200, short={Wait.STORAGE: 50.0}, cpu_ns=50 * MS,
        ticks={CpuMode.USER: 101, CpuMode.FAULT: 101},
    )  # fmt: skip
    assert totals(did(scene)) == {"cpu": 25, "fault": 25, "storage_wait": 50}


def test_a_snapshot_tells_of_the_time_before_it() -> None:
    scene = running().thread_row(PID, 150, ticks={CpuMode.USER: 100, CpuMode.FAULT: 104})
    scene.thread_row(PID, 250, ticks={CpuMode.USER: 104, CpuMode.FAULT: 104})
    assert did(scene) == [("fault", 100, 150), ("cpu", 150, 200)]


def test_waiting_time_is_not_split() -> None:
    scene = running().thread_row(PID, 200, ticks={CpuMode.FAULT: 101, CpuMode.USER: 100})
    scene.wait(PID, 120, 180, Wait.LOCK)
    assert did(scene) == [("fault", 100, 120), ("lock", 120, 180), ("fault", 180, 200)]


def test_a_thread_from_before_is_counted_from_its_first_row() -> None:
    """What it had counted when recording began is not of this interval."""
    scene = Scene().wait(PID, 10, 11, Wait.LOCK)
    scene.thread_row(PID, 150, ticks={CpuMode.FAULT: 5_000})
    assert did(scene) == [("cpu", 100, 200)]


def test_a_new_thread_is_counted_from_zero() -> None:
    scene = Scene().forked(PID, 100).thread_row(PID, 200, since=100, ticks={CpuMode.FAULT: 5})
    assert did(scene) == [("fault", 100, 200)]


def test_counters_that_start_anew_are_another_threads() -> None:
    scene = Scene().thread(PID, 71, 20).thread_row(PID, 90, tid=71, since=20,
                                                   ticks={CpuMode.USER: 900})  # fmt: skip
    scene.thread_ended(PID, 71, 95, since=20).thread(PID, 71, 100)
    scene.thread_row(PID, 200, tid=71, since=100, ticks={CpuMode.FAULT: 5})
    assert did(scene) == [("fault", 100, 200)]


# -- any threads ----------------------------------------------------------------------------------

moments = st.integers(0, 60)
waits = st.tuples(st.integers(0, 3), moments, moments, st.sampled_from(Wait))
lives = st.tuples(st.integers(0, 3), moments, moments, st.booleans())
rows = st.tuples(st.integers(0, 3), moments, st.lists(st.integers(0, 50), min_size=13, max_size=13))


def scene_of(
    waited: list[tuple[int, int, int, Wait]],
    lived: list[tuple[int, int, int, bool]],
    counted: list[tuple[int, int, list[int]]],
) -> Scene:
    scene = Scene()
    for thread, begin, length, reason in waited:
        scene.wait(PID, begin, begin + length, reason, tid=PID + thread)
    for thread, born, length, ends in lived:
        scene.thread(PID, PID + thread, born)
        if ends:
            scene.thread_ended(PID, PID + thread, born + length, since=born)
    for thread, at, numbers in counted:
        scene.thread_row(
            PID, at, tid=PID + thread, cpu_ns=numbers[0] * MS,
            short=dict(zip(Wait, numbers[1:11], strict=False)),
            ticks=dict(zip(CpuMode, numbers[10:], strict=True)),
        )  # fmt: skip
    return scene


@settings(deadline=None)
@given(
    st.lists(waits, max_size=12), st.lists(lives, max_size=4), st.lists(rows, max_size=6),
    moments, moments,
)  # fmt: skip
def test_any_threads_give_a_partition(
    waited: list[tuple[int, int, int, Wait]],
    lived: list[tuple[int, int, int, bool]],
    counted: list[tuple[int, int, list[int]]],
    begin: int,
    length: int,
) -> None:
    timeline = scene_of(waited, lived, counted).timeline()
    whole = process_activities(timeline, PID, ns(begin), ns(begin + length))
    check_partition(whole, ns(begin), ns(begin + length))


@settings(deadline=None)
@given(st.lists(waits, min_size=1, max_size=10), st.integers(1, 59))
def test_two_halves_are_the_whole(waited: list[tuple[int, int, int, Wait]], cut: int) -> None:
    """Where no running time has to be shared out, it does not matter how an interval is cut."""
    timeline = scene_of(waited, [], []).timeline()
    first = process_activities(timeline, PID, ns(0), ns(cut))
    second = process_activities(timeline, PID, ns(cut), ns(60))
    assert merged([first, second]) == process_activities(timeline, PID, ns(0), ns(60))


def simply(waited: list[tuple[int, int, int, Wait]], at: float) -> str | None:
    """The rule in a few lines, for one moment; None where nobody runs."""
    threads = {thread for thread, *_ in waited}
    asleep = {(t, r) for t, b, n, r in waited if b <= at < b + n}
    reasons = {reason for _, reason in asleep}
    for reason, activity in (
        (Wait.STORAGE, "storage_wait"), (Wait.RECLAIM, "reclaim"), (Wait.DEVICE, "gpu"),
    ):  # fmt: skip
        if reason in reasons:
            return activity
    awake = threads - {t for t, r in asleep if r != Wait.RUNNABLE}
    return "cpu" if awake else None


def apart(waited: list[tuple[int, int, int, Wait]]) -> bool:
    """No thread is in two waits at once."""
    return all(
        a[0] != b[0] or a[1] + a[2] <= b[1] or b[1] + b[2] <= a[1]
        for n, a in enumerate(waited)
        for b in waited[n + 1 :]
    )


@settings(deadline=None)
@given(st.lists(waits, min_size=1, max_size=8).filter(apart))
def test_every_moment_follows_the_rule(waited: list[tuple[int, int, int, Wait]]) -> None:
    found = process_activities(scene_of(waited, [], []).timeline(), PID, ns(0), ns(120))
    for at in range(120):
        expected = simply(waited, at + 0.5)
        moment = ARMED_NS + round((at + 0.5) * MS)
        got = next(a.activity for a in found if a.start_ns <= moment < a.end_ns)
        assert got == expected if expected else got in {"lock", "sleep", "idle"}


def test_neighbours_of_one_kind_are_one() -> None:
    pieces = [Activity("cpu", 0, 5), Activity("cpu", 5, 7), Activity("lock", 7, 7)]
    more = [Activity("cpu", 7, 9), Activity("cpu", 10, 11)]
    assert merged([Activities.of(pieces), Activities.of(more)]) == [
        Activity("cpu", 0, 9),
        Activity("cpu", 10, 11),
    ]
