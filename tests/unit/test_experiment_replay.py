"""Traffic played again: waits counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ttftprof.experiment.replay import (
    Asked,
    Costs,
    Outcome,
    Policy,
    costs_of,
    played,
    policies,
    replay,
    traffic_of,
)
from ttftprof.experiment.statistics import Estimate, Interval
from ttftprof.experiment.store import Slot
from ttftprof.experiment.verdict import find
from unit.experiment_samples import kept, plan, result
from unit.report_samples import WEIGHTS_BYTES, cold, reswitch

SECOND = 1_000_000_000
COSTS = Costs(resident_ns=1.0, cached_ns=10.0, cold_ns=100.0, weights_bytes=50)
SIZES = {"a": 50, "b": 50, "c": 100}


def traffic(models: str, gap_s: float = 1.0) -> list[Asked]:
    return [Asked(int(i * gap_s * SECOND), model) for i, model in enumerate(models)]


def under(policy: Policy, models: str, cache: int = 1000, gap_s: float = 1.0) -> Outcome:
    return replay(traffic(models, gap_s), SIZES, COSTS, policy, cache)


def test_one_model_at_a_time() -> None:
    found = under(Policy("one", models=1), "aabab")
    assert found.mean_ns == pytest.approx((100 + 1 + 100 + 10 + 10) / 5)
    assert (found.requests, found.loads, found.cold_loads) == (5, 4, 2)
    assert found.memory_bytes == 50


def test_all_resident_load_once() -> None:
    found = under(Policy("all"), "aabab")
    assert found.mean_ns == pytest.approx((100 + 1 + 100 + 1 + 1) / 5)
    assert found.memory_bytes == 100


def test_a_bigger_model_takes_longer_to_load() -> None:
    assert under(Policy("all"), "c").mean_ns == pytest.approx(1 + 99 * 2)


def test_a_small_page_cache_makes_switches_cold() -> None:
    assert under(Policy("one", models=1), "abab", cache=50).cold_loads == 4
    assert under(Policy("one", models=1), "abab", cache=100).cold_loads == 2


def test_memory_is_a_budget_and_the_longest_unused_goes() -> None:
    found = under(Policy("budget", memory_bytes=150), "abcab")
    # c (100) puts out a; a puts out b, the longest unused; b puts out c
    assert found.loads == 5
    assert found.memory_bytes == 150


def test_keep_alive_and_pins() -> None:
    idle = Policy("idle", keep_alive_s=5)
    assert under(idle, "aa", gap_s=4).loads == 1
    assert under(idle, "aa", gap_s=6).loads == 2
    pinned = Policy("pin", models=2, pinned=frozenset("a"))
    assert under(pinned, "abcabc").loads == 5  # a once, the others each time


def test_policies_are_those_that_matter() -> None:
    assert [p.name for p in policies(traffic("ab"), SIZES)][:2] == [
        "one model at a time",
        "all models resident",
    ]
    assert any(p.pinned == frozenset("b") for p in policies(traffic("abbcb"), SIZES))


def test_memory_is_tried_as_a_budget_where_the_sizes_are_known() -> None:
    gigabytes = {"a": 40_000_000_000, "b": 8_000_000_000, "c": 8_000_000_000, "d": 24_000_000_000}
    found = [p for p in policies(traffic("abcd"), gigabytes) if p.memory_bytes]
    assert [(p.name.partition(",")[0], p.memory_bytes) for p in found] == [
        ("as many as have room in 40 GB", 40_000_000_000),
        ("as many as have room in 60 GB", 60_000_000_000),
    ]
    assert not [p for p in policies(traffic("abcz"), gigabytes) if p.memory_bytes]


def test_costs_are_the_measured_medians() -> None:
    def make(slot: Slot) -> dict[str, Any]:
        load = {"cold-switch": 9e8, "re-switch": 2e8, "resident": 0.0}[slot.scenario]
        return result({"load": load, "prefill": 1e8})

    made = plan(scenarios=["cold-switch", "re-switch", "resident"], runs=3)
    assert costs_of(find(made, kept(made, make))) == Costs(1e8, 3e8, 1e9, 50_000_000)
    alone = plan(scenarios=["resident"], runs=3)
    assert costs_of(find(alone, kept(alone, make))) is None


def test_what_a_policy_saves_has_the_interval_of_the_runs_behind_it() -> None:
    """By hand: two models in turn. One at a time: a cold load of each, then cached ones; both in
    memory: a cold load of each, then none."""

    def make(slot: Slot) -> dict[str, Any]:
        load = {"cold-switch": 9e8, "re-switch": 2e8, "resident": 0.0}[slot.scenario]
        return result({"load": load + (slot.block * 1e6 if load else 0), "prefill": 1e8})

    made = plan(scenarios=["cold-switch", "re-switch", "resident"], runs=9)
    costs = costs_of(find(made, kept(made, make)))
    assert costs is not None
    sizes = {"a": costs.weights_bytes, "b": costs.weights_bytes}
    both = [Policy("one", models=1), Policy("both")]
    one, two = played(traffic("abababab"), sizes, costs, both, 10**12)
    for outcome in (one, two):
        parts = (costs.resident_ns, costs.cached_ns, costs.cold_ns)
        assert outcome.mean_ns == pytest.approx(
            sum(share * ns for share, ns in zip(outcome.made_of, parts, strict=True))
        )
    assert one.saves == Estimate(0.0, Interval(0.0, 0.0))
    assert two.saves is not None
    assert two.saves.value == pytest.approx(204e6 * 6 / 8)  # six loads from the cache
    assert two.saves.interval is not None
    low, high = two.saves.interval.low, two.saves.interval.high
    assert 200e6 * 6 / 8 <= low < two.saves.value < high <= 208e6 * 6 / 8


def test_too_few_runs_leave_no_interval_of_what_a_policy_saves() -> None:
    def make(slot: Slot) -> dict[str, Any]:
        load = {"cold-switch": 9e8, "re-switch": 2e8, "resident": 0.0}[slot.scenario]
        return result({"load": load, "prefill": 1e8})

    made = plan(scenarios=["cold-switch", "re-switch", "resident"], runs=1)
    costs = costs_of(find(made, kept(made, make)))
    assert costs is not None
    both = [Policy("one", models=1), Policy("both")]
    _, two = played(traffic("abab"), {}, costs, both, 10**12)
    assert two.saves is not None
    assert two.saves.value > 0
    assert two.saves.interval is None


def test_traffic_is_read_from_recordings() -> None:
    reports = [reswitch(), cold()]
    asked, sizes = traffic_of(reports)
    assert {one.model for one in asked} == {r.model for x in reports for r in x.requests}
    assert [one.ns for one in asked] == sorted(one.ns for one in asked)
    assert sizes[cold().requests[0].model or ""] == WEIGHTS_BYTES


def test_a_model_is_as_big_as_all_its_shards() -> None:
    """And stays so where a later request touches one of them only."""
    whole = cold()
    (request,) = [r for r in whole.requests if r.files]
    one = next(f for f in request.files if f.is_weights)
    both = (one, replace(one, path=f"{one.path}.2"), replace(one, is_weights=False, path="/x"))
    sharded = replace(whole, requests=(replace(request, files=both),))
    later = replace(whole, requests=(replace(request, files=(one,)),))
    _, sizes = traffic_of([sharded, later])
    assert sizes == {request.model: 2 * WEIGHTS_BYTES}
