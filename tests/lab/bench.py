"""What recording costs: the same work with and without a recorder, paired in one run.

    scripts/bench [--pairs N] [--json FILE]
    scripts/bench report [--json FILE]         what analysis costs instead: see `bench_report`

The machine is shared and noisy, so nothing here is an absolute time: each pair runs bare and
under `ttftprof record` right after one another, in turn first and second, and what is shown is the
median ratio with its quartiles. Each workload is in `storms.c`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from kernel.support import recording
from lab import bench_report
from workloads.cache import make_model, warm_cache

SOURCE = Path(__file__).parent / "storms.c"
WORKLOADS = ("fault_storm", "map_load", "read_load", "switch_storm", "fork_storm", "stream")
FILE_BYTES = 128 << 20
RUNS = 3  # of a workload each side of a pair; the fastest counts


@dataclass(frozen=True)
class Measured:
    """One workload: ratio of recorded to bare time over the pairs, and what the recorder took."""

    workload: str
    ratio: float
    ratio_quartiles: tuple[float, float]
    bare_ms: float
    lost: int
    recorder_cpu_ms: float
    recorder_rss_mb: float
    recording_kb: float


@contextmanager
def storms(folder: Path) -> Iterator[subprocess.Popen[str]]:
    program, model = folder / "storms", make_model(folder / "bench.weights", FILE_BYTES)
    subprocess.run(["gcc", "-O2", "-Wall", "-pthread", "-o", str(program), str(SOURCE)], check=True)
    warm_cache(model)
    process = subprocess.Popen(
        [str(program), str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run_once(process: subprocess.Popen[str], workload: str) -> int:
    """Nanoseconds one run took, by the program's own clock."""
    assert process.stdin
    assert process.stdout
    process.stdin.write(workload + "\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def best(process: subprocess.Popen[str], workload: str) -> int:
    return min(run_once(process, workload) for _ in range(RUNS))


def measure(process: subprocess.Popen[str], workload: str, pairs: int, folder: Path) -> Measured:
    ratios, bare_times = [], []
    lost, cpu_ns, rss_bytes, size = 0, 0, 0, 0
    for pair in range(pairs):
        bare_first = best(process, workload) if pair % 2 == 0 else 0
        path = folder / f"{workload}.ttft"
        with recording(path, "--pid", str(process.pid)) as seen:
            recorded = best(process, workload)
        bare = bare_first or best(process, workload)
        report = seen.report()
        ratios.append(recorded / bare)
        bare_times.append(bare)
        lost += sum(report.lost.values())
        cpu_ns = report.overhead.cpu_ns or 0
        rss_bytes = report.overhead.max_rss_bytes or 0
        size = path.stat().st_size
    low, _, high = statistics.quantiles(ratios, n=4)
    return Measured(
        workload=workload,
        ratio=statistics.median(ratios),
        ratio_quartiles=(low, high),
        bare_ms=statistics.median(bare_times) / 1e6,
        lost=lost,
        recorder_cpu_ms=cpu_ns / 1e6,
        recorder_rss_mb=rss_bytes / 1e6,
        recording_kb=size / 1e3,
    )


def table(rows: list[Measured]) -> str:
    lines = [
        "workload      recorded / bare    (quartiles)     bare ms   lost   recorder MB   file KB",
    ]
    for row in rows:
        low, high = row.ratio_quartiles
        lines.append(
            f"{row.workload:12} {row.ratio:12.3f}      ({low:.3f} to {high:.3f}) "
            f"{row.bare_ms:9.1f} {row.lost:6d} {row.recorder_rss_mb:12.1f} {row.recording_kb:9.0f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7, help="paired runs of each workload")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("workloads", nargs="*", default=WORKLOADS, metavar="WORKLOAD")
    options = parser.parse_args()
    if list(options.workloads) == ["report"]:
        costs = on_recordings()
        _write_json(options.json, costs)
        return
    rows = []
    with tempfile.TemporaryDirectory() as name, storms(Path(name)) as process:
        for workload in options.workloads:
            print(f"[bench] {workload}", file=sys.stderr)
            rows.append(measure(process, workload, max(options.pairs, 2), Path(name)))
    print(table(rows))
    _write_json(options.json, rows)


def on_recordings() -> list[bench_report.Cost]:
    with tempfile.TemporaryDirectory() as name:
        costs = bench_report.measure(Path(name))
    print(bench_report.table(costs))
    return costs


def _write_json(path: Path | None, rows: Sequence[Measured | bench_report.Cost]) -> None:
    if path:
        path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
