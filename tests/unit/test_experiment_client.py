"""The experiment's client against servers that behave, and against some that do not."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

from ttftprof.experiment.client import Streams, ask
from ttftprof.experiment.messages import OUTCOMES, Answer, Ask, Limits, filler
from workloads.steady import END, HEAD, chunk, steady_server

QUICK = Limits(timeout_s=0.6, stall_s=0.15)  # where it is to run out of patience
PATIENT = Limits(timeout_s=30, stall_s=20)  # as on a machine that stands still at times
ENDLESS = Limits(timeout_s=0.6, stall_s=20)
JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\n\r\n"

Serve = Callable[[socket.socket], None]


def event(text: str | None, **more: object) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return chunk(b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n")


USAGE = {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}
LAST = b"0\r\n\r\n"


@contextmanager
def serving(serve: Serve) -> Iterator[tuple[str, int]]:
    """A server that reads each request and then does as it is told."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)

    def connection(sock: socket.socket) -> None:
        with sock, suppress(OSError):
            read_request(sock)
            serve(sock)

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=connection, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[:2]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def read_request(sock: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(1 << 16)
    head, _, body = data.partition(b"\r\n\r\n")
    found = re.search(rb"Content-Length: (\d+)", head)
    assert found
    while len(body) < int(found[1]):
        body += sock.recv(1 << 16)
    return body


def one(serve: Serve, limits: Limits = PATIENT) -> Answer:
    with serving(serve) as address:
        (answer,) = ask([Ask("m", "some words", 4)], address, limits)
    return answer


def well(sock: socket.socket) -> None:
    for piece in (HEAD, event(None), event("a"), event("b", usage=USAGE), END):
        sock.sendall(piece)
        time.sleep(0.01)


def test_a_whole_answer_gives_every_stamp_in_order() -> None:
    answer = one(well)
    assert answer.outcome == "ok"
    stamps = (answer.connect_ns, answer.send_begin_ns, answer.send_end_ns, answer.headers_ns)
    order = [ns for ns in (*stamps, answer.first_token_ns, answer.end_ns) if ns is not None]
    assert len(order) == 6
    assert order == sorted(order)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.text_chunks) == (7, 3, 2)
    assert [size for _, size in answer.chunks] == [
        len(HEAD),
        len(event(None)),
        len(event("a")),
        len(event("b", usage=USAGE)),
        len(END),
    ]
    # the role comes 10 ms before the first text: it is no token
    assert answer.first_token_ns == answer.chunks[2][0]


def test_ollamas_lines_end_with_the_connection() -> None:
    def serve(sock: socket.socket) -> None:
        sock.sendall(JSON_HEAD)
        for text, done in (("a", False), ("b", True)):
            line = {"message": {"content": text}, "done": done, "prompt_eval_count": 5}
            sock.sendall(json.dumps(line).encode() + b"\n")

    with serving(serve) as address:
        (answer,) = ask([Ask("m", "w", 4, api="ollama")], address, PATIENT)
    assert answer.outcome == "ok"
    assert answer.first_token_ns is not None
    assert answer.prompt_tokens == 5


@dataclass(frozen=True)
class Hostile:
    """What a server does, and the class that it must get."""

    name: str
    serve: Serve
    outcome: str
    limits: Limits = PATIENT


def send(*pieces: bytes, then: Callable[[], None] = lambda: None) -> Serve:
    def serve(sock: socket.socket) -> None:
        for piece in pieces:
            sock.sendall(piece)
        then()

    return serve


def for_ever(sock: socket.socket) -> None:
    sock.sendall(HEAD)
    while True:
        sock.sendall(event("more"))
        time.sleep(0.01)


def flood(head: bytes, block: bytes) -> Serve:
    def serve(sock: socket.socket) -> None:
        sock.sendall(head)
        while True:
            sock.sendall(block)

    return serve


def linger() -> None:
    time.sleep(2)


def reset(sock: socket.socket) -> None:
    sock.sendall(HEAD + event("a"))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def error_response(status: int, body: bytes = b'{"error":"no"}') -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )


BROKEN = chunk(b"data: {broken\n\n")
PLAIN_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
LONG_HEAD = PLAIN_HEAD[:-2] + b"Content-Length: 900000000\r\n\r\n"
WORD = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
HTML = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 4\r\n\r\noops"
STREAM_ERROR = chunk(b'data: {"error":{"message":"no"}}\n\n') + b"0\r\n\r\n"
FLOODED = Limits(20.0, 5.0, max_bytes=1 << 20)
HOSTILE = [
    Hostile("gone before a word", send(), "gone"),
    Hostile("gone in mid-stream", send(HEAD, event("a")), "gone"),
    Hostile("gone, which only a missing end mark tells", send(PLAIN_HEAD, WORD), "gone"),
    Hostile("a proxy closes what its server broke off", send(HEAD, event("a"), LAST), "gone"),
    Hostile("reset", reset, "gone"),
    Hostile("http 500", send(error_response(500)), "failed"),
    Hostile("http 503, then closed early", send(error_response(503)[:-3]), "failed"),
    Hostile("http 404", send(error_response(404)), "rejected"),
    Hostile("a redirect", send(b"HTTP/1.1 302 X\r\nContent-Length: 0\r\n\r\n"), "rejected"),
    Hostile("error inside the stream", send(HEAD, STREAM_ERROR), "failed"),
    Hostile("stall in mid-stream", send(HEAD, event("a"), then=linger), "stalled", QUICK),
    Hostile("silence", send(then=linger), "timeout", QUICK),
    Hostile("head, then silence", send(HEAD, event(None), then=linger), "timeout", QUICK),
    Hostile("no http", send(b"SSH-2.0-OpenSSH_9.2\r\n", then=linger), "malformed"),
    Hostile("event that is no JSON", send(HEAD, event("a"), BROKEN, END), "malformed"),
    Hostile("no chunk size", send(HEAD, b"what is this?\r\n", then=linger), "malformed"),
    Hostile("a web page", send(HTML), "malformed"),
    Hostile("no text", send(HEAD, event(None), END), "empty"),
    Hostile("never ends", for_ever, "endless", ENDLESS),
    Hostile("a flood", flood(HEAD, event("x" * 4000) * 64), "endless", FLOODED),
    Hostile("a flood until it closes", flood(PLAIN_HEAD, WORD * 999), "endless", FLOODED),
    Hostile("a flood of known length", flood(LONG_HEAD, WORD * 999), "endless", FLOODED),
    Hostile("a flood without a word", flood(HEAD, event(None) * 999), "endless", FLOODED),
]


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case.name)
def test_every_failure_has_its_class_and_its_end(case: Hostile) -> None:
    began = time.monotonic()
    answer = one(case.serve, case.limits)
    assert answer.outcome == case.outcome, answer.detail
    assert time.monotonic() - began < 10
    assert answer.outcome in OUTCOMES
    assert bool(answer.detail) == (answer.outcome not in ("ok",))
    if (
        answer.outcome in ("gone", "stalled", "endless")
        and answer.chunks
        and "without" not in case.name
    ):
        assert answer.first_token_ns is not None  # what had come is kept


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()[:2]
    (answer,) = ask([Ask("m", "w", 1)], address, PATIENT)
    assert answer.outcome == "refused"
    assert answer.ttft_ns is None


def test_one_bad_stream_does_not_disturb_the_others() -> None:
    turn = iter(range(8))
    lock = threading.Lock()

    def serve(sock: socket.socket) -> None:
        with lock:
            number = next(turn)
        if number == 3:
            return
        well(sock)

    with serving(serve) as address:
        answers = ask([Ask("m", "w", 4)] * 8, address, PATIENT)
    assert sorted(a.outcome for a in answers) == ["gone", *["ok"] * 7]


def test_pieces_of_one_byte_are_put_together() -> None:
    def serve(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in HEAD + event("a") + END:
            sock.sendall(bytes([byte]))

    assert one(serve).outcome == "ok"


def test_fields_of_the_request_can_be_set() -> None:
    request = Ask("m", "hi", 3, "ollama", {"options.num_ctx": 512, "keep_alive": "1h"}, "k1")
    head, _, body_bytes = request.encode("h", 1).partition(b"\r\n\r\n")
    body = json.loads(body_bytes)
    assert b"Authorization: Bearer k1" in head
    assert "k1" not in repr(request)
    assert body["options"] == {"num_predict": 3, "temperature": 0, "num_ctx": 512}
    assert body["keep_alive"] == "1h"


def test_prompts_are_fixed_by_the_seed_and_their_beginning_differs_to_bust_a_cache() -> None:
    one, two = (filler(34, 1, own).split() for own in ("a", "b"))
    assert len(one) == len(two) == 34
    assert one[:8] != two[:8]
    assert one[8:] == two[8:] == filler(34, 1, None).split()[8:]
    assert filler(34, 1, None) == filler(34, 1, None) != filler(34, 2, None)
    assert len(filler(3, 1, "a").split()) == 3


def test_connections_are_made_at_once_and_in_time() -> None:
    """To a server whose queue is full: it drops what comes, so that nobody is refused."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        fill = [socket.socket() for _ in range(4)]
        for sock in fill:
            sock.setblocking(False)
            sock.connect_ex(address)
        began = time.monotonic()
        answers = ask([Ask("m", "w", 1)] * 16, address, Limits(timeout_s=0.3))
        took = time.monotonic() - began
        for sock in fill:
            sock.close()
    assert {(a.outcome, a.detail) for a in answers} == {("refused", "no connection in time")}
    assert 0.3 <= took < 16 * 0.3 / 2


def test_the_client_goes_first_while_it_asks_and_only_then() -> None:
    before = os.sched_getscheduler(0)
    meanwhile: list[int] = []
    with serving(well) as address:
        ask([Ask("m", "w", 4)], address, PATIENT, meanwhile=lambda: meanwhile.append(policy()))
    allowed = os.geteuid() == 0
    assert meanwhile == [os.SCHED_RR if allowed else before]
    assert os.sched_getscheduler(0) == before


def policy() -> int:
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK


def test_a_name_with_several_places_is_tried_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = closed.getsockname()
    with serving(well) as address:
        places = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", at) for at in (gone, address)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
        (answer,) = ask([Ask("m", "w", 4)], ("a.name", 1), PATIENT)
    assert answer.outcome == "ok"
    assert answer.port is not None


STREAMS, WORDS, EVERY_S = 64, 25, 0.2
CORE_SHARE = (
    0.10  # `scripts/bench client` tells the figure, which is below 2 %; this holds anywhere
)


@pytest.mark.slow
def test_sixty_four_streams_cost_little_and_are_all_on_time() -> None:
    """Five words a second each, as fast as people read; in this process's own time, so that other
    work on the machine does not count."""
    with steady_server(STREAMS, WORDS, EVERY_S) as address:
        streams = Streams([Ask("m", "w", WORDS)] * STREAMS, address, Limits(30, 5))
        streams.send()
        wall_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
        streams.wait()
        took_ns = time.process_time_ns() - cpu_ns
        share = took_ns / (time.monotonic_ns() - wall_ns)
        answers = streams.answers()
    assert [a.outcome for a in answers] == ["ok"] * STREAMS
    assert sum(a.text_chunks or 0 for a in answers) == STREAMS * WORDS
    assert first_tokens_are_on_time(answers)
    assert share < CORE_SHARE


def first_tokens_are_on_time(answers: list[Answer]) -> bool:
    """Out of step as the server sends them: none waited for another."""
    stamps = sorted(a.first_token_ns or 0 for a in answers)
    return stamps[-1] - stamps[0] > 0.8 * EVERY_S * 1e9
