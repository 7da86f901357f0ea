"""What the runs of an experiment show: figures, comparisons, the phase to blame, verdicts. Pure.

Two kinds of question. Within a variant, each scenario against the baseline: which phase makes it
slower. Between variants, each scenario against itself under the first variant: what the change did,
and whether that was expected. Only runs count that are no warm-up, whose state was established, and
that came out as they should; all others are counted and shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from ttftprof.diagnosis import first_that_matters
from ttftprof.experiment.plan import Expectation, Plan, variants_of
from ttftprof.experiment.scenarios import Scenario
from ttftprof.experiment.statistics import (
    Shift,
    Summary,
    compare,
    compare_paired,
    holm,
    runs_needed,
    summarise,
)
from ttftprof.experiment.store import Kept
from ttftprof.model import PHASES

COUNTERS = ("major_faults", "minor_faults", "storage_bytes", "storage_rate")
# A phase is blamed for growth that is sure *and* matters: of the longer wait, and in time. What
# makes a slow start slow is no small part of it; what a setting changes may be.
MATTERS_SHARE = {"cause": 0.05, "change": 0.01}
MATTERS_NS = 1_000_000
PAIRED_FROM = 10  # pairs; below, signed ranks have too few outcomes to answer many questions


@dataclass(frozen=True, slots=True)
class Run:
    """One run as the statistics see it; `values` by metric, those known."""

    number: int
    block: int
    scenario: str
    variant: str
    warmup: bool
    established: bool
    as_expected: bool
    outcome: str
    values: Mapping[str, float]
    recovery_ns: int | None
    recovered: bool | None
    raw: Mapping[str, Any]

    @property
    def counts(self) -> bool:
        return not self.warmup and self.established and self.as_expected


@dataclass(frozen=True)
class Condition:
    """All runs of one scenario under one variant.

    `not_counted`: {why: how many}. `mean_phases` add up to the mean TTFT that the recorder saw.
    """

    scenario: str
    about: str
    variant: str
    is_failure: bool
    runs: tuple[Run, ...]
    not_counted: Mapping[str, int]
    outcomes: Mapping[str, int]
    mean_phases: Mapping[str, float]
    recovery: Summary | None
    not_recovered: int

    @property
    def counted(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.counts)

    @property
    def left_out(self) -> int:
        """How many runs do not count although they were meant to."""
        return sum(1 for run in self.runs if not run.counts and not run.warmup)

    def values(self, metric: str) -> list[float]:
        """Of the runs that count and know it."""
        return [run.values[metric] for run in self.counted if metric in run.values]

    @cached_property
    def summaries(self) -> Mapping[str, Summary]:
        """By metric, those known."""
        found = {name: summarise(self.values(name)) for name in ("ttft", *PHASES, *COUNTERS)}
        return {name: summary for name, summary in found.items() if summary is not None}


@dataclass(frozen=True, slots=True)
class Compared:
    """One metric of two conditions. `p` is corrected for all that were asked together; `beyond`:
    sure, and enough to matter. `base_median`: of the base's runs."""

    metric: str
    base_median: float
    shift: Shift
    p: float
    beyond: bool


@dataclass(frozen=True, slots=True)
class Contrast:
    """`other` against `base`: what is different, and which phase it began with.

    `direction`: slower, faster, or same (nothing sure). `blamed`: the first phase, in order of
    time, that changed that way beyond noise and makes a good part of the change. `too_few`: how
    many runs a side it would take to tell whether there is a difference, and to name a phase; 0
    where there are enough.
    """

    kind: str
    base: tuple[str, str]
    other: tuple[str, str]
    metrics: tuple[Compared, ...]
    direction: str
    blamed: str | None
    too_few: tuple[int, int]
    sentence: str

    def metric(self, name: str) -> Compared | None:
        return next((m for m in self.metrics if m.metric == name), None)


@dataclass(frozen=True, slots=True)
class Judged:
    """An expectation that was stated beforehand, and what became of it."""

    expectation: Expectation
    scenario: str
    variant: str
    verdict: str
    why: str


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that an experiment shows."""

    conditions: tuple[Condition, ...]
    causes: tuple[Contrast, ...]
    changes: tuple[Contrast, ...]
    judged: tuple[Judged, ...]


# -- runs -----------------------------------------------------------------------------------------


def runs_of(kept: Iterable[Kept]) -> list[Run]:
    return [_run(one) for one in kept]


def _run(kept: Kept) -> Run:
    slot, result = kept.slot, kept.result
    recovery = result.get("recovery")
    return Run(
        number=slot.run,
        block=slot.block,
        scenario=slot.scenario,
        variant=slot.variant,
        warmup=slot.warmup,
        established=bool(result["established"]),
        as_expected=bool(result["as_expected"]),
        outcome=str(result["outcome"]),
        values=_values(result),
        recovery_ns=recovery["after_ns"] if recovery and recovery["outcome"] == "ok" else None,
        recovered=None if recovery is None else recovery["outcome"] == "ok",
        raw=result,
    )


def _values(result: Mapping[str, Any]) -> dict[str, float]:
    """By metric. A phase that a recorded run did not have took 0; without a recording nothing is
    known of phases."""
    values: dict[str, float] = {}
    if result.get("value_ns") is not None:
        values["ttft"] = float(result["value_ns"])
    seen = result.get("digest") or {}
    if "phases" in seen:
        values |= {name: float(seen["phases"].get(name, 0)) for name in PHASES}
        values |= {name: float(seen[name]) for name in COUNTERS if seen.get(name) is not None}
    return values


def why_not_counted(run: Run) -> str:
    """Why a run is in no verdict; "" if it is."""
    if run.warmup:
        return "warm-up"
    if not run.established:
        unmet = next(c for c in run.raw["checks"] if not c["met"])
        return f"{unmet['what']}: {unmet['found']}, not {unmet['wanted']}"
    return "" if run.as_expected else f"failed: {run.outcome}"


# -- conditions -----------------------------------------------------------------------------------


def find(plan: Plan, kept: Sequence[Kept]) -> Findings:
    """The whole evaluation, of however many runs there are so far."""
    runs = runs_of(kept)
    conditions = tuple(
        _condition(scenario, variant.name, runs)
        for scenario in plan.chosen()
        for variant in variants_of(plan)
    )
    changes = tuple(_changes(plan, conditions))
    return Findings(
        conditions=conditions,
        causes=tuple(_causes(plan, conditions)),
        changes=changes,
        judged=tuple(judged(plan.expectations, changes, plan.alpha)),
    )


def _condition(scenario: Scenario, variant: str, runs: Sequence[Run]) -> Condition:
    own = tuple(r for r in runs if r.scenario == scenario.name and r.variant == variant)
    counted = [run for run in own if run.counts]
    recorded = [run for run in counted if PHASES[0] in run.values]
    return Condition(
        scenario=scenario.name,
        about=scenario.about,
        variant=variant,
        is_failure=scenario.is_failure,
        runs=own,
        not_counted=Counter(why for why in map(why_not_counted, own) if why),
        outcomes=Counter(run.outcome for run in own if not run.warmup),
        mean_phases={
            name: sum(run.values[name] for run in recorded) / len(recorded)
            for name in PHASES
            if recorded
        },
        recovery=summarise([float(r.recovery_ns) for r in own if r.recovery_ns is not None]),
        not_recovered=sum(1 for run in own if run.recovered is False),
    )


# -- contrasts ------------------------------------------------------------------------------------


def _causes(plan: Plan, conditions: Sequence[Condition]) -> Iterable[Contrast]:
    """Each scenario against the baseline, within each variant. Runs of a block are pairs there
    too, but of different work: they are compared as independent."""
    for base in conditions:
        if base.scenario != plan.baseline:
            continue
        for other in conditions:
            fits = other.variant == base.variant and other is not base and not other.is_failure
            if fits and base.counted and other.counted:
                yield contrast("cause", base, other, plan.alpha, paired=False)


def _changes(plan: Plan, conditions: Sequence[Condition]) -> Iterable[Contrast]:
    """Each variant against the first, scenario by scenario, in pairs of one block."""
    first = variants_of(plan)[0].name
    for base in conditions:
        if base.variant != first or base.is_failure:
            continue
        for other in conditions:
            fits = other.scenario == base.scenario and other is not base
            if fits and base.counted and other.counted:
                yield contrast("change", base, other, plan.alpha, paired=True)


def contrast(kind: str, base: Condition, other: Condition, alpha: float, paired: bool) -> Contrast:
    """All metrics of two conditions, corrected together."""
    threshold_ns = _threshold_ns(kind, base, other)
    shifts = _shifts(base, other, paired, threshold_ns)
    timed = {name: shift for name, shift in shifts.items() if name not in COUNTERS}
    counted = {name: shift for name, shift in shifts.items() if name in COUNTERS}
    # Counters explain, and are a family of their own.
    adjusted = {
        **_corrected({name: shift.p for name, shift in timed.items()}, kind, alpha),
        **holm({name: shift.p for name, shift in counted.items()}),
    }
    metrics = tuple(
        Compared(
            metric=name,
            base_median=median(base.values(name)),
            shift=shift,
            p=adjusted[name],
            beyond=adjusted[name] <= alpha
            and (name in COUNTERS or abs(shift.shift.value) >= threshold_ns),
        )
        for name, shift in shifts.items()
    )
    direction, blamed = blame(metrics)
    too_few = _too_few(timed, kind, alpha)
    return Contrast(
        kind=kind,
        base=(base.scenario, base.variant),
        other=(other.scenario, other.variant),
        metrics=metrics,
        direction=direction,
        blamed=blamed,
        too_few=too_few,
        sentence=_sentence(metrics, direction, blamed, too_few, min(_counts(base, other))),
    )


def _corrected(p: Mapping[str, float], kind: str, alpha: float) -> dict[str, float]:
    """Of a change, TTFT and phases are asked together: a phase may change where the whole does not
    show it. Of a cause, the phases are asked only where the TTFT is longer for sure (a gate), and
    so cost it nothing. Either way a false alarm in all of it is no likelier than alpha."""
    if kind == "change" or "ttft" not in p:
        return holm(p)
    phases = {name: value for name, value in p.items() if name != "ttft"}
    gate = p["ttft"] <= alpha
    return {"ttft": p["ttft"], **(holm(phases) if gate else dict.fromkeys(phases, 1.0))}


def _counts(base: Condition, other: Condition) -> tuple[int, int]:
    return len(base.counted), len(other.counted)


def _threshold_ns(kind: str, base: Condition, other: Condition) -> float:
    """Growth that is worth naming: a share of the longer wait, and some time."""
    usual = [median(values) for c in (base, other) if (values := c.values("ttft"))]
    return max(MATTERS_NS, MATTERS_SHARE[kind] * max(usual, default=0.0))


def _shifts(
    base: Condition, other: Condition, paired: bool, threshold_ns: float
) -> dict[str, Shift]:
    """By metric. A phase that never reached the threshold cannot have changed by it, and is no
    question: what is not asked costs the others nothing."""
    pairs = _pairs(base, other) if paired else []
    found: dict[str, Shift] = {}
    for name in ("ttft", *PHASES, *COUNTERS):
        if name in PHASES and _most(name, base, other) < threshold_ns:
            continue
        if len(pairs) >= PAIRED_FROM:
            both = [
                (a.values[name], b.values[name])
                for a, b in pairs
                if name in a.values and name in b.values
            ]
            shift = compare_paired([a for a, _ in both], [b for _, b in both])
        else:
            shift = compare(base.values(name), other.values(name))
        if shift is not None:
            found[name] = shift
    return found


def _most(name: str, *conditions: Condition) -> float:
    return max((value for c in conditions for value in c.values(name)), default=0.0)


def _pairs(base: Condition, other: Condition) -> list[tuple[Run, Run]]:
    by_block = {run.block: run for run in other.counted}
    return [(run, by_block[run.block]) for run in base.counted if run.block in by_block]


def blame(metrics: Sequence[Compared]) -> tuple[str, str | None]:
    """(direction, phase): whether it became slower or faster beyond noise, and the first phase in
    order of time that did so and makes up a good part of all that did."""
    phases = {m.metric: m.shift.shift.value for m in metrics if m.metric in PHASES and m.beyond}
    ttft = next((m for m in metrics if m.metric == "ttft"), None)
    total = ttft.shift.shift.value if ttft is not None and ttft.beyond else sum(phases.values())
    if not total:
        return "same", None
    sign = 1 if total > 0 else -1
    grown = {name: sign * phases[name] for name in PHASES if sign * phases.get(name, 0) > 0}
    return ("slower" if sign > 0 else "faster"), first_that_matters(grown)


def _too_few(shifts: Mapping[str, Shift], kind: str, alpha: float) -> tuple[int, int]:
    """(runs a side to answer whether it is slower, and to name the phase); 0 where there are
    enough."""
    phases = sum(1 for name in shifts if name != "ttft")
    together = len(shifts) if kind == "change" else 1
    if "ttft" not in shifts:
        return runs_needed(1, alpha, paired=False), runs_needed(1, alpha, paired=False)
    own = shifts["ttft"]
    paired = own.test == "wilcoxon"
    needs = [max(together, 1), max(together, phases)]
    whether, which = (
        0 if own.smallest_p * count <= alpha else runs_needed(count, alpha, paired)
        for count in needs
    )
    return whether, which


def _sentence(
    metrics: Sequence[Compared],
    direction: str,
    blamed: str | None,
    too_few: tuple[int, int],
    fewest: int,
) -> str:
    whether, which = too_few
    if whether:
        return f"too few runs to say: {fewest} on the smaller side that count, {whether} are needed"
    ttft = next(m for m in metrics if m.metric == "ttft")
    if direction == "same":
        text = "no difference beyond noise"
        if ttft.shift.detectable is not None:
            text += f"; one of {_time(ttft.shift.detectable)} would most likely have been found"
        return text
    own = next((m for m in metrics if m.metric == blamed), None)
    word = "grew" if direction == "slower" else "shrank"
    if own is not None and not ttft.beyond:
        changed = f"{blamed} {word} by {_time(abs(own.shift.shift.value))}{_bounds(own.shift)}"
        whole = f"{_signed(ttft.shift.shift.value)}{_bounds(ttft.shift)}"
        return f"{changed}; in the whole, {whole}, noise hides it"
    text = f"{direction} by {_time(abs(ttft.shift.shift.value))}{_bounds(ttft.shift)}"
    if own is not None:
        return (
            f"{text}; it began with {blamed}, which {word} by {_time(abs(own.shift.shift.value))}"
        )
    if which:
        return f"{text}; too few runs to name the phase: {fewest}, {which} are needed"
    return f"{text}; no phase alone changed beyond noise"


def _bounds(shift: Shift) -> str:
    """` (1.2 s to 1.4 s)`, with signs where the interval holds 0."""
    interval = shift.shift.interval
    if interval is None:
        return ""
    if interval.low * interval.high <= 0:
        return f" ({_signed(interval.low)} to {_signed(interval.high)})"
    low, high = sorted((abs(interval.low), abs(interval.high)))
    return f" ({_time(low)} to {_time(high)})"


def _time(ns: float) -> str:
    return f"{ns / 1e9:.2f} s" if ns >= 1e9 else f"{ns / 1e6:.1f} ms"


def _signed(ns: float) -> str:
    return f"{'−' if ns < 0 else '+'}{_time(abs(ns))}"


# -- expectations ---------------------------------------------------------------------------------


def judged(
    expectations: Sequence[Expectation], changes: Sequence[Contrast], alpha: float
) -> list[Judged]:
    """Each expectation against every contrast that it speaks of, corrected together.

    confirmed: sure, in the stated direction, and by its interval at least the stated size. refuted:
    sure in the other direction, or by its interval certainly less than stated. Else undecided, too
    few runs first of all.
    """
    stated = [(one, found) for one in expectations for found in _spoken_of(one, changes)]
    own = [found.metric(one.metric) if found else None for one, found in stated]
    p = holm({str(i): m.shift.p for i, m in enumerate(own) if m is not None})
    return [
        _judge(one, found, metric, p.get(str(i), 1.0) <= alpha)
        for i, ((one, found), metric) in enumerate(zip(stated, own, strict=True))
    ]


def _spoken_of(one: Expectation, changes: Sequence[Contrast]) -> list[Contrast | None]:
    fitting: list[Contrast | None] = [
        c for c in changes if one.scenario in ("", c.other[0]) and one.variant in ("", c.other[1])
    ]
    return fitting or [None]


def _judge(one: Expectation, found: Contrast | None, own: Compared | None, sure: bool) -> Judged:
    scenario, variant = found.other if found is not None else (one.scenario, one.variant)
    verdict, why = _settled(one, own, sure)
    return Judged(one, scenario, variant, verdict, why)


def _settled(one: Expectation, own: Compared | None, sure: bool) -> tuple[str, str]:
    if own is None:
        return "undecided", "nothing was measured that it speaks of"
    interval = own.shift.shift.interval
    if interval is None:
        return "undecided", "too few runs to say"
    sign = -1 if one.direction == "lower" else 1
    low, high = sorted((sign * interval.low, sign * interval.high))
    least = one.at_least * abs(own.base_median)
    shown = (
        f"{amount(one.metric, own.shift.shift.value)} "
        f"({amount(one.metric, interval.low)} to {amount(one.metric, interval.high)})"
    )
    if sure and low > 0 and low >= least:
        return "confirmed", shown
    if sure and high < 0:
        return "refuted", f"the other way: {shown}"
    if least and high < least:
        return "refuted", f"less than stated: {shown}"
    return "undecided", shown


def amount(metric: str, value: float) -> str:
    """A change of a metric, in its unit, with its sign."""
    if metric in ("major_faults", "minor_faults"):
        return f"{value:+,.0f}"
    if metric in ("storage_bytes", "storage_rate"):
        return f"{value / 1e6:+,.1f} MB" + ("/s" if metric == "storage_rate" else "")
    return _signed(value)
