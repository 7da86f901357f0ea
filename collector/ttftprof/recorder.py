"""The recorder: drains the probes on a schedule and appends what it finds to the recording.

It interprets nothing beyond what privacy forces (HTTP bodies and log lines become facts here, their
words are dropped) and what following the target needs (paths, libraries). The kernel is read every
20 ms on an absolute schedule once files or answers begin to move, and less often while they go on.
"""

from __future__ import annotations

import os
import platform
import resource
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ttftprof import __version__
from ttftprof.clock import NS_PER_MS, NS_PER_S, OtherClocks, measure_offset, now_ns, tick_ns
from ttftprof.connections import OwnConnections
from ttftprof.engines.catalog import engine_named, looks_like_weights
from ttftprof.engines.driver_calls import DRIVER_CALLS
from ttftprof.engines.kernel_caches import cache_of, is_bookkeeping
from ttftprof.engines.markers import MARK_NAMES, find_log_marks
from ttftprof.events import (
    EVENT,
    FILE_ROW,
    LOST,
    SKIPPED_RUNS,
    TCP_CLOSE,
    THREAD_ROW,
    CacheFlag,
    Kind,
    MmapFlag,
    Records,
    TextKind,
    dev_numbers,
)
from ttftprof.governor import BUDGET, PYTHON, RECORDER, SLOWER, TICK_HZ, Decision, Governor
from ttftprof.kernel.confinement import guards
from ttftprof.kernel.ring import TextHead
from ttftprof.kernel.session import ProbeSession
from ttftprof.kernel.statistics import ALL_OF_WINDOWS, Windows
from ttftprof.recording import Sink, Source
from ttftprof.sources.gpu import Gpus
from ttftprof.sources.gpu_schedule import before_others
from ttftprof.sources.libraries import LibraryMarks
from ttftprof.sources.memory import limit_of as memory_limit
from ttftprof.sources.metrics import EngineMetrics
from ttftprof.sources.mounts import (
    Mount,
    disk_of,
    is_called,
    legible,
    mount_under,
    mounts_of,
    opened_from,
    path_held,
    read_ahead_kb,
    resolved,
)
from ttftprof.sources.mountstats import sample, sample_shares
from ttftprof.sources.overlay import names_itself, shown_as
from ttftprof.sources.processes import is_alive, listening_ports, read_process
from ttftprof.sources.python_stacks import PythonStacks
from ttftprof.sources.requests import RequestTap, Seen
from ttftprof.stack import path_facts
from ttftprof.target import Target

if TYPE_CHECKING:
    from ttftprof.polled import PolledSession

ACTIVE_NS = 20 * NS_PER_MS
ACTIVE_LOOKS = 5  # at that pace, since files or answers were at rest: what follows is more of it
CALM_NS = 50 * NS_PER_MS  # they go on moving, or threads run and wait
TEXT_GAP_NS = 2 * NS_PER_MS  # the first of many texts is looked at as it comes, and then no sooner
WRITE_EVERY_NS = 200 * NS_PER_MS  # what kill -9 can cost
OWN_EVERY_NS = NS_PER_S
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NAMED = 8  # of many processes, how many are
LINGER_NS = NS_PER_S  # after the last awaited first token, for the answers to end


@dataclass(slots=True)
class Progress:
    """What the live line and the stop conditions need."""

    started_ns: int
    requests: int = 0
    first_tokens: int = 0
    storage_bytes: int = 0
    last_token_ns: int = 0
    open_requests: int = 0
    stage: str = "waiting for a request"


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop by itself; None means never."""

    duration_ns: int | None = None
    first_tokens: int | None = None
    command_pid: int | None = None


class SlotReader:
    """Rows of a mapped slot array that changed since the last look."""

    def __init__(self, slots: Records, row: np.dtype[Any]) -> None:
        self._words = slots.view("<u8").reshape(len(slots), -1)
        self._before = np.zeros_like(self._words)
        self._slot = slots.dtype
        self._row = row
        self._none = np.empty(0, row)
        self._kept = [n for n in row.names or () if n != "ns"]

    def changed(self, used: int, ns: int) -> Records:
        """The changed rows with their stamp, in `row`'s layout."""
        now = self._words[:used].copy()
        moved = (now != self._before[: len(now)]).any(axis=1)
        if not moved.any():
            return self._none
        self._before[: len(now)][moved] = now[moved]
        rows = now[moved].view(self._slot)[:, 0]
        return self.rows_of(rows[rows["since_ns"] != 0], ns)

    def rows_of(self, rows: Records, ns: int) -> Records:
        """Slots with their stamp, in `row`'s layout."""
        out = np.empty(len(rows), self._row)
        out["ns"] = ns
        for name in self._kept:
            out[name] = rows[name]
        return out


class Recorder:
    """One recording from `arm` to `finish`. Use as: arm, run, finish; `finish` always."""

    def __init__(
        self,
        writer: Sink,
        target: Target,
        session: ProbeSession | PolledSession,
        limits: Limits | None = None,
        show: Callable[[Progress], None] = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
        gpu_launches: bool = False,
        python: PythonStacks | None = None,
        budget: float | None = BUDGET,
    ) -> None:
        self.writer = writer
        self.target = target
        self.limits = limits or Limits()
        self.session = session
        self.progress = Progress(now_ns())
        self._show = show
        self._say = say
        self._stop = 0
        self._members: set[int] = set()
        self._met: dict[int, int] = {}  # when each member was executed, if seen
        self._known_files: dict[tuple[int, int], str] = {}  # the path each was first opened by
        self._fstypes: set[str] = set()  # of the files followed
        self._cache_fstypes: dict[tuple[int, str], str | None] = {}  # by process and kernel cache
        self._own_mount = mount_under(str(writer.path.resolve()), mounts_of(os.getpid()))
        self._command_ended = False
        self._tell_survivors_ns: int | None = None  # when what a command left behind is told
        self.command_status: int | None = None  # as of waitpid(2), once it was seen to end
        self._stacks: dict[tuple[int, str], dict[str, Any]] = {}  # by device and mount point
        self._own = OwnConnections()
        self._moved: list[Seen] = []  # requests to count once it is known who asks
        self._open: dict[tuple[int, int], bool] = {}  # counted exchanges; got a first token?
        self._tap = RequestTap(self._exchange_ended, self._moved.append, self.session.set_quiet)
        self._gpus = Gpus.find()
        self._python = python or PythonStacks(enabled=False)
        self._metrics = EngineMetrics()
        self._libraries = LibraryMarks(
            self.session.attach_marks,
            self._library_found,
            self._library_refused,
            launches=gpu_launches,
        )
        self._mapped = 0, 0  # by whom, and since when at most, the libraries now looked at
        self._known_code: set[tuple[int, int]] = set()  # mapped when libraries were looked at
        self._just_scanned: set[int] = set()  # processes whose libraries were, in this drain
        self._poll = select.epoll()
        self._looked_ns = 0
        self._moving_looks = 0  # in a row that saw files or answers move
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.setblocking(False)
        self._wake_w.setblocking(False)
        self._windows: Windows | None = None
        self._governor = Governor(budget, os.cpu_count() or 1)
        self._pace = 1  # how many times as long it waits between two looks
        self._next_own_ns = 0
        self._clocks = OtherClocks()
        self._told: tuple[list[Source], dict[str, int]] = [], {}
        self._unanswered: Records = np.empty(0, EVENT)
        self._armed_cpu_ns = 0
        self._next_write_ns = 0
        self._held: dict[str, list[Records]] = {}
        self._closes: list[tuple[int, int]] = []  # (ns, socket) that texts may still come before
        self._follow_by_kind = self._handlers()

    # -- arm ----------------------------------------------------------------------------------

    def arm(self, armed: Callable[[], None] = lambda: None) -> None:
        """Loads, attaches, seeds and drains once; then calls `armed`, from which on nothing is done
        that needs more than `privilege.KEPT`. Raises what `ProbeSession.load` raises."""
        began, began_cpu = now_ns(), time.process_time_ns()
        if self.session.is_probed:
            self._windows = Windows()
        self.session.load()
        self.session.attach()
        for port, pid in listening_ports(set(self.target.pids)).items():
            self.session.watch_port(port, pid)
            self._own.serve(port)
        for name in self.target.successors:
            self.session.take_successors(name, self.target.successors_in)
        self.session.seed(self.target.pids)
        self.session.keep_helpers()
        if self._windows is not None:
            self._windows.begin()
        self._threads = SlotReader(self.session.threads, THREAD_ROW)
        self._files = SlotReader(self.session.files, FILE_ROW)
        self._libraries.attach_drivers()
        for pid in sorted(self.target.pids):
            self._meet_process(pid)
        self._sample_mounts("start")
        self._write_meta(began)
        self._watch_descriptors()
        self._cycle()
        self.write_states()
        self._armed_cpu_ns = time.process_time_ns()
        self.writer.set_meta("arm_cpu_ns", self._armed_cpu_ns - began_cpu)
        self.progress.started_ns = now_ns()
        self.writer.set_meta("armed_ns", self.progress.started_ns)
        self.writer.commit()
        with before_others():
            armed()
            self.session.begin()
            # Last, for what a thread may do is its own. A driver may take seconds to wake.
            self._gpus.start()

    def _sample_mounts(self, when: str) -> None:
        """The kernel's own counters of network mounts, whose growth the probes are held against."""
        for mount in sample(sorted(self._members)):
            self.writer.add_fact("mountstats", now_ns(), {"when": when, **mount.as_fact()})
        for share in sample_shares():
            self.writer.add_fact("smb_share", now_ns(), {"when": when, **share.as_fact()})

    def _write_meta(self, began_ns: int) -> None:
        offset = measure_offset()
        meta = {
            "tool": {"name": "ttftprof", "version": __version__},
            "host": {
                "node": platform.node(),
                "kernel": platform.release(),
                "machine": platform.machine(),
                "cpus": os.cpu_count(),
                "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
                "page_bytes": os.sysconf("SC_PAGE_SIZE"),
                "tick_ns": tick_ns(),
            },
            "clock": {
                "name": "CLOCK_MONOTONIC",
                "realtime_offset_ns": offset.offset_ns,
                "error_ns": offset.error_ns,
            },
            "start_ns": began_ns,
            "target": {
                "how": self.target.how,
                "roots": list(self.target.roots),
                "pids": sorted(self.target.pids),
            },
            "settings": {
                "short_wait_ns": self.session.settings.short_wait_ns,
                "min_file_bytes": self.session.settings.min_file_bytes,
                "tick_hz": self.session.settings.tick_hz,
                "event_ring_bytes": self.session.settings.event_ring_bytes,
                "loader": self.session.loader,
            },
            "marks": {str(row): name for row, name in MARK_NAMES.items()},
            "driver_calls": {str(row): call.name for row, call in DRIVER_CALLS.items()},
            "recording_filesystem": self.writer.filesystem,
        }
        for key, value in meta.items():
            self.writer.set_meta(key, value)

    def _watch_descriptors(self) -> None:
        # By edge: a ring is never empty while the target is busy, but wakes when it has to.
        for ring in (self.session.events, self.session.texts, self.session.ends):
            self._poll.register(ring.fd, select.EPOLLIN | select.EPOLLET)
        self._poll.register(self._wake_r.fileno(), select.EPOLLIN)

    def handle_signals(self) -> None:
        """SIGINT, SIGTERM and the loss of the terminal stop the recording."""
        signal.set_wakeup_fd(self._wake_w.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop += 1

    @property
    def stopped(self) -> bool:
        """Whether it was told to stop."""
        return self._stop > 0

    @property
    def command_ended(self) -> bool:
        """Whether the command of the limits was seen to end."""
        return self._command_ended

    # -- run ----------------------------------------------------------------------------------

    def run(self) -> str:
        """Records until told to stop or a limit is met; returns why it ended, in words."""
        due = now_ns()
        interval = ACTIVE_NS
        while True:
            why = self._why_stop()
            if why:
                return why
            now = now_ns()
            due = max(min(due, now) + interval, now)  # what ends a sleep early delays no look
            self._wait_until(due)
            seen = self._cycle()
            interval = min(seen * self._pace or interval * 2, self.session.slowest_ns)
            self._show(self.progress)

    def _wait_until(self, due_ns: int) -> None:
        """Sleeps until due; a ring that fills or a text record ends the sleep early."""
        left = max(due_ns - now_ns(), 0)
        for fd, _ in self._poll.poll(left / NS_PER_S):
            if fd == self._wake_r.fileno():
                self._drain_wakeups()
            elif fd == self.session.texts.fd:
                early = self._looked_ns + TEXT_GAP_NS - now_ns()
                time.sleep(max(early, 0) / NS_PER_S)

    def _drain_wakeups(self) -> None:
        try:
            self._wake_r.recv(64)
        except BlockingIOError:
            return

    def _why_stop(self) -> str:
        limits, progress, now = self.limits, self.progress, now_ns()
        if self._stop:
            return "interrupted"
        if limits.duration_ns is not None and now - progress.started_ns >= limits.duration_ns:
            return "the duration is over"
        if limits.first_tokens is not None and progress.first_tokens >= limits.first_tokens:
            ended = progress.open_requests == 0
            if ended or now - progress.last_token_ns > LINGER_NS:
                return f"{progress.first_tokens} first token(s) seen"
        if self._command_ended and not self._members:
            return "the command ended"
        if not self._members and not self.target.successors:
            return "the target exited"
        return ""

    def _cycle(self) -> int:
        """One drain of everything; returns how soon the next is due, 0 if nothing happened."""
        self._looked_ns = until_ns = now_ns()
        events = self.session.events.drain()
        self._own.learn(events)
        self._count_requests()
        texts = self._take_texts(events, until_ns)
        self._hold("events", merge_held(events))
        self._follow(events)
        ns = now_ns()  # of the look at the counters: what came before took its time
        control = self.session.control[0]
        threads = self._threads.changed(int(control["threads_used"]), ns)
        files = self._files.changed(int(control["files_used"]), ns)
        self._hold("threads", threads)
        # After the look: of a thread that ended since, this row is the later one.
        self._hold("threads", self._threads.rows_of(self.session.ends.drain(), ns))
        self._hold("files", files)
        if len(files):
            slots = self.session.files[: int(control["files_used"])]
            cached_bytes = int(slots["added_pages"].sum()) * resource.getpagesize()
            self.progress.storage_bytes = cached_bytes + int(slots["direct_bytes"].sum())
        self._gpus.follow(frozenset(self._members))
        self._gpus.attend(self._is_waited_for())
        self._take_engine_counts()
        self._take_python_stacks(ns)
        self._note_clocks(ns)
        self._note_own_cost(ns)
        if ns >= self._next_write_ns:
            self._write(ns)
        moves = len(files) > 0 or texts > 0
        self._moving_looks = self._moving_looks + 1 if moves else 0
        if moves and self._moving_looks <= ACTIVE_LOOKS:
            return ACTIVE_NS
        return CALM_NS if moves or len(events) else 0

    def _is_waited_for(self) -> bool:
        """Whether a request has no first token yet."""
        return not all(self._open.values())

    def _take_gpu_samples(self) -> None:
        for drained in self._gpus.drain():
            self._hold("gpu", drained.rows)
            self._hold("gpu_processes", drained.process_rows)
            for kind, ns, fact in drained.facts:
                self.writer.add_fact(kind, ns, fact)

    def _take_python_stacks(self, ns: int) -> None:
        self._python.follow(self._members, ns, waited_for=self._is_waited_for())
        for begin_ns, fact in self._python.drain():
            self.writer.add_fact("python_stacks", begin_ns, fact)

    def _take_engine_counts(self) -> None:
        """Engines are asked only while a client waits for a first token."""
        self._metrics.await_token(self._is_waited_for())
        for ns, fact in self._metrics.drain():
            self.writer.add_fact("engine_load", ns, fact)

    def _hold(self, stream: str, records: Records) -> None:
        if len(records):
            self._held.setdefault(stream, []).append(records)

    def _write(self, ns: int) -> None:
        """Appends what was held back: fewer, bigger rows cost a fraction of many small ones."""
        self._next_write_ns = ns + WRITE_EVERY_NS
        self._take_gpu_samples()
        for stream, parts in self._held.items():
            self.writer.add_batch(stream, np.concatenate(parts))
        self._held.clear()
        self._keep_unanswered(ns)
        self.session.take_late(self._fstypes)
        self.writer.commit()

    def _keep_unanswered(self, ns: int) -> None:
        """Remote reads that wait for their answer are in the recording as long as they do."""
        before = len(self._unanswered)
        self._unanswered = self.session.unanswered(ns)
        if before or len(self._unanswered):
            self.writer.set_passing("events", self._unanswered)

    # -- facts behind the events --------------------------------------------------------------

    def _follow(self, events: Records) -> None:
        """Looks up what the events name: processes, files, libraries, connections."""
        self._just_scanned.clear()
        present = set(events["kind"].tolist())  # np.unique() imports for 20 ms
        for kind, handle in self._follow_by_kind.items():
            if kind in present:
                for event in events[events["kind"] == kind]:
                    handle(event)

    def _handlers(self) -> dict[Kind, Callable[[Any], None]]:
        return {
            Kind.FORK: self._on_fork,
            Kind.EXEC: self._on_exec,
            Kind.HELD: self._on_file,
            Kind.OPEN: self._on_file,
            Kind.MMAP: self._on_mmap,
            Kind.LISTEN: self._on_listen,
            Kind.PROCESS_EXIT: self._on_process_exit,
        }

    def _meet_process(self, pid: int, executed_ns: int = 0) -> None:
        """An exec is told by an event and by a text; either may be lost, and the first counts."""
        self._members.add(pid)
        if executed_ns and self._met.get(pid) == executed_ns:
            return
        self._met[pid] = executed_ns
        facts = read_process(pid)
        if facts is not None:
            self.writer.add_fact("process", now_ns(), facts.as_fact())
            engine = engine_named(facts.engine)
            if engine is not None and engine.metrics:
                self._metrics.follow(pid, engine.metrics)
        limit = memory_limit(pid)
        if limit is not None:
            self.writer.add_fact("memory", now_ns(), {"tgid": pid, **limit.as_fact()})
        self._look_for_libraries(pid, executed_ns)

    def _on_fork(self, event: Any) -> None:
        tgid = int(event["tgid"])
        self._members.add(tgid)
        if int(event["tid"]) == tgid:
            self._python.process_starts(tgid, forked=True)

    def _on_exec(self, event: Any) -> None:
        self._meet_process(int(event["tgid"]), int(event["start_ns"]))
        self._python.process_starts(int(event["tgid"]))

    def _on_listen(self, _event: Any) -> None:
        self._python.process_listens()

    def _on_process_exit(self, event: Any) -> None:
        pid = int(event["tgid"])
        self._python.process_ends(pid)
        self._members.discard(pid)
        self._met.pop(pid, None)
        self._metrics.forget(pid)
        self._tap.process_gone(pid, int(event["start_ns"]))
        if pid == self.limits.command_pid:
            self._end_of_command()
            self.command_status = int(event["a"])
        if not self._members and self.target.successors:
            self.progress.stage = "the server exited; waiting for the next one"

    def _on_file(self, event: Any) -> None:
        key = (int(event["dev"]), int(event["ino"]))
        if key in self._known_files:
            return
        pid, size_bytes = int(event["tgid"]), int(event["a"])
        path = path_held(pid, key) or shown_as(pid, key, size_bytes)
        if path is not None:
            self._name_file(key, pid, path, size_bytes)

    def _on_mmap(self, event: Any) -> None:
        if int(event["flags"]) & MmapFlag.EXEC:
            self._on_code(event)
        else:
            self._on_file(event)

    def _on_code(self, event: Any) -> None:
        """A file is looked at once, and all that a process has mapped by now with it."""
        key, pid = (int(event["dev"]), int(event["ino"])), int(event["tgid"])
        if key in self._known_code or int(event["flags"]) & MmapFlag.FAILED:
            return
        if pid in self._just_scanned or self._look_for_libraries(pid, int(event["start_ns"])):
            self._just_scanned.add(pid)
            self._known_code.add(key)

    def _name_file(self, key: tuple[int, int], pid: int, path: str, size_bytes: int) -> None:
        """A file's path, mount and readahead, as its process sees them."""
        self._known_files[key] = path
        lies_at = resolved(pid, key, path)  # a link may lead to another mount
        mount = mount_under(lies_at, mounts_of(pid))
        fact: dict[str, Any] = {
            "dev": key[0],
            "ino": key[1],
            "path": legible(path),
            "lies_at": legible(lies_at),
            "tgid": pid,
            "size_bytes": size_bytes,
            "device": "{}:{}".format(*dev_numbers(key[0])),
            "fstype": mount.fstype if mount else None,
            "mount": legible(mount.point) if mount else None,
            "source": legible(mount.source) if mount else None,
            "options": legible(mount.options) if mount else None,
            "read_ahead_kb": read_ahead_kb(key[0]),
            "beneath_unseen": names_itself(mount, key[0]),
        }
        fact |= self._path_facts(key[0], mount, lies_at, pid)
        self.writer.add_fact("file", now_ns(), fact)
        if mount and (_network(mount.fstype) or looks_like_weights(path)):
            self._warn_of_own_writes(replace(mount, dev=dev_numbers(key[0])))

    def _warn_of_own_writes(self, measured: Mount) -> None:
        """What the recorder writes, its target's reads wait for, if both go the same way."""
        own, self_measured = self._own_mount, False
        if own and _network(measured.fstype):
            self_measured = own.dev == measured.dev
        elif own:
            disk = disk_of(measured)
            self_measured = disk is not None and disk == disk_of(own)
        if own and self_measured:
            self._own_mount = None  # said once
            way = "mount" if _network(measured.fstype) else "disk"
            self._say(
                f"the recording lies on the {way} it measures ({measured.point}); "
                "-o FILE elsewhere keeps its writes apart"
            )
            self.writer.set_meta("recording_on_measured_mount", measured.point)

    def _path_facts(self, dev: int, mount: Mount | None, path: str, pid: int) -> dict[str, Any]:
        """What lies under a file; the same for all on a device and mount, of which 500 may be."""
        where = dev, mount.point if mount else ""
        known = self._stacks.get(where)
        if known is None:
            known = path_facts(path, pid)
            if known:  # else its process is gone, and the next file's may live
                self._stacks[where] = known
            self._fstypes.update(known.get("fstypes", ()), [mount.fstype] if mount else ())
        return {name: value for name, value in known.items() if value is not None}

    # -- texts --------------------------------------------------------------------------------

    def _take_texts(self, events: Records, until_ns: int) -> int:
        """All texts up to a moment, with the ends of connections among them where they fell: a
        closed socket's address goes to the next connection. Returns how many there were."""
        gone = (events["kind"] == Kind.CONN) & (events["flags"] == TCP_CLOSE)
        ended = [*self._closes, *((int(e["start_ns"]), int(e["ino"])) for e in events[gone])]
        # An event of just now may be here before the texts that came before it are.
        self._closes = [close for close in ended if close[0] > until_ns]
        closes = [close for close in ended if close[0] <= until_ns]
        closes.reverse()
        count = 0

        def skim(head: TextHead, data: memoryview) -> bool:
            nonlocal count
            if (closes and closes[-1][0] <= head.end_ns) or not self._tap.skim(head, data):
                return False
            count += 1
            return True

        for head, data in self.session.texts.drain(until_ns, skim):
            while closes and closes[-1][0] <= int(head["end_ns"]):
                ns, sock = closes.pop()
                self._tap.closed(sock, ns)
            self._take_text(head, data)
            count += 1
        for ns, sock in reversed(closes):
            self._tap.closed(sock, ns)
        return count

    def _take_text(self, head: Any, data: bytes) -> None:
        kind = int(head["kind"])
        if kind in (TextKind.RECEIVED, TextKind.SENT, TextKind.SENT_HELD):
            held = kind == TextKind.SENT_HELD
            self._tap.take(head, data, kind != TextKind.RECEIVED, held)
        elif kind == TextKind.LEFT:
            self._tap.left(int(head["key"]), int(head["end_ns"]))
        elif kind == TextKind.LOG:
            self._take_log(head, data)
        elif kind == TextKind.PATH:
            self._take_path(head, data)
        elif kind == TextKind.CACHE:
            self._take_cache(head, data)
        elif kind == TextKind.EXEC:
            fact = {"tgid": int(head["tgid"]), "path": _text(data)}
            self.writer.add_fact("exec", int(head["start_ns"]), fact)
            self._meet_process(int(head["tgid"]), int(head["start_ns"]))

    def _take_path(self, head: Any, data: bytes) -> None:
        key = (int(head["dev"]), int(head["key"]))
        pid, path = int(head["tgid"]), os.fsdecode(data)
        if not path.startswith("/"):
            path = opened_from(pid, int(head["skipped"]), path)
        known = self._known_files.get(key)
        if known is not None and (known == path or is_called(pid, known, key[1])):
            return
        used = int(self.session.control["files_used"][0])
        slots = self.session.files[:used]
        size = slots["size_bytes"][(slots["dev"] == key[0]) & (slots["ino"] == key[1])]
        self._name_file(key, pid, path, int(size[0]) if len(size) else 0)

    def _take_cache(self, head: Any, data: bytes) -> None:
        """A file of a kernel cache was opened: which cache, how, and on what it lies."""
        flags, path, pid = int(head["flags"]), _text(data), int(head["tgid"])
        if is_bookkeeping(path):
            return
        cache = cache_of(path)
        fact = {
            "cache": cache,
            "tgid": pid,
            "fstype": self._cache_fstype(pid, cache, path),
            "write": bool(flags & CacheFlag.WRITE),
            "missing": bool(flags & CacheFlag.MISSING),
            "dev": int(head["dev"]),
            "ino": int(head["key"]),
            "size_bytes": int(head["skipped"]),
        }
        self.writer.add_fact("cache_open", int(head["start_ns"]), fact)

    def _cache_fstype(self, pid: int, cache: str, path: str) -> str | None:
        """Asked once for each cache of a process, of which thousands of files may be opened."""
        if (pid, cache) not in self._cache_fstypes:
            mount = mount_under(path, mounts_of(pid))
            self._cache_fstypes[pid, cache] = mount.fstype if mount else None
        return self._cache_fstypes[pid, cache]

    def _take_log(self, head: Any, data: bytes) -> None:
        for name, values in find_log_marks(data):
            fact = {"name": name, "tgid": int(head["tgid"]), "tid": int(head["tid"]), **values}
            self.writer.add_fact("mark", int(head["start_ns"]), fact)

    # -- requests -----------------------------------------------------------------------------

    def _count_requests(self) -> None:
        """Counts what the last drain told, now that its connections are known: a runner may read
        a request before the front's call that sent it has returned."""
        for seen in self._moved:
            self._count_request(seen)
        self._moved.clear()

    def _count_request(self, seen: Seen) -> None:
        exchange, progress = seen.exchange, self.progress
        began_ns = exchange.start_ns
        if not exchange.generates or self._own.has(*seen.ports, seen.socket, began_ns):
            return
        key = seen.socket, began_ns
        if key not in self._open:
            self._open[key] = False
            progress.requests += 1
            progress.open_requests += 1
        if exchange.first_token_ns and not self._open[key]:
            self._open[key] = True
            progress.first_tokens += 1
            progress.last_token_ns = now_ns()
        progress.stage = "answering" if exchange.first_token_ns else "waiting for the first token"
        if exchange.end_ns is not None:
            del self._open[key]
            progress.open_requests -= 1

    def _exchange_ended(self, seen: Seen) -> None:
        self.writer.add_fact("exchange", seen.exchange.start_ns, seen.as_fact())
        self._moved.append(seen)

    def unfinished(self) -> list[Seen]:
        """The exchanges that have not ended, as they stand."""
        return self._tap.pending()

    # -- libraries ----------------------------------------------------------------------------

    def _look_for_libraries(self, pid: int, since_ns: int) -> bool:
        """`since_ns`: the earliest that what is new can have been mapped; 0: before recording.
        False if the process is gone."""
        self._mapped = pid, since_ns
        return self._libraries.scan(pid)

    def _library_found(self, path: str, marks: list[str]) -> None:
        pid, since_ns = self._mapped
        mapped = {"tgid": pid, "mapped_ns": since_ns} if since_ns else {}
        self.writer.add_fact("library", now_ns(), {"path": path, "marks": marks, **mapped})

    def _library_refused(self, path: str, reason: str) -> None:
        self.writer.add_fact("library", now_ns(), {"path": path, "marks": [], "reason": reason})

    # -- own cost -----------------------------------------------------------------------------

    def _note_clocks(self, ns: int) -> None:
        jump = self._clocks.moved()
        if jump is not None:
            self.writer.add_fact("clock_jump", ns, asdict(jump))
            if jump.suspended_ns > 0:
                self.session.follow_cpus(after_suspend=True)

    def _note_own_cost(self, ns: int) -> None:
        if ns >= self._next_own_ns:
            self._next_own_ns = ns + OWN_EVERY_NS
            self.writer.set_meta("own", self._own_cost())
            self.session.follow_cpus()
            self._keep_states()
            self._forget_the_dead()
            self._tell_survivors(ns)
            if self._governor.is_due(ns):
                decision = self._governor.look(ns, self._spent())
                if decision is not None:
                    self._relieve(ns, decision)

    def _own_cost(self) -> dict[str, int]:
        """CPU time while recording, py-spy's with it, before (start, imports, loading), and for
        samples of GPUs; peak memory."""
        return {
            "cpu_ns": time.process_time_ns() - self._armed_cpu_ns + self._python.cpu_ns,
            "arming_cpu_ns": self._armed_cpu_ns,
            "gpu_cpu_ns": self._gpus.cpu_ns,
            "max_rss_bytes": own_peak_bytes(),
        }

    def _spent(self) -> dict[str, int]:
        """{what: ns of processor time so far}, of kernel programs what their windows stand for."""
        kernel = self.session.program_counts()
        return {
            RECORDER: time.process_time_ns(),
            PYTHON: self._python.cpu_ns,
            **{name: round(counts.run_ns * ALL_OF_WINDOWS) for name, counts in kernel.items()},
        }

    def _relieve(self, ns: int, decision: Decision) -> None:
        relief, reason = decision.relief, decision.reason()
        if RECORDER in relief.costs:
            self._pace = SLOWER
        elif PYTHON in relief.costs:
            self._python.drop(reason)
        elif relief.source == "cpu":
            self.session.slow_ticks(TICK_HZ, reason, relief.lost)
        else:
            self.session.drop(relief.costs, reason)
        self.writer.add_fact("governor", ns, decision.as_fact())
        self._say(f"{relief.name}: {reason}; --overhead-budget off leaves it be")

    def _forget_the_dead(self) -> None:
        """A member whose exit was lost, or came before we looked, must not be waited for."""
        dead = {pid for pid in self._members if not is_alive(pid)}
        self._members -= dead
        if self.limits.command_pid in dead:
            self._end_of_command()
        for pid in dead:
            self._met.pop(pid, None)

    def _end_of_command(self) -> None:
        self._command_ended = True
        self._tell_survivors_ns = now_ns() + NS_PER_S  # most that it started end with it

    def _tell_survivors(self, ns: int) -> None:
        """A command that put its server into the background has ended, and the server has not."""
        if self._tell_survivors_ns is None or ns < self._tell_survivors_ns:
            return
        self._tell_survivors_ns = None
        if self._members:
            self.progress.stage = "the command ended; what it started runs on"
            self._say(
                f"the command ended, but what it started runs on ({self.survivors()}): recording "
                "until that ends too, or Ctrl-C"
            )

    def survivors(self) -> str:
        """The processes of the target that live, in words; "" if there are none."""
        pids = sorted(filter(is_alive, self._members))
        more = f" and {len(pids) - _NAMED} more" if len(pids) > _NAMED else ""
        return f"pid {', '.join(map(str, pids[:_NAMED]))}{more}" if pids else ""

    # -- end ----------------------------------------------------------------------------------

    def finish(self, why: str, complete: bool = True) -> None:
        """Drains what is left, writes states, losses and costs, and closes everything."""
        if self._windows is not None:
            self._windows.close()
        try:
            self._gpus.stop()
            for begin_ns, fact in self._python.stop():
                self.writer.add_fact("python_stacks", begin_ns, fact)
            self._metrics.stop()
            self._cycle()
            self._cycle()  # what the first left for the next
            self._count_requests()
            self._sample_mounts("end")
            self._write(now_ns())
            for seen in self.unfinished():
                self.writer.add_fact("exchange", seen.exchange.start_ns, seen.as_fact())
            self.write_states()
            self._write_program_counts()
            self.writer.set_meta("own", self._own_cost())
            self.writer.set_meta("end_ns", now_ns())
            self.writer.set_meta("ended_because", why)
            self.writer.close(complete)
        finally:
            self.session.close()
            self._poll.close()
            signal.set_wakeup_fd(-1)
            self._wake_r.close()
            self._wake_w.close()

    def _write_program_counts(self) -> None:
        counts = self.session.program_counts()
        costs = {name: [own.runs, own.run_ns] for name, own in counts.items()}
        self.writer.set_meta("probe_costs", costs)
        self.writer.set_lost(SKIPPED_RUNS, sum(own.skipped for own in counts.values()))

    def write_states(self) -> None:
        """How the sources stand and what was lost, as of now."""
        sources, lost = self._told = self._states()
        for source in sources:
            self.writer.set_source(source)
        for place, count in lost.items():
            self.writer.set_lost(place, count)

    def _keep_states(self) -> None:
        """A recording whose recorder is killed says how its sources stood, too."""
        if self._states() != self._told:
            self.write_states()

    def _marks_state(self, ok: Source) -> Source:
        """What became of the calls of libraries; of one that may not be read, nobody knows whether
        it has any."""
        libraries = self._libraries
        state = ok if libraries.attached else _NO_MARKS
        if not libraries.hidden:
            return state
        by = "".join(f"; in force on ttftprof: {guard.what}" for guard in guards())
        kind = "degraded" if libraries.attached else "absent"
        return replace(_NO_MARKS, state=kind, reason=f"{libraries.hidden}{by}")

    def _states(self) -> tuple[list[Source], dict[str, int]]:
        sources = {
            state.name: Source(state.name, state.state, state.reason, state.lost)
            for state in self.session.states_for(self._fstypes)
        }
        if sources["marks"].state == "ok":
            sources["marks"] = self._marks_state(sources["marks"])
        lost = dict(zip(LOST, self.session.lost(), strict=False))
        return [*sources.values(), self._gpus.source(), self._python.source()], lost


_NO_MARKS = Source(
    "marks",
    "absent",
    "no library of the target exports a call that ttftprof knows",
    "phases rest on files, processes, sockets and logs alone",
)


def merge_held(events: Records) -> Records:
    """Of the records of one file that a process held in many maps or descriptors, the first, with
    how many there were."""
    held = events["kind"] == Kind.HELD
    if not held.any():
        return events
    at = np.flatnonzero(held).tolist()
    first: dict[tuple[int, ...], int] = {}
    times: Counter[tuple[int, ...]] = Counter()
    for index, identity in zip(
        at, events[at][["tgid", "dev", "ino", "flags"]].tolist(), strict=True
    ):
        first.setdefault(identity, index)
        times[identity] += 1
    where, counts = np.array([*first.values()]), np.array([times[who] for who in first])
    merged = events.copy()
    merged["flags"][where] |= np.minimum(counts, 0x7FFF).astype(np.uint16) << np.uint16(1)
    kept = ~held
    kept[where] = True
    one_each: Records = merged[kept]
    return one_each


def own_peak_bytes() -> int:
    """VmHWM; ru_maxrss would keep, over exec, the peak of the process that started this one."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _text(data: bytes) -> str:
    """A path as text; bytes that are no UTF-8 are shown escaped, never lost."""
    return data.decode("utf-8", errors="backslashreplace")


def _network(fstype: str) -> bool:
    return fstype in {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "afs"} or fstype.startswith(
        "fuse"
    )
