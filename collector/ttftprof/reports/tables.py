"""The tables of the terminal report. One that is too wide continues below in bands of columns.

Cells of the phase × activity table are rounded together (`scale.round_table`), so rows and columns
add up as printed, to the TTFT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from rich.cells import cell_len
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ttftprof import scale
from ttftprof.model import (
    ACTIVITIES,
    PHASES,
    FileUse,
    GpuUse,
    InFlight,
    MountUse,
    Quantiles,
    Request,
)
from ttftprof.reports import flame, words
from ttftprof.reports.safe import clip, clip_path, plain

_TITLE, _TOTAL = Style(dim=True), Style(bold=True)
_US = 1000
_ADVICE = 6  # of one file


@dataclass(frozen=True, slots=True)
class Column:
    """A column of finished cells; titles and cells may have several lines."""

    title: str
    cells: Sequence[str | Text]
    right: bool = True

    @property
    def width(self) -> int:
        cells = (str(cell).split("\n") for cell in self.cells)
        texts = [*self.title.split("\n"), *(line for lines in cells for line in lines)]
        return max(map(cell_len, texts), default=0)


def banded(first: Column, columns: Sequence[Column], width: int) -> Iterator[Table]:
    """The table as one, or as several that repeat `first`, each within `width`.

    Columns move closer if that keeps the table whole; bands are about equally wide.
    """
    if first.width + sum(1 + column.width for column in columns) <= width:
        spare = width - first.width - sum(2 + column.width for column in columns)
        yield _table([first, *columns], gap=2 if spare >= 0 else 1)
        return
    fewest = len(_bands(first, columns, width))
    narrowest = next(w for w in range(width + 1) if len(_bands(first, columns, w)) == fewest)
    for band in _bands(first, columns, narrowest):
        yield _table([first, *band], gap=2)


def _bands(first: Column, columns: Sequence[Column], width: int) -> list[list[Column]]:
    """Columns in order, as many a band as fit beside `first`, at least one."""
    bands: list[list[Column]] = []
    used = width
    for column in columns:
        used += 2 + column.width
        if used > width:
            bands.append([])
            used = first.width + 2 + column.width
        bands[-1].append(column)
    return bands


def _table(columns: Sequence[Column], gap: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style=_TITLE)
    depth = max(column.title.count("\n") for column in columns)
    for column in columns:
        above = "\n" * (depth - column.title.count("\n"))
        table.add_column(
            Text(above + column.title),
            justify="right" if column.right else "left",
            no_wrap=True,
        )
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return table


# -- phase × activity -----------------------------------------------------------------------------


def phase_activity(request: Request, width: int, colour: bool) -> Iterator[Table]:
    """Milliseconds of each phase in each activity, with sums and percentages of the whole."""
    cells = request.phase_activity()
    phases = [name for name in PHASES if name in cells]
    activities = [name for name in ACTIVITIES if any(name in row for row in cells.values())]
    exact = [[cells[phase].get(name, 0) for name in activities] for phase in phases]
    shown = scale.round_table(exact, _US)
    shares = _percents([sum(column) for column in zip(*exact, strict=True)])
    columns = [
        _activity_column(name, [row[i] for row in exact], [row[i] for row in shown], shares[i])
        for i, name in enumerate(activities)
    ]
    sums = [sum(row) for row in shown]
    whole = [*map(scale.milliseconds, sums), scale.milliseconds(sum(sums)), ""]
    columns.append(Column("total", [Text(cell, _TOTAL) for cell in whole]))
    columns.append(Column("%", [*_percents([sum(row) for row in exact]), "100.0", ""]))
    inferred = {phase.phase for phase in request.phases if phase.basis == "inferred"}
    names = [_phase_name(name, name in inferred, colour) for name in phases]
    labels = [*names, Text("   total", _TOTAL), Text("   %")]
    yield from banded(Column("phase ×\nactivity, ms", labels, right=False), columns, width)


def _activity_column(
    name: str, exact_ns: Sequence[int], rounded_us: Sequence[int], share: str
) -> Column:
    cells = [_ms(us, ns) for us, ns in zip(rounded_us, exact_ns, strict=True)]
    total = Text(scale.milliseconds(sum(rounded_us)), _TOTAL)
    return Column(name.replace("_", "_\n"), [*cells, total, share])


def _ms(us: int, ns: int) -> str:
    """Blank for nothing at all."""
    return scale.milliseconds(us) if ns else ""


def _percents(parts_ns: Sequence[int]) -> list[str]:
    thousandths = scale.apportion(parts_ns, 1000)
    return [scale.tenths(t, ns) for t, ns in zip(thousandths, parts_ns, strict=True)]


def _phase_name(name: str, inferred: bool, colour: bool) -> Text:
    text = Text()
    text.append_text(flame.swatch(name, colour))
    return text.append(f" {name}{' ~' if inferred else ''}")


# -- files, mounts, GPUs --------------------------------------------------------------------------


def files(used: Sequence[FileUse], width: int) -> Iterator[Table]:
    """What the request did with each file, in the order given."""
    name_width = max(width // 4, 20)
    first = Column("file", [clip_path(plain(f.path), name_width) for f in used], right=False)
    columns = [
        Column("size", [scale.size(f.size_bytes) for f in used]),
        Column("from\nstorage", [scale.size(f.bytes_from_storage) for f in used]),
        Column("from\ncache", [scale.size(f.bytes_from_cache) for f in used]),
        Column("cached\nbefore", [scale.percent(f.residency_before) for f in used]),
        Column("access", [_word(f.access) for f in used], right=False),
        Column("on", [_word(f.fstype) for f in used], right=False),
        Column("storage\nwait", [scale.duration(f.storage_wait_ns) for f in used]),
        Column("rate", [scale.rate(f.bytes_per_second) for f in used]),
        Column("request\np50 / p95", [_quantiles(f.request_size_bytes) for f in used]),
        Column("in flight\nmean / max", [_in_flight(f.in_flight) for f in used]),
        Column("major\nfaults", [scale.count(f.major_faults) for f in used]),
        Column("minor\nfaults", [scale.count(f.minor_faults) for f in used]),
        *(
            Column(title, [scale.size(getattr(f, name)) for f in used])
            for title, name in words.CACHE_MOVES
            if any(getattr(f, name) for f in used)
        ),
    ]
    if any(f.advice for f in used):
        columns.append(_advice(used, first, columns, name_width, width))
    yield from banded(first, columns, width)


def _advice(
    used: Sequence[FileUse], first: Column, before: Sequence[Column], least: int, width: int
) -> Column:
    """On as few lines as there is room for without one more band, at least `least` wide."""

    def stacked(room: int) -> Column:
        cells = ["\n".join(_filled(f.advice[:_ADVICE], room)) for f in used]
        return Column("advice", cells, right=False)

    fewest = len(_bands(first, [*before, stacked(least)], width))
    rooms = range(stacked(width - first.width - 2).width, least, -1)
    fitting = (r for r in rooms if len(_bands(first, [*before, stacked(r)], width)) == fewest)
    return stacked(next(fitting, least))


def _filled(items: Sequence[str], room: int) -> list[str]:
    """`a, b,` and so on: lines of at most `room` cells, broken between items."""
    lines: list[str] = []
    for number, item in enumerate(items, 1):
        text = clip(plain(item), room - 1) + ("," if number < len(items) else "")
        if lines and cell_len(f"{lines[-1]} {text}") <= room:
            lines[-1] += f" {text}"
        else:
            lines.append(text)
    return lines


def storage_waits(used: Sequence[FileUse], width: int) -> Iterator[Table]:
    """Where the requests were while threads waited, by file and phase; nothing if none waited.
    Columns in which nothing was waited for are left out."""
    rows = words.storage_waits(used)
    if not rows:
        return
    name_width = max(width * 2 // 5, 20)
    names = [f"{clip_path(plain(f.path), name_width - 10)} {share.phase}" for f, share in rows]
    columns = [
        Column("from\nstorage", [scale.size(share.bytes_from_storage) for _, share in rows]),
        Column("storage\nwait", [scale.duration(share.storage_wait_ns) for _, share in rows]),
    ]
    for title, spent in words.wait_split(rows):
        columns.append(Column(title, list(map(scale.duration, spent))))
    yield from banded(Column("waited for, in", names, right=False), columns, width)


def mounts(used: Sequence[MountUse], width: int) -> Iterator[Table]:
    """Where the files lie; columns that no mount knows are left out."""
    name_width = max(width // 4, 20)
    first = Column("mount", [clip_path(plain(m.path), name_width) for m in used], right=False)
    columns = [
        Column("type", [_word(m.fstype) for m in used], right=False),
        Column("read-ahead", [_kib(m.read_ahead_kb) for m in used]),
        *_known(used, "requests", "requests", scale.count),
        *_known(used, "queue", "queue_ns", scale.duration),
        *_known(used, "wire + server", "wire_ns", scale.duration),
        *_known(used, "total", "total_ns", scale.duration),
        *_known(used, "retransmits", "retransmits", scale.count),
        Column("options", [clip(plain(m.options), width - name_width - 2) for m in used], False),
    ]
    yield from banded(first, columns, width)


def gpus(used: Sequence[GpuUse], width: int) -> Iterator[Table]:
    first = Column(
        "GPU", [clip(f"{words.gpu_number(g.label)} {plain(g.name)}", 24) for g in used], right=False
    )
    columns = [
        Column("memory\nbefore", [scale.size(g.memory_before_bytes) for g in used]),
        Column("memory\nafter", [scale.size(g.memory_after_bytes) for g in used]),
        Column("busy", [scale.duration(g.busy_ns) for g in used]),
        Column("transferred", [scale.size(g.transfer_bytes) for g in used]),
        Column("seen by", [_word(g.source) for g in used], right=False),
    ]
    yield from banded(first, columns, width)


def _known(
    used: Sequence[MountUse], title: str, name: str, shown: Callable[[int | None], str]
) -> list[Column]:
    values = list(map(attrgetter(name), used))
    return [Column(title, list(map(shown, values)))] if any(v is not None for v in values) else []


def _word(text: str | None) -> str:
    return scale.ABSENT if text is None else clip(plain(text), 12)


def _kib(read_ahead_kb: int | None) -> str:
    return scale.block(None if read_ahead_kb is None else read_ahead_kb << 10)


def _quantiles(sizes: Quantiles | None) -> str:
    """`128 / 512 KiB`; a shared unit is written once."""
    if sizes is None:
        return scale.ABSENT
    low, high = scale.block(sizes.p50), scale.block(sizes.p95)
    if low.split()[-1] == high.split()[-1]:
        low = low.split()[0]
    return f"{low} / {high}"


def _in_flight(depth: InFlight | None) -> str:
    return scale.ABSENT if depth is None else f"{depth.mean:.1f} / {depth.max}"
