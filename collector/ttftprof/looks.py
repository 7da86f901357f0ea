"""A file's counters between the moments at which the recorder looked at them. Pure.

Rows are written when they changed, so a row alone does not say since when: it is since the last
look, and what the target did with the file began no sooner than its first use of it after that.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ttftprof.events import Records

Ints = npt.NDArray[np.int64]
_PAUSE_NS = 4_000_000  # of 4 jiffies or more: what the kernel side calls a touch (1000 Hz at most)
# These change without the target using the file: others read it, memory is reclaimed.
_BY_ANYBODY = ("cached_pages", "foreign_pages", "evicted_pages", "reclaimed_pages")


def begins_of_use(events: Records) -> Ints:
    """When a file was used after a pause, by its touches and reads: ascending ns."""
    if not len(events):
        return np.empty(0, np.int64)
    events = events[np.argsort(events["start_ns"], kind="stable")]
    starts = events["start_ns"].astype(np.int64)
    over = np.maximum.accumulate(starts + events["duration_ns"].astype(np.int64))
    begins: Ints = starts[np.append(True, starts[1:] >= over[:-1] + _PAUSE_NS)]
    return begins


def with_holds(rows: Records, looks: Ints, uses: Ints, end_ns: int) -> Records:
    """The rows of a file (by `ns`, ascending), with those added that make every counter right where
    it is taken to be linear from row to row.

    Unchanged rows are added at the last look before each change, at the first use since, and at
    `end_ns`. `looks` and `uses`: ascending ns.
    """
    if not len(rows):
        return rows
    stamps = rows["ns"].astype(np.int64)
    before, changed = stamps[:-1], stamps[1:]
    looked = _last_before(looks, changed)
    used = _first_after(uses, np.maximum(looked, before), changed)
    seen = np.flatnonzero(looked > before)
    begun = np.flatnonzero(used < changed)
    at_looks = _moved(rows[seen], looked[seen])
    at_uses = _begun(rows[begun], rows[begun + 1], np.maximum(looked, before)[begun], used[begun])
    at_end = _moved(rows[-1:], np.maximum(stamps[-1:], end_ns))
    together = np.concatenate([rows, at_looks, at_uses, at_end])
    ordered: Records = together[np.argsort(together["ns"], kind="stable")]
    return ordered


def _last_before(looks: Ints, moments: Ints) -> Ints:
    """The last look before each moment, 0 where there was none."""
    return np.append(0, looks)[np.searchsorted(looks, moments, side="left")]


def _first_after(uses: Ints, begins: Ints, ends: Ints) -> Ints:
    """The first use after each begin, the end where there was none."""
    return np.append(uses, np.iinfo(np.int64).max)[
        np.searchsorted(uses, begins, side="right")
    ].clip(max=ends)


def _moved(rows: Records, ns: Ints) -> Records:
    moved = rows.copy()
    moved["ns"] = ns
    return moved


def _begun(rows: Records, changed: Records, since: Ints, ns: Ints) -> Records:
    """Rows of the moment of first use: only what anybody changes has changed, a part of its way."""
    begun = _moved(rows, ns)
    part = (ns - since) / (changed["ns"].astype(np.int64) - since)
    for name in _BY_ANYBODY:
        was, is_now = rows[name].astype(np.int64), changed[name].astype(np.int64)
        begun[name] = (was + np.rint((is_now - was) * part).astype(np.int64)).astype(np.uint64)
    return begun
