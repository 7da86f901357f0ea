"""Exports for databases, back ends and people, read again by somebody else's reader."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest
from click.testing import CliRunner
from google.protobuf import json_format
from hypothesis import HealthCheck, given, settings
from markdown_it import MarkdownIt
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from ttftprof.analysis import conclude
from ttftprof.cli.export import FORMATS, command
from ttftprof.errors import OutputError, UsageError
from ttftprof.model import Report
from ttftprof.reports import facts, markdown, otlp_json
from ttftprof.timeline import Timeline
from unit import report_samples as samples
from unit.recordings import NEW, python_segment, router_switch
from unit.synthetic import busy_timeline


@pytest.fixture(scope="module")
def switch() -> tuple[Report, Timeline]:
    timeline = router_switch().timeline()
    return conclude(timeline, Path("switch.ttft")), timeline


def asked(query: str) -> list[Any]:
    return duckdb.connect().execute(query).fetchall()


# -- the facts ------------------------------------------------------------------------------------


def test_duckdb_reads_in_parquet_what_csv_says(
    switch: tuple[Report, Timeline], tmp_path: Path
) -> None:
    report, timeline = switch
    path = tmp_path / "facts.parquet"
    with path.open("wb") as out:
        facts.write_parquet(report, timeline, out)
    text = io.StringIO()
    facts.write_csv(report, timeline, text)
    rows = list(csv.reader(io.StringIO(text.getvalue())))
    assert tuple(rows[0]) == facts.COLUMNS
    told = asked(f"SELECT * FROM '{path}'")
    assert [["" if v is None else str(v) for v in row] for row in told] == rows[1:]
    phases = asked(
        f"SELECT name, sum(duration_ns)::BIGINT FROM '{path}' WHERE kind = 'PHASE' GROUP BY name"
    )
    assert dict(phases) == report.requests[0].phase_totals()


def test_every_event_is_a_row(tmp_path: Path) -> None:
    timeline = busy_timeline(threads=1, waits=120_000)
    path = tmp_path / "facts.parquet"
    with path.open("wb") as out:
        facts.write_parquet(conclude(timeline, path), timeline, out)
    query = f"SELECT count(*), sum(a)::BIGINT, min(start_ns) FROM '{path}' WHERE kind = 'BLOCK'"
    first_ns = int(timeline.start_ns)
    assert asked(query) == [(120_000, 120_000 * 131_072, first_ns)]


# -- OpenTelemetry --------------------------------------------------------------------------------


def spans_of(report: Report) -> list[Any]:
    """Read by OpenTelemetry's own protobuf, whose JSON has identities in base64, not hex."""
    out = io.StringIO()
    otlp_json.write(report, out)
    document = json.loads(out.getvalue())
    for span in document["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for name in ("traceId", "spanId", "parentSpanId"):
            if name in span:
                span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    request = json_format.ParseDict(document, ExportTraceServiceRequest())
    return list(request.resource_spans[0].scope_spans[0].spans)


def test_otlp_has_a_trace_a_request_with_its_phases_inside() -> None:
    report = samples.cold()
    root, *children = spans_of(report)
    request, offset = report.requests[0], report.realtime_offset_ns or 0
    assert root.end_time_unix_nano - root.start_time_unix_nano == request.ttft_ns
    assert root.start_time_unix_nano == request.start_ns + offset
    assert [c.name for c in children] == [p.phase for p in request.phases]
    assert all((c.trace_id, c.parent_span_id) == (root.trace_id, root.span_id) for c in children)
    length = sum(c.end_time_unix_nano - c.start_time_unix_nano for c in children)
    assert length == request.ttft_ns


@given(samples.any_report())
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_report_is_valid_otlp(report: Report) -> None:
    spans = spans_of(report)
    assert all(len(s.trace_id) == 16 and len(s.span_id) == 8 for s in spans)


def test_otlp_identities_are_unique_and_stay() -> None:
    identities = [s.span_id for s in spans_of(samples.many(50))]
    assert len(set(identities)) == len(identities)
    assert identities == [s.span_id for s in spans_of(samples.many(50))]


def test_otlp_calls_a_start_what_it_is() -> None:
    roots = [s for s in spans_of(samples.never_ended()) if not s.parent_span_id]
    assert [s.name for s in roots] == ["time to first token", "start of a server"]


# -- Markdown -------------------------------------------------------------------------------------


# As GitHub renders: bare addresses become links.
RENDERER = MarkdownIt("gfm-like", {"html": True})
LINKS = ("https://evil.com/x HTTP://EVIL.COM www.evil.com WWW.evil.com/a ftp://evil.com/x",
         "mailto:eve@evil.com eve@evil.com")  # fmt: skip
MARKUP = "[a](http://x) ![i](y) # h\n> q | c `d` <b> ~~s~~"


def rendered(report: Report) -> str:
    out = io.StringIO()
    markdown.write(report, out)
    page: str = RENDERER.render(out.getvalue())
    return page


def test_markdown_shows_the_table_that_adds_up() -> None:
    page = rendered(samples.cold())
    assert page.count("<table>") == 3  # requests, the split, files
    assert "<td>/srv/models/model-b.gguf</td>\n<td>315 MB</td>\n<td>315 MB</td>" in page
    assert "<li>Raise the read-ahead of /srv" in page
    assert "(saves about 430 ms)</li>" in page
    assert "<strong>1562.314</strong>" in page
    split = page[page.index("request 1, ms</h3>") :]
    cells = re.findall(r"<td>([\d.]*)</td>\n</tr>", split[: split.index("</table>")])
    assert round(sum(float(c) for c in cells if c) * 1000) == 1_562_314


@pytest.mark.parametrize(
    "name",
    [*samples.HOSTILE_NAMES, *LINKS, MARKUP],
    ids=range(len(samples.HOSTILE_NAMES) + 3),
)
def test_hostile_names_stay_text_in_markdown(name: str) -> None:
    page = rendered(samples.hostile(name))
    assert not re.search(r"<(a|img|script|b|h1|code|em|s)\b", page)


def test_the_renderer_would_make_links_of_all_of_them() -> None:
    for name in " ".join(LINKS).split():
        assert "<a href=" in RENDERER.render(name), name


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_written_whole(form: str, tmp_path: Path) -> None:
    scene = router_switch().meta(clock={"realtime_offset_ns": 1_764_000_000_000_000_000})
    seen = python_segment(NEW, [(NEW, 100, 600, [("torch/__init__.py", "<module>", 1)])])
    scene.fact("python_stacks", *seen)
    recording, out = scene.write(tmp_path / "run.ttft"), tmp_path / "out"
    done = CliRunner().invoke(command, [str(recording), "--to", form, "-o", str(out)])
    assert done.exit_code == 0, done.output or done.exception
    assert out.stat().st_size > 100
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run.ttft"]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    recording = router_switch().write(tmp_path / "run.ttft")
    arguments = [str(recording), "--to", "parquet", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(command, arguments)
    assert isinstance(done.exception, UsageError)
    assert "pyarrow" in done.exception.message
    assert not (tmp_path / "out").exists()


def test_without_wall_time_there_are_no_spans(tmp_path: Path) -> None:
    recording = router_switch().write(tmp_path / "run.ttft")
    arguments = [str(recording), "--to", "otlp-json", "-o", str(tmp_path / "out")]
    assert isinstance(CliRunner().invoke(command, arguments).exception, UsageError)


def test_a_folder_that_is_not_there_is_an_output_error(tmp_path: Path) -> None:
    recording = router_switch().write(tmp_path / "run.ttft")
    arguments = [str(recording), "--to", "csv", "-o", str(tmp_path / "no" / "out")]
    assert isinstance(CliRunner().invoke(command, arguments).exception, OutputError)


def test_a_dash_is_standard_output(tmp_path: Path) -> None:
    recording = router_switch().write(tmp_path / "run.ttft")
    done = CliRunner().invoke(command, [str(recording), "--to", "folded", "-o", "-"])
    assert ";prefill;" in done.output
