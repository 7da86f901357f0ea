"""The tests' own GPUs: C libraries with the real ABI, and the words of memory they share."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self
from unittest.mock import patch

HERE = Path(__file__).parent
WORDS = 80
GIB = 1 << 30
_MOVES_EVERY_S, _MOVES_BYTES = 0.2, 64 << 20

# As in fake_nvml.c; per device where an index is added.
USED, BUSY, LOST, PID, TOTAL = 0, 8, 16, 24, 32
COUNT, PERSISTENCE, LINK, RX = 40, 41, 42, 43
COUNTS, RECEIVED, SENT, DRAWS = 44, 45, 46, 47
HANG_MS, DELAY_US, CALLS, INSTANCES, INIT_ERROR = 48, 49, 50, 51, 52
REFUSED, INIT_MS, UNTOLD, INSTANCE_USED = 53, 54, 55, 56
OWNERS, OWNERS_MOST = 64, 8


class State:
    """What the fake GPU says, word by word; shared with every process that maps the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(8 * WORDS))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8 * WORDS)
        for device in range(8):
            self[TOTAL + device] = 8 * GIB
        self.link(4, 4, 16, 16)

    def link(self, gen: int, gen_max: int, width: int, width_max: int) -> None:
        self[LINK] = gen | gen_max << 8 | width << 16 | width_max << 24

    def __getitem__(self, word: int) -> int:
        return int(struct.unpack_from("<Q", self._memory, 8 * word)[0])

    def __setitem__(self, word: int, value: int) -> None:
        struct.pack_into("<Q", self._memory, 8 * word, value)


@contextmanager
def shown(libraries: Path, state: State) -> Iterator[None]:
    """What is started meanwhile finds the tests' own NVML in this folder, and what it says."""
    found = {"FAKE_GPU_STATE": str(state.path), "LD_LIBRARY_PATH": str(libraries)}
    with patch.dict(os.environ, found):
        yield


def await_that(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until, "waited for in vain"
        time.sleep(0.002)


@contextmanager
def moving(state: State, devices: int = 1) -> Iterator[None]:
    """Memory of each device rises again and again, as in a load."""
    ends = threading.Event()

    def moves() -> None:
        while not ends.wait(_MOVES_EVERY_S):
            for used in range(USED, USED + devices):
                state[used] = (state[used] + _MOVES_BYTES) % GIB

    thread = threading.Thread(target=moves)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def await_calls(state: State, more: int) -> None:
    """Until NVML was asked so much more, as by a sampler."""
    goal = state[CALLS] + more
    await_that(lambda: state[CALLS] >= goal)


class Stamp(NamedTuple):
    """One call, as the fake libcuda itself saw it begin and end."""

    name: str
    pid: int
    begin_ns: int
    end_ns: int


def stamps(path: Path) -> list[Stamp]:
    """What FAKE_CUDA_STAMPS holds, in the order in which the calls returned."""
    lines = (line.split() for line in path.read_text().splitlines())
    return [Stamp(name, *map(int, numbers)) for name, *numbers in lines]


def build(source: str, folder: Path, library: str) -> Path:
    """`source` of this folder as a shared library of that name in `folder`, with the versions of
    symbols that a .map beside it gives."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, "the fake GPU needs a C compiler: scripts/setup installs it"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / library
    versions = HERE / source.replace(".c", ".map")
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{library}"]
    flags += [f"-Wl,--version-script={versions}"] if versions.exists() else []
    subprocess.run([compiler, *flags, "-o", str(path), str(HERE / source)], check=True)
    return path


class MemoryBack:
    """Within the block, the driver's part in the end of a process: what it held is given back once
    another has been refused for want of it, and `AFTER_S` have passed.

    `given`: {pid: just before, just after}.
    """

    AFTER_S = 0.03

    def __init__(self, state: State) -> None:
        self._state = state
        self._refused: dict[int, int] = {}  # how many were, when it was first seen to be gone
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.given: dict[int, tuple[int, int]] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.wait(0.002):
            for slot in range(OWNERS, OWNERS + 2 * OWNERS_MOST, 2):
                pid = self._state[slot]
                if pid and not Path(f"/proc/{pid}").exists():
                    self._is_gone(pid, slot)

    def _is_gone(self, pid: int, slot: int) -> None:
        state = self._state
        if state[REFUSED] == self._refused.setdefault(pid, state[REFUSED]):
            return
        time.sleep(self.AFTER_S)
        before_ns = time.monotonic_ns()
        state[USED] -= state[slot + 1]
        state[slot + 1] = state[slot] = 0
        self.given[pid] = before_ns, time.monotonic_ns()
