"""What of a file is in the page cache, told without touching it, and how to put it back.

Guarantee: `drop` only evicts the ranges it is given; with ranges that `absent` found before a
measurement, what was cached stays cached and what was not leaves again.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PAGE = mmap.PAGESIZE
_SYS_CACHESTAT = 451  # the same on every architecture; Linux 6.5
_WINDOW = 256 << 20  # mincore looks at the file through maps of this size

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_LIBC.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_OVERLAYFS = 0x794C7630  # OVERLAYFS_SUPER_MAGIC, include/uapi/linux/magic.h
_MAP_FAILED = ctypes.c_void_p(-1).value

Range = tuple[int, int]
"""[start, end) in bytes; starts on a page, ends on one or at the end of the file."""


class _CachestatRange(ctypes.Structure):
    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recent")
    )


@dataclass(frozen=True, slots=True)
class CacheState:
    """Pages of a file in the cache; `how` names the system call that told."""

    cached_pages: int
    total_pages: int
    how: str

    @property
    def share(self) -> float:
        return self.cached_pages / self.total_pages if self.total_pages else 0.0


def cachestat(fd: int, start: int, end: int) -> int:
    """Pages of [start, end) in the page cache, by cachestat(2); OSError where there is none."""
    if end <= start:
        return 0
    wanted, found = _CachestatRange(start, end - start), _Cachestat()
    if _LIBC.syscall(_SYS_CACHESTAT, fd, ctypes.byref(wanted), ctypes.byref(found), 0):
        code = ctypes.get_errno()
        raise OSError(code, f"cachestat: {os.strerror(code)}")
    return int(found.cache)


def _file_system(fd: int) -> int:
    """Its magic number: the first member of `struct statfs`."""
    status = (ctypes.c_long * 32)()
    if _LIBC.fstatfs(fd, status):
        code = ctypes.get_errno()
        raise OSError(code, f"fstatfs: {os.strerror(code)}")
    return int(status[0])


@dataclass(frozen=True, slots=True)
class Mapping:
    """A read-only shared map of [start, start + length) of a file; raises OSError, as mmap does."""

    address: int
    length: int

    @classmethod
    def of(cls, fd: int, start: int, length: int) -> Mapping:
        address = _LIBC.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, start)
        if address in (None, _MAP_FAILED):
            code = ctypes.get_errno()
            raise OSError(code, f"mmap: {os.strerror(code)}")
        return cls(address, length)

    def close(self) -> None:
        _LIBC.munmap(self.address, self.length)

    def copy_out(self, offset: int, length: int, target: int) -> None:
        """Copies bytes to an address, faulting them in; other threads run meanwhile."""
        _LIBC.memcpy(target, self.address + offset, length)


def _mincore_pages(fd: int, start: int, end: int) -> bytes:
    """One byte a page, bit 0 set if it is resident. Says 1 for all of a file one may not write."""
    mapping = Mapping.of(fd, start, end - start)
    try:
        states = ctypes.create_string_buffer(-(-(end - start) // PAGE))
        if _LIBC.mincore(mapping.address, end - start, states):
            code = ctypes.get_errno()
            raise OSError(code, f"mincore: {os.strerror(code)}")
    finally:
        mapping.close()
    return states.raw


def how_to_ask(fd: int) -> str:
    """`cachestat`, or `mincore` where this kernel or file has none (before 6.5; hugetlbfs), or it
    looks at the wrong file: overlayfs keeps the pages with the file beneath, where mmap finds them.

    Raises PermissionError for one who neither owns the file nor may write it: the kernel then
    refuses cachestat, and mincore claims that all is cached (mm/mincore.c, can_do_mincore).
    """
    try:
        cachestat(fd, 0, PAGE)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    else:
        if _file_system(fd) != _OVERLAYFS:
            return "cachestat"
    owner = os.fstat(fd).st_uid
    if os.geteuid() in (0, owner) or os.access(f"/proc/self/fd/{fd}", os.W_OK):
        return "mincore"
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def state_of(fd: int, size_bytes: int) -> CacheState:
    """How much of a file is in the page cache."""
    how = how_to_ask(fd)
    cached = cached_pages(fd, 0, size_bytes, how)
    return CacheState(cached, -(-size_bytes // PAGE), how)


def cached_pages(fd: int, start: int, end: int, how: str = "cachestat") -> int:
    """Pages of [start, end) in the cache; `start` lies on a page."""
    if how == "cachestat":
        return cachestat(fd, start, end)
    windows = ((at, min(at + _WINDOW, end)) for at in range(start, end, _WINDOW))
    return sum(sum(s & 1 for s in _mincore_pages(fd, low, high)) for low, high in windows)


def absent(fd: int, size_bytes: int, how: str) -> list[Range]:
    """The ranges of a file that are not in the page cache, in order, as long as possible."""
    if size_bytes <= 0:
        return []
    pieces = _bisected(fd, 0, size_bytes) if how == "cachestat" else _looked(fd, size_bytes)
    return _joined(pieces)


def _bisected(fd: int, start: int, end: int) -> Iterator[Range]:
    """Halves a range until each half is all cached or not at all: few calls for few runs."""
    pages = -(-(end - start) // PAGE)
    cached = cachestat(fd, start, end)
    if cached == 0:
        yield start, end
    elif cached < pages:
        middle = start + pages // 2 * PAGE
        yield from _bisected(fd, start, middle)
        yield from _bisected(fd, middle, end)


def _looked(fd: int, size_bytes: int) -> Iterator[Range]:
    for low in range(0, size_bytes, _WINDOW):
        high = min(low + _WINDOW, size_bytes)
        for page, state in enumerate(_mincore_pages(fd, low, high)):
            if not state & 1:
                begin = low + page * PAGE
                yield begin, min(begin + PAGE, size_bytes)


def _joined(pieces: Iterable[Range]) -> list[Range]:
    runs: list[Range] = []
    for start, end in pieces:
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((start, end))
    return runs


def overlap(runs: Iterable[Range], start: int, end: int) -> list[Range]:
    """The parts of the runs that lie in [start, end)."""
    cut = ((max(low, start), min(high, end)) for low, high in runs)
    return [(low, high) for low, high in cut if low < high]


def without(start: int, end: int, runs: Iterable[Range]) -> list[Range]:
    """What of [start, end) no run covers; the runs are in order."""
    left, at = [], start
    for low, high in overlap(runs, start, end):
        if low > at:
            left.append((at, low))
        at = max(at, high)
    return [*left, (at, end)] if at < end else left


def drop(fd: int, ranges: Iterable[Range], how: str, patience_s: float = 0.2) -> int:
    """Evicts ranges from the page cache; returns the pages that stayed (mapped, locked).

    A page that storage is still delivering (readahead goes on after its reader has ended) cannot
    be dropped yet: it is asked again until for `patience_s` none has left.
    """
    return sum(_drop_one(fd, start, end, how, patience_s) for start, end in ranges)


def _drop_one(fd: int, start: int, end: int, how: str, patience_s: float) -> int:
    """An end inside a page would keep that page, so it is rounded up."""
    length = -(-(end - start) // PAGE) * PAGE
    fewest, since = -1, time.monotonic()
    while True:
        os.posix_fadvise(fd, start, length, os.POSIX_FADV_DONTNEED)
        left = cached_pages(fd, start, end, how)
        if not left:
            return 0
        if left < fewest or fewest < 0:
            fewest, since = left, time.monotonic()
        elif time.monotonic() - since > patience_s:
            return left
        time.sleep(0.005)


def read_back(fd: int, ranges: Iterable[Range]) -> None:
    """Brings ranges into the cache again."""
    buffer = bytearray(1 << 20)
    view = memoryview(buffer)
    for start, end in ranges:
        at = start
        while at < end:
            got = os.preadv(fd, [view[: min(len(view), end - at)]], at)
            if not got:
                break
            at += got
