"""Real servers of other kinds, in Python: xllamacpp, `transformers serve`, and vLLM.

They speak llama-server's HTTP, so they are started, asked and stopped as it is. `scripts/engine`
installs the first, `scripts/engine --transformers` the second, `scripts/engine --vllm` the third.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lab.llama_server import READY_TIMEOUT_S, ROOT, LlamaServer, ServerFailed

XLLAMACPP = ROOT / ".engine/xllamacpp"
TRANSFORMERS = ROOT / ".engine/transformers/bin/transformers"
VLLM = ROOT / ".engine/vllm/bin/python"


@dataclass(frozen=True)
class Switched:
    """One model of a process: its making began when the one before was gone."""

    model: str
    begun_ns: int
    ready_ns: int


@dataclass
class XllamacppServer(LlamaServer):
    """llama.cpp's server inside a Python process (`xllamacpp_server.py`). `arguments`: a model."""

    def spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        if not XLLAMACPP.exists():
            raise ServerFailed("no xllamacpp here: run scripts/engine")
        return subprocess.Popen(
            [str(xllamacpp_program()), str(self.port), *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(XLLAMACPP)},
        )

    def wait_switched(self) -> Switched:
        """Waits for the model that was asked for last, or the first."""
        assert self.process is not None
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], READY_TIMEOUT_S)[0]:
            raise ServerFailed(f"no model after {READY_TIMEOUT_S} s")
        words = self.process.stdout.readline().decode().split()
        if not words:
            raise ServerFailed("the server is gone")
        return Switched(words[1], int(words[2]), int(words[3]))

    def switch(self, model: Path) -> Switched:
        """Another model in the same process; its server listens again when this returns."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(f"{model}\n".encode())
        self.process.stdin.flush()
        return self.wait_switched()


def xllamacpp_program() -> Path:
    """The server as pip installs programs: a script that names its interpreter, and so a process
    that has the script's name."""
    program = XLLAMACPP.with_name("xllamacpp-serve.py")
    text = Path(__file__).with_name("xllamacpp_server.py").read_text()
    program.write_text(f"#!{sys.executable}\n{text}")
    program.chmod(0o755)
    return program


@dataclass
class TransformersServer(LlamaServer):
    """`transformers serve`, which loads a model (a folder) when it is first asked for it."""

    def spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        if not TRANSFORMERS.exists():
            raise ServerFailed("no transformers here: run scripts/engine --transformers")
        command = [str(TRANSFORMERS), "serve", "--host", self.host, "--port", str(self.port)]
        return subprocess.Popen(
            [*command, "--device", "cpu", *self.arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"},
        )

    def own_fields(self, cache_prompt: bool) -> dict[str, Any]:
        """None: it keeps no prompt from one request to the next."""
        return {}


# vLLM on a CPU: a small KV cache, two threads; it asks nobody outside, and can be put to sleep.
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "2",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}


@dataclass
class VllmServer(LlamaServer):
    """vLLM's OpenAI server. `arguments`: a model."""

    def command(self) -> list[str]:
        (model,) = self.arguments
        server = [str(VLLM), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        bounds = ["--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "4"]
        return [*server, "--host", self.host, "--port", str(self.port), *bounds]

    def spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | VLLM_ENVIRONMENT,
        )

    def own_fields(self, cache_prompt: bool) -> dict[str, Any]:
        return {}
