"""What sampling GPUs costs inside a recording, and how well it keeps its schedule.

`ttftprof record`, as it is by default, asks the tests' own NVML (`fake_nvml.c`), whose answers cost
what the calls of a C library do; a real driver's cost more, and how much it takes of the system is
not in here. The figure is the time of the threads that look, and of taking what they found, as the
recording has it: while the devices' memory moves, as in a switch, and at rest but for the first
second. While it goes on, threads that do only a part of that show what it could cost at least
(`gpu_floor`).
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from lab import fake_gpu, gpu_floor
from lab.bench_tools import TOOLS, attached
from lab.fake_gpu import GIB, State
from lab.gpu_floor import Floor
from ttftprof.events import Records
from ttftprof.gpu_rows import Valid
from ttftprof.recording import Reader
from ttftprof.sources.gpu_schedule import PERIOD_NS, REST_EVERY
from workloads.busy import busy_machine

DEVICES = (1, 8)
ROUNDS, SECONDS = 3, 3


@dataclass(frozen=True)
class Sampled:
    """Shares of one core: the least, the median and the most of the rounds; of all looks, how far
    apart they were from what the schedule says and how late they came, in ns.

    `moves`: memory did, of all devices. `all_every_ns`: how far apart its link, clocks and state
    were asked for, at the median. `floor`: medians of what it could cost at least, were all looked
    at each 20 ms. `counted`: the driver counts what passes over the link, and need not be made to
    measure it.
    """

    devices: int
    counted: bool
    cores_taken: bool
    moves: bool
    rounds: int
    least: float
    median: float
    most: float
    off_median_ns: int
    late_median_ns: int
    late_p95_ns: int
    all_every_ns: int
    floor: Floor


@dataclass(frozen=True)
class _Round:
    share: float
    off_ns: list[int]
    late_ns: list[int]
    all_every_ns: list[int]
    floor: Floor


def measure(folder: Path) -> list[Sampled]:
    libraries = folder / "driver"
    fake_gpu.build("fake_nvml.c", libraries, "libnvidia-ml.so.1")
    floor = partial(gpu_floor.measure, gpu_floor.build(folder), libraries)
    state = State(folder / "state")
    conditions = list(product(DEVICES, (True, False), (False, True), (False, True)))
    with _sleeper() as pid, fake_gpu.shown(libraries, state):
        state[fake_gpu.PID], state[fake_gpu.USED] = pid, GIB
        return [_measured(state, pid, folder, floor, *condition) for condition in conditions]


@contextmanager
def _sleeper() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _measured(
    state: State,
    pid: int,
    folder: Path,
    floor: Callable[[], Floor],
    devices: int,
    counted: bool,
    taken: bool,
    moves: bool,
) -> Sampled:
    state[fake_gpu.COUNT], state[fake_gpu.COUNTS] = devices, counted
    with fake_gpu.moving(state, devices) if moves else nullcontext():
        rounds = [_round(pid, folder, floor, taken, moves) for _ in range(ROUNDS)]
    shares = sorted(one.share for one in rounds)
    off = [ns for one in rounds for ns in one.off_ns]
    late = [ns for one in rounds for ns in one.late_ns]
    return Sampled(
        devices, counted, taken, moves, ROUNDS,
        shares[0], statistics.median(shares), shares[-1],
        round(float(np.median(off))), round(float(np.median(late))),
        round(float(np.quantile(late, 0.95))),
        round(float(np.median([ns for one in rounds for ns in one.all_every_ns]))),
        Floor(*map(statistics.median, zip(*(astuple(one.floor) for one in rounds), strict=True))),
    )  # fmt: skip


def _round(pid: int, folder: Path, floor: Callable[[], Floor], taken: bool, moves: bool) -> _Round:
    with busy_machine() if taken else nullcontext(), attached(TOOLS[0], pid, folder):
        time.sleep(SECONDS)
        least = floor()
    with Reader(folder / "profile.out") as reader:
        rows = reader.stream("gpu")
        cpu_ns = int(reader.meta["own"]["gpu_cpu_ns"])
    looks: Records = rows[(rows["took_ns"] > 0) & (rows["device"] == 0)]
    stamps = np.sort(looks["ns"].astype(np.int64))
    off = np.abs(np.diff(stamps) - (PERIOD_NS if moves else REST_EVERY * PERIOD_NS))
    every = np.diff(stamps[(looks["valid"] & np.uint16(Valid.LINK)) > 0])
    return _Round(
        cpu_ns / int(np.ptp(stamps)), off.tolist(), looks["late_ns"].tolist(), every.tolist(), least
    )
