"""GPUs that no vendor library is asked for: AMD by sysfs, any other by the DRM fdinfo of its users.

Formats: Documentation/gpu/amdgpu/driver-misc.rst (`mem_info_vram_*`, `gpu_busy_percent`) and
thermal.rst (hwmon `freq1_input`, `freq2_input`, in Hz); Documentation/ABI/testing/sysfs-bus-pci
(`current_link_speed`); drivers/gpu/drm/i915/gt/intel_gt_sysfs_pm.c, drivers/gpu/drm/xe/xe_gt_freq.c
(clocks in MHz); Documentation/gpu/drm-usage-stats.rst (`drm-resident-*`, before 6.6 `drm-memory-*`;
`drm-engine-*` in ns, of xe `drm-cycles-*` of `drm-total-cycles-*`). NVIDIA's own driver offers none
of this; its devices are NVML's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttftprof.clock import now_ns
from ttftprof.sources.gpu import DeviceLost, GpuAbsent, Look, Vendor

# GT/s of a lane by generation: PCI Express Base Specification.
_GENERATION = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
_CARD = re.compile(r"card\d+")
_OWN_MEMORY = ("vram", "local", "lmem", "stolen-local")
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
# Where drivers tell the clocks of a device, of its cores and of its memory, and in what unit.
_CLOCKS = (
    ("hwmon/hwmon*/freq1_input", "hwmon/hwmon*/freq2_input", 1_000_000),
    ("drm/card*/gt/gt0/rps_act_freq_mhz", "", 1),
    ("tile0/gt0/freq0/act_freq", "", 1),
)
_USERS_KEPT = 25  # turns after which the descriptors of a process are looked for anew
_VENDORS = {"0x1002": "amd", "0x8086": "intel", "0x10de": "nvidia"}


def find(sysfs: Path = Path("/sys"), proc: Path = Path("/proc")) -> Vendor | None:
    """The DRM devices that can render and are not NVML's, or None."""
    cards = list(_cards(sysfs))
    return Drm(cards, proc) if cards else None


def _cards(sysfs: Path) -> Iterator[Path]:
    """The device folders behind /sys/class/drm/card*."""
    try:
        entries = sorted((sysfs / "class/drm").iterdir())
    except OSError:
        return
    for entry in entries:
        device = entry / "device"
        if not _CARD.fullmatch(entry.name) or not any((device / "drm").glob("renderD*")):
            continue
        if _driver(device) != "nvidia":
            yield device


def _driver(device: Path) -> str:
    try:
        return (device / "driver").readlink().name
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Usage:
    """One process on one device: bytes it holds there, how long its engines worked for it, and
    where the driver counts so, for how many cycles of how many that passed."""

    memory_bytes: int = 0
    engine_ns: int = 0
    cycles: int = 0
    total_cycles: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.memory_bytes + other.memory_bytes,
            self.engine_ns + other.engine_ns,
            self.cycles + other.cycles,
            max(self.total_cycles, other.total_cycles),
        )


class Drm(Vendor):
    """Cards by sysfs; memory by process from the fdinfo of the processes to `follow`."""

    name = "drm"

    def __init__(self, cards: list[Path], proc: Path, clock: Callable[[], int] = now_ns) -> None:
        self._cards = cards
        self._proc = proc
        self._clock = clock
        self._slots = [card.resolve().name for card in cards]
        self._clocks = [_clock_files(card) for card in cards]
        self._tgids: frozenset[int] = frozenset()
        self._descriptors: dict[int, tuple[int, list[str]]] = {}  # {tgid: (turn, names)}
        self._worked: dict[int, tuple[int, Usage]] = {}

    def open(self) -> list[dict[str, Any]]:
        if not self._cards:
            raise GpuAbsent("no DRM device that can render")
        return [self._fact(index, card) for index, card in enumerate(self._cards)]

    def _fact(self, index: int, card: Path) -> dict[str, Any]:
        vendor = _VENDORS.get(_read(card / "vendor") or "", "other")
        name = _read(card / "product_name") or f"{vendor} {_read(card / 'device') or ''}".strip()
        return {
            "index": index,
            "parent": None,
            "vendor": vendor,
            "source": self.name,
            "name": name,
            "pci": self._slots[index],
            "driver": _driver(card) or None,
            "total_bytes": _number(card / "mem_info_vram_total"),
            "persistence": None,
            "link_gen_max": _generation(_read(card / "max_link_speed")),
            "link_width_max": _number(card / "max_link_width"),
        }

    def follow(self, tgids: frozenset[int]) -> None:
        self._tgids = tgids

    def look(self, device: int, turn: int) -> Look:
        card = self._cards[device]
        if not card.exists():
            raise DeviceLost(device, "it is gone from sysfs")
        found: dict[str, int] = {}
        users = self._users(device, turn) if turn >= 0 and turn % 2 == 0 else None
        used = _number(card / "mem_info_vram_used")
        if used is None and users is not None:
            used = sum(user.memory_bytes for user in users.values())
        if used is not None:
            found["used_bytes"] = used
        if users is not None:
            self._busy(device, users, found)
        elif turn >= 0:
            _link(card, found)
            _clock(self._clocks[device], found)
        processes = None if users is None else {t: u.memory_bytes for t, u in users.items()}
        return Look(found, processes)

    def _users(self, device: int, turn: int) -> dict[int, Usage]:
        slot, tgids = self._slots[device], self._tgids
        for gone in self._descriptors.keys() - tgids:
            del self._descriptors[gone]  # its number may be another's next
        found = {}
        for tgid in tgids:
            seen, names = self._descriptors.get(tgid, (-_USERS_KEPT, []))
            if turn - seen >= _USERS_KEPT:
                seen, names = turn, drm_descriptors(self._proc, tgid)
                self._descriptors[tgid] = seen, names
            usage = usage_of(self._proc, tgid, names).get(slot) if names else None
            if usage is not None:
                found[tgid] = usage
        return found

    def _busy(self, device: int, users: Mapping[int, Usage], found: dict[str, int]) -> None:
        """The driver's own figure, or the share of the time since the last look that the engines
        worked for the processes that are followed."""
        percent = _number(self._cards[device] / "gpu_busy_percent")
        now, worked = self._clock(), sum(users.values(), Usage())
        before = self._worked.get(device)
        self._worked[device] = now, worked
        if percent is None and before is not None and now > before[0]:
            percent = _busy_percent(before[1], worked, now - before[0])
        if percent is not None and 0 <= percent <= 100:
            found["busy_percent"] = percent

    def close(self) -> None:
        return


def _busy_percent(before: Usage, now: Usage, lasted_ns: int) -> int:
    passed = now.total_cycles - before.total_cycles
    if passed > 0:
        worked, of = now.cycles - before.cycles, passed
    else:
        worked, of = now.engine_ns - before.engine_ns, lasted_ns
    return min(max(worked, 0) * 100 // of, 100)


def drm_descriptors(proc: Path, tgid: int) -> list[str]:
    """The file descriptors of a process that are DRM devices."""
    try:
        return [fd.name for fd in (proc / str(tgid) / "fd").iterdir() if _is_drm(fd)]
    except OSError:
        return []


def _is_drm(fd: Path) -> bool:
    try:
        return str(fd.readlink()).startswith("/dev/dri/")
    except OSError:
        return False


def usage_of(proc: Path, tgid: int, descriptors: Iterable[str]) -> dict[str, Usage]:
    """{PCI slot: usage} of one process; a client that several descriptors share counts once."""
    clients: dict[tuple[str, str], Usage] = {}
    for fd in descriptors:
        fields = parse_fdinfo(_read(proc / str(tgid) / "fdinfo" / fd) or "")
        slot, client = fields.get("drm-pdev"), fields.get("drm-client-id")
        if slot and client:
            clients[slot, client] = Usage(
                _memory_bytes(fields), _engine_ns(fields), *_cycles(fields)
            )
    found: dict[str, Usage] = {}
    for (slot, _), usage in clients.items():
        found[slot] = found.get(slot, Usage()) + usage
    return found


def parse_fdinfo(text: str) -> dict[str, str]:
    """The `drm-` keys of an fdinfo file."""
    pairs = (line.partition(":") for line in text.splitlines() if line.startswith("drm-"))
    return {key: value.strip() for key, _, value in pairs}


def _memory_bytes(fields: Mapping[str, str]) -> int:
    """What lies in the device's own memory; on one without any, what lies in the system's for it.

    `resident` is told since 6.6 or so; before, amdgpu called the same `memory`.
    """
    for prefix in ("drm-resident-", "drm-memory-", "drm-total-"):
        regions = {k.removeprefix(prefix): v for k, v in fields.items() if k.startswith(prefix)}
        if regions:
            own = [v for k, v in regions.items() if k.startswith(_OWN_MEMORY)]
            return sum(map(_size, own or regions.values()))
    return 0


def _engine_ns(fields: Mapping[str, str]) -> int:
    """The sum over engines: work on two at once counts twice."""
    return sum(
        int(value.removesuffix(" ns"))
        for key, value in fields.items()
        if key.startswith("drm-engine-") and value.removesuffix(" ns").isdigit()
    )


def _cycles(fields: Mapping[str, str]) -> tuple[int, int]:
    """(cycles of all engines together, cycles that passed meanwhile) of xe."""
    worked, passed = 0, 0
    for key, value in fields.items():
        if key.startswith("drm-cycles-") and value.isdigit():
            worked += int(value)
        elif key.startswith("drm-total-cycles-") and value.isdigit():
            passed = max(passed, int(value))
    return worked, passed


def _size(text: str) -> int:
    number, _, unit = text.partition(" ")
    return int(number) * _UNITS.get(unit, 0) if number.isdigit() else 0


def _link(card: Path, found: dict[str, int]) -> None:
    gen = _generation(_read(card / "current_link_speed"))
    width = _number(card / "current_link_width")
    if gen is not None and width is not None and 0 < width < 256:
        found["link_gen"], found["link_width"] = gen, width


def _clock_files(card: Path) -> tuple[Path, Path | None, int] | None:
    """(cores, memory, per MHz) of the first way in which this driver tells clocks."""
    for core, memory, per_mhz in _CLOCKS:
        cores = sorted(card.glob(core))
        if cores:
            memories = sorted(card.glob(memory)) if memory else []
            return cores[0], memories[0] if memories else None, per_mhz
    return None


def _clock(files: tuple[Path, Path | None, int] | None, found: dict[str, int]) -> None:
    core = _number(files[0]) if files else None
    if files is None or core is None:
        return
    memory = _number(files[1]) if files[1] else None
    found["core_mhz"], found["memory_mhz"] = core // files[2], (memory or 0) // files[2]


def _generation(speed: str | None) -> int | None:
    """From `16.0 GT/s PCIe`."""
    return _GENERATION.get(speed.split(" ")[0]) if speed else None


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text and text.isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
