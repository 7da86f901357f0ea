"""What analysis costs: time and peak memory of reports and exports by the length of a recording.

    scripts/bench report [--json FILE]

Each command runs in a process of its own; processor time, wall time and VmHWM are its own, too.
`linear` lays a straight line through the time by the number of records; of the text report, by the
number of requests that it shows, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.long_recording import raw_bytes, requests_of, write_long
from ttftprof import scale
from ttftprof.cli.export import FORMATS
from ttftprof.reports.terminal import MOST_SHOWN

SIZES = (100_000, 300_000, 1_000_000)
LARGE = (2_000_000, 3_000_000, 5_000_000, 10_000_000)  # for the text report alone
COMMANDS = (
    "report",
    "report --compact",
    "report --format json",
    "report --html",
    *(f"export --to {form}" for form in FORMATS),
    "diff",
)
ALL_AT_ONCE = "all at once"
_SMALL = 1_000
_MANY = 2_000_000  # events of the recordings with many files or requests
_RUN = """
import time
began = time.monotonic()
import re, sys
from pathlib import Path
from ttftprof.cli import main
try:
    main()
except SystemExit as end:
    if end.code:
        raise
"""
# What is read and concluded once serves every output; each is done before the next begins.
_RUN_ALL = """
import time
began = time.monotonic()
import re, sys
from pathlib import Path
from ttftprof.cli import export
from ttftprof.diff import Wait, compare, quickest, slowest
from ttftprof.reports import diff_terminal, html, json, terminal
report, timeline = export.read(Path(sys.argv[1]))
with open("/dev/null", "w") as text, open("/dev/null", "wb") as raw:
    terminal.write([report], text, 100, False)
    json.write(report, text)
    html.write([report], text)
    for form in export.FORMATS:
        if form in export.BINARY:
            export.write_binary(form, report, timeline, raw)
        else:
            export.write_text(form, report, timeline, text)
    comparison = compare(Wait(report, quickest(report)), Wait(report, slowest(report)))
    diff_terminal.write([comparison], text, 100, False)
    html.write_comparison([comparison], text)
"""
_TAIL = """
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(time.process_time(), time.monotonic() - began, int(peak[1]) * 1024, file=sys.stderr)
"""


@dataclass(frozen=True)
class Cost:
    """One command on one recording. `above_bytes`: memory above that for a very short one."""

    command: str
    shape: str
    events: int
    cpu_s: float
    wall_s: float
    peak_bytes: int
    above_bytes: int

    @property
    def of_raw(self) -> float:
        return self.above_bytes / raw_bytes(self.events)


def run(command: str, recording: Path) -> tuple[float, float, int]:
    """(seconds of processor time, of wall time, peak bytes resident)."""
    script, words = _RUN_ALL if command == ALL_AT_ONCE else _RUN, _arguments(command, recording)
    done = subprocess.run(
        [sys.executable, "-c", script + _TAIL, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        # As it is where it was installed: its modules are compiled.
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": ""},
    )
    cpu_s, wall_s, peak = done.stderr.splitlines()[-1].split()
    return float(cpu_s), float(wall_s), int(peak)


def _arguments(command: str, recording: Path) -> list[str]:
    if command == ALL_AT_ONCE:
        return [str(recording)]
    words, out = command.split(), str(recording.with_suffix(".out"))
    more = {"--html": [out], "diff": [str(recording)]}.get(words[-1], [])  # against itself
    return [*words, *(["-o", out] if words[0] == "export" else more), str(recording)]


def measure_lengths(
    folder: Path, sizes: Iterable[int] = SIZES, commands: Sequence[str] = COMMANDS
) -> list[Cost]:
    """Every command on every recording, shortest first."""
    small = write_long(folder / "small.ttft", _SMALL)
    floor = {command: run(command, small)[-1] for command in commands}
    costs = []
    for events in sizes:
        recording = write_long(folder / f"{events}.ttft", events)
        for command in commands:
            cpu_s, wall_s, peak = run(command, recording)
            above = peak - floor[command]
            costs.append(Cost(command, "a load", events, cpu_s, wall_s, peak, above))
        recording.unlink()
    return costs


def measure(folder: Path) -> list[Cost]:
    """What docs/COST.md shows."""
    costs = measure_lengths(folder)
    costs += measure_lengths(folder, LARGE, COMMANDS[:1])
    for shape, how in (
        ("5,000 files", {"files": 5_000}),
        ("10,000 requests", {"requests": 10_000}),
    ):
        recording = write_long(folder / "many.ttft", _MANY, **how)
        for command in ("report", "report --format json"):
            costs.append(Cost(command, shape, _MANY, *run(command, recording), 0))
        recording.unlink()
    return costs


def fit(costs: Sequence[Cost]) -> tuple[float, float, float, float]:
    """(seconds at no events, seconds per million, seconds per request that is concluded beside
    those in proportion to the events, largest distance from that as a share)."""
    events = np.array([c.events for c in costs]) / 1e6
    seconds = np.array([c.cpu_s for c in costs])
    terms = [np.ones(len(costs)), events]
    # The text concludes no more requests than it shows: all of a short recording, few of a long.
    if costs[0].command == "report":
        terms.append(np.array([min(requests_of(c.events), MOST_SHOWN) for c in costs], float))
    found, *_ = np.linalg.lstsq(np.column_stack(terms), seconds)
    off = np.abs(seconds - np.column_stack(terms) @ found) / seconds
    start, slope, each = (*found.tolist(), 0.0)[:3]
    return start, slope, each, float(off.max())


def linear(costs: Sequence[Cost]) -> list[str]:
    """The fit of each command, in words."""
    lines = []
    for command in dict.fromkeys(c.command for c in costs):
        own = [c for c in costs if c.command == command and c.shape == "a load"]
        start, slope, each, off = fit(own)
        shown = f" + {each * 1e3:.0f} ms a request shown ({MOST_SHOWN} at most)" if each else ""
        lines.append(
            f"- `{command}`: {start:.2f} s + {slope:.2f} s a million records{shown}; "
            f"no point lies further than {scale.percent(off)} off that"
        )
    return lines
