"""As much of gRPC as the workload speaks: HTTP/2's preface and frames, messages of JSON in them."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from .wire import WireError

Message = dict[str, Any]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = b"\0\0\0\4\0\0\0\0\0"
_DATA, _STREAM = 0, 1
_HEAD_BYTES = 9


def opening(message: Message) -> bytes:
    """What a client sends first on a connection."""
    return PREFACE + _SETTINGS + _framed(message)


def _framed(message: Message) -> bytes:
    text = json.dumps(message).encode()
    data = struct.pack(">BI", 0, len(text)) + text
    return struct.pack(">I", len(data))[1:] + struct.pack(">BBI", _DATA, 0, _STREAM) + data


class Channel:
    """One connection with one call on it, from either side."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")

    def call(self, message: Message) -> Message:
        self._sock.sendall(opening(message))
        return self.receive()

    def accept(self) -> Message:
        """A server's side: the preface, then the call."""
        if self._read(len(PREFACE)) != PREFACE:
            raise WireError("no HTTP/2")
        return self.receive()

    def send(self, message: Message) -> None:
        self._sock.sendall(_framed(message))

    def receive(self) -> Message:
        """The next message; other frames are passed over."""
        while True:
            head = self._read(_HEAD_BYTES)
            data = self._read(int.from_bytes(head[:3], "big"))
            if head[3] == _DATA:
                message: Message = json.loads(data[5:])
                return message

    def _read(self, size_bytes: int) -> bytes:
        data = self._file.read(size_bytes)
        if len(data) < size_bytes:
            raise WireError("closed in the middle of a frame")
        return data
