"""The truth file: who writes which stamps, and how they become one partition per request.

Every process appends its own lines (one write each, O_APPEND): a `runner` line when a process is
able to serve, a `served` line per request it answered, a `front` line per request the router
relayed, a `restart` line from the supervisor.  `read_truth` joins them by pid and request id.
All stamps are CLOCK_MONOTONIC ns.

Small real gaps go where DESIGN section 4 puts them: parsing before the switch to `queue`
(received, not yet acted on), fork and exec after the old process is reaped to `evict` (until the
next one may start), hand-over inside the runner to `prefill`, the relay of the first token to
`first_decode`, the hand-over of a front whose runner has the model to `queue`.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Line = dict[str, Any]
PHASES = ("queue", "evict", "launch", "load", "init", "ready_gap", "prefill", "first_decode")


AWAIT_TIMEOUT_NS = 5_000_000_000


class TruthError(AssertionError):
    """The workload's own stamps do not form a partition: a bug in the workload."""


class TruthWriter:
    """Appends lines to the truth file; usable from any thread."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, source: str, **fields: Any) -> None:
        line = json.dumps({"source": source, **fields}) + "\n"
        os.write(self._fd, line.encode())


@dataclass(frozen=True)
class Edge:
    phase: str
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class TruthRequest:
    """One answered request; `edges` abut and cover it, phases of no length left out."""

    request_id: str
    model: str
    kind: str
    request_start_ns: int
    first_token_ns: int
    switched: bool
    complete: bool  # the whole answer was sent; False where the client went away meanwhile
    runner_pid: int
    prompt_tokens: int
    edges: tuple[Edge, ...]
    marks: dict[str, int]  # single moments inside the phases: reaped_ns, ready_seen_ns, ...
    at_ready: dict[str, int]  # the runner's own_counters() since its start, once able to serve
    at_end: dict[str, int]  # the same after this answer

    @property
    def ttft_ns(self) -> int:
        return self.first_token_ns - self.request_start_ns

    @property
    def totals_ns(self) -> dict[str, int]:
        totals = dict.fromkeys(PHASES, 0)
        for edge in self.edges:
            totals[edge.phase] += edge.duration_ns
        return totals

    @property
    def dominant(self) -> str:
        totals = self.totals_ns
        return max(totals, key=totals.__getitem__)


def read_truth(path: str | Path) -> list[TruthRequest]:
    """Every request that got its first token, by arrival; TruthError if one does not add up."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    runners = [line for line in lines if line["source"] == "runner"]
    served = {line["request_id"]: line for line in lines if line["source"] == "served"}
    fronts = {line["request_id"]: line for line in lines if line["source"] == "front"}
    restarts = {line["pid"]: line for line in lines if line["source"] == "restart"}
    requests = [
        _merge(
            {**restarts.get(line["pid"], {}), **_able(runners, line)}, line, fronts.get(request_id)
        )
        for request_id, line in served.items()
        if _answered(line, fronts.get(request_id))
    ]
    return sorted(requests, key=lambda request: request.request_start_ns)


def _able(runners: list[Line], served: Line) -> Line:
    """How the process that served came to be able to: one that is woken comes to be so again."""
    return [
        line
        for line in runners
        if line["pid"] == served["pid"] and line["ready_ns"] <= served["prefill_end_ns"]
    ][-1]


def await_truth(path: str | Path, request_ids: set[str]) -> list[TruthRequest]:
    """`read_truth` once these requests are in it: stamps are written after an answer has left."""
    deadline_ns = time.monotonic_ns() + AWAIT_TIMEOUT_NS
    while True:
        requests = read_truth(path)
        missing = request_ids - {request.request_id for request in requests}
        if not missing:
            return requests
        if time.monotonic_ns() > deadline_ns:
            raise TruthError(f"{path}: no stamps of {sorted(missing)}")
        time.sleep(0.01)


def _answered(served: Line, front: Line | None) -> bool:
    """False where the client left before the first token, or a line is not written yet."""
    if served["kind"] == "router" and front is None:
        return False
    return bool((front or served).get("first_token_ns"))


def _merge(runner: Line, served: Line, front: Line | None) -> TruthRequest:
    outer = front or served
    start_ns, first_token_ns = outer["request_start_ns"], outer["first_token_ns"]
    before = _routed(runner, front) if front else _direct(runner, served)
    switched = bool(front and front["exec_ns"]) or start_ns < runner["ready_ns"]
    # A front that hands on to a runner that was able all along is no gap after its becoming so.
    moments = [*before, ("ready_gap" if switched else "queue", served["received_ns"])]
    moments += [("queue", served["slot_ns"])] if served["waited_for_slot"] else []
    moments += [("prefill", served["prefill_end_ns"]), ("first_decode", first_token_ns)]
    request = TruthRequest(
        request_id=served["request_id"],
        model=served["model"],
        kind=served["kind"],
        request_start_ns=start_ns,
        first_token_ns=first_token_ns,
        switched=switched,
        complete=outer["complete"],
        runner_pid=served["pid"],
        prompt_tokens=served["prompt_tokens"],
        edges=_partition(start_ns, moments),
        at_ready=runner["counters"],
        at_end=served["counters"],
        marks={
            name: value
            for line in (runner, served, front or {})
            for name, value in line.items()
            if name.endswith("_ns") and value is not None
        },
    )
    _check(request)
    return request


def _routed(runner: Line, front: Line) -> list[tuple[str, int]]:
    """(phase, its end) from the front's arrival up to where the new runner could serve."""
    if not front["exec_ns"]:
        return [("queue", max(runner["ready_ns"], front["request_start_ns"]))]
    evict = [("queue", front["kill_ns"]), ("evict", front["exec_ns"])]
    fresh = [("queue", front["exec_ns"])]
    return [*(evict if front["kill_ns"] else fresh), *_start_up(runner)]


def _direct(runner: Line, served: Line) -> list[tuple[str, int]]:
    """A request that lay in the listen backlog saw only what was left of the start-up."""
    start_ns = served["request_start_ns"]
    return [(phase, end_ns) for phase, end_ns in _start_up(runner) if end_ns > start_ns]


def _start_up(runner: Line) -> list[tuple[str, int]]:
    return [
        ("launch", runner["first_touch_ns"]),
        ("load", runner["last_weight_ns"]),
        ("init", runner["ready_ns"]),
    ]


def _partition(start_ns: int, moments: Iterable[tuple[str, int]]) -> tuple[Edge, ...]:
    edges = []
    at_ns = start_ns
    for phase, end_ns in moments:
        if end_ns < at_ns:
            raise TruthError(f"{phase} ends {at_ns - end_ns} ns before it starts")
        if end_ns > at_ns:
            edges.append(Edge(phase, at_ns, end_ns))
        at_ns = end_ns
    return tuple(edges)


def _check(request: TruthRequest) -> None:
    edges = request.edges
    if not edges or edges[0].start_ns != request.request_start_ns:
        raise TruthError(f"{request.request_id}: does not begin at the request's start")
    if edges[-1].end_ns != request.first_token_ns:
        raise TruthError(f"{request.request_id}: does not end at the first token")
    if any(a.end_ns != b.start_ns for a, b in itertools.pairwise(edges)):
        raise TruthError(f"{request.request_id}: phases do not abut")
    if sum(request.totals_ns.values()) != request.ttft_ns:
        raise TruthError(f"{request.request_id}: phases do not add up to TTFT")
