"""The last writes of an answer whose first token is known.

From then on single writes tell nothing new, until the last ones, which carry token counts and
timings. The kernel side keeps these too once it is asked to be quiet; doing the same with what
comes before makes a backlog cheap, and the facts independent of when the asking was.
"""

from __future__ import annotations

from collections import deque

from ttftprof.sources.http.framing import RESPONSE_BEGINS, Framing

KEPT_WRITES = 8  # TAIL_WRITES and TAIL_BYTES of probes/sockets.bpf.h
SMALL_BYTES = 512


class Tail:
    """At most `KEPT_WRITES` small writes, and how many bytes came before them unread."""

    __slots__ = ("_kept", "_skipped", "size_bytes")

    def __init__(self) -> None:
        self._kept: deque[tuple[int, bytes]] = deque()
        self._skipped = 0
        self.size_bytes = 0

    def keep(self, ns: int, data: bytes, missing: int) -> bool:
        """Takes a write; False if it is one to read at once, after what is kept."""
        if missing:
            if data:
                return False
            self._skipped += missing + self.size_bytes
            self._kept.clear()
            self.size_bytes = 0
            return True
        if len(data) >= SMALL_BYTES or Framing.ends_with_last_chunk(data):
            return False
        if data.startswith(RESPONSE_BEGINS):
            return False
        self._kept.append((ns, data))
        self.size_bytes += len(data)
        if len(self._kept) > KEPT_WRITES:
            _, oldest = self._kept.popleft()
            self.size_bytes -= len(oldest)
            self._skipped += len(oldest)
        return True

    def take(self, ns: int) -> list[tuple[int, bytes, int]]:
        """(ns, data, missing) of what is kept, oldest first, with the hole before it; forgets it.

        `ns`: the moment, for a hole that nothing follows.
        """
        pieces = [(at, data, 0) for at, data in self._kept]
        if self._skipped:
            pieces.insert(0, (pieces[0][0] if pieces else ns, b"", self._skipped))
        self._kept.clear()
        self._skipped = self.size_bytes = 0
        return pieces
