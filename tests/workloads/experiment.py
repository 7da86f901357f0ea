"""A truth server as an experiment needs it: the command that starts it, and its models' files."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from .build import build_library
from .cache import make_model
from .config import MIB, MS, ModelConfig, ServerConfig, save_config
from .server import pick_port

TESTS = Path(__file__).resolve().parents[1]
QUICK = ModelConfig(load_mode="read", launch_ns=MS, init_ns=2 * MS, prefill_ns_per_token=MS // 4)


@dataclass(frozen=True)
class Truth:
    """What a plan says of it."""

    config: ServerConfig
    config_path: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.config.port}"

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "workloads.front", "--config", str(self.config_path)]

    def plan(
        self, experiment: str, server: str = "", rest: str = "", first_in_line: bool = False
    ) -> str:
        """A plan that starts this server; the arguments are TOML. `first_in_line`: its few steps on
        a core wait for nobody, as on a machine of its own."""
        command = ["chrt", "--rr", "1", *self.command] if first_in_line else self.command
        return (
            f"[experiment]\n{experiment}\n[server]\nurl = '{self.url}'\nmodels = ['a', 'b']\n"
            f"command = '''{shlex.join(command)}'''\nenv = {{ PYTHONPATH = '{TESTS}' }}\n"
            f"ready_timeout_s = 60\n{server}\n{rest}\n"
        )


def truth_server(
    folder: Path, a: ModelConfig = QUICK, b: ModelConfig | None = None, size: int = 4 * MIB
) -> Truth:
    """Models a and b of about `size` bytes; nothing is started."""
    models = {
        name: replace(model, path=str(make_model(folder / f"{name}.weights", size + odd)))
        for name, model, odd in (("a", a, 7919), ("b", b or a, 104729))
    }
    config = ServerConfig(
        models=models,
        library_path=str(build_library(folder / "build")),
        truth_path=str(folder / "truth.jsonl"),
        port=pick_port(),
        health_quantum_ns=10 * MS,
    )
    path = folder / "config.json"
    save_config(config, path)
    return Truth(config, path)
