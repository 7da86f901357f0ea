"""Files as they come: replaced or deleted while open, under two names, under odd names, by the
hundred, and through a real sshfs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from conftest import unsupported
from kernel.support import Recording, recorded_script
from ttftprof import remote, storage
from ttftprof.events import Family
from ttftprof.stack import stack_of
from ttftprof.timeline import FileFacts, Timeline, build
from workloads.cache import drop_cache, make_model

pytestmark = pytest.mark.kernel

MIB, PAGE = 1 << 20, 4096
SHARDS = 500
HEAD = """
import os, sys
def read(fd, pages, start=0):
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    for page in range(start, start + pages):
        os.pread(fd, 4096, page * 4096)
sys.stdin.readline()
"""
TAIL = """
print("done", flush=True)
sys.stdin.readline()
"""


def timeline_of(seen: Recording) -> Timeline:
    with seen.reader() as reader:
        assert not reader.lost()
        return build(reader)


def recorded(script: str, folder: Path, *arguments: object) -> Timeline:
    return timeline_of(recorded_script(HEAD + script + TAIL, folder / "files.ttft", *arguments))


def cold_model(path: Path, size_bytes: int = 2 * MIB) -> Path:
    make_model(path, size_bytes)
    drop_cache(path)
    return path


def added(file: FileFacts) -> int:
    return int(file.rows["added_pages"][-1])


def inode(timeline: Timeline, number: int) -> FileFacts:
    return next(f for f in timeline.files.values() if f.ino == number)


def test_a_file_replaced_while_open_is_two_files_of_one_name(tmp_path: Path) -> None:
    old, new = cold_model(tmp_path / "m.gguf"), cold_model(tmp_path / "new")
    numbers = old.stat().st_ino, new.stat().st_ino
    script = """
fd = os.open(sys.argv[1], os.O_RDONLY)
read(fd, 11)
os.rename(sys.argv[2], sys.argv[1])
read(fd, 13, 100)
read(os.open(sys.argv[1], os.O_RDONLY), 17)
"""
    timeline = recorded(script, tmp_path, old, new)
    first, second = (inode(timeline, number) for number in numbers)
    assert first.path == second.path == str(old)
    assert (added(first), added(second)) == (11 + 13, 17)


def test_a_file_deleted_while_open_keeps_its_name(tmp_path: Path) -> None:
    model = cold_model(tmp_path / "m.gguf")
    number = model.stat().st_ino
    script = """
fd = os.open(sys.argv[1], os.O_RDONLY)
read(fd, 7)
os.unlink(sys.argv[1])
read(fd, 19, 100)
"""
    file = inode(recorded(script, tmp_path, model), number)
    assert file.path == str(model)
    assert added(file) == 7 + 19


def test_a_number_given_out_again_is_another_file(tmp_path: Path) -> None:
    """What is deleted and written anew often gets the same inode number: its name is the new one
    since then, and its pages were not there before."""
    old, new = cold_model(tmp_path / "old.gguf"), tmp_path / "new.gguf"
    number = old.stat().st_ino
    script = """
old, new, copy = sys.argv[1:4]
fd = os.open(old, os.O_RDONLY)
read(fd, 7)
os.close(fd)
data = open(copy, "rb").read()
os.unlink(old)
for attempt in range(64):
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    if os.fstat(fd).st_ino == int(sys.argv[4]):
        break
    os.rename(new, f"{new}.{attempt}")
os.write(fd, data)
os.fsync(fd)
os.close(fd)
fd = os.open(new, os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
read(fd, 11)
"""
    copy = make_model(tmp_path / "copy", 2 * MIB)
    seen = recorded_script(HEAD + script + TAIL, tmp_path / "files.ttft", old, new, copy, number)
    timeline = timeline_of(seen)
    if new.stat().st_ino != number:
        unsupported("this file system gave the number to no new file")
    file = inode(timeline, number)
    assert [path for _, path in file.names] == [str(old), str(new)]
    replaced_ns = file.names[1][0]
    assert file.name_at(replaced_ns - 1) == str(old)
    assert file.name_at(timeline.end_ns) == file.path == str(new)
    # What was written and then dropped came in again; nothing of the old file did.
    assert int(file.rows["refaulted_pages"][-1]) == 11


def test_a_path_from_a_folder_that_is_no_working_directory(tmp_path: Path) -> None:
    folder = tmp_path / "sub"
    folder.mkdir()
    model = cold_model(folder / "m.gguf")
    script = """
fd = os.open("m.gguf", os.O_RDONLY, dir_fd=os.open(sys.argv[1], os.O_RDONLY))
read(fd, 7)
"""
    file = inode(recorded(script, tmp_path, folder), model.stat().st_ino)
    assert file.path == str(model)


WAYS = """
import mmap, socket
def by_mmap(fd, size):
    with mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ) as data:
        sum(data[at] for at in range(0, size, 4096))
def by_refused_mmap(fd, size):
    try:
        mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except PermissionError:
        by_read(fd, size)
def by_read(fd, size):
    while os.read(fd, 1 << 18):
        pass
def by_pread(fd, size):
    for at in range(0, size, 1 << 18):
        os.pread(fd, 1 << 18, at)
def by_preadv(fd, size):
    buffers = [bytearray(1 << 17), bytearray(1 << 17)]
    for at in range(0, size, 1 << 18):
        os.preadv(fd, buffers, at)
def by_direct(fd, size):
    buffer = mmap.mmap(-1, 1 << 18)
    direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT)
    for at in range(0, size, 1 << 18):
        os.preadv(direct, [buffer], at)
def by_splice(fd, size):
    out, into = os.pipe()
    left = size
    while left:
        left -= len(os.read(out, os.splice(fd, into, 1 << 16)))
def by_sendfile(fd, size):
    ours, theirs = socket.socketpair()
    left, at = size, 0
    while left:
        got = os.sendfile(ours.fileno(), fd, at, 1 << 15)
        at += got
        while got:
            taken = len(theirs.recv(1 << 15))
            got, left = got - taken, left - taken
for path in sys.argv[1:]:
    fd = os.open(path, os.O_RDONLY)
    globals()["by_" + os.path.basename(path).partition(".")[0]](fd, os.fstat(fd).st_size)
"""


def test_bytes_from_storage_are_right_whatever_the_way_of_reading(tmp_path: Path) -> None:
    """io_uring has tests of its own."""
    accesses = {
        "mmap": "mmap", "refused_mmap": "read", "read": "read", "pread": "read", "preadv": "read",
        "direct": "direct", "splice": None, "sendfile": None,
    }  # fmt: skip
    models = [cold_model(tmp_path / f"{way}.gguf") for way in accesses]
    timeline = recorded(WAYS, tmp_path, *models)
    files, _ = storage.uses_of(timeline, None, timeline.processes, 0, timeline.end_ns)
    found = {Path(file.path).stem: file for file in files}
    for way, access in accesses.items():
        assert found[way].bytes_from_storage == 2 * MIB, way
        assert found[way].bytes_from_cache == 0 or access == "mmap", way
        assert found[way].access == access, way
        assert found[way].read_amplification == 1.0, way
    assert found["refused_mmap"].advice == ("mmap failed (EACCES), then read()",)


def test_what_it_writes_itself_did_not_come_from_storage(tmp_path: Path) -> None:
    """As of a server that fetches its model; here from a map, whose bytes did come from there."""
    model, new = cold_model(tmp_path / "m.gguf"), tmp_path / "new.gguf"
    script = """
import mmap
source = os.open(sys.argv[1], os.O_RDONLY)
data = mmap.mmap(source, 0, prot=mmap.PROT_READ)
fd = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
half = len(data) // 2
os.write(fd, memoryview(data)[:half])
os.pwrite(fd, memoryview(data)[half:], half)
os.fsync(fd)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
read(os.open(sys.argv[2], os.O_RDONLY), 17)
"""
    timeline = recorded(script, tmp_path, model, new)
    assert added(inode(timeline, model.stat().st_ino)) * PAGE == 2 * MIB
    assert added(inode(timeline, new.stat().st_ino)) == 17


def test_what_another_program_reads_meanwhile_is_counted_apart(tmp_path: Path) -> None:
    model, opened, others_done = cold_model(tmp_path / "m.gguf"), tmp_path / "1", tmp_path / "2"
    script = """
fd = os.open(sys.argv[1], os.O_RDONLY)
read(fd, 11)
open(sys.argv[2], "w").close()
while not os.path.exists(sys.argv[3]):
    time.sleep(0.005)
read(fd, 29)
"""

    def read_too() -> None:
        while not opened.exists():
            time.sleep(0.005)
        fd = os.open(model, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for page in range(5, 5 + 19):
            os.pread(fd, PAGE, page * PAGE)
        os.close(fd)
        others_done.touch()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(read_too)
        timeline = recorded("import time\n" + script, tmp_path, model, opened, others_done)
        other.result()
    file = inode(timeline, model.stat().st_ino)
    assert added(file) == 11 + 5  # of pages 11 to 28 the other had read all but 24 to 28
    assert int(file.rows["foreign_pages"][-1]) == 19 - 6


def test_two_names_of_one_file_are_one_file(tmp_path: Path) -> None:
    model = cold_model(tmp_path / "m.gguf")
    other = tmp_path / "blob"
    other.hardlink_to(model)
    script = """
for number, name in enumerate(sys.argv[1:]):
    read(os.open(name, os.O_RDONLY), 23, number * 100)
"""
    timeline = recorded(script, tmp_path, model, other)
    [file] = [f for f in timeline.files.values() if f.ino == model.stat().st_ino]
    assert file.path in (str(model), str(other))
    assert added(file) == 2 * 23
    assert int(file.rows["opens"][-1]) == 2


def test_a_link_to_another_mount_is_measured_there(tmp_path: Path) -> None:
    point = tmp_path / "store"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "t", str(point)], check=True)
    try:
        (point / "m.gguf").write_bytes(bytes(2 * MIB))
        link = tmp_path / "m.gguf"
        link.symlink_to(point / "m.gguf")
        script = "read(os.open(sys.argv[1], os.O_RDONLY), 5)"
        timeline = recorded(script, tmp_path, link)
    finally:
        subprocess.run(["umount", str(point)], check=True)
    [file] = [f for f in timeline.files.values() if f.path == str(link)]
    assert (file.mount, file.fstype) == (str(point), "tmpfs")


@pytest.mark.parametrize(
    "name", [b"two words.gguf", b"caf\xe9 \xff.gguf", "modèle ✓.gguf".encode(), b"tab\tnl\n.gguf"]
)
def test_a_name_may_hold_anything(name: bytes, tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    cold_model(path)
    number = path.stat().st_ino
    script = "read(os.open(os.fsencode(sys.argv[1]), os.O_RDONLY), 29)"
    file = inode(recorded(script, tmp_path, path), number)
    assert added(file) == 29
    assert file.path == f"{tmp_path}/{name.decode(errors='backslashreplace')}"
    mount = stack_of(str(tmp_path)).mount
    assert mount
    assert file.mount == mount.point


def test_a_mount_point_may_be_called_anything(tmp_path: Path) -> None:
    """Mapped before recording began: what lies on it is known by what /proc says."""
    point = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9 \xff"))
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "t", point], check=True)
    try:
        (point / "m.gguf").write_bytes(bytes(2 * MIB))
        script = """
import mmap, os, sys
with open(os.fsencode(sys.argv[1]), "rb") as file:
    held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
sys.stdin.readline()
"""
        seen = recorded_script(script + TAIL, tmp_path / "files.ttft", point / "m.gguf")
    finally:
        subprocess.run(["umount", "--lazy", point], check=True)
    [file] = [f for f in timeline_of(seen).files.values() if f.path.endswith("/m.gguf")]
    assert file.path == rf"{tmp_path}/caf\xe9 \xff/m.gguf"
    assert (file.mount, file.fstype) == (rf"{tmp_path}/caf\xe9 \xff", "tmpfs")


def test_500_shards_are_followed_one_by_one(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(SHARDS):
        with (shards / f"m-{number + 1:05}-of-{SHARDS:05}.gguf").open("wb") as file:
            file.truncate(MIB)  # a hole: its pages enter the cache all the same
    script = """
for number, name in enumerate(sorted(os.listdir(sys.argv[1]))):
    fd = os.open(os.path.join(sys.argv[1], name), os.O_RDONLY)
    read(fd, 1 + number % 7)
    os.close(fd)
"""
    timeline = recorded(script, tmp_path, shards)
    found = sorted(
        (f for f in timeline.files.values() if f.path.startswith(str(shards))),
        key=lambda f: f.path,
    )
    assert [Path(f.path).name for f in found] == sorted(p.name for p in shards.iterdir())
    assert [added(f) for f in found] == [1 + number % 7 for number in range(SHARDS)]
    assert len({f.mount for f in found}) == 1


# -- sshfs -----------------------------------------------------------------------------------------


@contextmanager
def sshfs(folder: Path, shared: Path) -> Iterator[Path]:
    """`shared` mounted by sshfs from a server of the test's own, on this machine."""
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin")
    if sshd is None or shutil.which("sshfs") is None:
        unsupported("sshd or sshfs is not installed")
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    Path("/run/sshd").mkdir(exist_ok=True)
    settings = {
        "ListenAddress": f"127.0.0.1:{port}",
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "user.pub",
        "PidFile": "none",
        "StrictModes": "no",
        "PermitRootLogin": "yes",
        "Subsystem": "sftp internal-sftp",
    }
    (folder / "sshd.conf").write_text("".join(f"{k} {v}\n" for k, v in settings.items()))
    server = subprocess.Popen([sshd, "-D", "-f", str(folder / "sshd.conf")])
    point = folder / "remote"
    point.mkdir()
    options = [
        f"port={port}", f"IdentityFile={folder / 'user'}", "StrictHostKeyChecking=no",
        "UserKnownHostsFile=/dev/null", "LogLevel=ERROR",
    ]  # fmt: skip
    try:
        _mount(["sshfs", f"root@127.0.0.1:{shared}", str(point), "-o", ",".join(options)])
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], capture_output=True, check=False)
        server.terminate()
        server.wait(timeout=10)


def _mount(command: list[str]) -> None:
    """Tries again while the server is not listening yet."""
    for _ in range(50):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        time.sleep(0.1)
    raise AssertionError(done.stderr)


def test_reads_over_sshfs_are_told_with_their_server(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    model = make_model(shared / "m.gguf", 8 * MIB)
    with sshfs(tmp_path, shared) as point:
        script = """
with open(sys.argv[1], "rb", buffering=0) as file:
    while file.read(1 << 20):
        pass
"""
        timeline = recorded(script, tmp_path, point / "m.gguf")
        kinds = [layer.kind for layer in stack_of(str(point / "m.gguf")).layers()]
    [file] = [f for f in timeline.files.values() if f.path == str(point / "m.gguf")]
    reads = remote.on_file(timeline.remote, file.dev, file.ino)
    assert file.fstype == "fuse.sshfs"
    assert set(reads["family"].tolist()) == {int(Family.FUSE)}
    assert int(reads["got_bytes"].sum()) == model.stat().st_size == added(file) * PAGE
    assert not reads["failed"].any()
    assert "server" in kinds
