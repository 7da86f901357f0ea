"""Recorded traffic, played again under other ways of keeping models in memory. Pure.

A request waits as long as the experiment measured for the state that it finds: its model resident,
to be loaded from the page cache, or to be loaded from storage. What a policy decides is only which
state that is. Loads of other models are taken to grow with the size of their weights. Queueing is
left out: a request that comes while another waits is served as if it came after it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ttftprof.experiment.conditions import Condition
from ttftprof.experiment.statistics import (
    CONFIDENCE,
    INTERVAL_NEEDS,
    Estimate,
    Interval,
    Sample,
    resampled_medians,
)
from ttftprof.experiment.verdict import Findings
from ttftprof.model import Report, weights_bytes

NS = 1_000_000_000
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the traffic."""

    ns: int
    model: str


@dataclass(frozen=True, slots=True)
class Costs:
    """TTFT, ns, of the measured model by the state it is found in, and the size of its weights.

    `weights_bytes`: 0 where no run tells it. `resampled`: the three times, drawn again and again
    from the runs; a row a draw, none where there are too few runs for an interval.
    """

    resident_ns: float
    cached_ns: float
    cold_ns: float
    weights_bytes: int
    resampled: Values = field(default_factory=lambda: np.empty((0, 3)), compare=False, repr=False)

    def wait_ns(self, state: str, size_bytes: int) -> float:
        if state == "resident":
            return self.resident_ns
        whole = self.cached_ns if state == "cached" else self.cold_ns
        return self.resident_ns + (whole - self.resident_ns) * size_bytes / self.weights_bytes


@dataclass(frozen=True, slots=True)
class Policy:
    """Which models stay in memory: at most `models` and `memory_bytes` of weights, the one used
    longest ago goes first; those idle for `keep_alive_s` go; `pinned` never goes."""

    name: str
    models: int | None = None
    memory_bytes: int | None = None
    keep_alive_s: float | None = None
    pinned: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the traffic would have waited. `memory_bytes`: the most weights that were resident.

    `made_of`: the mean as a sum of the three costs, how much of each; `saves`: of the mean, against
    the first policy, with the interval that the runs behind the costs leave.
    """

    policy: Policy
    requests: int
    mean_ns: float
    p95_ns: float
    loads: int
    cold_loads: int
    memory_bytes: int
    made_of: tuple[float, float, float] = (0.0, 0.0, 0.0)
    saves: Estimate | None = None


def traffic_of(reports: Iterable[Report]) -> tuple[list[Asked], dict[str, int]]:
    """All requests that name a model, by time, and the size of each model's weights where it was
    seen being used."""
    asked: list[Asked] = []
    sizes: dict[str, int] = {}
    for report in reports:
        offset = report.realtime_offset_ns or 0  # recordings of several days, on one clock
        for request in report.requests:
            if request.model is None or request.outcome == "error":
                continue
            asked.append(Asked(request.start_ns + offset, request.model))
            size = weights_bytes(request.files)
            if size is not None:  # a resident model may touch only some of its shards
                sizes[request.model] = max(size, sizes.get(request.model, 0))
    return sorted(asked, key=lambda one: one.ns), sizes


def costs_of(findings: Findings) -> Costs | None:
    """From the first variant's scenarios; None where resident or re-switch was not measured. Where
    no cold switch was, a load from storage is taken to cost as much as one from the cache."""
    by_name: dict[str, Condition] = {}
    for condition in findings.conditions:
        if "ttft" in condition.summaries:
            by_name.setdefault(condition.scenario, condition)
    if "resident" not in by_name or not {"re-switch", "cold-switch"} & set(by_name):
        return None
    times = {name: condition.values("ttft") for name, condition in by_name.items()}
    medians = {name: float(np.median(values)) for name, values in times.items()}
    cached_by = "re-switch" if "re-switch" in times else "cold-switch"
    cold_by = "cold-switch" if "cold-switch" in times else cached_by
    sizes = [
        size
        for condition in by_name.values()
        for run in condition.counted
        if (size := (run.raw.get("digest") or {}).get("weights_bytes"))
    ]
    states = ("resident", cached_by, cold_by)
    few = any(len(times[name]) < INTERVAL_NEEDS for name in states)
    return Costs(
        medians["resident"],
        medians[cached_by],
        medians[cold_by],
        max(sizes, default=0),
        np.empty((0, 3)) if few else _resampled(times, states),
    )


def _resampled(times: Mapping[str, Sample], states: Sequence[str]) -> Values:
    """Medians drawn anew: of each scenario once, also where it stands for two states."""
    drawn = {name: resampled_medians(times[name]) for name in dict.fromkeys(states)}
    return np.column_stack([drawn[name] for name in states])


def policies(asked: Sequence[Asked], sizes: Mapping[str, int]) -> list[Policy]:
    """Those worth comparing for this traffic; by memory where the models' sizes are known."""
    used = Counter(one.model for one in asked)
    favourite = used.most_common(1)[0][0]
    found = [Policy("one model at a time", models=1)]
    found += [
        Policy(f"up to {count} models, the longest unused goes", models=count)
        for count in range(2, min(len(used), 5))
    ]
    found += _budgets([sizes[model] for model in used if model in sizes], len(used))
    found.append(Policy("all models resident"))
    for minutes in (5, 30):
        found.append(
            Policy(f"one model, given up after {minutes} min", models=1, keep_alive_s=minutes * 60)
        )
    if len(used) > 2:
        pinned = frozenset({favourite})
        found.append(Policy(f"{favourite} always, one other beside it", models=2, pinned=pinned))
    return found


def _budgets(sizes: Sequence[int], models: int) -> Iterator[Policy]:
    """Memory for a half and for three quarters of all weights, where the largest has room in it."""
    if len(sizes) < models or models < 3:
        return
    for share in (1 / 2, 3 / 4):
        room = int(sum(sizes) * share)
        if room >= max(sizes):
            name = f"as many as have room in {room / 1e9:.3g} GB, the longest unused goes"
            yield Policy(name, memory_bytes=room)


def played(
    asked: Sequence[Asked],
    sizes: Mapping[str, int],
    costs: Costs,
    tried: Sequence[Policy],
    page_cache_bytes: int,
) -> list[Outcome]:
    """The traffic under each policy, each with what it saves against the first."""
    found = [replay(asked, sizes, costs, policy, page_cache_bytes) for policy in tried]
    return [replace(one, saves=_saves(found[0], one, costs)) for one in found]


def _saves(first: Outcome, one: Outcome, costs: Costs) -> Estimate:
    value = first.mean_ns - one.mean_ns
    if not len(costs.resampled):
        return Estimate(value, None)
    drawn = costs.resampled @ (np.asarray(first.made_of) - np.asarray(one.made_of))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(drawn, (tail, 100 - tail))
    return Estimate(value, Interval(float(low), float(high)))


def replay(
    asked: Sequence[Asked],
    sizes: Mapping[str, int],
    costs: Costs,
    policy: Policy,
    page_cache_bytes: int,
) -> Outcome:
    """The traffic under one policy. The first load of each model is from storage; after that its
    file is in the page cache for as long as files used later leave room."""
    memory, cache = _Memory(policy, sizes, costs), _PageCache(page_cache_bytes)
    waits, states, loaded = [], Counter[str](), Counter[str]()
    for one in asked:
        size = sizes.get(one.model, costs.weights_bytes)
        memory.pass_time(one.ns)
        state = "resident" if one.model in memory else "cached" if one.model in cache else "cold"
        states[state] += 1
        if state != "resident":
            loaded[state] += size
        waits.append(costs.wait_ns(state, size))
        memory.use(one.model, one.ns)
        cache.use(one.model, size)
    return Outcome(
        policy=policy,
        requests=len(waits),
        mean_ns=float(np.mean(waits)) if waits else 0.0,
        p95_ns=float(np.percentile(waits, 95)) if waits else 0.0,
        loads=states["cached"] + states["cold"],
        cold_loads=states["cold"],
        memory_bytes=memory.most_bytes,
        made_of=_made_of(len(waits), loaded, costs),
    )


def _made_of(requests: int, loaded: Mapping[str, int], costs: Costs) -> tuple[float, float, float]:
    """As `Costs.wait_ns` puts a wait together: what of a load goes by its bytes is not resident."""
    cached, cold = (
        loaded.get(state, 0) / costs.weights_bytes / max(requests, 1)
        for state in ("cached", "cold")
    )
    return (1 - cached - cold if requests else 0.0), cached, cold


class _Memory:
    """The resident models, the longest unused first."""

    def __init__(self, policy: Policy, sizes: Mapping[str, int], costs: Costs) -> None:
        self._policy, self._sizes, self._usual = policy, sizes, costs.weights_bytes
        self._used: OrderedDict[str, int] = OrderedDict()
        self.most_bytes = 0

    def __contains__(self, model: str) -> bool:
        return model in self._used

    def pass_time(self, ns: int) -> None:
        if self._policy.keep_alive_s is None:
            return
        for model, last_ns in list(self._used.items()):
            idle = ns - last_ns > self._policy.keep_alive_s * NS
            if idle and model not in self._policy.pinned:
                del self._used[model]

    def use(self, model: str, ns: int) -> None:
        self._used[model] = ns
        self._used.move_to_end(model)
        while self._is_over() and (victim := self._victim(model)) is not None:
            del self._used[victim]
        self.most_bytes = max(self.most_bytes, self._bytes())

    def _victim(self, newest: str) -> str | None:
        may_go = (m for m in self._used if m not in self._policy.pinned and m != newest)
        return next(may_go, None)

    def _is_over(self) -> bool:
        policy = self._policy
        too_many = policy.models is not None and len(self._used) > policy.models
        return too_many or (policy.memory_bytes is not None and self._bytes() > policy.memory_bytes)

    def _bytes(self) -> int:
        return sum(self._sizes.get(model, self._usual) for model in self._used)


class _PageCache:
    """Whose file is cached; whole files, the longest unused goes."""

    def __init__(self, room_bytes: int) -> None:
        self._room = room_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, model: str) -> bool:
        return model in self._sizes

    def use(self, model: str, size: int) -> None:
        self._sizes[model] = size
        self._sizes.move_to_end(model)
        while sum(self._sizes.values()) > self._room and self._sizes:
            self._sizes.popitem(last=False)
