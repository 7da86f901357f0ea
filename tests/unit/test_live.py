"""The lines and totals of `watch`, and the page for Prometheus."""

from __future__ import annotations

import io
import json
import urllib.request
from dataclasses import replace

import jsonschema
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from ttftprof import scale
from ttftprof.cli import watch
from ttftprof.errors import OutputError
from ttftprof.model import PHASES, Report, Request
from ttftprof.reports import live
from ttftprof.reports.prometheus import Metrics
from ttftprof.watch import Ended
from unit import report_samples as samples

WALL_NS = 1_700_000_000_000_000_000


def ended(request: Request) -> Ended:
    return Ended(request, WALL_NS)


@settings(deadline=None, max_examples=60)
@given(samples.any_report(), st.integers(60, 200), st.booleans())
def test_a_line_is_one_line_and_fits(report: Report, width: int, colour: bool) -> None:
    for request in report.requests:
        line = live.line(ended(request), width, colour)
        assert line.cell_len <= width
        assert not set(line.plain) & set("\n\r\x1b")


@settings(deadline=None, max_examples=30)
@given(samples.any_report())
def test_a_line_for_programs_satisfies_the_schema_that_is_shipped(report: Report) -> None:
    shipped = json.loads(CliRunner().invoke(watch.command, ["--schema"]).output)
    jsonschema.Draft202012Validator.check_schema(shipped)
    out = io.StringIO()
    for request in report.requests:
        watch.JsonLines(out).tell(ended(request))
    lines = out.getvalue().splitlines()
    assert len(lines) == len(report.requests)
    for line in lines:
        jsonschema.validate(json.loads(line), shipped)
        assert json.loads(line)["schema"] == shipped["properties"]["schema"]["const"]


def test_a_line_says_what_the_report_says() -> None:
    request = samples.cold().requests[0]
    line = live.line(ended(request), 100, colour=False).plain
    assert str(request.model) in line
    assert scale.duration(request.ttft_ns) in line
    assert " cold " in line
    assert "load" in line


def test_without_colour_every_phase_has_a_fill_that_the_header_names() -> None:
    shown = "\n".join(text.plain for text in live.header(80, colour=False))
    for name in PHASES:
        assert f" {name}" in shown
    assert all(text.cell_len <= 80 for text in live.header(80, colour=False))


@pytest.mark.parametrize("name", ["<script>1</script>", "a\x1b[2Jb", "\u202eevil", "x" * 4096])
def test_hostile_names_stay_harmless(name: str) -> None:
    request = replace(samples.cold().requests[0], model=name)
    line = live.line(ended(request), 80, colour=False)
    assert line.cell_len <= 80
    assert "\x1b" not in line.plain
    assert "\u202e" not in line.plain


def test_a_failed_request_says_how_it_ended() -> None:
    request = replace(samples.cold().requests[0], first_token_ns=None, outcome="cancelled")
    assert " cancelled " in live.line(ended(request), 80, colour=False).plain


def test_totals_are_exact_and_stay_small() -> None:
    totals = live.Totals()
    request = samples.warm().requests[0]
    for number in range(3_000):
        token_ns = request.start_ns + (number + 1) * 1_000_000
        totals.add(ended(replace(request, model=f"m{number % 70}", first_token_ns=token_ns)))
    assert totals.requests == 3_000
    assert len(totals.models) == 51
    assert sum(own.requests for own in totals.models.values()) == 3_000
    assert totals.models["other"].requests == sum(1 for n in range(3_000) if n % 70 >= 50)
    assert all(len(own.ttfts_ns) <= 1_000 for own in totals.models.values())
    out = io.StringIO()
    Console(file=out, width=80).print(totals.table(80, everything=True))
    assert all(len(line) <= 80 for line in out.getvalue().splitlines())


def test_models_in_one_long_folder_are_told_apart() -> None:
    totals = live.Totals()
    for name in ("a.gguf", "b.gguf"):
        totals.add(ended(replace(samples.cold().requests[0], model=f"/srv/{'deep/' * 30}{name}")))
    assert [own.requests for own in totals.models.values()] == [1, 1]
    assert [name[-6:] for name in totals.models] == ["a.gguf", "b.gguf"]


def test_the_sentence_counts_what_failed() -> None:
    totals = live.Totals()
    request = samples.cold().requests[0]
    totals.add(ended(request))
    totals.add(ended(replace(request, outcome="error", first_token_ns=None, switched=False)))
    start = replace(request, id="start 1", endpoint="", first_token_ns=None)
    totals.add(ended(start))
    assert totals.sentence() == "2 requests, 1 switch, 1 start, 1 error"


# -- Prometheus -----------------------------------------------------------------------------------


def samples_of(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    page = generate_latest(metrics.registry).decode()
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(page)
        for s in family.samples
    }


def test_the_page_has_the_numbers_of_the_requests() -> None:
    metrics = Metrics()
    requests = [r for report in (samples.cold(), samples.warm()) for r in report.requests]
    for request in requests:
        metrics.add(request)
    found = samples_of(metrics)
    ttft = sum(v for (name, _), v in found.items() if name == "ttftprof_ttft_seconds_sum")
    assert ttft == pytest.approx(sum(r.ttft_ns or 0 for r in requests) / 1e9)
    for phase in PHASES:
        seconds = sum(
            v for (name, labels), v in found.items()
            if name == "ttftprof_phase_seconds_sum" and ("phase", phase) in labels
        )  # fmt: skip
        assert seconds == pytest.approx(sum(r.phase_totals().get(phase, 0) for r in requests) / 1e9)
    count = sum(v for (name, _), v in found.items() if name == "ttftprof_requests_total")
    assert count == len(requests)


def test_models_beyond_the_limit_share_a_series() -> None:
    metrics = Metrics(models=3)
    request = samples.warm().requests[0]
    for number in range(40):
        metrics.add(replace(request, model=f"m{number}"))
    models = {dict(labels).get("model") for _, labels in samples_of(metrics)} - {None}
    assert models == {"m0", "m1", "m2", "other"}


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("/home/eve/secret/m.gguf", "m.gguf"),
        ("models/m.gguf", "m.gguf"),
        ("../m", "m"),
        ("~/models/m", "m"),
        ("C:\\Users\\eve\\m.gguf", "m.gguf"),
        ("/home/eve/", "other"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("qwen2.5:7b", "qwen2.5:7b"),
        (f"/srv/{'secret/' * 30}m.gguf", "m.gguf"),
        (f"/srv/{'x' * 78}/b", "b"),
        (" ", "other"),
    ],
)
def test_a_model_that_is_named_by_its_path_goes_by_its_last_part(model: str, shown: str) -> None:
    metrics = Metrics()
    metrics.add(replace(samples.cold().requests[0], model=model))
    assert {dict(labels).get("model") for _, labels in samples_of(metrics)} - {None} == {shown}


def test_no_content_and_no_path_is_served() -> None:
    metrics = Metrics()
    metrics.add(replace(samples.cold().requests[0], model='a"b\n{c}\\' + "x" * 500))
    page = generate_latest(metrics.registry).decode()
    assert list(text_string_to_metric_families(page))
    assert ".gguf" not in page.replace("model", "")
    longest = max(len(v) for _, labels in samples_of(metrics) for _, v in labels)
    assert longest <= 80


def test_it_is_served_until_it_is_stopped_and_an_address_in_use_is_told() -> None:
    metrics = Metrics()
    metrics.add(samples.warm().requests[0])
    port, stop = metrics.serve("127.0.0.1", 0)
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    assert "ttftprof_ttft_seconds_bucket" in page
    with pytest.raises(OutputError, match="no metrics can be served"):
        Metrics().serve("127.0.0.1", port)
    stop()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")
