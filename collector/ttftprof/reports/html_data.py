"""What the HTML page draws, as compact JSON: times from the recording's start, in ns.

Pure. Bounded: intervals and curves come condensed, so a page is as heavy as what it shows, not as
the recording. All text in it is harmless (`safe.plain`) and of bounded length.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ttftprof import condense, scale
from ttftprof.engines.python_code import CATEGORY_WORDS
from ttftprof.model import (
    ACTIVITIES,
    PHASES,
    Activities,
    Evidence,
    Part,
    Phase,
    ProcessTrack,
    Report,
    Request,
    Series,
    SizeTrack,
    Spans,
    Tracks,
)
from ttftprof.reports import words
from ttftprof.reports.safe import plain

_LABEL, _TEXT = 160, 400
_ACTIVITIES_OF_ONE, _ACTIVITIES_OF_ALL = 2_000, 40_000
_POINTS = 1_500
_NAMING = frozenset({"pid", "tid", "signal"})  # units of which a value is a name, no number
_ONE = {"calls": "call", "processes": "process", "files": "file", "ioctls": "ioctl"}

Json = dict[str, Any]


def embedded(document: Json) -> str:
    """As JSON that can stand inside a <script> element: nothing in it can end the element."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def document(reports: Sequence[Report], linked: bool = False) -> Json:
    """`linked`: the timelines are aligned where their chosen requests begin, and move together."""
    return {
        "linked": linked,
        "phases": PHASES,
        "activities": ACTIVITIES,
        "python": CATEGORY_WORDS,
        "recordings": [_recording(report) for report in reports],
    }


def subjects(report: Report) -> list[Request]:
    """What is drawn with phases: requests, then starts that no request waited for."""
    return [*report.requests, *report.starts]


def _recording(report: Report) -> Json:
    shown = subjects(report)
    origin = min([report.start_ns, *(s.start_ns for s in shown)])
    ends = [words.span(s)[1] for s in shown]
    limit = max(min(_ACTIVITIES_OF_ONE, _ACTIVITIES_OF_ALL // max(len(shown), 1)), 32)
    return {
        "name": plain(words.recording_name(report), _LABEL),
        "start_ns": origin,
        "length": max([report.end_ns, *ends]) - origin,
        "subjects": [_subject(subject, origin, limit) for subject in shown],
        "series": [_series(series, origin) for series in _drawn(report)],
        **_tracks(report.tracks, origin),
    }


def _subject(subject: Request, origin: int, limit: int) -> Json:
    start, end = words.span(subject)
    token = subject.first_token_ns
    return {
        "id": plain(subject.id, _LABEL),
        "title": title(subject),
        "model": plain(subject.model, _LABEL) if subject.model else None,
        "start": start - origin,
        "end": end - origin,
        "token": None if token is None else token - origin,
        "phases": [_phase(phase, origin) for phase in subject.phases],
        "activities": _activities(subject, origin, limit),
        "cause": plain(words.cause(subject.verdict), _LABEL),
    }


def title(subject: Request) -> str:
    """`request 2`, `start 1`."""
    identity = plain(subject.id, 40)
    return identity if identity.startswith("start ") else f"request {identity}"


def _phase(phase: Phase, origin: int) -> list[Any]:
    evidence = [evidence_text(e) for e in phase.evidence]
    inferred = int(phase.basis == "inferred")
    where = PHASES.index(phase.phase)
    parts = [_part(part, origin) for part in phase.parts]
    return [where, phase.start_ns - origin, phase.end_ns - origin, inferred, evidence, parts]


def _part(part: Part, origin: int) -> list[Any]:
    evidence = [evidence_text(e) for e in part.evidence]
    inferred = int(part.basis == "inferred")
    return [
        plain(part.part, _LABEL),
        part.start_ns - origin,
        part.end_ns - origin,
        part.spent_ns,
        inferred,
        evidence,
    ]


def evidence_text(evidence: Evidence) -> str:
    """`process: pid 31600 was executed`, with its value where the words do not hold it."""
    text = f"{evidence.source}: {evidence.what}"
    value = evidence.value
    if value is not None and str(value) not in evidence.what:
        text += f" ({_quantity(value, evidence.unit)})"
    return plain(text, _TEXT)


def _quantity(value: float | int | str, unit: str) -> str:
    written = {"ns": scale.duration, "bytes": scale.size}.get(unit)
    if written and type(value) is int:
        return written(value)
    if unit in _NAMING:
        return f"{unit} {value}"
    return f"{value} {_ONE.get(unit, unit) if value == 1 else unit}".strip()


def _activities(subject: Request, origin: int, limit: int) -> Json:
    found = Activities.of(subject.activities)
    pieces = condense.intervals(found.start_ns, found.end_ns, found.code.astype(np.int64), limit)
    return _packed(
        pieces.start_ns.tolist(),
        pieces.end_ns.tolist(),
        pieces.code.tolist(),
        pieces.busy_ns.tolist(),
        origin,
    )


def _packed(
    starts: Sequence[int],
    ends: Sequence[int],
    codes: Iterable[int],
    busy: Sequence[int],
    origin: int,
) -> Json:
    """`s`: each start after the one before; `d`: lengths; `c`: a digit of base 16 each; `b`: what
    of the length was busy, absent if all of it always was."""
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    packed = {
        "s": np.diff(np.array(starts, np.int64), prepend=origin).tolist(),
        "d": lengths,
        "c": "".join(f"{code:x}" for code in codes),
    }
    if list(busy) != lengths:
        packed["b"] = list(busy)
    return packed


def _spans(spans: Spans, names: Sequence[str], origin: int) -> Json:
    codes = [names.index(name) for name in spans.name]
    return {
        "label": plain(spans.label, _LABEL),
        **_packed(spans.start_ns, spans.end_ns, codes, spans.busy_ns, origin),
    }


# -- curves ---------------------------------------------------------------------------------------


def _drawn(report: Report) -> list[Series]:
    """The report's curves; throughput of each file and mount only where that says more."""
    own = [s for s in report.tracks.storage if s.ns]
    mounts = [s for s in own if s.name == "mount_bytes"]
    files = [s for s in own if s.name == "file_bytes"]
    curves = [s for s in report.series if s.ns]
    return [*curves, *(mounts if len(mounts) > 1 else []), *(files if len(files) > 1 else [])]


def _series(series: Series, origin: int) -> Json:
    ns, values = condense.points(
        np.array(series.ns, np.int64), np.nan_to_num(np.array(series.values, np.float64)), _POINTS
    )
    return {
        "name": plain(series.name, _LABEL),
        "unit": plain(series.unit, 20),
        "path": None if series.path is None else plain(series.path, _TEXT),
        "t": np.diff(ns, prepend=origin).tolist(),
        "v": [int(v) if v == int(v) else round(v, 3) for v in values.tolist()],
    }


# -- processes, sizes, log lines ------------------------------------------------------------------


def _tracks(tracks: Tracks, origin: int) -> Json:
    return {
        "processes": [_process(process, origin) for process in tracks.processes],
        "sizes": [_sizes(sizes, origin) for sizes in tracks.sizes],
        "ticks": [[tick.ns - origin, plain(tick.text, _TEXT)] for tick in tracks.ticks],
        "left_out": list(tracks.left_out),
    }


def _process(process: ProcessTrack, origin: int) -> Json:
    return {
        "label": plain(process.label, _LABEL),
        "argv": plain(" ".join(process.argv), _TEXT),
        "start": process.start_ns - origin,
        "end": process.end_ns - origin,
        "running": _series(process.running, origin),
        "threads": [_spans(thread, ACTIVITIES, origin) for thread in process.threads],
        "left_out": process.threads_left_out,
        "calls": _calls(process.calls, origin),
        "driver_calls": _calls(process.driver_calls, origin),
        "python": [_calls(thread, origin) for thread in process.python],
    }


def _calls(calls: Spans, origin: int) -> Json:
    names = list(dict.fromkeys(calls.name))
    return {"names": [plain(n, _LABEL) for n in names], **_spans(calls, names, origin)}


def _sizes(sizes: SizeTrack, origin: int) -> Json:
    return {
        "path": plain(sizes.path, _TEXT),
        "quantum": sizes.quantum_ns,
        "t": [ns - origin for ns in sizes.start_ns],
        "size": list(sizes.size_bytes),
        "count": list(sizes.count),
        "bytes": list(sizes.total_bytes),
    }
