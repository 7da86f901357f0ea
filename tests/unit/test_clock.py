"""Offsets between clocks: the tightest sandwich wins, and its error holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttftprof.clock import NS_PER_S, Jump, Offset, OtherClocks, measure_offset, now_ns

OFFSET = 1_795_970_131_066_624_877


class FakeClocks:
    """A machine on which every look at a clock takes a while; the other clock is ahead by OFFSET.

    `delays` are three a sandwich: before the first look at the monotonic clock, before the look at
    the other, and before the second look at the monotonic one.
    """

    def __init__(self, delays: list[int]) -> None:
        self._now = 1_000
        self._delays = iter(delays)

    def _pass(self) -> int:
        self._now += next(self._delays)
        return self._now

    def monotonic(self) -> int:
        return self._pass()

    def other(self) -> int:
        return self._pass() + OFFSET


def test_the_tightest_of_the_sandwiches_wins() -> None:
    clocks = FakeClocks([0, 900, 100, 0, 10, 30, 0, 300, 300])
    measured = measure_offset(clocks.other, clocks.monotonic, attempts=3)
    assert measured == Offset(OFFSET - 10, 20)


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**9), min_size=3, max_size=30).map(lambda d: d[: len(d) // 3 * 3]))
def test_the_truth_lies_within_the_error(delays: list[int]) -> None:
    clocks = FakeClocks(delays)
    measured = measure_offset(clocks.other, clocks.monotonic, attempts=len(delays) // 3)
    assert abs(measured.offset_ns - OFFSET) <= measured.error_ns


def test_without_delay_there_is_no_error() -> None:
    clocks = FakeClocks([0] * 27)
    assert measure_offset(clocks.other, clocks.monotonic) == Offset(OFFSET, 0)


@pytest.mark.parametrize("stamp", [0, 1, OFFSET, -OFFSET])
def test_another_clocks_stamp_becomes_monotonic(stamp: int) -> None:
    assert Offset(OFFSET, 5).to_monotonic(stamp + OFFSET) == stamp


def test_a_step_of_the_other_clock_between_attempts_is_no_average() -> None:
    readings = iter([100, 100, 1_000_100, 1_000_100])

    def steps() -> Iterator[int]:
        yield from (0, 50, 50, 52)

    monotonic = iter(steps())
    measured = measure_offset(lambda: next(readings), lambda: next(monotonic), attempts=2)
    assert measured == Offset(100 - 51, 1)


def test_the_clock_counts_whole_nanoseconds() -> None:
    first, second = now_ns(), now_ns()
    assert isinstance(first, int)
    assert second >= first


class Machine:
    """Three clocks that one may let go on, suspend and set; each reading takes 100 ns."""

    def __init__(self) -> None:
        self.now, self.slept, self.wall = 10 * NS_PER_S, 7 * NS_PER_S, OFFSET
        self.others = OtherClocks(
            lambda: self.monotonic() + self.slept,
            lambda: self.monotonic() + self.slept + self.wall,
            self.monotonic,
        )

    def monotonic(self) -> int:
        self.now += 100
        return self.now


@pytest.mark.parametrize("suspended_ns", [0, 60 * NS_PER_S])
@pytest.mark.parametrize("set_ns", [0, 3600 * NS_PER_S, -NS_PER_S])
def test_a_suspend_is_told_from_a_set_wall_clock(suspended_ns: int, set_ns: int) -> None:
    machine = Machine()
    assert machine.others.moved() is None
    machine.slept += suspended_ns
    machine.wall += set_ns
    moved = machine.others.moved()
    if not suspended_ns and not set_ns:
        assert moved is None
    else:
        assert moved is not None
        assert moved.suspended_ns == pytest.approx(suspended_ns, abs=1000)
        assert moved.set_ns == pytest.approx(set_ns, abs=1000)
    assert machine.others.moved() is None, "told once"


def test_a_reader_that_waited_for_a_core_saw_no_jump() -> None:
    """Its readings lay far apart once; read again, nothing moved."""
    machine, late = Machine(), [0]

    def boot() -> int:
        machine.now += late.pop() if late else 0
        return machine.monotonic() + machine.slept

    others = OtherClocks(boot, lambda: machine.monotonic() + machine.wall, machine.monotonic)
    late.append(NS_PER_S)
    assert others.moved() is None


def test_real_clocks_stand_still_against_each_other() -> None:
    others = OtherClocks()
    assert [others.moved() for _ in range(100)] == [None] * 100


def test_a_jump_needs_to_be_notable() -> None:
    machine = Machine()
    machine.slept += OtherClocks.NOTABLE_NS + 10_000
    machine.wall += 1_000_000
    assert machine.others.moved() == Jump(OtherClocks.NOTABLE_NS + 10_000, 0)
