"""What the sampler of GPUs could cost at least on this machine: threads that do only a part of it.

They run as the sampler does, before threads that compute, and at the same moments.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pynvml

from lab import fake_gpu
from ttftprof.clock import NS_PER_S
from ttftprof.sources import nvml
from ttftprof.sources.gpu_schedule import PERIOD_NS, Alarm, Schedule, before_others

WAKES = NS_PER_S // PERIOD_NS


@dataclass(frozen=True)
class Floor:
    """Shares of one core of a thread that wakes each 20 ms: in C, in Python, and in Python with
    the same calls of NVML as the sampler, by ctypes, whose answers it does not look at."""

    wakes_in_c: float
    wakes: float
    wakes_and_calls: float


def build(folder: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(fake_gpu.build("gpu_floor.c", folder, "libgpu_floor.so")))
    library.wakes.restype = ctypes.c_longlong
    library.wakes.argtypes = ctypes.c_longlong, ctypes.c_longlong
    return library


def measure(library: ctypes.CDLL, libraries: Path) -> Floor:
    """One after the other; the calls go to the fake NVML of `libraries`."""
    vars(pynvml)["nvmlLib"] = ctypes.CDLL(str(libraries / nvml.LIBRARY))
    return Floor(
        _share(lambda: int(library.wakes(PERIOD_NS, WAKES))),
        _share(lambda: _woken(lambda number: None)),
        _share(lambda: _woken(_calls())),
    )


def _share(run: Callable[[], int]) -> float:
    """Of one core, in a thread of its own; `run` tells the processor time of its wakes."""
    spent: list[int] = []
    thread = threading.Thread(target=lambda: spent.append(run()))
    with before_others():
        thread.start()
    thread.join()
    return spent[0] / (WAKES * PERIOD_NS)


def _woken(work: Callable[[int], None]) -> int:
    schedule = Schedule(time.monotonic_ns() + PERIOD_NS, PERIOD_NS)
    began_ns = time.thread_time_ns()
    with Alarm(schedule) as alarm:
        for number in range(WAKES):
            alarm.wait()
            work(number)
            schedule.tick += 1
    return time.thread_time_ns() - began_ns


def _calls() -> Callable[[int], None]:
    vendor = nvml.Nvml()
    devices = [int(device["index"]) for device in vendor.open()]
    rounds = [
        [(q.function, q.arguments) for d in devices for q in vendor.questions(d, turn)]
        for turn in range(2)
    ]

    def call(number: int) -> None:
        for function, arguments in rounds[number % 2]:
            function(*arguments)

    return call
