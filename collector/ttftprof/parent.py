"""A child that does not outlive the process that started it, however that ends."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h
_LIBC = ctypes.CDLL(None)


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Runs in the child: the kernel sends it `number` when its parent is gone."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
