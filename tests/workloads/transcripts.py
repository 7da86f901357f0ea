"""What servers said, as pieces of a connection: the fixtures of `fixtures/http`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

FIXTURES = Path(__file__).parents[1] / "fixtures" / "http"
SERVERS = sorted(p.stem for p in FIXTURES.glob("*.txt"))

Piece = tuple[str, bytes]
"""("r", bytes the server read) or ("s", bytes it wrote)."""


def transcript(name: str) -> list[Piece]:
    """A fixture as reads and writes: the request in one read; head and each event in a write."""
    request, response = (FIXTURES / f"{name}.txt").read_bytes().split(b"=====\n")
    head, body = request.rstrip(b"\n").split(b"\n\n", 1)
    head = head.replace(b"\n", b"\r\n") + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
    return [("r", head + body), *(("s", part) for part in writes(response))]


def writes(response: bytes) -> Iterator[bytes]:
    """A response as a server writes it."""
    head, body = response.split(b"\n\n", 1)
    head = head.replace(b"\n", b"\r\n")
    if b"transfer-encoding: chunked" not in head.lower():
        body = body.rstrip(b"\n")
        yield head + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
        yield body
        return
    yield head + b"\r\n\r\n"
    separator = b"\n\n" if b"event-stream" in head else b"\n"
    for event in body.rstrip(b"\n").split(separator):
        yield chunk(event + separator)
    yield b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """A chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)
