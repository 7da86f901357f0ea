"""What each probe costs on this machine: the kernel's own statistics while a small program runs.

The program does a little of everything a server does. It runs twice: as the target, which is what
a recording adds to a server, and as a stranger, which is what it adds to everybody else. Other
programs of the machine run meanwhile; they are strangers as well, and only change how often.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ttftprof.kernel import libbpf
from ttftprof.kernel.session import ProbeSession, Settings

_FILE_BYTES = 4 << 20
_ROUNDS = 20
_ECHOES = 200  # round trips of a message between two threads, in each round
_GRACE_S = 0.2  # for what the program's end still causes


@dataclass(frozen=True, slots=True)
class Cost:
    """A program of the kernel side: how often it ran, and its mean time in ns (None: never ran).

    What a program does after it jumped to another one counts as the first one's.
    """

    name: str
    target_runs: int
    target_ns: float | None
    stranger_runs: int
    stranger_ns: float | None


def measure() -> list[Cost]:
    """Loads every probe, runs the program twice, takes all away again; the dearest come first.

    Takes about two seconds. Raises `TtftprofError` or `BpfError` where nothing can be loaded.
    """
    session = ProbeSession(Settings(event_ring_bytes=1 << 20, text_ring_bytes=1 << 20))
    try:
        session.load()
        session.attach()
        stranger = _counted(session, is_target=False)
        target = _counted(session, is_target=True)
    finally:
        session.close()
    costs = [
        Cost(name, target[name][0], _mean(*target[name]), runs, _mean(runs, ns))
        for name, (runs, ns) in stranger.items()
    ]
    return sorted(costs, key=lambda cost: -(cost.target_ns or 0) * cost.target_runs)


def _mean(runs: int, ns: int) -> float | None:
    return ns / runs if runs else None


def _counted(session: ProbeSession, is_target: bool) -> dict[str, tuple[int, int]]:
    """(runs, ns) of every program while the small program ran."""
    before = session.program_counts()
    statistics = libbpf.enable_stats()
    try:
        with _held_child() as (pid, go):
            if is_target:
                session.seed([pid])
            go()
        time.sleep(_GRACE_S)
    finally:
        os.close(statistics)
    after = session.program_counts()
    return {
        name: (own.runs - before[name].runs, own.run_ns - before[name].run_ns)
        for name, own in after.items()
    }


@contextmanager
def _held_child() -> Iterator[tuple[int, Callable[[], None]]]:
    """The small program as a child that waits to be let go; its end is waited for."""
    gate_r, gate_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(gate_w)
            os.read(gate_r, 1)
            _exercise()
            status = 0
        finally:
            os._exit(status)
    os.close(gate_r)

    def go() -> None:
        os.write(gate_w, b"g")

    try:
        yield pid, go
    finally:
        os.close(gate_w)
        os.waitpid(pid, 0)


def _exercise() -> None:
    """Reads, maps and faults a file, takes memory, makes children, and serves a connection."""
    with tempfile.TemporaryFile() as file, _echo() as connection:
        file.write(bytes(_FILE_BYTES))
        file.flush()
        for _ in range(_ROUNDS):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for at in range(0, _FILE_BYTES, 1 << 16):
                os.pread(file.fileno(), 1 << 16, at)
            with mmap.mmap(file.fileno(), _FILE_BYTES, prot=mmap.PROT_READ) as mapped:
                sum(mapped[at] for at in range(0, _FILE_BYTES, mmap.PAGESIZE))
            with mmap.mmap(-1, _FILE_BYTES) as memory:
                memory.write(bytes(_FILE_BYTES))
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
            for _ in range(_ECHOES):
                connection.sendall(b"x")
                connection.recv(1)


@contextmanager
def _echo() -> Iterator[socket.socket]:
    """A connection over loopback to a thread that sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()

    def serve() -> None:
        while piece := server.recv(64):
            server.sendall(piece)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield client
    finally:
        client.shutdown(socket.SHUT_WR)
        thread.join()
        client.close()
        server.close()
