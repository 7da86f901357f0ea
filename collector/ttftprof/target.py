"""Who is to be recorded: finds the processes a user means, and refuses to guess between two.

Raises `TargetError` with the candidates and the option that tells them apart.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ttftprof.errors import TargetError
from ttftprof.plain import plain
from ttftprof.sources.conmon import contained
from ttftprof.sources.processes import (
    PROC,
    ProcessFacts,
    cgroup_paths,
    descendants,
    is_alive,
    listening_ports,
    read_process,
    thread_group,
)


@dataclass(frozen=True, slots=True)
class Target:
    """`roots`: the processes named; `pids`: they and all below them, as of now. `how`: in words.

    `successors`: names of processes that, executed later, continue the target (in the control group
    `successors_in`, if one is named). Empty where the user named a process, or where the name is
    that of an interpreter and says nothing.
    """

    roots: tuple[int, ...]
    pids: frozenset[int]
    how: str
    successors: frozenset[str] = frozenset()
    successors_in: str = ""


_SHOWN_CHARACTERS = 100


def describe(process: ProcessFacts) -> str:
    """One process in one line, for messages."""
    words = [plain(word, _SHOWN_CHARACTERS) for word in process.argv or [process.comm]]
    shown = words[0]
    for word in words[1:]:
        if len(shown) + len(word) > _SHOWN_CHARACTERS:
            shown += " …"
            break
        shown += f" {word}"
    return f"pid {process.pid}  {shown}"


_INTERPRETERS = re.compile(r"^(python|pypy|node|ruby|perl|java|bash|sh|dash|zsh|uvicorn|gunicorn)")


def _target(roots: Iterable[int], how: str, outlives: bool = False, cgroup: str = "") -> Target:
    """`outlives`: the user's way of naming the target still holds after a restart, in `cgroup`."""
    tops = _without_children(set(roots))
    names = {p.comm for p in map(read_process, tops) if p is not None} if outlives else set()
    successors = frozenset(n for n in names if not _INTERPRETERS.match(n))
    return Target(tuple(sorted(tops)), frozenset(descendants(tops)), how, successors, cgroup)


def _without_children(pids: set[int]) -> set[int]:
    """Of processes that descend from each other, the topmost. Whose parent is not known any more
    has ended meanwhile, as children do all the time."""
    above = {pid: _ancestors(pid) for pid in pids}
    there = {pid for pid, ancestors in above.items() if ancestors or pid == 1} or pids
    return {pid for pid in there if not pids & above[pid]}


def _ancestors(pid: int) -> set[int]:
    above: set[int] = set()
    while pid > 1:
        process = read_process(pid)
        if process is None or process.ppid in above:
            break
        pid = process.ppid
        above.add(pid)
    return above


def _one(candidates: set[int], what: str, hint: str) -> set[int]:
    """The only server among the candidates (with its children), or an error that lists them."""
    tops = _without_children(candidates)
    if len(tops) == 1:
        return tops
    lines = [describe(p) for p in map(read_process, sorted(tops)) if p is not None]
    raise TargetError(
        f"{len(tops)} servers match {what}:\n  " + "\n  ".join(lines),
        hint,
    )


def by_pid(pid: int) -> Target:
    """A process by its id; the id of one of its threads means the process."""
    pid = thread_group(pid) or pid
    process = read_process(pid)
    if process is None:
        raise TargetError(
            f"there is no process {pid}", "ttftprof record, without a target, looks for servers"
        )
    return _target({pid}, f"--pid {pid}")


def by_port(port: int) -> Target:
    everyone = {p for p in _all_pids() if p}
    listeners = {pid for number, pid in listening_ports_all(everyone) if number == port}
    if not listeners:
        raise TargetError(
            f"nothing listens on TCP port {port} (or it is another user's: try sudo)",
            "ss -ltnp shows who listens where",
        )
    return _target(
        _one(listeners, f"--port {port}", "name one with --pid"), f"--port {port}", outlives=True
    )


def listening_ports_all(pids: set[int]) -> list[tuple[int, int]]:
    """(port, pid) of every listener among `pids`; a port may be shared by several."""
    return [(port, pid) for pid in pids for port in listening_ports({pid})]


def by_name(name: str) -> Target:
    found = {p.pid for p in _processes() if _is_named(p, name)}
    if not found:
        raise TargetError(f"no process is called {name!r}", "ps -eo pid,comm,args shows the names")
    return _target(
        _one(found, f"--name {name}", "name one with --pid"), f"--name {name}", outlives=True
    )


def _is_named(process: ProcessFacts, name: str) -> bool:
    words = {process.comm, PurePosixPath(process.exe).name}
    if process.argv:
        words.add(PurePosixPath(process.argv[0]).name)
    return name in words


def by_unit(unit: str) -> Target:
    """All processes of a systemd unit, by its control group."""
    name = unit if "." in unit else f"{unit}.service"
    found = _in_cgroup(lambda path: name in path.split("/"))
    if not found:
        raise TargetError(
            f"no running process belongs to the unit {name}",
            f"systemctl status {name} tells whether it runs",
        )
    unified = [cgroup_paths(pid).get(0, "").split("/") for pid in found]
    known_by = (
        name if any(name in path for path in unified) else ""
    )  # v1 alone tells probes nothing
    return _target(found, f"--unit {name}", outlives=True, cgroup=known_by)


def by_cgroup(path: str) -> Target:
    """All processes in a control group, by its path, and in those below."""
    wanted = "/" + path.strip("/")
    found = _in_cgroup(lambda path: path == wanted or path.startswith(wanted + "/"))
    if not found:
        raise TargetError(f"no process is in the control group {wanted}", "systemd-cgls lists them")
    return _target(found, f"--cgroup {wanted}")


_CONTAINER_ID = re.compile(r"[0-9a-f]{8,64}")


def by_container(name: str, docker: Path = Path("/var/lib/docker/containers")) -> Target:
    """All processes of a container, by its id (8 digits or more) or its name.

    Names are known of Docker's, of Podman's while they run, and of those that LXC and
    systemd-nspawn give a control group.
    """
    identity = _container_id(name, docker) or name
    named = {identity, f"lxc.payload.{identity}", f"machine-{identity}.scope"} - {""}
    is_id = bool(_CONTAINER_ID.fullmatch(identity))
    found = _in_cgroup(
        lambda path: any(part in named or (is_id and identity in part) for part in path.split("/"))
    )
    if not found:
        watched = contained(name)
        if len(watched) > 1:
            raise TargetError(
                f"{len(watched)} containers match {name!r}: {', '.join(sorted(watched))}",
                "give the id of one",
            )
        found = set().union(*watched.values())
    if not found:
        raise TargetError(
            f"no running process belongs to the container {name!r}",
            "docker ps (or podman ps) shows what runs; give the id, or use --cgroup",
        )
    return _target(found, f"--container {name}")


def _container_id(name: str, docker: Path) -> str | None:
    try:
        for config in docker.glob("*/config.v2.json"):
            facts = json.loads(config.read_text())
            if facts.get("Name", "").lstrip("/") == name:
                return str(facts.get("ID", ""))
    except (OSError, ValueError, AttributeError):
        return None
    return None


def discover() -> Target:
    """The inference servers that run here. One, or several related ones; else an error."""
    found = {p.pid for p in running_servers()}
    if not found:
        raise TargetError(
            "no inference server that ttftprof knows is running",
            "start one, or name your process with --pid, --port or --name",
        )
    tops = _one(found, "(no target was given)", "choose one with --pid, --port or --name")
    process = read_process(next(iter(tops)))
    title = process.engine if process and process.engine else "server"
    return _target(tops, f"found {title}, pid {next(iter(tops))}", outlives=True)


def running_servers() -> list[ProcessFacts]:
    """The processes of every engine ttftprof knows, without those below another such."""
    known = {p.pid: p for p in _processes() if p.engine}
    return [known[pid] for pid in sorted(_without_children(set(known)))]


def _in_cgroup(matches: Callable[[str], bool]) -> set[int]:
    """The processes of which a control group's path matches, in whatever hierarchy."""
    others = _all_pids() - {os.getpid()}
    found = {pid for pid in others if any(map(matches, cgroup_paths(pid).values()))}
    return set(filter(is_alive, found))


def _all_pids() -> set[int]:
    return {int(e.name) for e in PROC.iterdir() if e.name.isdigit()}


def _processes() -> list[ProcessFacts]:
    """Everyone but this program, which is never a target, and those that only wait to be reaped."""
    others = sorted(_all_pids() - {os.getpid()})
    return [p for p in map(read_process, others) if p is not None and is_alive(p.pid)]
