"""What a truth server is told: frozen, JSON on disk, times in ns and sizes in bytes."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Style = Literal["router", "ollama", "llama-swap", "sleeper", "localai"]
LoadMode = Literal["mmap", "populate", "random", "read", "pread", "direct", "lazy"]
Compute = Literal["busy", "sleep"]

MS = 1_000_000
MIB = 1 << 20


@dataclass(frozen=True)
class ModelConfig:
    """One model: where its weights are, how its runner loads them, and what each step costs."""

    path: str = ""
    shards: tuple[str, ...] = ()  # further files of the same weights
    load_threads: int = 1  # how many threads load the files
    engine: Literal["llama.cpp", "vllm", "sglang", "tgi", "localai"] = "llama.cpp"
    tensor_parallel: int = 1  # vLLM: worker processes, each with its part of the files
    nap_ns: int = 0  # vLLM: to bring the weights back from the host's memory; a fifth: to put there
    context_tokens: int = 4096
    cache_tokens: int = 0  # room in the KV cache of vLLM, SGLang; 0: enough
    load_mode: LoadMode = "mmap"
    compute: Compute = "busy"
    launch_ns: int = 0  # what imports and device discovery would cost, on top of Python's own start
    fit_pass: bool = True  # header-only load during launch, as llama.cpp's memory-fit step does
    kv_bytes: int = 16 * MIB
    init_ns: int = 20 * MS
    warmup: bool = True  # two decodes before the server is ready
    prefill_ns_per_token: int = 1 * MS
    batch_tokens: int = 512  # a longer prompt takes several decodes
    sample_ns: int = 1 * MS
    silent_tokens: int = 0  # decoded before any text shows (a reasoning or partial UTF-8 token)
    evict_delay_ns: int = 0  # after everything is freed, before the process exits
    parallel: int = 1


@dataclass(frozen=True)
class ServerConfig:
    """One server: its models by name and what belongs to the front or to every runner."""

    models: dict[str, ModelConfig]
    library_path: str
    truth_path: str
    host: str = "127.0.0.1"
    port: int = 0
    markers: bool = True  # whether library_path exports llama.cpp's names
    health_quantum_ns: int = 50 * MS
    logs: bool = True
    style: Style = "router"  # whose manner the front has
    programs: str = ""  # folder of links by which programs are executed under an engine's name
    vram_lag_ns: int = 0  # Ollama: a GPU's memory is back that long after a runner's end
    keep_alive_ns: int = 0  # Ollama: a model not used for so long is unloaded; 0: never
    sleep_level: int = 1  # of a front that puts its servers to sleep
    unix_backend: bool = False  # the front reaches its runners over Unix sockets
    wrapper_ns: int = 0  # runners are started by a shell that waits so long, then executes them
    kernel_stamps: bool = True  # a request's arrival by SO_TIMESTAMPNS; else by poll() and clock

    def program(self, name: str) -> str:
        """What a command line of an engine begins with."""
        return f"{self.programs}/{name}" if self.programs else sys.executable


def server_options(program: str, *, needs_host: bool = True) -> argparse.Namespace:
    """What a front gives a server it starts: `config`, `alias`, `host`, `port` and `routed`. What
    llama-server would take the others for is in the configuration already."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--alias", required=True)
    parser.add_argument("--host", required=needs_host)
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--routed", action="store_true")
    for name in ("--model", "-c", "-np"):
        parser.add_argument(name)
    return parser.parse_args()


def save_config(config: ServerConfig, path: Path) -> None:
    path.write_text(json.dumps(asdict(config), indent=1))


def load_config(path: Path) -> ServerConfig:
    raw: dict[str, Any] = json.loads(path.read_text())
    raw["models"] = {
        name: ModelConfig(**{**model, "shards": tuple(model["shards"])})
        for name, model in raw["models"].items()
    }
    return ServerConfig(**raw)
