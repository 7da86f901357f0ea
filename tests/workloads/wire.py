"""As much HTTP/1.1 as the workload speaks, over plain sockets; keeps the first byte's moment."""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_RECV_BYTES = 1 << 16
_SO_TIMESTAMPNS = 35  # asm-generic/socket.h; Python's socket module does not name it
_TIMESPEC = struct.Struct("qq")
_HEAD_LIMIT_BYTES = 1 << 20
_STAMPING_TIMEOUT_NS = 2_000_000_000

REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Error", 503: "Unavailable"}


class WireError(Exception):
    """The peer said something that is not the HTTP spoken here, or went away in mid-message."""


def now_ns() -> int:
    return time.monotonic_ns()


@dataclass(frozen=True)
class Message:
    """A head with its body; `first_byte_ns` is when it began to be readable."""

    start_line: str
    headers: dict[str, str]
    body: bytes
    first_byte_ns: int

    @property
    def method(self) -> str:
        return self.start_line.split(" ", 1)[0]

    @property
    def target(self) -> str:
        return self.start_line.split(" ")[1]

    @property
    def path(self) -> str:
        return self.target.split("?", 1)[0]

    @property
    def status(self) -> int:
        return int(self.start_line.split(" ")[1])


class Reader:
    """Buffered reading of one socket.

    With `kernel_stamps` the first byte's time is the kernel's own receive time: on a busy machine
    a thread gets to look tens of ms later, and a request may have lain in the listen backlog much
    longer.  It comes from a peek of one byte; data is read by recv() as servers do.  Otherwise the
    time is when poll() said readable.
    """

    def __init__(self, sock: socket.socket, *, kernel_stamps: bool = False) -> None:
        self.sock = sock
        self._kernel_stamps = kernel_stamps
        self._buffer = b""

    def read_message(self) -> Message | None:
        """The next head and, where a Content-Length says so, its body; None at a clean end."""
        first_byte_ns = self._first_byte()
        if first_byte_ns is None:
            return None
        head = self._read_head()
        lines = head.decode("latin-1").split("\r\n")
        headers = dict(_header(line) for line in lines[1:])
        body = self._read_exactly(int(headers.get("content-length", "0")))
        return Message(lines[0], headers, body, first_byte_ns)

    def recv(self) -> bytes:
        """Whatever is there: what was read ahead first, then the socket; b"" at the end."""
        if self._buffer:
            data, self._buffer = self._buffer, b""
            return data
        return self.sock.recv(_RECV_BYTES)

    def _first_byte(self) -> int | None:
        if self._buffer:
            return now_ns()
        wait_readable(self.sock)
        first_byte_ns = now_ns()
        if self._kernel_stamps:
            first_byte_ns = self._arrival_by_kernel(first_byte_ns)
        self._buffer = self.sock.recv(_RECV_BYTES)
        return first_byte_ns if self._buffer else None

    def _arrival_by_kernel(self, seen_ns: int) -> int:
        space = socket.CMSG_SPACE(_TIMESPEC.size)
        _, ancillary, _, _ = self.sock.recvmsg(1, space, socket.MSG_PEEK)
        if not ancillary:  # the end of the stream has no time; data without one would be a lie
            if self.sock.recv(1, socket.MSG_PEEK):
                raise WireError("the kernel gave no receive time")
            return seen_ns
        seconds, rest_ns = _TIMESPEC.unpack(ancillary[0][2][: _TIMESPEC.size])
        arrived_ns: int = seconds * 1_000_000_000 + rest_ns - wall_offset_ns()
        return min(seen_ns, arrived_ns)

    def _read_head(self) -> bytes:
        while b"\r\n\r\n" not in self._buffer:
            if len(self._buffer) > _HEAD_LIMIT_BYTES:
                raise WireError("head too long")
            self._fill()
        head, self._buffer = self._buffer.split(b"\r\n\r\n", 1)
        return head

    def _read_exactly(self, size_bytes: int) -> bytes:
        while len(self._buffer) < size_bytes:
            self._fill()
        body, self._buffer = self._buffer[:size_bytes], self._buffer[size_bytes:]
        return body

    def _fill(self) -> None:
        data = self.sock.recv(_RECV_BYTES)
        if not data:
            raise WireError("closed in the middle of a message")
        self._buffer += data


def accept_each(listener: socket.socket, handle: Callable[[socket.socket], None]) -> None:
    """A thread for each connection, until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=handle, args=(connection,), daemon=True).start()


def answer_each(
    connection: socket.socket,
    answer: Callable[[socket.socket, Message], None],
    *,
    kernel_stamps: bool = False,
) -> None:
    """Every request of a connection, until either side has enough; closes it."""
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reader = Reader(connection, kernel_stamps=kernel_stamps)
    try:
        while (request := reader.read_message()) is not None:
            answer(connection, request)
    except (OSError, WireError):
        pass
    finally:
        connection.close()


def wait_readable(sock: socket.socket) -> None:
    """Block until a byte or an end is there; the socket's own timeout holds."""
    timeout_s = sock.gettimeout()
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    if not poll.poll(None if timeout_s is None else timeout_s * 1000):
        raise TimeoutError("nothing to read")


def wall_offset_ns() -> int:
    """CLOCK_REALTIME - CLOCK_MONOTONIC, from the tightest of a few sandwiches."""
    best_width_ns, best_offset_ns = 1 << 62, 0
    for _ in range(8):
        before_ns = time.monotonic_ns()
        wall_ns = time.time_ns()
        width_ns = time.monotonic_ns() - before_ns
        if width_ns < best_width_ns:
            best_width_ns, best_offset_ns = width_ns, wall_ns - before_ns - width_ns // 2
    return best_offset_ns


def listen(host: str, port: int, *, kernel_stamps: bool = False) -> socket.socket:
    """A listening socket; a host that is a path is a Unix socket, as llama-server has it."""
    if host.startswith("/"):
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind(host)
        unix.listen(64)
        return unix
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if kernel_stamps:
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        _await_stamping(host)
    sock.bind((host, port))
    sock.listen(64)
    return sock


def _await_stamping(host: str) -> None:
    """The kernel begins to stamp packets some time after the first socket has asked for it."""
    deadline_ns = now_ns() + _STAMPING_TIMEOUT_NS
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        probe.bind((host, 0))
        while now_ns() < deadline_ns:
            sent_ns = time.time_ns()
            probe.sendto(b"?", probe.getsockname())
            time.sleep(0.001)  # without a stamp of its own the datagram gets the time of reading
            read_ns = time.time_ns()
            _, ancillary, _, _ = probe.recvmsg(1, socket.CMSG_SPACE(_TIMESPEC.size))
            seconds, rest_ns = _TIMESPEC.unpack(ancillary[0][2][: _TIMESPEC.size])
            if sent_ns <= seconds * 1_000_000_000 + rest_ns < read_ns:
                return
    raise WireError("the kernel does not stamp received packets: set kernel_stamps to false")


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    if host.startswith("/"):
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.settimeout(timeout_s)
        unix.connect(host)
        return unix
    sock = socket.create_connection((host, port), timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def free_port(host: str) -> int:
    with listen(host, 0) as sock:
        return int(sock.getsockname()[1])


def head(status: int, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Unknown')}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def json_response(status: int, payload: dict[str, Any]) -> bytes:
    body = json.dumps(payload).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    return head(status, headers) + body


def chunk(data: bytes) -> bytes:
    """One piece of a chunked body; chunk(b"") ends it."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _header(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip().lower(), value.strip()
