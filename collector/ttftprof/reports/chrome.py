"""Chrome trace JSON ("Trace Event Format", the JSON object form): Perfetto UI, Speedscope and
chrome://tracing read it. Times are microseconds of CLOCK_MONOTONIC with ns as decimals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

from ttftprof.model import Report
from ttftprof.reports import slices
from ttftprof.timeline import Timeline

# Tracks without a process of their own get one that no real pid has.
_REQUESTS, _STORAGE, _COUNTERS = 1 << 30, (1 << 30) + 1, (1 << 30) + 2


def write(report: Report, timeline: Timeline, out: TextIO) -> None:
    out.write('{"displayTimeUnit":"ms","otherData":{"clock":"CLOCK_MONOTONIC"},"traceEvents":[')
    encode = json.JSONEncoder(separators=(",", ":")).encode
    for number, event in enumerate(_events(report, timeline)):
        out.write(",\n" if number else "\n")
        out.write(encode(event))
    out.write("\n]}\n")


def _events(report: Report, timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield _named("process_name", _REQUESTS, 0, "requests")
    for track in slices.tracks(report, timeline):
        pid = track.tgid or (_STORAGE if track.kind == "io" else _REQUESTS)
        if track.kind == "group" and "storage" in track.name:
            yield _named("process_name", _STORAGE, 0, track.name)
        if track.kind == "process":
            yield _named("process_name", pid, 0, track.name)
        yield _named("thread_name", pid, track.number, track.name)
        yield from (_slice(piece, pid, track.number) for piece in track.slices)
    for name, series in slices.counters(report):
        for ns, value in zip(series.ns, series.values, strict=True):
            yield {
                "ph": "C",
                "ts": ns / 1000,
                "pid": _COUNTERS,
                "name": name,
                "args": {series.unit or "value": value},
            }


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(piece: slices.Slice, pid: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "ts": piece.start_ns / 1000,
        "dur": (piece.end_ns - piece.start_ns) / 1000,
        "pid": pid,
        "tid": tid,
        "name": piece.name,
        "args": dict(piece.facts),
    }
