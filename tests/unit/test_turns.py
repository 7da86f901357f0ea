"""Requests inferred where nothing can be read: TLS records, and bytes that were only counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttftprof.sources.http import TOKEN_INFERRED, Connection, Exchange

MS = 1_000_000
Step = tuple[str, int, bytes]


def record(kind: int, size: int) -> bytes:
    return bytes([kind, 3, 3]) + size.to_bytes(2, "big") + b"\x00" * size


HELLO = record(0x16, 200)
DATA, ALERT = 0x17, 0x15
FINISHED_13 = record(0x14, 1) + record(DATA, 53)
HANDSHAKE_13: list[Step] = [
    ("r", 0, HELLO),
    ("s", 1, record(0x16, 90) + record(0x14, 1) + record(DATA, 900)),
]
HANDSHAKE_12: list[Step] = [
    ("r", 0, HELLO),
    ("s", 1, record(0x16, 900)),
    ("r", 2, record(0x16, 70) + record(0x14, 1) + record(0x16, 40)),
    ("s", 3, record(0x14, 1) + record(0x16, 40)),
]
TICKETS = record(DATA, 234) * 2
REQUEST = record(DATA, 400)
ANSWER = record(DATA, 190)


def play(steps: list[Step]) -> list[Exchange]:
    out: list[Exchange] = []
    connection = Connection(out.append)
    for side, ms, data in steps:
        (connection.received if side == "r" else connection.sent)(ms * MS, data)
    connection.closed(9_000 * MS)
    return out


def moments(exchanges: list[Exchange]) -> list[tuple[int, int | None, int | None]]:
    return [
        (
            e.start_ns // MS,
            None if e.first_token_ns is None else e.first_token_ns // MS,
            None if e.end_ns is None else e.end_ns // MS,
        )
        for e in exchanges
    ]


def two_requests(handshake: list[Step], before: list[Step]) -> list[Step]:
    asked: list[Step] = [("r", 100, REQUEST), ("s", 300, ANSWER), ("s", 400, ANSWER)]
    again: list[Step] = [("r", 1000, REQUEST), ("s", 1100, ANSWER)]
    return [*handshake, *before, *asked, *again]


@pytest.mark.parametrize(
    ("handshake", "before"),
    [
        (HANDSHAKE_12, []),
        (HANDSHAKE_13, [("r", 5, FINISHED_13), ("s", 6, TICKETS)]),
        (HANDSHAKE_13, [("r", 5, FINISHED_13)]),  # and no tickets
    ],
)
def test_each_request_after_an_answer_is_one(handshake: list[Step], before: list[Step]) -> None:
    got = play(two_requests(handshake, before))
    first_ms = 400 if len(before) == 1 else 300  # taken for tickets
    assert moments(got) == [(100, first_ms, 400), (1000, 1100, 1100)]
    assert {(e.protocol, e.outcome, e.generates, e.model) for e in got} == {
        ("tls", "ok", True, None)
    }
    assert all(TOKEN_INFERRED in e.notes and "TLS" in e.notes[0] for e in got)


def test_a_request_that_comes_with_the_end_of_the_handshake() -> None:
    got = play(
        [*HANDSHAKE_13, ("r", 5, FINISHED_13 + REQUEST), ("s", 6, TICKETS), ("s", 90, ANSWER)]
    )
    assert moments(got) == [(5, 90, 90)]


def test_an_only_write_is_the_answer_even_if_it_looks_like_tickets() -> None:
    got = play([*HANDSHAKE_13, ("r", 5, FINISHED_13), ("r", 9, REQUEST), ("s", 90, ANSWER)])
    assert moments(got) == [(9, 90, 90)]


def test_an_alert_is_no_request() -> None:
    end: list[Step] = [("r", 500, record(ALERT, 26)), ("r", 501, record(DATA, 19))]
    assert len(play([*HANDSHAKE_12, ("r", 10, REQUEST), ("s", 90, ANSWER), *end])) == 1


def test_a_quick_answer_in_one_write_is_no_models_work() -> None:
    (got,) = play([*HANDSHAKE_12, ("r", 10, REQUEST), ("s", 11, ANSWER)])
    assert not got.generates
    (got,) = play([*HANDSHAKE_12, ("r", 10, REQUEST), *[("s", 11, ANSWER)] * 3])
    assert got.generates


def test_no_answer_is_a_cancellation() -> None:
    (got,) = play([*HANDSHAKE_12, ("r", 10, REQUEST)])
    assert (got.outcome, got.first_token_ns, got.generates) == ("cancelled", None, True)


def test_a_handshake_alone_is_said_and_is_no_request() -> None:
    (got,) = play(HANDSHAKE_12)
    assert (got.outcome, got.generates, got.first_token_ns) == ("incomplete", False, None)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.booleans())
def test_however_the_records_are_cut(sizes: list[int], new: bool) -> None:
    before: list[Step] = [("r", 5, FINISHED_13), ("s", 6, TICKETS)] if new else []
    whole = two_requests(HANDSHAKE_13 if new else HANDSHAKE_12, before)
    cut: list[Step] = []
    for side, ms, data in whole:
        at = 0
        for size in [*sizes, len(data)]:
            if at < len(data):
                cut.append((side, ms, data[at : at + size]))
            at += size
    assert moments(play(cut)) == moments(play(whole))


@given(st.lists(st.tuples(st.sampled_from("rs"), st.binary(max_size=80), st.integers(0, 2**40))))
def test_nothing_raises(pieces: list[tuple[str, bytes, int]]) -> None:
    out: list[Exchange] = []
    connection = Connection(out.append)
    connection.received(0, HELLO[:6])
    for i, (side, data, missing) in enumerate(pieces):
        (connection.received if side == "r" else connection.sent)(i, data, missing)
        connection.pending()
    connection.closed(len(pieces))
    assert connection.pending() == []
    assert all(e.end_ns is None or e.start_ns <= e.end_ns for e in out)
