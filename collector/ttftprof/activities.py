"""What the critical threads of a process did in every moment of an interval.

Rule, in this order, for each moment: if a thread waits for storage, `storage_wait` (a compute
pool spins at its barrier while one thread waits, so one waiting thread holds up all); then
`reclaim`; `transfer`, if a thread is inside a copy to the device, where the driver spins or sleeps
(what it waits for storage there, on the pages of its source, was counted before); `gpu`, if one is
inside a call that returns when the device is done, or sleeps in its driver; if a thread runs or
wants to run, `cpu` or `fault`; else nobody runs, and the moment belongs to the wait that ends it:
the reason why the next thread to run had been asleep.

Running time is split into `cpu` and `fault` by the clock ticks of the same moments, and waits too
short for a record are given back to their reason; both in proportion, within snapshots of 20 ms.
Pure. The intervals returned partition [start, end] exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ttftprof.engines.driver_calls import WAIT
from ttftprof.events import CpuMode, Wait
from ttftprof.gpu_facts import DriverSpan
from ttftprof.grouping import distinct
from ttftprof.model import ACTIVITIES, Activities
from ttftprof.threads import FOREVER, ProcessWaits
from ttftprof.timeline import Timeline
from ttftprof.windows import Ints

Codes = npt.NDArray[np.uint8]  # positions in ACTIVITIES

ACTIVITY_OF_WAIT = {
    Wait.RUNNABLE: "cpu",
    Wait.STORAGE: "storage_wait",
    Wait.LOCK: "lock",
    Wait.TIMER: "sleep",
    Wait.NETWORK: "idle",
    Wait.CHILD: "idle",
    Wait.PIPE: "idle",
    Wait.DEVICE: "gpu",
    Wait.RECLAIM: "reclaim",
    Wait.OTHER: "idle",
}
# Beside the waits: inside a copy to the device, or a call that waits for it.
_COPYING, _AWAITING = len(Wait), len(Wait) + 1
# What wins over running, most telling first.
_COUNTED = (int(Wait.STORAGE), int(Wait.RECLAIM), _COPYING, _AWAITING, int(Wait.DEVICE))
_COPYING_AND_RUNNING = _AWAITING + 1
_CODE = {activity: code for code, activity in enumerate(ACTIVITIES)}
_CPU = _CODE["cpu"]
_UNKNOWN = _CODE["unknown"]
_AT_REST = (_CODE["idle"], _CODE["lock"])
_TRANSFER = _CODE["transfer"]
# The activity of each label; what runs is divided further.
_CODE_OF_LABEL = np.array(
    [*(_CODE[ACTIVITY_OF_WAIT[wait]] for wait in Wait), _TRANSFER, _CODE["gpu"], _TRANSFER],
    np.uint8,
)
_RUNS = np.array([*(ACTIVITY_OF_WAIT[wait] == "cpu" for wait in Wait), False, False, True])
_NO_STAMPS = np.empty(0, np.uint64)
_MOST_PARTS = len(ACTIVITIES)  # of one snapshot: each activity once


@dataclass(frozen=True, slots=True)
class _Changes:
    """Edges of one process: at `ns`, how many threads start (+) or stop (-) to run, and so on."""

    ns: Ints
    running: Ints
    waiting: dict[int, Ints]  # by what wins over running, most telling first; none that never was


def process_activities(
    timeline: Timeline, tgid: int, start_ns: int, end_ns: int, loading: bool = False
) -> Activities:
    """The partition of [start_ns, end_ns) for one process; `unknown` if nothing of it is.

    `loading`: what the device does meanwhile is to take copies, so waiting for it is `transfer`.
    """
    if end_ns <= start_ns:
        return Activities.none()
    threads = timeline.threads.waits_of(tgid, start_ns, end_ns)
    if not threads.lives:
        return _joined(np.array([start_ns]), np.array([end_ns]), np.array([_UNKNOWN], np.uint8))
    under_way = timeline.gpu.during(tgid, start_ns, end_ns)
    copying = [c for c in under_way if c.to_device]
    awaiting = [c for c in under_way if c.group == WAIT]
    calls = {_COPYING: [*copying, *awaiting] if loading else copying}
    calls[_AWAITING] = [] if loading else awaiting
    edges, labels = _label(threads, calls, start_ns, end_ns)
    shares = timeline.derived(_Shares, tgid)
    begin, end, label = edges[:-1], edges[1:], labels
    runs = _RUNS[label]
    split = shares.split(begin[runs], end[runs], label[runs] == _COPYING_AND_RUNNING)
    starts = np.concatenate([begin[~runs], split.start_ns])
    ends = np.concatenate([end[~runs], split.end_ns])
    codes = np.concatenate([_CODE_OF_LABEL[label[~runs]], split.code])
    order = np.argsort(starts, kind="stable")
    return _joined(starts[order], ends[order], codes[order])


def while_idle(mine: Activities, others: Activities) -> Activities:
    """Both of one span: where mine is at rest, what the others' process did, which it waited for,
    as far as that did anything. Pools of threads rest on a lock."""
    edges = distinct(np.concatenate([mine.start_ns, others.start_ns, mine.end_ns[-1:]]))
    at = edges[:-1]
    own = mine.code[np.searchsorted(mine.start_ns, at, side="right") - 1]
    other = others.code[np.searchsorted(others.start_ns, at, side="right") - 1]
    waits = np.isin(own, _AT_REST) & ~np.isin(other, (*_AT_REST, _UNKNOWN))
    return _joined(at, edges[1:], np.where(waits, other, own))


def cpu_wait_ns(timeline: Timeline, tgid: int, start_ns: int, end_ns: int) -> int:
    """How long threads of a process were ready to run and did not, summed over threads."""
    threads = timeline.threads.waits_of(tgid, start_ns, end_ns)
    ready = threads.reason == Wait.RUNNABLE
    begin = np.maximum(threads.start_ns[ready], start_ns)
    end = np.minimum(threads.end_ns[ready], end_ns)
    return int(np.maximum(end - begin, 0).sum())


def merged(pieces: Iterable[Activities]) -> Activities:
    """All pieces, in their order, as one run: neighbours of the same kind are joined."""
    parts = list(pieces)
    if not parts:
        return Activities.none()
    return _joined(
        np.concatenate([part.start_ns for part in parts]),
        np.concatenate([part.end_ns for part in parts]),
        np.concatenate([part.code for part in parts]),
    )


def _joined(start_ns: Ints, end_ns: Ints, code: Codes) -> Activities:
    """Neighbours of the same kind as one; empty ones dropped."""
    real = end_ns > start_ns
    start_ns, end_ns, code = start_ns[real], end_ns[real], code[real]
    follows = (code[1:] == code[:-1]) & (start_ns[1:] == end_ns[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~follows])) if len(code) else np.empty(0, int)
    last = np.append(first[1:] - 1, len(code) - 1)[: len(first)]
    return Activities(start_ns[first], end_ns[last], code[first])


def _label(
    threads: ProcessWaits,
    calls: Mapping[int, Sequence[DriverSpan]],
    start_ns: int,
    end_ns: int,
) -> tuple[Ints, Ints]:
    """(edges, labels): `labels[i]` holds from `edges[i]` to `edges[i + 1]`; a wait, or a call."""
    changes = _changes(threads, calls, start_ns, end_ns)
    order = np.argsort(changes.ns, kind="stable")
    stamps = changes.ns[order]
    last_of_stamp = np.append(np.flatnonzero(np.diff(stamps)), len(stamps) - 1)
    edges = stamps[last_of_stamp]
    running = np.cumsum(changes.running[order])[last_of_stamp]
    levels = {w: np.cumsum(d[order])[last_of_stamp] for w, d in changes.waiting.items()}
    edges, keep = _clip(edges, start_ns, end_ns)
    codes = np.where(running[keep] > 0, int(Wait.RUNNABLE), -1)
    for wait in reversed(levels):
        codes = np.where(levels[wait][keep] > 0, wait, codes)
    codes = np.where((codes == _COPYING) & (running[keep] > 0), _COPYING_AND_RUNNING, codes)
    gaps = np.flatnonzero(codes < 0)
    codes[gaps] = _wake_reasons(threads, edges[gaps], edges[gaps + 1])
    codes[edges[:-1] < threads.born_ns.min()] = Wait.OTHER  # nobody was there to wait
    return edges, codes.astype(np.int64)


def _clip(edges: Ints, start_ns: int, end_ns: int) -> tuple[Ints, npt.NDArray[np.intp]]:
    """Edges inside the interval with its ends added, and for each segment its level's index.

    The first edge never lies after `start_ns` (see `_changes`).
    """
    inside = edges[(edges > start_ns) & (edges < end_ns)]
    out = np.concatenate([[start_ns], inside, [end_ns]]).astype(np.int64)
    keep = np.searchsorted(edges, out[:-1], side="right") - 1
    return out, np.maximum(keep, 0)


def _changes(
    threads: ProcessWaits,
    calls: Mapping[int, Sequence[DriverSpan]],
    start_ns: int,
    end_ns: int,
) -> _Changes:
    slept = (threads.reason != Wait.RUNNABLE) & (threads.end_ns > start_ns)
    reason = threads.reason[slept].astype(np.int64)
    dead_ns = threads.dead_ns[threads.dead_ns != FOREVER]
    spans = [call for own in calls.values() for call in own]
    code = np.array([code for code, own in calls.items() for _ in own], np.int64)
    nothing = -1
    # (when, by how many more run then, what for or nothing, whether that begins or ends)
    parts = [
        (np.zeros(1, np.int64), 0, nothing, 0),  # before the first is born, nobody runs
        (np.clip(threads.born_ns, 0, end_ns), 1, nothing, 0),
        (dead_ns, -1, nothing, 0),
        (threads.start_ns[slept], -1, reason, 1),
        (np.minimum(threads.end_ns, threads.dead_ns[threads.thread])[slept], 1, reason, -1),
        (np.array([call.start_ns for call in spans], np.int64), 0, code, 1),
        (np.array([call.end_ns for call in spans], np.int64), 0, code, -1),
    ]
    sizes = [len(ns) for ns, *_ in parts]
    running = np.repeat(np.array([by for _, by, _, _ in parts], np.int64), sizes)
    sign = np.repeat(np.array([sign for *_, sign in parts], np.int64), sizes)
    why = np.concatenate([np.broadcast_to(what, ns.shape) for ns, _, what, _ in parts])
    of_reason = {wait: why == wait for wait in _COUNTED}
    return _Changes(
        np.concatenate([ns for ns, *_ in parts]),
        running,
        {wait: np.where(own, sign, 0) for wait, own in of_reason.items() if own.any()},
    )


def _wake_reasons(threads: ProcessWaits, begin: Ints, end: Ints) -> Ints:
    """For each time in which nobody ran, why the first thread to wake at or after its end had
    slept. Being preempted is no sleep: such a thread was counted as running."""
    why = np.full(len(begin), int(Wait.OTHER), np.int64)
    slept = (threads.reason != Wait.RUNNABLE) & (threads.end_ns >= end.min(initial=FOREVER))
    if not slept.any():
        return why
    order = np.argsort(threads.end_ns[slept], kind="stable")
    # A thread that has never run slept before it was born, too.
    at_birth = threads.start_ns <= threads.born_ns[threads.thread]
    starts = np.where(at_birth, 0, threads.start_ns)[slept][order]
    ends = threads.end_ns[slept][order]
    first = np.searchsorted(ends, end)
    sleeps = first < len(ends)
    sleeps[sleeps] = starts[first[sleeps]] <= begin[sleeps]
    # Where the waits of a thread overlap, or all threads had ended: the first that slept by then.
    for gap in np.flatnonzero(~sleeps).tolist():
        later = np.flatnonzero(starts[first[gap] :] <= begin[gap])
        if len(later):
            first[gap], sleeps[gap] = first[gap] + later[0], True
    why[sleeps] = threads.reason[slept][order][first[sleeps]]
    return why


class _Shares:
    """How the running time of one process divides, snapshot by snapshot."""

    def __init__(self, timeline: Timeline, tgid: int) -> None:
        """Sums the growth of all threads' counters at each snapshot."""
        threads = timeline.thread_rows.get(tgid, ())
        width = len(CpuMode) + len(Wait) + 1
        stamps = distinct(np.concatenate([_NO_STAMPS, *(own["ns"] for own in threads)]))
        stamps = stamps.view(np.int64)
        grown = np.zeros((len(stamps), width))
        armed_ns = timeline.armed_ns
        for own in threads:
            values = np.column_stack([own["samples"], own["short_ns"], own["cpu_ns"]]).astype(float)
            first = np.zeros(width) if int(own["since_ns"][0]) > armed_ns else values[0]
            steps = np.diff(values, axis=0, prepend=first[None, :])
            where = np.searchsorted(stamps, own["ns"].astype(np.int64))
            np.add.at(grown, where, np.where(steps < 0, 0, steps))
        self._stamps, self._grown = stamps, grown
        self._tables: dict[int, tuple[list[float], list[int]]] = {}

    def split(self, start_ns: Ints, end_ns: Ints, copying: npt.NDArray[np.bool_]) -> Activities:
        """Intervals of running time as pieces, each in proportion to what its snapshots counted.

        `copying`: in which of them running is called `transfer`, where it is no fault.
        """
        first = np.searchsorted(self._stamps, start_ns, side="right")
        number = np.searchsorted(self._stamps, end_ns, side="left") - first + 1
        owner = np.repeat(np.arange(len(start_ns)), number)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(number) - number, number)
        snapshot = first[owner] + within
        stamps = np.append(self._stamps, FOREVER)
        ends = np.minimum(stamps[snapshot], end_ns[owner])
        starts = np.where(within == 0, start_ns[owner], stamps[snapshot - 1])
        cuts, codes = self._cut(starts, ends, snapshot)
        codes = np.where(copying[owner, None] & (codes == _CPU), np.uint8(_TRANSFER), codes)
        real = cuts[:, 1:] > cuts[:, :-1]
        return Activities(cuts[:, :-1][real], cuts[:, 1:][real], codes[real])

    def _cut(self, starts: Ints, ends: Ints, snapshot: Ints) -> tuple[Ints, Codes]:
        """(where each piece is cut, piece × (parts + 1); what the parts are): consecutive, the last
        takes the rounding, so that they add up exactly."""
        used, which = np.unique(snapshot, return_inverse=True)
        tables = [self._table_of(number) for number in used.tolist()]
        upto = np.array([shares for shares, _ in tables]).reshape(len(used), _MOST_PARTS)[which]
        rest = np.isnan(upto)
        upto[rest] = 1.0
        codes = np.array([found for _, found in tables], np.uint8)
        codes = codes.reshape(len(used), _MOST_PARTS)[which]
        length = (ends - starts)[:, None]
        cuts = starts[:, None] + np.minimum(np.rint(length * upto).astype(np.int64), length)
        cuts[rest] = np.broadcast_to(ends[:, None], cuts.shape)[rest]
        cuts = np.maximum.accumulate(np.column_stack([starts, cuts]), axis=1)
        return cuts, codes

    def _table_of(self, snapshot: int) -> tuple[list[float], list[int]]:
        """(shares summed up to each part, NaN from the last on; codes of the parts)."""
        known = self._tables.get(snapshot)
        if known is None:
            inside = snapshot < len(self._stamps)
            parts = _parts_of(self._grown[snapshot]) if inside else [("cpu", 1.0)]
            sums = np.cumsum([share for _, share in parts]).tolist()
            rest = _MOST_PARTS - len(parts)
            upto = [*sums[:-1], *[np.nan] * (rest + 1)]
            known = upto, [*(_CODE[activity] for activity, _ in parts), *[_CPU] * rest]
            self._tables[snapshot] = known
        return known


def _parts_of(grown: npt.NDArray[np.float64]) -> list[tuple[str, float]]:
    """[(activity, share)] of one snapshot, shares summing to 1, `cpu` first."""
    samples, shorts = grown[: len(CpuMode)], grown[len(CpuMode) : -1]
    on_cpu_ns = max(float(grown[-1]), 0.0)
    waits: dict[str, float] = {}
    total = on_cpu_ns + float(shorts.sum()) or 1.0
    for wait in Wait:
        activity = ACTIVITY_OF_WAIT[wait]
        if activity != "cpu" and shorts[wait] > 0:
            waits[activity] = waits.get(activity, 0.0) + float(shorts[wait]) / total
    running = 1.0 - sum(waits.values())
    ticks = float(samples.sum())
    fault = running * float(samples[CpuMode.FAULT]) / ticks if ticks else 0.0
    return [("cpu", running - fault), ("fault", fault), *waits.items()]
