"""What analysis costs: time and peak memory of reports and exports by the length of a recording.

    scripts/bench report [--json FILE]

Each command runs in a process of its own; processor time and VmHWM are its own, too. Memory counts
above that for a recording of `_SMALL` events and is told as a multiple of the records' raw size;
time as a multiple of the shortest recording's, and by a straight line laid through it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.long_recording import raw_bytes, write_long

SIZES = (100_000, 300_000, 1_000_000)
COMMANDS = ("report --format json", "report --html", "export --to perfetto")
_SMALL = 1_000
_RUN = """
import re, sys, time
from pathlib import Path
from ttftprof.cli import main
try:
    main()
except SystemExit as end:
    if end.code:
        raise
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(time.process_time(), int(peak[1]) * 1024, file=sys.stderr)
"""


@dataclass(frozen=True)
class Cost:
    """One command on one recording; `peak_bytes` above that for a very short one."""

    command: str
    events: int
    cpu_s: float
    peak_bytes: int

    @property
    def of_raw(self) -> float:
        return self.peak_bytes / raw_bytes(self.events)


def run(command: str, recording: Path) -> tuple[float, int]:
    """(seconds of processor time, peak bytes resident)."""
    words = command.split()
    out = [str(recording.with_suffix(".out"))] if words[-1] == "--html" else []
    if words[0] == "export":
        out = ["-o", str(recording.with_suffix(".out"))]
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *words, *out, str(recording)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    seconds, peak = done.stderr.splitlines()[-1].split()
    return float(seconds), int(peak)


def measure(
    folder: Path, sizes: Iterable[int] = SIZES, commands: Sequence[str] = COMMANDS
) -> list[Cost]:
    """Every command on every recording, shortest first."""
    small = write_long(folder / "small.ttft", _SMALL)
    floor = {command: run(command, small)[1] for command in commands}
    costs = []
    for events in sizes:
        recording = write_long(folder / f"{events}.ttft", events)
        for command in commands:
            seconds, peak = run(command, recording)
            costs.append(Cost(command, events, seconds, peak - floor[command]))
        recording.unlink()
    return costs


def fit(costs: Sequence[Cost]) -> tuple[float, float, float]:
    """(seconds at no events, seconds per million, largest distance from the line as a share)."""
    events = np.array([c.events for c in costs]) / 1e6
    seconds = np.array([c.cpu_s for c in costs])
    slope, start = np.polyfit(events, seconds, 1)
    off = np.abs(seconds - (start + slope * events)) / seconds
    return float(start), float(slope), float(off.max())


def table(costs: Sequence[Cost]) -> str:
    lines = ["command                  events    CPU s   × shortest   peak MB above   × raw"]
    for command in dict.fromkeys(c.command for c in costs):
        own = [c for c in costs if c.command == command]
        for c in own:
            lines.append(
                f"{command:21} {c.events:9,d} {c.cpu_s:8.2f} {c.cpu_s / own[0].cpu_s:12.2f} "
                f"{c.peak_bytes / 1e6:15.1f} {c.of_raw:7.2f}"
            )
        start, slope, off = fit(own)
        lines.append(
            f"  linear: {start:.2f} s + {slope:.2f} s a million events, off by {off:.0%} at most"
        )
    return "\n".join(lines)
