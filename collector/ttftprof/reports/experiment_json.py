"""`ttftprof.experiment/1`: everything an experiment shows, for programs. Its schema lies beside it.

One object on one line, pure ASCII; times in nanoseconds; what is not known is null, never 0.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, TextIO

from ttftprof import __version__
from ttftprof.experiment.conditions import Condition, Run, why_not_counted
from ttftprof.experiment.contrasts import Compared, Contrast
from ttftprof.experiment.evaluate import Experiment
from ttftprof.experiment.replay import Outcome
from ttftprof.reports import experiment_words
from ttftprof.reports.json import clean, load_schema, write_line

SCHEMA_NAME = "ttftprof.experiment/1"


def write(experiment: Experiment, out: TextIO) -> None:
    write_line(as_json(experiment), out)


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) that every output of `write` satisfies."""
    return load_schema("experiment")


def as_json(experiment: Experiment) -> dict[str, Any]:
    findings = experiment.findings
    document: dict[str, Any] = clean(
        {
            "schema": SCHEMA_NAME,
            "tool": {"name": "ttftprof", "version": __version__},
            "plan": experiment.plan.public(),
            "engine": experiment.engine,
            "runs": {
                "scheduled": experiment.scheduled,
                "done": experiment.done,
                "interrupted": experiment.interrupted,
            },
            "warnings": list(experiment_words.warnings(experiment)),
            "fingerprint": experiment.fingerprint,
            "differences": experiment.differences,
            "conditions": [_condition(c) for c in findings.conditions],
            "causes": [_contrast(c) for c in findings.causes],
            "changes": [_contrast(c) for c in findings.changes],
            "expectations": [asdict(one) for one in findings.judged],
            "advice": [asdict(one) for one in experiment.advice],
            "policies": [_policy(one) for one in experiment.policies],
        }
    )
    return document


def _policy(outcome: Outcome) -> dict[str, Any]:
    found = asdict(outcome) | {"policy": outcome.policy.name}
    del found["made_of"]
    return found


def _condition(condition: Condition) -> dict[str, Any]:
    return {
        "scenario": condition.scenario,
        "about": condition.about,
        "variant": condition.variant,
        "is_failure": condition.is_failure,
        "counted": len(condition.counted),
        "not_counted": condition.not_counted,
        "outcomes": condition.outcomes,
        "summaries": {name: asdict(s) for name, s in condition.summaries.items()},
        "mean_phases": condition.mean_phases,
        "recovery": asdict(condition.recovery) if condition.recovery else None,
        "not_recovered": condition.not_recovered,
        "runs": [_run(run) for run in condition.runs],
    }


def _run(run: Run) -> dict[str, Any]:
    return {
        "run": run.number,
        "block": run.block,
        "warmup": run.warmup,
        "counts": run.counts,
        "why_not": why_not_counted(run) or None,
        "outcome": run.outcome,
        "detail": run.raw["detail"],
        "values": run.values,
        "checks": run.raw["checks"],
        "degraded": run.raw["degraded"],
        "recovery": run.raw["recovery"],
        "load": run.raw["load"],
        "answers": [{k: v for k, v in a.items() if k != "chunks"} for a in run.raw["answers"]],
    }


def _contrast(contrast: Contrast) -> dict[str, Any]:
    names = ("scenario", "variant")
    return {
        "base": dict(zip(names, contrast.base, strict=True)),
        "other": dict(zip(names, contrast.other, strict=True)),
        "direction": contrast.direction,
        "blamed": contrast.blamed,
        "runs_needed": dict(zip(("whether", "which_phase"), contrast.too_few, strict=True)),
        "sentence": contrast.sentence,
        "metrics": {m.metric: _compared(m) for m in contrast.metrics},
    }


def _compared(metric: Compared) -> dict[str, Any]:
    shift = metric.shift
    return {
        "base_median": metric.base_median,
        "shift": shift.shift.value,
        "interval": asdict(shift.shift.interval) if shift.shift.interval else None,
        "p": shift.p,
        "p_corrected": metric.p,
        "beyond_noise": metric.beyond,
        "test": shift.test,
        "smallest_p": shift.smallest_p,
        "detectable": metric.detectable,
        "base_count": shift.base_count,
        "other_count": shift.other_count,
    }
