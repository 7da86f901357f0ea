"""Level of detail: many intervals, points or requests as few, without losing a nanosecond of sums.

Guarantees: what is returned has at most `limit` items, however much goes in; if it was that few
anyway it comes back unchanged. Detail goes where most things happen: what is long stays exact, only
short neighbours are pooled. Pure; linear in the input but for a sort; times are ns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MOST_CODES = 16
_WHOLE = 62  # 2^62 ns: a quantum no recording is longer than
SIZE_CLASSES = tuple(4096 << n for n in range(13))
"""Upper bounds of the request size classes, 4 KiB to 16 MiB; the last holds what is larger too."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Intervals of a lane: parallel arrays, by start.

    An exact one has `busy_ns` = its length. Pooled ones that share `start_ns` and `end_ns` are what
    happened in between, `busy_ns` of each code; together at most the length.
    """

    start_ns: Ints
    end_ns: Ints
    code: Ints
    busy_ns: Ints


def intervals(start_ns: Ints, end_ns: Ints, code: Ints, limit: int) -> Pieces:
    """Intervals that do not overlap and come by start; codes are below 16, `limit` at least 16."""
    if len(start_ns) <= limit:
        return Pieces(start_ns, end_ns, code, end_ns - start_ns)
    power = _smallest(lambda p: _pooled_number(start_ns, end_ns, code, 1 << p) <= limit)
    return _pooled(start_ns, end_ns, code, 1 << power)


def _smallest(fits: Callable[[int], bool]) -> int:
    """The smallest power of two (as found by halving) that fits; `_WHOLE` always does."""
    low, high = 0, _WHOLE
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return high


def _groups(start_ns: Ints, quantum_ns: int) -> Ints:
    """For each short interval the number of its group: those that start in one quantum."""
    bins = start_ns // quantum_ns
    return np.cumsum(np.diff(bins, prepend=bins[:1]) != 0)


def _pooled_number(start_ns: Ints, end_ns: Ints, code: Ints, quantum_ns: int) -> int:
    short = end_ns - start_ns < quantum_ns
    keys = _groups(start_ns[short], quantum_ns) * _MOST_CODES + code[short]
    kinds = int(np.count_nonzero(np.bincount(keys))) if len(keys) else 0
    return int(np.count_nonzero(~short)) + kinds


def _pooled(start_ns: Ints, end_ns: Ints, code: Ints, quantum_ns: int) -> Pieces:
    """An interval of a quantum or more stays; it can lie in no group, as it ends beyond any."""
    short = end_ns - start_ns < quantum_ns
    begin, end, lengths = start_ns[short], end_ns[short], (end_ns - start_ns)[short]
    group = _groups(begin, quantum_ns)
    first = np.flatnonzero(np.diff(group, prepend=-1))
    begins, ends = begin[first], np.maximum.reduceat(end, first) if len(first) else end
    keys = group * _MOST_CODES + code[short]
    kinds = np.flatnonzero(np.bincount(keys)) if len(keys) else keys
    busy = np.rint(np.bincount(keys, weights=lengths)[kinds]).astype(np.int64)
    where, what = kinds // _MOST_CODES, kinds % _MOST_CODES
    pieces = (
        np.concatenate([start_ns[~short], begins[where]]),
        np.concatenate([end_ns[~short], ends[where]]),
        np.concatenate([code[~short], what]),
        np.concatenate([(end_ns - start_ns)[~short], busy]),
    )
    order = np.lexsort([pieces[2], pieces[0]])
    return Pieces(*(part[order] for part in pieces))


def points(ns: Ints, values: Floats, limit: int) -> tuple[Ints, Floats]:
    """A curve with the same course: level stretches as their ends, then first, lowest, highest and
    last of each run of points (M4: Jugel et al. 2014, "M4: A visualization-oriented time series
    data aggregation"). Where a curve only rises, the lowest is the first: its steepest step is kept
    instead, which is a running total's peak rate."""
    if len(ns) <= limit:
        return ns, values
    turns = np.ones(len(ns), bool)
    turns[1:-1] = (values[1:-1] != values[:-2]) | (values[1:-1] != values[2:])
    ns, values = ns[turns], values[turns]
    if len(ns) <= limit:
        return ns, values
    steps = np.diff(values)
    rises = bool((steps >= 0).all())
    steepness = steps / np.maximum(np.diff(ns), 1)
    kept: list[npt.NDArray[np.intp]] = []
    for run in np.array_split(np.arange(len(ns)), max(limit // 4, 1)):
        if rises:
            steepest = run[np.argmax(steepness[run[:-1]])] if len(run) > 1 else run[0]
            kept.append(np.array([run[0], steepest, min(steepest + 1, run[-1]), run[-1]]))
        else:
            lowest, highest = run[np.argmin(values[run])], run[np.argmax(values[run])]
            kept.append(np.array([run[0], lowest, highest, run[-1]]))
    chosen = np.unique(np.concatenate(kept))
    return ns[chosen], values[chosen]


@dataclass(frozen=True, slots=True)
class Cells:
    """Requests counted by time and size: `count[i]` began in [start_ns[i], + quantum_ns) and were
    of class `size[i]` (`SIZE_CLASSES`), `total_bytes[i]` together."""

    quantum_ns: int
    start_ns: Ints
    size: Ints
    count: Ints
    total_bytes: Ints


def sizes(start_ns: Ints, size_bytes: Ints, limit: int) -> Cells:
    """The finest grid (down to 2^16 ns) that has at most `limit` filled cells; `limit` ≥ 16."""
    size = np.searchsorted(np.array(SIZE_CLASSES), size_bytes, side="left")
    size = np.minimum(size, len(SIZE_CLASSES) - 1).astype(np.int64)

    def keys(power: int) -> Ints:
        return (start_ns >> power) * _MOST_CODES + size

    power = _smallest(lambda p: p >= 16 and len(np.unique(keys(p))) <= limit)
    cells, where, count = np.unique(keys(power), return_inverse=True, return_counts=True)
    return Cells(
        quantum_ns=1 << power,
        start_ns=(cells // _MOST_CODES) << power,
        size=cells % _MOST_CODES,
        count=count.astype(np.int64),
        total_bytes=np.rint(np.bincount(where, weights=size_bytes)).astype(np.int64),
    )
