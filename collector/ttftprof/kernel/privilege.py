"""Root is for loading probes. Once they are attached, what is not needed any more is given up.

What stays: attaching marks to libraries that the target maps later, and for `watch` arming all
probes again (CAP_BPF, CAP_PERFMON), and looking at processes of other users and their files
(CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH). Under sudo the recorder goes on as the person who called it.
There is no way back.

Constants: include/uapi/linux/capability.h and prctl.h.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from ttftprof.caller import become, sudo_caller
from ttftprof.kernel.permission import CAPABILITIES, effective_bits, names_of
from ttftprof.parent import still_ending_with_parent

KEPT = ("CAP_BPF", "CAP_PERFMON", "CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH")
# What children need that look at the target (py-spy)
INHERITED = ("CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH")
_VERSION_3 = 0x20080522
_SET_KEEPCAPS, _CAPBSET_DROP, _SET_NO_NEW_PRIVS, _CAP_AMBIENT, _AMBIENT_RAISE = 8, 24, 38, 47, 2


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Data(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


_libc = ctypes.CDLL(None, use_errno=True)


def drop(folder: Path | None, ends_command: bool = False) -> None:
    """Keeps `KEPT` of what this process has, and leaves root to whoever called sudo.

    `folder` is where recordings will be written, None if nowhere: a caller who may not write there
    does not become their owner, and a root that may not without CAP_DAC_OVERRIDE keeps that.
    `ends_command`: a command that was started will be sent signals. Does nothing where nothing is
    left to be given up. To be called while the process has one thread, for capabilities belong to
    threads. Raises OSError.
    """
    kept = set(KEPT)
    if "CAP_BPF" not in held():
        kept.add("CAP_SYS_ADMIN")  # which stands for it, in what started this process
    caller = sudo_caller()
    if caller is not None and not _may_write(folder, caller.uid, caller.gid):
        caller = None
    if caller is None:
        kept |= {"CAP_KILL"} if ends_command else set()
        kept |= set() if _may_write(folder, os.geteuid(), os.getegid()) else {"CAP_DAC_OVERRIDE"}
        if not _held() & ~_bits(kept):
            return
    held_bits = _held() & _bits(kept)
    inherited = held_bits & _bits(INHERITED)
    _check(_libc.prctl(_SET_KEEPCAPS, 1, 0, 0, 0))
    _bound(held_bits)
    if caller is not None:
        with still_ending_with_parent():
            become(caller)
    _set(held_bits, inherited)
    for number in _numbers(inherited):
        _check(_libc.prctl(_CAP_AMBIENT, _AMBIENT_RAISE, number, 0, 0))
    _check(_libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def alone_with(kept_fds: Iterable[int], name: str = "CAP_SYS_ADMIN") -> None:
    """A helper that was forked, of one thread, is left with these descriptors and one capability,
    and can get no other. It holds nothing else of the recorder's, whose links would outlive it, and
    signals are the recorder's."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    begin = 0
    for fd in sorted({*kept_fds, os.sysconf("SC_OPEN_MAX")}):
        os.closerange(begin, fd)
        begin = fd + 1
    bits = _held() & _bits([name])
    _bound(bits)
    _set(bits, 0)
    _check(_libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def held() -> set[str]:
    """The names, of those in `CAPABILITIES`, of what this thread may use."""
    return names_of(_held())


def _held() -> int:
    return effective_bits(Path("/proc/thread-self/status").read_text())


def _may_write(folder: Path | None, uid: int, gid: int) -> bool:
    """Whether that user may make files in `folder`, judged by its mode."""
    if folder is None:
        return True
    status = folder.stat()
    if status.st_uid == uid:
        return bool(status.st_mode & 0o300 == 0o300)
    if status.st_gid == gid:
        return bool(status.st_mode & 0o030 == 0o030)
    return bool(status.st_mode & 0o003 == 0o003)


def _bits(names: Iterable[str]) -> int:
    return sum(1 << CAPABILITIES[name] for name in names)


def _numbers(bits: int) -> list[int]:
    return [number for number in range(bits.bit_length()) if bits & 1 << number]


def _bound(kept: int) -> None:
    """Nothing executed later can get more than `kept`. The list ends at the kernel's last one."""
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    for number in range(last + 1):
        if not kept & 1 << number:
            _check(_libc.prctl(_CAPBSET_DROP, number, 0, 0, 0))


def _set(kept: int, inherited: int) -> None:
    header = _Header(_VERSION_3, 0)
    words = [(kept >> shift & 0xFFFF_FFFF, inherited >> shift & 0xFFFF_FFFF) for shift in (0, 32)]
    data = (_Data * 2)(*(_Data(own, own, passed) for own, passed in words))
    _check(_libc.capset(ctypes.byref(header), data))


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
