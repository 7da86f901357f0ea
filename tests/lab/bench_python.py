"""What looks at a server's Python code cost that server: CPU time of the same computation.

`workloads/python_server.py` stamps the processor time of its last stage; the recorder looks 20
times a second while a request waits.
"""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kernel.support import recording
from lab.llama_server import free_port
from workloads import python_server
from workloads.cache import make_model, warm_cache

OPTIONS = {
    "stacks": (),
    "native stacks": ("--native-stacks",),
    "no stacks": ("--no-python-stacks",),
}


@dataclass(frozen=True)
class Python:
    """Ratios of watched to bare: CPU time of the computation, and the time to the first token."""

    tool: str
    pairs: int
    cpu_ratio: float
    cpu_quartiles: tuple[float, float]
    ttft_ratio: float


def measure(folder: Path, pairs: int) -> list[Python]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in OPTIONS}
    with _server(folder) as (pid, port):
        _ask(port, folder)
        for number in range(pairs):
            for name, options in OPTIONS.items():
                bare = _ask(port, folder) if number % 2 == 0 else None
                with recording(folder / "python.ttft", "--pid", str(pid), *options):
                    watched = _ask(port, folder)
                bare = bare or _ask(port, folder)
                found[name].append((watched[0] / bare[0], watched[1] / bare[1]))
    return [_summed(name, ratios) for name, ratios in found.items()]


def _summed(name: str, ratios: Sequence[tuple[float, float]]) -> Python:
    cpu, ttft = zip(*ratios, strict=True)
    low, _, high = statistics.quantiles(cpu, n=4)
    return Python(name, len(cpu), statistics.median(cpu), (low, high), statistics.median(ttft))


def _ask(port: int, folder: Path) -> tuple[int, int]:
    """(CPU ns of the last stage, ns to the answer) of one request."""
    body = json.dumps(
        {"model": "x", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    )
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    began = time.monotonic_ns()
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    connection.getresponse().read()
    ended = time.monotonic_ns()
    connection.close()
    told = json.loads((folder / "stages").read_text().splitlines()[-1])
    return int(told["generate_cpu_ns"]), ended - began


@contextmanager
def _server(folder: Path) -> Iterator[tuple[int, int]]:
    weights, port = make_model(folder / "python.weights", 8 << 20), free_port()
    warm_cache(weights)
    command = [sys.executable, python_server.__file__, str(port), str(folder), str(weights)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        while True:
            try:
                http.client.HTTPConnection("127.0.0.1", port, timeout=1).connect()
                break
            except OSError:
                time.sleep(0.05)
        yield process.pid, port
    finally:
        process.kill()
        process.wait()
