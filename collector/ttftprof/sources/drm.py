"""GPUs that no vendor library is asked for: AMD by sysfs, any other by the DRM fdinfo of its users.

Formats: Documentation/gpu/amdgpu/driver-misc.rst (`mem_info_vram_*`, `gpu_busy_percent`) and
thermal.rst (hwmon `freq1_input`, `freq2_input`, in Hz); Documentation/ABI/testing/sysfs-bus-pci
(`current_link_speed`); drivers/gpu/drm/i915/gt/intel_gt_sysfs_pm.c, drivers/gpu/drm/xe/xe_gt_freq.c
(clocks in MHz); Documentation/gpu/drm-usage-stats.rst (`drm-resident-*`, before 6.6 `drm-memory-*`;
`drm-engine-*` in ns, of xe `drm-cycles-*` of `drm-total-cycles-*`). NVIDIA's own driver offers none
of this; its devices are NVML's.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
# One key of an fdinfo file, without the blanks around its value.
_FIELD = re.compile(r"^(drm-[^:\n]*):[ \t]*(.*?)[ \t]*$", re.MULTILINE)
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


class KernelFile:
    """A small file that the kernel writes anew for each read from its beginning: one descriptor is
    kept, for to open it costs more than to read it. Of one that is not there, or whose device or
    process is gone, nothing is read."""

    _SIZE = 1 << 14

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def read(self) -> bytes | None:
        if self._fd < 0:
            return None
        try:
            return os.pread(self._fd, self._SIZE, 0)
        except OSError:
            return None

    def number(self) -> int | None:
        text = self.read()
        return int(text) if text and text.strip().isdigit() else None

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class Fdinfo(KernelFile):
    """What one descriptor of a process tells of its client of a device."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._text: bytes | None = None
        self._client: tuple[tuple[str, str], Usage] | None = None

    def client(self) -> tuple[tuple[str, str], Usage] | None:
        """((PCI slot, client), usage), taken apart anew only if it has changed; None of no DRM
        device."""
        text = self.read()
        if text != self._text:
            self._text = text
            self._client = _client_of(parse_fdinfo((text or b"").decode(errors="replace")))
        return self._client


def _client_of(fields: Mapping[str, str]) -> tuple[tuple[str, str], Usage] | None:
    slot, client = fields.get("drm-pdev"), fields.get("drm-client-id")
    if not slot or not client:
        return None
    return (slot, client), Usage(_memory_bytes(fields), _engine_ns(fields), *_cycles(fields))


class _Card:
    """What is read of one device again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = str(folder)
        self.slot = folder.resolve().name
        self.used, self.busy = (
            KernelFile(folder / name) for name in ("mem_info_vram_used", "gpu_busy_percent")
        )
        self._speed, self._width = (
            KernelFile(folder / f"current_link_{what}") for what in ("speed", "width")
        )
        self._clocks = _clock_files(folder)

    def state(self, found: dict[str, int]) -> None:
        gen = _generation((self._speed.read() or b"").decode(errors="replace"))
        width = self._width.number()
        if gen is not None and width is not None and 0 < width < 256:
            found["link_gen"], found["link_width"] = gen, width
        if self._clocks is None:
            return
        core, memory, per_mhz = self._clocks
        rate = core.number()
        if rate is not None:
            found["core_mhz"] = rate // per_mhz
            found["memory_mhz"] = ((memory.number() if memory else None) or 0) // per_mhz


class Drm(Vendor):
    """Cards by sysfs; memory by process from the fdinfo of the processes to `follow`."""

    name = "drm"

    def __init__(
        self, cards: list[Path], proc: Path, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._cards = [_Card(card) for card in cards]
        self._proc = proc
        self._clock = clock
        self._tgids: frozenset[int] = frozenset()
        self._clients: dict[int, tuple[int, list[Fdinfo]]] = {}  # {tgid: (turn, fdinfos)}
        self._worked: dict[int, tuple[int, Usage]] = {}

    def open(self) -> list[dict[str, Any]]:
        if not self._cards:
            raise GpuAbsent("no DRM device that can render")
        return [self._fact(i, card.folder, card.slot) for i, card in enumerate(self._cards)]

    def _fact(self, index: int, card: Path, slot: str) -> dict[str, Any]:
        vendor = _VENDORS.get(_read(card / "vendor") or "", "other")
        name = _read(card / "product_name") or f"{vendor} {_read(card / 'device') or ''}".strip()
        return {
            "index": index,
            "parent": None,
            "vendor": vendor,
            "source": self.name,
            "name": name,
            "pci": slot,
            "driver": _driver(card) or None,
            "total_bytes": _number(card / "mem_info_vram_total"),
            "persistence": None,
            "link_gen_max": _generation(_read(card / "max_link_speed")),
            "link_width_max": _number(card / "max_link_width"),
        }

    def follow(self, tgids: frozenset[int]) -> None:
        self._tgids = tgids

    def look(self, device: int, turn: int) -> Look:
        """Memory always, from its users where the device does not tell it; at a turn also who has
        how much of it, how busy it is and in which state. Raises `DeviceLost`, with those."""
        card = self._cards[device]
        found: dict[str, int] = {}
        if turn >= 0 and not os.path.exists(card.path):  # noqa: PTH110 - a third of its cost
            raise DeviceLost(device, "it is gone from sysfs")
        used = card.used.number()
        users = self._users(card.slot, turn) if turn >= 0 or used is None else None
        if used is None and users is not None:
            used = sum(user.memory_bytes for user in users.values())
        if used is not None:
            found["used_bytes"] = used
        if users is not None and turn >= 0:
            self._busy(device, users, found)
            card.state(found)
        processes = None if users is None else {t: u.memory_bytes for t, u in users.items()}
        return Look.of(found, processes)

    def _users(self, slot: str, turn: int) -> dict[int, Usage]:
        tgids = self._tgids
        for gone in self._clients.keys() - tgids:
            del self._clients[gone]  # its number may be another's next
        found = {}
        for tgid in tgids:
            seen, files = self._clients.get(tgid, (-_USERS_KEPT, []))
            if turn - seen >= _USERS_KEPT:
                seen, files = turn, fdinfos_of(self._proc, tgid)
                self._clients[tgid] = seen, files
            usage = usage_of(files).get(slot) if files else None
            if usage is not None:
                found[tgid] = usage
        return found

    def _busy(self, device: int, users: Mapping[int, Usage], found: dict[str, int]) -> None:
        """The driver's own figure, or the share of the time since the last look that the engines
        worked for the processes that are followed."""
        percent = self._cards[device].busy.number()
        if percent is None:
            now, worked = self._clock(), sum(users.values(), Usage())
            before = self._worked.get(device)
            self._worked[device] = now, worked
            if before is not None and now > before[0]:
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


def fdinfos_of(proc: Path, tgid: int) -> list[Fdinfo]:
    """Of the file descriptors of a process that are DRM devices."""
    folder = proc / str(tgid)
    try:
        descriptors = list(os.scandir(folder / "fd"))
    except OSError:
        return []
    return [Fdinfo(folder / "fdinfo" / fd.name) for fd in descriptors if _is_drm(fd.path)]


def _is_drm(descriptor: str) -> bool:
    try:
        return os.readlink(descriptor).startswith("/dev/dri/")  # noqa: PTH115 - of hundreds
    except OSError:
        return False


def usage_of(fdinfos: Iterable[Fdinfo]) -> dict[str, Usage]:
    """{PCI slot: usage} of one process; a client that several descriptors share counts once."""
    clients = dict(told for file in fdinfos if (told := file.client()) is not None)
    found: dict[str, Usage] = {}
    for (slot, _), usage in clients.items():
        found[slot] = found[slot] + usage if slot in found else usage
    return found


def parse_fdinfo(text: str) -> dict[str, str]:
    """The `drm-` keys of an fdinfo file."""
    return dict(_FIELD.findall(text))


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


def _clock_files(card: Path) -> tuple[KernelFile, KernelFile | None, int] | None:
    """(cores, memory, per MHz) of the first way in which this driver tells clocks."""
    for core, memory, per_mhz in _CLOCKS:
        cores = sorted(card.glob(core))
        if cores:
            memories = sorted(card.glob(memory)) if memory else []
            return KernelFile(cores[0]), KernelFile(memories[0]) if memories else None, per_mhz
    return None


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
