"""What a run's recording says of it, as plain numbers for the statistics. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ttftprof import __version__
from ttftprof.analysis import analyse
from ttftprof.model import FileUse, Report, Request, first_weights, weights_bytes
from ttftprof.reports.words import warnings

_NEAR_NS = 250_000_000  # a request may have lain in the backlog: its start is not the client's


def digest(path: Path, sent_ns: Sequence[int], began_ns: int | None = None) -> dict[str, Any]:
    """The run's phases and counters. `sent_ns`: when the client began to send each request of the
    run; `began_ns`: when the restart that it measures began. Raises `RecordingError`."""
    report = analyse(path, drawn=False)
    found = [_nearest(report, ns) for ns in sent_ns]
    requests = [request for request in found if request is not None]
    answered = sorted((r for r in requests if r.ttft_ns is not None), key=lambda r: r.ttft_ns or 0)
    result: dict[str, Any] = {
        "version": __version__,
        "warnings": warnings(report),
        "lost": dict(report.lost),
        "requests": len(requests),
        "overhead_cpu_ns": report.overhead.cpu_ns,
    }
    if not answered:
        return result
    middle = answered[(len(answered) - 1) // 2]  # of several streams, the median one
    phases = middle.phase_totals()
    start = _start(report, began_ns, middle)
    if began_ns is not None:
        phases = _since_restart(start, middle, began_ns)
    files = [*middle.files, *(start.files if start is not None else ())]
    weights = first_weights(files)
    begin_ns = began_ns if began_ns is not None else middle.start_ns
    end_ns = middle.first_token_ns or middle.start_ns
    return result | {
        "engine": middle.engine,
        "ttft_ns": middle.ttft_ns,
        "first_token_ns": middle.first_token_ns,
        "switched": start is not None or middle.switched,
        "residency_before": weights.residency_before if weights else middle.residency_before,
        "prompt_tokens": middle.prompt_tokens,
        "cached_tokens": middle.cached_tokens,
        "phases": phases,
        "activities": middle.activity_totals(),
        "phase_activity": middle.phase_activity(),
        "storage_bytes": _from_storage(report, files, began_ns, end_ns),
        "storage_rate": _storage_rate(files),
        "weights_bytes": weights_bytes(files),
        "major_faults": _grown(report, "major_faults", begin_ns, end_ns),
        "minor_faults": _grown(report, "minor_faults", begin_ns, end_ns),
        "cause": middle.verdict.cause,
        "notes": list(middle.notes),
    }


def _from_storage(
    report: Report, files: Sequence[FileUse], began_ns: int | None, end_ns: int
) -> int:
    """By the files of what was waited for; since a restart, at least what all files together took:
    a front may read of a model before anybody asks for it."""
    by_files = sum(f.bytes_from_storage or 0 for f in files)
    if began_ns is None:
        return by_files
    return max(by_files, _grown(report, "storage_bytes", began_ns, end_ns) or 0)


def _storage_rate(files: Sequence[FileUse]) -> float | None:
    """Bytes per second of the weights; shards are read one after another."""
    read = [(f.bytes_from_storage or 0, f.bytes_per_second) for f in files if f.is_weights]
    known = [(size, rate) for size, rate in read if size and rate]
    seconds = sum(size / rate for size, rate in known)
    return sum(size for size, _ in known) / seconds if seconds else None


def weights_of(path: Path) -> dict[str, list[str]]:
    """{model: paths of its weights} as the loads in a recording show them."""
    found: dict[str, list[str]] = {}
    for request in analyse(path, drawn=False).requests:
        paths = [f.path for f in request.files if f.is_weights]
        if request.model and paths:
            found.setdefault(request.model, paths)
    return found


def _nearest(report: Report, sent_ns: int) -> Request | None:
    near = [r for r in report.requests if abs(r.start_ns - sent_ns) <= _NEAR_NS]
    return min(near, key=lambda r: abs(r.start_ns - sent_ns), default=None)


def _start(report: Report, began_ns: int | None, request: Request) -> Request | None:
    """The start of the server that the request had to wait for."""
    if began_ns is None:
        return None
    after = [s for s in report.starts if (s.end_ns or 0) > began_ns]
    return min(after, key=lambda s: abs((s.end_ns or 0) - request.start_ns), default=None)


def _since_restart(start: Request | None, request: Request, began_ns: int) -> dict[str, int]:
    """Phases from the restart's begin to the first token: the start's up to the request, then the
    request's own. What is left is the launch of a front that loads only when it is asked, where no
    other start was seen; else it is unexplained."""
    totals: dict[str, int] = {}
    for phase in start.phases if start is not None else ():
        length = min(phase.end_ns, request.start_ns) - max(phase.start_ns, began_ns)
        if length > 0:
            totals[phase.phase] = totals.get(phase.phase, 0) + length
    for name, ns in request.phase_totals().items():
        totals[name] = totals.get(name, 0) + ns
    whole = (request.first_token_ns or request.start_ns) - began_ns
    rest = whole - sum(totals.values())
    if rest > 0:
        name = "launch" if start is None else "unexplained"
        totals[name] = totals.get(name, 0) + rest
    return totals


def _grown(report: Report, name: str, begin_ns: int, end_ns: int) -> int | None:
    """By how much a running total grew in [begin, end]."""
    series = next((s for s in report.series if s.name == name), None)
    if series is None:
        return None
    before = [v for ns, v in zip(series.ns, series.values, strict=True) if ns <= begin_ns]
    until = [v for ns, v in zip(series.ns, series.values, strict=True) if ns <= end_ns]
    return int((until[-1] if until else 0) - (before[-1] if before else 0))
