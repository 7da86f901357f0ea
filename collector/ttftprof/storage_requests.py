"""The requests behind a file's bytes, whoever answered them; where they were while threads waited;
and the model of the path that explains their times.

Pure. A request to a disk is shaped as a remote read (`remote.READ`) with `DEVICE` as its family: it
runs from its issue to its completion.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
import numpy.typing as npt

from ttftprof import path_model, remote
from ttftprof.columns import Columns
from ttftprof.events import Kind, ReadFlag, Records, Wait, duration_end
from ttftprof.grouping import distinct, grouped, split_by
from ttftprof.model import PathModel, WaitSplit
from ttftprof.timeline import FileFacts, Timeline
from ttftprof.windows import Ints

DEVICE = 0
PLAIN_READ_BYTES = 1 << 20
# Readahead windows under way before a reader that goes in order: the kernel asks for the next when
# the first page of the one before is touched (mm/readahead.c, the marker of a window).
WINDOWS = 2
_SECTOR = 512
_MOST_FITTED = 1 << 19  # requests to disks that a model of a path rests on
_REQUEST_OPTIONS = re.compile(r"(?:^|,)(?:rsize|max_read|msize)=(\d+)")

Ranges = npt.NDArray[np.int64]  # [begin, end] in each row


class Traffic:
    """The requests for files that began in [start, end), and the waits for their pages that reach
    into it: looked up once, whichever files are asked about."""

    def __init__(self, timeline: Timeline, start_ns: int, end_ns: int) -> None:
        self._timeline, self._window = timeline, (start_ns, end_ns)
        self._blocks = _Blocks(timeline, timeline.blocks.begun(start_ns, end_ns))
        self._waits = _waits_by_file(timeline.waits.within(start_ns, end_ns))
        self._requests: dict[tuple[int, int], Records] = {}

    def requests(self, file: FileFacts) -> Records:
        """Those for a file's bytes, as `remote.READ`."""
        if file.key not in self._requests:
            self._requests[file.key] = self._find(file)
        return self._requests[file.key]

    def _find(self, file: FileFacts) -> Records:
        asked = self._timeline.derived(_remote_by_file, None).get(file.key)
        if asked is not None:
            return remote.begun_within(asked, *self._window)
        disks = self._timeline.derived(_upper_disks, None).get(file.key)
        return _as_reads(self._blocks.of_file(file, disks))

    @property
    def inodes(self) -> set[int]:
        """Of which `requests` can find something."""
        asked = remote.begun_within(self._timeline.remote, *self._window)
        return {*self._blocks.inodes, *distinct(asked["ino"]).tolist()}

    def waits(self, file: FileFacts, start_ns: int, end_ns: int) -> Ranges:
        """[begin, end] of the recorded waits of threads for a file's pages, cut to a part of the
        window."""
        waits = self._waits.get(file.key)
        return np.empty((0, 2), np.int64) if waits is None else waits.within(start_ns, end_ns)


def waited_ns(timeline: Timeline, start_ns: int, end_ns: int) -> dict[tuple[int, ...], int]:
    """{(dev, ino): how long threads waited for it in [start, end)}; each thread counts."""
    waits = _waits_by_file(timeline.waits.within(start_ns, end_ns))
    cuts = ((key, own.within(start_ns, end_ns)) for key, own in waits.items())
    return {key: int((cut[:, 1] - cut[:, 0]).sum()) for key, cut in cuts if len(cut)}


def _remote_by_file(timeline: Timeline, _: None) -> dict[tuple[int, ...], Records]:
    return split_by(timeline.remote, "dev", "ino")


# -- requests to disks ----------------------------------------------------------------------------


class _Blocks:
    """Requests to disks of some window, by the file they were for. A request names a disk, which is
    no file system: where several files have the inode, it is that of the file whose file system
    lies on the disk."""

    def __init__(self, timeline: Timeline, blocks: Columns) -> None:
        self._timeline, self._blocks = timeline, blocks
        self._order, self._parts = grouped(blocks, "ino")
        self._past_cache = _past_the_cache(timeline, blocks)

    @property
    def inodes(self) -> set[int]:
        return {*(ino for (ino,) in self._parts), *(ino for _, ino in self._past_cache)}

    def of_file(self, file: FileFacts, disks: Disks | None = None) -> Columns:
        """Those for a file, oldest first; `disks`: only those to these."""
        where = self._order[self._parts.get((file.ino,), slice(0, 0))]
        if _shares_inode(self._timeline, file):
            where = where[self._blocks["dev"][where] == file.dev]
        if file.key in self._past_cache:
            where = np.union1d(where, self._past_cache[file.key])
        if disks is not None:
            where = where[np.isin(self._blocks["dev"][where], list(disks))]
        return {name: column[where] for name, column in self._blocks.items()}


Disks = frozenset[int]


def _shares_inode(timeline: Timeline, file: FileFacts) -> bool:
    return timeline.derived(_files_by_inode, None)[file.ino] > 1


def _files_by_inode(timeline: Timeline, _: None) -> Counter[int]:
    return Counter(file.ino for file in timeline.files.values())


def _disks_of(timeline: Timeline, file: FileFacts) -> Disks:
    """The disks that were asked for a file's pages, whichever layer they are of."""
    named = timeline.disks.of(file.ino)
    if _shares_inode(timeline, file):
        named &= {file.dev}
    return frozenset(named | timeline.derived(_disks_past_cache, None).get(file.key, set()))


def _disks_past_cache(timeline: Timeline, _: None) -> dict[tuple[int, ...], set[int]]:
    """The disks of what was read past the page cache, by file."""
    found: dict[tuple[int, ...], set[int]] = {}
    if timeline.derived(_direct_reads, None):
        for window in timeline.blocks.windows():
            blocks = timeline.blocks.begun(*window)
            for key, where in _past_the_cache(timeline, blocks).items():
                found.setdefault(key, set()).update(distinct(blocks["dev"][where]).tolist())
    return found


def _direct_reads(timeline: Timeline, _: None) -> dict[int, Records]:
    """Reads past the page cache, by thread."""
    reads = timeline.of_kind(Kind.READ)
    reads = reads[(reads["flags"] & ReadFlag.DIRECT) != 0]
    return {tid: own for (tid,), own in split_by(reads, "tid").items()}


def _inodes_followed(timeline: Timeline, _: None) -> npt.NDArray[np.uint64]:
    return np.array(sorted({file.ino for file in timeline.files.values()}), np.uint64)


def _past_the_cache(
    timeline: Timeline, blocks: Columns
) -> dict[tuple[int, ...], npt.NDArray[np.intp]]:
    """Where the requests of reads past the page cache stand, by file. Their pages are the reader's
    own, of no file or of shared memory: one belongs to the read that its thread was in."""
    reads = timeline.derived(_direct_reads, None)
    if not reads or not len(blocks["ino"]):
        return {}
    nameless = np.flatnonzero(~np.isin(blocks["ino"], timeline.derived(_inodes_followed, None)))
    parts: dict[tuple[int, ...], list[npt.NDArray[np.intp]]] = {}
    for tid in distinct(blocks["tid"][nameless]).tolist():
        own = reads.get(tid)
        if own is None:
            continue
        mine = nameless[blocks["tid"][nameless] == tid]
        begun_ns = blocks["start_ns"][mine]
        last = np.searchsorted(own["start_ns"].view(np.int64), begun_ns, side="right") - 1
        until_ns = np.maximum.accumulate(duration_end(own))
        during = (last >= 0) & (begun_ns <= until_ns[last])
        order, by_file = grouped(own[last[during]], "dev", "ino")
        for key, part in by_file.items():
            parts.setdefault(key, []).append(mine[during][order[part]])
    return {key: np.concatenate(pieces) for key, pieces in parts.items()}


def _upper_disks(timeline: Timeline, _: None) -> dict[tuple[int, int], Disks]:
    """For each file of which several disks were asked: these without those under another (a loop
    device's file). Their requests lie within requests of the upper one; disks side by side (RAID)
    all stay."""
    asked = {key: _disks_of(timeline, file) for key, file in timeline.files.items()}
    layered = {key: disks for key, disks in asked.items() if len(disks) > 1}
    apart: set[tuple[tuple[int, int], int, int]] = set()  # (file, one, other it is not within)
    for window in timeline.blocks.windows() if layered else ():
        begun = _Blocks(timeline, timeline.blocks.begun(*window))
        around = _Blocks(timeline, timeline.blocks.within(*window))
        for key, disks in layered.items():
            inner, outer = (of.of_file(timeline.files[key]) for of in (begun, around))
            for low, high in permutations(sorted(disks), 2):
                if not _lie_within(inner, low, outer, high):
                    apart.add((key, low, high))
    return {
        key: frozenset(
            disk
            for disk in disks
            if not any(
                (key, disk, other) not in apart and (key, other, disk) in apart
                for other in disks - {disk}
            )
        )
        for key, disks in layered.items()
    }


def _lie_within(inner: Columns, low: int, outer: Columns, high: int) -> bool:
    """Whether every request to one disk happened inside some request to another; `outer`: all that
    were under way in the time in which the inner began."""
    inside, around = inner["dev"] == low, outer["dev"] == high
    if not inside.any():
        return True
    if not around.any():
        return False
    latest = np.maximum.accumulate(outer["end_ns"][around])
    before = np.searchsorted(outer["start_ns"][around], inner["start_ns"][inside], "right") - 1
    return bool((before >= 0).all() and (latest[before] >= inner["end_ns"][inside]).all())


def _as_reads(blocks: Columns) -> Records:
    found = np.zeros(len(blocks["start_ns"]), remote.READ)
    for name in ("start_ns", "end_ns", "tid", "tgid", "dev", "ino"):
        found[name] = blocks[name]
    found["family"] = DEVICE
    found["offset"] = blocks["b"] * np.uint64(_SECTOR)
    found["asked_bytes"] = found["got_bytes"] = blocks["a"].view(np.int64)
    return found


# -- where the requests were while threads waited --------------------------------------------------


class Whereabouts:
    """Where the requests for a file were in each moment: one with several of them belongs to the
    one that got furthest."""

    def __init__(self, reads: Records) -> None:
        begin, end = reads["start_ns"], reads["end_ns"]
        split = reads["split"].astype(bool)
        sent = np.where(split, begin + np.minimum(reads["queue_ns"], end - begin), begin)
        disk = reads["family"] == DEVICE
        covered = np.empty((0, 2), np.int64)
        self._upto: list[tuple[str, _Cover]] = []
        for name, which, low, high in (
            ("device_ns", disk, begin, end),
            ("wire_ns", split, sent, end),
            ("server_ns", ~disk & ~split, begin, end),
            ("queue_ns", split, begin, sent),
        ):
            if which.any():
                own = np.column_stack([low[which], high[which]])
                covered = _union(np.concatenate([covered, own]))
                if len(covered):
                    self._upto.append((name, _Cover(covered)))

    def split(self, waits: Ranges, short_ns: int = 0) -> WaitSplit:
        """Some waits by where the requests were; `short_ns`: those too short to be recorded."""
        parts: dict[str, int] = {}
        covered_ns = 0
        for name, covered in self._upto if len(waits) else ():
            overlap_ns = covered.overlap_ns(waits)
            parts[name], covered_ns = overlap_ns - covered_ns, overlap_ns
        waited_ns = int((waits[:, 1] - waits[:, 0]).sum()) + short_ns
        return WaitSplit(**parts, client_ns=waited_ns - sum(parts.values()))


def wait_split(
    traffic: Traffic, file: FileFacts, where: Whereabouts, start_ns: int, end_ns: int
) -> WaitSplit:
    """The waits of threads for a file between two moments (several at once count several times), by
    where its requests were."""
    short_ns = file.delta("short_wait_ns", start_ns, end_ns)
    return where.split(traffic.waits(file, start_ns, end_ns), short_ns)


@dataclass(frozen=True, slots=True)
class _FileWaits:
    """[begin, end] of the waits for a file by begin; the latest end up to each."""

    ranges: Ranges
    latest_end_ns: Ints

    def within(self, start_ns: int, end_ns: int) -> Ranges:
        """Those in [start, end), cut to it."""
        # Those of several threads overlap: none before `first` reaches into the interval.
        first = np.searchsorted(self.latest_end_ns, start_ns, side="right")
        last = np.searchsorted(self.ranges[:, 0], end_ns)
        cut: Ranges = np.minimum(np.maximum(self.ranges[first:last], start_ns), end_ns)
        return cut[cut[:, 0] < cut[:, 1]]


def _waits_by_file(waits: Columns) -> dict[tuple[int, ...], _FileWaits]:
    on_storage = waits["flags"] == Wait.STORAGE
    waits = {name: column[on_storage] for name, column in waits.items()}
    order, parts = grouped(waits, "dev", "ino")
    ranges = np.column_stack([waits["start_ns"][order], waits["end_ns"][order]])
    return {
        key: _FileWaits(ranges[part], np.maximum.accumulate(ranges[part, 1]))
        for key, part in parts.items()
    }


def _union(ranges: Ranges) -> Ranges:
    """The ranges in order, those that touch joined, empty ones left out."""
    ranges = ranges[ranges[:, 0] < ranges[:, 1]]
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    latest = np.maximum.accumulate(ranges[:, 1])
    apart = np.flatnonzero(ranges[1:, 0] > latest[:-1])
    first = np.concatenate([[0], apart + 1]) if len(ranges) else apart
    last = np.append(apart, len(ranges) - 1)[: len(first)]
    return np.column_stack([ranges[first, 0], latest[last]])


class _Cover:
    """Ranges in order, apart from one another, and how much time they hold up to each."""

    def __init__(self, ranges: Ranges) -> None:
        self._begins = ranges[:, 0].copy()
        self._lengths = ranges[:, 1] - self._begins
        self._before = np.cumsum(self._lengths) - self._lengths

    def overlap_ns(self, waits: Ranges) -> int:
        """Time of the waits that falls into the ranges; each wait counts."""
        at = np.searchsorted(self._begins, waits, side="right") - 1
        within = np.minimum(np.maximum(waits - self._begins[at], 0), self._lengths[at])
        sums = np.where(at >= 0, self._before[at] + within, 0).sum(axis=0)
        return int(sums[1] - sums[0])


# -- the model -------------------------------------------------------------------------------------


def model_of(timeline: Timeline, file: FileFacts) -> PathModel | None:
    """What the requests of the recording say of the file's path; None without an answered one."""
    return timeline.derived(_model_of, file.key)


def _model_of(timeline: Timeline, key: tuple[int, int]) -> PathModel | None:
    file = timeline.files[key]
    path = timeline.derived(_fit, _path_of(timeline, file))
    if path is None:
        return None
    found = path.fit
    link = found.bytes_per_second or file.line_bytes_per_second
    window = read_window(file)
    if link is None or not window or found.delay_ns <= 0:
        return PathModel(round(found.delay_ns), link, None, None, None, None)
    request = min(window, largest_request(file, path.largest_bytes))
    rate = min(WINDOWS * window / (found.delay_ns / 1e9 + window / link), link)
    return PathModel(
        latency_ns=round(found.delay_ns),
        link_bytes_per_second=link,
        read_request_bytes=request,
        read_depth=WINDOWS * window / request,
        read_bytes_per_second=rate,
        read_ns=None,
    )


@dataclass(frozen=True, slots=True)
class _Fitted:
    """What the requests of a path say, and the most bytes that one of them asked for."""

    fit: path_model.Fit
    largest_bytes: int


def _path_of(timeline: Timeline, file: FileFacts) -> int | Disks:
    """A file's way to its storage: the file system whose server or daemon is asked, or disks."""
    if (timeline.remote["dev"] == file.dev).any():
        return file.dev
    disks = _disks_of(timeline, file)
    return timeline.derived(_upper_disks, None).get(file.key, disks)


def _fit(timeline: Timeline, path: int | Disks) -> _Fitted | None:
    """By all requests that took the path. Of millions so many, from all of the recording."""
    nothing = path_model.answered(np.empty(0, remote.READ))
    answered, largest = zip((nothing, 0), *_requests_of_path(timeline, path), strict=True)
    found = path_model.fit(np.concatenate(answered))
    return None if found is None else _Fitted(found, max(largest))


def _requests_of_path(timeline: Timeline, path: int | Disks) -> Iterator[tuple[Records, int]]:
    """(those that were answered, the most bytes that one of all asked for), part by part."""
    if isinstance(path, int):
        reads = timeline.remote[timeline.remote["dev"] == path]
        yield path_model.answered(reads), int(reads["asked_bytes"].max(initial=0))
        return
    if not path:
        return
    for window in timeline.blocks.windows(_MOST_FITTED / max(len(timeline.blocks), 1)):
        blocks = timeline.blocks.begun(*window)
        own = np.isin(blocks["dev"], list(path))
        asked = blocks["a"][own].view(np.int64)
        timed = path_model.timed(blocks["start_ns"][own], blocks["end_ns"][own], asked)
        yield timed[asked > 0], int(asked.max(initial=0))


def for_bytes(model: PathModel | None, count: int) -> PathModel | None:
    """The model with the time that so many bytes would take."""
    if model is None or not model.read_bytes_per_second:
        return model
    return replace(model, read_ns=round(count / model.read_bytes_per_second * 1e9))


def read_window(file: FileFacts) -> int | None:
    """Bytes of a readahead window before 1 MiB reads: the readahead in force, or the read itself up
    to the device's largest request (bdi io_pages), if that is more."""
    if file.read_ahead_kb is None:
        return None
    largest = (file.max_request_kb or 0) << 10
    return max(file.read_ahead_kb << 10, min(PLAIN_READ_BYTES, largest)) or None


def largest_request(file: FileFacts, seen_bytes: int) -> int:
    """The most the path takes in one request: by its mount's options, else the most that was seen
    or the device says."""
    option = _REQUEST_OPTIONS.search(file.options or "")
    if option:
        return max(int(option[1]), 1)
    return max(seen_bytes, (file.max_request_kb or 0) << 10, 1)
