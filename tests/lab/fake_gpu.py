"""The tests' own GPUs: C libraries with the real ABI, and the words of memory they share."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
WORDS = 80
GIB = 1 << 30

# As in fake_nvml.c; per device where an index is added.
USED, BUSY, LOST, PID, TOTAL = 0, 8, 16, 24, 32
COUNT, PERSISTENCE, LINK, RX = 40, 41, 42, 43
COUNTS, RECEIVED, SENT, DRAWS = 44, 45, 46, 47
HANG_MS, DELAY_US, CALLS, INSTANCES, INIT_ERROR = 48, 49, 50, 51, 52
REFUSED, OWNERS, OWNERS_MOST = 53, 64, 8


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
