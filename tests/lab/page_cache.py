"""What of a file is in the page cache, asked and changed without reading it."""

import ctypes
import mmap
import os
import time
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
MAP_FAILED = ctypes.c_void_p(-1).value


class StillCached(Exception):
    """Pages could not be dropped, most likely because a live process maps the file."""


def cached_bytes(path: Path) -> int:
    """Bytes of `path` in the page cache, in whole pages, by mincore(2)."""
    size = path.stat().st_size
    if size == 0:
        return 0
    with path.open("rb") as file:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"mmap of {path}")
    try:
        residency = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        if libc.mincore(address, size, residency):
            raise OSError(ctypes.get_errno(), f"mincore of {path}")
    finally:
        libc.munmap(address, size)
    resident_pages = sum(page & 1 for page in bytes(residency))
    return resident_pages * mmap.PAGESIZE


def drop_cache(path: Path, timeout_s: float = 2.0) -> None:
    """Drops `path` from the page cache; StillCached if any page stays."""
    deadline = time.monotonic() + timeout_s
    with path.open("rb") as file:
        os.fsync(file.fileno())  # dirty pages cannot be dropped
        while True:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            left = cached_bytes(path)
            if not left:
                return
            if time.monotonic() > deadline:
                raise StillCached(f"{left} bytes of {path} stay cached: is it mapped by a server?")
            time.sleep(0.02)


def fill_cache(path: Path) -> None:
    """Reads all of `path`, so that the next load finds it cached."""
    with path.open("rb") as file:
        while file.read(1 << 20):
            pass
