"""Which connections are the target's own: a front and its runners talk over HTTP too.

One rule for the live line, which learns the connections one by one, and for the timeline, which has
them all. Ports are seen from whoever opened the connection: near, far. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Any

from ttftprof.events import Kind, Records

_OPENED = (Kind.CONNECT, Kind.FORWARD)
_TCP_CLOSE = 7
# A server may be long in taking a connection, or reading a request; a call that made one returns
# soon after that has arrived.
_BEFORE_NS, _AFTER_NS = 60_000_000_000, 1_000_000_000


class OwnConnections:
    """The connections that processes of the target opened.

    A near port alone says little: another host, or another destination, gives out the same numbers,
    and so does this host again once it is free. So the far port has to be the server's, or one that
    nothing of the target serves (then it was translated on the way), and the connection was opened,
    or asked something, when the server took it, or was asked. A Unix socket has no ports: there the
    far socket tells, until it is closed.
    """

    def __init__(self, served: Iterable[int] = ()) -> None:
        """`served`: ports that the target is known to listen on."""
        self._served = set(served)
        self._called: dict[int, dict[int, list[int]]] = {}  # near -> far -> when, ascending
        self._accepted: dict[int, list[int]] = {}  # a server's socket -> when
        self._opened: dict[int, list[int]] = {}  # Unix: far socket -> when
        self._closed: dict[int, list[int]] = {}

    def learn(self, events: Records) -> None:
        """Takes what these records tell of connections, in any order."""
        told = events[_of_kinds(events, (*_OPENED, Kind.LISTEN, Kind.ACCEPT, Kind.CONN))]
        for event in told:
            kind, ports, ns = int(event["kind"]), int(event["a"]), int(event["start_ns"])
            near, far, socket = ports >> 16, ports & 0xFFFF, int(event["ino"])
            if kind == Kind.LISTEN:
                self._served.add(ports)
            elif kind == Kind.ACCEPT:
                insort(self._accepted.setdefault(socket, []), ns)
            elif kind == Kind.CONN:
                self.serve(near)
                if not ports and int(event["flags"]) == _TCP_CLOSE:
                    insort(self._closed.setdefault(socket, []), ns)
            elif near:
                insort(self._called.setdefault(near, {}).setdefault(far, []), ns)
            elif int(event["b"]):
                insort(self._opened.setdefault(int(event["b"]), []), ns)

    def serve(self, port: int) -> None:
        """The target serves this port."""
        self._served.add(port)

    def forget_before(self, ns: int) -> None:
        """What was opened or asked by then tells nothing any more: the memory of a long run."""
        for calls in self._called.values():
            for far, stamps in list(calls.items()):
                del stamps[: bisect_left(stamps, ns - _BEFORE_NS)]
                if not stamps:
                    del calls[far]
        self._called = {near: calls for near, calls in self._called.items() if calls}
        for stamps in self._accepted.values():
            del stamps[: bisect_left(stamps, ns)]
        self._accepted = {socket: stamps for socket, stamps in self._accepted.items() if stamps}

    def has(self, local_port: int, remote_port: int, socket: int = 0, ns: int = 0) -> bool:
        """Whether a server's connection is one: by its ports and socket, when it was asked."""
        if not local_port and not remote_port:
            return self._has_unix(socket, ns)
        accepted = [a for a in self._accepted.get(socket, ()) if a <= ns + _AFTER_NS]
        moments = [ns, *accepted[-1:]]
        return any(
            _is_near(stamps, moment)
            for far, stamps in self._called.get(remote_port, {}).items()
            if far == local_port or far not in self._served
            for moment in moments
        )

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


def _is_near(stamps: list[int], moment: int) -> bool:
    """Whether one of them may be of what the server saw at a moment."""
    first = bisect_left(stamps, moment - _BEFORE_NS)
    return first < len(stamps) and stamps[first] <= moment + _AFTER_NS
