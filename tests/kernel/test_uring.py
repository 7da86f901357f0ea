"""Reads through io_uring, which make no system call each, are counted and have their bytes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kernel.support import recording
from ttftprof.events import Kind, ReadFlag, Wait
from workloads.cache import drop_cache, make_model

pytestmark = pytest.mark.kernel

SOURCE = Path(__file__).parent.parent / "lab" / "uring_reads.c"
READS = 19
READ_BYTES = 64 << 10


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("uring") / "uring_reads"
    subprocess.run(["gcc", "-O2", "-Wall", "-o", str(built), str(SOURCE)], check=True)
    return built


@contextmanager
def uring_reader(program: Path, model: Path, *ways: str) -> Iterator[subprocess.Popen[str]]:
    reader = subprocess.Popen(
        [str(program), str(model), str(READS), str(READ_BYTES), *ways],
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


WAYS = ("", "fixed", "worker", "worker late", "poll", "poll fixed", "poll late")


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("cold", [True, False])
def test_19_uring_reads_are_19_reads(program: Path, ways: str, cold: bool, tmp_path: Path) -> None:
    model = make_model(tmp_path / "uring.weights", 4 << 20)
    with uring_reader(program, model, *ways.split()) as reader:
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
    assert set(reads["tgid"].tolist()) == {reader.pid}
    assert len(reads) == READS
    assert set(reads["flags"].tolist()) == {int(ReadFlag.IO_URING)}
    # Pages it did not ask for came by readahead; those it did ask for came from storage if cold.
    assert (int(row["added_pages"]) * 4096 >= READS * READ_BYTES) == cold


def test_workers_have_counters_of_their_own_and_their_idleness_is_no_storage(
    program: Path, tmp_path: Path
) -> None:
    """A worker bears the registers of the call that made it, io_uring_enter; and idles for 5 s."""
    model = make_model(tmp_path / "uring.weights", 4 << 20)
    with (
        uring_reader(program, model, "worker", "late") as reader,
        recording(tmp_path / "uring.ttft", "--pid", str(reader.pid)) as seen,
    ):
        assert reader.stdin
        assert reader.stdout
        reader.stdin.write("go\n")
        reader.stdin.flush()
        assert int(reader.stdout.readline()) == READS * READ_BYTES
        time.sleep(0.5)
    with seen.reader() as recorded:
        rows = recorded.stream("threads")
        events = recorded.stream("events")
    made = events[(events["kind"] == Kind.FORK) & (events["flags"] == 1)]
    workers = set(made["tid"].tolist())
    assert workers
    assert set(made["tgid"].tolist()) == {reader.pid}
    assert workers <= set(rows["tid"].tolist())
    asleep = rows[np.isin(rows["tid"], list(workers)) & (rows["off_ns"] > 0)]
    assert set(asleep["off_reason"][-1:].tolist()) == {int(Wait.OTHER)}
    waits = events[(events["kind"] == Kind.OFFCPU) & np.isin(events["tid"], list(workers))]
    storage = waits[waits["flags"] == Wait.STORAGE]
    assert int(storage["duration_ns"].max(initial=0)) < 400_000_000


def test_waiting_for_a_connection_in_a_ring_is_no_storage(program: Path, tmp_path: Path) -> None:
    """The kernel marks it as I/O all the same."""
    model = make_model(tmp_path / "uring.weights", 4 << 20)
    drop_cache(model)
    with (
        uring_reader(program, model, "idle") as reader,
        recording(tmp_path / "uring.ttft", "--pid", str(reader.pid)) as seen,
    ):
        assert reader.stdin
        assert reader.stdout
        time.sleep(0.4)
        reader.stdin.write("go\n")
        reader.stdin.flush()
        assert int(reader.stdout.readline()) == READS * READ_BYTES
    with seen.reader() as recorded:
        events = recorded.stream("events")
        threads = recorded.stream("threads")
    waits = events[(events["kind"] == Kind.OFFCPU) & (events["tid"] == reader.pid)]
    longest = waits[np.argmax(waits["duration_ns"])]
    assert longest["duration_ns"] > 300_000_000
    assert longest["flags"] == Wait.NETWORK
    stored = waits["flags"] == Wait.STORAGE
    own = threads[threads["tid"] == reader.pid]["short_count"][:, Wait.STORAGE]
    assert stored.any() or own[-1] > own[0]  # of a fast disk all are short
