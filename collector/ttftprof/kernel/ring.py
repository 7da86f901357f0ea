"""Reads BPF ring buffers straight from their mapped memory.

`FixedRing` holds records of one layout, so a drain is one numpy copy. `TextRing` holds records of
any length and is walked. Layout: the kernel's
kernel/bpf/ringbuf.c; behind the data's end its pages begin again, so that no record is ever split.
What is mapped counts as memory of this process, hence so much of them only as a record may need.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ttftprof.events import TEXT, TEXT_PIECE, Records

PAGE_BYTES = mmap.PAGESIZE
HEADER_BYTES = 8
_BUSY = 1 << 31
_DISCARD = 1 << 30


_LENGTH = struct.Struct("<I")
_CODES = {2: "H", 4: "I", 8: "Q"}


class TextHead(NamedTuple):
    """`events.TEXT` of one record, sooner read than by numpy."""

    start_ns: int
    end_ns: int
    key: int
    tid: int
    tgid: int
    dev: int
    kind: int
    flags: int
    total: int
    offset: int
    skipped: int
    length: int


_HEAD = struct.Struct("<" + "".join(_CODES[TEXT[name].itemsize] for name in TextHead._fields))


class _Ring:
    """`longest`: bytes of the longest record, with its header."""

    def __init__(self, fd: int, size_bytes: int, longest: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self._consumer_map = mmap.mmap(fd, PAGE_BYTES, mmap.MAP_SHARED)
        self._producer_map = mmap.mmap(
            fd,
            PAGE_BYTES + size_bytes + min(longest, size_bytes),
            mmap.MAP_SHARED,
            mmap.PROT_READ,
            offset=PAGE_BYTES,
        )
        # Read and written whole, as one word each
        self._consumer = memoryview(self._consumer_map)[:8].cast("Q")
        self._producer = memoryview(self._producer_map)[:8].cast("Q")

    def _span(self) -> tuple[int, int]:
        """(offset of the first unread byte in the data, unread bytes)."""
        consumed = self._consumer[0]
        return consumed & (self.size_bytes - 1), self._producer[0] - consumed

    def _advance(self, length: int) -> None:
        self._consumer[0] += length


class FixedRing(_Ring):
    """A ring of records of one layout only, a multiple of 8 bytes long."""

    def __init__(self, fd: int, size_bytes: int, dtype: np.dtype[Any]) -> None:
        self._framed = np.dtype([("length", "<u4"), ("page", "<u4"), ("record", dtype)])
        self._none = np.empty(0, dtype)
        super().__init__(fd, size_bytes, self._framed.itemsize)

    def drain(self) -> Records:
        """All finished records, copied out, in the order they were begun; may be empty."""
        first = self._take()
        if self._span()[0] >= self._framed.itemsize:
            return first
        rest = self._take()
        return np.concatenate([first, rest]) if len(rest) else first

    def _take(self) -> Records:
        """Those that lie in one row: that begin before the data's end."""
        offset, length = self._span()
        size = self._framed.itemsize
        count = min(length // size, -(-(self.size_bytes - offset) // size))
        if not count:
            return self._none
        batch = np.frombuffer(self._producer_map, self._framed, count, offset=PAGE_BYTES + offset)
        unfinished = np.flatnonzero(batch["length"] & np.uint32(_BUSY))
        if len(unfinished):
            batch = batch[: unfinished[0]]
        kept = batch["record"].copy()
        if np.any(batch["length"] & np.uint32(_DISCARD)):
            kept = kept[(batch["length"] & np.uint32(_DISCARD)) == 0]
        self._advance(len(batch) * self._framed.itemsize)
        return kept


# Of a text's header, whether the record that begins there is dealt with; and its bytes.
Skim = Callable[[TextHead, memoryview], bool]


class TextRing(_Ring):
    """A ring of `struct text`, each followed by its bytes."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        super().__init__(fd, size_bytes, HEADER_BYTES + TEXT.itemsize + TEXT_PIECE)
        self._data = memoryview(self._producer_map)[PAGE_BYTES:]

    def drain(
        self, until_ns: int, skim: Skim = lambda _head, _data: False
    ) -> Iterator[tuple[Any, bytes]]:
        """(header, bytes) of each finished record stamped no later than `until_ns`; consumed as
        they are taken. Later ones stay for the next drain, behind the events of their time.

        `skim` is asked about each first, and what it says it has dealt with is not given out: of
        many thousand pieces of answers nearly all tell nothing, and this way cost little.
        """
        while True:
            offset, waiting = self._span()
            if waiting < HEADER_BYTES:
                return
            (length,) = _LENGTH.unpack_from(self._data, offset)
            if length & _BUSY:
                return
            size = length & ~(_BUSY | _DISCARD)
            taken = (size + HEADER_BYTES + 7) // 8 * 8
            if length & _DISCARD or size < TEXT.itemsize:
                self._advance(taken)
                continue
            begin = offset + HEADER_BYTES
            head = TextHead._make(_HEAD.unpack_from(self._data, begin))
            if head.end_ns > until_ns:
                return
            body = self._data[begin + TEXT.itemsize : begin + TEXT.itemsize + head.length]
            if skim(head, body):
                self._advance(taken)
                continue
            raw = bytes(self._data[begin : begin + size])
            self._advance(taken)
            yield np.frombuffer(raw, TEXT, 1)[0], raw[TEXT.itemsize :][: head.length]


def map_array(fd: int, dtype: np.dtype[Any], count: int) -> Records:
    """A BPF array map as a numpy array over the kernel's own memory; reads are live."""
    stride = (dtype.itemsize + 7) // 8 * 8
    if stride != dtype.itemsize:
        raise ValueError(f"values of {dtype.itemsize} bytes cannot be mapped as an array")
    length = (stride * count + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES
    memory = mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ)
    return np.frombuffer(memory, dtype, count)
