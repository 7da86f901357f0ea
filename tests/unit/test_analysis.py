"""Whole recordings concluded: exact sums for any interleaving of facts, and time that grows with
their number, not with its square."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ttftprof.analysis import analyse
from ttftprof.engines.markers import MARK_NAMES
from ttftprof.errors import RecordingError
from ttftprof.events import EVENT, FILE_ROW, THREAD_ROW, Kind, Wait
from ttftprof.model import ACTIVITIES, BASES, PHASES, Activity, Phase, Report, Request
from ttftprof.reports import json as json_report
from ttftprof.sources.http import BEGAN_BEFORE
from unit.recordings import (
    ARMED_NS,
    B_GGUF,
    DEV,
    FRONT,
    MIB,
    MS,
    NEW,
    OLD,
    PAGE,
    Scene,
    answered,
    ended,
    launched,
    ms,
    ns,
    router_switch,
    two_models,
)


def check_report(report: Report) -> None:
    """What holds of every report, whatever was recorded."""
    for request in (*report.requests, *report.starts):
        check_request(request)
    for series in report.series:
        assert len(series.ns) == len(series.values)
        assert all(a <= b for a, b in pairwise(series.ns))
        assert series.unit != "faults" or all(a <= b for a, b in pairwise(series.values))
    written = io.StringIO()
    json_report.write(report, written)
    assert json.loads(written.getvalue())["schema"] == json_report.SCHEMA_NAME


def check_request(request: Request) -> None:
    """Phases and activities are ordered, abut, and cover the same interval exactly."""
    length = request.phases[-1].end_ns - request.phases[0].start_ns if request.phases else 0
    sequences: tuple[Sequence[Phase | Activity], ...] = (request.phases, request.activities)
    for parts in sequences:
        assert all(p.end_ns > p.start_ns for p in parts)
        assert all(a.end_ns == b.start_ns for a, b in pairwise(parts))
        assert sum(p.duration_ns for p in parts) == length
    if request.phases:
        first, last = request.activities[0], request.activities[-1]
        assert (first.start_ns, last.end_ns) == (
            request.phases[0].start_ns,
            request.phases[-1].end_ns,
        )
        assert request.phases[0].start_ns == request.start_ns
    if request.endpoint and request.ttft_ns is not None:
        assert request.ttft_ns == length
    assert {p.phase for p in request.phases} <= set(PHASES)
    assert {p.basis for p in request.phases} <= set(BASES)
    assert {a.activity for a in request.activities} <= set(ACTIVITIES)
    table = request.phase_activity()
    assert {p: sum(row.values()) for p, row in table.items()} == request.phase_totals()
    assert sum(request.activity_totals().values()) == length
    check_files(request)


def check_files(request: Request) -> None:
    for file in request.files:
        counted = (file.bytes_from_storage, file.bytes_from_cache, file.major_faults,
                   file.minor_faults, file.storage_wait_ns, file.reads, file.mmaps)  # fmt: skip
        assert all(number is None or number >= 0 for number in counted)
        assert file.residency_before is None or 0 <= file.residency_before <= 1
        assert file.bytes_per_second is None or file.bytes_per_second > 0


# -- any recording --------------------------------------------------------------------------------

PIDS = (FRONT, OLD, NEW)
near = st.integers(-20, 400).map(lambda half: ARMED_NS + half * MS // 2)
far = st.sampled_from([0, 1, ARMED_NS, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
stamps = st.one_of(near, near, near, near, near, near, near, far)
durations = st.one_of(st.integers(0, 100).map(lambda n: n * MS), st.sampled_from([0, 1, 2**64 - 1]))
pids = st.sampled_from(PIDS)
numbers = st.one_of(st.integers(0, 40), st.sampled_from([2**32, 2**63, 2**64 - 1]))
inodes = st.sampled_from([0, 11, 12, 13])

events = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(Kind) | st.just(60_000),
        "start_ns": stamps,
        "duration_ns": durations,
        "tgid": pids,
        "tid": pids | st.integers(1, 3),
        "flags": st.sampled_from([*MARK_NAMES, 0, 7, 9, 15, 65_535]),
        "dev": st.sampled_from([DEV, 0]),
        "ino": inodes,
        "a": numbers | st.sampled_from([40_001 << 16 | 9_001, 100 * MIB]),
        "b": numbers,
    }
)
thread_rows = st.fixed_dictionaries(
    {
        "ns": stamps,
        "tgid": pids,
        "tid": pids | st.integers(1, 3),
        "since_ns": stamps,
        "off_ns": st.just(0) | stamps,
        "off_reason": st.integers(0, 12),
        "cpu_ns": numbers,
        "maj_flt": numbers,
        "min_flt": numbers,
        "samples": st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3),
        "short_ns": st.lists(numbers, min_size=10, max_size=10),
    }
)
GROWING = ("added_pages", "cached_pages", "read_bytes", "direct_bytes", "faults", "map_arounds",
           "reads", "short_wait_ns")  # fmt: skip
file_rows = st.fixed_dictionaries(
    {
        "ns": stamps,
        "dev": st.just(DEV),
        "ino": inodes,
        "since_ns": stamps,
        "size_bytes": st.sampled_from([0, 1, 100 * MIB, 2**64 - 1]),
    }
    | dict.fromkeys(GROWING, numbers)
)
known_stamps = st.none() | stamps
exchanges = st.fixed_dictionaries(
    {
        "start_ns": near,
        "request_end_ns": known_stamps,
        "headers_ns": known_stamps,
        "first_token_ns": known_stamps,
        "end_ns": known_stamps,
        "endpoint": st.sampled_from(["/completion", ""]),
        "model": st.sampled_from(["a", "b", None]),
        "status": st.sampled_from([None, 200, 503]),
        "generates": st.booleans() | st.just(True),
        "prompt_tokens": st.sampled_from([None, 0, 38]),
        "cached_tokens": st.sampled_from([None, 0, 40]),
        "timings": st.sampled_from([{}, {"prompt_ms": 20.0}, {"prompt_ms": 1e300}, {"x": None}]),
        "outcome": st.sampled_from(["ok", "error", "cancelled", "incomplete"]),
        "notes": st.sampled_from([[], [BEGAN_BEFORE], ["encrypted: TLS"]]),
        "tgid": pids,
        "tid": pids,
        "socket": st.integers(1, 3),
        "local_port": st.sampled_from([8_080, 9_001]),
        "remote_port": st.sampled_from([40_001, 50_000]),
    }
)
marks = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["model_loaded", "slot_start", "evicting", "listening"]),
        "tgid": pids,
    }
)
processes = st.fixed_dictionaries(
    {"pid": pids, "ppid": st.just(FRONT), "comm": st.sampled_from(["server", "front"])}
)


BENIGN_ROW = {"ns": ARMED_NS, "since_ns": ARMED_NS}


def build_scene(
    recorded: Sequence[dict[str, Any]],
    of_threads: Sequence[dict[str, Any]],
    of_files: Sequence[dict[str, Any]],
    facts: Sequence[tuple[str, int, dict[str, Any]]],
) -> Scene:
    scene = Scene(end=500).file(11).file(12, "/models/b.safetensors").file(13, "/lib/x.so")
    scene.record(Kind.NONE, ARMED_NS)  # a batch is filed under its first stamp
    for event in recorded:
        scene.record(**event)
    scene.raw_rows([BENIGN_ROW, *of_threads], [BENIGN_ROW, *of_files])
    for kind, stamp, fact in facts:
        scene.fact(kind, min(stamp, 2**63 - 1), fact)
    return scene


facts = st.one_of(
    st.tuples(st.just("exchange"), near, exchanges),
    st.tuples(st.just("mark"), near, marks),
    st.tuples(st.just("process"), near, processes),
)
thorough = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@thorough
@given(
    st.lists(events, max_size=40),
    st.lists(thread_rows, max_size=8),
    st.lists(file_rows, max_size=8),
    st.lists(facts, max_size=12),
)
def test_any_facts_give_exact_partitions(
    recorded: list[dict[str, Any]],
    of_threads: list[dict[str, Any]],
    of_files: list[dict[str, Any]],
    told: list[tuple[str, int, dict[str, Any]]],
) -> None:
    check_report(build_scene(recorded, of_threads, of_files, told).report())


@thorough
@given(
    st.lists(events, max_size=25),
    st.lists(thread_rows, max_size=4),
    st.lists(file_rows, max_size=4),
    st.lists(facts, max_size=4),
    st.sampled_from(["router", "restart", "reload"]),
)
def test_a_real_switch_stays_exact_among_any_other_facts(
    recorded: list[dict[str, Any]],
    of_threads: list[dict[str, Any]],
    of_files: list[dict[str, Any]],
    told: list[tuple[str, int, dict[str, Any]]],
    way: str,
) -> None:
    scene = build_scene(recorded, of_threads, of_files, told)
    ended(scene.process(FRONT, "front").process(OLD).held(OLD, 11))
    launched(scene) if way != "reload" else scene.call(OLD, "model_load", 200, 400)
    if way == "router":
        answered(scene)
    else:
        scene.request(NEW if way == "restart" else OLD, 100, token=700)
    check_report(scene.report())


@given(st.permutations(range(9)))
@settings(max_examples=60, deadline=None)
def test_the_order_in_which_facts_were_written_does_not_matter(order: list[int]) -> None:
    told: list[Callable[[Scene], Scene]] = [
        lambda s: s.forked(NEW, 162, parent=FRONT),
        lambda s: s.executed(NEW, 163),
        lambda s: s.signalled(OLD, 103),
        lambda s: s.exited(OLD, 150, gone=160),
        lambda s: s.call(NEW, "model_load", 200, 500),
        lambda s: s.call(NEW, "decode", 575, 700, value=38),
        lambda s: s.log(NEW, "model_loaded", 560),
        lambda s: s.connected(FRONT, 571, local=40_001, remote=9_001),
        lambda s: s.request(FRONT, 100, token=716).request(
            NEW, 572, token=715, ports=(9_001, 40_001), prompt_tokens=38
        ),
    ]
    scene = two_models()
    for number in order:
        told[number](scene)
    assert scene.only_request().phase_totals() == {
        "queue": 3 * MS, "evict": 60 * MS, "launch": 37 * MS, "load": 300 * MS, "init": 60 * MS,
        "ready_gap": 12 * MS, "prefill": 128 * MS, "first_decode": 16 * MS,
    }  # fmt: skip


# -- what a report says ---------------------------------------------------------------------------


def test_a_report_says_what_was_recorded_and_what_was_lost() -> None:
    scene = router_switch().source("marks", "absent", "why", "what").loss("events ring full", 3)
    scene.meta(
        own={"cpu_ns": 5, "max_rss_bytes": 7},
        probe_costs={"b__x": [4, 10], "a__x": [2, 100], "c__never": [0, 0]},
        clock={"realtime_offset_ns": 11},
        recording_on_measured_mount="/nas",
    )
    report = scene.report()
    assert (report.start_ns, report.end_ns, report.complete) == (ns(-10), ns(10_000), True)
    assert (report.ended_because, report.realtime_offset_ns) == ("interrupted", 11)
    assert [(s.name, s.state, s.reason, s.lost) for s in report.sources] == [
        ("marks", "absent", "why", "what")
    ]
    assert report.lost == {"events ring full": 3}
    assert (report.overhead.cpu_ns, report.overhead.max_rss_bytes) == (5, 7)
    assert [(p.name, p.runs, p.mean_ns) for p in report.overhead.probes] == [
        ("a__x", 2, 50.0),
        ("b__x", 4, 2.5),
    ]
    assert any("/nas" in note for note in report.notes)
    check_report(report)


def test_a_recording_without_requests_is_a_report() -> None:
    report = Scene().report()
    assert (report.requests, report.starts, report.series) == ((), (), ())
    check_report(report)


def test_what_happened_to_the_machines_clocks_is_told_and_changes_no_phase() -> None:
    scene, before = router_switch(), router_switch().only_request()
    scene.fact("clock_jump", ns(400), {"suspended_ns": 3600_000 * MS, "set_ns": 0})
    scene.fact("clock_jump", ns(500), {"suspended_ns": 0, "set_ns": -5000 * MS})
    report = scene.report()
    assert report.requests[0].phase_totals() == before.phase_totals()
    slept, was_set = report.notes[:2]
    assert "suspended for 3600 s" in slept
    assert "no time here counts it" in slept
    assert "wall clock was set back by 5.0 s" in was_set


def test_a_recording_that_was_killed_is_a_report(tmp_path: Path) -> None:
    scene = router_switch().meta(end_ns=None, ended_because=None)
    report = analyse(scene.write(tmp_path / "x.ttft", complete=False))
    assert (report.complete, report.ended_because) == (False, "unknown: recording was cut off")
    assert report.requests[0].phase_totals()["load"] == 300 * MS
    check_report(report)


@pytest.mark.parametrize(
    "wrong",
    [
        {"own": 3}, {"own": {"cpu_ns": "x"}}, {"probe_costs": [1]}, {"probe_costs": {"x": 5}},
        {"probe_costs": {"x": [1, "y"]}}, {"clock": "noon"}, {"tool": 1}, {"host": [1]},
    ],
)  # fmt: skip
def test_a_head_that_makes_no_sense_is_a_damaged_recording(
    wrong: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(RecordingError, match="damaged"):
        analyse(Scene().meta(**wrong).write(tmp_path / "x.ttft"))


def test_a_request_names_its_engine_model_and_tokens() -> None:
    request = router_switch().only_request()
    assert (request.engine, request.model, request.endpoint) == (
        "llama.cpp", "b", "/v1/chat/completions",
    )  # fmt: skip
    assert (request.prompt_tokens, request.cached_tokens, request.streamed) == (38, 0, True)


def test_refused_requests_are_numbered_after_all_others() -> None:
    scene = Scene().process(FRONT)
    for at in (100, 200, 400):
        scene.request(FRONT, at, headers=at + 1, end=at + 1, status=503, outcome="error")
    scene.request(FRONT, 300, token=350).request(FRONT, 500, token=550)
    report = scene.report()
    assert [(ms(r.start_ns), r.id) for r in report.requests] == [
        (100, "3"), (200, "4"), (300, "1"), (400, "5"), (500, "2")
    ]  # fmt: skip


def test_encrypted_connections_are_said_not_to_be_read() -> None:
    scene = Scene().request(NEW, 10, generates=False, notes=["encrypted: TLS"])
    assert any("encrypted" in note for note in scene.report().notes)


# -- the baseline ---------------------------------------------------------------------------------


def with_resident(prompt_tokens: int | None, **facts: Any) -> str:
    """The explanation of a switch beside a resident request."""
    scene = router_switch().request(FRONT, 900, token=950, ports=(8_080, 50_001))
    scene.connected(FRONT, 901, local=40_009, remote=9_001)
    scene.request(NEW, 902, token=949, ports=(9_001, 40_009), prompt_tokens=prompt_tokens, **facts)
    return scene.report().requests[0].verdict.explanation


@pytest.mark.parametrize(
    ("prompt_tokens", "used"), [(38, True), (50, True), (26, True), (60, False), (None, False)]
)
def test_a_resident_request_with_a_prompt_alike_is_the_baseline(
    prompt_tokens: int | None, used: bool
) -> None:
    assert ("with the model resident" in with_resident(prompt_tokens)) is used


# -- series ---------------------------------------------------------------------------------------


def test_storage_bytes_are_summed_over_files() -> None:
    scene = Scene().file(B_GGUF).file(99, "/lib/x.so")
    scene.file_row(B_GGUF, 20, added_pages=10).file_row(99, 20, added_pages=1)
    scene.file_row(B_GGUF, 40, added_pages=30, direct_bytes=5)
    series = next(s for s in scene.report().series if s.name == "storage_bytes")
    assert series.ns[:2] == (ns(20), ns(40))
    assert series.values[:2] == (11 * PAGE, 31 * PAGE + 5)
    assert set(series.values[2:]) <= {31 * PAGE + 5}


def test_faults_of_before_recording_do_not_count() -> None:
    scene = Scene().thread_row(NEW, 10, maj_flt=1_000).thread_row(NEW, 30, maj_flt=1_007)
    scene.thread_row(NEW, 30, tid=71, since=15, maj_flt=5)
    series = next(s for s in scene.report().series if s.name == "major_faults")
    assert list(zip(series.ns, series.values, strict=True)) == [(ns(10), 0), (ns(30), 12)]


def test_a_thread_id_given_anew_counts_from_zero() -> None:
    scene = Scene().thread_row(NEW, 30, tid=71, since=15, maj_flt=50)
    scene.thread_row(NEW, 60, tid=71, since=40, maj_flt=7)
    series = next(s for s in scene.report().series if s.name == "major_faults")
    assert series.values[-1] == 57


# -- time and size --------------------------------------------------------------------------------


def waits_and_blocks(count: int) -> np.ndarray[Any, Any]:
    """Half waits of 64 threads, half block requests, over ten seconds."""
    out = np.zeros(count, EVENT)
    out["start_ns"] = ARMED_NS + np.linspace(0, 10_000 * MS, count).astype(np.uint64)
    out["duration_ns"] = 200_000
    waits = np.arange(count) % 2 == 0
    out["kind"] = np.where(waits, int(Kind.OFFCPU), int(Kind.BLOCK))
    out["tgid"], out["tid"] = NEW, NEW + np.arange(count) % 64
    out["flags"] = np.where(waits, int(Wait.STORAGE), 3)
    out["dev"], out["ino"], out["a"] = DEV, B_GGUF, 128 << 10
    return out


def short_lives(count: int) -> np.ndarray[Any, Any]:
    """Children that fork, execute, map the weights and exit: half a millisecond each."""
    out = np.zeros(5 * count, EVENT)
    child = np.repeat(np.arange(count), 5)
    step = np.tile(np.arange(5), count)
    kinds = (Kind.FORK, Kind.EXEC, Kind.MMAP, Kind.PROCESS_EXIT, Kind.THREAD_END)
    out["kind"] = np.array(kinds)[step]
    out["start_ns"] = ARMED_NS + child * 500_000 + np.where(step == 4, 0, step * 50_000)
    out["duration_ns"] = np.where(step == 4, 300_000, 0)
    out["tgid"] = out["tid"] = 1_000 + child
    out["dev"], out["ino"], out["a"] = DEV, 13, 2 * MIB
    return out


def snapshots(count: int) -> np.ndarray[Any, Any]:
    """A row for each of 16 threads every 20 ms, of ever new processes."""
    out = np.zeros(count, THREAD_ROW)
    look = np.arange(count) // 16
    out["ns"] = ARMED_NS + look * 20 * MS
    out["tgid"] = NEW + look // 8
    out["tid"] = out["tgid"] * 16 + np.arange(count) % 16
    out["since_ns"], out["cpu_ns"] = ARMED_NS - MS, out["ns"]
    return out


def many_files(count: int) -> np.ndarray[Any, Any]:
    """Eight rows for each of many files, over ten seconds."""
    out = np.zeros(count, FILE_ROW)
    out["ns"] = ARMED_NS + np.linspace(0, 10_000 * MS, count).astype(np.uint64)
    out["dev"], out["ino"], out["size_bytes"] = DEV, 20 + np.arange(count) % (count // 8), 2 * MIB
    out["added_pages"] = np.arange(count)
    return out


def decodes(count: int) -> np.ndarray[Any, Any]:
    """Calls of one token each, all through the recording."""
    out = np.zeros(count, EVENT)
    enters = np.arange(count) % 2 == 0
    out["kind"] = np.where(enters, int(Kind.MARK_ENTER), int(Kind.MARK_EXIT))
    out["start_ns"] = ns(1_000) + np.linspace(0, 9_000 * MS, count).astype(np.uint64)
    out["tgid"] = out["tid"] = NEW
    out["flags"], out["a"] = DECODE, 1
    return out


DECODE = next(row for row, name in MARK_NAMES.items() if name == "decode")
SIZES = (5_000, 40_000)
LOADS: dict[str, tuple[str, Callable[[int], np.ndarray[Any, Any]], int]] = {
    "waits and blocks": ("events", waits_and_blocks, 1),
    "short lives": ("events", short_lives, 20),
    "snapshots": ("threads", snapshots, 1),
    "files": ("files", many_files, 10),
    "decodes": ("events", decodes, 1),
}


def big_recording(path: Path, stream: str, records: np.ndarray[Any, Any]) -> Path:
    """A router's switch, eight requests more, and these records beside them."""
    scene = router_switch().file(13, "/lib/libc.so.6").meta(end_ns=None)
    for number in range(8):
        scene.request(FRONT, 2_000 + 100 * number, token=2_050 + 100 * number)
    return scene.write(path, more=[(stream, records)])


def seconds(path: Path) -> float:
    """Processor time of this process for one analysis: the best of two."""
    taken = []
    for _ in range(2):
        began = time.process_time()
        report = analyse(path)
        taken.append(time.process_time() - began)
    check_report(report)
    return min(taken)


@pytest.mark.parametrize("load", LOADS)
def test_time_grows_with_the_number_of_records(load: str, tmp_path: Path) -> None:
    """Eight times the records may take twelve times as long, not sixty-four."""
    stream, make, divisor = LOADS[load]
    paths: Iterator[Path] = (
        big_recording(tmp_path / f"{size}.ttft", stream, make(size // divisor)) for size in SIZES
    )
    few, many = map(seconds, paths)
    assert many <= 12 * few + 0.5, f"{few:.3f} s, {many:.3f} s"
