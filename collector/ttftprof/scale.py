"""Numbers for people: units, tables that add up as printed, time axes.

Pure and exact: what is rounded for the eye is rounded so that printed parts still sum to the
printed whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

ABSENT = "n/a"
_TIME_UNITS = ((1, "ns"), (1_000, "µs"), (1_000_000, "ms"), (1_000_000_000, "s"))
_BYTE_UNITS = ((1, "B"), (10**3, "kB"), (10**6, "MB"), (10**9, "GB"), (10**12, "TB"))
_BLOCK_UNITS = ((1, "B"), (1 << 10, "KiB"), (1 << 20, "MiB"), (1 << 30, "GiB"))
_COUNT_UNITS = ((1, ""), (10**3, " k"), (10**6, " M"), (10**9, " G"))


def duration(ns: int | None) -> str:
    """Four significant digits: `276.0 ms`, `1.562 s`; whole nanoseconds below 1 µs."""
    if not ns:
        return ABSENT if ns is None else "0 s"
    return _scaled(ns, _TIME_UNITS, digits=4)


def estimate(ns: int) -> str:
    """A modelled time: two significant digits from 10 of its unit on, `430 ms`, `1.4 s`."""
    if ns <= 0:
        return "0 s"
    coarse = 10 ** max(len(str(ns)) - 2, 0)
    return _scaled((ns + coarse // 2) // coarse * coarse, _TIME_UNITS, digits=2)


def size(size_bytes: float | None) -> str:
    """Three significant digits, decimal units as in MB/s: `315 MB`."""
    return ABSENT if size_bytes is None else _scaled(size_bytes, _BYTE_UNITS, digits=3)


def block(size_bytes: float | None) -> str:
    """Request sizes, which are powers of two: `128 KiB`."""
    if size_bytes is None or not math.isfinite(size_bytes):
        return ABSENT
    factor, unit = max((u for u in _BLOCK_UNITS if u[0] <= max(size_bytes, 1)), key=lambda u: u[0])
    value = size_bytes / factor
    return f"{value:.0f} {unit}" if value == round(value) else f"{value:.1f} {unit}"


def rate(bytes_per_second: float | None) -> str:
    return ABSENT if bytes_per_second is None else size(bytes_per_second) + "/s"


def count(number: int | None) -> str:
    return ABSENT if number is None else f"{number:,}"


def frequency(per_second: float) -> str:
    """`840/s`, `12.3 k/s`."""
    return _scaled(per_second, _COUNT_UNITS, digits=3).rstrip() + "/s"


def percent(share: float | None) -> str:
    """Whole percent; `<1 %` and `>99 %` where rounding would claim nothing or everything."""
    if share is None or not math.isfinite(share):
        return ABSENT
    if 0 < share < 0.01:
        return "<1 %"
    if 0.99 < share < 1:
        return ">99 %"
    return f"{share * 100:.0f} %"


def tenth_percent(share: float) -> str:
    """A small share, as what recording costs: `0.7 %`."""
    return f"{share * 100:.1f} %"


def milliseconds(us: int) -> str:
    """Whole microseconds as ms with three decimals, exactly."""
    return f"{us // 1000}.{us % 1000:03d}"


def tenths(parts_per_thousand: int, of: int) -> str:
    """A share as printed in tables, `62.0`; `<0.1` for a part (`of` > 0) that rounds to nothing."""
    if of and not parts_per_thousand:
        return "<0.1"
    return f"{parts_per_thousand // 10}.{parts_per_thousand % 10}"


def _scaled(value: float, units: Sequence[tuple[int, str]], digits: int) -> str:
    if not math.isfinite(value):
        return ABSENT
    if value == 0:
        return f"0 {units[0][1]}"
    for number, (factor, unit) in enumerate(units):
        text = _significant(value / factor, digits if number else 0)
        if float(text) < 1000 or number == len(units) - 1:
            return f"{text}{'' if unit[:1] == ' ' else ' '}{unit}"
    raise AssertionError("no units")


def _significant(value: float, digits: int) -> str:
    """`value` with that many significant digits, never in exponent form; 0: a whole number."""
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 1
    return f"{value:.{max(digits - whole, 0)}f}"


# -- rounding that adds up ------------------------------------------------------------------------


def apportion(values: Sequence[int], parts: int) -> list[int]:
    """`parts` divided in proportion to `values` (largest remainder); all 0 if they are."""
    total = sum(values)
    if not total:
        return [0] * len(values)
    shares = [value * parts // total for value in values]
    rest = sorted(range(len(values)), key=lambda i: -(values[i] * parts % total))
    for index in rest[: parts - sum(shares)]:
        shares[index] += 1
    return shares


def round_table(cells: Sequence[Sequence[int]], unit: int) -> list[list[int]]:
    """The cells in whole units so that rows, columns and the whole add up as printed.

    Controlled rounding: every cell, row sum and column sum is its own value rounded up or down (one
    cell, row and column by up to 1.5 units), the whole is rounded to nearest, an empty cell stays
    empty. Method: fractions are shifted round cycles of the table, bordered by its negated sums,
    until none is left (Cox 1987, "A constructive procedure for unbiased controlled rounding").
    """
    if not cells or not cells[0]:
        return [[] for _ in cells]
    table = _bordered(_whole_total(cells, unit))
    fractional = {
        (r, c) for r, row in enumerate(table) for c, value in enumerate(row) if value % unit
    }
    while fractional:
        cycle = _cycle(fractional)
        up, down = cycle[::2], cycle[1::2]
        room = [-table[r][c] % unit for r, c in up] + [table[r][c] % unit for r, c in down]
        step = min(room)
        for sign, part in ((1, up), (-1, down)):
            for r, c in part:
                table[r][c] += sign * step
        fractional -= {(r, c) for r, c in cycle if table[r][c] % unit == 0}
    return [[value // unit for value in row[:-1]] for row in table[:-1]]


def _whole_total(cells: Sequence[Sequence[int]], unit: int) -> list[list[int]]:
    """A copy whose sum is a multiple of `unit`: the largest cells take the difference."""
    copy = [list(row) for row in cells]
    total = sum(map(sum, copy))
    missing = (total + unit // 2) // unit * unit - total
    while missing:
        row = max(copy, key=max)
        column = row.index(max(row))
        change = max(missing, -row[column])
        row[column] += change
        missing -= change
    return copy


def _bordered(cells: list[list[int]]) -> list[list[int]]:
    """The cells with a row and a column added that make every line sum to 0."""
    rows = [[*row, -sum(row)] for row in cells]
    return [*rows, [-sum(column) for column in zip(*rows, strict=True)]]


def _cycle(fractional: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Cells that alternately share a column and a row, and close. Every line has none or two."""
    rows: dict[int, list[tuple[int, int]]] = {}
    columns: dict[int, list[tuple[int, int]]] = {}
    for cell in sorted(fractional):
        rows.setdefault(cell[0], []).append(cell)
        columns.setdefault(cell[1], []).append(cell)
    path = [next(iter(rows.values()))[0]]
    reached = {("row", path[0][0]): 0}  # line -> index in `path` of the cell that leaves it
    while True:
        row, column = path[-1]
        line = ("column", column) if len(path) % 2 else ("row", row)
        if line in reached:
            return path[reached[line] :]
        reached[line] = len(path)
        neighbours = columns[column] if len(path) % 2 else rows[row]
        path.append(next(cell for cell in neighbours if cell != path[-1]))


# -- axes -----------------------------------------------------------------------------------------


def ticks(length_ns: int, width: int, spacing: int) -> list[tuple[int, str]]:
    """(cell, label) of round times on an axis of `width` cells, at least `spacing` cells apart.

    All in one unit, which the first label (always at 0) names.
    """
    if length_ns <= 0:
        return [(0, "0 s")]
    step_ns = _round_step(length_ns * spacing / width)
    factor, unit = max((u for u in _TIME_UNITS if u[0] <= step_ns * 5), key=lambda u: u[0])
    decimals = next(d for d in range(4) if step_ns * 10**d % factor == 0)
    marks = [(0, f"0 {unit}")]
    for number in range(1, length_ns // step_ns + 1):
        cell = number * step_ns * width // length_ns
        marks.append((cell, f"{number * step_ns / factor:.{decimals}f}"))
    return marks


def _round_step(at_least_ns: float) -> int:
    """The smallest of 1, 2, 2.5, 5 × 10^n ns that is no smaller."""
    power: int = 10 ** max(0, math.floor(math.log10(max(at_least_ns, 1))))
    steps = (power, 2 * power, 5 * power // 2, 5 * power, 10 * power)
    return next(step for step in steps if step >= at_least_ns)
