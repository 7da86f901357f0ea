"""The requests behind a file's bytes: disks under disks, where waits were, the path's model."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttftprof import storage_requests
from ttftprof.events import Family, Kind, ReadFlag, Wait
from ttftprof.storage_requests import Traffic, Whereabouts, wait_split
from ttftprof.timeline import Timeline
from unit.recordings import A_GGUF, B_GGUF, DEV, DISK, MIB, NEW, Scene, ns

MS = 1_000_000
LOOP = DISK + 64


def scene(**facts: Any) -> Scene:
    return Scene().process(NEW, "server").file(B_GGUF, size_bytes=8 * MIB, **facts)


def block(told: Scene, begin: float, end: float, disk: int = DISK, size: int = 128 << 10) -> Scene:
    return told.record(
        Kind.BLOCK, ns(begin), round((end - begin) * MS), dev=disk, ino=B_GGUF, a=size,
        b=round(begin * 256), flags=1,
    )  # fmt: skip


def remote(
    told: Scene, begin: float, end: float, size: int, family: int = Family.NFS, at: int = 0
) -> Scene:
    return told.record(
        Kind.REMOTE, ns(begin), round((end - begin) * MS), tid=NEW, tgid=NEW, dev=DEV, ino=B_GGUF,
        a=size << 32 | size, b=at, flags=family,
    )  # fmt: skip


def split(told: Scene, begin: float, queue: float, wire: float) -> Scene:
    return told.record(
        Kind.REMOTE_SPLIT, ns(begin), round(wire * MS), tid=NEW, tgid=NEW, dev=DEV, ino=B_GGUF,
        a=round(queue * MS), b=round((queue + wire) * MS), flags=1,
    )  # fmt: skip


def the_split(timeline: Timeline, begin: float = 0, end: float = 9_000) -> tuple[float, ...]:
    """(queue, wire, server, device, client) in ms."""
    file = timeline.files[DEV, B_GGUF]
    traffic = Traffic(timeline, ns(0), ns(9_000))
    where = Whereabouts(traffic.requests(file))
    found = wait_split(traffic, file, where, ns(begin), ns(end))
    return tuple(part / MS for part in astuple(found))


def test_a_disk_under_a_loop_device_is_not_counted_twice() -> None:
    told = scene()
    for at in (10, 30, 50):
        block(told, at, at + 10, LOOP)
        block(told, at + 1, at + 9)
    timeline = told.timeline()
    reads = Traffic(timeline, 0, ns(100)).requests(timeline.files[DEV, B_GGUF])
    assert set(reads["dev"].tolist()) == {LOOP}
    assert len(reads) == 3


def test_disks_side_by_side_all_count() -> None:
    told = block(block(scene(), 10, 20, LOOP), 12, 25)
    timeline = told.timeline()
    traffic = Traffic(timeline, 0, ns(100))
    assert len(traffic.requests(timeline.files[DEV, B_GGUF])) == 2


def test_a_wait_is_split_by_where_the_requests_were() -> None:
    """Waited from 10 to 60: queued to 20, on the wire to 40, then nothing, at a disk never."""
    told = scene().wait(NEW, 10, 60, Wait.STORAGE, ino=B_GGUF)
    split(remote(told, 10, 40, 4096), 10, queue=10, wire=20)
    assert the_split(told.timeline()) == (10, 20, 0, 0, 20)


def test_a_moment_belongs_to_the_request_that_got_furthest() -> None:
    told = scene().wait(NEW, 10, 50, Wait.STORAGE, ino=B_GGUF)
    split(remote(told, 10, 30, 4096), 10, queue=0, wire=20)
    split(remote(told, 10.5, 50, 4096), 10.5, queue=29.5, wire=10)
    assert the_split(told.timeline()) == (10, 30, 0, 0, 0)


def test_a_daemon_and_a_disk_have_their_own_parts() -> None:
    daemon = remote(scene(), 10, 30, 4096, Family.FUSE).wait(NEW, 5, 35, Wait.STORAGE, ino=B_GGUF)
    assert the_split(daemon.timeline()) == (0, 0, 20, 0, 10)
    disk = block(scene(), 10, 30).wait(NEW, 5, 35, Wait.STORAGE, ino=B_GGUF)
    assert the_split(disk.timeline()) == (0, 0, 0, 20, 10)
    assert the_split(disk.timeline(), 20, 33) == (0, 0, 0, 10, 3)


def direct_read(told: Scene, begin: float, end: float, ino: int, tid: int = NEW) -> Scene:
    return told.record(
        Kind.READ, ns(begin), round((end - begin) * MS), tid=tid, tgid=NEW, dev=DEV, ino=ino,
        a=MIB, flags=ReadFlag.DIRECT,
    )  # fmt: skip


def nameless(told: Scene, begin: float, end: float, tid: int = NEW, ino: int = 0) -> Scene:
    return told.record(
        Kind.BLOCK, ns(begin), round((end - begin) * MS), tid=tid, tgid=NEW, dev=DISK, ino=ino,
        a=MIB // 2,
    )  # fmt: skip


def test_requests_past_the_cache_are_of_the_file_their_thread_read() -> None:
    told = scene().file(A_GGUF)
    direct_read(direct_read(told, 10, 20, B_GGUF), 30, 40, A_GGUF)
    direct_read(told, 10, 60, A_GGUF, tid=NEW + 1)
    nameless(told, 11, 19)
    nameless(told, 12, 20, ino=4_711)  # into shared memory, which is a file that nobody follows
    nameless(told, 25, 29)  # between two reads: swapped in
    nameless(told, 31, 39)
    nameless(told, 15, 59, tid=NEW + 1)
    nameless(told, 15, 59, tid=NEW + 2)  # of a thread that reads nothing past the cache
    timeline = told.timeline()
    traffic = Traffic(timeline, 0, ns(100))
    of = {ino: traffic.requests(timeline.files[DEV, ino]) for ino in (A_GGUF, B_GGUF)}
    assert of[B_GGUF]["start_ns"].tolist() == [ns(11), ns(12)]
    assert of[A_GGUF]["start_ns"].tolist() == [ns(15), ns(31)]
    assert {A_GGUF, B_GGUF} <= traffic.inodes


moments = st.tuples(st.integers(0, 200), st.integers(1, 60))


@settings(deadline=None)  # each example writes a recording
@given(st.lists(moments, max_size=6), st.lists(moments, max_size=6), st.integers(0, 250))
def test_the_parts_sum_to_the_wait(
    waits: list[tuple[int, int]], asked: list[tuple[int, int]], cut: int
) -> None:
    told = scene()
    for tid, (at, length) in enumerate(waits):
        told.wait(NEW, at, at + length, Wait.STORAGE, tid=NEW + tid, ino=B_GGUF)
    for number, (at, length) in enumerate(asked):
        remote(told, at + number / 100, at + length, 4096, Family.FUSE if number % 2 else 1)
        if number % 3 == 0:
            split(told, at + number / 100, 0.1, length / 2)
    timeline = told.timeline()
    file = timeline.files[DEV, B_GGUF]
    traffic = Traffic(timeline, ns(0), ns(9_000))
    where = Whereabouts(traffic.requests(file))
    whole = 0
    for begin, end in ((0, cut), (cut, 9_000)):
        found = wait_split(traffic, file, where, ns(begin), ns(end))
        assert min(astuple(found)) >= 0
        assert sum(astuple(found)) == found.total_ns
        whole += sum(astuple(found))
    assert whole == sum(length for _, length in waits) * MS


# -- the model -------------------------------------------------------------------------------------


def on_a_path(delay_ms: float, rate: float, sizes: list[int], **facts: Any) -> Timeline:
    """Lone requests of these sizes over a path of that delay and rate."""
    told, at = scene(**facts), 10.0
    for size in sizes:
        took = delay_ms + size / rate * 1e3
        remote(told, at, at + took, size)
        at += took + 1
    return told.timeline()


def test_the_model_predicts_plain_reads_from_single_pages() -> None:
    """2 ms, 100 MB/s, 128 KiB of readahead: two windows in 2 ms and their bytes' 1.31 ms."""
    timeline = on_a_path(2, 100e6, [4096] * 20 + [65536] * 3)
    file = timeline.files[DEV, B_GGUF]
    model = storage_requests.for_bytes(storage_requests.model_of(timeline, file), 8 * MIB)
    assert model
    assert model.latency_ns == pytest.approx(2 * MS, rel=0.001)
    assert model.link_bytes_per_second == pytest.approx(100e6, rel=0.001)
    assert model.read_bytes_per_second == pytest.approx(262144 / 3.31072e-3, rel=0.001)
    assert model.read_ns == pytest.approx(8 * MIB / 262144 * 3.31072 * MS, rel=0.001)


def test_no_more_than_the_link_is_promised() -> None:
    timeline = on_a_path(0.2, 50e6, [4096, 65536, 131072], read_ahead_kb=4096)
    model = storage_requests.model_of(timeline, timeline.files[DEV, B_GGUF])
    assert model
    assert model.read_bytes_per_second == pytest.approx(50e6, rel=0.001)


@pytest.mark.parametrize(
    ("facts", "request_bytes", "depth"),
    [
        ({}, 65536, 4.0),  # no option: the most that was seen
        ({"options": "rw,rsize=32768"}, 32768, 8.0),
        ({"options": "max_read=131072,rw"}, 131072, 2.0),
        ({"max_request_kb": 512}, 512 << 10, 2.0),  # a read of 1 MiB asks for as much at once
        ({"read_ahead_kb": 0, "max_request_kb": 256}, 256 << 10, 2.0),
    ],
)
def test_requests_are_as_big_as_the_path_takes(
    facts: dict[str, object], request_bytes: int, depth: float
) -> None:
    timeline = on_a_path(2, 100e6, [4096, 65536], **facts)
    model = storage_requests.model_of(timeline, timeline.files[DEV, B_GGUF])
    assert model
    assert (model.read_request_bytes, model.read_depth) == (request_bytes, depth)


@pytest.mark.parametrize("facts", [{"read_ahead_kb": None}, {"options": "x"}])
def test_what_is_not_known_predicts_nothing(facts: dict[str, object]) -> None:
    """Sizes all alike tell no rate from a delay."""
    sizes = [4096] * 5 if "options" in facts else [4096, 65536]
    timeline = on_a_path(2, 100e6, sizes, **facts)
    model = storage_requests.model_of(timeline, timeline.files[DEV, B_GGUF])
    assert model
    assert model.latency_ns > 0
    assert model.read_bytes_per_second is None
