"""`ttftprof.report/1`: everything a report says, for programs. The schema lies beside this file.

Guarantees: one recording is one object on one line; times are CLOCK_MONOTONIC nanoseconds and stay
integers; what is not known is null, never 0; no NaN or infinity appears (they become null); the
output is pure ASCII, so no name in it can steer a terminal. Where a request has its first token,
the sums of `totals.phase` and `totals.activity` equal `ttft_ns` exactly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from numbers import Integral, Real
from typing import IO, Any, TextIO

from ttftprof.model import Activity, Overhead, Report, Request, Series

SCHEMA_NAME = "ttftprof.report/1"


def write(report: Report, out: TextIO) -> None:
    """Writes the report as one line; lines of several reports together are JSON Lines."""
    write_one_by_one(report, report.requests, lambda: report.series, out)


def write_one_by_one(
    rest: Report, requests: Iterable[Request], series: Callable[[], Sequence[Series]], out: IO[str]
) -> None:
    """The same of a report whose requests come one by one and are not kept; then its series."""
    begin = "{"
    for name, value in _parts(rest, (_request(request) for request in requests), series):
        out.write(f"{begin}{json.dumps(name)}:")
        if isinstance(value, Iterator):
            _write_list(value, out)
        else:
            out.write(_dumped(clean(value)))
        begin = ","
    out.write("}\n")


def _write_list(values: Iterator[Any], out: IO[str]) -> None:
    begin = "["
    for value in values:
        out.write(begin + _dumped(clean(value)))
        begin = ","
    out.write("]" if begin == "," else "[]")


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) that every output of `write` satisfies."""
    return load_schema("report")


def write_line(document: Mapping[str, Any], out: TextIO) -> None:
    """A document of ours on one line of pure ASCII; a NaN in it is a defect, not an output."""
    out.write(_dumped(document) + "\n")


def _dumped(document: Any) -> str:
    return json.dumps(document, allow_nan=False, separators=(",", ":"))


def load_schema(name: str) -> dict[str, Any]:
    """The JSON Schema that is shipped as `NAME.schema.json`."""
    shipped = resources.files("ttftprof.reports").joinpath(f"{name}.schema.json")
    loaded: dict[str, Any] = json.loads(shipped.read_text("utf-8"))
    return loaded


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain dicts, lists, strings, numbers and None, in the schema's order."""
    requests = [_request(request) for request in report.requests]
    document: dict[str, Any] = clean(dict(_parts(report, requests, lambda: report.series)))
    return document


def _parts(
    report: Report, requests: Iterable[dict[str, Any]], series: Callable[[], Sequence[Series]]
) -> Iterator[tuple[str, Any]]:
    yield "schema", SCHEMA_NAME
    yield "tool", report.tool
    yield "host", report.host
    yield "recording", _recording(report)
    yield "sources", [asdict(source) for source in report.sources]
    yield "lost", report.lost
    yield "overhead", _overhead(report.overhead)
    yield "requests", requests
    yield "starts", [_request(start) for start in report.starts]
    yield "series", [asdict(one) for one in series()]
    yield "notes", report.notes


def request_as_json(request: Request) -> dict[str, Any]:
    """One request as it stands in `requests` of a report."""
    document: dict[str, Any] = clean(_request(request))
    return document


def _recording(report: Report) -> dict[str, Any]:
    return {
        "path": report.path,
        "start_ns": report.start_ns,
        "end_ns": report.end_ns,
        "complete": report.complete,
        "ended_because": report.ended_because,
        "realtime_offset_ns": report.realtime_offset_ns,
    }


def _overhead(overhead: Overhead) -> dict[str, Any]:
    return {
        "cpu_ns": overhead.cpu_ns,
        "max_rss_bytes": overhead.max_rss_bytes,
        "probes": [asdict(probe) for probe in overhead.probes],
        "reliefs": [asdict(relief) for relief in overhead.reliefs],
    }


def _request(request: Request) -> dict[str, Any]:
    return {
        "id": request.id,
        "engine": request.engine,
        "model": request.model,
        "endpoint": request.endpoint,
        "streamed": request.streamed,
        "outcome": request.outcome,
        "start_ns": request.start_ns,
        "first_token_ns": request.first_token_ns,
        "end_ns": request.end_ns,
        "ttft_ns": request.ttft_ns,
        "switched": request.switched,
        "residency_before": request.residency_before,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "phases": [asdict(phase) for phase in request.phases],
        "activities": [_activity(activity) for activity in request.activities],
        "totals": {
            "phase": request.phase_totals(),
            "activity": request.activity_totals(),
            "phase_activity": request.phase_activity(),
        },
        "files": [asdict(file) for file in request.files],
        "mounts": [asdict(mount) for mount in request.mounts],
        "gpu": [asdict(gpu) for gpu in request.gpu],
        "verdict": asdict(request.verdict),
        "notes": request.notes,
        "memory": asdict(request.memory) if request.memory else None,
        "python": [asdict(time) for time in request.python],
    }


def _activity(activity: Activity) -> dict[str, Any]:
    """As `asdict`, which is too slow where there are tens of thousands."""
    return {
        "activity": activity.activity,
        "start_ns": activity.start_ns,
        "end_ns": activity.end_ns,
    }


def clean(value: Any) -> Any:
    """The value in types JSON has; numpy's numbers become Python's, lone surrogates are escaped."""
    if value is None or type(value) in (int, bool):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, Mapping):
        return {clean(str(key)): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    return clean(str(value))
