"""What a truth server is told: frozen, JSON on disk, times in ns and sizes in bytes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

LoadMode = Literal["mmap", "populate", "random", "read", "pread", "direct", "lazy"]
Compute = Literal["busy", "sleep"]

MS = 1_000_000
MIB = 1 << 20


@dataclass(frozen=True)
class ModelConfig:
    """One model: where its weights are, how its runner loads them, and what each step costs."""

    path: str = ""
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
    kernel_stamps: bool = True  # a request's arrival by SO_TIMESTAMPNS; else by poll() and clock


def save_config(config: ServerConfig, path: Path) -> None:
    path.write_text(json.dumps(asdict(config), indent=1))


def load_config(path: Path) -> ServerConfig:
    raw: dict[str, Any] = json.loads(path.read_text())
    raw["models"] = {name: ModelConfig(**model) for name, model in raw["models"].items()}
    return ServerConfig(**raw)
