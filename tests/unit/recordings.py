"""Synthetic recordings: a `Scene` is told in milliseconds and written as a real recording.

    scene = Scene().process(7, "server").request(7, at=100, token=150)
    scene.report().requests[0].phase_totals()

Times are milliseconds after the probes were armed; `ns` says where that lies on the clock. Files
are named by their inode. Calls can be given in any order: the file holds them as they were told.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from ttftprof.analysis import analyse
from ttftprof.engines.driver_calls import DRIVER_CALLS
from ttftprof.engines.markers import MARK_NAMES
from ttftprof.events import (
    EVENT,
    FILE_ROW,
    THREAD_ROW,
    CpuMode,
    Kind,
    Records,
    Wait,
    kernel_dev,
)
from ttftprof.gpu_rows import GPU_PROCESS_ROW, GPU_ROW, Valid
from ttftprof.model import Report, Request
from ttftprof.recording import Reader, Source, Writer
from ttftprof.timeline import Timeline, build

MS = 1_000_000
MIB, GIB = 1 << 20, 1 << 30
PAGE = 4096
ARMED_NS = 5_000 * MS
DEV = kernel_dev(8, 1)
DISK = kernel_dev(8, 0)
FRONT, OLD, NEW = 100, 200, 300
A_GGUF, B_GGUF = 11, 12
CHAT = "/v1/chat/completions"
_MARK_ROWS = {name: row for row, name in MARK_NAMES.items()}
_DRIVER_ROWS = {call.name: row for row, call in DRIVER_CALLS.items()}


def ns(ms: float) -> int:
    """The clock at a moment of a scene."""
    return ARMED_NS + round(ms * MS)


def ms(stamp_ns: int) -> float:
    """The inverse of `ns`."""
    return (stamp_ns - ARMED_NS) / MS


class Scene:
    """What happened, told fact by fact; every method returns the scene."""

    def __init__(self, end: float = 10_000) -> None:
        self._events: list[dict[str, int]] = []
        self._thread_rows: list[dict[str, Any]] = []
        self._file_rows: list[dict[str, int]] = []
        self._gpu_rows: list[dict[str, int]] = []
        self._gpu_process_rows: list[dict[str, int]] = []
        self._facts: list[tuple[str, int, Mapping[str, Any]]] = []
        self._sources: list[Source] = []
        self._lost: dict[str, int] = {}
        self._sockets = 0xFFFF_8880_0000_0000
        self._file_sizes: dict[int, int] = {}
        self._read_to: dict[int, int] = {}  # where the next read of a file goes on
        self._meta: dict[str, Any] = {
            "tool": {"name": "ttftprof", "version": "0"},
            "host": {"node": "test", "kernel": "6.18", "page_bytes": PAGE},
            "start_ns": ns(-10),
            "armed_ns": ns(0),
            "end_ns": ns(end),
            "ended_because": "interrupted",
            "marks": {str(row): name for row, name in MARK_NAMES.items()},
        }

    # -- anything ---------------------------------------------------------------------------

    def record(self, kind: int, start_ns: int, duration_ns: int = 0, **fields: int) -> Self:
        """A kernel record as it is, stamped in nanoseconds."""
        fixed = {"kind": int(kind), "start_ns": start_ns, "duration_ns": duration_ns}
        self._events.append(fixed | fields)
        return self

    def event(self, kind: Kind, at: float, pid: int, tid: int | None = None, **fields: int) -> Self:
        return self.record(kind, ns(at), tgid=pid, tid=pid if tid is None else tid, **fields)

    def fact(self, kind: str, stamp_ns: int, fact: Mapping[str, Any]) -> Self:
        self._facts.append((kind, stamp_ns, fact))
        return self

    def meta(self, **values: Any) -> Self:
        """Overwrites what the recording says of itself; None takes it away."""
        self._meta |= values
        return self

    def source(self, name: str, state: str = "ok", reason: str = "", lost: str = "") -> Self:
        self._sources.append(Source(name, state, reason, lost))
        return self

    def loss(self, place: str, count: int) -> Self:
        self._lost[place] = count
        return self

    # -- processes and threads --------------------------------------------------------------

    def process(self, pid: int, comm: str = "server", at: float = 0, **facts: Any) -> Self:
        """What /proc said of a process."""
        known = {"pid": pid, "ppid": 1, "comm": comm, "argv": [comm], "engine": None}
        return self.fact("process", ns(at), known | facts)

    def forked(self, pid: int, at: float, parent: int = 1) -> Self:
        return self.event(Kind.FORK, at, pid, a=parent, b=parent)

    def executed(self, pid: int, at: float, comm: str = "server", **facts: Any) -> Self:
        return self.event(Kind.EXEC, at, pid).process(pid, comm, at, **facts)

    def exited(self, pid: int, at: float, gone: float | None = None, since: float = -5) -> Self:
        """Its first thread exits; its memory is back when the last is `gone`."""
        self.event(Kind.PROCESS_EXIT, at, pid)
        return self if gone is None else self.thread_ended(pid, pid, gone, since)

    def thread(self, pid: int, tid: int, at: float) -> Self:
        return self.event(Kind.FORK, at, pid, tid, a=pid, b=pid)

    def thread_ended(self, pid: int, tid: int, at: float, since: float = -5) -> Self:
        lasted = round((at - since) * MS)
        return self.event(Kind.THREAD_END, since, pid, tid, duration_ns=lasted)

    def signalled(self, pid: int, at: float, number: int = 15) -> Self:
        return self.event(Kind.SIGNAL, at, pid, flags=number)

    def wait(
        self,
        pid: int,
        begin: float,
        end: float,
        reason: Wait,
        tid: int | None = None,
        ino: int = 0,
    ) -> Self:
        """An off-CPU interval."""
        on = {"dev": DEV, "ino": ino} if ino else {}
        lasted = round((end - begin) * MS)
        return self.event(Kind.OFFCPU, begin, pid, tid, duration_ns=lasted, flags=int(reason), **on)

    def thread_row(
        self,
        pid: int,
        at: float,
        tid: int | None = None,
        since: float = -5,
        short: Mapping[Wait, float] | None = None,
        ticks: Mapping[CpuMode, int] | None = None,
        **counters: int,
    ) -> Self:
        """A snapshot of a thread's running counters; `short` in ms by reason."""
        row: dict[str, Any] = {"ns": ns(at), "tgid": pid, "tid": pid if tid is None else tid}
        row["since_ns"] = ns(since)
        row["short_ns"] = [round((short or {}).get(wait, 0) * MS) for wait in Wait]
        row["samples"] = [(ticks or {}).get(mode, 0) for mode in CpuMode]
        self._thread_rows.append(row | counters)
        return self

    def raw_rows(
        self, of_threads: Sequence[Mapping[str, Any]], of_files: Sequence[Mapping[str, Any]]
    ) -> Self:
        """Rows of counters as they are, stamped in nanoseconds."""
        self._thread_rows += map(dict, of_threads)
        self._file_rows += map(dict, of_files)
        return self

    # -- what a server says -----------------------------------------------------------------

    def call(
        self,
        pid: int,
        name: str,
        begin: float,
        end: float | None,
        value: int = 0,
        tid: int | None = None,
    ) -> Self:
        """A marked call; `end` is None if it never returned."""
        row = _MARK_ROWS[name]
        self.event(Kind.MARK_ENTER, begin, pid, tid, flags=row, a=value)
        if end is not None:
            self.event(Kind.MARK_EXIT, end, pid, tid, flags=row)
        return self

    def log(self, pid: int, name: str, at: float, **values: Any) -> Self:
        return self.fact("mark", ns(at), {"name": name, "tgid": pid, "tid": pid, **values})

    # -- files ------------------------------------------------------------------------------

    def file(
        self, ino: int, path: str | None = None, size_bytes: int = 100 * MIB, **facts: Any
    ) -> Self:
        self._file_sizes[ino] = size_bytes
        known = {"dev": DEV, "ino": ino, "path": path or f"/models/{ino}.gguf"}
        known |= {"size_bytes": size_bytes, "fstype": "ext4", "mount": "/", "options": "rw"}
        return self.fact("file", ns(0), known | {"read_ahead_kb": 128} | facts)

    def file_row(self, ino: int, at: float, **counters: int) -> Self:
        """A snapshot of a file's running counters."""
        row = {"ns": ns(at), "dev": DEV, "ino": ino, "since_ns": ns(-5)}
        row["size_bytes"] = self._file_sizes.get(ino, 0)
        self._file_rows.append(row | counters)
        return self

    def opened(self, pid: int, ino: int, at: float, cached_pages: int = 0) -> Self:
        size = self._file_sizes.get(ino, 0)
        self._read_to[ino] = 0
        return self.event(Kind.OPEN, at, pid, dev=DEV, ino=ino, a=size, b=cached_pages)

    def held(self, pid: int, ino: int, cached_pages: int = 0) -> Self:
        size = self._file_sizes.get(ino, 0)
        return self.event(Kind.HELD, -1, pid, dev=DEV, ino=ino, a=size, b=cached_pages)

    def mapped(
        self,
        pid: int,
        ino: int,
        at: float,
        length: int | None = None,
        address: int = 0x7F00_0000_0000,
        flags: int = 0,
    ) -> Self:
        length = self._file_sizes.get(ino, 0) if length is None else length
        return self.event(Kind.MMAP, at, pid, dev=DEV, ino=ino, a=length, b=address, flags=flags)

    def has_read(
        self,
        pid: int,
        ino: int,
        begin: float,
        end: float,
        count: int,
        flags: int = 0,
        offset: int | None = None,
    ) -> Self:
        """From where the last read of the file since it was opened ended, if no offset is given."""
        offset = self._read_to.get(ino, 0) if offset is None else offset
        self._read_to[ino] = offset + count
        lasted = round((end - begin) * MS)
        where = {"dev": DEV, "ino": ino, "a": count, "b": offset}
        return self.event(Kind.READ, begin, pid, duration_ns=lasted, flags=flags, **where)

    def block(
        self, begin: float, end: float, ino: int, size: int = 128 << 10, in_flight: int = 1
    ) -> Self:
        return self.record(
            Kind.BLOCK, ns(begin), round((end - begin) * MS), dev=DISK, ino=ino, a=size,
            flags=in_flight,
        )  # fmt: skip

    # -- GPUs -------------------------------------------------------------------------------

    def gpu(self, index: int = 0, **facts: Any) -> Self:
        known = {"index": index, "parent": None, "name": "Fake GPU", "source": "nvml"}
        known |= {"total_bytes": 8 << 30, "persistence": True}
        return self.fact("gpu", ns(0), known | {"link_gen_max": 4, "link_width_max": 16} | facts)

    def gpu_row(self, at: float, device: int = 0, **fields: int) -> Self:
        """A look at a device; what is given is valid."""
        valid = Valid(0)
        for name, bit in (
            ("used_bytes", Valid.USED),
            ("busy_percent", Valid.BUSY),
            ("link_gen", Valid.LINK),
            ("pstate", Valid.PSTATE),
            ("core_mhz", Valid.CLOCKS),
            ("throttle", Valid.THROTTLE),
            ("rx_bytes_per_s", Valid.RX),
            ("tx_bytes_per_s", Valid.TX),
        ):
            valid |= bit if name in fields else Valid(0)
        row = {"ns": ns(at), "device": device, "valid": int(valid)}
        self._gpu_rows.append(row | fields)
        return self

    def gpu_process(self, pid: int, at: float, used_bytes: int, device: int = 0) -> Self:
        """The memory of a process on a device changed to this."""
        row = {"ns": ns(at), "device": device, "tgid": pid, "used_bytes": used_bytes}
        self._gpu_process_rows.append(row)
        return self

    def driver_call(
        self,
        pid: int,
        name: str,
        begin: float,
        end: float | None,
        size: int = 0,
        second: int = 0,
        result: int = 0,
        tid: int | None = None,
    ) -> Self:
        """A call into a GPU driver; `end` is None if it never returned."""
        row = _DRIVER_ROWS[name]
        self.event(Kind.MARK_ENTER, begin, pid, tid, flags=row, a=size, b=second)
        if end is not None:
            self.event(Kind.MARK_EXIT, end, pid, tid, flags=row, a=result)
        return self

    def cache_open(
        self,
        pid: int,
        at: float,
        cache: str,
        write: bool = False,
        missing: bool = False,
        fstype: str | None = "ext4",
        ino: int = 0,
    ) -> Self:
        fact = {"cache": cache, "tgid": pid, "write": write, "missing": missing, "size_bytes": 9}
        return self.fact("cache_open", ns(at), fact | {"fstype": fstype, "dev": DEV, "ino": ino})

    # -- sockets ----------------------------------------------------------------------------

    def listened(self, pid: int, at: float, port: int = 8080) -> Self:
        return self.event(Kind.LISTEN, at, pid, a=port)

    def connected(self, pid: int, at: float, local: int, remote: int) -> Self:
        """A process of the target opened a connection."""
        return self.event(Kind.CONNECT, at, pid, a=local << 16 | remote)

    def accepted(self, pid: int, at: float, socket: int) -> Self:
        return self.event(Kind.ACCEPT, at, pid, ino=socket)

    def request(
        self,
        pid: int,
        at: float,
        token: float | None = None,
        end: float | None = None,
        ports: tuple[int, int] = (8080, 50_000),
        headers: float | None = None,
        **facts: Any,
    ) -> Self:
        """An exchange as a server saw it; without `end` it ends 50 ms after its token."""
        self._sockets += 64
        if end is None and token is not None:
            end = token + 50
        ends = None if end is None else ns(end)
        known: dict[str, Any] = {
            "start_ns": ns(at), "request_end_ns": ns(at),
            "headers_ns": None if headers is None and token is None else ns(headers or token or 0),
            "first_token_ns": None if token is None else ns(token), "end_ns": ends,
            "method": "POST", "endpoint": CHAT, "model": "b", "streamed": True,
            "status": None if token is None else 200, "prompt_tokens": None,
            "cached_tokens": None, "completion_tokens": None, "timings": {}, "generates": True,
            "prompt_bytes": 148, "outcome": "incomplete" if token is None else "ok", "notes": [],
            "socket": self._sockets, "tgid": pid, "tid": pid, "local_port": ports[0],
            "remote_port": ports[1],
        }  # fmt: skip
        return self.fact("exchange", ns(at), known | facts)

    # -- the file ---------------------------------------------------------------------------

    def write(
        self, path: Path, complete: bool = True, more: Iterable[tuple[str, Records]] = ()
    ) -> Path:
        """The recording; `more` adds packed records to its streams, a batch each."""
        writer = Writer(path, overwrite=True)
        for key, value in self._meta.items():
            if value is not None:
                writer.set_meta(key, value)
        writer.add_batch("events", _array(self._events, EVENT))
        writer.add_batch("threads", _array(self._thread_rows, THREAD_ROW))
        writer.add_batch("files", _array(self._file_rows, FILE_ROW))
        writer.add_batch("gpu", _array(self._gpu_rows, GPU_ROW))
        writer.add_batch("gpu_processes", _array(self._gpu_process_rows, GPU_PROCESS_ROW))
        for stream, records in more:
            writer.add_batch(stream, records)
        for kind, stamp_ns, fact in self._facts:
            writer.add_fact(kind, stamp_ns, fact)
        for source in self._sources:
            writer.set_source(source)
        for place, count in self._lost.items():
            writer.set_lost(place, count)
        writer.close(complete)
        return path

    def timeline(self) -> Timeline:
        with (
            tempfile.TemporaryDirectory() as folder,
            Reader(self.write(Path(folder) / "scene.ttft")) as reader,
        ):
            return build(reader)

    def report(self) -> Report:
        with tempfile.TemporaryDirectory() as folder:
            return analyse(self.write(Path(folder) / "scene.ttft"))

    def only_request(self) -> Request:
        (request,) = self.report().requests
        return request


# thread, from, until, stack (module, function, line; outermost first)
PythonSpans = list[tuple[int, float, float, list[tuple[str, str, int]]]]


def python_segment(pid: int, spans: PythonSpans, rate: int = 20) -> tuple[int, dict[str, Any]]:
    """(ns, fact) of a segment of Python stacks."""
    frames = list(dict.fromkeys(frame for *_, stack in spans for frame in stack))
    numbers = [tuple(frames.index(frame) for frame in stack) for *_, stack in spans]
    stacks = list(dict.fromkeys(numbers))
    begin = min(start for _, start, _, _ in spans)
    rows = [
        (tid, round((start - begin) * 1000), round((end - start) * 1000), stacks.index(number))
        for (tid, start, end, _), number in zip(spans, numbers, strict=True)
    ]
    return ns(begin), {
        "pid": pid, "end_ns": ns(max(end for _, _, end, _ in spans)), "clock_error_ns": 1,
        "rate_hz": rate, "samples": len(rows), "errors": 0, "native": False,
        "frames": frames, "stacks": stacks, "spans": rows,
    }  # fmt: skip


def _array(rows: Sequence[Mapping[str, Any]], dtype: np.dtype[Any]) -> Records:
    out = np.zeros(len(rows), dtype)
    for at, row in enumerate(rows):
        for name, value in row.items():
            out[at][name] = value
    return out


# -- scenes that several tests share --------------------------------------------------------------


def two_models() -> Scene:
    """A front, and behind it a server that has model A mapped; nothing has happened yet."""
    return (
        Scene()
        .process(FRONT, "front", engine="llama.cpp")
        .process(OLD, "server", ppid=FRONT)
        .file(A_GGUF, "/models/a.gguf")
        .file(B_GGUF, "/models/b.gguf")
        .held(OLD, A_GGUF, 25_600)
    )


def ended(scene: Scene) -> Scene:
    """The old server is told to end at 103 ms, exits at 150 and is gone at 160."""
    return scene.signalled(OLD, 103).exited(OLD, 150, gone=160)


def launched(scene: Scene) -> Scene:
    """The new one is executed at 163 ms, loads from 200 to 500, and has run empty by 550."""
    return (
        scene.forked(NEW, 162, parent=FRONT)
        .executed(NEW, 163)
        .opened(NEW, B_GGUF, 195)
        .mapped(NEW, B_GGUF, 200)
        .call(NEW, "model_load", 200, 500)
        .call(NEW, "context_init", 501, 530)
        .call(NEW, "decode", 531, 550, value=2)
    )


def answered(scene: Scene, front_at: float = 100, **facts: Any) -> Scene:
    """The front passes the request on at 572 ms; the prompt is done at 700, text comes at 715."""
    return (
        scene.request(FRONT, front_at, token=716, **facts)
        .connected(FRONT, 571, local=40_001, remote=9_001)
        .request(NEW, 572, token=715, ports=(9_001, 40_001), prompt_tokens=38, cached_tokens=0)
        .call(NEW, "decode", 575, 640, value=32)
        .call(NEW, "decode", 641, 700, value=6)
        .call(NEW, "decode", 701, 712, value=1)
    )


def router_switch() -> Scene:
    """A whole switch by a router, every marker seen."""
    return answered(launched(ended(two_models())).log(NEW, "model_loaded", 560))


def gpu_switch() -> Scene:
    """Launch 163 to 200 ms, load to 500, init to 560 (see `router_switch`), on a GPU."""
    return (
        router_switch()
        .driver_call(NEW, "cuInit", 165, 175)
        .driver_call(NEW, "cuDevicePrimaryCtxRetain", 173, 190)
        .driver_call(NEW, "cuMemAlloc", 201, 203, size=3 * GIB)
        .driver_call(NEW, "cuMemcpyHtoD", 300, 340, size=100 * MIB, second=0x1000)
        .driver_call(NEW, "cuMemcpyHtoD", 350, 400, size=60 * MIB, second=0x2000)
        .driver_call(NEW, "cuModuleLoadData", 502, 512)
        .driver_call(NEW, "cuMemCreate", 513, 515, size=GIB)
        .driver_call(NEW, "cuMemMap", 515, 516, size=GIB)
        .driver_call(NEW, "cuMemAlloc", 516, 517, size=9 * GIB, result=2)
        .driver_call(NEW, "cuStreamBeginCapture", 520, 521)
        .driver_call(NEW, "cuStreamEndCapture", 527, 528)
        .driver_call(NEW, "cuGraphInstantiate", 528, 530)
    )
