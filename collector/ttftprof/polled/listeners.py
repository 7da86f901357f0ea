"""Which TCP sockets listen, asked of the kernel alone.

/proc/net/tcp lists every connection of the machine, which takes milliseconds; the kernel's own
question for the sockets of one state (sock_diag(7)) takes microseconds.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from ttftprof.sources.processes import PROC

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY, _DONE, _ERROR = 20, 3, 2
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_TCP_LISTEN = 10
_HEAD = struct.Struct("=IHHII")  # struct nlmsghdr
_QUESTION = struct.Struct("=BBBxI48x")  # struct inet_diag_req_v2
_ANSWER = struct.Struct("=4x2s62xI")  # of struct inet_diag_msg: the port, the inode
_BUFFER = 64 << 10


def listeners(pid: int) -> dict[int, int]:
    """{inode: port} of the TCP sockets that listen in a process's network namespace."""
    try:
        if (PROC / str(pid) / "ns/net").readlink() == (PROC / "self/ns/net").readlink():
            return {
                inode: port
                for family in (socket.AF_INET, socket.AF_INET6)
                for inode, port in _asked(family)
            }
        return _listed(pid)
    except OSError:
        return {}


def _asked(family: int) -> Iterator[tuple[int, int]]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        question = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 1 << _TCP_LISTEN)
        length = _HEAD.size + len(question)
        kernel.send(_HEAD.pack(length, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0) + question)
        while True:
            answer = kernel.recv(_BUFFER)
            at = 0
            while at < len(answer):
                length, kind, *_ = _HEAD.unpack_from(answer, at)
                if kind in (_DONE, _ERROR):
                    return
                port, inode = _ANSWER.unpack_from(answer, at + _HEAD.size)
                yield inode, int.from_bytes(port, "big")
                at += (length + 3) & ~3


def _listed(pid: int) -> dict[int, int]:
    """The same by proc(5), in a namespace that is not ours."""
    found: dict[int, int] = {}
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        for line in path.read_bytes().splitlines()[1:] if path.exists() else ():
            words = line.split(None, 10)
            if len(words) > 9 and words[3] == b"0A":
                found[int(words[9])] = int(words[1].rpartition(b":")[2], 16)
    return found
