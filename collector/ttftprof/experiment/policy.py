"""What to change in how models are served, each with the gain that this experiment measured. Pure.

Nothing is advised that was not measured here: a gain is a difference of two conditions, with its
interval, and one that is not beyond noise, corrected for all that could be advised, is not named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ttftprof.experiment.conditions import Condition
from ttftprof.experiment.contrasts import Contrast
from ttftprof.experiment.plan import Plan, variants_of
from ttftprof.experiment.statistics import Interval, compare, holm
from ttftprof.experiment.verdict import Findings


@dataclass(frozen=True, slots=True)
class Advice:
    """`gain_ns` of TTFT each time the condition named in `when` is met; `interval` 95 %.

    `cost`: what it takes, as far as it was measured. `rests_on`: the two conditions compared.
    """

    change: str
    when: str
    gain_ns: float
    interval: Interval
    cost: str
    rests_on: tuple[str, str]


def advise(plan: Plan, findings: Findings) -> list[Advice]:
    """The largest gain first."""
    found = [*_of_scenarios(plan, findings), *_of_variants(findings)]
    return sorted(found, key=lambda advice: -advice.gain_ns)


# (slow scenario, quick scenario, what turns one into the other, when it counts, what it costs)
_RULES = (
    (
        "cold-switch",
        "re-switch",
        "keep the model's file in the page cache (enough free memory, or read it after boot; "
        "vmtouch -l pins it)",
        "a switch finds the file not cached",
        "file",
    ),
    (
        "cold-switch",
        "resident",
        "keep both models in memory at once",
        "the other model answered last, and this one's file is not cached",
        "memory",
    ),
    (
        "re-switch",
        "resident",
        "keep both models in memory at once",
        "the other model answered last",
        "memory",
    ),
    (
        "re-switch",
        "dual-resident",
        "keep both models in memory at once (measured so)",
        "the other model answered last",
        "memory",
    ),
    (
        "idle-expired",
        "resident",
        "let the model stay loaded when idle (Ollama: OLLAMA_KEEP_ALIVE=-1; llama-swap: ttl: 0)",
        "nobody asked for longer than the server's idle time",
        "memory",
    ),
    (
        "restart",
        "resident",
        "do not restart the server to switch: use a router that keeps running",
        "the server is restarted",
        "",
    ),
    (
        "cold-restart",
        "restart",
        "read the model's file once after boot, before the server starts",
        "a restart finds the file not cached",
        "file",
    ),
    (
        "long-prompt",
        "resident",
        "limit the prompt's length, or keep its beginning the same so that the prompt cache helps",
        "the prompt is as long as the long one here",
        "",
    ),
)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What turns a slow condition into a quick one, if that one is quicker."""

    slow: Condition
    quick: Condition
    change: str
    when: str
    cost: str


def _of_scenarios(plan: Plan, findings: Findings) -> Iterator[Advice]:
    first = variants_of(plan)[0].name
    by_name = {c.scenario: c for c in findings.conditions if c.variant == first}
    found = [
        _Candidate(by_name[slow], by_name[quick], change, when, cost)
        for slow, quick, change, when, cost in _RULES
        if slow in by_name and quick in by_name
    ]
    yield from _sure([*found, *_of_concurrency(by_name)], plan.alpha)


def _of_concurrency(by_name: dict[str, Condition]) -> Iterator[_Candidate]:
    """Against the fewest streams that were tried."""
    ladder = [c for name, c in by_name.items() if name.startswith("concurrency-")]
    ladder.sort(key=lambda c: int(c.scenario.rpartition("-")[2]))
    for busy in ladder[1:]:
        streams = busy.scenario.rpartition("-")[2]
        fewest = ladder[0].scenario.rpartition("-")[2]
        change = f"admit at most {fewest} request(s) at once, or give the server more slots"
        yield _Candidate(busy, ladder[0], change, f"{streams} requests come at once", "")


def _sure(candidates: Sequence[_Candidate], alpha: float) -> Iterator[Advice]:
    """Those that gain for sure, corrected for having looked at all of them."""
    shifts = [compare(c.quick.values("ttft"), c.slow.values("ttft")) for c in candidates]
    p = holm({str(i): shift.p for i, shift in enumerate(shifts) if shift is not None})
    for i, (one, shift) in enumerate(zip(candidates, shifts, strict=True)):
        if shift is None or shift.shift.interval is None or p[str(i)] > alpha:
            continue
        if shift.shift.interval.low > 0:
            yield Advice(
                change=one.change,
                when=one.when,
                gain_ns=shift.shift.value,
                interval=shift.shift.interval,
                cost=_cost(one.slow, one.cost),
                rests_on=(f"{one.slow.scenario} against {one.quick.scenario}", one.slow.variant),
            )


def _cost(condition: Condition, kind: str) -> str:
    """Memory, by the size of the weights that were loaded."""
    sizes = [
        run.raw["digest"]["weights_bytes"]
        for run in condition.counted
        if run.raw.get("digest") and run.raw["digest"].get("weights_bytes")
    ]
    if not kind or not sizes:
        return ""
    size = f"{max(sizes) / 1e6:,.0f} MB"
    if kind == "file":
        return f"{size} of page cache"
    return f"about {size} of memory for the weights, and the context's beside them"


def _of_variants(findings: Findings) -> Iterator[Advice]:
    """A setting that helped."""
    for change in findings.changes:
        yield from _adopted(change)


def _adopted(change: Contrast) -> Iterator[Advice]:
    ttft = change.metric("ttft")
    if ttft is None or not ttft.beyond or ttft.shift.shift.interval is None:
        return  # a phase may have become faster, and the whole not
    interval = ttft.shift.shift.interval
    if interval.high >= 0:
        return
    yield Advice(
        change=f"adopt {change.other[1]}",
        when=change.other[0],
        gain_ns=-ttft.shift.shift.value,
        interval=Interval(-interval.high, -interval.low),
        cost="",
        rests_on=(f"{change.other[1]} against {change.base[1]}", change.other[0]),
    )
