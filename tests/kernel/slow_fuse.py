"""A FUSE daemon (lab/slow_fuse.c) of known delay and rate, mounted where a test wants it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "lab" / "slow_fuse.c"
SIZE_BYTES = 16 << 20
DELAY_US = 8000
BYTES_PER_SECOND = 60_000_000


def compiled(folder: Path) -> Path:
    """The daemon's program, built in `folder`."""
    program = folder / "slow_fuse"
    subprocess.run(["gcc", "-O2", "-Wall", "-o", str(program), str(SOURCE)], check=True)
    return program


@dataclass
class Daemon:
    """A mounted slow file system; `answered` is its own list, (offset, size), once it has ended."""

    point: Path
    process: subprocess.Popen[str]
    answered: list[tuple[int, int]] = field(default_factory=list)

    @property
    def model(self) -> Path:
        return self.point / "model"

    def set_readahead(self, kib: int) -> None:
        device = self.point.stat().st_dev
        bdi = Path(f"/sys/class/bdi/{device >> 8}:{device & 0xFF}/read_ahead_kb")
        bdi.write_text(str(kib))

    def end(self) -> None:
        out, _ = self.process.communicate("", timeout=20)
        self.answered = [(int(o), int(s)) for o, s in map(str.split, out.splitlines())]


@contextmanager
def mounted(
    binary: Path,
    point: Path,
    *more: int,
    size_bytes: int = SIZE_BYTES,
    delay_us: int = DELAY_US,
    rate: int = BYTES_PER_SECOND,
    direct_io: bool = False,
) -> Iterator[Daemon]:
    """`more`: after how many answers it gives none. `direct_io`: the kernel is to cache nothing."""
    point.mkdir(exist_ok=True)
    arguments = [str(n) for n in (size_bytes, delay_us, rate, *more)]
    if direct_io:
        arguments += [*([] if more else [str(0xFFFFFFFF)]), "direct_io"]
    process = subprocess.Popen(
        [str(binary), str(point), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    daemon = Daemon(point, process)
    try:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield daemon
    finally:
        if process.poll() is None:
            daemon.end()
        subprocess.run(["umount", "-l", str(point)], capture_output=True, check=False)
