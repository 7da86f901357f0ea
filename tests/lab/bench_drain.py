"""What a record costs once the kernel has written it: CPU time to drain it, bytes to keep it.

A storm of context switches on the real kernel, every wait a record; the recorder's own ring and
writer take them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.bench_workloads import storms
from ttftprof.events import Records
from ttftprof.kernel.session import ProbeSession, Settings
from ttftprof.recorder import merge_held
from ttftprof.recording import Writer

ROUNDS = 8


@dataclass(frozen=True)
class Drained:
    """`drained_per_cpu_s`: out of the ring; `kept_per_cpu_s`: drained, packed and written."""

    records: int
    drained_per_cpu_s: float
    kept_per_cpu_s: float
    bytes_a_record: float
    lost: int


def measure(folder: Path) -> Drained:
    session = ProbeSession(Settings(short_wait_ns=0))
    taken: list[Records] = []
    drain_ns = 0
    with storms(folder) as storm:
        try:
            session.load()
            session.attach()
            session.seed([storm.pid])
            for _ in range(ROUNDS):
                storm.run("switch_storm")
                began = time.process_time_ns()
                taken.append(session.events.drain())
                drain_ns += time.process_time_ns() - began
            lost = session.lost()[0]
        finally:
            session.close()
    records = sum(map(len, taken))
    path = folder / "drained.ttft"
    began = time.process_time_ns()
    writer = Writer(path)
    for part in taken:
        for batch in np.array_split(merge_held(part), max(len(part) // 10_000, 1)):
            writer.add_batch("events", batch)
        writer.commit()
    kept_ns = time.process_time_ns() - began
    writer.close(complete=True)
    return Drained(
        records=records,
        drained_per_cpu_s=records / drain_ns * 1e9,
        kept_per_cpu_s=records / (drain_ns + kept_ns) * 1e9,
        bytes_a_record=path.stat().st_size / records,
        lost=lost,
    )
