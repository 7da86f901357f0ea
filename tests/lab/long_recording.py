"""Recordings of any length, written by the real `Writer`: for what analysis costs.

A server of 16 threads reads four files of weights while it answers: in each 20 events 14 waits, 5
requests to the disk and now and then a marked call; 20 µs apart, as in a load. A request each
20,000 events, the threads' and files' counters each 20 ms. Both numbers can be other ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ttftprof.engines.markers import MARK_NAMES
from ttftprof.events import EVENT, FILE_ROW, THREAD_ROW, Kind, Records, Wait
from unit.recordings import DEV, DISK, MIB, Scene, ns

Inodes = np.typing.NDArray[np.uint64]
PID = 4242
THREADS = 16
_FIRST_INODE = np.uint64(21)
_AT_A_TIME = 4  # files that are read
_APART_NS = 20_000
_DRAIN = 4_096  # events
_RECORD_BYTES = 64  # of an event in the ring, with its head
_REQUEST = 20_000  # events
_LOOK_NS = 20_000_000
_FILE_BYTES = 4096 * MIB
_REASONS = np.array([Wait.STORAGE, Wait.STORAGE, Wait.RUNNABLE, Wait.LOCK, Wait.TIMER])
_DECODE = next(row for row, name in MARK_NAMES.items() if name == "decode")


def write_long(path: Path, events: int, files: int = 4, requests: int | None = None) -> Path:
    """A recording of so many events. Of many files each is read for a while, four at a time."""
    length_ms = events * _APART_NS / 1e6
    scene = Scene(end=length_ms + 10).meta(clock={"realtime_offset_ns": 1_700_000_000 * 10**9})
    scene.process(PID, "llama-server", engine="llama.cpp")
    inodes = _FIRST_INODE + np.arange(files, dtype=np.uint64)
    for ino in inodes.tolist():
        scene.file(ino, f"/models/{ino}.gguf", size_bytes=_FILE_BYTES).mapped(PID, ino, 0.001)
    requests = requests or requests_of(events)
    each_ms = events * _APART_NS / 1e6 / requests if requests > 1 else _REQUEST * _APART_NS / 1e6
    for number in range(requests):
        at = number * each_ms + 1
        scene.request(PID, at, token=at + 0.8 * each_ms, ports=(8080, 40_000 + number % 20_000))
    return scene.write(path, more=_batches(events, inodes))


def requests_of(events: int) -> int:
    """How many requests a load of so many events has."""
    return max(events // _REQUEST, 1)


def raw_bytes(events: int) -> int:
    """What the kernel wrote for so many events."""
    return events * _RECORD_BYTES


def _batches(events: int, inodes: Inodes) -> Iterator[tuple[str, Records]]:
    for begin in range(0, events, _DRAIN):
        end = min(begin + _DRAIN, events)
        read = _read_at(inodes, begin / events)
        yield "events", _events(np.arange(begin, end, dtype=np.int64), read)
    looks = np.arange(0, max(events * _APART_NS // _LOOK_NS, 2), dtype=np.int64)
    for part in np.array_split(looks, max(len(looks) // 50, 1)):
        yield "threads", _thread_rows(part)
        read = _read_at(inodes, part[0] / (looks[-1] + 1))
        yield "files", _file_rows(part, read)


def _read_at(inodes: Inodes, share: float) -> Inodes:
    """The files that are read when so much of the recording is over."""
    first = int(share * len(inodes)) // _AT_A_TIME * _AT_A_TIME
    return inodes[first : first + _AT_A_TIME]


def _events(number: np.typing.NDArray[np.int64], inodes: Inodes) -> Records:
    found, turn, cycle = np.zeros(len(number), EVENT), number % 20, number // 20
    found["start_ns"], found["tgid"] = ns(0) + number * _APART_NS, PID
    found["tid"] = PID + number % THREADS
    found["kind"], found["duration_ns"] = Kind.OFFCPU, 200_000 + number % 7 * 10_000
    found["flags"] = _REASONS[(number + cycle) % len(_REASONS)]
    on_file = found["flags"] == Wait.STORAGE
    found["dev"][on_file] = DEV
    found["ino"][on_file] = inodes[cycle[on_file] % len(inodes)]
    asks = (turn >= 14) & (turn < 19)
    found["kind"][asks], found["dev"][asks] = Kind.BLOCK, DISK
    found["duration_ns"][asks], found["flags"][asks] = 90_000 + number[asks] % 11 * 1_000, 1
    found["ino"][asks] = inodes[cycle[asks] % len(inodes)]
    found["a"][asks], found["b"][asks] = 131_072, number[asks] * 256
    for kind, at in ((Kind.MARK_ENTER, 2), (Kind.MARK_EXIT, 7)):
        calls = (turn == 19) & (cycle % 10 == at)
        found["kind"][calls], found["flags"][calls], found["tid"][calls] = kind, _DECODE, PID
        found["dev"][calls], found["ino"][calls], found["duration_ns"][calls] = 0, 0, 0
        found["a"][calls] = 512 if kind == Kind.MARK_ENTER else 0
    return found


def _thread_rows(looks: np.typing.NDArray[np.int64]) -> Records:
    rows = np.zeros((len(looks), THREADS), THREAD_ROW)
    rows["ns"] = ns(0) + (looks[:, None] + 1) * _LOOK_NS
    rows["tgid"], rows["tid"], rows["since_ns"] = PID, PID + np.arange(THREADS), ns(-5)
    rows["cpu_ns"] = (looks[:, None] + 1) * (_LOOK_NS // 4)
    rows["maj_flt"] = (looks[:, None] + 1) * 20
    return rows.reshape(-1)


def _file_rows(looks: np.typing.NDArray[np.int64], inodes: Inodes) -> Records:
    rows = np.zeros((len(looks), len(inodes)), FILE_ROW)
    rows["ns"] = ns(0) + (looks[:, None] + 1) * _LOOK_NS
    rows["dev"], rows["ino"], rows["since_ns"] = DEV, inodes, ns(-5)
    rows["size_bytes"] = _FILE_BYTES
    rows["added_pages"] = rows["cached_pages"] = (looks[:, None] + 1) * 2_000
    return rows.reshape(-1)
