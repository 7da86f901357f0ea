"""The timeline of a request as lines of text: an axis, a lane of phases, lanes beneath it.

Every lane shares one axis. Phases are blocks as long as they lasted; every other lane is a row of
bars of eight heights. Told apart by colour (Okabe and Ito's, for any eye) or, without colour, by
the character that fills a block. A line is never wider than its layout.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

from ttftprof import scale
from ttftprof.model import ACTIVITIES, PHASES, FileUse, Report, Request, Series
from ttftprof.reports.lanes import Blocks, Window, blocks, levels, peak_rate, rates, shares
from ttftprof.reports.words import gpu_number, span

_HEIGHTS = "▁▂▃▄▅▆▇█"
_UNKNOWN = "·"
MARK = "╏"
_TICK_SPACING = 8
_LABEL_WIDTH = 14
_READING_WIDTH = 14


@dataclass(frozen=True, slots=True)
class Paint:
    """How something is filled: a character without colour, else `colour` under `ink`."""

    fill: str
    colour: str = ""
    ink: str = "color(16)"

    def block(self) -> Style:
        """For text on a coloured ground; where there is no colour, the terminal's own."""
        return Style(color=self.ink, bgcolor=self.colour) if self.colour else Style()

    def line(self) -> Style:
        return Style(color=self.colour) if self.colour else Style()


# Okabe and Ito's colours, each the nearest of the 256 that every terminal has; 0-15 are left out,
# as people redefine them.
PHASE_PAINT: Mapping[str, Paint] = {
    "queue": Paint("·", "color(247)"),
    "evict": Paint("╱", "color(175)"),
    "launch": Paint("░", "color(74)"),
    "load": Paint("█", "color(166)"),
    "init": Paint("▒", "color(214)"),
    "ready_gap": Paint("╌", "color(227)"),
    "prefill": Paint("▓", "color(36)"),
    "first_decode": Paint("═", "color(25)", "color(231)"),
    "unexplained": Paint("?"),
}
_ACTIVITY_COLOUR = {
    "storage_wait": "color(166)",
    "fault": "color(175)",
    "cpu": "color(36)",
    "transfer": "color(25)",
    "gpu": "color(74)",
    "lock": "color(214)",
    "reclaim": "color(214)",
    "sleep": "color(247)",
    "idle": "color(247)",
    "unknown": "color(239)",
}
_GPU = "color(36)"
_STORAGE, _FAULTS, _CACHE = "color(74)", "color(175)", "color(36)"


@dataclass(frozen=True, slots=True)
class Layout:
    """Cells of a line: `label │ bar │ reading`, one space between."""

    width: int
    colour: bool

    @property
    def bar(self) -> int:
        return self.width - _LABEL_WIDTH - _READING_WIDTH - 2

    def line(self, label: str, body: Text, reading: str = "") -> Text:
        text = Text(label.ljust(_LABEL_WIDTH) + " ", no_wrap=True, end="")
        text.append_text(body)
        if reading:
            text.append(" " * max(self.bar - cell_len(body.plain), 0) + " " + reading)
        return text


def flame(request: Request, report: Report, layout: Layout) -> list[Text]:
    """All lanes of one request, top to bottom."""
    window = Window(*span(request), layout.bar)
    lane = blocks([(p.phase, p.start_ns, p.end_ns) for p in request.phases], window)
    lines = [*axis(layout, window), layout.line("phases", draw_blocks(lane, layout.colour))]
    if lane.unseen:
        lines.extend(_unseen(lane, request, layout))
    lines.extend(_activity_lanes(request, window, layout))
    curves = list(_series_lanes(request, report, window, layout))
    lines.extend(curves)
    if any(_UNKNOWN in line.plain for line in curves):
        lines.append(layout.line("", Text(f"{_UNKNOWN} not known at that moment", Style(dim=True))))
    return lines


def axis(layout: Layout, window: Window) -> list[Text]:
    """Round times over a ruler; the ruler's end is the first token."""
    labels, ruler = [" "] * layout.bar, ["─"] * layout.bar
    free = 0
    for cell, label in scale.ticks(window.length_ns, layout.bar, _TICK_SPACING):
        at = min(cell, layout.bar - 1)
        ruler[at] = "┬"
        if at >= free and at + len(label) <= layout.bar:
            labels[at : at + len(label)] = label
            free = at + len(label) + 1
    ruler[0], ruler[-1] = "├", "┤"
    dim = Style(dim=True)
    return [
        layout.line("", Text("".join(labels), dim)),
        layout.line("", Text("".join(ruler), dim), scale.duration(window.length_ns)),
    ]


# -- phases ---------------------------------------------------------------------------------------


def draw_blocks(lane: Blocks, colour: bool, labels: bool = True) -> Text:
    """A lane of labelled blocks; `╏` where phases too short for a cell lie."""
    body = Text()
    for name, start, cells in lane.runs():
        if name is None:
            body.append(" " * cells)
            continue
        paint = PHASE_PAINT[name]
        shown = _block_text(name if labels else "", cells, _fill(paint, colour))
        marked = [MARK if start + offset in lane.marks else c for offset, c in enumerate(shown)]
        body.append("".join(marked), paint.block() if colour else None)
    return body


def swatch(phase: str, colour: bool) -> Text:
    """Two cells of a phase's block."""
    paint = PHASE_PAINT[phase]
    return Text(_fill(paint, colour) * 2, paint.block() if colour else "")


def legend(names: Iterable[str], width: int, colour: bool) -> Text:
    """Phases by their blocks, in lines that fit: rich would tear a name from its block."""
    lines, line = [], Text()
    for name in names:
        item = swatch(name, colour).append(f" {name}")
        if line and line.cell_len + 2 + item.cell_len > width:
            lines.append(line)
            line = Text()
        line.append("  " if line else "").append_text(item)
    return Text("\n").join([*lines, line])


def _fill(paint: Paint, colour: bool) -> str:
    return " " if colour and paint.colour else paint.fill


def _block_text(name: str, cells: int, fill: str) -> str:
    """`█load███`: the name one cell in, shortened to what fits, left out below four letters."""
    room = cells - 2
    if len(name) > room:
        name = name[: room - 1] + "…" if room >= 4 else ""
    return (fill + name if name else "").ljust(cells, fill)


def _unseen(lane: Blocks, request: Request, layout: Layout) -> Iterator[Text]:
    """Names the phases too short to draw, on as many lines as they take."""
    totals = request.phase_totals()
    names = [name for name in PHASES if name in lane.unseen]
    parts = [f"{name} {scale.duration(totals[name])}" for name in names]
    note = f"{MARK} too short to draw: {', '.join(parts)}"
    for line in textwrap.wrap(note, layout.width - _LABEL_WIDTH - 1, subsequent_indent="  "):
        yield layout.line("", Text(line, Style(dim=True)))


# -- bars -----------------------------------------------------------------------------------------


def bars(values: Sequence[float | None], full: float) -> str:
    """A character a value: blank for 0, `▁` to `█` (= `full`) for more, `·` for None."""
    return "".join(_bar(value, full) for value in values)


def _bar(value: float | None, full: float) -> str:
    if value is None:
        return _UNKNOWN
    if value <= 0 or full <= 0:
        return " "
    return _HEIGHTS[min(int(value / full * len(_HEIGHTS)), len(_HEIGHTS) - 1)]


def _activity_lanes(request: Request, window: Window, layout: Layout) -> Iterator[Text]:
    by_name = shares([(a.activity, a.start_ns, a.end_ns) for a in request.activities], window)
    totals = request.activity_totals()
    names = [name for name in ACTIVITIES if name in by_name]
    parts = scale.apportion([totals[name] for name in names], 1000)
    for name, part in zip(names, parts, strict=True):
        style = Style(color=_ACTIVITY_COLOUR[name])
        body = Text(bars(by_name[name], 1.0), style)
        yield layout.line(f"  {name}", body, f"{scale.tenths(part, totals[name]):>5} %")


def _series_lanes(
    request: Request, report: Report, window: Window, layout: Layout
) -> Iterator[Text]:
    for name, label, unit, colour in (
        ("storage_bytes", "storage", scale.rate, _STORAGE),
        ("major_faults", "major faults", scale.frequency, _FAULTS),
        ("minor_faults", "minor faults", scale.frequency, _FAULTS),
    ):
        found = _of_all_files(report, name)
        values, peak = rates(found, window), peak_rate(found, window)
        if peak is None:
            continue
        reading = f"peak {unit(peak)}" if peak else "none"
        yield layout.line(label, Text(bars(values, _most(values)), Style(color=colour)), reading)
    yield from _residency_lane(request, report, window, layout)
    yield from _gpu_lanes(report, window, layout)


def _most(values: Sequence[float | None]) -> float:
    return max((value for value in values if value is not None), default=0.0)


def _gpu_lanes(report: Report, window: Window, layout: Layout) -> Iterator[Text]:
    """Memory, utilisation and link of each GPU, and copies to them; nothing where there is none."""
    for one in report.series:
        lane = _GPU_LANES.get(one.name)
        seen = [v for v in levels([one], window) if v is not None] if lane and one.path else []
        if lane is None or not seen:
            continue
        full = 1.0 if one.unit == "share" else max(one.values)
        body = Text(bars(levels([one], window), full), Style(color=_GPU))
        label = f"gpu {gpu_number(str(one.path))} {lane.label}"
        yield layout.line(label, body, f"{lane.kept} {lane.unit(lane.of(seen))}")
    copied = [s for s in report.series if s.name == "transfer_bytes" and s.ns]
    growth, peak = rates(copied, window), peak_rate(copied, window)
    if peak:
        body = Text(bars(growth, _most(growth)), Style(color=_ACTIVITY_COLOUR["transfer"]))
        yield layout.line("to the GPU", body, f"peak {scale.rate(peak)}")


@dataclass(frozen=True, slots=True)
class _GpuLane:
    """`kept`: what of the values is written beside the lane, as `of` finds it."""

    label: str
    unit: Callable[[float], str]
    kept: str = "peak"
    of: Callable[[Sequence[float]], float] = max


_GPU_LANES = {
    "gpu_memory_bytes": _GpuLane("memory", lambda value: scale.size(round(value))),
    "gpu_busy": _GpuLane("busy", scale.percent),
    "gpu_link_in": _GpuLane("link in", scale.rate),
    "gpu_clock": _GpuLane("clock", lambda mhz: f"{mhz:.0f} MHz", "least", min),
    "gpu_slowed": _GpuLane("slowed", scale.percent),
}


def _of_all_files(report: Report, name: str) -> list[Series]:
    """The series of everything if there is one, else those of all files."""
    found = [series for series in report.series if series.name == name and series.ns]
    return [series for series in found if series.path is None] or found


def _residency_lane(
    request: Request, report: Report, window: Window, layout: Layout
) -> Iterator[Text]:
    """How much of the weights the page cache holds."""
    weights = {file.path: file for file in request.files if _has_size(file)}
    series = [
        one
        for one in report.series
        if one.name == "cached_bytes" and one.path in weights and one.ns
    ]
    if not series:
        return
    whole = sum(weights[path].size_bytes for path in {str(one.path) for one in series})
    held = [None if v is None else min(v / whole, 1.0) for v in levels(series, window)]
    seen = [value for value in held if value is not None]
    if not seen:
        return
    before = request.residency_before
    first, last = seen[0] if before is None else before, seen[-1]
    reading = f"{scale.percent(first)[:-2]} → {scale.percent(last)}"
    yield layout.line("in page cache", Text(bars(held, 1.0), Style(color=_CACHE)), reading)


def _has_size(file: FileUse) -> bool:
    return file.is_weights and file.size_bytes > 0
