"""The profilers that `bench` holds against each other: how each is started, armed, ended, read.

Each is attached to a process that runs already and follows its children, and writes a file. Facts
as alike as the tools allow: waits, system calls, faults, page-cache insertions, block requests.
"""

from __future__ import annotations

import atexit
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

import psutil

from ttftprof.recording import Reader

LAB = Path(__file__).parent
ARMED_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0
_LOST = re.compile(r"LOST (\d+) events|[Ll]ost (\d+)")


@dataclass(frozen=True, slots=True)
class Tool:
    """One profiler. `command`: of (pid, output file). `armed`: whether it is, by what it wrote to
    its terminal, its process and its output file. `lost`: how many events, by the file and what it
    wrote. `about`: for the table's legend."""

    name: str
    needs: str
    command: Callable[[int, Path], Sequence[str]]
    armed: Callable[[str, psutil.Process, Path], bool]
    lost: Callable[[Path, str], int]
    about: str


@dataclass
class Attached:
    """A profiler that is armed, and at its end what it took."""

    process: psutil.Process
    armed_s: float
    peak_bytes: int = 0
    file_bytes: int = 0
    lost: int = 0


def _record(*options: str) -> Callable[[int, Path], Sequence[str]]:
    def command(pid: int, out: Path) -> Sequence[str]:
        words = [sys.executable, "-m", "ttftprof", "record", "--pid", str(pid), "--force"]
        return [*words, "-o", str(out), "--ready-file", f"{out}.ready", "--quiet", *options]

    return command


def _floor(*options: str) -> Callable[[int, Path], Sequence[str]]:
    return lambda pid, _out: [sys.executable, "-m", "lab.bench_floor", str(pid), *options]


def _ready(_said: str, _process: psutil.Process, out: Path) -> bool:
    return Path(f"{out}.ready").exists()


def _says(word: str) -> Callable[[str, psutil.Process, Path], bool]:
    return lambda said, _process, out: (
        word in said or (out.exists() and word in out.read_text(errors="replace"))
    )


def _opened_events(_said: str, process: psutil.Process, _out: Path) -> bool:
    """perf says nothing: armed is when it waits for its events."""
    return any("perf_event" in link for link in _descriptors(process)) and _is_polling(process)


def _descriptors(process: psutil.Process) -> list[str]:
    try:
        return [str(fd.readlink()) for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
    except OSError:
        return []


def _is_polling(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_SLEEPING
    except psutil.NoSuchProcess:
        return False


def _lost_in_recording(out: Path, _said: str) -> int:
    with Reader(out) as reader:
        return sum(reader.lost().values())


def _lost_in_text(out: Path, said: str) -> int:
    told = said + (out.read_text(errors="replace") if out.exists() else "")
    return sum(int(a or b) for a, b in _LOST.findall(told))


TOOLS = (
    Tool(
        "ttftprof",
        "",
        _record(),
        _ready,
        _lost_in_recording,
        "`ttftprof record`, as it is by default",
    ),
    Tool(
        "ttftprof, all",
        "",
        _record("--overhead-budget", "off", "--gpu-launches"),
        _ready,
        _lost_in_recording,
        "`ttftprof record --overhead-budget off --gpu-launches`: every probe, whatever it costs",
    ),
    Tool(
        "bcc",
        "/usr/lib/python3/dist-packages/bcc",
        lambda pid, out: ["/usr/bin/python3", str(LAB / "bench_bcc.py"), str(pid), str(out)],
        _says("armed"),
        _lost_in_text,
        "`tests/lab/bench_bcc.py`, by Debian's python3-bpfcc",
    ),
    Tool(
        "bpftrace",
        "bpftrace",
        lambda pid, out: ["bpftrace", "-B", "none", "-o", str(out), f"{LAB}/bench.bt", str(pid)],
        _says("armed"),
        _lost_in_text,
        "`tests/lab/bench.bt`",
    ),
    Tool(
        "perf trace",
        "perf",
        lambda pid, out: ["perf", "trace", "-F", "all", "--syscalls", "-e", "block:*",
                          "-p", str(pid), "-o", str(out)],
        _opened_events,
        _lost_in_text,
        "`perf trace -F all --syscalls -e block:*`; attached to a process it does not follow new "
        "ones",
    ),
    Tool(
        "floor",
        "",
        _floor(),
        _says("armed"),
        _lost_in_text,
        "BPF programs that do nothing, on the hooks of ttftprof: no profiler by them goes below",
    ),
    Tool(
        "floor, filtered",
        "",
        _floor("--filter"),
        _says("armed"),
        _lost_in_text,
        "the same, each asking only whether the thread is the target's",
    ),
    Tool(
        "strace",
        "strace",
        lambda pid, out: ["strace", "-f", "-tt", "-T", "-o", str(out), "-p", str(pid)],
        _says("attached"),
        _lost_in_text,
        "`strace -f -tt -T`: system calls alone, no faults and no requests to disks",
    ),
)  # fmt: skip


# The same probes on a kernel without types of its own
BY_BCC = Tool(
    "ttftprof by bcc",
    "/usr/lib/python3/dist-packages/bcc",
    _record("--loader", "bcc"),
    _ready,
    _lost_in_recording,
    "`ttftprof record --loader bcc`: the same probes, by types that bcc compiles of headers",
)


@cache
def bcc_headers() -> dict[str, str]:
    """Where bcc finds headers to compile with. A kernel that brings none gets those of a Debian
    kernel, both halves as one tree: arguments of tracepoints come from the running kernel anyway.
    """
    if Path(f"/lib/modules/{platform.release()}/build").exists():
        return {}
    own = sorted(Path("/usr/src").glob("linux-headers-*-amd64"))
    if not own:
        return {}
    common = own[-1].with_name(own[-1].name.replace("-amd64", "-common"))
    tree = tempfile.mkdtemp(prefix="bench-headers-")
    for half in (common, own[-1]):
        subprocess.run(["cp", "-rsf", f"{half}/.", tree], check=True, stderr=subprocess.DEVNULL)
    atexit.register(shutil.rmtree, tree)
    return {"BCC_KERNEL_SOURCE": tree}


def _as_installed() -> dict[str, str]:
    """This environment, but Python keeps what it compiled, as an installed program has it."""
    return {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}


def missing(tool: Tool) -> bool:
    return bool(tool.needs) and shutil.which(tool.needs) is None and not Path(tool.needs).exists()


@contextmanager
def attached(
    tool: Tool, pid: int, folder: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Attached]:
    """The tool, armed, while the block runs; the rest of what it took is filled in at its end."""
    out, said = folder / "profile.out", folder / "profile.said"
    for old in folder.glob("profile.*"):
        old.unlink()
    env = {**_as_installed(), **bcc_headers(), **environment}  # made before the clock runs
    began = time.monotonic()
    with said.open("wb") as terminal:
        process = subprocess.Popen(
            tool.command(pid, out),
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=terminal,
            env=env,
        )
    try:
        own = psutil.Process(process.pid)
        while not tool.armed(said.read_text(errors="replace"), own, out):
            ended = process.poll()
            if ended is not None or time.monotonic() - began > ARMED_TIMEOUT_S:
                raise RuntimeError(_why_not_armed(ended, said.read_text(errors="replace")))
            time.sleep(0.002)
        found = Attached(own, time.monotonic() - began)
        yield found
        found.peak_bytes = _peak_bytes(own)
        process.send_signal(signal.SIGINT)
        process.wait(END_TIMEOUT_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    found.file_bytes = out.stat().st_size if out.exists() else 0
    found.lost = tool.lost(out, said.read_text(errors="replace"))


def _why_not_armed(status: int | None, said: str) -> str:
    """On one line: how it ended, and the last of what it said."""
    how = f"not armed within {ARMED_TIMEOUT_S:.0f} s" if status is None else f"ended with {status}"
    return " / ".join([how, *said.strip().splitlines()[-3:]])


def cpu_s(process: psutil.Process) -> float:
    """Of the tool and what it started."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return float(total)


def resident_bytes(process: psutil.Process) -> int:
    """Of the tool, and what its children have to themselves."""
    return int(process.memory_info().rss) + _of_children(process)


def _peak_bytes(process: psutil.Process) -> int:
    """The tool's VmHWM, and what its children have to themselves."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    return (int(peak[1]) * 1024 if peak else 0) + _of_children(process)


def _of_children(process: psutil.Process) -> int:
    found = 0
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += child.memory_full_info().uss
    return found
