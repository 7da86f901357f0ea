"""Records as columns: how a recording packs them, and how they are read without ever being rows.

A structured array costs a reader most of its time: to join, to sift or to order it copies whole
rows, field by field. Parallel arrays are copied as they lie.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ttftprof.errors import RecordingError
from ttftprof.events import Records

Columns = Mapping[str, npt.NDArray[Any]]  # parallel arrays

COMPRESS_FROM_BYTES = 2048
MAX_BATCH_BYTES = 256 << 20  # more than any ring holds: no file makes a reader swell
UPDATE = "read it with a newer ttftprof: pip install --upgrade ttftprof"
_STAMPS = ("start_ns", "ns")


def of_records(records: Records) -> Columns:
    """Views of a structured array."""
    return {name: records[name] for name in records.dtype.names or ()}


def as_records(columns: Columns, dtype: np.dtype[Any]) -> Records:
    """A structured array; a field of which there is no column reads as 0."""
    records = np.zeros(length(columns), dtype)
    for name, column in columns.items():
        records[name] = column
    return records


def joined(parts: Sequence[Columns], dtype: np.dtype[Any]) -> Columns:
    """The fields of a layout, of several parts; one of which there is no column reads as 0."""
    count = sum(map(length, parts))
    return {
        name: np.concatenate([part[name] for part in parts])
        if all(name in part for part in parts)
        else np.zeros((count, *dtype[name].shape), dtype[name].base)
        for name in dtype.names or ()
    }


def chosen(columns: Columns, which: npt.NDArray[Any]) -> Columns:
    """Some of them, by a mask or by their places."""
    places = np.flatnonzero(which) if which.dtype == bool else which
    return {name: np.take(column, places, axis=0) for name, column in columns.items()}


def length(columns: Columns) -> int:
    return len(next(iter(columns.values())))


# -- as they are packed ---------------------------------------------------------------------------


def layout_of(dtype: np.dtype[Any]) -> list[list[Any]]:
    """A dtype as JSON: [[name, type, shape], …] in order, without padding."""
    fields = []
    for name in dtype.names or ():
        kind = dtype[name]
        fields.append([name, kind.base.str, list(kind.shape)])
    return fields


_PLAIN_TYPE = re.compile(r"[<|][uif][1248]")


def dtype_of(layout: Iterable[Iterable[Any]]) -> np.dtype[Any]:
    """The inverse of `layout_of`. Raises `ValueError` or `TypeError` for anything else."""
    fields: list[Any] = []
    for name, kind, shape in layout:
        lengths = tuple(int(d) for d in shape)
        if not _PLAIN_TYPE.fullmatch(kind) or not all(0 < d <= 4096 for d in lengths):
            raise ValueError(f"no layout of numbers: {kind!r} {lengths}")
        fields.append((str(name), kind, lengths))
    return np.dtype(fields)


def pack(records: Records) -> tuple[str, bytes]:
    """(codec, bytes) of a structured array: its columns one after the other.

    Times are stored as differences, which is what makes the columns small.
    """
    columns = []
    for name in records.dtype.names or ():
        column = np.ascontiguousarray(records[name])
        if name in _STAMPS:
            column = np.diff(column, prepend=column.dtype.type(0))
        columns.append(column.tobytes())
    plain = b"".join(columns)
    if len(plain) < COMPRESS_FROM_BYTES:
        return "columns", plain
    return "columns+zlib", zlib.compress(plain, 1)


def unpack(codec: str, data: bytes, dtype: np.dtype[Any], count: int) -> Columns:
    """What was packed, by column, some of them views of the bytes. Raises `RecordingError` if these
    do not fit the layout."""
    if not 0 <= count <= MAX_BATCH_BYTES // dtype.itemsize:
        raise RecordingError(f"a batch of the recording is damaged ({count} records)")
    if codec == "columns+zlib":
        try:
            # Bounded by what the layout says: a hostile file cannot swell in memory.
            data = zlib.decompressobj().decompress(data, count * dtype.itemsize + 1)
        except zlib.error as error:
            raise RecordingError(f"a batch of the recording is damaged ({error})") from error
    elif codec != "columns":
        raise RecordingError(f"the recording uses an unknown encoding, {codec!r}", UPDATE)
    if len(data) != count * dtype.itemsize:
        raise RecordingError("a batch of the recording is damaged (its length is wrong)")
    columns, at = {}, 0
    for name in dtype.names or ():
        kind = dtype[name]
        numbers = count * (kind.itemsize // kind.base.itemsize)
        column = np.frombuffer(data, kind.base, numbers, at)
        at += kind.itemsize * count
        if name in _STAMPS:
            column = np.cumsum(column, dtype=kind.base)
        columns[name] = column.reshape((count, *kind.shape))
    return columns
