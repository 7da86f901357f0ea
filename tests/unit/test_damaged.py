"""A damaged recording through the whole chain: one of our errors, or reports that sum.

`test_recording.py` damages what the reader is given; here the reader may take a wrong value for a
right one, and everything after it must bear it: every report, every export, a comparison.
"""

from __future__ import annotations

import io
import random
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest

from ttftprof.analysis import analyse
from ttftprof.cli import export
from ttftprof.diff import Wait, compare
from ttftprof.errors import TtftprofError, UsageError
from ttftprof.model import Report
from ttftprof.reports import diff_terminal, html, json, terminal
from ttftprof.timeline import Timeline
from unit.recordings import router_switch

FLIPS = 20
FLIPS_AT_ONCE = (1, 1, 3, 20)
SCHEMA = jsonschema.Draft202012Validator(json.schema())
BOUND_S = 5.0  # for one damaged file; a whole one takes a hundredth


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return router_switch().write(tmp_path_factory.mktemp("whole") / "a.ttft").read_bytes()


def check(report: Report) -> None:
    for request in report.requests:
        if request.ttft_ns is not None:
            assert sum(request.phase_totals().values()) == request.ttft_ns
            assert sum(request.activity_totals().values()) == request.ttft_ns
        edges = [(p.start_ns, p.end_ns) for p in request.phases]
        assert all(end == start for (_, end), (start, _) in pairwise(edges))


def write_all(report: Report, timeline: Timeline) -> None:
    terminal.write([report], io.StringIO(), width=100, colour=False)
    SCHEMA.validate(json.as_json(report))
    html.write([report], io.StringIO())
    for form in export.FORMATS:
        if form in export.BINARY:
            export.write_binary(form, report, timeline, io.BytesIO())
        else:
            with suppress(UsageError):  # otlp-json, without wall time
                export.write_text(form, report, timeline, io.StringIO())
    if report.requests:
        waits = [Wait(report, request) for request in report.requests]
        comparisons = [compare(waits[0], wait) for wait in waits]
        diff_terminal.write(comparisons, io.StringIO(), width=80, colour=False)
        html.write_comparison(comparisons, io.StringIO())


@pytest.mark.parametrize("seed", range(2))
def test_flipped_bits_are_an_error_or_exact_reports(
    tmp_path: Path, sample: bytes, seed: int
) -> None:
    dice = random.Random(seed)
    path = tmp_path / "flipped.ttft"
    told = 0
    for _ in range(FLIPS):
        damaged = bytearray(sample)
        for _ in range(dice.choice(FLIPS_AT_ONCE)):
            damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        began = time.process_time()
        try:
            report, timeline = export.read(path)
            check(report)
            write_all(report, timeline)
            told += 1
        except TtftprofError:
            pass
        assert time.process_time() - began < BOUND_S
    assert told


def test_every_kilobyte_swapped_with_another_is_survived(tmp_path: Path, sample: bytes) -> None:
    """What a torn write leaves: pages of another time in place of their own."""
    dice = random.Random(5)
    path = tmp_path / "torn.ttft"
    for at in range(0, len(sample) - 1024, 1024):
        damaged = bytearray(sample)
        other = dice.randrange(len(sample) // 1024 - 1) * 1024
        damaged[at : at + 1024] = sample[other : other + 1024]
        path.write_bytes(damaged)
        try:
            check(analyse(path))
        except TtftprofError:
            continue
