"""Which connections are the target's own: by ports, through translation, by Unix sockets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ttftprof.connections import OwnConnections
from ttftprof.events import EVENT, Kind, Records

FRONT, RUNNER, NEAR, CLOSED = 8080, 9001, 40_001, 7


def events(*rows: tuple[Kind, int, dict[str, int]]) -> Records:
    records = np.zeros(len(rows), EVENT)
    for record, (kind, ns, fields) in zip(records, rows, strict=True):
        record["kind"], record["start_ns"] = kind, ns
        for name, value in fields.items():
            record[name] = value
    return records


def tcp(kind: Kind, near: int, far: int) -> tuple[Kind, int, dict[str, int]]:
    return kind, 1, {"a": near << 16 | far}


def known(*rows: Any, served: tuple[int, ...] = (FRONT, RUNNER)) -> OwnConnections:
    own = OwnConnections(served)
    own.learn(events(*rows))
    return own


@pytest.mark.parametrize("kind", [Kind.CONNECT, Kind.FORWARD])
def test_what_a_front_opens_to_its_runner_is_its_own(kind: Kind) -> None:
    own = known(tcp(kind, NEAR, RUNNER))
    assert own.has(RUNNER, NEAR)
    assert not own.has(RUNNER, NEAR + 1)


def test_a_stranger_may_come_from_the_same_port_number() -> None:
    assert not known(tcp(Kind.CONNECT, NEAR, RUNNER)).has(FRONT, NEAR)


def test_a_far_port_that_nobody_serves_was_translated() -> None:
    own = known(tcp(Kind.CONNECT, NEAR, 31_000))
    assert own.has(RUNNER, NEAR)
    own.serve(31_000)
    assert not own.has(RUNNER, NEAR)


def test_a_port_is_served_once_it_is_listened_to() -> None:
    own = known(tcp(Kind.CONNECT, NEAR, 31_000), (Kind.LISTEN, 2, {"a": 31_000}))
    assert not own.has(RUNNER, NEAR)


def test_it_is_learned_in_any_order_and_in_parts() -> None:
    own = OwnConnections()
    own.learn(events())
    assert not own.has(RUNNER, NEAR)
    own.learn(events((Kind.LISTEN, 1, {"a": RUNNER}), tcp(Kind.FORWARD, NEAR, RUNNER)))
    assert own.has(RUNNER, NEAR)


def unix(kind: Kind, ns: int, socket: int) -> tuple[Kind, int, dict[str, int]]:
    if kind == Kind.CONN:
        return kind, ns, {"ino": socket, "flags": CLOSED}
    return kind, ns, {"b": socket}


def test_a_unix_socket_is_its_own_until_it_is_closed() -> None:
    own = known(unix(Kind.CONNECT, 10, 5), unix(Kind.CONN, 100, 5))
    assert own.has(0, 0, 5, 11)
    assert own.has(0, 0, 5, 9)  # read before the front's call had returned
    assert not own.has(0, 0, 5, 101)  # the address is another's now
    assert not own.has(0, 0, 6, 11)


def test_a_reused_unix_socket_may_be_its_own_again() -> None:
    own = known(
        unix(Kind.CONN, 100, 5),
        unix(Kind.FORWARD, 110, 5),
        unix(Kind.CONN, 200, 5),
    )
    assert [own.has(0, 0, 5, ns) for ns in (50, 120, 210)] == [False, True, False]
