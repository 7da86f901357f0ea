"""Advice: what was measured to gain, with its interval, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ttftprof.experiment.plan import Plan
from ttftprof.experiment.policy import Advice, advise
from ttftprof.experiment.store import Slot
from ttftprof.experiment.verdict import find
from unit.experiment_samples import kept, plan, result

Waits = Mapping[tuple[str, str], float]  # {(scenario, variant): s}


def advised(made: Plan, waits: Waits, noise: float = 0.001) -> list[Advice]:
    """What is advised if each condition takes so long, and a little more with every run."""

    def make(slot: Slot) -> dict[str, Any]:
        seconds = waits[slot.scenario, slot.variant] + noise * (slot.run % 7)
        return result({"load": seconds * 1e9})

    return advise(made, find(made, kept(made, make)))


def of(scenarios: Mapping[str, float]) -> list[Advice]:
    names = [name for name in scenarios if not name.startswith("concurrency-")]
    ladder = [int(name[12:]) for name in scenarios if name.startswith("concurrency-")]
    if ladder:
        names.append("concurrency")
    server = {"url": "http://h:1", "models": ["a", "b"], "command": "srv"}
    made = plan(scenarios=names, runs=8, server=server, workload={"concurrency": ladder or [1]})
    return advised(made, {(name, "as given"): s for name, s in scenarios.items()})


@pytest.mark.parametrize(
    ("scenarios", "change", "gain_s", "cost"),
    [
        ({"cold-switch": 9.0, "re-switch": 2.0}, "in the page cache", 7.0, "50 MB of page cache"),
        ({"cold-switch": 9.0, "resident": 0.5}, "both models in memory", 8.5, "about 50 MB of mem"),
        ({"re-switch": 2.0, "dual-resident": 0.5}, "(measured so)", 1.5, "about 50 MB of memory"),
        ({"idle-expired": 4.0, "resident": 0.5}, "stay loaded when idle", 3.5, "about 50 MB of"),
        ({"restart": 4.0, "resident": 0.5}, "do not restart the server", 3.5, ""),
        ({"cold-restart": 9.0, "restart": 4.0}, "once after boot", 5.0, "50 MB of page cache"),
        ({"long-prompt": 3.0, "resident": 0.5}, "limit the prompt's length", 2.5, ""),
        ({"concurrency-1": 0.5, "concurrency-4": 2.0}, "admit at most 1 request", 1.5, ""),
    ],
)
def test_each_rule_promises_what_was_measured(
    scenarios: Mapping[str, float], change: str, gain_s: float, cost: str
) -> None:
    (one,) = of(scenarios)
    assert change in one.change
    assert one.gain_ns == pytest.approx(gain_s * 1e9, abs=4e6)
    assert one.interval.low <= one.gain_ns <= one.interval.high
    assert one.cost.startswith(cost)


def test_the_largest_gain_comes_first_and_none_is_made_up() -> None:
    found = of({"cold-switch": 9.0, "re-switch": 2.0, "resident": 0.5})
    assert [round(one.gain_ns / 1e9, 1) for one in found] == [8.5, 7.0, 1.5]
    assert of({"cold-switch": 2.0, "re-switch": 2.0}) == []
    assert of({"cold-switch": 1.0, "re-switch": 2.0}) == []


def test_local_against_nas_is_a_setting_that_helped() -> None:
    server = {"url": "http://h:1", "models": ["a", "b"], "command": "srv --dir {disk}"}
    made = plan(scenarios=["cold-switch"], runs=12, server=server, vary={"disk": ["/nas", "/ssd"]})
    waits = {("cold-switch", "disk=/nas"): 40.0, ("cold-switch", "disk=/ssd"): 6.0}
    (one,) = advised(made, waits)
    assert (one.change, one.when) == ("adopt disk=/ssd", "cold-switch")
    assert one.gain_ns == pytest.approx(34e9, rel=0.01)
    slower = {("cold-switch", "disk=/nas"): 6.0, ("cold-switch", "disk=/ssd"): 40.0}
    assert advised(made, slower) == []


def test_a_faster_phase_that_the_noise_of_the_whole_hides_is_no_advice() -> None:
    server = {"url": "http://h:1", "models": ["a", "b"], "command": "srv --dir {disk}"}
    made = plan(scenarios=["cold-switch"], runs=12, server=server, vary={"disk": ["/nas", "/ssd"]})
    waits = {("cold-switch", "disk=/nas"): 10.0, ("cold-switch", "disk=/ssd"): 9.9}
    assert advised(made, waits, noise=0.3) == []


def test_gains_are_corrected_for_all_that_could_be_advised() -> None:
    """Five runs a side, the smallest p there is: enough for one question, not for seven."""
    times = {"resident": 100e6, "re-switch": 300e6}

    def make(slot: Slot) -> dict[str, Any]:
        return result({"prefill": times.get(slot.scenario, 100e6) + slot.block * 1e6})

    found = {}
    others = ["cold-switch", "dual-resident", "idle-expired", "long-prompt", "concurrency"]
    for scenarios in (["re-switch", "resident"], ["re-switch", "resident", *others]):
        made = plan(scenarios=scenarios, runs=5, workload={"concurrency": [1, 2]})
        found[len(scenarios)] = len(advise(made, find(made, kept(made, make))))
    assert found == {2: 1, 7: 0}


def test_a_difference_within_the_noise_is_no_advice() -> None:
    made = plan(scenarios=["cold-switch", "re-switch"], runs=8)
    waits = {("cold-switch", "as given"): 2.01, ("re-switch", "as given"): 2.0}
    assert advised(made, waits, noise=0.2) == []
