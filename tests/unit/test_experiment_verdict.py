"""Verdicts: planted changes are found and blamed on their phase, chance is not."""

from __future__ import annotations

from typing import Any

import pytest

from ttftprof.experiment.store import Slot
from ttftprof.experiment.verdict import Contrast, Findings, find
from unit.experiment_samples import UNMET, drawn, kept, measured_noise, plan, result

AB = {"vary": {"request.x": ["1", "2"]}, "scenarios": ["cold-switch"], "runs": 12}
BASE, CHANGED = "request.x=1", "request.x=2"


def change(seed: int, planted: dict[str, float]) -> Contrast:
    made = plan(**AB)
    findings = find(made, kept(made, drawn(measured_noise(), seed, {CHANGED: planted})))
    (found,) = findings.changes
    return found


@pytest.fixture(scope="module")
def simulations(is_long: bool) -> int:
    """Experiments of 12 runs a side, with noise measured on the truth workload; 0.1 s each."""
    return 100 if is_long else 40


@pytest.mark.parametrize("phase", ["init", "prefill"])
def test_fifteen_percent_of_a_phase_are_found_and_blamed_on_it(
    phase: str, simulations: int
) -> None:
    found = [change(seed, {phase: 1.15}) for seed in range(simulations)]
    blamed = [c.direction == "slower" and c.blamed == phase for c in found]
    assert sum(blamed) >= 0.95 * simulations, [(c.direction, c.blamed) for c in found]


def test_nothing_planted_gives_at_most_five_alarms_in_a_hundred(simulations: int) -> None:
    found = [change(1000 + seed, {}) for seed in range(simulations)]
    alarms = [(c.direction, c.blamed) for c in found if c.direction != "same"]
    assert len(alarms) <= 0.05 * simulations, alarms


def test_what_got_shorter_is_blamed_too() -> None:
    found = change(1, {"prefill": 0.8})
    assert (found.direction, found.blamed) == ("faster", "prefill")
    assert "it began with prefill, which shrank by" in found.sentence


def test_the_cause_is_the_first_phase_that_grew_not_the_one_that_grew_most() -> None:
    usual = {"prefill": 100e6}

    def make(slot: Slot) -> dict[str, Any]:
        jitter = slot.run * 1e4
        slow = {"evict": 5e6, "launch": 300e6, "load": 500e6, "init": 100e6, "prefill": 100e6}
        own = slow if slot.scenario == "cold-switch" else usual
        return result({name: ns + jitter for name, ns in own.items()})

    made = plan(scenarios=["cold-switch", "resident"], runs=5)
    (cause,) = find(made, kept(made, make)).causes
    assert cause.direction == "slower"
    assert cause.blamed == "launch"
    assert cause.sentence.startswith("slower by 905.2 ms (905.0 ms to 905.5 ms); it began")


def test_too_few_runs_say_so_and_how_many_are_needed() -> None:
    made = plan(**{**AB, "runs": 3})
    findings = find(made, kept(made, drawn(measured_noise(), 1, {CHANGED: {"prefill": 3.0}})))
    (found,) = findings.changes
    assert found.direction == "same"
    assert found.blamed is None
    assert found.sentence.startswith("too few runs to say: 3 on the smaller side that count, ")
    needed = found.too_few[0]
    assert needed > 3
    enough = plan(**{**AB, "runs": needed})
    findings = find(enough, kept(enough, drawn(measured_noise(), 1, {CHANGED: {"prefill": 3.0}})))
    assert findings.changes[0].direction == "slower"


def expectation(planted: float, direction: str, at_least: str = "0%", runs: int = 12) -> str:
    stated = [{"direction": direction, "at_least": at_least, "metric": "prefill"}]
    made = plan(**{**AB, "runs": runs}, expect=stated)
    noise = drawn(measured_noise(), 3, {CHANGED: {"prefill": planted}})
    (one,) = find(made, kept(made, noise)).judged
    return one.verdict


def test_an_expectation_is_confirmed_refuted_or_left_undecided() -> None:
    assert expectation(0.7, "lower") == "confirmed"
    assert expectation(0.7, "lower", "20%") == "confirmed"
    assert expectation(0.7, "lower", "50%") == "refuted"  # less than stated
    assert expectation(1.3, "lower") == "refuted"  # the other way
    assert expectation(1.3, "higher") == "confirmed"
    assert expectation(1.0, "lower") == "undecided"
    assert expectation(0.7, "lower", runs=2) == "undecided"


def mixed(slot: Slot) -> dict[str, Any]:
    phases = {"load": 400e6 + slot.run * 1e5, "prefill": 50e6}
    if slot.block == 1:
        return result({"load": 9e9}, checks=[UNMET])
    if slot.block == 2:
        return result(None, outcome="gone", as_expected=False, detail="closed")
    return result(phases)


def test_what_does_not_count_is_counted_but_in_no_figure() -> None:
    made = plan(scenarios=["cold-switch"], runs=8, warmups=1)
    (condition,) = find(made, kept(made, mixed)).conditions
    assert len(condition.runs) == 9
    assert len(condition.counted) == 6
    assert condition.summaries["ttft"].most < 1e9
    assert condition.not_counted == {
        "warm-up": 1,
        "page cache of the model's files: 40.0 % cached, not cold": 1,
        "failed: gone": 1,
    }


def test_failures_are_told_with_their_recovery() -> None:
    def make(slot: Slot) -> dict[str, Any]:
        outcome = "ok" if slot.block else "gone"
        recovery = {"outcome": outcome, "after_ns": 5_000_000 * (slot.block + 1)}
        return result(None, outcome="failed", as_expected=True, recovery=recovery)

    made = plan(scenarios=["killed-mid-load"], runs=4)
    (condition,) = find(made, kept(made, make)).conditions
    assert condition.outcomes == {"failed": 4}
    assert condition.not_recovered == 1
    assert condition.recovery is not None
    assert condition.recovery.count == 3


def test_mean_phases_add_up_to_the_mean_wait() -> None:
    findings: Findings = find(made := plan(**AB), kept(made, drawn(measured_noise(), 5, {})))
    for condition in findings.conditions:
        waits = [run.values["ttft"] for run in condition.counted]
        assert sum(condition.mean_phases.values()) == pytest.approx(sum(waits) / len(waits))
