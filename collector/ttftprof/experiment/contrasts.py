"""One condition against another: what changed for sure, and with which phase it began. Pure.

Two kinds of question. `cause`: why a scenario is slower than the baseline. `change`: what another
variant did to a scenario. All questions of a kind are corrected together, so that an experiment in
which nothing differs gives a false alarm no more often than alpha, however many conditions it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ttftprof.diagnosis import first_that_matters
from ttftprof.experiment.conditions import COUNTERS, Condition, Run
from ttftprof.experiment.statistics import (
    CONFIDENCE,
    Shift,
    compare,
    compare_paired,
    holm,
    runs_needed,
)
from ttftprof.model import PHASES

# A phase is blamed for growth that is sure *and* matters: of the longer wait, and in time. What
# makes a slow start slow is no small part of it; what a setting changes may be.
MATTERS_SHARE = {"cause": 0.05, "change": 0.01}
MATTERS_NS = 1_000_000
# Counters explain; what is less than this, or than a hundredth of the whole, explains nothing.
COUNTER_MATTERS = {"storage_bytes": 1e6, "storage_rate": 1e6}  # of faults: one
_GATE_SHARE = 0.8  # of alpha, for the TTFT of a cause
PAIRED_FROM = 10  # pairs; below, signed ranks have too few outcomes to answer many questions


@dataclass(frozen=True, slots=True)
class Compared:
    """One metric of two conditions. `p` is corrected for all that were asked together; `beyond`:
    sure, and enough to matter. `base_median`: of the base's runs. `detectable`: the shift that
    would have been found four times in five, with the same correction."""

    metric: str
    base_median: float
    shift: Shift
    p: float
    beyond: bool
    detectable: float | None


@dataclass(frozen=True, slots=True)
class Contrast:
    """`other` against `base`: what is different, and which phase it began with.

    `direction`: slower, faster, or same (nothing sure). `blamed`: the first phase, in order of
    time, that changed that way beyond noise and makes a good part of the change. `too_few`: how
    many runs a side it would take to tell whether there is a difference, and to name a phase; 0
    where there are enough, or it is told already.
    """

    kind: str
    base: tuple[str, str]
    other: tuple[str, str]
    metrics: tuple[Compared, ...]
    direction: str
    blamed: str | None
    too_few: tuple[int, int]
    sentence: str

    def metric(self, name: str) -> Compared | None:
        return next((m for m in self.metrics if m.metric == name), None)


Pair = tuple[Condition, Condition]


def contrasts(kind: str, pairs: Sequence[Pair], alpha: float) -> tuple[Contrast, ...]:
    """Each pair is (base, other); both have runs that count."""
    asked = [_Asked(kind, base, other, _questions(kind, base, other)) for base, other in pairs]
    times = across([one.within() for one in asked])
    counters = across([holm({n: s.p for n, s in one.counted.items()}) for one in asked])
    return tuple(
        _contrast(one, {**p, **q}, len(asked), alpha)
        for one, p, q in zip(asked, times, counters, strict=True)
    )


# -- what is asked --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Asked:
    """The metrics of two conditions that are questions; counters explain, and are a family of
    their own."""

    kind: str
    base: Condition
    other: Condition
    shifts: Mapping[str, Shift]

    @property
    def timed(self) -> dict[str, Shift]:
        return {name: shift for name, shift in self.shifts.items() if name not in COUNTERS}

    @property
    def counted(self) -> dict[str, Shift]:
        return {name: shift for name, shift in self.shifts.items() if name in COUNTERS}

    @property
    def is_gated(self) -> bool:
        """Of a change, TTFT and phases are asked together: a phase may change where the whole does
        not show it. Of a cause, the TTFT comes first, with most of alpha: where it is longer for
        sure, the phases are asked with all of alpha; else with what was left of it (a fallback
        procedure), so that a load is found also where the noise of the whole hides it."""
        return self.kind == "cause" and "ttft" in self.shifts

    def within(self) -> dict[str, float]:
        """p by metric of time, corrected within this contrast."""
        p = {name: shift.p for name, shift in self.timed.items()}
        if not self.is_gated:
            return holm(p)
        gate = min(p.pop("ttft") / _GATE_SHARE, 1.0)
        return {"ttft": gate} | {
            name: min(max(value, gate), value / (1 - _GATE_SHARE), 1.0)
            for name, value in holm(p).items()
        }

    def questions(self, contrasts: int) -> dict[str, float]:
        """{metric: by how much its p-value is corrected at most, once the gate is open}."""
        phases = sum(1 for name in self.timed if name != "ttft")
        whole = contrasts / _GATE_SHARE if self.is_gated else contrasts * len(self.timed)
        each = max(whole, phases)
        found = {name: whole if name == "ttft" else each for name in self.timed}
        return found | dict.fromkeys(self.counted, contrasts * len(self.counted))


def across(families: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """p-values that are corrected each within its family, corrected for the number of families: one
    is opened only if its smallest p is sure among those of all (Holm), and what is in it is no
    surer than that. So a false alarm in all of it is no likelier than alpha."""
    doors = holm({str(i): min(family.values()) for i, family in enumerate(families) if family})
    return [
        {name: max(p, doors[str(i)]) for name, p in family.items()}
        for i, family in enumerate(families)
    ]


def threshold_ns(kind: str, base: Condition, other: Condition) -> float:
    """Growth that is worth naming: a share of the longer wait, and some time."""
    usual = [median(values) for c in (base, other) if (values := c.values("ttft"))]
    return max(MATTERS_NS, MATTERS_SHARE[kind] * max(usual, default=0.0))


def _questions(kind: str, base: Condition, other: Condition) -> dict[str, Shift]:
    """By metric. A phase that never reached the threshold cannot have changed by it, and is no
    question: what is not asked costs the others nothing."""
    least = threshold_ns(kind, base, other)
    asked = [
        name
        for name in ("ttft", *PHASES, *COUNTERS)
        if name not in PHASES or _most(name, base, other) >= least
    ]
    shifts = {name: shift_of(name, kind, base, other) for name in asked}
    return {name: shift for name, shift in shifts.items() if shift is not None}


def shift_of(
    metric: str, kind: str, base: Condition, other: Condition, confidence: float = CONFIDENCE
) -> Shift | None:
    """One metric of two conditions. The runs of a block are pairs where the work is the same: of a
    change, not of a cause."""
    pairs = _pairs(base, other) if kind == "change" else []
    if len(pairs) < PAIRED_FROM:
        return compare(base.values(metric), other.values(metric), confidence)
    both = [
        (a.values[metric], b.values[metric])
        for a, b in pairs
        if metric in a.values and metric in b.values
    ]
    return compare_paired([a for a, _ in both], [b for _, b in both], confidence)


def _most(name: str, *conditions: Condition) -> float:
    return max((value for c in conditions for value in c.values(name)), default=0.0)


def _pairs(base: Condition, other: Condition) -> list[tuple[Run, Run]]:
    by_block = {run.block: run for run in other.counted}
    return [(run, by_block[run.block]) for run in base.counted if run.block in by_block]


# -- what came out --------------------------------------------------------------------------------


def _contrast(asked: _Asked, p: Mapping[str, float], contrasts: int, alpha: float) -> Contrast:
    base, other = asked.base, asked.other
    least = threshold_ns(asked.kind, base, other)
    questions = asked.questions(contrasts)
    metrics = tuple(
        Compared(
            metric=name,
            base_median=median(base.values(name)),
            shift=shift,
            p=p[name],
            beyond=p[name] <= alpha and abs(shift.shift.value) >= _matters(name, asked, least),
            detectable=shift.detectable(alpha / questions[name]),
        )
        for name, shift in asked.shifts.items()
    )
    direction, blamed = blame(metrics)
    whether, which = _too_few(asked, questions, alpha)
    too_few = (0 if direction != "same" else whether, 0 if blamed is not None else which)
    fewest = min(len(base.counted), len(other.counted))
    recorded = min(len(c.values(PHASES[0])) for c in (base, other))
    return Contrast(
        kind=asked.kind,
        base=(base.scenario, base.variant),
        other=(other.scenario, other.variant),
        metrics=metrics,
        direction=direction,
        blamed=blamed,
        too_few=too_few,
        sentence=_sentence(metrics, direction, blamed, too_few, (fewest, recorded)),
    )


def _matters(name: str, asked: _Asked, least_ns: float) -> float:
    """How much of a metric is worth naming."""
    if name not in COUNTERS:
        return least_ns
    most = max(median(c.values(name)) for c in (asked.base, asked.other))
    return max(COUNTER_MATTERS.get(name, 1.0), 0.01 * most)


def blame(metrics: Iterable[Compared]) -> tuple[str, str | None]:
    """(direction, phase): whether it became slower or faster beyond noise, and the first phase in
    order of time that did so and makes up a good part of all that did."""
    by_name = {m.metric: m for m in metrics}
    phases = {n: m.shift.shift.value for n, m in by_name.items() if n in PHASES and m.beyond}
    ttft = by_name.get("ttft")
    total = ttft.shift.shift.value if ttft is not None and ttft.beyond else sum(phases.values())
    if not total:
        return "same", None
    sign = 1 if total > 0 else -1
    grown = {name: sign * phases[name] for name in PHASES if sign * phases.get(name, 0) > 0}
    return ("slower" if sign > 0 else "faster"), first_that_matters(grown)


def _too_few(asked: _Asked, questions: Mapping[str, float], alpha: float) -> tuple[int, int]:
    """(runs a side to answer whether it is slower, and to name the phase); 0 where there are
    enough."""
    if "ttft" not in asked.shifts:
        needed = runs_needed(1, alpha, paired=False)
        return needed, needed
    own = asked.shifts["ttft"]
    paired = own.test == "wilcoxon"
    phases = [name for name in asked.timed if name != "ttft"] or ["ttft"]
    # Of phases those runs tell that were recorded, which may be fewer.
    worst = max(asked.shifts[name].smallest_p for name in phases)
    whether, which = (
        0 if smallest_p * count <= alpha else runs_needed(count, alpha, paired)
        for smallest_p, count in (
            (own.smallest_p, questions["ttft"]),
            (worst, max(questions[name] for name in asked.timed)),
        )
    )
    return whether, which


# -- in words -------------------------------------------------------------------------------------


def _sentence(
    metrics: Sequence[Compared],
    direction: str,
    blamed: str | None,
    too_few: tuple[int, int],
    runs: tuple[int, int],
) -> str:
    """`runs`: on the smaller side, those that count and those that tell their phases."""
    whether, which = too_few
    fewest, recorded = runs
    if whether:
        return f"too few runs to say: {fewest} on the smaller side that count, {whether} are needed"
    ttft = next(m for m in metrics if m.metric == "ttft")
    if direction == "same":
        return "no difference beyond noise" + _would_have_been_found(ttft)
    own = next((m for m in metrics if m.metric == blamed), None)
    word = "grew" if direction == "slower" else "shrank"
    if own is not None and not ttft.beyond:
        changed = f"{blamed} {word} by {_time(abs(own.shift.shift.value))}{_bounds(own.shift)}"
        whole = f"{_signed(ttft.shift.shift.value)}{_bounds(ttft.shift)}"
        return f"{changed}; in the whole, {whole}, noise hides it"
    text = f"{direction} by {_time(abs(ttft.shift.shift.value))}{_bounds(ttft.shift)}"
    if own is not None:
        return (
            f"{text}; it began with {blamed}, which {word} by {_time(abs(own.shift.shift.value))}"
        )
    if not recorded:
        return f"{text}; no recording tells with which phase"
    if which:
        return f"{text}; too few runs to name the phase: {recorded}, {which} are needed"
    return f"{text}; no phase alone changed beyond noise"


def _would_have_been_found(ttft: Compared) -> str:
    if ttft.detectable is None:
        return ""
    share = f" ({ttft.detectable / ttft.base_median * 100:.0f} %)" if ttft.base_median else ""
    return f"; one of {_time(ttft.detectable)}{share} would most likely have been found"


def _bounds(shift: Shift) -> str:
    """` (1.2 s to 1.4 s)`, with signs where the interval holds 0."""
    interval = shift.shift.interval
    if interval is None:
        return ""
    if interval.low * interval.high <= 0:
        return f" ({_signed(interval.low)} to {_signed(interval.high)})"
    low, high = sorted((abs(interval.low), abs(interval.high)))
    return f" ({_time(low)} to {_time(high)})"


def _time(ns: float) -> str:
    return f"{ns / 1e9:.2f} s" if ns >= 1e9 else f"{ns / 1e6:.1f} ms"


def _signed(ns: float) -> str:
    return f"{'−' if ns < 0 else '+'}{_time(abs(ns))}"


def amount(metric: str, value: float) -> str:
    """A change of a metric, in its unit, with its sign."""
    if metric in ("major_faults", "minor_faults"):
        return f"{value:+,.0f}"
    if metric in ("storage_bytes", "storage_rate"):
        return f"{value / 1e6:+,.1f} MB" + ("/s" if metric == "storage_rate" else "")
    return _signed(value)
