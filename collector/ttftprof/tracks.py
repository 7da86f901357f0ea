"""What a drawing shows beside the requests: processes, threads, storage, request sizes, log lines.

Pure: a timeline in, `model.Tracks` out. Bounded: a recording of any length gives at most some ten
thousand items; what is left out is counted and said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import PurePath

import numpy as np

from ttftprof import condense
from ttftprof.activities import ACTIVITY_OF_WAIT
from ttftprof.condense import Floats, Ints
from ttftprof.engines.python_code import CATEGORIES, IDLE, place_of
from ttftprof.events import DeviceFlag, Kind, Records, Wait
from ttftprof.gpu_facts import DriverSpan
from ttftprof.grouping import distinct
from ttftprof.model import (
    ACTIVITIES,
    ProcessTrack,
    Series,
    SizeTrack,
    Spans,
    Tick,
    Tracks,
)
from ttftprof.threads import Waits
from ttftprof.timeline import Call, FileFacts, Process, Timeline

_PROCESSES = 24
_THREADS = 48  # of all processes
_THREADS_OF_ONE = 16
_SPANS = 2_000  # of one row
_ALL_SPANS = 40_000
_POINTS = 1_000
_FILES = 8
_TICKS = 2_000
_CODE_OF_WAIT = np.array([ACTIVITIES.index(ACTIVITY_OF_WAIT[wait]) for wait in Wait])
_CPU = ACTIVITIES.index("cpu")
_CALL_NAMES = 15  # of one process; condense knows 16 codes
_PYTHON_THREADS = 4


def tracks_of(timeline: Timeline) -> Tracks:
    lives = _lives(timeline)
    chosen = _busiest_threads(timeline, lives[:_PROCESSES])
    limit = max(min(_SPANS, _ALL_SPANS // max(sum(map(len, chosen)), 1)), 64)
    files = [f for f in timeline.files.values() if len(f.rows)]
    ticks = sorted(_ticks(timeline), key=lambda tick: tick.ns)
    left_out = []
    if len(lives) > _PROCESSES:
        left_out.append(f"{len(lives) - _PROCESSES} processes")
    if len(ticks) > _TICKS:
        left_out.append(f"{len(ticks) - _TICKS} log lines")
    return Tracks(
        processes=tuple(
            _process(timeline, life, threads, limit)
            for life, threads in zip(lives[:_PROCESSES], chosen, strict=True)
        ),
        storage=tuple(_storage(timeline, files)),
        sizes=tuple(_sizes(timeline)),
        ticks=tuple(ticks[:_TICKS]),
        left_out=tuple(left_out),
    )


# -- processes and threads ------------------------------------------------------------------------


def _lives(timeline: Timeline) -> list[Process]:
    """Processes that were there while it was recorded, the earliest first."""
    lives = [
        life
        for lives in timeline.processes.values()
        for life in lives
        if life.gone_ns > timeline.armed_ns and life.start_ns < timeline.end_ns
    ]
    return sorted(lives, key=lambda life: (life.start_ns, life.tgid))


def _span_of(timeline: Timeline, life: Process) -> tuple[int, int]:
    start_ns = max(life.start_ns, timeline.armed_ns)
    return start_ns, max(min(life.gone_ns, timeline.end_ns), start_ns)


def _threads_of(timeline: Timeline, life: Process) -> list[Waits]:
    return timeline.threads.waits_of(life.tgid, *_span_of(timeline, life)).by_thread()


def _busiest_threads(timeline: Timeline, lives: Sequence[Process]) -> list[list[Waits]]:
    """For each process the threads to draw: the main one first, then by time not spent asleep."""
    ranked = [
        (_awake_ns(timeline, life, thread), number, thread)
        for number, life in enumerate(lives)
        for thread in _threads_of(timeline, life)
    ]
    ranked.sort(key=lambda entry: (entry[2].tid != entry[2].tgid, -entry[0], entry[2].tid))
    chosen: list[list[Waits]] = [[] for _ in lives]
    left = _THREADS
    for _, number, thread in ranked:
        if left and len(chosen[number]) < _THREADS_OF_ONE:
            chosen[number].append(thread)
            left -= 1
    return chosen


def _awake_ns(timeline: Timeline, life: Process, thread: Waits) -> int:
    """Running, or held up by something that costs: storage, locks, memory, the device."""
    start_ns, end_ns = _within(thread, *_span_of(timeline, life))
    calm = np.isin(thread.reason, [Wait.TIMER, Wait.NETWORK, Wait.CHILD, Wait.PIPE, Wait.OTHER])
    begin = np.maximum(thread.start_ns[calm], start_ns)
    end = np.minimum(thread.end_ns[calm], end_ns)
    return end_ns - start_ns - int(np.maximum(end - begin, 0).sum())


def _within(thread: Waits, start_ns: int, end_ns: int) -> tuple[int, int]:
    begin = max(thread.born_ns, start_ns)
    return begin, max(min(thread.dead_ns, end_ns), begin)


def _process(
    timeline: Timeline, life: Process, threads: Sequence[Waits], limit: int
) -> ProcessTrack:
    start_ns, end_ns = _span_of(timeline, life)
    everyone = _threads_of(timeline, life)
    program = PurePath(life.argv[0]).name if life.argv else str(life.facts.get("comm") or "process")
    return ProcessTrack(
        tgid=life.tgid,
        label=f"{life.tgid} {program}",
        argv=tuple(map(str, life.argv)),
        start_ns=start_ns,
        end_ns=end_ns,
        running=_running(everyone, start_ns, end_ns),
        threads=tuple(_thread(thread, start_ns, end_ns, limit) for thread in threads),
        threads_left_out=len(everyone) - len(threads),
        calls=_calls("calls", timeline.calls_of(life.tgid), start_ns, end_ns),
        driver_calls=_calls(
            "driver calls", timeline.gpu.calls.get(life.tgid, ()), start_ns, end_ns
        ),
        python=tuple(_python(timeline, life.tgid, start_ns, end_ns)),
    )


def _thread(thread: Waits, start_ns: int, end_ns: int, limit: int) -> Spans:
    """Between its waits a thread runs: waits too short for a record belong to that."""
    begin_ns, last_ns = _within(thread, start_ns, end_ns)
    starts = np.clip(thread.start_ns, begin_ns, last_ns)
    ends = np.clip(thread.end_ns, begin_ns, last_ns)
    codes = _CODE_OF_WAIT[np.minimum(thread.reason, len(_CODE_OF_WAIT) - 1)]
    free_from = np.concatenate([[begin_ns], ends]).astype(np.int64)
    free_to = np.concatenate([starts, [last_ns]]).astype(np.int64)
    all_starts, all_ends = np.concatenate([starts, free_from]), np.concatenate([ends, free_to])
    all_codes = np.concatenate([codes, np.full(len(free_from), _CPU)])
    real = all_ends > all_starts
    order = np.argsort(all_starts[real], kind="stable")
    pieces = condense.intervals(
        all_starts[real][order], all_ends[real][order], all_codes[real][order], limit
    )
    main = " (main)" if thread.tid == thread.tgid else ""
    return _spans(f"thread {thread.tid}{main}", pieces, ACTIVITIES)


def _spans(label: str, pieces: condense.Pieces, names: Sequence[str]) -> Spans:
    return Spans(
        label=label,
        start_ns=tuple(pieces.start_ns.tolist()),
        end_ns=tuple(pieces.end_ns.tolist()),
        name=tuple(names[code] for code in pieces.code.tolist()),
        busy_ns=tuple(pieces.busy_ns.tolist()),
    )


def _running(threads: Sequence[Waits], start_ns: int, end_ns: int) -> Series:
    """Threads on a CPU: mean over each of at most `_POINTS` equal parts of the process's life."""
    number = min(_POINTS, max((end_ns - start_ns) // 1_000_000, 1))
    edges = start_ns + (end_ns - start_ns) * np.arange(number + 1) // number
    spent = np.zeros(number + 1)
    for thread in threads:
        begin_ns, last_ns = _within(thread, start_ns, end_ns)
        spent += np.clip(edges, begin_ns, last_ns) - begin_ns
        spent -= _waited(thread, begin_ns, last_ns, edges)
    means = np.diff(spent) / np.maximum(np.diff(edges), 1)
    values = np.append(np.maximum(means, 0.0), 0.0).round(3)
    return Series("threads_running", "threads", None, tuple(edges.tolist()), tuple(values.tolist()))


def _waited(thread: Waits, begin_ns: int, last_ns: int, edges: Ints) -> Floats:
    """Time it had waited, by each of the edges."""
    starts = np.clip(thread.start_ns, begin_ns, last_ns)
    ends = np.maximum(np.clip(thread.end_ns, begin_ns, last_ns), starts)
    if not len(starts):
        return np.zeros(len(edges))
    stamps = np.column_stack([starts, ends]).ravel()
    totals = np.cumsum(np.column_stack([np.zeros(len(starts)), ends - starts]).ravel())
    waited: Floats = np.interp(edges, stamps, totals)
    return waited


def _calls(
    label: str, calls: Sequence[Call] | Sequence[DriverSpan], start_ns: int, end_ns: int
) -> Spans:
    """The outermost calls of all threads; where threads overlap, the earlier one's is cut short.
    Of more names than there are codes, those that took most."""
    own = [c for c in calls if start_ns <= c.start_ns < end_ns]
    own.sort(key=lambda call: call.start_ns)
    taken = Counter[str]()
    for call in own:
        taken[call.name] += min(call.end_ns, end_ns) - call.start_ns
    shown = [name for name, _ in taken.most_common(_CALL_NAMES)]
    own = [call for call in own if call.name in shown]
    starts = np.array([call.start_ns for call in own], np.int64)
    ends = np.array([min(call.end_ns, end_ns) for call in own], np.int64)
    if own:
        ends = np.minimum(ends, np.append(starts[1:], end_ns))
    codes = np.array([shown.index(call.name) for call in own], np.int64)
    return _spans(label, condense.intervals(starts, ends, codes, _SPANS), shown)


def _python(timeline: Timeline, tgid: int, start_ns: int, end_ns: int) -> list[Spans]:
    """The threads that most looks found at work, the busiest first; idle looks are left out."""
    busy: dict[int, list[tuple[int, int, int]]] = {}
    for segment in timeline.python.get(tgid, ()):
        codes = np.array([CATEGORIES.index(place_of(s).category) for s in segment.stacks], np.int64)
        for tid, spans in segment.threads.items():
            begins = np.maximum(spans.start_ns, max(segment.start_ns, start_ns))
            ends = np.minimum(spans.end_ns, min(segment.end_ns, end_ns))
            told = codes[spans.stack]
            wanted = (ends > begins) & (told != CATEGORIES.index(IDLE))
            columns = (begins[wanted].tolist(), ends[wanted].tolist(), told[wanted].tolist())
            busy.setdefault(tid, []).extend(zip(*columns, strict=True))
    found = [(tid, np.array(own, np.int64)) for tid, own in busy.items() if own]
    found.sort(key=lambda entry: -int((entry[1][:, 1] - entry[1][:, 0]).sum()))
    return [
        _spans(
            f"Python of thread {tid}",
            condense.intervals(own[:, 0], own[:, 1], own[:, 2], _SPANS),
            CATEGORIES,
        )
        for tid, own in found[:_PYTHON_THREADS]
    ]


# -- storage --------------------------------------------------------------------------------------


def _storage(timeline: Timeline, files: Sequence[FileFacts]) -> list[Series]:
    """Mounts first, then the files that most came from."""
    curves = {f.key: _from_storage(timeline, f) for f in files}
    used = sorted(
        (f for f in files if curves[f.key][1][-1] > 0), key=lambda f: -curves[f.key][1][-1]
    )
    found = []
    by_mount = sorted((f for f in used if f.mount), key=lambda f: str(f.mount))
    for mount, members in groupby(by_mount, key=lambda f: str(f.mount)):
        ns, total = _sum_of([curves[f.key] for f in members])
        found.append(_series("mount_bytes", mount, ns, total))
    found += [_series("file_bytes", f.path, *curves[f.key]) for f in used[:_FILES]]
    return found


def _from_storage(timeline: Timeline, file: FileFacts) -> tuple[Ints, Floats]:
    """(moments, bytes by then), from 0 when it began to be followed."""
    rows = file.rows
    total = rows["added_pages"].astype(np.float64) * timeline.page_bytes + rows["direct_bytes"]
    ns = rows["ns"].astype(np.int64)
    since_ns = min(int(rows["since_ns"][0]), int(ns[0]))
    begun = max(since_ns, timeline.start_ns)
    if begun < ns[0]:
        ns, total = np.append(begun, ns), np.append(0.0, total)
    return ns, total


def _sum_of(curves: Sequence[tuple[Ints, Floats]]) -> tuple[Ints, Floats]:
    ns = distinct(np.concatenate([stamps for stamps, _ in curves]))
    total = np.zeros(len(ns))
    for stamps, values in curves:
        total += np.interp(ns, stamps, values, left=0.0)
    return ns, total


def _series(name: str, path: str, ns: Ints, values: Floats) -> Series:
    ns, values = condense.points(ns, values, _POINTS)
    return Series(name, "bytes", path, tuple(ns.tolist()), tuple(values.tolist()))


def _sizes(timeline: Timeline) -> Iterable[SizeTrack]:
    """The files with most requests: to the block layer, or to a server or daemon."""
    asked = _asked(timeline)
    names = {f.ino: f.path for f in timeline.files.values()}
    inodes, counts = np.unique(asked["ino"], return_counts=True)
    for ino in inodes[np.argsort(-counts, kind="stable")][:_FILES].tolist():
        own = asked[asked["ino"] == ino]
        path = names.get(ino, "not a followed file" if not ino else f"inode {ino}")
        cells = condense.sizes(own["ns"], own["bytes"], _SPANS)
        yield SizeTrack(
            path=path,
            quantum_ns=cells.quantum_ns,
            start_ns=tuple(cells.start_ns.tolist()),
            size_bytes=tuple(condense.SIZE_CLASSES[size] for size in cells.size.tolist()),
            count=tuple(cells.count.tolist()),
            total_bytes=tuple(cells.total_bytes.tolist()),
        )


def _asked(timeline: Timeline) -> Records:
    """Reads asked of storage: when, of which inode, how many bytes."""
    block, remote = timeline.blocks.everything(), timeline.of_kind(Kind.REMOTE)
    number = len(block["ino"]) + len(remote)
    asked = np.zeros(number, [("ns", "<i8"), ("ino", "<u8"), ("bytes", "<i8")])
    asked["ns"] = np.concatenate([block["start_ns"], remote["start_ns"].view(np.int64)])
    asked["ino"] = np.concatenate([block["ino"], remote["ino"]])
    asked["bytes"] = np.concatenate([block["a"], remote["a"] >> np.uint64(32)])
    return asked


# -- log lines, kernel caches, device files --------------------------------------------------------


def _ticks(timeline: Timeline) -> Iterable[Tick]:
    for mark in timeline.marks:
        told = ", ".join(f"{name} {value}" for name, value in mark.values.items())
        text = f"{mark.name.replace('_', ' ')}{': ' if told else ''}{told}, said pid {mark.tgid}"
        yield Tick(mark.ns, mark.name, text)
    yield from _cache_ticks(timeline)
    yield from _device_ticks(timeline)


def _cache_ticks(timeline: Timeline) -> Iterable[Tick]:
    """The first open of each kind in each cache and process: thousands may follow."""
    seen = set()
    for opened in timeline.gpu.cache_opens:
        how = "written" if opened.write else "not found" if opened.missing else "read"
        key = opened.tgid, opened.cache, how
        if key not in seen:
            seen.add(key)
            text = f"kernel cache {opened.cache}: first file {how}, by pid {opened.tgid}"
            yield Tick(opened.ns, "kernel_cache", text)


_FAMILIES: dict[int, str] = {
    DeviceFlag.NVIDIA: "/dev/nvidia*",
    DeviceFlag.KFD: "/dev/kfd",
    DeviceFlag.DRI: "/dev/dri",
}


def _device_ticks(timeline: Timeline) -> Iterable[Tick]:
    """The first open of the device files of each kind by each process."""
    events = timeline.gpu.device_files
    seen = set()
    for event in events[(events["flags"] & DeviceFlag.IOCTL) == 0]:
        tgid, family, result = int(event["tgid"]), int(event["flags"]), int(np.int64(event["b"]))
        key = tgid, family, result < 0
        if key not in seen:
            seen.add(key)
            how = "opened" if result >= 0 else f"refused (error {-result})"
            name = _FAMILIES.get(family, "a device file")
            yield Tick(int(event["start_ns"]), "gpu_device", f"{name} {how}, by pid {tgid}")
