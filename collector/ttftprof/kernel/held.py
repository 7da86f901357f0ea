"""The regular files that a process has mapped or open, taken hold of without opening them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def held_files(tgid: int) -> Iterator[tuple[int, bool]]:
    """(a descriptor that only names the file, whether it is open), one after the other.

    The descriptor is closed when the next is asked for. A process that ends meanwhile has no more;
    mapped files are shown to CAP_SYS_ADMIN only.
    """
    for folder, is_open in (("map_files", False), ("fd", True)):
        entries: list[Path] = []
        with suppress(OSError):
            entries = sorted(Path(f"/proc/{tgid}/{folder}").iterdir())
        for entry in entries:
            with suppress(OSError):
                fd = os.open(entry, os.O_PATH | os.O_CLOEXEC)
                try:
                    if stat.S_ISREG(os.fstat(fd).st_mode):
                        yield fd, is_open
                finally:
                    os.close(fd)
