"""Whether one experiment is worse than another: a gate for CI. Pure.

It closes only where a condition became slower by more than the limit *and* beyond chance, corrected
for everything that was asked; what too few runs cannot tell is said, and left to the caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ttftprof.experiment.conditions import Condition
from ttftprof.experiment.contrasts import MATTERS_NS
from ttftprof.experiment.evaluate import Experiment
from ttftprof.experiment.statistics import Shift, compare, holm, runs_needed

RESULTS = ("regressed", "improved", "same", "undecided", "absent")


@dataclass(frozen=True, slots=True)
class Checked:
    """One metric of one condition against the baseline's. `result`: one of `RESULTS`; `share`: of
    the baseline's median, None where that is 0 or a side has no runs."""

    scenario: str
    variant: str
    metric: str
    result: str
    base_median: float | None
    median: float | None
    shift: Shift | None
    p: float | None
    share: float | None
    why: str


@dataclass(frozen=True, slots=True)
class Gate:
    """`differences`: {what: (baseline, here)} of what should have been the same."""

    checked: tuple[Checked, ...]
    limit: float
    differences: Mapping[str, tuple[str, str]]

    @property
    def regressed(self) -> tuple[Checked, ...]:
        return tuple(one for one in self.checked if one.result == "regressed")

    @property
    def undecided(self) -> tuple[Checked, ...]:
        return tuple(one for one in self.checked if one.result == "undecided")

    @property
    def absent(self) -> tuple[Checked, ...]:
        return tuple(one for one in self.checked if one.result == "absent")


def gate(
    here: Experiment, base: Experiment, limit: float, metrics: Sequence[str] = ("ttft",)
) -> Gate:
    """Every scenario of the baseline; variants are matched by their name, or by their place where
    each experiment has only one."""
    pairs = [
        (known, _match(known, here, base), metric)
        for known in base.findings.conditions
        if not known.is_failure and known.counted
        for metric in metrics
    ]
    shifts = {str(i): _shift(*pair) for i, pair in enumerate(pairs)}
    p = holm({key: shift.p for key, shift in shifts.items() if shift is not None})
    return Gate(
        checked=tuple(
            _checked(*pair, shifts[str(i)], p.get(str(i)), limit, len(p), here.plan.alpha)
            for i, pair in enumerate(pairs)
        ),
        limit=limit,
        differences=dict(_differences(here, base)),
    )


def _match(known: Condition, here: Experiment, base: Experiment) -> Condition | None:
    found = here.condition(known.scenario, known.variant)
    if found is not None:
        return found
    variants = ({c.variant for c in e.findings.conditions} for e in (here, base))
    if any(len(names) > 1 for names in variants):
        return None
    own = here.findings.conditions
    return next((c for c in own if c.scenario == known.scenario), None)


def _shift(known: Condition, found: Condition | None, metric: str) -> Shift | None:
    if found is None:
        return None
    return compare(known.values(metric), found.values(metric))


def _checked(
    known: Condition,
    found: Condition | None,
    metric: str,
    shift: Shift | None,
    p: float | None,
    limit: float,
    questions: int,
    alpha: float,
) -> Checked:
    before = known.summaries.get(metric)
    now = found.summaries.get(metric) if found is not None else None
    base_median = before.median.value if before else None
    share = shift.shift.value / base_median if shift is not None and base_median else None
    if shift is None or p is None or base_median is None:
        result, why = "absent", _why_absent(known, found, metric)
    elif p > alpha and shift.smallest_p * questions > alpha:
        needed = runs_needed(questions, alpha, paired=False)
        result, why = "undecided", f"too few runs to say: {needed} a side are needed"
    else:
        result = _result(shift.shift.value, base_median, p <= alpha, limit)
        blind = _blind(shift, base_median, limit, alpha / questions) if result == "same" else ""
        why = "; ".join(filter(None, (_fewer(known, found), blind)))
    median = now.median.value if now else None
    return Checked(
        known.scenario, known.variant, metric, result, base_median, median, shift, p, share, why
    )


def _blind(shift: Shift, base_median: float, limit: float, alpha: float) -> str:
    """That a regression of just the limit could well have been missed, where it could."""
    detectable = shift.detectable(alpha)
    if detectable is None or not base_median or detectable <= limit * base_median:
        return ""
    return (
        f"as noisy as these runs are, less than {detectable / base_median * 100:.0f} % may well "
        "be missed: more runs, or a quieter machine, would tell"
    )


def _fewer(known: Condition, found: Condition | None) -> str:
    """That runs are missing here which the baseline has: the slow ones, perhaps."""
    if found is None or found.left_out <= known.left_out:
        return ""
    return f"{found.left_out} runs here do not count, of the baseline's {known.left_out}"


def _why_absent(known: Condition, found: Condition | None, metric: str) -> str:
    if not known.values(metric):
        return f"no run of the baseline tells its {metric}: was it recorded?"
    if found is None or not found.counted:
        return "no runs of this here that count"
    return f"no run here tells its {metric}: was it recorded?"


def _result(shift: float, base_median: float, sure: bool, limit: float) -> str:
    """A phase that took no time before has a millisecond's grace."""
    if not sure:
        return "same"
    if shift > max(limit * base_median, 0 if base_median else MATTERS_NS):
        return "regressed"
    return "improved" if shift < 0 else "same"


def _differences(here: Experiment, base: Experiment) -> Iterator[tuple[str, tuple[str, str]]]:
    for name in dict.fromkeys([*base.fingerprint, *here.fingerprint]):
        before, now = base.fingerprint.get(name, "-"), here.fingerprint.get(name, "-")
        if before != now:
            yield name, (before, now)
