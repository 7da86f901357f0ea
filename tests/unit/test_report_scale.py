"""Numbers for people: units, sums that hold as printed, cells of a timeline."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttftprof import scale
from ttftprof.model import Series
from ttftprof.reports.lanes import Window, blocks, levels, peak_rate, rates, shares

MS = 1_000_000
TABLES = st.integers(1, 9).flatmap(
    lambda columns: st.lists(
        st.lists(
            st.one_of(st.just(0), st.integers(0, 5000), st.integers(0, 10**13)),
            min_size=columns,
            max_size=columns,
        ),
        min_size=1,
        max_size=9,
    )
)


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (None, "n/a"),
        (0, "0 s"),
        (1, "1 ns"),
        (999, "999 ns"),
        (1_000, "1.000 µs"),
        (412_345, "412.3 µs"),
        (999_960, "1.000 ms"),
        (276 * MS, "276.0 ms"),
        (999_999_999, "1.000 s"),
        (1_562_314_159, "1.562 s"),
        (41_234_567_890, "41.23 s"),
        (4_123_456_789_000, "4123 s"),
    ],
)
def test_durations_have_four_digits(ns: int | None, text: str) -> None:
    assert scale.duration(ns) == text


def test_estimates_claim_two_digits_only() -> None:
    shown = [scale.estimate(ns) for ns in (0, 7, 432 * MS, 36_540 * MS, 999 * MS)]
    assert shown == ["0 s", "7 ns", "430 ms", "37 s", "1.0 s"]


def test_other_units() -> None:
    assert scale.size(314_572_800) == "315 MB"
    assert scale.size(999_950_000) == "1.00 GB"
    assert scale.size(0) == "0 B"
    assert scale.rate(61e6) == "61.0 MB/s"
    assert scale.block(131_072) == "128 KiB"
    assert scale.block(1_500) == "1.5 KiB"
    assert scale.frequency(840) == "840/s"
    assert scale.frequency(12_345) == "12.3 k/s"
    assert scale.count(12_040) == "12,040"
    assert [scale.percent(s) for s in (0.0, 0.004, 0.615, 0.997, 1.0)] == [
        "0 %",
        "<1 %",
        "62 %",
        ">99 %",
        "100 %",
    ]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), None])
def test_what_is_no_number_is_absent(number: float | None) -> None:
    for shown in (scale.size, scale.rate, scale.block, scale.percent):
        assert shown(number).startswith("n/a")


@given(TABLES, st.sampled_from([10, 1000, 10**6]))
def test_tables_add_up_as_rounded(cells: list[list[int]], unit: int) -> None:
    shown = scale.round_table(cells, unit)
    total = sum(map(sum, cells))
    assert sum(map(sum, shown)) == (total + unit // 2) // unit
    for exact, rounded in (
        *zip(cells, shown, strict=True),
        *zip(zip(*cells, strict=True), zip(*shown, strict=True), strict=True),
    ):
        assert abs(sum(exact) - sum(rounded) * unit) <= unit * 1.5
        for value, units in zip(exact, rounded, strict=True):
            assert units >= 0
            assert abs(value - units * unit) <= unit * 1.5
            assert value or not units


@given(st.lists(st.integers(0, 10**12), max_size=9))
def test_shares_add_up(values: list[int]) -> None:
    parts = scale.apportion(values, 1000)
    assert sum(parts) == (1000 if sum(values) else 0)
    assert all(part == 0 for part, value in zip(parts, values, strict=True) if not value)


@given(st.integers(1, 10**14), st.integers(10, 180))
def test_axis_labels_keep_their_distance(length_ns: int, width: int) -> None:
    marks = scale.ticks(length_ns, width, 8)
    cells = [cell for cell, _ in marks]
    assert cells == sorted(set(cells))
    assert cells[0] == 0
    assert cells[-1] <= width
    assert len({label for _, label in marks}) == len(marks)
    if length_ns > 1000:
        assert all(b - a >= 7 for a, b in pairwise(cells))


def test_axis_labels_share_a_unit() -> None:
    short, long = scale.ticks(1_562 * MS, 50, 8), scale.ticks(41_000 * MS, 50, 8)
    assert short[:4] == [(0, "0 s"), (8, "0.25"), (16, "0.50"), (24, "0.75")]
    assert [label for _, label in long] == ["0 s", "10", "20", "30", "40"]


def test_the_longest_has_the_cell_and_the_rest_a_mark() -> None:
    window = Window(0, 100, 10)
    lane = blocks([("load", 0, 52), ("ready_gap", 52, 54), ("prefill", 54, 100)], window)
    assert lane.runs() == [("load", 0, 5), ("prefill", 5, 5)]
    assert lane.unseen == ("ready_gap",)
    assert lane.marks == {5}


def test_a_mark_does_not_hide_a_block_of_one_cell() -> None:
    lane = blocks([("a", 0, 60), ("b", 60, 72), ("c", 72, 74), ("d", 74, 100)], Window(0, 100, 10))
    assert lane.unseen == ("c",)
    (mark,) = lane.marks
    assert lane.names[mark] in ("a", "d")


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=12), st.integers(1, 180))
def test_shares_fill_each_cell_once(lengths: list[int], width: int) -> None:
    pieces, at = [], 0
    for number, length in enumerate(lengths):
        pieces.append((str(number % 3), at, at + length))
        at += length
    window = Window(0, at, width)
    rows = shares(pieces, window)
    for cell in range(width):
        filled = sum(row[cell] for row in rows.values())
        expected = 1.0 if window.edge_ns(cell + 1) > window.edge_ns(cell) else 0.0
        assert filled == pytest.approx(expected)


def test_rates_are_growth_and_unknown_outside_the_samples() -> None:
    total = Series("storage_bytes", "bytes", None, (20, 40, 60), (0.0, 100.0, 100.0))
    assert rates([total], Window(0, 80, 4)) == [None, 5e9, 0.0, None]
    assert levels([total], Window(0, 80, 4)) == [0.0, 100.0, 100.0, None]
    assert rates([], Window(0, 80, 4)) == [None] * 4


@pytest.mark.parametrize("width", [10, 66, 1_000])
def test_a_peak_is_the_same_however_wide_the_drawing(width: int) -> None:
    """Looks every 20 ms, one of them 10 µs after another, as when a thread ends."""
    stamps = (0, 20 * MS, 40 * MS, 40 * MS + 10_000, 60 * MS)
    series = [Series("storage_bytes", "bytes", None, stamps, (0.0, 2e6, 12e6, 13e6, 14e6))]
    assert peak_rate(series, Window(0, 60 * MS, width)) == 500e6
    assert peak_rate(series, Window(0, 15 * MS, width)) == 100e6
    assert peak_rate([], Window(0, 60 * MS, width)) is None
