"""What a recording says of cold files on real file systems: their bytes, names, mounts, devices and
requests, also of those that overlayfs shows."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernel.file_systems import kept_cached, mounted, overlay, sh
from kernel.support import Recording, recorded_script, recording
from ttftprof import storage, storage_requests
from ttftprof.model import FileUse
from ttftprof.timeline import Timeline, build
from workloads.cache import drop_cache, make_model

pytestmark = pytest.mark.kernel

PAGE = 4096
SIZES = {"read": 3_145_739, "mmap": 4_194_319}  # primes
LOAD = """
import mmap, os, sys
def by_mmap(fd, size):
    with mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ) as data:
        sum(data[at] for at in range(0, size, 4096))
def by_read(fd, size):
    while os.read(fd, 1 << 18):
        pass
sys.stdin.readline()
for path in sys.argv[1:]:
    fd = os.open(path, os.O_RDONLY)
    globals()["by_" + os.path.basename(path).partition(".")[0]](fd, os.fstat(fd).st_size)
    os.close(fd)
print("done", flush=True)
sys.stdin.readline()
"""


def paged(size_bytes: int) -> int:
    return -(-size_bytes // PAGE) * PAGE


def cold_models(folder: Path) -> list[Path]:
    """A model to read and one to map, of a prime number of bytes each, and not in the cache."""
    models = [make_model(folder / f"{way}.gguf", size) for way, size in SIZES.items()]
    for model in models:
        drop_cache(model)
    return models


def timeline_of(seen: Recording) -> Timeline:
    with seen.reader() as reader:
        assert not reader.lost()
        return build(reader)


def layers_of(seen: Recording, path: Path) -> list[str]:
    """What the recording says lies under a file."""
    with seen.reader() as reader:
        [fact] = [f for _, f in reader.facts("file") if f["path"] == str(path)]
    return list(fact["layers"])


def uses_of(timeline: Timeline) -> dict[str, FileUse]:
    files, _ = storage.uses_of(timeline, None, timeline.processes, 0, timeline.end_ns)
    return {file.path: file for file in files}


def device_of(point: Path) -> str:
    """The device number of a file system as the kernel has it; stat() may give another (btrfs)."""
    return sh("findmnt", "--noheadings", "--output", "MAJ:MIN", "--target", point)


def file_key(timeline: Timeline, path: Path) -> tuple[int, int]:
    [key] = [key for key, file in timeline.files.items() if file.path == str(path)]
    return key


def assert_came_from_storage(timeline: Timeline, model: Path, way: str) -> FileUse:
    """All of a cold file, and once: by the page cache, and by the requests to its disk."""
    use = uses_of(timeline)[str(model)]
    size_bytes = SIZES[way]
    assert (use.size_bytes, use.access, use.residency_before) == (size_bytes, way, 0)
    assert use.bytes_from_storage == paged(size_bytes)
    file = timeline.files[file_key(timeline, model)]
    asked = storage_requests.Traffic(timeline, 0, timeline.end_ns).requests(file)
    assert size_bytes <= int(asked["asked_bytes"].sum()) <= paged(size_bytes)
    # Whoever waits for them is told whom: the disk, and not the client alone.
    assert use.wait_split
    assert use.wait_split.device_ns > 0
    return use


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_cold_files_of_a_file_system(kind: str, tmp_path: Path) -> None:
    with mounted(kind, tmp_path) as (point, device):
        models = cold_models(point)
        number = device_of(point)
        seen = recorded_script(LOAD, tmp_path / "cold.ttft", *models)
    timeline = timeline_of(seen)
    for model, way in zip(models, SIZES, strict=True):
        use = assert_came_from_storage(timeline, model, way)
        assert (use.fstype, use.mount, use.device) == (kind, str(point), number)
        assert layers_of(seen, model)[:2] == [f"file system {kind}", f"loop {device.name}"]


# -- overlayfs: its files' pages, requests and waits are those of files beneath --------------------


def test_cold_files_of_an_overlay(tmp_path: Path) -> None:
    """Of one whose layers lie on different file systems, so that it numbers files anew."""
    with mounted("ext4", tmp_path) as (point, device), overlay(tmp_path, point) as (_, merged):
        cold_models(point)
        models = [merged / f"{way}.gguf" for way in SIZES]
        number = device_of(point)
        seen = recorded_script(LOAD, tmp_path / "cold.ttft", *models)
    timeline = timeline_of(seen)
    for model, way in zip(models, SIZES, strict=True):
        use = assert_came_from_storage(timeline, model, way)
        assert (use.fstype, use.mount, use.device) == ("overlay", str(merged), number)
        kinds = ["file system overlay", "file system ext4", f"loop {device.name}"]
        assert layers_of(seen, model)[:3] == kinds
    assert not [f for f in timeline.files.values() if f.path.startswith("inode ")]


def test_warm_files_of_an_overlay_come_from_the_cache(tmp_path: Path) -> None:
    with overlay(tmp_path) as (lower, merged):
        below = cold_models(lower)
        models = [merged / f"{way}.gguf" for way in SIZES]
        with kept_cached(below[0]), kept_cached(below[1]):
            seen = recorded_script(LOAD, tmp_path / "warm.ttft", *models)
    timeline = timeline_of(seen)
    for model, way in zip(models, SIZES, strict=True):
        file = timeline.files[file_key(timeline, model)]
        assert storage.residency_before(timeline, file, 0, timeline.end_ns) == 1.0
        assert int(file.rows["added_pages"][-1]) == 0
        assert int(file.rows["read_bytes" if way == "read" else "map_arounds"][-1]) > 0


COPIED_UP = """
import os, sys, time
def read(fd, pages, start):
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    for page in range(start, start + pages):
        os.pread(fd, 4096, page * 4096)
sys.stdin.readline()
path, opened, written = sys.argv[1:]
fd = os.open(path, os.O_RDONLY)
read(fd, 11, 0)
open(opened, "w").close()
while not os.path.exists(written):
    time.sleep(0.005)
read(fd, 13, 100)
read(os.open(path, os.O_RDONLY), 17, 200)
print("done", flush=True)
sys.stdin.readline()
"""


def test_a_file_that_is_copied_up_while_it_is_open(tmp_path: Path) -> None:
    """Another program writes to it: from then on it is read from the upper layer, also by who had
    it open."""
    opened, written = tmp_path / "opened", tmp_path / "written"

    def write() -> None:
        while not opened.exists():
            time.sleep(0.005)
        with (merged / "read.gguf").open("r+b") as file:
            file.write(b"x")
        drop_cache(tmp_path / "upper/read.gguf")
        written.touch()

    with overlay(tmp_path) as (lower, merged), ThreadPoolExecutor(1) as pool:
        [below, _] = cold_models(lower)
        writer = pool.submit(write)
        model = merged / "read.gguf"
        seen = recorded_script(COPIED_UP, tmp_path / "up.ttft", model, opened, written)
        writer.result()
        numbers = below.stat().st_ino, (tmp_path / "upper/read.gguf").stat().st_ino
    timeline = timeline_of(seen)
    before, after = (next(f for f in timeline.files.values() if f.ino == n) for n in numbers)
    assert before.path == after.path == str(model)
    added = [int(file.rows["added_pages"][-1]) for file in (before, after)]
    assert added == [11, 13 + 17]


HELD = """
import mmap, os, sys
maps = []
for path in sys.argv[1:]:
    fd = os.open(path, os.O_RDONLY)
    maps.append(mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ))
    os.close(fd)
print("ready", flush=True)
sys.stdin.readline()
for data in maps:
    sum(data[at] for at in range(0, len(data), 4096))
print("done", flush=True)
sys.stdin.readline()
"""
# What a container runtime does: a root of its own, shown by an overlay.
CONTAINER = """
mount -t tmpfs t "$1" && mkdir "$1/upper" "$1/work" "$1/root" &&
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root" &&
mkdir "$1/root/old" && mount -t proc proc "$1/root/proc" && cd "$1/root" &&
pivot_root . old && umount -l old && shift && exec "$@"
"""


@contextmanager
def container(folder: Path, script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A Python program in a mount namespace whose root is an overlay of this machine's."""
    folder.mkdir()
    program = [sys.executable, "-c", script, *map(str, arguments)]
    running = subprocess.Popen(
        ["unshare", "--mount", "sh", "-ec", CONTAINER, "sh", str(folder), *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


OPENED = LOAD.replace("sys.stdin", "print('ready', flush=True)\nsys.stdin", 1)


@pytest.mark.parametrize("script", [HELD, OPENED], ids=["mapped before", "opened"])
def test_the_own_layer_of_a_container(script: str, tmp_path: Path) -> None:
    """Weights in an image, mapped before recording began or opened by the server."""
    models = cold_models(tmp_path)
    with container(tmp_path / "box", script, *models) as program:
        assert program.stdin
        assert program.stdout
        assert program.stdout.readline() == "ready\n"
        with recording(tmp_path / "box.ttft", "--pid", str(program.pid)) as seen:
            program.stdin.write("go\n")
            program.stdin.flush()
            assert program.stdout.readline() == "done\n"
    timeline = timeline_of(seen)
    for model, way in zip(models, SIZES, strict=True):
        file = timeline.files[file_key(timeline, model)]
        assert (file.fstype, file.mount) == ("overlay", "/")
        assert int(file.rows["added_pages"][-1]) * PAGE == paged(SIZES[way])
        assert file.is_weights
    assert not [f for f in timeline.files.values() if f.path.startswith("inode ")]
