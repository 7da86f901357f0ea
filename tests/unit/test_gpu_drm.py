"""AMD by sysfs and any DRM device by fdinfo, from machines kept in the documented formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttftprof.sources import drm
from ttftprof.sources.gpu import DeviceLost
from unit.trees import unpack

MIB = 1 << 20
PROCESS = 70


def found(name: str, root: Path) -> drm.Drm:
    """The devices of a machine of tests/fixtures/gpu, with its one process followed."""
    unpack(f"gpu/{name}", root)
    vendor = drm.find(root / "sys", root / "proc")
    assert isinstance(vendor, drm.Drm)
    vendor.follow(frozenset({PROCESS, 71}))
    return vendor


def write(root: Path, fd: int, old: str, new: str) -> None:
    """The machine goes on: a number in an fdinfo becomes another."""
    path = root / f"proc/{PROCESS}/fdinfo/{fd}"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_an_amd_card(tmp_path: Path) -> None:
    vendor = found("amdgpu", tmp_path)
    assert vendor.open() == [
        {
            "index": 0, "parent": None, "vendor": "amd", "source": "drm", "driver": "amdgpu",
            "name": "Radeon RX 7900 XTX", "pci": "0000:03:00.0", "total_bytes": 25753026560,
            "persistence": None, "link_gen_max": 4, "link_width_max": 16,
        }
    ]  # fmt: skip
    assert vendor.look(0, -1).values == {"used_bytes": 1104326656}
    assert vendor.look(0, 0).values == {
        "used_bytes": 1104326656, "busy_percent": 42, "link_gen": 1, "link_width": 8,
        "core_mhz": 2304, "memory_mhz": 1249,
    }  # fmt: skip


def test_memory_by_process_counts_a_shared_client_once(tmp_path: Path) -> None:
    vendor = found("amdgpu", tmp_path)
    vendor.open()
    assert vendor.look(0, 0).processes == {PROCESS: 1536 << 10}


def test_an_amd_card_of_an_older_kernel(tmp_path: Path) -> None:
    """How busy it was is what its engines worked between two looks."""
    vendor = found("amdgpu_6_1", tmp_path)
    (fact,) = vendor.open()
    assert (fact["name"], fact["total_bytes"]) == ("amd 0x73bf", 17163091968)
    look = vendor.look(0, 0)
    assert (look.values, look.processes) == ({"used_bytes": 4 << 30}, {PROCESS: 3000 * MIB})


def test_a_device_without_memory_of_its_own(tmp_path: Path) -> None:
    """Its memory is the system's; how busy it was is what its engines worked between two looks."""
    unpack("gpu/i915", tmp_path)
    clock = iter([1_000_000_000, 1_100_000_000])
    vendor = drm.Drm([tmp_path / "sys/class/drm/card0/device"], tmp_path / "proc", clock.__next__)
    (fact,) = vendor.open()
    assert (fact["vendor"], fact["total_bytes"], fact["name"]) == ("intel", None, "intel 0x56a0")
    vendor.follow(frozenset({PROCESS}))
    state = {"used_bytes": 32 * MIB, "core_mhz": 1150, "memory_mhz": 0}
    assert vendor.look(0, 0).values == state
    write(tmp_path, 4, "render:\t5000000 ns", "render:\t30000000 ns")
    assert vendor.look(0, -1).values == {"used_bytes": 32 * MIB}
    assert vendor.look(0, 1).values == {**state, "busy_percent": 25}


def test_a_device_whose_engines_count_cycles(tmp_path: Path) -> None:
    vendor = found("xe", tmp_path)
    vendor.open()
    first = vendor.look(0, 0)
    assert (first.values["used_bytes"], first.processes) == (4608 * MIB, {PROCESS: 4608 * MIB})
    assert "busy_percent" not in first.values
    write(tmp_path, 21, "28257900", "28257960")
    write(tmp_path, 21, "7655183225", "7655183325")
    state = vendor.look(0, 1).values
    assert state["busy_percent"] == 60
    assert (state["link_gen"], state["link_width"], state["core_mhz"]) == (4, 8, 2850)


def test_a_descriptor_that_comes_later_is_found_within_a_second(tmp_path: Path) -> None:
    vendor = found("xe", tmp_path)
    vendor.open()
    assert vendor.look(0, 0).processes == {PROCESS: 4608 * MIB}
    text = (tmp_path / f"proc/{PROCESS}/fdinfo/21").read_text()
    for fd in (22, 23):
        (tmp_path / f"proc/{PROCESS}/fd/{fd}").symlink_to("/dev/dri/renderD128")
        client = text.replace("client-id:\t3", f"client-id:\t{fd}")
        (tmp_path / f"proc/{PROCESS}/fdinfo/{fd}").write_text(client)
    assert vendor.look(0, 2).processes == {PROCESS: 4608 * MIB}
    assert vendor.look(0, 26).processes == {PROCESS: 3 * 4608 * MIB}


def test_a_process_that_was_let_go_is_looked_at_anew(tmp_path: Path) -> None:
    """When its number comes back it may be another's."""
    vendor = found("xe", tmp_path)
    vendor.open()
    assert vendor.look(0, 0).processes == {PROCESS: 4608 * MIB}
    vendor.follow(frozenset())
    assert vendor.look(0, 2).processes == {}
    process = tmp_path / f"proc/{PROCESS}"
    (process / "fd/22").symlink_to("/dev/dri/renderD128")
    text = (process / "fdinfo/21").read_text()
    (process / "fdinfo/22").write_text(text.replace("client-id:\t3", "client-id:\t22"))
    vendor.follow(frozenset({PROCESS}))
    assert vendor.look(0, 4).processes == {PROCESS: 2 * 4608 * MIB}


def test_what_is_nvmls_and_what_cannot_render_is_left_alone(tmp_path: Path) -> None:
    unpack("gpu/xe", tmp_path)
    device = tmp_path / "sys/devices/pci0000:00/0000:04:00.0"
    (device / "driver").unlink()
    (device / "driver").symlink_to("../../../bus/pci/drivers/nvidia")
    assert drm.find(tmp_path / "sys", tmp_path / "proc") is None
    unpack("gpu/i915", tmp_path / "other")
    render = tmp_path / "other/sys/devices/pci0000:00/0000:00:02.0/drm/renderD128"
    render.rename(render.with_name("card0-without"))
    assert drm.find(tmp_path / "other/sys", tmp_path / "other/proc") is None
    assert drm.find(tmp_path / "nothing", tmp_path / "proc") is None


def test_a_card_that_goes(tmp_path: Path) -> None:
    vendor = found("amdgpu", tmp_path)
    vendor.open()
    (tmp_path / "sys/devices/pci0000:00/0000:03:00.0").rename(tmp_path / "away")
    with pytest.raises(DeviceLost):
        vendor.look(0, 0)


@pytest.mark.parametrize(
    "text",
    [
        "", "drm-", "drm-total-vram: x\n", "drm-memory-vram: -5 KiB\ndrm-engine-gfx: ns\n",
        "drm-cycles-rcs: -\ndrm-total-cycles-rcs: 1x\n",
    ],
)  # fmt: skip
def test_damaged_fdinfo_is_nothing(text: str, tmp_path: Path) -> None:
    unpack("gpu/xe", tmp_path)
    path = tmp_path / f"proc/{PROCESS}/fdinfo/21"
    path.write_text("drm-pdev: a\ndrm-client-id: 1\n" + text)
    files = [drm.Fdinfo(path), drm.Fdinfo(path.with_name("99"))]
    assert drm.usage_of(files) == {"a": drm.Usage()}
