"""Probes of modules that are loaded while recording runs, as a mount of a share does.

A module's types are given out to CAP_SYS_ADMIN only, so a small process keeps that, and nothing
else, when the recorder gives it up. What it attached it hands over, and it ends with the recorder,
however that ends.
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ttftprof.clock import now_ns
from ttftprof.errors import TtftprofError
from ttftprof.kernel import privilege

LOOK_EVERY_MS = 100
_MESSAGE_BYTES, _DESCRIPTORS = 1 << 16, 128


@dataclass(frozen=True, slots=True)
class Attached:
    """A program that was attached late: its descriptor, and that of the link that holds it."""

    name: str
    program_fd: int
    link_fd: int


class Latecomers:
    """Waits for modules from when it is made until `close`."""

    def __init__(
        self,
        modules: Iterable[str],
        attach: Callable[[], Sequence[Attached]],
        kept_fds: Iterable[int],
        with_types: bool = True,
    ) -> None:
        """`attach` attaches what can be had now and was not before; it may use `kept_fds` only.
        `with_types`: a module is of use only if it carries them. To be made while this process has
        one thread."""
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            try:
                privilege.alone_with([theirs.fileno(), *kept_fds])
                _wait(set(modules), attach, theirs, with_types)
            except (OSError, TtftprofError):
                pass  # the probe stays as absent as it was
            finally:
                os._exit(0)
        theirs.close()
        self._ours.setblocking(False)

    def take(self) -> tuple[int, list[Attached]]:
        """(when, what) was attached since the last call; (0, []) if nothing was."""
        try:
            data, fds, _, _ = socket.recv_fds(self._ours, _MESSAGE_BYTES, _DESCRIPTORS)
        except OSError:
            return 0, []
        if not data:  # it has ended
            return 0, []
        told = json.loads(data)
        pairs = zip(fds[::2], fds[1::2], strict=True)
        return int(told["ns"]), [
            Attached(name, *pair) for name, pair in zip(told["programs"], pairs, strict=True)
        ]

    def close(self) -> None:
        self._ours.close()
        os.waitpid(self._pid, 0)


def is_loaded(module: str, with_types: bool = True, sysfs: Path = Path("/sys")) -> bool:
    """Whether a module has been initialised, and carries types."""
    with suppress(OSError):
        live = (sysfs / "module" / module / "initstate").read_text() == "live\n"
        return live and (not with_types or (sysfs / "kernel/btf" / module).exists())
    return False


def _wait(
    modules: set[str],
    attach: Callable[[], Sequence[Attached]],
    end: socket.socket,
    with_types: bool,
) -> None:
    poll = select.poll()
    poll.register(end, select.POLLIN)
    while modules and not poll.poll(LOOK_EVERY_MS):
        came = {module for module in modules if is_loaded(module, with_types)}
        modules -= came
        if came and (attached := attach()):
            _hand_over(attached, end)
    end.recv(1)  # the links are the recorder's from here on


def _hand_over(attached: Sequence[Attached], end: socket.socket) -> None:
    told = {"ns": now_ns(), "programs": [a.name for a in attached]}
    fds = [fd for a in attached for fd in (a.program_fd, a.link_fd)]
    socket.send_fds(end, [json.dumps(told).encode()], fds)
    for fd in fds:
        os.close(fd)
