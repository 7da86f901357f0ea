"""Named scenarios: prepare the state, let a profiler attach, switch, give back the truth.

    run = run_scenario("cold_mmap_short", workdir, before_switch=attach, after=detach)
    run.truth.edges, run.client.ttft_ns, run.server_pid

Names say cache state, way of loading and prompt length; `dominant` is the phase it is about.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from .build import WorkloadError, build_library, make_programs
from .cache import drop_cache, make_model, residency, warm_cache
from .client import ChatRequest, ClientResult, chat
from .config import MIB, MS, LoadMode, ModelConfig, ServerConfig, Style
from .server import Server, pick_port, router, supervised
from .truth import TruthRequest, await_truth

Hook = Callable[[int], None]
Drive = Literal[
    "switch",
    "resident",
    "queued",
    "queued_switch",
    "restart",
    "second",  # for b, while b is loaded for somebody else
    "other",  # for a, while b is loaded for somebody else
    "left",  # for b, after somebody who asked for b has hung up
    "crashed",  # for b, which had been there until it crashed
    "expired",  # for b, which had been there until nobody had used it for a while
    "back",  # for b, which had answered the same before a was asked for
]

SHORT_TOKENS = 34
LONG_TOKENS = 1419
# Neither is a multiple of the page or of the read size, so that tails are tested too.
WEIGHTS_A_BYTES = 96 * MIB + 7919
WEIGHTS_B_BYTES = 640 * MIB + 104729
_SMALL_B_BYTES = 96 * MIB + 104729  # where the load is not what it is about
_TINY_B_BYTES = 32 * MIB + 104729
_SUFFIXES = {  # what llama.cpp serves is told without any
    "llama.cpp": ".weights",
    "vllm": ".safetensors",
    "sglang": ".safetensors",
    "tgi": ".safetensors",
    "localai": ".gguf",
}
_SETTLE_S = 0.1
_END_TIMEOUT_S = 60.0
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
    style: Style = "router"
    path: str = "/v1/chat/completions"
    vram_lag_ns: int = 0
    keep_alive_ns: int = 0
    sleep_level: int = 1
    unix_backend: bool = False
    wrapper_ns: int = 0
    shards: int = 1
    same_weights: bool = False  # b is a with other settings
    ahead_tokens: int = 1300  # of the answer that is under way when the measured request comes

    @property
    def measured_model(self) -> str:
        return "a" if self.drive in ("resident", "queued", "other") else "b"

    @property
    def switches(self) -> bool:
        """Whether the measured request waits for a load."""
        return self.drive not in ("resident", "queued")


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
        "wrapped_exec",
        "the runner is executed by a shell in its own place, which waits first",
        "launch",
        b=replace(_B, launch_ns=100 * MS),
        weights_b_bytes=_SMALL_B_BYTES,
        wrapper_ns=200 * MS,
    ),
    Scenario(
        "unix_backend",
        "the front reaches its runners over Unix sockets",
        "launch",
        b=replace(_B, launch_ns=300 * MS),
        weights_b_bytes=_SMALL_B_BYTES,
        unix_backend=True,
    ),
    Scenario(
        "parallel_slots",
        "another answer is being decoded in the other of two slots",
        "prefill",
        drive="queued",
        a=replace(_A, parallel=2, compute="sleep"),
        prompt_tokens=400,
        weights_b_bytes=_SMALL_B_BYTES,
    ),
    Scenario(
        "second_for_the_same",
        "the model is being loaded for somebody else",
        "queue",
        drive="second",
        b=replace(_B, launch_ns=500 * MS, parallel=2, compute="sleep"),
        weights_b_bytes=_SMALL_B_BYTES,
        ahead_tokens=20,
    ),
    Scenario(
        "other_while_loading",
        "for the old model, while the new one is loaded for somebody else",
        "queue",
        drive="other",
        b=replace(_B, launch_ns=500 * MS),
        weights_b_bytes=_SMALL_B_BYTES,
        ahead_tokens=100,
    ),
    Scenario(
        "after_one_who_left",
        "who caused the load has hung up; the server goes on with it",
        "queue",
        drive="left",
        b=replace(_B, launch_ns=600 * MS),
        weights_b_bytes=_SMALL_B_BYTES,
        ahead_tokens=20,
    ),
    Scenario(
        "crash_and_reload",
        "the model was there until its runner crashed",
        "launch",
        drive="crashed",
        b=replace(_B, launch_ns=300 * MS),
        weights_b_bytes=_SMALL_B_BYTES,
    ),
    Scenario(
        "shards_by_threads",
        "three files of one set, read by two threads, by a library of no known names",
        "load",
        cold=True,
        b=replace(_B, load_mode="read", load_threads=2, fit_pass=False),
        weights_b_bytes=_SMALL_B_BYTES,
        shards=3,
        markers=False,
    ),
    Scenario(
        "ollama_switch",
        "Ollama: the old runner is gone, and the scheduler waits for the GPU's memory",
        "evict",
        style="ollama",
        path="/api/chat",
        vram_lag_ns=600 * MS,
        weights_b_bytes=_TINY_B_BYTES,
    ),
    Scenario(
        "ollama_expired",
        "Ollama: the model was unloaded because nobody used it",
        "launch",
        drive="expired",
        style="ollama",
        path="/api/generate",
        keep_alive_ns=1_500 * MS,
        b=replace(_B, launch_ns=400 * MS),
        weights_b_bytes=_TINY_B_BYTES,
    ),
    Scenario(
        "swap_switch",
        "llama-swap: ready soon after its first look, and it looks once a second",
        "ready_gap",
        style="llama-swap",
        b=replace(_B, launch_ns=250 * MS, compute="sleep"),
        weights_b_bytes=_TINY_B_BYTES,
    ),
    Scenario(
        "swap_to_vllm",
        "llama-swap in front of vLLM: front, API server and engine core are three processes",
        "launch",
        style="llama-swap",
        b=replace(_B, engine="vllm", load_mode="read", fit_pass=False, launch_ns=600 * MS),
        weights_b_bytes=_SMALL_B_BYTES,
        markers=False,
    ),
    Scenario(
        "vllm_cache_full",
        "vLLM: the other answer has the KV cache, this prompt does not fit beside it",
        "queue",
        drive="queued",
        style="llama-swap",
        a=replace(
            _A,
            engine="vllm",
            fit_pass=False,
            cache_tokens=400,
            prefill_ns_per_token=4 * MS,
            compute="sleep",
        ),
        prompt_tokens=60,
        weights_b_bytes=_TINY_B_BYTES,
        ahead_tokens=150,
        markers=False,
    ),
    Scenario(
        "ollama_other_context",
        "Ollama: the same model with another context size is the same file loaded anew",
        "launch",
        style="ollama",
        path="/api/chat",
        a=replace(_A, load_mode="mmap"),
        b=replace(_B, launch_ns=500 * MS, context_tokens=8192),
        same_weights=True,
    ),
    Scenario(
        "back_with_a_long_prompt",
        "back to a model that had processed this very prompt before it was evicted",
        "prefill",
        drive="back",
        prompt_tokens=700,
        weights_b_bytes=_TINY_B_BYTES,
    ),
    Scenario(
        "vllm_two_workers",
        "llama-swap to vLLM with tensor parallelism: each of two workers loads its shards",
        "load",
        cold=True,
        style="llama-swap",
        b=replace(
            _B,
            engine="vllm",
            load_mode="read",
            fit_pass=False,
            launch_ns=60 * MS,
            tensor_parallel=2,
        ),
        shards=2,
        weights_b_bytes=512 * MIB + 104729,
        markers=False,
    ),
    Scenario(
        "vllm_woken",
        "vLLM's sleep mode, level 1: one engine is put to sleep, the other woken",
        "load",
        style="sleeper",
        a=replace(_A, engine="vllm", fit_pass=False, nap_ns=500 * MS, init_ns=0),
        b=replace(_B, engine="vllm", fit_pass=False, nap_ns=500 * MS, init_ns=0),
        weights_b_bytes=_TINY_B_BYTES,
        markers=False,
    ),
    Scenario(
        "vllm_woken_anew",
        "the same at level 2: its weights are read again",
        "load",
        style="sleeper",
        sleep_level=2,
        cold=True,
        a=replace(_A, engine="vllm", fit_pass=False),
        b=replace(_B, engine="vllm", fit_pass=False, load_mode="read", init_ns=0),
        weights_b_bytes=320 * MIB + 104729,
        markers=False,
    ),
    Scenario(
        "swap_to_sglang",
        "llama-swap to SGLang: graphs, a sleep of 1 s before its warm-up, one over a health check",
        "init",
        style="llama-swap",
        b=replace(
            _B,
            engine="sglang",
            load_mode="read",
            fit_pass=False,
            init_ns=2_500 * MS,
            compute="sleep",
        ),
        weights_b_bytes=_SMALL_B_BYTES,
        markers=False,
    ),
    Scenario(
        "swap_to_tgi",
        "llama-swap from TGI to TGI: a launcher starts the router once it has seen the shard up",
        "init",
        style="llama-swap",
        a=replace(_A, engine="tgi", fit_pass=False),
        b=replace(_B, engine="tgi", load_mode="read", fit_pass=False, init_ns=1_500 * MS),
        weights_b_bytes=_SMALL_B_BYTES,
        markers=False,
    ),
    Scenario(
        "localai_switch",
        "LocalAI: its gRPC backend is up at once, and is asked again after 2 s",
        "launch",
        cold=True,
        style="localai",
        a=replace(_A, engine="localai"),
        b=replace(_B, engine="localai", fit_pass=False),
        weights_b_bytes=_TINY_B_BYTES,
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
    through: int = 0,
) -> ScenarioRun:
    """Run one scenario in `workdir` (model files there are kept and reused by later runs).

    `before_switch(server_pid)` runs when the state is prepared and nothing is in flight;
    `after(server_pid)` when the answers are complete and the server still lives. The pid is the
    router's, or for a restarted server its supervisor's. `port` 0 takes a free one; `through` is
    another port that the clients send to.
    """
    scenario = SCENARIOS[name] if isinstance(name, str) else name
    config, run_dir = _prepare_files(scenario, workdir, port or pick_port())
    with _resident(scenario, config, run_dir) as server:
        time.sleep(_SETTLE_S)
        measured = Path(config.models[scenario.measured_model].path)
        before = _prepare_cache(scenario, measured)
        if before_switch is not None:
            before_switch(server.pid)
        seen = replace(server, port=through or server.port)
        clients = _drive(scenario, config, seen)
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
    a, *_ = _weights(scenario, workdir, "a", WEIGHTS_A_BYTES)
    b, *shards = (
        [a] if scenario.same_weights else _weights(scenario, workdir, "b", scenario.weights_b_bytes)
    )
    library = build_library(workdir / "build", markers=scenario.markers)
    config = ServerConfig(
        models={
            "a": replace(scenario.a, path=a),
            "b": replace(scenario.b, path=b, shards=tuple(shards)),
        },
        library_path=str(library),
        truth_path=str(run_dir / "truth.jsonl"),
        port=port,
        markers=scenario.markers,
        health_quantum_ns=scenario.health_quantum_ns,
        logs=scenario.logs,
        style=scenario.style,
        programs=str(make_programs(workdir / "bin")),
        vram_lag_ns=scenario.vram_lag_ns,
        keep_alive_ns=scenario.keep_alive_ns,
        sleep_level=scenario.sleep_level,
        unix_backend=scenario.unix_backend,
        wrapper_ns=scenario.wrapper_ns,
    )
    return config, run_dir


def _weights(scenario: Scenario, workdir: Path, model: str, size_bytes: int) -> list[str]:
    """The files of a model, named as the engine has them: `.weights`, blobs, numbered shards."""
    stem = "a" if model == "a" else f"b-{size_bytes}"
    if scenario.style == "ollama":
        (workdir / "blobs").mkdir(exist_ok=True)
        names = [f"blobs/sha256-{hashlib.sha256(stem.encode()).hexdigest()}"]
    elif model == "b" and scenario.shards > 1:
        count = scenario.shards
        names = [f"{stem}-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    else:
        names = [f"{stem}{_SUFFIXES[getattr(scenario, model).engine]}"]
    return [str(make_model(workdir / name, size_bytes)) for name in names]


@contextmanager
def _resident(scenario: Scenario, config: ServerConfig, run_dir: Path) -> Iterator[Server]:
    """A server in which a model has just answered somebody: a, or b where b is to come again."""
    start = supervised if scenario.drive == "restart" else router
    with start(config, run_dir) as server:
        if scenario.drive == "restart":
            server.restart("a")
        if scenario.style == "sleeper":  # it only sleeps when it has been awake
            _ask(server, "b", "awake", prompt_tokens=2, max_tokens=1, path=scenario.path)
        model = "b" if scenario.drive in ("crashed", "expired") else "a"
        _ask(server, model, "prepare", prompt_tokens=2, max_tokens=1, path=scenario.path)
        yield server


def _prepare_cache(scenario: Scenario, measured: Path) -> float:
    """The measured file's residency, 0..1, made what the scenario is about."""
    if scenario.cold:
        for shard in measured.parent.glob(measured.name.replace("00001-of", "*-of")):
            drop_cache(shard)
    elif scenario.b.load_mode != "direct":
        warm_cache(measured)
    return residency(measured)


def _drive(scenario: Scenario, config: ServerConfig, server: Server) -> list[ClientResult]:
    if scenario.drive in ("queued", "queued_switch", "second", "other"):
        return _drive_queued(scenario, server)
    if scenario.drive == "left":
        leaving = ChatRequest(server.port, "b", "left", 34, scenario.ahead_tokens, timeout_s=0.15)
        if chat(leaving).outcome != "timeout":
            raise WorkloadError("the one who was to leave got an answer")
    elif scenario.drive == "restart":
        server.restart("b")
    elif scenario.drive == "back":
        for model in "ba":
            _ask(server, model, f"before-{model}", prompt_tokens=scenario.prompt_tokens)
    elif scenario.drive == "crashed":
        os.kill(_runner_pid(config), signal.SIGSEGV)
        _await_end(_runner_pid(config))
    elif scenario.drive == "expired":
        # A recorder may have taken longer to come than the model was to stay.
        _ask(server, "b", "used", prompt_tokens=2, max_tokens=1, path=scenario.path)
        _await_end(_runner_pid(config))
    return [_ask_measured(scenario, server)]


def _runner_pid(config: ServerConfig) -> int:
    """The runner that was able to serve last."""
    lines = [json.loads(line) for line in Path(config.truth_path).read_text().splitlines()]
    return int([line["pid"] for line in lines if line["source"] == "runner"][-1])


def _await_end(pid: int) -> None:
    """Until a process is gone, its memory with it; its parent may not have waited for it yet."""
    with suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            if not select.select([fd], [], [], _END_TIMEOUT_S)[0]:
                raise WorkloadError(f"pid {pid} did not end")
        finally:
            os.close(fd)


def _drive_queued(scenario: Scenario, server: Server) -> list[ClientResult]:
    ahead: list[ClientResult] = []

    def send_ahead() -> None:
        model = "b" if scenario.drive in ("second", "other") else "a"
        tokens = scenario.ahead_tokens
        ahead.append(_ask(server, model, "ahead", prompt_tokens=200, max_tokens=tokens))

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
        path=scenario.path,
    )


def _ask(
    server: Server,
    model: str,
    request_id: str,
    *,
    prompt_tokens: int,
    max_tokens: int = 8,
    stream: bool = True,
    path: str = "/v1/chat/completions",
) -> ClientResult:
    request = ChatRequest(
        server.port, model, request_id, prompt_tokens, max_tokens, stream, path=path
    )
    result = chat(request)
    if result.outcome != "ok":
        raise WorkloadError(
            f"{request_id}: {result.outcome} (status {result.status}); see {server.log_path}"
        )
    return result
