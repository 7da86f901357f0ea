"""The tap: pieces of transfers become exchanges, gaps are told, connections end."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttftprof.events import TEXT, TextKind
from ttftprof.sources import requests
from ttftprof.sources.http import TOKEN_INFERRED
from ttftprof.sources.http.held import LEFT_UNSEEN
from ttftprof.sources.requests import RequestTap, Seen

SOCKET = 0xFFFF_8880_1234_5678
PORTS = 8080 << 16 | 50_000


def message(head: str, body: bytes) -> bytes:
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


REQUEST = message(
    "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer CANARY-key\r\n",
    json.dumps({"model": "m", "messages": "CANARY-prompt", "stream": True}).encode(),
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
TOKEN = b'data: {"choices":[{"delta":{"content":"CANARY-answer"}}]}\n\n'
LAST = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Tap:
    """A `RequestTap` with what it told."""

    def __init__(self) -> None:
        self.ended: list[Seen] = []
        self.moved: list[Seen] = []
        self.quiet: list[tuple[int, int]] = []
        self.tap = RequestTap(self.ended.append, self.moved.append, self._asked)
        self._ns = 0
        self.turn = 0
        self.unix = False

    def _asked(self, socket: int, turn: int) -> None:
        self.quiet.append((socket, turn))

    def piece(
        self,
        data: bytes,
        sent: bool,
        offset: int = 0,
        total: int | None = None,
        skipped: int = 0,
        socket: int = SOCKET,
        held: bool = False,
    ) -> Tap:
        """One piece of a transfer, 10 ns after the one before."""
        self._ns += 10
        head = np.zeros(1, TEXT)[0]
        head["start_ns"] = self._ns
        head["key"], head["tgid"], head["tid"] = socket, 7, 8
        head["dev"] = 0 if self.unix else PORTS
        head["kind"] = TextKind.SENT if sent else TextKind.RECEIVED
        self.turn += not sent
        head["flags"] = self.turn
        head["offset"], head["skipped"], head["length"] = offset, skipped, len(data)
        head["total"] = offset + len(data) if total is None else total
        self.tap.take(head, data, sent, held)
        return self

    def received(self, data: bytes, **how: Any) -> Tap:
        return self.piece(data, sent=False, **how)

    def sent(self, data: bytes, **how: Any) -> Tap:
        return self.piece(data, sent=True, **how)

    def closed(self, socket: int = SOCKET) -> Tap:
        self._ns += 10
        self.tap.closed(socket, self._ns)
        return self


def test_what_was_held_back_is_dated_when_it_left() -> None:
    written, left = 30, 25_000_030
    for end in ("left", "unseen", "closed"):
        tap = Tap()
        tap.received(REQUEST).sent(STREAM_HEAD).sent(chunk(TOKEN) + LAST, held=True)
        assert not tap.ended
        assert [s.exchange.outcome for s in tap.tap.pending()] == ["ok"]
        if end == "left":
            tap.tap.left(SOCKET, left)
        elif end == "unseen":
            tap.received(REQUEST)
        else:
            tap.tap.closed(SOCKET, left)
        (seen,) = tap.ended
        if end == "left":
            assert (seen.exchange.first_token_ns, seen.exchange.end_ns) == (left, left)
            assert any("for 25 ms" in note for note in seen.exchange.notes)
        else:
            assert seen.exchange.first_token_ns == written
            assert seen.exchange.notes == (LEFT_UNSEEN,)


def test_an_exchange_is_told_with_where_it_was_seen() -> None:
    tap = Tap().received(REQUEST).sent(STREAM_HEAD).sent(chunk(TOKEN)).sent(LAST)
    (seen,) = tap.ended
    assert (seen.socket, seen.tgid, seen.tid, seen.ports) == (SOCKET, 7, 8, (8080, 50_000))
    exchange = seen.exchange
    assert (exchange.start_ns, exchange.headers_ns, exchange.first_token_ns) == (10, 20, 30)
    assert (exchange.model, exchange.outcome, exchange.notes) == ("m", "ok", ())


def test_a_fact_holds_no_word_and_is_json() -> None:
    tap = Tap().received(REQUEST).sent(STREAM_HEAD).sent(chunk(TOKEN)).sent(LAST)
    fact = json.loads(json.dumps(tap.ended[0].as_fact()))
    assert "CANARY" not in str(fact)
    assert (fact["socket"], fact["local_port"], fact["remote_port"]) == (SOCKET, 8080, 50_000)
    assert (fact["timings"], fact["tgid"]) == ({}, 7)


def test_pieces_of_one_transfer_join() -> None:
    tap = Tap()
    half = len(REQUEST) // 2
    tap.received(REQUEST[:half], total=len(REQUEST))
    tap.received(REQUEST[half:], offset=half)
    (seen,) = tap.sent(STREAM_HEAD).sent(chunk(TOKEN)).sent(LAST).ended
    assert seen.exchange.request_bytes == len(REQUEST)
    assert seen.exchange.notes == ()


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), max_size=12))
def test_however_it_is_cut(cuts: list[int]) -> None:
    tap, at = Tap(), 0
    for size in [*cuts, len(REQUEST)]:
        data = REQUEST[at : at + size]
        if data:
            tap.received(data, offset=at, total=len(REQUEST))
        at += len(data)
    (seen,) = tap.sent(STREAM_HEAD + chunk(TOKEN) + LAST).ended
    assert (seen.exchange.request_bytes, seen.exchange.model) == (len(REQUEST), "m")


def gap_in_prompt() -> tuple[bytes, bytes, bytes]:
    """A request with a long prompt in the middle that is not copied."""
    body = json.dumps({"model": "m", "stream": True, "prompt": "p" * 5_000}).encode()
    whole = message("POST /completion HTTP/1.1\r\n", body)
    return whole[:1_000], whole[1_000:-100], whole[-100:]


def test_a_piece_that_is_missing_is_told_by_the_next_ones_offset() -> None:
    first, missing, last = gap_in_prompt()
    tap, total = Tap(), len(first) + len(missing) + len(last)
    tap.received(first, total=total)
    tap.received(last, offset=len(first) + len(missing))
    (seen,) = tap.sent(STREAM_HEAD + chunk(TOKEN) + LAST).ended
    assert seen.exchange.request_bytes == total
    assert (seen.exchange.model, seen.exchange.outcome) == ("m", "ok")
    assert "gap in capture" in seen.exchange.notes


def test_the_end_that_is_missing_is_told_by_the_next_transfer() -> None:
    first, missing, last = gap_in_prompt()
    tap, total = Tap(), len(first) + len(missing) + len(last)
    tap.received(first, total=total)
    tap.sent(STREAM_HEAD + chunk(TOKEN) + LAST)
    assert [e.exchange.request_end_ns for e in tap.ended] == [None]  # not told yet
    tap.received(first, total=total).closed()
    assert len(tap.ended) == 2


def test_a_first_piece_that_is_missing_is_a_gap_before_the_second() -> None:
    tap = Tap().received(REQUEST).sent(STREAM_HEAD)
    tap.sent(chunk(TOKEN)[20:], offset=20).sent(LAST)
    (seen,) = tap.ended
    assert "gap in capture" in seen.exchange.notes


def test_what_was_only_counted_comes_before_the_next_transfer() -> None:
    later = chunk(TOKEN)
    tap = Tap().received(REQUEST).sent(STREAM_HEAD).sent(chunk(TOKEN))
    tap.sent(LAST, skipped=3 * len(later))
    (seen,) = tap.ended
    expected = len(STREAM_HEAD) + 4 * len(later) + len(LAST)
    assert (seen.exchange.response_bytes, seen.exchange.outcome) == (expected, "ok")
    assert seen.exchange.notes == ()  # left out by arrangement, not lost
    assert seen.exchange.text_chunks is None


def test_quiet_is_asked_for_once_a_response() -> None:
    tap = Tap()
    for _ in range(2):
        tap.received(REQUEST).sent(STREAM_HEAD)
        for _ in range(3):
            tap.sent(chunk(TOKEN))
        tap.sent(LAST)
    assert tap.quiet == [(SOCKET, 1), (SOCKET, 2)]


def test_a_plain_answer_is_never_quiet() -> None:
    answer = message("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n", b'{"content":"x"}')
    assert Tap().received(REQUEST).sent(answer).quiet == []


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":99}}\n\n'


def streaming() -> Tap:
    """An answer in full flow: its first token was seen."""
    return Tap().received(REQUEST).sent(STREAM_HEAD).sent(chunk(TOKEN))


def test_the_last_writes_of_a_quiet_answer_are_read() -> None:
    tap = streaming()
    for _ in range(100):
        tap.sent(chunk(TOKEN))
    tap.sent(chunk(USAGE)).sent(chunk(b"data: [DONE]\n\n")).sent(LAST)
    exchange = tap.ended[0].exchange
    assert (exchange.prompt_tokens, exchange.completion_tokens) == (7, 99)
    assert exchange.last_token_ns == 10 * 103
    assert (exchange.text_chunks, exchange.notes) == (None, ())
    sent = len(STREAM_HEAD) + 101 * len(chunk(TOKEN)) + len(chunk(USAGE)) + len(LAST)
    assert exchange.response_bytes == sent + len(chunk(b"data: [DONE]\n\n"))


def test_a_short_answer_is_read_whole() -> None:
    tap = streaming().sent(chunk(TOKEN)).sent(LAST)
    assert tap.ended[0].exchange.text_chunks == 2


@pytest.mark.parametrize("end", ["request", "close", "big"])
def test_what_is_kept_is_read_when_something_follows(end: str) -> None:
    tap = streaming().sent(chunk(USAGE))
    if end == "request":
        tap.received(REQUEST)
    elif end == "close":
        tap.closed()
    else:
        tap.sent(chunk(b"data: " + b"x" * 600 + b"\n\n")).sent(LAST)
    seen = tap.ended or tap.tap.pending()
    assert seen[0].exchange.prompt_tokens == 7


def test_no_quiet_while_another_request_waits() -> None:
    tap = Tap().received(REQUEST).received(REQUEST).sent(STREAM_HEAD).sent(chunk(TOKEN))
    assert tap.quiet == []
    tap.sent(LAST).sent(STREAM_HEAD).sent(chunk(TOKEN))
    assert tap.quiet == [(SOCKET, 2)]
    assert tap.tap.pending()[0].exchange.first_token_ns is not None


def test_bytes_that_lay_in_no_buffer_are_told_as_such() -> None:
    tap = Tap().received(REQUEST).sent(STREAM_HEAD)
    tap.sent(b"", total=500).closed()
    exchange = tap.ended[0].exchange
    assert exchange.first_token_ns == exchange.first_body_ns == 30
    assert TOKEN_INFERRED in exchange.notes


def test_a_connection_moved_unseen_gives_requests_by_turns() -> None:
    tap = Tap()
    for _ in range(2):
        tap.received(b"", total=300)
        for _ in range(3):
            tap.sent(b"", total=200)
    tap.closed()
    assert [(e.exchange.start_ns, e.exchange.first_token_ns) for e in tap.ended] == [
        (10, 20),
        (50, 60),
    ]
    assert {(e.exchange.protocol, e.exchange.generates) for e in tap.ended} == {("unseen", True)}


def test_a_process_takes_its_unix_sockets_with_it() -> None:
    tap = Tap().received(REQUEST)
    tap.tap.process_gone(7, 99)
    assert tap.ended == []  # a TCP socket's states tell its end
    tap.unix = True
    tap.received(REQUEST, socket=1)
    tap.tap.process_gone(8, 99)
    assert tap.ended == []
    tap.tap.process_gone(7, 99)
    assert [(s.socket, s.exchange.outcome) for s in tap.ended] == [(1, "cancelled")]


def test_what_many_connections_hold_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_BUFFERED_BYTES", 100_000)
    tap = Tap()
    for socket in range(50):
        tap.received(b"GET / HTTP/1.1\r\nX: " + b"a" * 4_000, socket=socket + 1)
    held = [t.buffered_bytes for t in tap.tap._open.values()]
    assert sum(held) <= 100_000
    assert held.count(0) == 26
    assert "not read on" in tap.ended[0].exchange.notes[0]


def test_how_many_connections_are_held_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_CONNECTIONS", 10)
    tap = Tap()
    for socket in range(30):
        tap.received(REQUEST, socket=socket + 1)
    assert len(tap.tap.pending()) == 10
    assert len(tap.ended) == 20


@pytest.mark.parametrize(
    ("steps", "outcome"),
    [(0, "cancelled"), (1, "cancelled"), (2, "cancelled"), (3, "ok")],
)
def test_closing_ends_what_is_open(steps: int, outcome: str) -> None:
    tap = Tap().received(REQUEST)
    for data in [STREAM_HEAD, chunk(TOKEN), LAST][:steps]:
        tap.sent(data)
    tap.closed().closed()
    assert [seen.exchange.outcome for seen in tap.ended] == [outcome]
    assert tap.tap.pending() == []


def test_closing_an_unknown_socket_is_nothing() -> None:
    assert Tap().closed(1).ended == []


def test_a_socket_address_is_reused_by_another_connection() -> None:
    tap = Tap().received(REQUEST[:50], total=len(REQUEST)).closed()
    tap.received(REQUEST).sent(STREAM_HEAD + chunk(TOKEN) + LAST)
    assert tap.ended[-1].exchange.outcome == "ok"
    assert tap.ended[-1].exchange.request_bytes == len(REQUEST)


def test_connections_do_not_mix() -> None:
    tap = Tap()
    for socket in (1, 2):
        tap.received(REQUEST[:80], total=len(REQUEST), socket=socket)
    for socket in (2, 1):
        tap.received(REQUEST[80:], offset=80, socket=socket)
        tap.sent(STREAM_HEAD + chunk(TOKEN) + LAST, socket=socket)
    assert [(s.socket, s.exchange.model, s.exchange.notes) for s in tap.ended] == [
        (2, "m", ()),
        (1, "m", ()),
    ]


def test_what_has_not_ended_is_pending() -> None:
    tap = Tap().received(REQUEST).sent(STREAM_HEAD)
    (seen,) = tap.tap.pending()
    assert (seen.exchange.outcome, seen.exchange.headers_ns) == ("incomplete", 20)
    assert tap.ended == []


def test_progress_is_told_at_the_request_the_head_and_the_token() -> None:
    tap = Tap().received(REQUEST).sent(STREAM_HEAD).sent(chunk(TOKEN)).sent(chunk(TOKEN))
    stages = [
        (m.exchange.headers_ns is not None, m.exchange.first_token_ns is not None)
        for m in tap.moved
    ]
    assert stages == [(False, False), (True, False), (True, True)]


pieces = st.tuples(
    st.booleans(),
    st.one_of(st.binary(max_size=60), st.sampled_from([REQUEST, STREAM_HEAD, chunk(TOKEN), LAST])),
    st.integers(0, 2**32 - 1) | st.integers(0, 300),
    st.integers(0, 2**32 - 1) | st.integers(0, 300),
    st.integers(0, 2**32 - 1) | st.just(0),
    st.sampled_from([1, 2]),
)


@settings(deadline=None)
@given(st.lists(pieces, max_size=20))
def test_no_order_of_pieces_makes_it_stumble(
    played: list[tuple[bool, bytes, int, int, int, int]],
) -> None:
    tap = Tap()
    for sent, data, offset, total, skipped, socket in played:
        tap.piece(data, sent, offset=offset, total=total, skipped=skipped, socket=socket)
    tap.closed(1).closed(2)
    assert tap.tap.pending() == []
    assert all(seen.exchange.end_ns is not None for seen in tap.ended)
