"""What a drawing shows beside the requests, from a recording told in milliseconds."""

from __future__ import annotations

import numpy as np
import pytest

from ttftprof.tracks import tracks_of
from unit.recordings import Scene, router_switch
from unit.synthetic import busy_timeline


def test_tracks_lie_within_the_recording() -> None:
    timeline = router_switch().timeline()
    tracks = tracks_of(timeline)
    assert tracks.processes
    for process in tracks.processes:
        assert timeline.armed_ns <= process.start_ns <= process.end_ns <= timeline.end_ns
        for thread in process.threads:
            assert sum(thread.busy_ns) <= process.end_ns - process.start_ns
            assert all(process.start_ns <= ns <= process.end_ns for ns in thread.start_ns)


def test_requests_to_storage_are_all_counted() -> None:
    (sizes,) = tracks_of(busy_timeline(threads=1, waits=5_000)).sizes
    assert sum(sizes.count) == 5_000
    assert sum(sizes.total_bytes) == 5_000 * 131_072
    assert set(sizes.size_bytes) == {131_072}


def test_a_thread_runs_between_its_waits() -> None:
    timeline = busy_timeline(threads=1, waits=100)
    (process,) = tracks_of(timeline).processes
    (thread,) = process.threads
    busy = dict.fromkeys(("cpu", "storage_wait"), 0)
    for name, ns in zip(thread.name, thread.busy_ns, strict=True):
        busy[name] += ns
    assert sum(busy.values()) == process.end_ns - process.start_ns
    waits = timeline.threads.waits_of(process.tgid).by_thread()[0]
    assert busy["storage_wait"] == int((waits.end_ns - waits.start_ns).sum())


def test_running_threads_integrate_to_their_cpu_time() -> None:
    timeline = busy_timeline(threads=3, waits=1_000)
    (process,) = tracks_of(timeline).processes
    ns, values = np.array(process.running.ns), np.array(process.running.values)
    spent = float((np.diff(ns) * values[:-1]).sum())
    waits = timeline.threads.waits_of(process.tgid)
    waited = int((waits.end_ns - waits.start_ns).sum())
    assert spent == pytest.approx(3 * (process.end_ns - process.start_ns) - waited, rel=0.01)


def test_a_huge_recording_is_bounded_and_says_what_it_left_out() -> None:
    timeline = busy_timeline(threads=80, waits=3_000)
    (process,) = tracks_of(timeline).processes
    assert len(process.threads) + process.threads_left_out == 80
    assert sum(len(thread.name) for thread in process.threads) <= 40_000


def test_nothing_recorded_gives_no_tracks() -> None:
    tracks = tracks_of(Scene().timeline())
    assert (tracks.processes, tracks.storage, tracks.sizes, tracks.ticks) == ((), (), (), ())
