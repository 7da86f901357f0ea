"""Requests inferred on a connection whose bytes cannot be read: from who sends when.

TLS shows the kind and length of every record, io_uring no more than that bytes moved. What a client
sends after an answer is a new request; the first write that follows is taken for its first token.
Pure, never raises, and keeps no byte but the five of a record's head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ttftprof.sources.http.exchange import Draft, Protocol

_DATA = 0x17
_FINISHED_BYTES = (53, 69)  # RFC 8446: message head, SHA-256 or -384, inner type, AEAD tag
_NO_REQUEST_BYTES = 24  # a closing alert or a key update
_TICKETS_BYTES = 700  # session tickets: written unasked once a TLS 1.3 handshake is over


class Turns:
    """The requests of one connection, one after another."""

    __slots__ = (
        "_doubtful", "_draft", "_idle", "_note", "_on_end", "_on_progress", "_records", "_spoken",
        "protocol",
    )  # fmt: skip

    def __init__(
        self,
        ns: int,
        protocol: Protocol,
        note: str,
        on_end: Callable[[Draft], None],
        on_progress: Callable[[Draft], None],
    ) -> None:
        self.protocol = protocol
        self._note = note
        self._on_end = on_end
        self._on_progress = on_progress
        self._records = _Records() if protocol == "tls" else None
        self._draft: Draft | None = None
        self._idle = Draft(ns, protocol)  # stands for the connection until a request is seen
        self._idle.note(note)
        self._spoken = False
        self._doubtful: tuple[int, int] | None = None  # (ns, bytes) of what may be no answer

    def received(self, ns: int, data: bytes, missing: int) -> None:
        """The server read `data` and then `missing` bytes that are not at hand."""
        count = len(data) + missing
        if self._records is not None:
            count = self._records.received(data, missing)
        if not count:
            self._idle.request_bytes += len(data) + missing
            return
        draft = self._draft
        if draft is None or draft.headers_ns is not None:
            self._end(ns)
            self._spoken = True
            draft = self._draft = Draft(ns, self.protocol)
            draft.note(self._note)
        draft.request_bytes += count
        draft.request_end_ns = ns

    def sent(self, ns: int, data: bytes, missing: int) -> None:
        """The server wrote `data` and then `missing` bytes that are not at hand."""
        count, doubtful = len(data) + missing, False
        if self._records is not None:
            count, doubtful = self._records.sent(data, missing)
        if self._draft is None or not count:
            self._idle.response_bytes += len(data) + missing
            return
        if doubtful:
            self._doubtful = ns, count
        else:
            self._answer(self._draft, ns, count)

    def closed(self, ns: int) -> None:
        """The connection is gone, at `ns`."""
        self._end(ns)
        if not self._spoken:
            self._spoken = True
            self._idle.end_ns = ns
            self._on_end(self._idle)

    def pending(self) -> list[Draft]:
        """The request in hand, or what stands for the connection if there was none."""
        if self._draft is not None:
            return [self._draft]
        return [] if self._spoken else [self._idle]

    def _end(self, ns: int) -> None:
        draft, self._draft = self._draft, None
        doubtful, self._doubtful = self._doubtful, None
        if draft is None:
            return
        if draft.headers_ns is None and doubtful is not None:
            self._answer(draft, *doubtful)
        draft.end_ns = draft.last_sent_ns or ns
        self._on_end(draft)

    def _answer(self, draft: Draft, ns: int, count: int) -> None:
        draft.count_response(ns, count)
        draft.writes += 1
        if draft.headers_ns is None:
            draft.headers_ns = draft.first_body_ns = ns
        self._on_progress(draft)


class _Records:
    """Both directions of a TLS connection: which bytes are those of the application."""

    __slots__ = ("_asked", "_client", "_finished", "_server", "_server_spoke")

    def __init__(self) -> None:
        self._client = _Stream()
        self._server = _Stream()
        self._server_spoke = False  # sealed records before the client's: TLS 1.3
        self._finished = False  # the client's last handshake message of TLS 1.3 has passed
        self._asked = False

    def received(self, data: bytes, missing: int) -> int:
        """Bytes of application data among these that can be of a request."""
        count = 0
        for kind, size, now, whole in self._client.feed(data, missing):
            if kind != _DATA or size <= _NO_REQUEST_BYTES:
                continue
            if self._server_spoke and not self._asked and size in _FINISHED_BYTES:
                self._finished, self._server_spoke = True, not whole
                continue
            self._asked = True
            count += now
        return count

    def sent(self, data: bytes, missing: int) -> tuple[int, bool]:
        """(bytes of application data among these, whether they may be session tickets)."""
        count = sum(now for kind, _, now, _ in self._server.feed(data, missing) if kind == _DATA)
        if not self._asked and not self._finished:
            self._server_spoke = self._server_spoke or count > 0
        doubtful = self._finished and 0 < count <= _TICKETS_BYTES
        if count:
            self._finished = False
        return count, doubtful


class _Stream:
    """One direction, cut into records."""

    __slots__ = ("_head", "_left", "_size")

    def __init__(self) -> None:
        self._head = bytearray()
        self._size = self._left = 0

    def feed(self, data: bytes, missing: int) -> Iterator[tuple[int, int, int, bool]]:
        """For each record touched: (kind, payload bytes of it in all, of these, now complete)."""
        pos, end = 0, len(data) + missing
        while pos < end:
            if not self._left:
                piece = data[pos : pos + 5 - len(self._head)]
                self._head += piece
                pos += len(piece)
                if len(self._head) < 5:
                    if pos < end:  # a hole: where the next record begins is not known
                        self._head.clear()
                    return
                self._size = self._left = int.from_bytes(self._head[3:5], "big")
            now = min(self._left, end - pos)
            self._left -= now
            pos += now
            yield self._head[0], self._size, now, not self._left
            if not self._left:
                self._head.clear()
