"""The runs of an experiment, gathered by scenario and variant. Pure.

Only runs count that are no warm-up, whose state was established, and that came out as they should;
all others are counted and shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ttftprof.experiment.plan import Plan, variants_of
from ttftprof.experiment.scenarios import Scenario
from ttftprof.experiment.statistics import Summary, summarise
from ttftprof.experiment.store import Kept
from ttftprof.model import PHASES

COUNTERS = ("major_faults", "minor_faults", "storage_bytes", "storage_rate")


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

    @cached_property
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


def conditions_of(plan: Plan, kept: Iterable[Kept]) -> tuple[Condition, ...]:
    """Every scenario under every variant, with however many runs there are so far."""
    runs = [_run(one) for one in kept]
    return tuple(
        _condition(scenario, variant.name, runs)
        for scenario in plan.chosen()
        for variant in variants_of(plan)
    )


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
