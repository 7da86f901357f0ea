"""Pieces of what sockets and logs carry, as records of the text ring."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from ttftprof.events import TEXT, TextKind

MAX_BYTES = 32 << 20  # held between two looks; what exceeds it is counted as lost


class Texts:
    """A queue with the ring's interface, filled by other threads."""

    def __init__(self) -> None:
        self.lost = 0
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Any, bytes]] = deque()
        self._bytes = 0

    def add(self, kind: TextKind, ns: int, data: bytes, **fields: int) -> None:
        """`fields` as in `events.TEXT`."""
        head = np.zeros(1, TEXT)[0]
        head["kind"], head["start_ns"], head["end_ns"] = kind, ns, ns
        head["total"] = head["length"] = len(data)
        for name, value in fields.items():
            head[name] = value
        with self._lock:
            if self._bytes + len(data) > MAX_BYTES:
                self.lost += 1
                return
            self._bytes += len(data)
            self._waiting.append((head, data))

    def drain(self, until_ns: int, _skim: object = None) -> Iterator[tuple[Any, bytes]]:
        """(header, bytes) of each that is stamped no later than `until_ns`."""
        while True:
            with self._lock:
                if not self._waiting or int(self._waiting[0][0]["end_ns"]) > until_ns:
                    return
                head, data = self._waiting.popleft()
                self._bytes -= len(data)
            yield head, data
