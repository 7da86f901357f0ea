"""What a storage path gives, measured on the user's own file: politely, and put back as it was.

Guarantees: no more bytes and (but for a request that does not return) no more time than `Limits`
allows; no two cells of the matrix read the same range, so none warms a cache for the other; what
was in the page cache stays, what a measurement brought in is dropped again, also when it ends by an
exception. Every cell opens the file anew: a file takes its readahead over when it is opened.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import mmap
import os
import random
import resource
import select
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from ttftprof import residency
from ttftprof.clock import NS_PER_S, now_ns
from ttftprof.parent import end_with_parent
from ttftprof.readahead import set_readahead
from ttftprof.residency import Mapping, Range
from ttftprof.stack import Stack
from ttftprof.weights import OpenFile, Weights

KIB, MIB = 1 << 10, 1 << 20
RANDOM_BYTES = 4 * KIB
# Of ranges: covers the block size of every device for O_DIRECT, and the largest folio (on 4 KiB
# pages): the kernel drops a folio as a whole or not at all.
ALIGN = 2 * MIB
_SLACK = 8 * MIB  # at least this far around a range readahead may have read
_STEP = 64 * KIB  # of the mmap cell's copying
_WARM_BYTES = 32 * MIB
_RANDOM_READS = 2000
_STALL_S = 10.0
_LEAST_CELL_S = 0.2
_PATIENCE_S = 1.0  # with readahead that is still under way
_LEAST_POINTS = 6  # for a slope
_RAMP_SHARE = 0.2  # of a cell's time that is left out: bursts, slow start, the first readahead
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one path's measurement may cost. `evict`: also measure ranges that are cached, which
    are dropped for it and read back. `quick`: only the cells that decide. `read_aheads_kb`: values
    to try."""

    max_bytes: int = 1 << 30
    max_ns: int = 30 * NS_PER_S
    evict: bool = False
    quick: bool = False
    read_aheads_kb: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Way:
    """One way to read. `method`: read, direct (O_DIRECT), mmap, random (4 KiB preads), cached
    (read from the page cache: what this program itself can do). `request_bytes`: what the program
    asks for at once; None for mmap, where the kernel decides. `read_ahead_kb`: set for this cell
    (None: as it was found)."""

    method: str
    streams: int
    request_bytes: int | None
    read_ahead_kb: int | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """One cell of the matrix; `not_measured` says why it has no figures.

    `bytes_per_second`: see `steady_rate`.
    Requests and latencies are the program's, one request from call to return; None for mmap, where
    the kernel makes the requests and `major_faults` says how often the program had to wait for
    one. `cpu_ns`: processor time of the reading thread or process; for several streams, their sum.
    """

    way: Way
    read_ahead_kb: int | None
    bytes_read: int = 0
    elapsed_ns: int = 0
    bytes_per_second: float | None = None
    requests: int | None = None
    latency_mean_ns: int | None = None
    latency_p50_ns: int | None = None
    latency_p95_ns: int | None = None
    major_faults: int | None = None
    cpu_ns: int | None = None
    not_measured: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Extent:
    """A part of one of the files; `file` is its index."""

    file: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: when it began and ended, what it got."""

    start_ns: int
    end_ns: int
    got: int


@dataclass(frozen=True, slots=True)
class _Taken:
    """What one cell's reading gave, stream by stream."""

    streams: Sequence[Sequence[Sample]]
    cpu_ns: int
    major_faults: int | None = None


class Interrupted(BaseException):
    """Somebody asked for the end: Ctrl-C, SIGTERM or SIGHUP. `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Unanswered(Exception):
    """The storage did not answer for so long that the measurement was given up."""


# -- the plan --------------------------------------------------------------------------------------


def matrix(read_aheads_kb: Sequence[int] = (), quick: bool = False) -> list[Way]:
    """All cells, the most telling first: if the file is small, the last are left out."""
    telling = [
        Way("read", 1, MIB),
        Way("mmap", 1, None),
        Way("random", 1, RANDOM_BYTES),
        Way("direct", 1, MIB),
        Way("read", 4, MIB),
        Way("direct", 4, MIB),
        *(Way("mmap", 1, None, kb) for kb in read_aheads_kb),
        *(Way("read", 1, MIB, kb) for kb in read_aheads_kb),
    ]
    others = [
        Way("read", 16, MIB),
        Way("read", 1, 4 * MIB),
        Way("read", 1, 64 * KIB),
        Way("read", 4, 64 * KIB),
        Way("read", 16, 64 * KIB),
        Way("read", 4, 4 * MIB),
        Way("read", 16, 4 * MIB),
    ]
    return telling if quick else telling + others


def _unit(way: Way) -> int:
    """A cell's range is a whole number of these, so that every stream gets whole requests."""
    return max(ALIGN, way.streams * (way.request_bytes or MIB))


def _bounds(way: Way) -> tuple[int, int]:
    """(least, wanted) bytes of a cell's range."""
    unit = _unit(way)
    return 2 * unit if way.method == "mmap" else unit, max(48 * MIB, 2 * unit)


def allot(ways: Sequence[Way], space_bytes: int) -> list[int]:
    """Bytes for each way out of `space_bytes`; 0 where too little is left.

    Every way gets its least amount while there is room, in order; what remains is shared out in
    proportion to what is wanted.
    """
    bounds = [_bounds(way) for way in ways]
    given: list[int] = []
    left = space_bytes
    for least, _ in bounds:
        given.append(least if least <= left else 0)
        left -= given[-1]
    more = [w - g if g else 0 for (_, w), g in zip(bounds, given, strict=True)]
    share = min(1.0, left / sum(more)) if sum(more) else 0.0
    return [
        g + int(m * share) // _unit(way) * _unit(way)
        for way, g, m in zip(ways, given, more, strict=True)
    ]


def usable(runs_of_files: Sequence[Sequence[Range]]) -> list[Extent]:
    """Ranges worth measuring on: aligned, and of the longest runs; crumbs between cached parts
    would turn big requests into small ones."""
    extents = []
    for file, runs in enumerate(runs_of_files):
        for start, end in runs:
            low, high = -(-start // ALIGN) * ALIGN, end // ALIGN * ALIGN
            if high > low:
                extents.append(Extent(file, low, high - low))
    longest = max((e.length for e in extents), default=0)
    return [e for e in extents if e.length >= min(16 * MIB, longest)]


def cut(extents: Iterable[Extent], sizes: Sequence[int]) -> list[list[Extent]]:
    """The extents dealt out in order, `sizes[i]` bytes to the i-th; each list is disjoint."""
    dealt: list[list[Extent]] = []
    rest = list(extents)[::-1]
    for size in sizes:
        mine: list[Extent] = []
        wanted = size
        while wanted > 0 and rest:
            first = rest.pop()
            taken = min(wanted, first.length)
            mine.append(replace(first, length=taken))
            if taken < first.length:
                rest.append(Extent(first.file, first.start + taken, first.length - taken))
            wanted -= taken
        dealt.append(mine)
    return dealt


def requests_of(extents: Iterable[Extent], request_bytes: int) -> Iterator[Extent]:
    for extent in extents:
        for at in range(0, extent.length, request_bytes):
            yield Extent(extent.file, extent.start + at, min(request_bytes, extent.length - at))


# -- figures ---------------------------------------------------------------------------------------


def steady_rate(streams: Sequence[Sequence[Sample]]) -> float | None:
    """Bytes per second while all streams ran, without the ramp at the start; None for no bytes.

    A token bucket, a TCP slow start or the first readahead gives the beginning away for nothing:
    the first fifth is left out. Of the rest, the slope of a straight line through (bytes so far,
    when they were there), since readahead lets the bytes come in steps. Where too few requests
    remain, the mean over the whole. A ramp that gave nothing lifts the rate by its share and no
    more: a higher slope only means that the bytes came in one burst.
    """
    samples = sorted((s for stream in streams for s in stream), key=lambda s: s.end_ns)
    if not samples:
        return None
    begin = min(s.start_ns for s in samples)
    last = min(stream[-1].end_ns for stream in streams if stream)
    ramp = begin + (last - begin) * _RAMP_SHARE
    totals = itertools.accumulate(s.got for s in samples)
    points = [
        (total, s.end_ns)
        for total, s in zip(totals, samples, strict=True)
        if ramp < s.end_ns <= last
    ]
    spent = samples[-1].end_ns - begin
    if spent <= 0:
        return None
    mean = sum(s.got for s in samples) / spent * NS_PER_S
    if len(points) < max(_LEAST_POINTS, len(samples) // 2):
        return mean
    slope = statistics.linear_regression(*zip(*points, strict=True)).slope
    most = mean / (1 - _RAMP_SHARE) * spent / (last - begin)
    return min(NS_PER_S / slope, most) if slope > 0 else mean


def _figures(way: Way, read_ahead_kb: int | None, taken: _Taken) -> Measured:
    samples = [s for stream in taken.streams for s in stream]
    if not samples:
        return Measured(way, read_ahead_kb, not_measured="not one request ended in its time")
    waits = sorted(s.end_ns - s.start_ns for s in samples)
    asks = way.method != "mmap"
    return Measured(
        way=way,
        read_ahead_kb=read_ahead_kb,
        bytes_read=sum(s.got for s in samples),
        elapsed_ns=max(s.end_ns for s in samples) - min(s.start_ns for s in samples),
        bytes_per_second=steady_rate(taken.streams),
        requests=len(samples) if asks else None,
        latency_mean_ns=round(statistics.fmean(waits)) if asks else None,
        latency_p50_ns=round(statistics.median(waits)) if asks else None,
        latency_p95_ns=waits[min(len(waits) * 95 // 100, len(waits) - 1)] if asks else None,
        major_faults=taken.major_faults,
        cpu_ns=taken.cpu_ns,
    )


# -- reading ---------------------------------------------------------------------------------------


class _Stream(threading.Thread):
    """One reader: synchronous requests over its extents, on descriptors of its own.

    The reads release the interpreter lock; a daemon, so that one that never returns cannot keep
    the program from ending.
    """

    def __init__(self, files: Sequence[OpenFile], way: Way, extents: list[Extent], until: int):
        super().__init__(daemon=True)
        self.samples: list[Sample] = []
        self.error: OSError | None = None
        self.stop = False
        self.cpu_ns = 0
        self._files, self._way, self._extents, self._until = files, way, extents, until

    def run(self) -> None:
        fds: dict[int, int] = {}
        try:
            with mmap.mmap(-1, self._way.request_bytes or MIB) as buffer:
                self._read(fds, memoryview(buffer))
        except OSError as error:
            self.error = error
        finally:
            self.cpu_ns = time.thread_time_ns()
            for fd in fds.values():
                os.close(fd)

    def _read(self, fds: dict[int, int], view: memoryview) -> None:
        with view:
            for request in requests_of(self._extents, len(view)):
                fd = fds.get(request.file)
                if fd is None:
                    fd = fds[request.file] = _open_for(self._files[request.file], self._way)
                begin = now_ns()
                if self.stop or begin >= self._until:
                    return
                with view[: request.length] as part:
                    got = os.preadv(fd, [part], request.start)
                if not got:
                    raise OSError(errno.ENODATA, "the file became shorter")
                self.samples.append(Sample(begin, now_ns(), got))


def _open_for(file: OpenFile, way: Way) -> int:
    fd = file.reopen(os.O_RDONLY | (os.O_DIRECT if way.method == "direct" else 0))
    if way.method == "random":
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd


def _split(extents: Sequence[Extent], streams: int) -> list[list[Extent]]:
    total = sum(e.length for e in extents)
    return cut(extents, [total // streams] * streams)


def _scattered(extents: Sequence[Extent]) -> list[Extent]:
    """Places for the random reads, each page once; the same order in every run."""
    places = list(requests_of(extents, RANDOM_BYTES))
    random.Random(len(places)).shuffle(places)
    return places[:_RANDOM_READS]


def _read_by_threads(
    files: Sequence[OpenFile],
    way: Way,
    extents: Sequence[Extent],
    until: int,
    tick: Callable[[], None],
) -> _Taken:
    parts = [_scattered(extents)] if way.method == "random" else _split(extents, way.streams)
    streams = [_Stream(files, way, part, until) for part in parts]
    try:
        for stream in streams:
            stream.start()
        _wait_for(streams, until, tick)
    finally:
        for stream in streams:
            stream.stop = True
        for stream in streams:
            if stream.ident is not None:
                stream.join(1.0)
    for stream in streams:
        if stream.error is not None:
            raise stream.error
    return _Taken([stream.samples for stream in streams], sum(s.cpu_ns for s in streams))


def _wait_for(streams: Sequence[_Stream], until: int, tick: Callable[[], None]) -> None:
    for stream in streams:
        while stream.is_alive():
            stream.join(0.05)
            tick()
            if now_ns() > until + _STALL_S * NS_PER_S:
                raise Unanswered(f"no answer for {_STALL_S:.0f} s")


# -- the page-touching child -----------------------------------------------------------------------


def _touch_by_mmap(
    files: Sequence[OpenFile],
    _way: Way,
    extents: Sequence[Extent],
    until: int,
    tick: Callable[[], None],
) -> _Taken:
    """Copies the extents out of a map, in a child: what a fault does to a process (SIGBUS where the
    file became shorter, a wait that no signal ends) then happens to the child."""
    ready, write_end = os.pipe()
    held = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # until somebody minds the child
    pid = os.fork()
    if pid == 0:
        _child(files, extents, until, write_end)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        os.close(write_end)
        answer = _answer_of(ready, until, tick)
    finally:
        os.close(ready)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if not answer:
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGBUS:
            raise OSError(errno.ENODATA, "a page could not be had (SIGBUS)")
        raise OSError(errno.EIO, "the reading process died")
    found: dict[str, Any] = json.loads(answer)
    if "errno" in found:
        raise OSError(found["errno"], found["message"])
    streams = [[Sample(*sample) for sample in found["samples"]]]
    return _Taken(streams, found["cpu_ns"], found["major_faults"])


def _answer_of(fd: int, until: int, tick: Callable[[], None]) -> bytes:
    answer = b""
    while True:
        if select.select([fd], [], [], 0.05)[0]:
            piece = os.read(fd, 1 << 16)
            if not piece:
                return answer
            answer += piece
        tick()
        if now_ns() > until + _STALL_S * NS_PER_S:
            raise Unanswered(f"no answer for {_STALL_S:.0f} s")


def _child(files: Sequence[OpenFile], extents: Sequence[Extent], until: int, out: int) -> None:
    try:
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        end_with_parent()
        try:
            answer = _touch(files, extents, until)
        except OSError as error:
            answer = {"errno": error.errno, "message": str(error)}
        view = memoryview(json.dumps(answer).encode())
        while view:
            view = view[os.write(out, view) :]
    finally:
        os._exit(0)


def _touch(files: Sequence[OpenFile], extents: Sequence[Extent], until: int) -> dict[str, Any]:
    buffer = mmap.mmap(-1, _STEP)
    buffer.write(bytes(_STEP))  # its own faults come before the count
    target = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    samples: list[tuple[int, int, int]] = []
    faults, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_majflt, time.process_time_ns()
    for extent in extents:
        fd = files[extent.file].reopen()
        mapping = Mapping.of(fd, extent.start, extent.length)
        for at in range(0, extent.length, _STEP):
            begin = now_ns()
            if begin >= until:
                break
            step = min(_STEP, extent.length - at)
            mapping.copy_out(at, step, target)
            samples.append((begin, now_ns(), step))
        mapping.close()
        os.close(fd)
    return {
        "samples": samples,
        "major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults,
        "cpu_ns": time.process_time_ns() - cpu,
    }


# -- one path --------------------------------------------------------------------------------------


class Session:
    """The measurement of one path; `results` grows, and is valid after an interruption too."""

    def __init__(
        self,
        weights: Weights,
        stack: Stack,
        limits: Limits,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.weights, self.stack, self.limits, self.progress = weights, stack, limits, progress
        self.results: list[Measured] = []
        self.after: residency.CacheState | None = None
        self.notes: tuple[str, ...] = ()
        self._read = 0
        self._until = 0
        self._answers = True
        self._fds = [file.reopen(os.O_RDONLY | os.O_NONBLOCK) for file in weights.files]
        for fd in self._fds:  # they only read what was cached back: exactly that
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        self._how = residency.how_to_ask(self._fds[0])
        self._absent = [
            residency.absent(fd, file.size_bytes, self._how)
            for fd, file in zip(self._fds, weights.files, strict=True)
        ]
        self.before = self._state()

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)

    def _state(self) -> residency.CacheState:
        states = [
            residency.state_of(fd, file.size_bytes)
            for fd, file in zip(self._fds, self.weights.files, strict=True)
        ]
        return residency.CacheState(
            sum(s.cached_pages for s in states), sum(s.total_pages for s in states), self._how
        )

    def space(self) -> list[Extent]:
        """Where may be measured: what is not cached, or with `evict` everything."""
        whole = [[(0, file.size_bytes)] for file in self.weights.files]
        return usable(whole if self.limits.evict else self._absent)

    def run(self) -> None:
        """Measures all cells there is room and time for, and puts the cache back."""
        self._until = now_ns() + self.limits.max_ns
        ways = matrix(self.limits.read_aheads_kb, self.limits.quick)
        space = self.space()
        room = min(sum(e.length for e in space), self.limits.max_bytes)
        sizes = allot(ways, room)
        dealt = cut(space, sizes)
        try:
            for index, (way, extents) in enumerate(zip(ways, dealt, strict=True)):
                left = sum(1 for rest in dealt[index:] if rest)
                self._cell(way, extents, left)
        except Unanswered as error:
            self.notes = (*self.notes, f"given up: the storage gave {error}")
        finally:
            self.after = self._state()

    def _cell(self, way: Way, extents: list[Extent], cells_left: int) -> None:
        if not extents:
            why = "too little of the file, or of --max-bytes, is left for a range of its own"
            self._add(Measured(way, None, not_measured=why))
            return
        remaining = self._until - now_ns()
        if remaining < _LEAST_CELL_S * NS_PER_S:
            self._add(Measured(way, None, not_measured="no time was left for it"))
            return
        slot = max(remaining // cells_left, int(_LEAST_CELL_S * NS_PER_S))
        if (alone := self._one_round_ns(way)) > 2 * slot:
            why = f"one request per stream alone would take about {alone / NS_PER_S:.1f} s"
            self._add(Measured(way, None, not_measured=why))
            return
        until = now_ns() + slot
        with self._readahead_of(way) as why:
            if why:
                self._add(Measured(way, None, not_measured=why))
            else:
                self._measure(way, extents, until)

    def _one_round_ns(self, way: Way) -> int:
        """How long one request of every stream takes at the best rate seen so far."""
        best = max((m.bytes_per_second or 0.0 for m in self.results if _is_storage(m)), default=0.0)
        return round((way.request_bytes or MIB) * way.streams / best * NS_PER_S) if best else 0

    @contextmanager
    def _readahead_of(self, way: Way) -> Iterator[str]:
        """The readahead the cell asks for, in force inside; yields why it cannot be, or ''."""
        layer = self.stack.readahead
        if way.read_ahead_kb is None:
            yield ""
        elif layer is None or layer.read_ahead_file is None:
            yield "which readahead setting is this file's is not known"
        else:
            with set_readahead(layer.read_ahead_file, way.read_ahead_kb) as why:
                yield why

    def _measure(self, way: Way, extents: list[Extent], until: int) -> None:
        try:
            if why := self._make_cold(extents):
                self._add(Measured(way, None, not_measured=why))
            else:
                self._add(self._checked(self._read_cell(way, extents, until), extents))
                if way == Way("read", 1, MIB):
                    self._add(self._read_warm(extents))
        except OSError as error:
            self._add(Measured(way, None, not_measured=_why(error, way)))
        except Unanswered as error:
            self._answers = False
            self._add(Measured(way, None, not_measured=str(error)))
            raise
        finally:
            self._put_back(extents)

    def _checked(self, measured: Measured, extents: list[Extent]) -> Measured:
        """The cell, with a note if O_DIRECT was granted but not done."""
        if measured.way.method != "direct":
            return measured
        if self._cached_in(extents) * residency.PAGE * 2 < measured.bytes_read:
            return measured
        return replace(measured, notes=("O_DIRECT went through the page cache here",))

    def _read_cell(self, way: Way, extents: list[Extent], until: int) -> Measured:
        files, force = self.weights.files, self._readahead_in_force(way)

        def tick() -> None:
            self.progress(describe(way))

        tick()
        read = _touch_by_mmap if way.method == "mmap" else _read_by_threads
        return _figures(way, force, read(files, way, extents, until, tick))

    def _readahead_in_force(self, way: Way) -> int | None:
        if way.method in ("direct", "random"):
            return None
        layer = self.stack.readahead
        return way.read_ahead_kb or (layer.read_ahead_kb if layer else None)

    def _read_warm(self, extents: list[Extent]) -> Measured:
        """What was just read, read again: what this program can do when storage is no limit."""
        way = Way("cached", 1, MIB)
        kept = cut(extents, [_WARM_BYTES])[0]
        if self._cached_in(kept) < sum(e.length for e in kept) // residency.PAGE:
            return Measured(way, None, not_measured="what was read did not stay in the cache")
        until = now_ns() + NS_PER_S
        return _figures(way, None, _read_by_threads(self.weights.files, way, kept, until, _nothing))

    def _cached_in(self, extents: Iterable[Extent]) -> int:
        return sum(
            residency.cached_pages(self._fds[e.file], e.start, e.start + e.length, self._how)
            for e in extents
        )

    def _make_cold(self, extents: Iterable[Extent]) -> str:
        """Drops what is cached of the extents (with `evict`); says why they are not cold, or ''."""
        stay = 0
        for e in extents:
            fd, end = self._fds[e.file], e.start + e.length
            if self.limits.evict:
                stay += residency.drop(fd, [(e.start, end)], self._how)
            else:
                stay += residency.cached_pages(fd, e.start, end, self._how)
        if stay == 0:
            return ""
        why = (
            "cannot be dropped (a process maps them)" if self.limits.evict else "came in meanwhile"
        )
        return f"{stay * residency.PAGE / 1e6:,.1f} MB of its range are cached and {why}"

    def _put_back(self, extents: Iterable[Extent]) -> None:
        """Around the extents: what was not cached leaves, what was cached is there again."""
        layer = self.stack.readahead
        ahead = (layer.read_ahead_kb or 0) * KIB if layer else 0
        tried = max(self.limits.read_aheads_kb, default=0) * KIB
        slack = max(_SLACK, 2 * ahead, 2 * tried)
        with signals_held():
            for e in extents:
                fd, size = self._fds[e.file], self.weights.files[e.file].size_bytes
                low, high = max(e.start - slack, 0), min(e.start + e.length + slack, size)
                was_absent = residency.overlap(self._absent[e.file], low, high)
                stayed = residency.drop(fd, was_absent, self._how, _PATIENCE_S)
                if self.limits.evict and self._answers:
                    self._read_back(e, was_absent, stayed > 0)

    def _read_back(self, extent: Extent, was_absent: list[Range], stayed: bool) -> None:
        """With `evict`: brings in what was cached of the extent and is not now.

        A folio that came in over the border between what was cached and what was not `stayed`: it
        goes as a whole, and the cached side comes back by exact reads.
        """
        fd, end = self._fds[extent.file], extent.start + extent.length
        was_cached = residency.without(extent.start, end, was_absent)
        if stayed:
            for border in {edge for run in was_cached for edge in run}:
                around = (max(border - ALIGN, extent.start), min(border + ALIGN, end))
                residency.drop(fd, [around], self._how)
        residency.read_back(fd, was_cached)

    def _add(self, measured: Measured) -> None:
        self._read += measured.bytes_read if _is_storage(measured) else 0
        self.results.append(measured)

    @property
    def bytes_read(self) -> int:
        """What all cells read from storage."""
        return self._read


def _is_storage(measured: Measured) -> bool:
    return measured.way.method != "cached"


def _nothing() -> None:
    return None


def _why(error: OSError, way: Way) -> str:
    if way.method == "direct" and error.errno == errno.EINVAL:
        return "this file system does not do O_DIRECT"
    if way.method == "mmap" and error.errno in (errno.ENODEV, errno.EACCES):
        return f"mmap is refused here ({errno.errorcode[error.errno]})"
    name = errno.errorcode.get(error.errno or 0, "?")
    return f"{error.strerror or error} ({name})"


def size_name(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= MIB else f"{size_bytes >> 10} KiB"


def describe(way: Way) -> str:
    """`read 4 × 1 MiB`: streams × size of a request."""
    names = {"direct": "O_DIRECT", "random": "random read", "cached": "from page cache"}
    text = names.get(way.method, way.method)
    if way.request_bytes is not None:
        text += f" {way.streams} × {size_name(way.request_bytes)}"
    return text if way.read_ahead_kb is None else f"{text}, readahead {way.read_ahead_kb} KiB"


# -- signals ---------------------------------------------------------------------------------------


@contextmanager
def signals_held() -> Iterator[None]:
    """Ctrl-C and its like wait until the block is through."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


@contextmanager
def signals_raise() -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and SIGHUP raise `Interrupted`, so that everything is put back.

    Once: what comes while things are being put back does not keep them from it.
    """
    asked = False

    def end(number: int, _frame: object) -> None:
        nonlocal asked
        if not asked:
            asked = True
            raise Interrupted(number)

    old = {number: signal.signal(number, end) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
