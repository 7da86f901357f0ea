"""What GPUs did for one request, and their curves: memory, load, clocks, link, what was copied.

Pure. Nothing is said of what was not sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ttftprof.condense import Floats
from ttftprof.events import Records
from ttftprof.gpu_facts import DriverSpan
from ttftprof.gpu_memory import level
from ttftprof.gpu_parts import Span
from ttftprof.gpu_rows import Valid
from ttftprof.model import GpuUse, Series
from ttftprof.threads import FOREVER
from ttftprof.timeline import Timeline

# A lane's bytes per second by PCIe generation, after line coding.
_LANE_RATE = {1: 250e6, 2: 500e6, 3: 985e6, 4: 1969e6, 5: 3938e6, 6: 7563e6}
# nvml.h, nvmlClocksEventReason…: for want of power, or too hot (software's and hardware's doing).
_SLOWED = 0x04 | 0x08 | 0x20 | 0x40 | 0x80
_SERIES_POINTS = 4_000
_LATE_NS = 2_000_000
# What a call of NVML asks, and the field that has it if another call answered.
_QUESTIONS = {
    "nvmlDeviceGetMemoryInfo": ("memory", Valid.USED),
    "nvmlDeviceGetMemoryInfo_v2": ("memory", Valid.USED),
    "nvmlDeviceGetUtilizationRates": ("utilisation", Valid.BUSY),
    "nvmlDeviceGetComputeRunningProcesses_v3": ("memory by process", None),
    "nvmlDeviceGetPcieThroughput": ("link traffic", Valid.RX),
    "nvmlDeviceGetCurrPcieLinkGeneration": ("link", Valid.LINK),
    "nvmlDeviceGetCurrPcieLinkWidth": ("link", Valid.LINK),
    "nvmlDeviceGetMaxPcieLinkGeneration": ("link's maximum", None),
    "nvmlDeviceGetMaxPcieLinkWidth": ("link's maximum", None),
    "nvmlDeviceGetClockInfo": ("clocks", Valid.CLOCKS),
    "nvmlDeviceGetPerformanceState": ("performance state", Valid.PSTATE),
    "nvmlDeviceGetCurrentClocksThrottleReasons": ("throttle reasons", Valid.THROTTLE),
    "nvmlDeviceGetPersistenceMode": ("persistence mode", None),
}
_PROCESSES = 8  # of one device that have a curve of their own


# -- use ------------------------------------------------------------------------------------------


def uses_of(timeline: Timeline, tgid: int, start_ns: int, end_ns: int) -> list[GpuUse]:
    """One row for each device; one for a device that only calls show; none without either."""
    window = start_ns, end_ns
    copies = _inside(timeline.gpu.during(tgid, *window), window)
    copied = sum(c.size_bytes for c in copies) if timeline.gpu.calls.get(tgid) else None
    devices = timeline.gpu.devices
    holding = timeline.gpu.held_by(tgid)
    if not devices:
        if copied is None:
            return []
        return [GpuUse(0, "GPU 0", "GPU", None, None, None, copied, "driver calls")]
    return [
        GpuUse(
            index=index,
            label=timeline.gpu.name_of(index),
            name=str(fact.get("name") or f"GPU {index}"),
            memory_before_bytes=level(timeline, index, start_ns),
            memory_after_bytes=level(timeline, index, end_ns),
            busy_ns=_busy_ns(timeline, index, window),
            # Which device a copy went to is only certain where there is one, or one is used.
            transfer_bytes=copied if len(devices) == 1 or holding == {index} else None,
            source=str(fact.get("source") or ""),
        )
        for index, fact in sorted(devices.items())
    ]


def _inside(calls: Iterable[DriverSpan], window: Span) -> list[DriverSpan]:
    """The copies to the device that began and ended there."""
    return [c for c in calls if c.to_device and c.start_ns >= window[0] and c.end_ns <= window[1]]


def notes_of(timeline: Timeline) -> list[str]:
    """What devices do not tell, which calls may be missing, and how far samples came off their
    schedule."""
    notes = list(_unseen_calls(timeline))
    whole = (i for i, fact in sorted(timeline.gpu.devices.items()) if fact.get("parent") is None)
    for index in whole:  # what instances do not tell, their GPU may
        asked = [_QUESTIONS.get(r.call) for r in timeline.gpu.refused if r.device == index]
        missing = {
            q[0] for q in asked if q and not (q[1] and len(timeline.gpu.of_device(index, q[1])))
        }
        if missing:
            notes.append(
                f"{timeline.gpu.name_of(index)} does not tell its {', '.join(sorted(missing))}"
            )
    rows = timeline.gpu.samples[timeline.gpu.samples["took_ns"] > 0]
    if len(rows) and (late_ns := int(np.median(rows["late_ns"]))) > _LATE_NS:
        notes.append(f"samples of the GPU came {late_ns / 1e6:.0f} ms late at the median")
    return notes


def _unseen_calls(timeline: Timeline) -> Iterator[str]:
    """A library at a path that nobody knew is probed only once it was seen to be mapped."""
    for library in timeline.gpu.libraries:
        if library.refused:
            yield f"calls into {library.path} could not be seen ({library.refused})"
        elif library.unseen_ns:
            ms = library.unseen_ns / 1e6
            yield (
                f"calls into {library.path} in the first {ms:.1f} ms after pid {library.tgid} "
                "mapped it may be missing"
            )


def _busy_ns(timeline: Timeline, device: int, window: Span) -> int | None:
    """The driver's own samples where it gives them (they have an error), else its averages. A value
    is that of the time since the one before."""
    rows = timeline.gpu.of_device(device, Valid.BUSY)
    own = rows[rows["error_ns"] > 0]
    rows = own if len(own) > 1 else rows[rows["error_ns"] == 0]
    if len(rows) < 2:
        return None
    stamps = rows["ns"].astype(np.int64)
    begins, ends = np.maximum(stamps[:-1], window[0]), np.minimum(stamps[1:], window[1])
    spans = np.maximum(ends - begins, 0)
    return int((spans * rows["busy_percent"][1:].astype(np.int64)).sum() // 100)


# -- series ---------------------------------------------------------------------------------------


def _link_rates(rows: Records) -> Floats:
    lanes = np.array([_LANE_RATE.get(gen, 0.0) for gen in range(256)])
    rates: Floats = lanes[rows["link_gen"]] * rows["link_width"]
    return rates


def _slowed(rows: Records) -> Any:
    """For each sample, whether the device ran slower than it could."""
    return (rows["throttle"] & np.uint64(_SLOWED)) != 0


@dataclass(frozen=True, slots=True)
class _Curve:
    """What is drawn of each device from the samples that hold `valid`; `rare`: only if any of it
    is not 0."""

    name: str
    unit: str
    valid: Valid
    values: Callable[[Records], Any]
    rare: bool = False


_CURVES = (
    _Curve("gpu_memory_bytes", "bytes", Valid.USED, lambda rows: rows["used_bytes"]),
    _Curve("gpu_busy", "share", Valid.BUSY, lambda rows: rows["busy_percent"] / 100),
    _Curve("gpu_link_in", "bytes/s", Valid.RX, lambda rows: rows["rx_bytes_per_s"], rare=True),
    _Curve("gpu_link_out", "bytes/s", Valid.TX, lambda rows: rows["tx_bytes_per_s"], rare=True),
    _Curve("gpu_link_speed", "bytes/s", Valid.LINK, _link_rates),
    _Curve("gpu_clock", "MHz", Valid.CLOCKS, lambda rows: rows["core_mhz"]),
    _Curve("gpu_memory_clock", "MHz", Valid.CLOCKS, lambda rows: rows["memory_mhz"], rare=True),
    _Curve("gpu_pstate", "P", Valid.PSTATE, lambda rows: rows["pstate"], rare=True),
    _Curve("gpu_slowed", "share", Valid.THROTTLE, _slowed, rare=True),
)


def series_of(timeline: Timeline) -> list[Series]:
    """The curves of each device and of the processes on it, and what was copied to devices."""
    found = []
    for index in sorted(timeline.gpu.devices):
        shown = timeline.gpu.name_of(index)
        for curve in _CURVES:
            rows = timeline.gpu.of_device(index, curve.valid)
            values = curve.values(rows)
            if len(rows) and not (curve.rare and not np.any(values)):
                found.append(_series(curve.name, curve.unit, shown, rows["ns"], values))
        found += _process_series(timeline, index)
    copies = [c for own in timeline.gpu.calls for c in timeline.gpu.copies(own)]
    copies = [c for c in copies if c.end_ns != FOREVER]
    if copies:
        found.append(_transfer_series(copies, timeline.start_ns, timeline.end_ns))
    return [one for one in found if one.ns]


def link_rate(generation: Any, width: Any) -> float | None:
    """Bytes per second of a PCIe link; None if its generation or width is not known."""
    rate = _LANE_RATE.get(generation) if isinstance(generation, int) else None
    return rate * width if rate and isinstance(width, int) else None


def _process_series(timeline: Timeline, device: int) -> Iterator[Series]:
    """Steps: a row is written when the memory of a process has changed."""
    rows = timeline.gpu.process_samples
    rows = rows[rows["device"] == device]
    peaks = {
        t: int(rows["used_bytes"][rows["tgid"] == t].max()) for t in set(rows["tgid"].tolist())
    }
    for tgid in sorted(sorted(peaks, key=lambda t: -peaks[t])[:_PROCESSES]):
        own = rows[rows["tgid"] == tgid]
        ns, used = own["ns"].astype(np.int64), own["used_bytes"].astype(np.int64)
        until = np.append(ns[1:] - 1, max(timeline.end_ns, int(ns[-1])))
        stamps = np.column_stack([ns, until]).ravel()
        name = f"{timeline.gpu.name_of(device)} pid {tgid}"
        yield _series("gpu_process_bytes", "bytes", name, stamps, np.repeat(used, 2))


def _series(name: str, unit: str, path: str | None, ns: Any, values: Any) -> Series:
    step = max(len(ns) // _SERIES_POINTS, 1)
    kept = np.unique(np.append(np.arange(0, len(ns), step), max(len(ns) - 1, 0)))[: len(ns)]
    stamps, levels = ns.astype(np.int64)[kept], values.astype(np.float64)[kept]
    return Series(name, unit, path, tuple(stamps.tolist()), tuple(levels.tolist()))


def _transfer_series(copies: Sequence[DriverSpan], start_ns: int, end_ns: int) -> Series:
    """A copy's bytes arrive evenly over its time; before, between and after nothing does."""
    begins = np.array([c.start_ns for c in copies], np.int64)
    ends = np.maximum(np.array([c.end_ns for c in copies], np.int64), begins + 1)
    rates: Floats = np.array([c.size_bytes for c in copies], np.float64) / (ends - begins)
    stamps = np.concatenate([begins, ends])
    order = np.argsort(stamps, kind="stable")
    stamps = stamps[order]
    rate = np.cumsum(np.concatenate([rates, -rates])[order])
    totals = np.concatenate([[0.0], np.cumsum(rate[:-1] * np.diff(stamps))])[: len(stamps)]
    stamps = np.concatenate([[min(start_ns, int(stamps[0]))], stamps, [max(end_ns, stamps[-1])]])
    totals = np.concatenate([[0.0], totals, totals[-1:]])
    return _series("transfer_bytes", "bytes", None, stamps, totals)
