"""Events that some kernels open for CAP_SYS_ADMIN alone, and not for CAP_PERFMON: Debian's and
Ubuntu's, where kernel.perf_event_paranoid is above 2, as it is there unless somebody sets it.

They are needed while recording runs, too: for calls of a library that is mapped then, where the
kernel cannot put many into one link (before 6.6), and for ticks of a CPU that comes on. So a small
process keeps that capability, and nothing else, when the recorder gives it up, and opens what it is
asked for. It ends with the recorder, however that ends.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path

from ttftprof.kernel import libbpf, privilege
from ttftprof.kernel.libbpf import BpfError

_MESSAGE_BYTES = 4096
_PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")
_MOST_OF_THE_KERNELS_OWN = 2


def are_for_admin_only() -> bool:
    """Whether this kernel may refuse them to CAP_PERFMON."""
    try:
        return int(_PARANOID.read_text()) > _MOST_OF_THE_KERNELS_OWN
    except (OSError, ValueError):
        return False


class Opener:
    """Opens events from when it is made until `close`, with what its maker has then. Each call
    gives a descriptor or raises `BpfError`."""

    def __init__(self) -> None:
        """To be made while this process has one thread."""
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            try:
                privilege.alone_with([theirs.fileno()])
                _serve(theirs)
            except OSError:
                pass  # the recorder is told that it is gone
            finally:
                os._exit(0)
        theirs.close()

    def clock(self, cpu: int, hz: int) -> int:
        """As `libbpf.open_clock_event`."""
        return self._ask([], cpu=cpu, hz=hz)

    def uprobe(self, path: str, offset: int, on_return: bool) -> int:
        """As `libbpf.open_uprobe_event`; the path is the recorder's to look up."""
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            raise BpfError(f"uprobe in {path}", error.errno or 0) from error
        try:
            return self._ask([fd], offset=offset, on_return=on_return)
        finally:
            os.close(fd)

    def _ask(self, fds: list[int], **what: int) -> int:
        try:
            socket.send_fds(self._ours, [json.dumps(what).encode()], fds)
            data, opened, _, _ = socket.recv_fds(self._ours, _MESSAGE_BYTES, 1)
        except OSError as error:
            raise BpfError("perf_event_open", error.errno or 0) from error
        if not opened:
            raise BpfError("perf_event_open", int(data or errno.EPIPE))
        return opened[0]

    def close(self) -> None:
        self._ours.close()
        os.waitpid(self._pid, 0)


def _serve(end: socket.socket) -> None:
    while True:
        data, fds, _, _ = socket.recv_fds(end, _MESSAGE_BYTES, 1)
        if not data:
            return
        try:
            event = _opened(json.loads(data), fds)
        except BpfError as error:
            end.send(str(error.errno).encode())
        else:
            socket.send_fds(end, [b"0"], [event])
            os.close(event)
        finally:
            for fd in fds:
                os.close(fd)


def _opened(what: dict[str, int], fds: list[int]) -> int:
    if fds:
        path = f"/proc/self/fd/{fds[0]}"
        return libbpf.open_uprobe_event(path, what["offset"], bool(what["on_return"]))
    return libbpf.open_clock_event(what["cpu"], what["hz"])
