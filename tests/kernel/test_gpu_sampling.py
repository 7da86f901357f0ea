"""Samples of GPUs in whole recordings: their schedule, and devices and drivers that misbehave.

The real binding asks the tests' own NVML, as `ttftprof record` does it.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kernel.support import Recording, recording
from lab import fake_gpu
from lab.fake_gpu import State
from ttftprof.clock import measure_offset
from ttftprof.events import Records
from ttftprof.gpu_rows import Valid
from ttftprof.reports.words import warnings
from ttftprof.sources.gpu import UNSAMPLED
from ttftprof.sources.gpu_schedule import MOVES_FOR_NS, PERIOD_NS, REST_EVERY
from ttftprof.timeline import Timeline, build
from workloads.busy import busy_machine
from workloads.scripted import go, heard, scripted

pytestmark = pytest.mark.kernel

MIB = 1 << 20
MS = 1_000_000
CALLS_AFTER = 53
HUNG_S = 1.2  # more than a call may take
ENDS_WITHIN_NS = 10_000 * MS
FOREVER_MS = 3_600_000
LOOKS = 80  # calls of NVML, in which a sampler has asked for everything
# A server as far as its driver sees: maps it, calls it at a line, and stays.
SERVER = """
import ctypes, sys
cuda = ctypes.CDLL(sys.argv[1])
print("mapped", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[2])):
    cuda.cuInit(0)
print("done", flush=True)
sys.stdin.readline()
"""


@contextmanager
def server(libraries: Path) -> Iterator[subprocess.Popen[str]]:
    with scripted(SERVER, libraries / "libcuda.so.1", CALLS_AFTER) as program:
        assert heard(program) == "mapped"
        yield program


def timeline_of(recorded: Recording) -> Timeline:
    with recorded.reader() as reader:
        assert reader.meta["complete"]
        return build(reader)


def fact_of(recorded: Recording, kind: str) -> dict[str, object]:
    with recorded.reader() as reader:
        (fact,) = [fact for _, fact in reader.facts(kind)]
    return dict(fact)


def goes_on_though_hung(program: subprocess.Popen[str], recorded: Recording) -> Timeline:
    """While a call of NVML does not return: the recorder ends when told to, and has all that the
    server did."""
    time.sleep(HUNG_S)
    go(program)
    assert heard(program) == "done"
    told_to_end_ns = time.monotonic_ns()
    recorded.stop()
    assert time.monotonic_ns() - told_to_end_ns < ENDS_WITHIN_NS
    timeline = timeline_of(recorded)
    assert len(timeline.gpu.calls[program.pid]) == CALLS_AFTER
    return timeline


# -- devices and drivers that misbehave -----------------------------------------------------------


def test_a_gpu_that_is_lost_and_a_driver_that_hangs_cost_only_their_samples(
    gpu_libraries: Path, tmp_path: Path
) -> None:
    """Of two GPUs one falls off the bus; then NVML does not return any more. The recorder ends when
    told to, has all that the server did after that, and says what is missing."""
    state = State(tmp_path / "state")
    state[fake_gpu.COUNT], state[fake_gpu.USED + 1] = 2, 5 * MIB
    with (
        server(gpu_libraries) as program,
        fake_gpu.shown(gpu_libraries, state),
        recording(tmp_path / "hangs.ttft", "--pid", str(program.pid)) as recorded,
    ):
        fake_gpu.await_calls(state, 100)
        state[fake_gpu.LOST + 1] = 1
        fake_gpu.await_calls(state, 100)
        state[fake_gpu.HANG_MS] = FOREVER_MS
        fake_gpu.await_that(lambda: not state[fake_gpu.HANG_MS])
        hangs_ns = time.monotonic_ns()
        timeline = goes_on_though_hung(program, recorded)
    hung = fact_of(recorded, "gpu_hung")
    assert fact_of(recorded, "gpu_lost")["index"] == 1
    assert hung["call"] == "nvmlDeviceGetMemoryInfo_v2"
    assert 0 <= hangs_ns - int(str(hung["since_ns"])) < 1_000 * MS
    samples = timeline.gpu.samples[timeline.gpu.samples["took_ns"] > 0]
    assert set(samples["device"].tolist()) == {0, 1}
    assert int(samples["ns"].max()) <= int(str(hung["since_ns"]))
    (warning,) = [w for w in warnings(recorded.report()) if "gpu" in w]
    for said in ("GPU 1 was lost while recording", "nvmlDeviceGetMemoryInfo_v2 did not return"):
        assert said in warning


def test_a_driver_that_does_not_start_is_said_and_waited_for_by_nobody(
    gpu_libraries: Path, tmp_path: Path
) -> None:
    """As one does that waits for firmware: recording begins, sees the calls into it, and ends."""
    state = State(tmp_path / "state")
    state[fake_gpu.INIT_MS] = FOREVER_MS
    with (
        server(gpu_libraries) as program,
        fake_gpu.shown(gpu_libraries, state),
        recording(tmp_path / "starts.ttft", "--pid", str(program.pid)) as recorded,
    ):
        timeline = goes_on_though_hung(program, recorded)
    assert not timeline.gpu.devices
    assert not len(timeline.gpu.samples)
    assert fact_of(recorded, "gpu_hung")["call"] == "nvmlInit"
    report = recorded.report()
    (source,) = [s for s in report.sources if s.name == "gpu"]
    assert (source.state, source.lost) == ("absent", UNSAMPLED)
    (warning,) = [w for w in warnings(report) if "gpu" in w]
    for said in ("nvmlInit did not return", UNSAMPLED):
        assert said in warning
    assert not [s for s in report.series if s.name.startswith("gpu")]


# -- several devices ------------------------------------------------------------------------------


def test_several_gpus_one_of_them_partitioned(gpu_libraries: Path, tmp_path: Path) -> None:
    """The server is on the second instance of the first GPU; the driver does not tell how much
    memory its process has on the other GPU, as in a container."""
    state = State(tmp_path / "state")
    state[fake_gpu.COUNT], state[fake_gpu.INSTANCES], state[fake_gpu.UNTOLD] = 2, 2, 0b10
    with (
        server(gpu_libraries) as program,
        fake_gpu.shown(gpu_libraries, state),
        recording(tmp_path / "many.ttft", "--pid", str(program.pid)) as recorded,
    ):
        state[fake_gpu.PID] = state[fake_gpu.PID + 1] = program.pid
        state[fake_gpu.USED] = state[fake_gpu.INSTANCE_USED + 1] = 600 * MIB
        state[fake_gpu.USED + 1] = 7 * MIB
        fake_gpu.await_calls(state, 3 * LOOKS)
        go(program)
        assert heard(program) == "done"
    gpu = timeline_of(recorded).gpu
    assert {gpu.name_of(i): (d["name"], d["parent"]) for i, d in gpu.devices.items()} == {
        "GPU 0": ("Fake GPU", None),
        "GPU 1": ("Fake GPU", None),
        "GPU 0 MIG 0": ("Fake GPU MIG 1g", 0),
        "GPU 0 MIG 1": ("Fake GPU MIG 1g", 0),
    }
    used = {gpu.name_of(i): gpu.of_device(i, Valid.USED)["used_bytes"] for i in gpu.devices}
    assert {name: int(rows[-1]) for name, rows in used.items()} == {
        "GPU 0": 600 * MIB, "GPU 1": 7 * MIB, "GPU 0 MIG 0": 0, "GPU 0 MIG 1": 600 * MIB,
    }  # fmt: skip
    processes = {
        (int(r["device"]), int(r["tgid"]), int(r["used_bytes"])) for r in gpu.process_samples
    }
    assert processes == {(0, program.pid, 600 * MIB), (3, program.pid, 600 * MIB)}
    assert gpu.held_by(program.pid) == {3}
    refused = {(r.device, r.call): r.reason for r in gpu.refused}
    assert refused[3, "nvmlDeviceGetUtilizationRates"] == "Not Supported"
    assert refused[1, "nvmlDeviceGetComputeRunningProcesses_v3"] == "their memory is not told"
    report = recorded.report()
    assert [n for n in report.notes if "GPU" in n] == ["GPU 1 does not tell its memory by process"]
    curves = {s.path for s in report.series if s.name == "gpu_memory_bytes"}
    assert curves == set(used)
    assert {s.path for s in report.series if s.name == "gpu_process_bytes"} == {
        f"GPU 0 pid {program.pid}", f"GPU 0 MIG 1 pid {program.pid}"
    }  # fmt: skip


# -- the schedule ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnderLoad:
    """Samples of one GPU while twice as many processes computed as there are cores: while its
    memory moves, and at rest."""

    samples: Records
    began_ns: int  # to move
    rests_ns: int
    offsets_ns: tuple[int, int]  # of wall time, before and after
    cpu_ns: int  # as the recording has it
    looks_cpu_ns: int  # as the kernel counts it, of the thread that looks


@pytest.fixture(scope="module")
def under_load(gpu_libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> UnderLoad:
    folder = tmp_path_factory.mktemp("load")
    state = State(folder / "state")
    before = measure_offset()
    with (
        server(gpu_libraries) as program,
        fake_gpu.shown(gpu_libraries, state),
        recording(folder / "load.ttft", "--pid", str(program.pid)) as recorded,
    ):
        fake_gpu.await_calls(state, LOOKS)
        looks = thread_that_looks(recorded.process.pid)
        with busy_machine():
            with fake_gpu.moving(state):
                began_ns = time.monotonic_ns()
                time.sleep(3)
                rests_ns = time.monotonic_ns()
            time.sleep(3)
        looks_cpu_ns = int(looks.joinpath("schedstat").read_text().split()[0])
    rows = timeline_of(recorded).gpu.samples
    with recorded.reader() as reader:
        cpu_ns = int(reader.meta["own"]["gpu_cpu_ns"])
    offsets = before.offset_ns, measure_offset().offset_ns
    return UnderLoad(rows, began_ns, rests_ns, offsets, cpu_ns, looks_cpu_ns)


def thread_that_looks(pid: int) -> Path:
    """The one that goes before threads that compute."""
    (task,) = (
        task
        for task in Path(f"/proc/{pid}/task").iterdir()
        if os.sched_getscheduler(int(task.name)) == os.SCHED_RR
    )
    return task


def looks_of(load: UnderLoad) -> Records:
    return load.samples[load.samples["took_ns"] > 0]


def off_by_ns(load: UnderLoad, begin_ns: int, end_ns: int, period_ns: int) -> float:
    """From the schedule, at the median; in the best third, as others may use the machine."""
    stamps = looks_of(load)["ns"].astype(np.int64)
    stamps = stamps[(stamps >= begin_ns) & (stamps < end_ns)]
    thirds = np.array_split(np.abs(np.diff(stamps) - period_ns), 3)
    assert min(map(len, thirds)) > 10
    return min(float(np.median(third)) for third in thirds)


def test_the_schedule_is_held_under_load(under_load: UnderLoad) -> None:
    """Every 20 ms within 2 ms at the median while memory moves; every 40 ms at rest."""
    began_ns, rests_ns = under_load.began_ns + 500 * MS, under_load.rests_ns
    assert off_by_ns(under_load, began_ns, rests_ns, PERIOD_NS) < 2 * MS
    after_ns = rests_ns + MOVES_FOR_NS + 500 * MS
    assert off_by_ns(under_load, after_ns, 1 << 62, REST_EVERY * PERIOD_NS) < 2 * MS


def test_lateness_is_recorded_with_each_look(under_load: UnderLoad) -> None:
    """Less it, all looks lie on one grid."""
    rows = looks_of(under_load)
    due = rows["ns"].astype(np.int64) - rows["late_ns"]
    off = (due - int(np.median(due % PERIOD_NS))) % PERIOD_NS
    assert float(np.median(np.minimum(off, PERIOD_NS - off))) < MS
    thirds = np.array_split(rows["late_ns"], 3)
    assert min(float(np.median(third)) for third in thirds) < 2 * MS


def test_the_samplers_own_time_is_recorded(under_load: UnderLoad) -> None:
    """What it takes is in docs/COST.md; here, that the figure is that of its threads."""
    assert under_load.cpu_ns > 0
    lasted_ns = int(np.ptp(looks_of(under_load)["ns"].astype(np.int64)))
    assert under_load.cpu_ns < lasted_ns // 10
    assert under_load.looks_cpu_ns > under_load.cpu_ns // 4


def test_the_drivers_own_stamps_are_brought_to_our_clock(under_load: UnderLoad) -> None:
    """A sample each 50 ms of wall time, whose value is the tenth of a second it fell into."""
    own = under_load.samples[under_load.samples["error_ns"] > 0]
    own = own[own["error_ns"] < MS]  # one that was interrupted as it compared the clocks says so
    assert len(own) > 5
    before, after = under_load.offsets_ns
    wall = own["ns"].astype(np.int64) + before
    off = np.abs(wall - np.round(wall / (50 * MS)) * 50 * MS)
    assert (off <= own["error_ns"] + abs(after - before) + MS // 10).all()
    tenths = (wall + 2 * MS) // (100 * MS) % 10
    assert tenths.tolist() == own["busy_percent"].tolist()
