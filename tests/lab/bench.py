"""What recording costs, beside what people would use instead: paired runs in one session.

    scripts/bench [--pairs N] [--json FILE] [--tool NAME]... [WORKLOAD...]
    scripts/bench report | drain | python      what analysis, draining and Python stacks cost
    scripts/bench armed                        how soon each tool is armed
    scripts/bench client | gpu                 what an experiment's client, samples of GPUs cost
    scripts/bench table FILE                   docs/COST.md's tables from kept figures

The machine is shared and noisy, so nothing here is an absolute time: each pair runs bare and under
a tool right after one another, in turn first and second; tools follow one another within each round
in a shuffled order. Shown are medians of the pairs' ratios with their quartiles. The workloads are
in `bench_workloads`, the tools in `bench_tools`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab import (
    bench_armed,
    bench_client,
    bench_drain,
    bench_gpu,
    bench_python,
    bench_report,
    bench_table,
)
from lab.bench_tools import TOOLS, Attached, Tool, attached, cpu_s, missing
from lab.bench_workloads import PACED, STORMS, STREAMS, TITLES, Running, programs, started

# Of a work on each side of a pair: as many runs as fit, of which the fastest was disturbed least.
RUNS_LEAST, RUNS_MOST, RUNS_NS = 3, 15, 300_000_000
SEED = 8


@dataclass(frozen=True)
class Measured:
    """One tool on one workload: ratio of watched to bare time over the pairs, and what it took.

    `fastest_ratio`: of the fastest run of all that were watched to that of all bare ones: what
    others on the machine do only ever adds. `cpu_share`: of one core while the workload ran.
    `file_kb`, `lost`: of all works of the program. `refused`: why it has no figures.
    """

    workload: str
    tool: str
    pairs: int = 0
    bare_ms: float = 0.0
    ratio: float = 0.0
    ratio_quartiles: tuple[float, float] = (0.0, 0.0)
    fastest_ratio: float = 0.0
    cpu_share: float = 0.0
    peak_mb: float = 0.0
    file_kb: float = 0.0
    lost: int = 0
    refused: str = ""


@dataclass(frozen=True)
class Watched:
    """One work of a pair: ns bare and watched, the tool's CPU meanwhile, as a share of a core."""

    bare_ns: int
    watched_ns: int
    cpu_share: float


def timed(running: Running, work: str) -> int:
    """ns of the fastest of some runs; of a switch, which waits for much that no profiler touches,
    of the median; a stream is long enough to be done once."""
    runs = [running.run(work)]
    if work in STREAMS or work in PACED:
        return runs[0]
    while len(runs) < RUNS_LEAST or (sum(runs) < RUNS_NS and len(runs) < RUNS_MOST):
        runs.append(running.run(work))
    return min(runs) if work in STORMS else sorted(runs)[len(runs) // 2]


def pair(
    running: Running, works: Sequence[str], tool: Tool, folder: Path, bare_first: bool
) -> tuple[dict[str, Watched], Attached]:
    """All works of a program bare and under a tool, right after one another."""
    bare = {work: timed(running, work) for work in works} if bare_first else {}
    watched: dict[str, tuple[int, float]] = {}
    with attached(tool, running.pid, folder) as found:
        for work in works:
            before, began = cpu_s(found.process), time.monotonic()
            ns = timed(running, work)
            spent = cpu_s(found.process) - before
            watched[work] = ns, spent / (time.monotonic() - began)
    bare = bare or {work: timed(running, work) for work in works}
    return {work: Watched(bare[work], *watched[work]) for work in works}, found


def measure(
    works: Sequence[str], tools: Sequence[Tool], pairs: int, folder: Path
) -> Iterator[list[Measured]]:
    """Every tool on the works of one program, interleaved; all figures so far after each round, so
    that a run that is stopped has shown something."""
    order = random.Random(SEED)
    refused = {tool.name: f"{tool.needs} is not here" for tool in tools if missing(tool)}
    found: dict[str, list[tuple[dict[str, Watched], Attached]]] = {tool.name: [] for tool in tools}
    with started(works[0], folder) as running:
        for work in works:
            running.run(work)
        for number in range(pairs):
            for tool in order.sample(tools, len(tools)):
                if tool.name not in refused:
                    try:
                        done = pair(running, works, tool, folder, bare_first=number % 2 == 0)
                        found[tool.name].append(done)
                    except (RuntimeError, OSError) as error:
                        refused[tool.name] = str(error)
            yield [
                summed(work, tool.name, found[tool.name])
                if found[tool.name]
                else Measured(work, tool.name, refused=refused[tool.name])
                for work in works
                for tool in tools
            ]


def summed(work: str, tool: str, done: Sequence[tuple[dict[str, Watched], Attached]]) -> Measured:
    own, took = [pairs[work] for pairs, _ in done], [attached for _, attached in done]
    ratios = [one.watched_ns / one.bare_ns for one in own]
    low, high = np.quantile(ratios, [0.25, 0.75]).tolist()
    return Measured(
        workload=work,
        tool=tool,
        pairs=len(done),
        bare_ms=statistics.median(one.bare_ns for one in own) / 1e6,
        ratio=statistics.median(ratios),
        ratio_quartiles=(low, high),
        fastest_ratio=min(one.watched_ns for one in own) / min(one.bare_ns for one in own),
        cpu_share=statistics.median(one.cpu_share for one in own),
        peak_mb=max(one.peak_bytes for one in took) / 1e6,
        file_kb=statistics.median(one.file_bytes for one in took) / 1e3,
        lost=sum(one.lost for one in took),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--pairs", type=int, default=7, help="paired runs of each tool and workload"
    )
    parser.add_argument("--json", type=Path, help="keep the figures here, beside those it holds")
    parser.add_argument("--tool", action="append", help="only this one; may be repeated")
    parser.add_argument("what", nargs="*", default=[*TITLES], metavar="WORKLOAD")
    options = parser.parse_args()
    if options.what[0] == "table":
        bench_table.write(json.loads(Path(options.what[1]).read_text()))
        return
    compared = [what for what in options.what if what in TITLES]
    others = [[what] for what in options.what if what not in TITLES]
    with tempfile.TemporaryDirectory() as name:
        for works in (*programs(compared), *others):
            print(f"[bench] {', '.join(works)}", file=sys.stderr, flush=True)
            for kept in _figures(works, options, Path(name)):
                for what, figures in kept.items():
                    keep(options.json, what, figures)
            for what, figures in kept.items():
                print(bench_table.shown(what, figures), flush=True)


def _figures(
    works: Sequence[str], options: argparse.Namespace, folder: Path
) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """{workload: its figures}, again and again where there is more of it with every round."""
    rows: Sequence[Any]
    if works == ["report"]:
        rows = bench_report.measure(folder)
    elif works == ["drain"]:
        rows = [bench_drain.measure(folder)]
    elif works == ["armed"]:
        rows = bench_armed.measure(folder)
    elif works == ["client"]:
        rows = bench_client.measure()
    elif works == ["gpu"]:
        rows = bench_gpu.measure(folder)
    elif works == ["python"]:
        rows = bench_python.measure(folder, options.pairs)
    else:
        tools = [tool for tool in TOOLS if not options.tool or tool.name in options.tool]
        for measured in measure(works, tools, max(options.pairs, 2), folder):
            yield {w: [asdict(row) for row in measured if row.workload == w] for w in works}
        return
    yield {works[0]: [asdict(row) for row in rows]}


def keep(path: Path | None, what: str, figures: list[dict[str, Any]]) -> None:
    """{workload: its figures}, the new in place of the old; of tools that were not asked for now,
    the old."""
    if path:
        held = json.loads(path.read_text()) if path.exists() else {}
        new = {row.get("tool") for row in figures}
        old = [row for row in held.get(what, ()) if row.get("tool") not in new]
        held[what] = [*figures, *old]
        path.write_text(json.dumps(held, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
