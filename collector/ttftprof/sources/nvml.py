"""NVIDIA's management library behind one door: nothing else in the program calls it.

Guarantees: without the library nothing is imported and no thread runs; what a device or driver does
not support is found out once, told once and never asked again; a lost device is an exception of its
own; a call that does not return can be seen from another thread (`Door.since_ns`). NVML's own
stamps are wall time in microseconds and come out on the monotonic clock, with their error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ttftprof.clock import measure_offset, now_ns
from ttftprof.gpu_rows import Valid
from ttftprof.sources.gpu import DeviceLost, GpuAbsent, Look, Vendor

LIBRARY = "libnvidia-ml.so.1"
_COST = "GPU memory, utilisation and link are unknown"


def find() -> Vendor | None:
    """NVML if its library can be loaded here, else None. Costs one failing dlopen without it."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    return Nvml()


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

    def ask(self, call: str, device: Device | None, *arguments: Any) -> Any:
        """What `call` answers, or None if it is refused. Raises `DeviceLost`."""
        index = -1 if device is None else device.index
        key = (call, index, arguments[:1])  # the first argument says what is asked for
        if key in self._refused:
            return None
        first = () if device is None else (device.handle,)
        self.call, self.since_ns = call, self._clock()
        try:
            return getattr(self._library, call)(*first, *arguments)
        except self._library.NVMLError as error:
            if self._is_final(index, error):
                self._refused.add(key)
                self._told(call, index, str(error))
            return None
        finally:
            self.since_ns = 0

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
            self.fast.call, self.fast.since_ns = "nvmlInit", self._clock()
            self._library.nvmlInit()
        except self._library.NVMLError as error:
            raise GpuAbsent(f"NVML does not work here ({error})", _COST) from error
        finally:
            self.fast.since_ns = 0
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
        whole = [
            Device(i, self.fast.ask("nvmlDeviceGetHandleByIndex", None, i)) for i in range(count)
        ]
        whole = [device for device in whole if device.handle is not None]
        yield from whole
        following = count
        for device in whole:
            for instance in self._instances(device):
                yield Device(following, instance, device.index)
                following += 1

    def _instances(self, device: Device) -> Iterator[Any]:
        mode = self.fast.ask("nvmlDeviceGetMigMode", device)
        if not mode or not mode[0]:
            return
        for number in range(int(self.fast.ask("nvmlDeviceGetMaxMigDeviceCount", device) or 0)):
            try:
                yield self._library.nvmlDeviceGetMigDeviceHandleByIndex(device.handle, number)
            except self._library.NVMLError:
                continue  # a slot that no instance has

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

    def look(self, device: int, tick: int) -> Look:
        """Memory at every tick, what changes slowly at every fifth or tenth."""
        target = self._devices[device]
        found: dict[str, int] = {}
        valid = Valid(0)
        memory = self._memory(target)
        if memory is not None:
            found["used_bytes"] = int(memory.used)
            valid |= Valid.USED
        if tick % 5 == 0:
            valid |= self._busy(target, found)
        if tick % 10 == 0:
            valid |= self._state(target, found)
        return Look(valid, found, self._processes(target) if tick % 5 == 0 else None)

    def _memory(self, device: Device) -> Any:
        """Since driver 510 without what the driver keeps for itself (version 2)."""
        ask = self.fast.ask
        found = ask("nvmlDeviceGetMemoryInfo", device, self._library.nvmlMemory_v2)
        return found if found is not None else ask("nvmlDeviceGetMemoryInfo", device)

    def _busy(self, device: Device, found: dict[str, int]) -> Valid:
        rates = self.fast.ask("nvmlDeviceGetUtilizationRates", device)
        if rates is None:
            return Valid(0)
        found["busy_percent"] = int(rates.gpu)
        return Valid.BUSY

    def _state(self, device: Device, found: dict[str, int]) -> Valid:
        ask, library = self.fast.ask, self._library
        valid = Valid(0)
        pstate = ask("nvmlDeviceGetPerformanceState", device)
        if pstate is not None and 0 <= int(pstate) < 32:
            found["pstate"] = int(pstate)
            valid |= Valid.PSTATE
        gen, width = (ask(f"nvmlDeviceGetCurrPcieLink{x}", device) for x in ("Generation", "Width"))
        if gen is not None and width is not None:
            found["link_gen"], found["link_width"] = int(gen), int(width)
            valid |= Valid.LINK
        core = ask("nvmlDeviceGetClockInfo", device, library.NVML_CLOCK_SM)
        memory = ask("nvmlDeviceGetClockInfo", device, library.NVML_CLOCK_MEM)
        if core is not None and memory is not None:
            found["core_mhz"], found["memory_mhz"] = int(core), int(memory)
            valid |= Valid.CLOCKS
        throttle = ask("nvmlDeviceGetCurrentClocksThrottleReasons", device)
        if throttle is not None:
            found["throttle"] = int(throttle)
            valid |= Valid.THROTTLE
        return valid

    def _processes(self, device: Device) -> dict[int, int] | None:
        """{host pid: bytes}; a container or WSL may not tell the bytes."""
        running = self.fast.ask("nvmlDeviceGetComputeRunningProcesses_v3", device)
        if running is None:
            return None
        return {int(p.pid): int(p.usedGpuMemory) for p in running if p.usedGpuMemory is not None}

    def look_slowly(self, device: int) -> Iterator[tuple[int, int, Look]]:
        """(ns, error, look) of what may block: the link's traffic (NVML measures it for 20 ms a
        call), and the driver's own samples of utilisation, finer than what it averages."""
        target = self._devices[device]
        found: dict[str, int] = {}
        valid = Valid(0)
        for counter, name, bit in (
            (1, "rx_bytes_per_s", Valid.RX),
            (0, "tx_bytes_per_s", Valid.TX),
        ):
            rate = self.slow.ask("nvmlDeviceGetPcieThroughput", target, counter)
            if rate is not None:
                found[name] = int(rate) * 1000  # KB/s
                valid |= bit
        if valid:
            yield self._clock(), 0, Look(valid, found)
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
            yield ns, offset.error_ns + 500, Look(Valid.BUSY, {"busy_percent": value})

    def close(self) -> None:
        try:
            self._library.nvmlShutdown()
        except self._library.NVMLError:
            return  # lost, or never awake


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _flag(value: Any) -> bool | None:
    return None if value is None else bool(value)
