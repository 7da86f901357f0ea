"""Which process had weights, and which files they were."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ttftprof.events import Kind, MmapFlag, Records
from ttftprof.grouping import distinct
from ttftprof.timeline import Call, FileFacts, Process, Timeline
from ttftprof.weights import shard_group

FILE_USES = (Kind.OPEN, Kind.MMAP, Kind.READ, Kind.HELD)


def held_a_model(timeline: Timeline, process: Process) -> bool:
    """Whether a process loaded a model, had weights, or answered with text."""
    if has_weights(timeline, process):
        return True
    return any(e.tgid == process.tgid and e.generates for e in timeline.exchanges)


def has_weights(timeline: Timeline, process: Process) -> bool:
    """Whether a process called what only an engine calls, or used a file of weights."""
    if timeline.calls_of(process.tgid, None, process.start_ns, process.gone_ns):
        return True
    looks = _is_weights if timeline.is_probed else _may_be_weights  # where no call tells
    return any(looks(f) for f in files_used(timeline, process, 0, process.gone_ns))


def loaders(timeline: Timeline) -> set[int]:
    """Processes that may have loaded a model: of thousands that come and go, few."""
    found = {c.tgid for c in timeline.calls if c.name == "model_load"}
    inodes = [f.ino for f in timeline.files.values() if _may_be_weights(f)]
    for kind in FILE_USES:
        records = timeline.of_kind(kind)
        found |= set(distinct(records["tgid"][np.isin(records["ino"], inodes)]).tolist())
    return found


def weights_of(
    timeline: Timeline,
    process: Process,
    load: Call | None,
    before_ns: int,
    since_ns: int | None = None,
) -> tuple[FileFacts, ...]:
    """The weights a process took up, the biggest first: those of its load if that is known, those
    used from `since_ns` on if that is given.

    The biggest file says what the model is (any big file but a library, if none looks like
    weights); its shards belong to it.
    """
    inside: _Uses | None = None
    if load is not None:
        inside = _uses(timeline, process, load.start_ns, min(load.end_ns, before_ns))
    elif since_ns is not None:
        inside = _uses(timeline, process, since_ns, before_ns)
    if inside is None or not any(map(_is_weights, timeline.derived(_files_used, inside))):
        inside = _uses(timeline, process, process.start_ns, before_ns)
    return timeline.derived(_model_among, inside)


def _model_among(timeline: Timeline, uses: _Uses) -> tuple[FileFacts, ...]:
    files = timeline.derived(_files_used, uses)
    named = [f for f in files if f.is_weights]
    likely = named or [f for f in files if _may_be_weights(f)]
    biggest = max(likely, key=lambda f: f.size_bytes, default=None)
    if biggest is None:
        return ()
    others = [f for f in likely if f is not biggest and _same_set(f, biggest)]
    return (biggest, *sorted(others, key=lambda f: f.path))


def _same_set(one: FileFacts, biggest: FileFacts) -> bool:
    """Shards by their names; a hub's cache names them by their hashes, side by side."""
    if shard_group(one.path) == shard_group(biggest.path):
        return True
    folder, _, name = one.path.rpartition("/")
    return (
        folder == biggest.path.rpartition("/")[0]
        and folder.endswith("/blobs")
        and not name.startswith("sha256")
    )


def _is_weights(file: FileFacts) -> bool:
    return file.is_weights


def _may_be_weights(file: FileFacts) -> bool:
    if file.is_weights:
        return True
    is_memory = file.path.startswith(("/dev/shm/", "/memfd:", "/dev/zero"))  # shared by processes
    return not is_memory and ".so" not in file.path and file.size_bytes >= 8 << 20


def files_used(timeline: Timeline, process: Process, start_ns: int, end_ns: int) -> list[FileFacts]:
    """The followed files that a process opened, mapped as data or read in an interval."""
    return timeline.derived(_files_used, _uses(timeline, process, start_ns, end_ns))


_Uses = tuple[int, tuple[tuple[int, int], ...]]
"""A process, and of each kind of `FILE_USES` where its events in an interval lie: the same for all
requests between which nobody turned to a file."""


def _uses(timeline: Timeline, process: Process, start_ns: int, end_ns: int) -> _Uses:
    stamps = (timeline.of_kind(kind)["start_ns"].view(np.int64) for kind in FILE_USES)
    found = (np.searchsorted(ns, [start_ns, max(end_ns, start_ns)]).tolist() for ns in stamps)
    return process.tgid, tuple((first, end) for first, end in found)


def _files_used(timeline: Timeline, uses: _Uses) -> list[FileFacts]:
    tgid, where = uses
    used: dict[tuple[int, int], int] = {}
    for kind, (first, end) in zip(FILE_USES, where, strict=True):
        records = timeline.of_kind(kind)[first:end]
        mask = records["tgid"] == tgid
        if kind == Kind.MMAP:
            mask &= (records["flags"] & MmapFlag.EXEC) == 0
        for dev, ino in np.unique(records[mask][["dev", "ino"]]):
            used[int(dev), int(ino)] = 1
    return [timeline.files[key] for key in used if key in timeline.files]


def on_files(
    timeline: Timeline, kind: Kind, process: Process, files: Iterable[FileFacts], until: int
) -> Records:
    """The events of a kind that one life of a process caused on some files before `until`."""
    records = timeline.of_kind(kind)
    mask = np.zeros(len(records), bool)
    for file in files:
        mask |= (records["ino"] == file.ino) & (records["dev"] == file.dev)
    mask &= (records["tgid"] == process.tgid) & (records["start_ns"] < until)
    mask &= records["start_ns"] >= process.start_ns
    found: Records = records[mask]
    return found
