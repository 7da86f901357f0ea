"""`report --format json`: the schema, exact sums, nothing that JSON or a terminal trips over."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings

from ttftprof.cli.report import command
from ttftprof.model import Evidence, Report, Series
from ttftprof.reports.json import as_json, schema, write
from unit import report_samples as samples

SAMPLES = [
    samples.cold(),
    samples.reswitch(),
    samples.warm(),
    samples.empty(),
    samples.incomplete(),
    samples.instant(),
    samples.many(20),
    samples.hostile(samples.HOSTILE_NAMES[0]),
]
CHECK = jsonschema.Draft202012Validator(schema())


def written(report: Report) -> dict[str, Any]:
    """The report written, checked for what every reader needs, and read back."""
    out = io.StringIO()
    write(report, out)
    line = out.getvalue()
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert line.isascii()

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    document: dict[str, Any] = json.loads(line, parse_constant=refuse)
    document_errors = [error.message for error in CHECK.iter_errors(document)]
    assert document_errors == []
    return document


def test_the_schema_is_printed_on_demand() -> None:
    shown = CliRunner().invoke(command, ["--schema"])
    assert shown.exit_code == 0
    assert json.loads(shown.output) == schema()


def test_the_schema_is_itself_valid_and_strict() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    document = as_json(samples.cold())
    document["requests"][0]["files"][0]["extra"] = 1
    assert not CHECK.is_valid(document)


def _objects(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        if "properties" in part and part.get("additionalProperties") is False:
            yield part
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            yield from _objects(inner)


def test_every_field_that_is_described_is_always_there() -> None:
    """So a reader may rely on it: what is not known is null, not left out."""
    found = list(_objects(schema()))
    assert len(found) > 20
    for described in found:
        assert set(described["required"]) == set(described["properties"])


@pytest.mark.parametrize("report", SAMPLES, ids=lambda report: str(report.path)[:20])
def test_samples_satisfy_the_schema(report: Report) -> None:
    assert written(report)["schema"] == "ttftprof.report/1"


@pytest.mark.parametrize("report", SAMPLES, ids=lambda report: str(report.path)[:20])
def test_sums_equal_the_ttft(report: Report) -> None:
    for request in written(report)["requests"]:
        totals, ttft_ns = request["totals"], request["ttft_ns"]
        phases = sum(totals["phase"].values())
        assert phases == sum(totals["activity"].values())
        assert phases == sum(sum(row.values()) for row in totals["phase_activity"].values())
        assert ttft_ns is None or phases == ttft_ns


def test_times_stay_exact_integers() -> None:
    document = written(samples.cold())
    request = document["requests"][0]
    assert request["ttft_ns"] == 1_562_314_159
    assert type(request["start_ns"]) is int
    assert document["recording"]["realtime_offset_ns"] == 1_764_000_000_000_000_000


def test_absent_is_null_and_never_zero() -> None:
    request = written(samples.incomplete())["requests"][0]
    for name in ("first_token_ns", "ttft_ns", "end_ns", "residency_before", "model"):
        assert request[name] is None
    library = request["files"][0]
    assert library["bytes_per_second"] is library["request_size_bytes"] is None
    assert library["bytes_from_storage"] == 0


def test_foreign_numbers_become_json_numbers() -> None:
    """Numpy's scalars and what JSON has no number for, as an analysis may let them through."""
    foreign: Any = (np.int64(7), float("nan"), np.float32(2))
    report = samples.cold()
    request = replace(report.requests[0], prompt_tokens=foreign[0])
    evidence = Evidence("a", "b", float("inf"))
    phase = replace(request.phases[0], evidence=(evidence,))
    request = replace(request, phases=(phase, *request.phases[1:]))
    series = Series("storage_bytes", "bytes", None, (1, 2, 3), foreign)
    document = written(replace(report, requests=(request,), series=(series,)))
    assert document["requests"][0]["phases"][0]["evidence"][0]["value"] is None
    assert document["requests"][0]["prompt_tokens"] == 7
    assert document["series"][0]["values"] == [7, None, 2.0]


@given(samples.any_report())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_report_satisfies_the_schema(report: Report) -> None:
    written(report)
