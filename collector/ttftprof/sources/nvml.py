"""NVIDIA's management library behind one door: nothing else in the program calls it.

Guarantees: without the library nothing is imported and no thread runs; what a device or driver does
not support is found out once, told once and never asked again; a lost device is an exception of its
own; a call that does not return can be seen from another thread (`Door.since_ns`). NVML's own
stamps are wall time in microseconds and come out on the monotonic clock, with their error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ttftprof.clock import measure_offset, now_ns
from ttftprof.engines.driver_calls import places_of
from ttftprof.sources.gpu import UNSAMPLED, DeviceLost, GpuAbsent, Look, Vendor

LIBRARY = "libnvidia-ml.so.1"
_COMPUTING = "nvmlDeviceGetComputeRunningProcesses_v3"
_SAMPLES_EVERY = 10  # slow looks
# nvml.h: bytes over PCIe since the driver was loaded, seen from the device.
_COUNTS = ((198, 0), (197, 0))  # received, sent; each of the whole device
_STATE_EVERY = 5  # looks, while memory changes: a load is to be known with its link and clocks
_PROCESSES_EVERY = 20  # turns, if memory does not change; those that draw too, where none did


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


class Door:
    """Every call passes here. `told(call, device, reason)` is called once for each that is refused.

    One thread at a time; each thread that calls has a door of its own.
    """

    def __init__(
        self,
        library: Any,
        told: Callable[[str, int, str], None],
        clock: Callable[[], int] = now_ns,
    ) -> None:
        self._library = library
        self._told = told
        self._clock = clock
        self._refused: set[tuple[Any, ...]] = set()
        self.call = ""
        self.since_ns = 0  # since when `call` is under way; 0: none is

    def call_it(self, call: str, *arguments: Any) -> Any:
        """What `call` answers. Raises the library's `NVMLError`."""
        self.call, self.since_ns = call, self._clock()
        try:
            return getattr(self._library, call)(*arguments)
        finally:
            self.since_ns = 0

    def ask(self, call: str, device: Device | None, *arguments: Any) -> Any:
        """What `call` answers, or None if it is refused. Raises `DeviceLost`."""
        index = -1 if device is None else device.index
        key = (call, index, *arguments[:1])  # the first argument says what is asked for
        if key in self._refused:
            return None
        first = () if device is None else (device.handle,)
        try:
            return self.call_it(call, *first, *arguments)
        except self._library.NVMLError as error:
            if self._is_final(index, error):
                self._refused.add(key)
                self._told(call, index, str(error))
            return None

    def _is_final(self, index: int, error: Any) -> bool:
        """Whether it makes no sense to ask again. Raises `DeviceLost`."""
        number, library = int(getattr(error, "value", 0)), self._library
        if number in (library.NVML_ERROR_GPU_IS_LOST, library.NVML_ERROR_RESET_REQUIRED):
            raise DeviceLost(index, str(error))
        return number not in (
            library.NVML_ERROR_NOT_FOUND,  # no sample newer than the last
            library.NVML_ERROR_NO_DATA,
            library.NVML_ERROR_NOT_READY,
            library.NVML_ERROR_TIMEOUT,
            library.NVML_ERROR_UNKNOWN,
        )


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or one instance of a partitioned one (MIG), whose `parent` is the GPU's index."""

    index: int
    handle: Any = field(repr=False)
    parent: int | None = None


class Nvml(Vendor):
    """All NVIDIA devices. `open` may take seconds: without persistence mode it wakes the driver."""

    name = "nvml"

    def __init__(self, library: Any = None, clock: Callable[[], int] = now_ns) -> None:
        self._library = library
        self._clock = clock
        self._devices: dict[int, Device] = {}
        self._seen_us: dict[int, int] = {}
        self._samples_at: dict[int, int] = {}  # the slow turn from which they are asked for again
        self._counted: dict[int, tuple[int, int, int]] = {}  # µs, bytes received, sent
        self._uncounted: set[int] = set()
        self._used: dict[int, tuple[int | None, bool]] = {}  # at the last look; had it changed?
        self._stated: dict[int, int] = {}  # looks since its state was asked for
        self._drawn_on: set[int] = set()
        self._untold: set[int] = set()  # devices that tell processes and not their memory
        self._facts: list[tuple[str, dict[str, Any]]] = []

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
        if not facts:
            raise GpuAbsent("the NVIDIA driver shows no device that answers")
        return facts

    def _refused(self, call: str, index: int, reason: str) -> None:
        self._facts.append(("gpu_refused", {"call": call, "device": index, "reason": reason}))

    def take_facts(self) -> list[tuple[str, dict[str, Any]]]:
        """What was found out since the last time: refused calls."""
        facts, self._facts = self._facts, []
        return facts

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
        memory = self._memory(device)
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
            "persistence": _flag(ask("nvmlDeviceGetPersistenceMode", device)),
            "link_gen_max": ask("nvmlDeviceGetMaxPcieLinkGeneration", device),
            "link_width_max": ask("nvmlDeviceGetMaxPcieLinkWidth", device),
        }

    # -- again and again --------------------------------------------------------------------

    def look(self, device: int, turn: int) -> Look:
        """Memory always; at a turn also what the device does, or in which state it is; whose the
        memory is when it has changed, and now and then."""
        target = self._devices[device]
        found: dict[str, int] = {}
        memory = self._memory(target)
        if memory is not None:
            found["used_bytes"] = int(memory.used)
        if turn >= 0 and turn % 2 == 0:
            self._busy(target, found)
            self._traffic(target, found)
        is_moving = self._is_moving(device, found.get("used_bytes"))
        self._stated[device] = since = self._stated.get(device, 0) + 1
        if (turn >= 0 and turn % 2) or (is_moving and since >= _STATE_EVERY):
            self._state(target, found)
            self._stated[device] = 0
        by_now = turn >= 0 and turn % _PROCESSES_EVERY == 0
        if is_moving or by_now:
            return Look(found, self._processes(target, by_now))
        return Look(found)

    def _is_moving(self, device: int, used: int | None) -> bool:
        """Whether memory has changed at this look or the one before: a driver may tell of the
        process a little later."""
        before, changed = self._used.get(device, (None, False))
        self._used[device] = used, used != before
        return changed or used != before

    def _memory(self, device: Device) -> Any:
        """Since driver 510 without what the driver keeps for itself (version 2)."""
        ask = self.fast.ask
        found = ask("nvmlDeviceGetMemoryInfo", device, self._library.nvmlMemory_v2)
        return found if found is not None else ask("nvmlDeviceGetMemoryInfo", device)

    def _busy(self, device: Device, found: dict[str, int]) -> None:
        rates = self.fast.ask("nvmlDeviceGetUtilizationRates", device)
        if rates is not None:
            found["busy_percent"] = int(rates.gpu)

    def _traffic(self, device: Device, found: dict[str, int]) -> None:
        """The link's traffic since the last look, from running counts with stamps of their own.

        Newer drivers and devices have them; else `look_slowly` asks for rates.
        """
        if device.index in self._uncounted:
            return
        answer = self.fast.ask("nvmlDeviceGetFieldValues", device, _COUNTS)
        if answer is None or any(value.nvmlReturn for value in answer):
            self._uncounted.add(device.index)
            self.slow_every = 1
            return
        received, sent = (int(value.value.ullVal) for value in answer)
        now = int(answer[0].timestamp), received, sent
        before = self._counted.get(device.index)
        self._counted[device.index] = now
        if before is None or now[0] <= before[0] or now[1] < before[1] or now[2] < before[2]:
            return  # the first, not renewed yet, or wrapped
        for name, at in (("rx_bytes_per_s", 1), ("tx_bytes_per_s", 2)):
            found[name] = (now[at] - before[at]) * 1_000_000 // (now[0] - before[0])

    def _state(self, device: Device, found: dict[str, int]) -> None:
        ask, library = self.fast.ask, self._library
        pstate = ask("nvmlDeviceGetPerformanceState", device)
        if pstate is not None and 0 <= int(pstate) < 32:
            found["pstate"] = int(pstate)
        gen, width = (ask(f"nvmlDeviceGetCurrPcieLink{x}", device) for x in ("Generation", "Width"))
        if gen is not None and width is not None:
            found["link_gen"], found["link_width"] = int(gen), int(width)
        core = ask("nvmlDeviceGetClockInfo", device, library.NVML_CLOCK_SM)
        memory = ask("nvmlDeviceGetClockInfo", device, library.NVML_CLOCK_MEM)
        if core is not None and memory is not None:
            found["core_mhz"], found["memory_mhz"] = int(core), int(memory)
        throttle = ask("nvmlDeviceGetCurrentClocksThrottleReasons", device)
        if throttle is not None:
            found["throttle"] = int(throttle)

    def _processes(self, device: Device, by_now: bool) -> dict[int, int] | None:
        """{host pid: bytes}; a container or WSL may not tell the bytes. What computes by Vulkan is
        among those that draw; one that does both is told by either with all of its memory."""
        computing = self.fast.ask(_COMPUTING, device)
        drawing: Any = ()
        if device.index in self._drawn_on or by_now:
            drawing = self.fast.ask("nvmlDeviceGetGraphicsRunningProcesses_v3", device) or ()
            (self._drawn_on.add if drawing else self._drawn_on.discard)(device.index)
        if computing is None and not drawing:
            return None
        running = [p for p in (*(computing or ()), *drawing) if p.usedGpuMemory is not None]
        if computing and not running and device.index not in self._untold:
            self._untold.add(device.index)
            self._refused(_COMPUTING, device.index, "their memory is not told")
        return {int(p.pid): int(p.usedGpuMemory) for p in running}

    def look_slowly(self, device: int, turn: int) -> Iterator[tuple[int, int, Look]]:
        """(ns, error, look) of what may block: the link's traffic where there are no counts (NVML
        measures it for 20 ms a call), and the driver's own samples of utilisation, finer than what
        it averages."""
        target = self._devices[device]
        if device in self._uncounted:
            found: dict[str, int] = {}
            for counter, name in (
                (self._library.NVML_PCIE_UTIL_RX_BYTES, "rx_bytes_per_s"),
                (self._library.NVML_PCIE_UTIL_TX_BYTES, "tx_bytes_per_s"),
            ):
                rate = self.slow.ask("nvmlDeviceGetPcieThroughput", target, counter)
                if rate is not None:
                    found[name] = int(rate) * 1000  # KB/s
            if found:
                yield self._clock(), 0, Look(found)
        if turn >= self._samples_at.get(device, 0):
            self._samples_at[device] = turn + _SAMPLES_EVERY
            yield from self._samples(target)

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
            yield ns, offset.error_ns + 500, Look({"busy_percent": value})

    def close(self) -> None:
        with suppress(self._library.NVMLError):  # lost, or never awake
            self.fast.call_it("nvmlShutdown")


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _flag(value: Any) -> bool | None:
    return None if value is None else bool(value)
