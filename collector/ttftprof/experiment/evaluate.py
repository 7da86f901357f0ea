"""From an experiment's folder to what its reports print. Looks at nothing but the folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ttftprof.analysis import analyse
from ttftprof.errors import UsageError
from ttftprof.experiment import plan as plans
from ttftprof.experiment.conditions import Condition
from ttftprof.experiment.contrasts import Contrast
from ttftprof.experiment.fingerprint import differences
from ttftprof.experiment.plan import Expectation, Factor, Plan, Server, Workload
from ttftprof.experiment.policy import Advice, advise
from ttftprof.experiment.replay import Outcome, costs_of, played, policies, traffic_of
from ttftprof.experiment.store import Kept, Store
from ttftprof.experiment.verdict import Findings, find

_CACHE_SHARE = 0.8  # of the machine's memory, that files may take


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment as far as it got. `differences`: {what: {variant: values}} of all that was not
    the same in every run and that nobody asked to vary."""

    path: str
    plan: Plan
    findings: Findings
    scheduled: int
    done: int
    interrupted: int
    engine: str | None
    fingerprint: Mapping[str, str]
    differences: Mapping[str, Mapping[str, tuple[str, ...]]]
    degraded: Mapping[int, tuple[str, ...]]
    advice: tuple[Advice, ...]
    policies: tuple[Outcome, ...] = ()
    """Recorded traffic under several policies; empty if there is none, or nothing to tell it by."""

    def condition(self, scenario: str, variant: str) -> Condition | None:
        found = self.findings.conditions
        return next((c for c in found if (c.scenario, c.variant) == (scenario, variant)), None)

    def cause(self, condition: Condition) -> Contrast | None:
        """The condition against the baseline."""
        place = (condition.scenario, condition.variant)
        return next((c for c in self.findings.causes if c.other == place), None)


def evaluate(folder: Path, traffic: Sequence[Path] = ()) -> Experiment:
    """`traffic`: recordings whose requests are played again. Raises `UsageError` or
    `RecordingError` if the folder holds no experiment, or the traffic cannot be used."""
    with Store.read(folder) as store:
        kept, plan = store.kept(), plan_from_json(store.plan)
        findings = find(plan, kept)
        prints = _prints(kept)
        return Experiment(
            path=str(folder),
            plan=plan,
            findings=findings,
            scheduled=len(store.slots()),
            done=len(kept),
            interrupted=store.interrupted(),
            engine=_engine(kept),
            fingerprint=_first_print(plan, prints),
            differences=_unasked(plan, differences(prints)),
            degraded={
                one.slot.run: tuple(one.result["degraded"])
                for one in kept
                if one.result["degraded"]
            },
            advice=tuple(advise(plan, findings)),
            policies=tuple(_played(findings, plan.server.target, traffic)),
        )


def _played(findings: Findings, measured: str, traffic: Sequence[Path]) -> list[Outcome]:
    """`measured`: the model whose waits these are. Loads of others are told by their size."""
    if not traffic:
        return []
    costs = costs_of(findings)
    if costs is None:
        raise UsageError(
            "the traffic cannot be played: no switch was measured here, or no resident model",
            "run the scenarios cold-switch, re-switch and resident first",
        )
    reports = [analyse(path, drawn=False) for path in traffic]
    asked, sizes = traffic_of(reports)
    if not asked:
        raise UsageError("the recordings hold no request that names a model", "record some traffic")
    if not costs.weights_bytes:  # its runs were not recorded, but the traffic was
        costs = replace(costs, weights_bytes=sizes.get(measured, 0))
    if not costs.weights_bytes:
        raise UsageError(
            f"the traffic cannot be played: nothing tells how large {measured!r} is",
            "record the runs of the experiment (as root, without record = false)",
        )
    room = int(min(r.host.get("memory_bytes") or 0 for r in reports) * _CACHE_SHARE)
    return played(asked, sizes, costs, policies(asked, sizes), room)


def plan_from_json(raw: Mapping[str, Any]) -> Plan:
    """The plan that `Plan.public` gave."""
    values = dict(raw)
    values["server"] = Server(**_tuples(raw["server"]))
    values["workload"] = Workload(**_tuples(raw["workload"]))
    values["factors"] = tuple(Factor(f["name"], tuple(f["values"])) for f in raw["factors"])
    values["expectations"] = tuple(Expectation(**one) for one in raw["expectations"])
    values["scenarios"] = tuple(raw["scenarios"])
    return Plan(**values)


def _tuples(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in raw.items()}


def _prints(kept: list[Kept]) -> dict[str, list[Mapping[str, str]]]:
    found: dict[str, list[Mapping[str, str]]] = {}
    for one in kept:
        if one.result["fingerprint"]:
            found.setdefault(one.slot.variant, []).append(one.result["fingerprint"])
    return found


def _first_print(plan: Plan, prints: Mapping[str, list[Mapping[str, str]]]) -> dict[str, str]:
    """Of the base, if it ran: what another experiment is held against."""
    names = [variant.name for variant in plans.variants_of(plan)]
    return next((dict(prints[name][0]) for name in names if name in prints), {})


# What a factor changes in the fingerprint, by its name: that much is asked for.
_ASKED = {plans.READAHEAD: ("read-ahead of",)}
_ASKED_OF_STARTS = ("server's command", "server's program", "engine", "file of", "content of",
                    "mount of", "mount opt", "read-ahead of")  # fmt: skip


def _unasked(
    plan: Plan, found: Mapping[str, Mapping[str, tuple[str, ...]]]
) -> dict[str, Mapping[str, tuple[str, ...]]]:
    """Without what the factors change between variants; within one variant nothing is asked for."""
    asked = tuple(start for f in plan.factors for start in _ASKED.get(f.name, _ASKED_OF_STARTS))
    return {
        name: groups
        for name, groups in found.items()
        if not name.startswith(asked or ("\0",)) or any(len(v) > 1 for v in groups.values())
    }


def _engine(kept: list[Kept]) -> str | None:
    """As the server names itself, or as the recordings recognise it."""
    told = [one.result["fingerprint"].get("engine") for one in kept]
    seen = [(one.result["digest"] or {}).get("engine") for one in kept]
    return next((engine for engine in [*told, *seen] if engine), None)
