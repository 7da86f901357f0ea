"""Runs that cannot be had: servers that do not start, states that nobody tells. Without root."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ttftprof.experiment import plan as plans
from ttftprof.experiment.evaluate import Experiment, evaluate
from ttftprof.experiment.runner import Watcher, carry_out
from ttftprof.experiment.schedule import slots_of
from ttftprof.experiment.store import Store
from ttftprof.reports import experiment_words
from workloads.config import save_config
from workloads.experiment import Truth, truth_server


@pytest.fixture
def truth(tmp_path: Path) -> Truth:
    return truth_server(tmp_path)


class Heard(Watcher):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def bench(folder: Path, text: str, watcher: Watcher | None = None) -> Experiment:
    """Carries the plan out in this process."""
    plan = plans.from_mapping({**tomllib.loads(text)}, "a test", text)
    plan = replace(plan, record=False)
    schedule = slots_of(plan)
    with Store.create(folder / "x.bench", plan.public(), plan.digest(), schedule) as store:
        carry_out(plan, store, watcher or Watcher())
    return evaluate(folder / "x.bench")


def reasons(experiment: Experiment) -> dict[str, Mapping[str, int]]:
    """{scenario, variant: why runs do not count}"""
    return {f"{c.scenario}, {c.variant}": c.not_counted for c in experiment.findings.conditions}


def test_a_variant_whose_server_does_not_start_costs_its_own_runs_only(
    truth: Truth, tmp_path: Path
) -> None:
    only = replace(truth.config, models={"a": truth.config.models["a"]})
    save_config(only, truth.config_path)
    plan = truth.plan(
        "runs = 2\nwarmups = 0\ngap_s = 0\nscenarios = ['resident', 'restart']",
        f"files = {{ a = '{only.models['a'].path}' }}",
        f"[vary]\nconfig = ['{truth.config_path}', '/no/such/config']\n"
        "[[expect]]\ndirection = 'lower'",
    ).replace("['a', 'b']", "['a']")
    report = bench(tmp_path, plan.replace(f"--config {truth.config_path}", "--config {config}"))
    assert report.done == report.scheduled == 8
    good, bad = f"config={truth.config_path}", "config=/no/such/config"
    failed = {"failed: not started": 2}
    assert reasons(report) == {
        f"resident, {good}": {},
        f"restart, {good}": {},
        f"resident, {bad}": failed,
        f"restart, {bad}": failed,
    }
    failure = report.condition("resident", bad)
    assert failure is not None
    assert "No such file" in failure.runs[0].raw["detail"]  # the server's last words
    assert {one.verdict for one in report.findings.judged} == {"undecided"}
    warnings = list(experiment_words.warnings(report))
    told = f"resident, {bad}: none of its 2 runs counts (failed: not started; the first: the server"
    assert any(warning.startswith(told) for warning in warnings)


def test_a_state_that_nobody_tells_is_left_out(truth: Truth, tmp_path: Path) -> None:
    """The server has no API for it and two models, and no run is recorded."""
    files = ", ".join(f"{name} = '{m.path}'" for name, m in truth.config.models.items())
    heard = Heard()
    report = bench(
        tmp_path,
        truth.plan(
            "runs = 1\nwarmups = 0\ngap_s = 0\n"
            "scenarios = ['cold-switch', 'resident', 'restart', 'unknown-model']",
            f"files = {{ {files} }}",
        ),
        heard,
    )
    assert any("no run of cold-switch, resident will count" in text for text in heard.said)
    assert reasons(report) == {
        "cold-switch, as given": {"model a: nobody tells, not unloaded": 1},
        "resident, as given": {"model a: nobody tells, not loaded": 1},
        "restart, as given": {},  # the process that starts again tells it
        "unknown-model, as given": {},
    }
    assert report.findings.causes == ()


def test_a_prompt_that_was_to_come_from_a_cache_must_be_told_to(
    truth: Truth, tmp_path: Path
) -> None:
    only = replace(truth.config, models={"a": truth.config.models["a"]})
    save_config(only, truth.config_path)
    plan = truth.plan(
        "runs = 1\nwarmups = 0\ngap_s = 0\nscenarios = ['resident']",
        rest="[workload]\nprompt_cache = 'keep'",
    ).replace("['a', 'b']", "['a']")
    heard = Heard()
    (found,) = bench(tmp_path, plan, heard).findings.conditions
    assert not any("will count" in text for text in heard.said)  # it names no other model
    # The truth server has no such cache, and says so.
    assert list(found.not_counted) == ["prompt cache: 0 of 34 tokens, not used"]
