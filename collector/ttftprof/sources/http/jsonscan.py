"""Pick a few fields out of JSON of any size without keeping the rest.

What is wanted is a table of paths (`"choices[].delta.content"`) compiled by `compile_paths`. Two
readers use it: `walk` for a decoded value, `JsonScanner` for bytes that arrive in pieces of any
size. The scanner holds a key or one short value at most (2 KiB) and jumps over everything unwanted
at the speed of `bytes.find`, so a prompt of megabytes costs milliseconds and is never stored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

Found = Callable[[str, object], None]

CONTAINER = object()
"""Stands for the value of a wanted path that turned out to be a non-empty object or array."""

_MAX_VALUE_BYTES = 2048
_MAX_KEY_BYTES = 128
_MAX_DEPTH = 1000
_BRACKET_OR_QUOTE = re.compile(rb'[\[\]{}"]')
_BLANK = re.compile(rb"[ \t\r\n]+")
_SCALAR = re.compile(rb'[^ \t\r\n,:"\[\]{}]+')
_CUT_ESCAPE = re.compile(rb"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?$")

_NONE, _KEY, _CAPTURE, _EARLY, _JUMP = range(5)


class Node:
    """One step of a compiled path table: what to report here, and where it goes on."""

    __slots__ = ("children", "early", "item", "kind")

    def __init__(self) -> None:
        self.kind: str | None = None
        self.early = False
        self.children: dict[str, Node] = {}
        self.item: Node | None = None


def compile_paths(table: Mapping[str, str], early: frozenset[str] = frozenset()) -> Node:
    """Compile `{path: kind}`; `[]` after a name steps into the elements of an array.

    A scanner reports a string whose kind is in `early` at its first byte, with a placeholder as
    value.
    """
    root = Node()
    for path, kind in table.items():
        node = root
        for part in path.split("."):
            name = part.rstrip("[]")
            if name:
                node = node.children.setdefault(name, Node())
            for _ in range((len(part) - len(name)) // 2):
                node.item = node.item or Node()
                node = node.item
        node.kind, node.early = kind, kind in early
    return root


def walk(value: object, node: Node, found: Found) -> None:
    """Report every wanted path of a decoded JSON value to `found(kind, value)`."""
    if isinstance(value, dict):
        if node.kind is not None and value:
            found(node.kind, CONTAINER)
        children = node.children
        for key, inner in value.items():
            child = children.get(key)
            if child is not None:
                walk(inner, child, found)
    elif isinstance(value, list):
        if node.kind is not None and value:
            found(node.kind, CONTAINER)
        if node.item is not None:
            for inner in value:
                walk(inner, node.item, found)
    elif node.kind is not None:
        found(node.kind, value)


class JsonScanner:
    """Incremental reader of one or more JSON documents, reporting the wanted paths as they pass.

    Malformed input ends the scan (`dead`), never raises. Nothing is reported twice.
    """

    __slots__ = (
        "_capture", "_escaped", "_found", "_had_value", "_key", "_mode", "_on_document", "_root",
        "_scalar", "_skip_depth", "_stack", "_target", "_want_key", "dead",
    )  # fmt: skip

    def __init__(
        self, root: Node, found: Found, on_document: Callable[[], None] | None = None
    ) -> None:
        self._root = root
        self._found = found
        self._on_document = on_document
        self._stack: list[tuple[Node, bool]] = []  # wanted containers only: as deep as the table
        self._skip_depth = 0
        self._mode = _NONE
        self._escaped = False  # an odd number of backslashes ended the previous piece
        self._capture = bytearray()
        self._scalar = bytearray()
        self._want_key = False
        self._had_value = False  # the next thing has to be a comma or a closing bracket
        self._key: Node | None = None
        self._target: Node | None = None
        self.dead = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes. Linear in their number."""
        pos, end = 0, len(data)
        while pos < end and not self.dead:
            if self._mode != _NONE:
                pos = self._in_string(data, pos)
            elif self._skip_depth:
                pos = self._in_skipped(data, pos)
            else:
                pos = self._token(data, pos)

    def _token(self, data: bytes, pos: int) -> int:
        scalar = _SCALAR.match(data, pos)
        if scalar is not None:
            return self._in_scalar(scalar, len(data))
        if self._scalar:
            self._end_scalar()
        char = data[pos]
        if char == 0x22:
            self._open_string()
        elif char in b"{[":
            self._open(char == 0x7B)
        elif char in b"}]":
            self._close(char == 0x7D)
        elif char == 0x2C:
            self._want_key = bool(self._stack) and self._stack[-1][1]
            self._had_value = False
            self._key = None
        elif char == 0x3A:
            self._want_key = False
        else:
            blank = _BLANK.match(data, pos)
            return blank.end() if blank is not None else pos + 1
        return pos + 1

    def _here(self) -> Node | None:
        """What the table says about the value that begins now."""
        if not self._stack:
            return self._root
        node, is_object = self._stack[-1]
        return self._key if is_object else node.item

    def _open(self, is_object: bool) -> None:
        if self._want_key or self._had_value:
            self.dead = True
            return
        node = self._here()
        if node is not None and node.kind is not None:
            self._found(node.kind, CONTAINER)
        if node is None or not (node.children if is_object else node.item):
            self._skip_depth = 1
        else:
            self._stack.append((node, is_object))
            self._want_key = is_object
        self._key = None

    def _close(self, is_object: bool) -> None:
        if not self._stack or self._stack[-1][1] is not is_object:
            self.dead = True
            return
        self._stack.pop()
        self._after_container()

    def _after_container(self) -> None:
        self._want_key = False
        self._had_value = bool(self._stack)
        self._key = None
        if not self._stack and self._on_document is not None:
            self._on_document()

    def _in_skipped(self, data: bytes, pos: int) -> int:
        hit = _BRACKET_OR_QUOTE.search(data, pos)
        if hit is None:
            return len(data)
        char = data[hit.start()]
        if char == 0x22:
            self._mode = _JUMP
        elif char in b"{[":
            self._skip_depth += 1
            self.dead = self._skip_depth > _MAX_DEPTH
        else:
            self._skip_depth -= 1
            if not self._skip_depth:
                self._after_container()
        return hit.end()

    def _in_scalar(self, scalar: re.Match[bytes], end: int) -> int:
        if not self._stack or self._had_value:
            self.dead = True  # only objects and arrays are documents here
        if len(self._scalar) < 64:
            self._scalar += scalar.group()[:64]
        if scalar.end() < end:
            self._end_scalar()
        return scalar.end()

    def _end_scalar(self) -> None:
        node = self._here()
        if node is not None and node.kind is not None and not self._want_key:
            self._found(node.kind, _number_or_word(bytes(self._scalar)))
        self._had_value = True
        self._scalar.clear()

    def _open_string(self) -> None:
        self._escaped = False
        self._capture.clear()
        if not self._stack or self._had_value:
            self.dead = True
        elif self._want_key:
            self._mode = _KEY
        else:
            self._target = self._here()
            if self._target is None or self._target.kind is None:
                self._mode = _JUMP
            else:
                self._mode = _EARLY if self._target.early else _CAPTURE

    def _in_string(self, data: bytes, pos: int) -> int:
        quote = self._closing_quote(data, pos)
        stop = len(data) if quote < 0 else quote
        if self._mode == _EARLY and stop > pos:
            self._mode = _JUMP
            if self._target is not None and self._target.kind is not None:
                self._found(self._target.kind, "…")
        elif self._mode in (_KEY, _CAPTURE) and len(self._capture) <= _MAX_VALUE_BYTES:
            self._capture += data[pos : min(stop, pos + _MAX_VALUE_BYTES + 1)]
        if quote < 0:
            return stop
        mode, self._mode = self._mode, _NONE
        self._had_value = mode != _KEY and not self._skip_depth
        if mode == _KEY:
            self._key = self._stack[-1][0].children.get(_key_text(bytes(self._capture)))
        elif mode == _CAPTURE and self._target is not None and self._target.kind is not None:
            self._found(self._target.kind, _string_text(bytes(self._capture)))
        self._capture.clear()
        return quote + 1

    def _closing_quote(self, data: bytes, pos: int) -> int:
        """Where the string ends in `data`, or -1; remembers a backslash that ends the piece."""
        carry = self._escaped
        while True:
            quote = data.find(b'"', pos)
            part = data[pos:quote] if quote >= 0 else data[pos:]
            slashes = len(part) - len(part.rstrip(b"\\"))
            odd = bool(slashes & 1) ^ (carry and slashes == len(part))
            if quote < 0:
                self._escaped = odd
                return -1
            if not odd:
                self._escaped = False
                return quote
            pos, carry = quote + 1, False


def _key_text(raw: bytes) -> str:
    if len(raw) > _MAX_KEY_BYTES:
        return ""
    return _string_text(raw) if b"\\" in raw else raw.decode("utf-8", "replace")


def _string_text(raw: bytes) -> str:
    """Decode the inside of a JSON string; one longer than 2 KiB is cut there."""
    if len(raw) > _MAX_VALUE_BYTES:
        raw = _CUT_ESCAPE.sub(rb"\1", raw[:_MAX_VALUE_BYTES])
    text = raw.decode("utf-8", "replace")
    if "\\" not in text:
        return text
    try:
        decoded = json.loads(f'"{text}"', strict=False)
    except ValueError:
        return ""
    return decoded if isinstance(decoded, str) else ""


def _number_or_word(raw: bytes) -> object:
    if raw in (b"true", b"false"):
        return raw == b"true"
    try:
        return int(raw) if raw.lstrip(b"-").isdigit() else float(raw)
    except ValueError:
        return None
