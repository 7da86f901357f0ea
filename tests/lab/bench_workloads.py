"""What `bench` lets profilers watch: programs that stay, and do one piece of work when asked."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lab.llama_server import LlamaServer
from lab.make_model import make_model as make_gguf
from workloads.cache import make_model, warm_cache

LAB = Path(__file__).parent
FILE_BYTES = 128 << 20
SWITCH_MODEL_MB, SWITCH_MODEL_LAYERS = 300, 12  # as the demo's
PROMPT = "Explain in one sentence why the sky is blue."
STORMS = {
    "fault_storm": "4 KiB anonymous fault storm",
    "cold_map_load": "cold mmap load",
    "map_load": "warm mmap load",
    "read_load": "1 MiB read load",
    "direct_load": "4 KiB O_DIRECT, depth 1",
    "fork_storm": "fork storm",
    "switch_storm": "context-switch storm",
}
STREAMS = {"stream_64": 64, "stream_512": 512}
PACED = {"paced_64": 64, "paced_512": 512}
TOKEN_GAP_US = 20_000
TITLES = {
    **STORMS,
    **{name: f"HTTP streaming, {count} connections" for name, count in STREAMS.items()},
    **{name: f"the same, {n}, 50 tokens/s each: server's CPU" for name, n in PACED.items()},
    "switch": "llama-server switch, warm: TTFT",
}


class Running(Protocol):
    """A program to be watched: `pid` is its root, `run` does some work once and says its ns."""

    @property
    def pid(self) -> int: ...
    def run(self, work: str) -> int: ...


@dataclass
class Storm:
    """`storms.c`, which times each of its storms by itself."""

    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    def run(self, work: str) -> int:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(work + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@dataclass
class Streams:
    """`http_load`: a server that streams to so many connections at once as fast as it can; the time
    from the first question to the last answer."""

    server: subprocess.Popen[str]
    program: Path
    port: int
    streams: int

    @property
    def pid(self) -> int:
        return self.server.pid

    def run(self, work: str) -> int:
        requests = max(256 // self.streams, 1) if work in STREAMS else 1
        asked = subprocess.run(
            [str(self.program), "ask", str(self.port), str(self.streams), str(requests)],
            stdout=subprocess.PIPE, text=True, check=True, timeout=60,
        )  # fmt: skip
        lines = [tuple(map(int, line.split())) for line in asked.stdout.splitlines()]
        return max(first for *_, first in lines) - min(sent for _, sent, _ in lines)


@dataclass
class Paced(Streams):
    """The same at the pace at which models speak; the processor time that the server took."""

    def run(self, work: str) -> int:
        before = self._cpu_ns()
        super().run(work)
        return self._cpu_ns() - before

    def _cpu_ns(self) -> int:
        return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[0])


@dataclass
class Switch:
    """A real llama-server in router mode that is asked for the model it does not hold: the time to
    the first token, as the client sees it."""

    server: LlamaServer
    turn: int = 0

    @property
    def pid(self) -> int:
        return self.server.pid

    def run(self, work: str) -> int:
        self.turn += 1
        return self.server.chat("ab"[self.turn % 2], PROMPT, max_tokens=1).ttft_ns


@contextmanager
def started(name: str, folder: Path) -> Iterator[Running]:
    """The program that does this work; ended with the block."""
    with ExitStack() as stack:
        if name in STORMS:
            yield stack.enter_context(storms(folder))
        elif name in STREAMS:
            yield stack.enter_context(_streams(Streams, STREAMS[name], 0, folder))
        elif name in PACED:
            yield stack.enter_context(_streams(Paced, PACED[name], TOKEN_GAP_US, folder))
        else:
            yield stack.enter_context(_switch(folder))


def programs(names: Sequence[str]) -> list[list[str]]:
    """The workloads by the program that does them: all storms are one's."""
    own = [name for name in names if name in STORMS]
    return [*([own] if own else []), *([name] for name in names if name not in STORMS)]


@contextmanager
def storms(folder: Path) -> Iterator[Storm]:
    program, model = folder / "storms", make_model(folder / "bench.weights", FILE_BYTES)
    _compile(program, "storms.c", "-pthread")
    warm_cache(model)
    process = subprocess.Popen(
        [str(program), str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Storm(process)
    finally:
        _end(process)


@contextmanager
def _streams(kind: type[Streams], count: int, gap_us: int, folder: Path) -> Iterator[Streams]:
    program = folder / "http_load"
    _compile(program, "http_load.c")
    server = subprocess.Popen(
        [str(program), "serve", "64", str(gap_us), "0"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout
        port = int(server.stdout.readline())
        drain = subprocess.Popen(["cat"], stdin=server.stdout, stdout=subprocess.DEVNULL)
        yield kind(server, program, port, count)
    finally:
        server.kill()
        server.wait()
        drain.wait()


@contextmanager
def _switch(folder: Path) -> Iterator[Switch]:
    models = folder / "models"
    models.mkdir(exist_ok=True)
    for seed, name in enumerate("ab"):
        if not (models / f"{name}.gguf").exists():
            make_gguf(
                models / f"{name}.gguf",
                size_mb=SWITCH_MODEL_MB,
                layers=SWITCH_MODEL_LAYERS,
                seed=seed,
            )
        warm_cache(models / f"{name}.gguf")
    with LlamaServer.router(models) as server:
        yield Switch(server)


def _compile(program: Path, source: str, *options: str) -> None:
    command = ["gcc", "-O2", "-Wall", *options, "-o", str(program), str(LAB / source)]
    subprocess.run(command, check=True)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
