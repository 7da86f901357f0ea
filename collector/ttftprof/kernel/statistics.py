"""Short windows in which the kernel times every BPF program, which costs two clock reads a run.

Switching them on takes CAP_SYS_ADMIN, so a small process keeps that, and nothing else, when the
recorder gives it up. It ends with the recorder, however that ends.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress

from ttftprof.kernel import libbpf, privilege

WINDOW_MS = 50
EVERY_MS = 2_000
ALL_OF_WINDOWS = (WINDOW_MS + EVERY_MS) / WINDOW_MS  # times what was counted is what was spent


class Windows:
    """From `begin` to `close`, a window at once and every few seconds."""

    def __init__(self) -> None:
        """To be made while this process has one thread."""
        end_r, self._end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                privilege.alone_with([end_r])
                _open_windows(end_r)
            except (OSError, libbpf.BpfError):
                pass  # the recording tells no costs
            finally:
                os._exit(0)
        os.close(end_r)

    def begin(self) -> None:
        with suppress(BrokenPipeError):  # without it no costs are told
            os.write(self._end, b"b")

    def close(self) -> None:
        os.close(self._end)
        os.waitpid(self._pid, 0)


def _open_windows(end: int) -> None:
    if not os.read(end, 1):
        return
    poll = select.poll()
    poll.register(end)
    while True:
        statistics = libbpf.enable_stats()
        if poll.poll(WINDOW_MS):
            return
        os.close(statistics)
        if poll.poll(EVERY_MS):
            return
