"""`ttftprof bench` as it is typed: plans from flags, what is refused before any run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ttftprof.cli import bench
from ttftprof.errors import NotPermitted, OutputError, TtftprofError, UsageError
from ttftprof.experiment.plan import EXAMPLE, Plan
from ttftprof.experiment.store import Store
from unit.experiment_samples import plan, result, stored


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would have been run: (plan, folder, fresh, quiet) of every bench."""
    found: list[Any] = []
    monkeypatch.setattr(bench, "_run", lambda *arguments: found.append(arguments))
    monkeypatch.setattr(bench, "_print", lambda *_: None)
    return found


def run(*arguments: str | Path) -> int:
    done = CliRunner().invoke(bench.command, [str(a) for a in arguments], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return int(done.return_value)


def refused(kind: type[TtftprofError], *arguments: str | Path) -> str:
    with pytest.raises(kind) as caught:
        run(*arguments)
    assert caught.value.next_step
    return caught.value.message


FLAGS = ("--url", "127.0.0.1:8080", "--models", "small, large")


def test_flags_make_a_plan(given: list[Any]) -> None:
    more = ["--scenarios", "cold-switch,resident", "--runs", "7", "--seed", "3", "--command", "srv"]
    assert run(*FLAGS, *more, "--vary", "readahead=128,1024", "--expect", "lower:10%") == 0
    ((made, folder, fresh, quiet),) = given
    assert isinstance(made, Plan)
    assert made.server.models == ("small", "large")
    assert made.server.command == ("srv",)
    assert (made.scenarios, made.runs, made.seed) == (("cold-switch", "resident"), 7, 3)
    assert [(f.name, f.values) for f in made.factors] == [("readahead", ("128", "1024"))]
    assert [(e.direction, e.at_least) for e in made.expectations] == [("lower", 0.1)]
    assert (folder, fresh, quiet) == (Path("experiment.bench"), False, False)


def test_flags_win_over_the_plan_and_it_gives_the_name(given: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "ahead.toml"
    path.write_text("".join(x for x in EXAMPLE.splitlines(True) if not x.startswith("name =")))
    own = ["--runs", "3", "--vary", "readahead=64,1024", "--scenarios", "resident"]
    run(path, *own, "--no-record", "--expect", "lower")
    ((made, folder, _, _),) = given
    assert (made.name, made.runs, made.record) == ("ahead", 3, False)
    assert made.factors[0].values == ("64", "1024")
    assert folder == Path("ahead.bench")


def test_values_that_hold_commas_are_parted_by_bars(given: list[Any]) -> None:
    run(*FLAGS, "--command", "srv", "--vary", "argv=--split 1,2|--split 3,4")
    assert given[0][0].factors[0].values == ("--split 1,2", "--split 3,4")


def test_what_cannot_be_run_is_refused_at_once(given: list[Any], tmp_path: Path) -> None:
    assert "nothing to run" in refused(UsageError)
    assert "is no factor" in refused(UsageError, *FLAGS, "--vary", "readahead")
    assert "give KiB" in refused(UsageError, *FLAGS, "--vary", "readahead=128k,1M")
    assert "contradict" in refused(UsageError, tmp_path / "p.toml", "--report", tmp_path)
    assert given == []


def test_recording_without_root_is_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    folder = tmp_path / "x"
    assert "need root" in refused(NotPermitted, *FLAGS, "-o", folder)
    assert not folder.exists()


def test_beginning_anew_keeps_what_there_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = plan(scenarios=["resident"], runs=2)
    folder = stored(tmp_path / "x", made, lambda _: result({"load": 1e8}))
    monkeypatch.setattr("ttftprof.experiment.runner.carry_out", lambda *_: None)
    run(*FLAGS, "--no-record", "--scenarios", "resident", "-o", folder, "--fresh", "--quiet")
    assert (tmp_path / "x.1/experiment.sqlite").exists()
    with Store.resume(folder, *_stored_plan(folder)):  # somebody writes into it
        assert "another ttftprof bench writes into" in refused(
            OutputError,
            *FLAGS, "--no-record", "--scenarios", "resident", "-o", folder, "--fresh",
        )  # fmt: skip
    assert (folder / "experiment.sqlite").exists()
    assert "holds an experiment with another plan" in refused(
        UsageError, *FLAGS, "--no-record", "--scenarios", "long-prompt", "-o", folder
    )


def _stored_plan(folder: Path) -> tuple[dict[str, Any], str]:
    with Store.read(folder) as store:
        return store.plan, store.meta("digest")


def test_the_example_is_printed() -> None:
    done = CliRunner().invoke(bench.command, ["--example"], standalone_mode=False)
    assert done.output == EXAMPLE
