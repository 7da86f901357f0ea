"""The verdict on one request: what to blame, how sure, what to change, how to check it.

Pure. Alone, a request is judged by its dominant phase × activity; beside a resident request of the
same recording, by the first phase that grew beyond noise. Every number in a sentence is evidence of
the recording; a gain is only promised with the model that gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ttftprof.gpu import Hint
from ttftprof.model import Action, Activity, FileUse, MountUse, Phase, Request, Verdict

# Growth that counts: more than this share of the baseline's TTFT and than this time.
NOISE_SHARE = 0.10
NOISE_NS = 20_000_000
WHOLE_PATTERN_BYTES = 1 << 20  # a request of this size costs storage about one latency

_PHASE_WORDS = {
    "queue": "waiting behind other work",
    "evict": "ending the old model",
    "launch": "starting the new server process",
    "load": "loading the weights",
    "init": "initialising the runtime (context, KV memory, warm-up)",
    "ready_gap": "waiting for the front to notice that the server was ready",
    "prefill": "processing the prompt",
    "first_decode": "producing and relaying the first token",
    "unexplained": "something that no probe saw",
}
_ACTIVITY_WORDS = {
    "storage_wait": "waiting for storage",
    "fault": "in page faults on the CPU",
    "cpu": "computing",
    "transfer": "copying to the device",
    "gpu": "waiting for the device",
    "lock": "waiting for a lock",
    "reclaim": "waiting for memory to be freed",
    "sleep": "asleep on a timer",
    "idle": "waiting for somebody else",
}


_UNANSWERED = {
    "ok": "The answer held no text, so there is no first token to explain.",
    "error": "The server answered with an error: there is no first token to explain.",
    "timeout": "The client gave up before the first token.",
    "cancelled": "The client hung up before the first token.",
    "incomplete": "Recording ended before the first token was seen.",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What a verdict is drawn from."""

    ttft_ns: int
    phases: Sequence[Phase]
    activities: Sequence[Activity]
    files: Sequence[FileUse]
    mounts: Sequence[MountUse]
    table: dict[str, dict[str, int]]
    prompt_tokens: int | None
    cached_tokens: int | None
    sources_missing: int
    answered: bool
    outcome: str
    until: str = "to the first token"
    hints: Sequence[Hint] = ()


def judge(facts: Facts, baseline: Request | None) -> Verdict:
    """The verdict. `baseline`: a resident request of the same server, if the recording has one."""
    if not facts.answered:
        return Verdict("unknown", None, None, "low", _UNANSWERED.get(facts.outcome, ""))
    if facts.ttft_ns <= 0 or not facts.table:
        return Verdict("unknown", None, None, "low", "Nothing of this request's wait was seen.")
    phase = first_that_grew(facts.phases, baseline) or _dominant_phase(facts)
    spent = facts.table[phase]
    activity = max(spent, key=lambda a: spent[a])
    share = spent[activity] / facts.ttft_ns
    if phase == "unexplained":
        return Verdict(
            "unknown", activity, share, "low", _sentence(facts, phase, activity, baseline)
        )
    hints = [hint for hint in facts.hints if hint.phase == phase]
    return Verdict(
        cause=phase,
        activity=activity,
        share=share,
        confidence=_confidence(facts, phase),
        explanation=_sentence(facts, phase, activity, baseline)
        + _detail(facts, phase, activity)
        + "".join(f" {hint.says}" for hint in hints),
        actions=(
            *(hint.action for hint in hints if hint.action is not None),
            *_actions(facts, phase, activity),
        ),
    )


def _dominant_phase(facts: Facts) -> str:
    """The phase of the largest phase × activity cell."""
    return max(facts.table, key=lambda p: max(facts.table[p].values()))


def noise_ns(baseline: Request) -> int:
    """Growth of a phase that may be chance: a share of the baseline's wait, at least some time."""
    return max(NOISE_NS, int(NOISE_SHARE * (baseline.ttft_ns or 0)))


def first_that_grew(phases: Sequence[Phase], baseline: Request | None) -> str | None:
    """Against a baseline: the first phase, in order of time, that grew beyond noise and makes up a
    good part (a fifth) of all that grew."""
    if baseline is None or baseline.ttft_ns is None:
        return None
    usual = baseline.phase_totals()
    grown: dict[str, int] = {}
    for phase in phases:
        grown[phase.phase] = grown.get(phase.phase, -usual.get(phase.phase, 0)) + phase.duration_ns
    beyond = {name: ns for name, ns in grown.items() if ns > noise_ns(baseline)}
    total = sum(beyond.values())
    return next((name for name, ns in beyond.items() if ns * 5 >= total), None)


def _confidence(facts: Facts, phase: str) -> str:
    total = sum(p.duration_ns for p in facts.phases) or 1
    unexplained = sum(p.duration_ns for p in facts.phases if p.phase == "unexplained")
    blamed = [p for p in facts.phases if p.phase == phase]
    observed = all(p.basis == "observed" for p in blamed)
    if unexplained > 0.1 * total or facts.sources_missing > 2:
        return "low"
    return "high" if observed and not facts.sources_missing else "medium"


def _seconds(ns: float) -> str:
    return f"{ns / 1e9:.2f} s" if ns >= 1e9 else f"{ns / 1e6:.0f} ms"


def _sentence(facts: Facts, phase: str, activity: str, baseline: Request | None) -> str:
    in_phase = sum(facts.table[phase].values())
    in_cell = facts.table[phase][activity]
    text = (
        f"Of {_seconds(facts.ttft_ns)} {facts.until}, {_seconds(in_phase)} went into "
        f"{_PHASE_WORDS[phase]}"
    )
    if in_cell < in_phase:
        text += f", {_seconds(in_cell)} of it {_ACTIVITY_WORDS[activity]}"
    else:
        text += f", all of it {_ACTIVITY_WORDS[activity]}"
    if baseline is not None and baseline.ttft_ns:
        usual = baseline.phase_totals().get(phase, 0)
        text += f" (request {baseline.id}, with the model resident: {_seconds(usual)})"
    return text + "."


def _weights(facts: Facts) -> FileUse | None:
    return next((f for f in facts.files if f.is_weights), facts.files[0] if facts.files else None)


def _detail(facts: Facts, phase: str, activity: str) -> str:
    if activity == "storage_wait":
        return _storage_detail(facts)
    weights = _weights(facts)
    if phase == "load" and weights is not None and weights.bytes_from_storage == 0:
        return " Storage is not to blame: not one byte of the weights came from it."
    if phase == "prefill" and facts.prompt_tokens:
        cached = f", {facts.cached_tokens} of them cached" if facts.cached_tokens else ""
        return f" The prompt has {facts.prompt_tokens} tokens{cached}."
    return ""


def _storage_detail(facts: Facts) -> str:
    weights = _weights(facts)
    if weights is None or not weights.bytes_from_storage:
        return ""
    text = f" {weights.bytes_from_storage / 1e6:,.0f} MB of {weights.path} came from storage"
    if weights.bytes_per_second:
        text += f" at {weights.bytes_per_second / 1e6:,.0f} MB/s"
    if weights.request_size_bytes and weights.in_flight:
        text += (
            f", in requests of {weights.request_size_bytes.p50 / 1024:,.0f} KiB (median), "
            f"{weights.in_flight.mean:.1f} under way at a time"
        )
    return text + "."


def _actions(facts: Facts, phase: str, activity: str) -> tuple[Action, ...]:
    if activity == "storage_wait":
        return tuple(_storage_actions(facts, phase))
    by_phase = {
        "queue": Action(
            "let the server take more requests at once (parallel slots), or keep both models "
            "resident if memory allows",
            None,
            "record again: the queue phase should be gone",
        ),
        "evict": Action(
            "keep both models resident, or unload the old one before the request comes",
            sum(facts.table["evict"].values()) if "evict" in facts.table else None,
            "record again: there should be no evict phase",
        ),
        "ready_gap": Action(
            "shorten the front's health-check interval if it has a setting",
            facts.table.get("ready_gap", {}).get("sleep"),
            "record again and compare ready_gap",
        ),
        "prefill": Action(
            "shorten the prompt or keep its beginning the same, so that the server's prompt cache "
            "is used",
            None,
            "repeat the request with one token of prompt: prefill should shrink with it",
        ),
        "init": Action(
            "try the server without its warm-up run (llama-server: --no-warmup) and with a "
            "smaller context size; the first request then pays for the warm-up itself",
            None,
            "record again and compare init",
        ),
    }
    found = by_phase.get(phase)
    return (found,) if found else ()


def _storage_actions(facts: Facts, phase: str) -> list[Action]:
    weights = _weights(facts)
    waited = facts.table[phase]["storage_wait"]
    if weights is None:
        return []
    actions: list[Action] = []
    if any("RANDOM" in a for a in weights.advice):
        actions.append(
            Action(
                "the server told the kernel to expect random access, which switches readahead off: "
                "turn off its NUMA option, or load without mmap (llama-server: --no-mmap)",
                _gain_of_bigger_requests(weights, waited),
                "record again: the median request size should grow",
            )
        )
    elif weights.access == "mmap" and _small_requests(weights):
        actions.append(
            Action(
                "load without mmap (llama-server: --no-mmap), or raise read_ahead_kb of the mount",
                _gain_of_bigger_requests(weights, waited),
                "record again: bigger requests, more of them under way",
            )
        )
    actions.append(
        Action(
            "keep the weights in the page cache (enough memory; read the file once after boot), or "
            "on faster storage",
            waited,
            "switch back and forth: the second switch should show 0 bytes from storage",
        )
    )
    return actions


def _small_requests(weights: FileUse) -> bool:
    sizes = weights.request_size_bytes
    return sizes is not None and sizes.p50 < WHOLE_PATTERN_BYTES / 4


def _gain_of_bigger_requests(weights: FileUse, waited_ns: int) -> int | None:
    """rate = request size × depth / latency: with the latency unchanged, requests of 1 MiB would
    need that many times fewer waits."""
    sizes = weights.request_size_bytes
    if sizes is None or not sizes.p50 or sizes.p50 >= WHOLE_PATTERN_BYTES:
        return None
    return round(waited_ns * (1 - sizes.p50 / WHOLE_PATTERN_BYTES))
