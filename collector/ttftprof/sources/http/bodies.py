"""What request and response bodies say, as facts without content.

A body is read once, as it passes. Of a request: the model and the streaming flag. Of a response:
whether a piece carries generated text, when the piece began, and the numbers the server reports
(`FIELDS` lists every field that is looked at). Text itself is compared with the empty string and
forgotten.

Formats behind `FIELDS`: OpenAI chat, text completions and responses; Anthropic messages; Ollama's
/api/chat and /api/generate; llama.cpp's native /completion and its `timings`; TGI; SGLang's
/generate.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator

from ttftprof.sources.http.framing import BodyHead
from ttftprof.sources.http.jsonscan import JsonScanner, compile_paths, walk

MAX_LINE_BYTES = 256 * 1024
MAX_INFLATED_BYTES = 16 * 1024 * 1024
INFLATER_BYTES = 48 * 1024  # zlib's window and state
MAX_MODEL_CHARS = 256
_INFLATE_STEP_BYTES = 64 * 1024
_LARGEST_NUMBER = 2**63

COMPRESSED = "compressed"
UNREADABLE_CODING = "compressed in a way that cannot be read"
LONG_LINE = "long line dropped"
UNREADABLE_EVENT = "unreadable event"

_MODEL, _STREAM = "model", "stream"
_TEXT, _ERROR, _END, _TYPE, _ROLE = "text", "error", "end", "type", "role"

_REQUEST_FIELDS = compile_paths({"model": _MODEL, "stream": _STREAM})

_GENERATED = (
    "choices[].delta.content", "choices[].delta.reasoning_content", "choices[].delta.reasoning",
    "choices[].delta.refusal", "choices[].delta.tool_calls[].function.name",
    "choices[].delta.tool_calls[].function.arguments", "choices[].delta.function_call.name",
    "choices[].delta.function_call.arguments",
    "choices[].message.content", "choices[].message.reasoning_content",
    "choices[].message.reasoning", "choices[].message.refusal",
    "choices[].message.tool_calls[].function.name", "choices[].message.function_call.name",
    "choices[].text",
    "content", "[].content",  # llama.cpp native
    "delta",  # OpenAI responses, streamed: response.*.delta
    "output[].content[].text", "output[].summary[].text", "output[].name",
    "delta.text", "delta.thinking", "delta.partial_json",  # Anthropic, streamed
    "content_block.text", "content_block.thinking", "content_block.name",
    "content[].text", "content[].thinking", "content[].name",
    "message.content", "message.thinking", "message.tool_calls[].function.name",  # Ollama
    "response", "thinking",
    "token.text", "generated_text", "[].generated_text",  # TGI
    "text", "[].text", "text[]",  # SGLang, vLLM's own /generate
)  # fmt: skip

_NUMBERS = {
    **{
        f"{at}usage.{path}": name
        for at in ("", "message.", "response.")
        for path, name in {
            "prompt_tokens": "prompt_tokens",
            "completion_tokens": "completion_tokens",
            "prompt_tokens_details.cached_tokens": "cached_tokens",
            "input_tokens": "input_tokens",
            "output_tokens": "output_tokens",
            "input_tokens_details.cached_tokens": "cached_tokens",
            "cache_read_input_tokens": "cache_read_input_tokens",
            "cache_creation_input_tokens": "cache_creation_input_tokens",
        }.items()
    },
    **{
        f"{at}{name}": name
        for at in ("timings.", "[].timings.")
        for name in (
            "cache_n", "prompt_n", "predicted_n", "prompt_ms", "predicted_ms",
            "prompt_per_token_ms", "predicted_per_token_ms",
        )
    },
    **{
        f"{at}{name}": name
        for at in ("", "[].")
        for name in ("tokens_evaluated", "tokens_predicted")
    },
    "prompt_progress.total": "prompt_tokens",
    "prompt_progress.cache": "cached_tokens",
    "prompt_eval_count": "prompt_eval_count",
    "eval_count": "eval_count",
    "total_duration": "total_duration_ns",
    "load_duration": "load_duration_ns",
    "prompt_eval_duration": "prompt_eval_duration_ns",
    "eval_duration": "eval_duration_ns",
    "meta_info.prompt_tokens": "prompt_tokens",
    "meta_info.completion_tokens": "completion_tokens",
    "meta_info.cached_tokens": "cached_tokens",
    "details.generated_tokens": "completion_tokens",
}  # fmt: skip

_MARKS = {
    "error": _ERROR,
    "response.error": _ERROR,
    "choices[].finish_reason": _END,
    "done": _END,
    "stop": _END,
    "type": _TYPE,
    "object": _TYPE,
    "choices[].delta.role": _ROLE,
}

FIELDS = compile_paths(
    {**dict.fromkeys(_GENERATED, _TEXT), **_NUMBERS, **_MARKS}, early=frozenset({_TEXT})
)
"""Every response field that is looked at."""


class Inflater:
    """Undoes gzip or deflate piece by piece: at most 64 KiB at a time, 16 MiB in all."""

    __slots__ = ("_budget", "_head", "_stream", "dead")

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=47)  # gzip or zlib, told by its header
        self._head = b""  # the two bytes that tell, until both are in
        self._budget = MAX_INFLATED_BYTES
        self.dead = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Give what `data` adds. Sets `dead` on damage, and when the budget is used up."""
        if len(self._head) < 2:
            data, self._head = self._begin(data), (self._head + data)[:2]
        while data and not self.dead and not self._stream.eof:
            try:
                piece = self._stream.decompress(data, _INFLATE_STEP_BYTES)
            except zlib.error:
                self.dead = True
                return
            data = self._stream.unconsumed_tail
            self._budget -= len(piece)
            self.dead = self._budget < 0
            if piece:
                yield piece

    def _begin(self, data: bytes) -> bytes:
        """Hold the header back until it can be told from a "deflate" that came without one."""
        data = self._head + data
        if len(data) < 2:
            return b""
        zlib_header = data[0] & 0x0F == 8 and (data[0] << 8 | data[1]) % 31 == 0
        if not zlib_header and data[:2] != b"\x1f\x8b":
            self._stream = zlib.decompressobj(wbits=-15)
        return data


class RequestBody:
    """Finds the model and the streaming flag at the top level of a JSON body."""

    __slots__ = ("_inflater", "_scanner", "model", "notes", "prompt_bytes", "stream", "understood")

    def __init__(self, encoding: str) -> None:
        self.model: str | None = None
        self.stream: bool | None = None
        self.understood = False
        """The whole JSON object was read, so an absent field is known to be absent."""
        self.prompt_bytes = 0
        self.notes: list[str] = [COMPRESSED] if encoding else []
        self._inflater = Inflater() if encoding in _ZLIB_CODINGS else None
        self._scanner: JsonScanner | None = None
        if not encoding or self._inflater is not None:
            self._scanner = JsonScanner(_REQUEST_FIELDS, self._found, self._document)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        self.prompt_bytes += len(data)
        if self._scanner is None:
            return
        if self._inflater is None:
            self._scan(data)
            return
        for piece in self._inflater.feed(data):
            self._scan(piece)
        if self._inflater.dead:
            self._scanner = None

    def gap(self, count: int) -> None:
        """`count` bytes of the body were not captured: whatever follows cannot be placed."""
        self.prompt_bytes += count
        self._scanner = None

    def _scan(self, data: bytes) -> None:
        if self._scanner is not None:
            self._scanner.feed(data)
            if self.understood or self._scanner.dead:
                self._scanner = None

    def _found(self, kind: str, value: object) -> None:
        if kind == _MODEL and isinstance(value, str) and value:
            shown = (c if c.isprintable() else "\ufffd" for c in value[:MAX_MODEL_CHARS])
            self.model = "".join(shown)
        elif kind == _STREAM and isinstance(value, bool):
            self.stream = value

    def _document(self) -> None:
        self.understood = True


class Facts:
    """What a response has told so far: stamps, counts and flags only."""

    __slots__ = (
        "_begins", "_repeats", "_text", "blind", "ended", "error", "first_text_ns", "last_text_ns",
        "numbers", "text_chunks", "token_certain",
    )  # fmt: skip

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}
        self.text_chunks = 0
        self.first_text_ns: int | None = None
        self.last_text_ns: int | None = None
        self.token_certain = False
        """Nothing before the first text seen went unread."""
        self.blind = False
        """Something of the response went unread, and it may have been text."""
        self.error = False
        self.ended = False
        """The server said that the generation is over."""
        self._begins = False
        self._text = False
        self._repeats = False

    def found(self, kind: str, value: object) -> None:
        """Take one wanted field of the record being read."""
        if kind == _TEXT:
            if isinstance(value, str) and value:
                self._text = True
        elif kind == _TYPE:
            if isinstance(value, str):
                self._typed(value)
        elif kind == _ROLE:
            self._begins = True
        elif kind == _ERROR:
            self.error = self.error or bool(value)
        elif kind == _END:
            self.ended = self.ended or bool(value)
        elif type(value) in (int, float) and 0 <= value < _LARGEST_NUMBER:  # type: ignore[operator]
            self.numbers[kind] = value  # type: ignore[assignment]

    def end_record(self, ns: int) -> None:
        """The record that began at `ns` is complete."""
        if self._begins and not self._text and self.first_text_ns is None:
            self.blind = False  # the answer begins here, so what went unread was no text of it
        if self._text and not self._repeats:
            if self.first_text_ns is None:
                self.first_text_ns = ns
                self.token_certain = not self.blind
            self.last_text_ns = ns
            self.text_chunks += 1
        self._begins = self._text = self._repeats = False

    def _typed(self, name: str) -> None:
        if name in ("error", "response.failed"):
            self.error = True
        elif name in ("message_stop", "response.completed", "response.incomplete"):
            self.ended = True
        elif name in ("message_start", "response.created"):
            self._begins = True
        self._repeats = self._repeats or name.endswith(".done")  # says again what deltas said

    def tokens(self) -> tuple[int | None, int | None, int | None]:
        """(prompt, cached, completion) tokens, each from the first field of its list that is there.

        Anthropic's `input_tokens` leaves out what came from or went to the cache; llama.cpp's
        `prompt_n` leaves out `cache_n`, which servers before it never sent (then: unknown).
        """
        n = self.numbers
        prompt = _first(n, "prompt_tokens")
        if prompt is None and "input_tokens" in n:
            prompt = int(
                n["input_tokens"]
                + n.get("cache_read_input_tokens", 0)
                + n.get("cache_creation_input_tokens", 0)
            )
        if prompt is None and "prompt_n" in n and "cache_n" in n:
            prompt = int(n["prompt_n"] + n["cache_n"])
        if prompt is None:
            prompt = _first(n, "tokens_evaluated", "prompt_eval_count")
        return (
            prompt,
            _first(n, "cached_tokens", "cache_n", "cache_read_input_tokens"),
            _first(
                n,
                "completion_tokens",
                "output_tokens",
                "predicted_n",
                "tokens_predicted",
                "eval_count",
            ),
        )

    def timings(self) -> dict[str, float]:
        """Durations as the server reported them; the unit ends each name (`_ms`, `_ns`)."""
        return {k: float(v) for k, v in self.numbers.items() if k.endswith(("_ms", "_ns"))}


def _first(numbers: dict[str, float], *names: str) -> int | None:
    return next((int(numbers[name]) for name in names if name in numbers), None)


class ResponseBody:
    """Reads a response body as SSE, NDJSON or JSON, told by its type and first byte.

    `sniff` False: count nothing (an endpoint that does not generate, or an error status).
    """

    __slots__ = (
        "_dropping", "_event_ns", "_facts", "_headless", "_inflater", "_line", "_line_ns", "_ns",
        "_scanner", "_sniff", "_unsynced", "by_lines", "notes",
    )  # fmt: skip

    def __init__(self, head: BodyHead | None, facts: Facts, *, sniff: bool) -> None:
        content_type = head.content_type if head else ""
        encoding = head.encoding if head else ""
        self.by_lines: bool | None = None
        """True for SSE or NDJSON, False for one JSON document, None before its first byte."""
        if head is None or "event-stream" in content_type or "ndjson" in content_type:
            self.by_lines = True
        self.notes: list[str] = [COMPRESSED] if encoding else []
        self._facts = facts
        self._sniff = sniff
        self._inflater = Inflater() if encoding in _ZLIB_CODINGS else None
        if encoding and self._inflater is None:
            self._give_up(UNREADABLE_CODING)
        self._scanner: JsonScanner | None = None
        self._line = bytearray()
        self._line_ns = 0
        self._event_ns: int | None = None
        self._ns = 0
        self._dropping = False
        self._headless = self._unsynced = head is None

    @property
    def streamed(self) -> bool | None:
        """As `by_lines`, but None where the response head was not seen."""
        return None if self._headless else self.by_lines

    def feed(self, ns: int, data: bytes) -> None:
        """Take the next payload bytes, written at `ns`."""
        if not self._sniff:
            return
        if self._inflater is None:
            self._read(ns, data)
            return
        for piece in self._inflater.feed(data):
            self._read(ns, piece)
        if self._inflater.dead:
            self._give_up(UNREADABLE_CODING)

    def gap(self) -> None:
        """Bytes were not captured here. Text begun before the hole still counts as seen."""
        if not self._sniff:
            return
        facts = self._facts
        if facts.first_text_ns is None:
            self._scan_cut_line()
        facts.blind = True
        facts.last_text_ns = None
        self._line.clear()
        self._dropping = False
        self._unsynced = True
        if self._inflater is not None or self._scanner is not None:
            self._sniff = False

    @property
    def needs_every_byte(self) -> bool:
        """Compressed: after a hole nothing can be read."""
        return self._inflater is not None

    @property
    def buffered_bytes(self) -> int:
        """What it holds of the body: a line that is not complete, a decompressor's window."""
        return len(self._line) + (0 if self._inflater is None else INFLATER_BYTES)

    def end(self, ns: int) -> None:
        """The body is complete: a last line may have no newline."""
        if self._sniff and self._line and not self._dropping:
            self._end_line(bytes(self._line), self._line_ns)
        self._line.clear()

    def _give_up(self, note: str) -> None:
        self._note(note)
        self._sniff = False

    def _note(self, note: str) -> None:
        """Say what went unread."""
        self._facts.blind = True
        if note not in self.notes:
            self.notes.append(note)

    def _read(self, ns: int, data: bytes) -> None:
        if self.by_lines is None:
            data = data.lstrip(b" \t\r\n")
            if not data:
                return
            self.by_lines = data[:1] not in (b"{", b"[")
        if self.by_lines:
            self._read_lines(ns, data)
        else:
            self._read_json(ns, data)

    def _read_json(self, ns: int, data: bytes) -> None:
        if self._scanner is None:
            self._scanner = JsonScanner(FIELDS, self._found_in_json, self._end_document)
        self._ns = ns
        self._scanner.feed(data)

    def _found_in_json(self, kind: str, value: object) -> None:
        self._facts.found(kind, value)
        if kind == _TEXT:  # a document may be long: its text counts from where it begins
            self._facts.end_record(self._ns)

    def _end_document(self) -> None:
        self._facts.end_record(self._ns)

    def _read_lines(self, ns: int, data: bytes) -> None:
        start = 0
        while True:
            stop = data.find(b"\n", start)
            if stop < 0:
                break
            if self._line or self._dropping:
                self._keep(data[start:stop])
                line, line_ns = bytes(self._line), self._line_ns
                self._line.clear()
                self._dropping = False
            else:
                line, line_ns = data[start:stop], ns
            self._end_line(line, line_ns)
            start = stop + 1
        if start < len(data):
            if not self._line and not self._dropping:
                self._line_ns = ns
            self._keep(data[start:])

    def _keep(self, piece: bytes) -> None:
        if self._dropping:
            return
        if len(self._line) + len(piece) > MAX_LINE_BYTES:
            self._line += piece[: MAX_LINE_BYTES - len(self._line)]
            self._scan_cut_line()
            self._line.clear()
            self._dropping = True
            self._note(LONG_LINE)
        else:
            self._line += piece

    def _end_line(self, line: bytes, ns: int) -> None:
        first = line[:1]
        if first == b"d" and line.startswith(b"data:"):
            self._record(line[5:].strip(), ns if self._event_ns is None else self._event_ns)
        elif first == b"{":
            self._record(line.strip(), ns)
        elif line in (b"", b"\r"):
            self._event_ns = None
        elif first != b":":
            if line.startswith((b"event:", b"id:", b"retry:")) and self._event_ns is None:
                self._event_ns = ns
            if line.startswith(b"error:") or (line[6:].strip() == b"error" and first == b"e"):
                self._facts.error = True
        self._unsynced = False

    def _record(self, payload: bytes, ns: int) -> None:
        facts = self._facts
        if payload == b"[DONE]":
            facts.ended = True
        elif payload.startswith(b"{"):
            try:
                value = json.loads(payload.decode("utf-8", "replace"))
            except (ValueError, RecursionError):
                if not self._unsynced:
                    self._note(UNREADABLE_EVENT)
                return
            walk(value, FIELDS, facts.found)
            facts.end_record(ns)

    def _scan_cut_line(self) -> None:
        """Look for text in the captured beginning of a line whose end will not be seen."""
        line = bytes(self._line)
        if line.startswith(b"data:"):
            ns = self._line_ns if self._event_ns is None else self._event_ns
            line = line[5:]
        else:
            ns = self._line_ns
        JsonScanner(FIELDS, self._facts.found).feed(line.lstrip())
        self._facts.end_record(ns)


_ZLIB_CODINGS = ("gzip", "x-gzip", "deflate")
