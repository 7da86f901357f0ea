"""Many recordings as one flat table: a row a request, for medians here and queries elsewhere.

Recordings are concluded one at a time in processes of their own and only their rows are kept, so
memory does not grow with what was recorded. Rows come in the order in which the paths were given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ttftprof.errors import TtftprofError
from ttftprof.model import ACTIVITIES, PHASES, FileUse, Request

Row = tuple[Any, ...]
_AHEAD = 4  # recordings handed out per worker before the oldest is waited for


@dataclass(frozen=True, slots=True)
class Origin:
    """The recording a row is from."""

    path: str
    host: str | None
    kernel: str | None
    realtime_offset_ns: int | None
    complete: bool
    lost: int


@dataclass(frozen=True, slots=True)
class Column:
    """`kind`: text, integer, real, truth or time (UTC)."""

    name: str
    kind: str
    value: Callable[[Origin, Request], Any]


def _weights(request: Request) -> FileUse | None:
    """The biggest of the request's model files."""
    held = [file for file in request.files if file.is_weights]
    return max(held, key=lambda file: file.size_bytes, default=None)


def _began(origin: Origin, request: Request) -> datetime | None:
    if origin.realtime_offset_ns is None:
        return None
    at_us = (request.start_ns + origin.realtime_offset_ns) // 1000
    return datetime.fromtimestamp(at_us // 1_000_000, UTC).replace(microsecond=at_us % 1_000_000)


def _of_weights(name: str, kind: str, field: str) -> Column:
    def value(_: Origin, request: Request) -> Any:
        file = _weights(request)
        return None if file is None else getattr(file, field)

    return Column(name, kind, value)


def _total(request: Request, field: str) -> int | None:
    """Over all files of a request; None as soon as one is not known."""
    values = [getattr(file, field) for file in request.files]
    return None if None in values else sum(values)


def _phase_ns(name: str) -> Column:
    return Column(f"{name}_ns", "integer", lambda _, r: r.phase_totals().get(name, 0))


def _activity_ns(name: str) -> Column:
    return Column(f"activity_{name}_ns", "integer", lambda _, r: r.activity_totals().get(name, 0))


COLUMNS: tuple[Column, ...] = (
    Column("recording", "text", lambda o, _: o.path),
    Column("host", "text", lambda o, _: o.host),
    Column("kernel", "text", lambda o, _: o.kernel),
    Column("complete", "truth", lambda o, _: o.complete),
    Column("lost", "integer", lambda o, _: o.lost),
    Column("request", "text", lambda _, r: r.id),
    Column("began", "time", _began),
    Column("engine", "text", lambda _, r: r.engine),
    Column("model", "text", lambda _, r: r.model),
    Column("endpoint", "text", lambda _, r: r.endpoint),
    Column("outcome", "text", lambda _, r: r.outcome),
    Column("switched", "truth", lambda _, r: r.switched),
    Column("residency_before", "real", lambda _, r: r.residency_before),
    Column("prompt_tokens", "integer", lambda _, r: r.prompt_tokens),
    Column("cached_tokens", "integer", lambda _, r: r.cached_tokens),
    Column("ttft_ns", "integer", lambda _, r: r.ttft_ns),
    *map(_phase_ns, PHASES),
    *map(_activity_ns, ACTIVITIES),
    _of_weights("weights_bytes", "integer", "size_bytes"),
    _of_weights("file_system", "text", "fstype"),
    _of_weights("access", "text", "access"),
    Column("storage_bytes", "integer", lambda _, r: _total(r, "bytes_from_storage")),
    Column("cache_bytes", "integer", lambda _, r: _total(r, "bytes_from_cache")),
    Column("major_faults", "integer", lambda _, r: _total(r, "major_faults")),
    Column("minor_faults", "integer", lambda _, r: _total(r, "minor_faults")),
    Column("cause", "text", lambda _, r: r.verdict.cause),
    Column("activity", "text", lambda _, r: r.verdict.activity),
    Column("share", "real", lambda _, r: r.verdict.share),
    Column("confidence", "text", lambda _, r: r.verdict.confidence),
)
NAMES = tuple(column.name for column in COLUMNS)


@dataclass(frozen=True, slots=True)
class Unread:
    """A recording that could not be concluded, and why."""

    path: str
    reason: str


def rows_of(path: Path) -> list[Row] | Unread:
    """The rows of one recording. Starts that no request waited for are not among them."""
    from ttftprof import analysis
    from ttftprof.recording import Reader
    from ttftprof.timeline import build

    try:
        with Reader(path) as reader:
            timeline = build(reader)
        host, clock = timeline.meta.get("host") or {}, timeline.meta.get("clock") or {}
        origin = Origin(
            str(path),
            host.get("node"),
            host.get("kernel"),
            clock.get("realtime_offset_ns"),
            timeline.complete,
            sum(timeline.lost.values()),
        )
        asked = [request for _, request in analysis.concluded(timeline)]
    except TtftprofError as error:
        return Unread(str(path), error.message)
    return [tuple(column.value(origin, request) for column in COLUMNS) for request in asked]


def read_all(paths: Sequence[Path], workers: int | None = None) -> Iterator[list[Row] | Unread]:
    """`rows_of` of every path, in their order; a bounded number is worked on ahead."""
    workers = min(workers or os.cpu_count() or 1, len(paths))
    if workers <= 1:
        yield from map(rows_of, paths)
        return
    with ProcessPoolExecutor(workers) as pool:
        waiting = []
        try:
            for path in paths:
                waiting.append(pool.submit(rows_of, path))
                if len(waiting) >= workers * _AHEAD:
                    yield waiting.pop(0).result()
            while waiting:
                yield waiting.pop(0).result()
        finally:
            pool.shutdown(cancel_futures=True)


def recordings(places: Iterable[Path]) -> list[Path]:
    """Files as given; of a folder every recording below it, by name."""
    found: list[Path] = []
    for place in places:
        found += sorted(place.rglob("*.ttft")) if place.is_dir() else [place]
    return list(dict.fromkeys(found))
