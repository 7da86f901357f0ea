"""What the client of `ttftprof bench` costs beside the server that it asks: CPU time of its own.

Streams of five words a second each, as fast as people read, out of step. The client's process does
nothing else meanwhile, so the figure is its own time by the wall's.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from ttftprof.experiment.client import Streams
from ttftprof.experiment.messages import Ask, Limits
from workloads.steady import steady_server

STREAMS = (1, 16, 64, 256)
WORDS, EVERY_S = 25, 0.2
ROUNDS = 5


@dataclass(frozen=True)
class Asked:
    """Shares of one core: the least, the median and the most of the rounds."""

    streams: int
    rounds: int
    least: float
    median: float
    most: float


def measure() -> list[Asked]:
    return [_measured(streams) for streams in STREAMS]


def _measured(streams: int) -> Asked:
    with steady_server(streams, WORDS, EVERY_S) as address:
        shares = sorted(share_of_a_core(address, streams) for _ in range(ROUNDS))
    return Asked(streams, ROUNDS, shares[0], statistics.median(shares), shares[-1])


def share_of_a_core(address: tuple[str, int], count: int) -> float:
    """From the first piece that is awaited to the last answer."""
    streams = Streams([Ask("m", "w", WORDS)] * count, address, Limits(30, 5))
    streams.send()
    wall_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
    streams.wait()
    took_ns = time.process_time_ns() - cpu_ns
    wall_ns = time.monotonic_ns() - wall_ns
    answers = streams.answers()
    assert [answer.outcome for answer in answers] == ["ok"] * count
    return took_ns / wall_ns
