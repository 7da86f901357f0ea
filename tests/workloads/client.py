"""A small streaming client over a raw socket; stamps CLOCK_MONOTONIC before it looks at data."""

from __future__ import annotations

import json
import re
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from . import wire
from .wire import now_ns

_TEXT = re.compile(rb'"(?:content|response)": ?"[^"]')
_CONNECT_RETRY_S = 0.002


@dataclass(frozen=True)
class ClientResult:
    """One request as its client saw it; absent moments are None.

    outcome: ok, http_error, timeout, refused, closed (the stream ended before its end).
    """

    request_id: str
    model: str
    outcome: str
    send_begin_ns: int | None = None
    send_end_ns: int | None = None
    headers_ns: int | None = None
    first_text_ns: int | None = None
    end_ns: int | None = None
    status: int | None = None
    chunks: tuple[tuple[int, int], ...] = ()  # (when recv returned, bytes)
    texts: int = 0
    timings: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft_ns(self) -> int:
        """From the first byte sent to the first generated text received."""
        if self.send_begin_ns is None or self.first_text_ns is None:
            raise ValueError(f"{self.request_id}: no first token ({self.outcome})")
        return self.first_text_ns - self.send_begin_ns


@dataclass(frozen=True)
class ChatRequest:
    port: int
    model: str
    request_id: str
    prompt_tokens: int = 34
    max_tokens: int = 8
    stream: bool = True
    timeout_s: float = 60.0
    host: str = "127.0.0.1"
    path: str = "/v1/chat/completions"

    def encode(self) -> bytes:
        prompt = " ".join(f"w{index}" for index in range(self.prompt_tokens))
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
        if self.path == "/api/generate":
            asked = {"prompt": prompt}
        limits = {"max_tokens": self.max_tokens, "options": {"num_predict": self.max_tokens}}
        payload = {"model": self.model, **asked, **limits, "stream": self.stream, "temperature": 0}
        body = json.dumps(payload).encode()
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Content-Type: application/json",
            f"X-Request-Id: {self.request_id}",
            f"Content-Length: {len(body)}",
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class Stream:
    """What of one reply has arrived."""

    def __init__(self) -> None:
        self.chunks: list[tuple[int, int]] = []
        self.data = b""
        self.headers_ns: int | None = None
        self.first_text_ns: int | None = None

    def add(self, when_ns: int, piece: bytes) -> None:
        self.chunks.append((when_ns, len(piece)))
        self.data += piece
        if self.headers_ns is None and b"\r\n\r\n" in self.data:
            self.headers_ns = when_ns
        if self.first_text_ns is None and _TEXT.search(self.data):
            self.first_text_ns = when_ns

    @property
    def status(self) -> int | None:
        return int(self.data.split(b" ", 2)[1]) if self.headers_ns else None

    @property
    def complete(self) -> bool:
        start, _, body = self.data.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", start, re.IGNORECASE)
        if length:
            return len(body) >= int(length.group(1))
        return body.endswith(b"\r\n0\r\n\r\n")

    @property
    def timings(self) -> dict[str, Any]:
        found = re.search(rb'"timings": ?(\{[^}]*\})', self.data)
        return dict(json.loads(found.group(1))) if found else {}


def chat(request: ChatRequest) -> ClientResult:
    """Send one request on a connection of its own and read its reply to the end."""
    try:
        sock = _connect(request)
    except OSError:
        return ClientResult(request.request_id, request.model, "refused")
    with sock:
        return chat_on(sock, request)


def chat_on(sock: socket.socket, request: ChatRequest) -> ClientResult:
    """The same on an open connection, which stays open (keep-alive)."""
    deadline_ns = now_ns() + int(request.timeout_s * 1e9)
    data = request.encode()
    send_begin_ns = now_ns()
    sock.sendall(data)
    send_end_ns = now_ns()
    stream = Stream()
    outcome = _receive(sock, stream, deadline_ns)
    if outcome == "ok" and stream.status != 200:
        outcome = "http_error"
    return ClientResult(
        request_id=request.request_id,
        model=request.model,
        outcome=outcome,
        send_begin_ns=send_begin_ns,
        send_end_ns=send_end_ns,
        headers_ns=stream.headers_ns,
        first_text_ns=stream.first_text_ns,
        end_ns=now_ns(),
        status=stream.status,
        chunks=tuple(stream.chunks),
        texts=len(_TEXT.findall(stream.data)),
        timings=stream.timings,
    )


def _receive(sock: socket.socket, stream: Stream, deadline_ns: int) -> str:
    while not stream.complete:
        left_s = (deadline_ns - now_ns()) / 1e9
        if left_s <= 0:
            return "timeout"
        sock.settimeout(left_s)
        try:
            piece = sock.recv(1 << 16)
        except TimeoutError:
            return "timeout"
        except OSError:
            return "closed"
        when_ns = now_ns()
        if not piece:
            return "closed"
        stream.add(when_ns, piece)
    return "ok"


def _connect(request: ChatRequest) -> socket.socket:
    """Retries while refused: a restarted server does not listen at once."""
    deadline_ns = now_ns() + int(request.timeout_s * 1e9)
    while True:
        try:
            return wire.connect(request.host, request.port, request.timeout_s)
        except ConnectionRefusedError:
            if now_ns() > deadline_ns:
                raise
            time.sleep(_CONNECT_RETRY_S)
