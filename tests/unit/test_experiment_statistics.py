"""The statistics against scipy's own, against published examples, and against known truth."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from ttftprof.experiment.statistics import (
    Sample,
    Shift,
    compare,
    compare_paired,
    holm,
    runs_needed,
    summarise,
)

# Hollander & Wolfe, Table 4.1 (water vapour permeability of the human chorioamnion at term and at
# 12 to 26 weeks): W = 30, one-sided P = .1272, the estimate of the shift is .305 and its 96 %
# interval is (-.15, .76).
AT_TERM = [0.80, 0.83, 1.89, 1.04, 1.45, 1.38, 1.91, 1.64, 0.73, 1.46]
EARLIER = [1.15, 0.88, 0.90, 0.74, 1.21]
# Hollander & Wolfe, Table 3.1 (Hamilton depression scale before and after a tranquilizer): T+ = 5,
# one-sided P = .020, the estimate is -.46, the 96 % interval (-.786, -.010).
BEFORE = [1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30]
AFTER = [0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29]


def test_two_sets_as_published() -> None:
    found = compare(EARLIER, AT_TERM)
    assert found is not None
    assert found.shift.value == pytest.approx(0.305)
    assert found.p == pytest.approx(2 * 0.1272, abs=1e-4)
    assert found.shift.interval is not None
    assert found.shift.interval.low == pytest.approx(-0.15)
    assert found.shift.interval.high == pytest.approx(0.76)


def test_pairs_as_published() -> None:
    found = compare_paired(BEFORE, AFTER)
    assert found is not None
    assert found.shift.value == pytest.approx(-0.46)
    assert found.p == pytest.approx(2 * 0.0195, abs=1e-3)
    assert found.shift.interval is not None
    assert found.shift.interval.low == pytest.approx(-0.786)
    assert found.shift.interval.high == pytest.approx(-0.010)


def test_p_values_are_scipys() -> None:
    random = np.random.default_rng(1)
    for _ in range(20):
        x, y = random.normal(0, 1, 9), random.normal(0.7, 1, 9)
        one, paired = compare(x, y), compare_paired(x, y)
        assert one is not None
        assert paired is not None
        assert one.p == pytest.approx(stats.mannwhitneyu(x, y, method="exact").pvalue)
        assert paired.p == pytest.approx(stats.wilcoxon(y, x, method="exact").pvalue)


def test_the_shift_is_the_median_of_all_differences() -> None:
    found = compare([1.0, 2.0, 4.0], [5.0, 9.0])
    assert found is not None
    assert found.shift.value == pytest.approx(np.median([4, 3, 1, 8, 7, 5]))


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Of 200 intervals of 95 %, 190 are to hold the truth; 182 or fewer would be one in 50."""
    random = np.random.default_rng(7)
    held = {"sets": 0, "pairs": 0, "median": 0}
    for _ in range(200):
        x = random.lognormal(0, 0.4, 12)
        y = random.lognormal(0, 0.4, 12) + 0.25
        one, paired = compare(x, y), compare_paired(x, x * 0 + x + random.normal(0.25, 0.3, 12))
        own = summarise(random.lognormal(0, 0.4, 25))
        assert one is not None
        assert one.shift.interval is not None
        assert paired is not None
        assert paired.shift.interval is not None
        assert own is not None
        assert own.median.interval is not None
        held["sets"] += one.shift.interval.low <= 0.25 <= one.shift.interval.high
        held["pairs"] += paired.shift.interval.low <= 0.25 <= paired.shift.interval.high
        held["median"] += own.median.interval.low <= 1.0 <= own.median.interval.high
    assert min(held["sets"], held["pairs"]) > 182, held
    assert held["median"] > 178, held  # percentile intervals of few values are a little short


@pytest.mark.parametrize("questions", [1, 8])
@pytest.mark.parametrize("compared", [compare, compare_paired])
def test_what_is_detectable_is_found_four_times_in_five(
    compared: Callable[[Sample, Sample], Shift | None], questions: int
) -> None:
    """Of eight questions, each has an eighth of alpha, and needs a larger shift to be found."""
    random = np.random.default_rng(3)
    alpha, runs = 0.05 / questions, 12
    paired = compared is compare_paired
    known = math.sqrt((1 if paired else 2) / runs / (3 / math.pi))  # where the noise is 1
    freedom = runs - 1 if paired else 2 * runs - 2
    shift = (stats.t.ppf(1 - alpha / 2, freedom) + stats.t.ppf(0.8, freedom)) * known
    found, told = [], []
    for _ in range(300):
        x, noise = random.normal(10, 5 if paired else 1, runs), random.normal(0, 1, runs)
        moved = compared(x, (x if paired else 10) + noise + shift)
        assert moved is not None
        found.append(moved.p <= alpha)
        told.append(moved.detectable(alpha) or 0.0)
    assert np.mean(found) == pytest.approx(0.8, abs=0.08)
    assert np.median(told) == pytest.approx(shift, rel=0.1)  # from an estimated noise


@pytest.mark.parametrize("runs", [4, 6, 9, 12])
def test_few_runs_do_not_make_the_noise_look_small(runs: int) -> None:
    """The standard error is estimated as it is, of normal noise of 1, however few runs."""
    random = np.random.default_rng(4)
    true = math.sqrt(2 / runs / (3 / math.pi))
    told = []
    for _ in range(300):
        found = compare(random.normal(0, 1, runs), random.normal(0, 1, runs))
        assert found is not None
        assert found.error is not None
        told.append(found.error)
    assert np.mean(told) == pytest.approx(true, rel=0.1)


def test_an_interval_holds_just_the_shifts_that_scipys_test_does_not_refuse() -> None:
    random = np.random.default_rng(8)
    x, y = random.normal(0, 1, 12), random.normal(0.7, 1, 12)

    def p_of_sets(shift: float) -> float:
        return float(stats.mannwhitneyu(y - shift, x, method="exact").pvalue)

    def p_of_pairs(shift: float) -> float:
        return float(stats.wilcoxon(y - x - shift, method="exact").pvalue)

    for confidence in (0.95, 0.99, 0.995):
        for compared, p in ((compare, p_of_sets), (compare_paired, p_of_pairs)):
            found = compared(x, y, confidence)
            assert found is not None
            assert found.shift.interval is not None
            low, high = found.shift.interval.low, found.shift.interval.high
            assert min(p(low + 1e-9), p(high - 1e-9)) > 1 - confidence
            assert max(p(low - 1e-9), p(high + 1e-9)) <= 1 - confidence


def test_holm_as_by_hand() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx(
        {"a": 0.03, "b": 0.06, "c": 0.06}
    )
    assert holm({"a": 0.5, "b": 0.9}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


@pytest.mark.parametrize("paired", [False, True])
def test_runs_needed_is_the_fewest_that_can_prove_anything(paired: bool) -> None:
    count = runs_needed(8, 0.05, paired)
    test = compare_paired if paired else compare
    for runs, enough in ((count - 1, False), (count, True)):
        found = test(list(range(runs)), [100.0 + 2 * i + i / 7 for i in range(runs)])
        assert found is not None
        assert found.p == pytest.approx(found.smallest_p)
        assert (found.p * 8 <= 0.05) is enough


def test_too_few_have_no_interval() -> None:
    assert summarise([]) is None
    two = summarise([1.0, 2.0])
    assert two is not None
    assert two.median.interval is None
    assert two.p95_is_rough
    four, five = summarise([1.0, 2.0, 3.0, 4.0]), summarise([1.0, 2.0, 3.0, 4.0, 5.0])
    assert four is not None
    assert five is not None
    assert four.median.interval is None  # even least to most would hold it 7 times in 8 only
    assert five.median.interval is not None
    three = compare([1.0, 2.0, 3.0], [11.0, 12.0, 13.0])
    assert three is not None
    assert three.shift.interval is None
    assert three.smallest_p == pytest.approx(0.1)
    assert compare([], [1.0]) is None
    assert compare_paired([1.0], []) is None


def test_sets_that_are_all_the_same_differ_in_nothing() -> None:
    same = compare([5.0] * 8, [5.0] * 8)
    pairs = compare_paired([5.0] * 8, [5.0] * 8)
    assert same is not None
    assert pairs is not None
    assert same.p == pairs.p == 1.0
    assert same.shift.value == pairs.shift.value == 0


def test_the_same_numbers_give_the_same_answer() -> None:
    values = list(np.random.default_rng(5).normal(100, 10, 30))
    assert summarise(values) == summarise(values)
