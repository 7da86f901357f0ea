"""What an experiment's reports say: the text, the JSON by its schema, the page by its parts."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ttftprof.errors import UsageError
from ttftprof.experiment import evaluate as evaluation
from ttftprof.experiment.evaluate import Experiment, evaluate
from ttftprof.experiment.store import Slot
from ttftprof.reports import experiment_html, experiment_json, experiment_terminal
from unit.experiment_samples import UNMET, plan, result, stored
from unit.report_samples import WEIGHTS_BYTES, cold

HOSTILE = "<script>alert(1)</script>\x1b[31m"


def make(slot: Slot) -> dict[str, Any]:
    """Loads that 1024 KiB make shorter by a third; one run whose state was not had; failures."""
    prints = {"kernel": "6.1", "mount options of a": "rw" if slot.run < 20 else "ro"}
    if slot.scenario == "killed-mid-load":
        recovery = {"outcome": "ok", "after_ns": 300_000_000 + slot.run}
        return result(None, outcome="gone", as_expected=True, recovery=recovery)
    if slot.scenario == "resident":
        return result({"prefill": 50e6 + slot.run * 1e5}, fingerprint=prints)
    load = (300e6 if slot.variant == "readahead=128" else 200e6) + slot.run * 1e5
    checks = [UNMET] if slot.block == 3 and slot.variant == "readahead=128" else []
    phases = {"launch": 20e6, "load": load, "prefill": 50e6}
    return result(phases, checks=checks, fingerprint=prints)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = plan(
        name=f"ahead {HOSTILE}",
        scenarios=["cold-switch", "resident", "killed-mid-load"],
        runs=10,
        vary={"readahead": ["128", "1024"]},
        expect=[{"scenario": "cold-switch", "direction": "lower", "at_least": "20%"}],
    )
    return stored(tmp_path_factory.mktemp("experiment") / "x", made, make, leave=4)


@pytest.fixture(scope="module")
def experiment(folder: Path) -> Experiment:
    return evaluate(folder)


def text(experiment: Experiment, width: int = 100) -> str:
    out = io.StringIO()
    experiment_terminal.write(experiment, out, width, colour=False)
    return out.getvalue()


def test_what_is_in_doubt_stands_first(experiment: Experiment) -> None:
    lines = text(experiment, 200).splitlines()
    assert "56 of 60 runs" in lines[0]
    warnings = [line for line in lines if line.startswith("! ")]
    assert lines[1 : 1 + len(warnings)] == warnings
    told = "\n".join(warnings)
    assert "4 runs are still to be made" in told
    assert "1 of 9 runs left out (page cache of the model's files: 40.0 % cached, not" in told
    assert "mount options of a changed during the experiment: rw, then ro" in told


def test_a_busy_machine_is_told_of_the_runs_that_figures_rest_on(tmp_path: Path) -> None:
    """Not of warm-ups, nor of failures that were asked for."""
    made = plan(scenarios=["resident", "unknown-model"], runs=6, warmups=1)
    busy = {"busy": 0.5}
    folder = stored(
        tmp_path / "x",
        made,
        lambda slot: result({"load": 1e8}, rest=busy if slot.block < 4 else {}),
    )
    told = " ".join(text(evaluate(folder), 200).split())
    assert "before 3 of the 6 runs that are timed and count the machine was busy" in told


def test_what_to_know_stands_before_the_figures(experiment: Experiment) -> None:
    shown = text(experiment, 200)
    brief = shown[shown.index("in short") : shown.index("condition")]
    assert "expected cold-switch, readahead=1024: ttft lower by at least 20 %: confirmed." in brief
    assert "cold-switch, readahead=128 against resident: slower by" in brief
    assert "it began with load" in brief
    assert "most would be gained by this: " in brief


def test_how_it_was_measured_is_told_for_who_doubts_it(experiment: Experiment) -> None:
    told = " ".join(text(experiment).split())
    assert "shuffled by seed 1" in told
    assert "p corrected (Holm) for all that is asked of all conditions together" in told


def test_the_findings_are_sentences(experiment: Experiment) -> None:
    shown = " ".join(text(experiment).split())
    assert "cold-switch, readahead=1024 against readahead=128: faster by" in shown
    assert "it began with load, which shrank by" in shown
    assert "ttft lower by at least 20 %: confirmed. −" in shown
    assert re.search(
        r"killed-mid-load, readahead=128: \d+ × gone; answered again after 300.0 ms", shown
    )
    assert re.search(r"1\. keep .* saves|1\. adopt readahead=1024: saves", shown)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_line_is_too_wide_and_nothing_steers_the_terminal(
    experiment: Experiment, width: int
) -> None:
    shown = text(experiment, width)
    assert max(map(len, shown.splitlines())) <= width
    assert "\x1b" not in shown


def test_json_satisfies_its_schema(experiment: Experiment) -> None:
    out = io.StringIO()
    experiment_json.write(experiment, out)
    document = json.loads(out.getvalue())
    jsonschema.Draft202012Validator.check_schema(experiment_json.schema())
    jsonschema.validate(document, experiment_json.schema())
    assert out.getvalue().isascii()
    assert out.getvalue().count("\n") == 1
    runs = [run for c in document["conditions"] for run in c["runs"]]
    assert sorted(run["run"] for run in runs) == list(range(1, 57))
    change = next(c for c in document["changes"] if c["other"]["scenario"] == "cold-switch")
    assert change["blamed"] == "load"
    assert change["metrics"]["load"]["interval"]["high"] < 0


class Page(HTMLParser):
    """What of the page matters here."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_draws_every_run_and_asks_for_nothing(experiment: Experiment) -> None:
    out = io.StringIO()
    experiment_html.write(experiment, out)
    page = Page(out.getvalue())
    assert not [tag for tag, _ in page.tags if tag in ("script", "img", "link", "iframe")]
    assert not [a for _, a in page.tags if any(n in a for n in ("src", "href", "onclick"))]
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    points = [a for tag, a in page.tags if tag == "ellipse"]
    timed = [c for c in experiment.findings.conditions if not c.is_failure]
    assert len(points) == 2 * sum(len(c.runs) for c in timed)  # by length, and by order
    assert re.search(
        r"~\d+\.\d ms \(\d+\.\d ms to \d+\.\d ms\)", page.text
    )  # p95 with its interval
    hollow = [a for a in points if "hollow" in (a["class"] or "")]
    assert len(hollow) == 2 * sum(len(c.runs) - len(c.counted) for c in timed) == 2
    for heading in ("In the order of the runs", "Where it went", "every run", "confirmed"):
        assert heading in page.text


def test_an_experiment_without_a_run_has_reports_too(tmp_path: Path) -> None:
    made = plan(scenarios=["resident"], runs=2)
    empty = evaluate(stored(tmp_path / "x", made, make, leave=2))
    assert "0 of 2 runs" in text(empty)
    out = io.StringIO()
    experiment_html.write(empty, out)
    jsonschema.validate(experiment_json.as_json(empty), experiment_json.schema())


def test_recorded_traffic_is_played_in_every_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost of each state comes from the experiment, who asks and when from the recording."""

    def waits(slot: Slot) -> dict[str, Any]:
        load = {"cold-switch": 9e8, "re-switch": 2e8, "resident": 0.0}[slot.scenario]
        return result({"load": load, "prefill": 1e8})

    made = plan(scenarios=["cold-switch", "re-switch", "resident"], runs=6)
    folder = stored(tmp_path / "x", made, waits)
    traffic = replace(cold(), host={"memory_bytes": 8})
    monkeypatch.setattr(evaluation, "analyse", lambda *_, **__: traffic)
    played = evaluate(folder, [tmp_path / "traffic.ttft"])
    one, *_ = played.policies
    assert (one.policy.name, one.requests) == ("one model at a time", 1)
    assert one.mean_ns == pytest.approx(1e8 + 9e8 * WEIGHTS_BYTES / 50_000_000)  # a cold load
    assert "the recorded traffic under other policies" in text(played)
    out = io.StringIO()
    experiment_html.write(played, out)
    assert "one model at a time" in Page(out.getvalue()).text
    document = experiment_json.as_json(played)
    jsonschema.validate(document, experiment_json.schema())
    assert [p["policy"] for p in document["policies"]][:2] == [
        "one model at a time", "all models resident",
    ]  # fmt: skip


def test_traffic_without_a_measured_switch_cannot_be_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(scenarios=["resident"], runs=2)
    folder = stored(tmp_path / "x", made, make)
    monkeypatch.setattr(evaluation, "analyse", lambda *_, **__: cold())
    with pytest.raises(UsageError, match="no switch was measured"):
        evaluate(folder, [tmp_path / "traffic.ttft"])


def test_traffic_is_not_played_by_a_size_that_nobody_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that were not recorded tell no size of their model; the traffic may."""

    def waits(slot: Slot) -> dict[str, Any]:
        return result(None, value_ns=10**8 if slot.scenario == "resident" else 10**9)

    model = cold().requests[0].model
    assert model is not None
    monkeypatch.setattr(evaluation, "analyse", lambda *_, **__: replace(cold(), host={}))
    for name in ("other", model):
        server = {"url": "http://h:1", "models": [name, "b"]}
        made = plan(scenarios=["cold-switch", "resident"], runs=6, server=server)
        folder = stored(tmp_path / Path(name).name, made, waits)
        if name == model:
            one, *_ = evaluate(folder, [tmp_path / "traffic.ttft"]).policies
            assert one.mean_ns == pytest.approx(1e9)
        else:
            with pytest.raises(UsageError, match="nothing tells how large 'other' is"):
                evaluate(folder, [tmp_path / "traffic.ttft"])


def test_what_is_true_of_several_conditions_is_said_once(tmp_path: Path) -> None:
    made = plan(scenarios=["cold-switch", "re-switch", "resident"], runs=2)
    few = evaluate(stored(tmp_path / "x", made, lambda _: result({"prefill": 1e8})))
    shown = " ".join(text(few).split())
    assert "cold-switch; re-switch against resident: too few runs to say: 2 on the" in shown
    assert shown.count("too few runs to say") == 1
