"""The verdict: what it blames, how sure it is, what it acquits, and what each gain rests on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttftprof.circumstances import Circumstances, CoreWait, Polls, Reload
from ttftprof.diagnosis import NOISE_NS, RULES, Facts, first_that_matters, judge
from ttftprof.diagnosis.phase_rules import LEADING_RULES, PHASE_RULES
from ttftprof.diagnosis.python_rules import PYTHON_RULES
from ttftprof.diagnosis.rules import Blamed
from ttftprof.engines.catalog import engine_named
from ttftprof.model import (
    ACTIVITIES,
    CONFIDENCES,
    OUTCOMES,
    PHASES,
    Activity,
    Evidence,
    FileUse,
    InFlight,
    Phase,
    PythonShare,
    PythonTime,
    Quantiles,
    Request,
    Verdict,
)
from ttftprof.phases.naps import ASLEEP, Nap, Woken

MS = 1_000_000
Cell = tuple[str, str, int]
"""(phase, activity, ms)"""


def partition(cells: Sequence[Cell]) -> tuple[tuple[Phase, ...], tuple[Activity, ...]]:
    """Phases and activities one after the other, from 0."""
    phases, activities, at = [], [], 0
    for phase, activity, length in cells:
        end = at + length * MS
        phases.append(Phase(phase, at, end, "observed"))
        activities.append(Activity(activity, at, end))
        at = end
    return tuple(phases), tuple(activities)


def request(*cells: Cell, identity: str = "2", answered: bool = True) -> Request:
    phases, activities = partition(cells)
    end = phases[-1].end_ns if phases else 0
    return Request(
        id=identity, engine=None, model=None, endpoint="/x", streamed=True, outcome="ok",
        start_ns=0, first_token_ns=end if answered else None, end_ns=end, switched=False,
        residency_before=None, prompt_tokens=None, cached_tokens=None, phases=phases,
        activities=activities, files=(), mounts=(), gpu=(),
        verdict=Verdict("unknown", None, None, "low", ""),
    )  # fmt: skip


def facts(*cells: Cell, files: Sequence[FileUse] = (), missing: int = 0) -> Facts:
    told = request(*cells)
    return Facts(
        ttft_ns=told.ttft_ns or 0, phases=told.phases, activities=told.activities, files=files,
        mounts=(), table=told.phase_activity(), prompt_tokens=None, cached_tokens=None,
        sources_missing=missing, answered=True, outcome="ok",
    )  # fmt: skip


def weights(
    from_storage: int | None = 400_000_000,
    access: str = "mmap",
    size: float | None = 128 << 10,
    advice: tuple[str, ...] = (),
) -> FileUse:
    return FileUse(
        path="/models/b.gguf", device="8:1", inode=1, fstype="ext4", mount="/",
        size_bytes=400_000_000, bytes_from_storage=from_storage, bytes_from_cache=0,
        major_faults=None, minor_faults=None, storage_wait_ns=0, bytes_per_second=61e6,
        request_size_bytes=None if size is None else Quantiles(size, size),
        in_flight=None if size is None else InFlight(1.5, 4), access=access, advice=advice,
        is_weights=True,
    )  # fmt: skip


STORAGE_LOAD: tuple[Cell, ...] = (
    ("evict", "sleep", 100),
    ("load", "storage_wait", 1_000),
    ("load", "cpu", 200),
    ("prefill", "cpu", 300),
)


# -- what is to blame -----------------------------------------------------------------------------


def test_alone_the_largest_cell_is_to_blame() -> None:
    verdict = judge(facts(*STORAGE_LOAD), None)
    assert (verdict.cause, verdict.activity) == ("load", "storage_wait")
    assert verdict.share == pytest.approx(1_000 / 1_600)


def test_parts_of_one_cell_are_summed() -> None:
    cells: list[Cell] = [("queue", "idle", 60), ("load", "cpu", 100), ("queue", "idle", 60)]
    assert judge(facts(*cells), None).cause == "queue"


def test_the_unexplained_is_no_cause() -> None:
    verdict = judge(facts(("unexplained", "idle", 500), ("load", "cpu", 100)), None)
    assert (verdict.cause, verdict.confidence, verdict.actions) == ("unknown", "low", ())
    assert "no phase explains" in verdict.explanation


BASELINE = request(("prefill", "cpu", 290), ("first_decode", "cpu", 10), identity="3")


def test_against_a_baseline_the_first_phase_that_grew_is_to_blame() -> None:
    slow: tuple[Cell, ...] = (
        ("evict", "sleep", 500),
        ("load", "cpu", 600),
        ("prefill", "cpu", 900),
        ("first_decode", "cpu", 10),
    )
    assert judge(facts(*slow), None).cause == "prefill"
    assert judge(facts(*slow), BASELINE).cause == "evict"


def test_growth_within_noise_is_none() -> None:
    """Noise: a tenth of the baseline's TTFT, 30 ms here."""
    for evict, cause in ((30, "load"), (31, "load"), (400, "evict")):
        cells: list[Cell] = [("evict", "sleep", evict), ("load", "cpu", 1_000)]
        assert judge(facts(*cells, ("prefill", "cpu", 290)), BASELINE).cause == cause


def test_a_small_growth_before_a_big_one_is_not_to_blame() -> None:
    """It has to make up a fifth of all that grew."""
    cells: list[Cell] = [("queue", "idle", 200), ("load", "cpu", 801), ("prefill", "cpu", 290)]
    assert judge(facts(*cells), BASELINE).cause == "load"
    cells[1] = ("load", "cpu", 800)
    assert judge(facts(*cells), BASELINE).cause == "queue"


def test_where_nothing_grew_the_dominant_phase_is_named() -> None:
    verdict = judge(facts(("prefill", "cpu", 295), ("first_decode", "cpu", 10)), BASELINE)
    assert verdict.cause == "prefill"


def test_alone_the_longest_phase_is_named_though_it_did_many_things() -> None:
    small: list[Cell] = [("load", a, 90) for a in ("cpu", "lock", "idle")]
    verdict = judge(facts(("launch", "cpu", 270), *small, ("load", "storage_wait", 110)), None)
    assert (verdict.cause, verdict.activity) == ("load", "storage_wait")


def test_a_baseline_is_named_with_its_figure() -> None:
    explanation = judge(facts(*STORAGE_LOAD), BASELINE).explanation
    assert "request 3, with the model resident: 0 ms" in explanation


def test_a_baseline_without_a_token_is_none() -> None:
    silent = request(("prefill", "cpu", 290), answered=False)
    assert judge(facts(*STORAGE_LOAD), silent) == judge(facts(*STORAGE_LOAD), None)


# -- how sure -------------------------------------------------------------------------------------


def inferred(told: Facts, phase: str) -> Facts:
    marked = [replace(p, basis="inferred") if p.phase == phase else p for p in told.phases]
    return replace(told, phases=marked)


@pytest.mark.parametrize(
    ("basis_of", "missing", "confidence"),
    [
        ("", 0, "high"),
        ("evict", 0, "high"),
        ("load", 0, "medium"),
        ("", 1, "medium"),
        ("", 2, "medium"),
        ("", 3, "low"),
    ],
)
def test_confidence(basis_of: str, missing: int, confidence: str) -> None:
    told = inferred(facts(*STORAGE_LOAD, missing=missing), basis_of)
    assert judge(told, None).confidence == confidence


@pytest.mark.parametrize(("unexplained", "confidence"), [(177, "high"), (178, "low")])
def test_what_is_unexplained_costs_confidence(unexplained: int, confidence: str) -> None:
    """A tenth of the whole is the limit: 1,600 ms are explained."""
    told = facts(*STORAGE_LOAD, ("unexplained", "idle", unexplained))
    assert judge(told, None).confidence == confidence


# -- no verdict -----------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_unanswered_request_has_no_cause_but_a_reason(outcome: str) -> None:
    verdict = judge(replace(facts(*STORAGE_LOAD), answered=False, outcome=outcome), None)
    assert (verdict.cause, verdict.activity, verdict.share) == ("unknown", None, None)
    assert (verdict.confidence, verdict.actions) == ("low", ())
    assert verdict.explanation


def test_nothing_seen_is_no_verdict() -> None:
    verdict = judge(facts(), None)
    assert (verdict.cause, verdict.explanation) == (
        "unknown",
        "Nothing of this request's wait was seen.",
    )


# -- storage: convicted and acquitted -------------------------------------------------------------


def test_storage_is_convicted_with_its_figures() -> None:
    told = facts(*STORAGE_LOAD, files=[weights()])
    explanation = judge(told, None).explanation
    for figure in ("400 MB of /models/b.gguf", "61 MB/s", "128 KiB", "1.5 under way"):
        assert figure in explanation


@pytest.mark.parametrize(
    ("from_storage", "waited", "kind"),
    [
        (0, 0, "cache worked"),
        (4_096, 0, "not storage"),
        (4_096, 99, "not storage"),
        (4_096, 101, "unknown"),
        (None, 0, None),
    ],
)
def test_storage_is_acquitted_by_a_count_of_zero_or_a_short_wait(
    from_storage: int | None, waited: int, kind: str | None
) -> None:
    """A tenth of the whole is the limit."""
    cells: list[Cell] = [("load", "cpu", 900 - waited), ("init", "cpu", 100)]
    told = facts(*cells, ("load", "storage_wait", waited), files=[weights(from_storage)])
    verdict = judge(told, None)
    assert verdict.storage == kind
    acquitted = kind in ("cache worked", "not storage")
    assert ("Storage is not to blame" in verdict.explanation) is acquitted


def test_a_warm_map_that_is_slow_by_faults_alone_acquits_storage() -> None:
    verdict = judge(facts(("load", "fault", 900), ("init", "cpu", 100), files=[weights(0)]), None)
    assert (verdict.cause, verdict.activity) == ("load", "fault")
    assert verdict.storage == "cache worked"
    assert "not one byte of the weights came from it" in verdict.explanation
    assert not any("page cache" in action.change for action in verdict.actions)


def test_a_file_that_is_no_model_acquits_nothing() -> None:
    other = replace(weights(0), is_weights=False)
    assert judge(facts(("load", "cpu", 900), files=[other]), None).storage is None


def test_unknown_figures_are_left_out() -> None:
    unknown = replace(weights(size=None), bytes_per_second=None)
    explanation = judge(facts(*STORAGE_LOAD, files=[unknown]), None).explanation
    assert "came from storage." in explanation
    assert "None" not in explanation


def test_prefill_names_its_tokens() -> None:
    told = replace(facts(("prefill", "cpu", 900)), prompt_tokens=1_419, cached_tokens=12)
    assert "1419 tokens, 12 of them cached" in judge(told, None).explanation


# -- what to change -------------------------------------------------------------------------------


def gains(told: Facts) -> Mapping[str, int | None]:
    """{first words of the change: expected gain}."""
    actions = judge(told, None).actions
    assert all(action.verify for action in actions)
    return {action.change.split(",")[0]: action.expected_gain_ns for action in actions}


def test_without_a_model_no_gain_is_promised() -> None:
    gain = gains(facts(*STORAGE_LOAD, files=[weights()]))
    assert gain["load without mmap (llama-server: --no-mmap)"] is None
    assert next(ns for c, ns in gain.items() if c.startswith("keep the weights")) == 1_000 * MS


@pytest.mark.parametrize("size", [256 << 10, 1 << 20, None])
def test_big_or_unknown_requests_are_not_made_bigger(size: float | None) -> None:
    gain = gains(facts(*STORAGE_LOAD, files=[weights(size=size)]))
    assert not any(change.startswith("load without mmap") for change in gain)


def test_a_file_that_is_read_is_not_told_to_be_read() -> None:
    gain = gains(facts(*STORAGE_LOAD, files=[weights(access="read")]))
    assert list(gain) == [next(c for c in gain if c.startswith("keep the weights"))]


def test_advice_of_random_access_is_named_first() -> None:
    told = facts(*STORAGE_LOAD, files=[weights(size=4_096, advice=("MADV_RANDOM",))])
    verdict = judge(told, None)
    assert verdict.storage == "pattern"
    assert "MADV_RANDOM" in verdict.explanation
    assert "random access" in verdict.actions[0].change


def test_without_a_file_there_is_nothing_to_change() -> None:
    assert gains(facts(*STORAGE_LOAD)) == {}


@pytest.mark.parametrize(
    ("cells", "gain"),
    [
        ((("queue", "idle", 900),), None),
        ((("evict", "sleep", 700), ("evict", "cpu", 200)), 900 * MS),
        ((("ready_gap", "sleep", 700), ("ready_gap", "cpu", 20)), 700 * MS),
        ((("ready_gap", "idle", 700),), None),
        ((("prefill", "cpu", 900),), None),
        ((("init", "cpu", 900),), None),
    ],
)
def test_a_gain_is_promised_only_with_a_model(cells: Sequence[Cell], gain: int | None) -> None:
    (action,) = judge(facts(*cells), None).actions
    assert action.expected_gain_ns == gain


@pytest.mark.parametrize(("phase", "activity"), [("launch", "sleep"), ("first_decode", "cpu")])
def test_where_nothing_is_known_to_help_nothing_is_said(phase: str, activity: str) -> None:
    assert judge(facts((phase, activity, 900)), None).actions == ()


@pytest.mark.parametrize("activity", [a for a in ACTIVITIES if a != "storage_wait"])
def test_a_shorter_prompt_is_advised_only_where_the_prompt_is_worked_on(activity: str) -> None:
    given = replace(facts(("prefill", activity, 900)), prompt_tokens=90)
    verdict = judge(given, None)
    works = activity in ("cpu", "fault", "transfer", "gpu", "lock")
    assert any("shorten the prompt" in a.change for a in verdict.actions) == works
    assert ("tokens per second" in verdict.explanation) == works
    assert ("A shorter prompt would not change that." in verdict.explanation) == (
        activity == "sleep"
    )


def test_without_a_new_process_none_is_said_to_be_started() -> None:
    given = facts(("launch", "cpu", 900), ("load", "cpu", 100))
    assert "starting the new server process" in judge(given, None).explanation
    told = Evidence("python_stacks", "found importing", 3, "stacks")
    inside = replace(given.phases[0], evidence=(told,))
    verdict = judge(replace(given, phases=(inside, given.phases[1])), None)
    assert "in the server process, which ran already" in verdict.explanation


# -- public cases: what each would have been told -------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One thread of the case log, as facts, and what its verdict has to say and to propose."""

    number: str
    cells: tuple[Cell, ...]
    cause: str
    says: str
    change: str = ""
    known: Circumstances = field(default_factory=Circumstances)
    files: tuple[FileUse, ...] = ()
    tokens: tuple[int, int] | None = None  # of the prompt, cached
    evidence: tuple[Evidence, ...] = ()  # of the first phase
    python: tuple[PythonTime, ...] = ()


def woken(level: int) -> Woken:
    """As the numbers of case 98 go."""
    slept = Nap(1, 0, 10_570 * MS, level)
    took = {1: 2_190 * MS, 2: 6_530 * MS}[level]
    return Woken((Nap(2, 10_600 * MS, 10_600 * MS + took),), slept, replace(slept, tgid=3))


def imports() -> PythonTime:
    share = PythonShare("imports", 71.4, 0.83, 0.04, 13_280 * MS, ("transformers", "torch"))
    return PythonTime("launch", 86, 20, 1.0, (share,))


CASES = [
    Case(
        "29, 30: a NUMA option turns readahead off",
        (("load", "storage_wait", 450_000), ("load", "cpu", 60_000)),
        "load", "in requests of 4 KiB", "turn off its NUMA option",
        files=(weights(size=4_096, advice=("MADV_RANDOM",)),),
    ),
    Case(
        "35: lazy mmap makes the prompt pay for the load",
        (("load", "cpu", 300), ("prefill", "storage_wait", 9_000), ("prefill", "cpu", 500)),
        "prefill", "a load in disguise: 400 MB", "before the server says it is ready",
        known=Circumstances(lazy_bytes=400_000_000), files=(weights(),),
    ),
    Case(
        "67: the memory-fit step costs a second load",
        (("launch", "cpu", 150_000), ("load", "cpu", 100_000)),
        "launch", "a first load that only looks whether the model fits", "-fit off",
        known=Circumstances(fit_ns=150_000 * MS),
    ),
    Case(
        "68: device discovery in a process of its own",
        (("launch", "idle", 12_000), ("load", "cpu", 2_000)),
        "launch", "1 other process came and went", known=Circumstances(helpers=1),
    ),
    Case(
        "88: LocalAI asks its backend every 2 s whether it is up",
        (("launch", "cpu", 200), ("launch", "idle", 1_800), ("load", "cpu", 900)),
        "launch", "was up 1.75 s before its front asked it to do anything. LocalAI asks",
        "keep both models loaded",
        known=Circumstances(front=engine_named("localai"), unasked_ns=1_750 * MS),
    ),
    Case(
        "75, 100: storage is 6 % of it",
        (("load", "storage_wait", 18_000), ("init", "cpu", 250_000)),
        "init", "initialising the runtime", "--no-warmup", files=(weights(),),
    ),
    Case(
        "78: slow by mmap with everything cached",
        (("load", "fault", 67_000), ("load", "cpu", 3_000)),
        "load", "not one byte of the weights came from it", "load without mmap",
        files=(replace(weights(from_storage=0), minor_faults=900_000, major_faults=0),),
    ),
    Case(
        "82: Ollama waits five seconds for memory that is back",
        (("evict", "sleep", 5_100), ("load", "cpu", 2_000)),
        "evict", "the old process was gone 5.00 s before", "OLLAMA_MAX_LOADED_MODELS",
        known=Circumstances(front=engine_named("ollama"), after_end_ns=5_000 * MS),
    ),
    Case(
        "83: another context size loads the same file anew",
        (("evict", "cpu", 300), ("load", "cpu", 4_000)),
        "load", "-c 2048 → 8192", "the same settings (-c)",
        known=Circumstances(
            reload=Reload("/models/b.gguf", "other options (-c 2048 → 8192)",
                          (("-c", "2048", "8192"),))
        ),
    ),
    Case(
        "85: the model expires and is loaded again every minute",
        (("load", "cpu", 30_000),), "load", "had been loaded before", "keep_alive",
        known=Circumstances(
            reload=Reload("/models/b.gguf", "unloaded after 30.0 s without a request")
        ),
    ),
    Case(
        "87: one request at a time",
        (("queue", "cpu", 20_000), ("prefill", "cpu", 400)),
        "queue", "waiting behind other work", "parallel slots",
        evidence=(Evidence("sockets", "an earlier request (for a) was being answered"),),
    ),
    Case(
        "88: the proxy looks once a second",
        (("load", "cpu", 400), ("ready_gap", "sleep", 950), ("prefill", "cpu", 90)),
        "ready_gap", "able to serve 950 ms before the front", "health-check interval",
        known=Circumstances(front=engine_named("llama-swap"), polls=Polls(3, 1_000 * MS)),
    ),
    Case(
        "89: the swap lost the prompt cache",
        (("load", "cpu", 9_000), ("prefill", "gpu", 300_000)),
        "prefill", "The switch lost the prompt cache", "keep its beginning the same",
        known=Circumstances(cache_lost_tokens=60_000), tokens=(60_000, 0),
    ),
    Case(
        "90: the cache is there and not used",
        (("prefill", "cpu", 14_000),),
        "prefill", "it processes the whole prompt again", "prompt",
        known=Circumstances(reprocessed=True), tokens=(3_461, 0),
    ),
    Case(
        "92: a long system prompt after a load: two bars",
        (("load", "cpu", 40_000), ("prefill", "cpu", 105_000)),
        "prefill", "That is 119 tokens per second", "prompt", tokens=(12_500, 0),
    ),
    Case(
        "96: what no phase of the log explains stays unexplained",
        (("load", "cpu", 20_000), ("unexplained", "idle", 28_000)), "unknown", "no phase explains",
    ),
    Case(
        "88: SGLang looks at its own health once a second",
        (("init", "cpu", 300), ("ready_gap", "idle", 1_400), ("prefill", "cpu", 90)),
        "ready_gap", "looks for the outcome once a second", "health-check interval",
        known=Circumstances(server=engine_named("sglang")),
    ),
    Case(
        "98: asleep at level 1, woken in 2.19 s",
        (("load", "transfer", 2_190), ("prefill", "gpu", 300)),
        "load", "copies its weights back from the host's memory", "wake it before",
        known=Circumstances(woken=woken(1)),
    ),
    Case(
        "98: asleep at level 2, woken in 6.53 s",
        (("load", "cpu", 6_530), ("prefill", "gpu", 300)),
        "load", "reads its weights again", "sleep at level 1", known=Circumstances(woken=woken(2)),
    ),
    Case(
        "98: nobody wakes the engine that has the request",
        (("queue", "idle", 4_000), ("load", "transfer", 2_190), ("prefill", "gpu", 300)),
        "queue", "was asleep, and takes requests all the same", "wake an engine before",
        known=Circumstances(woken=woken(1)), evidence=(Evidence("sockets", ASLEEP, 7, "pid"),),
    ),
    Case(
        "98: the other one takes 10.57 s to fall asleep",
        (("evict", "transfer", 10_570), ("load", "transfer", 2_190)),
        "evict", "took 10.57 s to fall asleep", "sleep at level 2",
        known=Circumstances(woken=woken(1)),
    ),
    Case(
        "SGLang sleeps before it warms up",
        (("init", "sleep", 1_000), ("init", "cpu", 200)),
        "init", "sleeps 1 s before it first asks", "--no-warmup",
        known=Circumstances(server=engine_named("sglang")),
    ),
    Case(
        "TGI's launcher looks for its shard before it starts the router",
        (("init", "sleep", 150), ("init", "cpu", 100)),
        "init", "TGI's launcher looks every 100 ms", "--no-warmup",
        known=Circumstances(server=engine_named("tgi")),
    ),
    Case(
        "a reasoning model's first tokens show no text",
        (("prefill", "cpu", 300), ("first_decode", "cpu", 9_000)),
        "first_decode", "400 tokens were decoded before", "turn reasoning off",
        known=Circumstances(silent_tokens=400),
    ),
    Case(
        "a server that gathers requests before it answers",
        (("prefill", "sleep", 3_000), ("prefill", "cpu", 300)),
        "prefill", "A shorter prompt would not change that", "waits for the clock",
    ),
    Case(
        "75: imports are most of a start",
        (("launch", "cpu", 16_000), ("load", "cpu", 300)),
        "launch", "83 ± 4 % of 86 samples found its Python code importing", "keep the process",
        python=(imports(),),
    ),
    Case(
        "no room in vLLM's KV cache",
        (("queue", "idle", 39_000), ("prefill", "gpu", 4_600)),
        "queue", "no room in the KV cache (5 waiting", "--gpu-memory-utilization",
        evidence=(Evidence("engine", "no room in the KV cache (5 waiting, 3 running)", 5),),
    ),
    Case(
        "one thread too many on a busy machine",
        (("prefill", "cpu", 9_000),),
        "prefill", "waited for a free core 80 % of the time", "fewer threads",
        known=Circumstances(core_waits={"prefill": CoreWait(8_000 * MS, 2_000 * MS)}),
    ),
]  # fmt: skip


def facts_of(case: Case) -> Facts:
    told = facts(*case.cells, files=case.files)
    phases = (replace(told.phases[0], evidence=case.evidence), *told.phases[1:])
    tokens, cached = case.tokens or (None, None)
    return replace(
        told, phases=phases, known=case.known, prompt_tokens=tokens, cached_tokens=cached,
        python=case.python,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.number)
def test_a_public_case_gets_its_verdict(case: Case) -> None:
    verdict = judge(facts_of(case), None)
    assert verdict.cause == case.cause
    assert case.says.lower() in verdict.explanation.lower()
    assert case.change in (verdict.actions[0].change if verdict.actions else "")
    assert all(action.verify for action in verdict.actions)


def test_every_rule_speaks_in_some_case() -> None:
    """Of the rules on phases; storage has cases of its own in test_storage_cause."""
    silent = {row.name for row in (*LEADING_RULES, *PHASE_RULES, *PYTHON_RULES)}
    for case in CASES:
        told = facts_of(case)
        activity = max(told.table.get(case.cause, {"": 0}).items(), key=lambda item: item[1])[0]
        blamed = Blamed(told, case.cause, activity)
        silent -= {row.name for row in RULES if row.look(blamed) is not None}
    assert silent == set()


def test_the_table_of_verdicts_has_every_rule_on_phases() -> None:
    table = (Path(__file__).parents[2] / "docs/VERDICTS.md").read_text()
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    for row in (*LEADING_RULES, *PHASE_RULES, *PYTHON_RULES):
        assert any(cells[1] == row.name for cells in rows), row.name


# Of the case log: scheduler, eviction, swap layer, prompt.
SWAP_CASES = (82, 83, 85, 87, 88, 89, 90, 92, 93, 95, 96, 98, 100)


def test_the_table_of_verdicts_has_every_phase_and_every_case_of_swapping() -> None:
    table = (Path(__file__).parents[2] / "docs/VERDICTS.md").read_text()
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    assert {p.strip() for row in rows for p in row[0].removeprefix("| ").split(",")} >= {*PHASES}
    numbers = {int(n) for row in rows for n in re.findall(r"\b\d+\b", row[2])}
    assert numbers >= {*SWAP_CASES}


def test_every_rule_has_a_name_of_its_own_and_somebody_to_ask_it() -> None:
    assert len({row.name for row in RULES}) == len(RULES)
    assert all(row.phases <= set(PHASES) for row in RULES)
    assert all(row.activities <= set(ACTIVITIES) for row in RULES)


# -- any facts ------------------------------------------------------------------------------------

cells = st.tuples(st.sampled_from(PHASES), st.sampled_from(ACTIVITIES), st.integers(1, 5_000))
files = st.lists(
    st.builds(
        weights,
        st.sampled_from([None, 0, 1, 10**12]),
        st.sampled_from(["mmap", "read", "direct", "mixed"]),
        st.sampled_from([None, 0, 512, 128 << 10, 1 << 20, 1 << 30]),
        st.sampled_from([(), ("MADV_RANDOM",), ("FADV_RANDOM", "MADV_WILLNEED")]),
    ),
    max_size=2,
)


@settings(deadline=None)
@given(st.lists(cells, max_size=8), st.lists(cells, max_size=4), files, st.integers(0, 5))
def test_every_verdict_is_within_its_bounds(
    told: list[Cell], usual: list[Cell], used: list[FileUse], missing: int
) -> None:
    baseline = request(*usual) if usual else None
    known = facts(*told, files=used, missing=missing)
    verdict = judge(known, baseline)
    assert verdict.cause in {*PHASES, "unknown"} - {"unexplained"}
    assert verdict.confidence in CONFIDENCES
    assert verdict.explanation
    assert verdict.share is None or 0 < verdict.share <= 1
    for action in verdict.actions:
        assert action.expected_gain_ns is None or 0 <= action.expected_gain_ns <= known.ttft_ns


@settings(deadline=None)
@given(st.lists(cells, min_size=1, max_size=8))
def test_a_request_that_is_its_own_baseline_has_no_growth(told: list[Cell]) -> None:
    assert NOISE_NS > 0
    assert judge(facts(*told), request(*told)).cause == judge(facts(*told), None).cause


def test_what_nothing_explains_is_blamed_only_where_it_is_most() -> None:
    assert first_that_matters({"unexplained": 70, "load": 220}) == "load"
    assert first_that_matters({"unexplained": 220, "load": 70}) == "unexplained"
    assert first_that_matters({"unexplained": 5}) == "unexplained"
    assert first_that_matters({"queue": 10, "init": 40, "load": 90}) == "init"
    assert first_that_matters({}) is None
