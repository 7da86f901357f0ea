"""Processes and their threads, as looks at /proc show them: who is there, who runs, who waits."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ttftprof.clock import NS_PER_S
from ttftprof.events import Kind, Wait
from ttftprof.sources.processes import PROC, cgroup_paths

_SPARE = 64  # descriptors that are left for what is opened for a moment
_FULL = (errno.EMFILE, errno.ENFILE)
_TICK_NS = NS_PER_S // os.sysconf("SC_CLK_TCK")
# So long a new process is looked at for an exec: into a program of the same name, or of one that
# continues the target.
_YOUNG_NS = 2 * NS_PER_S
_STARTED = 19  # of the fields of stat from the state on: when, in ticks since the machine began
_STORAGE_STATE = "D"
_ENDED = (b"Z", b"X")
_SLEEPS = "SDTtI"
# Where in the kernel a thread sleeps (/proc/PID/task/TID/wchan), by the beginning of its name.
_WAITS = (
    ("folio_wait", Wait.STORAGE),
    ("io_schedule", Wait.STORAGE),
    ("futex", Wait.LOCK),
    ("hrtimer", Wait.TIMER),
    ("do_nanosleep", Wait.TIMER),
    ("common_nsleep", Wait.TIMER),
    ("schedule_hrtimeout", Wait.NETWORK),  # poll and its like, with a timeout
    ("ep_poll", Wait.NETWORK),
    ("do_poll", Wait.NETWORK),
    ("do_epoll", Wait.NETWORK),
    ("do_select", Wait.NETWORK),
    ("inet_csk", Wait.NETWORK),
    ("sk_wait", Wait.NETWORK),
    ("wait_woken", Wait.NETWORK),
    ("unix_", Wait.NETWORK),
    ("do_wait", Wait.CHILD),
    ("kernel_wait", Wait.CHILD),
    ("pipe_", Wait.PIPE),
    ("anon_pipe", Wait.PIPE),
)


_Stat = tuple[bytes, list[bytes]]
"""(comm, fields from the state on) of a process's stat."""


def numbers_in(folder: Path | str) -> set[int]:
    """The entries of a folder of /proc that are numbers. Raises OSError."""
    with os.scandir(folder) as entries:
        return {int(entry.name) for entry in entries if entry.name.isdigit()}


def _content(path: str, limit: int = 4096) -> bytes:
    """The beginning of a small file, read as cheaply as can be: this happens thousands of times a
    second. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, limit)
    finally:
        os.close(fd)


def held_open(path: Path | str, flags: int = 0) -> int:
    """A descriptor that is kept. Raises OSError, also where it would leave too few for all else."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and fd >= limit - _SPARE:
        os.close(fd)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return fd


@dataclass(frozen=True, slots=True)
class Told:
    """An event in the fields of `struct event`; what is not named is 0."""

    kind: Kind
    ns: int
    tgid: int
    tid: int
    duration_ns: int = 0
    flags: int = 0
    dev: int = 0
    ino: int = 0
    a: int = 0
    b: int = 0


class Thread:
    """One thread: its running time and faults, and since when it waits for what.

    /proc is read through descriptors that stay with this thread: a number that is given to another
    one is never taken for it.
    """

    def __init__(self, tgid: int, tid: int, since_ns: int, proc: str) -> None:
        """Raises OSError if it is gone."""
        self.tgid, self.tid, self.since_ns = tgid, tid, since_ns
        self.cpu_ns = self.min_flt = self.maj_flt = 0
        self.off_ns = 0  # 0: it runs
        self.off_reason = Wait.OTHER
        self.has_changed = True  # since somebody set it to False
        self._folder = f"{proc}/{tgid}/task/{tid}"
        self._times = held_open(f"{self._folder}/schedstat")
        try:
            self._stat = held_open(f"{self._folder}/stat")
        except OSError:
            os.close(self._times)
            raise
        self._before = b""

    def look(self, ns: int) -> Told | None:
        """What it did since the last look: a wait that ended, if one did. Raises OSError if it is
        gone."""
        times = os.pread(self._times, 128, 0)
        if times == self._before:  # it has not run, so nothing about it has changed
            return None
        self._before = times
        self.has_changed = True
        self.cpu_ns = int(times.split(None, 1)[0] or 0)
        text = os.pread(self._stat, 1024, 0)
        fields = text[text.rindex(b")") + 2 :].split()
        self.min_flt, self.maj_flt = int(fields[7]), int(fields[9])
        state = fields[0].decode()
        ended = self._woken(ns)
        if state in _SLEEPS:
            self.off_ns, self.off_reason = ns, self._reason(state)
        return ended

    def _woken(self, ns: int) -> Told | None:
        """It ran since: the wait it was seen in is over, at the latest by now."""
        if not self.off_ns:
            return None
        since, self.off_ns = self.off_ns, 0
        return Told(
            Kind.OFFCPU, since, self.tgid, self.tid, ns - since, int(self.off_reason)
        )  # fmt: skip

    def _reason(self, state: str) -> Wait:
        if state == _STORAGE_STATE:
            return Wait.STORAGE
        try:
            where = Path(self._folder, "wchan").read_text()
        except OSError:
            return Wait.OTHER
        return next((wait for begin, wait in _WAITS if where.startswith(begin)), Wait.OTHER)

    def end(self, ns: int) -> Iterator[Told]:
        """The wait that it was last seen in, if it was, and its end."""
        self.close()
        waited = self._woken(ns)
        if waited is not None:
            yield waited
        yield Told(
            Kind.THREAD_END,
            self.since_ns,
            self.tgid,
            self.tid,
            ns - self.since_ns,
            ino=self.cpu_ns,
            a=self.min_flt,
            b=self.maj_flt,
        )

    def close(self) -> None:
        os.close(self._times)
        os.close(self._stat)


@dataclass(slots=True)
class Task:
    """One process of the target."""

    pid: int
    began_ns: int
    ticks: bytes  # when it was forked, as /proc counts: a reused pid has another
    comm: bytes
    argv: bytes
    threads: dict[int, Thread] = field(default_factory=dict)


class Tasks:
    """The target's processes and threads. Each `look` gives what happened since the last one."""

    def __init__(self, proc: Path = PROC) -> None:
        self.of: dict[int, Task] = {}
        self.unfollowed: set[tuple[int, int]] = set()  # (pid, thread): no descriptors were left
        self._proc = str(proc)
        self._seen: set[int] = set()  # pids that are no members
        self._last_ns = 0
        self._names: frozenset[str] = frozenset()
        self._names_in = ""

    def threads(self) -> Iterator[Thread]:
        for task in self.of.values():
            yield from task.threads.values()

    def succeed(self, names: frozenset[str], cgroup: str = "") -> None:
        """A process executed later under one of these names continues the target once all of its
        processes of such a name are gone or exiting; till then it is another server. `cgroup`: the
        name of a control group that it must be in, or below."""
        self._names, self._names_in = names, cgroup

    def begin(self, pids: frozenset[int], ns: int) -> None:
        """The processes that are there from the start; what else runs belongs to others."""
        for pid in sorted(pids):
            self._join(pid, 0, ns)
        self._seen = numbers_in(self._proc) - self.of.keys()
        self._last_ns = ns

    def look(self, ns: int) -> list[Told]:
        # Who left since the last look did so before who came: a server makes room for the next.
        known = {pid: self._fields(pid) for pid in self.of}
        told = self._departed(known, self._last_ns)
        told += self._arrived(ns)
        told += self._executed(known, ns)
        for task in list(self.of.values()):
            told += self._threads_of(task, ns)
        self._last_ns = ns
        return told

    def close(self) -> None:
        for thread in self.threads():
            thread.close()

    def _departed(self, known: Mapping[int, _Stat | None], ns: int) -> list[Told]:
        told: list[Told] = []
        for pid, fields in known.items():
            task = self.of[pid]
            is_same = fields is not None and fields[1][_STARTED] == task.ticks
            if fields is not None and is_same and not self._is_over(pid, fields[1][0]):
                continue
            told.append(Told(Kind.PROCESS_EXIT, ns, pid, pid))
            for thread in task.threads.values():
                told += thread.end(ns)
            del self.of[pid]
            if is_same:  # it waits to be reaped
                self._seen.add(pid)
        return told

    def _is_over(self, pid: int, state: bytes) -> bool:
        """Its first thread may be gone while others run."""
        if state not in _ENDED:
            return False
        try:
            return len(numbers_in(f"{self._proc}/{pid}/task")) < 2
        except OSError:
            return True

    def _arrived(self, ns: int) -> list[Told]:
        """New processes whose parent is a member."""
        there = numbers_in(self._proc)
        self._seen &= there
        new = {
            pid: fields
            for pid in sorted(there - self._seen - self.of.keys())
            if (fields := self._fields(pid)) is not None
        }
        told: list[Told] = []
        while members := [pid for pid, fields in new.items() if self._belongs(pid, *fields)]:
            for pid in members:
                told += self._taken_in(pid, new.pop(pid)[1], ns)
        for pid, (_, words) in new.items():
            if not self._names or ns - self._began_ns(words) >= _YOUNG_NS:
                self._seen.add(pid)
        return told

    def _belongs(self, pid: int, comm: bytes, fields: list[bytes]) -> bool:
        return int(fields[1]) in self.of or self._is_next(pid, comm)

    def _taken_in(self, pid: int, fields: list[bytes], ns: int) -> Iterator[Told]:
        parent = int(fields[1])
        began_ns = min(max(self._began_ns(fields), self._last_ns), ns)
        self._join(pid, began_ns, ns)
        if pid not in self.of:
            return
        yield Told(Kind.FORK, began_ns, pid, pid, a=parent, b=parent)
        above = self.of.get(parent)
        if above is None or above.argv != self.of[pid].argv:
            yield Told(Kind.EXEC, began_ns, pid, pid)

    def _is_next(self, pid: int, comm: bytes) -> bool:
        """Whether a stranger continues the target."""
        if not self._is_named(comm):
            return False
        if self._names_in:
            paths = cgroup_paths(pid, Path(self._proc)).values()
            if not any(self._names_in in path.split("/") for path in paths):
                return False
        return not any(self._stays(t.pid) for t in self.of.values() if self._is_named(t.comm))

    def _is_named(self, comm: bytes) -> bool:
        return comm.decode(errors="replace") in self._names

    def _stays(self, pid: int) -> bool:
        """False once it gives its memory back, which may take seconds."""
        fields = self._fields(pid)
        return fields is not None and fields[1][0] not in _ENDED and fields[1][20] != b"0"

    def _executed(self, known: Mapping[int, _Stat | None], ns: int) -> list[Told]:
        told: list[Told] = []
        for task in self.of.values():
            fields = known.get(task.pid)
            if fields is None:  # gone, or new
                continue
            young = ns - task.began_ns < _YOUNG_NS
            if fields[0] == task.comm and not young:
                continue
            argv = self._argv(task.pid)
            if argv and argv != task.argv:
                task.argv = argv
                told.append(Told(Kind.EXEC, ns, task.pid, task.pid))
            task.comm = fields[0]
        return told

    def _threads_of(self, task: Task, ns: int) -> list[Told]:
        told: list[Told] = []
        try:
            there = numbers_in(f"{self._proc}/{task.pid}/task")
        except OSError:
            return told
        since_ns = max(task.began_ns, self._last_ns) if self._last_ns else ns
        new = there - task.threads.keys()
        for tid in new:
            try:
                task.threads[tid] = Thread(task.pid, tid, since_ns, self._proc)
            except OSError as error:
                if error.errno in _FULL:
                    self.unfollowed |= {(task.pid, tid) for tid in new - task.threads.keys()}
                    break
        for tid, thread in list(task.threads.items()):
            try:
                woken = thread.look(ns) if tid in there else None
            except (OSError, ValueError):
                there.discard(tid)
                woken = None
            if woken is not None:
                told.append(woken)
            if tid not in there:
                told += thread.end(ns)
                del task.threads[tid]
        return told

    def _join(self, pid: int, began_ns: int, ns: int) -> None:
        fields = self._fields(pid)
        if fields is not None:
            comm, words = fields
            self.of[pid] = Task(pid, began_ns, words[_STARTED], comm, self._argv(pid))
            self._threads_of(self.of[pid], ns)

    def _fields(self, pid: int) -> _Stat | None:
        """Its stat; None if it is gone."""
        try:
            text = _content(f"{self._proc}/{pid}/stat")
            end = text.rindex(b")")
            return text[text.index(b"(") + 1 : end], text[end + 2 :].split()
        except (OSError, ValueError):
            return None

    def _argv(self, pid: int) -> bytes:
        try:
            return _content(f"{self._proc}/{pid}/cmdline", 64 << 10)
        except OSError:
            return b""

    @staticmethod
    def _began_ns(fields: list[bytes]) -> int:
        """When it was forked, CLOCK_MONOTONIC; /proc counts ticks of a clock that suspend does not
        stop."""
        asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
        return int(fields[_STARTED]) * _TICK_NS - asleep_ns
