"""A recording in the VM across two suspends, and a CPU that went off and came on again."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from conftest import VM_RESULTS
from ttftprof.analysis import analyse
from ttftprof.events import Kind
from ttftprof.recording import Reader

pytestmark = pytest.mark.vm

RESULTS = VM_RESULTS.parent / "suspend" / "results"
RECORDING = RESULTS / "suspend.ttft"
READ_BYTES = 1 << 20
SECOND_NS = 1_000_000_000
NOTABLE_NS = 50_000_000
LEVELS = ["core", "none"]  # the kernel's own test of a suspend, and a real one


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / "suspend.json").read_text())
    return found


def slept_ns(suspend: dict[str, Any]) -> int:
    """By how much more one clock went on than the other."""
    before, after = suspend["before"], suspend["after"]
    awake_ns = after["monotonic_ns"] - before["monotonic_ns"]
    return int(after["boottime_ns"] - before["boottime_ns"] - awake_ns)


def test_the_machine_was_suspended_to_memory(told: dict[str, Any]) -> None:
    assert "[deep]" in told["mem_sleep"]
    assert [s["level"] for s in told["suspends"]] == LEVELS
    assert [s["refused"] for s in told["suspends"]] == ["", ""]
    assert all(slept_ns(s) > SECOND_NS for s in told["suspends"])


def test_each_suspend_is_told_with_its_length(told: dict[str, Any]) -> None:
    with Reader(RECORDING) as reader:
        assert reader.complete
        assert not reader.lost()
        jumps = [fact for _, fact in reader.facts("clock_jump")]
    assert len(jumps) == len(LEVELS)
    for jump, suspend in zip(jumps, told["suspends"], strict=True):
        assert jump["suspended_ns"] == pytest.approx(slept_ns(suspend), abs=NOTABLE_NS)
        assert jump["set_ns"] == 0
    notes = [n for n in analyse(RECORDING).notes if "was suspended for" in n]
    assert len(notes) == len(LEVELS)
    assert all("no time here counts it" in note for note in notes)


def test_no_time_of_the_recording_counts_it(told: dict[str, Any]) -> None:
    """Its clock is the one that stood still: it lies within what was awake."""
    report = analyse(RECORDING)
    first, last = told["suspends"][0], told["suspends"][-1]
    assert report.start_ns < first["before"]["monotonic_ns"]
    assert report.end_ns > last["after"]["monotonic_ns"]
    boottime_ns = last["after"]["boottime_ns"] - first["before"]["boottime_ns"]
    assert last["after"]["monotonic_ns"] - first["before"]["monotonic_ns"] < boottime_ns


def test_reads_go_on_after_each(told: dict[str, Any]) -> None:
    with Reader(RECORDING) as reader:
        events = reader.stream("events")
    reads = events[events["kind"] == Kind.READ]
    assert set(reads["a"].tolist()) == {READ_BYTES}
    edges = [0]
    edges += [s[when]["monotonic_ns"] for s in told["suspends"] for when in ("before", "after")]
    edges.append(int(np.iinfo("i8").max))
    spans = list(pairwise(edges))
    begun = reads["start_ns"].astype(np.int64)
    for start_ns, end_ns in spans[::2]:
        assert ((begun >= start_ns) & (begun < end_ns)).any()


def test_a_cpu_that_came_back_is_looked_at(told: dict[str, Any]) -> None:
    """After a suspend, which switches all but the first off, and after somebody did; though the
    kernel opens perf events for CAP_SYS_ADMIN alone, which the recorder has no more."""
    assert told["cpus"] == "0-1"
    [cpu] = [s for s in analyse(RECORDING).sources if s.name == "cpu"]
    assert cpu.state == "ok", cpu.reason
    assert len(re.findall(r"CPU 1 is looked at since [^;]* suspended", cpu.reason)) == len(LEVELS)
    assert len(re.findall(r"CPU 1 is looked at since [^;]* came on", cpu.reason)) == 1
