"""Chrome trace JSON ("Trace Event Format", the JSON object form): Perfetto UI, Speedscope and
chrome://tracing read it. Times are microseconds of CLOCK_MONOTONIC; their decimals are the ns,
exact however long the machine has been up.
"""

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
    for number, (times_ns, event) in enumerate(_events(report, timeline)):
        out.write(",\n{" if number else "\n{")
        out.writelines(f'"{name}":{_microseconds(ns)},' for name, ns in times_ns.items())
        out.write(encode(event)[1:])
    out.write("\n]}\n")


def _microseconds(ns: int) -> str:
    """Digit by digit: a float has too few of them after 104 days of uptime."""
    return f"{ns // 1000}.{ns % 1000:03d}"


_Event = tuple[dict[str, int], dict[str, Any]]
"""(times in ns, everything else)"""


def _events(report: Report, timeline: Timeline) -> Iterator[_Event]:
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
            args = {series.unit or "value": value}
            yield {"ts": ns}, {"ph": "C", "pid": _COUNTERS, "name": name, "args": args}


def _named(what: str, pid: int, tid: int, name: str) -> _Event:
    return {}, {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(piece: slices.Slice, pid: int, tid: int) -> _Event:
    times_ns = {"ts": piece.start_ns, "dur": piece.end_ns - piece.start_ns}
    args = dict(piece.facts)
    return times_ns, {"ph": "X", "pid": pid, "tid": tid, "name": piece.name, "args": args}
