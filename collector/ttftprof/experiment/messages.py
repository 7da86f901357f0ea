"""What an experiment asks, and what an answer came to: facts, no words of an answer."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OUTCOMES = (
    "ok",
    "empty",  # a whole answer without any text
    "rejected",  # HTTP 4xx, or 3xx: we do not follow
    "failed",  # HTTP 5xx, or an error inside the stream
    "refused",  # no connection
    "gone",  # the connection, or the stream without its end mark, ended before the answer did
    "stalled",  # text had come, then nothing for `stall_s`
    "malformed",  # no HTTP, broken chunks, events that cannot be read
    "endless",  # still coming at `timeout_s`, or more than any answer is
    "timeout",  # no text by `timeout_s`
)
MAX_ANSWER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `extra`: fields of the body, which win over ours. `key`: sent as a bearer's."""

    model: str
    prompt: str = field(repr=False)
    max_tokens: int
    api: str = "openai"
    extra: Mapping[str, Any] = field(default_factory=dict)
    key: str = field(default="", repr=False)

    def encode(self, host: str, port: int, base_path: str = "") -> bytes:
        messages = [{"role": "user", "content": self.prompt}]
        body: dict[str, Any] = {"model": self.model, "messages": messages, "stream": True}
        if self.api == "ollama":
            path = f"{base_path}/api/chat"
            body |= {"options": {"num_predict": self.max_tokens, "temperature": 0}}
        else:
            path = f"{base_path}/v1/chat/completions"
            body |= {"max_tokens": self.max_tokens, "temperature": 0}
        for name, value in self.extra.items():
            outer, _, inner = name.partition(".")
            if inner:
                body[outer] = {**body.get(outer, {}), inner: value}
            else:
                body[outer] = value
        data = json.dumps(body).encode()
        lines = (
            f"POST {path} HTTP/1.1",
            f"Host: {host}:{port}",
            "Content-Type: application/json",
            "Accept: text/event-stream, application/x-ndjson, application/json",
            "Connection: close",
            f"Content-Length: {len(data)}",
            *([f"Authorization: Bearer {self.key}"] if self.key else []),
        )
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + data


@dataclass(frozen=True, slots=True)
class Limits:
    """When a request is ended from our side. `timeout_s` from its first byte to the answer's last;
    `stall_s` without a byte once text has come."""

    timeout_s: float = 180.0
    stall_s: float = 30.0
    max_bytes: int = MAX_ANSWER_BYTES


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request came to; nothing of what was said. A moment that was not reached is None.

    `chunks`: (ns, bytes) of every `recv`. `detail`: what the outcome rests on, in words.
    """

    outcome: str
    detail: str = ""
    connect_ns: int | None = None
    send_begin_ns: int | None = None
    send_end_ns: int | None = None
    headers_ns: int | None = None
    first_token_ns: int | None = None
    end_ns: int | None = None
    status: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    text_chunks: int | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    chunks: tuple[tuple[int, int], ...] = ()
    port: int | None = None

    @property
    def ttft_ns(self) -> int | None:
        """From when we began to send to the arrival of the first generated text."""
        if self.first_token_ns is None or self.send_begin_ns is None:
            return None
        return self.first_token_ns - self.send_begin_ns


_WORDS = (
    "river", "stone", "lamp", "paper", "cloud", "table", "green", "seven", "winter", "bridge",
    "glass", "field", "copper", "music", "window", "garden", "letter", "silver", "market", "engine",
)  # fmt: skip
_OWN_WORDS = 8  # 20^8 beginnings; caches compare from the first token on


def filler(tokens: int, seed: int, own: str | None) -> str:
    """A prompt of about so many tokens, one a word: always the same for a seed, but for its first
    words where it is to bust a prompt cache; those are drawn by `own`, which no other prompt has.
    """
    body = random.Random(f"ttftprof {seed}").choices(_WORDS, k=tokens)
    if own is not None:
        body[:_OWN_WORDS] = random.Random(own).choices(_WORDS, k=min(_OWN_WORDS, tokens))
    return " ".join(body)
