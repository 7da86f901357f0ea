"""`PolledSession` stands in for `kernel.session.ProbeSession`: the same records, by looking."""

from __future__ import annotations

import os
import resource
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ttftprof.clock import NS_PER_MS, NS_PER_S, now_ns
from ttftprof.errors import TargetError
from ttftprof.events import (
    CONTROL,
    EVENT,
    FILE_SLOT,
    LOST,
    THREAD_SLOT,
    Kind,
    Records,
    TextKind,
)
from ttftprof.kernel.session import FILES, THREADS, ProbeState, Settings
from ttftprof.kernel.table import PROBES
from ttftprof.polled.files import Files
from ttftprof.polled.listeners import listeners
from ttftprof.polled.output import CommandOutput
from ttftprof.polled.relay import Relay, Server
from ttftprof.polled.tasks import Tasks, Thread, Told
from ttftprof.polled.texts import Texts
from ttftprof.recording import LOOKED_AT

LOOK_NS = 20 * NS_PER_MS
_SETTLES_NS = NS_PER_S  # from a socket's making until it listens, as a rule
_OF_THREAD = (
    "tid", "tgid", "since_ns", "off_ns", "off_reason", "cpu_ns", "min_flt", "maj_flt",
)  # fmt: skip
_NO_PROBES = "the kernel's probes are not used"
_LOST_THREADS, _LOST_FILES = LOST.index("threads not followed"), LOST.index("files not followed")
_LOST_TEXTS = LOST.index("text ring full")
# What of a source is had by looking, and what is not.
_LOOKED_AT = {
    "process": ("/proc is looked at", "what lives shorter than a look is not seen"),
    "offcpu": ("states of threads are looked at", "waits shorter than a look are not seen"),
    "syscalls": ("what a process has open is looked at", "calls themselves are not seen"),
    "files": (
        "descriptors and maps are looked at",
        "reads by pread() and io_uring, advice, and what is undone within a look are not seen",
    ),
}


class PolledSession:
    """What one recording sees by looking every 20 ms.

    Used in the order of `ProbeSession`: load, attach, watch_port, seed; then `begin`, from which on
    other threads run, and `events.drain()`, which is a look.
    """

    loader = LOOKED_AT
    is_probed = False
    slowest_ns = LOOK_NS

    def __init__(
        self,
        settings: Settings,
        relay: Relay | None = None,
        output: CommandOutput | None = None,
        command_pid: int = 0,
    ) -> None:
        self.settings = settings
        self._relay, self._output, self._command = relay, output, command_pid
        self._tasks, self._files = Tasks(), Files(settings.min_file_bytes)
        self._ports: dict[int, int] = {}
        self._unsettled: dict[int, tuple[int, int]] = {}  # inode -> (pid, until when it is asked)
        self._slots: dict[tuple[int, int], int] = {}  # (thread, since when) -> its place
        self._free: list[int] = []
        self._names: set[str] = set()
        self._names_in = ""
        self._lost = [0] * len(LOST)
        self._is_first = True
        self.threads = np.zeros(THREADS, THREAD_SLOT)
        self.files = np.zeros(FILES, FILE_SLOT)
        self.control = np.zeros(1, CONTROL)
        self.events, self.texts, self.ends = _Events(self._look), _Texts(), _Ends()
        self.states = {probe.stem: self._state(probe.stem) for probe in PROBES}
        self.if_needed: dict[str, ProbeState] = {}

    # -- set up -------------------------------------------------------------------------------

    def load(self) -> None:
        """Takes all the descriptors that it may: each thread is read through two."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def attach(self) -> None:
        """No probe has to be attached."""

    def keep_helpers(self) -> None:
        """Nor waited for till its module comes."""

    def watch_port(self, port: int, tgid: int) -> None:
        self._ports[port] = tgid

    def take_successors(self, comm: str, cgroup: str = "") -> None:
        self._names.add(comm)
        self._names_in = cgroup

    def seed(self, tgids: Collection[int]) -> None:
        """Raises TargetError if none of them is there."""
        self._tasks.succeed(frozenset(self._names), self._names_in)
        self._tasks.begin(frozenset(tgids), now_ns())
        if not self._tasks.of:
            raise TargetError("the target exited before it could be looked at", "start it again")

    def begin(self) -> None:
        """Other threads may run now."""
        if self._relay is not None:
            self._relay.begin(self._server, self.texts.queue)

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()
        if self._output is not None:
            self._output.close()
        self._tasks.close()
        self._files.close()

    def _server(self) -> Server | None:
        """Where the relay passes on to: the topmost process that listens, on its first port."""
        order = list(self._tasks.of)
        own = self._relay.port if self._relay is not None else None
        found = [
            (order.index(pid), port)
            for port, pid in self._ports.copy().items()
            if pid in order and port != own
        ]
        if not found:
            return None
        place, port = min(found)
        return port, order[place]

    # -- looking ------------------------------------------------------------------------------

    def _look(self) -> Records:
        ns = now_ns()
        told = self._tasks.look(ns)
        for event in told:
            if event.kind == Kind.PROCESS_EXIT:
                self._files.forget(event.tgid)
                self._ports = {p: pid for p, pid in self._ports.items() if pid != event.tgid}
            elif event.kind == Kind.THREAD_END:
                self.ends.add(event)
        told += self._files.look(list(self._tasks.of), ns, self._is_first)
        told += self._listening(ns)
        if self._relay is not None:
            while self._relay.events:
                told.append(self._relay.events.popleft())
        if self._output is not None:
            for at, data in self._output.drain():
                pid = self._command
                self.texts.queue.add(TextKind.LOG, at, data, tgid=pid, tid=pid)
        self._is_first = False
        self._fill_slots()
        return _records(told)

    def _listening(self, ns: int) -> Iterator[Told]:
        """Asked for a while after a socket was made: it is bound, and listens, later."""
        for inode, pid in self._files.new_sockets.items():
            self._unsettled[inode] = pid, ns + _SETTLES_NS
        self._files.new_sockets.clear()
        listening = {pid: listeners(pid) for pid in {pid for pid, _ in self._unsettled.values()}}
        for inode, (pid, until_ns) in list(self._unsettled.items()):
            port = listening[pid].get(inode)
            if port is not None or ns >= until_ns:
                del self._unsettled[inode]
            if port is not None and port not in self._ports:
                self._ports[port] = pid
                yield Told(Kind.LISTEN, ns, pid, pid, a=port)

    def _fill_slots(self) -> None:
        for end in self.ends.threads():
            slot = self._slots.pop(end, None)
            if slot is not None:
                self.threads[slot] = 0
                self._free.append(slot)
        for thread in self._tasks.threads():
            if thread.has_changed:
                thread.has_changed = False
                self._fill(thread)
        asked = [file for file in self._files.of.values() if file.fd is not None]
        self._lost[_LOST_FILES] = max(0, len(asked) - FILES)
        for number, file in enumerate(asked[:FILES]):
            self.files[number] = file.in_order(FILE_SLOT)
        self.control["threads_used"] = len(self._slots) + len(self._free)
        self.control["files_used"] = min(len(asked), FILES)

    def _fill(self, thread: Thread) -> None:
        key = thread.tid, thread.since_ns
        number = self._slots.get(key)
        if number is None:
            used = len(self._slots) + len(self._free)
            if not self._free and used == THREADS:
                self._lost[_LOST_THREADS] += 1
                return
            number = self._slots[key] = self._free.pop() if self._free else used
        slot = self.threads[number]
        for name in _OF_THREAD:
            slot[name] = getattr(thread, name)

    # -- what is said of it -------------------------------------------------------------------

    def states_for(self, fstypes: Iterable[str]) -> list[ProbeState]:
        """What the probes would have told is told in part, or not at all. Those that only certain
        file systems need count where files lie on one."""
        used = set(fstypes)
        return [
            self._state(probe.stem)
            for probe in PROBES
            if not probe.filesystems or any(map(probe.serves, used))
        ]

    def _state(self, stem: str) -> ProbeState:
        if stem in _LOOKED_AT:
            how, lost = _LOOKED_AT[stem]
            return ProbeState(stem, "degraded", f"{how} 50 times a second", lost)
        if stem == "pagecache" and self._files.asks_cache:
            asked = "cachestat is asked 50 times a second"
            return ProbeState(
                stem,
                "degraded",
                asked,
                "what came before the first look at a file counts as cached",
            )
        if stem == "sockets" and self._relay is not None:
            passes = f"what passes the relay on port {self._relay.port} is seen"
            return ProbeState(stem, "degraded", passes, "other requests are not seen")
        if stem == "logs" and self._output is not None:
            return ProbeState(
                stem, "degraded", "the command's output is read", "what it writes into files is not"
            )
        cost = next(probe.cost_of_absence for probe in PROBES if probe.stem == stem)
        return ProbeState(stem, "absent", _NO_PROBES, cost)

    def lost(self) -> list[int]:
        counts = list(self._lost)
        counts[_LOST_THREADS] += len(self._tasks.unfollowed)
        counts[_LOST_TEXTS] = self.texts.queue.lost
        return counts

    # -- what only probes have ----------------------------------------------------------------

    def attach_marks(self, path: str, places: Sequence[tuple[int, int]]) -> None:
        """Calls are not seen."""

    def set_quiet(self, socket: int, turn: int) -> None:
        """All of an answer passes the relay anyway."""

    def take_late(self, used: Iterable[str]) -> None:
        """No module brings anything."""

    def unanswered(self, _now_ns: int) -> Records:
        return np.empty(0, EVENT)

    def program_counts(self) -> dict[str, Any]:
        return {}

    def drop(self, programs: Collection[str], reason: str) -> None:
        """There is nothing to be dropped."""

    def slow_ticks(self, hz: int, reason: str, lost: str) -> None:
        """Nor slowed down."""

    def follow_cpus(self, after_suspend: bool = False) -> None:
        """Threads are looked at, wherever they run."""


class _Source:
    """Something that the recorder waits on; here it never wakes it."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


class _Events(_Source):
    def __init__(self, look: Any) -> None:
        super().__init__()
        self.drain = look


class _Texts(_Source):
    def __init__(self) -> None:
        super().__init__()
        self.queue = Texts()
        self.drain = self.queue.drain


class _Ends(_Source):
    """Last rows of ended threads."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[Told] = []

    def add(self, end: Told) -> None:
        self._held.append(end)

    def threads(self) -> list[tuple[int, int]]:
        """(thread, since when it lived) of those that wait to be taken."""
        return [(end.tid, end.ns) for end in self._held]

    def drain(self) -> Records:
        rows = np.zeros(len(self._held), THREAD_SLOT)
        for row, end in zip(rows, self._held, strict=True):
            row["tid"], row["tgid"], row["since_ns"] = end.tid, end.tgid, end.ns
            row["cpu_ns"], row["min_flt"], row["maj_flt"] = end.ino, end.a, end.b
        self._held.clear()
        return rows


def _records(told: Sequence[Told]) -> Records:
    records = np.zeros(len(told), EVENT)
    for record, event in zip(records, told, strict=True):
        record["start_ns"], record["duration_ns"] = event.ns, event.duration_ns
        for name in ("tid", "tgid", "kind", "flags", "dev", "ino", "a", "b"):
            record[name] = getattr(event, name)
    return records
