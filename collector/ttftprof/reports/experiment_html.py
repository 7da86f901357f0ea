"""An experiment as one HTML file: distributions, phases, and the order of the runs, drawn.

Guarantees are those of `html`: one file, no connection and here no script at all; foreign text is
escaped. Every point of a plot is a run and says on pointing which one; its figures stand in the
tables as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from markupsafe import Markup

from ttftprof import scale
from ttftprof.experiment.conditions import Condition, Run, why_not_counted
from ttftprof.experiment.contrasts import Contrast, amount
from ttftprof.experiment.evaluate import Experiment
from ttftprof.experiment.statistics import Summary
from ttftprof.model import PHASES
from ttftprof.reports import experiment_words
from ttftprof.reports.html import asset, inline_hash, template
from ttftprof.reports.safe import clip_middle, plain

_WIDTH = 1000  # of a plot, in its own units
_ROW, _MIDDLE = 30, 15
_SPREAD = 8  # of points that would lie on each other
_ORDER_HEIGHT = 46


def write(experiment: Experiment, out: TextIO) -> None:
    """Writes the page."""
    style = _style()
    timed = [c for c in experiment.findings.conditions if not c.is_failure and c.runs]
    page = template("experiment.html.j2").render(
        title=f"{plain(experiment.plan.name, 60)} · ttftprof",
        style=Markup(style),
        style_hash=inline_hash(style),
        heading=plain(experiment.plan.name, 120),
        facts=experiment_words.title(experiment).split(" · ")[1:],
        warnings=[plain(w) for w in experiment_words.warnings(experiment)],
        axis=_axis(timed),
        rows=[_row(c, experiment, timed) for c in timed],
        orders=[_order(c, experiment) for c in timed if c.counted],
        phases=[n for n in PHASES if any(c.mean_phases.get(n) for c in timed)],
        details=[(heading, [_contrast(c, experiment) for c in contrasts]) for heading,
                 contrasts in _by_question(experiment) if contrasts],
        found=[(heading, list(experiment_words.findings(contrasts, experiment))) for heading,
               contrasts in _by_question(experiment) if contrasts],
        judged=[(one.verdict, *experiment_words.judged(one)) for one in
                experiment.findings.judged],
        failures=[plain(experiment_words.failure(c, experiment)) for c in
                  experiment.findings.conditions if c.is_failure and c.runs],
        advice=[plain(experiment_words.advice(one)) for one in experiment.advice],
        policy_titles=experiment_words.POLICY_TITLES,
        policies=[experiment_words.policy(one) for one in experiment.policies],
        fingerprint=[(plain(n), clip_middle(plain(v), 200)) for n, v in
                     experiment.fingerprint.items()],
        seed=experiment.plan.seed,
        method=experiment_words.method(experiment) if experiment.done else "",
    )  # fmt: skip
    out.write(page)


def _by_question(experiment: Experiment) -> Iterator[tuple[str, list[Contrast]]]:
    yield "What the change did", [c for c in experiment.findings.changes if c.metrics]
    yield "Why slower", [c for c in experiment.findings.causes if c.metrics]


def _style() -> str:
    """The report's own, which turns dark by a script; here by the reader's setting."""
    shared = re.sub(
        r':root\[data-theme="dark"\] (\{[^}]*\})',
        r"@media (prefers-color-scheme: dark) { :root \1 }",
        asset("report.css"),
    )
    return shared + asset("experiment.css")


# -- plots ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Point:
    """A run in a plot; `counts`: solid, else hollow."""

    x: float
    y: float
    counts: bool
    says: str


def _longest(conditions: Sequence[Condition]) -> float:
    values = [v for c in conditions for r in c.runs for v in [r.values.get("ttft", 0.0)]]
    return max([*values, *(sum(c.mean_phases.values()) for c in conditions)], default=0.0) or 1.0


def _axis(conditions: Sequence[Condition]) -> list[tuple[float, str]]:
    longest = _longest(conditions)
    marks = scale.ticks(round(longest), _WIDTH, 110)
    return [(float(at), label) for at, label in marks]


def _row(
    condition: Condition, experiment: Experiment, among: Sequence[Condition]
) -> dict[str, Any]:
    unit = _longest(among) / _WIDTH
    ttft = condition.summaries.get("ttft")
    interval = ttft.median.interval if ttft else None
    at, stack = 0.0, []
    for name, ns in condition.mean_phases.items():
        if ns:
            says = f"{name}: {scale.duration(round(ns))} on average"
            stack.append((name, round(at, 2), round(ns / unit, 2), says))
            at += ns / unit
    cause = experiment.cause(condition)
    return {
        "name": plain(experiment_words.place((condition.scenario, condition.variant), experiment)),
        "about": condition.about,
        "points": _points(condition, unit),
        "median": None if ttft is None else round(ttft.median.value / unit, 2),
        "interval": None
        if interval is None
        else (round(interval.low / unit, 2), round(max(interval.high - interval.low, 0) / unit, 2)),
        "p95": None if ttft is None else round(ttft.p95.value / unit, 2),
        "stack": stack,
        "cells": _cells(condition),
        "mean": _ns(sum(condition.mean_phases.values())) if stack else "",
        "began": "" if cause is None else cause.blamed or "",
    }


def _points(condition: Condition, unit: float) -> list[_Point]:
    """Runs beside each other where they are equally long, in the order in which they came."""
    found = []
    for number, run in enumerate(r for r in condition.runs if "ttft" in r.values):
        y = _MIDDLE + (number % 5 - 2) * _SPREAD / 2
        x = round(run.values["ttft"] / unit, 2)
        found.append(_Point(x, y, run.counts, _says(run)))
    return found


def _says(run: Run) -> str:
    why = why_not_counted(run)
    ttft = scale.duration(round(run.values["ttft"]))
    return f"run {run.number}: {ttft}" + (f" (not counted: {why})" if why else "")


def _cells(condition: Condition) -> list[str]:
    ttft = condition.summaries.get("ttft")

    def median(metric: str) -> float | None:
        found = condition.summaries.get(metric)
        return None if found is None else found.median.value

    faults = median("major_faults")
    interval = ttft.median.interval if ttft else None
    return [
        str(len(condition.counted)),
        str(condition.left_out),
        scale.duration(round(ttft.median.value)) if ttft else scale.ABSENT,
        f"{_ns(interval.low)} to {_ns(interval.high)}" if interval else scale.ABSENT,
        _tail(ttft) if ttft else scale.ABSENT,
        scale.size(median("storage_bytes")),
        scale.rate(median("storage_rate")),
        scale.count(None if faults is None else round(faults)),
    ]


def _tail(summary: Summary) -> str:
    """The p95 with its interval."""
    shown = f"{'~' if summary.p95_is_rough else ''}{_ns(summary.p95.value)}"
    interval = summary.p95.interval
    return f"{shown} ({_ns(interval.low)} to {_ns(interval.high)})" if interval else shown


def _ns(ns: float) -> str:
    return scale.duration(round(ns))


def _order(condition: Condition, experiment: Experiment) -> dict[str, Any]:
    """TTFT over the order of the runs, each condition on a scale of its own: drift is a slope."""
    shown = [r for r in condition.runs if "ttft" in r.values]
    last = max(experiment.scheduled, 1)
    top = max((r.values["ttft"] for r in shown), default=1.0) or 1.0
    least = min((r.values["ttft"] for r in shown), default=0.0)
    span = max(top - least, top * 0.05)

    def y(value: float) -> float:
        return round(_ORDER_HEIGHT - 6 - (value - least) / span * (_ORDER_HEIGHT - 12), 2)

    ttft = condition.summaries["ttft"]
    return {
        "name": plain(experiment_words.place((condition.scenario, condition.variant), experiment)),
        "points": [
            _Point(round(r.number / last * _WIDTH, 2), y(r.values["ttft"]), r.counts, _says(r))
            for r in shown
        ],
        "median": y(ttft.median.value),
        "range": f"{_ns(least)} to {_ns(top)}",
    }


# -- tables ---------------------------------------------------------------------------------------


def _contrast(one: Contrast, experiment: Experiment) -> dict[str, Any]:
    return {
        "name": plain(experiment_words.place(one.other, experiment)),
        "against": plain(experiment_words.place(one.base, experiment)),
        "sentence": one.sentence,
        "rows": [
            (
                m.metric,
                m.metric == one.blamed,
                m.beyond,
                amount(m.metric, m.shift.shift.value),
                ""
                if m.shift.shift.interval is None
                else f"{amount(m.metric, m.shift.shift.interval.low)} to "
                f"{amount(m.metric, m.shift.shift.interval.high)}",
                f"{m.p:.3f}" if m.p >= 0.001 else "<0.001",
                "" if m.detectable is None else amount(m.metric, m.detectable)[1:],
                m.shift.test,
            )
            for m in one.metrics
        ],
    }
