"""Writes that the kernel held back, and when they left.

Nagle's algorithm (RFC 9293, 3.7.4) sends no small segment while an earlier one is unacknowledged,
and a client may take 40 ms to acknowledge: the user waits on, though the server has written.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from ttftprof.sources.http.exchange import Exchange

_WORTH_A_NOTE_NS = 1_000_000
_REMEMBERED = 64  # a stream's first writes, before its quiet takes effect

LEFT_UNSEEN = "first token held back by the kernel; when it left was not seen"


class HeldBack:
    """The held writes of one connection. Pure; of bounded size."""

    __slots__ = ("_left", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[int] = deque(maxlen=_REMEMBERED)
        self._left: deque[tuple[int, int | None]] = deque(maxlen=_REMEMBERED)

    @property
    def waits(self) -> bool:
        """Whether a write has not left yet, as far as is known."""
        return bool(self._waiting)

    def write(self, ns: int) -> None:
        """A write that began at `ns` was held back."""
        if ns not in self._waiting:
            self._waiting.append(ns)

    def left(self, ns: int | None) -> None:
        """All that was held back left at `ns`; None: unknown."""
        self._left.extend((written, ns) for written in self._waiting)
        self._waiting.clear()

    def dated(self, exchange: Exchange) -> Exchange:
        """The exchange, with a first token that was held back dated when it left."""
        written = exchange.first_token_ns
        if written is None or written not in (held := dict(self._left)):
            return exchange
        left = held[written]
        if left is None:
            return replace(exchange, notes=(*exchange.notes, LEFT_UNSEEN))
        notes = exchange.notes
        if left - written >= _WORTH_A_NOTE_NS:
            notes = (*notes, _held_for(left - written))
        return replace(
            exchange,
            first_token_ns=left,
            last_token_ns=_no_earlier(exchange.last_token_ns, left),
            end_ns=_no_earlier(exchange.end_ns, left),
            notes=notes,
        )


def _held_for(held_ns: int) -> str:
    return (
        f"first token held back for {held_ns / 1e6:.0f} ms by Nagle's algorithm: "
        "the server does not set TCP_NODELAY"
    )


def _no_earlier(ns: int | None, than: int) -> int | None:
    return None if ns is None else max(ns, than)
