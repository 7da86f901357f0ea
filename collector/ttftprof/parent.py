"""A child that does not outlive the process that started it, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2  # include/uapi/linux/prctl.h
_LIBC = ctypes.CDLL(None)


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Runs in the child: the kernel sends it `number` when its parent is gone."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


@contextmanager
def still_ending_with_parent() -> Iterator[None]:
    """A change of user within makes the kernel forget `end_with_parent`; it holds on, here."""
    asked, parent = ctypes.c_int(), os.getppid()
    _LIBC.prctl(_PR_GET_PDEATHSIG, ctypes.byref(asked), 0, 0, 0)
    yield
    if asked.value:
        end_with_parent(signal.Signals(asked.value))
        if os.getppid() != parent:  # it went meanwhile
            os.kill(os.getpid(), asked.value)
