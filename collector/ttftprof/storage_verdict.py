"""What the measured ceilings of a path mean: the model beside the figures, a verdict, what to try.

Pure. Every figure in a sentence was measured on the path in question; a way is only called better
if it is so by more than these measurements scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ttftprof.ceilings import KIB, MIB, Measured, Way, describe
from ttftprof.clock import NS_PER_S
from ttftprof.model import Action
from ttftprof.reports import scale
from ttftprof.residency import CacheState
from ttftprof.stack import Stack

CLEARLY = 1.5  # a present way is a fault of the pattern if another is that much faster
BETTER = 1.25  # the least gain worth advice
REACHES = 0.85  # of the ceiling: as good as at it
LINE_REACHED = 0.8  # of a link's line rate: what protocol headers leave
CACHED = 0.99

PLAIN, MAPPED = Way("read", 1, MIB), Way("mmap", 1, None)

VERDICTS = ("pattern", "hardware or link", "at the ceiling", "cache worked", "unknown")


@dataclass(frozen=True, slots=True)
class Conclusion:
    """`verdict` is one of VERDICTS; `ceiling` the fastest cell that read from storage."""

    verdict: str
    ceiling: Measured | None
    sentences: tuple[str, ...]
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, slots=True)
class Seen:
    """What a conclusion is drawn from."""

    stack: Stack
    size_bytes: int
    before: CacheState
    results: Sequence[Measured]

    def rate(self, way: Way) -> float | None:
        """The measured rate of a way, None if it has none."""
        return next((m.bytes_per_second for m in self.results if m.way == way), None)


def ceiling_of(results: Sequence[Measured]) -> Measured | None:
    """The fastest sequential cell with the settings as they were found."""
    found = [m for m in results if m.way.method in ("read", "direct") and m.bytes_per_second]
    found = [m for m in found if m.way.read_ahead_kb is None]
    return max(found, key=lambda m: m.bytes_per_second or 0.0, default=None)


def model_rate(measured: Measured, results: Sequence[Measured]) -> float | None:
    """`request size × depth / latency`, in bytes per second.

    For reads the size and depth are the program's and the latency the measured median. For mmap
    they are one readahead at a time, each taking the latency of a small random read plus its
    bytes at the ceiling's rate; None where one of these is not known.
    """
    way = measured.way
    if way.method != "mmap":
        if not measured.latency_p50_ns or way.request_bytes is None:
            return None
        return way.request_bytes * way.streams / measured.latency_p50_ns * NS_PER_S
    small = next((m for m in results if m.way.method == "random"), None)
    ceiling = ceiling_of(results)
    if not measured.read_ahead_kb or small is None or not small.latency_p50_ns or ceiling is None:
        return None
    size = measured.read_ahead_kb * KIB
    return size / (small.latency_p50_ns / NS_PER_S + size / (ceiling.bytes_per_second or 1.0))


def judge(seen: Seen) -> Conclusion:
    """The verdict on a path's storage, from its ceilings."""
    ceiling = ceiling_of(seen.results)
    if ceiling is None or not ceiling.bytes_per_second:
        return _without_figures(seen)
    best = ceiling.bytes_per_second
    sentences = [_ceiling_sentence(ceiling, best, seen.stack), _load_times(seen, best)]
    plain, mapped = seen.rate(PLAIN), seen.rate(MAPPED)
    if plain and plain >= REACHES * best:
        sentences.append(
            "One stream of 1 MiB reads reaches the ceiling: for a program that reads so, the way "
            "it reads is not the limit."
        )
    slow = [rate for rate in (plain, mapped) if rate and rate * CLEARLY < best]
    sentences += _slow_sentences(plain, mapped, best)
    sentences += _model_sentence(seen)
    return Conclusion(_verdict(bool(slow), best, seen), ceiling, tuple(sentences), _actions(seen))


def _verdict(slow: bool, best: float, seen: Seen) -> str:
    if slow:
        return "pattern"
    line = seen.stack.line_rate
    return "hardware or link" if line and best >= LINE_REACHED * line[0] else "at the ceiling"


def _without_figures(seen: Seen) -> Conclusion:
    if seen.before.share >= CACHED:
        share = scale.percent(seen.before.share)
        text = (
            f"{share} of it is in the page cache: a load now reads (almost) nothing from storage. "
            "If it is slow all the same, storage is not why."
        )
        return Conclusion("cache worked", None, (text,))
    return Conclusion("unknown", None, ("No cell gave a figure to judge by.",))


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


def _slow_sentences(plain: float | None, mapped: float | None, best: float) -> list[str]:
    found = []
    for name, rate in (("mmap as it is set now", mapped), ("one stream of 1 MiB reads", plain)):
        if rate and rate * CLEARLY < best:
            found.append(
                f"{name[0].upper()}{name[1:]} gets {scale.rate(rate)}, "
                f"{scale.percent(rate / best)} of the ceiling: the requests are too small or too "
                "few at a time for this path."
            )
    return found


def _model_sentence(seen: Seen) -> list[str]:
    mapped = next((m for m in seen.results if m.way == MAPPED), None)
    small = next((m for m in seen.results if m.way.method == "random"), None)
    if mapped is None or small is None or not mapped.bytes_per_second:
        return []
    model = model_rate(mapped, seen.results)
    if model is None or not mapped.read_ahead_kb:
        return []
    return [
        f"Model of mmap: {scale.block(mapped.read_ahead_kb * KIB)} (the readahead) × 1 at a time / "
        f"({scale.duration(small.latency_p50_ns)} latency + its bytes at the ceiling) = "
        f"{scale.rate(model)}; measured {scale.rate(mapped.bytes_per_second)}."
    ]


# -- what to try -----------------------------------------------------------------------------------


def _actions(seen: Seen) -> tuple[Action, ...]:
    """Changes that were measured to help, the biggest gain first; then what is left to measure."""
    found = [*_readahead_actions(seen), *_read_instead(seen), *_more_at_once(seen)]
    found.sort(key=lambda action: -(action.expected_gain_ns or 0))
    return (*found, *_left_to_measure(seen))


def _gain_ns(seen: Seen, now: float, then: float) -> int:
    return round((seen.size_bytes / now - seen.size_bytes / then) * NS_PER_S)


def _again(seen: Seen, extra: str = "") -> str:
    return f"ttftprof storage {extra}{seen.stack.path}"


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
        f"a loader that reads by {describe(best.way)} gets {scale.rate(best.bytes_per_second)} "
        f"here; one stream of 1 MiB reads gets {scale.rate(plain)}"
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
