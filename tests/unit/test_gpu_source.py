"""The sampler of GPUs: its schedule on a clock of the test's, NVML through the real binding."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pynvml
import pytest

from lab import fake_gpu
from lab.fake_gpu import GIB, State
from ttftprof.clock import NS_PER_MS, now_ns
from ttftprof.gpu_rows import GPU_ROW, Valid
from ttftprof.sources import gpu, nvml
from ttftprof.sources.gpu import Drained, Gpus, Look, Sampler, Schedule, Vendor

MIB = 1 << 20


class Clock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.ns = 1_000 * NS_PER_MS

    def __call__(self) -> int:
        return self.ns

    def move(self, ms: float) -> None:
        self.ns += round(ms * NS_PER_MS)


class Slow(Vendor):
    """A device each of whose looks takes as long as it is told."""

    name = "slow"

    def __init__(self, clock: Clock) -> None:
        self.clock, self.takes_ms, self.ticks = clock, 0.0, list[int]()

    def open(self) -> list[dict[str, Any]]:
        return [{"index": 0, "name": "slow"}]

    def look(self, device: int, tick: int) -> Look:
        self.ticks.append(tick)
        self.clock.move(self.takes_ms)
        return Look(Valid.USED, {"used_bytes": tick})

    def close(self) -> None:
        return


# -- the schedule ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "due", "tick", "missed"),
    [(100, 120, 1, 0), (119, 120, 1, 0), (120, 140, 2, 1), (165, 180, 4, 3), (90, 120, 1, 0)],
)
def test_the_schedule_keeps_its_moments(now: int, due: int, tick: int, missed: int) -> None:
    schedule = Schedule(due_ns=100, period_ns=20)
    schedule.passed(now)
    assert (schedule.due_ns, schedule.tick, schedule.missed) == (due, tick, missed)


def test_lateness_is_recorded_and_not_handed_on() -> None:
    clock = Clock()
    sampler = Sampler(Slow(clock), clock=clock)
    assert sampler.open()
    schedule = Schedule(clock(), gpu.PERIOD_NS)
    for late_ms in (0, 3, 0, 50, 1):
        clock.ns = schedule.due_ns + late_ms * NS_PER_MS
        sampler.sample(schedule)
    rows = sampler.drain().rows
    assert (rows["late_ns"] // NS_PER_MS).tolist() == [0, 3, 0, 50, 1]
    # Two moments passed during the one that was 50 ms late; the next are where they always were.
    assert rows["used_bytes"].tolist() == [0, 1, 2, 3, 6]
    assert schedule.missed == 2


def test_a_slow_look_is_timed_and_costs_moments_not_the_schedule() -> None:
    clock = Clock()
    vendor = Slow(clock)
    sampler = Sampler(vendor, clock=clock)
    assert sampler.open()
    schedule = Schedule(clock(), gpu.PERIOD_NS)
    began = schedule.due_ns
    vendor.takes_ms = 45
    sampler.sample(schedule)
    assert sampler.drain().rows["took_ns"].tolist() == [45 * NS_PER_MS]
    assert schedule.due_ns == began + 3 * gpu.PERIOD_NS


# -- NVML -----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_gpu.build("fake_nvml.c", tmp_path_factory.mktemp("nvml"), nvml.LIBRARY)


@pytest.fixture
def state(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    """The real binding, over the tests' own library."""
    shared = State(tmp_path / "state")
    monkeypatch.setenv("FAKE_GPU_STATE", str(shared.path))
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(library)))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return shared


@pytest.fixture
def running(state: State) -> Iterator[Gpus]:
    gpus = Gpus([nvml.Nvml()])
    gpus.start()
    yield gpus
    gpus.stop()


def opened() -> Sampler:
    sampler = Sampler(nvml.Nvml())
    assert sampler.open()
    return sampler


def look(sampler: Sampler, times: int = 1) -> Drained:
    schedule = Schedule(now_ns(), gpu.PERIOD_NS)
    for _ in range(times):
        sampler.sample(schedule)
        schedule.due_ns = now_ns()
    return sampler.drain()


def facts(drained: Drained, kind: str) -> list[dict[str, Any]]:
    return [fact for found, _, fact in drained.facts if found == kind]


def test_a_device_and_its_numbers(state: State) -> None:
    state[fake_gpu.USED], state[fake_gpu.BUSY], state[fake_gpu.PID] = 3 * GIB, 37, 1234
    state[fake_gpu.PERSISTENCE] = 1
    state.link(1, 4, 8, 16)
    drained = look(opened())
    (device,) = facts(drained, "gpu")
    assert device == {
        "index": 0, "parent": None, "vendor": "nvidia", "source": "nvml", "name": "Fake GPU",
        "pci": "00000000:01:00.0", "driver": "999.88", "total_bytes": 8 * GIB,
        "persistence": True, "link_gen_max": 4, "link_width_max": 16,
    }  # fmt: skip
    (row,) = drained.rows
    assert Valid(int(row["valid"])) == (
        Valid.USED | Valid.BUSY | Valid.PSTATE | Valid.LINK | Valid.CLOCKS | Valid.THROTTLE
    )
    assert (row["used_bytes"], row["busy_percent"], row["pstate"]) == (3 * GIB, 37, 2)
    assert (row["link_gen"], row["link_width"], row["throttle"]) == (1, 8, 4)
    assert (row["core_mhz"], row["memory_mhz"]) == (1500, 9001)
    assert drained.process_rows[["device", "tgid", "used_bytes"]].tolist() == [(0, 1234, 3 * GIB)]


def test_a_process_is_told_when_it_changes_and_when_it_is_gone(state: State) -> None:
    sampler = opened()
    state[fake_gpu.PID] = 7
    for used in (MIB, MIB, 2 * MIB, 0):
        state[fake_gpu.USED] = used
        look_at = Schedule(now_ns(), gpu.PERIOD_NS)
        sampler.sample(look_at)
    rows = sampler.drain().process_rows
    assert rows[["tgid", "used_bytes"]].tolist() == [(7, MIB), (7, 2 * MIB), (7, 0)]


def test_what_is_not_supported_is_told_once_and_not_asked_again(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "FAKE_GPU_REFUSES", "nvmlDeviceGetUtilizationRates nvmlDeviceGetPcieThroughput"
    )
    sampler = opened()
    sampler.sample_slowly()
    first = look(sampler, 11)
    sampler.sample_slowly()
    before = state[fake_gpu.CALLS]
    again = look(sampler)  # the 12th look is at memory, processes and the rest, not at the refused
    assert [f["call"] for f in facts(first, "gpu_refused")] == [
        "nvmlDeviceGetMigMode", "nvmlDeviceGetPcieThroughput", "nvmlDeviceGetPcieThroughput",
        "nvmlDeviceGetUtilizationRates",
    ]  # fmt: skip
    assert facts(again, "gpu_refused") == []
    assert not any(int(row["valid"]) & Valid.BUSY for row in first.rows if row["error_ns"] == 0)
    assert state[fake_gpu.CALLS] - before < 10
    source = Gpus([])
    source._samplers = [sampler]
    assert source.source().state == "ok"


def test_an_old_driver_has_the_old_call_for_memory(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_GPU_REFUSES", "nvmlDeviceGetMemoryInfo_v2")
    state[fake_gpu.USED] = GIB
    assert look(opened()).rows["used_bytes"].tolist() == [GIB]


def test_a_gpu_lost_on_the_way(state: State) -> None:
    state[fake_gpu.COUNT] = 2
    sampler = opened()
    assert look(sampler).rows["device"].tolist() == [0, 1]
    state[fake_gpu.LOST] = 1
    lost = look(sampler, 2)
    assert lost.rows["device"].tolist() == [1, 1]
    assert facts(lost, "gpu_lost") == [{"index": 0, "reason": "GPU is lost"}]
    gpus = Gpus([])
    gpus._samplers = [sampler]
    assert gpus.source().state == "degraded"
    assert "GPU 0 was lost" in gpus.source().reason


def test_instances_of_a_partitioned_gpu(state: State) -> None:
    state[fake_gpu.INSTANCES] = 2
    state[fake_gpu.USED + 1] = 5 * MIB
    drained = look(opened())
    assert [(d["index"], d["parent"]) for d in facts(drained, "gpu")] == [
        (0, None), (1, 0), (2, 0)
    ]  # fmt: skip
    assert drained.rows["device"].tolist() == [0, 1, 2]


def test_no_library_is_no_thread_and_no_loss() -> None:
    gpus = Gpus([])
    gpus.start()
    assert gpus.drain() == []
    gpus.stop()
    source = gpus.source()
    assert (source.state, source.reason, source.lost) == (
        "absent", "no NVIDIA driver library", ""
    )  # fmt: skip


def test_a_driver_that_is_not_loaded_is_a_loss(state: State) -> None:
    state[fake_gpu.INIT_ERROR] = 9
    gpus = Gpus([nvml.Nvml()])
    gpus.start()
    gpus.stop()
    source = gpus.source()
    assert source.state == "absent"
    assert "Driver Not Loaded" in source.reason
    assert source.lost


def test_the_drivers_own_stamps_come_out_on_our_clock(state: State) -> None:
    """A sample each 50 ms of wall time, whose value is the tenth of a second it fell into."""
    sampler = opened()
    sampler.sample_slowly()  # what it remembers of before
    began = now_ns()
    time.sleep(0.3)
    sampler.sample_slowly()
    rows = sampler.drain().rows
    own = rows[(rows["valid"] == Valid.BUSY) & (rows["error_ns"] > 0)]
    assert 4 <= len(own) <= 8
    assert own["ns"].min() > began - 60 * NS_PER_MS
    assert own["ns"].max() <= now_ns()
    wall = own["ns"].astype(np.int64) + (time.time_ns() - now_ns())
    off = np.abs(wall - np.round(wall / (50 * NS_PER_MS)) * 50 * NS_PER_MS)
    assert (off <= own["error_ns"] + 100_000).all()
    assert ((wall + NS_PER_MS) // (100 * NS_PER_MS) % 10).tolist() == own["busy_percent"].tolist()


def test_a_call_that_hangs_holds_up_nobody(running: Gpus, state: State) -> None:
    wait_for_rows(running, 1)
    state[fake_gpu.HANG_MS] = 1_600
    time.sleep(1.2)
    before = now_ns()
    (drained,) = running.drain()
    assert now_ns() - before < 50 * NS_PER_MS
    (hung,) = facts(drained, "gpu_hung")
    assert hung["call"] == "nvmlDeviceGetMemoryInfo"
    assert before - hung["since_ns"] > 1_000 * NS_PER_MS
    assert facts(running.drain()[0], "gpu_hung") == []
    time.sleep(0.6)
    rows = wait_for_rows(running, 3)
    assert rows["took_ns"].max() > 1_500 * NS_PER_MS  # the look itself, and then it went on
    running.stop()
    assert running.source().state == "degraded"


def wait_for_rows(gpus: Gpus, count: int) -> Any:
    found = np.empty(0, GPU_ROW)
    until = now_ns() + 5_000 * NS_PER_MS
    while now_ns() < until:
        found = np.concatenate([found, *(d.rows for d in gpus.drain())])
        if len(found[(found["valid"] & np.uint16(Valid.USED)) > 0]) >= count:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{len(found)} rows in 5 s")


def test_the_schedule_is_held_in_real_time(running: Gpus) -> None:
    """Every 20 ms, within 2 ms at the median; best of three on a busy machine."""
    wait_for_rows(running, 3)
    best = 1 << 62
    for _ in range(3):
        running.drain()
        time.sleep(0.8)
        (drained,) = running.drain()
        rows = drained.rows[(drained.rows["valid"] & np.uint16(Valid.USED)) > 0]
        steps = np.diff(rows["ns"].astype(np.int64)) - gpu.PERIOD_NS
        best = min(best, int(np.median(np.abs(steps))))
        assert len(rows) > 10
    assert best < 2 * NS_PER_MS
