"""The plan of a measurement, its figures, what is concluded from them, and how it is printed."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from ttftprof.ceilings import (
    KIB,
    MIB,
    Extent,
    Measured,
    Sample,
    Way,
    allot,
    cut,
    matrix,
    requests_of,
    steady_rate,
    usable,
)
from ttftprof.clock import NS_PER_S
from ttftprof.reports.storage import PathReport, as_json, bar, schema, write, write_json
from ttftprof.residency import CacheState, overlap, without
from ttftprof.sources.mounts import Mount
from ttftprof.stack import Layer, Stack
from ttftprof.storage_verdict import VERDICTS, Conclusion, Seen, judge, model_rate

MS = 1_000_000
SCHEMA = jsonschema.Draft202012Validator(schema())
SIZES = st.integers(0, 4 << 30)
EXTENTS = st.lists(st.integers(1, 300), max_size=6).map(
    lambda lengths: [Extent(i, 0, n * MIB) for i, n in enumerate(lengths)]
)
RUNS = st.lists(st.integers(0, 400), max_size=12, unique=True).map(
    lambda edges: list(zip(sorted(edges)[::2], sorted(edges)[1::2], strict=False))
)


# -- the plan --------------------------------------------------------------------------------------


@given(SIZES, st.lists(st.integers(4, 1 << 14), max_size=4, unique=True), st.booleans())
def test_the_plan_keeps_within_its_bytes(space: int, sweep: list[int], quick: bool) -> None:
    ways = matrix(sweep, quick)
    given_bytes = allot(ways, space)
    assert sum(given_bytes) <= space
    for way, size in zip(ways, given_bytes, strict=True):
        assert size % (way.streams * (way.request_bytes or MIB)) == 0, "whole requests"


def test_a_big_file_has_room_for_every_cell_and_a_small_one_for_the_telling() -> None:
    assert all(allot(matrix((128, 1024, 4096)), 1 << 30))
    small = allot(matrix(), 16 * MIB)
    assert all(small[:4])
    assert not small[-1]


@given(EXTENTS, st.lists(st.integers(0, 200).map(lambda n: n * MIB), max_size=8))
def test_no_two_cells_share_a_range(extents: list[Extent], sizes: list[int]) -> None:
    dealt = cut(extents, sizes)
    assert all(sum(e.length for e in p) <= size for p, size in zip(dealt, sizes, strict=True))
    everything = sorted((e.file, e.start, e.length) for part in dealt for e in part)
    for (file, start, length), (next_file, next_start, _) in pairwise(everything):
        assert file < next_file or start + length <= next_start


@given(EXTENTS, st.sampled_from([4 * KIB, 64 * KIB, MIB]))
def test_requests_cover_the_extents_once(extents: list[Extent], request_bytes: int) -> None:
    small = [Extent(e.file, e.start, min(e.length, 4 * MIB)) for e in extents]
    requests = list(requests_of(small, request_bytes))
    assert sum(r.length for r in requests) == sum(e.length for e in small)
    assert all(r.length <= request_bytes for r in requests)


@given(st.lists(RUNS, max_size=3))
def test_only_aligned_parts_of_the_runs_are_used(runs: list[list[tuple[int, int]]]) -> None:
    scaled = [[(low * 300_000, high * 300_000) for low, high in file] for file in runs]
    for extent in usable(scaled):
        assert extent.start % MIB == extent.length % MIB == 0
        assert any(
            low <= extent.start and extent.start + extent.length <= high
            for low, high in scaled[extent.file]
        )


@given(RUNS, st.integers(0, 400), st.integers(0, 400))
def test_runs_and_their_gaps_fill_a_range(
    runs: list[tuple[int, int]], start: int, end: int
) -> None:
    parts = sorted([*overlap(runs, start, end), *without(start, end, runs)])
    assert sum(high - low for low, high in parts) == max(end - start, 0)
    assert all(low < high for low, high in parts)


# -- figures ---------------------------------------------------------------------------------------


def stream(rate: float, count: int, size: int = MIB, burst: int = 0) -> list[Sample]:
    """Back-to-back requests at a rate; the first `burst` of them take no time."""
    each = round(size / rate * NS_PER_S)
    ends = [max(i - burst + 1, 0) * each + i + 1 for i in range(count)]
    return [Sample(begin, end, size) for begin, end in pairwise([0, *ends])]


@pytest.mark.parametrize("count", [1, 3, 20, 500])
def test_the_rate_of_an_even_stream(count: int) -> None:
    assert steady_rate([stream(50e6, count)]) == pytest.approx(50e6, rel=0.01)


def test_a_burst_at_the_start_is_left_out() -> None:
    assert steady_rate([stream(50e6, 100, burst=15)]) == pytest.approx(50e6, rel=0.01)


def test_a_burst_at_the_end_is_no_rate() -> None:
    """A stall first, then all at once, as a limit on requests per second lets it come."""
    samples = [Sample(0, 40 * MS + i * 1000, MIB) for i in range(20)]
    assert steady_rate([samples]) == pytest.approx(20 * MIB / 0.040, rel=0.3)


def test_steps_of_readahead_do_not_bend_the_rate() -> None:
    """Eight requests at once every 160 ms are 50 MiB/s, wherever the steps fall."""
    for count in range(60, 80):
        steps = [(i // 8 + 1) * 160 * MS + i for i in range(count)]
        samples = [Sample(end - 1000, end, MIB) for end in steps]
        assert steady_rate([samples]) == pytest.approx(50 * MIB, rel=0.05)


def test_streams_add_up_and_stragglers_do_not_count() -> None:
    streams = [stream(20e6, 40), stream(20e6, 40), stream(20e6, 80)]
    assert steady_rate(streams) == pytest.approx(60e6, rel=0.02)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), max_size=9), max_size=4
    )
)
def test_any_samples_give_a_rate_or_none(raw: list[list[tuple[int, int]]]) -> None:
    streams = [sorted((Sample(b, b + d, 4096) for b, d in s), key=lambda s: s.end_ns) for s in raw]
    rate = steady_rate(streams)
    assert rate is None or rate > 0


# -- the verdict -----------------------------------------------------------------------------------

SETTING = Path("/sys/class/bdi/0:44/read_ahead_kb")
MOUNT = Mount(1, (0, 44), "/mnt/nas", "nfs4", "nas:/export", "rw,vers=4.2,rsize=1048576")


def nas(read_ahead_kb: int = 128) -> Stack:
    port = Layer("interface", "eth0", (("speed", "1000 Mb/s"),), line_rate=125e6)
    server = Layer("server", "192.168.1.10", below=(port,))
    top = Layer("file system", "nfs4", (), read_ahead_kb, SETTING, None, (server,))
    return Stack("/mnt/nas/a model.gguf", MOUNT, top)


def cell(
    way: Way, megabytes_per_second: float, latency_us: int | None = None, cpu_share: float = 0.05
) -> Measured:
    elapsed = 400 * MS
    return Measured(
        way=way,
        read_ahead_kb=None if way.method in ("direct", "random") else way.read_ahead_kb or 128,
        bytes_read=48 * MIB,
        elapsed_ns=elapsed,
        bytes_per_second=megabytes_per_second * 1e6,
        requests=100,
        latency_mean_ns=None if latency_us is None else latency_us * 1000,
        cpu_ns=round(elapsed * cpu_share),
    )


def seen(*results: Measured, cached_share: float = 0.0) -> Seen:
    return Seen(nas(), 4_700_000_000, CacheState(round(1000 * cached_share), 1000, "t"), results)


READ, MAPPED = Way("read", 1, MIB), Way("mmap", 1, None)
RANDOM, DIRECT4 = Way("random", 1, 4 * KIB), Way("direct", 4, MIB)


def slow_mmap(*more: Measured) -> Seen:
    return seen(
        cell(READ, 108, 9000), cell(MAPPED, 61), cell(RANDOM, 4, 1000), cell(DIRECT4, 112), *more
    )


def test_small_requests_one_at_a_time_are_a_pattern() -> None:
    found = judge(slow_mmap())
    assert found.verdict == "pattern"
    assert found.confidence == "high"
    said = " ".join(found.sentences)
    assert "112 MB/s" in said
    assert "90 % of the line rate of the narrowest link, interface eth0" in said
    assert "One stream of 1 MiB reads reaches the ceiling" in said
    assert "77.05 s by mmap" in said
    first, measure = found.actions
    assert "--no-mmap" in first.change
    assert first.expected_gain_ns == pytest.approx(4.7e9 * (1 / 61e6 - 1 / 108e6) * 1e9, rel=1e-6)
    assert measure.verify == (
        "ttftprof storage --try-readahead 128,1024,4096 '/mnt/nas/a model.gguf'"
    )


def test_the_best_readahead_is_the_measured_one_and_not_the_largest() -> None:
    sweep = [
        cell(Way("mmap", 1, None, kb), rate) for kb, rate in ((1024, 109), (4096, 111), (16384, 70))
    ]
    found = judge(slow_mmap(*sweep))
    change = next(a.change for a in found.actions if "readahead" in a.change)
    assert "is 1024 KiB: 109 MB/s instead of 61.0 MB/s with 128 KiB" in change
    assert f"echo 1024 > {SETTING}" in change


def test_a_readahead_that_gains_little_is_not_advised() -> None:
    sweep = cell(Way("mmap", 1, None, 4096), 70)
    assert not any("readahead" in a.change for a in judge(slow_mmap(sweep)).actions)


def test_all_ways_at_the_link_are_the_link() -> None:
    found = judge(seen(cell(READ, 110), cell(MAPPED, 108), cell(DIRECT4, 112)))
    assert found.verdict == "hardware or link"
    assert found.actions == ()


def test_faults_that_cost_cpu_are_not_storage() -> None:
    found = judge(seen(cell(READ, 108), cell(MAPPED, 40, cpu_share=0.97), cell(DIRECT4, 112)))
    assert found.verdict == "not storage"
    assert "97 % of its time is CPU work" in " ".join(found.sentences)


def test_a_rate_above_the_link_was_a_cache() -> None:
    found = judge(seen(cell(READ, 900), cell(MAPPED, 800)))
    assert "so a cache behind it answered" in found.sentences[0]


def test_nothing_to_read_acquits_storage() -> None:
    found = judge(seen(cached_share=1.0))
    assert found.verdict == "cache worked"
    assert judge(seen()).verdict == "unknown"


def thin(way: Way, megabytes: int, elapsed_ms: int) -> Measured:
    made = cell(way, megabytes * MIB / elapsed_ms / 1000)
    return replace(made, bytes_read=megabytes * MIB, elapsed_ns=elapsed_ms * MS)


@pytest.mark.parametrize(
    ("results", "amount"),
    [
        ([thin(READ, 4, 20)], "4.19 MB could be read from storage, in one measurement"),
        ([thin(READ, 48, 400)], "50.3 MB could be read from storage, in one measurement"),
        ([thin(READ, 2, 10), thin(MAPPED, 4, 20)], "6.29 MB could be read from storage, in 2"),
    ],
)
def test_too_little_is_not_judged_and_what_to_do_is_said(
    results: list[Measured], amount: str
) -> None:
    """As on a file that is nearly all cached."""
    found = judge(seen(*results, cell(RANDOM, 4, 1000), cached_share=0.96))
    assert (found.verdict, found.confidence, found.ceiling) == ("unknown", "low", None)
    assert amount in found.sentences[0]
    (action,) = found.actions
    assert "96 % that is in the page cache" in action.change
    assert action.verify == "ttftprof storage --evict '/mnt/nas/a model.gguf'"
    again = judge(replace(seen(*results, cached_share=0.96), evicted=True))
    assert "a bigger file" in again.actions[0].change


def test_slow_storage_is_judged_by_few_bytes() -> None:
    found = judge(seen(thin(READ, 2, 4000), thin(MAPPED, 4, 8000)))
    assert found.verdict == "at the ceiling"


def test_what_was_over_too_soon_is_said_and_advises_nothing() -> None:
    found = judge(
        seen(*(replace(m, elapsed_ns=5 * MS) for m in slow_mmap().results)),
    )
    assert found.confidence == "low"
    assert found.actions == ()


def test_the_model_of_mmap() -> None:
    """128 KiB / (1 ms + 128 KiB / 112 MB/s)"""
    results = slow_mmap().results
    mapped = next(m for m in results if m.way == MAPPED)
    assert model_rate(mapped, results) == pytest.approx(131072 / (0.001 + 131072 / 112e6))
    direct = cell(DIRECT4, 112, latency_us=37000)
    one = cell(Way("direct", 1, 64 * KIB), 112)
    assert model_rate(direct, results) == pytest.approx(112e6), "no more than the ceiling"
    assert model_rate(one, results) == pytest.approx(65536 / (0.001 + 65536 / 112e6))


# -- the report ------------------------------------------------------------------------------------


def report(conclusion: Conclusion, results: tuple[Measured, ...]) -> PathReport:
    state = CacheState(0, 1000, "cachestat")
    return PathReport(
        asked="/mnt/nas/a\x1b[31m\udcff",
        path="/mnt/nas/a\x1b[31m\udcff",
        chosen="",
        size_bytes=4_700_000_000,
        files=1,
        stack=nas(),
        before=state,
        after=state,
        results=results,
        bytes_read=1,
        conclusion=conclusion,
    )


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_text_keeps_its_width_and_writes_no_escape(width: int) -> None:
    found = slow_mmap(Measured(Way("read", 16, 4 * MIB), None, not_measured="no time was left"))
    out = io.StringIO()
    write(report(judge(found), tuple(found.results)), out, width, colour=False)
    text = out.getvalue()
    assert "\x1b" not in text
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert "read 16 × 4 MiB: no time was left" in re.sub(r"\s+", " ", text)
    assert "readahead 128 KiB (this file" in text
    assert "verdict: pattern, confidence high" in text


def test_the_json_is_ascii_and_null_where_nothing_was_measured() -> None:
    found = slow_mmap(Measured(Way("read", 16, 4 * MIB), None, not_measured="no time was left"))
    out = io.StringIO()
    write_json([report(judge(found), tuple(found.results))], out)
    assert out.getvalue().isascii()
    SCHEMA.validate(json.loads(out.getvalue()))
    (path,) = json.loads(out.getvalue())["paths"]
    assert path["path"].endswith("\\udcff")
    assert path["line_bytes_per_second"] == 125e6
    last = path["measurements"][-1]
    assert last["bytes_per_second"] is None
    assert last["not_measured"] == "no time was left"
    assert as_json(report(judge(found), ()))["measurements"] == []


def test_the_schema_is_valid_strict_and_knows_every_word() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    verdict = schema()["$defs"]["verdict"]["properties"]["verdict"]["enum"]
    assert verdict == list(VERDICTS)
    methods = schema()["$defs"]["measurement"]["properties"]["method"]["enum"]
    assert {way.method for way in matrix((128,))} | {"cached"} == set(methods)
    assert not SCHEMA.is_valid({"schema": "ttftprof.storage/1", "tool": {}, "paths": []})


def test_what_was_only_looked_at_satisfies_the_schema() -> None:
    out = io.StringIO()
    looked_at = replace(
        report(judge(slow_mmap()), ()), before=None, after=None, conclusion=None,
        not_measured="only the stack was asked for",
    )  # fmt: skip
    write_json([looked_at], out)
    SCHEMA.validate(json.loads(out.getvalue()))


def test_bars() -> None:
    assert bar(None, 10) == ""
    assert bar(10, 10) == "█" * 12
    assert bar(0.001, 10) == "▏"
    assert bar(20, 10) == "█" * 12
