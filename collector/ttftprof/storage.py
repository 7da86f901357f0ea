"""What a request did with files and mounts: bytes from storage and cache, waits, request sizes.

Pure. Bytes from storage are the pages that entered the cache because the target asked, plus what it
read past the cache: right on every file system with a page cache, whatever lies beneath.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ttftprof import remote, storage_requests
from ttftprof.condense import Floats
from ttftprof.events import Kind, MmapFlag, Records, dev_numbers
from ttftprof.grouping import distinct
from ttftprof.model import (
    RATES,
    FileUse,
    MemoryUse,
    MountUse,
    PathModel,
    Phase,
    PhaseShare,
    WaitSplit,
)
from ttftprof.phases import StartUp
from ttftprof.recording import is_watched
from ttftprof.storage_requests import Traffic, Whereabouts, wait_split
from ttftprof.timeline import FileFacts, Growth, Timeline
from ttftprof.windows import Ints

# Advice numbers of madvise(2) and posix_fadvise(2): asm-generic/mman-common.h, linux/fadvise.h.
_MADVICE = {1: "RANDOM", 2: "SEQUENTIAL", 3: "WILLNEED", 14: "HUGEPAGE", 22: "POPULATE_READ"}
_FADVICE = {1: "RANDOM", 2: "SEQUENTIAL", 3: "WILLNEED", 4: "DONTNEED", 5: "NOREUSE"}
_READAHEAD_CALL = 0x100


def uses_of(
    timeline: Timeline,
    start: StartUp | None,
    tgids: Iterable[int],
    start_ns: int,
    end_ns: int,
    phases: Sequence[Phase] = (),
) -> tuple[tuple[FileUse, ...], tuple[MountUse, ...]]:
    """Files that cost something between two moments, the weights first, then by bytes; the mounts
    they lie on, with what their servers were asked."""
    traffic = Traffic(timeline, start_ns, end_ns)
    files = _files_of(traffic, timeline, start, set(tgids), start_ns, end_ns, phases)
    used = dict.fromkeys(use.mount for use in files if use.mount is not None)
    return tuple(files), tuple(_mount_use(timeline, mount, traffic) for mount in used)


def _files_of(
    traffic: Traffic,
    timeline: Timeline,
    start: StartUp | None,
    members: set[int],
    start_ns: int,
    end_ns: int,
    phases: Sequence[Phase],
) -> list[FileUse]:
    weights = {file.key for file in start.shards} if start else set()
    span = _Span(timeline, traffic, members, start_ns, end_ns, phases)
    candidates = {file.key: file for file in (start.shards if start else ())}
    candidates |= {file.key: file for file in _moving(timeline, start_ns, end_ns)}
    uses = [
        _file_use(span, file, file.key in weights)
        for _, file in sorted(candidates.items())
        if _matters(timeline, file, start, members, start_ns, end_ns)
    ]
    return sorted(uses, key=lambda u: (not u.is_weights, -(u.bytes_from_storage or 0), u.path))


@dataclass(frozen=True, slots=True)
class _Moves:
    """When counters of files moved: from one row to the next, by begin, `file` being its place in
    `files`; `latest_end_ns`: up to each."""

    begin_ns: Ints
    end_ns: Ints
    latest_end_ns: Ints
    file: npt.NDArray[np.intp]
    files: tuple[FileFacts, ...]


_MOVING = ("added_pages", "direct_bytes", "reclaimed_pages", "read_bytes")


def _moves(timeline: Timeline, _: None) -> _Moves:
    files = tuple(file for file in timeline.files.values() if len(file.rows))
    nothing = np.empty(0, np.int64)
    of = np.repeat(np.arange(len(files)), [len(file.rows) for file in files])
    ns = np.concatenate([nothing, *(file.rows["ns"].astype(np.int64) for file in files)])
    first = np.diff(of, prepend=-1) != 0  # from nothing to the first row
    moved = first.copy()
    for counter in _MOVING:
        values = np.concatenate([nothing, *(f.rows[counter].view(np.int64) for f in files)])
        moved[1:] |= values[1:] != values[:-1]
    where = np.flatnonzero(moved)
    before = np.where(first[where], where, where - 1)
    order = np.argsort(ns[before], kind="stable")
    before, where = before[order], where[order]
    return _Moves(ns[before], ns[where], np.maximum.accumulate(ns[where]), of[where], files)


def _moving(timeline: Timeline, start_ns: int, end_ns: int) -> list[FileFacts]:
    """The files of which something moved between two moments; of others nothing can have grown."""
    moves = timeline.derived(_moves, None)
    first = np.searchsorted(moves.latest_end_ns, start_ns)
    last = np.searchsorted(moves.begin_ns, end_ns, side="right")
    hit = first + np.flatnonzero(moves.end_ns[first:last] >= start_ns)
    return [moves.files[index] for index in distinct(moves.file[hit])]


def _matters(
    timeline: Timeline,
    file: FileFacts,
    start: StartUp | None,
    members: set[int],
    start_ns: int,
    end_ns: int,
) -> bool:
    if start and file in start.shards:
        return True
    grown = file.between(start_ns, end_ns)
    if any(grown.by(counter) for counter in ("added_pages", "direct_bytes", "reclaimed_pages")):
        return True
    return file.is_weights and grown.by("read_bytes") > file.size_bytes // 10


def _within(records: Records, start_ns: int, end_ns: int) -> Records:
    """The events of a kind that began in [start, end)."""
    first, last = np.searchsorted(records["start_ns"].view(np.int64), [start_ns, end_ns])
    return records[first:last]


def _on_file(records: Records, file: FileFacts) -> Records:
    found: Records = records[(records["ino"] == file.ino) & (records["dev"] == file.dev)]
    return found


@dataclass(frozen=True, slots=True)
class _Span:
    """What of a recording is looked at. `models`: of the paths seen so far, by device."""

    timeline: Timeline
    traffic: Traffic
    members: set[int]
    start_ns: int
    end_ns: int
    phases: Sequence[Phase]
    models: dict[int, PathModel | None] = field(default_factory=dict)

    def model_of(self, file: FileFacts, bytes_from_storage: int) -> PathModel | None:
        """One fit serves all shards of a path; only the bytes differ."""
        if not bytes_from_storage:
            return None
        if file.dev not in self.models:
            self.models[file.dev] = storage_requests.model_of(self.timeline, file)
        return storage_requests.for_bytes(self.models[file.dev], bytes_from_storage)


def _file_use(span: _Span, file: FileFacts, is_weights: bool) -> FileUse:
    timeline, members = span.timeline, span.members
    start_ns, end_ns = span.start_ns, span.end_ns
    page = timeline.page_bytes
    grown = file.between(start_ns, end_ns)
    added, direct = grown.by("added_pages") * page, grown.by("direct_bytes")
    read, by_others = grown.by("read_bytes"), grown.by("foreign_pages") * page
    from_storage = added + direct
    # Where nothing counted what entered the cache, 0 would acquit storage unheard.
    counts = not (file.beneath_unseen or file.uncounted) and is_watched(
        timeline.sources, "pagecache"
    )
    residency = residency_before(timeline, file, start_ns, end_ns)
    maps = _on_file(_within(timeline.of_kind(Kind.MMAP), start_ns, end_ns), file)
    maps = maps[(maps["flags"] & (MmapFlag.FAILED | MmapFlag.EXEC)) == 0]
    access = _access(read, direct, len(maps) > 0)
    advice = _advice(timeline, file, members, start_ns, end_ns)
    asked = span.traffic.requests(file)
    where = Whereabouts(asked)
    split = wait_split(span.traffic, file, where, start_ns, end_ns)
    counted_leaving = counts and timeline.counts_refaults

    def grew(counter: str, during: Growth = grown) -> int | None:
        return during.by(counter) * page if counted_leaving else None

    refaulted = grew("refaulted_pages")
    asks = grown.by("readahead_asks") or None

    return FileUse(
        path=file.name_at(end_ns),
        device="{}:{}".format(*dev_numbers(file.dev)),
        inode=file.ino,
        fstype=file.fstype,
        mount=file.mount,
        size_bytes=file.size_bytes,
        bytes_from_storage=from_storage if counts else None,
        bytes_from_cache=_from_cache(file, residency, read, direct, added, bool(len(maps)))
        if counts
        else None,
        major_faults=_major_faults(timeline, file, members, start_ns, end_ns),
        minor_faults=_minor_faults(timeline, file, members, start_ns, end_ns),
        storage_wait_ns=split.total_ns,
        bytes_per_second=_rate(file, from_storage, page, start_ns, end_ns),
        request_size_bytes=remote.sizes(asked),
        in_flight=remote.in_flight(asked),
        access=access,
        advice=tuple(_with_fallback(given, access) for given in advice),
        is_weights=is_weights,
        reads=grown.by("reads"),
        mmaps=len(maps),
        residency_before=residency,
        requests=len(asked) if len(asked) or not from_storage else None,
        sequential_share=remote.sequential_share(asked),
        wait_split=split,
        by_phase=tuple(_by_phase(span, file, where, counts)),
        evicted_bytes=grew("evicted_pages"),
        reclaimed_bytes=grew("reclaimed_pages"),
        reclaimed_before_bytes=grew("reclaimed_pages", file.between(0, start_ns)),
        refaulted_bytes=refaulted,
        read_by_others_bytes=by_others if counts else None,
        rates=_rates(file, asked, page, start_ns, end_ns),
        path_model=span.model_of(file, from_storage),
        read_amplification=_amplification(from_storage, refaulted, None if len(maps) else read)
        if counts
        else None,
        readahead_asks=asks,
        readahead_bytes=grown.by("readahead_pages") * page if asks else None,
    )


def _amplification(came: int, again: int | None, read: int | None) -> float | None:
    """See `FileUse.read_amplification`. `came`: bytes from storage, `again` for the second time;
    `read`: by read(), None where a map may have used more."""
    if not came:
        return None
    ahead = max(came / read, 1.0) if read else 1.0
    return ahead * came / max(came - (again or 0), 1)


def _by_phase(span: _Span, file: FileFacts, where: Whereabouts, counts: bool) -> list[PhaseShare]:
    """The phases in which something of the file came or was waited for, in order of time."""
    found: dict[str, list[Phase]] = {}
    for phase in span.phases:
        found.setdefault(phase.phase, []).append(phase)
    shares = [_share(span, file, where, name, parts, counts) for name, parts in found.items()]
    return [s for s in shares if s.bytes_from_storage or s.storage_wait_ns]


def _share(
    span: _Span,
    file: FileFacts,
    where: Whereabouts,
    name: str,
    parts: Sequence[Phase],
    counts: bool,
) -> PhaseShare:
    came, split = 0, WaitSplit()
    for part in parts:
        grown = file.between(part.start_ns, part.end_ns)
        came += grown.by("added_pages") * span.timeline.page_bytes + grown.by("direct_bytes")
        split = split.plus(wait_split(span.traffic, file, where, part.start_ns, part.end_ns))
    return PhaseShare(name, came if counts else None, split.total_ns, split)


def _rates(
    file: FileFacts, asked: Records, page: int, start_ns: int, end_ns: int
) -> tuple[tuple[int, float], ...]:
    """(moment, bytes per second until the next), from the first byte to the last; then 0.

    By the answers to requests, if there are any; pages enter the cache when they are asked for.
    """
    if len(asked):
        answered = np.take(asked, np.argsort(asked["end_ns"], kind="stable"))
        stamps = np.concatenate([[int(asked["start_ns"].min())], answered["end_ns"]])
        total = np.concatenate([[0], np.cumsum(answered["got_bytes"])])
    else:
        rows = file.looks(start_ns, end_ns)
        total = rows["added_pages"].astype(np.float64) * page + rows["direct_bytes"]
        stamps = rows["ns"].astype(np.int64)
    moved = np.flatnonzero(np.diff(total) > 0)
    if not len(moved):
        return ()
    first, last = int(stamps[moved[0]]), int(stamps[moved[-1] + 1])
    edges = np.linspace(first, last, min(RATES, len(moved) + 1)).astype(np.int64)
    grown = np.diff(np.interp(edges, stamps, total))
    spans = np.maximum(np.diff(edges), 1) / 1e9
    rates = [*(grown / spans).tolist(), 0.0]
    return tuple(zip(edges.tolist(), rates, strict=True))


def residency_before(
    timeline: Timeline, file: FileFacts, start_ns: int, end_ns: int
) -> float | None:
    """Share of the file in the page cache when the request first turned to it.

    The kernel reads the page count at the open, so nothing races it. For a file that was held
    already, the level of its last counter row before the request.
    """
    if not file.size_bytes or file.beneath_unseen:
        return None
    pages = -(-file.size_bytes // timeline.page_bytes)
    opens = _on_file(_within(timeline.of_kind(Kind.OPEN), start_ns, end_ns), file)
    if len(opens):
        return min(int(opens["b"][0]) / pages, 1.0)
    before = file.looks(0, start_ns)
    if len(before):
        return min(int(before["cached_pages"][-1]) / pages, 1.0)
    held = _on_file(timeline.of_kind(Kind.HELD), file)
    return min(int(held["b"][0]) / pages, 1.0) if len(held) else None


_NOTEWORTHY_SHARE, _NOTEWORTHY_BYTES = 0.01, 1 << 20  # of a file's size, and at least


def notes_of(files: Iterable[FileUse]) -> list[str]:
    """Where other programs read the same files meanwhile: the cache that worked was theirs."""
    found = []
    for file in files:
        others = file.read_by_others_bytes or 0
        if others >= max(_NOTEWORTHY_SHARE * file.size_bytes, _NOTEWORTHY_BYTES):
            found.append(
                f"other programs read {others / 1e6:,.0f} MB of {file.path} into the page cache "
                "meanwhile"
            )
    return found


def unseen_beneath(timeline: Timeline) -> list[str]:
    """Which weights lie in an overlay of which the probes could not tell what lies beneath."""
    return [
        f"{file.path} lies in an overlay mounted since recording began: how much of it came from "
        "storage is not known; record again"
        for file in timeline.files.values()
        if file.beneath_unseen and file.is_weights
    ]


def read_past_cache(timeline: Timeline) -> list[str]:
    """Which weights are read past the page cache though nobody asked for that."""
    return [
        f"{file.path} is read past the page cache, as {file.fstype or 'its file system'} has it"
        + (
            ": how much of it came from storage is not known"
            if file.uncounted
            else ": nothing of it is kept there, and each load asks for all of it again"
        )
        for file in timeline.files.values()
        if file.past_cache and file.is_weights
    ]


_BESIDE_SHARE, _BESIDE_BYTES = 0.1, 16 << 20  # of what a server gave, from which others matter


def read_beside(timeline: Timeline) -> list[str]:
    """Where the kernel counted more bytes from a server than the target's files had: other programs
    read over the same way, and had a part of the link."""
    nfs = [(m, m, stats.bytes.get("server_read", 0)) for m, stats in timeline.mounts.items()]
    smb = [(s, s.replace("\\", "/"), stats.read_bytes) for s, stats in timeline.shares.items()]
    found = []
    for name, way, given in sorted(nfs + smb):
        own = sum(_came(timeline, f) for f in timeline.files.values() if way in (f.mount, f.source))
        beside = given - own
        if own and beside >= max(_BESIDE_SHARE * given, _BESIDE_BYTES):
            found.append(
                f"other programs read {beside / 1e6:,.0f} MB from {name} meanwhile, beside "
                f"{own / 1e6:,.0f} MB of the target"
            )
    return found


def _came(timeline: Timeline, file: FileFacts) -> int:
    """Bytes that came from storage while recording ran, for the target."""
    grown = file.between(timeline.start_ns, timeline.end_ns)
    return grown.by("added_pages") * timeline.page_bytes + grown.by("direct_bytes")


def _from_cache(
    file: FileFacts, residency: float | None, read: int, direct: int, added: int, mapped: bool
) -> int | None:
    """Through read(): what was read but not fetched. Through a map: what was resident of it."""
    if mapped:
        return None if residency is None else round(residency * file.size_bytes)
    return max(read - direct - added, 0)


def _major_faults(
    timeline: Timeline, file: FileFacts, members: set[int], start_ns: int, end_ns: int
) -> int | None:
    """The kernel counts major faults by thread, not by file: known for a file if it is the only
    one that came from storage."""
    if any(s.name == "faults" and s.state != "ok" for s in timeline.sources):
        return None  # before 6.12 nothing counts faults by file
    if not file.between(start_ns, end_ns).by("faults"):
        return 0
    others = any(
        f is not file and f.between(start_ns, end_ns).by("added_pages") > 0
        for f in _moving(timeline, start_ns, end_ns)
    )
    return None if others else counted(timeline, members, "maj_flt", start_ns, end_ns)


def _minor_faults(
    timeline: Timeline, file: FileFacts, members: set[int], start_ns: int, end_ns: int
) -> int | None:
    major = _major_faults(timeline, file, members, start_ns, end_ns)
    if major is None:
        return None
    grown = file.between(start_ns, end_ns)
    return max(grown.by("faults") + grown.by("map_arounds") - major, 0)


def counted(timeline: Timeline, members: set[int], counter: str, start_ns: int, end_ns: int) -> int:
    """Growth of a thread counter (`maj_flt`, `cpu_ns`…) over all threads of some processes."""
    total = 0.0
    for tgid in members:
        for stamps, values, first in timeline.derived(_counter_curves, (tgid, counter)):
            total += float(np.interp(end_ns, stamps, values, left=first))
            total -= float(np.interp(start_ns, stamps, values, left=first))
    return round(total)


def _counter_curves(timeline: Timeline, of: tuple[int, str]) -> list[tuple[Floats, Floats, float]]:
    """(moments, values, value before the first) of a counter, for each thread of a process."""
    tgid, counter = of
    curves = []
    for own in timeline.thread_rows.get(tgid, ()):
        stamps, values = own["ns"].astype(np.float64), own[counter].astype(np.float64)
        new = int(own["since_ns"][0]) > timeline.armed_ns
        curves.append((stamps, values, 0.0 if new else float(values[0])))
    return curves


def _rate(
    file: FileFacts, from_storage: int, page: int, start_ns: int, end_ns: int
) -> float | None:
    """Bytes from storage over the time in which they came, snapshot by snapshot."""
    rows = file.looks(start_ns, end_ns)
    if not from_storage or len(rows) < 1:
        return None
    total = rows["added_pages"].astype(np.int64) * page + rows["direct_bytes"].astype(np.int64)
    before = round(file.at("added_pages", start_ns)) * page + round(
        file.at("direct_bytes", start_ns)
    )
    grew = np.flatnonzero(np.diff(total, prepend=before) > 0)
    if not len(grew):
        return None
    stamps = rows["ns"].astype(np.int64)
    first = int(stamps[grew[0] - 1]) if grew[0] else max(start_ns, int(rows["since_ns"][0]))
    spent = int(stamps[grew[-1]]) - first
    return from_storage / spent * 1e9 if spent > 0 else None


def _access(read: int, direct: int, mapped: bool) -> str | None:
    ways = [
        name
        for name, used in (("mmap", mapped), ("direct", direct > 0), ("read", read > direct))
        if used
    ]
    # A loader that maps the weights still reads the header: that makes it no mixed access.
    if mapped and "direct" not in ways:
        return "mmap"
    return "mixed" if len(ways) > 1 else (ways[0] if ways else None)


def _advice(
    timeline: Timeline, file: FileFacts, members: set[int], start_ns: int, end_ns: int
) -> tuple[str, ...]:
    """What the server told the kernel about this file, in order, without repeats."""
    given: list[str] = []
    fadvise = _on_file(_within(timeline.of_kind(Kind.FADVISE), start_ns, end_ns), file)
    for event in fadvise:
        number = int(event["flags"])
        name = (
            "readahead()" if number == _READAHEAD_CALL else f"FADV_{_FADVICE.get(number, number)}"
        )
        given.append(name)
    given += _map_advice(timeline, file, members, start_ns, end_ns)
    return tuple(dict.fromkeys(given))


def _with_fallback(given: str, access: str | None) -> str:
    """What was done instead where a map was refused."""
    taken = {"read": ", then read()", "direct": ", then O_DIRECT reads"}.get(access or "", "")
    return f"{given}{taken}" if given.startswith("mmap failed") else given


def _map_advice(
    timeline: Timeline, file: FileFacts, members: set[int], start_ns: int, end_ns: int
) -> list[str]:
    given: list[str] = []
    maps = _on_file(_within(timeline.of_kind(Kind.MMAP), start_ns, end_ns), file)
    advised = _within(timeline.of_kind(Kind.MADVISE), start_ns, end_ns)
    for mapping in maps[(maps["flags"] & MmapFlag.FAILED) == 0]:
        if int(mapping["flags"]) & MmapFlag.POPULATE:
            given.append("MAP_POPULATE")
        begin, length = int(mapping["b"]), int(mapping["a"])
        for event in advised[advised["tgid"] == mapping["tgid"]]:
            if begin <= int(event["b"]) < begin + length:
                given.append(f"MADV_{_MADVICE.get(int(event['flags']), int(event['flags']))}")
    for number in maps["b"][(maps["flags"] & MmapFlag.FAILED) != 0].tolist():
        given.append(f"mmap failed ({errno.errorcode.get(number, number)})")
    return given


def _mount_use(timeline: Timeline, mount: str, traffic: Traffic) -> MountUse:
    files = timeline.derived(_files_on, None)[mount]
    inodes = traffic.inodes
    parts = [traffic.requests(f) for f in files if f.ino in inodes]
    asked = np.concatenate([np.empty(0, remote.READ), *parts])
    facts = next((f for f in files if f.read_ahead_kb is not None), files[0])
    totals = remote.totals(asked) if len(asked) else dict.fromkeys(remote.TOTALS)
    return MountUse(
        path=mount,
        fstype=facts.fstype or "?",
        options=facts.options or "",
        read_ahead_kb=facts.read_ahead_kb,
        link=facts.link,
        link_bytes_per_second=facts.line_bytes_per_second,
        connections=remote.connections(asked),
        **totals,
    )


def _files_on(timeline: Timeline, _: None) -> dict[str | None, list[FileFacts]]:
    found: dict[str | None, list[FileFacts]] = {}
    for file in timeline.files.values():
        found.setdefault(file.mount, []).append(file)
    return found


def memory_of(timeline: Timeline, tgid: int) -> MemoryUse | None:
    """What a process may use of the machine's memory; None if the recording says nothing of it."""
    host = _positive((timeline.meta.get("host") or {}).get("memory_bytes"))
    mine = [fact for fact in timeline.memory if fact.get("tgid") == tgid]
    limit = _positive(mine[-1].get("limit_bytes")) if mine else None
    if host is None and limit is None:
        return None
    return MemoryUse(host, limit, str(mine[-1].get("group")) if limit else None)


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
