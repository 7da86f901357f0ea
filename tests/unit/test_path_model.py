"""A path's delay and its link's rate from the times of requests, on paths of known ones: that
answer in order, everyone at once, or so many at a time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np
import pytest

from ttftprof import path_model, remote
from ttftprof.events import Records

MS, KIB, MIB = 1_000_000, 1 << 10, 1 << 20
RATE, DELAY_MS = 100_000_000, 5.0
Timed = list[tuple[float, float, int]]  # [start, end] in ms and bytes of each


def fit(timed: Timed) -> path_model.Fit | None:
    return path_model.fit(path_model.answered(reads(timed)))


def reads(timed: Timed) -> Records:
    found = np.zeros(len(timed), remote.READ)
    for at, (start_ms, end_ms, size) in enumerate(timed):
        found[at]["start_ns"], found[at]["end_ns"] = round(start_ms * MS), round(end_ms * MS)
        found[at]["asked_bytes"] = found[at]["got_bytes"] = size
    return found


def link_ms(size: int, rate: float = RATE) -> float:
    return size / rate * 1e3


def alone(sizes: Iterable[int], delay_ms: float, rate: float, start_ms: float = 0) -> Timed:
    """One after the other."""
    found, at = [], start_ms
    for size in sizes:
        end = at + delay_ms + link_ms(size, rate)
        found.append((at, end, size))
        at = end + 1
    return found


def burst(start_ms: float, count: int, size: int) -> Timed:
    """Handed over at once; the link carries one after the other."""
    return [
        (start_ms + i / 1000, start_ms + DELAY_MS + link_ms(size) * (i + 1), size)
        for i in range(count)
    ]


def shared(depth: int, count: int, size: int, delay_ms: float, rate: float) -> Timed:
    """`depth` kept under way; each gets its share of the link, so all take `depth` times as long
    as alone. Begun in turn."""
    each = link_ms(size, rate) * depth + delay_ms
    return [(1_000 + i * each / depth, 1_000 + i * each / depth + each, size) for i in range(count)]


def lanes(lanes: int, depth: int, count: int, size: int, lane_rate: float) -> Timed:
    """`depth` kept under way at a path that answers `lanes` of them at a time, each at its own
    rate."""
    free = [1_000.0] * lanes
    begins = [1_000.0 + i / 1e3 for i in range(depth)]
    found: Timed = []
    for _ in range(count):
        begin = heapq.heappop(begins)
        end = max(begin, heapq.heappop(free)) + link_ms(size, lane_rate)
        heapq.heappush(free, end)
        heapq.heappush(begins, end)
        found.append((begin, end, size))
    return found


def test_bursts_tell_the_rate_and_the_delay() -> None:
    found = fit([r for i in range(5) for r in burst(50 * i, 6, 128 * KIB)])
    assert found
    assert found.bytes_per_second == pytest.approx(RATE, rel=0.001)
    assert found.delay_ns == pytest.approx(DELAY_MS * MS, rel=0.001)


def test_lone_reads_of_two_sizes_tell_them_too() -> None:
    found = fit(alone([4096, 65536] * 6, DELAY_MS, RATE))
    assert found
    assert found.bytes_per_second == pytest.approx(RATE, rel=0.001)
    assert found.delay_ns == pytest.approx(DELAY_MS * MS, rel=0.001)


def test_lone_reads_of_one_size_tell_no_rate() -> None:
    found = fit([(100.0 * i, 100.0 * i + 7, 4096) for i in range(9)])
    assert found
    assert found.bytes_per_second is None
    assert found.delay_ns == 7 * MS


def test_a_read_that_others_join_is_not_alone() -> None:
    """On a disk that serves all at once, the first of eight takes as long as they all."""
    small = alone([4 * KIB, 16 * KIB] * 4, 0.1, 500e6)
    found = fit(small + shared(8, 16, 4 * MIB, 0.1, 500e6))
    assert found
    assert found.bytes_per_second == pytest.approx(500e6, rel=0.15)
    assert found.delay_ns == pytest.approx(0.1 * MS, rel=0.1)


def test_what_went_faster_refutes_an_estimate() -> None:
    """Small lone reads, slow for a reason of their own, say 58 MB/s; 500 MB/s came, eight at a
    time, each of which stood in line behind the others."""
    slow = alone([4 * KIB, 64 * KIB] * 4, 0.1, 58e6)
    found = fit(slow + shared(8, 64, 4 * MIB, 0.1, 500e6))
    assert found
    assert found.bytes_per_second == pytest.approx(500e6, rel=0.15)


@pytest.mark.parametrize(("depth", "known"), [(4, False), (8, False), (32, True)])
def test_the_link_is_known_only_if_more_at_once_bring_no_more(depth: int, known: bool) -> None:
    """Eight answered at a time, each at 50 MB/s: up to eight, each takes as long as alone."""
    found = fit(alone([MIB] * 4, 0, 50e6) + lanes(8, depth, 400, MIB, 50e6))
    assert found
    assert (found.bytes_per_second is not None) is known
    if found.bytes_per_second is not None:
        assert found.bytes_per_second == pytest.approx(400e6, rel=0.1)


def test_without_a_lone_read_a_deep_queue_tells_no_limit() -> None:
    found = fit(shared(8, 64, 4 * MIB, 0.1, 500e6))
    assert found
    assert found.bytes_per_second is None


@pytest.mark.parametrize(("count", "rate"), [(7, RATE), (8, None)])
def test_only_so_many_bytes_refute(count: int, rate: float | None) -> None:
    """Less than 8 MiB may have lain in a buffer on the way."""
    sized = alone([4 * KIB, 64 * KIB] * 4, DELAY_MS, RATE)
    found = fit([*sized, *[(5_000.0, 5_001.0, MIB)] * count])
    assert found
    assert found.bytes_per_second == (rate and pytest.approx(rate, rel=0.001))
