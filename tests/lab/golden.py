"""Keeps a recording of a real server for the unit tests: small, and nothing in it of the machine.

    python -m lab.golden RECORDING OUT.ttft.xz

Left out: files that are no weights (a Python server maps fifty libraries), the recorder's own
costs and settings but the loader, the host's name, folders of paths.
"""

from __future__ import annotations

import lzma
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ttftprof.engines.catalog import looks_like_weights
from ttftprof.events import Kind, Records
from ttftprof.recording import STREAMS, Reader, Writer

_LEFT_OUT = {"own", "probe_costs", "arm_cpu_ns", "driver_calls", "settings", "complete"}
_FILES_ONLY = (Kind.OPEN, Kind.MMAP, Kind.MUNMAP, Kind.READ, Kind.HELD, Kind.TOUCH, Kind.BLOCK)


def keep(source: Path, out: Path, is_weights: Callable[[str], bool] = looks_like_weights) -> None:
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small.ttft"
        with Reader(source) as reader:
            _copy(reader, Writer(small), is_weights)
        out.write_bytes(lzma.compress(small.read_bytes(), preset=9 | lzma.PRESET_EXTREME))


@contextmanager
def kept(path: Path) -> Iterator[Path]:
    """The recording as a file again."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / path.stem
        whole.write_bytes(lzma.decompress(path.read_bytes()))
        yield whole


def _copy(reader: Reader, writer: Writer, is_weights: Callable[[str], bool]) -> None:
    writer.set_meta("settings", {"loader": reader.meta["settings"].get("loader")})
    for key, value in reader.meta.items():
        if key not in _LEFT_OUT:
            writer.set_meta(key, value | {"node": "host"} if key == "host" else value)
    files = [fact for _, fact in reader.facts("file") if is_weights(fact["path"] or "")]
    inodes = [fact["ino"] for fact in files]
    for stream in STREAMS:
        records = reader.stream(stream)
        if len(records):
            writer.add_batch(stream, _of_files(records, stream, inodes))
    for kind in reader.fact_kinds():
        for ns, fact in reader.facts(kind):
            if kind != "file" or fact["ino"] in inodes:
                writer.add_fact(kind, ns, without_folders(fact))
    for row in reader.sources():
        writer.set_source(row)
    for place, count in reader.lost().items():
        writer.set_lost(place, count)
    writer.close(complete=reader.complete)


def _of_files(records: Records, stream: str, inodes: list[int]) -> Records:
    if stream == "files":
        return records[np.isin(records["ino"], inodes)]
    if stream == "events":
        return records[~np.isin(records["kind"], _FILES_ONLY) | np.isin(records["ino"], inodes)]
    return records


def without_folders(value: Any) -> Any:
    """Of each path its name alone, in whatever a document holds; endpoints of HTTP stay."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    if isinstance(value, str) and value.startswith("/") and not value.startswith("/v1"):
        return f"/{PurePosixPath(value).name}"
    return value


if __name__ == "__main__":
    keep(Path(sys.argv[1]), Path(sys.argv[2]))
