"""A command's own output: passed on to where it would have gone, and told line by line.

A process of its own passes it on, not the recorder: a server that outlives the recording must not
find its output closed.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn

from ttftprof.clock import now_ns

_HEAD = struct.Struct("<QI")
_PIECE = 16 << 10
_PART = select.PIPE_BUF - _HEAD.size  # is written whole or not at all
_PIPE_BYTES = 1 << 20


class CommandOutput:
    """To be made while this process has one thread. `ends`: what the command's standard output and
    error are to be."""

    def __init__(self) -> None:
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        self._told, told_w = os.pipe()
        with suppress(OSError):  # beyond the user's share of pipe memory
            fcntl.fcntl(self._told, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        if os.fork() == 0:
            for fd in (out_w, err_w, self._told):
                os.close(fd)
            _pass_on({out_r: 1, err_r: 2}, told_w)
        for fd in (out_r, err_r, told_w):
            os.close(fd)
        os.set_blocking(self._told, False)
        self.ends = (out_w, err_w)
        self._held = b""

    def handed_over(self) -> None:
        """The command has them now."""
        for fd in self.ends:
            os.close(fd)

    def drain(self) -> Iterator[tuple[int, bytes]]:
        """(when, what was written at once); whole lines as a rule."""
        with suppress(BlockingIOError):
            while more := os.read(self._told, _PIPE_BYTES):
                self._held += more
        while len(self._held) >= _HEAD.size:
            ns, length = _HEAD.unpack_from(self._held)
            end = _HEAD.size + length
            if len(self._held) < end:
                return
            data, self._held = self._held[_HEAD.size : end], self._held[end:]
            yield ns, data

    def close(self) -> None:
        os.close(self._told)


def _pass_on(ways: dict[int, int], told: int) -> NoReturn:
    """Until the command and all that it started have closed their ends."""
    try:
        # Ctrl-C is for the command, whose last words are wanted.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        os.set_blocking(told, False)
        poll = select.poll()
        for fd in ways:
            poll.register(fd, select.POLLIN)
        while ways:
            for fd, _ in poll.poll():
                data = os.read(fd, _PIECE)
                ns = now_ns()
                if not data:
                    poll.unregister(fd)
                    del ways[fd]
                    continue
                with suppress(OSError):  # nobody reads it there any more
                    _write_all(ways[fd], data)
                with suppress(OSError):  # nor here; or the recorder is far behind
                    for begin in range(0, len(data), _PART):
                        part = data[begin : begin + _PART]
                        os.write(told, _HEAD.pack(ns, len(part)) + part)
    finally:
        os._exit(0)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
