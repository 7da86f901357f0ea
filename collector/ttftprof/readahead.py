"""Sets a device's readahead for a while. The old value is put back whatever ends the program.

A child holds a pipe to this process: if the pipe closes without the value having been put back
(kill -9), the child writes it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def set_readahead(file: Path, kib: int) -> Iterator[str]:
    """The file (a bdi's read_ahead_kb) holds `kib` inside; yields why it could not be set, or ''.

    The kernel keeps whole pages, so the value in force may be a little smaller. If somebody else
    sets it meanwhile, theirs is left alone.
    """
    try:
        old = file.read_text().strip()
        guard = _Guard.start(file, old)
    except OSError as error:
        yield f"{file} cannot be read: {error.strerror}"
        return
    try:
        try:
            file.write_text(f"{kib}\n")
            guard.ours = ours = file.read_text().strip()
        except OSError as error:
            yield f"{file} cannot be written: {error.strerror}"
            return
        yield "" if abs(int(ours) - kib) < 64 else f"the kernel set {ours} KiB instead"
    finally:
        guard.put_back()


class _Guard:
    """The value to put back, and the child that does it if we cannot."""

    def __init__(self, file: Path, old: str, pid: int, pipe: int) -> None:
        self._file, self._old, self._pid, self._pipe = file, old, pid, pipe
        self.ours: str | None = None

    @classmethod
    def start(cls, file: Path, old: str) -> _Guard:
        held = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            ours, theirs = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(theirs)
                _guard(file, old, ours)
            os.close(ours)
            return cls(file, old, pid, theirs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

    def put_back(self) -> None:
        held = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            if self.ours is None or self._file.read_text().strip() == self.ours:
                _write(self._file, self._old)
            os.write(self._pipe, b"d")
            os.close(self._pipe)
            os.waitpid(self._pid, 0)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _guard(file: Path, old: str, pipe: int) -> None:
    """The child: waits for the word that all is done, or for the parent's end."""
    try:
        os.setsid()
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
        if os.read(pipe, 1) != b"d":
            _write(file, old)
    finally:
        os._exit(0)


def _write(file: Path, value: str) -> None:
    try:
        file.write_text(f"{value}\n")
    except OSError:
        return  # it could not be set either, or the device is gone
