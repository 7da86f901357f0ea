"""The facts as one flat table, for CSV and Parquet: a row an event, a phase or an activity.

`kind` tells what a row is: an event of the kernel side (OFFCPU, BLOCK, OPEN, …), PHASE or ACTIVITY.
What a column means for an event is written in `probes/events.h`; what has no value is null.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from importlib import import_module
from typing import Any, BinaryIO, TextIO

import numpy as np

from ttftprof.events import Kind, Records, dev_numbers
from ttftprof.model import Report
from ttftprof.reports import html_data
from ttftprof.reports.safe import plain
from ttftprof.timeline import Timeline

COLUMNS = (
    "kind",
    "start_ns",
    "duration_ns",
    "request",
    "name",
    "basis",
    "tgid",
    "tid",
    "flags",
    "device",
    "inode",
    "path",
    "a",
    "b",
)
_UNSIGNED = ("a", "b", "inode")
_ROWS = 20_000

Column = list[Any]


def write_csv(report: Report, timeline: Timeline, out: TextIO) -> None:
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for batch in batches(report, timeline):
        writer.writerows(zip(*(batch[name] for name in COLUMNS), strict=True))


def write_parquet(report: Report, timeline: Timeline, out: BinaryIO) -> None:
    """Needs the `pyarrow` package."""
    pa: Any = import_module("pyarrow")
    pq: Any = import_module("pyarrow.parquet")
    texts = {"kind", "request", "name", "basis", "device", "path"}
    kinds = {name: pa.string() if name in texts else pa.int64() for name in COLUMNS}
    kinds |= {name: pa.uint64() for name in _UNSIGNED}
    schema = pa.schema(list(kinds.items()), metadata={"clock": "CLOCK_MONOTONIC, ns"})
    with pq.ParquetWriter(out, schema, compression="zstd") as writer:
        for batch in batches(report, timeline):
            writer.write_table(pa.table(batch, schema=schema))


def batches(report: Report, timeline: Timeline) -> Iterator[dict[str, Column]]:
    """The table in parts, as columns of equal length."""
    yield _of_requests(report)
    paths = {file.key: plain(file.path) for file in timeline.files.values()}
    for kind, records in _events(timeline):
        for begin in range(0, len(records), _ROWS):
            yield _of_events(kind, records[begin : begin + _ROWS], paths)


def _events(timeline: Timeline) -> Iterator[tuple[Kind, Records]]:
    yield from timeline.events.items()
    for kind, bulky in ((Kind.OFFCPU, timeline.waits), (Kind.BLOCK, timeline.blocks)):
        for records in bulky.records():
            yield kind, records


def _of_requests(report: Report) -> dict[str, Column]:
    rows = [
        (what, start_ns, end_ns - start_ns, plain(subject.id), name, basis)
        for subject in html_data.subjects(report)
        for what, name, start_ns, end_ns, basis in (
            *(("PHASE", p.phase, p.start_ns, p.end_ns, p.basis) for p in subject.phases),
            *(("ACTIVITY", a.activity, a.start_ns, a.end_ns, None) for a in subject.activities),
        )
    ]
    columns: dict[str, Column] = {name: [None] * len(rows) for name in COLUMNS}
    for number, name in enumerate(("kind", "start_ns", "duration_ns", "request", "name", "basis")):
        columns[name] = [row[number] for row in rows]
    return columns


def _of_events(
    kind: Kind, records: Records, paths: dict[tuple[int, int], str]
) -> dict[str, Column]:
    number = len(records)
    devices, inodes = records["dev"].tolist(), records["ino"].tolist()
    return {
        "kind": [kind.name] * number,
        **{name: [None] * number for name in ("request", "name", "basis")},
        **{
            name: records[name].astype(np.int64).tolist()
            for name in ("start_ns", "duration_ns", "tgid", "tid", "flags")
        },
        "device": ["{}:{}".format(*dev_numbers(dev)) if dev else None for dev in devices],
        "inode": inodes,
        "path": [paths.get(key) for key in zip(devices, inodes, strict=True)],
        "a": records["a"].tolist(),
        "b": records["b"].tolist(),
    }
