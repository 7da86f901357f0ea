"""`ttftprof report`: what a recording says, for people (text, HTML) or programs (JSON)."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from ttftprof.cli import output
from ttftprof.errors import UsageError

if TYPE_CHECKING:
    from ttftprof.model import Report

_IN_MEMORY_BYTES = 16 << 20  # of a report as JSON; the rest lies on the disk until all is there
_EPILOG = """\b
Examples:
  ttftprof report switch.ttft                  timeline, tables, verdict
  ttftprof report cold.ttft warm.ttft          side by side, then each in detail
  ttftprof report --compact *.ttft             one line a request
  ttftprof report --request 2 switch.ttft      one request alone
  ttftprof report --html out.html switch.ttft  a page to explore and to share
  ttftprof report --format json a.ttft | jq '.requests[].totals.phase'

\b
Phases split the time from a request's first byte to its first token:
  queue         it waits behind other work
  evict         the old model is stopped and its memory comes back
  launch        the new server starts, up to its first touch of the weights
  load          the weights are read, until the last is in place
  init          contexts, compilation, KV cache, warm-up: until it can serve
  ready_gap     it could serve, but the front has not noticed yet
  prefill       the prompt is processed
  first_decode  the first token is made and sent
  unexplained   nothing observed says what this was

\b
Activities say what the server's threads did meanwhile: a storage_wait in prefill is a
model that is mapped and read late. Phases and activities each add up to the TTFT exactly.

\b
  n/a  nothing observed it              ╏  phases too short to draw
  ~    the phase is inferred            ·  a stretch of bars that nothing saw
  !    what the recording lacks

\b
Pages hold paths, command lines and names of models, but no prompt and no answer. Recordings
are readable by you alone; who may read a page or an export, your umask decides.
"""


def _schema() -> dict[str, Any]:
    from ttftprof.reports import json

    return json.schema()


@click.command("report", epilog=_EPILOG)
@click.argument(
    "files",
    metavar="FILE...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
)
@output.format_option(
    "json: the schema ttftprof.report/1, one object; several files give JSON Lines, one object a "
    "line."
)
@output.schema_option(_schema)
@click.option(
    "--html",
    "page",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="OUT",
    help="Write one self-contained HTML file instead, to explore and to share; an existing one is "
    "replaced.",
)
@click.option("--compact", is_flag=True, help="One line a request, no details.")
@click.option("--all", "everything", is_flag=True, help="Details of every request and every file.")
@click.option(
    "--request", "request_id", metavar="ID", help='Only the request with this id, or "start N".'
)
@output.WIDTH
@output.COLOR
def command(
    files: tuple[Path, ...],
    form: str,
    page: Path | None,
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
    output.checked_width(width)
    if page is not None:
        _refuse_beside_html(form=form, compact=compact, everything=everything)
        _write_html(files, request_id, page)
        return
    out = output.printable(sys.stdout)
    if form == "json":
        _write_json(files, request_id, out)
    else:
        from ttftprof.reports import terminal

        most = None if everything else terminal.MOST_SHOWN
        reports = _only([_analysed(path, request_id, most=most) for path in files], request_id)
        terminal.write(
            reports,
            out,
            width or output.width_of(out),
            output.has_colour(color, out),
            compact=compact,
            everything=everything,
        )
    out.flush()  # a reader that went away shows here, where it is handled


def _refuse_beside_html(*, form: str, compact: bool, everything: bool) -> None:
    """Raises `UsageError` for what says how another output is to look."""
    for option, given in (
        ("--format json", form == "json"),
        ("--compact", compact),
        ("--all", everything),
    ):
        if given:
            raise UsageError(f"--html and {option} are two outputs", "run it twice, once with each")


def _write_json(files: Sequence[Path], request_id: str | None, out: TextIO) -> None:
    from ttftprof.reports import json

    if request_id is None:
        for path in files:
            _write_all_as_json(path, out)
        return
    for report in _only([_analysed(path, request_id) for path in files], request_id):
        json.write(report, out)


def _write_all_as_json(path: Path, out: TextIO) -> None:
    """Requests are written as they are concluded, for there may be thousands; all or nothing."""
    from tempfile import SpooledTemporaryFile

    from ttftprof import analysis
    from ttftprof.reports import json

    found = analysis.analyse_one_by_one(path)
    with SpooledTemporaryFile(_IN_MEMORY_BYTES, "w+", encoding="ascii", newline="") as text:
        json.write_one_by_one(found.rest, found.requests, found.series, text)
        text.seek(0)
        shutil.copyfileobj(text, out)


def _write_html(files: Sequence[Path], request_id: str | None, page: Path) -> None:
    from ttftprof.reports import html

    reports = _only([_analysed(path, request_id, drawn=True) for path in files], request_id)
    with output.text_file(page) as out:
        html.write(reports, out)
    output.say_written(page)


def _analysed(
    path: Path, request_id: str | None = None, *, drawn: bool = False, most: int | None = None
) -> Report:
    """With all that is shown concluded: one request, the `most` that waited longest, or all."""
    from ttftprof import analysis

    choice = analysis.every if most is None else analysis.slowest(most)
    return analysis.analyse(
        path, drawn, choice if request_id is None else analysis.only(request_id)
    )


def _only(reports: list[Report], request_id: str | None) -> list[Report]:
    """The recordings that hold that request, or start of a server, each with it alone."""
    from ttftprof.reports import words

    if request_id is None:
        return reports
    found = [
        replace(
            report,
            requests=tuple(r for r in report.requests if r.id == request_id),
            starts=tuple(s for s in report.starts if s.id == request_id),
        )
        for report in reports
    ]
    found = [report for report in found if words.told(report)]
    if not found:
        ids = ", ".join(dict.fromkeys(r.id for report in reports for r in words.told(report)))
        raise UsageError(
            f"no request {request_id!r} was recorded",
            f"give one of: {ids}" if ids else "no request was recorded at all",
        )
    return found
