"""Foreign text (model names, paths, log words) made harmless and short enough for a terminal.

Guarantee: what `plain` returns is one line without control, format or invisible characters, so
it can neither move the cursor nor colour, reorder or hide what stands beside it. Widths are in
terminal cells.
"""

from __future__ import annotations

import unicodedata

from rich.cells import cell_len

_ELLIPSIS = "…"
_MAX_CHARACTERS = 1000
_MAX_MARKS = 2
# Cc control, Cf format (bidi overrides, zero width), Cs surrogate, Co private, Cn unassigned,
# Zl and Zp line ends, Me enclosing marks.
_ESCAPED = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Me"}


def plain(text: object, limit: int = _MAX_CHARACTERS) -> str:
    """The text on one line, dangerous characters written as escapes; over-long ones cut."""
    line = " ".join(str(text)[: 2 * limit].split())
    out: list[str] = []
    marks = 0
    for character in line:
        is_mark = unicodedata.category(character) == "Mn"
        marks = marks + 1 if is_mark else 0
        out.append(_escape(character) if _is_harmful(character, marks) else character)
    shown = "".join(out)
    return shown if len(shown) <= limit else shown[: limit - 1] + _ELLIPSIS


def plain_lines(text: str) -> str:
    """As `plain`, line for line, each with the blanks it begins with."""
    lines = text.split("\n")
    return "\n".join(" " * (len(x) - len(x.lstrip(" "))) + plain(x) for x in lines)


def _is_harmful(character: str, marks: int) -> bool:
    """A mark after many others (they pile up), or one that changes the width of what precedes."""
    if unicodedata.category(character) in _ESCAPED or marks > _MAX_MARKS:
        return True
    return "\ufe00" <= character <= "\ufe0f" or "\U0001f3fb" <= character <= "\U0001f3ff"


def _escape(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def clip(text: str, width: int) -> str:
    """At most `width` cells, the end replaced by `…` if it was longer."""
    if cell_len(text) <= width:
        return text
    return _head(text, width - 1) + _ELLIPSIS if width > 0 else ""


def clip_middle(text: str, width: int) -> str:
    """At most `width` cells; the middle goes, as ends tell paths and models apart."""
    if cell_len(text) <= width:
        return text
    if width < 3:
        return clip(text, width)
    tail = _head(text[::-1], (width - 1) * 3 // 5)[::-1]
    return _head(text, width - 1 - cell_len(tail)) + _ELLIPSIS + tail


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
    return f"{kept}{_ELLIPSIS}/{name}"


def _head(text: str, width: int) -> str:
    """As many first characters as fit `width` cells."""
    taken, cells = 0, 0
    for character in text:
        cells += cell_len(character)
        if cells > width:
            break
        taken += 1
    return text[:taken]
