"""`ttftprof diff` for people: the waits on one scale, what grew, what else was different.

Guarantees are those of `terminal`. Both tables of a comparison are rounded before they are
subtracted, so the printed differences add up to the difference of the printed waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.style import Style
from rich.text import Text

from ttftprof import scale
from ttftprof.diff import Comparison, length_ns
from ttftprof.reports import diff_words, flame, tables, words
from ttftprof.reports.overview import legend, overview
from ttftprof.reports.safe import clip_middle, plain
from ttftprof.reports.tables import Column
from ttftprof.reports.terminal import Page

_BOLD, _DIM = Style(bold=True), Style(dim=True)
_WARNING = Style(color="color(166)", bold=True)


def write(comparisons: Sequence[Comparison], out: TextIO, width: int, colour: bool) -> None:
    """Prints the comparisons; all have the same base."""
    page = Page(width, colour)
    waits = [comparisons[0].base, *(c.other for c in comparisons)]
    for wait in waits:
        for warning in words.warnings(wait.report):
            page.add_text(f"! {diff_words.name_of(wait)}: {plain(warning)}", _WARNING)
    asked = [(wait.report, wait.request) for wait in waits]
    page.gap()
    page.add(overview(asked, width, colour))
    page.add(legend(asked, width, colour))
    for comparison in comparisons:
        page.gap()
        _print_comparison(page, comparison)
    out.write(page.text())


def _print_comparison(page: Page, comparison: Comparison) -> None:
    base, other = comparison.base, comparison.other
    page.add_text(
        f"{diff_words.name_of(other)} against {diff_words.name_of(base)}: "
        f"{scale.duration(length_ns(base.request))} → {scale.duration(length_ns(other.request))}, "
        f"{diff_words.signed(comparison.growth_ns)}",
        _BOLD,
    )
    page.add_text(diff_words.finding(comparison), indent=2)
    page.add_text(diff_words.rule(comparison), _DIM, indent=2)
    if comparison.phases:
        page.gap()
        _print_table(page, comparison)
    page.gap()
    _print_circumstances(page, comparison)


def _print_table(page: Page, comparison: Comparison) -> None:
    cells = diff_words.difference_us(comparison)
    columns = [
        Column(
            name.replace("_", "_\n"),
            [diff_words.signed_ms(row[i]) for row in cells]
            + [diff_words.signed_ms(sum(row[i] for row in cells))],
        )
        for i, name in enumerate(comparison.activities)
    ]
    sums = [sum(row) for row in cells]
    columns.append(
        Column("total", [Text(diff_words.signed_ms(us) or "0", _BOLD) for us in [*sums, sum(sums)]])
    )
    labels: list[str | Text] = [_label(name, page.colour) for name in comparison.phases]
    first = Column("difference,\nms", [*labels, Text("   total", _BOLD)], right=False)
    page.add(*tables.banded(first, columns, page.width))


def _label(name: str, colour: bool) -> Text:
    return flame.swatch(name, colour).append(f" {name}")


def _print_circumstances(page: Page, comparison: Comparison) -> None:
    found = comparison.circumstances
    if not found:
        page.add_text("nothing else that is known was different", _DIM)
        return
    room = (page.width - 34) // 2
    shown = [
        [clip_middle(plain(text), room) if text is not None else "-" for text in pair]
        for pair in ((c.base, c.other) for c in found)
    ]
    first = Column("also different", [clip_middle(plain(c.name), 30) for c in found], right=False)
    columns = [
        Column("base", [pair[0] for pair in shown], right=False),
        Column("here", [pair[1] for pair in shown], right=False),
    ]
    page.add(*tables.banded(first, columns, page.width))
