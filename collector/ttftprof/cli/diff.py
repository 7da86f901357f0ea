"""`ttftprof diff`: why one wait was longer than another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import click

from ttftprof.cli import output
from ttftprof.diff import Comparison, Wait, compare, quickest, slowest
from ttftprof.errors import UsageError
from ttftprof.model import Report, Request

_EPILOG = """\b
Examples:
  ttftprof diff warm.ttft cold.ttft               what the cold switch has that warm had not
  ttftprof diff old.ttft new.ttft newer.ttft      two against one
  ttftprof diff run.ttft run.ttft                 of one recording, the slowest and the quickest
  ttftprof diff --base-request 3 --request 1 run.ttft run.ttft

\b
"first to grow" is the phase to look at, which need not be the one that grew most: those after
it may have grown as its consequence. A phase grew if it took longer by a tenth of the
base's wait, at least 20 ms, and by a fifth of all such growth. What follows in the table and
under "also different" says why.
"""


@click.command("diff", epilog=_EPILOG)
@click.argument("base", type=click.Path(path_type=Path))
@click.argument(
    "others",
    metavar="SWITCH...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
)
@click.option("--base-request", metavar="ID", help="Of BASE (default: the one answered soonest).")
@click.option("--request", metavar="ID", help="Of each SWITCH (default: the longest wait).")
@click.option(
    "--html",
    "page",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="OUT",
    help="Write one self-contained HTML file instead, with the timelines.",
)
@output.WIDTH
@output.COLOR
def command(
    base: Path,
    others: tuple[Path, ...],
    base_request: str | None,
    request: str | None,
    page: Path | None,
    width: int | None,
    color: str,
) -> None:
    """Show what one wait for the first token has that another had not.

    BASE is a recording of the usual wait, each SWITCH of a longer one; the same file may be both.
    Waits are laid over each other where their requests begin. The first phase that grew beyond
    noise is named, with the rule; then every difference by phase and activity, and what else was
    different: arguments, kernel, mount options, read-ahead, context size.
    """
    from ttftprof import analysis
    from ttftprof.reports import diff_terminal

    output.checked_width(width)
    analysed = cache(analysis.analyse)  # a recording against itself is read once
    first = _wait(analysed(base), base_request, quickest)
    comparisons = [compare(first, _wait(analysed(path), request, slowest)) for path in others]
    if page is not None:
        _write_html(comparisons, page)
        return
    out = output.printable(sys.stdout)
    diff_terminal.write(
        comparisons, out, width or output.width_of(out), output.has_colour(color, out)
    )


def _write_html(comparisons: Sequence[Comparison], page: Path) -> None:
    from ttftprof.reports import html

    with output.text_file(page) as out:
        html.write_comparison(comparisons, out)
    output.say_written(page)


def _wait(
    report: Report, identity: str | None, default: Callable[[Report], Request | None]
) -> Wait:
    if identity is None:
        chosen = default(report)
    else:
        chosen = next((r for r in report.requests if r.id == identity), None)
    if chosen is None:
        ids = ", ".join(r.id for r in report.requests)
        what = f"no request {identity!r}" if identity else "no request with a first token"
        raise UsageError(f"{report.path} has {what}", f"it has: {ids}" if ids else "record again")
    return Wait(report, chosen)
