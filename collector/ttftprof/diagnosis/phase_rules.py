"""Rules on the phases, whatever waited in them but storage: one row each, with what it rests on."""

from __future__ import annotations

from ttftprof import scale
from ttftprof.diagnosis.rules import Blamed, Finding, Rule, rule, seconds
from ttftprof.model import ACTIVITIES, Action, Evidence
from ttftprof.phases import ASLEEP, LOADED_FOR_ANOTHER

_NOT_STORAGE = " ".join(a for a in ACTIVITIES if a != "storage_wait")
_MOSTLY = 0.5  # of a phase or of the time wanted, from which something is the main part of it
_NOTEWORTHY_NS = 50_000_000


# -- any phase ------------------------------------------------------------------------------------


def _waited_for_a_core(blamed: Blamed) -> Finding | None:
    wait = blamed.facts.known.core_waits.get(blamed.phase)
    if wait is None:
        return None
    who = f"{wait.by} ran meanwhile" if wait.by else "who ran instead was not recorded"
    action = Action(
        "leave the server more of the cores: stop what runs beside it, or start it with fewer "
        "threads than there are free cores",
        None,
        "record again on the quiet machine; `top -H` shows who runs",
    )
    return Finding(
        f"Its threads waited for a free core {scale.percent(wait.share)} of the time they "
        f"wanted to run ({who}), so this is not the server's own pace.",
        (action,),
        (Evidence("scheduler", "threads waited for a core", wait.waited_ns, "ns"),),
        "low" if wait.share > _MOSTLY else "medium",
    )


def _loaded_again(blamed: Blamed) -> Finding | None:
    again = blamed.facts.known.reload
    if again is None:
        return None
    if again.changed:
        names = ", ".join(name for name, _, _ in again.changed)
        change = f"give every client the same settings ({names}): each change loads the file anew"
    elif "without a request" in again.why:
        change = "keep the model longer (Ollama: keep_alive or OLLAMA_KEEP_ALIVE; llama-swap: ttl)"
    elif "by itself" in again.why:
        change = "find out why the server ended: its log, `dmesg`, `journalctl -k -g oom`"
    else:
        change = "keep the model resident"
    verify = "record again: the file should not be loaded a second time"
    return Finding(
        f"{again.path} had been loaded before: {again.why}.",
        (Action(change, blamed.phase_ns, verify),),
        (Evidence("process", "the same file was loaded before", again.path),),
    )


# -- queue ----------------------------------------------------------------------------------------


def _no_room_in_cache(blamed: Blamed) -> Finding | None:
    found = next(
        (
            e
            for p in blamed.facts.phases
            if p.phase == "queue"
            for e in p.evidence
            if e.source == "engine"
        ),
        None,
    )
    if found is None:
        return None
    action = Action(
        "give the KV cache more memory or let fewer and shorter requests share it (vLLM: "
        "--gpu-memory-utilization up, --max-model-len or --max-num-seqs down)",
        None,
        "curl -s localhost:PORT/metrics | grep -E 'num_requests_waiting|kv_cache_usage'",
    )
    return Finding(f"The engine's own counts: {found.what}.", (action,), (found,))


def _queued_for(blamed: Blamed) -> Evidence | None:
    """What the longest part of the queue was for."""
    waits = [p for p in blamed.facts.phases if p.phase == "queue" and p.evidence]
    longest = max(waits, key=lambda p: p.duration_ns, default=None)
    return longest.evidence[0] if longest else None


def _asleep(blamed: Blamed) -> Finding | None:
    reason = _queued_for(blamed)
    if reason is None or reason.what != ASLEEP:
        return None
    action = Action(
        "have the front wake an engine before it passes a request on (vLLM: /wake_up), or keep the "
        "engine awake",
        blamed.phase_ns,
        "record again: the call that wakes it should come before the request reaches it",
    )
    says = "The engine was asleep, and takes requests all the same: this one lay there meanwhile."
    return Finding(says, (action,), (reason,))


def _behind_another(blamed: Blamed) -> Finding | None:
    reason = _queued_for(blamed)
    if reason is not None and reason.what == ASLEEP:
        return None
    if reason is not None and reason.what == LOADED_FOR_ANOTHER:
        action = Action(
            "what that load took is told by its own request or start: shorten that, or keep the "
            "model resident",
            None,
            "record again: the queue phase shrinks with the load",
        )
        says = "Its model was being loaded for an earlier request, perhaps one who has left."
        return Finding(says, (action,), (reason,))
    action = Action(
        "let the server take more requests at once (parallel slots), or keep both models "
        "resident if memory allows",
        None,
        "record again: the queue phase should be gone",
    )
    return Finding(actions=(action,), evidence=(reason,) if reason else ())


# -- evict ----------------------------------------------------------------------------------------


def _waits_by_the_clock_after_unload(blamed: Blamed) -> Finding | None:
    """Between the old process's end and the next one's execution nothing is left to end."""
    known = blamed.facts.known
    after, fixed = known.after_end_ns, next(iter(known.fixed_waits("evict")), None)
    if after is None or after < _NOTEWORTHY_NS or after < _MOSTLY * blamed.phase_ns:
        return None
    why = ""
    if fixed is not None:
        most = f", at most {seconds(fixed.most_ns)}" if fixed.most_ns else ""
        why = f": {fixed.says}, a look every {seconds(fixed.quantum_ns)}{most}"
    action = Action(
        "keep both models loaded (Ollama: OLLAMA_MAX_LOADED_MODELS), or unload the old one before "
        "the request comes (keep_alive 0)",
        after,
        "record again: the next process should start as the old one ends",
    )
    return Finding(
        f"The old process was gone {seconds(after)} before the next one was started{why}.",
        (action,),
        (Evidence("process", "from the old process's end to the next one's start", after, "ns"),),
    )


def _old_model_ends_slowly(blamed: Blamed) -> Finding | None:
    if blamed.facts.known.woken is not None:
        return None
    after = blamed.facts.known.after_end_ns or 0
    ending = blamed.phase_ns - after
    says = f"The old process took {seconds(ending)} to end." if ending > _NOTEWORTHY_NS else ""
    action = Action(
        "keep both models resident, or unload the old one before the request comes",
        blamed.phase_ns,
        "record again: there should be no evict phase",
    )
    return Finding(says, (action,))


def _falls_asleep(blamed: Blamed) -> Finding | None:
    woken = blamed.facts.known.woken
    room = woken.made_room if woken else None
    if room is None:
        return None
    says = f"The other engine took {seconds(room.duration_ns)} to fall asleep."
    evidence = (Evidence("sockets", "from word to answer of its sleep", room.duration_ns, "ns"),)
    if room.level != 1:
        return Finding(says, (), evidence)
    action = Action(
        "put it to sleep at level 2 (vLLM: /sleep?level=2) where its weights are read again fast "
        "enough: level 1 first copies them into the host's memory",
        None,
        "record again and compare evict and load together",
    )
    return Finding(says, (action,), evidence)


# -- launch ---------------------------------------------------------------------------------------


def _fits_twice(blamed: Blamed) -> Finding | None:
    spent = blamed.facts.known.fit_ns
    if spent < max(_NOTEWORTHY_NS, blamed.phase_ns // 4):
        return None
    action = Action(
        "give the server its sizes and skip the memory-fit pass (llama-server: -fit off with -ngl "
        "and -c)",
        spent,
        "record again: one model_load call in place of two",
    )
    return Finding(
        f"{seconds(spent)} of it went into a first load that only looks whether the model fits.",
        (action,),
        (Evidence("call", "memory-fit pass before the load", spent, "ns"),),
    )


def _asked_late(blamed: Blamed) -> Finding | None:
    """Up at t, told to load at t + Δ: its front looks whether it is up by the clock."""
    known = blamed.facts.known
    late = known.unasked_ns
    if late < _NOTEWORTHY_NS:
        return None
    fixed = [w for w in known.fixed_waits("launch") if late >= _MOSTLY * w.quantum_ns]
    why = "".join(f" {wait.says}." for wait in fixed)
    action = Action(
        "shorten the interval in which the front looks for the new process if it has a setting, or "
        "keep both models loaded",
        late,
        "record again: the launch should end as the new process listens",
    )
    return Finding(
        f"The new process was up {seconds(late)} before its front asked it to do anything.{why}",
        (action,),
        (Evidence("sockets", "from its listening to the first connection", late, "ns"),),
    )


def _asks_helpers(blamed: Blamed) -> Finding | None:
    count = blamed.facts.known.helpers
    if not count:
        return None
    return Finding(
        f"{count} other process{'es' if count > 1 else ''} came and went meanwhile (device "
        "discovery, compilers).",
        (),
        (Evidence("process", "processes that came and went in the launch", count),),
    )


def _imports(blamed: Blamed) -> Finding:
    action = Action(
        "keep the server process alive between models if it can switch inside one process, or keep "
        "a second one started",
        None,
        "`py-spy record --native` or `strace -c -f` on the start shows what it does before",
    )
    return Finding(actions=(action,))


# -- load -----------------------------------------------------------------------------------------


def _mapped_page_by_page(blamed: Blamed) -> Finding | None:
    weights = blamed.weights
    if weights is None or weights.access != "mmap":
        return None
    faults = (weights.minor_faults or 0) + (weights.major_faults or 0)
    action = Action(
        "load without mmap (llama-server: --no-mmap or --direct-io): one copy in place of a fault "
        "for every few pages",
        None,
        "record again: the fault column of load should be gone",
    )
    return Finding(
        f"The pages were at hand and were mapped one fault at a time ({faults:,} faults).",
        (action,),
        (Evidence("faults", "faults on the weights", faults),),
    )


def _wakes_up(blamed: Blamed) -> Finding | None:
    woken = blamed.facts.known.woken
    if woken is None:
        return None
    weights = blamed.weights
    used = weights is not None and (weights.bytes_from_storage or weights.bytes_from_cache)
    deep = woken.slept.level == 2 if woken.slept else bool(used)
    way = "reads its weights again" if deep else "copies its weights back from the host's memory"
    action = Action(
        "let it sleep at level 1 if the host has memory for its weights: nothing is read then"
        if deep
        else "keep both models loaded if memory allows, or wake it before the request comes",
        None,
        "record again and compare load",
    )
    spent = sum(nap.duration_ns for nap in woken.calls)
    return Finding(
        f"No process was started: the engine woke up, and {way}.",
        (action,),
        (Evidence("sockets", "calls that woke it", spent, "ns"),),
    )


# -- init, ready_gap ------------------------------------------------------------------------------


def _waits_by_the_clock(blamed: Blamed) -> Finding | None:
    """Asleep on a timer for about as long as a wait that this engine is known for."""
    slept_ns = blamed.facts.table[blamed.phase].get("sleep", 0)
    fitting = [
        fixed
        for fixed in blamed.facts.known.fixed_waits(blamed.phase)
        if slept_ns >= _MOSTLY * fixed.quantum_ns
    ]
    if not fitting:
        return None
    evidence = Evidence("scheduler", "asleep on a timer", slept_ns, "ns")
    return Finding(" ".join(f"{fixed.says}." for fixed in fitting), (), (evidence,))


def _init(blamed: Blamed) -> Finding | None:
    if blamed.facts.known.woken is not None:
        return None
    action = Action(
        "try the server without its warm-up run (llama-server: --no-warmup) and with a "
        "smaller context size; the first request then pays for the warm-up itself",
        None,
        "record again and compare init",
    )
    return Finding(actions=(action,))


def _front_polls(blamed: Blamed) -> Finding:
    """Able to serve at t, passed on at t + Δ: half a quantum on average, a quantum at most."""
    known = blamed.facts.known
    polls, gap = known.polls, blamed.phase_ns
    says, evidence = "", []
    if polls is not None:
        apart = f", {seconds(polls.quantum_ns)} apart" if polls.quantum_ns else ""
        says = (
            f"The server was able to serve {seconds(gap)} before the front passed the request on; "
            f"the front looked {polls.count} times{apart}."
        )
        evidence.append(Evidence("sockets", "looks of the front at the new server", polls.count))
        if polls.quantum_ns:
            evidence.append(Evidence("sockets", "between two looks", polls.quantum_ns, "ns"))
    for fixed in known.fixed_waits("ready_gap"):
        says += f" {fixed.says}."
    action = Action(
        "shorten the front's health-check interval if it has a setting",
        blamed.facts.table["ready_gap"].get("sleep"),
        "record again and compare ready_gap",
    )
    return Finding(says.strip(), (action,), tuple(evidence))


# -- prefill, first_decode ------------------------------------------------------------------------

# What a thread does for the prompt: there is less of it with fewer tokens. Any other wait is not.
_COMPUTES = ("cpu", "fault", "transfer", "gpu", "lock")


def _left_to_first_use(blamed: Blamed) -> Finding | None:
    came = blamed.facts.known.lazy_bytes
    if not came:
        return None
    action = Action(
        "have the weights read before the server says it is ready (llama-server: no --no-warmup, "
        "or --no-mmap; mlock); the load then takes what the prompt now waits for",
        blamed.facts.table["prefill"].get("storage_wait"),
        "record again: prefill should have no storage_wait",
    )
    return Finding(
        f"This is a load in disguise: {came / 1e6:,.0f} MB of the weights were read from storage "
        "while the prompt was processed.",
        (action,),
        (Evidence("files", "of the weights from storage inside prefill", came, "bytes"),),
    )


def _prompt(blamed: Blamed) -> Finding:
    facts, known = blamed.facts, blamed.facts.known
    says, evidence = [], []
    if facts.prompt_tokens:
        cached = f", {facts.cached_tokens} of them cached" if facts.cached_tokens else ""
        says.append(f"The prompt has {facts.prompt_tokens} tokens{cached}.")
        worked = facts.prompt_tokens - (facts.cached_tokens or 0)
        if worked > 0 and blamed.activity in _COMPUTES:
            rate = worked / (blamed.phase_ns / 1e9)
            says.append(f"That is {rate:,.0f} tokens per second.")
            evidence.append(Evidence("response", "prompt tokens processed", worked, "tokens"))
    if known.cache_lost_tokens is not None:
        says.append("The switch lost the prompt cache that an earlier request had filled.")
    if known.reprocessed:
        says.append("The server said that it processes the whole prompt again.")
        evidence.append(Evidence("log", "forcing full prompt re-processing"))
    action = Action(
        "shorten the prompt or keep its beginning the same, so that the server's prompt cache "
        "is used",
        None,
        "repeat the request with one token of prompt: prefill should shrink with it",
    )
    actions = (action,) if blamed.activity in _COMPUTES else ()
    return Finding(" ".join(says), actions, tuple(evidence))


def _sleeps_over_prompt(_blamed: Blamed) -> Finding:
    action = Action(
        "find out what in the server waits for the clock before it answers (a window in which it "
        "gathers requests, a rate limit, a retry), and shorten that",
        None,
        "`py-spy dump --pid PID`, or `strace -f -p PID`, while a request waits",
    )
    return Finding("A shorter prompt would not change that.", (action,))


def _tokens_without_text(blamed: Blamed) -> Finding | None:
    count = blamed.facts.known.silent_tokens
    if count < 2:
        return None
    action = Action(
        "let the client show reasoning text, or turn reasoning off for such requests",
        blamed.phase_ns,
        "record again: first_decode should hold one token",
    )
    return Finding(
        f"{count} tokens were decoded before the first one that shows text.",
        (action,),
        (Evidence("call", "tokens decoded before the first text", count, "tokens"),),
    )


# What makes everything else said of the phase come second.
LEADING_RULES: tuple[Rule, ...] = (
    rule("waited for a core", _waited_for_a_core, activities="cpu fault"),
    rule("loaded again", _loaded_again, "evict launch load init"),
    rule("left to the first use", _left_to_first_use, "prefill"),
)
PHASE_RULES: tuple[Rule, ...] = (
    rule("no room in the KV cache", _no_room_in_cache, "queue"),
    rule("asleep", _asleep, "queue"),
    rule("behind another request", _behind_another, "queue", _NOT_STORAGE),
    rule("waits by the clock after the end", _waits_by_the_clock_after_unload, "evict"),
    rule("falls asleep", _falls_asleep, "evict"),
    rule("old model ends slowly", _old_model_ends_slowly, "evict", _NOT_STORAGE),
    rule("fits twice", _fits_twice, "launch"),
    rule("asked late", _asked_late, "launch"),
    rule("asks helpers", _asks_helpers, "launch"),
    rule("imports", _imports, "launch", "cpu fault"),
    rule("mapped page by page", _mapped_page_by_page, "load", "fault"),
    rule("wakes up", _wakes_up, "load init"),
    rule("waits by the clock", _waits_by_the_clock, "init"),
    rule("init", _init, "init", _NOT_STORAGE),
    rule("front polls", _front_polls, "ready_gap", _NOT_STORAGE),
    rule("prompt", _prompt, "prefill", _NOT_STORAGE),
    rule("sleeps over the prompt", _sleeps_over_prompt, "prefill", "sleep"),
    rule("tokens without text", _tokens_without_text, "first_decode"),
)
