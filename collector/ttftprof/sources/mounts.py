"""Where a file lies: its mount, as the process that opened it sees it, and its readahead."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ttftprof.events import dev_numbers
from ttftprof.sources.processes import PROC

_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo: `dev` is (major, minor) of the file system's super block, `root` the
    part of it that is mounted (`/` unless it is a bind mount or a subvolume)."""

    mount_id: int
    dev: tuple[int, int]
    point: str
    fstype: str
    source: str
    options: str
    root: str = "/"


def parse_mountinfo(text: str) -> list[Mount]:
    """The mounts of a mountinfo file, later ones on top; malformed lines are left out.

    Format: proc(5), /proc/pid/mountinfo.
    """
    mounts = []
    for line in text.split("\n"):  # a path may hold any other end of a line
        before, separator, after = line.partition(" - ")
        fields, tail = before.split(" "), after.split(" ")
        if not separator or len(fields) < 6 or len(tail) < 3:
            continue
        major, colon, minor = fields[2].partition(":")
        if not (colon and major.isdigit() and minor.isdigit() and fields[0].isdigit()):
            continue
        mounts.append(
            Mount(
                mount_id=int(fields[0]),
                dev=(int(major), int(minor)),
                point=unescape(fields[4]),
                fstype=tail[0],
                source=unescape(tail[1]),
                options=f"{fields[5]},{tail[2]}" if tail[2] else fields[5],
                root=unescape(fields[3]),
            )
        )
    return mounts


def unescape(text: str) -> str:
    """Undoes the kernel's octal escapes (space, tab, newline, backslash)."""
    return _ESCAPE.sub(lambda m: chr(int(m[1], 8)), text)


def legible(path: str) -> str:
    """A path for a recording: bytes that are no UTF-8, by which it is found, as escapes."""
    return path.encode(errors="surrogateescape").decode(errors="backslashreplace")


def mounts_of(pid: int, proc: Path = PROC) -> list[Mount]:
    """The mounts a process sees, or those of this one if it is gone."""
    for who in (str(pid), "self"):
        try:
            return parse_mountinfo((proc / who / "mountinfo").read_text(errors="surrogateescape"))
        except OSError:
            continue
    return []


def mount_under(path: str, mounts: list[Mount]) -> Mount | None:
    """The mount a path lies on: the longest mount point above it, the latest of equals."""
    best: Mount | None = None
    for mount in mounts:
        point = mount.point.rstrip("/")
        inside = path == mount.point or path.startswith(point + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def disk_of(mount: Mount, sysfs: Path = Path("/sys")) -> str | None:
    """The name of the disk that a mount's file system lies on, whatever its partition; None if it
    lies on no block device of its own. A volume of several (LVM, RAID) is a disk here."""
    major, minor = mount.dev
    if major == 0:  # a number of its own, as btrfs gives: its source is the device
        try:
            number = Path(mount.source).stat().st_rdev
        except OSError:
            return None
        major, minor = os.major(number), os.minor(number)
    device = (sysfs / f"dev/block/{major}:{minor}").resolve()
    if major == 0 or not device.exists():
        return None
    return device.parent.name if (device / "partition").exists() else device.name


def read_ahead_kb(dev: int, sysfs: Path = Path("/sys")) -> int | None:
    """Readahead of a file system's backing device, in KiB, or None if it has none.

    `dev` is the kernel's dev_t. Network and stacked file systems have a bdi of their own; a
    partition uses its disk's queue.
    """
    major, minor = dev_numbers(dev)
    for path in (
        sysfs / f"class/bdi/{major}:{minor}/read_ahead_kb",
        sysfs / f"dev/block/{major}:{minor}/queue/read_ahead_kb",
        sysfs / f"dev/block/{major}:{minor}/../queue/read_ahead_kb",
    ):
        try:
            return int(path.read_text())
        except (OSError, ValueError):
            continue
    return None


def mapped_paths(pid: int, proc: Path = PROC) -> dict[tuple[int, int], str]:
    """{(kernel dev, inode): path} of the files a process has mapped.

    The device in maps is the super block's, as in the kernel's records (stat() may differ, as on
    btrfs).
    """
    found: dict[tuple[int, int], str] = {}
    try:
        text = (proc / str(pid) / "maps").read_text(errors="surrogateescape")
    except OSError:
        return found
    for line in text.split("\n"):
        fields = line.split(None, 5)
        if len(fields) < 6 or not fields[5].startswith("/"):
            continue
        major, _, minor = fields[3].partition(":")
        key = (int(major, 16) << 20 | int(minor, 16), int(fields[4]))
        found[key] = unescape(fields[5])
    return found


def open_paths(pid: int, proc: Path = PROC) -> dict[int, list[str]]:
    """{inode: paths} of the regular files a process has open.

    Each is taken hold of, not opened: a descriptor may be another file's between two looks.
    """
    found: dict[int, list[str]] = {}
    try:
        entries = list((proc / str(pid) / "fd").iterdir())
    except OSError:
        return found
    for entry in entries:
        with suppress(OSError):
            fd = os.open(entry, os.O_PATH | os.O_CLOEXEC)
            try:
                status, path = os.fstat(fd), str(Path(f"/proc/self/fd/{fd}").readlink())
            finally:
                os.close(fd)
            if path.startswith("/") and stat.S_ISREG(status.st_mode):
                found.setdefault(status.st_ino, []).append(path)
    return found


def path_held(pid: int, key: tuple[int, int], proc: Path = PROC) -> str | None:
    """A path by which a process has the file of this (kernel dev, inode) mapped or open."""
    mapped = mapped_paths(pid, proc).get(key)
    return mapped or next(iter(open_paths(pid, proc).get(key[1], [])), None)


AT_FDCWD = 2**32 - 100  # include/uapi/linux/fcntl.h


def opened_from(pid: int, folder: int, path: str, proc: Path = PROC) -> str:
    """A relative path made absolute, from the descriptor that the open was given (`AT_FDCWD`: the
    working directory). As it was given where that folder is not known any more."""
    start = proc / str(pid) / ("cwd" if folder == AT_FDCWD else f"fd/{folder}")
    try:
        return os.path.normpath(start.readlink() / path)
    except OSError:
        return path


def is_called(pid: int, path: str, inode: int, proc: Path = PROC) -> bool:
    """Whether a path, as the process sees it, leads to a file of this inode number. A file that
    was deleted leaves its number to another."""
    try:
        return (proc / str(pid) / "root" / path.lstrip("/")).stat().st_ino == inode
    except OSError:
        return False


def resolved(pid: int, key: tuple[int, int], path: str, proc: Path = PROC) -> str:
    """Where a file that a process has open or mapped lies, links followed, as the process sees it.

    `key` is its (kernel dev, inode), `path` what it was opened by: given back where nothing better
    is known, because the process has closed it or is gone.
    """
    mapped = mapped_paths(pid, proc).get(key)
    if mapped is not None:
        return mapped
    candidates = open_paths(pid, proc).get(key[1], [])
    if candidates:
        return path if path in candidates else candidates[0]
    if not path.startswith("/"):
        return path
    try:
        same_root = (proc / str(pid) / "root").samefile("/")
    except OSError:
        same_root = False
    return os.path.realpath(path) if same_root else path
