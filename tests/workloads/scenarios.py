"""Named scenarios: prepare the state, let a profiler attach, switch, give back the truth.

    run = run_scenario("cold_mmap_short", workdir, before_switch=attach, after=detach)
    run.truth.edges, run.client.ttft_ns, run.server_pid

Names say cache state, way of loading and prompt length; `dominant` is the phase it is about.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from .build import WorkloadError, build_library
from .cache import drop_cache, make_model, residency, warm_cache
from .client import ChatRequest, ClientResult, chat
from .config import MIB, MS, LoadMode, ModelConfig, ServerConfig
from .server import Server, pick_port, router, supervised
from .truth import TruthRequest, await_truth

Hook = Callable[[int], None]
Drive = Literal["switch", "resident", "queued", "queued_switch", "restart"]

SHORT_TOKENS = 34
LONG_TOKENS = 1419
# Neither is a multiple of the page or of the read size, so that tails are tested too.
WEIGHTS_A_BYTES = 96 * MIB + 7919
WEIGHTS_B_BYTES = 640 * MIB + 104729
_SMALL_B_BYTES = 96 * MIB + 104729  # where the load is not what it is about
_TINY_B_BYTES = 32 * MIB + 104729
_SETTLE_S = 0.1
_AHEAD_S = 0.2  # how long the request in front has been at work when the queued one is sent

_A = ModelConfig(load_mode="read", init_ns=5 * MS, prefill_ns_per_token=MS // 2)
_B = ModelConfig(launch_ns=5 * MS)


@dataclass(frozen=True)
class Scenario:
    name: str
    about: str
    dominant: str
    drive: Drive = "switch"
    cold: bool = False
    a: ModelConfig = _A
    b: ModelConfig = _B
    weights_b_bytes: int = WEIGHTS_B_BYTES
    prompt_tokens: int = SHORT_TOKENS
    stream: bool = True
    health_quantum_ns: int = 20 * MS
    markers: bool = True
    logs: bool = True

    @property
    def measured_model(self) -> str:
        return "a" if self.drive in ("resident", "queued") else "b"


@dataclass(frozen=True)
class ScenarioRun:
    """What one run left: the measured request first, everything else beside it."""

    scenario: Scenario
    server_pid: int
    port: int
    truth: TruthRequest
    client: ClientResult
    all_truth: list[TruthRequest]
    all_clients: list[ClientResult]
    model_path: Path  # the measured model's weights
    residency_before: float  # of that file, before the request
    truth_path: Path
    log_path: Path
    config: ServerConfig = field(repr=False)


def _loading(
    mode: LoadMode, *, launch_ns: int = 5 * MS, prefill_ns_per_token: int = MS
) -> ModelConfig:
    return replace(
        _B, load_mode=mode, launch_ns=launch_ns, prefill_ns_per_token=prefill_ns_per_token
    )


_ALL = [
    Scenario(
        "cold_mmap_short",
        "weights touched in order through a mapping, from storage",
        "load",
        cold=True,
        b=_loading("mmap"),
    ),
    Scenario(
        "warm_mmap_short",
        "the same from the page cache: only starting up is left",
        "launch",
        b=_loading("mmap", launch_ns=300 * MS),
        weights_b_bytes=_SMALL_B_BYTES,
    ),
    Scenario(
        "cold_read_short",
        "1-MiB read() calls into memory, from storage",
        "load",
        cold=True,
        b=_loading("read"),
    ),
    Scenario(
        "warm_read_short",
        "the same from the page cache",
        "launch",
        b=_loading("read", launch_ns=400 * MS),
        weights_b_bytes=_SMALL_B_BYTES,
    ),
    Scenario(
        "cold_mmap_long",
        "cold, but the prompt costs more than the load",
        "prefill",
        cold=True,
        b=_loading("mmap", prefill_ns_per_token=MS // 2),
        prompt_tokens=LONG_TOKENS,
        weights_b_bytes=_SMALL_B_BYTES,
    ),
    Scenario(
        "warm_read_long",
        "warm, long prompt in several decodes, one JSON answer instead of a stream",
        "prefill",
        b=_loading("read", prefill_ns_per_token=MS // 2),
        prompt_tokens=LONG_TOKENS,
        stream=False,
        weights_b_bytes=_SMALL_B_BYTES,
    ),
    Scenario(
        "slow_init",
        "device context, graph capture and the like after the weights are there",
        "init",
        b=replace(_B, init_ns=600 * MS),
        weights_b_bytes=_SMALL_B_BYTES,
    ),
    Scenario(
        "slow_evict",
        "the old runner takes its time to end",
        "evict",
        a=replace(_A, compute="sleep", evict_delay_ns=600 * MS),
        weights_b_bytes=_SMALL_B_BYTES,
    ),
    Scenario(
        "queued",
        "one slot, and somebody else's answer is being decoded in it",
        "queue",
        drive="queued",
        weights_b_bytes=_SMALL_B_BYTES,
    ),
    Scenario(
        "lazy_mmap",
        "mapped only: storage is waited for inside the first prefill",
        "prefill",
        cold=True,
        b=replace(_B, load_mode="lazy", warmup=False),
    ),
    Scenario(
        "populate_mmap",
        "MAP_POPULATE: the whole file inside one mmap() call",
        "load",
        cold=True,
        b=_loading("populate"),
    ),
    Scenario(
        "single_restart_backlog",
        "the server is restarted with another model; the request waits in the listen backlog",
        "load",
        drive="restart",
        cold=True,
        b=_loading("read", launch_ns=50 * MS),
    ),
    Scenario(
        "resident_warm",
        "no switch at all",
        "prefill",
        drive="resident",
        prompt_tokens=400,
        weights_b_bytes=_SMALL_B_BYTES,
    ),
    Scenario(
        "queued_switch",
        "the other model has to finish an answer before it can be evicted",
        "queue",
        drive="queued_switch",
        weights_b_bytes=_SMALL_B_BYTES,
    ),
    Scenario(
        "direct_read",
        "O_DIRECT: the page cache is neither used nor filled",
        "load",
        b=_loading("direct"),
    ),
    Scenario(
        "random_mmap",
        "MADV_RANDOM: one page per request, no readahead",
        "load",
        cold=True,
        b=_loading("random"),
        weights_b_bytes=_TINY_B_BYTES,
    ),
    Scenario(
        "lazy_mmap_warmup",
        "mapped only, and the warm-up run pays for it before the server is ready",
        "init",
        cold=True,
        b=_loading("lazy"),
    ),
    Scenario(
        "slow_launch",
        "imports and device discovery",
        "launch",
        b=replace(_B, launch_ns=500 * MS),
        weights_b_bytes=_SMALL_B_BYTES,
    ),
    Scenario(
        "slow_poll",
        "ready long before the front looks again",
        "ready_gap",
        b=replace(_B, compute="sleep"),
        weights_b_bytes=_TINY_B_BYTES,
        health_quantum_ns=700 * MS,
    ),
    Scenario(
        "slow_first_text",
        "tokens are decoded that show no text yet",
        "first_decode",
        b=replace(_B, silent_tokens=400),
        weights_b_bytes=_SMALL_B_BYTES,
    ),
    Scenario(
        "plain_names",
        "cold mmap by a library whose names no profiler knows, and no logs",
        "load",
        cold=True,
        b=_loading("mmap"),
        markers=False,
        logs=False,
    ),
]
SCENARIOS = {scenario.name: scenario for scenario in _ALL}


def run_scenario(
    name: str | Scenario,
    workdir: Path,
    *,
    before_switch: Hook | None = None,
    after: Hook | None = None,
    port: int = 0,
) -> ScenarioRun:
    """Run one scenario in `workdir` (model files there are kept and reused by later runs).

    `before_switch(server_pid)` runs when the state is prepared and nothing is in flight;
    `after(server_pid)` when the answers are complete and the server still lives. The pid is the
    router's, or for a restarted server its supervisor's. `port` 0 takes a free one.
    """
    scenario = SCENARIOS[name] if isinstance(name, str) else name
    config, run_dir = _prepare_files(scenario, workdir, port or pick_port())
    with _resident_a(scenario, config, run_dir) as server:
        time.sleep(_SETTLE_S)
        measured = Path(config.models[scenario.measured_model].path)
        before = _prepare_cache(scenario, measured)
        if before_switch is not None:
            before_switch(server.pid)
        clients = _drive(scenario, server)
        requests = await_truth(config.truth_path, {client.request_id for client in clients})
        if after is not None:
            after(server.pid)
        return ScenarioRun(
            scenario=scenario,
            server_pid=server.pid,
            port=server.port,
            truth=next(request for request in requests if request.request_id == "measured"),
            client=next(client for client in clients if client.request_id == "measured"),
            all_truth=requests,
            all_clients=clients,
            model_path=measured,
            residency_before=before,
            truth_path=Path(config.truth_path),
            log_path=server.log_path,
            config=config,
        )


def _prepare_files(scenario: Scenario, workdir: Path, port: int) -> tuple[ServerConfig, Path]:
    run_dir = workdir / f"{scenario.name}.{time.monotonic_ns()}"
    run_dir.mkdir(parents=True)
    a = make_model(workdir / "a.weights", WEIGHTS_A_BYTES)
    b = make_model(workdir / f"b-{scenario.weights_b_bytes}.weights", scenario.weights_b_bytes)
    library = build_library(workdir / "build", markers=scenario.markers)
    config = ServerConfig(
        models={"a": replace(scenario.a, path=str(a)), "b": replace(scenario.b, path=str(b))},
        library_path=str(library),
        truth_path=str(run_dir / "truth.jsonl"),
        port=port,
        markers=scenario.markers,
        health_quantum_ns=scenario.health_quantum_ns,
        logs=scenario.logs,
    )
    return config, run_dir


@contextmanager
def _resident_a(scenario: Scenario, config: ServerConfig, run_dir: Path) -> Iterator[Server]:
    """A server in which model a has just answered somebody."""
    start = supervised if scenario.drive == "restart" else router
    with start(config, run_dir) as server:
        if scenario.drive == "restart":
            server.restart("a")
        _ask(server, "a", "prepare", prompt_tokens=2, max_tokens=1)
        yield server


def _prepare_cache(scenario: Scenario, measured: Path) -> float:
    """The measured file's residency, 0..1, made what the scenario is about."""
    if scenario.cold:
        drop_cache(measured)
    elif scenario.b.load_mode != "direct":
        warm_cache(measured)
    return residency(measured)


def _drive(scenario: Scenario, server: Server) -> list[ClientResult]:
    if scenario.drive in ("queued", "queued_switch"):
        return _drive_queued(scenario, server)
    if scenario.drive == "restart":
        server.restart("b")
    return [_ask_measured(scenario, server)]


def _drive_queued(scenario: Scenario, server: Server) -> list[ClientResult]:
    ahead: list[ClientResult] = []

    def send_ahead() -> None:
        ahead.append(_ask(server, "a", "ahead", prompt_tokens=200, max_tokens=1300))

    thread = threading.Thread(target=send_ahead)
    thread.start()
    time.sleep(_AHEAD_S)
    measured = _ask_measured(scenario, server)
    thread.join()
    return [*ahead, measured]


def _ask_measured(scenario: Scenario, server: Server) -> ClientResult:
    return _ask(
        server,
        scenario.measured_model,
        "measured",
        prompt_tokens=scenario.prompt_tokens,
        stream=scenario.stream,
    )


def _ask(
    server: Server,
    model: str,
    request_id: str,
    *,
    prompt_tokens: int,
    max_tokens: int = 8,
    stream: bool = True,
) -> ClientResult:
    request = ChatRequest(server.port, model, request_id, prompt_tokens, max_tokens, stream)
    result = chat(request)
    if result.outcome != "ok":
        raise WorkloadError(
            f"{request_id}: {result.outcome} (status {result.status}); see {server.log_path}"
        )
    return result
