"""HTTP/1 as a server's socket shows it: requests and first tokens from copied bytes.

`Connection` takes what a server process reads from and writes to one accepted socket, in order,
each piece with its stamp, and gives one `Exchange` per request. Guarantees: pure (no I/O, no
clock); never raises on any input; keeps nothing of prompts, answers, keys or headers beyond the
piece being read; linear time; at most about 512 KiB a connection (`buffered_bytes`). A hole in the
capture costs knowledge, not correctness: what cannot be known is None, and `notes` says why.

h11 and httptools were considered: neither goes on after a hole, nor tells which read or write a
byte came with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ttftprof.sources.http.bodies import RequestBody, ResponseBody
from ttftprof.sources.http.exchange import (
    BEGAN_BEFORE,
    GAP,
    NO_TOKENS,
    NOT_STREAMED,
    TOKEN_INFERRED,
    Draft,
    Exchange,
    Outcome,
    Protocol,
)
from ttftprof.sources.http.framing import (
    BodyHead,
    Framing,
    HeadBuffer,
    RequestHead,
    ResponseHead,
    begins_request,
    begins_response,
    begins_stream,
    may_begin_response,
    parse_request,
    parse_response,
    protocol_of,
)
from ttftprof.sources.http.turns import Turns

__all__ = [
    "BEGAN_BEFORE",
    "GAP",
    "NOT_STREAMED",
    "NO_TOKENS",
    "TOKEN_INFERRED",
    "Connection",
    "Exchange",
    "Outcome",
    "Protocol",
]

_MAX_UNANSWERED = 64
_OPAQUE_NOTES: dict[Protocol, str] = {
    "tls": "encrypted (TLS): a request is told from who sends when, nothing inside can be seen",
    "unseen": "moved by io_uring or the like: a request is told from who sends when",
    "http/2": "HTTP/2 is not read",
    "other": "head larger than 64 KiB",
}
_UNSEEN = "sent by sendfile, splice or io_uring: not read"
_CROWDED = "too much was unfinished at once: not read on"


class Connection:
    """One server-side connection.

    `on_exchange` gets each exchange once, when it ends. `on_progress` gets a snapshot when the
    request is known (model found, or body complete), at the response head, and at the first token.
    """

    __slots__ = (
        "_closed", "_deaf", "_on_exchange", "_on_progress", "_opaque", "_request_body",
        "_request_draft", "_request_head", "_request_lost", "_response_body", "_response_head",
        "_stray_bytes", "_stray_gap", "_stray_ns", "_turns", "_unanswered",
    )  # fmt: skip

    def __init__(
        self,
        on_exchange: Callable[[Exchange], None],
        on_progress: Callable[[Exchange], None] | None = None,
    ) -> None:
        self._on_exchange = on_exchange
        self._on_progress = on_progress
        self._unanswered: deque[Draft] = deque()  # the response in progress belongs to the first
        self._opaque: Draft | None = None  # the one exchange of a connection that cannot be read
        self._turns: Turns | None = None  # of one whose requests show only by who sends when
        self._deaf = False
        self._closed = False
        self._request_head = HeadBuffer()
        self._request_draft: Draft | None = None  # whose head or body is being received
        self._request_body: Framing | None = None
        self._request_lost = False
        self._response_head = HeadBuffer()
        self._response_body: Framing | None = None  # None: a response head comes next
        self._stray_ns: int | None = None  # received, but of a request whose head was not seen
        self._stray_bytes = 0
        self._stray_gap = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "deaf" if self._deaf else "open"
        return f"<Connection {self.protocol} {state}, {len(self._unanswered)} unanswered>"

    @property
    def protocol(self) -> Protocol:
        """What is spoken here, as far as seen."""
        if self._turns is not None:
            return self._turns.protocol
        return self._opaque.protocol if self._opaque else "http/1"

    @property
    def quiet(self) -> bool:
        """True while only big writes and the last ones are still of interest.

        The first token of a streamed response has been seen and its end has not. Small writes may
        then be given as `sent(ns, b"", n)`. It is False again once the response has ended, and
        while other requests wait for theirs: what follows may be the next first token.
        """
        framing = self._response_body
        if framing is None or framing.of_known_length or len(self._unanswered) != 1:
            return False
        draft = self._unanswered[0]
        if draft.body is None or draft.body.needs_every_byte:
            return False
        return draft.facts.first_text_ns is not None and draft.reads_lines

    @property
    def buffered_bytes(self) -> int:
        """How much of unfinished heads and lines is held."""
        body = self._unanswered[0].body if self._unanswered else None
        heads = len(self._request_head.bytes) + len(self._response_head.bytes)
        return heads + (body.buffered_bytes if body is not None else 0)

    def received(self, ns: int, data: bytes, missing: int = 0) -> None:
        """The server read `data`, and after it `missing` bytes that were not captured."""
        if self._turns is not None:
            self._turns.received(ns, data, missing)
            return
        if self._ignoring(request_bytes=len(data) + missing):
            return
        if data:
            self._receive(ns, data)
        if missing and not self._ignoring(request_bytes=missing):
            self._receive_gap(ns, missing)

    def sent(self, ns: int, data: bytes, missing: int = 0) -> None:
        """The server wrote `data`, and after it `missing` bytes that were not captured."""
        if self._turns is not None:
            self._turns.sent(ns, data, missing)
            return
        if self._ignoring(response_bytes=len(data) + missing):
            return
        if data:
            self._send(ns, data, len(data) + missing)
        if missing and not self._ignoring(response_bytes=missing):
            self._send_gap(ns, missing)

    def received_unseen(self, ns: int, count: int) -> None:
        """The server read `count` bytes into no buffer that could be looked into."""
        untouched = not self._unanswered and self._stray_ns is None and not self._request_lost
        if self._turns is None and untouched and not self._deaf:
            self._turn_to(ns, "unseen")
        self.received(ns, b"", count)

    def sent_unseen(self, ns: int, count: int) -> None:
        """The server wrote `count` bytes out of no buffer that could be looked into."""
        if self._turns is None and self._unanswered and not self._deaf:
            draft = self._unanswered[0]
            draft.unseen = True
            draft.note(_UNSEEN)
            draft.headers_ns = ns if draft.headers_ns is None else draft.headers_ns
            draft.first_body_ns = ns if draft.first_body_ns is None else draft.first_body_ns
            self._tell_token(draft)
        self.sent(ns, b"", count)

    def give_up(self, ns: int) -> None:
        """Reads no further, and lets go of what is held."""
        while self._unanswered:
            self._unanswered[0].note(_CROWDED)
            self._finish(ns, whole=False)
        self._request_head.bytes.clear()
        self._deaf = True

    def closed(self, ns: int) -> None:
        """The connection is gone; ends every exchange. Idempotent."""
        if self._closed:
            return
        self._closed = self._deaf = True
        if self._turns is not None:
            self._turns.closed(ns)
        if self._opaque is not None:
            self._unanswered.append(self._opaque)
        while self._unanswered:
            draft = self._unanswered[0]
            by_closing = self._response_body is not None and self._response_body.until_close
            if by_closing and self._ended_by_closing(draft):
                self._finish(draft.last_sent_ns or ns, whole=True)
            else:
                self._finish(ns, whole=False)

    def pending(self) -> list[Exchange]:
        """Snapshots of the exchanges that have not ended."""
        drafts = [*self._unanswered, *([self._opaque] if self._opaque and not self._closed else [])]
        drafts += self._turns.pending() if self._turns is not None else []
        return [draft.snapshot() for draft in drafts]

    # What the server reads

    def _receive(self, ns: int, data: bytes) -> None:
        pos, end = 0, len(data)
        if self._request_lost:
            pos = self._find_request(ns, data)
        while pos < end and not self._deaf:
            draft = self._request_draft
            if draft is None:
                pos = self._begin_request(ns, data, pos)
            elif self._request_body is None:
                pos = self._read_request_head(ns, data, pos, draft)
            else:
                pos = self._read_request_body(ns, data, pos, draft, self._request_body)
        if self._turns is not None:
            self._turns.received(ns, data[pos:], 0)

    def _begin_request(self, ns: int, data: bytes, pos: int) -> int:
        if data[pos] in b"\r\n":  # allowed, and ignored, between requests
            return pos + 1
        if len(self._unanswered) >= _MAX_UNANSWERED:
            self._unanswered[0].note_gap(lost=True)
            self._finish(ns, whole=False)
        self._request_draft = Draft(ns)
        self._unanswered.append(self._request_draft)
        return pos

    def _read_request_head(self, ns: int, data: bytes, pos: int, draft: Draft) -> int:
        before = pos
        pos, head = self._request_head.feed(data, pos)
        draft.request_bytes += pos - before
        begins = head or bytes(self._request_head.bytes[:24])
        protocol = protocol_of(begins[:24])
        if protocol == "tls":
            held = head or bytes(self._request_head.bytes)
            self._request_head.bytes.clear()
            self._unanswered.pop()
            self._turn_to(draft.start_ns, "tls").received(ns, held, 0)
        elif protocol == "other":
            self._lose_request(draft, len(data) - pos)
            return len(data)
        elif self._request_head.overflowed:
            self._become_opaque(draft, "other")
        elif head is not None:
            parsed = parse_request(head)
            if parsed is None:
                self._lose_request(draft, len(data) - pos)
                return len(data)
            if parsed.version == 2:
                self._become_opaque(draft, "http/2")
            else:
                self._take_request_head(ns, draft, parsed)
        return pos

    def _take_request_head(self, ns: int, draft: Draft, head: RequestHead) -> None:
        first = self._unanswered[0] if self._unanswered else draft
        if first is not draft and self._response_body is not None and self._response_body.lost:
            # a client asks again once it has been served
            self._finish(first.last_sent_ns or ns, whole=True)
        self._stray_ns, self._stray_bytes, self._stray_gap = None, 0, False
        draft.method, draft.endpoint = head.method, head.endpoint
        draft.request = RequestBody(head.body.encoding)
        self._request_body = Framing.of(head.body, until_close=False)
        if self._request_body.done:
            self._end_request(ns, draft)

    def _read_request_body(
        self, ns: int, data: bytes, pos: int, draft: Draft, framing: Framing
    ) -> int:
        before = pos
        start, stop, pos = framing.feed(data, pos)
        draft.request_bytes += pos - before
        if draft.request is not None and stop > start:
            draft.request.feed(data[start:stop])
            if draft.request.model is not None:
                self._announce(draft)
        if framing.done:
            self._end_request(ns, draft)
        elif framing.lost:
            draft.request_bytes += len(data) - pos
            self._lose_request_body(draft)
            return len(data)
        return pos

    def _end_request(self, ns: int, draft: Draft) -> None:
        draft.request_end_ns = ns
        self._request_draft = self._request_body = None
        self._announce(draft)

    def _receive_gap(self, ns: int, missing: int) -> None:
        draft, framing = self._request_draft, self._request_body
        if draft is None:
            self._request_lost = self._stray_gap = True
            self._stray(ns, missing)
        elif framing is None or draft.request is None:
            self._cut_request_head(ns, draft, missing)
        else:
            beyond = framing.skip(missing)
            draft.request_bytes += missing - beyond
            draft.request.gap(missing - beyond)
            draft.note_gap()
            if framing.done:
                self._end_request(ns, draft)
                if beyond:
                    self._receive_gap(ns, beyond)
            elif framing.lost:
                self._lose_request_body(draft)

    def _cut_request_head(self, ns: int, draft: Draft, missing: int) -> None:
        head = parse_request(bytes(self._request_head.bytes))
        self._request_head.bytes.clear()
        if head is None:
            self._lose_request(draft, missing)
            self._stray_gap = True
            return
        self._take_request_head(
            ns, draft, RequestHead(head.method, head.endpoint, 1, _UNKNOWN_BODY)
        )
        draft.request_bytes += missing
        self._lose_request_body(draft)

    def _lose_request_body(self, draft: Draft) -> None:
        """The end of this request's body will not be recognised."""
        draft.note_gap()
        draft.request_end_ns = None
        if draft.request is not None:
            draft.request.gap(0)
        self._request_draft = self._request_body = None
        self._request_lost = True

    def _lose_request(self, draft: Draft, unread_bytes: int) -> None:
        """What began as a request is none."""
        self._request_head.bytes.clear()
        self._request_draft = self._request_body = None
        self._request_lost = True
        answered = draft.body is not None or draft.headers_ns is not None
        if self._unanswered and self._unanswered[-1] is draft and not answered:
            self._unanswered.pop()
        self._stray(draft.start_ns, draft.request_bytes + unread_bytes)

    def _find_request(self, ns: int, data: bytes) -> int:
        """Where lost: a request line that begins a read is taken for one."""
        if begins_request(data):
            self._request_lost = False
            return 0
        self._stray(ns, len(data))
        return len(data)

    def _stray(self, ns: int, count: int) -> None:
        """Count bytes of a request whose head was not seen, or whose framing was lost."""
        if self._unanswered:
            self._unanswered[-1].request_bytes += count
            return
        if self._stray_ns is None:
            self._stray_ns = ns
        self._stray_bytes += count

    # What the server writes

    def _send(self, ns: int, data: bytes, write_bytes: int) -> None:
        pos, end = 0, len(data)
        while pos < end and not self._deaf:
            framing = self._response_body
            if framing is None or not self._unanswered:
                pos = self._read_response_head(ns, data, pos)
            elif framing.lost:
                pos = self._read_lost(ns, data, pos, write_bytes, framing)
            else:
                pos = self._read_response_body(ns, data, pos, framing)
        if self._turns is not None:
            self._turns.sent(ns, data[pos:], 0)

    def _read_response_head(self, ns: int, data: bytes, pos: int) -> int:
        buffered = self._response_head.bytes
        if not may_begin_response((bytes(buffered) + data[pos : pos + 7])[:7]):
            buffered.clear()
            return self._unrecognised_response(ns, data, pos)
        draft = self._unanswered[0] if self._unanswered else self._adopt(ns)
        if not buffered:
            draft.headers_ns = ns
        before = pos
        pos, head = self._response_head.feed(data, pos)
        draft.count_response(ns, pos - before)
        if self._response_head.overflowed:
            self._become_opaque(draft, "other")
        elif head is not None:
            parsed = parse_response(head)
            if parsed is None:
                self._lose_response(draft)
            else:
                self._take_response_head(ns, draft, parsed)
        return pos

    def _adopt(self, ns: int) -> Draft:
        """A response whose request was not seen."""
        draft = Draft(ns if self._stray_ns is None else self._stray_ns)
        draft.request_bytes = self._stray_bytes
        draft.note(GAP if self._stray_gap else BEGAN_BEFORE)
        self._stray_ns, self._stray_bytes, self._stray_gap = None, 0, False
        self._unanswered.append(draft)
        return draft

    def _unrecognised_response(self, ns: int, data: bytes, pos: int) -> int:
        if not self._unanswered:
            if protocol_of(data[pos : pos + 3]) == "tls" and pos == 0:
                self._turn_to(ns, "tls")
                return pos
            if pos == 0 and begins_stream(data):
                draft = self._adopt(ns)
                draft.lost = True
                self._read_without_head(draft)
                return pos
            return len(data)
        self._lose_response(self._unanswered[0])
        return pos

    def _take_response_head(self, ns: int, draft: Draft, head: ResponseHead) -> None:
        if 100 <= head.status < 200 and head.status != 101:
            draft.headers_ns = None
            return
        draft.status = head.status
        bodiless = draft.method == "HEAD" or head.status in (101, 204, 304)
        upgraded = head.status == 101 or (draft.method == "CONNECT" and head.status < 300)
        framing = (
            Framing.empty() if bodiless or upgraded else Framing.of(head.body, until_close=True)
        )
        self._open_response(draft, framing, head.body)
        self._progress(draft)
        if upgraded:
            draft.note("switched to another protocol")
        if framing.done:
            self._finish(ns, whole=True)
        self._deaf = self._deaf or upgraded

    def _open_response(self, draft: Draft, framing: Framing, head: BodyHead | None) -> None:
        type_ = head.content_type if head else ""
        streams = "event-stream" in type_ or "ndjson" in type_
        may_generate = draft.generates or not draft.endpoint or (draft.method == "POST" and streams)
        good = draft.status is None or draft.status < 400
        self._response_body = framing
        draft.body = ResponseBody(head, draft.facts, sniff=may_generate and good)

    def _read_response_body(self, ns: int, data: bytes, pos: int, framing: Framing) -> int:
        draft, before = self._unanswered[0], pos
        start, stop, pos = framing.feed(data, pos)
        draft.count_response(ns, pos - before)
        if stop > start:
            self._response_payload(ns, data[start:stop], draft)
        if framing.done:
            self._finish(ns, whole=True)
        elif framing.lost:
            self._response_gap(draft)
        return pos

    def _response_payload(self, ns: int, payload: bytes, draft: Draft) -> None:
        if draft.first_body_ns is None and not draft.lost:
            draft.first_body_ns = ns
        if draft.body is not None:
            draft.body.feed(ns, payload)
        self._tell_token(draft)

    def _tell_token(self, draft: Draft) -> None:
        if draft.token_announced:
            return
        if draft.facts.first_text_ns is not None or draft.first_token_ns is not None:
            draft.token_announced = True
            self._progress(draft)

    def _read_lost(self, ns: int, data: bytes, pos: int, write_bytes: int, framing: Framing) -> int:
        """Read on without framing, until a write begins or ends with something recognisable."""
        draft = self._unanswered[0]
        if pos == 0 and begins_response(data):
            if draft.status is not None:
                self._finish(draft.last_sent_ns or ns, whole=True)
            self._response_body = None
            return pos
        if pos == 0 and framing.resume(data, write_bytes):
            return pos
        draft.count_response(ns, len(data) - pos)
        self._response_payload(ns, data[pos:], draft)
        if framing.ends_with_last_chunk(data[pos:]):
            self._finish(ns, whole=True)
        return len(data)

    def _send_gap(self, ns: int, missing: int) -> None:
        if not self._unanswered:
            self._response_head.bytes.clear()
            return
        draft, framing = self._unanswered[0], self._response_body
        if framing is None:
            draft.count_response(ns, missing)
            self._cut_response_head(draft)
            return
        beyond = framing.skip(missing)
        draft.count_response(ns, missing - beyond)
        self._response_gap(draft)
        if draft.first_body_ns is None and not draft.lost:
            draft.first_body_ns = ns
        if framing.done:
            self._finish(ns, whole=True)
            if beyond:
                self._send_gap(ns, beyond)

    def _response_gap(self, draft: Draft) -> None:
        """Bytes of this response went unseen: by arrangement if quiet, else a loss."""
        if self.quiet:
            draft.left_out = True
        else:
            draft.note_gap(lost=self._response_body is not None and self._response_body.lost)
        if draft.body is not None:
            draft.body.gap()

    def _cut_response_head(self, draft: Draft) -> None:
        head = parse_response(bytes(self._response_head.bytes))
        self._response_head.bytes.clear()
        if head is not None and head.status >= 200:
            draft.status = head.status
        self._lose_response(draft)

    def _lose_response(self, draft: Draft) -> None:
        """It is not known where this response's body begins or ends."""
        draft.note_gap(lost=True)
        self._read_without_head(draft)

    def _read_without_head(self, draft: Draft) -> None:
        draft.facts.blind = True
        self._open_response(draft, Framing.unknown(), None)

    # Ends

    def _finish(self, ns: int, *, whole: bool) -> None:
        draft = self._unanswered.popleft()
        self._response_body = None
        self._response_head.bytes.clear()
        if draft.body is not None:
            draft.body.end(ns)
        draft.end_ns = ns
        draft.finished = True
        self._on_exchange(draft.snapshot(_outcome(draft, whole=whole)))

    @staticmethod
    def _ended_by_closing(draft: Draft) -> bool:
        """Whether closing was the end of the response, or its interruption."""
        return draft.facts.ended or draft.left_out or not (draft.generates and draft.reads_lines)

    def _become_opaque(self, draft: Draft, protocol: Protocol) -> None:
        draft.protocol = protocol
        draft.note(_OPAQUE_NOTES[protocol])
        if draft in self._unanswered:
            self._unanswered.remove(draft)
        self._opaque = draft
        self._deaf = True
        self._request_head.bytes.clear()
        self._response_head.bytes.clear()
        self._progress(draft)

    def _turn_to(self, ns: int, protocol: Protocol) -> Turns:
        """From now on requests are told from who sends when."""
        self._deaf = True
        self._turns = Turns(ns, protocol, _OPAQUE_NOTES[protocol], self._turn_ended, self._progress)
        return self._turns

    def _turn_ended(self, draft: Draft) -> None:
        draft.finished = True
        outcome: Outcome = "ok"
        if draft.headers_ns is None:
            outcome = "incomplete" if draft.request_end_ns is None else "cancelled"
        self._on_exchange(draft.snapshot(outcome))

    def _ignoring(self, request_bytes: int = 0, response_bytes: int = 0) -> bool:
        if self._deaf and self._opaque is not None and not self._closed:
            self._opaque.request_bytes += request_bytes
            self._opaque.response_bytes += response_bytes
        return self._deaf

    def _announce(self, draft: Draft) -> None:
        if not draft.announced:
            draft.announced = True
            self._progress(draft)

    def _progress(self, draft: Draft) -> None:
        if self._on_progress is not None and not draft.finished:
            self._on_progress(draft.snapshot())


_UNKNOWN_BODY = BodyHead(length=None, chunked=True, content_type="", encoding="")


def _outcome(draft: Draft, *, whole: bool) -> Outcome:
    if draft.facts.error or (draft.status is not None and draft.status >= 400):
        return "error"
    if whole or (draft.facts.ended and draft.status is not None):
        return "ok"
    if draft.request_end_ns is None or draft.lost or draft.protocol != "http/1":
        return "incomplete"
    return "cancelled"
