"""The client of an experiment: one or many streamed requests, every piece of an answer stamped.

Guarantees: each piece is stamped with CLOCK_MONOTONIC as `recv` returns, before anyone looks at it
(once many streams have all begun to answer, up to 10 ms late; a first token never is);
every request ends, by itself or by a limit, and in exactly one of `messages.OUTCOMES`; answers are
kept in memory until they are understood and never written anywhere. While answers come, a piece
costs one `recv` and the walk over its chunk sizes; words are looked for up to the first token, and
in the rest only when all is over. What counts as a first token is what the recorder counts as one
(`sources.http`), so the two can be compared.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ttftprof.clock import NS_PER_S, now_ns
from ttftprof.experiment.messages import Answer, Ask, Limits
from ttftprof.sources.http import Connection, Exchange
from ttftprof.sources.http.bodies import LONG_LINE, UNREADABLE_EVENT
from ttftprof.sources.http.framing import Framing, HeadBuffer, ResponseHead, parse_response

_RECV_BYTES = 1 << 13  # a bigger buffer costs more than it saves
_MANY, _TOGETHER_S = 16, 0.01  # streams past their first token, and how late their stamps may be
_UNREADABLE = {UNREADABLE_EVENT, LONG_LINE}

Place = tuple[Any, ...]
"""Where a name leads, as `getaddrinfo` says it."""


def ask(
    asks: Sequence[Ask],
    address: tuple[str, int],
    limits: Limits,
    base_path: str = "",
    meanwhile: Callable[[], None] | None = None,
) -> list[Answer]:
    """Sends all requests at once, each on a connection of its own, and waits for all the answers.

    `meanwhile` is called once, when every request has been sent.
    """
    streams = Streams(asks, address, limits, base_path)
    with first_in_line():
        streams.send()
        if meanwhile is not None:
            meanwhile()
        streams.wait()
    return streams.answers()


@contextmanager
def first_in_line() -> Iterator[None]:
    """This thread goes before those that compute, where that is allowed (to root): a server that
    takes every core would else delay the stamps of its own answers by a time slice."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError:  # not allowed
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


def wait_for_server(address: tuple[str, int], timeout_s: float) -> bool:
    """Whether something accepts connections before time is up."""
    until_ns = now_ns() + int(timeout_s * NS_PER_S)
    while now_ns() < until_ns:
        try:
            socket.create_connection(address, timeout=1).close()
        except OSError:
            time.sleep(0.01)
        else:
            return True
    return False


# -- one stream -----------------------------------------------------------------------------------


class Streams:
    """Requests that are sent at once, on connections that are made at once: `send`, `wait`, then
    `answers`."""

    def __init__(
        self, asks: Sequence[Ask], address: tuple[str, int], limits: Limits, base_path: str = ""
    ) -> None:
        host, port = address
        self._all = [_Stream(a.encode(host, port, base_path), limits) for a in asks]
        self._connect(address, limits.timeout_s)
        self._open = {s.sock.fileno(): s for s in self._all if s.sock is not None and not s.ended}

    def _connect(self, address: tuple[str, int], timeout_s: float) -> None:
        """One that hangs holds up no other, and all together no longer than `timeout_s`."""
        until_ns = now_ns() + int(timeout_s * NS_PER_S)
        try:
            places = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        except OSError as error:
            for stream in self._all:
                stream.refuse(error)
            return
        with select.epoll(max(len(self._all), 1)) as poll:
            waiting: dict[int, _Stream] = {}

            def watch(streams: Iterable[_Stream]) -> None:
                for stream in streams:
                    if stream.sock is not None:
                        waiting[stream.sock.fileno()] = stream
                        poll.register(stream.sock, select.EPOLLOUT)

            for stream in self._all:
                stream.connect(places)
            watch(self._all)
            while waiting and (left_ns := until_ns - now_ns()) > 0:
                for fd, _ in poll.poll(left_ns / NS_PER_S):
                    stream = waiting.pop(fd)
                    poll.unregister(fd)
                    if not stream.take_connection():
                        watch([stream])  # at the name's next place
            for stream in waiting.values():
                stream.refuse(TimeoutError())

    def send(self) -> None:
        for fd, stream in list(self._open.items()):
            stream.send()
            if stream.ended:
                self._close(fd)

    def wait(self) -> None:
        """Until every request has ended, by itself or by a limit."""
        look_ns = 0  # when to look for those that are late; at every piece would cost too much
        with select.epoll(max(len(self._open), 1)) as poll:
            for fd, stream in self._open.items():
                poll.register(fd, select.EPOLLIN | (select.EPOLLOUT if stream.unsent else 0))
            while self._open:
                ns = now_ns()
                if ns >= look_ns:
                    self._end_the_late(ns)
                    look_ns = ns + min((s.patience_ns for s in self._open.values()), default=0)
                    many = self._are_many_and_answered()
                if many:
                    time.sleep(_TOGETHER_S)
                for fd, _ in poll.poll(max(look_ns - ns, 0) / NS_PER_S if self._open else 0):
                    self._serve(fd, poll)

    def answers(self) -> list[Answer]:
        """What each came to, in the order of the requests."""
        return [stream.answer() for stream in self._all]

    def _serve(self, fd: int, poll: select.epoll) -> None:
        stream = self._open[fd]
        if stream.unsent:
            stream.send()
            if not stream.unsent and not stream.ended:
                poll.modify(fd, select.EPOLLIN)
        else:
            stream.receive()
        if stream.ended:
            self._close(fd)

    def _end_the_late(self, ns: int) -> None:
        for fd, stream in list(self._open.items()):
            if stream.due_ns() <= ns:
                stream.run_out(ns)
                self._close(fd)

    def _close(self, fd: int) -> None:
        self._open.pop(fd).close()

    def _are_many_and_answered(self) -> bool:
        """Whether no first token is to come and pieces may be taken a few at a time: to wake for
        each of hundreds a second would take from the server what is measured."""
        return len(self._open) >= _MANY and all(s.has_text for s in self._open.values())


class _Stream:
    """One request on its way and the pieces of its answer."""

    __slots__ = (
        "_body",
        "_bytes",
        "_connect_ns",
        "_connection",
        "_deadline_ns",
        "_detail",
        "_end_ns",
        "_exchange",
        "_fed",
        "_followed",
        "_head",
        "_headers_ns",
        "_is_chunked",
        "_last_ns",
        "_limits",
        "_outcome",
        "_pieces",
        "_places",
        "_port",
        "_request",
        "_response",
        "_send_begin_ns",
        "_send_end_ns",
        "_stall_ns",
        "ended",
        "has_text",
        "patience_ns",
        "sock",
        "unsent",
    )  # fmt: skip

    def __init__(self, request: bytes, limits: Limits) -> None:
        self.sock: socket.socket | None = None
        self.ended = False
        self.unsent = request
        self._request = request
        self._limits = limits
        self._stall_ns = int(limits.stall_s * NS_PER_S)
        # How often it is looked after: a limit is kept to a twentieth, and to 50 ms.
        self.patience_ns = int(min(limits.stall_s / 20, limits.timeout_s / 20, 0.05) * NS_PER_S)
        self._outcome, self._detail = "", ""
        self._places: list[Place] = []
        self._port: int | None = None
        self._connect_ns: int | None = None
        self._send_begin_ns: int | None = None
        self._send_end_ns: int | None = None
        self._headers_ns: int | None = None
        self._end_ns: int | None = None
        self._deadline_ns = 0
        self._last_ns = 0
        self._pieces: list[tuple[int, bytes]] = []
        self._bytes = 0
        self._head = HeadBuffer()
        self._response: ResponseHead | None = None
        self._body: Framing | None = None
        self.has_text = False  # the first token was seen
        self._exchange: Exchange | None = None
        self._connection = Connection(self._take_exchange, self._take_exchange)
        self._is_chunked = False
        self._fed = self._followed = 0  # pieces that `_connection` and `_body` have read

    def _take_exchange(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.has_text = self.has_text or exchange.first_token_ns is not None

    # -- sending

    def connect(self, places: Iterable[Place]) -> None:
        """Begins to connect to the first place that can be tried."""
        self._places = list(places)
        self._try_next(ConnectionRefusedError(errno.ECONNREFUSED, ""))

    def _try_next(self, failed: OSError) -> None:
        while self._places:
            family, kind, protocol, _, place = self._places.pop(0)
            try:
                self.sock = socket.socket(family, kind, protocol)
                self.sock.setblocking(False)
                self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.sock.connect(place)
            except BlockingIOError:
                return
            except OSError as error:
                self.close()
                failed = error
            else:
                return
        self.refuse(failed)

    def take_connection(self) -> bool:
        """Whether it has come to an end, good or bad; else it begins anew elsewhere."""
        assert self.sock is not None
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self.close()
            self._try_next(OSError(code, os.strerror(code)))
            return self.ended
        self._connect_ns = now_ns()
        self._port = int(self.sock.getsockname()[1])
        return True

    def refuse(self, error: OSError) -> None:
        """No connection is to be had."""
        self._connect_ns = now_ns()
        self._end("refused", _why(error))

    def send(self) -> None:
        if self.ended:
            return
        assert self.sock is not None
        if self._send_begin_ns is None:
            self._send_begin_ns = now_ns()
            self._deadline_ns = self._send_begin_ns + int(self._limits.timeout_s * NS_PER_S)
        try:
            sent = self.sock.send(self.unsent)
        except BlockingIOError:
            return
        except OSError as error:
            self._end("gone", f"while the request was sent: {_why(error)}")
            return
        self.unsent = self.unsent[sent:]
        if not self.unsent:
            self._send_end_ns = now_ns()
            self._connection.received(self._send_begin_ns, self._request)

    # -- receiving

    def receive(self) -> None:
        assert self.sock is not None
        try:
            data = self.sock.recv(_RECV_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end("gone", _why(error))
            return
        ns = now_ns()
        if not data:
            self._take_close(ns)
            return
        self._last_ns = ns
        self._pieces.append((ns, data))
        self._bytes += len(data)
        if not self.has_text or self._may_end_with(data):
            self._follow()
            if not self.has_text:
                self._feed_parser()
        if self._bytes > self._limits.max_bytes and not self.ended:
            self._end("endless", f"more than {self._limits.max_bytes >> 20} MiB")

    def _may_end_with(self, data: bytes) -> bool:
        """Whether this may be an answer's last piece; what surely is not is looked at later."""
        return not self._is_chunked or len(data) < 5 or data[-5:] == b"0\r\n\r\n"

    def _take_close(self, ns: int) -> None:
        self._follow()
        if self.ended:
            return
        if self._body is not None and self._body.until_close:
            self._end("", "", ns)
        elif not self._pieces:
            self._end("gone", "closed without an answer")
        elif self._response is None and not self._looks_like_http():
            self._end("malformed", "the answer is no HTTP")
        else:
            self._end("gone", "closed in the middle of the answer")

    def _looks_like_http(self) -> bool:
        return self._pieces[0][1][:5] == b"HTTP/"[: len(self._pieces[0][1])]

    def _follow(self) -> None:
        """Where the answer ends, by its framing alone."""
        pieces, self._followed = self._pieces[self._followed :], len(self._pieces)
        for ns, data in pieces:
            pos = self._follow_head(ns, data) if self._body is None else 0
            body = self._body
            if body is None or self.ended:
                return
            while pos < len(data) and not body.done and not body.lost:
                _, _, pos = body.feed(data, pos)
            if body.done:
                self._end("", "", ns)
            elif body.lost:
                self._end("malformed", "the chunks of the answer cannot be read")

    def _follow_head(self, ns: int, data: bytes) -> int:
        """Reads on in the head (a 100 Continue may precede it); where the body begins in `data`."""
        pos = 0
        if self._headers_ns is None:
            self._headers_ns = ns
        while self._body is None:
            pos, head = self._head.feed(data, pos)
            if head is None:
                if self._head.overflowed or not self._looks_like_http():
                    self._end("malformed", "the answer is no HTTP")
                return pos
            self._response = parse_response(head)
            if self._response is None:
                self._end("malformed", "the status line cannot be read")
                return pos
            if self._response.status >= 200:
                self._is_chunked = self._response.body.chunked
                self._body = Framing.of(self._response.body, until_close=True)
        return pos

    def _feed_parser(self) -> None:
        for ns, data in self._pieces[self._fed :]:
            self._connection.sent(ns, data)
        self._fed = len(self._pieces)

    # -- limits

    def due_ns(self) -> int:
        """When patience ends."""
        if self.has_text:
            return min(self._deadline_ns, self._last_ns + self._stall_ns)
        return self._deadline_ns

    def run_out(self, ns: int) -> None:
        self._follow()
        if self.ended:
            return
        if ns < self._deadline_ns:
            self._end("stalled", f"text had come, then nothing for {self._limits.stall_s:g} s")
        elif self.has_text:
            self._end("endless", f"still answering after {self._limits.timeout_s:g} s")
        else:
            self._end("timeout", f"no text within {self._limits.timeout_s:g} s")

    def _end(self, outcome: str, detail: str, ns: int | None = None) -> None:
        """Ends it; an outcome of "" is told later, by what the answer says."""
        self.ended = True
        self._end_ns = now_ns() if ns is None else ns
        self._outcome, self._detail = outcome, detail

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None

    # -- understanding

    def answer(self) -> Answer:
        """The facts, once it has ended."""
        self.close()
        self._feed_parser()
        assert self._end_ns is not None
        self._connection.closed(self._end_ns)
        seen = self._exchange
        outcome, detail = self._judged(seen)
        status = self._response.status if self._response else None
        return Answer(
            outcome=outcome,
            detail=detail,
            connect_ns=self._connect_ns,
            send_begin_ns=self._send_begin_ns,
            send_end_ns=self._send_end_ns,
            headers_ns=self._headers_ns,
            first_token_ns=seen.first_token_ns if seen and (status or 0) < 400 else None,
            end_ns=self._end_ns,
            status=status,
            prompt_tokens=seen.prompt_tokens if seen else None,
            cached_tokens=seen.cached_tokens if seen else None,
            completion_tokens=seen.completion_tokens if seen else None,
            text_chunks=seen.text_chunks if seen else None,
            timings=dict(seen.timings) if seen else {},
            chunks=tuple((ns, len(data)) for ns, data in self._pieces),
            port=self._port,
        )

    def _judged(self, seen: Exchange | None) -> tuple[str, str]:
        status = self._response.status if self._response else None
        if status is not None and status >= 300 and self._outcome in ("", "gone"):
            return ("failed" if status >= 500 else "rejected"), f"HTTP status {status}"
        if self._outcome:
            return self._outcome, self._detail
        if seen is None:
            return "malformed", "the answer could not be read"
        if seen.outcome == "error":
            return "failed", "the stream holds an error"
        unreadable = _UNREADABLE & set(seen.notes)
        if unreadable:
            return "malformed", f"in the stream: {', '.join(sorted(unreadable))}"
        if seen.first_token_ns is not None:
            if not seen.said_end:  # a proxy closes neatly what its server broke off
                return "gone", "the answer ended without its end mark"
            return "ok", ""
        if self._response and not _is_answer(self._response.body.content_type):
            return "malformed", "neither events nor JSON"
        return "empty", "the answer holds no text"


def _is_answer(content_type: str) -> bool:
    return not content_type or "json" in content_type or "event-stream" in content_type


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no connection in time"
    code = error.errno or errno.EIO
    return os.strerror(code) if code > 0 else str(error)
