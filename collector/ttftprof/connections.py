"""Which connections are the target's own: a front and its runners talk over HTTP too.

One rule for the live line, which learns the connections one by one, and for the timeline, which has
them all. Ports are seen from whoever opened the connection: near, far. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ttftprof.events import TCP_CLOSE, Kind, Records

_OPENED = (Kind.CONNECT, Kind.FORWARD)


class OwnConnections:
    """The connections that processes of the target opened.

    A near port alone says little: another host, or another destination, gives out the same numbers.
    The far port tells too, unless nothing of the target serves it: then it was translated on the
    way. A Unix socket has no ports: there the far socket tells, until it is closed.
    """

    def __init__(self, served: Iterable[int] = ()) -> None:
        """`served`: ports that the target is known to listen on."""
        self._served = set(served)
        self._far_ends: dict[int, set[int]] = {}
        self._opened: dict[int, list[int]] = {}  # Unix: far socket -> when, oldest first
        self._closed: dict[int, list[int]] = {}

    def learn(self, events: Records) -> None:
        """Takes what these records tell of connections, in any order."""
        told = events[_of_kinds(events, (*_OPENED, Kind.LISTEN, Kind.CONN))]
        for event in told:
            kind, ports, ns = int(event["kind"]), int(event["a"]), int(event["start_ns"])
            if kind == Kind.LISTEN:
                self._served.add(ports)
            elif kind == Kind.CONN:
                self.serve(ports >> 16)
                if not ports and int(event["flags"]) == TCP_CLOSE:
                    _insert(self._closed, int(event["ino"]), ns)
            elif ports >> 16:
                self._far_ends.setdefault(ports >> 16, set()).add(ports & 0xFFFF)
            elif int(event["b"]):
                _insert(self._opened, int(event["b"]), ns)

    def serve(self, port: int) -> None:
        """The target serves this port."""
        self._served.add(port)

    def has(self, local_port: int, remote_port: int, socket: int = 0, ns: int = 0) -> bool:
        """Whether a server's connection is one, by its ports, or by its socket at a moment."""
        if not local_port and not remote_port:
            return self._has_unix(socket, ns)
        far_ends = self._far_ends.get(remote_port, set())
        return local_port in far_ends or bool(far_ends - self._served)

    def _has_unix(self, socket: int, ns: int) -> bool:
        """Opened before its first request was over, and not closed in between."""
        opened = self._opened.get(socket, ())
        closed = [c for c in self._closed.get(socket, ()) if c <= ns]
        ended = [c for c in self._closed.get(socket, ()) if c > ns]
        return any((not closed or o > closed[-1]) and (not ended or o < ended[0]) for o in opened)


def _of_kinds(events: Records, kinds: Iterable[Kind]) -> Any:
    wanted = events["kind"] == Kind.NONE
    for kind in kinds:
        wanted |= events["kind"] == kind
    return wanted


def _insert(stamps: dict[int, list[int]], socket: int, ns: int) -> None:
    known = stamps.setdefault(socket, [])
    known.append(ns)
    known.sort()
