"""Rules on the phases, whatever waited in them but storage."""

from __future__ import annotations

from ttftprof.diagnosis.rules import Blamed, Finding, Rule, rule
from ttftprof.model import ACTIVITIES, Action

_NOT_STORAGE = " ".join(a for a in ACTIVITIES if a != "storage_wait")


def _storage_acquitted(blamed: Blamed) -> Finding | None:
    weights = blamed.weights
    if weights is None or weights.bytes_from_storage != 0:
        return None
    return Finding("Storage is not to blame: not one byte of the weights came from it.")


def _queue(_blamed: Blamed) -> Finding:
    action = Action(
        "let the server take more requests at once (parallel slots), or keep both models "
        "resident if memory allows",
        None,
        "record again: the queue phase should be gone",
    )
    return Finding(actions=(action,))


def _evict(blamed: Blamed) -> Finding:
    action = Action(
        "keep both models resident, or unload the old one before the request comes",
        blamed.phase_ns,
        "record again: there should be no evict phase",
    )
    return Finding(actions=(action,))


def _ready_gap(blamed: Blamed) -> Finding:
    action = Action(
        "shorten the front's health-check interval if it has a setting",
        blamed.facts.table["ready_gap"].get("sleep"),
        "record again and compare ready_gap",
    )
    return Finding(actions=(action,))


def _prefill(blamed: Blamed) -> Finding:
    facts = blamed.facts
    says = ""
    if facts.prompt_tokens:
        cached = f", {facts.cached_tokens} of them cached" if facts.cached_tokens else ""
        says = f"The prompt has {facts.prompt_tokens} tokens{cached}."
    action = Action(
        "shorten the prompt or keep its beginning the same, so that the server's prompt cache "
        "is used",
        None,
        "repeat the request with one token of prompt: prefill should shrink with it",
    )
    return Finding(says, (action,))


def _init(_blamed: Blamed) -> Finding:
    action = Action(
        "try the server without its warm-up run (llama-server: --no-warmup) and with a "
        "smaller context size; the first request then pays for the warm-up itself",
        None,
        "record again and compare init",
    )
    return Finding(actions=(action,))


PHASE_RULES: tuple[Rule, ...] = (
    rule("storage acquitted", _storage_acquitted, "load", _NOT_STORAGE),
    rule("queue", _queue, "queue", _NOT_STORAGE),
    rule("evict", _evict, "evict", _NOT_STORAGE),
    rule("ready gap", _ready_gap, "ready_gap", _NOT_STORAGE),
    rule("prefill", _prefill, "prefill", _NOT_STORAGE),
    rule("init", _init, "init", _NOT_STORAGE),
)
