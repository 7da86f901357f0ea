"""From being able to serve to the first token: handed over, queued, processed, decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ttftprof.model import Evidence
from ttftprof.phases.edges import INFERRED, OBSERVED, Cutter, Edge
from ttftprof.phases.queues import blocked_until, inside_server, others_computed_until
from ttftprof.phases.served import Served, computed
from ttftprof.phases.startup import StartUp, accepted_ns, first_prompt_call
from ttftprof.threads import FOREVER
from ttftprof.timeline import Call, Exchange, Timeline


def until_work(
    timeline: Timeline,
    served: Served,
    start: StartUp | None,
    cutter: Cutter,
    switched: bool,
) -> None:
    """From being able to serve to the beginning of the work on this prompt.

    A front that hands on to a server that was able all along is no gap after its becoming so: the
    request waits its turn in the front.
    """
    handing_on = "ready_gap" if switched else "queue"
    handed = _handed_on(timeline, served, start, switched)
    if handed is not None:
        if served.last_hop is not served.front or served.worker is not None:
            cutter.until("queue", blocked_until(timeline, served, handed.ns))
        cutter.until(handing_on, handed)
    cutter.until("queue", inside_server(timeline, served))


def _handed_on(
    timeline: Timeline, served: Served, start: StartUp | None, switched: bool
) -> Edge | None:
    """When the process that computes got the request."""
    if served.worker is not None and start is not None:
        call = first_prompt_call(timeline, start.process, served)
        if call is not None:
            did = f"pid {served.server} began to work on a prompt"
            return Edge(call.start_ns, INFERRED, Evidence("call", did, call.tid, "tid"))
    if served.back is not None:
        to = served.back.tgid
        evidence = Evidence("sockets", f"the front passed the request on to pid {to}")
        return Edge(served.back.start_ns, OBSERVED, evidence)
    accepted = accepted_ns(timeline, served.front)
    if accepted is None or served.worker is not None or not switched:
        return None
    return Edge(accepted, OBSERVED, Evidence("sockets", "the server took the connection"))


# -- prefill and first decode ---------------------------------------------------------------------


def work(
    timeline: Timeline,
    served: Served,
    start: StartUp | None,
    cutter: Cutter,
    answered: bool,
    switched: bool,
) -> None:
    """Prefill and the first decode. What cannot be told from them is left."""
    if served.alone and not computed(timeline, served.server, cutter.at_ns, served.last_ns):
        return
    prefilled = _prefill_end(timeline, served, cutter.at_ns)
    if prefilled is None and switched and served.worker and start and start.ready is None:
        return  # neither when the server was able to serve nor what it then did was seen
    if switched and answered and prefilled is not None:
        told = _told_from_the_end(served, start, prefilled)
        if told is not None and told.ns > cutter.at_ns:
            cutter.until("init", told)
            prefilled = replace(prefilled, ns=served.last_ns)
    cutter.until("queue", _began_late(timeline, served, prefilled, cutter.at_ns))
    cutter.until("prefill", prefilled)
    if not answered:
        return
    first_token = Evidence("sockets", "the first text left the server")
    if prefilled is None:
        cutter.rest("prefill", INFERRED, first_token)
    else:
        cutter.rest("first_decode", OBSERVED, first_token)


def _told_from_the_end(served: Served, start: StartUp | None, prefilled: Edge) -> Edge | None:
    """Where nothing shows when the server was able to serve, what it says of the prompt is counted
    back from the first token, which follows the prompt. What is before belongs to its start."""
    took = prefilled.evidence.value
    if prefilled.basis != INFERRED or start is None or start.ready is not None:
        return None
    if prefilled.evidence.unit != "ms" or not isinstance(took, (int, float)):
        return None
    told = "the prompt took so long by the server's own figure, up to the first token"
    return Edge(
        served.last_ns - round(took * 1e6), INFERRED, Evidence("response", told, took, "ms")
    )


def _prefill_end(timeline: Timeline, served: Served, begin_ns: int) -> Edge | None:
    mine = served.last_hop
    until = mine.first_token_ns or served.last_ns
    decodes = [
        c
        for name in ("decode", "encode")
        for c in timeline.calls_of(served.server, name, begin_ns, until)
        if c.end_ns <= until
    ]
    if decodes:
        decodes.sort(key=lambda c: c.start_ns)
        return _last_prompt_decode(timeline, decodes, mine)
    prompt_ms = mine.timings.get("prompt_ms")
    if prompt_ms is None and "prompt_eval_duration_ns" in mine.timings:
        prompt_ms = mine.timings["prompt_eval_duration_ns"] / 1e6
    source = "response"
    if not prompt_ms:
        prompt_ms, source = _logged_ms(timeline, served), "log"
    if not prompt_ms:
        return None
    figure = Evidence(source, "the server's own figure for the prompt", prompt_ms, "ms")
    return Edge(begin_ns + round(prompt_ms * 1e6), INFERRED, figure)


def _began_late(
    timeline: Timeline, served: Served, prefilled: Edge | None, since_ns: int
) -> Edge | None:
    """When the server began on this prompt, if it computed for others before: a request has its
    slot while the call for another goes on. By its own figure, back from the prompt's last call."""
    prompt_ms = served.last_hop.timings.get("prompt_ms")
    if not prompt_ms or prefilled is None or prefilled.evidence.source != "call":
        return None
    own_ns = prefilled.ns - round(prompt_ms * 1e6)
    if not others_computed_until(timeline, served, since_ns, own_ns):
        return None
    figure = Evidence("response", "by the server's own figure it began later", prompt_ms, "ms")
    return Edge(own_ns, INFERRED, figure)


_LOGGED_WITHIN_NS = 100_000_000  # of an answer's end


def _logged_ms(timeline: Timeline, served: Served) -> float | None:
    """What the server's log gives for the prompt: written once it is done, or with the answer."""
    mine = served.last_hop
    first_ns, end_ns = mine.first_token_ns, mine.end_ns
    if first_ns is None:
        return None
    told = [
        m.values
        for m in timeline.marks_of(served.server, "prompt_eval")
        if mine.start_ns <= m.ns <= (end_ns or first_ns) + _LOGGED_WITHIN_NS
    ]
    wanted = None if mine.prompt_tokens is None else mine.prompt_tokens - (mine.cached_tokens or 0)
    fitting = [v for v in told if wanted in (None, v.get("tokens"))]
    return float(fitting[0]["ms"]) if len(fitting) == 1 and "ms" in fitting[0] else None


def _last_prompt_decode(timeline: Timeline, decodes: Sequence[Call], mine: Exchange) -> Edge:
    """The call that processed the last prompt token: counted if the number is known, else the last
    call with more than one token. Of answers in the same batch, each call has a token too."""
    if not any(call.value for call in decodes):
        return _last_uncounted(decodes, mine)
    wanted = None
    if mine.prompt_tokens is not None:
        wanted = mine.prompt_tokens - (mine.cached_tokens or 0)
    done = 0
    chosen = next((c for c in reversed(decodes) if c.value > 1), decodes[0])
    if wanted:
        for call in decodes:
            done += max(call.value - _being_answered(timeline, mine, call), 0)
            if done >= wanted:
                chosen = call
                break
    return Edge(
        chosen.end_ns,
        OBSERVED,
        Evidence("call", "llama_decode returned with the last prompt token", wanted, "tokens"),
    )


def _last_uncounted(decodes: Sequence[Call], mine: Exchange) -> Edge:
    """Where calls do not tell their tokens: the one that ended when the server's own figure says,
    else the last before a streamed first token, which the next call made a second one of."""
    prompt_ms = mine.timings.get("prompt_ms")
    if prompt_ms:
        wanted_ns = decodes[0].start_ns + prompt_ms * 1e6
        chosen = min(decodes, key=lambda c: abs(c.end_ns - wanted_ns))
    else:
        chosen = decodes[-1] if mine.streamed else decodes[0]
    return Edge(
        chosen.end_ns,
        OBSERVED,
        Evidence("call", "the last call for the prompt returned", decodes.index(chosen) + 1, "th"),
    )


def _being_answered(timeline: Timeline, mine: Exchange, call: Call) -> int:
    """How many other answers the same server was writing when a call began."""
    return sum(
        1
        for e in timeline.exchanges
        if e is not mine
        and e.tgid == mine.tgid
        and e.generates
        and e.first_token_ns is not None
        and e.first_token_ns <= call.start_ns < (e.end_ns or FOREVER)
    )
