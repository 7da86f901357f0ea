"""Spans sent to a collector: what it gets, and what is said when it does not take them."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from ttftprof.errors import OutputError, UsageError
from ttftprof.reports.otlp_endpoint import HEADERS_VARIABLE, send
from unit import report_samples as samples

KEY = "Bearer hunter2"
PARTIAL = b'{"partialSuccess":{"rejectedSpans":"3","errorMessage":"too old"}}'


@dataclass
class Collector:
    """Answers as told, and remembers what it got."""

    url: str = ""
    status: int = 200
    answer: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    got: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)


@contextmanager
def collecting(status: int = 200, answer: bytes = b"{}", **headers: str) -> Iterator[Collector]:
    told = Collector(status=status, answer=answer, headers=headers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            told.got.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            self.send_response(told.status)
            for name, value in told.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(told.answer)

        def log_message(self, *_: Any) -> None:
            """Tests say what they have to say themselves."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        told.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield told
        finally:
            server.shutdown()
            thread.join()


def decoded(body: bytes) -> ExportTraceServiceRequest:
    """By protobuf; in OTLP's JSON, identities are hexadecimal where protobuf's has base64."""

    def rewritten(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                k: base64.b64encode(bytes.fromhex(v)).decode()
                if k in ("traceId", "spanId", "parentSpanId")
                else rewritten(v)
                for k, v in value.items()
            }
        return [rewritten(v) for v in value] if isinstance(value, list) else value

    message = ExportTraceServiceRequest()
    json_format.ParseDict(rewritten(json.loads(body)), message)
    return message


def test_the_collector_gets_every_span() -> None:
    report = samples.cold()
    with collecting() as collector:
        number = send(report, collector.url)
    ((path, headers, body),) = collector.got
    assert path == "/v1/traces"
    assert headers["content-type"] == "application/json"
    spans = decoded(body).resource_spans[0].scope_spans[0].spans
    assert len(spans) == number == 1 + len(report.requests[0].phases)
    root = next(span for span in spans if not span.parent_span_id)
    assert root.end_time_unix_nano - root.start_time_unix_nano == report.requests[0].ttft_ns
    inner = [span for span in spans if span.parent_span_id == root.span_id]
    lengths = [span.end_time_unix_nano - span.start_time_unix_nano for span in inner]
    assert sum(lengths) == report.requests[0].ttft_ns


def test_a_path_of_its_own_is_kept_and_headers_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(HEADERS_VARIABLE, "authorization=Bearer%20hunter2,x-scope=a")
    with collecting() as collector:
        send(samples.cold(), f"{collector.url}/otlp/v1/traces")
    ((path, headers, _),) = collector.got
    assert path == "/otlp/v1/traces"
    assert headers["authorization"] == KEY
    assert headers["x-scope"] == "a"


@pytest.mark.parametrize(
    ("status", "answer", "said", "step"),
    [
        (500, b"out of \x1b[2Jmemory", r"answered 500 .*out of \\x1b", "sending again"),
        (401, b"", "answered 401", HEADERS_VARIABLE),
        (404, b"", "answered 404", "whole address"),
        (200, PARTIAL, "rejected 3 spans: too old", "log"),
    ],
)  # fmt: skip
def test_a_refusal_is_told(status: int, answer: bytes, said: str, step: str) -> None:
    with (
        collecting(status, answer) as collector,
        pytest.raises(OutputError, match=said) as told,
    ):
        send(samples.cold(), collector.url)
    assert step in told.value.next_step
    assert "\x1b" not in told.value.message


def test_a_key_does_not_follow_a_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEADERS_VARIABLE, "authorization=Bearer%20hunter2")
    with (
        collecting() as elsewhere,
        collecting(307, Location=elsewhere.url) as collector,
        pytest.raises(OutputError, match="answered 307") as told,
    ):
        send(samples.cold(), collector.url)
    assert not elsewhere.got
    assert "hunter2" not in told.value.message + told.value.next_step


def test_nobody_there_and_one_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(OutputError, match=r"cannot be reached.*timed out"):
            send(samples.cold(), url, timeout_s=0.2)
    with pytest.raises(OutputError, match=r"cannot be reached.*refused") as told:
        send(samples.cold(), url)
    assert "4318" in told.value.next_step


def test_a_host_name_that_cannot_be_one_cannot_be_reached() -> None:
    with pytest.raises(OutputError, match="cannot be reached"):
        send(samples.cold(), f"http://{'x' * 70}.example/")


@pytest.mark.parametrize(
    "url", ["localhost:4318", "ftp://h/", "http://", "http://u:secret@h/", "http://h:99999/", "http://[x/",
     "http://ä.example/", "http://h/ä"]
)  # fmt: skip
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as told:
        send(samples.cold(), url)
    assert "secret" not in told.value.message
    assert HEADERS_VARIABLE in told.value.next_step


def test_headers_that_are_none_are_refused_without_showing_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value in ("hunter2", "a=x%0d%0ahunter2: 1", "=hunter2", "k=%E2%82%AC", "x:y=1"):
        monkeypatch.setenv(HEADERS_VARIABLE, value)
        with pytest.raises(UsageError) as told:
            send(samples.cold(), "http://127.0.0.1:9")
        assert "hunter2" not in told.value.message + told.value.next_step
