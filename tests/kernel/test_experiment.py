"""Whole experiments, recorded: against the truth workload, and with the real llama-server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest

from lab.llama_server import BINARY, free_port
from lab.make_model import make_models
from ttftprof.analysis import analyse
from ttftprof.experiment.state import readahead_of
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


SIDE = 6  # runs of each variant: the fewest that can tell a change, and its phase


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A cold switch under two settings of the truth server; in the second, init takes 15 % more."""
    folder = tmp_path_factory.mktemp("planted")
    truth = truth_server(folder, SLEEPER)
    slower = {
        name: replace(model, init_ns=model.init_ns * 115 // 100)
        for name, model in truth.config.models.items()
    }
    save_config(replace(truth.config, models=slower), folder / "slower.json")
    plan = truth.plan(
        f"runs = {SIDE}\nwarmups = 1\ngap_s = 0.05\nscenarios = ['cold-switch']",
        files_of(truth),
        f"[vary]\nconfig = ['{truth.config_path}', '{folder / 'slower.json'}']\n"
        "[[expect]]\nmetric = 'init'\ndirection = 'higher'\nat_least = '10%'",
        first_in_line=True,
    ).replace(f"--config {truth.config_path}", "--config {config}")
    return folder / "x.bench", bench(folder, plan)


def files_of(truth: Truth) -> str:
    inner = ", ".join(f"{name} = '{model.path}'" for name, model in truth.config.models.items())
    return f"files = {{ {inner} }}"


def test_a_slower_phase_that_was_planted_is_found(planted: tuple[Path, dict[str, Any]]) -> None:
    _, report = planted
    (change,) = report["changes"]
    assert change["metrics"]["init"]["beyond_noise"], change["sentence"]
    assert change["metrics"]["init"]["shift"] == pytest.approx(75 * MS, abs=30 * MS)
    assert change["blamed"] in ("init", None), change["sentence"]  # None: hidden by noise elsewhere
    (expectation,) = report["expectations"]
    # On a busy machine six runs a side may not tell 15 % from the 10 that are expected at least.
    assert expectation["verdict"] in ("confirmed", "undecided"), expectation


def test_the_clients_stamps_agree_with_the_probes(planted: tuple[Path, dict[str, Any]]) -> None:
    """The first token as the server's socket sent it, and as the client received it."""
    folder, _ = planted
    with Store.read(folder) as store:
        kept = [one for one in store.kept() if not one.slot.warmup]
    sent = [one.result["digest"]["first_token_ns"] for one in kept]
    received = [one.result["answers"][0]["first_token_ns"] for one in kept]
    late = sorted(there - here for here, there in zip(sent, received, strict=True))
    assert len(late) == 2 * SIDE
    assert late[0] >= 0  # nothing is received before it is sent
    assert statistics.median(late) <= STAMP_ERROR_NS, late
    waits = [
        abs(one.result["digest"]["ttft_ns"] - one.result["answers"][0]["ttft_ns"]) for one in kept
    ]
    assert statistics.median(waits) <= STAMP_ERROR_NS, sorted(waits)


def test_every_run_counts_and_nothing_of_the_talk_is_kept(
    planted: tuple[Path, dict[str, Any]],
) -> None:
    folder, report = planted
    for found in report["conditions"]:
        assert found["counted"] == SIDE, found["not_counted"]
        assert found["not_counted"] == {"warm-up": 1}
        for run in found["runs"]:
            assert {c["what"] for c in run["checks"]} >= {"page cache of the model's files"}
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert b"winter bridge" not in data  # words of the prompts
            assert b"tok0" not in data  # and of the answers


def test_a_state_that_cannot_be_had_is_left_out_and_one_that_passes_by_itself_is_seen(
    tmp_path: Path,
) -> None:
    """A server as Ollama is: it keeps one model, and gives that up when nobody asks. Files are not
    named: they are seen."""
    truth = truth_server(tmp_path, replace(SLEEPER, init_ns=100 * MS), size=24 << 20)
    save_config(replace(truth.config, style="ollama", keep_alive_ns=800 * MS), truth.config_path)
    report = bench(
        tmp_path,
        truth.plan(
            "runs = 1\nwarmups = 0\ngap_s = 0.05\nscenarios = ['dual-resident', 'idle-expired']",
            "api = 'ollama'",
            "[workload]\nidle_s = 1.5",
        ).replace("workloads.front", "workloads.ollama"),
    )
    dual = condition(report, "dual-resident")
    assert list(dual["not_counted"]) == ["the request needed: a load, not no load"]
    assert dual["summaries"] == {}
    idle = condition(report, "idle-expired")
    assert idle["counted"] == 1, idle["not_counted"]
    assert idle["mean_phases"]["init"] >= 100 * MS


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


# -- the real llama-server ------------------------------------------------------------------------

QUICK_ENGINE = ["--ctx-size", "1024", "--threads", "1", "--parallel", "2", "--no-ui"]


@pytest.fixture(scope="module")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models a and b, so small that loading and asking them costs little."""
    return make_models(tmp_path_factory.mktemp("small"), size_mb=12, layers=2)


def engine_plan(
    experiment: str,
    models: Path | str,
    resident: int = 1,
    binary: Path | str = BINARY,
    server: str = "",
    rest: str = "",
) -> str:
    """A plan that starts the real server, and measures b."""
    port = free_port()
    command = [str(binary), "--models-dir", str(models), "--models-max", str(resident)]
    command += [*QUICK_ENGINE, "--host", "127.0.0.1", "--port", str(port)]
    return (
        f"[experiment]\nwarmups = 0\ngap_s = 0.05\n{experiment}\n"
        f"[server]\nurl = 'http://127.0.0.1:{port}'\nmodels = ['b', 'a']\n"
        f"command = {json.dumps(command)}\n{server}\n"
        "[workload]\nprompt_tokens = 12\nlong_prompt_tokens = 80\ntoo_long_tokens = 2000\n"
        f"max_tokens = 2\nconcurrency = [2]\ngive_up_s = 0.05\nkill_after_s = 0.01\n{rest}\n"
    )


@pytest.mark.engine
def test_the_real_server(small_models: Path, tmp_path: Path) -> None:
    """Four scenarios, five runs of each: a cold and a cached switch, a resident model with a short
    and with a long prompt. The machine may be busy: what is asserted does not hang on a few ms."""
    scenarios = ["cold-switch", "re-switch", "resident", "long-prompt"]
    report = bench(tmp_path, engine_plan(f"runs = 5\nscenarios = {scenarios}", small_models))
    assert report["engine"].startswith("llama.cpp")
    for scenario in scenarios:
        found = condition(report, scenario)
        assert found["counted"] == 5, found["not_counted"]
        for run in found["runs"]:
            checks = {check["what"]: check for check in run["checks"]}
            assert checks["page cache of the model's files"]["how"] in ("cachestat", "mincore")
            assert checks["prompt cache"]["met"]
            assert checks["model b"]["how"] == "llama-router API"
    size = (small_models / "b.gguf").stat().st_size
    cold, cached = condition(report, "cold-switch"), condition(report, "re-switch")
    assert cold["summaries"]["storage_bytes"]["median"]["value"] == pytest.approx(size, rel=0.02)
    assert cached["summaries"]["storage_bytes"]["most"] < size * 0.02
    causes = {c["other"]["scenario"]: c for c in report["causes"]}
    assert causes["cold-switch"]["metrics"]["ttft"]["shift"] > 0
    assert causes["cold-switch"]["metrics"]["init"]["shift"] > 0
    long = causes["long-prompt"]
    assert long["metrics"]["prefill"]["shift"] > 0
    assert long["blamed"] in ("prefill", None), long["sentence"]  # None: hidden by other work
    if long["metrics"]["ttft"]["beyond_noise"]:
        assert any("limit the prompt's length" in one["change"] for one in report["advice"])


FAILED = {
    "unknown-model": {"rejected", "failed"},
    "context-too-long": {"rejected", "failed"},
    "killed-mid-load": {"failed", "gone", "rejected", "refused", "empty"},
    "client-timeout": {"timeout"},
}
ANSWERED = ["dual-resident", "concurrency-2", "restart", "cold-restart"]


@pytest.mark.engine
def test_every_other_scenario_of_the_real_server(small_models: Path, tmp_path: Path) -> None:
    """Both models in memory, several at once, restarts; failures, each with its recovery."""
    scenarios = [*(name.removesuffix("-2") for name in ANSWERED), *FAILED]
    plan = engine_plan(f"runs = 1\nscenarios = {scenarios}", small_models, resident=2)
    report = bench(tmp_path, plan)
    for name in ANSWERED:
        found = condition(report, name)
        assert found["counted"] == 1, (name, found["not_counted"])
    assert len(condition(report, "concurrency-2")["runs"][0]["answers"]) == 2
    size = (small_models / "b.gguf").stat().st_size
    read = {
        name: condition(report, name)["runs"][0]["values"]["storage_bytes"]
        for name in ("restart", "cold-restart")
    }
    assert read["restart"] < size * 0.02
    assert read["cold-restart"] >= size * 0.98
    for name, outcomes in FAILED.items():
        failed = condition(report, name)
        assert set(failed["outcomes"]) <= outcomes, name
        assert failed["counted"] == 1, (name, failed["not_counted"])
        assert failed["not_recovered"] == 0
        assert failed["runs"][0]["recovery"]["outcome"] == "ok"


@pytest.mark.engine
def test_a_prompt_cache_that_is_kept_is_used_by_the_servers_word(
    small_models: Path, tmp_path: Path
) -> None:
    """Also of a long prompt, which is asked for before it is measured."""
    scenarios = ["resident", "long-prompt"]
    experiment = f"runs = 1\nrecord = false\nscenarios = {scenarios}"
    report = bench(tmp_path, engine_plan(experiment, small_models, rest="prompt_cache = 'keep'"))
    for found in report["conditions"]:
        assert found["counted"] == 1, (found["scenario"], found["not_counted"])
        (run,) = found["runs"]
        (check,) = [c for c in run["checks"] if c["what"] == "prompt cache"]
        assert (check["wanted"], check["met"]) == ("used", True)
        for answer in run["answers"]:
            assert answer["cached_tokens"] > answer["prompt_tokens"] / 2


@pytest.mark.engine
def test_every_kind_of_factor_takes_force_alone(small_models: Path, tmp_path: Path) -> None:
    """Read-ahead, mmap, arguments, mount, engine: each differs from the base in that only, by what
    each run noted of itself. What was changed on the machine is put back."""
    engine = other_engine(tmp_path)
    with mounted_copy(small_models, tmp_path) as elsewhere:
        before = readahead_of(str(small_models / "b.gguf")), readahead_of(str(elsewhere / "b.gguf"))
        plan = engine_plan(
            "runs = 1\nscenarios = ['cold-switch']",
            "{disk}",
            binary="{engine}",
            server="files = { a = '{disk}/a.gguf', b = '{disk}/b.gguf' }",
            rest="[vary]\nreadahead = [4096, 64]\nmmap = ['on', 'off']\n"
            "argv = ['', '--no-warmup']\n"
            f"disk = ['{elsewhere}', '{small_models}']\nengine = ['{BINARY}', '{engine}']",
        )
        report = bench(tmp_path, plan)
        after = readahead_of(str(small_models / "b.gguf")), readahead_of(str(elsewhere / "b.gguf"))
    assert before == after
    with Store.read(tmp_path / "x.bench") as store:
        prints = {one.slot.variant: one.result["fingerprint"] for one in store.kept()}
    assert all(c["counted"] == 1 for c in report["conditions"])
    base = prints.pop(report["changes"][0]["base"]["variant"])
    changed = {
        variant: {name for name in base if found[name] != base[name]}
        for variant, found in prints.items()
    }
    parts = ("file of", "content of", "mount of", "mount options of")  # read-ahead is held
    of_mount = {f"{part} {model}" for part in parts for model in "ab"}
    assert changed["readahead=64"] == {"read-ahead of a", "read-ahead of b"}
    assert changed["mmap=off"] == changed["argv=--no-warmup"] == {"server's command"}
    assert changed[f"engine={engine}"] == {"server's command", "server's program"}
    assert changed[f"disk={small_models}"] == {"server's command", *of_mount}
    assert "--no-mmap" in prints["mmap=off"]["server's command"]
    assert {c["sentence"].partition(":")[0] for c in report["changes"]} == {"too few runs to say"}


def other_engine(folder: Path) -> Path:
    """A second installation of the server: the same program in a file of its own."""
    (command,) = (line for line in BINARY.read_text().splitlines() if line.startswith("exec "))
    packages = BINARY.resolve().parent / "packages"
    program = Path(command.split()[1].strip('"').replace("$packages", str(packages)))
    shutil.copy(program, folder / "llama-server")
    other = folder / "other-engine"
    text = BINARY.read_text().replace(command, f'exec "{folder}/llama-server" "$@"')
    other.write_text(text.replace('$(dirname "$(readlink -f "$0")")/packages', str(packages)))
    other.chmod(0o755)
    return other


@contextmanager
def mounted_copy(models: Path, folder: Path) -> Iterator[Path]:
    """The models on a file system of their own."""
    image, point = folder / "image", folder / "elsewhere"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True)
    try:
        for path in models.glob("*.gguf"):
            shutil.copy(path, point)
        os.sync()
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)
