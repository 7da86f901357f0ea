"""An experiment for people: the figures of every condition, what made it slow, what a change did.

What is missing or in doubt stands first, then what to know and to change; a figure never stands
without the number of runs behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from rich.style import Style
from rich.text import Text

from ttftprof import scale
from ttftprof.experiment.conditions import Condition
from ttftprof.experiment.contrasts import Contrast, amount
from ttftprof.experiment.evaluate import Experiment
from ttftprof.experiment.policy import Advice
from ttftprof.experiment.statistics import Estimate, Summary
from ttftprof.model import PHASES
from ttftprof.reports import experiment_words, flame, tables
from ttftprof.reports.lanes import Window, blocks
from ttftprof.reports.safe import clip, plain
from ttftprof.reports.tables import Column
from ttftprof.reports.terminal import Page

_BOLD, _DIM = Style(bold=True), Style(dim=True)
_WARNING = Style(color="color(166)", bold=True)


def write(experiment: Experiment, out: TextIO, width: int, colour: bool) -> None:
    """Prints the experiment; no line is wider than `width`."""
    page = Page(width, colour)
    page.add_text(experiment_words.title(experiment), _BOLD)
    for warning in experiment_words.warnings(experiment):
        page.add_text(f"! {plain(warning)}", _WARNING)
    _print_brief(page, experiment)
    timed = [c for c in experiment.findings.conditions if not c.is_failure]
    if any(c.runs for c in timed):
        page.gap()
        page.add(*tables.banded(*_figures(timed, experiment), width))
        page.gap()
        _print_stacks(page, timed)
    causes = [c for c in experiment.findings.causes if c.metrics]
    _print_findings(page, "why slower", causes, experiment)
    _print_findings(page, "what the change did", experiment.findings.changes, experiment)
    _print_judged(page, experiment)
    _print_failures(page, experiment)
    _print_advice(page, experiment.advice)
    _print_policies(page, experiment)
    if experiment.done:
        page.gap()
        page.add_text(experiment_words.method(experiment), _DIM)
    out.write(page.text())


def _print_brief(page: Page, experiment: Experiment) -> None:
    lines = list(experiment_words.brief(experiment))
    if lines:
        page.gap()
        page.add_text("in short", _BOLD)
        for line in lines:
            page.add_text(line, indent=2)


# -- figures --------------------------------------------------------------------------------------


def _figures(
    conditions: Sequence[Condition], experiment: Experiment
) -> tuple[Column, Sequence[Column]]:
    names: list[str | Text] = [
        plain(experiment_words.place((c.scenario, c.variant), experiment), 48) for c in conditions
    ]
    ttft = [c.summaries.get("ttft") for c in conditions]
    columns = [
        Column("runs", [str(len(c.counted)) for c in conditions]),
        Column("left\nout", [str(c.left_out or "") for c in conditions]),
        Column("TTFT\nmedian", [_value(s.median if s else None) for s in ttft]),
        Column("95 %\ninterval", [_interval(s.median if s else None) for s in ttft]),
        Column("p95", [_p95(s) for s in ttft]),
        Column("least", [scale.ABSENT if s is None else _ns(s.least) for s in ttft]),
        Column("most", [scale.ABSENT if s is None else _ns(s.most) for s in ttft]),
        Column("from\nstorage", [_median(c, "storage_bytes", scale.size) for c in conditions]),
        Column("storage\nrate", [_median(c, "storage_rate", scale.rate) for c in conditions]),
        Column("major\nfaults", [_median(c, "major_faults", _count) for c in conditions]),
        Column("began\nwith", [_began(c, experiment) for c in conditions], right=False),
    ]
    return Column("condition", names, right=False), columns


def _value(estimate: Estimate | None) -> str:
    return scale.ABSENT if estimate is None else _ns(estimate.value)


def _ns(ns: float) -> str:
    return scale.duration(round(ns))


def _interval(estimate: Estimate | None) -> str:
    if estimate is None or estimate.interval is None:
        return scale.ABSENT
    return f"{_ns(estimate.interval.low)} to {_ns(estimate.interval.high)}"


def _p95(summary: Summary | None) -> str:
    """`~` where so few runs make it hardly more than the largest."""
    if summary is None:
        return scale.ABSENT
    return f"{'~' if summary.p95_is_rough else ''}{_ns(summary.p95.value)}"


def _median(condition: Condition, metric: str, shown: Callable[[float], str]) -> str:
    found = condition.summaries.get(metric)
    return scale.ABSENT if found is None else shown(found.median.value)


def _count(value: float) -> str:
    return scale.count(round(value))


def _began(condition: Condition, experiment: Experiment) -> str:
    cause = experiment.cause(condition)
    if cause is None:
        return "(baseline)" if condition.scenario == experiment.plan.baseline else ""
    if cause.blamed is None and any(cause.too_few):
        return "too few runs"
    return cause.blamed or "-"


def _print_stacks(page: Page, conditions: Sequence[Condition]) -> None:
    """Mean phases, one scale."""
    shown = [c for c in conditions if sum(c.mean_phases.values())]
    if not shown:
        return
    longest = max(sum(c.mean_phases.values()) for c in shown)
    label = min(max(len(_short(c, conditions)) for c in shown), page.width // 3)
    bar = page.width - label - 12
    for condition in shown:
        total = sum(condition.mean_phases.values())
        at, pieces = 0, []
        for name, ns in condition.mean_phases.items():
            pieces.append((name, at, at + round(ns)))
            at += round(ns)
        cells = max(round(bar * total / longest), 1)
        line = Text(f"{clip(_short(condition, conditions), label):{label}} ")
        line.append_text(
            flame.draw_blocks(blocks(pieces, Window(0, at, cells)), page.colour, labels=False)
        )
        line.append(f" {_ns(total)}", _DIM)
        page.add(line)
    seen = [n for n in PHASES if any(c.mean_phases.get(n) for c in shown)]
    legend = Text("mean phases:  ", _DIM)
    for name in seen:
        legend.append_text(flame.swatch(name, page.colour)).append(f"\N{NO-BREAK SPACE}{name}  ")
    legend.rstrip()
    page.add(legend)


def _short(condition: Condition, among: Sequence[Condition]) -> str:
    several = len({c.variant for c in among}) > 1
    return plain(f"{condition.scenario}, {condition.variant}" if several else condition.scenario)


# -- findings -------------------------------------------------------------------------------------


def _print_findings(
    page: Page, heading: str, contrasts: Sequence[Contrast], experiment: Experiment
) -> None:
    if not contrasts:
        return
    page.gap()
    page.add_text(heading, _BOLD)
    for found in experiment_words.findings(contrasts, experiment):
        page.add_text(f"{found.where} against {found.against}: {found.sentence}", indent=2)
        for one in found.contrasts:
            details = "; ".join(_details(one))
            if details:
                page.add_text(details, _DIM, indent=4)


def _details(one: Contrast) -> Iterator[str]:
    for metric in one.metrics:
        if metric.beyond and metric.metric != "ttft":
            shift = amount(metric.metric, metric.shift.shift.value)
            yield f"{metric.metric} {shift} (p {_p(metric.p)})"


def _p(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def _print_judged(page: Page, experiment: Experiment) -> None:
    if not experiment.findings.judged:
        return
    page.gap()
    page.add_text("what was expected", _BOLD)
    for one in experiment.findings.judged:
        stated, why = experiment_words.judged(one)
        page.add_text(f"{stated}: {one.verdict}. {why}", indent=2)


def _print_failures(page: Page, experiment: Experiment) -> None:
    conditions = [c for c in experiment.findings.conditions if c.is_failure and c.runs]
    if not conditions:
        return
    page.gap()
    page.add_text("failures that were asked for", _BOLD)
    for condition in conditions:
        page.add_text(plain(experiment_words.failure(condition, experiment)), indent=2)


def _print_advice(page: Page, advice: Sequence[Advice]) -> None:
    if not advice:
        return
    page.gap()
    page.add_text("what to change, by measured gain", _BOLD)
    for number, one in enumerate(advice, 1):
        page.add_text(plain(f"{number}. {experiment_words.advice(one)}"), indent=2)


def _print_policies(page: Page, experiment: Experiment) -> None:
    if not experiment.policies:
        return
    page.gap()
    page.add_text("the recorded traffic under other policies, by the waits measured here", _BOLD)
    rows = [experiment_words.policy(outcome) for outcome in experiment.policies]
    titles = experiment_words.POLICY_TITLES
    columns = [
        Column(title, cells, right=number > 0)
        for number, (title, cells) in enumerate(zip(titles, zip(*rows, strict=True), strict=True))
    ]
    page.add(*tables.banded(columns[0], columns[1:], page.width))
