"""Foreign text (titles of processes, model names, paths, log words) made harmless for a terminal.

Guarantee: what `plain` returns is one line without control, format or invisible characters, so
it can neither move the cursor nor colour, reorder or hide what stands beside it.
"""

from __future__ import annotations

import unicodedata

ELLIPSIS = "…"
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
    return shown if len(shown) <= limit else shown[: limit - 1] + ELLIPSIS


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
