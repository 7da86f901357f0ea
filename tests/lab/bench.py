"""What recording costs, beside what people would use instead: paired runs in one session.

    scripts/bench [--pairs N] [--json FILE] [--tool NAME]... [WORKLOAD...]
    scripts/bench report | drain | python      what analysis, draining and Python stacks cost
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab import bench_drain, bench_python, bench_report, bench_table
from lab.bench_tools import TOOLS, Cost, Tool, attached, missing
from lab.bench_workloads import TITLES, Running, started

RUNS = 3  # of a storm each side of a pair; the fastest counts
SEED = 8


@dataclass(frozen=True)
class Measured:
    """One tool on one workload: ratio of watched to bare time over the pairs, and what it took.

    `cpu_share`: of one core while the workload ran; `refused`: why it has no figures.
    """

    workload: str
    tool: str
    pairs: int = 0
    bare_ms: float = 0.0
    ratio: float = 0.0
    ratio_quartiles: tuple[float, float] = (0.0, 0.0)
    armed_s: float = 0.0
    cpu_share: float = 0.0
    peak_mb: float = 0.0
    file_kb: float = 0.0
    lost: int = 0
    refused: str = ""


def best(running: Running, runs: int) -> int:
    return min(running.run() for _ in range(runs))


def pair(
    running: Running, tool: Tool, runs: int, folder: Path, bare_first: bool
) -> tuple[int, int, Cost]:
    """(ns bare, ns watched, what the tool took)."""
    bare = best(running, runs) if bare_first else 0
    with attached(tool, running.pid, folder) as cost:
        watched = best(running, runs)
    return bare or best(running, runs), watched, cost


def measure(workload: str, tools: Sequence[Tool], pairs: int, folder: Path) -> list[Measured]:
    """Every tool on one workload, interleaved."""
    runs = 1 if workload == "switch" else RUNS
    order, found = random.Random(SEED), {tool.name: list[tuple[int, int, Cost]]() for tool in tools}
    refused = {tool.name: f"{tool.needs} is not here" for tool in tools if missing(tool)}
    with started(workload, folder) as running:
        best(running, runs)
        for number in range(pairs):
            for tool in order.sample(tools, len(tools)):
                if tool.name not in refused:
                    try:
                        done = pair(running, tool, runs, folder, bare_first=number % 2 == 0)
                        found[tool.name].append(done)
                    except (RuntimeError, OSError) as error:
                        refused[tool.name] = str(error).strip().splitlines()[-1]
    return [
        summed(workload, tool.name, found[tool.name])
        if found[tool.name]
        else Measured(workload, tool.name, refused=refused.get(tool.name, "no run"))
        for tool in tools
    ]


def summed(workload: str, tool: str, done: Sequence[tuple[int, int, Cost]]) -> Measured:
    ratios = [watched / bare for bare, watched, _ in done]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    costs = [cost for *_, cost in done]
    return Measured(
        workload=workload,
        tool=tool,
        pairs=len(done),
        bare_ms=statistics.median(bare for bare, *_ in done) / 1e6,
        ratio=statistics.median(ratios),
        ratio_quartiles=(low, high),
        armed_s=statistics.median(cost.armed_s for cost in costs),
        cpu_share=statistics.median(cost.cpu_s / max(cost.wall_s, 1e-9) for cost in costs),
        peak_mb=max(cost.peak_bytes for cost in costs) / 1e6,
        file_kb=statistics.median(cost.file_bytes for cost in costs) / 1e3,
        lost=sum(cost.lost for cost in costs),
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
    with tempfile.TemporaryDirectory() as name:
        for what in options.what:
            print(f"[bench] {what}", file=sys.stderr, flush=True)
            figures = _figures(what, options, Path(name))
            print(bench_table.shown(what, figures), flush=True)
            keep(options.json, what, figures)


def _figures(what: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    rows: Sequence[Any]
    if what == "report":
        rows = bench_report.measure(folder)
    elif what == "drain":
        rows = [bench_drain.measure(folder)]
    elif what == "python":
        rows = bench_python.measure(folder, options.pairs)
    else:
        tools = [tool for tool in TOOLS if not options.tool or tool.name in options.tool]
        rows = measure(what, tools, max(options.pairs, 2), folder)
    return [asdict(row) for row in rows]


def keep(path: Path | None, what: str, figures: list[dict[str, Any]]) -> None:
    """{workload: its figures}, the new in place of the old."""
    if path:
        held = json.loads(path.read_text()) if path.exists() else {}
        held[what] = figures
        path.write_text(json.dumps(held, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
