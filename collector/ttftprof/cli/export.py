"""`ttftprof export`: a recording in the formats of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO

import click

from ttftprof.cli import output
from ttftprof.errors import UsageError

if TYPE_CHECKING:
    from ttftprof.model import Report
    from ttftprof.timeline import Timeline

FORMATS = (
    "perfetto",
    "chrome",
    "speedscope",
    "folded",
    "python-folded",
    "csv",
    "parquet",
    "otlp-json",
    "markdown",
)
BINARY = ("perfetto", "parquet")
_EPILOG = """\b
Examples:
  ttftprof export switch.ttft --to perfetto -o switch.pftrace     ui.perfetto.dev
  ttftprof export switch.ttft --to speedscope -o s.json           speedscope.app
  ttftprof export switch.ttft --to folded -o s.folded             flamegraph.pl, inferno
  ttftprof export switch.ttft --to parquet -o facts.parquet       DuckDB, Spark, pandas
  ttftprof export switch.ttft --to otlp --endpoint http://localhost:4318
"""


@click.command("export", epilog=_EPILOG)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--to", "form", type=click.Choice([*FORMATS, "otlp"]), required=True)
@click.option(
    "-o",
    "--output",
    "target",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="OUT",
    help="The file to write; - is standard output. An existing one is replaced. Your umask decides "
    "who may read it.",
)
@click.option(
    "--endpoint",
    metavar="URL",
    help="For --to otlp: the collector's address, as http://localhost:4318. Keys are taken from "
    "OTEL_EXPORTER_OTLP_HEADERS alone.",
)
def command(file: Path, form: str, target: Path | None, endpoint: str | None) -> None:
    """Write a recording in the format of another tool.

    perfetto, chrome: tracks of requests with their phases, of threads and of requests to storage.
    speedscope, folded: phases and activities as stacks. python-folded: phases, categories and
    frames of Python code, as far as samples tell. csv, parquet: a row for each event
    of the kernel side, phase and activity; `dump` has the other facts.
    otlp-json: OpenTelemetry spans, a trace a request; otlp sends them to a collector. markdown: a
    summary.
    """
    if (form == "otlp") != (endpoint is not None):
        raise UsageError("--to otlp and --endpoint go together", "give both, or neither")
    if (form == "otlp") == (target is not None):
        raise UsageError(
            "it is not said where to write" if target is None else "--to otlp writes no file",
            "add -o FILE" if target is None else "leave -o out",
        )
    report, timeline = read(file)
    if endpoint is not None:
        from ttftprof.reports.otlp_endpoint import send

        click.echo(f"{send(report, endpoint)} spans sent", err=True)
        return
    assert target is not None
    try:
        if form in BINARY:
            with output.binary_file(target) as raw:
                write_binary(form, report, timeline, raw)
        else:
            with output.text_file(target) as text:
                write_text(form, report, timeline, text)
    except ImportError as error:
        package = {"perfetto": "perfetto", "parquet": "pyarrow"}[form]
        raise UsageError(
            f"--to {form} needs the Python package {package}, which is not installed ({error})",
            "pip install 'ttftprof[export]'",
        ) from error


def read(file: Path) -> tuple[Report, Timeline]:
    from ttftprof import analysis
    from ttftprof.recording import Reader
    from ttftprof.timeline import build

    with Reader(file) as reader:
        timeline = build(reader)
    return analysis.conclude(timeline, file), timeline


def write_binary(form: str, report: Report, timeline: Timeline, out: BinaryIO) -> None:
    if form == "perfetto":
        from ttftprof.reports import perfetto

        perfetto.write(report, timeline, out)
    else:
        from ttftprof.reports import facts

        facts.write_parquet(report, timeline, out)


def write_text(form: str, report: Report, timeline: Timeline, out: TextIO) -> None:
    from ttftprof.reports import chrome, facts, folded, markdown, otlp_json, python, speedscope

    if form == "chrome":
        chrome.write(report, timeline, out)
    elif form == "speedscope":
        speedscope.write(report, out)
    elif form == "folded":
        folded.write(report, timeline, out)
    elif form == "python-folded":
        python.write_folded(report, out)
    elif form == "csv":
        facts.write_csv(report, timeline, out)
    elif form == "otlp-json":
        otlp_json.write(report, out)
    else:
        markdown.write(report, out)
