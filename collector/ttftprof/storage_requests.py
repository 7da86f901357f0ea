"""The requests behind a file's bytes, whoever answered them; where they were while threads waited;
and the model of the path that explains their times.

Pure. A request to a disk is shaped as a remote read (`remote.READ`) with `DEVICE` as its family: it
runs from its issue to its completion.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ttftprof import path_model, remote
from ttftprof.events import Kind, ReadFlag, Records, Wait, duration_end
from ttftprof.model import PathModel, WaitSplit
from ttftprof.timeline import FileFacts, Timeline, grouped, split_by

DEVICE = 0
PLAIN_READ_BYTES = 1 << 20
# Readahead windows under way before a reader that goes in order: the kernel asks for the next when
# the first page of the one before is touched (mm/readahead.c, the marker of a window).
WINDOWS = 2
_SECTOR = 512
_REQUEST_OPTIONS = re.compile(r"(?:^|,)(?:rsize|max_read|msize)=(\d+)")

Ranges = npt.NDArray[np.int64]  # [begin, end] in each row


def of_file(timeline: Timeline, file: FileFacts, start_ns: int, end_ns: int) -> Records:
    """The requests for a file's bytes that began in [start, end), as `remote.READ`."""
    asked = remote.on_file(timeline.remote, file.dev, file.ino)
    if len(asked):
        return remote.begun_within(asked, start_ns, end_ns)
    own = timeline.derived(_blocks_of_one_layer, file.key)
    blocks = timeline.of_kind(Kind.BLOCK)
    first, last = np.searchsorted(own.start_ns, [start_ns, end_ns])
    return _as_reads(np.take(blocks, own.where[first:last]))


def inodes_asked(timeline: Timeline, start_ns: int, end_ns: int) -> set[int]:
    """Of which inodes `of_file` can find something."""
    blocks = timeline.of_kind(Kind.BLOCK)
    first, last = np.searchsorted(timeline.derived(_block_starts, None), [start_ns, end_ns])
    asked = remote.begun_within(timeline.remote, start_ns, end_ns)
    return {*np.unique(blocks["ino"][first:last]).tolist(), *np.unique(asked["ino"]).tolist()}


def _block_starts(timeline: Timeline, _: None) -> Records:
    starts: Records = timeline.of_kind(Kind.BLOCK)["start_ns"].astype(np.int64)
    return starts


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The requests to disks for a file, by start: when each began, and where it stands."""

    start_ns: Records
    where: npt.NDArray[np.int32]


def _blocks_of_one_layer(timeline: Timeline, key: tuple[int, int]) -> _Blocks:
    past_the_cache = timeline.derived(_past_the_cache, None).get(key)
    where = timeline.where_blocks_of(timeline.files[key])
    if past_the_cache is not None:
        where = np.union1d(where, past_the_cache)
    blocks = timeline.of_kind(Kind.BLOCK)
    stays = np.isin(blocks["dev"][where], _upper_disks(blocks, where))
    where = where[stays]
    return _Blocks(blocks["start_ns"][where].astype(np.int64), where)


def _past_the_cache(timeline: Timeline, _: None) -> dict[tuple[int, ...], npt.NDArray[np.int32]]:
    """Where the requests of reads past the page cache stand, by file. Their pages are the reader's
    own, of no file or of shared memory: one belongs to the read that its thread was in."""
    reads, blocks = timeline.of_kind(Kind.READ), timeline.of_kind(Kind.BLOCK)
    reads = reads[(reads["flags"] & ReadFlag.DIRECT) != 0]
    if not len(reads):
        return {}
    followed = [file.ino for file in timeline.files.values()]
    nameless = np.flatnonzero(~np.isin(blocks["ino"], followed)).astype(np.int32)
    parts: dict[tuple[int, ...], list[npt.NDArray[np.int32]]] = {}
    for (tid,), own in split_by(reads, "tid").items():
        mine = nameless[blocks["tid"][nameless] == tid]
        begun_ns = blocks["start_ns"][mine]
        last = np.searchsorted(own["start_ns"], begun_ns, side="right") - 1
        until_ns = np.maximum.accumulate(duration_end(own))
        during = (last >= 0) & (begun_ns <= until_ns[last])
        order, by_file = grouped(own[last[during]], "dev", "ino")
        for key, part in by_file.items():
            parts.setdefault(key, []).append(mine[during][order[part]])
    return {key: np.concatenate(pieces) for key, pieces in parts.items()}


def of_path(timeline: Timeline, file: FileFacts) -> Records:
    """All requests of the recording that took the file's path: same server or daemon, or disk."""
    asked: Records = timeline.remote[timeline.remote["dev"] == file.dev]
    if len(asked):
        return asked
    blocks = timeline.of_kind(Kind.BLOCK)
    own = timeline.derived(_blocks_of_one_layer, file.key)
    theirs = np.isin(blocks["dev"], np.unique(blocks["dev"][own.where]))
    return _as_reads(blocks if theirs.all() else blocks[theirs])


def _as_reads(blocks: Records) -> Records:
    found = np.zeros(len(blocks), remote.READ)
    for name in ("start_ns", "tid", "tgid", "dev", "ino"):
        found[name] = blocks[name]
    found["end_ns"] = found["start_ns"] + blocks["duration_ns"].astype(np.int64)
    found["family"] = DEVICE
    found["offset"] = blocks["b"] * np.uint64(_SECTOR)
    found["asked_bytes"] = found["got_bytes"] = blocks["a"].astype(np.int64)
    return found


def _upper_disks(every: Records, where: npt.NDArray[np.int32]) -> Records:
    """The disks of some requests without those under another (a loop device's file): their requests
    lie within requests of the upper one. Disks side by side (RAID) all stay."""
    disks: Records = np.unique(every["dev"][where])
    if len(disks) < 2:
        return disks
    blocks = every[where]
    by_disk = {int(d): _as_reads(blocks[blocks["dev"] == d]) for d in disks}
    under = {
        low
        for low, inner in by_disk.items()
        for high, outer in by_disk.items()
        if low != high and _lies_within(inner, outer) and not _lies_within(outer, inner)
    }
    return disks[~np.isin(disks, list(under))]


def _lies_within(inner: Records, outer: Records) -> bool:
    """Whether every request happened inside some request of the other."""
    outer = outer[np.argsort(outer["start_ns"], kind="stable")]
    latest = np.maximum.accumulate(outer["end_ns"])
    before = np.searchsorted(outer["start_ns"], inner["start_ns"], side="right") - 1
    return bool((before >= 0).all() and (latest[before] >= inner["end_ns"]).all())


# -- where the requests were while threads waited --------------------------------------------------


def wait_split(
    timeline: Timeline, file: FileFacts, reads: Records, start_ns: int, end_ns: int
) -> WaitSplit:
    """The waits of threads for a file between two moments, by where its requests were.

    A moment with several requests belongs to the one that got furthest. `reads` are the file's.
    """
    waits = waits_for(timeline, file, start_ns, end_ns)
    waited_ns = int((waits[:, 1] - waits[:, 0]).sum()) + file.delta(
        "short_wait_ns", start_ns, end_ns
    )
    if not len(waits):
        return WaitSplit(client_ns=waited_ns)
    begin, end = reads["start_ns"], reads["end_ns"]
    split = reads["split"].astype(bool)
    sent = np.where(split, begin + np.minimum(reads["queue_ns"], end - begin), begin)
    disk = reads["family"] == DEVICE
    parts: dict[str, int] = {}
    covered, covered_ns = np.empty((0, 2), np.int64), 0
    for name, which, low, high in (
        ("device_ns", disk, begin, end),
        ("wire_ns", split, sent, end),
        ("server_ns", ~disk & ~split, begin, end),
        ("queue_ns", split, begin, sent),
    ):
        if not which.any():
            parts[name] = 0
            continue
        covered = _union(np.concatenate([covered, np.column_stack([low[which], high[which]])]))
        overlap_ns = _overlap_ns(waits, covered)
        parts[name], covered_ns = overlap_ns - covered_ns, overlap_ns
    return WaitSplit(**parts, client_ns=waited_ns - sum(parts.values()))


def waits_for(timeline: Timeline, file: FileFacts, start_ns: int, end_ns: int) -> Records:
    """[begin, end] of the recorded waits of threads for a file's pages, cut to [start, end)."""
    waits = timeline.derived(_waits_by_file, None).get(file.key)
    return np.empty((0, 2), np.int64) if waits is None else waits.within(start_ns, end_ns)


def waited_ns(timeline: Timeline, start_ns: int, end_ns: int) -> dict[tuple[int, ...], int]:
    """{(dev, ino): how long threads waited for it in [start, end)}; each thread counts."""
    waits = timeline.derived(_waits_by_file, None)
    cuts = ((key, own.within(start_ns, end_ns)) for key, own in waits.items())
    return {key: int((cut[:, 1] - cut[:, 0]).sum()) for key, cut in cuts if len(cut)}


@dataclass(frozen=True, slots=True)
class _FileWaits:
    """[begin, end] of the waits for a file by begin; the latest end up to each."""

    ranges: Records
    latest_end_ns: Records

    def within(self, start_ns: int, end_ns: int) -> Records:
        """Those in [start, end), cut to it."""
        # Those of several threads overlap: none before `first` reaches into the interval.
        first = np.searchsorted(self.latest_end_ns, start_ns, side="right")
        last = np.searchsorted(self.ranges[:, 0], end_ns)
        cut: Records = np.clip(self.ranges[first:last], start_ns, end_ns)
        return cut[cut[:, 0] < cut[:, 1]]


def _waits_by_file(timeline: Timeline, _: None) -> dict[tuple[int, ...], _FileWaits]:
    waits = timeline.of_kind(Kind.OFFCPU)
    where = np.flatnonzero(waits["flags"] == Wait.STORAGE).astype(np.int32)
    keys = np.empty(len(where), [("dev", "<u4"), ("ino", "<u8")])
    keys["dev"], keys["ino"] = waits["dev"][where], waits["ino"][where]
    order, parts = grouped(keys, "dev", "ino")
    order = where[order]
    ranges = np.empty((len(order), 2), np.int64)
    ranges[:, 0] = waits["start_ns"][order]
    ranges[:, 1] = waits["duration_ns"][order]
    ranges[:, 1] += ranges[:, 0]
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


def _overlap_ns(waits: Records, ranges: Ranges) -> int:
    """Time of the waits that falls into the ranges; each wait counts."""
    if not len(ranges) or not len(waits):
        return 0
    begins, lengths = ranges[:, 0], ranges[:, 1] - ranges[:, 0]
    before = np.cumsum(lengths) - lengths

    def covered_until(ns: Records) -> Records:
        at = np.searchsorted(begins, ns, side="right") - 1
        within = np.clip(ns - begins[at], 0, lengths[at])
        sums: Records = np.where(at >= 0, before[at] + within, 0)
        return sums

    return int((covered_until(waits[:, 1]) - covered_until(waits[:, 0])).sum())


# -- the model -------------------------------------------------------------------------------------


def model_of(timeline: Timeline, file: FileFacts) -> PathModel | None:
    """What the requests of the recording say of the file's path; None without an answered one."""
    return timeline.derived(_model_of, file.key)


def _model_of(timeline: Timeline, key: tuple[int, int]) -> PathModel | None:
    file = timeline.files[key]
    reads = of_path(timeline, file)
    found = path_model.fit(reads)
    if found is None:
        return None
    link = found.bytes_per_second or file.line_bytes_per_second
    window = read_window(file)
    if link is None or not window or found.delay_ns <= 0:
        return PathModel(round(found.delay_ns), link, None, None, None, None)
    request = min(window, largest_request(file, reads))
    rate = min(WINDOWS * window / (found.delay_ns / 1e9 + window / link), link)
    return PathModel(
        latency_ns=round(found.delay_ns),
        link_bytes_per_second=link,
        read_request_bytes=request,
        read_depth=WINDOWS * window / request,
        read_bytes_per_second=rate,
        read_ns=None,
    )


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


def largest_request(file: FileFacts, reads: Records) -> int:
    """The most the path takes in one request: by its mount's options, else the most that was seen
    or the device says."""
    option = _REQUEST_OPTIONS.search(file.options or "")
    if option:
        return max(int(option[1]), 1)
    seen = int(reads["asked_bytes"].max()) if len(reads) else 0
    return max(seen, (file.max_request_kb or 0) << 10, 1)
