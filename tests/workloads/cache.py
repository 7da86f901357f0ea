"""Model files and the page cache: make them, drop them, warm them, and know that it worked."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path

from .build import WorkloadError

_CHUNK_BYTES = 1 << 20
_DROP_TRIES = 20
_PROT_READ, _MAP_SHARED = 1, 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def make_model(path: Path, size_bytes: int) -> Path:
    """A file of random bytes, kept if it already has the size; every chunk of it is different."""
    if path.exists() and path.stat().st_size == size_bytes:
        return path
    block = os.urandom(_CHUNK_BYTES)
    with path.open("wb") as file:
        for index in range(0, size_bytes, _CHUNK_BYTES):
            chunk = index.to_bytes(8, "little") + block[8:]
            file.write(chunk[: size_bytes - index])
        # Or somebody's fsync writes it out while it is measured.
        file.flush()
        os.fsync(file.fileno())
    return path


def drop_cache(path: Path) -> None:
    """Leave no page of the file in the cache; raises if pages stay, as mapped ones do."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        for _ in range(_DROP_TRIES):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if resident_pages(path) == 0:
                return
            time.sleep(0.02)
    finally:
        os.close(fd)
    raise WorkloadError(f"{path}: {resident_pages(path)} pages stay in the cache; is it mapped?")


def warm_cache(path: Path) -> None:
    """Read the file through until every page of it is in the cache."""
    buffer = bytearray(_CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    if residency(path) < 1.0:
        raise WorkloadError(f"{path}: only {residency(path):.1%} of it stay in the cache")


def residency(path: Path) -> float:
    """Share of the file's pages in the page cache, 0..1."""
    return resident_pages(path) / -(-path.stat().st_size // mmap.PAGESIZE)


def resident_pages(path: Path) -> int:
    """Counted by mincore(2), which looks without touching."""
    size_bytes = path.stat().st_size
    states = ctypes.create_string_buffer(-(-size_bytes // mmap.PAGESIZE))
    fd = os.open(path, os.O_RDONLY)
    try:
        address = _LIBC.mmap(None, size_bytes, _PROT_READ, _MAP_SHARED, fd, 0)
    finally:
        os.close(fd)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap", str(path))
    try:
        if _LIBC.mincore(address, size_bytes, states):
            raise OSError(ctypes.get_errno(), "mincore", str(path))
    finally:
        _LIBC.munmap(address, size_bytes)
    return sum(state & 1 for state in states.raw)
