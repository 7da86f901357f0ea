"""What Python code did in each phase of a request, by samples.

Pure. Of the moments at which py-spy looked (a stack holds from the look that found it to the next),
each belongs to the threads of the phase's process that held it up: those that ran or waited for
storage or a device, else those that were blocked inside a call that the tables know; several share
it. Where there are none it is `idle`. Whether a thread ran is no sample: the scheduler's own
records tell.

A share of n samples is known within its standard error, √(p(1 − p)/n), with one look for and one
against it added: what was never missed may be. It is never an exact time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from ttftprof.activities import ACTIVITY_OF_WAIT
from ttftprof.engines.python_code import CATEGORIES, IDLE, OTHER, Place, place_of
from ttftprof.events import Wait
from ttftprof.model import Phase, PythonShare, PythonStack, PythonTime, PythonWait
from ttftprof.python_facts import Segment, Stack
from ttftprof.threads import Waits
from ttftprof.timeline import Timeline

_STACKS = 500  # of a phase, the most frequent
_PACKAGES = 3
_WAITS = 5
_HELD_UP_BY = (Wait.RUNNABLE, Wait.STORAGE, Wait.RECLAIM, Wait.DEVICE)


@dataclass(frozen=True, slots=True)
class _Seen:
    """One thread at one look."""

    stack: Stack
    place: Place
    weight: float


@dataclass(frozen=True, slots=True)
class _Looks:
    """All looks of one phase: how many, at what rate, and who held it up in each."""

    number: int
    rate_hz: int
    seen: Sequence[_Seen]


def times_of(
    timeline: Timeline, phases: Sequence[Phase], critical: Sequence[int]
) -> tuple[PythonTime, ...]:
    """For each phase that has samples, in order of time; `critical` names each phase's process."""
    told: dict[str, list[tuple[Phase, int]]] = {}
    for phase, tgid in zip(phases, critical, strict=True):
        if phase.duration_ns and tgid in timeline.python:
            told.setdefault(phase.phase, []).append((phase, tgid))
    found = (_time_of(timeline, name, parts) for name, parts in told.items())
    return tuple(time for time in found if time is not None)


def _time_of(
    timeline: Timeline, name: str, parts: Sequence[tuple[Phase, int]]
) -> PythonTime | None:
    looks = _looks(timeline, parts)
    if not looks.number:
        return None
    length_ns = sum(phase.duration_ns for phase, _ in parts)
    return PythonTime(
        phase=name,
        samples=looks.number,
        rate_hz=looks.rate_hz,
        covered=min(looks.number * 1e9 / looks.rate_hz / length_ns, 1.0),
        shares=tuple(_shares(looks, length_ns)),
        stacks=tuple(_stacks(looks)),
        waits=tuple(_waits(timeline, parts)),
    )


# -- looks ----------------------------------------------------------------------------------------


def _looks(timeline: Timeline, parts: Iterable[tuple[Phase, int]]) -> _Looks:
    number, rate_hz, seen = 0, 1, []
    for phase, tgid in parts:
        segments = timeline.python.get(tgid, ())
        waits = {w.tid: w for w in _waits_in(timeline, tgid, phase)} if segments else {}
        for segment in segments:
            rate_hz = segment.rate_hz
            places = _Places(segment.stacks)
            for ns in _moments(segment, phase):
                number += 1
                seen += _held_up_by(_at(segment, waits, ns, places))
    return _Looks(number, rate_hz, seen)


def _waits_in(timeline: Timeline, tgid: int, phase: Phase) -> list[Waits]:
    return timeline.threads.waits_of(tgid, phase.start_ns, phase.end_ns).by_thread()


def _moments(segment: Segment, phase: Phase) -> range:
    """The looks of a segment that fall into a phase, as many and as far apart as their rate says:
    a look that found nothing new left no stamp of its own."""
    period_ns = round(1e9 / segment.rate_hz)
    first = -(-(max(phase.start_ns - segment.start_ns, 0)) // period_ns)
    end_ns = min(phase.end_ns, segment.end_ns)
    return range(segment.start_ns + first * period_ns, end_ns, period_ns)


class _Places:
    """The places of a segment's stacks, each looked up once."""

    def __init__(self, stacks: Sequence[Stack]) -> None:
        self.stacks = stacks
        self._known: dict[int, Place] = {}

    def of(self, number: int) -> Place:
        if number not in self._known:
            self._known[number] = place_of(self.stacks[number])
        return self._known[number]


def _at(
    segment: Segment, waits: Mapping[int, Waits], ns: int, places: _Places
) -> Iterator[tuple[Stack, Place, Wait | None]]:
    """(stack, place, what it waits for or None while it runs) of each living Python thread."""
    for tid, spans in segment.threads.items():
        own = waits.get(tid)
        number = spans.at(ns)
        if number is None or (own is not None and not own.born_ns <= ns < own.dead_ns):
            continue
        yield places.stacks[number], places.of(number), _wait_at(own, ns)


def _wait_at(waits: Waits | None, ns: int) -> Wait | None:
    if waits is None:
        return None
    before = int(np.searchsorted(waits.start_ns, ns, side="right")) - 1
    if before < 0 or ns >= waits.end_ns[before]:
        return None
    return Wait(int(waits.reason[before]))


def _held_up_by(threads: Iterable[tuple[Stack, Place, Wait | None]]) -> list[_Seen]:
    """The threads that a moment belongs to, by the rule above."""
    ranks: dict[tuple[bool, bool], list[tuple[Stack, Place]]] = {}
    for stack, place, wait in threads:
        busy = wait is None or wait in _HELD_UP_BY
        if place.category != IDLE and (busy or place.category != OTHER):
            rank = (not busy, place.category == OTHER)
            ranks.setdefault(rank, []).append((stack, place))
    if not ranks:
        return [_Seen((), Place(IDLE, ""), 1.0)]
    chosen = ranks[min(ranks)]
    return [_Seen(stack, place, 1 / len(chosen)) for stack, place in chosen]


# -- what they say --------------------------------------------------------------------------------


def _shares(looks: _Looks, length_ns: int) -> Iterator[PythonShare]:
    """The categories of a phase, the largest first; together 1."""
    weights: dict[str, float] = {}
    packages: dict[str, Counter[str]] = {}
    for seen in looks.seen:
        category = seen.place.category
        weights[category] = weights.get(category, 0.0) + seen.weight
        packages.setdefault(category, Counter())[seen.place.package] += 1
    for category in sorted(weights, key=lambda c: (-weights[c], CATEGORIES.index(c))):
        share = min(weights[category] / looks.number, 1.0)  # of many parts, added up
        yield PythonShare(
            category=category,
            samples=weights[category],
            share=share,
            error=_error(weights[category], looks.number),
            estimated_ns=round(share * length_ns),
            packages=tuple(p for p, _ in packages[category].most_common(_PACKAGES) if p),
        )


def _error(samples: float, number: int) -> float:
    share = (samples + 1) / (number + 2)
    return sqrt(share * (1 - share) / (number + 2))


def _stacks(looks: _Looks) -> Iterator[PythonStack]:
    """The most frequent stacks that did something; lines are left out, they split what is one."""
    weights: dict[tuple[str, ...], float] = {}
    categories: dict[tuple[str, ...], str] = {}
    for seen in looks.seen:
        if seen.place.category != IDLE:
            frames = tuple(f"{module}:{function}" for module, function, _ in seen.stack)
            weights[frames] = weights.get(frames, 0.0) + seen.weight
            categories[frames] = seen.place.category
    for frames in sorted(weights, key=lambda f: -weights[f])[:_STACKS]:
        yield PythonStack(categories[frames], frames, weights[frames])


def _waits(timeline: Timeline, parts: Sequence[tuple[Phase, int]]) -> Iterator[PythonWait]:
    """Which code waited for storage, and for which file: the waits are exact, who waited is as the
    look before says."""
    paths = {file.key: file.path for file in timeline.files.values()}
    spent: Counter[tuple[str, str, str, str | None]] = Counter()
    for phase, tgid in parts:
        for segment in timeline.python.get(tgid, ()):
            places = _Places(segment.stacks)
            for waits in _waits_in(timeline, tgid, phase):
                if waits.tid in segment.threads:
                    for reason, number, key, ns in _waited(waits, segment, phase):
                        place = places.of(number)
                        frame = _telling_frame(places.stacks[number], place)
                        activity = ACTIVITY_OF_WAIT[reason]
                        spent[activity, place.category, frame, paths.get(key)] += ns
    for (activity, category, frame, path), ns in spent.most_common(_WAITS):
        yield PythonWait(activity, category, frame, path, ns)


def _waited(
    waits: Waits, segment: Segment, phase: Phase
) -> Iterator[tuple[Wait, int, tuple[int, int], int]]:
    """(why, number of the stack, file, ns) of a thread's waits for storage in a phase."""
    begin = np.maximum(waits.start_ns, max(phase.start_ns, segment.start_ns))
    end = np.minimum(waits.end_ns, min(phase.end_ns, segment.end_ns))
    wanted = (waits.reason == Wait.STORAGE) & (end > begin)
    for index in np.flatnonzero(wanted):
        number = segment.threads[waits.tid].at(int(begin[index]))
        if number is not None:
            key = (int(waits.dev[index]), int(waits.ino[index]))
            yield Wait.STORAGE, number, key, int(end[index] - begin[index])


def _telling_frame(stack: Stack, place: Place) -> str:
    """The innermost frame of the stack's own package: where in the library it stood."""
    own = (f for f in reversed(stack) if f[0].split("/", 1)[0] == place.package)
    module, function, line = next(own, stack[-1])
    return f"{module}:{function}:{line}"
