"""Follows a recorder for as long as it runs, and tells of each request as it ends.

The recorder writes into memory (`rolling`); once a request is over, the usual analysis runs on the
moments around it, in a forked child that leaves nothing behind: the recorder is not held up, and
what the analysis takes goes back to the system. Then those moments are let go.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ttftprof import analysis
from ttftprof.clock import NS_PER_MS, NS_PER_S, now_ns
from ttftprof.errors import TtftprofError
from ttftprof.model import Request
from ttftprof.phases import Served
from ttftprof.recorder import Progress, Recorder
from ttftprof.rolling import KEEP_NS, Interval, Rolling, View
from ttftprof.timeline import Exchange, build

_BEFORE_NS = 2 * NS_PER_S  # what came just before a request may explain it
_AFTER_NS = NS_PER_S  # after its first token
_SETTLE_NS = 300 * NS_PER_MS  # after its end
_LOADS_WITHIN_NS = 900 * NS_PER_S  # a process that takes longer to serve is no start any more
_FIRST_LOOK_NS = 3 * NS_PER_S  # at a process that was started; then ever less often
_NO_SERVER_NS = 30 * NS_PER_S
_KNOWN = 16
_KEPT_AT_MOST = 100
_SLOTS_LEFT = 0.25  # of the kernel's table of files: below this the recorder begins anew


@dataclass(frozen=True, slots=True)
class Slow:
    """Requests that waited this long are kept as recordings in a folder."""

    after_ns: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that is over, or a start (`Report.starts`). `kept`: the recording of it."""

    request: Request
    wall_ns: int
    kept: Path | None = None

    def numbered(self, identity: str) -> Ended:
        return replace(self, request=replace(self.request, id=identity))


class Watcher:
    """One recorder's requests. Give `step` to the recorder as `show`; after `finish`, `drain`."""

    def __init__(
        self,
        tell: Callable[[Ended], None],
        say: Callable[[str], None],
        slow: Slow | None = None,
    ) -> None:
        self.rolling = Rolling()
        self.is_worn = False  # it stopped its recorder only to begin anew
        self._tell, self._say, self._slow = tell, say, slow
        self._recorder: Recorder | None = None
        self._due: list[_Due] = []
        self._job: _Job | None = None
        self._young: dict[int, _Young] = {}
        self._known: deque[Request] = deque(maxlen=_KNOWN)
        self._lost: Mapping[str, int] = {}
        self._kept = 0
        self._next_prune_ns = 0

    def follow(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def step(self, _: Progress) -> None:
        """Takes note of what the recorder has just written; never waits for long."""
        now = now_ns()
        self._note()
        if self._job is not None and self._job.is_done():
            self._take(self._job.result())
            self._job = None
        if self._job is None:
            self._begin(now)
        if now >= self._next_prune_ns:
            self._next_prune_ns = now + NS_PER_S
            self.rolling.prune(self._needed(now))
            self._watch_losses()
            self._watch_slots()

    def drain(self) -> None:
        """The recorder has finished: tells of what is left, without hurry."""
        self._note()
        while self._job is not None or self._due:
            if self._job is None:
                self._job = _Job(self.rolling, self._due, [], list(self._known), self._keep())
                self._due = []
            self._take(self._job.result())
            self._job = None

    # -- what is pending ------------------------------------------------------------------------

    def _note(self) -> None:
        self._due += [_Due.of(e) for e in self.rolling.ended if _is_answer(e)]
        self.rolling.ended.clear()
        for tgid, ns in self.rolling.executed:
            self._young[tgid] = _Young(ns)
        for tgid in self.rolling.exited:
            self._young.pop(tgid, None)
        self.rolling.executed.clear()
        self.rolling.exited.clear()

    def _open(self) -> list[dict[str, Any]]:
        return [] if self._recorder is None else [s.as_fact() for s in self._recorder.unfinished()]

    def _needed(self, now: int) -> Iterator[Interval]:
        for due in [*self._due, *(self._job.dues if self._job else [])]:
            yield due.interval
        for fact in self._open():
            if _is_answer(fact):
                yield _Due.of(fact).interval
        for young in self._young.values():
            if now - young.since_ns < _LOADS_WITHIN_NS:
                yield young.since_ns - KEEP_NS, now

    def _begin(self, now: int) -> None:
        """Analyses what is over, if something is."""
        ready = [due for due in self._due if self.rolling.committed_ns > due.interval[1]]
        starting = [] if ready or self._is_awaited() else self._to_look_at(now)
        if not ready and not starting:
            return
        if self._recorder is not None:
            self._recorder.write_states()
        self._due = [due for due in self._due if due not in ready]
        pending = self._open()
        known = list(self._known)
        self._job = _Job(self.rolling, ready, pending, known, self._keep(), starting)

    def _is_awaited(self) -> bool:
        """Whether somebody waits for a first token, perhaps of a server that is starting."""
        waiting = any(_is_answer(e) and not e.get("first_token_ns") for e in self._open())
        return waiting or bool(self._due)

    def _to_look_at(self, now: int) -> list[int]:
        """Processes that may by now have become able to serve; the earliest's start is needed."""
        found = [tgid for tgid, young in self._young.items() if now >= young.next_look_ns]
        for tgid in found:
            young = self._young[tgid]
            young.next_look_ns = now + (now - young.since_ns) // 2
        return [young.since_ns for young in self._young.values()] if found else []

    def _keep(self) -> Slow | None:
        return self._slow if self._kept < _KEPT_AT_MOST else None

    # -- what came out --------------------------------------------------------------------------

    def _take(self, found: _Found) -> None:
        for message in found.troubles:
            self._say(message)
        for request in found.requests:
            if request.is_start:
                self._young.pop(request.tgid, None)
            elif not request.ended.request.switched:
                self._known.append(request.ended.request)
            if request.ended.kept:
                self._kept += 1
                if self._kept == _KEPT_AT_MOST:
                    self._say(f"{_KEPT_AT_MOST} slow requests are kept; no more will be")
            self._tell(request.ended)
        for tgid in found.looked_at - found.loaders:
            young = self._young.get(tgid)
            if young and now_ns() - young.since_ns > _NO_SERVER_NS:
                del self._young[tgid]

    def _watch_losses(self) -> None:
        if self._recorder is not None:
            self._recorder.write_states()
        lost = self.rolling.lost
        for place, count in lost.items():
            if count > self._lost.get(place, 0):
                self._say(f"lost {count - self._lost.get(place, 0):,} × {place}")
        self._lost = dict(lost)

    def _watch_slots(self) -> None:
        """The kernel's table of files fills for good: a new one before it is full."""
        if self._recorder is None or self.is_worn:
            return
        session = self._recorder.session
        used, most = int(session.control["files_used"][0]), len(session.files)
        if used > most * (1 - _SLOTS_LEFT) and not self._open() and not self._due:
            self.is_worn = True
            self._recorder.stop()


@dataclass(slots=True)
class _Young:
    """A process that was executed, and may turn out to be a server that starts."""

    since_ns: int
    next_look_ns: int = field(init=False)

    def __post_init__(self) -> None:
        self.next_look_ns = self.since_ns + _FIRST_LOOK_NS


def _is_answer(exchange: Mapping[str, Any]) -> bool:
    return bool(exchange.get("generates") or exchange.get("first_token_ns"))


_Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Due:
    """A request and the moments that its analysis needs."""

    key: _Key
    interval: Interval

    @classmethod
    def of(cls, exchange: Mapping[str, Any]) -> _Due:
        began, token, end = (exchange[n] for n in ("start_ns", "first_token_ns", "end_ns"))
        until = (end or now_ns()) + _SETTLE_NS
        if token:
            until = min(until, token + _AFTER_NS)
        return cls((exchange["socket"], token, end), (began - _BEFORE_NS, until))

    @staticmethod
    def key_of(exchange: Exchange) -> _Key:
        return exchange.socket, exchange.first_token_ns, exchange.end_ns


# -- the analysis, in a child ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _One:
    ended: Ended
    tgid: int
    is_start: bool = False


@dataclass(slots=True)
class _Found:
    requests: list[_One] = field(default_factory=list)
    looked_at: set[int] = field(default_factory=set)
    loaders: set[int] = field(default_factory=set)
    troubles: list[str] = field(default_factory=list)


class _Job:
    """An analysis under way. The child sees memory as it was at the fork, and only reads it."""

    def __init__(
        self,
        rolling: Rolling,
        dues: Sequence[_Due],
        pending: Sequence[Mapping[str, Any]],
        known: Sequence[Request],
        slow: Slow | None,
        starting: Sequence[int] = (),
    ) -> None:
        self.dues = list(dues)
        self._memory = os.memfd_create("ttftprof")
        self._pid = os.fork()
        self._over = False
        if self._pid == 0:
            self._run(lambda: _analyse(rolling, dues, pending, known, slow, starting))

    def _run(self, work: Callable[[], _Found]) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.nice(5)
        try:
            found = work()
        except Exception as error:  # whatever it is, the next request is another one
            found = _Found(troubles=[f"a request could not be analysed: {error!r}"])
        data = memoryview(pickle.dumps(found))
        while data:
            data = data[os.write(self._memory, data) :]
        os._exit(0)

    def is_done(self) -> bool:
        self._over = self._over or os.waitpid(self._pid, os.WNOHANG)[0] != 0
        return self._over

    def result(self) -> _Found:
        """What it found; waits for it if need be."""
        if not self._over:
            os.waitpid(self._pid, 0)
        with os.fdopen(self._memory, "rb") as memory:
            memory.seek(0)
            data = memory.read()
        if not data:
            return _Found(troubles=["a request could not be analysed: no memory was left for it"])
        found: _Found = pickle.loads(data)
        return found


def _analyse(
    rolling: Rolling,
    dues: Sequence[_Due],
    pending: Sequence[Mapping[str, Any]],
    known: Sequence[Request],
    slow: Slow | None,
    starting: Sequence[int],
) -> _Found:
    found = _Found()
    for group in _grouped(dues):
        interval = group[0].interval[0], max(due.interval[1] for due in group)
        view = rolling.view(interval, pending)
        keys = {due.key for due in group}

        def wanted(served: Served, keys: set[_Key] = keys) -> bool:
            return _Due.key_of(served.front) in keys

        for served, request in analysis.concluded(build(view), wanted, known):
            ended = _kept(request, view, slow, found.troubles)
            found.requests.append(_One(ended, served.server))
    if starting:
        _add_starts(found, rolling.view((min(starting) - KEEP_NS, now_ns()), pending), slow)
    return found


def _grouped(dues: Sequence[_Due]) -> Iterator[list[_Due]]:
    """Those whose moments overlap together, oldest first."""
    group: list[_Due] = []
    until = 0
    for due in sorted(dues, key=lambda d: d.interval):
        if group and due.interval[0] > until:
            yield group
            group = []
        group.append(due)
        until = max(until, due.interval[1])
    if group:
        yield group


def _add_starts(found: _Found, view: View, slow: Slow | None) -> None:
    timeline = build(view)
    found.looked_at = {
        tgid for tgid, lives in timeline.processes.items() if any(p.exec_ns for p in lives)
    }
    for started, request in analysis.starts(timeline):
        found.loaders.add(started.start.process.tgid)
        if started.start.ready is not None:
            ended = _kept(request, view, slow, found.troubles)
            found.requests.append(_One(ended, started.start.process.tgid, is_start=True))


def _kept(request: Request, view: View, slow: Slow | None, troubles: list[str]) -> Ended:
    last_ns = max([request.start_ns, *(p.end_ns for p in request.phases)])
    clock = view.meta.get("clock") or {}
    wall_ns = (request.end_ns or last_ns) + int(clock.get("realtime_offset_ns") or 0)
    waited_ns = last_ns - request.start_ns
    if slow is None or waited_ns < slow.after_ns:
        return Ended(request, wall_ns)
    when = time.strftime("%Y%m%d-%H%M%S", time.localtime(wall_ns / NS_PER_S))
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", request.model or "unknown")[:60].strip("-.")
    path = slow.folder / f"{when}-{model}-{waited_ns // NS_PER_MS}ms.ttft"
    try:
        view.save(path, f"kept: a request waited {waited_ns / NS_PER_S:.1f} s")
    except TtftprofError as error:
        troubles.append(f"the slow request is not kept: {error.message}")
        return Ended(request, wall_ns)
    return Ended(request, wall_ns, path)
