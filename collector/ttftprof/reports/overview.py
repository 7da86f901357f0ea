"""Many requests side by side: a row each, on one time scale, so that lengths compare by eye."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ttftprof import scale
from ttftprof.model import PHASES, Report, Request
from ttftprof.reports import flame, words
from ttftprof.reports.lanes import Window, blocks
from ttftprof.reports.safe import clip, clip_middle, plain

_GAP = 2
_CAUSE_WIDTH = 12
_TTFT_WIDTH = 8
_TICK_SPACING = 9

Asked = tuple[Report, Request]


@dataclass(frozen=True, slots=True)
class _Names:
    """Columns that say which request a row is, each with its title."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    width: int


def overview(asked: Sequence[Asked], width: int, colour: bool) -> Table:
    """The table, at most `width` wide; rows in the order given."""
    names = _names(asked, width // 3)
    causes = [_cause(request) for _, request in asked]
    cause_width = max(map(cell_len, ["cause", *causes]))
    bar = width - names.width - _TTFT_WIDTH - cause_width - 3 * _GAP
    longest_ns = max(words.waited_ns(request) for _, request in asked)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style=Style(dim=True))
    for title in names.titles:
        table.add_column(title, no_wrap=True)
    table.add_column("TTFT", justify="right", no_wrap=True, width=_TTFT_WIDTH)
    table.add_column("cause", no_wrap=True, width=cause_width)
    table.add_column(_axis(longest_ns, bar), no_wrap=True, width=bar)
    for (_, request), cells, cause in zip(asked, names.rows, causes, strict=True):
        table.add_row(
            *map(Text, cells),
            Text(scale.duration(_wait_ns(request))),
            Text(cause),
            _bar(request, longest_ns, bar, colour),
        )
    return table


def _wait_ns(request: Request) -> int | None:
    """TTFT; of a start, how long it took. None where neither came."""
    return None if words.unfinished(request) else words.waited_ns(request)


def legend(asked: Sequence[Asked], width: int, colour: bool) -> Text:
    """The phases that occur, each with its block."""
    seen = {phase.phase for _, request in asked for phase in request.phases}
    return flame.legend([name for name in PHASES if name in seen], width, colour)


def _names(asked: Sequence[Asked], budget: int) -> _Names:
    """Recording and request only where they tell rows apart; the model always."""
    columns: list[tuple[str, list[str]]] = []
    if len({id(report) for report, _ in asked}) > 1:
        columns.append(("recording", [words.recording_name(report) for report, _ in asked]))
    if any(len(report.requests) + len(report.starts) > 1 for report, _ in asked):
        columns.append(("request", [request.id for _, request in asked]))
    columns.append(("model", [request.model or scale.ABSENT for _, request in asked]))
    shown: list[list[str]] = []
    left = budget
    for number, (title, cells) in enumerate(columns):
        room = max(left // (len(columns) - number), len(title))
        clipped = [clip_middle(plain(cell), room) for cell in cells]
        shown.append(clipped)
        left -= max(len(title), *(cell_len(cell) for cell in clipped)) + _GAP
    rows = tuple(zip(*shown, strict=True))
    return _Names(tuple(title for title, _ in columns), rows, budget - left)


def _axis(longest_ns: int, width: int) -> Text:
    labels = [" "] * width
    free = 0
    for cell, label in scale.ticks(longest_ns, width, _TICK_SPACING):
        if cell >= free and cell + len(label) <= width:
            labels[cell : cell + len(label)] = label
            free = cell + len(label) + 1
    return Text("".join(labels))


def _cause(request: Request) -> str:
    why = request.outcome if words.unfinished(request) else request.verdict.cause
    return clip(plain(why), _CAUSE_WIDTH)


def _bar(request: Request, longest_ns: int, width: int, colour: bool) -> Text:
    waited_ns = words.waited_ns(request)
    if not waited_ns:
        return Text()
    cells = max(round(width * waited_ns / longest_ns), 1)
    window = Window(*words.span(request), cells)
    lane = blocks([(p.phase, p.start_ns, p.end_ns) for p in request.phases], window)
    return flame.draw_blocks(lane, colour, labels=False)
