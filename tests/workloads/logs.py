"""Log lines on stderr, stamped as llama.cpp stamps them: time since this process started."""

from __future__ import annotations

import os
import time


class Log:
    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._start_ns = time.monotonic_ns()

    def line(self, text: str) -> None:
        if self._enabled:
            os.write(2, f"{self._elapsed()} I {text}\n".encode())

    def plain(self, text: str) -> None:
        """A line in another server's form."""
        if self._enabled:
            os.write(2, f"{text}\n".encode())

    def _elapsed(self) -> str:
        """M.SS.mmm.uuu"""
        total_us = (time.monotonic_ns() - self._start_ns) // 1000
        minutes, rest_us = divmod(total_us, 60_000_000)
        seconds, rest_us = divmod(rest_us, 1_000_000)
        return f"{minutes}.{seconds:02}.{rest_us // 1000:03}.{rest_us % 1000:03}"
