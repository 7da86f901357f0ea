"""What the measured ceilings of a path mean: the model beside the figures, a verdict, what to try.

Pure. Every figure in a sentence was measured on the path in question; a way is only called better
if it is so by more than these measurements scatter.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ttftprof import scale
from ttftprof.ceilings import KIB, MIB, Measured, Way, describe
from ttftprof.clock import NS_PER_S
from ttftprof.model import Action
from ttftprof.residency import CacheState
from ttftprof.stack import Stack

CLEARLY = 1.5  # a present way is a fault of the pattern if another is that much faster
BETTER = 1.25  # the least gain worth advice
REACHES = 0.85  # of the ceiling: as good as at it
LINE_REACHED = 0.8  # of a link's line rate: what protocol headers leave
CACHED = 0.99

PLAIN, MAPPED = Way("read", 1, MIB), Way("mmap", 1, None)

BRIEF_NS = 20_000_000  # a cell that was over sooner says little
# Less than this of both, over all sequential cells, is no evidence: ramps and bursts fill it.
ENOUGH_BYTES, ENOUGH_NS = 16 * MIB, 100_000_000
WAITS = 0.5  # share of a way's time spent waiting, from which storage and not the CPU holds it

VERDICTS = (
    "pattern",
    "hardware or link",
    "at the ceiling",
    "not storage",
    "cache worked",
    "unknown",
)


@dataclass(frozen=True, slots=True)
class Conclusion:
    """`verdict` is one of VERDICTS; `ceiling` the fastest cell that read from storage, None where
    too little was read to call it one.

    Confidence is high, or low where a deciding cell was over too soon.
    """

    verdict: str
    confidence: str
    ceiling: Measured | None
    sentences: tuple[str, ...]
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, slots=True)
class Seen:
    """What a conclusion is drawn from. `evicted`: parts that were cached were measured too."""

    stack: Stack
    size_bytes: int
    before: CacheState
    results: Sequence[Measured]
    evicted: bool = False

    def rate(self, way: Way) -> float | None:
        """The measured rate of a way, None if it has none."""
        cell = self.cell(way)
        return cell.bytes_per_second if cell else None

    def cell(self, way: Way) -> Measured | None:
        return next((m for m in self.results if m.way == way and m.bytes_per_second), None)


def ceiling_of(results: Sequence[Measured]) -> Measured | None:
    """The fastest sequential cell with the settings as they were found."""
    found = [m for m in results if m.way.method in ("read", "direct") and m.bytes_per_second]
    found = [m for m in found if m.way.read_ahead_kb is None]
    return max(found, key=lambda m: m.bytes_per_second or 0.0, default=None)


def is_brief(measured: Measured) -> bool:
    return measured.elapsed_ns < BRIEF_NS


def waiting_share(measured: Measured) -> float | None:
    """Share of its time that a single reader waited, the rest being CPU; None if not known."""
    if measured.cpu_ns is None or measured.way.streams != 1 or not measured.elapsed_ns:
        return None
    return max(0.0, 1 - measured.cpu_ns / measured.elapsed_ns)


def model_rate(measured: Measured, results: Sequence[Measured]) -> float | None:
    """`request size × depth / latency`, in bytes per second; None where one is not known.

    Size and depth are the program's for O_DIRECT and random reads; for buffered reads and mmap,
    where the kernel makes the requests, one readahead (or the program's request, if that is
    bigger) per stream. Latency is the mean of a small random read plus the request's bytes at the
    ceiling's rate; the model gives no more than the ceiling.
    """
    way = measured.way
    latency_ns = small_latency_ns(results)
    ceiling = ceiling_of(results)
    size = max(
        measured.read_ahead_kb * KIB if measured.read_ahead_kb else 0, way.request_bytes or 0
    )
    if way.method == "cached" or not measured.bytes_per_second or not size:
        return None
    if latency_ns is None or ceiling is None or not ceiling.bytes_per_second:
        return None
    best = ceiling.bytes_per_second
    return min(size * way.streams / (latency_ns / NS_PER_S + size / best), best)


def small_latency_ns(results: Sequence[Measured]) -> int | None:
    """Mean latency of a random 4 KiB read: of all its waits, since rates are made by the mean."""
    return next((m.latency_mean_ns for m in results if m.way.method == "random"), None)


def judge(seen: Seen) -> Conclusion:
    """The verdict on a path's storage, from its ceilings."""
    ceiling = ceiling_of(seen.results)
    if ceiling is None or not ceiling.bytes_per_second:
        return _without_figures(seen)
    if is_thin(seen.results):
        return _too_little(seen)
    best = ceiling.bytes_per_second
    sentences = [_ceiling_sentence(ceiling, best, seen.stack), _load_times(seen, best)]
    plain = seen.rate(PLAIN)
    if plain and plain >= REACHES * best:
        sentences.append(
            "One stream of 1 MiB reads reaches the ceiling: for a program that reads so, the way "
            "it reads is not the limit."
        )
    deciding = [cell for cell in (seen.cell(PLAIN), seen.cell(MAPPED)) if cell is not None]
    slow = [cell for cell in deciding if (cell.bytes_per_second or 0.0) * CLEARLY < best]
    sentences += [_slow_sentence(cell, best) for cell in slow]
    sentences += _model_sentence(seen)
    brief = any(is_brief(cell) for cell in (*deciding, ceiling))
    if brief:
        sentences.append(
            "The deciding measurements were over within 20 ms, so the figures scatter; a bigger "
            "file would give surer ones."
        )
    return Conclusion(
        verdict=_verdict(slow, best, seen),
        confidence="low" if brief else "high",
        ceiling=ceiling,
        sentences=tuple(sentences),
        actions=_actions(seen),
    )


def is_thin(results: Sequence[Measured]) -> bool:
    """Whether there is too little to judge by: one way of reading, which nothing can be compared
    with, or a few bytes in a moment."""
    read = [m for m in _sequential(results) if m.bytes_per_second]
    few = sum(m.bytes_read for m in read) < ENOUGH_BYTES
    return len(read) < 2 or (few and sum(m.elapsed_ns for m in read) < ENOUGH_NS)


def _sequential(results: Sequence[Measured]) -> list[Measured]:
    return [m for m in results if m.way.method in ("read", "direct", "mmap")]


def _too_little(seen: Seen) -> Conclusion:
    read = [m for m in _sequential(seen.results) if m.bytes_per_second]
    came = scale.size(sum(m.bytes_read for m in read))
    ways = "one measurement" if len(read) == 1 else f"{len(read)} measurements"
    text = f"Only {came} could be read from storage, in {ways}: too little to judge it by."
    if seen.before.cached_pages and not seen.evicted:
        change = (
            f"measure the {scale.percent(seen.before.share)} that is in the page cache too: "
            "it is dropped for that and read back"
        )
        action = Action(change, None, _again(seen, "--evict "))
    else:
        change = "measure a bigger file on the same storage, or give it more time (--max-seconds)"
        action = Action(change, None, "ttftprof storage FILE")
    return Conclusion("unknown", "low", None, (text,), (action,))


def _verdict(slow: Sequence[Measured], best: float, seen: Seen) -> str:
    if any(_waits(cell) for cell in slow):
        return "pattern"
    if slow:
        return "not storage"
    line = seen.stack.line_rate
    return "hardware or link" if line and best >= LINE_REACHED * line[0] else "at the ceiling"


def _waits(cell: Measured) -> bool:
    """Whether storage holds a slow way up, rather than the CPU's own work."""
    share = waiting_share(cell)
    return share is None or share >= WAITS


def _without_figures(seen: Seen) -> Conclusion:
    if seen.before.share >= CACHED:
        share = scale.percent(seen.before.share)
        text = (
            f"{share} of it is in the page cache: a load now reads (almost) nothing from storage. "
            "If it is slow all the same, storage is not why."
        )
        return Conclusion("cache worked", "high", None, (text,))
    return Conclusion("unknown", "low", None, ("No cell gave a figure to judge by.",))


def _ceiling_sentence(ceiling: Measured, best: float, stack: Stack) -> str:
    text = f"The most this path gave is {scale.rate(best)} ({describe(ceiling.way)})"
    line = stack.line_rate
    if line is None:
        return text + "; no link on the way states its rate."
    share = best / line[0]
    narrowest = f"the narrowest link, {line[1]} ({scale.rate(line[0])})"
    if share > 1:
        return f"{text}: more than {narrowest} carries, so a cache behind it answered."
    return f"{text}, {scale.percent(share)} of the line rate of {narrowest}."


def _load_times(seen: Seen, best: float) -> str:
    """What reading the whole file takes; the bound by which a slow load acquits storage."""
    size = seen.size_bytes
    ways = [
        (name, rate)
        for name, rate in (
            ("by mmap as it is set now", seen.rate(MAPPED)),
            ("by 1 MiB reads", seen.rate(PLAIN)),
            ("at the most it gave", best),
        )
        if rate
    ]
    times = ", ".join(f"{scale.duration(round(size / r * NS_PER_S))} {name}" for name, r in ways)
    return (
        f"All {scale.size(size)} from storage take {times}; what a cold load takes beyond that is "
        "not storage."
    )


def _slow_sentence(cell: Measured, best: float) -> str:
    name = "Mmap as it is set now" if cell.way == MAPPED else "One stream of 1 MiB reads"
    rate = cell.bytes_per_second or 0.0
    text = f"{name} gets {scale.rate(rate)}, {scale.percent(rate / best)} of the ceiling"
    share = waiting_share(cell)
    if _waits(cell):
        waited = "" if share is None else f" and waits {scale.percent(share)} of its time"
        return f"{text}{waited}: its requests are too small or too few at a time for this path."
    return (
        f"{text}, but {scale.percent(1 - (share or 0.0))} of its time is CPU work (page faults, "
        "copying): that is not storage."
    )


def _model_sentence(seen: Seen) -> list[str]:
    mapped, latency_ns = seen.cell(MAPPED), small_latency_ns(seen.results)
    model = model_rate(mapped, seen.results) if mapped else None
    if mapped is None or model is None or not mapped.read_ahead_kb:
        return []
    return [
        f"Model of mmap: {scale.block(mapped.read_ahead_kb * KIB)} (the readahead) × 1 at a time / "
        f"({scale.duration(latency_ns)} latency + its bytes at the ceiling) = "
        f"{scale.rate(model)}; measured {scale.rate(mapped.bytes_per_second)}."
    ]


# -- what to try -----------------------------------------------------------------------------------


def _actions(seen: Seen) -> tuple[Action, ...]:
    """Changes that were measured to help, the biggest gain first; then what is left to measure.

    Cells that were over too soon advise nothing.
    """
    seen = replace(seen, results=[m for m in seen.results if not is_brief(m)])
    found = [*_readahead_actions(seen), *_read_instead(seen), *_more_at_once(seen)]
    found.sort(key=lambda action: -(action.expected_gain_ns or 0))
    return (*found, *_left_to_measure(seen))


def _gain_ns(seen: Seen, now: float, then: float) -> int:
    return round((seen.size_bytes / now - seen.size_bytes / then) * NS_PER_S)


def _again(seen: Seen, extra: str = "") -> str:
    return f"ttftprof storage {extra}{shlex.quote(seen.stack.path)}"


def _readahead_actions(seen: Seen) -> list[Action]:
    layer = seen.stack.readahead
    if layer is None or layer.read_ahead_file is None:
        return []
    actions = []
    for name, present in (("mmap", MAPPED), ("1 MiB reads", PLAIN)):
        now = seen.rate(present)
        tried = _tried(seen, present)
        if not now or not tried:
            continue
        most = max(tried.values())
        value = min(kb for kb, rate in tried.items() if rate >= 0.95 * most)
        if tried[value] < BETTER * now:
            continue
        change = (
            f"the best readahead measured here for {name} is {value} KiB: "
            f"{scale.rate(tried[value])} instead of {scale.rate(now)} with "
            f"{layer.read_ahead_kb} KiB. Set it with: echo {value} > {layer.read_ahead_file} "
            "(until the next mount or boot; files opened from then on use it)"
        )
        actions.append(Action(change, _gain_ns(seen, now, tried[value]), _again(seen)))
    return actions


def _tried(seen: Seen, present: Way) -> dict[int, float]:
    """{readahead in KiB: rate} of the sweep's cells of one method."""
    return {
        m.way.read_ahead_kb: m.bytes_per_second
        for m in seen.results
        if m.way.read_ahead_kb and m.bytes_per_second and m.way.method == present.method
    }


def _read_instead(seen: Seen) -> list[Action]:
    mapped, plain = seen.rate(MAPPED), seen.rate(PLAIN)
    if not mapped or not plain or plain < BETTER * mapped:
        return []
    change = (
        f"load without mmap (llama-server: --no-mmap): 1 MiB reads get {scale.rate(plain)} here, "
        f"mmap {scale.rate(mapped)}"
    )
    return [Action(change, _gain_ns(seen, mapped, plain), "record a switch with that option")]


def _more_at_once(seen: Seen) -> list[Action]:
    """Several streams, bigger requests or O_DIRECT, where they beat one stream of 1 MiB reads."""
    plain = seen.rate(PLAIN)
    best = ceiling_of(seen.results)
    if not plain or best is None or not best.bytes_per_second:
        return []
    if best.bytes_per_second < BETTER * plain:
        return []
    change = (
        f"a loader that keeps this path as busy as {describe(best.way)} does gets "
        f"{scale.rate(best.bytes_per_second)} here; one stream of 1 MiB reads gets "
        f"{scale.rate(plain)}"
    )
    gain = _gain_ns(seen, plain, best.bytes_per_second)
    return [Action(change, gain, "record a switch with that loader")]


def _left_to_measure(seen: Seen) -> list[Action]:
    """Other readaheads, if the present one seems to hold mmap back and none was tried."""
    mapped, best = seen.rate(MAPPED), ceiling_of(seen.results)
    layer = seen.stack.readahead
    if not mapped or best is None or _tried(seen, MAPPED) or layer is None:
        return []
    if layer.read_ahead_file is None or mapped * CLEARLY >= (best.bytes_per_second or 0.0):
        return []
    change = "measure whether another readahead helps mmap (it is put back afterwards)"
    return [Action(change, None, _again(seen, "--try-readahead 128,1024,4096 "))]
