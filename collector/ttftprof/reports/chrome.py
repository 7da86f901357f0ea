"""Chrome trace JSON ("Trace Event Format", the JSON object form): Perfetto UI, Speedscope and
chrome://tracing read it. Times are microseconds of CLOCK_MONOTONIC; their decimals are the ns,
exact however long the machine has been up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TextIO

from ttftprof.model import Report
from ttftprof.reports import slices
from ttftprof.timeline import Timeline

# Tracks without a process of their own get one that no real pid has.
_REQUESTS, _STORAGE, _COUNTERS = 1 << 30, (1 << 30) + 1, (1 << 30) + 2


def write(report: Report, timeline: Timeline, out: TextIO) -> None:
    out.write('{"displayTimeUnit":"ms","otherData":{"clock":"CLOCK_MONOTONIC"},"traceEvents":[')
    separator = "\n"
    for line in _lines(report, timeline):
        out.write(separator + line)
        separator = ",\n"
    out.write("\n]}\n")


def _microseconds(ns: int) -> str:
    """Digit by digit: a float has too few of them after 104 days of uptime."""
    return f"{ns // 1000}.{ns % 1000:03d}"


_encode = json.JSONEncoder(separators=(",", ":")).encode


def _lines(report: Report, timeline: Timeline) -> Iterator[str]:
    """An event each, or several with what is between them."""
    yield _named("process_name", _REQUESTS, 0, "requests")
    for track in slices.tracks(report, timeline):
        pid = track.tgid or (_STORAGE if track.kind == "io" else _REQUESTS)
        if track.kind == "group" and "storage" in track.name:
            yield _named("process_name", _STORAGE, 0, track.name)
        if track.kind == "process":
            yield _named("process_name", pid, 0, track.name)
        yield _named("thread_name", pid, track.number, track.name)
        if isinstance(track.slices, slices.Runs):
            for run in track.slices.make():
                if len(run.what):
                    yield _run(run, pid, track.number)
        else:
            yield from (_slice(piece, pid, track.number) for piece in track.slices)
    for name, series in slices.counters(report):
        for ns, value in zip(series.ns, series.values, strict=True):
            args = {series.unit or "value": value}
            rest = _encode({"ph": "C", "pid": _COUNTERS, "name": name, "args": args})
            yield f'{{"ts":{_microseconds(ns)},{rest[1:]}'


def _named(what: str, pid: int, tid: int, name: str) -> str:
    return _encode({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}})


def _slice(piece: slices.Slice, pid: int, tid: int) -> str:
    start, took = _microseconds(piece.start_ns), _microseconds(piece.end_ns - piece.start_ns)
    return f'{{"ts":{start},"dur":{took},{_what((piece.name, piece.facts), pid, tid)}'


def _run(run: slices.Run, pid: int, tid: int) -> str:
    rests = [_what(named, pid, tid) for named in run.named]
    columns = [
        part.tolist()
        for ns in (run.start_ns, run.end_ns - run.start_ns)
        for part in divmod(ns, 1000)
    ]
    return ",\n".join(
        f'{{"ts":{start}.{start_ns:03d},"dur":{took}.{took_ns:03d},{rests[what]}'
        for start, start_ns, took, took_ns, what in zip(*columns, run.what.tolist(), strict=True)
    )


def _what(named: slices.Named, pid: int, tid: int) -> str:
    """All of a slice's event but its times."""
    name, facts = named
    rest = {"ph": "X", "pid": pid, "tid": tid, "name": name, "args": dict(facts)}
    return _encode(rest)[1:]
