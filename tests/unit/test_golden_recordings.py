"""Recordings of real servers that CI has not, kept by `lab.golden`: what is concluded from them.

A vLLM 0.32 for a CPU, attached to while it ran; its model had been in memory long before.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.golden import kept
from ttftprof.analysis import analyse
from ttftprof.model import Report, Request
from ttftprof.phases import requests_of
from ttftprof.recording import Reader
from ttftprof.timeline import Timeline, build

GOLDEN = Path(__file__).parents[1] / "golden"
API_SERVER, ENGINE_CORE, WORKER = 8949, 10397, 10903


def read(name: str) -> tuple[Report, Timeline]:
    with kept(GOLDEN / name) as path:
        with Reader(path) as reader:
            timeline = build(reader)
        return analyse(path), timeline


def ms(request: Request) -> dict[str, int]:
    assert sum(request.phase_totals().values()) == request.ttft_ns
    assert sum(request.activity_totals().values()) == request.ttft_ns
    return {phase: round(ns / 1e6) for phase, ns in request.phase_totals().items()}


def spent_on(request: Request, phase: str) -> dict[str, float]:
    """{what its Python code did in a phase: share}"""
    return {s.category: s.share for p in request.python if p.phase == phase for s in p.shares}


def test_a_vllm_that_was_attached_to() -> None:
    """Two requests alone, two beside each other: the worker computed, and its code says so."""
    report, timeline = read("vllm_attached.ttft.xz")
    assert [ms(request) for request in report.requests] == [
        {"prefill": 643},
        {"prefill": 408},
        {"prefill": 108},
        {"prefill": 200},
    ]
    assert {request.engine for request in report.requests} == {"vllm"}
    assert {served.server for served in requests_of(timeline)} == {WORKER}
    assert {r.verdict.cause for r in report.requests} == {"prefill"}
    assert spent_on(report.requests[0], "prefill")["generate"] > 0.8
    assert spent_on(report.requests[1], "prefill") == {"generate": 1.0}


def test_a_vllm_that_was_asleep() -> None:
    """Its server took the request; the worker spun and then polled for a message until somebody
    woke the engine a second later. Without a GPU there are no weights to bring back."""
    report, timeline = read("vllm_asleep.ttft.xz")
    (request,) = report.requests
    assert ms(request) == {"queue": 1003, "load": 17, "prefill": 317}
    assert [served.server for served in requests_of(timeline)] == [WORKER]
    assert "The engine was asleep" in request.verdict.explanation
    assert set(spent_on(request, "queue")) == {"idle"}
    assert spent_on(request, "prefill")["generate"] > 0.8
    assert any("woken from sleep level 1" in note for note in request.notes)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.ttft.xz")), ids=lambda p: p.name)
def test_a_kept_recording_is_small_and_tells_nothing_of_its_machine(path: Path) -> None:
    assert path.stat().st_size < 120_000
    with kept(path) as whole, Reader(whole) as reader:
        assert reader.meta["host"]["node"] == "host"
        paths = [word for _, fact in reader.facts("process") for word in fact["argv"]]
        assert all(word.count("/") <= 1 for word in paths)
