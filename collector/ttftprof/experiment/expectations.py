"""What was expected before it was tried: confirmed, refuted or undecided. Pure.

Every statement is judged by intervals and tests that are corrected for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ttftprof.experiment.conditions import Condition
from ttftprof.experiment.contrasts import Contrast, amount, shift_of
from ttftprof.experiment.plan import Expectation
from ttftprof.experiment.statistics import Shift, holm

Conditions = Mapping[tuple[str, str], Condition]
"""By scenario and variant."""


@dataclass(frozen=True, slots=True)
class Judged:
    """An expectation that was stated beforehand, and what became of it."""

    expectation: Expectation
    scenario: str
    variant: str
    verdict: str
    why: str


@dataclass(frozen=True, slots=True)
class _Stated:
    """An expectation, and a contrast that it speaks of, if one was measured."""

    expectation: Expectation
    contrast: Contrast | None

    @property
    def base_median(self) -> float | None:
        """None: nothing was measured that it speaks of."""
        own = self.contrast.metric(self.expectation.metric) if self.contrast else None
        return own.base_median if own is not None else None


def judged(
    expectations: Sequence[Expectation],
    changes: Sequence[Contrast],
    conditions: Conditions,
    alpha: float,
) -> tuple[Judged, ...]:
    """Each expectation against every contrast that it speaks of.

    confirmed: sure, in the stated direction, and by its interval at least the stated size. refuted:
    sure in the other direction, or by its interval certainly less than stated. Else undecided, too
    few runs first of all. Tests are corrected by Holm's rule; the intervals hold all together with
    1 - alpha (Bonferroni's).
    """
    stated = [_Stated(one, found) for one in expectations for found in _spoken_of(one, changes)]
    count = sum(1 for one in stated if one.base_median is not None)
    shifts = [_shift(one, conditions, 1 - alpha / max(count, 1)) for one in stated]
    p = holm({str(i): shift.p for i, shift in enumerate(shifts) if shift is not None})
    return tuple(
        _judge(one, shift, p.get(str(i), 1.0) <= alpha)
        for i, (one, shift) in enumerate(zip(stated, shifts, strict=True))
    )


def _spoken_of(one: Expectation, changes: Sequence[Contrast]) -> list[Contrast | None]:
    fitting: list[Contrast | None] = [
        c for c in changes if one.scenario in ("", c.other[0]) and one.variant in ("", c.other[1])
    ]
    return fitting or [None]


def _shift(one: _Stated, conditions: Conditions, confidence: float) -> Shift | None:
    if one.contrast is None or one.base_median is None:
        return None
    base, other = conditions[one.contrast.base], conditions[one.contrast.other]
    return shift_of(one.expectation.metric, one.contrast.kind, base, other, confidence)


def _judge(one: _Stated, shift: Shift | None, sure: bool) -> Judged:
    stated = one.expectation
    scenario, variant = one.contrast.other if one.contrast else (stated.scenario, stated.variant)
    verdict, why = _settled(stated, one.base_median, shift, sure)
    return Judged(stated, scenario, variant, verdict, why)


def _settled(
    stated: Expectation, base_median: float | None, shift: Shift | None, sure: bool
) -> tuple[str, str]:
    if shift is None or base_median is None:
        return "undecided", "nothing was measured that it speaks of"
    interval, value = shift.shift.interval, shift.shift.value
    if interval is None:
        return "undecided", "too few runs to say"
    sign = -1 if stated.direction == "lower" else 1
    low, high = sorted((sign * interval.low, sign * interval.high))
    least = stated.at_least * abs(base_median)
    bounds = f"{amount(stated.metric, interval.low)} to {amount(stated.metric, interval.high)}"
    shown = f"{amount(stated.metric, value)} ({bounds})"
    if sure and sign * value > 0 and (not least or low >= least):
        return "confirmed", shown
    if sure and sign * value < 0:
        return "refuted", f"the other way: {shown}"
    if least and high < least:
        return "refuted", f"less than stated: {shown}"
    return "undecided", shown
