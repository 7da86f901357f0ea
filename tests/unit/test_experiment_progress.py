"""How far an experiment is: told by runs of the same kind, in lines where there is no terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ttftprof.cli.bench_progress import Remaining, spoken, watcher
from ttftprof.experiment.runner import RunResult
from ttftprof.experiment.store import Slot, Store
from unit.experiment_samples import UNMET, plan, result, stored


def took(seconds: dict[str, float]) -> Any:
    return lambda slot: result({"load": 1e8}, wall_s=seconds[slot.scenario])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two of six runs are made; a cold switch takes 10 s, a resident model 1 s."""
    made = plan(scenarios=["cold-switch", "resident"], runs=3, gap_s=0.5)
    folder = stored(tmp_path / "x", made, took({"cold-switch": 10.0, "resident": 1.0}), leave=4)
    return Store.read(folder)


def test_the_rest_takes_as_long_as_its_like_did(store: Store) -> None:
    remaining = Remaining(store, 0.5)
    assert remaining.seconds(store.left()) == pytest.approx(2 * 10 + 2 * 1 + 4 * 0.5)
    other = Slot(9, 9, "long-prompt", "as given", False)  # not tried yet: as long as the others
    assert remaining.seconds([other]) == pytest.approx(5.5 + 0.5)


def test_nothing_is_guessed_before_the_first_run(tmp_path: Path) -> None:
    made = plan(scenarios=["resident"], runs=1)
    with Store.read(stored(tmp_path / "x", made, took({}), leave=1)) as empty:
        assert Remaining(empty, 0.5).seconds(empty.left()) is None
    assert spoken(None) == "?"


@pytest.mark.parametrize(
    ("seconds", "words"), [(11.6, "12 s"), (200.0, "3 min 20 s"), (3900.0, "1 h 05 min")]
)
def test_times_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert spoken(seconds) == words


def test_lines_count_on_where_an_interruption_was(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    left = store.left()
    with watcher(store, quiet=False) as progress:
        progress.begin(left[0], left)
        progress.end(left[0], RunResult(outcome="ok", as_expected=True, value_ns=123_000_000))
        progress.begin(left[1], left[1:])
        progress.end(left[1], RunResult(checks=[UNMET], outcome="ok"))
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"ttftprof: [3/6, 24 s left] {left[0].scenario}, as given: 123 ms"
    assert told[1].endswith("left out: page cache of the model's files: 40.0 % cached, not cold")


def test_on_a_terminal_a_bar_shows_the_runs_and_the_time_left(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    left = store.left()
    with watcher(store, quiet=False) as progress:
        progress.begin(left[0], left)
    shown = capsys.readouterr().err
    assert "2/6" in shown
    assert "24 s left" in shown


def test_quiet_says_nothing(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    with watcher(store, quiet=True) as progress:
        progress.begin(store.left()[0], store.left())
        progress.say("something")
    assert capsys.readouterr().err == ""
