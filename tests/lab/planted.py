"""Measures runs of the truth workload in which one phase was made 15 % longer, for simulations.

    python -m lab.planted FOLDER [--blocks N]

Makes three experiments in FOLDER by `ttftprof bench`, as root: cold switches in which what takes
time waits for a clock or for a file system of known speed, not for what a shared disk or core
happens to do; switches found ready by a poll; and requests behind others in one slot. In each block
every phase is slowed down once, beside a run as given (and, of the switches, a second such run).
An experiment that was interrupted goes on. When all are done, their runs are written to
`fixtures/experiment/planted.json`, which tests draw their simulations from.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernel.slow_fuse import compiled, mounted
from ttftprof.experiment.store import Kept, Store
from workloads.config import MIB, MS, ModelConfig, ServerConfig, save_config
from workloads.experiment import Truth, truth_server

OUT = Path(__file__).parents[1] / "fixtures/experiment/planted.json"
AS_GIVEN, AGAIN = "as given", "again"
LONGER = 1.15
_WEIGHTS_BYTES, _RATE, _DELAY_US = 24 * MIB, 50_000_000, 200

# Of a launch and an eviction only what is configured grows by 15 %, so the phase by less.
SWITCH = ModelConfig(
    load_mode="read",
    compute="sleep",
    launch_ns=500 * MS,
    fit_pass=False,
    kv_bytes=MIB,
    init_ns=400 * MS,
    warmup=False,  # its decodes would cost init more when prefill does
    prefill_ns_per_token=12 * MS,
    sample_ns=300 * MS,
)
QUICK = ModelConfig(
    load_mode="read", compute="sleep", kv_bytes=MIB, warmup=False, prefill_ns_per_token=10 * MS
)
# Found ready by the second look: the gap is what is left of the quantum.
POLLED = replace(QUICK, launch_ns=500 * MS, init_ns=100 * MS)
_POLL_NS, _GAP_NS = 1500 * MS, 600 * MS


Weights = Mapping[str, Path]  # of a file system of the usual speed, and of a slow one


def _longer(ns: int) -> int:
    return round(ns * LONGER)


def _with(server: ServerConfig, model: str, **changes: Any) -> ServerConfig:
    changed = replace(server.models[model], **changes)
    return replace(server, models={**server.models, model: changed})


def switches(folder: Path, weights: Weights) -> str:
    truth = truth_server(folder, SWITCH, replace(QUICK, evict_delay_ns=400 * MS))
    given = _with(truth.config, "a", path=str(weights["usual"]))
    planted = {
        AS_GIVEN: given,
        AGAIN: given,
        "evict": _with(given, "b", evict_delay_ns=_longer(400 * MS)),
        "launch": _with(given, "a", launch_ns=_longer(SWITCH.launch_ns)),
        "load": _with(given, "a", path=str(weights["slow"])),
        "init": _with(given, "a", init_ns=_longer(SWITCH.init_ns)),
        "prefill": _with(given, "a", prefill_ns_per_token=_longer(SWITCH.prefill_ns_per_token)),
        "first_decode": _with(given, "a", sample_ns=_longer(SWITCH.sample_ns)),
    }
    return _plan(folder, truth, "scenarios = ['cold-switch']", planted)


def polled(folder: Path, _: Weights) -> str:
    truth = truth_server(folder, POLLED, QUICK)
    given = replace(truth.config, health_quantum_ns=_POLL_NS)
    longer = replace(given, health_quantum_ns=_POLL_NS + round((LONGER - 1) * _GAP_NS))
    return _plan(folder, truth, "scenarios = ['re-switch']", {AS_GIVEN: given, "ready_gap": longer})


def queued(folder: Path, _: Weights) -> str:
    """The middle one of three waits for one answer: 34 tokens of a prompt and those of the text."""
    truth = truth_server(folder, QUICK)
    return truth.plan(
        f"{COMMON}\nscenarios = ['concurrency']\nbaseline = 'concurrency'",
        f"files = {{ a = '{folder}/a.weights', b = '{folder}/b.weights' }}",
        "[workload]\nconcurrency = [3]\n[vary]\n'request.max_tokens' = ['60', '74']",
        first_in_line=True,
    )


EXPERIMENTS: Mapping[str, Callable[[Path, Weights], str]] = {
    "switches": switches,
    "polled": polled,
    "queued": queued,
}
COMMON = "warmups = 1\ngap_s = 0.1\nruns = BLOCKS"


def _plan(folder: Path, truth: Truth, scenarios: str, planted: Mapping[str, ServerConfig]) -> str:
    """TOML of a plan whose variants are configurations, written into `folder` beside links to
    their weights."""
    for name, config in planted.items():
        save_config(config, folder / f"{name}.json")
        (folder / f"{name}.model").symlink_to(config.models["a"].path)
    text = truth.plan(
        f"{COMMON}\n{scenarios}",
        f"files = {{ a = '{folder}/{{planted}}.model', b = '{folder}/b.weights' }}",
        f"[vary]\nplanted = {json.dumps(list(planted))}",
        first_in_line=True,
    )
    return text.replace(str(truth.config_path), f"{folder}/{{planted}}.json")


@contextmanager
def file_systems(folder: Path) -> Iterator[Weights]:
    program = compiled(folder)
    with ExitStack() as stack:

        def mount(name: str, rate: float) -> Path:
            daemon = mounted(
                program,
                folder / name,
                size_bytes=_WEIGHTS_BYTES,
                delay_us=_DELAY_US,
                rate=round(rate),
            )
            return stack.enter_context(daemon).point / "model.gguf"

        yield {"usual": mount("usual", _RATE), "slow": mount("slow", _RATE / LONGER)}


def carry_out(name: str, folder: Path, weights: Weights, blocks: int) -> int:
    """Begins it, or goes on; the exit code of `ttftprof bench`."""
    folder.mkdir(exist_ok=True)
    plan = folder / "plan.toml"
    if not plan.exists():  # its port is the experiment's from then on
        text = EXPERIMENTS[name](folder, weights)
        plan.write_text(text.replace("BLOCKS", str(blocks)))
    command = [sys.executable, "-m", "ttftprof", "bench", str(plan), "-o", str(folder / "x.bench")]
    bench = subprocess.Popen([*command, "--format", "json"], stdout=subprocess.DEVNULL)
    try:
        return bench.wait()
    except KeyboardInterrupt:  # which it was told as well, and ends by
        return bench.wait()


def rows(name: str, kept: Sequence[Kept]) -> Iterator[dict[str, Any]]:
    """What simulations need of the runs that count."""
    for one in kept:
        result, slot = one.result, one.slot
        if slot.warmup or not (result["established"] and result["as_expected"]):
            continue
        if result["digest"] is None or "phases" not in result["digest"]:
            continue
        yield {
            "experiment": name,
            "planted": _NAMES.get(slot.variant, slot.variant.partition("=")[2]),
            "block": slot.block,
            "ttft": result["value_ns"],
            "phases": {phase: ns for phase, ns in result["digest"]["phases"].items() if ns},
        }


_NAMES = {"request.max_tokens=60": AS_GIVEN, "request.max_tokens=74": "queue"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="lab.planted")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--blocks", type=int, default=16)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    with file_systems(folder) as weights:
        for name in EXPERIMENTS:
            if code := carry_out(name, folder / name, weights, options.blocks):
                return code
            with Store.read(folder / name / "x.bench") as store:
                if store.left():
                    return 1  # interrupted
                found += rows(name, store.kept())
    lines = ",\n".join(json.dumps(row) for row in found)
    OUT.write_text(f"[\n{lines}\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
