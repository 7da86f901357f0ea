"""Experiments made up for tests: runs of chosen values, through the real evaluation."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ttftprof.experiment import plan as plans
from ttftprof.experiment.plan import Plan
from ttftprof.experiment.runner import RunResult
from ttftprof.experiment.schedule import slots_of
from ttftprof.experiment.state import Check
from ttftprof.experiment.store import Kept, Slot, Store

Phases = Mapping[str, float]
FIXTURES = Path(__file__).parents[1] / "fixtures/experiment"


def measured_noise() -> list[Phases]:
    """Phases of real runs of the truth workload: whole runs, so that what belongs together does."""
    found: list[Phases] = json.loads((FIXTURES / "truth_noise.json").read_text())["runs"]
    return found


def plan(**experiment: Any) -> Plan:
    raw: dict[str, Any] = {"server": {"url": "http://h:1", "models": ["a", "b"]}}
    for table in ("server", "vary", "expect", "workload"):
        if table in experiment:
            raw[table] = experiment.pop(table)
    raw["experiment"] = {"warmups": 0, **experiment}
    return plans.from_mapping(raw, "a test")


def result(phases: Phases | None, **more: Any) -> dict[str, Any]:
    """A run that went well, with these phases (None: not recorded), as it is stored."""
    run = RunResult(outcome="ok", as_expected=True)
    if phases is not None:
        whole = {name: round(ns) for name, ns in phases.items()}
        run.value_ns = sum(whole.values())
        run.digest = {"phases": whole, "storage_bytes": 1000, "engine": "llama.cpp", "lost": {}}
        run.digest |= {"weights_bytes": 50_000_000, "major_faults": 3, "minor_faults": 40}
    for name, value in more.items():
        setattr(run, name, value)
    return run.as_json()


UNMET = Check("page cache of the model's files", "cold", "40.0 % cached", False, "cachestat")

Make = Callable[[Slot], dict[str, Any]]


def kept(plan: Plan, make: Make) -> list[Kept]:
    return [Kept(slot, make(slot)) for slot in slots_of(plan)]


def stored(folder: Path, plan: Plan, make: Make, leave: int = 0) -> Path:
    """The same as a folder, with the last `leave` runs still to be made."""
    slots = slots_of(plan)
    with Store.create(folder, plan.public(), plan.digest(), slots) as store:
        for slot in slots[: len(slots) - leave]:
            store.end(slot, store.begin(slot), make(slot))
    return folder


def drawn(pool: Sequence[Phases], seed: int, planted: Mapping[str, dict[str, float]]) -> Make:
    """Runs drawn from real ones; `planted`: {variant: {phase: how many times as long}}."""
    dice = random.Random(seed)

    def make(slot: Slot) -> dict[str, Any]:
        slower = planted.get(slot.variant, {})
        own = dice.choice(pool)
        return result({name: ns * slower.get(name, 1.0) for name, ns in own.items()})

    return make
