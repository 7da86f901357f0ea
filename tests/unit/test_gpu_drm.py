"""AMD by sysfs and any DRM device by fdinfo, from files in their documented formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttftprof.gpu_rows import Valid
from ttftprof.sources import drm
from ttftprof.sources.gpu import DeviceLost

MIB = 1 << 20

AMD = {
    "vendor": "0x1002\n", "device": "0x744c\n", "product_name": "Radeon RX 7900 XTX\n",
    "mem_info_vram_total": "25753026560\n", "mem_info_vram_used": "1104326656\n",
    "gpu_busy_percent": "42\n", "current_link_speed": "2.5 GT/s PCIe\n",
    "max_link_speed": "16.0 GT/s PCIe\n", "current_link_width": "8\n", "max_link_width": "16\n",
}  # fmt: skip
INTEL = {"vendor": "0x8086\n", "device": "0x56a0\n"}

# Documentation/gpu/drm-usage-stats.rst; two descriptors of one client, one of another.
AMDGPU_FDINFO = """pos:\t0
flags:\t02100002
mnt_id:\t26
ino:\t1076
drm-driver:\tamdgpu
drm-client-id:\t{client}
drm-pdev:\t0000:03:00.0
pasid:\t32771
drm-total-cpu:\t0
drm-shared-vram:\t0
drm-total-vram:\t{vram} KiB
drm-resident-vram:\t{vram} KiB
drm-purgeable-vram:\t0
drm-total-gtt:\t2048 KiB
drm-resident-gtt:\t2048 KiB
drm-memory-vram:\t{vram} KiB
drm-engine-gfx:\t{ns} ns
drm-engine-compute:\t1000000 ns
"""
I915_FDINFO = """drm-driver:\ti915
drm-client-id:\t7
drm-pdev:\t0000:00:02.0
drm-total-system0:\t64 MiB
drm-resident-system0:\t32 MiB
drm-active-system0:\t0
drm-engine-render:\t{ns} ns
drm-engine-capacity-video:\t2
"""


def card(root: Path, number: int, slot: str, driver: str, files: dict[str, str]) -> Path:
    """A card as sysfs shows it; returns its device folder."""
    device = root / "sys/devices" / slot
    (device / f"drm/renderD{128 + number}").mkdir(parents=True)
    (root / "sys/drivers" / driver).mkdir(parents=True, exist_ok=True)
    (device / "driver").symlink_to(root / "sys/drivers" / driver)
    for name, text in files.items():
        (device / name).write_text(text)
    entry = root / f"sys/class/drm/card{number}"
    entry.mkdir(parents=True)
    (entry / "device").symlink_to(device)
    (root / f"sys/class/drm/card{number}-DP-1").mkdir()
    return device


def client(root: Path, tgid: int, fd: int, text: str, path: str = "/dev/dri/renderD128") -> None:
    process = root / "proc" / str(tgid)
    for name in ("fd", "fdinfo"):
        (process / name).mkdir(parents=True, exist_ok=True)
    link = process / "fd" / str(fd)
    link.unlink(missing_ok=True)
    link.symlink_to(path)
    (process / "fdinfo" / str(fd)).write_text(text)


def found(root: Path) -> drm.Drm:
    vendor = drm.find(root / "sys", root / "proc")
    assert isinstance(vendor, drm.Drm)
    return vendor


def test_an_amd_card(tmp_path: Path) -> None:
    card(tmp_path, 0, "0000:03:00.0", "amdgpu", AMD)
    vendor = found(tmp_path)
    (fact,) = vendor.open()
    assert (fact["vendor"], fact["name"], fact["driver"]) == (
        "amd", "Radeon RX 7900 XTX", "amdgpu"
    )  # fmt: skip
    assert (fact["total_bytes"], fact["link_gen_max"], fact["link_width_max"]) == (
        25753026560, 4, 16
    )  # fmt: skip
    look = vendor.look(0, 0)
    assert look.valid == Valid.USED | Valid.BUSY | Valid.LINK
    assert look.values == {
        "used_bytes": 1104326656, "busy_percent": 42, "link_gen": 1, "link_width": 8
    }  # fmt: skip
    assert vendor.look(0, 1).valid == Valid.USED


def test_memory_by_process_counts_a_shared_client_once(tmp_path: Path) -> None:
    card(tmp_path, 0, "0000:03:00.0", "amdgpu", AMD)
    first = AMDGPU_FDINFO.format(client=5, vram=1024, ns=10)
    client(tmp_path, 70, 4, first)
    client(tmp_path, 70, 9, first)
    client(tmp_path, 70, 11, AMDGPU_FDINFO.format(client=6, vram=512, ns=10))
    client(tmp_path, 70, 12, "drm-pdev:\t0000:03:00.0\n", path="/var/log/some.log")
    vendor = found(tmp_path)
    vendor.open()
    vendor.follow(frozenset({70, 71}))
    assert vendor.look(0, 0).processes == {70: 1536 << 10}


def test_a_device_without_memory_of_its_own(tmp_path: Path) -> None:
    """Its memory is the system's; how busy it was is what its engines worked between two looks."""
    card(tmp_path, 0, "0000:00:02.0", "i915", INTEL)
    clock = iter([1_000_000_000, 1_100_000_000])
    vendor = drm.Drm([tmp_path / "sys/class/drm/card0/device"], tmp_path / "proc", clock.__next__)
    (fact,) = vendor.open()
    assert (fact["vendor"], fact["total_bytes"], fact["name"]) == ("intel", None, "intel 0x56a0")
    vendor.follow(frozenset({70}))
    client(tmp_path, 70, 4, I915_FDINFO.format(ns=5_000_000))
    assert vendor.look(0, 0).values == {"used_bytes": 32 * MIB}
    client(tmp_path, 70, 4, I915_FDINFO.format(ns=30_000_000))
    assert vendor.look(0, 5).values == {"used_bytes": 32 * MIB, "busy_percent": 25}


def test_what_is_nvmls_and_what_cannot_render_is_left_alone(tmp_path: Path) -> None:
    card(tmp_path, 0, "0000:01:00.0", "nvidia", {"vendor": "0x10de\n"})
    device = card(tmp_path, 1, "0000:04:00.0", "ast", {"vendor": "0x1a03\n"})
    (device / "drm/renderD129").rmdir()
    assert drm.find(tmp_path / "sys", tmp_path / "proc") is None
    assert drm.find(tmp_path / "nothing", tmp_path / "proc") is None


def test_a_card_that_goes(tmp_path: Path) -> None:
    device = card(tmp_path, 0, "0000:03:00.0", "amdgpu", AMD)
    vendor = found(tmp_path)
    vendor.open()
    device.rename(tmp_path / "away")
    with pytest.raises(DeviceLost):
        vendor.look(0, 0)


@pytest.mark.parametrize(
    "text", ["", "drm-", "drm-total-vram: x\n", "drm-memory-vram: -5 KiB\ndrm-engine-gfx: ns\n"]
)
def test_damaged_fdinfo_is_nothing(text: str, tmp_path: Path) -> None:
    client(tmp_path, 70, 4, "drm-pdev: a\ndrm-client-id: 1\n" + text)
    assert drm.usage_of(tmp_path / "proc", 70) == {"a": drm.Usage(0, 0)}
