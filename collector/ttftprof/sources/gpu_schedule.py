"""When GPUs are looked at: an absolute schedule, what wakes for it, and how much is asked when.

Of the schedule's moments every second one is for all devices, whatever they do; the others are for
those that move, or for all when somebody begins to wait (`Motion`).

Guarantees: a moment that was missed is left out, not made up for; to wait costs one system call.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from ttftprof.clock import NS_PER_MS, NS_PER_S

PERIOD_NS = 20 * NS_PER_MS
REST_EVERY = 2  # moments: where nothing moves
MOVES_FOR_NS = NS_PER_S  # after it was last seen to
ATTENDS_FOR_NS = 3 * NS_PER_S  # to a wait: what makes room for it does so by then
SLOW_PERIOD_NS = 50 * NS_PER_MS
CPU_SHARE = 0.009  # of a core, above which less is asked
BURST_NS = 50 * NS_PER_MS  # processor time that may be spent beyond it before looks are fewer
WEIGHED_EVERY_NS = NS_PER_S // 2
_STRETCH_MOST = 32
_CLOCK_MONOTONIC, _TFD_TIMER_ABSTIME = 1, 1  # include/uapi/linux/{time,timerfd}.h
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class Schedule:
    """The moments start + n × period; `passed` looks ahead to the first that is still to come."""

    due_ns: int
    period_ns: int
    tick: int = 0
    missed: int = 0

    def passed(self, now_ns: int, every: int = 1) -> None:
        """On to the next moment to come whose number is a multiple of `every`."""
        late_ns = now_ns - self.due_ns
        if late_ns < self.period_ns:  # as it should be
            steps = 1 if every == 1 else every - self.tick % every
        else:
            steps = 1 + late_ns // self.period_ns
            self.missed += steps - 1
            steps += -(self.tick + steps) % every
        self.tick += steps
        self.due_ns += steps * self.period_ns


class Alarm:
    """Wakes at the moments of a schedule whose first is still to come, of CLOCK_MONOTONIC.

    The kernel keeps the moments: a timer that is set once, and read to wait. To compute each sleep
    anew costs a fifth more processor time. Raises `OSError` where it cannot be had.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._reached = self._every = 0
        self._fd = _LIBC.timerfd_create(_CLOCK_MONOTONIC, os.O_CLOEXEC)
        self._set(1)

    def _set(self, every: int) -> None:
        schedule = self._schedule
        self._every = every
        self._reached = schedule.tick  # the number of the next moment that the timer will tell
        period, first = (
            divmod(ns, NS_PER_S) for ns in (every * schedule.period_ns, max(schedule.due_ns, 1))
        )
        setting = (ctypes.c_long * 4)(*period, *first)
        if self._fd < 0 or _LIBC.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, setting, None):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def wait(self, every: int = 1) -> None:
        """Until the moment that is due has come; after it, each `every`th will do."""
        if every != self._every:
            self._set(every)
        while self._reached <= self._schedule.tick:
            self._reached += self._every * int.from_bytes(os.read(self._fd, 8), "little")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


class Motion:
    """Until when it matters to look again soon: memory of a device moved a moment ago, or somebody
    began to wait for what devices do. `attend` may be called by another thread."""

    def __init__(self) -> None:
        self.moves_until_ns = self.attends_until_ns = 0
        self._is_waited_for = False
        self.began = threading.Event()  # for who sleeps while nothing moves

    def attend(self, is_waited_for: bool, now_ns: int) -> None:
        """Whether somebody waits now."""
        if is_waited_for and not self._is_waited_for:
            self._tell(now_ns)
            self.attends_until_ns = now_ns + ATTENDS_FOR_NS
        self._is_waited_for = is_waited_for

    def moved(self, now_ns: int) -> int:
        """Memory of a device did. Until when it is said to move."""
        self._tell(now_ns)
        self.moves_until_ns = now_ns + MOVES_FOR_NS
        return self.moves_until_ns

    def _tell(self, now_ns: int) -> None:
        if not self.goes_on(now_ns):
            self.began.set()

    def goes_on(self, now_ns: int) -> bool:
        return now_ns < self.moves_until_ns or now_ns < self.attends_until_ns


class Pace:
    """At which looks all is asked: at each that is for all devices, or at fewer where answers are
    dear, be it for the driver, or because others on the machine leave nothing in its caches. And
    whether what moves may be looked at more often than what rests: what was saved at rest, and a
    burst, is there to be spent on it.
    """

    def __init__(self, now_ns: int) -> None:
        self._weighed_ns = self._began_ns = now_ns
        self.can_hurry = True
        self.due_ns = now_ns + WEIGHED_EVERY_NS  # to ask for processor time costs some, too
        self._spent_ns = self._asked_ns = 0  # until then
        self._due_tick = self._turns = 0
        self.stretch = 1

    def turn(self, tick: int) -> int:
        """The number of this look among those at all; -1 if it is none. Counted: were it the
        moment's, a driver that misses every other moment would be asked for half of all only."""
        if tick < self._due_tick:
            return -1
        step = self.stretch * REST_EVERY
        self._due_tick = (tick // step + 1) * step
        self._turns += 1
        return self._turns - 1

    def weigh(self, now_ns: int, spent_ns: int, asked_ns: int) -> bool:
        """When due: by all the CPU time so far, what sampling costs, and by how long the looks
        at all took, what could be saved; whether the pace changed. To wake at all may cost most of
        it: then to ask less often helps nobody."""
        lasted_ns, before = now_ns - self._weighed_ns, self.stretch
        spent = (spent_ns - self._spent_ns) / lasted_ns
        asked = (asked_ns - self._asked_ns) / lasted_ns
        self._weighed_ns, self._spent_ns, self._asked_ns = now_ns, spent_ns, asked_ns
        self.due_ns = now_ns + WEIGHED_EVERY_NS
        self.can_hurry = spent_ns < CPU_SHARE * (now_ns - self._began_ns) + BURST_NS
        if spent > CPU_SHARE and asked > CPU_SHARE / 3:
            self.stretch = min(before * 2, _STRETCH_MOST)
        elif spent + asked < CPU_SHARE:  # as it would be, asked twice as often
            self.stretch = max(before // 2, 1)
        return self.stretch != before


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
