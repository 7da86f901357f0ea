"""How GPU memory changed hands: the old model's falls, the new one's rises, and what lay between.

Pure. Levels are samples 20 or 40 ms apart: an edge is true to the one before it. Whose memory it
was is only said where the driver tells it by process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ttftprof.engines import driver_calls as known
from ttftprof.gpu_rows import Valid
from ttftprof.model import Evidence, Phase
from ttftprof.timeline import Timeline
from ttftprof.windows import Ints

_EDGE_SHARE = 0.1  # of a fall in memory, at either end, that is not yet or no longer its edge
EDGE_BYTES = 64 << 20


def level(timeline: Timeline, device: int, ns: int) -> int | None:
    """Memory in use at a moment: that of the last sample before it."""
    rows = timeline.gpu.of_device(device, Valid.USED)
    at = int(np.searchsorted(rows["ns"].astype(np.int64), ns, side="right"))
    return int(rows["used_bytes"][at - 1]) if at else None


def with_eviction(timeline: Timeline, phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """The memory's edges as evidence: of the phase in which the old model made room, else of the
    phase in which memory fell (a model that was dropped inside its process)."""
    if not phases or not (timeline.gpu.devices or timeline.gpu.calls):
        return tuple(phases)
    at = next((n for n, p in enumerate(phases) if p.phase == "evict"), None)
    begin_ns, end_ns = phases[0 if at is None else at].start_ns, phases[-1].end_ns
    edges = list(_edges(timeline, begin_ns, end_ns))
    if at is None and edges:
        at = next((n for n, p in enumerate(phases) if edges[0].falls_ns < p.end_ns), None)
    if at is None:
        return tuple(phases)
    evict = phases[at]
    told = [e for edge in edges for e in _told(timeline, edge, evict.start_ns, end_ns)]
    # What is refused once the weights are in is too big, and not too early.
    loaded_ns = max((p.end_ns for p in phases if p.phase == "load"), default=end_ns)
    told += _retries(timeline, begin_ns, loaded_ns)
    return (*phases[:at], replace(evict, evidence=(*evict.evidence, *told)), *phases[at + 1 :])


# -- a device's memory ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryEdge:
    """A fall of a device's memory: by how much, from when, when it was over, and when the next rise
    began (None: it did not). `error_ns`: by how much the moments may be too late."""

    device: int
    fell_bytes: int
    falls_ns: int
    back_ns: int
    rises_ns: int | None
    error_ns: int


def memory_edge(device: int, ns: Ints, used: Ints) -> MemoryEdge | None:
    """The first big fall from the first level; None if there is none."""
    before, lowest = int(used[0]), int(used.min())
    fell = before - lowest
    if fell < EDGE_BYTES:
        return None
    margin = int(fell * _EDGE_SHARE)
    falls = np.flatnonzero(used < before - margin)[0]
    down = np.flatnonzero(used <= lowest + margin)[0]
    up = down + np.flatnonzero(used[down:] > lowest + margin)[:1]
    rises = int(ns[up[0]]) if len(up) else None
    seen = np.array([falls, down, *up])
    error_ns = int((ns[seen] - ns[seen - 1]).max())
    return MemoryEdge(device, fell, int(ns[falls]), int(ns[down]), rises, error_ns)


def _edges(timeline: Timeline, begin_ns: int, end_ns: int) -> Iterator[MemoryEdge]:
    for device in sorted(timeline.gpu.devices):
        rows = timeline.gpu.of_device(device, Valid.USED)
        stamps, used = (rows[name].astype(np.int64) for name in ("ns", "used_bytes"))
        first = int(np.searchsorted(stamps, begin_ns, side="right")) - 1  # the level before
        last = int(np.searchsorted(stamps, end_ns, side="right"))
        edge = memory_edge(device, stamps[first:last], used[first:last]) if first >= 0 else None
        if edge is not None:
            yield edge


def _told(timeline: Timeline, edge: MemoryEdge, begin_ns: int, end_ns: int) -> Iterator[Evidence]:
    yield Evidence(
        "gpu", f"memory given back on {timeline.gpu.name_of(edge.device)}", edge.fell_bytes, "bytes"
    )
    yield Evidence("gpu", "it was back after", edge.back_ns - begin_ns, "ns")
    if edge.rises_ns is not None:
        gap_ns = edge.rises_ns - edge.back_ns
        yield Evidence("gpu", "and used anew after another", gap_ns, "ns")
    yield Evidence("gpu", "looked at before each of these no longer ago than", edge.error_ns, "ns")
    for tgid, change in _changes(timeline, edge.device, begin_ns, end_ns):
        what = "gave back" if change < 0 else "took"
        yield Evidence("gpu", f"pid {tgid} {what}", abs(change), "bytes")


def _changes(
    timeline: Timeline, device: int, begin_ns: int, end_ns: int
) -> Iterator[tuple[int, int]]:
    """(tgid, bytes more or less) of the processes whose memory changed much, as they changed."""
    rows = timeline.gpu.process_samples
    rows = rows[(rows["device"] == device) & (rows["ns"] <= end_ns)]
    late = rows["ns"] >= begin_ns
    for tgid in dict.fromkeys(rows["tgid"][late].tolist()):
        levels = rows["used_bytes"][rows["tgid"] == tgid].astype(np.int64)
        inside = levels[late[rows["tgid"] == tgid]]
        before = int(levels[-len(inside) - 1]) if len(levels) > len(inside) else 0
        less, more = int(inside.min()) - before, int(inside.max()) - before
        yield from ((tgid, by) for by in (min(less, 0), max(more, 0)) if abs(by) >= EDGE_BYTES)


# -- memory that was not back in time -------------------------------------------------------------


def _retries(timeline: Timeline, begin_ns: int, end_ns: int) -> Iterator[Evidence]:
    """Allocations that were refused, and whether the same was asked for again and given."""
    refused = given = lasted_ns = 0
    for tgid in timeline.gpu.calls:
        calls = timeline.gpu.during(tgid, begin_ns, end_ns)
        asked = [
            c
            for c in calls
            if c.group == known.ALLOC and begin_ns <= c.start_ns and c.end_ns <= end_ns
        ]
        for number, call in enumerate(asked):
            if call.result != known.OUT_OF_MEMORY:
                continue
            refused += 1
            later = asked[number + 1 :]
            again = next(
                (c for c in later if not c.result and c.size_bytes == call.size_bytes), None
            )
            if again is not None:
                given += 1
                lasted_ns = max(lasted_ns, again.end_ns - call.start_ns)
    if refused:
        yield Evidence("driver", "allocations refused: out of memory", refused, "calls")
    if given:
        yield Evidence("driver", "of them asked for again and given", given, "calls")
        yield Evidence("driver", "the longest wait for it", lasted_ns, "ns")
