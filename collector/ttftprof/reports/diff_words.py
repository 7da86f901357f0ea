"""What a comparison says in words and rounded numbers, for every output alike.

Both tables are rounded before they are subtracted, so the printed differences add up.
"""

from __future__ import annotations

from ttftprof import diagnosis, scale
from ttftprof.diff import Comparison, Wait
from ttftprof.reports import words
from ttftprof.reports.safe import clip_middle, plain


def name_of(wait: Wait) -> str:
    """`cold request 1`"""
    recording = clip_middle(plain(words.recording_name(wait.report)), 40)
    return f"{recording} request {plain(wait.request.id, 24)}"


def signed(ns: int) -> str:
    """`+1.286 s`, `-30.00 ms`."""
    return f"{'-' if ns < 0 else '+'}{scale.duration(abs(ns))}"


def finding(comparison: Comparison) -> str:
    """The first phase that grew beyond noise, in a sentence."""
    phase = comparison.blamed
    if phase is None:
        return "no phase grew beyond noise"
    before = sum(comparison.base_cells.get(phase, {}).values())
    now = sum(comparison.other_cells.get(phase, {}).values())
    grown = {
        name: ns - comparison.base_cells.get(phase, {}).get(name, 0)
        for name, ns in comparison.other_cells.get(phase, {}).items()
    }
    most = max(grown, key=lambda name: grown[name])
    return (
        f"first to grow: {phase}, {signed(comparison.phase_growth_ns(phase))} "
        f"({scale.duration(before)} → {scale.duration(now)}), most of it {most} "
        f"{signed(grown[most])}"
    )


def rule(comparison: Comparison) -> str:
    """How the phase was chosen."""
    share = round(diagnosis.NOISE_SHARE * 100)
    return (
        f"rule: the first phase, in order of time, that grew by more than "
        f"{scale.duration(comparison.noise_ns)} ({share} % of the base's wait, at least "
        f"{scale.duration(diagnosis.NOISE_NS)}) and makes up a fifth of all such growth"
    )


def difference_us(comparison: Comparison) -> list[list[int]]:
    """Phase × activity, other minus base, in µs that add up as the rounded tables do."""
    names, columns = comparison.phases, comparison.activities
    rounded = []
    for cells in (comparison.base_cells, comparison.other_cells):
        exact = [[cells.get(n, {}).get(c, 0) for c in columns] for n in names]
        rounded.append(scale.round_table(exact, 1_000))
    return [
        [now - before for before, now in zip(*rows, strict=True)]
        for rows in zip(*rounded, strict=True)
    ]


def signed_ms(us: int) -> str:
    return f"{'-' if us < 0 else '+'}{scale.milliseconds(abs(us))}" if us else ""
