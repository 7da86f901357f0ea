"""OpenTelemetry spans in OTLP's JSON encoding (one ExportTraceServiceRequest): a trace a request,
phases as its child spans. A collector's `otlpjsonfile` receiver and `POST /v1/traces` take it.

Times are wall time, as OTLP wants: CLOCK_MONOTONIC plus the recording's measured offset. Identities
are derived from the facts, so exporting twice gives the same spans. No content is in them.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, TextIO

from ttftprof.errors import UsageError
from ttftprof.model import Phase, Report, Request
from ttftprof.reports import html_data, words
from ttftprof.reports.safe import plain

_INTERNAL, _SERVER = 1, 2  # SpanKind
_ERROR = 2  # StatusCode


def write(report: Report, out: TextIO) -> int:
    """Returns how many spans it wrote."""
    if report.realtime_offset_ns is None:
        raise UsageError(
            f"{report.path} does not know the wall time, which OTLP needs",
            "export it with --to perfetto",
        )
    spans = [s for subject in html_data.subjects(report) for s in _spans(report, subject)]
    scope = {"name": "ttftprof", "version": plain(report.tool.get("version", ""), 40)}
    document = {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(_resource(report))},
                "scopeSpans": [{"scope": scope, "spans": spans}],
            }
        ]
    }
    json.dump(document, out, separators=(",", ":"))
    out.write("\n")
    return len(spans)


def _resource(report: Report) -> dict[str, Any]:
    return {
        "service.name": plain(words.engines(report), 80),
        "host.name": report.host.get("node"),
        "os.description": report.host.get("kernel"),
    }


def _spans(report: Report, subject: Request) -> list[dict[str, Any]]:
    start_ns, end_ns = words.span(subject)
    trace = _identity(16, report, subject, "trace")
    root = _identity(8, report, subject, "request")
    facts = {
        "gen_ai.request.model": subject.model,
        "gen_ai.usage.input_tokens": subject.prompt_tokens,
        "ttftprof.request.id": subject.id,
        "ttftprof.outcome": subject.outcome,
        "ttftprof.switched": subject.switched,
        "ttftprof.ttft_ns": subject.ttft_ns,
        "ttftprof.cause": words.cause(subject.verdict),
        **{f"ttftprof.activity.{k}_ns": v for k, v in subject.activity_totals().items()},
    }
    is_start = words.is_start(subject)
    name = "start of a server" if is_start else "time to first token"
    first = _span(report, trace, root, name, start_ns, end_ns, facts)
    first["kind"] = _INTERNAL if is_start else _SERVER
    if subject.outcome in ("error", "timeout"):
        first["status"] = {"code": _ERROR}
    return [first, *(_phase(report, subject, n, p) for n, p in enumerate(subject.phases))]


def _phase(report: Report, subject: Request, number: int, phase: Phase) -> dict[str, Any]:
    facts = {
        "ttftprof.basis": phase.basis,
        "ttftprof.evidence": "; ".join(html_data.evidence_text(e) for e in phase.evidence),
    }
    trace = _identity(16, report, subject, "trace")
    identity = _identity(8, report, subject, f"phase {number}")
    span = _span(report, trace, identity, phase.phase, phase.start_ns, phase.end_ns, facts)
    span["parentSpanId"] = _identity(8, report, subject, "request")
    return span


def _span(
    report: Report,
    trace: str,
    identity: str,
    name: str,
    start_ns: int,
    end_ns: int,
    facts: dict[str, Any],
) -> dict[str, Any]:
    offset_ns = report.realtime_offset_ns or 0
    return {
        "traceId": trace,
        "spanId": identity,
        "name": name,
        "kind": _INTERNAL,
        "startTimeUnixNano": str(start_ns + offset_ns),
        "endTimeUnixNano": str(end_ns + offset_ns),
        "attributes": _attributes(facts),
    }


def _identity(size_bytes: int, report: Report, subject: Request, part: str) -> str:
    told = (report.host.get("node"), report.realtime_offset_ns, subject.id, subject.start_ns, part)
    return hashlib.sha256(repr(told).encode()).hexdigest()[: 2 * size_bytes]


def _attributes(facts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": k, "value": _value(v)} for k, v in facts.items() if v is not None]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": plain(value)}
