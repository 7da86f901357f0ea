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
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from ttftprof.clock import NS_PER_S
from ttftprof.events import Records
from ttftprof.gpu_rows import GPU_PROCESS_ROW, GPU_ROW, Valid
from ttftprof.recording import Source
from ttftprof.sources.gpu_schedule import (
    PERIOD_NS,
    REST_EVERY,
    SLOW_PERIOD_NS,
    Alarm,
    Motion,
    Pace,
    Schedule,
)

HUNG_NS = NS_PER_S
NO_GPU = "no NVIDIA driver library, no other device that renders"
UNSAMPLED = "GPU memory, utilisation and link are unknown"
JOIN_S = 0.2
SELDOM = 10  # of the slow schedule's moments, where nothing is to be measured
_FEW = 2  # devices: those of which all are looked at more often when somebody waits
_MOVES_BYTES = 16 << 20  # a change of a device's memory; what draws on a screen changes it by less
_USED = int(Valid.USED)
_MOST = (1 << 32) - 1


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
# What a look finds: the fields of a row between `valid` and `error_ns`, in their order.
_NAMES = GPU_ROW.names or ()
NUMBERS = _NAMES[_NAMES.index("valid") + 1 : _NAMES.index("error_ns")]


# As `Look`, of which it is the plain form.
Found = tuple[int, tuple[int, ...], Mapping[int, int] | None]


class Look(NamedTuple):
    """What one look found: the `NUMBERS` as they stand in a row, of which `valid` says which mean
    something, and {tgid: bytes} if whose the memory is was asked for and may have changed."""

    valid: int
    numbers: tuple[int, ...]
    processes: Mapping[int, int] | None = None

    @classmethod
    def of(cls, values: Mapping[str, int], processes: Mapping[int, int] | None = None) -> Self:
        """From numbers by name; a pair is told by its first."""
        valid = sum(int(_TELLING.get(name, 0)) for name in values)
        return cls(valid, tuple(values.get(name, 0) for name in NUMBERS), processes)

    @property
    def values(self) -> dict[str, int]:
        """Those numbers that mean something."""
        told, found = True, {}
        for name, number in zip(NUMBERS, self.numbers, strict=True):
            told = bool(self.valid & _TELLING[name]) if name in _TELLING else told
            if told:
                found[name] = number
        return found


class InCall(Protocol):
    """Which call is under way, and since when (0: none)."""

    call: str
    since_ns: int


class Vendor(ABC):
    """One way to ask devices. `open`, `look` and `close` are called in one thread, `look_slowly`,
    which may block for tens of milliseconds, in another."""

    name: str
    doors: Sequence[InCall] = ()

    def slow_every(self, moves: bool) -> int:
        """Of the slow schedule's moments, those at which there is something to ask."""
        return SELDOM

    @abstractmethod
    def open(self) -> list[dict[str, Any]]:
        """The devices, a fact each with at least `index` (from 0) and `name`; `GpuAbsent`."""

    @abstractmethod
    def look(self, device: int, turn: int) -> Look:
        """One look: at memory alone if `turn` is negative; the turns count the others, so that what
        is dear can be asked at some of them. Raises `DeviceLost`."""

    def looker(self, device: int) -> Callable[[int], Found]:
        """`look` of one device, by turn, on the shortest way."""
        return partial(self.look, device)

    def look_slowly(self, device: int, turn: int) -> Iterator[tuple[int, int, Look]]:
        """(ns, error of ns, look) of what blocks; nothing for most. `turn` counts the slow
        schedule's moments."""
        yield from ()

    def take_facts(self) -> list[tuple[str, dict[str, Any]]]:
        """What else was found out since the last time. Called by the recorder's thread."""
        return []

    def follow(self, tgids: frozenset[int]) -> None:  # noqa: B027 - most need not know
        """Whose memory is asked for, where that is found process by process."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back."""


@dataclass(slots=True)
class Drained:
    """What the samplers found since the last drain."""

    rows: Records
    process_rows: Records
    facts: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)


@dataclass(slots=True)
class _Watched:
    """A device that answers: its number in the recording, and what its memory did last."""

    device: int
    number: int
    look: Callable[[int], Found]
    used_bytes: int = -_MOVES_BYTES
    moves_until_ns: int = 0


class Sampler:
    """One vendor's devices. `base` is added to its device numbers."""

    def __init__(
        self, vendor: Vendor, base: int = 0, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.vendor = vendor
        self.names: list[str] = []
        self.absent: GpuAbsent | None = None
        self.troubles: list[str] = []
        self._base = base
        self._clock = clock
        self._stopped = False
        self._threads: list[threading.Thread] = []
        self._alive: list[_Watched] = []  # never changed: another thread may go through it
        self._memory: dict[int, dict[int, int]] = {}
        self._hung: dict[int, int] = {}
        self._looking_ns = self._looking_slowly_ns = self._draining_ns = 0  # processor time
        self._asked_ns = 0  # how long the looks took at which all is asked
        self._pace, self._motion = Pace(clock()), Motion()
        self._every, self._all_tick = 1, 0  # moments; the next that is for all
        # Appending to and taking from a deque needs no lock: `drain` cannot be held up.
        self._rows: deque[_Sample] = deque()
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
        with Alarm(schedule) as alarm:
            alarm.wait()
            while self._alive and not self._stopped:
                self.look_around(schedule)
                if schedule.due_ns >= pace.due_ns:
                    self._looking_ns = time.thread_time_ns() - began_ns
                    self._weigh(schedule.due_ns)
                alarm.wait(self._every)
        self._looking_ns = time.thread_time_ns() - began_ns
        if not any(door.since_ns for door in self.vendor.doors):
            self.vendor.close()

    def _run_slowly(self) -> None:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        schedule, motion = Schedule(self._clock(), SLOW_PERIOD_NS), self._motion
        while self._alive and not self._stopped:
            began_ns = self._clock()
            self.sample_slowly(schedule.tick)
            now_ns = self._clock()
            every = max(self.vendor.slow_every(motion.goes_on(now_ns)), self._pace.stretch)
            self._looking_slowly_ns = time.thread_time_ns()
            # What measures for most of the time is its own pause: to sleep for the rest costs more.
            pauses = every > 1 or now_ns - began_ns < SLOW_PERIOD_NS // 2
            if pauses or now_ns >= schedule.due_ns:
                schedule.passed(now_ns, every)
            if pauses:
                motion.began.wait((schedule.due_ns - now_ns) / NS_PER_S)
                motion.began.clear()

    def _weigh(self, now_ns: int) -> None:
        """What could be saved: the looks at which all is asked, and what is measured by calls."""
        asked_ns = self._asked_ns + self._looking_slowly_ns
        if self._pace.weigh(now_ns, self.cpu_ns, asked_ns):
            self._tell_pace()

    def _tell_pace(self) -> None:
        """How far apart looks are from now on."""
        all_every_ns = self._pace.stretch * REST_EVERY * PERIOD_NS
        every_ns = self._every * PERIOD_NS
        self._tell("gpu_pace", {"memory_every_ns": every_ns, "all_every_ns": all_every_ns})

    @property
    def cpu_ns(self) -> int:
        """Processor time of both threads since there was something to look at, and of drains."""
        return self._looking_ns + self._looking_slowly_ns + self._draining_ns

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
        devices = [int(fact["index"]) for fact in found]
        self._alive = [_Watched(d, d + self._base, self.vendor.looker(d)) for d in devices]
        return True

    # Others have filled the caches since the last look, so each step in here costs ten times what
    # it would in a loop: nothing is done that `drain` could do.

    def look_around(self, schedule: Schedule) -> None:
        """At what the moment that has come is for, then on to the next. A driver that takes so long
        that it misses every other moment is asked for all at the ones that are left."""
        tick, devices, turn = schedule.tick, self._alive, -1
        if tick >= self._all_tick:
            self._all_tick = tick + REST_EVERY - tick % REST_EVERY
            turn = self._pace.turn(tick)
        elif len(devices) > 1:
            due = schedule.due_ns
            if len(devices) > _FEW or due >= self._motion.attends_until_ns:
                devices = [one for one in devices if due < one.moves_until_ns]
        self.sample(schedule, turn, devices)

    def sample(self, schedule: Schedule, turn: int, devices: Sequence[_Watched]) -> None:
        """One look at each, then on to the next moment."""
        clock, motion, due = self._clock, self._motion, schedule.due_ns
        first = began = clock()
        for one in devices:
            try:
                found = one.look(turn)
            except DeviceLost as lost:
                self._lose(one, str(lost))
                began = clock()
                continue
            ended = clock()
            self._rows.append((began, began - due, ended - began, one.number, 0, found))
            valid, numbers, processes = found
            if valid & _USED and not -_MOVES_BYTES < numbers[0] - one.used_bytes < _MOVES_BYTES:
                one.used_bytes, one.moves_until_ns = numbers[0], motion.moved(due)
            if processes is not None:
                self._note_processes(one.number, began, processes)
            began = ended  # of the next
        if turn >= 0:
            self._asked_ns += began - first
        often = due < motion.moves_until_ns or (
            due < motion.attends_until_ns and len(self._alive) <= _FEW
        )
        every = 1 if often and self._pace.can_hurry else REST_EVERY
        schedule.passed(began, every)
        if every != self._every:
            self._every = every
            self._tell_pace()

    def sample_slowly(self, turn: int) -> None:
        for one in self._alive:
            try:
                for ns, error_ns, look in self.vendor.look_slowly(one.device, turn):
                    self._rows.append((ns, 0, 0, one.number, error_ns, look))
            except DeviceLost as lost:
                self._lose(one, str(lost))

    def _lose(self, lost: _Watched, reason: str) -> None:
        if lost not in self._alive:
            return  # the other thread met it first
        self._alive = [one for one in self._alive if one is not lost]
        self.troubles.append(f"GPU {lost.number} was lost while recording ({reason})")
        self._tell("gpu_lost", {"index": lost.number, "reason": reason})

    def attend(self, is_waited_for: bool) -> None:
        """Whether somebody waits for what devices do, as the recorder knows it now."""
        self._motion.attend(is_waited_for, self._clock())

    def _note_processes(self, number: int, ns: int, now: Mapping[int, int]) -> None:
        """A row for each process whose memory changed, and one of 0 for each that is gone."""
        before = self._memory.get(number, {})
        for tgid in sorted({*before, *now}):
            if before.get(tgid, 0) != now.get(tgid, 0):
                self._process_rows.append((ns, number, tgid, now.get(tgid, 0)))
        self._memory[number] = dict(now)

    def _tell(self, kind: str, fact: dict[str, Any]) -> None:
        self._facts.append((kind, self._clock(), fact))

    # -- what the recorder does -------------------------------------------------------------

    def drain(self) -> Drained:
        """All that is there; never waits."""
        began_ns = time.thread_time_ns()
        self._watch(HUNG_NS, "did not return for over a second")
        for kind, fact in self.vendor.take_facts():
            self._tell(kind, fact)
        drained = Drained(
            np.array([*map(_row, _take(self._rows))], GPU_ROW),
            np.array(_take(self._process_rows), GPU_PROCESS_ROW),
            _take(self._facts),
        )
        self._draining_ns += time.thread_time_ns() - began_ns
        return drained

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

    def __init__(
        self, vendors: Sequence[Vendor], clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
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

    def attend(self, is_waited_for: bool) -> None:
        for sampler in self._samplers:
            sampler.attend(is_waited_for)

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


def _take(found: deque[Any]) -> list[Any]:
    """What is there now; the other side may append meanwhile."""
    return [found.popleft() for _ in range(len(found))]


# ns, late, took, device, error of ns, what was found
_Sample = tuple[int, int, int, int, int, Found]


def _row(sample: _Sample) -> tuple[int, ...]:
    """As `GPU_ROW` has it."""
    ns, late_ns, took_ns, device, error_ns, (valid, numbers, _) = sample
    late_ns, took_ns, error_ns = (min(max(n, 0), _MOST) for n in (late_ns, took_ns, error_ns))
    return ns, late_ns, took_ns, device, valid, *numbers, error_ns
