"""One request and its response, as facts: `Exchange`, and the draft it is built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ttftprof.sources.http.bodies import UNREADABLE_CODING, Facts, RequestBody, ResponseBody

Protocol = Literal["http/1", "tls", "unseen", "http/2", "other"]
Outcome = Literal["ok", "error", "cancelled", "incomplete"]

BEGAN_BEFORE = "began before recording"
GAP = "gap in capture"
TOKEN_UNCERTAIN = "first token uncertain: something before it went unread"
TOKEN_INFERRED = "first token inferred: the first write of an answer that cannot be read"
NOT_STREAMED = "not streamed: the first token came with the whole answer"
NO_TOKENS = "an answer without tokens: its first byte counts"

_GENERATING = (
    "/chat/completions", "/completions", "/completion", "/infill", "/v1/messages", "/responses",
    "/v1/complete", "/api/chat", "/generate", "/generate_stream", "/generate/stream",
    "/invocations",
)  # fmt: skip
_COMPUTING = (
    "/embeddings", "/embedding", "/embed", "/embed_all", "/rerank", "/reranking", "/score",
    "/pooling", "/classify", "/predict",
)  # fmt: skip
_STREAMING_BY_NATURE = ("/generate_stream", "/generate/stream")
_STREAMING_BY_DEFAULT = ("/api/chat", "/api/generate")
_WORK_NS = 50_000_000  # an unreadable request that waited this long had a model work
_WORK_WRITES = 3  # or was answered in pieces


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its response on a server's socket. Holds nothing of what was said.

    All stamps are CLOCK_MONOTONIC nanoseconds of the read or write that carried the byte in
    question; None where it was not seen. An unknown number is None, never 0.
    """

    start_ns: int
    """First byte of the request (or the first thing seen, see `notes`)."""
    request_end_ns: int | None
    """Last byte of the request body."""
    headers_ns: int | None
    """First byte of the final response head (not of a 100 Continue)."""
    first_body_ns: int | None
    """First byte of the response body."""
    first_token_ns: int | None
    """First byte of the first SSE event or NDJSON line that carries generated, non-empty text; in a
    plain JSON response, the write in which that text begins. None unless it is certainly the
    first. Where there are no tokens, or none can be read, the first byte of the answer: `notes`
    then say so."""
    last_token_ns: int | None
    """As `first_token_ns`, of the last piece; None where small writes were left out (`quiet`)."""
    end_ns: int | None
    """Last byte of the response; where it was cut off, the moment of closing."""
    method: str
    endpoint: str
    """Path without query: plain ASCII, its last 64 characters; "" if the head was not seen."""
    model: str | None
    """As the request asks for it, at most 256 printable characters."""
    streamed: bool | None
    """As asked for, or by the API's default; else told by the response."""
    status: int | None
    request_bytes: int
    """Bytes on the wire, head and framing included."""
    response_bytes: int
    text_chunks: int | None
    """Pieces with generated text; None where small writes were left out (`quiet`)."""
    prompt_tokens: int | None
    """All tokens of the prompt, cached ones included."""
    cached_tokens: int | None
    completion_tokens: int | None
    timings: Mapping[str, float] = field(hash=False)
    """The server's own durations, names ending in their unit: `prompt_ms`, `load_duration_ns`…"""
    generates: bool
    """The endpoint has a model work: it generates text, embeds or ranks."""
    prompt_bytes: int
    """Size of the request body."""
    protocol: Protocol
    outcome: Outcome
    """`cancelled`: closed before the response was complete; `incomplete`: the end was not seen."""
    notes: tuple[str, ...]
    said_end: bool = False
    """The response itself says that the generation is over: `[DONE]`, a reason, `done`."""


class Draft:
    """An exchange in the making. Mutable; `snapshot` gives the facts so far."""

    __slots__ = (
        "announced", "body", "end_ns", "endpoint", "facts", "finished", "first_body_ns",
        "headers_ns", "last_sent_ns", "left_out", "lost", "method", "notes", "protocol", "request",
        "request_bytes", "request_end_ns", "response_bytes", "start_ns", "status",
        "token_announced", "unseen", "writes",
    )  # fmt: skip

    def __init__(self, start_ns: int, protocol: Protocol = "http/1") -> None:
        self.start_ns = start_ns
        self.request_end_ns: int | None = None
        self.headers_ns: int | None = None
        self.first_body_ns: int | None = None
        self.last_sent_ns: int | None = None
        self.end_ns: int | None = None
        self.method = ""
        self.endpoint = ""
        self.status: int | None = None
        self.request_bytes = 0
        self.response_bytes = 0
        self.protocol = protocol
        self.request: RequestBody | None = None
        self.body: ResponseBody | None = None
        self.facts = Facts()
        self.notes: list[str] = []
        self.lost = False  # where the response begins or ends was not captured
        self.left_out = False  # small writes were left out by arrangement
        self.unseen = False  # some of the answer was sent out of no buffer
        self.writes = 0  # of an answer that cannot be read
        self.announced = False
        self.token_announced = False
        self.finished = False

    def note(self, text: str) -> None:
        """Add a note once."""
        if text not in self.notes:
            self.notes.append(text)

    def note_gap(self, *, lost: bool = False) -> None:
        """Bytes were not captured, without having been left out on purpose; `lost`: an edge of the
        response with them."""
        self.lost = self.lost or lost
        self.note(GAP)

    def count_response(self, ns: int, count: int) -> None:
        """The server wrote `count` bytes of this response."""
        self.last_sent_ns = ns
        self.response_bytes += count

    @property
    def generates(self) -> bool:
        """The endpoint has a model work; for one that was not seen, whether it seems so."""
        if self.protocol in ("tls", "unseen"):
            if self.request_end_ns is None:
                return False
            waited_ns = (self.headers_ns or self.end_ns or self.start_ns) - self.start_ns
            return waited_ns >= _WORK_NS or self.writes >= _WORK_WRITES
        if not self.endpoint:
            return self.facts.first_text_ns is not None
        return self.makes_text or self.computes

    @property
    def makes_text(self) -> bool:
        """The endpoint is one that generates text."""
        return self._posts_to(_GENERATING)

    @property
    def computes(self) -> bool:
        """The endpoint has a model work, but not for text."""
        return self._posts_to(_COMPUTING)

    def _posts_to(self, endings: tuple[str, ...]) -> bool:
        return self.method in ("POST", "") and self.endpoint.rstrip("/").endswith(endings)

    @property
    def reads_lines(self) -> bool:
        """The response is read as events or lines."""
        return self.body is not None and self.body.by_lines is True

    def snapshot(self, outcome: Outcome = "incomplete") -> Exchange:
        """The facts so far."""
        facts, request = self.facts, self.request
        prompt, cached, completion = facts.tokens()
        return Exchange(
            start_ns=self.start_ns,
            request_end_ns=self.request_end_ns,
            headers_ns=self.headers_ns,
            first_body_ns=self.first_body_ns,
            first_token_ns=self.first_token_ns,
            last_token_ns=facts.last_text_ns,
            end_ns=self.end_ns,
            method=self.method,
            endpoint=self.endpoint,
            model=request.model if request else None,
            streamed=self._streamed(),
            status=self.status,
            request_bytes=self.request_bytes,
            response_bytes=self.response_bytes,
            text_chunks=None if self.left_out else facts.text_chunks,
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=completion,
            timings=facts.timings(),
            generates=self.generates,
            prompt_bytes=request.prompt_bytes if request else 0,
            protocol=self.protocol,
            outcome=outcome,
            notes=self._all_notes(),
            said_end=facts.ended,
        )

    def _streamed(self) -> bool | None:
        endpoint = self.endpoint.rstrip("/")
        if (self.body is not None and self.body.streamed) or endpoint.endswith(
            _STREAMING_BY_NATURE
        ):
            return True
        if self.request is not None and self.generates:
            if self.request.stream is not None:
                return self.request.stream
            if self.request.understood:
                return endpoint.endswith(_STREAMING_BY_DEFAULT)
        return self.body.streamed if self.body else None

    @property
    def first_token_ns(self) -> int | None:
        """The first token, or what stands for it; None if that is not known for certain."""
        if self._inferred or (self.computes and (self.status or 400) < 400):
            return self.first_body_ns
        return self.facts.first_text_ns if self.facts.token_certain else None

    @property
    def _inferred(self) -> bool:
        """Nothing of the answer can be read, so that its first write has to do."""
        if self.protocol in ("tls", "unseen"):
            return self.headers_ns is not None
        unreadable = self.unseen or (self.body is not None and UNREADABLE_CODING in self.body.notes)
        failed = self.status is not None and self.status >= 400
        return unreadable and self.makes_text and not failed and self.facts.first_text_ns is None

    def _all_notes(self) -> tuple[str, ...]:
        notes = list(self.notes)
        notes += self.request.notes if self.request else []
        notes += self.body.notes if self.body else []
        if self._inferred:
            notes.append(TOKEN_INFERRED)
        elif self.computes:
            notes.append(NO_TOKENS)
        elif self.facts.first_text_ns is not None:
            if not self.facts.token_certain:
                notes.append(TOKEN_UNCERTAIN)
            elif self.body is not None and self.body.by_lines is False:
                notes.append(NOT_STREAMED)
        return tuple(dict.fromkeys(notes))
