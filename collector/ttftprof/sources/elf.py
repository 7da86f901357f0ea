"""Where the exported functions of a library lie in its file, by the tables that the loader uses.

A few words of the file are read for each name, and no section is looked at, so that a stripped
library tells as much, and a new process costs a millisecond. The file is of whoever is recorded:
nothing in it is trusted, and no read goes past what is there. 64 bits, little-endian, as every
machine that the probes are built for. Layouts: the System V ABI, and .gnu.hash as the GNU and LLVM
linkers write it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

MAX_LIBRARY_BYTES = 4 << 30
_HEADER = struct.Struct("<IBB10xHHIQQQIHHH")  # up to e_phnum
_MAGIC, _CLASS_64, _LITTLE_ENDIAN = int.from_bytes(b"\x7fELF", "little"), 2, 1
_SEGMENT = struct.Struct("<IIQQQQQQ")
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DYNAMIC = struct.Struct("<QQ")
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 4, 5, 6, 0x6FFFFEF5
_SYMBOL = struct.Struct("<IBBHQQ")
_STT_FUNC = 2
_GNU_HASH = struct.Struct("<IIII")
_HASH = struct.Struct("<II")
_MOST_SEGMENTS, _MOST_DYNAMIC = 64, 4096
_LONGEST_CHAIN = 1024  # symbols of one bucket; real ones have a few


class _Damaged(Exception):
    """The file ends, or leads nowhere."""


def symbol_places(path: Path, names: Iterable[str]) -> list[tuple[str, int]]:
    """(symbol, offset in the file) of the defined functions among `names`, in all their versions.

    Empty for what is not an ELF file with a dynamic symbol table, or a damaged one.
    """
    found = []
    try:
        with path.open("rb", buffering=0) as file:
            library = _Library(file.fileno())
            for name in names:
                found += [(name, at) for at in library.functions(name.encode())]
    except (OSError, _Damaged, struct.error, OverflowError):
        return []
    return found


class _Library:
    """One open file. Raises `_Damaged` where it is no library, or not whole."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        if os.fstat(fd).st_size > MAX_LIBRARY_BYTES:
            raise _Damaged
        magic, bits, order, *_, at, _, _, _, size, count = self._read(_HEADER, 0)
        if magic != _MAGIC or (bits, order) != (_CLASS_64, _LITTLE_ENDIAN):
            raise _Damaged
        if size != _SEGMENT.size or count > _MOST_SEGMENTS:
            raise _Damaged
        segments = [self._read(_SEGMENT, at + number * size) for number in range(count)]
        # (first address, first behind it, offset in the file) of what is in the file
        self._loaded = [(s[3], s[3] + s[5], s[2]) for s in segments if s[0] == _PT_LOAD]
        tables = self._tables(segments)
        self._symbols, self._strings = tables[_DT_SYMTAB], tables[_DT_STRTAB]
        self._gnu_hash, self._hash = tables.get(_DT_GNU_HASH), tables.get(_DT_HASH)

    def _tables(self, segments: list[tuple[int, ...]]) -> dict[int, int]:
        """{tag: offset in the file} of the tables that the dynamic section names."""
        wanted = {_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH}
        for kind, _, offset, _, _, size, *_ in segments:
            if kind == _PT_DYNAMIC:
                raw = self._bytes(offset, min(size, _MOST_DYNAMIC * _DYNAMIC.size))
                pairs = _DYNAMIC.iter_unpack(raw[: len(raw) // _DYNAMIC.size * _DYNAMIC.size])
                found = {tag: self._offset(address) for tag, address in pairs if tag in wanted}
                if _DT_SYMTAB in found and _DT_STRTAB in found:
                    return found
        raise _Damaged

    def functions(self, name: bytes) -> list[int]:
        """Offsets in the file of the defined functions of this name."""
        if not name or b"\0" in name:
            return []
        if self._gnu_hash is not None:
            candidates = self._by_gnu_hash(self._gnu_hash, gnu_hash(name))
        elif self._hash is not None:
            candidates = self._by_hash(self._hash, name)
        else:
            return []
        found = []
        for index in candidates:
            symbol = self._symbols + index * _SYMBOL.size
            string, info, _, _, address, _ = self._read(_SYMBOL, symbol)
            if info & 0xF == _STT_FUNC and address and self._is_called(string, name):
                found.append(self._offset(address))
        return found

    def _by_gnu_hash(self, table: int, wanted: int) -> Iterator[int]:
        """Indices of the symbols with this hash. 4 words, a filter of words of 64 bits, the
        buckets, and a hash a symbol from the first one that is hashed, the last of a bucket odd."""
        buckets, first, words, shift = self._read(_GNU_HASH, table)
        if not buckets or not words:
            raise _Damaged
        at = table + _GNU_HASH.size
        (present,) = struct.unpack("<Q", self._bytes(at + wanted // 64 % words * 8, 8))
        if not present >> wanted % 64 & present >> (wanted >> shift) % 64 & 1:
            return
        at += words * 8
        (index,) = struct.unpack("<I", self._bytes(at + wanted % buckets * 4, 4))
        if index < first:
            return
        at += buckets * 4
        for hashed in self._words(at + (index - first) * 4):
            if hashed | 1 == wanted | 1:
                yield index
            if hashed & 1:
                return
            index += 1

    def _by_hash(self, table: int, name: bytes) -> Iterator[int]:
        buckets, symbols = self._read(_HASH, table)
        if not buckets:
            raise _Damaged
        at = table + _HASH.size
        (index,) = struct.unpack("<I", self._bytes(at + sysv_hash(name) % buckets * 4, 4))
        for _ in range(_LONGEST_CHAIN):
            if not 0 < index < symbols:
                return
            yield index
            (index,) = struct.unpack("<I", self._bytes(at + (buckets + index) * 4, 4))

    def _is_called(self, string: int, name: bytes) -> bool:
        return os.pread(self._fd, len(name) + 1, self._strings + string) == name + b"\0"

    def _offset(self, address: int) -> int:
        """Where in the file that lies which is loaded at an address."""
        for begin, end, offset in self._loaded:
            if begin <= address < end:
                return int(address - begin + offset)
        raise _Damaged

    def _words(self, offset: int) -> Iterator[int]:
        raw = os.pread(self._fd, _LONGEST_CHAIN * 4, offset)
        return (word for (word,) in struct.iter_unpack("<I", raw[: len(raw) // 4 * 4]))

    def _read(self, layout: struct.Struct, offset: int) -> tuple[int, ...]:
        return layout.unpack(self._bytes(offset, layout.size))

    def _bytes(self, offset: int, size: int) -> bytes:
        found = os.pread(self._fd, size, offset)
        if len(found) < size:
            raise _Damaged
        return found


@lru_cache(1024)
def gnu_hash(name: bytes) -> int:
    """Of .gnu.hash."""
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value


def sysv_hash(name: bytes) -> int:
    """Of .hash."""
    value = 0
    for byte in name:
        value = (value << 4) + byte
        value = (value ^ (value & 0xF0000000) >> 24) & 0x0FFFFFFF
    return value
