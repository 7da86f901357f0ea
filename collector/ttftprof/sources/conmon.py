"""Containers of Podman and CRI-O, by the process that watches over each: conmon(8).

Its command line has the container's id and name, and the container's first process is its child.
So a container is found that has no control group of its own (rootless, on version 1), and by the
names that Podman gives, which lie in each user's own storage.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from ttftprof.sources.processes import PROC, descendants, read_stat

_SHORTEST_ID = 8


def contained(name: str, proc: Path = PROC) -> dict[str, set[int]]:
    """{id: its processes} of every container of this name or (the beginning of the) id."""
    found: dict[str, set[int]] = {}
    for monitor in (int(e.name) for e in proc.iterdir() if e.name.isdigit()):
        identity, title = _told_by(proc / str(monitor))
        is_meant = (name and name == title) or identity[: max(len(name), _SHORTEST_ID)] == name
        if identity and is_meant:
            found.setdefault(identity, set()).update(descendants({monitor}, proc) - {monitor})
    return {identity: pids for identity, pids in found.items() if pids}


def _told_by(entry: Path) -> tuple[str, str]:
    """(id, name) on a monitor's command line; empty for any other process."""
    try:
        if read_stat(entry / "stat")[0] != "conmon":
            return "", ""
        argv = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except (OSError, ValueError):
        return "", ""
    return _after(argv, "-c", "--cid"), _after(argv, "-n", "--name")


def _after(argv: list[str], *options: str) -> str:
    values = (value for option, value in pairwise(argv) if option in options)
    return next(values, "")
