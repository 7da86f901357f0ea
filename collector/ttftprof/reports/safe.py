"""Foreign text made harmless (`plain`) and short enough for a terminal. Widths are in cells."""

from __future__ import annotations

from rich.cells import cell_len

from ttftprof.plain import ELLIPSIS, plain

__all__ = ["clip", "clip_middle", "clip_path", "plain"]


def clip(text: str, width: int) -> str:
    """At most `width` cells, the end replaced by `…` if it was longer."""
    if cell_len(text) <= width:
        return text
    return _head(text, width - 1) + ELLIPSIS if width > 0 else ""


def clip_middle(text: str, width: int) -> str:
    """At most `width` cells; the middle goes, as ends tell paths and models apart."""
    if cell_len(text) <= width:
        return text
    if width < 3:
        return clip(text, width)
    tail = _head(text[::-1], (width - 1) * 3 // 5)[::-1]
    return _head(text, width - 1 - cell_len(tail)) + ELLIPSIS + tail


def clip_path(path: str, width: int) -> str:
    """At most `width` cells; whole folders go from the middle before the name is touched."""
    if cell_len(path) <= width:
        return path
    folder, _, name = path.rpartition("/")
    room = width - cell_len(name) - 2
    if room < 0:
        return clip_middle(name, width)
    kept = ""
    for part in folder.split("/"):
        if cell_len(kept + part) + 1 > room:
            break
        kept += part + "/"
    return f"{kept}{ELLIPSIS}/{name}"


def _head(text: str, width: int) -> str:
    """As many first characters as fit `width` cells."""
    taken, cells = 0, 0
    for character in text:
        cells += cell_len(character)
        if cells > width:
            break
        taken += 1
    return text[:taken]
