"""What a recording holds of GPUs: devices, samples, driver calls, kernel caches, device files.

Pure, and part of the timeline: it pairs and orders, and concludes nothing. Times are
CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from ttftprof.engines import driver_calls as known
from ttftprof.engines.driver_calls import DRIVER_CALLS, FIRST_ROW, calls_in
from ttftprof.engines.kernel_caches import is_compiler
from ttftprof.events import Kind, Records
from ttftprof.gpu_rows import Valid
from ttftprof.recording import Facts

_IMPOSSIBLE_NS = 1 << 62
STILL_THERE = int(np.iinfo(np.int64).max)
Ints = npt.NDArray[np.int64]
_NO_EDGES: tuple[Ints, Ints] = (np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class DriverSpan:
    """One call into a GPU driver. `end_ns` is STILL_THERE if it had not returned at the end.

    `size_bytes`: what it was asked to copy or allocate; `second`: see `engines.driver_calls`;
    `result`: 0 for success.
    """

    name: str
    group: str
    tid: int
    start_ns: int
    end_ns: int
    size_bytes: int
    second: int
    result: int | None

    @property
    def to_device(self) -> bool:
        """Whether it copies from the host to the device for certain."""
        if self.group != known.COPY:
            return False
        told = self.name.startswith("hipMemcpy") and self.second == known.HOST_TO_DEVICE
        return told or "HtoD" in self.name

    @property
    def either_way(self) -> bool:
        """Whether it copies, and only the driver knows where to."""
        if self.group != known.COPY or self.to_device:
            return False
        return not self.name.startswith("hipMemcpy") or self.second == known.ANY_DIRECTION


@dataclass(frozen=True, slots=True)
class CacheOpen:
    """A file of a kernel cache was opened: to be written (a miss), or only read. `fstype`: of the
    file system it lies on, None if that is not known."""

    ns: int
    tgid: int
    cache: str
    write: bool
    missing: bool
    size_bytes: int
    fstype: str | None = None
    file: tuple[int, int] | None = None  # device and inode


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler was executed in this process."""

    ns: int
    tgid: int
    path: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A question that a device (-1: the driver) does not answer, and its reason."""

    device: int
    call: str
    reason: str


@dataclass(frozen=True, slots=True)
class DriverLibrary:
    """A library of a driver, and from when on its calls are told. `mapped_ns`: the earliest that
    `tgid` can have mapped it; `probed_ns` if nobody had, or before recording began. `refused`: why
    its calls could not be probed, else ""."""

    path: str
    tgid: int
    mapped_ns: int
    probed_ns: int
    refused: str

    @property
    def unseen_ns(self) -> int:
        """For how long, at most, its calls were not told."""
        return max(self.probed_ns - self.mapped_ns, 0)


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """All of one recording. Samples and calls are ordered by stamp; `devices` by the number that
    the samples carry; `calls` by tgid."""

    devices: Mapping[int, Mapping[str, Any]]
    persistence: Mapping[int, Sequence[tuple[int, bool]]]  # of devices where it changed: (ns, on)
    samples: Records
    process_samples: Records
    calls: Mapping[int, Sequence[DriverSpan]]
    cache_opens: Sequence[CacheOpen]
    compilers: Sequence[Compiler]
    device_files: Records  # EVENT_DEVICE
    refused: Sequence[Refused]
    libraries: Sequence[DriverLibrary]
    # By tgid: when each call began, and until when those up to it lasted. A server makes some
    # hundred a second, and each phase of each request asks for its own.
    edges: Mapping[int, tuple[Ints, Ints]]

    def of_device(self, device: int, valid: Valid) -> Records:
        """The samples of one device in which these fields were looked at."""
        rows = self.samples
        bits = np.uint16(valid)
        found: Records = rows[(rows["device"] == device) & ((rows["valid"] & bits) == bits)]
        return found

    def name_of(self, device: int) -> str:
        """`GPU 0`; of an instance of a partitioned one, `GPU 0 MIG 1`."""
        parent = self.devices.get(device, {}).get("parent")
        if parent is None:
            return f"GPU {device}"
        others = [index for index, fact in self.devices.items() if fact.get("parent") == parent]
        return f"GPU {parent} MIG {sorted(others).index(device)}"

    def persists(self, device: int, ns: int) -> bool | None:
        """Whether persistence mode was on at a moment."""
        told: bool | None = self.devices.get(device, {}).get("persistence")
        for changed_ns, on in self.persistence.get(device, ()):
            told = on if changed_ns <= ns else told
        return told

    def held_by(self, tgid: int) -> set[int]:
        """The devices on which a process was ever seen to have memory; of a partitioned one and
        its instances, the instances."""
        rows = self.process_samples
        held = set(rows["device"][(rows["tgid"] == tgid) & (rows["used_bytes"] > 0)].tolist())
        return held - {self.devices.get(index, {}).get("parent") for index in held}

    def during(self, tgid: int, begin_ns: int, end_ns: int) -> list[DriverSpan]:
        """The calls of one process that were under way in an interval."""
        starts, latest = self.edges.get(tgid, _NO_EDGES)
        first = int(np.searchsorted(latest, begin_ns, side="right"))
        last = int(np.searchsorted(starts, end_ns, side="left"))
        return [call for call in self.calls.get(tgid, ())[first:last] if call.end_ns > begin_ns]

    def copies(self, tgid: int) -> list[DriverSpan]:
        """Host-to-device copies of one process."""
        return [call for call in self.calls.get(tgid, ()) if call.to_device]


def read(reader: Facts, by_kind: Mapping[Kind, Records]) -> GpuFacts:
    """Raises `ValueError`, `TypeError` or `LookupError` for facts that make no sense."""
    calls: dict[int, list[DriverSpan]] = {}
    for tgid, span in _spans(by_kind):
        calls.setdefault(tgid, []).append(span)
    ordered = {tgid: sorted(own, key=lambda c: c.start_ns) for tgid, own in calls.items()}
    executed = [(ns, int(f["tgid"]), str(f.get("path") or "")) for ns, f in reader.facts("exec")]
    return GpuFacts(
        devices={int(fact["index"]): fact for _, fact in reader.facts("gpu")},
        persistence=_persistence(reader),
        samples=_ordered(reader.stream("gpu")),
        process_samples=_ordered(reader.stream("gpu_processes")),
        calls=ordered,
        cache_opens=tuple(_cache_opens(reader)),
        compilers=tuple(Compiler(*one) for one in executed if is_compiler(one[2])),
        device_files=by_kind[Kind.DEVICE],
        refused=tuple(_refused(reader)),
        libraries=tuple(_libraries(reader)),
        edges={tgid: _edges(own) for tgid, own in ordered.items()},
    )


def engine_marks(by_kind: Mapping[Kind, Records]) -> Records:
    """Enters and exits of marks that are no driver calls, ordered by stamp."""
    both = _marks(by_kind)
    return both[both["flags"] < FIRST_ROW]


def _marks(by_kind: Mapping[Kind, Records]) -> Records:
    both = np.concatenate([by_kind[Kind.MARK_ENTER], by_kind[Kind.MARK_EXIT]])
    ordered: Records = both[np.argsort(both["start_ns"], kind="stable")]
    return ordered


def _spans(by_kind: Mapping[Kind, Records]) -> Iterator[tuple[int, DriverSpan]]:
    """(tgid, span). Pairs enters with exits by thread and row. A variant that calls another is one
    call, the inner; an enter whose exit was lost is told only if it was the thread's last."""
    both = _marks(by_kind)
    under_way: dict[tuple[int, int, int], Any] = {}
    for event in both[both["flags"] >= FIRST_ROW]:
        key = (int(event["tgid"]), int(event["tid"]), int(event["flags"]))
        if int(event["kind"]) == Kind.MARK_ENTER:
            under_way[key] = event
        elif key in under_way:
            yield key[0], _span(under_way.pop(key), event)
    for key, enter in under_way.items():
        yield key[0], _span(enter, None)


def _span(enter: Any, leave: Any) -> DriverSpan:
    row = int(enter["flags"])
    call = DRIVER_CALLS.get(row)
    return DriverSpan(
        name=call.name if call else f"driver call {row}",
        group=call.group if call else "",
        tid=int(enter["tid"]),
        start_ns=int(enter["start_ns"]),
        end_ns=STILL_THERE if leave is None else int(leave["start_ns"]),
        size_bytes=int(enter["a"]),
        second=int(enter["b"]),
        result=None if leave is None else int(leave["a"]) & 0xFFFF_FFFF,
    )


def _edges(calls: Sequence[DriverSpan]) -> tuple[Ints, Ints]:
    starts = np.array([call.start_ns for call in calls], np.int64)
    ends = np.array([call.end_ns for call in calls], np.int64)
    return starts, np.maximum.accumulate(ends)


def _refused(reader: Facts) -> Iterator[Refused]:
    for _, fact in reader.facts("gpu_refused"):
        yield Refused(int(fact["device"]), str(fact.get("call")), str(fact.get("reason")))


def _libraries(reader: Facts) -> Iterator[DriverLibrary]:
    for ns, fact in reader.facts("library"):
        path = str(fact.get("path") or "")
        if calls_in(PurePath(path.removesuffix(" (deleted)")).name):
            yield DriverLibrary(
                path=path,
                tgid=int(fact.get("tgid") or 0),
                mapped_ns=int(fact.get("mapped_ns") or ns),
                probed_ns=ns,
                refused=str(fact.get("reason") or ""),
            )


def _ordered(rows: Records) -> Records:
    rows = rows[rows["ns"] < _IMPOSSIBLE_NS]
    ordered: Records = rows[np.argsort(rows["ns"], kind="stable")]
    return ordered


def _cache_opens(reader: Facts) -> Iterator[CacheOpen]:
    for ns, fact in reader.facts("cache_open"):
        ino = int(fact.get("ino") or 0)
        yield CacheOpen(
            ns=ns,
            tgid=int(fact["tgid"]),
            cache=str(fact.get("cache") or ""),
            write=bool(fact.get("write")),
            missing=bool(fact.get("missing")),
            size_bytes=int(fact.get("size_bytes") or 0),
            fstype=fact.get("fstype"),
            file=(int(fact["dev"]), ino) if ino else None,
        )


def _persistence(reader: Facts) -> dict[int, list[tuple[int, bool]]]:
    changes: dict[int, list[tuple[int, bool]]] = {}
    for ns, fact in reader.facts("gpu_persistence"):
        changes.setdefault(int(fact["index"]), []).append((ns, bool(fact["on"])))
    return changes
