"""The requests behind a file's bytes, whoever answered them; where they were while threads waited;
and the model of the path that explains their times.

Pure. A request to a disk is shaped as a remote read (`remote.READ`) with `DEVICE` as its family: it
runs from its issue to its completion.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from ttftprof import remote
from ttftprof.events import Kind, Records, Wait
from ttftprof.model import PathModel, WaitSplit
from ttftprof.timeline import FileFacts, Timeline

DEVICE = 0
PLAIN_READ_BYTES = 1 << 20
# Readahead windows under way before a reader that goes in order: the kernel asks for the next when
# the first page of the one before is touched (mm/readahead.c, the marker of a window).
WINDOWS = 2
_SECTOR = 512
_REQUEST_OPTIONS = re.compile(r"(?:^|,)(?:rsize|max_read|msize)=(\d+)")

Ranges = list[tuple[int, int]]


def of_file(timeline: Timeline, file: FileFacts, start_ns: int, end_ns: int) -> Records:
    """The requests for a file's bytes that began in [start, end), as `remote.READ`."""
    asked = remote.on_file(timeline.remote, file.dev, file.ino)
    if not len(asked):
        asked = _of_one_layer(_as_reads(timeline.blocks_of(file)))
    return remote.begun_within(asked, start_ns, end_ns)


def of_path(timeline: Timeline, file: FileFacts) -> Records:
    """All requests of the recording that took the file's path: same server or daemon, or disk."""
    asked: Records = timeline.remote[timeline.remote["dev"] == file.dev]
    if len(asked):
        return asked
    blocks = timeline.of_kind(Kind.BLOCK)
    own = _of_one_layer(_as_reads(timeline.blocks_of(file)))
    every: Records = _as_reads(blocks[np.isin(blocks["dev"], np.unique(own["dev"]))])
    return every


def _as_reads(blocks: Records) -> Records:
    found = np.zeros(len(blocks), remote.READ)
    for name in ("start_ns", "tid", "tgid", "dev", "ino"):
        found[name] = blocks[name]
    found["end_ns"] = found["start_ns"] + blocks["duration_ns"].astype(np.int64)
    found["family"] = DEVICE
    found["offset"] = blocks["b"] * np.uint64(_SECTOR)
    found["asked_bytes"] = found["got_bytes"] = blocks["a"].astype(np.int64)
    return found


def _of_one_layer(reads: Records) -> Records:
    """Without the requests of a disk under another one (a loop device's file): those lie within
    requests of the upper one. Disks side by side (RAID) all stay."""
    disks = np.unique(reads["dev"])
    if len(disks) < 2:
        return reads
    by_disk = {int(d): reads[reads["dev"] == d] for d in disks}
    under = {
        low
        for low, inner in by_disk.items()
        for high, outer in by_disk.items()
        if low != high and _lies_within(inner, outer) and not _lies_within(outer, inner)
    }
    kept: Records = reads[~np.isin(reads["dev"], list(under))]
    return kept


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
    begin, end = reads["start_ns"], reads["end_ns"]
    split = reads["split"].astype(bool)
    sent = np.where(split, begin + np.minimum(reads["queue_ns"], end - begin), begin)
    disk = reads["family"] == DEVICE
    parts: dict[str, int] = {}
    covered: Ranges = []
    for name, which, low, high in (
        ("device_ns", disk, begin, end),
        ("wire_ns", split, sent, end),
        ("server_ns", ~disk & ~split, begin, end),
        ("queue_ns", split, begin, sent),
    ):
        more = _union([*covered, *zip(low[which].tolist(), high[which].tolist(), strict=True)])
        parts[name] = _overlap_ns(waits, more) - _overlap_ns(waits, covered)
        covered = more
    return WaitSplit(**parts, client_ns=waited_ns - sum(parts.values()))


def waits_for(timeline: Timeline, file: FileFacts, start_ns: int, end_ns: int) -> Records:
    """[begin, end] of the recorded waits of threads for a file's pages, cut to [start, end)."""
    waits = timeline.of_kind(Kind.OFFCPU)
    own = waits["flags"] == Wait.STORAGE
    own &= (waits["ino"] == file.ino) & (waits["dev"] == file.dev)
    mine = waits[own]
    begin = np.maximum(mine["start_ns"].astype(np.int64), start_ns)
    end = np.minimum((mine["start_ns"] + mine["duration_ns"]).astype(np.int64), end_ns)
    both = np.stack([begin, end], axis=1)
    cut: Records = both[begin < end]
    return cut


def _union(ranges: Ranges) -> Ranges:
    """The ranges in order, those that touch joined."""
    joined: Ranges = []
    for begin, end in sorted(r for r in ranges if r[0] < r[1]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def _overlap_ns(waits: Records, ranges: Ranges) -> int:
    """Time of the waits that falls into the ranges; each wait counts."""
    if not ranges or not len(waits):
        return 0
    edges = np.array(ranges, np.int64)
    before = np.concatenate([[0], np.cumsum(edges[:, 1] - edges[:, 0])])

    def covered_until(ns: Records) -> Records:
        at = np.searchsorted(edges[:, 0], ns, side="right")
        last = edges[np.maximum(at - 1, 0)]
        within = np.minimum(np.maximum(ns - last[:, 0], 0), last[:, 1] - last[:, 0])
        sums: Records = np.where(at > 0, before[np.maximum(at - 1, 0)] + within, 0)
        return sums

    return int((covered_until(waits[:, 1]) - covered_until(waits[:, 0])).sum())


# -- the model -------------------------------------------------------------------------------------


def model_of(timeline: Timeline, file: FileFacts) -> PathModel | None:
    """What the requests of the recording say of the file's path; None without an answered one."""
    reads = of_path(timeline, file)
    found = remote.path_model(reads)
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
