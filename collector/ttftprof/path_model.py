"""What the requests of a recording say of the path they took: a delay, and the rate of a link.

Pure. A path may answer in order or everyone at once, one request or many at a time; so only what
holds for all is concluded. A request that was under way alone took the delay and its bytes' time.
What was begun and answered within a time has crossed the link in it: no link is slower than that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ttftprof.events import Records
from ttftprof.grouping import distinct

TOGETHER = 0.2  # of the gap between two answers: reads handed over closer than this are one burst
PEAK_BYTES = 8 << 20  # less than this may have lain in some buffer
BEGINNINGS = 64  # of a span: one that begins a part later holds all but that part
REFUTED = 1.25  # times an estimate of the link's rate: what went faster shows it to be wrong
IN_LINE = 2.0  # times what it takes alone: a request that took so long stood behind others


@dataclass(frozen=True, slots=True)
class Fit:
    """A path as a delay and a link: a read's bytes cross the link one read after the other, and
    its answer comes `delay_ns` later. The rate is None if nothing tells it."""

    delay_ns: float
    bytes_per_second: float | None


_TIMED = np.dtype([("start_ns", "<i8"), ("end_ns", "<i8"), ("got_bytes", "<i8")])


def answered(reads: Records) -> Records:
    """What `fit` needs of some reads (`remote.READ`): those that were answered."""
    usable = ~reads["unanswered"] & ~reads["failed"] & (reads["got_bytes"] > 0)
    return timed(*(reads[name][usable] for name in _TIMED.names or ()))


def timed(start_ns: Records, end_ns: Records, got_bytes: Records) -> Records:
    """Answered reads as `fit` takes them: of a long recording they are a quarter of it."""
    found = np.empty(len(start_ns), _TIMED)
    found["start_ns"], found["end_ns"], found["got_bytes"] = start_ns, end_ns, got_bytes
    return found


def fit(answered: Records) -> Fit | None:
    """The delay and rate that explain the times of some answered reads; medians, so that a stray
    delay does not matter. None without one."""
    if not len(answered):
        return None
    answered = np.take(answered, np.argsort(answered["start_ns"], kind="stable"))
    alone = _alone(answered)
    rate = _burst_rate(answered) or _rate_by_size(alone)
    peak = _peak(answered)
    if peak is not None and (rate is None or peak.bytes_per_second > REFUTED * rate):
        rate = peak.bytes_per_second if _stood_in_line(peak, alone) else None
    elif peak is not None and rate is not None:
        rate = max(rate, peak.bytes_per_second)
    return Fit(_delay_ns(alone if len(alone) else _on_idle_path(answered), rate), rate)


def _delay_ns(lone: Records, rate: float | None) -> float:
    took = _took(lone)
    if rate is None:
        return float(np.median(took))
    return max(float(np.median(took - lone["got_bytes"] / rate * 1e9)), 0.0)


def _took(reads: Records) -> Records:
    took: Records = (reads["end_ns"] - reads["start_ns"]).astype(np.float64)
    return took


def _busy_until(answered: Records) -> Records:
    """Until when the path was busy with the reads before each."""
    until: Records = np.maximum.accumulate(np.concatenate([[0], answered["end_ns"][:-1]]))
    return until


def _on_idle_path(answered: Records) -> Records:
    """Those that found nothing under way; others may have joined them."""
    found: Records = answered[answered["start_ns"] >= _busy_until(answered)]
    return found


def _alone(answered: Records) -> Records:
    """Those beside which no other was under way."""
    found_idle = answered["start_ns"] >= _busy_until(answered)
    left_idle = np.append(answered["start_ns"][1:] >= answered["end_ns"][:-1], True)
    found: Records = answered[found_idle & left_idle]
    return found


def _burst_rate(answered: Records) -> float | None:
    """In a burst the link is the bottleneck: bytes over the gap to the answer before."""
    by_end = np.take(answered, np.argsort(answered["end_ns"], kind="stable"))
    gap = np.diff(by_end["end_ns"]).astype(np.float64)
    apart = np.abs(np.diff(by_end["start_ns"])).astype(np.float64)
    together = by_end["start_ns"][1:] < by_end["end_ns"][:-1]
    burst = together & (gap > 0) & (apart < TOGETHER * gap)
    if np.count_nonzero(burst) < 3:
        return None
    return float(np.median(by_end["got_bytes"][1:][burst] / gap[burst])) * 1e9


def _rate_by_size(alone: Records) -> float | None:
    """The slope of time over size, where lone reads of different sizes show one."""
    sizes = distinct(alone["got_bytes"])
    if len(sizes) < 2:
        return None
    medians = [np.median(_took(alone[alone["got_bytes"] == size])) for size in sizes]
    slope = float(np.polyfit(sizes.astype(np.float64), medians, 1)[0])
    return 1e9 / slope if slope > 0 else None


@dataclass(frozen=True, slots=True)
class _Peak:
    """The reads that brought the most bytes for the time from the first one's beginning to the
    last one's answer."""

    reads: Records
    bytes_per_second: float


def _peak(answered: Records) -> _Peak | None:
    """Over spans of `PEAK_BYTES` and its doubles, which begin `BEGINNINGS` times in their length
    or with every read; None if fewer bytes came in all."""
    came = np.concatenate([[0], np.cumsum(answered["got_bytes"])])
    until = np.maximum.accumulate(answered["end_ns"])
    best, size = None, PEAK_BYTES
    while size <= came[-1]:
        reads = len(answered) * size // int(came[-1])  # in such a span, about
        first = np.arange(0, len(answered), max(reads // BEGINNINGS, 1))
        last = np.searchsorted(came, came[first] + size)
        first, last = first[last < len(came)], last[last < len(came)]
        spent = np.maximum(until[last - 1] - answered["start_ns"][first], 1)
        rates = (came[last] - came[first]) / spent
        at = int(np.argmax(rates))
        if best is None or rates[at] * 1e9 > best.bytes_per_second:
            best = _Peak(answered[first[at] : last[at]], float(rates[at]) * 1e9)
        size *= 2
    return best


def _stood_in_line(peak: _Peak, alone: Records) -> bool:
    """Whether the reads of a peak took longer than alone: then more of them at once would have
    brought no more, and the rate is the link's. Alone: as those of their size did, or else by the
    delay of small ones and this rate. Unknown (False) where none was alone."""
    if not len(alone):
        return False
    size = float(np.median(peak.reads["got_bytes"]))
    as_big = alone[alone["got_bytes"] >= size / 2]
    if len(as_big):
        alone_ns = float(np.median(_took(as_big)))
    else:
        rate = peak.bytes_per_second
        alone_ns = _delay_ns(alone, rate) + size / rate * 1e9
    return float(np.median(_took(peak.reads))) >= IN_LINE * alone_ns
