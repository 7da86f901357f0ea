"""Exports for trace viewers, read again by somebody else's reader."""

from __future__ import annotations

import io
import json
import re
from collections import defaultdict
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from ttftprof import python_frames
from ttftprof.analysis import conclude
from ttftprof.events import Wait
from ttftprof.model import Report
from ttftprof.reports import (
    chrome,
    facts,
    folded,
    html,
    html_data,
    markdown,
    otlp_json,
    perfetto,
    python,
    slices,
    speedscope,
    words,
)
from ttftprof.timeline import Timeline
from unit import report_samples as samples
from unit.recordings import (
    B_GGUF,
    DEV,
    MIB,
    MS,
    NEW,
    PythonSpans,
    Scene,
    gpu_switch,
    ms,
    python_segment,
    router_switch,
)
from unit.synthetic import busy_timeline

# What speedscope's importer asks of an evented profile, as a schema of our own.
_FRAME = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
_EVENT = {
    "type": "object",
    "required": ["type", "frame", "at"],
    "properties": {
        "type": {"enum": ["O", "C"]},
        "frame": {"type": "integer", "minimum": 0},
        "at": {"type": "number"},
    },
}
_PROFILE = {
    "type": "object",
    "required": ["type", "name", "unit", "startValue", "endValue", "events"],
    "properties": {
        "type": {"const": "evented"},
        "name": {"type": "string"},
        "unit": {"enum": ["nanoseconds", "microseconds", "milliseconds", "seconds"]},
        "startValue": {"type": "number"},
        "endValue": {"type": "number"},
        "events": {"type": "array", "items": _EVENT},
    },
}
SPEEDSCOPE = {
    "type": "object",
    "required": ["$schema", "shared", "profiles"],
    "properties": {
        "$schema": {"const": "https://www.speedscope.app/file-format-schema.json"},
        "shared": {
            "type": "object",
            "required": ["frames"],
            "properties": {"frames": {"type": "array", "items": _FRAME}},
        },
        "profiles": {"type": "array", "items": _PROFILE},
    },
}


def nothing() -> Timeline:
    return Scene().timeline()


def switch() -> tuple[Report, Timeline]:
    timeline = router_switch().timeline()
    return conclude(timeline, Path("switch.ttft")), timeline


def busy() -> tuple[Report, Timeline]:
    timeline = busy_timeline(threads=3, waits=200)
    return conclude(timeline, Path("busy.ttft")), timeline


DRIVER_TRACK = f"driver calls of thread {NEW}"
PYTHON_TRACK = f"Python of thread {NEW}, 20 looks a second"
_LOOKS: PythonSpans = [
    (NEW, 170, 220, [("server.py", "main", 1), ("torch/a.py", "load", 3)]),
    (NEW, 220, 270, [("server.py", "main", 2), ("torch/a.py", "load", 3), ("torch/b.py", "f", 4)]),
    (NEW, 270, 300, [("server.py", "main", 2), ("torch/b.py", "f", 4)]),
    (NEW, 400, 450, [("server.py", "main", 9)]),
]
# (frame, from, to, depth)
PYTHON_FRAMES = [
    ("server.py:main", 170, 300, 0),
    ("torch/a.py:load", 170, 270, 1),
    ("torch/b.py:f", 220, 270, 2),
    ("torch/b.py:f", 270, 300, 1),
    ("server.py:main", 400, 450, 0),
]


def seen_inside() -> tuple[Report, Timeline]:
    """With calls into the driver and looks at Python stacks."""
    scene = gpu_switch().fact("python_stacks", *python_segment(NEW, _LOOKS))
    timeline = scene.timeline()
    return conclude(timeline, Path("inside.ttft")), timeline


def recordings() -> list[tuple[Report, Timeline]]:
    return [switch(), busy(), seen_inside()]


# -- Perfetto -------------------------------------------------------------------------------------


def decoded(report: Report, timeline: Timeline) -> Any:
    out = io.BytesIO()
    perfetto.write(report, timeline, out)
    trace = Trace()
    trace.ParseFromString(out.getvalue())
    return trace


def spans_of(trace: Any) -> dict[int, list[tuple[str, int, int, int]]]:
    """{track: (name, start, end, depth)}; fails unless begins and ends balance and nest."""
    open_slices: dict[int, list[tuple[str, int]]] = defaultdict(list)
    found: dict[int, list[tuple[str, int, int, int]]] = defaultdict(list)
    last: dict[int, int] = {}
    for packet in trace.packet:
        event = packet.track_event
        if not packet.HasField("track_event") or event.type == TrackEvent.TYPE_COUNTER:
            continue
        assert packet.timestamp >= last.get(event.track_uuid, 0)
        last[event.track_uuid] = packet.timestamp
        stack = open_slices[event.track_uuid]
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            stack.append((event.name, packet.timestamp))
        else:
            name, start_ns = stack.pop()
            found[event.track_uuid].append((name, start_ns, packet.timestamp, len(stack)))
    assert not any(open_slices.values())
    return found


@pytest.mark.parametrize("which", [0, 1, 2])
def test_perfetto_declares_its_clock_and_describes_tracks_first(which: int) -> None:
    trace = decoded(*recordings()[which])
    first = trace.packet[0]
    assert first.clock_snapshot.primary_trace_clock == 3  # BUILTIN_CLOCK_MONOTONIC
    described: set[int] = set()
    for packet in trace.packet[1:]:
        if packet.HasField("track_descriptor"):
            descriptor = packet.track_descriptor
            assert descriptor.uuid not in described
            assert not descriptor.parent_uuid or descriptor.parent_uuid in described
            described.add(descriptor.uuid)
        else:
            assert packet.timestamp_clock_id == 3
            assert packet.track_event.track_uuid in described


def test_perfetto_slices_balance_and_phases_nest_in_their_request() -> None:
    report, timeline = switch()
    trace = decoded(report, timeline)
    names = {p.track_descriptor.uuid: p.track_descriptor.name for p in trace.packet}
    spans = spans_of(trace)
    request = report.requests[0]
    (track,) = (n for n in spans if names[n].startswith("request 1"))
    told = {(name, start, end) for name, start, end, depth in spans[track] if depth == 1}
    assert told == {(p.phase, p.start_ns, p.end_ns) for p in request.phases}
    assert ("request 1", *words.span(request), 0) in spans[track]


def test_perfetto_has_every_wait_every_request_to_storage_and_the_counters() -> None:
    report, timeline = busy()
    trace = decoded(report, timeline)
    spans = [s for track in spans_of(trace).values() for s in track]
    assert sum(1 for s in spans if s[0] == "storage_wait") == 3 * 200
    assert sum(1 for s in spans if s[0] == "read") == 200
    report, timeline = switch()
    counted = [
        p for p in decoded(report, timeline).packet if p.track_event.type == TrackEvent.TYPE_COUNTER
    ]
    assert len(counted) == sum(len(s.ns) for _, s in slices.counters(report))


def test_perfetto_has_calls_into_the_driver_and_python_frames() -> None:
    report, timeline = seen_inside()
    trace = decoded(report, timeline)
    names = {p.track_descriptor.uuid: p.track_descriptor.name for p in trace.packet}
    told = {names[track]: spans for track, spans in spans_of(trace).items()}
    driver = {(name, ms(start), ms(end)) for name, start, end, _ in told[DRIVER_TRACK]}
    assert {("cuMemcpyHtoD", 300, 340), ("cuMemAlloc", 201, 203)} <= driver
    assert len(driver) == len(timeline.gpu.calls[NEW])
    copied = [
        note.int_value
        for packet in trace.packet
        if packet.track_event.name == "cuMemcpyHtoD"
        for note in packet.track_event.debug_annotations
        if note.name == "bytes"
    ]
    assert copied == [100 * MIB, 60 * MIB]
    frames = [(name, ms(start), ms(end), depth) for name, start, end, depth in told[PYTHON_TRACK]]
    assert sorted(frames, key=lambda f: (f[1], f[3])) == PYTHON_FRAMES


def test_python_frames_last_from_look_to_look_and_nest() -> None:
    report, timeline = seen_inside()
    (process,) = [p for p in report.tracks.processes if p.tgid == NEW]
    ((tid, rate_hz, frames),) = python_frames.threads(timeline, process)
    assert (tid, rate_hz) == (NEW, 20)
    assert [(n, ms(a), ms(b)) for a, b, n in frames] == [f[:3] for f in PYTHON_FRAMES]


@given(samples.any_report())
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_report_is_a_balanced_trace(report: Report) -> None:
    spans_of(decoded(report, nothing()))


# -- Chrome ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1, 2])
def test_chrome_slices_nest_and_keep_nanoseconds(which: int) -> None:
    report, timeline = recordings()[which]
    out = io.StringIO()
    chrome.write(report, timeline, out)
    events = json.loads(out.getvalue())["traceEvents"]
    by_track = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
            by_track[event["pid"], event["tid"]].append((begin, begin + length, event["name"]))
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(by_track) <= named
    for pieces in by_track.values():
        ends: list[int] = []
        for begin, end, _ in pieces:
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or end <= ends[-1]
            ends.append(end)
    told = {piece for pieces in by_track.values() for piece in pieces}
    for request in report.requests:
        assert {(p.start_ns, p.end_ns, p.phase) for p in request.phases} <= told


def test_chrome_times_are_exact_after_a_year_of_uptime() -> None:
    """As numbers of 64 bits they would be rounded to some nanoseconds."""
    late_ns = 366 * 86_400 * 10**9 + 123_456_789
    report = samples.cold()
    begun_ns = report.requests[0].start_ns
    phases = tuple(
        replace(p, start_ns=p.start_ns - begun_ns + late_ns, end_ns=p.end_ns - begun_ns + late_ns)
        for p in report.requests[0].phases
    )
    request = replace(report.requests[0], start_ns=late_ns, phases=phases, activities=())
    out = io.StringIO()
    chrome.write(replace(report, requests=(request,), series=()), nothing(), out)
    events = json.loads(out.getvalue(), parse_float=Decimal)["traceEvents"]
    told = {(e["name"], e["ts"] * 1000, e["dur"] * 1000) for e in events if e["ph"] == "X"}
    assert {(p.phase, p.start_ns, p.duration_ns) for p in phases} <= told


def test_chrome_of_hostile_names_is_json() -> None:
    for name in samples.HOSTILE_NAMES:
        out = io.StringIO()
        chrome.write(samples.hostile(name), nothing(), out)
        json.loads(out.getvalue())


_HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")


@pytest.mark.parametrize("name", samples.HOSTILE_NAMES, ids=range(len(samples.HOSTILE_NAMES)))
def test_names_of_lanes_parts_and_code_are_harmless_in_every_export(name: str) -> None:
    report, timeline = samples.hostile_inside(name), nothing()
    out = [io.StringIO() for _ in range(8)]
    chrome.write(report, timeline, out[0])
    speedscope.write(report, out[1])
    otlp_json.write(report, out[2])
    html.write([report], out[3])
    markdown.write(report, out[4])
    folded.write(report, timeline, out[5])
    python.write_folded(report, out[6])
    facts.write_csv(report, timeline, out[7])
    told = [file.getvalue() for file in out]
    told[:3] = [json.dumps(json.loads(text), ensure_ascii=False) for text in told[:3]]
    for packet in decoded(report, timeline).packet:
        notes = packet.track_event.debug_annotations
        told += [packet.track_descriptor.name, packet.track_event.name]
        told += [note.string_value for note in notes]
    for text in told:
        text.encode()
        assert not _HARMFUL.search(text)


# -- speedscope -----------------------------------------------------------------------------------


def scoped(report: Report) -> Any:
    out = io.StringIO()
    speedscope.write(report, out)
    return json.loads(out.getvalue())


@given(samples.any_report())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_speedscope_has_its_shape_and_is_balanced(report: Report) -> None:
    document = scoped(report)
    jsonschema.validate(document, SPEEDSCOPE)
    for profile in document["profiles"]:
        stack: list[int] = []
        at = profile["startValue"]
        for event in profile["events"]:
            assert at <= event["at"] <= profile["endValue"]
            at = event["at"]
            if event["type"] == "O":
                stack.append(event["frame"])
            else:
                assert stack.pop() == event["frame"]
        assert stack == []


def test_speedscope_has_the_reports_times() -> None:
    report = samples.cold()
    document = scoped(report)
    (profile,) = document["profiles"]
    frames = [frame["name"] for frame in document["shared"]["frames"]]
    took: dict[str, int] = defaultdict(int)
    began: list[int] = []
    for event in profile["events"]:
        if event["type"] == "O":
            began.append(event["at"])
        else:
            took[frames[event["frame"]]] += event["at"] - began.pop()
    request = report.requests[0]
    assert took == request.phase_totals() | request.activity_totals()


# -- folded ---------------------------------------------------------------------------------------


def folds(report: Report, timeline: Timeline) -> list[tuple[list[str], int]]:
    out = io.StringIO()
    folded.write(report, timeline, out)
    lines = [line.rsplit(" ", 1) for line in out.getvalue().splitlines()]
    return [(stack.split(";"), int(ns)) for stack, ns in lines]


def test_folded_lines_add_up_to_the_wait() -> None:
    for report, timeline in (switch(), (samples.cold(), nothing())):
        by_request: dict[str, int] = defaultdict(int)
        for stack, ns in folds(report, timeline):
            by_request[stack[0]] += ns
        waits = [words.waited_ns(s) for s in html_data.subjects(report)]
        assert list(by_request.values()) == waits


def test_folded_names_the_file_that_was_waited_for() -> None:
    load = next(p for p in router_switch().only_request().phases if p.phase == "load")
    begin = ms(load.start_ns)
    scene = router_switch().wait(NEW, begin, begin + 10, Wait.STORAGE, ino=B_GGUF)
    timeline = scene.timeline()
    lines = folds(conclude(timeline, Path("x")), timeline)
    told = [(stack[1], stack[3], ns) for stack, ns in lines if len(stack) == 4]
    assert told == [("load", timeline.files[DEV, B_GGUF].path, 10 * MS)]


def test_a_folded_frame_holds_no_separator() -> None:
    for name in (*samples.HOSTILE_NAMES, "a;b 5"):
        for stack, _ in folds(samples.hostile(name), nothing()):
            assert len(stack) == 3


@given(st.lists(st.integers(1, 1 << 62), min_size=1, max_size=9), st.data())
def test_runs_of_slices_are_the_packets_of_their_edges(
    stamps: list[int], data: st.DataObject
) -> None:
    """However many bytes a stamp needs beside others."""
    edges = np.array(sorted(stamps + [stamp + 1 for stamp in stamps]), np.int64)
    named: list[slices.Named] = [("cpu", {}), ("read", {"bytes": 1 << 40, "file": "/a"})]
    what = data.draw(st.lists(st.integers(0, 1), min_size=len(stamps), max_size=len(stamps)))
    run = slices.Run(edges[::2], edges[1::2], np.array(what), named)
    out = io.BytesIO()
    trace = perfetto._Trace(out)
    trace.run(7, run)
    for ns, piece in slices.edges(run):
        trace.edge(7, ns, (piece.name, piece.facts) if piece else None)
    trace.flush()
    packets = list(Trace.FromString(out.getvalue()).packet)
    assert packets[: len(edges)] == packets[len(edges) :]
