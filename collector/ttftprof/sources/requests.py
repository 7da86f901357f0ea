"""Turns what the target's sockets carried into facts on requests, and forgets the words.

Bytes come from the text ring in pieces; each connection has its parser. Prompts, answers, keys and
headers stay in this process's memory for as long as a parser needs them, and go nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ttftprof.events import TextKind
from ttftprof.kernel.ring import TextHead
from ttftprof.sources.http import Connection, Exchange
from ttftprof.sources.http.held import HeldBack
from ttftprof.sources.http.tail import SMALL_BYTES, Tail

MAX_CONNECTIONS = 16_384  # as many as the kernel side follows
MAX_BUFFERED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Seen:
    """An exchange and where it was seen. `ports`: (local, remote) of the server's socket."""

    exchange: Exchange
    socket: int
    tgid: int
    tid: int
    ports: tuple[int, int]

    def as_fact(self) -> dict[str, Any]:
        fact = asdict(self.exchange)
        fact["timings"] = dict(self.exchange.timings)
        return fact | {
            "socket": self.socket,
            "tgid": self.tgid,
            "tid": self.tid,
            "local_port": self.ports[0],
            "remote_port": self.ports[1],
        }


def _ports(head: Any) -> tuple[int, int]:
    """(local, remote) port of a text record's socket; zeros for a Unix socket."""
    both = int(head["dev"])
    return both >> 16, both & 0xFFFF


class _Tapped:
    """One connection: its parser, and how far each direction was copied."""

    def __init__(self, tap: RequestTap, socket: int) -> None:
        self.socket = socket
        self.tgid = self.tid = 0
        self.ports = (0, 0)
        self.asked_turn: int | None = None  # of the connection, for which quiet was asked
        self.quiet_turn: int | None = None  # whose small writes are only kept, for all to come
        self._tap = tap
        self._tail = Tail()
        self._held = HeldBack()
        self._waiting: list[Exchange] = []  # ended, but part of them has not left yet
        self._unfinished: dict[bool, tuple[int, int, int]] = {}  # sent -> (ns, next offset, total)
        self.connection = Connection(self._ended, self._progress)

    def _ended(self, exchange: Exchange) -> None:
        if self._held.waits:
            self._waiting.append(exchange)
        else:
            self._tap.on_end(self._seen(exchange))

    def _progress(self, exchange: Exchange) -> None:
        self._tap.on_progress(self._seen(exchange))

    def _seen(self, exchange: Exchange) -> Seen:
        return Seen(self._held.dated(exchange), self.socket, self.tgid, self.tid, self.ports)

    def left(self, ns: int | None) -> None:
        """What was held back left at `ns`, or will not be seen to leave."""
        self._held.left(ns)
        waiting, self._waiting = self._waiting, []
        for exchange in waiting:
            self._tap.on_end(self._seen(exchange))

    def pending(self) -> list[Seen]:
        """Exchanges that have not ended, or not left, as they stand."""
        return [self._seen(e) for e in (*self._waiting, *self.connection.pending())]

    def take(self, head: Any, data: bytes, sent: bool, held: bool) -> None:
        """One piece. What the kernel did not copy of the transfer before is told as missing."""
        ns = int(head["start_ns"])
        if held:
            self._held.write(ns)
        elif not sent:
            self.left(None)
        offset, total = int(head["offset"]), int(head["total"])
        self.tgid, self.tid = int(head["tgid"]), int(head["tid"])
        self.ports = _ports(head)
        if offset == 0:
            self.settle(sent)
            if int(head["skipped"]):
                self._feed(ns, b"", int(head["skipped"]), sent)
            if not data:
                self._moved_unseen(ns, total, sent)
                return
        else:
            _, expected, _ = self._unfinished.get(sent, (ns, 0, total))
            if offset > expected:
                self._feed(ns, b"", offset - expected, sent)
        end = offset + len(data)
        self._unfinished[sent] = (ns, end, total)
        self._feed(ns, data, 0, sent)
        if end >= total:
            del self._unfinished[sent]

    def skim(self, head: TextHead, data: memoryview) -> bool:
        """Keeps a small write that came whole while nothing else is of interest; False if it is
        to be taken."""
        whole = head.length == head.total < SMALL_BYTES and not head.skipped
        if (
            not whole
            or True in self._unfinished
            or not self._tail.keep(head.start_ns, bytes(data), 0)
        ):
            return False
        self.tgid, self.tid = head.tgid, head.tid
        return True

    def settle(self, sent: bool) -> None:
        """The rest of an unfinished transfer was not copied: say so to the parser."""
        ns, end, total = self._unfinished.pop(sent, (0, 0, 0))
        if total > end:
            self._feed(ns, b"", total - end, sent)

    def _moved_unseen(self, ns: int, count: int, sent: bool) -> None:
        self.read_tail(ns)
        if sent:
            self.connection.sent_unseen(ns, count)
        else:
            self.connection.received_unseen(ns, count)

    def _feed(self, ns: int, data: bytes, missing: int, sent: bool) -> None:
        if sent and self.connection.quiet and self._tail.keep(ns, data, missing):
            return
        self.read_tail(ns)
        if sent:
            self.connection.sent(ns, data, missing)
        else:
            self.connection.received(ns, data, missing)

    def read_tail(self, ns: int) -> None:
        """What was kept is read now: something follows it, or nothing will."""
        for at, data, missing in self._tail.take(ns):
            self.connection.sent(at, data, missing)

    def close(self, ns: int) -> None:
        """The connection is gone."""
        self.settle(True)
        self.settle(False)
        self.read_tail(ns)
        self.connection.closed(ns)
        self.left(None)

    def give_up(self, ns: int) -> None:
        """Reads no further, and lets go of what is held."""
        self.quiet_turn = None
        self.read_tail(ns)
        self.connection.give_up(ns)
        self.left(None)

    @property
    def tail_bytes(self) -> int:
        return self._tail.size_bytes

    @property
    def buffered_bytes(self) -> int:
        return self.connection.buffered_bytes + self._tail.size_bytes


class RequestTap:
    """All server-side connections of the target.

    `on_end` gets every finished exchange, `on_progress` those that start, get headers or the first
    token; `set_quiet(socket, turn)` is asked for once a first token was seen. However many
    connections there are and whatever they send, at most `MAX_BUFFERED_BYTES` are held.
    """

    def __init__(
        self,
        on_end: Callable[[Seen], None],
        on_progress: Callable[[Seen], None],
        set_quiet: Callable[[int, int], None],
    ) -> None:
        self.on_end = on_end
        self.on_progress = on_progress
        self._set_quiet = set_quiet
        self._open: dict[int, _Tapped] = {}
        self._buffered_bytes = 0

    def take(self, head: Any, data: bytes, sent: bool, held: bool = False) -> None:
        """A piece of `struct text` of kind RECEIVED, SENT, or SENT_HELD (`held`)."""
        socket, ns = int(head["key"]), int(head["start_ns"])
        tapped = self._open.get(socket)
        if tapped is not None and tapped.ports not in ((0, 0), _ports(head)):
            # The kernel gave the address to another connection; the end of the first was lost.
            self.closed(socket, ns)
            tapped = None
        if tapped is None:
            if len(self._open) >= MAX_CONNECTIONS:  # the kernel has forgotten the oldest, too
                self.closed(next(iter(self._open)), ns)
            tapped = self._open[socket] = _Tapped(self, socket)
        before = tapped.buffered_bytes
        tapped.take(head, data, sent, held)
        if self._buffered_bytes + tapped.buffered_bytes - before > MAX_BUFFERED_BYTES:
            tapped.give_up(ns)
        self._buffered_bytes += tapped.buffered_bytes - before
        turn = int(head["flags"])
        tapped.quiet_turn = turn if tapped.connection.quiet else None
        if tapped.quiet_turn is not None and tapped.asked_turn != turn:
            tapped.asked_turn = turn
            self._set_quiet(socket, turn)

    def skim(self, head: TextHead, data: memoryview) -> bool:
        """Whether a piece is dealt with: one of an answer whose first token was seen, which comes
        before the kernel is quiet. As `take`, at a tenth of its cost."""
        tapped = self._open.get(head.key)
        if (
            tapped is None
            or tapped.quiet_turn != head.flags
            or head.kind != TextKind.SENT
            or tapped.ports != (head.dev >> 16, head.dev & 0xFFFF)
            or self._buffered_bytes + head.total > MAX_BUFFERED_BYTES
        ):
            return False
        before = tapped.tail_bytes
        kept = tapped.skim(head, data)
        self._buffered_bytes += tapped.tail_bytes - before
        return kept

    def left(self, socket: int, ns: int) -> None:
        """What the kernel had held back on this connection left at `ns`."""
        tapped = self._open.get(socket)
        if tapped is not None:
            tapped.left(ns)

    def closed(self, socket: int, ns: int) -> None:
        """The connection is gone, from either side."""
        tapped = self._open.pop(socket, None)
        if tapped is not None:
            self._buffered_bytes -= tapped.buffered_bytes
            tapped.close(ns)

    def process_gone(self, tgid: int, ns: int) -> None:
        """A process has exited: so have its Unix sockets, which show no state of their own."""
        gone = [t for t in self._open.values() if t.tgid == tgid and t.ports == (0, 0)]
        for tapped in gone:
            self.closed(tapped.socket, ns)

    def pending(self) -> list[Seen]:
        """Exchanges that have not ended, as they stand."""
        return [seen for tapped in self._open.values() for seen in tapped.pending()]
