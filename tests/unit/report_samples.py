"""Synthetic reports: the three of the demo, every edge case, and a strategy for any valid one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from ttftprof.model import (
    ACTIVITIES,
    BASES,
    CONFIDENCES,
    OUTCOMES,
    PHASES,
    STORAGE_VERDICTS,
    Action,
    Activity,
    Evidence,
    FileUse,
    GpuUse,
    InFlight,
    MemoryUse,
    MountUse,
    Overhead,
    Part,
    PathModel,
    Phase,
    PhaseShare,
    ProbeCost,
    ProcessTrack,
    PythonShare,
    PythonStack,
    PythonTime,
    PythonWait,
    Quantiles,
    Report,
    Request,
    Series,
    SizeTrack,
    SourceState,
    Spans,
    Tick,
    Tracks,
    Verdict,
    WaitSplit,
)

MS = 1_000_000
BEGAN_NS = 81_234_567_890_123
"""Where the clock stands when a sample's recording begins."""
WEIGHTS = "/srv/models/model-b.gguf"
WEIGHTS_BYTES = 314_572_800
HOSTILE_NAMES = (
    "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "one\r\ntwo\tthree\x00\x7f\x9b31m",
    "\u202egnp.evil\u202c \u200b\u2066x\u2069",
    "[bold]not markup[/bold] [link=http://x]y[/link] :smile:",
    "x" * 4096,
    "模型" * 60 + "한국어",
    "e\u0301" + "\u0301" * 200 + "👨\u200d👩\u200d👧 ❤\ufe0f 👍🏽",
    "\ud800 lone \udfff surrogates",
    "<script>alert('1')</script>\"&amp;",
    "",
)

Parts = Sequence[tuple[str, float]]
"""(name, ms) one after the other."""
Points = Sequence[tuple[float, float]]
"""(value, ms)"""


def phases(start_ns: int, parts: Parts, inferred: Sequence[str] = ()) -> tuple[Phase, ...]:
    """Phases that abut, `inferred` ones with a rule as evidence."""
    out, at = [], start_ns
    for name, ms in parts:
        end = at + round(ms * MS)
        basis = "inferred" if name in inferred else "observed"
        evidence = (Evidence("sockets", f"the rule for {name}"),) if name in inferred else ()
        out.append(Phase(name, at, end, basis, evidence))
        at = end
    return tuple(out)


def activities(start_ns: int, end_ns: int, mix: Sequence[tuple[float, Parts]]) -> list[Activity]:
    """[start, end] in slices: each (ms, shares) cut into 20 ms rounds of its activities."""
    out: list[Activity] = []
    at = start_ns
    for ms, shares in mix:
        until = min(at + round(ms * MS), end_ns)
        while at < until:
            stop = min(at + 20 * MS, until)
            for number, (name, share) in enumerate(shares):
                last = number == len(shares) - 1
                end = stop if last else min(at + round(20 * MS * share), stop)
                if end > at:
                    out.append(Activity(name, at, end))
                    at = end
    if at < end_ns:
        out.append(Activity("cpu", at, end_ns))
    return out


def weights(path: str = WEIGHTS, **changes: Any) -> FileUse:
    """The model file of a cold switch by mmap."""
    file = FileUse(
        path=path,
        device="259:2",
        inode=1_835_021,
        fstype="ext4",
        mount="/srv",
        size_bytes=WEIGHTS_BYTES,
        bytes_from_storage=WEIGHTS_BYTES,
        bytes_from_cache=0,
        major_faults=2_318,
        minor_faults=12_040,
        storage_wait_ns=702_118_040,
        bytes_per_second=388.4e6,
        request_size_bytes=Quantiles(131_072, 262_144),
        in_flight=InFlight(1.4, 3),
        access="mmap",
        is_weights=True,
        mmaps=1,
        residency_before=0.0,
    )
    return replace(file, **changes)


def library() -> FileUse:
    """A file of which little is known."""
    return FileUse(
        path="/opt/llama/lib/x86_64-linux-gnu/libggml-cpu.so.0",
        device="259:2",
        inode=77,
        fstype="ext4",
        mount="/",
        size_bytes=1_912_344,
        bytes_from_storage=0,
        bytes_from_cache=1_912_344,
        major_faults=0,
        minor_faults=214,
        storage_wait_ns=0,
        bytes_per_second=None,
        request_size_bytes=None,
        in_flight=None,
        access="mmap",
        mmaps=4,
    )


def ramp(name: str, points: Points, start_ns: int, path: str | None = None) -> Series:
    """A series sampled every 20 ms that moves linearly between (value, ms) points."""
    ns: list[int] = []
    values: list[float] = []
    for (value, ms), (next_value, next_ms) in pairwise(points):
        steps = max(round((next_ms - ms) / 20), 1)
        for step in range(steps):
            part = step / steps
            ns.append(start_ns + round((ms + (next_ms - ms) * part) * MS))
            values.append(value + (next_value - value) * part)
    ns.append(start_ns + round(points[-1][1] * MS))
    values.append(points[-1][0])
    return Series(name, "pages" if "fault" in name else "bytes", path, tuple(ns), tuple(values))


def request(
    start_ns: int, parts: Parts, mix: Sequence[tuple[float, Parts]], **changes: Any
) -> Request:
    """A request with a first token at the end of its phases."""
    split = phases(start_ns, parts, inferred=("init",))
    end = split[-1].end_ns if split else start_ns
    made = Request(
        id="1",
        engine="llama-server",
        model="model-b",
        endpoint="/v1/chat/completions",
        streamed=True,
        outcome="ok",
        start_ns=start_ns,
        first_token_ns=end,
        end_ns=end + 400 * MS,
        switched=True,
        residency_before=0.0,
        prompt_tokens=34,
        cached_tokens=0,
        phases=split,
        activities=tuple(activities(start_ns, end, mix)),
        files=(library(), weights()),
        mounts=(MountUse("/srv", "ext4", "rw,relatime", 128, None, None, None, None, None),),
        gpu=(),
        verdict=Verdict(
            cause="load",
            activity="storage_wait",
            share=0.450,
            confidence="high",
            explanation="The wait is mostly loading: 702 ms of 1.562 s one thread waited for "
            "storage, in reads of 128 KiB with 1.4 in flight, at 388 MB/s.",
            actions=(
                Action(
                    "Raise the read-ahead of /srv from 128 KiB to 4 MiB: "
                    "echo 4096 | sudo tee /sys/class/bdi/259:2/read_ahead_kb",
                    430 * MS,
                    "record the same switch again and compare load / storage_wait",
                ),
                Action("Start llama-server with --no-mmap", None, "record it again"),
            ),
        ),
    )
    return replace(made, **changes)


def report(requests: Sequence[Request], path: str = "cold.ttft", **changes: Any) -> Report:
    """A complete recording of these requests, all well."""
    made = Report(
        tool={"name": "ttftprof", "version": "0.1.0"},
        host={"node": "nas1", "kernel": "6.18.44", "machine": "x86_64", "cpus": 4},
        path=path,
        start_ns=BEGAN_NS,
        end_ns=BEGAN_NS + 3_214 * MS,
        complete=True,
        ended_because="1 first token(s) seen",
        realtime_offset_ns=1_764_000_000_000_000_000,
        sources=(SourceState("files", "ok"), SourceState("sockets", "ok")),
        lost={"events ring full": 0},
        overhead=Overhead(38 * MS, 61_440_000, (ProbeCost("files_read", 812, 214.5),)),
        requests=tuple(requests),
    )
    return replace(made, **changes)


# -- the demo -------------------------------------------------------------------------------------

_START_NS = BEGAN_NS + 900 * MS
_MIXED_LOAD = [("storage_wait", 0.86), ("fault", 0.09), ("cpu", 0.05)]


def cold() -> Report:
    """A switch to a model of which nothing is cached."""
    one = request(
        _START_NS,
        [
            ("evict", 61.204517),
            ("launch", 214.518333),
            ("load", 812.007411),
            ("init", 118.402006),
            ("ready_gap", 9.130292),
            ("prefill", 309.947114),
            ("first_decode", 37.104486),
        ],
        [
            (61.2, [("sleep", 0.6), ("idle", 0.4)]),
            (214.5, [("cpu", 0.82), ("fault", 0.08), ("lock", 0.1)]),
            (812, _MIXED_LOAD),
            (118.4, [("cpu", 0.9), ("fault", 0.1)]),
            (9.1, [("idle", 1.0)]),
        ],
    )
    series = (
        ramp("storage_bytes", [(0, -100), (0, 275), (140e6, 560), (180e6, 760), (314.6e6, 1088),
                               (314.6e6, 1700)], _START_NS),
        ramp("major_faults", [(0, -100), (0, 275), (2318, 1090), (2318, 1700)], _START_NS),
        ramp("minor_faults", [(50, -100), (50, 60), (9000, 275), (12040, 1200), (14100, 1700)],
             _START_NS),
        ramp("cached_bytes", [(0, -100), (0, 275), (140e6, 560), (180e6, 760),
                              (WEIGHTS_BYTES, 1088), (WEIGHTS_BYTES, 1700)], _START_NS, WEIGHTS),
    )  # fmt: skip
    return report([one], series=series)


def reswitch() -> Report:
    """The switch back: everything is cached."""
    one = request(
        _START_NS,
        [
            ("evict", 58.1),
            ("launch", 198.7),
            ("load", 61.9),
            ("init", 101.2),
            ("ready_gap", 8.8),
            ("prefill", 205.015),
            ("first_decode", 35.3),
        ],
        [(58.1, [("idle", 1.0)]), (198.7, [("cpu", 1.0)]), (61.9, [("fault", 0.7), ("cpu", 0.3)])],
        model="model-a",
        residency_before=1.0,
        files=(weights("/srv/models/model-a.gguf", bytes_from_storage=0, residency_before=1.0),),
        verdict=Verdict("prefill", "cpu", 0.31, "medium", "Storage took no part in this wait."),
    )
    return report([one], path="reswitch.ttft")


def warm() -> Report:
    """A request to the model that is loaded."""
    one = request(
        _START_NS,
        [("prefill", 241.2), ("first_decode", 34.8)],
        [(300, [("cpu", 1.0)])],
        model="model-a",
        switched=False,
        residency_before=1.0,
        files=(),
        verdict=Verdict("prefill", "cpu", 0.87, "high", "The model was loaded."),
    )
    return report([one], path="warm.ttft")


# -- edges ----------------------------------------------------------------------------------------


def empty() -> Report:
    return report([], path="empty.ttft", ended_because="interrupted")


def incomplete() -> Report:
    """No first token, killed in mid-load, with losses."""
    one = request(
        _START_NS,
        [("evict", 60.0), ("load", 2_000.0)],
        [(60, [("idle", 1.0)]), (2_000, [("storage_wait", 1.0)])],
        outcome="incomplete",
        first_token_ns=None,
        end_ns=None,
        residency_before=None,
        model=None,
        verdict=Verdict("unknown", None, None, "low", "The recording ended before the wait did."),
        notes=("the request was still open when the recording ended",),
    )
    return report(
        [one],
        path="killed.ttft",
        complete=False,
        ended_because="",
        lost={"events ring full": 1_234, "text ring full": 0},
        sources=(
            SourceState("block", "absent", "the kernel has no block_rq_issue", "no request sizes"),
            SourceState("gpu", "degraded"),
        ),
        overhead=Overhead(None, None),
        notes=("the recording lies on the mount that was measured: /srv",),
    )


def never_ended() -> Report:
    """A request that failed, and a start whose end was not seen."""
    failed = replace(cold().requests[0], outcome="error", first_token_ns=None)
    start = replace(failed, id="start 1", endpoint="", outcome="incomplete", end_ns=None)
    return replace(cold(), requests=(failed,), starts=(start,))


def instant() -> Report:
    """A request whose first token came in the same nanosecond, and phases of 0 ns."""
    nothing = request(_START_NS, [], [], files=(), id="0")
    parts: Parts = [("queue", 0), ("prefill", 0.000001), ("first_decode", 0)]
    one_ns = request(_START_NS, parts, [], id="1", residency_before=None)
    thin: Parts = [("queue", 0.01), ("load", 5_000), ("ready_gap", 0.3), ("prefill", 0.02)]
    return report([nothing, one_ns, request(_START_NS, thin, [], id="2")], path="instant.ttft")


def many(number: int = 500) -> Report:
    """Requests of different lengths, one after the other."""
    requests = []
    for index in range(number):
        length = 200 + (index * 7919) % 1000
        start = _START_NS + index * 2_000 * MS
        parts: Parts = [("queue", length / 3), ("prefill", length)]
        made = request(start, parts, [], id=str(index + 1), files=(), mounts=(), switched=False)
        verdict = Verdict("queue", None, 0.25, "low", "Other requests were ahead.")
        requests.append(replace(made, verdict=verdict))
    return report(requests, path="many.ttft")


def hostile(name: str) -> Report:
    """A report in which every foreign string is `name`."""
    one = cold().requests[0]
    action = Action(name, 1, name)
    file = weights(name, fstype=name, advice=(name, name))
    bad = replace(
        one,
        id=name or "1",
        engine=name,
        model=name,
        endpoint=name,
        phases=tuple(replace(p, evidence=(Evidence(name, name, name, name),)) for p in one.phases),
        files=(file, replace(library(), path=name * 3)),
        mounts=(MountUse(name, name, name, None, 1, 2, 3, 4, 5),),
        gpu=(GpuUse(0, name, name, None, None, None, None, name),),
        verdict=Verdict("load", "fault", 1.0, "low", name, (action,)),
        notes=(name,),
    )
    return report(
        [bad, replace(bad, outcome="error", first_token_ns=None)],
        path=f"/tmp/{name}.ttft",
        host={"node": name, "kernel": name},
        ended_because=name,
        complete=False,
        lost={name: 3},
        sources=(SourceState(name, "absent", name, name),),
        notes=(name,),
    )


def hostile_inside(name: str) -> Report:
    """`hostile`, and so are its lanes, log lines, parts of phases and Python code."""
    report = hostile(name)
    one = report.requests[0]
    at = one.start_ns
    spans = Spans(name, (at,), (at + 5,), (name,), (5,))
    running = Series("threads_running", "threads", None, (at,), (1.0,))
    process = ProcessTrack(
        7, name, (name, name), at, at + 100, running, (), 0, spans, spans, (spans,)
    )
    tracks = Tracks(
        processes=(process,),
        storage=(Series("file_bytes", "bytes", name, (at, at + 1), (0.0, 1.0)),),
        sizes=(SizeTrack(name, 1, (at,), (4096,), (1,), (1,)),),
        ticks=(Tick(at, name, name),),
    )
    part = Part("warmup", at, at + 1, 1, "observed", (Evidence(name, name, 1, name),))
    phases = (replace(one.phases[0], parts=(part,)), *one.phases[1:])
    code = PythonTime(
        phases[0].phase, 10, 20, 1.0,
        (PythonShare("imports", 10, 1.0, 0.0, 5, (name,)),),
        (PythonStack("imports", (name,), 10),),
        (PythonWait("storage_wait", "imports", name, name, 5),),
    )  # fmt: skip
    request = replace(one, phases=phases, python=(code,))
    return replace(
        report,
        requests=(request,),
        tracks=tracks,
        series=(Series("cached_bytes", "bytes", name, (at,), (0.0,)),),
        realtime_offset_ns=1,
    )


# -- anything valid -------------------------------------------------------------------------------

_NAMES = st.one_of(st.sampled_from(HOSTILE_NAMES), st.text(max_size=40))
_COUNTS = st.none() | st.integers(0, 10**15)
_SHARES = st.none() | st.floats(0, 1)


@st.composite
def _partition(
    draw: st.DrawFn, names: Sequence[str], start: int, end: int
) -> list[tuple[str, int, int]]:
    cuts = draw(st.lists(st.integers(start, end), max_size=8))
    edges = [start, *sorted(cuts), end]
    return [(draw(st.sampled_from(names)), a, b) for a, b in pairwise(edges)]


_NS = st.integers(0, 10**13)
_SPLITS = st.builds(WaitSplit, _NS, _NS, _NS, _NS, _NS)
_SHARES_OF_PHASES = st.builds(PhaseShare, st.sampled_from(PHASES), _COUNTS, _NS, _SPLITS)
_MODELS = st.builds(
    PathModel,
    _NS,
    st.none() | st.floats(1, 1e12),
    _COUNTS,
    st.none() | st.floats(0, 1e4),
    st.none() | st.floats(1, 1e12),
    _COUNTS,
)


@st.composite
def _files(draw: st.DrawFn) -> FileUse:
    return weights(
        draw(_NAMES),
        size_bytes=draw(st.integers(0, 10**13)),
        bytes_from_storage=draw(_COUNTS),
        bytes_from_cache=draw(_COUNTS),
        major_faults=draw(_COUNTS),
        minor_faults=draw(_COUNTS),
        storage_wait_ns=draw(st.integers(0, 10**13)),
        bytes_per_second=draw(st.none() | st.floats(0, 1e13)),
        request_size_bytes=draw(
            st.none() | st.builds(Quantiles, st.floats(0, 1e9), st.floats(0, 1e9))
        ),
        in_flight=draw(st.none() | st.builds(InFlight, st.floats(0, 1e4), st.integers(0, 10**4))),
        access=draw(st.sampled_from([None, "mmap", "read", "direct", "mixed"])),
        is_weights=draw(st.booleans()),
        residency_before=draw(_SHARES),
        requests=draw(_COUNTS),
        sequential_share=draw(_SHARES),
        wait_split=draw(st.none() | _SPLITS),
        by_phase=tuple(draw(st.lists(_SHARES_OF_PHASES, max_size=3))),
        evicted_bytes=draw(_COUNTS),
        reclaimed_bytes=draw(_COUNTS),
        reclaimed_before_bytes=draw(_COUNTS),
        refaulted_bytes=draw(_COUNTS),
        read_amplification=draw(st.none() | st.floats(1, 1e9)),
        readahead_asks=draw(_COUNTS),
        readahead_bytes=draw(_COUNTS),
        read_by_others_bytes=draw(_COUNTS),
        rates=tuple(draw(st.lists(st.tuples(_NS, st.floats(0, 1e13)), max_size=3))),
        path_model=draw(st.none() | _MODELS),
    )


@st.composite
def _requests(draw: st.DrawFn) -> Request:
    start = draw(st.integers(0, 10**15))
    end = start + draw(st.one_of(st.integers(0, 3000), st.integers(0, 10**12)))
    outcome = draw(st.sampled_from(OUTCOMES))
    return Request(
        id=draw(_NAMES),
        engine=draw(st.none() | _NAMES),
        model=draw(st.none() | _NAMES),
        endpoint=draw(_NAMES),
        streamed=draw(st.none() | st.booleans()),
        outcome=outcome,
        start_ns=start,
        first_token_ns=end if outcome == "ok" else None,
        end_ns=draw(st.none() | st.just(end + 5)),
        switched=draw(st.booleans()),
        residency_before=draw(_SHARES),
        prompt_tokens=draw(_COUNTS),
        cached_tokens=draw(_COUNTS),
        phases=tuple(
            Phase(name, a, b, draw(st.sampled_from(BASES)))
            for name, a, b in draw(_partition(PHASES, start, end))
        ),
        activities=tuple(Activity(*piece) for piece in draw(_partition(ACTIVITIES, start, end))),
        files=tuple(draw(st.lists(_files(), max_size=3))),
        mounts=(),
        gpu=tuple(
            draw(
                st.lists(
                    st.builds(
                        GpuUse,
                        st.integers(0, 7),
                        _NAMES,
                        _NAMES,
                        _COUNTS,
                        _COUNTS,
                        _COUNTS,
                        _COUNTS,
                        _NAMES,
                    ),
                    max_size=2,
                )
            )
        ),
        verdict=Verdict(
            draw(st.sampled_from([*PHASES, "unknown"])),
            draw(st.none() | st.sampled_from(ACTIVITIES)),
            draw(_SHARES),
            draw(st.sampled_from(CONFIDENCES)),
            draw(_NAMES),
            tuple(draw(st.lists(st.builds(Action, _NAMES, _COUNTS, _NAMES), max_size=2))),
            storage=draw(st.none() | st.sampled_from(STORAGE_VERDICTS)),
        ),
        notes=tuple(draw(st.lists(_NAMES, max_size=2))),
        memory=draw(st.none() | st.builds(MemoryUse, _COUNTS, _COUNTS, st.none() | _NAMES)),
    )


@st.composite
def _series(draw: st.DrawFn, around: Sequence[Request]) -> Series:
    first = around[0] if around else None
    low = first.start_ns if first else 0
    stamps = sorted(draw(st.sets(st.integers(max(low - 1000, 0), low + 10**11), max_size=6)))
    values = [draw(st.floats(0, 1e13)) for _ in stamps]
    name = draw(st.sampled_from(["storage_bytes", "major_faults", "minor_faults", "cached_bytes"]))
    paths = [file.path for file in first.files] if first else []
    path = draw(st.sampled_from([None, *paths]))
    return Series(name, "bytes", path, tuple(stamps), tuple(values))


@st.composite
def any_report(draw: st.DrawFn) -> Report:
    """Any valid report, small."""
    requests = draw(st.lists(_requests(), max_size=3))
    return report(
        requests,
        path=draw(_NAMES),
        complete=draw(st.booleans()),
        lost=draw(st.dictionaries(_NAMES, st.integers(0, 10**9), max_size=2)),
        series=tuple(draw(st.lists(_series(requests), max_size=4))),
        overhead=Overhead(draw(_COUNTS), draw(_COUNTS)),
        notes=tuple(draw(st.lists(_NAMES, max_size=2))),
    )
