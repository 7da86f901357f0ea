"""How much memory a process may use: the tightest limit of the control groups it is in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttftprof.sources.mounts import parse_mountinfo
from ttftprof.sources.processes import PROC

_NO_LIMIT = 1 << 60  # version 1 writes "none" as the most that fits


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """`group` is the control group's folder; `usage_bytes` counts its page cache too."""

    group: str
    limit_bytes: int
    usage_bytes: int | None

    def as_fact(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "limit_bytes": self.limit_bytes,
            "usage_bytes": self.usage_bytes,
        }


def limit_of(pid: int, proc: Path = PROC) -> MemoryLimit | None:
    """The smallest limit on the way up from a process's group; None if there is none to be seen."""
    found = []
    for own, top, names in _groups(pid, proc):
        for folder in (own, *own.parents):
            limit = _number(folder / names[0])
            if limit is not None and 0 < limit < _NO_LIMIT:
                found.append(MemoryLimit(str(folder), limit, _number(folder / names[1])))
            if folder == top:
                break
    return min(found, key=lambda each: each.limit_bytes, default=None)


_FILES = {
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    "cgroup2": ("memory.max", "memory.current"),
}


def _groups(pid: int, proc: Path) -> list[tuple[Path, Path, tuple[str, str]]]:
    """(the process's folder, the mount it lies under, names of limit and usage), by hierarchy."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text(errors="replace").splitlines()
        mounts = parse_mountinfo((proc / "self/mountinfo").read_text(errors="replace"))
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        kind = "cgroup" if controllers else "cgroup2"
        if controllers and "memory" not in controllers.split(","):
            continue
        for mount in mounts:
            if mount.fstype != kind or (controllers and "memory" not in mount.options.split(",")):
                continue
            top = Path(mount.point)
            found.append((top / path.lstrip("/"), top, _FILES[kind]))
            break
    return [g for g in found if ".." not in g[0].parts]


def _number(file: Path) -> int | None:
    """The number in a file; None where there is none, as for `max`."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
