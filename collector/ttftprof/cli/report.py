"""`ttftprof report`: what a recording says, for people (text) or programs (JSON)."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import click

from ttftprof.errors import UsageError
from ttftprof.model import Report

_MIN_WIDTH, _MAX_WIDTH, _PIPED_WIDTH = 60, 200, 100

_EPILOG = """\b
Examples:
  ttftprof report switch.ttft                  timeline, tables, verdict
  ttftprof report cold.ttft warm.ttft          side by side, then each in detail
  ttftprof report --compact *.ttft             one line a request
  ttftprof report --request 2 switch.ttft      one request alone
  ttftprof report --format json a.ttft | jq '.requests[].totals.phase'

\b
How to read it: phases (queue, evict, launch, load, init, ready_gap, prefill,
first_decode, unexplained) split the time to the first token; activities say what the
server's threads did meanwhile. Both add up to the TTFT exactly. "n/a" is what nothing
observed, "~" marks a phase that is inferred, "╏" phases too short to draw, and lines that
begin with "!" name what the recording lacks.
"""


@click.command("report", epilog=_EPILOG)
@click.argument(
    "files",
    metavar="FILE...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="json: the schema ttftprof.report/1, one object; several files give JSON Lines, one "
    "object a line.",
)
@click.option("--compact", is_flag=True, help="One line a request, no details.")
@click.option("--all", "everything", is_flag=True, help="Details of every request and every file.")
@click.option("--request", "request_id", metavar="ID", help="Only the request with this id.")
@click.option(
    "--width",
    type=int,
    metavar="COLUMNS",
    help="At least 60 (default: the terminal's, 100 into a pipe).",
)
@click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="auto: only on a terminal, and not if NO_COLOR is set.",
)
def command(
    files: tuple[Path, ...],
    form: str,
    compact: bool,
    everything: bool,
    request_id: str | None,
    width: int | None,
    color: str,
) -> None:
    """Show where the first token's time went.

    Prints what recordings made by `ttftprof record` say: a timeline of each request, every
    millisecond by phase and activity, the files that were read, and what to change.
    """
    if width is not None and not _MIN_WIDTH <= width <= _MAX_WIDTH:
        raise UsageError(
            f"--width {width} is not between {_MIN_WIDTH} and {_MAX_WIDTH}",
            "leave --width out to use the terminal's",
        )
    out = _printable(sys.stdout)
    if form == "json":
        _write_json(files, request_id, out)
    else:
        from ttftprof.reports import terminal

        reports = _only([_analysed(path) for path in files], request_id)
        terminal.write(
            reports,
            out,
            width or _width(out),
            _colour(color, out),
            compact=compact,
            everything=everything,
        )
    out.flush()  # a reader that went away shows here, where it is handled


def _write_json(files: Sequence[Path], request_id: str | None, out: TextIO) -> None:
    from ttftprof.reports import json

    if request_id is None:
        for path in files:
            json.write(_analysed(path), out)
        return
    for report in _only([_analysed(path) for path in files], request_id):
        json.write(report, out)


def _analysed(path: Path) -> Report:
    from ttftprof import analysis

    return analysis.analyse(path)


def _only(reports: list[Report], request_id: str | None) -> list[Report]:
    """The recordings that hold that request, each with it alone."""
    if request_id is None:
        return reports
    found = [
        replace(report, requests=tuple(r for r in report.requests if r.id == request_id))
        for report in reports
    ]
    found = [report for report in found if report.requests]
    if not found:
        ids = ", ".join(dict.fromkeys(r.id for report in reports for r in report.requests))
        raise UsageError(
            f"no request {request_id!r} was recorded",
            f"give one of: {ids}" if ids else "no request was recorded at all",
        )
    return found


def _width(out: TextIO) -> int:
    if not out.isatty():
        return _PIPED_WIDTH
    return min(max(shutil.get_terminal_size().columns, _MIN_WIDTH), _MAX_WIDTH)


def _colour(choice: str, out: TextIO) -> bool:
    if choice != "auto":
        return choice == "always"
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return out.isatty() and not plain


def _printable(out: TextIO) -> TextIO:
    """Standard output that shows `?` for what its encoding lacks, instead of failing."""
    reconfigure = getattr(out, "reconfigure", None)
    if reconfigure:
        reconfigure(errors="replace")
    return out
