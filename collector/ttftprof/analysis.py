"""From a recording to a `Report`: timeline → phases × activities → files → verdict. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from ttftprof import (
    circumstances,
    diagnosis,
    gpu,
    gpu_memory,
    gpu_parts,
    phases,
    python_time,
    remote,
    scale,
    storage,
)
from ttftprof.activities import merged, process_activities, while_idle
from ttftprof.circumstances import Circumstances
from ttftprof.diagnosis.gpu_rules import hints_of
from ttftprof.events import Kind, Records
from ttftprof.model import (
    Activities,
    Overhead,
    Phase,
    ProbeCost,
    Report,
    Request,
    Series,
    SourceState,
    Tracks,
    Verdict,
    first_weights,
)
from ttftprof.phases import Served, Started, StartUp
from ttftprof.recording import Reader
from ttftprof.timeline import Exchange, FileFacts, Timeline, build
from ttftprof.tracks import tracks_of

Choice = Callable[[Timeline, Sequence[Served], Sequence[str]], Iterable[int]]
"""The places of the requests, of which also the ids are given, that a report has to conclude."""


def every(_: Timeline, everyone: Sequence[Served], __: Sequence[str]) -> Iterable[int]:
    return range(len(everyone))


def slowest(number: int) -> Choice:
    """The requests that waited longest; before them none that was refused without any text."""

    def choice(timeline: Timeline, everyone: Sequence[Served], _: Sequence[str]) -> Iterable[int]:
        def urgency(place: int) -> tuple[bool, int]:
            served = everyone[place]
            return _is_refused(served), -phases.waited_ns(timeline, served)

        return sorted(range(len(everyone)), key=urgency)[:number]

    return choice


def only(identity: str) -> Choice:
    """The request with this id, if there is one."""
    return lambda _, __, ids: [place for place, known in enumerate(ids) if known == identity]


def analyse(path: Path, drawn: bool = True, choice: Choice = every) -> Report:
    """Everything a recording says; `drawn`: with the tracks that only drawings show; `choice`: of
    other requests it is only told who sent them and when. Raises `RecordingError` if it cannot be
    read."""
    return conclude(_read(path), path, drawn, choice)


def analyse_one_by_one(path: Path) -> OneByOne:
    """The same without tracks, of recordings that may have too many requests to be held at once."""
    return one_by_one(_read(path), path)


def _read(path: Path) -> Timeline:
    with Reader(path) as reader:
        return build(reader)


def conclude(timeline: Timeline, path: Path, drawn: bool = True, choice: Choice = every) -> Report:
    """The report on a timeline; `path` is only named in it."""
    found = one_by_one(timeline, path, choice)
    requests = tuple(found.requests)
    tracks = tracks_of(timeline) if drawn else Tracks()
    return replace(found.rest, requests=requests, series=found.series(), tracks=tracks)


@dataclass(frozen=True, slots=True)
class OneByOne:
    """A report whose requests are concluded as they are asked for, each once, and not kept.

    `rest`: the report without requests, series and tracks. `series`: once all requests were taken.
    """

    rest: Report
    requests: Iterator[Request]
    series: Callable[[], tuple[Series, ...]]


def one_by_one(timeline: Timeline, path: Path, choice: Choice = every) -> OneByOne:
    """What `conclude` gives but the tracks, request by request."""
    weights: set[str] = set()

    def requests() -> Iterator[Request]:
        for request in _Requests(timeline).told(choice):
            weights.update(f.path for f in request.files if f.is_weights)
            yield request

    return OneByOne(_rest(timeline, path), requests(), lambda: tuple(_series(timeline, weights)))


def _rest(timeline: Timeline, path: Path) -> Report:
    meta = timeline.meta
    clock = meta.get("clock") or {}
    return Report(
        tool=dict(meta.get("tool") or {}),
        host=dict(meta.get("host") or {}),
        path=str(path),
        start_ns=timeline.start_ns,
        end_ns=timeline.end_ns,
        complete=timeline.complete,
        ended_because=str(meta.get("ended_because") or "unknown: recording was cut off"),
        realtime_offset_ns=clock.get("realtime_offset_ns"),
        sources=_sources(timeline),
        lost=dict(timeline.lost),
        overhead=_overhead(timeline),
        requests=(),
        series=(),
        notes=tuple(_notes(timeline)),
        starts=tuple(start for _, start in starts(timeline)),
    )


def _sources(timeline: Timeline) -> tuple[SourceState, ...]:
    return tuple(SourceState(s.name, s.state, s.reason, s.lost) for s in timeline.sources)


def _overhead(timeline: Timeline) -> Overhead:
    own = timeline.meta.get("own") or {}
    costs = timeline.meta.get("probe_costs") or {}
    probes = tuple(
        ProbeCost(name, int(runs), ns / runs) for name, (runs, ns) in sorted(costs.items()) if runs
    )
    return Overhead(own.get("cpu_ns"), own.get("max_rss_bytes"), probes, tuple(timeline.reliefs))


# -- requests -------------------------------------------------------------------------------------


def concluded(
    timeline: Timeline,
    wanted: Callable[[Served], bool] = lambda _: True,
    known: Sequence[Request] = (),
) -> list[tuple[Served, Request]]:
    """The requests of a timeline, each with what it was concluded from, oldest first.

    `wanted` chooses among them; `known` are other requests, concluded before, that these may be
    held against.
    """
    requests = _Requests(timeline, wanted, known)
    return [(requests.everyone[place], requests.judged(place)) for place in requests.wanted]


class _Requests:
    """The requests of a timeline, none concluded before it is needed: a report that shows the
    slowest of thousands concludes these and what they are held against."""

    def __init__(
        self,
        timeline: Timeline,
        wanted: Callable[[Served], bool] = lambda _: True,
        known: Sequence[Request] = (),
    ) -> None:
        self._timeline, self._known = timeline, known
        self.everyone = phases.requests_of(timeline)
        self.wanted = [place for place, served in enumerate(self.everyone) if wanted(served)]
        self._ids = _identities(self.everyone)
        self._found: dict[int, tuple[Request, Circumstances]] = {}

    def told(self, choice: Choice) -> Iterator[Request]:
        """All of them, those that are not chosen in outline."""
        chosen = set(choice(self._timeline, self.everyone, self._ids))
        for place, (served, identity) in enumerate(zip(self.everyone, self._ids, strict=True)):
            if place in chosen:
                yield self.judged(place)
            else:
                yield _outline(self._timeline, served, identity)

    def judged(self, place: int) -> Request:
        request, known = self._found.get(place) or self._conclusion(place)
        baseline = self._baseline(request)
        return _judged(self._timeline, request, baseline, self.everyone[place].server, known)

    def _conclusion(self, place: int) -> tuple[Request, Circumstances]:
        served, identity = self.everyone[place], self._ids[place]
        return _request(self._timeline, served, self.everyone, identity)

    def _candidate(self, place: int) -> Request:
        """Kept: every request that waited for its model is held against the same few."""
        if place not in self._found:
            self._found[place] = self._conclusion(place)
        return self._found[place][0]

    def _baseline(self, request: Request) -> Request | None:
        """The quickest that found its model resident, with about the same prompt."""
        if not request.switched:
            return None
        known = [r for r in self._known if _is_baseline(r, request)]
        fitting = (
            found
            for place in self._quickest
            if self._may_be_baseline(self.everyone[place], request)
            and _is_baseline(found := self._candidate(place), request)
        )
        both = [*known, *([first] if (first := next(fitting, None)) else [])]
        return min(both, key=lambda r: r.ttft_ns or 0, default=None)

    @cached_property
    def _quickest(self) -> list[int]:
        """The wanted ones, the quickest first."""
        return sorted(self.wanted, key=lambda n: phases.waited_ns(self._timeline, self.everyone[n]))

    def _may_be_baseline(self, served: Served, request: Request) -> bool:
        """As far as it can be told without concluding it."""
        return (
            _is_answered_like(request, served.front.outcome, served.last_hop.prompt_tokens)
            and served.front.first_token_ns is not None
            and not phases.is_switch(self._timeline, served)
        )


def _identities(everyone: Sequence[Served]) -> list[str]:
    """Numbers in order of time; those that got an error and no text, which reports leave out, come
    after all others, so that the numbers shown do not jump."""
    order = sorted(range(len(everyone)), key=lambda place: _is_refused(everyone[place]))
    numbers = {index: number for number, index in enumerate(order, 1)}
    return [str(numbers[index]) for index in range(len(everyone))]


def _is_refused(served: Served) -> bool:
    return served.front.outcome == "error" and served.front.first_token_ns is None


_UNJUDGED = Verdict("unknown", None, None, "low", "")


def _outline(timeline: Timeline, served: Served, identity: str) -> Request:
    """Who asked and when, and what came of it."""
    front, mine = served.front, served.last_hop
    return Request(
        id=identity,
        engine=_engine(timeline, served),
        model=front.model or mine.model,
        endpoint=front.endpoint,
        streamed=front.streamed,
        outcome=front.outcome,
        start_ns=front.start_ns,
        first_token_ns=front.first_token_ns,
        end_ns=front.end_ns,
        switched=False,
        residency_before=None,
        prompt_tokens=mine.prompt_tokens,
        cached_tokens=mine.cached_tokens,
        phases=(),
        activities=Activities.none(),
        files=(),
        mounts=(),
        gpu=(),
        verdict=_UNJUDGED,
    )


def _request(
    timeline: Timeline, served: Served, everyone: Sequence[Served], identity: str
) -> tuple[Request, Circumstances]:
    front = served.front
    parts = phases.partition(timeline, served, everyone)
    critical = phases.critical_processes(timeline, served, parts)
    start = phases.start_up(timeline, served)
    activities = _activities(timeline, parts, critical, start)
    parts = gpu_parts.with_parts(timeline, parts, critical, activities)
    parts = gpu_memory.with_eviction(timeline, parts)
    parts = phases.with_naps(parts, start.woken if start else None)
    known = circumstances.circumstances_of(timeline, served, start, parts, critical, everyone)
    parts = circumstances.with_lazy_load(parts, known.lazy_bytes)
    end_ns = parts[-1].end_ns if parts else front.start_ns
    members = {served.server} | (start.members if start else set())
    files, mounts = storage.uses_of(timeline, start, members, front.start_ns, end_ns, parts)
    weights = first_weights(files)
    request = replace(
        _outline(timeline, served, identity),
        switched=phases.is_switch(timeline, served),
        residency_before=weights.residency_before if weights else None,
        phases=parts,
        activities=activities,
        files=files,
        mounts=mounts,
        gpu=tuple(gpu.uses_of(timeline, served.server, front.start_ns, end_ns)),
        notes=(
            *_request_notes(timeline, served),
            *circumstances.notes_of(known),
            *storage.notes_of(files),
        ),
        memory=storage.memory_of(timeline, served.server),
        python=python_time.times_of(timeline, parts, critical),
    )
    return request, known


def starts(timeline: Timeline) -> list[tuple[Started, Request]]:
    """The starts that no request waited for, each with what it was concluded from."""
    everyone = phases.requests_of(timeline)
    return [
        (
            started,
            _judged(
                timeline,
                _start(timeline, started, f"start {number}"),
                None,
                started.start.process.tgid,
                circumstances.of_start(timeline, started),
            ),
        )
        for number, started in enumerate(phases.starts_of(timeline, everyone), 1)
    ]


def _start(timeline: Timeline, started: Started, identity: str) -> Request:
    parts, process, weights = started.phases, started.start.process, started.start.weights
    begin_ns, end_ns = parts[0].start_ns, parts[-1].end_ns
    critical = started.critical_processes()
    activities = _activities(timeline, parts, critical, started.start)
    parts = gpu_parts.with_parts(timeline, parts, critical, activities)
    parts = gpu_memory.with_eviction(timeline, parts)
    files, mounts = storage.uses_of(
        timeline, started.start, {process.tgid}, begin_ns, end_ns, parts
    )
    weights_used = first_weights(files)
    return Request(
        id=identity,
        engine=_engine_name(timeline, process.tgid),
        model=Path(weights.path).name if weights else None,
        endpoint="",
        streamed=None,
        outcome="ok" if started.start.ready else "incomplete",
        start_ns=begin_ns,
        first_token_ns=None,
        end_ns=end_ns,
        switched=True,
        residency_before=weights_used.residency_before if weights_used else None,
        prompt_tokens=None,
        cached_tokens=None,
        phases=parts,
        activities=activities,
        files=files,
        mounts=mounts,
        gpu=tuple(gpu.uses_of(timeline, process.tgid, begin_ns, end_ns)),
        verdict=_UNJUDGED,
        memory=storage.memory_of(timeline, process.tgid),
        python=python_time.times_of(timeline, parts, critical),
    )


def _engine(timeline: Timeline, served: Served) -> str | None:
    named = (_engine_name(timeline, tgid) for tgid in (served.front.tgid, served.server))
    return next((name for name in named if name), None)


def _engine_name(timeline: Timeline, tgid: int) -> str | None:
    engine = timeline.engine_of(tgid)
    return engine.name if engine else None


def _activities(
    timeline: Timeline, parts: Sequence[Phase], critical: Sequence[int], start: StartUp | None
) -> Activities:
    return merged(
        _of_phase(timeline, phase, tgid, start) for phase, tgid in zip(parts, critical, strict=True)
    )


def _of_phase(timeline: Timeline, phase: Phase, tgid: int, start: StartUp | None) -> Activities:
    """What its process did. Once an engine's worker has nothing to do, its server is waited for;
    once that has nothing to do or is not there yet, whoever starts both."""
    window = phase.start_ns, phase.end_ns
    mine = process_activities(timeline, tgid, *window, phase.phase == "load")
    if phase.phase != "init" or start is None or not start.launchers:
        return mine
    for other in (*start.servers, start.launchers[0]):
        mine = while_idle(mine, process_activities(timeline, other.tgid, *window))
    return mine


def _request_notes(timeline: Timeline, served: Served) -> list[str]:
    notes = list(dict.fromkeys([*served.front.notes, *(served.back.notes if served.back else ())]))
    if served.front.status is not None and served.front.status >= 400:
        notes.append(f"answered with HTTP status {served.front.status}")
    if served.front.outcome == "cancelled" and _ended_before(timeline, served.front):
        notes.append("the server's process ended before it had answered")
    if served.front.start_ns <= timeline.armed_ns:
        notes.append("it began before recording did: it waited at least this long")
    return notes


def _ended_before(timeline: Timeline, exchange: Exchange) -> bool:
    """Whether the server ended, and its sockets only with it: a client's hanging up comes first."""
    end_ns = exchange.end_ns if exchange.end_ns is not None else timeline.end_ns
    server = timeline.process_at(exchange.tgid, exchange.start_ns)
    return server is not None and server.exit_ns is not None and server.exit_ns <= end_ns


def _judged(
    timeline: Timeline,
    request: Request,
    baseline: Request | None,
    server: int,
    known: Circumstances,
) -> Request:
    length = sum(p.duration_ns for p in request.phases)
    facts = diagnosis.Facts(
        ttft_ns=length,
        phases=request.phases,
        activities=request.activities,
        files=request.files,
        mounts=request.mounts,
        table=request.phase_activity(),
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        sources_missing=sum(1 for s in _sources(timeline) if s.is_missed),
        answered=request.first_token_ns is not None or not request.endpoint,
        outcome=request.outcome,
        hints=hints_of(timeline, request.phases, server),
        known=known,
        memory=request.memory,
        python=request.python,
        until="to the first token" if request.endpoint else "until it could serve",
    )
    return replace(request, verdict=diagnosis.judge(facts, baseline))


def _is_baseline(one: Request, request: Request) -> bool:
    """Whether a request found its model resident and waited for nobody, with about the prompt of
    one that did not."""
    return (
        not one.switched
        and one.ttft_ns is not None
        and _is_answered_like(request, one.outcome, one.prompt_tokens)
        and not any(p.phase == "queue" and p.duration_ns > diagnosis.NOISE_NS for p in one.phases)
    )


def _is_answered_like(request: Request, outcome: str, prompt_tokens: int | None) -> bool:
    return outcome == "ok" and _alike(prompt_tokens, request.prompt_tokens)


def _alike(one: int | None, other: int | None) -> bool:
    """Prompts within a factor of 1.5 of each other."""
    if not one or not other:
        return False
    return max(one, other) <= 1.5 * min(one, other)


# -- series ---------------------------------------------------------------------------------------


def _series(timeline: Timeline, weights: Collection[str]) -> list[Series]:
    """`weights`: paths that requests used as such, whether they look so or not."""
    files = [f for f in timeline.files.values() if len(f.rows)]
    found = [_storage_series(timeline, files)]
    for counter, name in (("maj_flt", "major_faults"), ("min_flt", "minor_faults")):
        found.append(_fault_series(timeline, counter, name))
    found += [_residency_series(timeline, f) for f in files if f.is_weights or f.path in weights]
    found += gpu.series_of(timeline)
    return [s for s in found if s.ns]


def _storage_series(timeline: Timeline, files: Sequence[FileFacts]) -> Series:
    """Bytes from storage of all files, running total."""
    page = timeline.page_bytes
    columns = [
        (f.rows["ns"], f.rows["added_pages"].astype(np.float64) * page + f.rows["direct_bytes"])
        for f in files
    ]
    stamps, totals = _summed(columns)
    return Series("storage_bytes", "bytes", None, stamps, totals)


def _fault_series(timeline: Timeline, counter: str, name: str) -> Series:
    columns = []
    for threads in timeline.thread_rows.values():
        for own in threads:
            values = own[counter].astype(np.float64)
            new = int(own["since_ns"][0]) > timeline.armed_ns
            columns.append((own["ns"], values if new else values - values[0]))
    stamps, totals = _summed(columns)
    return Series(name, "faults", None, stamps, totals)


def _summed(
    columns: Sequence[tuple[Records, Records]],
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Running total of several counters, each given at its own moments."""
    if not columns:
        return (), ()
    stamps = np.concatenate([ns for ns, _ in columns]).astype(np.int64)
    steps = np.concatenate([np.maximum(np.diff(v, prepend=0.0), 0.0) for _, v in columns])
    order = np.argsort(stamps, kind="stable")
    stamps, totals = stamps[order], np.cumsum(steps[order])
    last = np.append(np.flatnonzero(np.diff(stamps)), len(stamps) - 1)
    return tuple(stamps[last].tolist()), tuple(totals[last].tolist())


def _residency_series(timeline: Timeline, file: FileFacts) -> Series:
    levels = file.rows["cached_pages"].astype(np.float64) * timeline.page_bytes
    return Series(
        "cached_bytes",
        "bytes",
        file.path,
        tuple(file.rows["ns"].astype(np.int64).tolist()),
        tuple(np.minimum(levels, file.size_bytes).tolist()),
    )


def _notes(timeline: Timeline) -> list[str]:
    notes = []
    mount = timeline.meta.get("recording_on_measured_mount")
    if mount:
        notes.append(f"the recording was written to the mount it measured ({mount})")
    for source in _sources(timeline):
        if source.name == "gpu" and source.state == "absent" and not source.is_missed:
            notes.append(f"no GPU is shown: {source.reason}")
    notes += _clock_notes(timeline)
    notes += gpu.notes_of(timeline)
    tls = len({e.socket for e in timeline.exchanges if any("TLS" in n for n in e.notes)})
    if tls:
        notes.append(f"{tls} connection(s) were encrypted: their requests could not be read")
    starved = timeline.of_kind(Kind.REMOTE_STARVED)
    notes += remote.notes(timeline.remote, timeline.mounts, timeline.shares, starved)
    notes += storage.read_beside(timeline)
    notes += storage.unseen_beneath(timeline)
    notes += storage.read_past_cache(timeline)
    return notes


def _clock_notes(timeline: Timeline) -> list[str]:
    """What happened to the machine's clocks: all times are CLOCK_MONOTONIC's, which is neither set
    nor goes on while the machine is suspended."""
    notes = []
    for ns, jump in timeline.jumps:
        when = f"{scale.estimate(max(ns - timeline.start_ns, 0))} after recording began"
        if jump.suspended_ns > 0:
            slept = scale.estimate(jump.suspended_ns)
            notes.append(f"the machine was suspended for {slept}, {when}: no time here counts it")
        if jump.set_ns:
            way = "forward" if jump.set_ns > 0 else "back"
            step = scale.estimate(abs(jump.set_ns))
            notes.append(
                f"the wall clock was set {way} by {step}, {when}: the times of day here are those "
                "of the clock before"
            )
    return notes
