"""What must stay the same while one thing is varied, as text by name; and what else went on.

Taken at every run. A difference between the runs of one variant, or between variants in anything
but what was varied, is reported: it may be the cause instead.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ttftprof import __version__
from ttftprof.experiment.state import readahead_of
from ttftprof.sources.mounts import mount_under, mounts_of
from ttftprof.sources.processes import read_process

_HEADER_BYTES = 1 << 20
_GOVERNORS = "/sys/devices/system/cpu"
_BUSY_SHARE = 0.10
_identities: dict[tuple[str, int, int, int], str] = {}


def fingerprint(
    files: Mapping[str, Sequence[str]], server_pid: int | None, engine: str
) -> dict[str, str]:
    """{name: value}; what cannot be told is left out.

    Reads each file's header the first time that it sees it, so not for the first time in a run.
    """
    found = {
        "kernel": platform.release(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "ttftprof": __version__,
    }
    if engine:
        found["engine"] = engine
    if governors := _governors():
        found["CPU governor"] = governors
    if driver := _nvidia_driver():
        found["NVIDIA driver"] = driver
    process = read_process(server_pid) if server_pid else None
    if process is not None:
        found["server's command"] = " ".join(process.argv)
        found |= _of_program(process.pid)
    for model, paths in files.items():
        for number, path in enumerate(paths):
            found |= _of_file(f"{model}" if len(paths) == 1 else f"{model} {number + 1}", path)
    return found


def _of_program(pid: int) -> dict[str, str]:
    """What is executed: an engine that was updated in its place is another one."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/exe").stat()
        path = Path(f"/proc/{pid}/exe").readlink()
        shown = f"{path}, {status.st_size} bytes, changed {status.st_mtime_ns}"
        return {"server's program": shown}
    return {}


def _of_file(name: str, path: str) -> dict[str, str]:
    found = {f"file of {name}": path}
    with suppress(OSError):
        found[f"content of {name}"] = _identity(path)
    mount = mount_under(path, mounts_of(os.getpid()))
    if mount is not None:
        found[f"mount of {name}"] = f"{mount.source} on {mount.point}, {mount.fstype}"
        found[f"mount options of {name}"] = mount.options
    ahead = readahead_of(path)
    if ahead is not None:
        found[f"read-ahead of {name}"] = f"{ahead} KiB"
    return found


def _identity(path: str) -> str:
    """Size, time of change, a hash of the first MiB: tells models apart, for little."""
    status = Path(path).stat()
    key = (path, status.st_size, status.st_mtime_ns, status.st_ino)
    if key not in _identities:
        with Path(path).open("rb") as file:
            digest = hashlib.sha256(file.read(_HEADER_BYTES)).hexdigest()[:16]
        _identities[key] = f"{status.st_size} bytes, header {digest}"
    return f"{_identities[key]}, changed {status.st_mtime_ns}"


def _governors() -> str:
    found: Counter[str] = Counter()
    for path in Path(_GOVERNORS).glob("cpu[0-9]*/cpufreq/scaling_governor"):
        with suppress(OSError):
            found[path.read_text().strip()] += 1
    return ", ".join(f"{name} × {count}" for name, count in sorted(found.items()))


def _nvidia_driver() -> str:
    with suppress(OSError):
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
        return " ".join(first.split()[:9])
    return ""


# -- other load -----------------------------------------------------------------------------------


class Load:
    """How busy the machine was with other things than the experiment, between two moments."""

    def __init__(self) -> None:
        self._before = _cpu_times()

    def as_json(self) -> dict[str, Any]:
        """`busy`: share of all CPUs in use meanwhile; `load`: the 1-minute average; `pressure`: the
        kernel's own (avg10) for cpu, memory and io, where it tells."""
        now = _cpu_times()
        steps = [b - a for a, b in zip(self._before, now, strict=False)]
        total = sum(steps)
        return {
            "busy": round(1 - (steps[3] + steps[4]) / total, 4) if total > 0 else None,
            "load": os.getloadavg()[0],
            "pressure": _pressure(),
        }


def _cpu_times() -> list[int]:
    with suppress(OSError, ValueError):
        return [int(v) for v in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return []


def _pressure() -> dict[str, float]:
    found = {}
    for name in ("cpu", "memory", "io"):
        with suppress(OSError, ValueError, IndexError):
            some = Path(f"/proc/pressure/{name}").read_text().split("\n")[0].split()
            found[name] = float(some[1].removeprefix("avg10="))
    return found


def other_load_before(run_load: Mapping[str, Any] | None) -> bool:
    """Whether the machine was already busy while it should have rested."""
    busy = run_load.get("busy") if run_load else None
    return busy is not None and busy > _BUSY_SHARE


# -- differences ----------------------------------------------------------------------------------


def differences(
    prints: Mapping[str, Iterable[Mapping[str, str]]],
) -> dict[str, dict[str, tuple[str, ...]]]:
    """{name: {group: its values}} of all that is not one and the same everywhere.

    `prints`: the fingerprints of each group (a variant). A value that a run lacks is "(not told)".
    """
    groups = {group: list(found) for group, found in prints.items()}
    names = dict.fromkeys(n for found in groups.values() for one in found for n in one)
    result: dict[str, dict[str, tuple[str, ...]]] = {}
    for name in names:
        by_group = {
            group: tuple(dict.fromkeys(one.get(name, "(not told)") for one in found))
            for group, found in groups.items()
            if found
        }
        if len({value for values in by_group.values() for value in values}) > 1:
            result[name] = by_group
    return result
