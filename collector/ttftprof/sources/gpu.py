"""GPUs, sampled on an absolute schedule in threads of their own, whoever makes them.

Guarantees: where there is no GPU to ask nothing runs and nothing is imported; `Gpus.drain` takes
what is there and never waits, whatever a driver does; a moment that was missed is left out, not
made up for, and the lateness of every look is in its row; a call that does not return, a device
that is lost and a question that is refused become facts.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from ttftprof.clock import NS_PER_MS, NS_PER_S, now_ns
from ttftprof.events import Records
from ttftprof.gpu_rows import GPU_PROCESS_ROW, GPU_ROW, Valid
from ttftprof.recording import Source

PERIOD_NS = 20 * NS_PER_MS
SLOW_PERIOD_NS = 50 * NS_PER_MS
HUNG_NS = NS_PER_S
NO_GPU = "no NVIDIA driver library, no other device that renders"
UNSAMPLED = "GPU memory, utilisation and link are unknown"
JOIN_S = 0.2
_MOST = (1 << 32) - 1
CPU_SHARE = 0.008  # of a core, above which less is asked
WEIGHED_EVERY_NS = NS_PER_S // 2
_STRETCH_MOST = 32


class DeviceLost(Exception):
    """The device fell off the bus or needs a reset; it will not answer again."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


class GpuAbsent(Exception):
    """There is nothing to sample: why, and what that costs (nothing, if there is no GPU)."""

    def __init__(self, reason: str, cost: str = "") -> None:
        super().__init__(reason)
        self.reason, self.cost = reason, cost


class Look(NamedTuple):
    """What one look found: values by `GPU_ROW` field, and {tgid: bytes} if that was asked for."""

    values: Mapping[str, int]
    processes: Mapping[int, int] | None = None


# Which fields say that another, or a pair, was looked at.
_TELLING = {
    "used_bytes": Valid.USED,
    "busy_percent": Valid.BUSY,
    "pstate": Valid.PSTATE,
    "link_gen": Valid.LINK,
    "core_mhz": Valid.CLOCKS,
    "throttle": Valid.THROTTLE,
    "rx_bytes_per_s": Valid.RX,
    "tx_bytes_per_s": Valid.TX,
}
# Where a row has each field, and its bit in `valid`. Numbers: flags cost a microsecond each, and
# that with caches that are full of what others do is ten.
_NAMES = GPU_ROW.names or ()
_VALID, _ERROR = _NAMES.index("valid"), _NAMES.index("error_ns")
_FIELDS = {
    name: (at, int(_TELLING.get(name, 0))) for at, name in enumerate(_NAMES) if _VALID < at < _ERROR
}
_NOTHING = (0,) * (len(_NAMES) - _VALID)


class InCall(Protocol):
    """Which call is under way, and since when (0: none)."""

    call: str
    since_ns: int


class Vendor(ABC):
    """One way to ask devices. `open`, `look` and `close` are called in one thread, `look_slowly`,
    which may block for tens of milliseconds, in another."""

    name: str
    doors: Sequence[InCall] = ()
    slow_every = 10  # of the slow schedule's moments, those at which there is something to ask

    @abstractmethod
    def open(self) -> list[dict[str, Any]]:
        """The devices, a fact each with at least `index` (from 0) and `name`; `GpuAbsent`."""

    @abstractmethod
    def look(self, device: int, turn: int) -> Look:
        """One look: at memory alone if `turn` is negative; the turns count the others, so that what
        is dear can be asked at some of them. Raises `DeviceLost`."""

    def look_slowly(self, device: int, turn: int) -> Iterator[tuple[int, int, Look]]:
        """(ns, error of ns, look) of what blocks; nothing for most. `turn` counts the slow
        schedule's moments."""
        yield from ()

    def take_facts(self) -> list[tuple[str, dict[str, Any]]]:
        """What else was found out since the last time."""
        return []

    def follow(self, tgids: frozenset[int]) -> None:  # noqa: B027 - most need not know
        """Whose memory is asked for, where that is found process by process."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back."""


@dataclass(slots=True)
class Schedule:
    """The moments start + n × period; `passed` looks ahead to the first that is still to come."""

    due_ns: int
    period_ns: int
    tick: int = 0
    missed: int = 0

    def passed(self, now_ns: int, every: int = 1) -> None:
        """On to the next moment to come whose number is a multiple of `every`."""
        steps = max((now_ns - self.due_ns) // self.period_ns, 0) + 1
        self.missed += steps - 1
        steps += -(self.tick + steps) % every
        self.tick += steps
        self.due_ns += steps * self.period_ns


class Pace:
    """At which looks all is asked: at each, or at fewer where answers are dear, be it for the
    driver, or because others on the machine leave nothing in its caches.

    Memory is looked at on every moment of the schedule.
    """

    def __init__(self, now_ns: int) -> None:
        self._weighed_ns = now_ns
        self._spent_ns = 0  # until then
        self._due_tick = self._turns = 0
        self.stretch = 1

    def turn(self, tick: int) -> int:
        """The number of this look among those at all; -1 if it is none. Counted: were it the
        moment's, a driver that misses every other moment would be asked for half of all only."""
        if tick < self._due_tick:
            return -1
        self._due_tick = (tick // self.stretch + 1) * self.stretch
        self._turns += 1
        return self._turns - 1

    def weigh(self, now_ns: int, spent_ns: int) -> bool:
        """Twice a second, by all the CPU time so far, what sampling costs; whether the pace
        changed. To ask twice as often costs less than twice as much, so that it does not swing."""
        lasted_ns = now_ns - self._weighed_ns
        if lasted_ns < WEIGHED_EVERY_NS:
            return False
        share, before = (spent_ns - self._spent_ns) / lasted_ns, self.stretch
        self._weighed_ns, self._spent_ns = now_ns, spent_ns
        if share > CPU_SHARE:
            self.stretch = min(before * 2, _STRETCH_MOST)
        elif share < CPU_SHARE / 2:
            self.stretch = max(before // 2, 1)
        return self.stretch != before


@dataclass(slots=True)
class Drained:
    """What the samplers found since the last drain."""

    rows: Records
    process_rows: Records
    facts: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)


class Sampler:
    """One vendor's devices. `base` is added to its device numbers."""

    def __init__(self, vendor: Vendor, base: int = 0, clock: Callable[[], int] = now_ns) -> None:
        self.vendor = vendor
        self.names: list[str] = []
        self.absent: GpuAbsent | None = None
        self.troubles: list[str] = []
        self._base = base
        self._clock = clock
        self._stopped = False
        self._threads: list[threading.Thread] = []
        self._alive: list[int] = []
        self._memory: dict[int, dict[int, int]] = {}
        self._hung: dict[int, int] = {}
        self._looking_ns = self._looking_slowly_ns = 0  # processor time of either thread
        self._pace = Pace(clock())
        # Appending to and taking from a deque needs no lock: `drain` cannot be held up.
        self._rows: deque[tuple[int, ...]] = deque()
        self._process_rows: deque[tuple[int, ...]] = deque()
        self._facts: deque[tuple[str, int, dict[str, Any]]] = deque()

    # -- threads ----------------------------------------------------------------------------

    def start(self) -> None:
        self._spawn("gpu", self._run)

    def _spawn(self, name: str, run: Callable[[], None]) -> None:
        # Daemons: one that hangs in a driver must not keep the recorder from ending.
        thread = threading.Thread(target=self._guarded, args=(run,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guarded(self, run: Callable[[], None]) -> None:
        """A thread that dies of what nobody thought of must not do so unseen."""
        try:
            run()
        except Exception as error:
            self.troubles.append(f"sampling ended: {type(error).__name__}: {error}")
            self._tell("gpu_failed", {"reason": str(error)})

    def _run(self) -> None:
        if not self.open():
            return
        self._spawn("gpu-slow", self._run_slowly)
        schedule, pace = Schedule(self._clock(), PERIOD_NS), self._pace
        began_ns = time.thread_time_ns()
        while self._wait(schedule):
            self.sample(schedule, pace.turn(schedule.tick))
            self._looking_ns = time.thread_time_ns() - began_ns
            if pace.weigh(self._clock(), self.cpu_ns):
                self._tell("gpu_pace", {"all_every_ns": pace.stretch * PERIOD_NS})
        if not any(door.since_ns for door in self.vendor.doors):
            self.vendor.close()

    def _run_slowly(self) -> None:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        schedule = Schedule(self._clock(), SLOW_PERIOD_NS)
        while self._wait(schedule):
            self.sample_slowly(schedule.tick)
            schedule.passed(self._clock(), max(self.vendor.slow_every, self._pace.stretch))
            self._looking_slowly_ns = time.thread_time_ns()

    @property
    def cpu_ns(self) -> int:
        """Processor time of both threads since there was something to look at."""
        return self._looking_ns + self._looking_slowly_ns

    def _wait(self, schedule: Schedule) -> bool:
        """Sleeps until due; False if it is time to end, or nothing is left to sample."""
        left = max(schedule.due_ns - self._clock(), 0)
        time.sleep(left / NS_PER_S)  # half the cost of waiting for an event
        return bool(self._alive) and not self._stopped

    def stop(self) -> None:
        """Ends the threads. The first is waited for; what hangs or blocks is left behind."""
        self._stopped = True
        for thread in self._threads[:1]:
            thread.join(JOIN_S)
        self._watch(round(JOIN_S * NS_PER_S), "did not return before recording ended")

    # -- what the threads do ----------------------------------------------------------------

    def open(self) -> bool:
        """Whether there is anything to sample; the devices become facts."""
        try:
            found = self.vendor.open()
        except GpuAbsent as absent:
            self.absent = absent
            return False
        for fact in found:
            self.names.append(str(fact["name"]))
            self._tell("gpu", {**fact, "index": fact["index"] + self._base})
        self._alive = [int(fact["index"]) for fact in found]
        self._tell_found()
        return True

    def sample(self, schedule: Schedule, turn: int) -> None:
        """One look at every device that still answers, then on to the next moment."""
        late = max(self._clock() - schedule.due_ns, 0)
        for device in list(self._alive):
            began = self._clock()
            try:
                look = self.vendor.look(device, turn)
            except DeviceLost as lost:
                self._lose(device, str(lost))
                continue
            took = self._clock() - began
            self._rows.append(_row(look, began, late, took, device + self._base))
            if look.processes is not None:
                self._note_processes(device, began, look.processes)
        if turn >= 0:
            self._tell_found()
        schedule.passed(self._clock())

    def sample_slowly(self, turn: int) -> None:
        for device in list(self._alive):
            try:
                for ns, error_ns, look in self.vendor.look_slowly(device, turn):
                    row = _row(look, ns, 0, 0, device + self._base, error_ns)
                    self._rows.append(row)
            except DeviceLost as lost:
                self._lose(device, str(lost))

    def _lose(self, device: int, reason: str) -> None:
        if device not in self._alive:
            return  # the other thread met it first
        self._alive.remove(device)
        self.troubles.append(f"GPU {device + self._base} was lost while recording ({reason})")
        self._tell("gpu_lost", {"index": device + self._base, "reason": reason})

    def _note_processes(self, device: int, ns: int, now: Mapping[int, int]) -> None:
        """A row for each process whose memory changed, and one of 0 for each that is gone."""
        before = self._memory.get(device, {})
        for tgid in sorted({*before, *now}):
            if before.get(tgid, 0) != now.get(tgid, 0):
                self._process_rows.append((ns, device + self._base, tgid, now.get(tgid, 0)))
        self._memory[device] = dict(now)

    def _tell(self, kind: str, fact: dict[str, Any]) -> None:
        self._facts.append((kind, self._clock(), fact))

    def _tell_found(self) -> None:
        for kind, fact in self.vendor.take_facts():
            self._tell(kind, fact)

    # -- what the recorder does -------------------------------------------------------------

    def drain(self) -> Drained:
        """All that is there; never waits."""
        self._watch(HUNG_NS, "did not return for over a second")
        return Drained(
            np.array(_take(self._rows), GPU_ROW),
            np.array(_take(self._process_rows), GPU_PROCESS_ROW),
            _take(self._facts),
        )

    def _watch(self, longest_ns: int, says: str) -> None:
        """Notes, once, each call that has been under way for longer."""
        now = self._clock()
        for number, door in enumerate(self.vendor.doors):
            since, call = door.since_ns, door.call
            if since and now - since >= longest_ns and self._hung.get(number) != since:
                self._hung[number] = since
                self.troubles.append(f"{call} {says}")
                self._tell("gpu_hung", {"call": call, "since_ns": since})


class Gpus:
    """All vendors' samplers of one recording, as one source."""

    def __init__(self, vendors: Sequence[Vendor], clock: Callable[[], int] = now_ns) -> None:
        self._samplers = [Sampler(v, 64 * number, clock) for number, v in enumerate(vendors)]

    @classmethod
    def find(cls) -> Gpus:
        """Those of this machine; of none if it has no GPU that can be asked."""
        from ttftprof.sources import drm, nvml

        return cls([vendor for vendor in (nvml.find(), drm.find()) if vendor is not None])

    def start(self) -> None:
        for sampler in self._samplers:
            sampler.start()

    def drain(self) -> list[Drained]:
        return [sampler.drain() for sampler in self._samplers]

    def follow(self, tgids: frozenset[int]) -> None:
        for sampler in self._samplers:
            sampler.vendor.follow(tgids)

    @property
    def cpu_ns(self) -> int:
        """Processor time of all threads that sample."""
        return sum(sampler.cpu_ns for sampler in self._samplers)

    def stop(self) -> None:
        for sampler in self._samplers:
            sampler.stop()

    def source(self) -> Source:
        """What became of it, after `stop`."""
        names = [name for sampler in self._samplers for name in sampler.names]
        absences = [s.absent for s in self._samplers if s.absent is not None]
        troubles = [trouble for sampler in self._samplers for trouble in sampler.troubles]
        if not names:
            reasons = [*(a.reason for a in absences), *troubles] or [NO_GPU]
            costs = [*(a.cost for a in absences if a.cost), *([UNSAMPLED] if troubles else ())]
            return Source("gpu", "absent", *("; ".join(dict.fromkeys(t)) for t in (reasons, costs)))
        if troubles:
            lost = "its samples begin late, end or have a gap there"
            return Source("gpu", "degraded", "; ".join(dict.fromkeys(troubles)), lost)
        return Source("gpu", "ok", ", ".join(names))


@contextmanager
def before_others() -> Iterator[None]:
    """Threads that are started within go before all that compute, where the kernel allows it: a
    sampler needs less than a hundredth of a core, and needs it on time. They inherit it from this
    one, which may ask for it only while it is root."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _take(found: deque[Any]) -> list[Any]:
    """What is there now; the other side may append meanwhile."""
    return [found.popleft() for _ in range(len(found))]


def _row(
    look: Look, ns: int, late_ns: int, took_ns: int, device: int, error_ns: int = 0
) -> tuple[int, ...]:
    row = [ns, min(late_ns, _MOST), min(took_ns, _MOST), device, *_NOTHING]
    for name, value in look.values.items():
        at, bit = _FIELDS[name]
        row[at] = value
        row[_VALID] |= bit
    row[_ERROR] = min(error_ns, _MOST)
    return tuple(row)
