"""Files that are read past the page cache though nobody asked for O_DIRECT.

Pure. A FUSE daemon may have it so (direct_io: mergerfs without `cache.files`), and so may a mount
(SMB and 9P with `cache=none`); ZFS answers reads from its own cache, DAX from memory itself. Not a
page of such a file is ever in the page cache, so what was read of it did not come from there.
"""

from __future__ import annotations

import numpy as np

from ttftprof import remote
from ttftprof.events import Records

# Of a file whose pages come and go in the page cache, one of these moves.
_PAGES = ("cached_pages", "added_pages", "foreign_pages", "evicted_pages", "faults", "map_arounds")


def is_read_past(rows: Records, looks: Records) -> bool:
    """Whether plain reads of a file never met the page cache. `rows`: its counters; `looks`: what
    was recorded as it was opened, or found open, with the pages that were cached then in `b`."""
    if not len(rows) or not len(looks) or looks["b"].any():
        return False
    read = rows["read_bytes"][-1] > rows["direct_bytes"][-1]
    return bool(read) and not any(rows[counter].any() for counter in _PAGES)


def as_direct(rows: Records) -> Records:
    """The counters of such a file as if it had been opened with O_DIRECT: all of it went past."""
    found: Records = rows.copy()
    found["direct_bytes"] = found["read_bytes"]
    return found


def is_answered(asked: Records, dev: int, ino: int) -> bool:
    """Whether a server or a daemon gave bytes of a file, as the remote reads tell."""
    return bool(np.any(remote.on_file(asked, dev, ino)["got_bytes"] > 0))
