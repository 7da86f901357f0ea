"""What a phase was spent on, where calls and files tell: context, compiling, copying and so on.

Pure. A part is the hull of its intervals with the time spent inside; parts may overlap (two
threads) and leave gaps, so they divide no phase. `storage`, `fault`, `copy` and `transfer` are the
load's activities, as `activities` divides them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ttftprof.engines import driver_calls as known
from ttftprof.events import DeviceFlag, Kind, duration_end
from ttftprof.gpu_facts import CacheOpen, DriverSpan
from ttftprof.model import ACTIVITIES, Activities, Activity, Evidence, Part, Phase
from ttftprof.threads import FOREVER
from ttftprof.timeline import Timeline

Span = tuple[int, int]
_LOAD_PARTS = {
    "storage_wait": "storage",
    "fault": "fault",
    "cpu": "copy",
    "transfer": "transfer",
}
_TOKENIZER_NAMES = ("tokenizer", "vocab.", "merges.txt", "spiece.model")


def with_parts(
    timeline: Timeline,
    phases: Sequence[Phase],
    critical: Sequence[int],
    activities: Sequence[Activity],
) -> tuple[Phase, ...]:
    """The phases with their parts; `critical` names the process that each phase hangs on."""
    return tuple(
        replace(phase, parts=tuple(_parts(timeline, phase, tgid, activities)))
        for phase, tgid in zip(phases, critical, strict=True)
    )


def _parts(
    timeline: Timeline, phase: Phase, tgid: int, activities: Sequence[Activity]
) -> Iterator[Part]:
    window = phase.start_ns, phase.end_ns
    calls = timeline.gpu.during(tgid, *window)
    found = [
        _context(timeline, tgid, calls, window),
        _compile(timeline, tgid, calls, window),
        _capture(timeline, tgid, calls, window),
        _allocation("kv_alloc" if phase.phase == "init" else "alloc", calls, window),
    ]
    if phase.phase == "init":
        found += [_tokenizer(timeline, tgid, window), _warmup(timeline, tgid, window)]
    if phase.phase == "load":
        found += list(_load(timeline, tgid, activities, window))
    yield from (part for part in found if part is not None)


# -- intervals ------------------------------------------------------------------------------------


def union(spans: Iterable[Span], window: Span) -> list[Span]:
    """The spans cut to the window, overlapping ones joined, in order."""
    out: list[Span] = []
    for begin, end in sorted((max(b, window[0]), min(e, window[1])) for b, e in spans):
        if end <= begin:
            continue
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out


def length(spans: Iterable[Span]) -> int:
    return sum(end - begin for begin, end in spans)


def common_ns(one: Sequence[Span], other: Sequence[Span]) -> int:
    """How long both go on; each without overlaps and in order, as `union` gives them."""
    total, at = 0, 0
    for begin, end in one:
        while at < len(other) and other[at][1] <= begin:
            at += 1
        number = at
        while number < len(other) and other[number][0] < end:
            total += min(end, other[number][1]) - max(begin, other[number][0])
            number += 1
    return total


def part_of(
    name: str, spans: Iterable[Span], window: Span, basis: str, *evidence: Evidence
) -> Part | None:
    """A part of these intervals; None if nothing of them lies in the window."""
    inside = union(spans, window)
    if not inside:
        return None
    return Part(name, inside[0][0], inside[-1][1], length(inside), basis, evidence)


def _spans(calls: Iterable[DriverSpan]) -> list[Span]:
    return [(call.start_ns, call.end_ns) for call in calls]


def _called(calls: Sequence[DriverSpan]) -> Evidence:
    names = ", ".join(dict.fromkeys(call.name for call in calls))
    return Evidence("driver", names, len(calls), "calls")


# -- of a start-up --------------------------------------------------------------------------------


def _context(
    timeline: Timeline, tgid: int, calls: Sequence[DriverSpan], window: Span
) -> Part | None:
    made = [call for call in calls if call.group == known.CONTEXT]
    if made:
        return part_of("context", _spans(made), window, "observed", _called(made))
    return _context_by_files(timeline, tgid, window)


def _unprobed_until_ns(timeline: Timeline, tgid: int) -> int:
    """Until when calls of a process into its driver may have been missed."""
    if not timeline.gpu.calls.get(tgid):
        return FOREVER
    libraries = timeline.gpu.libraries
    return max(
        (lib.probed_ns for lib in libraries if lib.tgid == tgid and lib.unseen_ns), default=0
    )


def _context_by_files(timeline: Timeline, tgid: int, window: Span) -> Part | None:
    """Where its calls were not seen: slow requests to a device whose file the process opened."""
    events = timeline.gpu.device_files
    own = events[(events["tgid"] == tgid)]
    opened = own[(own["flags"] & DeviceFlag.IOCTL) == 0]
    opened = opened[opened["b"].astype(np.int64) >= 0]
    if not len(opened):
        return None
    slow = own[
        ((own["flags"] & DeviceFlag.IOCTL) != 0)
        & (own["start_ns"] < _unprobed_until_ns(timeline, tgid))
    ]
    slow = slow[np.isin(slow["dev"] >> 20, np.unique(opened["dev"] >> 20))]
    begins = slow["start_ns"].astype(np.int64)
    spans = zip(
        begins.tolist(), (begins + slow["duration_ns"].astype(np.int64)).tolist(), strict=True
    )
    evidence = Evidence("files", "slow requests to the device", len(slow), "ioctls")
    return part_of("context", spans, window, "inferred", evidence)


def _compile(
    timeline: Timeline, tgid: int, calls: Sequence[DriverSpan], window: Span
) -> Part | None:
    """Modules loaded (and compiled, if they hold no code for this device), compilers run, and what
    the engine says of its own compiling."""
    loads = [call for call in calls if call.group == known.COMPILE]
    evidence = [_called(loads)] if loads else []
    children: list[Span] = []
    names: list[str] = []
    for compiler in timeline.gpu.compilers:
        life = timeline.process_at(compiler.tgid, compiler.ns)
        if compiler.ns < window[1] and (life is None or life.gone_ns > window[0]):
            gone_ns = min(life.gone_ns, timeline.end_ns) if life else compiler.ns
            children.append((compiler.ns, gone_ns))
            names.append(compiler.path.rsplit("/", 1)[-1])
    if children:
        what = ", ".join(dict.fromkeys(names))
        evidence.append(Evidence("process", f"compilers run: {what}", len(children), "processes"))
    said = union(_said(timeline, tgid, "compiled"), window)
    if said:
        what = "the engine said how long it compiled"
        evidence.append(Evidence("log", what, length(said), "ns"))
    evidence += cache_evidence(timeline, window)
    basis = "observed" if loads or children else "inferred"
    return part_of("compile", [*_spans(loads), *children, *said], window, basis, *evidence)


def _said(timeline: Timeline, tgid: int, name: str) -> Iterator[Span]:
    """What an engine tells at the end of a stage: that it took so many seconds."""
    for mark in timeline.marks_of(tgid, name):
        took = mark.values.get("s")
        if isinstance(took, int | float):
            yield mark.ns - round(took * 1e9), mark.ns


def cache_evidence(timeline: Timeline, window: Span) -> Iterator[Evidence]:
    """For each kernel cache, whether what was wanted was in it, and what the next start will find.
    A name that is written was not there; to read it back is no hit."""
    every = timeline.gpu.cache_opens
    made = {c.file: c.ns for c in reversed(every) if c.write and c.file is not None}
    opens = [c for c in every if window[0] <= c.ns < window[1]]
    opens = [c for c in opens if c.write or c.file not in made or c.ns < made[c.file]]
    for cache in dict.fromkeys(c.cache for c in opens):
        own = [c for c in opens if c.cache == cache]
        written = [c for c in own if c.write]
        read = sum(1 for c in own if not c.write and not c.missing)
        missing = [c for c in own if c.missing]
        if written:
            yield Evidence("files", f"{cache} missed: files written", len(written), "files")
        elif missing and not read:
            yield Evidence("files", f"{cache} missed: not found", len(missing), "files")
        if read:
            yield Evidence("files", f"{cache} hit: files read", read, "files")
        yield Evidence("files", f"{cache} at the next start", _next_start(written, read, own))


# File systems that go with the machine's memory, or with the container whose own layer they are.
_UNTIL_REBOOT, _UNTIL_REMOVED = ("tmpfs", "ramfs", "devtmpfs"), ("overlay", "aufs")


def _next_start(written: Sequence[CacheOpen], read: int, own: Sequence[CacheOpen]) -> str:
    """`hit`, or why not for certain."""
    if not written and not read:
        return "miss: nothing was kept"
    kinds = {c.fstype for c in own}
    if kinds & set(_UNTIL_REMOVED):
        return "hit only in this container, which keeps it in a layer of its own"
    if kinds & set(_UNTIL_REBOOT):
        return "hit only until the machine restarts, as the cache lies in memory"
    return "hit"


def _capture(
    timeline: Timeline, tgid: int, calls: Sequence[DriverSpan], window: Span
) -> Part | None:
    """From the begin of each capture to its end in the same thread, and making graphs of them; else
    what the engine says of it."""
    spans = _spans(call for call in calls if call.group == known.INSTANTIATE)
    spans += timeline.derived(_captures, tgid)
    groups = (known.CAPTURE, known.CAPTURED, known.INSTANTIATE)
    made = [call for call in calls if call.group in groups]
    if union(spans, window):
        evidence = [_called(made)] if made else []
        return part_of("graph_capture", spans, window, "observed", *evidence)
    said = union(_said(timeline, tgid, "graphs_captured"), window)
    what = "the engine said how long it captured graphs"
    told = Evidence("log", what, length(said), "ns")
    return part_of("graph_capture", said, window, "inferred", told)


def _captures(timeline: Timeline, tgid: int) -> list[Span]:
    """From the begin of each capture to its end in the same thread."""
    begun: dict[int, int] = {}
    spans = []
    for call in timeline.gpu.calls.get(tgid, ()):
        if call.group == known.CAPTURE:
            begun[call.tid] = call.start_ns
        elif call.group == known.CAPTURED and call.tid in begun:
            spans.append((begun.pop(call.tid), call.end_ns))
    return spans


def _allocation(name: str, calls: Sequence[DriverSpan], window: Span) -> Part | None:
    made = [call for call in calls if call.group in (known.ALLOC, known.MAP, known.PIN)]
    given, pinned = (
        sum(c.size_bytes for c in made if c.group == group and not c.result)
        for group in (known.ALLOC, known.PIN)
    )
    refused = sum(1 for c in made if c.result == known.OUT_OF_MEMORY)
    evidence = [_called(made), Evidence("driver", "memory given", given, "bytes")]
    if pinned:
        evidence.append(Evidence("driver", "the host's memory pinned", pinned, "bytes"))
    if refused:
        evidence.append(Evidence("driver", "refused: out of memory", refused, "calls"))
    return part_of(name, _spans(made), window, "observed", *evidence)


def _tokenizer(timeline: Timeline, tgid: int, window: Span) -> Part | None:
    """From each opening of its files to the last read of them."""
    keys = {
        key
        for key, file in timeline.files.items()
        if any(name in file.path.rsplit("/", 1)[-1] for name in _TOKENIZER_NAMES)
    }
    spans = [span for key in sorted(keys) for span in _sessions(timeline, tgid, key)]
    inside = union(spans, window)
    evidence = Evidence("files", "its files were read", len(keys), "files")
    return part_of("tokenizer", inside, window, "inferred", evidence)


def _sessions(timeline: Timeline, tgid: int, key: tuple[int, int]) -> Iterator[Span]:
    """From each opening of a file to what was last done with it before it was opened anew."""
    used = []
    for kind in (Kind.OPEN, Kind.READ, Kind.MMAP):
        events = timeline.of_kind(kind)
        own = events[(events["tgid"] == tgid) & (events["dev"] == key[0])]
        own = own[own["ino"] == key[1]]
        opens = [kind == Kind.OPEN] * len(own)
        used += list(zip(own["start_ns"].tolist(), duration_end(own).tolist(), opens, strict=True))
    begin = end = None
    for start_ns, end_ns, opens_it in sorted(used):
        if opens_it and begin is not None and end is not None:
            yield begin, end
            begin = end = None
        begin = start_ns if begin is None else begin
        end = max(end or 0, end_ns)
    if begin is not None and end is not None:
        yield begin, end


def _warmup(timeline: Timeline, tgid: int, window: Span) -> Part | None:
    runs = [c for name in ("decode", "encode") for c in timeline.calls_of(tgid, name)]
    inside = [c for c in runs if c.start_ns >= window[0] and c.end_ns <= window[1]]
    evidence = Evidence("call", "runs before it could serve", len(inside), "calls")
    spans = [(c.start_ns, c.end_ns) for c in inside]
    return part_of("warmup", spans, window, "observed", evidence)


# -- of a load ------------------------------------------------------------------------------------


def _load(
    timeline: Timeline, tgid: int, activities: Sequence[Activity], window: Span
) -> Iterator[Part | None]:
    every = Activities.of(activities)
    for activity, name in _LOAD_PARTS.items():
        own = every.code == ACTIVITIES.index(activity)
        spans = list(zip(every.start_ns[own].tolist(), every.end_ns[own].tolist(), strict=True))
        evidence = transfer_evidence(timeline, tgid, window) if name == "transfer" else ()
        yield part_of(name, spans, window, "observed", *evidence)


def transfer_evidence(timeline: Timeline, tgid: int, window: Span) -> list[Evidence]:
    """How much was copied, and how long storage was read meanwhile."""
    under_way = timeline.gpu.during(tgid, *window)
    copies = [c for c in under_way if c.to_device]
    inside = [c for c in copies if c.start_ns >= window[0] and c.end_ns <= window[1]]
    size = sum(c.size_bytes for c in inside)
    both = common_ns(union(_spans(copies), window), union(_storage(timeline, window), window))
    told = [
        Evidence("driver", "copied to the device", size, "bytes"),
        Evidence("driver", "storage was read while copying", both, "ns"),
    ]
    unknown = sum(c.size_bytes for c in under_way if c.either_way and c.start_ns >= window[0])
    if unknown:
        told.append(Evidence("driver", "copied in a direction that is not told", unknown, "bytes"))
    batches = sum(1 for c in under_way if c.either_way and not c.size_bytes)
    if batches:
        told.append(Evidence("driver", "copies whose size is not told", batches, "calls"))
    return told


def _storage(timeline: Timeline, window: Span) -> Iterator[Span]:
    """When storage worked for the target."""
    blocks, remote = timeline.blocks.within(*window), timeline.remote
    inside = (remote["start_ns"] < window[1]) & (remote["end_ns"] > window[0])
    for asked in (blocks, remote[inside]):
        yield from zip(asked["start_ns"].tolist(), asked["end_ns"].tolist(), strict=True)


def copy_spans(timeline: Timeline, tgid: int, window: Span) -> list[Span]:
    """When a copy to the device was under way."""
    copying = [c for c in timeline.gpu.during(tgid, *window) if c.to_device]
    return union(_spans(c for c in copying if c.end_ns != FOREVER), window)
