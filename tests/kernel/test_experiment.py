"""Whole experiments, recorded: against the truth workload, and with the real llama-server."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest

from lab.llama_server import BINARY, COMMON, free_port
from ttftprof.analysis import analyse
from ttftprof.experiment.store import Store
from ttftprof.reports.experiment_json import schema
from workloads.config import MS, ModelConfig, save_config
from workloads.experiment import Truth, truth_server

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

STAMP_ERROR_NS = 1_000_000


def bench(folder: Path, plan: str, *options: str, timeout_s: float = 300) -> dict[str, Any]:
    """Runs a plan; its report, which satisfies the schema."""
    path = folder / "plan.toml"
    path.write_text(plan)
    command = [sys.executable, "-m", "ttftprof", "bench", str(path), "-o", str(folder / "x.bench")]
    done = subprocess.run(
        [*command, "--format", "json", *options],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    jsonschema.validate(report, schema())
    return report


def condition(report: dict[str, Any], scenario: str, variant: str = "as given") -> dict[str, Any]:
    found: dict[str, Any] = next(
        c for c in report["conditions"] if (c["scenario"], c["variant"]) == (scenario, variant)
    )
    return found


SLEEPER = ModelConfig(
    load_mode="read", compute="sleep", launch_ns=MS, init_ns=500 * MS, prefill_ns_per_token=MS
)


@pytest.fixture(scope="module")
def side(is_long: bool) -> int:
    """Runs of each variant: three show that stamps and counts agree, eight tell a change."""
    return 8 if is_long else 3


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, side: int) -> tuple[Path, dict[str, Any]]:
    """A cold switch under two settings of the truth server; in the second, init takes 15 % more."""
    folder = tmp_path_factory.mktemp("planted")
    truth = truth_server(folder, SLEEPER)
    slower = {
        name: replace(model, init_ns=model.init_ns * 115 // 100)
        for name, model in truth.config.models.items()
    }
    save_config(replace(truth.config, models=slower), folder / "slower.json")
    plan = truth.plan(
        f"runs = {side}\nwarmups = 1\ngap_s = 0.05\nscenarios = ['cold-switch']",
        files_of(truth),
        f"[vary]\nconfig = ['{truth.config_path}', '{folder / 'slower.json'}']\n"
        "[[expect]]\nmetric = 'init'\ndirection = 'higher'\nat_least = '10%'",
    ).replace(f"--config {truth.config_path}", "--config {config}")
    return folder / "x.bench", bench(folder, plan)


def files_of(truth: Truth) -> str:
    inner = ", ".join(f"{name} = '{model.path}'" for name, model in truth.config.models.items())
    return f"files = {{ {inner} }}"


@pytest.mark.long
def test_a_slower_phase_that_was_planted_is_found(planted: tuple[Path, dict[str, Any]]) -> None:
    _, report = planted
    (change,) = report["changes"]
    assert change["metrics"]["init"]["beyond_noise"], change["sentence"]
    assert change["metrics"]["init"]["shift"] == pytest.approx(75 * MS, abs=30 * MS)
    assert change["blamed"] in ("init", None), change["sentence"]  # None: hidden by noise elsewhere
    assert [one["verdict"] for one in report["expectations"]] == ["confirmed"]


def test_the_clients_stamps_agree_with_the_probes(
    planted: tuple[Path, dict[str, Any]], side: int
) -> None:
    """The first token as the server's socket sent it, and as the client received it."""
    folder, _ = planted
    with Store.read(folder) as store:
        kept = [one for one in store.kept() if not one.slot.warmup]
    sent = [one.result["digest"]["first_token_ns"] for one in kept]
    received = [one.result["answers"][0]["first_token_ns"] for one in kept]
    late = sorted(there - here for here, there in zip(sent, received, strict=True))
    assert len(late) == 2 * side
    assert late[0] >= 0  # nothing is received before it is sent
    assert statistics.median(late) <= STAMP_ERROR_NS, late
    waits = [
        abs(one.result["digest"]["ttft_ns"] - one.result["answers"][0]["ttft_ns"]) for one in kept
    ]
    assert statistics.median(waits) <= STAMP_ERROR_NS, sorted(waits)


def test_every_run_counts_and_nothing_of_the_talk_is_kept(
    planted: tuple[Path, dict[str, Any]], side: int
) -> None:
    folder, report = planted
    for found in report["conditions"]:
        assert found["counted"] == side, found["not_counted"]
        assert found["not_counted"] == {"warm-up": 1}
        for run in found["runs"]:
            assert {c["what"] for c in run["checks"]} >= {"page cache of the model's files"}
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert b"winter bridge" not in data  # words of the prompts
            assert b"tok0" not in data  # and of the answers


def test_states_and_failures_of_the_truth_server(tmp_path: Path) -> None:
    """Files not named: they are seen. Cold is cold, a failure is kept, the server recovers."""
    truth = truth_server(tmp_path, replace(SLEEPER, init_ns=100 * MS), size=24 << 20)
    names = "'cold-switch', 'resident', 'dual-resident', 'killed-mid-load', 'client-timeout'"
    report = bench(
        tmp_path,
        truth.plan(
            f"runs = 1\nwarmups = 0\ngap_s = 0.05\nscenarios = [{names}]",
            rest="[workload]\ngive_up_s = 0.1\nkill_after_s = 0.15\ntimeout_s = 20",
        ),
    )
    cold = condition(report, "cold-switch")
    assert cold["counted"] == 1, cold["not_counted"]
    assert cold["runs"][0]["values"]["storage_bytes"] == pytest.approx(24 << 20, rel=0.01)
    assert condition(report, "resident")["counted"] == 1
    dual = condition(report, "dual-resident")  # this server keeps one model only
    assert list(dual["not_counted"]) == ["the request needed: a load, not no load"]
    for name, outcomes in (
        ("killed-mid-load", {"failed", "gone"}),
        ("client-timeout", {"timeout"}),
    ):
        failed = condition(report, name)
        assert set(failed["outcomes"]) <= outcomes
        assert failed["counted"] == 1, failed["not_counted"]
        assert failed["not_recovered"] == 0
        assert failed["runs"][0]["recovery"]["outcome"] == "ok"


def test_killed_while_it_records_nothing_is_left_behind(tmp_path: Path) -> None:
    """Neither a recorder nor the server, nor a run: the next bench goes on where this one was."""
    truth = truth_server(tmp_path, replace(SLEEPER, init_ns=MS))
    folder, plan = tmp_path / "x.bench", tmp_path / "plan.toml"
    text = truth.plan("runs = 4\nwarmups = 0\ngap_s = 0\nscenarios = ['resident']", files_of(truth))
    plan.write_text(text)
    command = [sys.executable, "-m", "ttftprof", "bench", str(plan), "-o", str(folder), "--quiet"]
    for number in (1, 2):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        recording = folder / f"runs/{number:05d}.ready"  # there while the probes are armed
        wait_until(recording.exists)
        process.kill()
        process.wait()
        wait_until(lambda: not processes_about(tmp_path))
        with Store.read(folder) as store:
            assert len(store.kept()) == number - 1
            # let one run end, so that the next kill falls into another
        finish_one(command, folder, number)
    report = bench(tmp_path, text)
    assert report["runs"] == {
        "scheduled": 4,
        "done": 4,
        "interrupted": report["runs"]["interrupted"],
    }
    assert report["runs"]["interrupted"] >= 2
    assert condition(report, "resident")["counted"] == 4
    with Store.read(folder) as store:
        for one in store.kept():
            assert analyse(store.recording(one.slot.run)).complete


def finish_one(command: list[str], folder: Path, number: int) -> None:
    """Runs on until that many runs have ended, then ends as by Ctrl-C."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def ended() -> bool:
        with Store.read(folder) as store:
            return len(store.kept()) >= number

    wait_until(ended)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0


def wait_until(holds: Callable[[], bool], timeout_s: float = 30) -> None:
    until = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def processes_about(folder: Path) -> list[str]:
    """Command lines of what still runs for this experiment."""
    return [
        " ".join(p.info["cmdline"])
        for p in psutil.process_iter(["cmdline"])
        if any(str(folder) in argument for argument in p.info["cmdline"] or ())
    ]


@pytest.mark.engine
def test_the_real_server(models_dir: Path, tmp_path: Path) -> None:
    """Four scenarios, five runs of each: a cold and a cached switch, a resident model with a short
    and with a long prompt. The machine may be busy: what is asserted does not hang on a few ms."""
    port = free_port()
    command = [str(BINARY), "--models-dir", str(models_dir), "--models-max", "1", *COMMON]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    plan = (
        "[experiment]\nruns = 5\nwarmups = 0\ngap_s = 0.05\n"
        "scenarios = ['cold-switch', 're-switch', 'resident', 'long-prompt']\n"
        f"[server]\nurl = 'http://127.0.0.1:{port}'\nmodels = ['b', 'a']\n"
        f"command = {json.dumps(command)}\n[workload]\nlong_prompt_tokens = 200\nmax_tokens = 2\n"
    )
    report = bench(tmp_path, plan)
    assert report["engine"].startswith("llama.cpp")
    for scenario in ("cold-switch", "re-switch", "resident", "long-prompt"):
        found = condition(report, scenario)
        assert found["counted"] == 5, found["not_counted"]
    size = (models_dir / "b.gguf").stat().st_size
    cold, cached = condition(report, "cold-switch"), condition(report, "re-switch")
    assert cold["summaries"]["storage_bytes"]["median"]["value"] == pytest.approx(size, rel=0.02)
    assert cached["summaries"]["storage_bytes"]["most"] < size * 0.02
    causes = {c["other"]["scenario"]: c for c in report["causes"]}
    assert causes["cold-switch"]["metrics"]["ttft"]["shift"] > 0
    assert causes["cold-switch"]["metrics"]["init"]["shift"] > 0
    assert causes["long-prompt"]["blamed"] == "prefill"
    assert any("limit the prompt's length" in one["change"] for one in report["advice"])
