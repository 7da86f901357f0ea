"""Where HTTP/1 messages begin and end, in a byte stream with holes.

`HeadBuffer` collects a head (at most 64 KiB), `parse_request` and `parse_response` keep the handful
of fields that framing needs, `Framing` cuts a body out of the stream. A hole inside a length that
is known costs nothing; after any other hole `Framing.lost` is set until `resume` sees a chunk
header that fits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_HEAD_BYTES = 64 * 1024
_MAX_CHUNK_LINE_BYTES = 1024
_HEAD_END = re.compile(rb"\n\r?\n")
_METHODS = (
    b"GET", b"POST", b"HEAD", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"TRACE", b"CONNECT", b"PRI",
)  # fmt: skip
# RFC 9112, 3.2: a path, a whole address, an authority (CONNECT) or the server itself.
_TARGET = rb"/[^ \r\n]*|[hH][tT][tT][pP][sS]?://[^ \r\n]*|(?<=CONNECT )[^ /\r\n]+|\*"
_REQUEST_LINE = re.compile(
    b"(" + b"|".join(_METHODS) + b") (" + _TARGET + rb") HTTP/(\d)\.\d[ \t]*\r?\n"
)
RESPONSE_BEGINS = b"HTTP/1."
_STATUS_LINE = re.compile(rb"HTTP/1\.\d (\d{3})(?![0-9])")
_TLS_RECORD = re.compile(rb"[\x14-\x17]\x03[\x00-\x04]")
_CHUNK_LINE = re.compile(rb"[ \t]*([0-9a-fA-F]{1,12})[ \t]*(?:;[^\r\n]{0,900})?\r?\n")
_STREAM_PIECE = re.compile(rb'(?:[0-9a-fA-F]{1,8}\r\n)?(?:data: ?[{\[]|event: |\{")|0\r\n\r\n\Z')
_AUTHORITY = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^/?#]*")
_UNSAFE = re.compile(r"[^A-Za-z0-9/_.:@~*+-]")
MAX_ENDPOINT_CHARS = 64
# The one query that is kept: how deep vLLM is put to sleep.
_SLEEP_LEVEL = re.compile(r"/sleep\?(?:[^#]*&)?level=([0-9])(?:[&#]|$)")
_KEPT_HEADERS = {
    b"content-length", b"transfer-encoding", b"content-type", b"content-encoding",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BodyHead:
    """What the head says about the body: `length` is None where it does not say."""

    length: int | None
    chunked: bool
    content_type: str
    encoding: str
    """Content coding in lower case; "" for none."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Request line without query, fragment and authority."""

    method: str
    endpoint: str
    version: int
    body: BodyHead


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Status line and what follows the head."""

    status: int
    body: BodyHead


class HeadBuffer:
    """Bytes of a head so far."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = bytearray()

    def feed(self, data: bytes, pos: int) -> tuple[int, bytes | None]:
        """Take bytes from `pos`; give the new position, and the head once its blank line is in."""
        before = len(self.bytes)
        self.bytes += data[pos : pos + MAX_HEAD_BYTES + 4 - before]
        end = _HEAD_END.search(self.bytes, max(0, before - 2))
        if end is None:
            return pos + len(self.bytes) - before, None
        head = bytes(self.bytes[: end.end()])
        self.bytes.clear()
        return pos + len(head) - before, head

    @property
    def overflowed(self) -> bool:
        """More than 64 KiB and still no end."""
        return len(self.bytes) > MAX_HEAD_BYTES


def protocol_of(prefix: bytes) -> str | None:
    """Name what begins so: "http/1", "tls", "other", or None while too short to say."""
    if _may_begin_request(prefix):
        return "http/1"
    if _TLS_RECORD.match(prefix):
        return "tls"
    if len(prefix) < 3 and prefix[:1] in b"\x14\x15\x16\x17" and prefix[1:2] in (b"", b"\x03"):
        return None
    return "other"


def _may_begin_request(prefix: bytes) -> bool:
    """Whether a few first bytes can still become a request line."""
    method, space, target = prefix.partition(b" ")
    if not space:
        return bool(method) and any(known.startswith(method) for known in _METHODS)
    begins = target[:1] in (b"", b"/", b"*", b"h", b"H") or method == b"CONNECT"
    return method in _METHODS and begins


def begins_request(data: bytes) -> bool:
    """Whether a whole request line stands at the start."""
    return _REQUEST_LINE.match(data) is not None


def begins_response(data: bytes) -> bool:
    """Whether a status line stands at the start."""
    return _STATUS_LINE.match(data) is not None


def begins_stream(data: bytes) -> bool:
    """Whether the middle of a streamed response stands at the start: an event, a line, the end."""
    return _STREAM_PIECE.match(data) is not None


def may_begin_response(prefix: bytes) -> bool:
    """Whether a few first bytes can still become a status line."""
    return prefix[: len(RESPONSE_BEGINS)] == RESPONSE_BEGINS[: len(prefix)]


def parse_request(head: bytes) -> RequestHead | None:
    """Read a request head, whole or cut short. None: not a request line."""
    line = _REQUEST_LINE.match(head)
    if line is None:
        return None
    return RequestHead(
        line[1].decode("ascii"), _endpoint(line[1], line[2]), int(line[3]), _body_head(head)
    )


def parse_response(head: bytes) -> ResponseHead | None:
    """Read a response head, whole or cut short. None: not a status line."""
    line = _STATUS_LINE.match(head)
    return None if line is None else ResponseHead(int(line[1]), _body_head(head))


def _endpoint(method: bytes, target: bytes) -> str:
    if method == b"CONNECT":
        return ""
    text = _AUTHORITY.sub("", target.decode("latin-1"), count=1)
    path = text.split("?", 1)[0].split("#", 1)[0] or "/"
    path = _UNSAFE.sub("_", path)
    if level := _SLEEP_LEVEL.match(text):
        return f"{path}?level={level[1]}"
    # The end says what is asked for; before it may stand a deployment's name.
    return path if len(path) <= MAX_ENDPOINT_CHARS else f"...{path[3 - MAX_ENDPOINT_CHARS :]}"


def _body_head(head: bytes) -> BodyHead:
    fields: dict[bytes, str] = {}
    for line in head.split(b"\n")[1:]:
        name, colon, value = line.partition(b":")
        name = name.lower()
        if colon and name in _KEPT_HEADERS:
            text = value.strip().decode("latin-1").lower()
            fields[name] = f"{fields[name]},{text}" if name in fields else text
    codings = fields.get(b"transfer-encoding", "")
    chunked = codings.replace(" ", "").endswith("chunked")
    encoding = fields.get(b"content-encoding", "").strip()
    if chunked and codings.strip() != "chunked":
        encoding = codings
    length = fields.get(b"content-length", "").split(",", 1)[0].strip()
    return BodyHead(
        length=int(length) if re.fullmatch(r"[0-9]{1,18}", length) else None,
        chunked=chunked,
        content_type=fields.get(b"content-type", ""),
        encoding="" if encoding == "identity" else encoding,
    )


_FIXED, _SIZE, _DATA, _AFTER_DATA, _TRAILER, _UNTIL_CLOSE, _LOST = range(7)


class Framing:
    """Cuts one body out of the stream. `done` once its last byte has passed."""

    __slots__ = ("_left", "_line", "_state", "_trailer_bytes", "done")

    def __init__(self, state: int, left: int = 0) -> None:
        self._state = state
        self._left = left
        self._line = bytearray()
        self._trailer_bytes = 0
        self.done = state == _FIXED and left == 0

    @classmethod
    def of(cls, body: BodyHead, *, until_close: bool) -> Framing:
        """Framing that a head announces; a response that announces none ends by closing."""
        if body.chunked:
            return cls(_SIZE)
        if body.length is not None:
            return cls(_FIXED, body.length)
        return cls(_UNTIL_CLOSE) if until_close else cls(_FIXED, 0)

    @classmethod
    def empty(cls) -> Framing:
        """No body."""
        return cls(_FIXED, 0)

    @classmethod
    def unknown(cls) -> Framing:
        """Framing of a body whose head or beginning was not seen."""
        return cls(_LOST)

    @property
    def lost(self) -> bool:
        """True when it is not known what the next byte is."""
        return self._state == _LOST

    @property
    def until_close(self) -> bool:
        """True when only closing the connection ends this body."""
        return self._state == _UNTIL_CLOSE

    @property
    def of_known_length(self) -> bool:
        """True when the head told how long this body is."""
        return self._state == _FIXED

    def feed(self, data: bytes, pos: int) -> tuple[int, int, int]:
        """One step from `pos`: (payload start, payload end, new position). Not for `lost`."""
        state = self._state
        if state == _SIZE:
            pos = self._size_line(data, pos)
            if self._state != _DATA:
                return pos, pos, pos
        elif state == _AFTER_DATA:
            pos = self._line_end(data, pos)
            return pos, pos, pos
        elif state == _TRAILER:
            pos = self._trailer(data, pos)
            return pos, pos, pos
        elif state == _UNTIL_CLOSE:
            return pos, len(data), len(data)
        end = min(len(data), pos + self._left)
        self._left -= end - pos
        if not self._left:
            self._payload_complete()
        return pos, end, end

    def skip(self, count: int) -> int:
        """Pass over `count` bytes that were not captured; gives how many lie beyond the body."""
        if self._state == _FIXED:
            taken = min(count, self._left)
            self._left -= taken
            self.done = self._left == 0
            return count - taken
        if self._state == _DATA and count <= self._left + 2:
            over = count - self._left
            self._left = max(0, -over)
            if over >= 0:
                self._state = _SIZE if over == 2 else _AFTER_DATA
        elif self._state != _UNTIL_CLOSE:
            self._state = _LOST
        return 0

    def resume(self, data: bytes, write_bytes: int) -> bool:
        """When lost: whether a chunk that fits begins this write (of `write_bytes` in all)."""
        line = _CHUNK_LINE.match(data)
        if line is None:
            return False
        end = line.end() + int(line[1], 16)
        if end == line.end() or end + 2 <= len(data):
            fits = data[end : end + 2] == b"\r\n"
        else:
            fits = end + 2 == write_bytes
        if fits:
            self._state = _SIZE
            self._line.clear()
        return fits

    @staticmethod
    def ends_with_last_chunk(data: bytes) -> bool:
        """Whether the chunk that ends a chunked body stands at the end."""
        return data.endswith(b"\r\n0\r\n\r\n") or data == b"0\r\n\r\n"

    def _payload_complete(self) -> None:
        if self._state == _DATA:
            self._state = _AFTER_DATA
        else:
            self.done = True

    def _size_line(self, data: bytes, pos: int) -> int:
        if not self._line:
            line = _CHUNK_LINE.match(data, pos)
            if line is not None:
                self._begin_chunk(int(line[1], 16))
                return line.end()
        stop = data.find(b"\n", pos) + 1
        piece = data[pos : stop or len(data)]
        self._line += piece[:_MAX_CHUNK_LINE_BYTES]
        if stop:
            line = _CHUNK_LINE.fullmatch(bytes(self._line))
            self._line.clear()
            if line is None:
                self._state = _LOST
                return pos
            self._begin_chunk(int(line[1], 16))
        elif len(self._line) >= _MAX_CHUNK_LINE_BYTES:
            self._state = _LOST
        return pos + len(piece)

    def _begin_chunk(self, size: int) -> None:
        self._left = size
        self._state = _DATA if size else _TRAILER

    def _line_end(self, data: bytes, pos: int) -> int:
        if data[pos : pos + 2] == b"\r\n":
            self._state = _SIZE
            return pos + 2
        if data[pos] == 0x0A:
            self._state = _SIZE
        elif data[pos] != 0x0D:
            self._state = _LOST
            return pos
        return pos + 1

    def _trailer(self, data: bytes, pos: int) -> int:
        stop = data.find(b"\n", pos) + 1
        piece = data[pos : stop or len(data)]
        self._trailer_bytes += len(piece)
        self._line += piece[:3]
        if self._trailer_bytes > MAX_HEAD_BYTES:
            self._state = _LOST
        elif stop:
            self.done = bytes(self._line) in (b"\r\n", b"\n")
            self._line.clear()
        elif len(self._line) > 3:
            del self._line[3:]
        return pos + len(piece)
