"""`ttftprof summary`: many recordings in one table, or as rows for other tools."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ttftprof.cli import output
from ttftprof.errors import RecordingError, UsageError

if TYPE_CHECKING:
    from ttftprof.reports.fleet import Parts, Summary

_GROUPINGS = ("engine", "model", "kind", "file_system", "host", "kernel", "cause", "recording")
_EPILOG = """\b
Examples:
  ttftprof summary recordings/                     by model and kind of switch
  ttftprof summary --by host,file_system *.ttft    which machine, which storage
  ttftprof summary --parquet fleet.parquet /srv/recordings
  duckdb -c "SELECT model, median(ttft_ns) / 1e9 AS s FROM 'fleet.parquet'
             WHERE switched GROUP BY model ORDER BY s DESC"
"""


@click.command("summary", epilog=_EPILOG)
@click.argument(
    "places", metavar="FILE|FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--by",
    default="model,kind",
    show_default=True,
    metavar="NAMES",
    help=f"What requests of one row have in common, of: {', '.join(_GROUPINGS)}.",
)
@output.format_option("csv and json (an object a line) give every request instead.", "csv")
@click.option(
    "--parquet",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="OUT",
    help="Also write every request to this file, for DuckDB, Spark, Dask or pandas.",
)
@click.option(
    "--jobs", type=click.IntRange(1), help="Recordings read at once (default: one a CPU)."
)
@output.WIDTH
@output.COLOR
def command(
    places: tuple[Path, ...],
    by: str,
    form: str,
    parquet: Path | None,
    jobs: int | None,
    width: int | None,
    color: str,
) -> None:
    """Summarise many recordings: TTFT and phases by model, host, storage.

    Reads recordings and folders of them, one at a time and several in parallel. What cannot be
    read is named first and left out. Rows are requests; times are nanoseconds.
    """
    from ttftprof import fleet
    from ttftprof.reports import fleet as shown

    output.checked_width(width)
    if parquet is not None and form != "text":
        raise UsageError("--parquet and --format do not go together", "run it once for each")
    summary = shown.Summary(_groups(by))
    paths = fleet.recordings(places)
    if not paths:
        raise UsageError("there is no recording there", "give *.ttft files or a folder of them")
    parts = _watched(fleet.read_all(paths, jobs), len(paths))
    out = output.printable(sys.stdout)
    if parquet is not None:
        _write_parquet(parts, summary, parquet)
    elif form == "csv":
        shown.write_csv(parts, summary, out)
    elif form == "json":
        shown.write_json(parts, summary, out)
    else:
        shown.count(parts, summary)
    if form == "text":
        columns = width or output.width_of(out)
        shown.write_text(summary, out, columns, output.has_colour(color, out))
    else:
        for unread in summary.unread:
            click.echo(f"not read: {unread.reason}", err=True)
    out.flush()
    if not summary.recordings:
        raise RecordingError("none of the recordings could be read", "see the reasons above")


def _write_parquet(parts: Parts, summary: Summary, target: Path) -> None:
    from ttftprof.reports import fleet

    try:
        with output.binary_file(target) as raw:
            fleet.write_parquet(parts, summary, raw)
    except ImportError as error:
        raise UsageError(
            f"--parquet needs the Python package pyarrow, which is not installed ({error})",
            "pip install 'ttftprof[export]'",
        ) from error


def _watched(parts: Parts, number: int) -> Parts:
    """The same, with a bar on standard error while a person waits."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(
        parts,
        "reading recordings",
        total=number,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _groups(by: str) -> list[str]:
    names = [name.strip() for name in by.split(",") if name.strip()]
    for name in names:
        if name not in _GROUPINGS:
            raise UsageError(f"--by {name!r} is none of {', '.join(_GROUPINGS)}")
    if not names:
        raise UsageError("--by names nothing", f"give some of: {', '.join(_GROUPINGS)}")
    return list(dict.fromkeys(names))
