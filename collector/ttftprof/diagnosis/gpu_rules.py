"""What to say of GPUs when a phase is to blame for a wait, and what to change.

A hint rests on driver calls, samples or log lines of its phase, and names them as its evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ttftprof import scale
from ttftprof.diagnosis.rules import Hint, seconds
from ttftprof.engines import driver_calls as known
from ttftprof.events import DeviceFlag, Kind, MmapFlag
from ttftprof.gpu import link_rate
from ttftprof.gpu_facts import DriverSpan
from ttftprof.gpu_parts import Span, copy_spans, length
from ttftprof.gpu_rows import Valid
from ttftprof.model import Action, Evidence, Part, Phase
from ttftprof.timeline import Timeline

_NOISE_NS = 100_000_000
_COLD_CONTEXT_NS = 500_000_000
_BIG_KV_SHARE = 0.3
_SLOW_LINK = 0.75  # of what it could do: a generation or half of its lanes less
_MOSTLY = 0.5
# nvml.h: slowed by the hardware, by either thermal limit, or by the power brake; not by the power
# cap, at which a busy GPU is meant to run.
_TOO_HOT = 0x08 | 0x20 | 0x40 | 0x80


@dataclass(frozen=True, slots=True)
class _Asked:
    """One phase of a request that the process `tgid` served since `since_ns`."""

    timeline: Timeline
    phase: Phase
    tgid: int
    since_ns: int

    @property
    def window(self) -> Span:
        return self.phase.start_ns, self.phase.end_ns

    @property
    def parts(self) -> Mapping[str, Part]:
        return {part.part: part for part in self.phase.parts}


def hints_of(timeline: Timeline, phases: Sequence[Phase], tgid: int) -> tuple[Hint, ...]:
    """In order of phases. `tgid`: the process that served."""
    asked = [_Asked(timeline, phase, tgid, phases[0].start_ns) for phase in phases]
    found = (rule(one) for one in asked for rule in _RULES)
    return tuple(hint for hint in found if hint is not None)


# -- of a start-up --------------------------------------------------------------------------------


def _persistence(asked: _Asked) -> Hint | None:
    context = asked.parts.get("context")
    gpu = asked.timeline.gpu
    off = [device for device in gpu.devices if gpu.persists(device, asked.window[0]) is False]
    if context is None or context.spent_ns < _COLD_CONTEXT_NS or not off:
        return None
    return Hint(
        asked.phase.phase,
        f"Making the device context took {seconds(context.spent_ns)}, and persistence mode is "
        "off: the driver wakes the GPU anew when nothing else uses it.",
        Action(
            "turn persistence mode on (enable nvidia-persistenced, or nvidia-smi -pm 1)",
            None,
            "record again with no other GPU program running, ttftprof among them: its own samples "
            "keep the driver awake",
        ),
        (
            Evidence("gpu", "persistence mode", "off"),
            Evidence("driver", "time in making the context", context.spent_ns, "ns"),
        ),
    )


def _cold_compile(asked: _Asked) -> Hint | None:
    compiled = asked.parts.get("compile")
    if compiled is None or compiled.spent_ns < _NOISE_NS:
        return None
    took = seconds(compiled.spent_ns)
    missed = [e for e in compiled.evidence if "missed" in e.what]
    if missed:
        return _cache_missed(asked.phase.phase, compiled, missed)
    if any("compilers run" in e.what for e in compiled.evidence):
        return Hint(
            asked.phase.phase,
            f"Compilers ran for {took} and nothing was written to a kernel cache that ttftprof "
            "knows: the next start may compile again.",
            evidence=compiled.evidence,
        )
    return None


def _cache_missed(phase: str, compiled: Part, missed: Sequence[Evidence]) -> Hint:
    caches = ", ".join(e.what.split(" ")[0] for e in missed)
    lost = [str(e.value) for e in compiled.evidence if "next start" in e.what and e.value != "hit"]
    after = f"the next start: {lost[0]}" if lost else "the next start should find them there"
    return Hint(
        phase,
        f"Kernels were compiled or loaded for {seconds(compiled.spent_ns)} because {caches} did "
        f"not have them; {after}.",
        Action(
            f"keep {caches} between starts (on a volume, in a container), and big enough "
            "(CUDA_CACHE_MAXSIZE for ComputeCache)",
            compiled.spent_ns,
            "start once more and record: the cache should be read and nothing written",
        ),
        compiled.evidence,
    )


def _big_kv(asked: _Asked) -> Hint | None:
    part = asked.parts.get("kv_alloc")
    if part is None:
        return None
    given = _sum_of(part, "memory given")
    refused = _sum_of(part, "refused")
    gpu = asked.timeline.gpu
    whole = {index for index, fact in gpu.devices.items() if fact.get("parent") is None}
    held = gpu.held_by(asked.tgid) or whole
    total = sum(int(gpu.devices.get(index, {}).get("total_bytes") or 0) for index in held)
    if not refused and not (total and given > _BIG_KV_SHARE * total):
        return None
    and_refused = f", and {refused} more were refused" if refused else ""
    return Hint(
        asked.phase.phase,
        f"After the weights {given / 1e9:.1f} GB of GPU memory were taken for the KV cache and "
        f"buffers{and_refused}.",
        Action(
            "lower the context size or the number of parallel slots (llama-server: -c, -np), or "
            "quantise the KV cache (-ctk, -ctv)",
            None,
            "record again and compare kv_alloc and the layers on the GPU",
        ),
        (*part.evidence, Evidence("gpu", "memory of the GPUs it is on", total, "bytes")),
    )


def _sum_of(part: Part, what: str) -> int:
    return sum(int(e.value or 0) for e in part.evidence if e.what.startswith(what))


# -- of the copies --------------------------------------------------------------------------------


def _used(asked: _Asked) -> list[int]:
    """The whole GPUs that the process has memory on; where that is not told, the only one."""
    devices = asked.timeline.gpu.devices
    whole = [index for index, fact in sorted(devices.items()) if fact.get("parent") is None]
    held = asked.timeline.gpu.held_by(asked.tgid)
    held |= {int(p) for i in held if (p := devices.get(i, {}).get("parent")) is not None}
    return [index for index in whole if index in held] if held or len(whole) > 1 else whole


def _slow_link(asked: _Asked) -> Hint | None:
    """At rest a link is slow to save power, so only what was seen during copies counts."""
    timeline = asked.timeline
    spans = copy_spans(timeline, asked.tgid, asked.window)
    copying_ns = length(spans)
    if copying_ns < _NOISE_NS:
        return None
    for index in _used(asked):
        fact, shown = timeline.gpu.devices[index], timeline.gpu.name_of(index)
        best = link_rate(fact.get("link_gen_max"), fact.get("link_width_max"))
        rows = timeline.gpu.of_device(index, Valid.LINK)
        stamps = rows["ns"].astype(np.int64)
        inside = np.zeros(len(rows), bool)
        for begin, end in spans:
            inside |= (stamps >= begin) & (stamps <= end)
        rates = [link_rate(int(r["link_gen"]), int(r["link_width"])) for r in rows[inside]]
        seen = max((rate for rate in rates if rate is not None), default=None)
        if seen is None or best is None or seen > _SLOW_LINK * best:
            continue
        row = rows[inside][-1]
        return Hint(
            asked.phase.phase,
            f"While copying, the link of {shown} ran as PCIe {row['link_gen']}.0 × "
            f"{row['link_width']}, {scale.percent(seen / best)} of what it and the slot could do "
            f"({fact['link_gen_max']}.0 × {fact['link_width_max']}).",
            Action(
                f"put {shown} into a slot with all its lanes, without a riser or a shared "
                "bridge, and look at the slot's speed in the firmware",
                round(copying_ns * (1 - seen / best)),
                "nvidia-smi -q -d PERFORMANCE,CLOCK under load, then record again",
            ),
            (
                Evidence("gpu", f"link of {shown} while copying", round(seen), "bytes/s"),
                Evidence("gpu", "the same at its best", round(best), "bytes/s"),
                Evidence("driver", "time in copies", copying_ns, "ns"),
            ),
        )
    return None


def _pageable(asked: _Asked) -> Hint | None:
    """Copies out of a mapped file that was not registered: the driver copies them twice."""
    timeline, tgid, window = asked.timeline, asked.tgid, asked.window
    if length(copy_spans(timeline, tgid, window)) < _NOISE_NS:
        return None
    copies = [
        c
        for c in timeline.gpu.during(tgid, *window)
        if c.to_device and c.start_ns >= window[0] and c.end_ns <= window[1]
    ]
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
        asked.phase.phase,
        f"{pageable / 1e6:,.0f} MB were copied to the device straight out of a mapped file: "
        "pageable memory, which the driver copies twice and page by page.",
        Action(
            "load without mmap (llama-server: --no-mmap), so that the copies come from pinned "
            "buffers while the next piece is read",
            None,
            "record again and compare the transfer part of load",
        ),
        (
            Evidence("driver", "copied out of a mapped file", pageable, "bytes"),
            Evidence("driver", "copied to the device", total, "bytes"),
        ),
    )


def _file_maps(timeline: Timeline, tgid: int) -> list[Span]:
    maps = timeline.of_kind(Kind.MMAP)
    own = maps[(maps["tgid"] == tgid) & ((maps["flags"] & MmapFlag.FAILED) == 0)]
    return [(int(m["b"]), int(m["b"]) + int(m["a"])) for m in own]


def _within(address: int, spans: Sequence[Span]) -> bool:
    return any(begin <= address < end for begin, end in spans)


# -- of the work ----------------------------------------------------------------------------------


def _slowed(asked: _Asked) -> Hint | None:
    """The device ran below its clock, by its own account, for most of the phase."""
    for index in _used(asked):
        shown = asked.timeline.gpu.name_of(index)
        rows = asked.timeline.gpu.of_device(index, Valid.THROTTLE)
        rows = rows[(rows["ns"] >= asked.phase.start_ns) & (rows["ns"] <= asked.phase.end_ns)]
        hot = (rows["throttle"] & np.uint64(_TOO_HOT)) != 0
        if len(rows) < 3 or asked.phase.phase != "prefill" or hot.mean() < _MOSTLY:
            continue
        return Hint(
            "prefill",
            f"{shown} ran below its clock in {scale.percent(float(hot.mean()))} of the looks "
            "at it, because it was too hot or its power was cut.",
            Action(
                f"look at the cooling and the power supply of {shown}",
                None,
                "nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE under load",
            ),
            (
                Evidence("gpu", "looks at which it was slowed", int(hot.sum()), "samples"),
                Evidence("gpu", "of so many in this phase", len(rows), "samples"),
            ),
        )
    return None


def _cpu_fallback(asked: _Asked) -> Hint | None:
    """Layers that found no room run on the CPU from then on."""
    if asked.phase.phase not in ("load", "init", "prefill"):
        return None
    marks = asked.timeline.marks_of(asked.tgid, "cpu_fallback")
    told = [m for m in marks if asked.since_ns <= m.ns <= asked.phase.end_ns]
    if not told:
        return None
    layers, of = told[-1].values.get("layers"), told[-1].values.get("of")
    if not isinstance(layers, int) or not isinstance(of, int) or layers >= of:
        return None
    if not asked.timeline.gpu.devices and not asked.timeline.gpu.calls.get(asked.tgid):
        return None
    refused = sum(
        1
        for c in asked.timeline.gpu.calls.get(asked.tgid, ())
        if c.group == known.ALLOC and c.result == known.OUT_OF_MEMORY and c.start_ns < told[-1].ns
    )
    return Hint(
        asked.phase.phase,
        f"Only {layers} of {of} layers are on the GPU; the rest runs on the CPU.",
        Action(
            "free GPU memory before the switch, or use a smaller quantisation or context, so that "
            "all layers fit",
            None,
            f"the server's line should say offloaded {of}/{of} layers",
        ),
        (
            Evidence("log", "layers on the GPU", layers, "layers"),
            Evidence("log", "of the model's", of, "layers"),
            *_fit_evidence(asked, told[-1].ns),
            *((Evidence("driver", "refused: out of memory", refused, "calls"),) if refused else ()),
        ),
    )


def _fit_evidence(asked: _Asked, until_ns: int) -> tuple[Evidence, ...]:
    """The server's own pass that looked how much fits, if it said so."""
    ended = [m for m in asked.timeline.marks_of(asked.tgid, "fit_end") if m.ns <= until_ns]
    if not ended:
        return ()
    took = ended[-1].values.get("s")
    return (Evidence("log", "the server fitted the model to free memory", took, "s"),)


def _no_device(asked: _Asked) -> Hint | None:
    """The driver or its device file refused, and the server went on without it."""
    if asked.phase.phase not in ("load", "init", "prefill"):
        return None
    began = asked.timeline.derived(_inits, asked.tgid)
    refused = [c for c in began if c.result]
    if refused and not any(c.result == 0 for c in began):
        found = Evidence("driver", f"{refused[-1].name} failed", refused[-1].result, "error")
        why = f"{refused[-1].name} failed with error {refused[-1].result}"
    else:
        denied = _denied_devices(asked)
        if not denied or began:
            return None
        found = Evidence("files", "opens of the GPU's device files refused", denied, "opens")
        why = "its device files could not be opened"
    return Hint(
        asked.phase.phase,
        f"The server could not use the GPU ({why}): the model runs on the CPU.",
        Action(
            "give the server its GPU: load the driver (nvidia-smi tells), let its user open "
            "/dev/nvidia* or /dev/kfd and /dev/dri, in a container --gpus all",
            None,
            "record again: the driver call should succeed",
        ),
        (found,),
    )


def _inits(timeline: Timeline, tgid: int) -> list[DriverSpan]:
    calls = timeline.gpu.calls.get(tgid, ())
    return [call for call in calls if call.name in ("cuInit", "hipInit")]


def _denied_devices(asked: _Asked) -> int:
    """Opens of device files that were refused for want of permission, if none was had."""
    events = asked.timeline.gpu.device_files
    own = events[(events["tgid"] == asked.tgid) & ((events["flags"] & DeviceFlag.IOCTL) == 0)]
    results = own["b"].astype(np.int64)
    had = (results >= 0).any()
    return 0 if had else int(np.isin(results, [-1, -13]).sum())  # EPERM, EACCES


_RULES: tuple[Callable[[_Asked], Hint | None], ...] = (
    _persistence,
    _cold_compile,
    _slow_link,
    _pageable,
    _slowed,
    _big_kv,
    _cpu_fallback,
    _no_device,
)
