"""All NVIDIA devices, by NVIDIA's management library.

Guarantees: without the library nothing is imported and no thread runs; the library is called by its
door alone (`nvml_door`). NVML's own stamps are wall time in microseconds and come out on the
monotonic clock, with their error.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from ttftprof.clock import measure_offset
from ttftprof.engines.driver_calls import places_of
from ttftprof.sources.gpu import SELDOM, UNSAMPLED, DeviceLost, Found, GpuAbsent, Look, Vendor
from ttftprof.sources.nvml_device import AskedDevice
from ttftprof.sources.nvml_door import Device, Door, Question

LIBRARY = "libnvidia-ml.so.1"
_BUSY_BYTES_PER_S = 16_000_000  # received: a load, be it of a slow disk; no token needs so much


def find() -> Vendor | None:
    """NVML if its library can be loaded here, else None. Costs some failing dlopen without it."""
    return Nvml() if any(map(_loads, (LIBRARY, *places_of(LIBRARY)))) else None


def _loads(path: str) -> bool:
    """Once loaded, from wherever, the binding's own dlopen by name finds it."""
    try:
        ctypes.CDLL(path)
    except OSError:
        return False
    return True


class Nvml(Vendor):
    """All NVIDIA devices. `open` may take seconds: without persistence mode it wakes the driver."""

    name = "nvml"

    def __init__(self, library: Any = None, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._library = library
        self._clock = clock
        self._devices: dict[int, Device] = {}
        self._asked: dict[int, AskedDevice] = {}
        self._rates: dict[int, LinkRates] = {}
        self._seen_us: dict[int, int] = {}
        self._samples_at: dict[int, int] = {}  # the slow turn from which they are asked for again
        self._facts: deque[tuple[str, dict[str, Any]]] = deque()  # may be taken by another thread

    # -- once -------------------------------------------------------------------------------

    def open(self) -> list[dict[str, Any]]:
        """Wakes NVML; one fact for each device. Raises `GpuAbsent`."""
        if self._library is None:
            import pynvml

            self._library = pynvml
        self.fast, self.slow = (Door(self._library, self._refused, self._clock) for _ in range(2))
        self.doors = (self.fast, self.slow)
        try:
            self.fast.call_it("nvmlInit")
        except self._library.NVMLError as error:
            raise GpuAbsent(f"NVML does not work here ({error})", UNSAMPLED) from error
        driver = _text(self.fast.ask("nvmlSystemGetDriverVersion", None))
        facts = []
        for device in self._find_devices():
            try:
                facts.append(self._device_fact(device, driver))
            except DeviceLost:
                continue  # was lost before recording began
            self._devices[device.index] = device
            self._rates[device.index] = LinkRates(self.slow, device)
        if not facts:
            raise GpuAbsent("the NVIDIA driver shows no device that answers")
        return facts

    def _refused(self, call: str, index: int, reason: str) -> None:
        self._tell("gpu_refused", {"call": call, "device": index, "reason": reason})

    def _tell(self, kind: str, fact: dict[str, Any]) -> None:
        self._facts.append((kind, fact))

    def take_facts(self) -> list[tuple[str, dict[str, Any]]]:
        """What was found out since the last time: refused calls, a new persistence mode."""
        return [self._facts.popleft() for _ in range(len(self._facts))]

    def _find_devices(self) -> Iterator[Device]:
        """Whole GPUs by their own index, then the instances of partitioned ones."""
        count = int(self.fast.ask("nvmlDeviceGetCount", None) or 0)
        whole = [device for index in range(count) if (device := self._whole(index)) is not None]
        yield from whole
        following = count
        for device in whole:
            for instance in self._instances(device):
                yield Device(following, instance, device.index)
                following += 1

    def _whole(self, index: int) -> Device | None:
        try:
            handle = self.fast.ask("nvmlDeviceGetHandleByIndex", None, index)
        except DeviceLost:
            return None  # before recording began
        return None if handle is None else Device(index, handle)

    def _instances(self, device: Device) -> Iterator[Any]:
        ask = self.fast.ask
        try:
            mode = ask("nvmlDeviceGetMigMode", device)
            slots = int(ask("nvmlDeviceGetMaxMigDeviceCount", device) or 0) if mode else 0
            for number in range(slots if mode and mode[0] else 0):
                handle = ask("nvmlDeviceGetMigDeviceHandleByIndex", device, number)
                if handle is not None:  # else a slot that no instance has
                    yield handle
        except DeviceLost:
            return

    def _device_fact(self, device: Device, driver: str | None) -> dict[str, Any]:
        ask = self.fast.ask
        # Since driver 510 without what the driver keeps for itself (version 2).
        memory = ask("nvmlDeviceGetMemoryInfo", device, self._library.nvmlMemory_v2)
        persists = _flag(ask("nvmlDeviceGetPersistenceMode", device))
        self._asked[device.index] = AskedDevice(
            self.fast, device, memory is not None, persists, self._tell
        )
        if memory is None:
            memory = ask("nvmlDeviceGetMemoryInfo", device)
        pci = ask("nvmlDeviceGetPciInfo_v3", device)
        return {
            "index": device.index,
            "parent": device.parent,
            "vendor": "nvidia",
            "source": self.name,
            "name": _text(ask("nvmlDeviceGetName", device)) or f"GPU {device.index}",
            "pci": _text(pci.busId) if pci is not None else None,
            "driver": driver,
            "total_bytes": None if memory is None else int(memory.total),
            "persistence": persists,
            "link_gen_max": ask("nvmlDeviceGetMaxPcieLinkGeneration", device),
            "link_width_max": ask("nvmlDeviceGetMaxPcieLinkWidth", device),
        }

    # -- again and again --------------------------------------------------------------------

    def look(self, device: int, turn: int) -> Look:
        """Memory always; at a turn all, and whose the memory is; that also when it changes."""
        return Look(*self._asked[device].look(turn))

    def looker(self, device: int) -> Callable[[int], Found]:
        return self._asked[device].look

    def questions(self, device: int, turn: int) -> tuple[Question, ...]:
        """What a look at that turn asks while memory rests."""
        return self._asked[device].questions(turn)

    def slow_every(self, moves: bool) -> int:
        """Seldom where no link has to be measured, or nothing comes over it."""
        measured = (self._rates[d] for d, one in self._asked.items() if not one.traffic.is_counted)
        goes_on = any(rates.can_be_had and (moves or rates.is_busy) for rates in measured)
        return 1 if goes_on else SELDOM

    def look_slowly(self, device: int, turn: int) -> Iterator[tuple[int, int, Look]]:
        """(ns, error, look) of what may block: the link's traffic where there are no counts (NVML
        measures it for 20 ms a call), and the driver's own samples of utilisation, finer than what
        it averages."""
        if not self._asked[device].traffic.is_counted:
            rates = self._rates[device].ask()
            if rates:
                yield self._clock(), 0, Look.of(rates)
        if turn >= self._samples_at.get(device, 0):
            self._samples_at[device] = turn + SELDOM
            yield from self._samples(self._devices[device])

    def _samples(self, device: Device) -> Iterator[tuple[int, int, Look]]:
        since_us = self._seen_us.get(device.index, 0)
        kind = self._library.NVML_GPU_UTILIZATION_SAMPLES
        answer = self.slow.ask("nvmlDeviceGetSamples", device, kind, since_us)
        if answer is None:
            return
        offset = measure_offset(monotonic=self._clock)
        stamps = [(int(s.timeStamp), int(s.sampleValue.uiVal)) for s in answer[1]]
        fresh = [(us, value) for us, value in stamps if us > since_us and 0 <= value <= 100]
        if fresh:
            self._seen_us[device.index] = max(us for us, _ in fresh)
        if not since_us:
            return  # what it remembers of before recording began
        for us, value in fresh:
            # A microsecond stamp is true to half of one.
            ns = offset.to_monotonic(us * 1000)
            yield ns, offset.error_ns + 500, Look.of({"busy_percent": value})

    def close(self) -> None:
        with suppress(self._library.NVMLError):  # lost, or never awake
            self.fast.call_it("nvmlShutdown")


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _flag(value: Any) -> bool | None:
    return None if value is None else bool(value)


class LinkRates:
    """The link's traffic where it is not counted: NVML measures each direction for 20 ms."""

    _DIRECTIONS = (("rx_bytes_per_s", 1), ("tx_bytes_per_s", 0))  # NVML_PCIE_UTIL_…_BYTES

    def __init__(self, door: Door, device: Device) -> None:
        self._door = door
        self._answers = {name: ctypes.c_uint() for name, _ in self._DIRECTIONS}
        asked = (
            door.question(
                "nvmlDeviceGetPcieThroughput",
                device,
                direction,
                ctypes.byref(self._answers[name]),
                good_for=1 << direction,
            )
            for name, direction in self._DIRECTIONS
        )
        self._questions = [question for question in asked if question is not None]

    @property
    def can_be_had(self) -> bool:
        return bool(self._questions)

    @property
    def is_busy(self) -> bool:
        """Whether much came when it was last measured: a load may go on while no memory moves."""
        return self._answers["rx_bytes_per_s"].value * 1000 >= _BUSY_BYTES_PER_S

    def ask(self) -> dict[str, int]:
        """Bytes per second, of what the device tells. Raises `DeviceLost`."""
        told = {question.good_for for question in self._questions}
        for question, result in self._door.put(self._questions):
            told.discard(question.good_for)
            if self._door.is_refused(question, result):
                self._questions = [other for other in self._questions if other is not question]
        return {
            name: self._answers[name].value * 1000  # KB/s
            for name, direction in self._DIRECTIONS
            if 1 << direction in told
        }
