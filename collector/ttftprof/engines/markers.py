"""Markers inside servers: exported symbols worth a uprobe, and log lines worth a stamp.

Symbols are found by name in whatever library a process maps; log lines by pattern as they are
written to stdout or stderr. Both are evidence of an edge; a missing one costs confidence only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

COOKIE_STACK_INT = 0x10000  # marks.bpf.c: keep the first field of a struct passed by value


@dataclass(frozen=True, slots=True)
class SymbolMark:
    """One call to mark. `row` is its id in the recording; names are tried in order, all found are
    probed (an old and a new name never both do the work)."""

    row: int
    name: str
    symbols: tuple[str, ...]
    stack_int: bool = False

    @property
    def cookie(self) -> int:
        return self.row | (COOKIE_STACK_INT if self.stack_int else 0)


# llama.cpp's C API (include/llama.h). The renamed ones kept their old symbol as a wrapper that
# calls the new one: spans nest, and the analysis takes the outermost.
SYMBOL_MARKS: tuple[SymbolMark, ...] = (
    SymbolMark(
        1,
        "model_load",
        (
            "llama_model_load_from_file",
            "llama_model_load_from_splits",
            "llama_load_model_from_file",
        ),
    ),
    SymbolMark(2, "context_init", ("llama_init_from_model", "llama_new_context_with_model")),
    SymbolMark(3, "decode", ("llama_decode",), stack_int=True),
    SymbolMark(4, "encode", ("llama_encode",), stack_int=True),
    SymbolMark(5, "model_free", ("llama_model_free", "llama_free_model")),
    SymbolMark(6, "context_free", ("llama_free",)),
)
MARK_NAMES = {mark.row: mark.name for mark in SYMBOL_MARKS}


@dataclass(frozen=True, slots=True)
class LogMark:
    """One line that means something. Named groups of the pattern become the mark's values:
    numbers as numbers, `model` as a short string; nothing else of the line is kept.

    `versions` says for which builds the wording was checked.
    """

    name: str
    pattern: re.Pattern[bytes]
    versions: str


def _log(name: str, pattern: bytes, versions: str) -> LogMark:
    return LogMark(name, re.compile(pattern), versions)


_LLAMA = "llama.cpp b4500 to b10434"
LOG_MARKS: tuple[LogMark, ...] = (
    _log("fit_begin", rb"fitting params to (?:free|device) memory", _LLAMA),
    _log(
        "fit_end", rb"fitting params to (?:free|device) memory took (?P<s>[\d.]+) seconds", _LLAMA
    ),
    _log("load_begin", rb"load_tensors: loading model tensors", _LLAMA),
    _log(
        "context_begin",
        rb"llama_context: constructing llama_context|llama_new_context_with_model:",
        _LLAMA,
    ),
    _log("warmup", rb"warming up the model with an empty run", _LLAMA),
    _log(
        "model_loaded",
        rb"(?:main|srv\s+\w+|load_model|llama_server): *(?:\|[^|]*\| *)?model loaded",
        _LLAMA,
    ),
    _log("listening", rb"server is listening on|starting the main loop", _LLAMA),
    _log("slot_start", rb"launch_slot_", _LLAMA),
    _log(
        "prompt_eval",
        rb"prompt eval time =\s*(?P<ms>[\d.]+) ms /\s*(?P<tokens>\d+) tokens",
        _LLAMA,
    ),
    _log("evicting", rb"evicting idle LRU name=(?P<model>\S+) to make room", "llama.cpp b7000 on"),
    _log(
        "spawning",
        rb"spawning server instance with name=(?P<model>\S+) on port (?P<port>\d+)",
        "llama.cpp b7000 on",
    ),
    _log("instance_exited", rb"instance name=(?P<model>\S+) exited", "llama.cpp b7000 on"),
    _log(
        "proxying",
        rb"proxying request to model (?P<model>\S+) on port (?P<port>\d+)",
        "llama.cpp b7000 on",
    ),
    _log("full_reprocess", rb"forcing full prompt re-processing", _LLAMA),
    _log("cpu_fallback", rb"offloaded (?P<layers>\d+)/(?P<of>\d+) layers to GPU", _LLAMA),
)

# A router prints its child's lines behind "[port] ": the child's own write was stamped already.
_RELAYED = re.compile(rb"^\s*\[\d{2,5}\] ")


def find_log_marks(chunk: bytes) -> list[tuple[str, dict[str, Any]]]:
    """(name, values) of every marker line in one write; relayed lines are left out."""
    found: list[tuple[str, dict[str, Any]]] = []
    for line in chunk.split(b"\n"):
        if len(line) < 8 or _RELAYED.match(line):
            continue
        for mark in LOG_MARKS:
            match = mark.pattern.search(line)
            if match:
                found.append((mark.name, _values(match)))
    return found


def _values(match: re.Match[bytes]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, raw in match.groupdict().items():
        if raw is None:
            continue
        text = raw[:128].decode("utf-8", errors="replace")
        if name == "model":
            values[name] = text
        else:
            try:
                values[name] = float(text) if "." in text else int(text)
            except ValueError:
                continue
    return values
