"""How soon each profiler is armed, from the start of its process, and what memory it then holds.

Each is attached to a process that sleeps, in turn and shuffled in each round. Beside the tools of
the comparison stand `ttftprof record --loader bcc`, the same probes by types that bcc compiles, and
what bcc takes for programs on every hook of ttftprof, be they a counter each: the least of what it
would take for the same.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lab.bench_floor import hooks
from lab.bench_tools import BY_BCC, TOOLS, Tool, attached, missing, resident_bytes
from lab.kernel_headers import write_headers

ROUNDS = 5
LONGEST_S = 180.0  # the rounds; then it only ends what it began
SEED = 11


@dataclass(frozen=True)
class Armed:
    """Of one tool. `resident_mb`: once armed; `refused`: why it has no figures."""

    tool: str
    rounds: int = 0
    least_s: float = 0.0
    median_s: float = 0.0
    most_s: float = 0.0
    resident_mb: float = 0.0
    refused: str = ""


def measure(folder: Path) -> list[Armed]:
    order = random.Random(SEED)
    own_headers = {"BCC_KERNEL_SOURCE": str(write_headers(folder / "headers"))}
    every = [tool for tool in (*TOOLS, BY_BCC, _every_hook()) if not missing(tool)]
    tools = [tool for tool in every if not tool.name.startswith("floor")]  # it compiles first
    found: dict[str, list[tuple[float, float]]] = {tool.name: [] for tool in tools}
    refused: dict[str, str] = {}
    latest = time.monotonic() + LONGEST_S
    with _sleeping() as pid:
        for _ in range(ROUNDS):
            for tool in order.sample(tools, len(tools)):
                if tool.name in refused or time.monotonic() > latest:
                    continue
                try:
                    armed = _once(tool, pid, folder, own_headers if tool is BY_BCC else {})
                    found[tool.name].append(armed)
                except (RuntimeError, OSError) as error:
                    refused[tool.name] = str(error)
    return [_summed(name, rounds, refused.get(name, "")) for name, rounds in found.items()]


def _every_hook() -> Tool:
    bcc, wanted = next(tool for tool in TOOLS if tool.name == "bcc"), hooks()
    return replace(
        bcc, name="bcc, every hook", command=lambda pid, out: [*bcc.command(pid, out), *wanted]
    )


def _once(tool: Tool, pid: int, folder: Path, environment: dict[str, str]) -> tuple[float, float]:
    with attached(tool, pid, folder, environment) as found:
        return found.armed_s, resident_bytes(found.process) / 1e6


def _summed(name: str, rounds: Sequence[tuple[float, float]], refused: str) -> Armed:
    if not rounds:
        return Armed(name, refused=refused)
    seconds, held = zip(*rounds, strict=True)
    return Armed(
        name, len(rounds), min(seconds), statistics.median(seconds), max(seconds), max(held)
    )


@contextmanager
def _sleeping() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "infinity"])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()
