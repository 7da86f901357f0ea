"""Starts and stops a truth server: by pid, always, and with everything it started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import wire
from .build import WorkloadError
from .config import ServerConfig, save_config
from .processes import hear, say, started

START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Server:
    """A running server; its pid is the router's, or the supervisor's of one that is restarted."""

    process: subprocess.Popen[bytes]
    port: int
    log_path: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def restart(self, model: str) -> int:
        """Supervised servers only: stop, execute anew with `model`; the new pid, listening."""
        say(self.process, model=model)
        return int(hear(self.process, START_TIMEOUT_S)["pid"])


@contextmanager
def router(config: ServerConfig, workdir: Path) -> Iterator[Server]:
    """A front that listens; no model is resident yet."""
    module, program = {
        "router": ("front", "llama-server"),
        "ollama": ("ollama", "ollama"),
        "llama-swap": ("llama_swap", "llama-swap"),
        "sleeper": ("sleeper", "llama-swap"),
        "localai": ("local_ai", "local-ai"),
    }[config.style]
    with _started(module, config, workdir, config.program(program)) as process:
        port = int(hear(process, START_TIMEOUT_S)["listening"])
        yield Server(process, port, _log_path(workdir))


@contextmanager
def supervised(config: ServerConfig, workdir: Path) -> Iterator[Server]:
    """A supervisor with no server yet; call restart(). The port must be known beforehand."""
    if not config.port:
        raise WorkloadError("a supervised server has to come back on the same port: set one")
    with _started("supervisor", config, workdir) as process:
        yield Server(process, config.port, _log_path(workdir))


def pick_port(host: str = "127.0.0.1") -> int:
    return wire.free_port(host)


@contextmanager
def _started(
    module: str, config: ServerConfig, workdir: Path, program: str = sys.executable
) -> Iterator[subprocess.Popen[bytes]]:
    config_path = workdir / "config.json"
    save_config(config, config_path)
    with (
        _log_path(workdir).open("ab") as log,
        started(module, "--config", str(config_path), stderr=log, program=program) as process,
    ):
        yield process


def _log_path(workdir: Path) -> Path:
    return workdir / "server.log"
