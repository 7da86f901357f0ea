"""Reads through io_uring, which make no system call each, are counted and have their bytes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernel.support import recording
from ttftprof.events import Kind, ReadFlag
from workloads.cache import drop_cache, make_model

pytestmark = pytest.mark.kernel

SOURCE = Path(__file__).parent.parent / "lab" / "uring_reads.c"
READS = 19
READ_BYTES = 64 << 10


@contextmanager
def uring_reader(program: Path, model: Path) -> Iterator[subprocess.Popen[str]]:
    subprocess.run(["gcc", "-O2", "-Wall", "-o", str(program), str(SOURCE)], check=True)
    reader = subprocess.Popen(
        [str(program), str(model), str(READS), str(READ_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert reader.stdout
        assert reader.stdout.readline() == "ready\n"
        yield reader
    finally:
        reader.kill()
        reader.communicate()


@pytest.mark.parametrize("cold", [True, False])
def test_19_uring_reads_are_19_reads(cold: bool, tmp_path: Path) -> None:
    model = make_model(tmp_path / "uring.weights", 4 << 20)
    with uring_reader(tmp_path / "uring_reads", model) as reader:
        if cold:
            drop_cache(model)
        with recording(tmp_path / "uring.ttft", "--pid", str(reader.pid)) as seen:
            assert reader.stdin
            assert reader.stdout
            reader.stdin.write("go\n")
            reader.stdin.flush()
            assert int(reader.stdout.readline()) == READS * READ_BYTES
    with seen.reader() as recorded:
        rows = recorded.stream("files")
        events = recorded.stream("events")
    row = rows[rows["ino"] == model.stat().st_ino][-1]
    assert int(row["reads"]) == READS
    assert int(row["read_bytes"]) == READS * READ_BYTES
    reads = events[events["kind"] == Kind.READ]
    assert len(reads) == READS
    assert set(reads["flags"].tolist()) == {int(ReadFlag.IO_URING)}
    # Pages it did not ask for came by readahead; those it did ask for came from storage if cold.
    assert (int(row["added_pages"]) * 4096 >= READS * READ_BYTES) == cold
