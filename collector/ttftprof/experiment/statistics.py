"""The statistics of an experiment, on scipy: estimates with intervals, tests, and their limits.

Pure and seeded: the same numbers give the same answer. Methods: medians and p95 with percentile
bootstrap intervals (`scipy.stats.bootstrap`); the Hodges-Lehmann shift with the interval that
belongs to its test (Hollander, Wolfe & Chicken, "Nonparametric Statistical Methods", 3rd ed.,
3.2-3.3 and 4.2-4.3); Mann-Whitney, or Wilcoxon's signed ranks where runs are paired; Holm's
correction (1979). No test here assumes normal times; the smallest effect that could have been found
does (`Shift.detectable`), and says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import stats

Values = npt.NDArray[np.float64]
Sample = Sequence[float] | Values

CONFIDENCE = 0.95
POWER = 0.8
_RESAMPLES = 2_000
_SEED = 20_240_607
INTERVAL_NEEDS = 5
"""Values, for an interval of a median. Of four, even least to most holds it only 7 times in 8."""
_P95_NEEDS = 20  # below this many runs the 95th percentile is hardly more than the largest
_EXACT_UP_TO = 50  # runs a side for which exact tests are quick
_WILCOXON_EFFICIENCY = 3 / math.pi  # of rank tests against t-tests, for normal noise
_MAD_TO_SIGMA = 1.4826  # of a normal distribution
# By how much the MAD of few values is too small: Croux & Rousseeuw, "Time-efficient algorithms for
# two highly robust estimators of scale" (COMPSTAT 1992); of n > 9 values n / (n - 0.8).
_MAD_OF_FEW = (1.0, 1.0, 1.196, 1.495, 1.363, 1.206, 1.200, 1.140, 1.129, 1.107)


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its interval; None where there are too few values for one."""

    value: float
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class Summary:
    """One set of values. `p95_is_rough`: so few that it is hardly more than the largest."""

    count: int
    median: Estimate
    p95: Estimate
    least: float
    most: float
    p95_is_rough: bool


def summarise(values: Sample) -> Summary | None:
    """None for no values."""
    if not len(values):
        return None
    data = np.asarray(values, np.float64)
    median, p95 = _percentiles(data, (50.0, 95.0))
    return Summary(
        count=len(data),
        median=median,
        p95=p95,
        least=float(data.min()),
        most=float(data.max()),
        p95_is_rough=len(data) < _P95_NEEDS,
    )


def _percentiles(data: Values, wanted: tuple[float, ...]) -> list[Estimate]:
    values = [float(v) for v in np.percentile(data, wanted)]
    if len(data) < INTERVAL_NEEDS:
        return [Estimate(value, None) for value in values]
    if np.ptp(data) == 0:
        return [Estimate(value, Interval(value, value)) for value in values]
    found = stats.bootstrap(
        (data,),
        lambda sample, axis: np.percentile(sample, wanted, axis=axis),
        n_resamples=_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    ends = zip(values, found.low, found.high, strict=True)
    return [Estimate(value, Interval(float(low), float(high))) for value, low, high in ends]


def resampled_medians(values: Sample) -> Values:
    """Medians of as many values, drawn again and again from these (bootstrap)."""
    data = np.asarray(values, np.float64)
    drawn = np.random.default_rng(_SEED).choice(data, (_RESAMPLES, len(data)))
    return np.asarray(np.median(drawn, axis=1), np.float64)


# -- one set against another ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shift:
    """By how much `other` lies above `base`, and how sure that is.

    `smallest_p`: the smallest p that so few runs can give. `error`: the standard error of the
    shift for normal noise as that of these runs, None for fewer than three a side. `test`:
    mann-whitney or wilcoxon.
    """

    shift: Estimate
    p: float
    smallest_p: float
    error: float | None
    test: str
    base_count: int
    other_count: int

    def detectable(self, alpha: float) -> float | None:
        """The shift that a test at this level finds with about 80 % power: t₁₋α/₂ + t₀.₈ standard
        errors, as of a t-test. Of several questions, give each one's part of alpha."""
        if self.error is None:
            return None
        paired = self.test == "wilcoxon"
        freedom = self.base_count - 1 if paired else self.base_count + self.other_count - 2
        return _errors_for(alpha, freedom) * self.error


def compare(base: Sample, other: Sample, confidence: float = CONFIDENCE) -> Shift | None:
    """Two independent sets; `confidence` of the shift's interval. None if either is empty."""
    if not len(base) or not len(other):
        return None
    x, y = np.asarray(base, np.float64), np.asarray(other, np.float64)
    differences = np.sort(np.subtract.outer(y, x), axis=None)
    return Shift(
        shift=Estimate(
            float(np.median(differences)),
            _rank_sum_interval(differences, len(x), len(y), confidence),
        ),
        p=_mann_whitney_p(x, y),
        smallest_p=min(1.0, 2 / math.comb(len(x) + len(y), len(x))),
        error=_error(math.sqrt((_sigma(x) ** 2 + _sigma(y) ** 2) / 2), len(x), len(y)),
        test="mann-whitney",
        base_count=len(x),
        other_count=len(y),
    )


def _mann_whitney_p(x: Values, y: Values) -> float:
    if np.ptp(np.concatenate((x, y))) == 0:
        return 1.0
    tied = len(np.unique(np.concatenate((x, y)))) < len(x) + len(y)
    exact = not tied and max(len(x), len(y)) <= _EXACT_UP_TO
    return float(
        stats.mannwhitneyu(
            y, x, alternative="two-sided", method="exact" if exact else "asymptotic"
        ).pvalue
    )


def _rank_sum_interval(differences: Values, n: int, m: int, confidence: float) -> Interval | None:
    """Order statistics of all differences: Hollander et al., 4.3."""
    if n * m <= _EXACT_UP_TO**2:
        return _between(differences, _rank_sum_counts(n, m), confidence)
    spread = math.sqrt(n * m * (n + m + 1) / 12)
    return _ends(differences, math.floor(n * m / 2 - _two_sided_z(confidence) * spread))


def _between(ordered: Values, counts: Sequence[int], confidence: float) -> Interval | None:
    """The interval between order statistics q and its mirror, q the smallest number for which
    P(statistic ≤ q) reaches (1 - confidence) / 2; None where even the widest is not sure enough."""
    tail, total = 0, sum(counts)
    for q, count in enumerate(counts):
        tail += count
        if tail > (1 - confidence) / 2 * total:
            return _ends(ordered, q) if q else None
    raise AssertionError("no counts")


def _ends(ordered: Values, q: int) -> Interval:
    q = min(max(q, 1), (len(ordered) + 1) // 2)
    return Interval(float(ordered[q - 1]), float(ordered[-q]))


@lru_cache(maxsize=64)
def _rank_sum_counts(n: int, m: int) -> tuple[int, ...]:
    """In how many ways Mann and Whitney's U is 0, 1, … n·m: a Gaussian binomial coefficient."""
    counts = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        for u in range(n * m, m + i - 1, -1):  # times (1 - q^(m+i))
            counts[u] -= counts[u - m - i]
        for u in range(i, n * m + 1):  # divided by (1 - q^i)
            counts[u] += counts[u - i]
    return tuple(counts)


@lru_cache(maxsize=64)
def _signed_rank_counts(n: int) -> tuple[int, ...]:
    """In how many ways Wilcoxon's T is 0, 1, … n(n+1)/2: subsets of the ranks by their sum."""
    counts = [1] + [0] * (n * (n + 1) // 2)
    for rank in range(1, n + 1):
        for total in range(len(counts) - 1, rank - 1, -1):
            counts[total] += counts[total - rank]
    return tuple(counts)


def compare_paired(base: Sample, other: Sample, confidence: float = CONFIDENCE) -> Shift | None:
    """Two sets whose values belong together one by one. None if they are empty.

    Of the differences, by their Walsh averages; those of 0 are dropped by the test (Wilcoxon's own
    rule), so that identical sets give p = 1.
    """
    if not len(base) or len(base) != len(other):
        return None
    steps = np.asarray(other, np.float64) - np.asarray(base, np.float64)
    count = len(steps)
    upper = np.triu_indices(count)
    walsh = np.sort((steps[upper[0]] + steps[upper[1]]) / 2)
    moved = steps[steps != 0]
    tied = len(np.unique(np.abs(moved))) < len(moved)
    p = 1.0
    if len(moved):
        exact = not tied and len(moved) <= _EXACT_UP_TO
        p = float(stats.wilcoxon(moved, method="exact" if exact else "asymptotic").pvalue)
    return Shift(
        shift=Estimate(float(np.median(walsh)), _signed_rank_interval(walsh, count, confidence)),
        p=p,
        smallest_p=min(1.0, 2.0 ** (1 - count)),
        error=_error(_sigma(steps), count, None),
        test="wilcoxon",
        base_count=count,
        other_count=count,
    )


def _signed_rank_interval(walsh: Values, n: int, confidence: float) -> Interval | None:
    """Order statistics of the Walsh averages: Hollander et al., 3.3."""
    if n <= _EXACT_UP_TO:
        return _between(walsh, _signed_rank_counts(n), confidence)
    spread = math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    return _ends(walsh, math.floor(n * (n + 1) / 4 - _two_sided_z(confidence) * spread))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """p-values adjusted for having been asked together: compare each with alpha as it is."""
    adjusted: dict[str, float] = {}
    highest = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, p * (len(p_values) - rank)))
        adjusted[name] = highest
    return {name: adjusted[name] for name in p_values}


# -- what could have been found -------------------------------------------------------------------


@lru_cache(maxsize=256)
def _errors_for(alpha: float, freedom: int) -> float:
    return float(stats.t.ppf(1 - alpha / 2, freedom) + stats.t.ppf(POWER, freedom))


def _two_sided_z(confidence: float) -> float:
    return float(stats.norm.ppf(0.5 + confidence / 2))


def _error(sigma: float, n: int, m: int | None) -> float | None:
    """σ·sqrt((1/n + 1/m)/ARE), ARE = 3/π of rank tests for normal noise; of pairs σ·sqrt(1/n/ARE).
    None for fewer than three."""
    if min(n, n if m is None else m) < 3:
        return None
    spread = 1 / n + (1 / m if m is not None else 0)
    return sigma * math.sqrt(spread / _WILCOXON_EFFICIENCY)


def _sigma(values: Values) -> float:
    """Robust: one outlier in twelve runs says nothing of the other eleven."""
    mad = float(np.median(np.abs(values - np.median(values)))) * _MAD_TO_SIGMA
    if mad == 0:
        return float(np.std(values))
    count = len(values)
    return mad * (_MAD_OF_FEW[count] if count < len(_MAD_OF_FEW) else count / (count - 0.8))


def runs_needed(comparisons: float, alpha: float, paired: bool) -> int:
    """The fewest runs a side whose smallest p survives Holm's correction for so many questions."""
    count = 2
    while True:
        smallest = 2.0 ** (1 - count) if paired else 2 / math.comb(2 * count, count)
        if smallest * comparisons <= alpha:
            return count
        count += 1
