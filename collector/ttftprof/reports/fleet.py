"""The table of many recordings: medians by group for people; every row as CSV, JSON or Parquet."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib import import_module
from typing import Any, BinaryIO, TextIO

import numpy as np
from rich.cells import cell_len, set_cell_size

from ttftprof import scale
from ttftprof.fleet import COLUMNS, NAMES, Row, Unread
from ttftprof.model import PHASES
from ttftprof.reports import words
from ttftprof.reports.safe import clip, plain
from ttftprof.reports.tables import Column, banded
from ttftprof.reports.terminal import Page

_NAME_WIDTH = 32
_SHOWN_SHARE = 0.01  # phases that are less of every group's wait are left out
_BATCH = 10_000

Parts = Iterable[list[Row] | Unread]


@dataclass(slots=True)
class _Group:
    """The requests that have the same names: their waits, and how each was split."""

    asked: int = 0
    ttft_ns: list[int] = field(default_factory=list)
    phases_ns: list[tuple[int, ...]] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)

    def add(self, row: Mapping[str, Any]) -> None:
        self.asked += 1
        if row["ttft_ns"] is None:
            return
        self.ttft_ns.append(row["ttft_ns"])
        self.phases_ns.append(tuple(row[f"{name}_ns"] for name in PHASES))
        self.causes[row["cause"]] += 1

    @property
    def median_phases(self) -> list[float]:
        if not self.phases_ns:
            return [0.0] * len(PHASES)
        return [float(v) for v in np.median(np.array(self.phases_ns, np.int64), axis=0)]


@dataclass(slots=True)
class Summary:
    """What was read, by group; `by` names what the groups have in common."""

    by: Sequence[str]
    recordings: int = 0
    unread: list[Unread] = field(default_factory=list)
    incomplete: int = 0
    groups: dict[tuple[str, ...], _Group] = field(default_factory=dict)

    def take(self, part: list[Row] | Unread) -> list[Row]:
        """Counts one recording and returns its rows."""
        if isinstance(part, Unread):
            self.unread.append(part)
            return []
        self.recordings += 1
        rows = [dict(zip(NAMES, row, strict=True)) for row in part]
        self.incomplete += any(row["lost"] or not row["complete"] for row in rows)
        for row in rows:
            key = tuple(str(_named(row, name)) for name in self.by)
            self.groups.setdefault(key, _Group()).add(row)
        return part


def _named(row: Mapping[str, Any], name: str) -> Any:
    if name == "kind":
        return words.kind_of_switch(row["switched"], row["residency_before"], "switch")
    return scale.ABSENT if row[name] is None else row[name]


def count(parts: Parts, summary: Summary) -> None:
    for part in parts:
        summary.take(part)


def write_text(summary: Summary, out: TextIO, width: int, colour: bool) -> None:
    page = Page(width, colour)
    for unread in summary.unread:
        page.add_text(f"! not read: {plain(unread.reason)}")
    if summary.incomplete:
        page.add_text(
            f"! {summary.incomplete} recording(s) are cut off or lost events: their waits may be "
            "split wrongly; ttftprof report says what is missing"
        )
    groups = sorted(summary.groups.items())
    asked = sum(group.asked for _, group in groups)
    seen = sum(len(group.ttft_ns) for _, group in groups)
    page.add_text(
        f"{summary.recordings:,} recordings, {asked:,} requests, {seen:,} with a first token"
    )
    if groups:
        page.gap()
        page.add(*banded(_names(summary.by, groups), _columns(groups), width))
        page.add_text("phases: the median of each, which need not add up to the median TTFT")
    out.write(page.text())


def _names(by: Sequence[str], groups: Sequence[tuple[tuple[str, ...], _Group]]) -> Column:
    """One column for all names, so that bands repeat them."""
    cells = [[clip(plain(name), _NAME_WIDTH) for name in key] for key, _ in groups]
    columns = zip(by, *cells, strict=True)
    widths = [max(map(cell_len, column)) for column in columns]
    joined = [
        "  ".join(set_cell_size(cell, n) for cell, n in zip(row, widths, strict=True))
        for row in [by, *cells]
    ]
    return Column(joined[0], joined[1:], right=False)


def _columns(groups: Sequence[tuple[tuple[str, ...], _Group]]) -> list[Column]:
    split = [group.median_phases for _, group in groups]
    worth = [
        any(row[i] > _SHOWN_SHARE * max(sum(row), 1) for row in split) for i in range(len(PHASES))
    ]
    phases = [
        Column(name.replace("_", "_\n"), [scale.duration(round(row[i])) for row in split])
        for i, name in enumerate(PHASES)
        if worth[i]
    ]
    return [
        Column("requests", [scale.count(group.asked) for _, group in groups]),
        Column("no first\ntoken", [_failed(group) for _, group in groups]),
        Column("TTFT\np50", [_quantile(group, 0.5) for _, group in groups]),
        Column("\np95", [_quantile(group, 0.95) for _, group in groups]),
        *phases,
        Column("most often\nblamed", [_blamed(group) for _, group in groups], right=False),
    ]


def _failed(group: _Group) -> str:
    missing = group.asked - len(group.ttft_ns)
    return scale.count(missing) if missing else ""


def _quantile(group: _Group, share: float) -> str:
    return scale.duration(round(np.quantile(group.ttft_ns, share)) if group.ttft_ns else None)


def _blamed(group: _Group) -> str:
    if not group.causes:
        return scale.ABSENT
    cause, times = group.causes.most_common(1)[0]
    return f"{cause} {times}/{len(group.ttft_ns)}"


# -- every row ------------------------------------------------------------------------------------


def write_csv(parts: Parts, summary: Summary, out: TextIO) -> None:
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(NAMES)
    for part in parts:
        writer.writerows(tuple(map(_plain, row)) for row in summary.take(part))


def write_json(parts: Parts, summary: Summary, out: TextIO) -> None:
    """JSON Lines, an object a request."""
    for part in parts:
        for row in summary.take(part):
            json.dump(dict(zip(NAMES, map(_plain, row), strict=True)), out, ensure_ascii=False)
            out.write("\n")


def write_parquet(parts: Parts, summary: Summary, out: BinaryIO) -> None:
    """Needs the `pyarrow` package. Rows are handed on in batches: memory stays bounded."""
    pa: Any = import_module("pyarrow")
    pq: Any = import_module("pyarrow.parquet")
    kinds = {
        "text": pa.string(),
        "integer": pa.int64(),
        "real": pa.float64(),
        "truth": pa.bool_(),
        "time": pa.timestamp("us", tz="UTC"),
    }
    schema = pa.schema([(column.name, kinds[column.kind]) for column in COLUMNS])
    with pq.ParquetWriter(out, schema, compression="zstd") as writer:
        for rows in _batches(parts, summary):
            columns = zip(*(map(_harmless, row) for row in rows), strict=True)
            arrays = [pa.array(c, kind) for c, kind in zip(columns, schema.types, strict=True)]
            writer.write_table(pa.table(arrays, schema=schema))


def _batches(parts: Parts, summary: Summary) -> Iterator[list[Row]]:
    rows: list[Row] = []
    for part in parts:
        rows += summary.take(part)
        if len(rows) >= _BATCH:
            yield rows
            rows = []
    if rows:
        yield rows


def _harmless(value: Any) -> Any:
    return plain(value) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else _harmless(value)
