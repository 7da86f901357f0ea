"""Timelines of any size, made in memory: for level of detail and for benchmarks."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from ttftprof.events import EVENT, Kind, Records, Wait
from ttftprof.recording import Reader
from ttftprof.timeline import Timeline, build
from unit.recordings import Scene

START_NS = 1_000_000_000_000
_TGID = 4242


def busy_timeline(threads: int, waits: int) -> Timeline:
    """One process whose threads wait for storage `waits` times each, 1 ms apart, 0.4 ms long."""
    scene = Scene().process(_TGID, "server")
    with tempfile.TemporaryDirectory() as folder:
        path = scene.write(Path(folder) / "busy.ttft", more=[("events", _events(threads, waits))])
        with Reader(path) as reader:
            timeline = build(reader)
    end_ns = START_NS + waits * 1_000_000
    return replace(timeline, start_ns=START_NS, armed_ns=START_NS, end_ns=end_ns)


def _events(threads: int, waits: int) -> Records:
    """Each moment one wait of every thread, and one request to a disk."""
    events = np.zeros((waits, threads + 1), EVENT)
    events["start_ns"] = START_NS + np.arange(waits)[:, None] * 1_000_000
    events["duration_ns"], events["tgid"] = 400_000, _TGID
    events["kind"], events["flags"] = Kind.OFFCPU, Wait.STORAGE
    events["tid"] = _TGID + np.arange(threads + 1)
    blocks = events[:, threads]
    blocks["kind"], blocks["flags"], blocks["tid"] = Kind.BLOCK, 0, 0
    blocks["a"], blocks["ino"] = 131_072, 7
    return events.reshape(-1)
