"""What /proc and /sys tell of processes and mounts, in every form they come in."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttftprof.events import kernel_dev
from ttftprof.sources.mounts import (
    Mount,
    legible,
    mapped_paths,
    mount_under,
    mounts_of,
    open_paths,
    parse_mountinfo,
    read_ahead_kb,
    resolved,
    unescape,
)
from ttftprof.sources.overlay import names_itself, shown_as
from ttftprof.sources.processes import (
    descendants,
    has_host_pids,
    is_alive,
    listening_ports,
    read_process,
    read_stat,
    thread_group,
)

# -- processes --------------------------------------------------------------------------------


def stat_line(pid: int, ppid: int, comm: str = "server", state: str = "S") -> str:
    """As proc(5) has it: 52 fields; the 22nd is the start time."""
    return f"{pid} ({comm}) {state} {ppid} " + " ".join(str(n) for n in range(5, 53)) + "\n"


def put(proc: Path, pid: int, ppid: int = 1, **files: bytes) -> Path:
    """A process in a /proc of the test's own."""
    folder = proc / str(pid)
    (folder / "task" / str(pid)).mkdir(parents=True)
    (folder / "stat").write_text(stat_line(pid, ppid))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_mount_point_may_hold_any_byte(tmp_path: Path) -> None:
    put(tmp_path, 7, mountinfo=b"36 35 8:1 / /mnt/caf\xe9 rw - ext4 /dev/x rw\n")
    (mount,) = mounts_of(7, tmp_path)
    assert (mount.fstype, mount.point[:8]) == ("ext4", "/mnt/caf")


@pytest.mark.parametrize(
    "comm", ["server", "with space", "paren) S 1 (", "((", "))", "", "tab\there", "nl\nhere"]
)
def test_a_name_may_hold_anything(tmp_path: Path, comm: str) -> None:
    (tmp_path / "stat").write_text(stat_line(7, 3, comm))
    name, fields = read_stat(tmp_path / "stat")
    assert name == comm
    assert fields[:2] == ["S", "3"]
    assert fields[19] == "22"


@pytest.mark.parametrize(
    ("raw", "argv"),
    [
        (b"llama-server\0-m\0a b.gguf\0", ["llama-server", "-m", "a b.gguf"]),
        (b"VLLM::EngineCore", ["VLLM::EngineCore"]),
        (b"nginx: master process\0\0\0\0\0", ["nginx: •••"]),
        (b"", []),
        (b"\0\0", []),
        (b"srv\0--api-key\0sesame\0", ["srv", "--api-key", "•••"]),
    ],
)
def test_a_command_line_in_its_forms(tmp_path: Path, raw: bytes, argv: list[str]) -> None:
    put(tmp_path, 7, cmdline=raw)
    facts = read_process(7, tmp_path)
    assert facts is not None
    assert facts.argv == argv


def test_bytes_that_are_no_text_can_still_be_recorded(tmp_path: Path) -> None:
    put(tmp_path, 7, cmdline=b"srv\0\xff\xfe.gguf\0")
    facts = read_process(7, tmp_path)
    assert facts is not None
    assert all(argument.encode() for argument in facts.argv)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (b"0::/user.slice/a.service\n", "/user.slice/a.service"),
        (b"12:memory:/docker/abc\n1:name=systemd:/\n0::/\n", "/docker/abc"),
        (b"4:cpu,cpuacct:/with:colon\n", "/with:colon"),
        (b"garbage\n", ""),
        (b"", ""),
    ],
)
def test_the_control_group_of_both_hierarchies(tmp_path: Path, text: bytes, path: str) -> None:
    put(tmp_path, 7, cmdline=b"srv\0", cgroup=text)
    facts = read_process(7, tmp_path)
    assert facts is not None
    assert facts.cgroup == path


def test_a_process_that_is_gone_or_half_gone_is_none(tmp_path: Path) -> None:
    assert read_process(7, tmp_path) is None
    assert read_process(-1, tmp_path) is None
    (put(tmp_path, 8) / "stat").write_text("")
    assert read_process(8, tmp_path) is None


def test_this_process_as_it_is() -> None:
    facts = read_process(os.getpid())
    assert facts is not None
    assert facts.ppid == os.getppid()
    assert Path(facts.exe).samefile(sys.executable)
    assert Path(facts.cwd).samefile(Path.cwd())
    assert facts.start_ticks > 0


def test_descendants(tmp_path: Path) -> None:
    for pid, ppid in ((10, 1), (11, 10), (12, 11), (20, 1), (21, 20)):
        put(tmp_path, pid, ppid)
    (tmp_path / "self").mkdir()
    (tmp_path / "30").mkdir()  # went while it was looked at
    assert descendants({10}, tmp_path) == {10, 11, 12}
    assert descendants({10, 21, 99}, tmp_path) == {10, 11, 12, 21}
    assert descendants({99}, tmp_path) == set()


def test_a_threads_process() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert thread.native_id
        assert thread_group(thread.native_id) == os.getpid()
        assert thread_group(os.getpid()) == os.getpid()
    finally:
        end.set()
        thread.join()
    assert thread_group(0) is None


def test_the_dead_are_told_from_the_living() -> None:
    assert is_alive(os.getpid())
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(process.pid), "it waits to be reaped"
    assert not is_alive(process.pid)
    assert not is_alive(0)


def test_a_process_whose_first_thread_ended_lives(tmp_path: Path) -> None:
    folder = put(tmp_path, 7)
    (folder / "stat").write_text(stat_line(7, 1, state="Z"))
    assert not is_alive(7, tmp_path)
    (folder / "task" / "8").mkdir()
    assert is_alive(7, tmp_path)


def test_whose_process_ids_are_seen(tmp_path: Path) -> None:
    assert has_host_pids(tmp_path), "not known is not forbidden"
    (tmp_path / "self/ns").mkdir(parents=True)
    link = tmp_path / "self/ns/pid"
    for inode, expected in ((4026531836, True), (4026532201, False)):
        link.unlink(missing_ok=True)
        link.symlink_to(f"pid:[{inode}]")
        assert has_host_pids(tmp_path) is expected


def test_ports_of_nobody_are_none() -> None:
    assert listening_ports(set()) == {}
    assert listening_ports({1 << 30}) == {}


# -- mounts -----------------------------------------------------------------------------------

MOUNTINFO = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
30 22 0:45 / /models rw,noatime shared:9 master:2 - nfs4 nas:/models ro,vers=4.2,rsize=1048576
31 22 0:46 / /with\\040space\\011tab ro - fuse.sshfs user@host:/a\\040b rw,user_id=0
32 22 8:17 /sub /bind rw - xfs /dev/sdb1 rw
33 30 0:47 / /models rw - overlay overlay rw,lowerdir=/l
"""


def test_mountinfo_in_its_forms() -> None:
    mounts = parse_mountinfo(MOUNTINFO)
    assert [mount.fstype for mount in mounts] == ["ext4", "nfs4", "fuse.sshfs", "xfs", "overlay"]
    assert mounts[1] == Mount(
        mount_id=30,
        dev=(0, 45),
        point="/models",
        fstype="nfs4",
        source="nas:/models",
        options="rw,noatime,ro,vers=4.2,rsize=1048576",
        root="/",
    )
    assert mounts[3].root == "/sub"
    assert mounts[2].point == "/with space\ttab"
    assert mounts[2].source == "user@host:/a b"


@pytest.mark.parametrize(
    "line",
    [
        "",
        " - ",
        "22 1 254:0 / / rw",
        "22 1 254 / / rw - ext4 /dev/vda rw",
        "x 1 254:0 / / rw - ext4 /dev/vda rw",
        "22 1 a:b / / rw - ext4 /dev/vda rw",
        "22 1 254:0 / / rw - ext4",
    ],
)
def test_malformed_mounts_are_left_out(line: str) -> None:
    assert parse_mountinfo(line + "\n" + MOUNTINFO) == parse_mountinfo(MOUNTINFO)


@given(st.text())
def test_any_text_is_some_list_of_mounts(text: str) -> None:
    parse_mountinfo(text)


@given(st.text(alphabet="/ab \t\n\\0123é", max_size=30))
def test_escapes_come_back(path: str) -> None:
    escaped = path
    for plain in "\\ \t\n":
        escaped = escaped.replace(plain, f"\\{ord(plain):03o}")
    assert unescape(escaped) == path


@pytest.mark.parametrize(
    ("path", "fstype"),
    [
        ("/", "ext4"),
        ("/m.gguf", "ext4"),
        ("/models/a.gguf", "overlay"),
        ("/modelsx/a.gguf", "ext4"),
        ("/with space\ttab/a", "fuse.sshfs"),
        ("/bind", "xfs"),
    ],
)
def test_a_path_lies_on_the_innermost_and_latest_mount(path: str, fstype: str) -> None:
    mount = mount_under(path, parse_mountinfo(MOUNTINFO))
    assert mount is not None
    assert mount.fstype == fstype


def test_a_path_on_no_known_mount() -> None:
    assert mount_under("/a", []) is None


def test_mounts_of_a_process_that_is_gone_are_ones_own(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text(MOUNTINFO)
    assert len(mounts_of(7, tmp_path)) == 5
    put(tmp_path, 7, mountinfo=MOUNTINFO.splitlines(keepends=True)[0].encode())
    assert len(mounts_of(7, tmp_path)) == 1
    assert mounts_of(7, tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    "place",
    ["class/bdi/8:17", "dev/block/8:17/queue"],
)
def test_read_ahead_of_a_device(tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "read_ahead_kb").write_text("4096\n")
    assert read_ahead_kb(kernel_dev(8, 17), tmp_path) == 4096


def test_read_ahead_of_a_partition_is_its_disks(tmp_path: Path) -> None:
    disk = tmp_path / "devices/sdb"
    (disk / "sdb1").mkdir(parents=True)
    (disk / "queue").mkdir()
    (disk / "queue/read_ahead_kb").write_text("128\n")
    (tmp_path / "dev/block").mkdir(parents=True)
    (tmp_path / "dev/block/8:17").symlink_to(disk / "sdb1")
    assert read_ahead_kb(kernel_dev(8, 17), tmp_path) == 128


def test_read_ahead_that_nobody_tells(tmp_path: Path) -> None:
    assert read_ahead_kb(kernel_dev(8, 17), tmp_path) is None
    (tmp_path / "class/bdi/8:17").mkdir(parents=True)
    (tmp_path / "class/bdi/8:17/read_ahead_kb").write_text("many\n")
    assert read_ahead_kb(kernel_dev(8, 17), tmp_path) is None


# -- files of a process -----------------------------------------------------------------------

MAPS = """\
5594cd000000-5594cd001000 r--p 00000000 fe:00 260811                     /usr/bin/srv
7f0000000000-7f0000001000 r--s 00000000 00:2d 99                         /models/a b\\012c.gguf
7f1000000000-7f1000001000 rw-p 00000000 00:00 0
7f2000000000-7f2000001000 rw-p 00000000 00:00 0                          [heap]
7f3000000000-7f3000001000 rw-s 00000000 00:05 7                          /dev/zero (deleted)
"""


def test_mapped_files_by_device_and_inode(tmp_path: Path) -> None:
    put(tmp_path, 7, maps=MAPS.encode())
    assert mapped_paths(7, tmp_path) == {
        (kernel_dev(254, 0), 260811): "/usr/bin/srv",
        (kernel_dev(0, 0x2D), 99): "/models/a b\nc.gguf",
        (kernel_dev(0, 5), 7): "/dev/zero (deleted)",
    }
    assert mapped_paths(8, tmp_path) == {}


NAME = b"\xff two \xe2\x80\xa8 \x0b lines"


def test_names_of_any_bytes(tmp_path: Path) -> None:
    """The kernel escapes spaces, tabs, backslashes and line feeds; the rest stands as it is."""
    escaped = NAME.replace(b" ", b"\\040")
    mountinfo = b"30 22 0:45 / /" + escaped + b" rw - tmpfs t rw\n31 22 0:46 / /a rw - tmpfs t rw\n"
    maps = b"7f0000000000-7f0000001000 r--s 00000000 00:2d 99    /" + NAME + b"/m.gguf\n"
    put(tmp_path, 7, mountinfo=mountinfo, maps=maps)
    [path] = mapped_paths(7, tmp_path).values()
    assert os.fsencode(path) == b"/" + NAME + b"/m.gguf"
    mount = mount_under(path, mounts_of(7, tmp_path))
    assert mount
    assert os.fsencode(mount.point) == b"/" + NAME
    assert legible(path) == "/\\xff two \u2028 \x0b lines/m.gguf"
    assert len(mounts_of(7, tmp_path)) == 2


def test_a_file_that_this_process_maps_and_holds(tmp_path: Path) -> None:
    path = tmp_path / "ä model.gguf"
    path.write_bytes(bytes(8192))
    inode = path.stat().st_ino
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        mapped = {key[1]: name for key, name in mapped_paths(os.getpid()).items()}
        assert mapped[inode] == str(path)
        assert set(open_paths(os.getpid())[inode]) == {str(path)}
    assert inode not in open_paths(os.getpid())


def test_a_device_that_is_open_is_no_file() -> None:
    """Its number may be that of a file on another file system."""
    with Path(os.devnull).open() as null:
        assert os.fstat(null.fileno()).st_ino not in open_paths(os.getpid())


def test_descriptors_of_nobody(tmp_path: Path) -> None:
    assert open_paths(7, tmp_path) == {}


# -- where a file lies ------------------------------------------------------------------------


def test_a_link_is_followed_to_the_file_that_is_open(tmp_path: Path) -> None:
    real, link = tmp_path / "real.gguf", tmp_path / "link.gguf"
    real.write_bytes(bytes(4096))
    link.symlink_to(real)
    status = real.stat()
    key = (kernel_dev(os.major(status.st_dev), os.minor(status.st_dev)), status.st_ino)
    with link.open("rb") as file:
        assert resolved(os.getpid(), key, str(link)) == str(real)
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
            assert resolved(os.getpid(), key, str(link)) == str(real)
    assert resolved(os.getpid(), key, str(link)) == str(real)  # closed: by the links themselves


def test_of_two_names_of_an_open_file_the_one_asked_for_is_kept(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"x")
    two.hardlink_to(one)
    key = (0, one.stat().st_ino)
    with one.open("rb"), two.open("rb"):
        assert resolved(os.getpid(), key, str(two)) == str(two)


def test_of_a_process_that_is_gone_the_name_is_kept(tmp_path: Path) -> None:
    assert resolved(7, (1, 2), "/models/m.gguf", tmp_path) == "/models/m.gguf"


# -- what an overlay shows --------------------------------------------------------------------


def put_overlay(proc: Path, pid: int, lower: str) -> None:
    """A process that has one file of an overlay mapped."""
    options = f"rw,lowerdir={lower},upperdir=/no/upper,workdir=/no/work"
    put(
        proc, pid,
        mountinfo=f"9 1 0:45 / / rw - overlay overlay {options}\n".encode(),
        maps=b"7f0000000000-7f0000001000 r--s 00000000 00:2d 99    /models/m.gguf\n",
    )  # fmt: skip


def test_an_overlays_file_is_known_by_the_one_beneath(tmp_path: Path) -> None:
    lower = tmp_path / "lower"
    (lower / "models").mkdir(parents=True)
    (lower / "models/m.gguf").write_bytes(bytes(8192))
    put_overlay(tmp_path, 7, str(lower))
    put(tmp_path, os.getpid(), mountinfo=Path("/proc/self/mountinfo").read_bytes())
    mount = mount_under(str(lower), mounts_of(os.getpid()))
    assert mount
    key = kernel_dev(*mount.dev), (lower / "models/m.gguf").stat().st_ino
    assert shown_as(7, key, 8192, tmp_path) == "/models/m.gguf"
    # Its own number, or its size, proves nothing where the layer can be looked at.
    assert shown_as(7, (key[0], 99), 8192, tmp_path) is None


def test_an_overlays_file_whose_layers_are_out_of_sight(tmp_path: Path) -> None:
    put_overlay(tmp_path, 7, "/no/lower")
    seen = tmp_path / "7/root/models/m.gguf"
    seen.parent.mkdir(parents=True)
    seen.write_bytes(bytes(8192))
    ext4 = kernel_dev(254, 0)
    assert shown_as(7, (ext4, 99), 8192, tmp_path) == "/models/m.gguf"
    assert shown_as(7, (ext4, 99), 8193, tmp_path) is None
    assert shown_as(7, (ext4, 98), 8192, tmp_path) is None
    assert shown_as(8, (ext4, 99), 8192, tmp_path) is None


def test_a_record_that_names_the_overlay_itself(tmp_path: Path) -> None:
    put_overlay(tmp_path, 7, "/no/lower")
    [mount] = mounts_of(7, tmp_path)
    assert names_itself(mount, kernel_dev(0, 45))
    assert not names_itself(mount, kernel_dev(254, 0))
    assert not names_itself(None, kernel_dev(0, 45))
