"""The gate: closed by what is slower beyond limit and chance, by nothing else."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Tree

import pytest
from click.testing import CliRunner

from ttftprof.cli.check import command
from ttftprof.experiment.evaluate import Experiment, evaluate
from ttftprof.experiment.gate import gate
from ttftprof.experiment.store import Slot
from ttftprof.reports import experiment_gate
from unit.experiment_samples import UNMET, drawn, kept, measured_noise, plan, result, stored

Make = Callable[[Slot], dict[str, Any]]
CALM = [run for run in measured_noise() if run["load"] < 400e6]


def experiment(folder: Path, make: Make, runs: int = 12, **more: Any) -> Path:
    return stored(folder, plan(scenarios=["cold-switch"], runs=runs, **more), make)


def slower(times: float, seed: int) -> Make:
    return drawn(CALM, seed, {"as given": {"init": times, "prefill": times}})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return experiment(tmp_path_factory.mktemp("base") / "x", slower(1.0, 1))


def check(*arguments: str | Path) -> tuple[int, str]:
    """(exit code, output), as `main` gives them."""
    code = CliRunner().invoke(command, [str(a) for a in arguments], standalone_mode=False)
    assert code.exception is None, code.exception
    return int(code.return_value), code.output


def test_much_slower_fails_and_is_named(base: Path, tmp_path: Path) -> None:
    junit = tmp_path / "check.xml"
    here = experiment(tmp_path / "x", slower(1.8, 2))
    code, output = check(here, "--baseline", base, "--junit", junit)
    assert code == 1
    assert "## ttftprof check: regressed" in output
    assert "| ❌ regressed | cold-switch, as given | ttft |" in output
    suite = Tree.parse(junit).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("1", "1", "0")
    assert suite.find("testcase/failure") is not None


def test_the_phase_that_is_to_blame_can_be_checked_alone(base: Path, tmp_path: Path) -> None:
    here = experiment(tmp_path / "x", slower(1.8, 2))
    assert check(here, "--baseline", base, "--phase", "prefill")[0] == 1
    assert check(here, "--baseline", base, "--phase", "ready_gap")[0] == 0


def test_sure_but_small_passes(base: Path, tmp_path: Path) -> None:
    here = experiment(tmp_path / "x", slower(1.05, 2))
    code, output = check(here, "--baseline", base, "--phase", "prefill")
    assert code == 0
    assert "✅ same" in output
    assert check(here, "--baseline", base, "--phase", "prefill", "--max-regression", "1%")[0] == 1


def test_large_but_unsure_passes(tmp_path: Path) -> None:
    """A limit of nothing, and noise: chance alone does not close it."""

    def noisy(seed: int) -> Make:
        return drawn([{"load": 1e8 * (1 + n % 7)} for n in range(50)], seed, {})

    one = experiment(tmp_path / "a", noisy(1))
    alarms = 0
    for seed in range(20):
        other = experiment(tmp_path / f"b{seed}", noisy(100 + seed))
        alarms += check(other, "--baseline", one, "--max-regression", "0%")[0]
    assert alarms <= 2
    _, output = check(other, "--baseline", one, "--max-regression", "10%")
    assert re.search(r"less than \d+ % may well be missed", output)  # it passes, but is not proof


def test_too_few_runs_are_undecided_which_may_fail(base: Path, tmp_path: Path) -> None:
    here = experiment(tmp_path / "x", slower(3.0, 2), runs=1)
    code, output = check(here, "--baseline", base)
    assert code == 0
    assert "❔ undecided" in output
    assert "## ttftprof check: too few runs to say" in output
    assert check(here, "--baseline", base, "--undecided", "fail")[0] == 1


def test_what_is_sure_beside_surer_ones_is_not_undecided(tmp_path: Path) -> None:
    """By Holm's steps the last of three needs no more than it would alone."""
    names = ["cold-switch", "re-switch", "long-prompt"]

    def make(times: float, few: bool) -> Make:
        def one(slot: Slot) -> dict[str, Any]:
            lost = few and slot.scenario == "long-prompt" and slot.block >= 2
            checks = [UNMET] if lost else []
            return result({"prefill": times * 1e9 + slot.run * 1e5}, checks=checks)

        return one

    made = plan(scenarios=names, runs=12)
    known = stored(tmp_path / "base", made, make(1.0, False))
    here = stored(tmp_path / "x", made, make(2.0, True))
    found = gate(evaluate(here), evaluate(known), 0.1)
    assert [one.result for one in found.checked] == ["regressed"] * 3


def test_runs_that_are_missing_here_leave_a_doubt(base: Path, tmp_path: Path) -> None:
    """A change that makes half of the runs fail must not pass without a word."""
    made = slower(1.0, 1)

    def half(slot: Slot) -> dict[str, Any]:
        return made(slot) if slot.block % 2 else result(None, outcome="gone", as_expected=False)

    code, output = check(experiment(tmp_path / "x", half), "--baseline", base)
    assert code == 0
    assert "## ttftprof check: no regression, as far as can be told" in output
    assert "6 runs here do not count, of the baseline's 0" in output


def test_the_bases_of_two_experiments_are_held_against_each_other(tmp_path: Path) -> None:
    """Whichever variant came first in either."""

    def make(slot: Slot) -> dict[str, Any]:
        return result({"load": 1e8 + slot.run}, fingerprint={"server's command": slot.variant})

    made = [
        plan(scenarios=["resident"], runs=6, seed=seed, vary={"request.x": ["1", "2"]})
        for seed in (2, 3)
    ]
    here, known = (stored(tmp_path / str(one.seed), one, make) for one in made)
    assert len({kept(one, make)[0].slot.variant for one in made}) == 2
    assert not gate(evaluate(here), evaluate(known), 0.1).differences


def test_a_scenario_that_is_gone_is_told(base: Path, tmp_path: Path) -> None:
    here = stored(
        tmp_path / "x", plan(scenarios=["resident"], runs=6), lambda _: result({"prefill": 1e8})
    )
    code, output = check(here, "--baseline", base)
    assert code == 1
    assert "❔ absent" in output
    assert "no regression" not in output


def test_where_every_run_failed_the_check_fails(base: Path, tmp_path: Path) -> None:
    here = experiment(tmp_path / "x", lambda _: result(None, outcome="refused", as_expected=False))
    code, output = check(here, "--baseline", base)
    assert code == 1
    assert "no runs of this here that count" in output


def test_a_phase_that_no_run_tells_fails_the_check(base: Path, tmp_path: Path) -> None:
    """As where they were not recorded."""
    blind = experiment(tmp_path / "x", lambda slot: result(None, value_ns=500_000_000 + slot.run))
    code, output = check(blind, "--baseline", blind, "--phase", "load")
    assert code == 1
    assert "no run of the baseline tells its load" in output
    assert "no run here tells its load" in check(blind, "--baseline", base, "--phase", "load")[1]


def test_what_is_not_the_same_is_told(tmp_path: Path) -> None:
    def on(kernel: str) -> Make:
        return lambda slot: result({"load": 1e8 + slot.run}, fingerprint={"kernel": kernel})

    found = gate(
        evaluate(experiment(tmp_path / "b", on("6.8"))),
        evaluate(experiment(tmp_path / "a", on("6.1"))),
        0.1,
    )
    assert found.differences == {"kernel": ("6.1", "6.8")}
    out = io.StringIO()
    experiment_gate.write_markdown(found, out)
    assert "**not the same**: kernel: 6.1 → 6.8" in out.getvalue()


def test_variants_are_matched_by_name(tmp_path: Path) -> None:
    vary = {"readahead": ["128", "1024"]}
    noise = drawn(CALM, 5, {})
    folders = [experiment(tmp_path / name, noise, vary=vary) for name in "ab"]
    one, other = map(evaluate, folders)
    assert isinstance(one, Experiment)
    found = gate(other, one, 0.1)
    assert [c.variant for c in found.checked] == ["readahead=128", "readahead=1024"]
    assert {c.result for c in found.checked} == {"same"}
