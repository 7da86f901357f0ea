"""Overlayfs: the folders that a mount shows as one, and the file beneath one of its files.

The kernel's records name the file beneath: its pages are read, and its storage is waited for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ttftprof.events import kernel_dev
from ttftprof.sources.mounts import (
    Mount,
    mapped_paths,
    mount_under,
    mounts_of,
    open_paths,
    unescape,
)
from ttftprof.sources.processes import PROC

OVERLAY = "overlay"


def overlay_folders(mount: Mount) -> list[str]:
    """The folders an overlay looks in, upper first. Relative ones (as Docker passes when there are
    many) are taken from the folder two above the upper one, where Docker keeps them."""
    given: list[tuple[str, str]] = []
    for part in mount.options.split(","):
        name, _, value = part.partition("=")
        given.append((unescape(name), unescape(value)))
    upper = [value for name, value in given if name == "upperdir"]
    lower = [
        folder
        for name, value in given
        if name in ("lowerdir", "lowerdir+", "datadir+")
        for folder in ([value] if name.endswith("+") else split_folders(value))
    ]
    folders = [f.replace("\\:", ":") for f in (*upper, *lower) if f]
    base = str(Path(upper[0]).parents[1]) if upper and upper[0].count("/") > 2 else "/"
    return [f if f.startswith("/") else f"{base.rstrip('/')}/{f}" for f in folders]


def split_folders(value: str) -> list[str]:
    """A lowerdir value at its unescaped colons."""
    return [part for part in re.split(r"(?<!\\)::?", value) if part]


def beneath(
    path: str, mount: Mount, exists: Callable[[str], bool] = os.path.lexists
) -> tuple[str, str] | None:
    """(folder, path in it) of the layer that holds a file of an overlay; None if none that can be
    seen from here does."""
    inside = "/" + os.path.relpath(path, mount.point) if path != mount.point else ""
    relative = ("" if mount.root == "/" else mount.root) + inside
    for folder in overlay_folders(mount):
        if exists(folder + relative):
            return folder, folder + relative
    return None


def names_itself(mount: Mount | None, dev: int) -> bool:
    """Whether a record names a file by the overlay's own device: the probes could not look beneath,
    for the kernel's overlay module came after they were loaded."""
    return mount is not None and mount.fstype == OVERLAY and kernel_dev(*mount.dev) == dev


def shown_as(pid: int, key: tuple[int, int], size_bytes: int, proc: Path = PROC) -> str | None:
    """The path by which a process holds a file that an overlay shows it, or None.

    `key` is the (kernel dev, inode) of the file beneath. Where the layers are out of sight (as they
    are from within a container), the file must have its number and size: an overlay whose layers
    lie on one file system numbers its files as that does.
    """
    mounts = mounts_of(pid, proc)
    if not any(mount.fstype == OVERLAY for mount in mounts):
        return None
    own = mounts_of(os.getpid(), proc)
    for path, number in _held(pid, proc):
        mount = mount_under(path, mounts)
        if mount is None or mount.fstype != OVERLAY:
            continue
        layer = beneath(path, mount)
        if layer is not None:
            if _identity(layer[1], own) == key:
                return path
        elif number == key[1] and _size_of(pid, path, proc) == size_bytes:
            return path
    return None


def _held(pid: int, proc: Path) -> Iterator[tuple[str, int]]:
    """(path, inode) of the files that a process has mapped or open."""
    for (_, number), path in mapped_paths(pid, proc).items():
        yield path, number
    for number, paths in open_paths(pid, proc).items():
        for path in paths:
            yield path, number


def _identity(path: str, mounts: list[Mount]) -> tuple[int, int] | None:
    """(kernel dev, inode) of a file: of its device stat() may say another number (btrfs)."""
    mount = mount_under(path, mounts)
    try:
        return (kernel_dev(*mount.dev), Path(path).stat().st_ino) if mount else None
    except OSError:
        return None


def _size_of(pid: int, path: str, proc: Path) -> int | None:
    try:
        return (proc / str(pid) / "root" / path.lstrip("/")).stat().st_size
    except OSError:
        return None
