"""The sentences that the reports of an experiment share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ttftprof import scale
from ttftprof.experiment.conditions import Condition, why_not_counted
from ttftprof.experiment.contrasts import Contrast
from ttftprof.experiment.evaluate import Experiment
from ttftprof.experiment.expectations import Judged
from ttftprof.experiment.fingerprint import other_load_before
from ttftprof.experiment.plan import variants_of
from ttftprof.experiment.policy import Advice
from ttftprof.experiment.replay import Outcome
from ttftprof.reports.safe import plain

_SHOWN = 3


def title(experiment: Experiment) -> str:
    plan = experiment.plan
    parts = [plain(plan.name, 60)]
    if experiment.engine:
        parts.append(plain(experiment.engine, 60))
    parts.append(f"{len(plan.chosen())} scenarios")
    if plan.factors:
        parts.append(f"{len(variants_of(plan))} variants")
    parts.append(f"{experiment.done} of {experiment.scheduled} runs")
    return " · ".join(parts)


def place(where: tuple[str, str], experiment: Experiment) -> str:
    """A condition's name; the variant only where there is more than one."""
    return f"{where[0]}, {where[1]}" if experiment.plan.factors else where[0]


def warnings(experiment: Experiment) -> Iterator[str]:
    """What is missing or in doubt."""
    left = experiment.scheduled - experiment.done
    if left:
        yield f"{left} runs are still to be made: the same command goes on from here"
    if experiment.interrupted == 1:
        yield "1 attempt was interrupted, and made again"
    elif experiment.interrupted:
        yield f"{experiment.interrupted} attempts were interrupted, and made again"
    yield from _left_out(experiment)
    if experiment.degraded:
        first = next(iter(experiment.degraded.values()))[0]
        yield f"{len(experiment.degraded)} runs are degraded, the first: {first}"
    yield from _differences(experiment)
    timed = [c for c in experiment.findings.conditions if not c.is_failure]
    counted = [run for condition in timed for run in condition.counted]
    busy = sum(other_load_before(run.raw.get("rest")) for run in counted)
    if busy:
        yield (
            f"before {busy} of the {len(counted)} runs that are timed and count the machine was "
            "busy with something else: intervals are wider than they need be"
        )


def _left_out(experiment: Experiment) -> Iterator[str]:
    for condition in experiment.findings.conditions:
        where = place((condition.scenario, condition.variant), experiment)
        reasons = {why: n for why, n in condition.not_counted.items() if why != "warm-up"}
        made = sum(not run.warmup for run in condition.runs)
        if reasons and not condition.counted:
            told = ", ".join(_with_detail(condition, why) for why in reasons)
            yield f"{where}: none of its {made} runs counts ({told})"
        else:
            for why, count in reasons.items():
                told = _with_detail(condition, why)
                yield f"{where}: {count} of {made} runs left out ({told})"


def _with_detail(condition: Condition, why: str) -> str:
    """Of a failure, what the first one rests on: details may differ where the reason does not."""
    first = next(run for run in condition.runs if why_not_counted(run) == why)
    detail = "" if first.as_expected or not first.established else first.raw["detail"]
    return f"{why}; the first: {detail}" if detail else why


def _differences(experiment: Experiment) -> Iterator[str]:
    for name, groups in experiment.differences.items():
        if all(len(values) == 1 for values in groups.values()):
            shown = "; ".join(f"{variant}: {values[0]}" for variant, values in groups.items())
            yield f"{name} differs between variants beside what was varied: {plain(shown, 200)}"
        else:
            values = dict.fromkeys(v for own in groups.values() for v in own)
            shown = ", then ".join(list(values)[:_SHOWN])
            yield f"{name} changed during the experiment: {plain(shown, 200)}"


def brief(experiment: Experiment) -> Iterator[str]:
    """What to know if nothing else is read: what became of the expectations, what makes the slowest
    scenario slow, what to change first. Only what is sure."""
    for one in experiment.findings.judged:
        stated, why = judged(one)
        yield f"expected {stated}: {one.verdict}. {why}"
    slower = [c for c in experiment.findings.causes if c.direction == "slower" and c.metric("ttft")]
    if slower:
        worst = max(slower, key=_growth)
        yield plain(f"{place(worst.other, experiment)} against {worst.base[0]}: {worst.sentence}")
    if experiment.advice:
        yield plain(f"most would be gained by this: {advice(experiment.advice[0])}")
    elif not slower and any(c.counted for c in experiment.findings.conditions):
        yield "nothing is sure enough to advise a change"


def _growth(cause: Contrast) -> float:
    ttft = cause.metric("ttft")
    return ttft.shift.shift.value if ttft is not None else 0.0


def method(experiment: Experiment) -> str:
    """How the figures came about, for who doubts them."""
    plan = experiment.plan
    counted = [run for c in experiment.findings.conditions for run in c.counted]
    hows = Counter(c["how"] for run in counted for c in run.raw["checks"] if c["how"])
    told = f", verified by {', '.join(how for how, _ in hows.most_common())}" if hows else ""
    blocks = plan.warmups + plan.runs
    return plain(
        f"Each block holds every condition once, in an order shuffled by seed {plan.seed}, so that "
        f"drift falls on all alike; of {blocks} blocks {plan.warmups} came first as warm-ups and "
        f"count for nothing. Every run begins in a state that is made{told}; what could not be "
        "had, or told, is left out. Medians and p95 with 95 % bootstrap intervals; shifts by "
        "Hodges and Lehmann, tested by Mann and Whitney, or in pairs of a block by Wilcoxon; p "
        "corrected (Holm) for all that is asked of all conditions together, against "
        f"{plan.alpha:g}."
    )


@dataclass(frozen=True, slots=True)
class Finding:
    """What one or several conditions show against the same base, in the same words."""

    where: str
    against: str
    sentence: str
    contrasts: tuple[Contrast, ...]


def findings(contrasts: Sequence[Contrast], experiment: Experiment) -> Iterator[Finding]:
    """What is true of several conditions is said once."""
    groups: dict[tuple[str, str], list[Contrast]] = {}
    for one in contrasts:
        against = one.base[0] if one.kind == "cause" else one.base[1]
        groups.setdefault((against, one.sentence), []).append(one)
    for (against, sentence), own in groups.items():
        where = "; ".join(place(one.other, experiment) for one in own)
        yield Finding(plain(where), plain(against), plain(sentence), tuple(own))


def judged(one: Judged) -> tuple[str, str]:
    """(what was expected, why the verdict is what it is)"""
    stated = f"{one.expectation.metric} {one.expectation.direction}"
    if one.expectation.at_least:
        stated += f" by at least {scale.percent(one.expectation.at_least)}"
    where = ", ".join(part for part in (one.scenario, one.variant) if part)
    return plain(f"{where}: {stated}"), plain(one.why)


def failure(condition: Condition, experiment: Experiment) -> str:
    """What a failure case came to, and whether the server answered afterwards."""
    outcomes = ", ".join(f"{count} × {name}" for name, count in condition.outcomes.items())
    where = place((condition.scenario, condition.variant), experiment)
    text = f"{where}: {outcomes or 'only warm-ups'}"
    unexpected = sum(1 for run in condition.runs if not run.as_expected and not run.warmup)
    if unexpected:
        text += f" ({unexpected} not what was to be expected)"
    if condition.recovery is not None:
        text += f"; answered again after {scale.duration(round(condition.recovery.median.value))}"
        text += f" (most {scale.duration(round(condition.recovery.most))})"
    if condition.not_recovered:
        text += f"; did NOT answer again in {condition.not_recovered} runs"
    return text


POLICY_TITLES = ("policy", "mean", "saves (95 %)", "p95", "loads", "cold", "memory for weights")


def policy(outcome: Outcome) -> tuple[str, ...]:
    """A row under `POLICY_TITLES`."""
    return (
        plain(outcome.policy.name, 80),
        scale.duration(round(outcome.mean_ns)),
        _saved(outcome),
        scale.duration(round(outcome.p95_ns)),
        f"{outcome.loads} of {outcome.requests}",
        str(outcome.cold_loads),
        scale.size(outcome.memory_bytes),
    )


def _saved(outcome: Outcome) -> str:
    """Of the mean, against the first policy; nothing where that is the same."""
    saves = outcome.saves
    if saves is None or not saves.value:
        return ""
    shown = _signed(saves.value)
    if saves.interval is None:
        return shown
    return f"{shown} ({_signed(saves.interval.low)} to {_signed(saves.interval.high)})"


def _signed(ns: float) -> str:
    return f"{'−' if ns < 0 else ''}{scale.duration(round(abs(ns)))}"


def advice(one: Advice) -> str:
    """`keep …: saves 0.72 s (0.68 to 0.80 s) when …; costs …`"""
    low, high = (scale.duration(round(end)) for end in (one.interval.low, one.interval.high))
    text = f"{one.change}: saves {scale.duration(round(one.gain_ns))} ({low} to {high})"
    text += f" when {one.when}" if one.when else ""
    return f"{text}; costs {one.cost}" if one.cost else text
