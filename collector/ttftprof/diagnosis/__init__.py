"""The verdict on one request: what to blame, how sure, what to change, how to check it.

Pure. Alone, a request is judged by its longest phase and what that mostly did; beside a resident
request of the same recording, by the first phase that grew beyond noise. Every number in a sentence
is evidence of the recording; a gain is only promised with the model that gives it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ttftprof.diagnosis.phase_rules import LEADING_RULES, PHASE_RULES
from ttftprof.diagnosis.python_rules import PYTHON_RULES
from ttftprof.diagnosis.rules import Blamed, Facts, Rule, seconds
from ttftprof.diagnosis.storage_rules import ACQUITTALS, STORAGE_RULES
from ttftprof.model import CONFIDENCES, Phase, Request, Verdict

__all__ = [
    "NOISE_NS",
    "NOISE_SHARE",
    "RULES",
    "Facts",
    "first_that_grew",
    "first_that_matters",
    "judge",
    "noise_ns",
]

# All that apply add to the verdict, in this order: the first action is the first rule's.
RULES: tuple[Rule, ...] = (
    *LEADING_RULES,
    *STORAGE_RULES,
    *PYTHON_RULES,
    *PHASE_RULES,
    *ACQUITTALS,
)

# Growth that counts: more than this share of the baseline's TTFT and than this time.
NOISE_SHARE = 0.10
NOISE_NS = 20_000_000

_PHASE_WORDS = {
    "queue": "waiting behind other work",
    "evict": "ending the old model",
    "launch": "starting the new server process",
    "load": "loading the weights",
    "init": "initialising the runtime (context, KV memory, warm-up)",
    "ready_gap": "waiting for the front to notice that the server was ready",
    "prefill": "processing the prompt",
    "first_decode": "producing and relaying the first token",
    "unexplained": "something that no phase explains",
}
_PREPARING = "importing and preparing in the server process, which ran already"
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
    "unknown": "in a process of which nothing was recorded",
}


_UNANSWERED = {
    "ok": "The answer held no text, so there is no first token to explain.",
    "error": "The server answered with an error: there is no first token to explain.",
    "timeout": "The client gave up before the first token.",
    "cancelled": "The connection was closed before the first token.",
    "incomplete": "Recording ended before the first token was seen.",
}


def judge(facts: Facts, baseline: Request | None) -> Verdict:
    """The verdict. `baseline`: a resident request of the same server, if the recording has one."""
    if not facts.answered:
        return Verdict("unknown", None, None, "low", _without_answer(facts))
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
    blamed = Blamed(facts, phase, activity)
    findings = [found for row in RULES if (found := row.look(blamed)) is not None]
    said = [_sentence(facts, phase, activity, baseline), *(f.says for f in findings)]
    limits = [_confidence(facts, phase), *(f.at_most for f in findings if f.at_most)]
    return Verdict(
        cause=phase,
        activity=activity,
        share=share,
        confidence=max(limits, key=CONFIDENCES.index),
        explanation=" ".join(text for text in (*said, *(h.says for h in hints)) if text),
        actions=(
            *(hint.action for hint in hints if hint.action is not None),
            *(action for found in findings for action in found.actions),
        ),
        evidence=(
            *(item for found in findings for item in found.evidence),
            *(item for hint in hints for item in hint.evidence),
        ),
        storage=next((found.storage for found in findings if found.storage), None),
    )


def _without_answer(facts: Facts) -> str:
    """Why there is no first token, and what the wait until then was for."""
    says = _UNANSWERED.get(facts.outcome, "")
    waited: Counter[str] = Counter()
    for phase in facts.phases:
        waited[phase.phase] += phase.duration_ns
    total = waited.total()
    del waited["unexplained"]
    if not waited:
        return says
    most = max(waited, key=lambda p: waited[p])
    words = _words_of(facts, most)
    return f"{says} Of {seconds(total)} until then, {seconds(waited[most])} went into {words}."


def _dominant_phase(facts: Facts) -> str:
    """The longest one, whatever mix of activities it is made of."""
    return max(facts.table, key=lambda p: sum(facts.table[p].values()))


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
    return first_that_matters({n: ns for n, ns in grown.items() if ns > noise_ns(baseline)})


def first_that_matters(beyond: Mapping[str, float]) -> str | None:
    """Of the phases that grew beyond noise, in order of time: the first that makes up a good part
    (a fifth) of their growth. What nothing explains is blamed only where it is the most of it."""
    total = sum(beyond.values())
    matters = [name for name, ns in beyond.items() if ns * 5 >= total]
    if len(matters) > 1 and beyond.get("unexplained", 0) * 2 < total:
        matters = [name for name in matters if name != "unexplained"]
    return matters[0] if matters else None


def _confidence(facts: Facts, phase: str) -> str:
    total = sum(p.duration_ns for p in facts.phases) or 1
    unexplained = sum(p.duration_ns for p in facts.phases if p.phase == "unexplained")
    blamed = [p for p in facts.phases if p.phase == phase]
    observed = all(p.basis == "observed" for p in blamed)
    if unexplained > 0.1 * total or facts.sources_missing > 2:
        return "low"
    return "high" if observed and not facts.sources_missing else "medium"


def _sentence(facts: Facts, phase: str, activity: str, baseline: Request | None) -> str:
    in_phase = sum(facts.table[phase].values())
    in_cell = facts.table[phase][activity]
    text = (
        f"Of {seconds(facts.ttft_ns)} {facts.until}, {seconds(in_phase)} went into "
        f"{_words_of(facts, phase)}"
    )
    crowded = activity == "cpu" and phase in facts.known.core_waits
    did = "computing or waiting for a core" if crowded else _ACTIVITY_WORDS[activity]
    text += f", {seconds(in_cell)} of it {did}" if in_cell < in_phase else f", all of it {did}"
    if baseline is not None and baseline.ttft_ns:
        usual = baseline.phase_totals().get(phase, 0)
        text += f" (request {baseline.id}, with the model resident: {seconds(usual)})"
    return text + "."


def _words_of(facts: Facts, phase: str) -> str:
    """No process was started where looks at Python code alone tell of a launch."""
    told = {e.source for p in facts.phases if p.phase == phase for e in p.evidence}
    return _PREPARING if phase == "launch" and told == {"python_stacks"} else _PHASE_WORDS[phase]
