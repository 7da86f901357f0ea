"""What a recording says of a run: the request that the client sent, and a restart it waited for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ttftprof.experiment import digest as digests
from ttftprof.model import Report, Request, Series
from unit.report_samples import BEGAN_NS, MS, WEIGHTS_BYTES, cold, phases

START_NS = BEGAN_NS + 10 * MS


@pytest.fixture
def analysed(monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    """What `analyse` gives next."""
    given = [cold()]
    monkeypatch.setattr(digests, "analyse", lambda *_, **__: given[0])
    return given


def asked(report: Report) -> Request:
    return next(r for r in report.requests if r.ttft_ns is not None)


def test_the_request_nearest_to_the_clients_stamp_is_taken(analysed: list[Report]) -> None:
    request = asked(analysed[0])
    found = digests.digest(Path("x"), [request.start_ns - MS])
    assert found["ttft_ns"] == request.ttft_ns
    assert found["phases"] == request.phase_totals()
    assert found["weights_bytes"] == WEIGHTS_BYTES
    assert found["switched"] is True
    assert found["requests"] == 1


def test_shards_are_one_model(analysed: list[Report]) -> None:
    """Twice the bytes in three times the time: one of them came at half the speed."""
    request = asked(analysed[0])
    files = tuple(
        replace(f, bytes_from_storage=1000, bytes_per_second=rate, path=f"{f.path}{rate}")
        for f in request.files
        if f.is_weights
        for rate in (2000.0, 1000.0)
    )
    analysed[0] = replace(analysed[0], requests=(replace(request, files=files),))
    found = digests.digest(Path("x"), [request.start_ns])
    assert found["weights_bytes"] == 2 * WEIGHTS_BYTES
    assert found["storage_rate"] == pytest.approx(2000 / 1.5)
    assert found["storage_bytes"] == 2000


def test_what_a_front_reads_before_it_is_asked_belongs_to_the_restart(
    analysed: list[Report],
) -> None:
    """10 bytes of it before the restart, 100 between that and the request."""
    began_ns = START_NS - 50 * MS
    report = restart(400, start=False)
    request = asked(report)
    files = tuple(replace(f, bytes_from_storage=1000) for f in request.files if f.is_weights)
    stamps = (began_ns - MS, began_ns + MS, request.start_ns + MS, request.start_ns + 90 * MS)
    total = Series("storage_bytes", "bytes", None, stamps, (10.0, 110.0, 1110.0, 5000.0))
    analysed[0] = replace(report, requests=(replace(request, files=files),), series=(total,))
    assert digests.digest(Path("x"), [request.start_ns])["storage_bytes"] == 1000
    assert digests.digest(Path("x"), [request.start_ns], began_ns)["storage_bytes"] == 1100


def test_a_request_that_was_not_seen_is_not_made_up(analysed: list[Report]) -> None:
    found = digests.digest(Path("x"), [asked(analysed[0]).start_ns + 900 * MS])
    assert found["requests"] == 0
    assert "ttft_ns" not in found


def restart(request_at_ms: int, start: bool) -> Report:
    """A start of 300 ms (when one is seen), then a request answered after 50 ms."""
    report = cold()
    at = START_NS + request_at_ms * MS
    request = replace(
        asked(report),
        start_ns=at,
        first_token_ns=at + 50 * MS,
        phases=phases(at, [("prefill", 50)]),
        switched=False,
    )
    started = replace(
        request,
        id="start 1",
        endpoint="",
        first_token_ns=None,
        start_ns=START_NS,
        end_ns=START_NS + 300 * MS,
        phases=phases(START_NS, [("launch", 100), ("load", 200)]),
    )
    return replace(report, requests=(request,), starts=(started,) if start else ())


@pytest.mark.parametrize(
    ("request_at_ms", "start", "expected"),
    [
        # after the server could serve: 20 ms of nobody's between, 10 before
        (320, True, {"launch": 100, "load": 200, "prefill": 50, "unexplained": 30}),
        # in the backlog: the start's phases count up to the request, which has its own from there
        (150, True, {"launch": 100, "load": 50, "prefill": 50, "unexplained": 10}),
        # a router that loads when it is asked: what precedes the request is its own launch
        (150, False, {"launch": 160, "prefill": 50}),
    ],
)
def test_a_restart_is_told_from_its_order_to_the_first_token(
    analysed: list[Report], request_at_ms: int, start: bool, expected: dict[str, int]
) -> None:
    analysed[0] = restart(request_at_ms, start)
    (request,) = analysed[0].requests
    found = digests.digest(Path("x"), [request.start_ns], began_ns=BEGAN_NS)
    assert found["phases"] == {name: ms * MS for name, ms in expected.items()}
    assert request.first_token_ns is not None
    assert sum(found["phases"].values()) == request.first_token_ns - BEGAN_NS
