"""The layers under a file, from the /proc and /sys of thirteen machines; parsers fuzzed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttftprof.cli.storage import command
from ttftprof.errors import Unsupported
from ttftprof.recorder import Recorder
from ttftprof.sources.mounts import Mount, parse_mountinfo
from ttftprof.sources.overlay import overlay_folders, split_folders
from ttftprof.stack import (
    Layer,
    Stack,
    System,
    local_addresses,
    monitor_of,
    parse_routes,
    parse_routes6,
    path_facts,
    pcie_link,
    safe_options,
    sata_rate,
    server_of,
    stack_of,
)
from ttftprof.weights import biggest_model, mount_id, shard_group
from unit.trees import unpack


@pytest.fixture
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> System:
    unpack(f"sys/{request.param}", tmp_path)
    return System(proc=tmp_path / "proc", sysfs=tmp_path / "sys", exists=lambda _: False)


def on(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("machine", [name], indirect=True, ids=[name])


def kinds(stack: Stack) -> list[str]:
    return [layer.kind for layer in stack.layers()]


def layer(stack: Stack, kind: str) -> Layer:
    return next(found for found in stack.layers() if found.kind == kind)


def governing(stack: Stack) -> tuple[str, int | None]:
    assert stack.readahead is not None
    return stack.readahead.name, stack.readahead.read_ahead_kb


@on("nvme")
def test_partition_of_an_nvme_disk(machine: System) -> None:
    stack = stack_of("/var/m.gguf", system=machine)
    assert kinds(stack) == ["file system", "partition", "disk", "controller"]
    assert governing(stack) == ("nvme0n1", 128)
    assert layer(stack, "disk").facts[0] == ("model", "Samsung SSD 970 EVO Plus 1TB")
    rate, what = stack.line_rate or (0.0, "")
    assert rate == pytest.approx(8e9 * 128 / 130 * 2 / 8)
    assert what == "controller nvme0"
    assert layer(stack, "controller").notes == ("the device could do 8.0 GT/s × 4",)


@on("nvme")
def test_a_bind_mount_says_of_what(machine: System) -> None:
    stack = stack_of("/models/m.gguf", system=machine)
    assert stack.top.notes == ("/models is a bind mount of /srv/models",)
    assert ("options", "ro") in stack.top.facts


@on("nvme")
def test_memory_has_no_storage(machine: System) -> None:
    stack = stack_of("/dev/shm/m.gguf", system=machine)
    assert stack.in_memory
    assert stack.readahead is None


@on("nvme")
def test_the_mount_id_decides_between_mounts_of_one_place(machine: System) -> None:
    assert stack_of("/models/m", mount_id=27, system=machine).mount == (
        stack_of("/x", system=machine).mount
    )


@on("lvm_luks_sata")
def test_volume_on_luks_on_sata(machine: System) -> None:
    stack = stack_of("/data/m", system=machine)
    assert kinds(stack) == ["file system", "volume", "crypt", "partition", "disk", "controller"]
    assert [s.read_ahead_kb for s in stack.layers()] == [None, 256, 128, None, 64, None]
    assert layer(stack, "crypt").name == "LUKS2 cryptdata (dm-1)"
    assert layer(stack, "disk").facts[0] == ("model", "ATA CT2000MX500SSD1")
    assert stack.line_rate == (300e6, "controller SATA ata3")
    assert layer(stack, "controller").notes == ("the port could do 6.0 Gbps",)


@on("md_raid")
def test_raid_sums_its_links_and_tells_its_state(machine: System) -> None:
    stack = stack_of("/tank/m", system=machine)
    raid = layer(stack, "raid")
    assert dict(raid.facts) == {"level": "raid5", "disks": "3", "chunk": "512 KiB"}
    assert raid.notes == ("degraded: 1 disk(s) missing", "busy with check")
    assert governing(stack) == ("md0", 2048)
    assert stack.line_rate == (1200e6, "controller SATA ata1 + controller SATA ata2")


@on("loop_on_nfs")
def test_an_image_on_nfs_has_two_readaheads(machine: System) -> None:
    stack = stack_of("/models image/m", system=machine)
    assert kinds(stack) == ["file system", "loop", "file system", "server", "interface"]
    assert governing(stack) == ("loop3", 128)
    assert [s.read_ahead_kb for s in stack.layers()] == [None, 128, 15360, None, None]
    assert stack.line_rate == (312.5e6, "interface eth0")


@on("btrfs")
def test_btrfs_has_its_own_readahead_and_all_its_devices(machine: System) -> None:
    stack = stack_of("/home/m", system=machine)
    assert kinds(stack) == ["file system", "partition", "disk", "controller", "disk", "controller"]
    assert governing(stack) == ("btrfs", 4096)
    assert stack.top.notes == ()
    assert governing(stack_of("/other/m", system=machine)) == ("btrfs", 8192)


@on("overlay")
def test_overlay_leads_to_the_layer_that_holds_the_file(machine: System) -> None:
    system = System(machine.proc, machine.sysfs, lambda p: p == "/lower:one/models/m")
    stack = stack_of("/merged/models/m", system=system)
    assert kinds(stack) == ["file system", "file system", "disk", "controller"]
    assert ("the file is in", "/lower:one") in stack.top.facts
    assert governing(stack) == ("vda", 128)


@on("overlay")
def test_overlay_of_a_container(machine: System) -> None:
    base = "/var/lib/docker/overlay2/l"
    system = System(machine.proc, machine.sysfs, lambda p: p == f"{base}/BBB/models/m")
    stack = stack_of("/models/m", pid=77, system=system)
    assert ("the file is in", f"{base}/BBB") in stack.top.facts
    assert governing(stack) == ("vda", 128)


@on("overlay")
def test_overlay_whose_layers_are_out_of_sight(machine: System) -> None:
    stack = stack_of("/models/m", pid=77, system=machine)
    assert stack.top.notes == ("which layer holds the file cannot be seen from here",)
    assert stack.readahead is None


@on("nfs4")
def test_nfs_over_a_gigabit_port(machine: System) -> None:
    stack = stack_of("/mnt/nas/m", system=machine)
    assert kinds(stack) == ["file system", "server", "interface"]
    assert governing(stack) == ("nfs4", 128)
    options = dict(stack.top.facts)["options"]
    assert options == "vers=4.2,proto=tcp,rsize=1048576,nconnect=4,hard,sec=sys"
    assert layer(stack, "server").name == "192.168.1.10"
    assert stack.line_rate == (125e6, "interface eth0")


@on("cifs")
def test_cifs_does_not_say_which_bdi_is_its(machine: System) -> None:
    stack = stack_of("/mnt/smb/m", system=machine)
    assert stack.readahead is None
    assert stack.top.notes == ("readahead is one of cifs-1: 8192 KiB, cifs-2: 128 KiB",)
    assert stack.line_rate == (1250e6, "interface eth1")
    assert stack.mount is not None
    assert "hunter2" not in safe_options(stack.mount)
    assert "hunter2" not in repr(stack.top.facts)


@on("cifs")
def test_cifs_readahead_is_known_if_all_agree(machine: System) -> None:
    (machine.sysfs / "class/bdi/cifs-1/read_ahead_kb").write_text("128\n")
    stack = stack_of("/mnt/smb/m", system=machine)
    assert governing(stack) == ("cifs", 128)
    assert stack.readahead is not None
    assert stack.readahead.read_ahead_file is None, "none may be written: which is not known"


@on("cifs")
def test_a_server_by_name_has_no_known_way(machine: System) -> None:
    stack = stack_of("/mnt/smb2/m", system=machine)
    assert layer(stack, "server").name == "other"
    assert stack.line_rate is None


@on("sshfs")
def test_sshfs_through_a_tunnel(machine: System) -> None:
    stack = stack_of("/mnt/ssh/m", system=machine)
    assert kinds(stack) == ["file system", "server", "interface"]
    assert ("max_background", "12") in stack.top.facts
    assert layer(stack, "interface").notes == ("its link speed is not known to the kernel",)
    assert governing(stack) == ("fuse.sshfs", 128)


@on("nfs4")
def test_a_recording_keeps_the_link_and_the_layers(machine: System) -> None:
    facts = path_facts("/mnt/nas/m", None, machine)
    assert facts["read_ahead_kb"] == 128
    assert facts["max_request_kb"] is None  # no disk of this machine
    assert (facts["link"], facts["line_bytes_per_second"]) == ("interface eth0", 125e6)
    assert [layer.split(" ")[0] for layer in facts["layers"]] == ["file", "server", "interface"]


@on("cifs")
def test_an_smb_mounts_readahead_comes_from_the_bdi_that_must_be_its(machine: System) -> None:
    (machine.sysfs / "class/bdi/cifs-1/read_ahead_kb").write_text("128")
    assert path_facts("/mnt/smb/m", None, machine)["read_ahead_kb"] == 128


@on("nvme")
def test_a_recording_keeps_the_largest_request_of_a_disk(machine: System) -> None:
    governing_file = stack_of("/var/m.gguf", system=machine).readahead
    assert governing_file
    assert governing_file.read_ahead_file
    number = governing_file.read_ahead_file.parent.name
    queue = machine.sysfs / "dev/block" / number / "queue"
    (queue).mkdir(parents=True, exist_ok=True)
    (queue / "max_sectors_kb").write_text("1280")
    assert path_facts("/var/m.gguf", None, machine)["max_request_kb"] == 1280


def test_without_proc_nothing_is_kept(tmp_path: Path) -> None:
    assert path_facts("/m", 7, System(tmp_path, tmp_path)) == {}


def test_what_lies_under_a_file_is_not_taken_for_unknown_because_a_process_is_gone() -> None:
    """A file on the same mount may be of one that lives."""
    ours = SimpleNamespace(_stacks={}, _fstypes=set())
    gone = subprocess.Popen(["true"])
    gone.wait()
    facts = [Recorder._path_facts(ours, 1, None, "/", pid) for pid in (gone.pid, os.getpid())]  # type: ignore[arg-type]
    assert facts[0] == {}
    assert facts[1]["layers"]


@on("virtiofs")
def test_virtiofs_sends_to_the_host(machine: System) -> None:
    stack = stack_of("/models/m", system=machine)
    assert governing(stack) == ("virtiofs", 128)
    assert "host's" in stack.top.notes[0]


@on("usb2")
def test_usb_3_stick_in_a_usb_2_port(machine: System) -> None:
    stack = stack_of("/media/stick/m", system=machine)
    assert stack.line_rate == (60e6, "controller USB 1-2")
    assert "USB 3 device at USB 2 speed" in layer(stack, "controller").notes[0]
    assert governing(stack) == ("sdb", 128)


@on("iscsi")
def test_iscsi_leads_to_its_server(machine: System) -> None:
    stack = stack_of("/lun/m", system=machine)
    assert kinds(stack) == ["file system", "disk", "target", "server", "interface"]
    assert layer(stack, "target").name == "iSCSI iqn.2004-04.com.nas:models"
    assert stack.line_rate == (1250e6, "interface ens1")


@on("zfs")
def test_zfs_is_known_as_such(machine: System) -> None:
    stack = stack_of("/tank/models/m", system=machine)
    assert stack.is_zfs
    assert ("ARC now", "8.59 GB") in stack.top.facts
    assert governing(stack) == ("zfs", 0)


def test_a_file_system_on_a_zfs_volume_is_zfs_too(tmp_path: Path) -> None:
    """Its blocks lie in the ARC as well."""
    disk = tmp_path / "sys/devices/virtual/block/zd0"
    (disk / "queue").mkdir(parents=True)
    (disk / "dev").write_text("230:0\n")
    numbers = tmp_path / "sys/dev/block"
    numbers.mkdir(parents=True)
    (numbers / "230:0").symlink_to(disk)
    own = tmp_path / "proc/self"
    own.mkdir(parents=True)
    (own / "mountinfo").write_text("29 1 230:0 / /models rw - ext4 /dev/zd0 rw\n")
    stack = stack_of("/models/m", system=System(tmp_path / "proc", tmp_path / "sys"))
    assert kinds(stack) == ["file system", "disk", "volume"]
    assert stack.is_zfs


@on("zfs")
@pytest.mark.parametrize("force", [False, True])
def test_zfs_is_measured_only_by_force(
    machine: System, force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache cannot be asked or put back."""
    model = tmp_path / "m.gguf"
    model.write_bytes(bytes(4 << 20))
    on_zfs = stack_of("/tank/models/m", system=machine)
    assert on_zfs.is_zfs
    monkeypatch.setattr("ttftprof.cli.storage.stack_of", lambda *_: on_zfs)
    arguments = ["--format", "json", "--quick", "--evict", str(model), *["--force"] * force]
    code = command.main(arguments, standalone_mode=False)
    assert code == (0 if force else Unsupported.exit_code)


def test_a_machine_that_shows_nothing(tmp_path: Path) -> None:
    system = System(tmp_path, tmp_path)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text("27 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
    stack = stack_of("/m", system=system)
    assert stack.readahead is None
    assert layer(stack, "disk").notes == ("sysfs does not show this device",)
    with pytest.raises(OSError, match="mountinfo"):
        stack_of("/m", pid=1, system=system)


def test_own_addresses_are_found() -> None:
    system = System()
    text = (system.proc / "net/fib_trie").read_text()
    assert "127.0.0.1" in local_addresses(text)


@pytest.mark.parametrize(
    ("fstype", "source", "server"),
    [
        ("nfs4", "nas:/export", "nas"),
        ("nfs", "[2001:db8::1]:/export", "2001:db8::1"),
        ("cifs", "//nas.lan/share/sub", "nas.lan"),
        ("ceph", "10.0.0.1:6789,10.0.0.2:6789:/", "10.0.0.1"),
        ("9p", "drvfs", ""),
    ],
)
def test_servers_in_sources(fstype: str, source: str, server: str) -> None:
    assert server_of(fstype, source) == server


@pytest.mark.parametrize(
    ("mon_addr", "server"),
    [
        ("192.0.2.1:3300/192.0.2.2:3300", "192.0.2.1"),
        ("192.0.2.1", "192.0.2.1"),
        ("[2001:db8::1]:3300/[2001:db8::2]:3300", "2001:db8::1"),
        ("2001:db8::1", "2001:db8::1"),
        ("", ""),
    ],
)
def test_a_ceph_mount_names_its_monitors_in_an_option(
    mon_addr: str, server: str, tmp_path: Path
) -> None:
    assert monitor_of(mon_addr) == server
    own = tmp_path / "proc/self"
    own.mkdir(parents=True)
    line = f"29 1 0:40 / /models rw - ceph me@0-1.fs=/models rw,name=me,mon_addr={mon_addr}\n"
    (own / "mountinfo").write_text(line)
    stack = stack_of("/models/m", system=System(tmp_path / "proc", tmp_path / "sys"))
    assert [found.name for found in stack.layers()] == ["ceph", *[server] * bool(server)]


def test_links() -> None:
    assert pcie_link("16.0 GT/s PCIe", "4")[0] == "16.0 GT/s × 4"
    assert pcie_link("16.0 GT/s PCIe", "4")[1] == pytest.approx(7.877e9, rel=1e-3)
    assert pcie_link("Unknown", "255") == ("", None)
    assert sata_rate("6.0 Gbps") == 600e6
    assert sata_rate("<unknown>") is None


# -- what the user names ---------------------------------------------------------------------------


def test_the_biggest_model_is_taken_with_all_its_shards(tmp_path: Path) -> None:
    (tmp_path / "deep/er").mkdir(parents=True)
    for part in (2, 1, 3):
        (tmp_path / f"deep/er/m-{part:05}-of-00003.safetensors").write_bytes(bytes(4000))
    (tmp_path / "one.gguf").write_bytes(bytes(10_000))
    (tmp_path / "notes.txt").write_bytes(bytes(50_000))
    names, why = biggest_model(tmp_path)
    assert names == [f"deep/er/m-{p:05}-of-00003.safetensors" for p in (1, 2, 3)]
    assert why.startswith("the biggest of 2 model(s)")


def test_blobs_without_a_suffix_and_empty_folders(tmp_path: Path) -> None:
    assert biggest_model(tmp_path)[0] == []
    (tmp_path / "sha256-aa").write_bytes(bytes(10))
    (tmp_path / "sha256-bb").write_bytes(bytes(20))
    assert biggest_model(tmp_path)[0] == ["sha256-bb"]
    assert biggest_model(tmp_path / "gone")[0] == []


def test_mount_id_of_an_open_file() -> None:
    fd = os.open("/proc/self/mountinfo", os.O_RDONLY)
    text = Path(f"/proc/self/fdinfo/{fd}").read_text()
    os.close(fd)
    found = mount_id(text)
    assert found is not None
    mounts = parse_mountinfo(Path("/proc/self/mountinfo").read_text())
    assert found in {mount.mount_id for mount in mounts}


# -- fuzz ------------------------------------------------------------------------------------------

LINES = st.lists(
    st.one_of(
        st.text(max_size=80),
        st.text(alphabet="0123456789abcdefABCDEF \t:/-,=.\\", max_size=120),
    ),
    max_size=8,
).map("\n".join)


@given(LINES)
def test_any_text_is_parsed_to_something(text: str) -> None:
    parse_routes(text)
    parse_routes6(text)
    local_addresses(text)
    mount_id(text)
    parse_mountinfo(text)
    pcie_link(text, text)
    sata_rate(text)
    shard_group(text)
    server_of("nfs", text)
    server_of("cifs", text)


@given(st.text(max_size=200))
def test_any_options_are_parsed(options: str) -> None:
    mount = Mount(1, (0, 9), "/", "overlay", "overlay", options)
    assert all(folder.startswith("/") for folder in overlay_folders(mount))
    assert safe_options(mount).count(",") == options.count(",")


@given(st.lists(st.text(alphabet="abc:", min_size=1, max_size=6), min_size=1, max_size=5))
def test_lower_folders_survive_escaping(folders: list[str]) -> None:
    escaped = ":".join(folder.replace(":", "\\:") for folder in folders)
    assert [f.replace("\\:", ":") for f in split_folders(escaped)] == folders


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> tuple[System, list[Path]]:
    """An NVMe disk, and the files that tell of it, but for those that say which it is."""
    root = tmp_path_factory.mktemp("device")
    unpack("sys/nvme", root)
    files = [f for f in (root / "sys").rglob("*") if f.is_file() and not f.is_symlink()]
    return System(root / "proc", root / "sys"), [f for f in files if f.name != "dev"]


@given(content=st.binary(max_size=300))
def test_any_bytes_in_the_files_of_a_device(
    content: bytes, device: tuple[System, list[Path]]
) -> None:
    system, files = device
    for file in files:
        file.write_bytes(content)
    stack = stack_of("/m", system=system)
    assert kinds(stack)[:3] == ["file system", "partition", "disk"]
