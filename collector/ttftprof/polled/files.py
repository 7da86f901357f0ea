"""The big files that processes have open and mapped, and what of them is in the page cache."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ttftprof.events import Kind, kernel_dev
from ttftprof.polled.tasks import Told, held_open, numbers_in
from ttftprof.residency import PAGE, cachestat, how_to_ask
from ttftprof.sources.mounts import mounts_of
from ttftprof.sources.processes import PROC
from ttftprof.weights import mount_id

_ALL_AGAIN = 10  # looks
Key = tuple[int, int]  # (kernel dev, inode)


@dataclass(slots=True)
class Followed:
    """One big file. `fd` is ours, to ask the page cache; None where we may not read the file, or
    would not be told the truth."""

    dev: int
    ino: int
    size_bytes: int
    fd: int | None
    since_ns: int
    cached_pages: int = 0
    added_pages: int = 0
    evicted_pages: int = 0
    reads: int = 0
    read_bytes: int = 0
    opens: int = 0
    mmaps: int = 0

    def in_order(self, slot: np.dtype[Any]) -> tuple[int, ...]:
        """Its fields as a row of `slot`."""
        return tuple(getattr(self, name, 0) for name in slot.names or ())

    def ask(self) -> None:
        """Counts what came into the page cache since the last look, or left it."""
        if self.fd is None:
            return
        with suppress(OSError):
            now = cachestat(self.fd, 0, self.size_bytes)
            self.added_pages += max(now - self.cached_pages, 0)
            self.evicted_pages += max(self.cached_pages - now, 0)
            self.cached_pages = now


@dataclass(slots=True)
class _Open:
    """A descriptor of a followed file: how far it was read by when."""

    key: Key
    offset: int
    ns: int


@dataclass(frozen=True, slots=True)
class _Map:
    key: Key
    begin: int
    end: int

    def covers(self, other: _Map) -> bool:
        return self.begin <= other.begin and other.end <= self.end


class Files:
    """What the target's processes do with files of at least `min_bytes`."""

    def __init__(self, min_bytes: int, proc: Path = PROC) -> None:
        self.of: dict[Key, Followed] = {}
        self.asks_cache = True  # whether the page cache could be asked for every file so far
        self._min_bytes = min_bytes
        self._proc = proc
        self._sizes: dict[int, bytes] = {}  # of each process's memory, as of the last look
        self._maps: dict[int, list[_Map]] = {}
        self._fds: dict[int, dict[int, tuple[str, _Open | None]]] = {}
        self._looks = 0
        self.new_sockets: dict[int, int] = {}  # inode -> who has it, since somebody cleared it

    def look(self, pids: Collection[int], ns: int, first: bool = False) -> list[Told]:
        """`first`: what is there was there before."""
        told: list[Told] = []
        self._looks += 1
        for pid in pids:
            told += self._opened(pid, ns, first)
            told += self._mapped(pid, ns, first)
        for file in self.of.values():
            file.ask()
        return told

    def forget(self, pid: int) -> None:
        self._sizes.pop(pid, None)
        self._maps.pop(pid, None)
        self._fds.pop(pid, None)

    def close(self) -> None:
        for file in self.of.values():
            if file.fd is not None:
                os.close(file.fd)
                file.fd = None

    # -- descriptors --------------------------------------------------------------------------

    def _opened(self, pid: int, ns: int, first: bool) -> Iterator[Told]:
        folder = f"{self._proc}/{pid}/fd"
        try:
            there = numbers_in(folder)
        except OSError:
            return
        known = self._fds.setdefault(pid, {})
        for fd in known.keys() - there:
            del known[fd]
        # A number may be given to another file at once; of most of them that is asked less often.
        again = self._looks % _ALL_AGAIN == 0
        for fd in sorted(there if again else there - known.keys()):
            with suppress(OSError):
                name = os.readlink(f"{folder}/{fd}")  # noqa: PTH115 (a path costs ten times as much)
                if fd not in known or known[fd][0] != name:
                    known[fd] = name, self._taken_up(pid, fd, name, ns)
                    if opened := known[fd][1]:
                        yield self._open_event(pid, opened, ns, first)
        for fd, (_, opened) in known.items():
            if opened is not None:
                with suppress(OSError):
                    yield from self._read_on(pid, fd, opened, ns)

    def _taken_up(self, pid: int, fd: int, name: str, ns: int) -> _Open | None:
        if name.startswith("socket:["):
            self.new_sockets[int(name[8:-1])] = pid
        if not name.startswith("/"):
            return None
        path = self._proc / str(pid) / "fd" / str(fd)
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size < self._min_bytes:
            return None
        key = self._key_of(pid, fd, status)
        self._follow(key, status.st_size, path, ns)
        return _Open(key, self._position(pid, fd), ns)

    def _key_of(self, pid: int, fd: int, status: os.stat_result) -> Key:
        """As the kernel's records have it: the device of the file system (stat's may differ)."""
        lies_on = mount_id((self._proc / str(pid) / "fdinfo" / str(fd)).read_text())
        for mount in mounts_of(pid, self._proc):
            if mount.mount_id == lies_on:
                return kernel_dev(*mount.dev), status.st_ino
        return kernel_dev(os.major(status.st_dev), os.minor(status.st_dev)), status.st_ino

    def _open_event(self, pid: int, opened: _Open, ns: int, first: bool) -> Told:
        file = self.of[opened.key]
        file.opens += 0 if first else 1
        kind = Kind.HELD if first else Kind.OPEN
        return Told(
            kind, ns, pid, pid, flags=1 if first else 0, dev=file.dev, ino=file.ino,
            a=file.size_bytes, b=file.cached_pages,
        )  # fmt: skip

    def _read_on(self, pid: int, fd: int, opened: _Open, ns: int) -> Iterator[Told]:
        """By how far its position moved. A seek back moved it, too, but read nothing."""
        offset = self._position(pid, fd)
        before, since = opened.offset, opened.ns
        opened.offset, opened.ns = offset, ns
        if offset <= before:
            return
        file = self.of[opened.key]
        file.reads += 1
        file.read_bytes += offset - before
        yield Told(
            Kind.READ, since, pid, pid, ns - since, dev=file.dev, ino=file.ino,
            a=offset - before, b=before,
        )  # fmt: skip

    def _position(self, pid: int, fd: int) -> int:
        text = (self._proc / str(pid) / "fdinfo" / str(fd)).read_bytes()
        return int(text.split(None, 2)[1])

    # -- maps ---------------------------------------------------------------------------------

    def _mapped(self, pid: int, ns: int, first: bool) -> Iterator[Told]:
        try:
            size = (self._proc / str(pid) / "statm").read_bytes().split(None, 1)[0]
            if self._sizes.get(pid) == size:
                return
            self._sizes[pid] = size
            found = list(self._big_maps(pid, ns))
        except (OSError, ValueError, IndexError):
            return
        before, self._maps[pid] = self._maps.get(pid, []), found
        for one in found:
            # Of a map that was cut to size, what is left is no new one.
            if any(old.key == one.key and old.covers(one) for old in before):
                continue
            file = self.of[one.key]
            file.mmaps += 0 if first else 1
            yield Told(
                Kind.HELD if first else Kind.MMAP, ns, pid, pid, dev=file.dev, ino=file.ino,
                a=file.size_bytes if first else one.end - one.begin,
                b=file.cached_pages if first else one.begin,
            )  # fmt: skip

    def _big_maps(self, pid: int, ns: int) -> Iterator[_Map]:
        """What is mapped as data, and big enough; no part of a program or library."""
        lines = [
            words
            for line in (self._proc / str(pid) / "maps").read_text(errors="replace").splitlines()
            if len(words := line.split(None, 5)) > 5 and words[5].startswith("/")
        ]
        programs = {(words[3], words[4]) for words in lines if "x" in words[1]}
        for words in lines:
            if (words[3], words[4]) in programs:
                continue
            begin, end = (int(number, 16) for number in words[0].split("-"))
            major, minor = (int(number, 16) for number in words[3].split(":"))
            key = kernel_dev(major, minor), int(words[4])
            if key not in self.of and end - begin >= self._min_bytes:
                path = self._proc / str(pid) / "root" / words[5].lstrip("/")
                with suppress(OSError):
                    status = path.stat()
                    if status.st_ino == key[1] and status.st_size >= self._min_bytes:
                        self._follow(key, status.st_size, path, ns)
            if key in self.of:
                yield _Map(key, begin, end)

    def _follow(self, key: Key, size_bytes: int, path: Path, ns: int) -> None:
        if key in self.of:
            return
        fd = self._readable(path)
        self.asks_cache &= fd is not None
        file = Followed(*key, size_bytes, fd, ns)
        if fd is not None:
            file.cached_pages = min(cachestat(fd, 0, size_bytes), -(-size_bytes // PAGE))
        self.of[key] = file

    @staticmethod
    def _readable(path: Path) -> int | None:
        try:
            fd = held_open(path, os.O_NONBLOCK)
        except OSError:
            return None
        try:
            if how_to_ask(fd) == "cachestat":
                return fd
        except OSError:
            pass
        os.close(fd)
        return None
