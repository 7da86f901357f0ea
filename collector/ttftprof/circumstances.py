"""What else is known of one request's wait: who had the cores, what was loaded before, who polled.

Pure. These are the facts that verdicts rest on beside phases and activities; each is a count or a
comparison of the recording's own facts, and None or empty where the recording does not tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from ttftprof import scale
from ttftprof.activities import cpu_wait_ns
from ttftprof.engines.catalog import Engine, FixedWait, option_of
from ttftprof.engines.driver_calls import CONTEXT
from ttftprof.events import Kind
from ttftprof.gpu_parts import length, union
from ttftprof.grouping import between
from ttftprof.model import Evidence, Phase
from ttftprof.phases import Served, Started, StartUp
from ttftprof.phases.holders import files_used
from ttftprof.phases.naps import Woken
from ttftprof.phases.room import evicted
from ttftprof.phases.served import ancestors
from ttftprof.phases.startup import idle_since_ns
from ttftprof.storage import counted
from ttftprof.threads import FOREVER
from ttftprof.timeline import Process, Timeline

CROWDED = 0.1  # share of the time in which a thread wanted to run and had to wait for a core
_NOTICEABLE_NS = 20_000_000
_NOTICEABLE_SHARE = 0.01
_MOSTLY_LOAD = 0.9
_LAZY_SHARE = 0.05  # of the weights, read inside prefill, from which it is a load in disguise
_SIGNALS = {6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
_ASKED_TO_END = {2, 15}
_KILL = 9
# A prompt shorter than this is soon processed again.
_LONG_PROMPT = 256


@dataclass(frozen=True, slots=True)
class CoreWait:
    """Threads that wanted to run, summed: how long they waited for a core, how long they ran.

    `by`: the other process of the target that ran most meanwhile, if it ran for long.
    """

    waited_ns: int
    ran_ns: int
    by: str = ""

    @property
    def share(self) -> float:
        wanted = self.waited_ns + self.ran_ns
        return self.waited_ns / wanted if wanted else 0.0


@dataclass(frozen=True, slots=True)
class Polls:
    """The front's looks at the new server: how many, how far apart (None: one alone)."""

    count: int
    quantum_ns: int | None


@dataclass(frozen=True, slots=True)
class Reload:
    """The file had been loaded before, by a process that is gone. `why`: words; `changed`: options
    that differ, as (name, before, now)."""

    path: str
    why: str
    changed: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class OwnLoad:
    """What the server's answer calls its load (Ollama: `load_duration`) though it is not, and what
    went on in it: it counts from the request's arrival to the runner's being there, whatever that
    took."""

    told_ns: int
    spent: tuple[tuple[str, int], ...]  # (phase, ns), in order of time

    def words(self) -> str:
        parts = ", ".join(f"{phase} {scale.duration(ns)}" for phase, ns in self.spent)
        return (
            f"the server's own load_duration of {scale.duration(self.told_ns)} is not the load "
            f"alone: {parts}"
        )


@dataclass(frozen=True, slots=True)
class Circumstances:
    """See the module. `by_phase` durations are nanoseconds."""

    front: Engine | None = None
    server: Engine | None = None
    core_waits: Mapping[str, CoreWait] = field(default_factory=dict)
    polls: Polls | None = None
    after_end_ns: int | None = None  # from the old process's end to the next one's execution
    reload: Reload | None = None
    fit_ns: int = 0  # spent in launch on a load that only looked whether the model fits
    unasked_ns: int = 0  # of the launch: the new process was up and waited for its front to ask it
    helpers: int = 0  # processes that came and went during launch
    silent_tokens: int = 0  # decoded between the prompt and the first text
    lazy_bytes: int = 0  # of the weights, from storage, inside prefill
    cache_lost_tokens: int | None = None  # processed again because the switch lost the prompt cache
    reprocessed: bool = False  # the server said that it processes the whole prompt again
    woken: Woken | None = None  # the engine was asleep, and was woken for the request
    own_load: OwnLoad | None = None

    def fixed_waits(self, phase: str) -> list[FixedWait]:
        """The waits by the clock that this front and this server are known for in a phase; of an
        engine whose versions differ, the one that the looks which were seen fit best."""
        engines = dict.fromkeys(engine for engine in (self.front, self.server) if engine)
        rows = ([w for w in engine.waits if w.phase == phase] for engine in engines)
        seen_ns = self.polls.quantum_ns if self.polls is not None else None
        return [_fitting(waits, seen_ns) for waits in rows if waits]


def _fitting(waits: Sequence[FixedWait], seen_ns: int | None) -> FixedWait:
    """The newest version's, where nothing was seen."""
    if seen_ns is None:
        return waits[0]
    return min(waits, key=lambda wait: abs(wait.quantum_ns - seen_ns))


def circumstances_of(
    timeline: Timeline,
    served: Served,
    start: StartUp | None,
    phases: Sequence[Phase],
    critical: Sequence[int],
    everyone: Sequence[Served],
) -> Circumstances:
    """Everything the recording tells of one request beside its phases. `critical`: the process
    that held up each phase."""
    switched_in = start if start and _inside(start, served) else None
    return Circumstances(
        front=timeline.engine_of(served.front.tgid),
        server=timeline.engine_of(served.server),
        core_waits=core_waits(timeline, phases, critical),
        polls=_polls(timeline, served, start) if switched_in else None,
        after_end_ns=_after_end_ns(timeline, served, start) if switched_in else None,
        reload=_reload(timeline, served, switched_in, everyone) if switched_in else None,
        fit_ns=_fit_ns(timeline, start, phases),
        unasked_ns=_unasked_ns(timeline, start, phases),
        helpers=_helpers(timeline, served, phases),
        silent_tokens=_silent_tokens(timeline, served, phases),
        lazy_bytes=lazy_bytes(timeline, start, phases),
        cache_lost_tokens=_cache_lost(served, switched_in, everyone) if switched_in else None,
        reprocessed=_said_reprocessed(timeline, served),
        woken=start.woken if start else None,
        own_load=_own_load(served, phases),
    )


def of_start(timeline: Timeline, started: Started) -> Circumstances:
    """The same of a start that no request waited for, as far as it has any."""
    tgid = started.start.process.tgid
    return Circumstances(
        server=timeline.engine_of(tgid),
        core_waits=core_waits(timeline, started.phases, started.critical_processes()),
        fit_ns=_fit_ns(timeline, started.start, started.phases),
    )


def _inside(start: StartUp, served: Served) -> bool:
    """Whether the model was loaded during the wait."""
    edge = start.load_end or start.ready
    return edge is not None and edge.ns > served.front.start_ns


# -- cores ----------------------------------------------------------------------------------------


def core_waits(
    timeline: Timeline, phases: Sequence[Phase], critical: Sequence[int]
) -> dict[str, CoreWait]:
    """{phase: how its process's threads fared for cores}, where they waited a good deal."""
    sums: dict[str, CoreWait] = {}
    for phase, tgid in zip(phases, critical, strict=True):
        window = phase.start_ns, phase.end_ns
        waited = cpu_wait_ns(timeline, tgid, *window)
        ran = counted(timeline, {tgid}, "cpu_ns", *window)
        so_far = sums.get(phase.phase, CoreWait(0, 0))
        sums[phase.phase] = CoreWait(so_far.waited_ns + waited, so_far.ran_ns + ran)
    crowded = {
        name: wait
        for name, wait in sums.items()
        if wait.share >= CROWDED and wait.waited_ns >= _NOTICEABLE_NS
    }
    for phase, tgid in zip(phases, critical, strict=True):
        wait = crowded.get(phase.phase)
        if wait is not None and not wait.by:
            by = _rival(timeline, tgid, (phase.start_ns, phase.end_ns))
            crowded[phase.phase] = replace(wait, by=by)
    return crowded


def _rival(timeline: Timeline, tgid: int, window: tuple[int, int]) -> str:
    ran = {
        other: counted(timeline, {other}, "cpu_ns", *window)
        for other in timeline.thread_rows
        if other != tgid
    }
    other = max(ran, key=lambda t: ran[t], default=None)
    if other is None or ran[other] < (window[1] - window[0]) * CROWDED:
        return ""
    life = timeline.process_at(other, window[0])
    name = life.facts.get("comm") if life else None  # not known of a worker that was forked
    engine = timeline.engine_of(other)
    return f"{name or (engine.title if engine else 'a process')} (pid {other})"


# -- the front ------------------------------------------------------------------------------------


def _polls(timeline: Timeline, served: Served, start: StartUp | None) -> Polls | None:
    """Health checks of the new server by another process of the target, until it was handed on."""
    if start is None:
        return None
    began = max(start.process.start_ns, served.front.start_ns)
    asked = {served.server} | ({served.back.tgid} if served.back else set())
    until = max(served.received_ns, began)
    polls = timeline.derived(_polls_by_server, None)
    looks = sorted(ns for tgid in asked for ns in between(polls.get(tgid, ()), began, until, int))
    if not looks:
        return None
    apart = [b - a for a, b in pairwise(looks)]
    return Polls(len(looks), round(float(np.median(apart))) if apart else None)


def _polls_by_server(timeline: Timeline, _: None) -> dict[int, list[int]]:
    """When each server was asked by its own target for something else than text, in order."""
    found: dict[int, list[int]] = {}
    for e in sorted(timeline.exchanges, key=lambda e: e.start_ns):
        if e.from_target and not e.generates:
            found.setdefault(e.tgid, []).append(e.start_ns)
    return found


def _after_end_ns(timeline: Timeline, served: Served, start: StartUp | None) -> int | None:
    if start is None or start.began is None:
        return None
    old = evicted(timeline, served, start)
    return start.began.ns - old.gone_ns if old and old.gone_ns < start.began.ns else None


# -- the same file again --------------------------------------------------------------------------


def _reload(
    timeline: Timeline, served: Served, start: StartUp | None, everyone: Sequence[Served]
) -> Reload | None:
    """Why a file is loaded that was loaded before; None if it was not, or made room meanwhile."""
    if start is None or start.weights is None:
        return None
    before = _held_before(timeline, start)
    if before is None or _used_between(before, start.process, served, everyone):
        return None
    path = start.weights.path
    changed = _changed(timeline, before, start.process)
    if changed:
        words = ", ".join(
            f"{name} {old or 'unset'} → {new or 'unset'}" for name, old, new in changed
        )
        return Reload(path, f"the server was started with other options ({words})", changed)
    crash = _crash(timeline, before)
    if crash:
        return Reload(path, f"the process that had it ended by itself ({crash})")
    if before.left_ns < served.front.start_ns:
        idle_ns = before.gone_ns - _last_use_ns(timeline, before)
        return Reload(path, f"it had been unloaded after {idle_ns / 1e9:.1f} s without a request")
    return Reload(path, "the process that had it was ended for this request")


def _held_before(timeline: Timeline, start: StartUp) -> Process | None:
    """The last other process that used the file and went before this one was executed."""
    assert start.weights is not None
    began = start.process.exec_ns or start.process.start_ns
    lives = (life for lives in timeline.processes.values() for life in lives)
    gone = [
        life
        for life in lives
        if life is not start.process
        and life.left_ns <= began
        and start.weights in files_used(timeline, life, 0, life.gone_ns)
    ]
    return max(gone, key=lambda life: life.gone_ns, default=None)


def _used_between(
    before: Process, now: Process, served: Served, everyone: Sequence[Served]
) -> bool:
    """Whether another process had somebody's request in between: then this is a switch back."""
    return any(
        o is not served
        and o.server not in (before.tgid, served.server)
        and before.gone_ns <= o.last_ns
        and o.received_ns <= now.runs_ns
        for o in everyone
    )


def _changed(timeline: Timeline, before: Process, now: Process) -> tuple[tuple[str, str, str], ...]:
    """The telling options that two command lines give differently."""
    engine = timeline.engine_of(now.tgid)
    names = engine.telling if engine else ()
    told = ((name, option_of(before.argv, [name]), option_of(now.argv, [name])) for name in names)
    return tuple((name, old or "", new or "") for name, old, new in told if old != new)


def _crash(timeline: Timeline, process: Process) -> str:
    """How a process ended that nobody had asked to; "" if somebody had, or it is not known."""
    exits = timeline.of_kind(Kind.PROCESS_EXIT)
    mine = exits[(exits["tgid"] == process.tgid) & (exits["start_ns"] <= process.gone_ns)]
    if not len(mine):
        return ""
    status = int(mine["a"][-1])
    signals = timeline.of_kind(Kind.SIGNAL)
    asked = signals[(signals["tgid"] == process.tgid) & (signals["start_ns"] <= process.gone_ns)]
    above = set(ancestors(timeline, process))
    for signal in asked:
        sender, number = int(signal["a"]), int(signal["flags"])
        # Ollama ends its runners by SIGKILL; from anybody else that is no way to ask.
        if (number in _ASKED_TO_END and sender != process.tgid) or (
            number == _KILL and sender in above
        ):
            return ""
    number, code = status & 0x7F, status >> 8 & 0xFF
    if number:
        return _SIGNALS.get(number, f"signal {number}")
    return f"exit code {code}" if code else ""


def _last_use_ns(timeline: Timeline, process: Process) -> int:
    """The end of the last answer it gave, else when it was last started."""
    ends = [
        e.end_ns
        for e in timeline.exchanges
        if e.tgid == process.tgid and e.generates and e.end_ns and e.end_ns <= process.gone_ns
    ]
    return max(ends, default=max(process.start_ns, timeline.start_ns))


# -- launch ---------------------------------------------------------------------------------------


def _window(phases: Sequence[Phase], name: str) -> tuple[int, int] | None:
    mine = [p for p in phases if p.phase == name]
    return (mine[0].start_ns, mine[-1].end_ns) if mine else None


def _fit_ns(timeline: Timeline, start: StartUp | None, phases: Sequence[Phase]) -> int:
    """Engine calls before the load: a first, header-only load that looks whether the model fits. To
    make the device's context, as its first call of the driver may do, is needed in any case."""
    window = _window(phases, "launch")
    if start is None or window is None:
        return 0
    calls = [
        c for c in timeline.calls_of(start.process.tgid, None, *window) if c.end_ns <= window[1]
    ]
    if not any(c.name == "model_load" for c in calls):
        return 0
    span = min(c.start_ns for c in calls), max(c.end_ns for c in calls)
    made = timeline.gpu.during(start.process.tgid, *span)
    contexts = union(((c.start_ns, c.end_ns) for c in made if c.group == CONTEXT), span)
    return span[1] - span[0] - length(contexts)


def _unasked_ns(timeline: Timeline, start: StartUp | None, phases: Sequence[Phase]) -> int:
    """Of a server that is told what to load only when its front finds it up: how long it listened,
    with nothing else to do, until it was connected to."""
    window = _window(phases, "launch")
    if start is None or window is None:
        return 0
    listened, accepted = (
        _first_ns(timeline, kind, start.process.tgid, window) for kind in (Kind.LISTEN, Kind.ACCEPT)
    )
    if listened is None or accepted is None:
        return 0
    since_ns = idle_since_ns(timeline, start.process, listened, accepted)
    return accepted - since_ns if since_ns is not None else 0


def _first_ns(timeline: Timeline, kind: Kind, tgid: int, window: tuple[int, int]) -> int | None:
    records = timeline.of_kind(kind)
    own = records["start_ns"][records["tgid"] == tgid]
    inside = own[(own >= window[0]) & (own <= window[1])]
    return int(inside.min()) if len(inside) else None


def _helpers(timeline: Timeline, served: Served, phases: Sequence[Phase]) -> int:
    """Processes that were started and ended within the launch: probing children, compilers."""
    window = _window(phases, "launch")
    if window is None:
        return 0
    return sum(
        1
        for lives in timeline.processes.values()
        for life in lives
        if life.exec_ns is not None
        and life.tgid not in (served.server, served.front.tgid)
        and window[0] <= life.exec_ns
        and life.gone_ns <= window[1]
    )


# -- prefill and decode ---------------------------------------------------------------------------


def lazy_bytes(timeline: Timeline, start: StartUp | None, phases: Sequence[Phase]) -> int:
    """Bytes of the weights that came from storage inside prefill, if they are a good part."""
    window = _window(phases, "prefill")
    if start is None or window is None or not start.shards:
        return 0
    size = sum(f.size_bytes for f in start.shards)
    pages = sum(f.delta("added_pages", *window) for f in start.shards)
    came = pages * timeline.page_bytes
    return came if came >= _LAZY_SHARE * size else 0


def with_lazy_load(phases: Sequence[Phase], came: int) -> tuple[Phase, ...]:
    """The phases, prefill with the evidence that weights were read inside it."""
    if not came:
        return tuple(phases)
    what = "of the weights came from storage inside it: the load was left to the first use"
    found = Evidence("files", what, came, "bytes")
    return tuple(
        replace(p, evidence=(*p.evidence, found)) if p.phase == "prefill" else p for p in phases
    )


def _silent_tokens(timeline: Timeline, served: Served, phases: Sequence[Phase]) -> int:
    """Tokens decoded after the prompt that showed no text."""
    window = _window(phases, "first_decode")
    if window is None:
        return 0
    return len(timeline.calls_of(served.server, "decode", *window))


def _own_load(served: Served, phases: Sequence[Phase]) -> OwnLoad | None:
    told_ns = round(served.front.timings.get("load_duration_ns", 0))
    until_ns = min((p.start_ns for p in phases if p.phase == "prefill"), default=0)
    before = [p for p in phases if p.end_ns <= until_ns]
    loading_ns = sum(p.duration_ns for p in before if p.phase == "load")
    if told_ns < _NOTICEABLE_NS or loading_ns >= _MOSTLY_LOAD * told_ns:
        return None
    ended_ns = served.front.start_ns + told_ns  # it may have waited for a slot after that
    spent: dict[str, int] = {}
    for phase in before:
        inside_ns = max(min(phase.end_ns, ended_ns) - phase.start_ns, 0)
        spent[phase.phase] = spent.get(phase.phase, 0) + inside_ns
    noticeable = {name: ns for name, ns in spent.items() if ns >= _NOTICEABLE_SHARE * told_ns}
    return OwnLoad(told_ns, tuple(noticeable.items())) if noticeable else None


def _cache_lost(served: Served, start: StartUp, everyone: Sequence[Served]) -> int | None:
    """Prompt tokens processed again, of a model that had a long prompt before the switch: by a
    process that is gone, or that slept since (a sleeping engine keeps no cache)."""
    mine = served.last_hop
    tokens = mine.prompt_tokens
    if tokens is None or tokens < _LONG_PROMPT or mine.cached_tokens:
        return None
    had = any(
        o.front.model == served.front.model
        and (o.server != served.server or start.woken is not None)
        and (o.front.end_ns or FOREVER) <= served.front.start_ns
        and (o.last_hop.prompt_tokens or 0) * 2 >= tokens
        for o in everyone
    )
    return tokens if had else None


def _said_reprocessed(timeline: Timeline, served: Served) -> bool:
    return any(
        served.received_ns <= mark.ns <= served.last_ns
        for mark in timeline.marks_of(served.server, "full_reprocess")
    )


def notes_of(found: Circumstances) -> list[str]:
    """What of it deserves a note whatever the verdict."""
    notes = []
    if found.core_waits:
        worst = max(found.core_waits.values(), key=lambda w: w.waited_ns)
        name = next(n for n, w in found.core_waits.items() if w is worst)
        notes.append(
            f"in {name} the server's threads waited for a free core "
            f"{scale.percent(worst.share)} of the time they wanted to run: "
            f"{worst.by or 'other programs'} had the cores"
        )
    if found.reload is not None:
        notes.append(f"{found.reload.path} was loaded again: {found.reload.why}")
    if found.woken is not None:
        notes.append(found.woken.words())
    if found.own_load is not None:
        notes.append(found.own_load.words())
    if found.cache_lost_tokens is not None:
        notes.append(
            f"the switch lost the prompt cache: all {found.cache_lost_tokens:,} tokens of the "
            "prompt were processed again"
        )
    return notes
