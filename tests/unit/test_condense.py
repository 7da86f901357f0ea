"""Level of detail: few items out of many, and not a nanosecond lost."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ttftprof import condense

LIMIT = 16 * 4


@st.composite
def _lanes(draw: st.DrawFn) -> tuple[condense.Ints, condense.Ints, condense.Ints]:
    """Up to some hundred intervals, apart or abutting, short and long mixed."""
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from([0, 0, 3, 10**7]),
                st.sampled_from([0, 1, 7, 900, 10**6, 10**9]),
                st.integers(0, 8),
            ),
            max_size=400,
        )
    )
    start, end, code, at = [], [], [], draw(st.integers(0, 2**50))
    for gap, length, name in steps:
        start.append(at + gap)
        at += gap + length
        end.append(at)
        code.append(name)
    return np.array(start, np.int64), np.array(end, np.int64), np.array(code, np.int64)


@given(_lanes())
def test_intervals_are_few_and_keep_every_nanosecond(
    lane: tuple[condense.Ints, condense.Ints, condense.Ints],
) -> None:
    start, end, code = lane
    pieces = condense.intervals(start, end, code, LIMIT)
    assert len(pieces.start_ns) <= LIMIT
    for name in range(9):
        before = int((end - start)[code == name].sum())
        assert int(pieces.busy_ns[pieces.code == name].sum()) == before
    assert (pieces.busy_ns <= pieces.end_ns - pieces.start_ns).all()
    assert (np.diff(pieces.start_ns) >= 0).all()
    apart = np.diff(pieces.start_ns) > 0
    assert (pieces.end_ns[:-1][apart] <= pieces.start_ns[1:][apart]).all()
    assert set(pieces.code.tolist()) == set(code.tolist())


def test_few_intervals_come_back_as_they_were() -> None:
    start = np.array([5, 10, 20])
    pieces = condense.intervals(start, start + 5, np.array([0, 1, 0]), LIMIT)
    assert pieces.start_ns.tolist() == [5, 10, 20]
    assert pieces.busy_ns.tolist() == [5, 5, 5]


def test_a_long_interval_among_many_short_ones_stays_exact() -> None:
    start = np.arange(0, 10_000, 10)
    start[500:] += 1_000_000
    end = start + 5
    end[499] = start[500]
    pieces = condense.intervals(start, end, np.zeros(1_000, np.int64), LIMIT)
    assert (int(start[499]), int(end[499])) in zip(
        pieces.start_ns.tolist(), pieces.end_ns.tolist(), strict=True
    )


def test_a_curve_keeps_its_ends_and_extremes() -> None:
    ns = np.arange(100_000)
    values = np.sin(ns / 1000.0)
    values[41_234], values[77_000] = 9.0, -9.0
    few_ns, few = condense.points(ns, values, 400)
    assert len(few) <= 400
    assert (few_ns[0], few_ns[-1]) == (0, 99_999)
    assert (few.max(), few.min()) == (9.0, -9.0)


def test_a_running_total_keeps_its_steepest_step() -> None:
    steps = np.ones(100_000)
    steps[41_234] = 500.0
    ns, few = condense.points(np.arange(100_000) * 10, np.cumsum(steps), 400)
    assert len(few) <= 400
    assert (np.diff(few) / np.diff(ns)).max() == 50.0


def test_level_stretches_of_a_curve_cost_two_points() -> None:
    values = np.repeat([1.0, 5.0, 2.0], 1_000)
    ns, few = condense.points(np.arange(3_000), values, 100)
    assert few.tolist() == [1.0, 1.0, 5.0, 5.0, 2.0, 2.0]
    assert ns.tolist() == [0, 999, 1000, 1999, 2000, 2999]


def test_requests_are_counted_by_size_and_none_is_lost() -> None:
    sizes = np.array([512, 4096, 4097, 131_072, 1 << 30] * 2_000)
    cells = condense.sizes(np.arange(10_000) * 50_000, sizes, 200)
    assert len(cells.count) <= 200
    assert int(cells.count.sum()) == 10_000
    assert int(cells.total_bytes.sum()) == int(sizes.sum())
    by_class = {c: int(cells.count[cells.size == c].sum()) for c in set(cells.size.tolist())}
    assert by_class == {0: 4_000, 1: 2_000, 5: 2_000, 12: 2_000}
