"""Ring buffers as the kernel lays them out, in a file: pages of positions, then the data, then its
first pages again."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ttftprof.events import TEXT, TEXT_PIECE
from ttftprof.kernel.ring import FixedRing, TextHead, TextRing

PAGE = mmap.PAGESIZE
SIZE = 4 * PAGE
BUSY, DISCARD = 1 << 31, 1 << 30
RECORD = np.dtype([("number", "<u8"), ("a", "<u8"), ("b", "<u8")])  # framed 32 bytes: none is split
LONG = np.dtype([("number", "<u8"), ("rest", "u1", 64)])  # framed 80 bytes: some are


class Ring:
    """The kernel's end: appends records at the producer's position."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("ring")
        os.ftruncate(self.fd, 2 * PAGE + 2 * SIZE)
        self._file = mmap.mmap(self.fd, 2 * PAGE + 2 * SIZE)
        self.produced = 0

    @property
    def consumed(self) -> int:
        return int(struct.unpack_from("<Q", self._file, 0)[0])

    def start_at(self, position: int) -> None:
        self.produced = position
        struct.pack_into("<Q", self._file, 0, position)
        struct.pack_into("<Q", self._file, PAGE, position)

    def add(self, record: bytes, flags: int = 0) -> int:
        """Returns where its header is."""
        framed = struct.pack("<II", len(record) | flags, 0) + record
        framed += bytes(-len(framed) % 8)
        assert self.produced + len(framed) - self.consumed <= SIZE, "the ring is full"
        at = self.produced
        for offset, byte in enumerate(framed, at):
            for window in (0, SIZE):
                self._file[2 * PAGE + window + offset % SIZE] = byte
        self.produced += len(framed)
        struct.pack_into("<Q", self._file, PAGE, self.produced)
        return at

    def finish(self, at: int, length: int) -> None:
        for window in (0, SIZE):
            struct.pack_into("<I", self._file, 2 * PAGE + window + at % SIZE, length)

    def close(self) -> None:
        self._file.close()
        os.close(self.fd)


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring()
    yield made
    made.close()


def fixed(dtype: np.dtype[np.void], number: int) -> bytes:
    record = np.zeros(1, dtype)
    record["number"] = number
    return record.tobytes()


def text(body: bytes, end_ns: int = 0) -> bytes:
    head = np.zeros(1, TEXT)
    head["length"], head["end_ns"] = len(body), end_ns
    return head.tobytes() + body


@pytest.mark.parametrize("dtype", [RECORD, LONG], ids=["divides", "splits"])
@pytest.mark.parametrize("batch", [1, 7, 101])
def test_every_record_is_read_once_however_often_the_ring_goes_round(
    dtype: np.dtype[np.void], batch: int, ring: Ring
) -> None:
    reader = FixedRing(ring.fd, SIZE, dtype)
    read: list[int] = []
    for first in range(0, 1009, batch):
        for number in range(first, first + batch):
            ring.add(fixed(dtype, number))
        read += reader.drain()["number"].tolist()
    assert read == [*range(len(read))]
    assert len(read) >= 1009
    assert ring.consumed == ring.produced


@pytest.mark.parametrize("dtype", [RECORD, LONG], ids=["divides", "splits"])
def test_what_is_not_finished_waits_and_what_is_thrown_away_is_left_out(
    dtype: np.dtype[np.void], ring: Ring
) -> None:
    framed = dtype.itemsize + 8
    ring.start_at((SIZE // framed - 1) * framed)
    reader = FixedRing(ring.fd, SIZE, dtype)
    ring.add(fixed(dtype, 1), DISCARD)
    ring.add(fixed(dtype, 2))
    at = ring.add(fixed(dtype, 3), BUSY)
    ring.add(fixed(dtype, 4))
    assert reader.drain()["number"].tolist() == [2]
    assert reader.drain()["number"].tolist() == []
    ring.finish(at, dtype.itemsize)
    assert reader.drain()["number"].tolist() == [3, 4]


def test_a_skimmed_header_has_the_fields_of_a_text() -> None:
    assert TextHead._fields == TEXT.names


def test_texts_of_every_length_come_whole_across_the_end(ring: Ring) -> None:
    reader = TextRing(ring.fd, SIZE)
    bodies = [bytes([n % 251]) * (n * 397 % (TEXT_PIECE + 1)) for n in range(97)]
    read = []
    for body in [*bodies, b"x" * TEXT_PIECE]:
        ring.add(text(body))
        read += [got for _, got in reader.drain(until_ns=1)]
    assert read == [*bodies, b"x" * TEXT_PIECE]


def test_a_text_of_later_stays_for_the_next_drain(ring: Ring) -> None:
    ring.start_at(SIZE - 16)
    reader = TextRing(ring.fd, SIZE)
    ring.add(text(b"sooner", end_ns=10))
    ring.add(text(b"later", end_ns=20))
    assert [body for _, body in reader.drain(until_ns=10)] == [b"sooner"]
    assert [body for _, body in reader.drain(until_ns=20)] == [b"later"]


def test_no_more_is_mapped_than_a_record_needs(ring: Ring) -> None:
    before = mapped_bytes()
    reader = TextRing(ring.fd, SIZE)
    assert PAGE + SIZE < mapped_bytes() - before <= PAGE + SIZE + 2 * PAGE
    assert not [*reader.drain(until_ns=1)]


def mapped_bytes() -> int:
    """Read-only, of rings."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:ring" in line and " r--s " in line:
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            total += high - low
    return total
