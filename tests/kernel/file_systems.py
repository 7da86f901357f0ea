"""Real file systems for a test, on loop devices or shown through overlayfs; files kept cached."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from conftest import unsupported

MIB = 1 << 20
MKFS = {"ext4": ["mkfs.ext4", "-q"], "xfs": ["mkfs.xfs", "-q"], "btrfs": ["mkfs.btrfs", "-q"]}


def sh(*command: str | Path) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextmanager
def mounted(kind: str, folder: Path, image_mb: int = 330) -> Iterator[tuple[Path, Path]]:
    """(mount point, loop device) of a fresh file system on a loop device with direct I/O."""
    if shutil.which(MKFS[kind][0]) is None:
        unsupported(f"{MKFS[kind][0]} is not installed")
    if kind not in Path("/proc/filesystems").read_text():
        unsupported(f"this kernel has no {kind}")
    image, point = folder / f"{kind}.img", folder / f"{kind} mount"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(image_mb * MIB)
    sh(*MKFS[kind], image)
    device = Path(sh("losetup", "--find", "--show", "--direct-io=on", image))
    try:
        sh("mount", device, point)
        try:
            yield point, device
        finally:
            sh("umount", point)
    finally:
        sh("losetup", "--detach", device)
        image.unlink()


@contextmanager
def overlay(folder: Path, lower: Path | None = None) -> Iterator[tuple[Path, Path]]:
    """(the folder below, made if none is given, where it is seen through overlayfs). What is
    written there goes to `folder`/upper."""
    below = lower or folder / "lower"
    upper, work, merged = (folder / n for n in ("upper", "work", "merged"))
    for made in (below, upper, work, merged):
        made.mkdir(exist_ok=made == lower)
    sh("mount", "-t", "overlay", "overlay", "-o",
       f"lowerdir={below},upperdir={upper},workdir={work}", merged)  # fmt: skip
    try:
        yield below, merged
    finally:
        sh("umount", merged)


@contextmanager
def kept_cached(path: Path) -> Iterator[None]:
    """All of a file in the page cache, locked: a kernel may let go what nobody uses."""
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
    address = ctypes.c_void_p(np.frombuffer(pages, np.uint8).ctypes.data)
    libc, size = ctypes.CDLL(None, use_errno=True), ctypes.c_size_t(len(pages))
    assert libc.mlock(address, size) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        libc.munlock(address, size)
        pages.close()
