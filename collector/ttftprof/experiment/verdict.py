"""What the runs of an experiment show: conditions, why some are slower, what a change did. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ttftprof.experiment.conditions import Condition, conditions_of
from ttftprof.experiment.contrasts import Contrast, Pair, contrasts
from ttftprof.experiment.expectations import Judged, judged
from ttftprof.experiment.plan import Plan, variants_of
from ttftprof.experiment.store import Kept


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that an experiment shows."""

    conditions: tuple[Condition, ...]
    causes: tuple[Contrast, ...]
    changes: tuple[Contrast, ...]
    judged: tuple[Judged, ...]


def find(plan: Plan, kept: Sequence[Kept]) -> Findings:
    """The whole evaluation, of however many runs there are so far."""
    conditions = conditions_of(plan, kept)
    changes = contrasts("change", list(_changes(plan, conditions)), plan.alpha)
    by_place = {(c.scenario, c.variant): c for c in conditions}
    return Findings(
        conditions=conditions,
        causes=contrasts("cause", list(_causes(plan, conditions)), plan.alpha),
        changes=changes,
        judged=judged(plan.expectations, changes, by_place, plan.alpha),
    )


def _causes(plan: Plan, conditions: Sequence[Condition]) -> Iterator[Pair]:
    """Each scenario against the baseline, within each variant."""
    for base in conditions:
        if base.scenario != plan.baseline:
            continue
        for other in conditions:
            fits = other.variant == base.variant and other is not base and not other.is_failure
            if fits and base.counted and other.counted:
                yield base, other


def _changes(plan: Plan, conditions: Sequence[Condition]) -> Iterator[Pair]:
    """Each variant against the first, scenario by scenario."""
    first = variants_of(plan)[0].name
    for base in conditions:
        if base.variant != first or base.is_failure:
            continue
        for other in conditions:
            fits = other.scenario == base.scenario and other is not base
            if fits and base.counted and other.counted:
                yield base, other
