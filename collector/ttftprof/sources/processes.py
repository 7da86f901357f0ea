"""Facts about a process, from /proc, while it lives: what it is, where it runs, what it sees."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttftprof.command_line import capped, public_argv
from ttftprof.engines.catalog import recognise

if TYPE_CHECKING:
    import psutil

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """One process as /proc showed it. `start_ticks` (clock ticks since boot) tells a reused pid.

    `argv` is what of the command line may be written down, up to a length (see command_line.py).
    The environment is never read.
    """

    pid: int
    ppid: int
    comm: str
    exe: str
    argv: list[str]
    cwd: str
    cgroup: str
    start_ticks: int
    engine: str | None

    def as_fact(self) -> dict[str, Any]:
        return asdict(self)


def read_process(pid: int, proc: Path = PROC) -> ProcessFacts | None:
    """The facts, or None if the process is gone."""
    root = proc / str(pid)
    try:
        comm, fields = read_stat(root / "stat")
        argv = [
            a.decode(errors="surrogateescape").encode(errors="replace").decode()
            # A process that names itself may leave no NUL behind its title, or many.
            for a in (root / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            if a
        ]
    except (OSError, ValueError):
        return None
    exe = _link(root / "exe")
    engine = recognise(exe, argv)
    return ProcessFacts(
        pid=pid,
        ppid=int(fields[1]),
        comm=comm,
        exe=exe,
        argv=capped(public_argv(argv)),
        cwd=_link(root / "cwd"),
        cgroup=max(
            cgroup_paths(pid, proc).values(), key=len, default=""
        ),  # where a container shows
        start_ticks=int(fields[19]),
        engine=engine.name if engine else None,
    )


def thread_group(tid: int, proc: Path = PROC) -> int | None:
    """The process a thread belongs to (itself, for a process), or None if it is gone."""
    try:
        status = (proc / str(tid) / "status").read_text(errors="replace")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("Tgid:"):
            return int(line.split()[1])
    return None


def is_alive(pid: int, proc: Path = PROC) -> bool:
    """Whether a process runs, and not only waits to be reaped. Its first thread may be gone."""
    try:
        _, fields = read_stat(proc / str(pid) / "stat")
        return fields[0] not in "ZX" or len([*(proc / str(pid) / "task").iterdir()]) > 1
    except (OSError, ValueError):
        return False


def has_host_pids(proc: Path = PROC) -> bool:
    """Whether process ids seen here are those the kernel's probes report.

    In a namespace of its own they are not. The first namespace's inode is fixed: PROC_PID_INIT_INO
    in the kernel's include/linux/proc_ns.h.
    """
    return _link(proc / "self/ns/pid") in ("", "pid:[4026531836]")


def read_stat(path: Path) -> tuple[str, list[str]]:
    """(comm, fields from the third on) of a stat file; comm may hold spaces and parentheses."""
    text = path.read_text(errors="replace")
    begin, end = text.index("("), text.rindex(")")
    return text[begin + 1 : end], text[end + 2 :].split()


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def cgroup_paths(pid: int, proc: Path = PROC) -> dict[int, str]:
    """{hierarchy: path} of a process's control groups; hierarchy 0 is v2, others v1; cgroups(7)."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    fields = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return {int(hierarchy): path for hierarchy, _, path in fields}


def descendants(roots: set[int], proc: Path = PROC) -> set[int]:
    """The roots and every process below them, as of now."""
    parents: dict[int, int] = {}
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                _, fields = read_stat(entry / "stat")
            except (OSError, ValueError):
                continue
            parents[int(entry.name)] = int(fields[1])
    found = {pid for pid in roots if pid in parents}
    grew = True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in found and pid not in found}
        found |= more
        grew = bool(more)
    return found


def listening_ports(pids: set[int]) -> dict[int, int]:
    """{TCP port: pid} of the sockets these processes listen on."""
    import psutil  # reports, which never ask, need not wait for it

    ports: dict[int, int] = {}
    for pid in pids:
        try:
            connections = _connections(psutil.Process(pid))
        except psutil.Error:
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN and connection.laddr:
                ports[int(connection.laddr.port)] = pid
    return ports


def _connections(process: psutil.Process) -> list[Any]:
    """Its TCP sockets, by the name that the call has had since psutil 6.0, or had before."""
    name = "net_connections" if hasattr(process, "net_connections") else "connections"
    found: list[Any] = getattr(process, name)(kind="tcp")
    return found
