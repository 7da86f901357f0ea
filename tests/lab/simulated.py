"""Experiments drawn from runs that were measured: how often verdicts are right.

    PYTHONPATH=tests python -m lab.simulated

Each is 12 runs a side, drawn by a seed from the runs of the truth workload that `lab.planted`
recorded: of one phase that was made 15 % longer, or of none. Nothing is made up but the draw.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ttftprof.experiment import plan as plans
from ttftprof.experiment.contrasts import Contrast
from ttftprof.experiment.runner import RunResult
from ttftprof.experiment.schedule import slots_of
from ttftprof.experiment.store import Kept
from ttftprof.experiment.verdict import find

SIMULATIONS, RUNS = 100, 12
BASE, CHANGED = "request.x=1", "request.x=2"
AS_GIVEN = ("as given", "again")
_FILE = Path(__file__).parents[1] / "fixtures/experiment/planted.json"

Runs = Sequence[Mapping[str, Any]]


def measured() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """{experiment: {phase that was made longer, or one of `AS_GIVEN`: its runs}}."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in json.loads(_FILE.read_text()):
        found.setdefault(row["experiment"], {}).setdefault(row["planted"], []).append(row)
    return found


MEASURED = measured()
SLOWED = [
    (name, phase) for name, runs in MEASURED.items() for phase in runs if phase not in AS_GIVEN
]


def compared(base: Runs, other: Runs) -> Contrast:
    """What an experiment says whose two sides are these runs."""
    made = plans.from_mapping(
        {
            "server": {"url": "http://h:1", "models": ["a", "b"]},
            "experiment": {"warmups": 0, "scenarios": ["cold-switch"], "runs": len(base)},
            "vary": {"request.x": ["1", "2"]},
        },
        "a simulation",
    )
    sides = {BASE: base, CHANGED: other}
    kept = [Kept(slot, _result(sides[slot.variant][slot.block])) for slot in slots_of(made)]
    (found,) = find(made, kept).changes
    return found


def _result(run: Mapping[str, Any]) -> dict[str, Any]:
    result = RunResult(outcome="ok", as_expected=True, value_ns=run["ttft"])
    result.digest = {"phases": run["phases"]}
    return result.as_json()


def as_given(experiment: str) -> Runs:
    return [run for name in AS_GIVEN for run in MEASURED[experiment].get(name, ())]


def planted(experiment: str, phase: str) -> list[Contrast]:
    """What a hundred experiments say in which this phase was made longer."""
    given, slowed = as_given(experiment), MEASURED[experiment][phase]
    dice = [random.Random(seed) for seed in range(SIMULATIONS)]
    return [compared(one.sample(given, RUNS), one.sample(slowed, RUNS)) for one in dice]


def unchanged(experiment: str) -> list[Contrast]:
    """What a hundred say whose sides are runs as given, parted in two."""
    given = as_given(experiment)
    side = min(RUNS, len(given) // 2)
    found = []
    for seed in range(SIMULATIONS):
        drawn = random.Random(seed).sample(given, 2 * side)
        found.append(compared(drawn[:side], drawn[side:]))
    return found


def is_blamed(found: Contrast, phase: str) -> bool:
    return found.direction == "slower" and found.blamed == phase


def main() -> None:
    print(f"| made 15 % longer | blamed, of {SIMULATIONS} |\n| --- | ---: |")
    for experiment, phase in SLOWED:
        print(f"| `{phase}` | {sum(is_blamed(c, phase) for c in planted(experiment, phase))} |")
    for experiment in MEASURED:
        alarms = sum(c.direction != "same" for c in unchanged(experiment))
        print(f"| nothing ({experiment}) | {alarms} false alarms |")


if __name__ == "__main__":
    main()
