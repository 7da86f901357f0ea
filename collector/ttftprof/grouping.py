"""Records by the values of some of their fields; spans of what is ordered. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ttftprof.events import Records

_Item = TypeVar("_Item")


def between(
    ordered: Sequence[_Item], first: int, last: int, key: Callable[[_Item], int]
) -> Sequence[_Item]:
    """Those whose `key`, by which they are ordered, lies from one number to another, both
    included."""
    begin = bisect_left(ordered, first, key=key)
    return ordered[begin : bisect_right(ordered, last, key=key)]


def distinct(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The values in order, each once: as `np.unique`, which first imports numpy's masked arrays, a
    share of a short report's time."""
    ordered = np.sort(values, axis=None)
    found: npt.NDArray[Any] = ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]
    return found


def split_by(records: Records, *fields: str) -> dict[tuple[int, ...], Records]:
    """The records by the values of some fields, each part in the order in which they came."""
    order, parts = grouped(records, *fields)
    ordered = np.take(records, order)
    return {key: ordered[part] for key, part in parts.items()}


def grouped(
    records: Records | Mapping[str, npt.NDArray[Any]], *fields: str
) -> tuple[npt.NDArray[np.int32], dict[tuple[int, ...], slice]]:
    """(order, {values of some fields: where in the order their records are}): of the same values,
    the records stay in the order in which they came. `records`: structured, or parallel arrays."""
    columns = [records[name] for name in fields]
    if not len(columns[0]):
        return np.empty(0, np.int32), {}
    order = np.lexsort(columns[::-1]).astype(np.int32)
    ordered = [column[order] for column in columns]
    changes = np.zeros(len(order) - 1, bool)
    for column in ordered:
        changes |= column[1:] != column[:-1]
    edges = [0, *(np.flatnonzero(changes) + 1).tolist(), len(order)]
    keys = zip(*(column[edges[:-1]].tolist() for column in ordered), strict=True)
    return order, {key: slice(*edge) for key, edge in zip(keys, pairwise(edges), strict=True)}
