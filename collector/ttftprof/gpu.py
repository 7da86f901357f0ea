"""What GPUs did for one request: memory before and after, what was copied, what to change.

Pure. Conclusions name the samples or calls they rest on; nothing is said of what was not sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ttftprof.condense import Floats
from ttftprof.engines import driver_calls as known
from ttftprof.events import Kind, MmapFlag
from ttftprof.gpu_facts import DriverSpan
from ttftprof.gpu_parts import Span, copy_spans, length
from ttftprof.gpu_rows import Valid
from ttftprof.model import Action, Evidence, GpuUse, Part, Phase, Series
from ttftprof.timeline import FOREVER, Ints, Timeline

# A lane's bytes per second by PCIe generation, after line coding.
_LANE_RATE = {1: 250e6, 2: 500e6, 3: 985e6, 4: 1969e6, 5: 3938e6, 6: 7563e6}
_SERIES_POINTS = 4_000
_NOISE_NS = 100_000_000
_COLD_CONTEXT_NS = 500_000_000
_EDGE_SHARE = 0.1  # of a fall in memory, at either end, that is not yet or no longer its edge
_EDGE_BYTES = 64 << 20
_BIG_KV_SHARE = 0.3


# -- use ------------------------------------------------------------------------------------------


def uses_of(timeline: Timeline, tgid: int, start_ns: int, end_ns: int) -> list[GpuUse]:
    """One row for each device; one for a device that only calls show; none without either."""
    window = start_ns, end_ns
    copies = _inside(timeline.gpu.copies(tgid), window)
    copied = sum(c.size_bytes for c in copies) if timeline.gpu.calls.get(tgid) else None
    devices = timeline.gpu.devices
    if not devices:
        if copied is None:
            return []
        return [GpuUse(0, "GPU", None, None, None, copied, "driver calls")]
    return [
        GpuUse(
            index=index,
            name=str(fact.get("name") or f"GPU {index}"),
            memory_before_bytes=_level(timeline, index, start_ns),
            memory_after_bytes=_level(timeline, index, end_ns),
            busy_ns=_busy_ns(timeline, index, window),
            # Which device a copy went to is only certain where there is one.
            transfer_bytes=copied if len(devices) == 1 else None,
            source=str(fact.get("source") or ""),
        )
        for index, fact in sorted(devices.items())
    ]


def _inside(calls: Iterable[DriverSpan], window: Span) -> list[DriverSpan]:
    return [c for c in calls if c.start_ns >= window[0] and c.end_ns <= window[1]]


def _level(timeline: Timeline, device: int, ns: int) -> int | None:
    """Memory in use at a moment: that of the last sample before it."""
    rows = timeline.gpu.of_device(device, Valid.USED)
    at = int(np.searchsorted(rows["ns"].astype(np.int64), ns, side="right"))
    return int(rows["used_bytes"][at - 1]) if at else None


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


# -- eviction -------------------------------------------------------------------------------------


def with_eviction(timeline: Timeline, phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """The memory's edges as evidence of the phase in which the old model made room."""
    if not timeline.gpu.devices or not phases:
        return tuple(phases)
    last_ns = phases[-1].end_ns
    return tuple(
        replace(p, evidence=(*p.evidence, *_edges(timeline, p.start_ns, last_ns)))
        if p.phase == "evict"
        else p
        for p in phases
    )


def _edges(timeline: Timeline, begin_ns: int, end_ns: int) -> Iterator[Evidence]:
    for index in sorted(timeline.gpu.devices):
        rows = timeline.gpu.of_device(index, Valid.USED)
        before = _level(timeline, index, begin_ns)
        inside = rows[(rows["ns"] >= begin_ns) & (rows["ns"] <= end_ns)]
        if before is None or not len(inside):
            continue
        edge = memory_edge(
            inside["ns"].astype(np.int64), inside["used_bytes"].astype(np.int64), before
        )
        if edge is None:
            continue
        yield Evidence("gpu", f"memory given back on GPU {index}", edge.fell_bytes, "bytes")
        yield Evidence("gpu", "it was back after", edge.back_ns - begin_ns, "ns")
        if edge.rises_ns is not None:
            gap = edge.rises_ns - edge.back_ns
            yield Evidence("gpu", "and used anew after another", gap, "ns")


@dataclass(frozen=True, slots=True)
class MemoryEdge:
    """A fall of a device's memory: by how much, when it was over, when the next rise began."""

    fell_bytes: int
    back_ns: int
    rises_ns: int | None


def memory_edge(ns: Ints, used: Ints, before: int) -> MemoryEdge | None:
    """The first big fall from the level `before`; None if there is none."""
    lowest = int(used.min())
    fell = before - lowest
    if fell < _EDGE_BYTES:
        return None
    margin = int(fell * _EDGE_SHARE)
    down = np.flatnonzero(used <= lowest + margin)[0]
    up = np.flatnonzero(used[down:] > lowest + margin)
    rises = int(ns[down + up[0]]) if len(up) else None
    return MemoryEdge(fell, int(ns[down]), rises)


# -- series ---------------------------------------------------------------------------------------


def series_of(timeline: Timeline) -> list[Series]:
    """Memory and utilisation of each device, and what was copied to devices in all."""
    found = []
    for index in sorted(timeline.gpu.devices):
        name = f"GPU {index}"
        used = timeline.gpu.of_device(index, Valid.USED)
        busy = timeline.gpu.of_device(index, Valid.BUSY)
        found.append(_series("gpu_memory_bytes", "bytes", name, used["ns"], used["used_bytes"]))
        share = busy["busy_percent"].astype(np.float64) / 100
        found.append(_series("gpu_busy", "share", name, busy["ns"], share))
    copies = [c for own in timeline.gpu.calls for c in timeline.gpu.copies(own)]
    copies = [c for c in copies if c.end_ns != FOREVER]
    if copies:
        found.append(_transfer_series(copies, timeline.start_ns, timeline.end_ns))
    return [one for one in found if one.ns]


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


# -- what to say and to change --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hint:
    """Something about the GPU worth saying when `phase` is to blame."""

    phase: str
    says: str
    action: Action | None = None


def hints_of(timeline: Timeline, phases: Sequence[Phase], tgid: int) -> tuple[Hint, ...]:
    """In order of phases. `tgid`: the process that served."""
    found: list[Hint | None] = []
    for phase in phases:
        window = phase.start_ns, phase.end_ns
        parts = {part.part: part for part in phase.parts}
        found.append(_persistence(timeline, phase, parts))
        found.append(_cold_compile(phase, parts))
        spans = copy_spans(timeline, tgid, window)
        if length(spans) >= _NOISE_NS:
            found.append(_slow_link(timeline, phase, spans))
            found.append(_pageable(timeline, phase, tgid))
        found.append(_big_kv(timeline, phase, parts))
        found.append(_cpu_fallback(timeline, phase, tgid, phases[0].start_ns))
    return tuple(hint for hint in found if hint is not None)


def _seconds(ns: float) -> str:
    return f"{ns / 1e9:.2f} s" if ns >= 1e9 else f"{ns / 1e6:.0f} ms"


def _persistence(timeline: Timeline, phase: Phase, parts: Mapping[str, Part]) -> Hint | None:
    context = parts.get("context")
    off = [d for d in timeline.gpu.devices.values() if d.get("persistence") is False]
    if context is None or context.spent_ns < _COLD_CONTEXT_NS or not off:
        return None
    return Hint(
        phase.phase,
        f"Making the device context took {_seconds(context.spent_ns)}, and persistence mode is "
        "off: the driver wakes the GPU anew when nothing else uses it.",
        Action(
            "turn persistence mode on (enable nvidia-persistenced, or nvidia-smi -pm 1)",
            None,
            "record again with no other GPU program running, ttftprof among them: its own samples "
            "keep the driver awake",
        ),
    )


def _cold_compile(phase: Phase, parts: Mapping[str, Part]) -> Hint | None:
    compiled = parts.get("compile")
    if compiled is None or compiled.spent_ns < _NOISE_NS:
        return None
    missed = [e for e in compiled.evidence if "missed" in e.what]
    if missed:
        caches = ", ".join(e.what.split(" ")[0] for e in missed)
        return Hint(
            phase.phase,
            f"Kernels were compiled or loaded for {_seconds(compiled.spent_ns)} and written to "
            f"{caches}: the next start should find them there.",
            Action(
                f"keep {caches} between starts (on a volume, in a container), and big enough "
                "(CUDA_CACHE_MAXSIZE for ComputeCache)",
                compiled.spent_ns,
                "start once more and record: the cache should be read and nothing written",
            ),
        )
    if any("compilers run" in e.what for e in compiled.evidence):
        return Hint(
            phase.phase,
            f"Compilers ran for {_seconds(compiled.spent_ns)} and nothing was written to a kernel "
            "cache that ttftprof knows: the next start may compile again.",
        )
    return None


def _slow_link(timeline: Timeline, phase: Phase, spans: Sequence[Span]) -> Hint | None:
    """At rest a link is slow to save power, so only what was seen during copies counts."""
    for index, fact in sorted(timeline.gpu.devices.items()):
        best = _link_rate(fact.get("link_gen_max"), fact.get("link_width_max"))
        rows = timeline.gpu.of_device(index, Valid.LINK)
        stamps = rows["ns"].astype(np.int64)
        inside = np.zeros(len(rows), bool)
        for begin, end in spans:
            inside |= (stamps >= begin) & (stamps <= end)
        rates = [_link_rate(int(r["link_gen"]), int(r["link_width"])) for r in rows[inside]]
        seen = max((rate for rate in rates if rate is not None), default=None)
        if seen is None or best is None or seen > 0.75 * best:
            continue
        row = rows[inside][-1]
        copying = length(spans)
        return Hint(
            phase.phase,
            f"While copying, the link of GPU {index} ran as PCIe {row['link_gen']}.0 × "
            f"{row['link_width']}, {seen / best:.0%} of what it and the slot could do "
            f"({fact['link_gen_max']}.0 × {fact['link_width_max']}).",
            Action(
                f"put GPU {index} into a slot with all its lanes, without a riser or a shared "
                "bridge, and look at the slot's speed in the firmware",
                round(copying * (1 - seen / best)),
                "nvidia-smi -q -d PERFORMANCE,CLOCK under load, then record again",
            ),
        )
    return None


def _link_rate(generation: Any, width: Any) -> float | None:
    rate = _LANE_RATE.get(generation) if isinstance(generation, int) else None
    return rate * width if rate and isinstance(width, int) else None


def _pageable(timeline: Timeline, phase: Phase, tgid: int) -> Hint | None:
    """Copies out of a mapped file that was not registered: the driver copies them twice."""
    copies = _inside(timeline.gpu.copies(tgid), (phase.start_ns, phase.end_ns))
    total = sum(c.size_bytes for c in copies)
    mapped = _file_maps(timeline, tgid)
    registered = [
        (c.second, c.second + c.size_bytes)
        for c in timeline.gpu.calls.get(tgid, ())
        if c.group == known.PIN and c.name.endswith("HostRegister") and not c.result
    ]
    pageable = sum(
        c.size_bytes
        for c in copies
        if _within(c.second, mapped) and not _within(c.second, registered)
    )
    if pageable * 2 < total or not pageable:
        return None
    return Hint(
        phase.phase,
        f"{pageable / 1e6:,.0f} MB were copied to the device straight out of a mapped file: "
        "pageable memory, which the driver copies twice and page by page.",
        Action(
            "load without mmap (llama-server: --no-mmap), so that the copies come from pinned "
            "buffers while the next piece is read",
            None,
            "record again and compare the transfer part of load",
        ),
    )


def _file_maps(timeline: Timeline, tgid: int) -> list[Span]:
    maps = timeline.of_kind(Kind.MMAP)
    own = maps[(maps["tgid"] == tgid) & ((maps["flags"] & MmapFlag.FAILED) == 0)]
    return [(int(m["b"]), int(m["b"]) + int(m["a"])) for m in own]


def _within(address: int, spans: Sequence[Span]) -> bool:
    return any(begin <= address < end for begin, end in spans)


def _refused(part: Part) -> int:
    return sum(int(e.value or 0) for e in part.evidence if e.what.startswith("refused"))


def _big_kv(timeline: Timeline, phase: Phase, parts: Mapping[str, Part]) -> Hint | None:
    part = parts.get("kv_alloc")
    if part is None:
        return None
    given = sum(int(e.value or 0) for e in part.evidence if e.what == "memory given")
    total = sum(int(d.get("total_bytes") or 0) for d in timeline.gpu.devices.values())
    if not _refused(part) and not (total and given > _BIG_KV_SHARE * total):
        return None
    refused = f", and {_refused(part)} more were refused" if _refused(part) else ""
    return Hint(
        phase.phase,
        f"After the weights {given / 1e9:.1f} GB of GPU memory were taken for the KV cache and "
        f"buffers{refused}.",
        Action(
            "lower the context size or the number of parallel slots (llama-server: -c, -np), or "
            "quantise the KV cache (-ctk, -ctv)",
            None,
            "record again and compare kv_alloc and the layers on the GPU",
        ),
    )


def _cpu_fallback(timeline: Timeline, phase: Phase, tgid: int, since_ns: int) -> Hint | None:
    """Layers that found no room run on the CPU from then on."""
    if phase.phase not in ("load", "init", "prefill"):
        return None
    told = [m for m in timeline.marks_of(tgid, "cpu_fallback") if since_ns <= m.ns <= phase.end_ns]
    layers, of = (
        (told[-1].values.get("layers"), told[-1].values.get("of")) if told else (None, None)
    )
    if not isinstance(layers, int) or not isinstance(of, int) or layers >= of:
        return None
    if not timeline.gpu.devices and not timeline.gpu.calls.get(tgid):
        return None
    return Hint(
        phase.phase,
        f"Only {layers} of {of} layers are on the GPU; the rest runs on the CPU.",
        Action(
            "free GPU memory before the switch, or use a smaller quantisation or context, so that "
            "all layers fit",
            None,
            f"the server's line should say offloaded {of}/{of} layers",
        ),
    )
