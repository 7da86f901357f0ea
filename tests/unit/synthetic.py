"""Timelines of any size, made in memory: for level of detail and for benchmarks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ttftprof.events import EVENT, Kind, Wait
from ttftprof.timeline import FOREVER, Ints, Timeline, Waits
from unit.recordings import Scene

START_NS = 1_000_000_000_000
_TGID = 4242


def busy_timeline(threads: int, waits: int) -> Timeline:
    """One process whose threads wait for storage `waits` times each, 1 ms apart, 0.4 ms long."""
    begin = START_NS + np.arange(waits, dtype=np.int64) * 1_000_000
    end_ns = START_NS + waits * 1_000_000
    rows = [_waits(_TGID + number, begin) for number in range(threads)]
    blocks = np.zeros(waits, EVENT)
    blocks["start_ns"], blocks["duration_ns"], blocks["kind"] = begin, 400_000, Kind.BLOCK
    blocks["a"], blocks["ino"], blocks["tgid"] = 131_072, 7, _TGID
    events = {kind: np.zeros(0, EVENT) for kind in Kind} | {Kind.BLOCK: blocks}
    scene = Scene().process(_TGID, "server").timeline()
    return replace(
        scene,
        start_ns=START_NS,
        armed_ns=START_NS,
        end_ns=end_ns,
        waits={_TGID: tuple(rows)},
        events=events,
    )


def _waits(tid: int, begin: Ints) -> Waits:
    number = len(begin)
    return Waits(
        tid=tid,
        tgid=_TGID,
        start_ns=begin,
        end_ns=begin + 400_000,
        reason=np.full(number, Wait.STORAGE, np.uint16),
        dev=np.zeros(number, np.uint32),
        ino=np.zeros(number, np.uint64),
        born_ns=0,
        dead_ns=FOREVER,
    )
