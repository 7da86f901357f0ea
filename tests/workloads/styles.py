"""A server that answers from transcripts, with every system call that servers read and write by.

    python -m workloads.styles FOLDER

Its first line of output is JSON: the port of each style, the path of its Unix socket. Each request
names a dialog in `X-Dialog`; each answer gives a line of JSON with the moments before and
after each of its writes (CLOCK_MONOTONIC, ns).
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from workloads.transcripts import SERVERS, chunk, transcript

PAUSE_S = 0.002
SLOW_S = 0.06  # between request and answer, so that it looks like a model's work
_ZEROCOPY, _SO_ZEROCOPY = 0x4000000, 60

Read = Callable[[socket.socket], bytes]
Write = Callable[[socket.socket, bytes], None]


def _peek(sock: socket.socket) -> bytes:
    return sock.recv(len(sock.recv(1 << 16, socket.MSG_PEEK)))


def _readv(sock: socket.socket) -> bytes:
    parts = [bytearray(1), bytearray(2), bytearray(1 << 16)]
    left = os.readv(sock.fileno(), parts)
    return b"".join(parts)[:left]


def _writev(sock: socket.socket, data: bytes) -> None:
    os.writev(sock.fileno(), [data[:1], b"", data[1:3], data[3:]])


def _sendmsg(sock: socket.socket, data: bytes) -> None:
    sock.sendmsg([data[:2], data[2:]])


def _sendfile(sock: socket.socket, data: bytes) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        os.sendfile(sock.fileno(), file.fileno(), 0, len(data))


def _splice(sock: socket.socket, data: bytes) -> None:
    out, into = os.pipe()
    os.write(into, data)
    os.splice(out, sock.fileno(), len(data))
    os.close(out)
    os.close(into)


def _write(sock: socket.socket, data: bytes) -> None:
    os.write(sock.fileno(), data)


class Ring:
    """An io_uring of one entry: include/uapi/linux/io_uring.h, by the raw system calls."""

    SEND, RECEIVE = 26, 27

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        params = ctypes.create_string_buffer(120)
        self._fd = self._libc.syscall(425, 1, params)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "io_uring_setup")
        sq, cq = struct.unpack_from("10I", params, 40), struct.unpack_from("10I", params, 80)
        self._sq_tail, self._sq_array, self._cq_head, self._cq_cqes = sq[1], sq[6], cq[0], cq[5]
        self._sq = mmap.mmap(self._fd, 4096, offset=0)
        self._cq = mmap.mmap(self._fd, 4096, offset=0x8000000)
        self._sqes = mmap.mmap(self._fd, 4096, offset=0x10000000)
        self._turns = 0

    def move(self, operation: int, sock: socket.socket, buffer: ctypes.Array[ctypes.c_char]) -> int:
        """Sends the buffer, or receives into it; gives how many bytes."""
        entry = struct.pack(
            "<BBHiQQII", operation, 0, 0, sock.fileno(), 0, ctypes.addressof(buffer), len(buffer), 0
        )
        self._sqes[:64] = entry.ljust(64, b"\0")
        struct.pack_into("<I", self._sq, self._sq_array, 0)
        self._turns += 1
        struct.pack_into("<I", self._sq, self._sq_tail, self._turns)
        self._libc.syscall(426, self._fd, 1, 1, 1, None, ctypes.c_size_t(0))
        at = self._cq_cqes + 16 * ((self._turns - 1) & 1)
        (result,) = struct.unpack_from("<i", self._cq, at + 8)
        struct.pack_into("<I", self._cq, self._cq_head, self._turns)
        return int(result)

    def read(self, sock: socket.socket) -> bytes:
        buffer = ctypes.create_string_buffer(1 << 16)
        count = self.move(self.RECEIVE, sock, buffer)
        return buffer.raw[: max(count, 0)]

    def write(self, sock: socket.socket, data: bytes) -> None:
        self.move(self.SEND, sock, ctypes.create_string_buffer(data, len(data)))


def _ring_style() -> tuple[Read, Write]:
    ring = Ring()
    return ring.read, ring.write


def _pair(read: Read, write: Write) -> Callable[[], tuple[Read, Write]]:
    return lambda: (read, write)


STYLES: dict[str, Callable[[], tuple[Read, Write]]] = {
    "recv-send": _pair(lambda s: s.recv(1 << 16), lambda s, d: s.sendall(d)),
    "byte-write": _pair(lambda s: s.recv(1), _write),
    "peek-writev": _pair(_peek, _writev),
    "readv-sendmsg": _pair(_readv, _sendmsg),
    "recvmsg-zerocopy": _pair(
        lambda s: s.recvmsg(1 << 16)[0], lambda s, d: s.sendall(d, _ZEROCOPY)
    ),
    "read-sendfile": _pair(lambda s: os.read(s.fileno(), 1 << 16), _sendfile),
    "recv-splice": _pair(lambda s: s.recv(1 << 16), _splice),
    "uring": _ring_style,
}
UNSEEN = ("read-sendfile", "recv-splice")  # the body; the head is sent as usual


def _sse(*texts: str) -> list[bytes]:
    return [
        b"data: " + json.dumps({"choices": [{"delta": {"content": t}}]}).encode() + b"\n\n"
        for t in texts
    ]


def _head(status: str, *fields: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *fields, "", ""]).encode()


def _squeezed() -> list[bytes]:
    squeeze = zlib.compressobj(wbits=31)
    parts = [
        squeeze.compress(e) + squeeze.flush(zlib.Z_SYNC_FLUSH) for e in _sse("", "CANARY", "b")
    ]
    return [*map(chunk, parts), b"0\r\n\r\n"]


_SSE_TYPE = "Content-Type: text/event-stream"
_CHUNKED = "Transfer-Encoding: chunked"
_EMBEDDING = b'{"data":[{"embedding":[0.1,0.2]}],"usage":{"prompt_tokens":5,"total_tokens":5}}'
_LOADING = b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}'


def _plain(status: str, body: bytes, *fields: str) -> list[bytes]:
    return [_head(status, "Content-Type: application/json", f"Content-Length: {len(body)}", *fields)
            + body]  # fmt: skip


_UTF8 = 'data: {"content":"é€😀"}\n\n'.encode()


def _bytes(data: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in data]


DIALOGS: dict[str, Sequence[bytes]] = {
    **{name: [data for side, data in transcript(name) if side == "s"] for name in SERVERS},
    "gzip": [_head("200 OK", _SSE_TYPE, _CHUNKED, "Content-Encoding: gzip"), *_squeezed()],
    "brotli": [
        _head("200 OK", _SSE_TYPE, _CHUNKED, "Content-Encoding: br"),
        chunk(b"\x8b\x01\x80"),
        chunk(b"\x02\x03"),
        b"0\r\n\r\n",
    ],
    "embeddings": _plain("200 OK", _EMBEDDING),
    "loading": _plain("503 Service Unavailable", _LOADING),
    "early": [_head("103 Early Hints", "Link: </x>"), *_plain("200 OK", b'{"content":"CANARY"}')],
    "head": [_head("200 OK", "Content-Length: 99")],
    "nothing": [_head("204 No Content")],
    "until-close": [_head("200 OK", _SSE_TYPE, "Connection: close"), *_sse("", "CANARY", "b")],
    "websocket": [_head("101 Switching Protocols", "Upgrade: websocket"), b"\x81\x05CANARY"],
    "hang": [],
    "stalled": [_head("200 OK", _SSE_TYPE, _CHUNKED), chunk(_sse("")[0])],
    "deep": [_head("200 OK", _SSE_TYPE, _CHUNKED), chunk(b"data: " + b'{"a":' * 50_000 + b"\n\n"),
             b"0\r\n\r\n"],
    "huge-chunk": [_head("200 OK", _SSE_TYPE, _CHUNKED), b"10000000000000000\r\n", *_sse("CANARY")],
    "huge-length": [_head("200 OK", _SSE_TYPE, "Content-Length: " + "9" * 30), *_sse("CANARY")],
    "cut-utf8": [_head("200 OK", _SSE_TYPE, _CHUNKED), *map(chunk, _bytes(_UTF8)), b"0\r\n\r\n"],
}  # fmt: skip
SLOW = {"brotli", "embeddings", "gzip"} | set(SERVERS)


class _Requests:
    """The requests of one connection, each whole, by one way to read."""

    def __init__(self, sock: socket.socket, read: Read) -> None:
        self._sock, self._read = sock, read
        self._held = b""

    def next(self) -> bytes:
        """The head of the next one; b"" at the end."""
        while b"\r\n\r\n" not in self._held:
            if not self._more():
                return b""
        head, self._held = self._held.split(b"\r\n\r\n", 1)
        if b"100-continue" in head:
            self._sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = int(_field(head, b"content-length") or 0)
        while len(self._held) < length:
            if not self._more():
                return b""
        self._held = self._held[length:]
        return head

    def _more(self) -> bool:
        got = self._read(self._sock)
        self._held += got
        return bool(got)


def _field(head: bytes, name: bytes) -> str:
    for line in head.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.lower() == name:
            return value.strip().decode()
    return ""


def _converse(sock: socket.socket, style: str) -> None:
    read, write = STYLES.get(style, STYLES["recv-send"])()
    requests = _Requests(sock, read)
    while head := requests.next():
        name = _field(head, b"x-dialog")
        stamps = []
        if name in SLOW:
            time.sleep(SLOW_S)
        for i, data in enumerate(DIALOGS[name]):
            began_ns = time.monotonic_ns()
            (sock.sendall(data) if style in UNSEEN and i == 0 else write(sock, data))
            stamps.append((began_ns, time.monotonic_ns()))
            time.sleep(PAUSE_S)
        _say({"dialog": name, "style": style, "writes": stamps})
        if name == "until-close":
            return


_lock = threading.Lock()


def _say(fact: object) -> None:
    with _lock:
        print(json.dumps(fact), flush=True)


def _serve(listener: socket.socket, style: str, tls: ssl.SSLContext | None) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_handle, args=(sock, style, tls), daemon=True).start()


def _handle(sock: socket.socket, style: str, tls: ssl.SSLContext | None) -> None:
    try:
        if style == "recvmsg-zerocopy":
            sock.setsockopt(socket.SOL_SOCKET, _SO_ZEROCOPY, 1)
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wrapped = sock if tls is None else tls.wrap_socket(sock, server_side=True)
        with wrapped:
            _converse(wrapped, style)
    except (OSError, ValueError, KeyError):
        sock.close()  # the client went away, or sent rubbish


def _tls(folder: Path) -> ssl.SSLContext:
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out",
         str(certificate), "-days", "1", "-subj", "/CN=localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def main() -> None:
    folder = Path(sys.argv[1])
    listeners: dict[str, tuple[socket.socket, ssl.SSLContext | None]] = {
        style: (socket.create_server(("127.0.0.1", 0)), None) for style in STYLES
    }
    listeners["tls"] = socket.create_server(("127.0.0.1", 0)), _tls(folder)
    path = str(folder / "socket")
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(path)
    unix.listen()
    ports = {style: listener.getsockname()[1] for style, (listener, _) in listeners.items()}
    _say({"ports": ports, "path": path})
    for style, (listener, tls) in listeners.items():
        threading.Thread(target=_serve, args=(listener, style, tls), daemon=True).start()
    _serve(unix, "unix", None)


if __name__ == "__main__":
    main()
