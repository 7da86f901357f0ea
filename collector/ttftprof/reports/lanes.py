"""Time laid out in cells: what each column of a timeline shows. Pure; no drawing."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ttftprof.model import Series

Piece = tuple[str, int, int]
"""(name, start_ns, end_ns)"""


@dataclass(frozen=True, slots=True)
class Window:
    """[start_ns, end_ns] as `width` cells."""

    start_ns: int
    end_ns: int
    width: int

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns

    def edge_ns(self, cell: int) -> int:
        return self.start_ns + self.length_ns * cell // self.width

    def cell_of(self, ns: int) -> int:
        """The cell that holds a moment; moments outside belong to the first or last cell."""
        if self.length_ns <= 0:
            return 0
        cell = (ns - self.start_ns) * self.width // self.length_ns
        return min(max(cell, 0), self.width - 1)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A lane of blocks. `names[i]`: who has most of cell i, None if nobody has any of it.

    `marks`: cells at which names lie that have most of none, so that none vanishes unseen.
    """

    names: tuple[str | None, ...]
    marks: frozenset[int]
    unseen: tuple[str, ...]

    def runs(self) -> list[tuple[str | None, int, int]]:
        """(name, first cell, cells) of each block."""
        out: list[tuple[str | None, int, int]] = []
        for cell, name in enumerate(self.names):
            if out and out[-1][0] == name:
                out[-1] = (name, out[-1][1], out[-1][2] + 1)
            else:
                out.append((name, cell, 1))
        return out


def shares(pieces: Iterable[Piece], window: Window) -> dict[str, list[float]]:
    """{name: share of each cell, 0..1}, for every name that has any of the window."""
    taken: dict[str, list[int]] = {}
    for name, start_ns, end_ns in pieces:
        start, end = max(start_ns, window.start_ns), min(end_ns, window.end_ns)
        if end <= start:
            continue
        row = taken.setdefault(name, [0] * window.width)
        for cell in range(window.cell_of(start), window.cell_of(end) + 1):
            overlap = min(end, window.edge_ns(cell + 1)) - max(start, window.edge_ns(cell))
            row[cell] += max(overlap, 0)
    cell_ns = [max(window.edge_ns(c + 1) - window.edge_ns(c), 1) for c in range(window.width)]
    return {name: [a / b for a, b in zip(row, cell_ns, strict=True)] for name, row in taken.items()}


def blocks(pieces: Sequence[Piece], window: Window) -> Blocks:
    """Each cell given to who has most of it; the rest marked where it lies."""
    by_name = shares(pieces, window)
    names: list[str | None] = []
    for cell in range(window.width):
        best = max(by_name, key=lambda name: by_name[name][cell], default=None)
        names.append(best if best is not None and by_name[best][cell] > 0 else None)
    unseen = tuple(name for name in by_name if name not in names)
    marks = {max(range(window.width), key=by_name[name].__getitem__) for name in unseen}
    return Blocks(tuple(names), frozenset(_beside(names, cell) for cell in marks), unseen)


def _beside(names: Sequence[str | None], cell: int) -> int:
    """The cell, or the one next to it if a block of one cell stands there and no other loses."""
    for near in (cell, cell - 1, cell + 1):
        if 0 <= near < len(names) and names.count(names[near]) > 1:
            return near
    return cell


def rates(series: Sequence[Series], window: Window) -> list[float | None]:
    """Growth per second of the sum of running totals, cell by cell; None where nothing was seen."""
    sums = [_sum_at(series, window.edge_ns(cell)) for cell in range(window.width + 1)]
    return [
        _growth(before, after, window.edge_ns(cell + 1) - window.edge_ns(cell))
        for cell, (before, after) in enumerate(pairwise(sums))
    ]


PEAK_NS = 10_000_000


def peak_rate(series: Sequence[Series], window: Window) -> float | None:
    """The fastest growth per second within a window, over 10 ms or from one look at the counters
    to the next: the same in every drawing, however wide. None where nothing was seen."""
    stamps = sorted({ns for one in series for ns in one.ns})
    first = max(bisect_right(stamps, window.start_ns) - 1, 0)
    looks = stamps[first : bisect_right(stamps, window.end_ns) + 1]
    values = [value or 0.0 for value in (_sum_at(series, ns) for ns in looks)]
    peak: float | None = None
    after = 0
    for before in range(len(looks) - 1):
        while after < len(looks) - 1 and looks[after] - looks[before] < PEAK_NS:
            after += 1
        spent_ns = max(looks[after] - looks[before], PEAK_NS)
        peak = max(peak or 0.0, (values[after] - values[before]) * 1e9 / spent_ns)
    return peak


def _growth(before: float | None, after: float | None, ns: int) -> float | None:
    if before is None or after is None or ns <= 0:
        return None
    return max(after - before, 0.0) * 1e9 / ns


def levels(series: Sequence[Series], window: Window) -> list[float | None]:
    """The sum of levels at the end of each cell; None where nothing was seen."""
    return [_sum_at(series, window.edge_ns(cell + 1)) for cell in range(window.width)]


def _sum_at(series: Sequence[Series], ns: int) -> float | None:
    values = [value for one in series if (value := _value_at(one, ns)) is not None]
    return sum(values) if values else None


def _value_at(series: Series, ns: int) -> float | None:
    """Interpolated between samples; None before the first and after the last."""
    stamps, values = series.ns, series.values
    after = bisect_right(stamps, ns)
    if after == 0 or (after == len(stamps) and ns > stamps[-1]):
        return None
    low = float(values[after - 1])
    value = low
    if after < len(stamps):
        part = (ns - stamps[after - 1]) / (stamps[after] - stamps[after - 1])
        value = low + part * (float(values[after]) - low)
    return value if math.isfinite(value) else None
