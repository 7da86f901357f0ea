"""Who called sudo: what root makes for them is theirs, and what they start does not run as root."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_IDS = 2**32 - 1  # the last one means "leave as it is" to the kernel


@dataclass(frozen=True, slots=True)
class Caller:
    """`name` is empty where the machine knows none for the number."""

    uid: int
    gid: int
    name: str

    @property
    def groups(self) -> list[int]:
        return os.getgrouplist(self.name, self.gid) if self.name else [self.gid]


def sudo_caller() -> Caller | None:
    """By sudo's environment; None for a real root, an ordinary user, or where it makes no sense."""
    uid = _number(os.environ.get("SUDO_UID", ""))
    if os.geteuid() != 0 or not uid:
        return None
    try:
        entry = pwd.getpwuid(uid)
        name, own_gid = entry.pw_name, entry.pw_gid
    except KeyError:
        name, own_gid = "", uid
    gid = _number(os.environ.get("SUDO_GID", ""))
    return Caller(uid, own_gid if gid is None else gid, name)


def _number(text: str) -> int | None:
    if not (text.isascii() and text.isdecimal()):
        return None
    return number if (number := int(text[:11])) < _IDS else None


def become(caller: Caller) -> None:
    """This process, for good. Raises OSError."""
    os.setgroups(caller.groups)
    os.setresgid(caller.gid, caller.gid, caller.gid)
    os.setresuid(caller.uid, caller.uid, caller.uid)


@contextmanager
def as_caller() -> Iterator[None]:
    """What is done to files in the block is allowed only if it is to whoever called sudo."""
    caller = sudo_caller()
    if caller is None:
        yield
        return
    groups, gid = os.getgroups(), os.getegid()
    os.setgroups(caller.groups)
    os.setegid(caller.gid)
    os.seteuid(caller.uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(gid)
        os.setgroups(groups)
