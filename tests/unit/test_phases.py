"""Each phase and each rule on a recording made for it; the partition is exact in all of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ttftprof.events import Kind, Wait
from ttftprof.model import Phase, Request
from ttftprof.phases import requests_of
from ttftprof.phases.holders import weights_of
from ttftprof.sources.http import BEGAN_BEFORE
from unit.recordings import (
    A_GGUF,
    B_GGUF,
    FRONT,
    MIB,
    NEW,
    OLD,
    Scene,
    answered,
    ended,
    launched,
    ms,
    ns,
    router_switch,
    two_models,
)

Part = tuple[str, float, float, str]
"""(phase, begin, end, basis), ms."""
O, I = "observed", "inferred"  # noqa: E741


def parts(phases: tuple[Phase, ...]) -> list[Part]:
    return [(p.phase, ms(p.start_ns), ms(p.end_ns), p.basis) for p in phases]


def check(request: Request, *expected: Part) -> None:
    """The phases are these; they abut and cover the wait, and so do the activities."""
    assert parts(request.phases) == list(expected)
    assert all(
        a.end_ns == b.start_ns for a, b in zip(request.phases, request.phases[1:], strict=False)
    )
    length = request.phases[-1].end_ns - request.start_ns if request.phases else 0
    assert sum(request.phase_totals().values()) == length
    assert sum(request.activity_totals().values()) == length
    assert request.ttft_ns in (None, length)


# What follows once the server is able to serve, in the shared scenes.
SERVED = (
    ("ready_gap", 560, 572, O),
    ("prefill", 572, 700, O),
    ("first_decode", 700, 716, O),
)
STARTED = (("launch", 163, 200, O), ("load", 200, 500, O), ("init", 500, 560, O), *SERVED)


# -- a switch by a router -------------------------------------------------------------------------


def test_a_whole_switch() -> None:
    request = router_switch().only_request()
    check(request, ("queue", 100, 103, I), ("evict", 103, 163, O), *STARTED)
    assert request.switched
    assert all(phase.evidence for phase in request.phases)


def started(scene: Scene) -> Scene:
    return answered(launched(scene).log(NEW, "model_loaded", 560))


@dataclass(frozen=True)
class FirstAct:
    """What is seen of the old model's end, when it shows, and on what it rests."""

    at: float
    basis: str
    kind: str


@pytest.mark.parametrize(
    "act",
    [
        FirstAct(103, I, "signal"),
        FirstAct(102, I, "log"),
        FirstAct(105, I, "context_free"),
        FirstAct(107, I, "model_free"),
    ],
)
def test_eviction_begins_with_the_first_act_seen(act: FirstAct) -> None:
    scene = two_models().exited(OLD, 150, gone=160)
    if act.kind == "signal":
        scene.signalled(OLD, act.at)
    elif act.kind == "log":
        scene.log(FRONT, "evicting", act.at, model="a")
    else:
        scene.call(OLD, act.kind, act.at, act.at + 20)
    request = started(scene).only_request()
    check(request, ("queue", 100, act.at, act.basis), ("evict", act.at, 163, O), *STARTED)


def test_without_any_act_seen_eviction_begins_at_once() -> None:
    request = started(two_models().exited(OLD, 150, gone=160)).only_request()
    check(request, ("evict", 100, 163, O), *STARTED)


def test_an_old_process_that_is_slow_to_leave_the_cpu_made_room() -> None:
    """Its parent was told of its end, and started the next one, while it was preempted."""
    request = started(two_models().signalled(OLD, 103).exited(OLD, 150, gone=170)).only_request()
    check(request, ("queue", 100, 103, I), ("evict", 103, 163, O), *STARTED)


def test_acts_of_before_and_after_are_not_this_eviction() -> None:
    scene = ended(two_models()).signalled(OLD, 20).log(FRONT, "evicting", 40).signalled(OLD, 700)
    check(started(scene).only_request(), ("queue", 100, 103, I), ("evict", 103, 163, O), *STARTED)


def test_a_process_without_a_model_that_ends_is_no_eviction() -> None:
    scene = two_models().process(400, "sh", ppid=1).signalled(400, 110).exited(400, 120, gone=121)
    first = started(scene).only_request().phases[0]
    assert (first.phase, ms(first.end_ns), first.basis) == ("queue", 163, I)


@pytest.mark.parametrize(("arrived", "phase"), [(100, "queue"), (63, "queue"), (62, "unexplained")])
def test_without_an_old_model_only_a_short_wait_for_the_launch_is_a_queue(
    arrived: float, phase: str
) -> None:
    scene = launched(two_models()).log(NEW, "model_loaded", 560)
    check(answered(scene, front_at=arrived).only_request(), (phase, arrived, 163, I), *STARTED)


def test_what_holds_a_model_is_told_by_its_files_calls_or_answers() -> None:
    by_answers = Scene().process(FRONT, "front").process(OLD, "server").file(B_GGUF)
    by_answers.request(OLD, 20, token=30, ports=(9_000, 40_000), generates=True)
    by_answers.connected(FRONT, 19, local=40_000, remote=9_000)
    request = started(ended(by_answers)).only_request()
    assert request.phases[1].phase == "evict"


def test_the_busy_old_model_is_waited_for_first() -> None:
    """Somebody else's answer has to end before its model is evicted."""
    scene = two_models().request(FRONT, 10, token=20, end=102, ports=(8_080, 50_001), model="a")
    ahead, request = started(ended(scene)).report().requests
    check(request, ("queue", 100, 102, O), ("queue", 102, 103, I), ("evict", 103, 163, O), *STARTED)
    assert not ahead.switched


# -- markers that are missing ---------------------------------------------------------------------


def test_without_log_lines_the_last_call_tells_readiness() -> None:
    request = answered(launched(ended(two_models()))).only_request()
    check(
        request,
        ("queue", 100, 103, I), ("evict", 103, 163, O), ("launch", 163, 200, O),
        ("load", 200, 500, O), ("init", 500, 550, I), ("ready_gap", 550, 572, O), *SERVED[1:],
    )  # fmt: skip


def unmarked(*, prompt_ms: float | None = None) -> Scene:
    """A switch of a server that exports no call that is known, and logs nothing."""
    scene = ended(two_models()).forked(NEW, 162, parent=FRONT).executed(NEW, 163)
    scene.connected(FRONT, 571, local=40_001, remote=9_001)
    scene.request(FRONT, 100, token=716)
    timings = {} if prompt_ms is None else {"prompt_ms": prompt_ms}
    return scene.request(NEW, 572, token=715, ports=(9_001, 40_001), timings=timings)


BEFORE_LOAD = (("queue", 100, 103, I), ("evict", 103, 163, O), ("launch", 163, 200, O))


def test_a_mapped_load_without_calls_ends_with_the_last_activity_on_the_file() -> None:
    scene = unmarked().opened(NEW, B_GGUF, 190).mapped(NEW, B_GGUF, 200).listened(NEW, 540)
    scene.file_row(B_GGUF, 220, added_pages=10).file_row(B_GGUF, 480, added_pages=25_600)
    scene.file_row(B_GGUF, 500, added_pages=25_600, evicted_pages=5)
    check(
        scene.only_request(),
        *BEFORE_LOAD, ("load", 200, 480, I), ("init", 480, 540, O), ("ready_gap", 540, 572, O),
        ("prefill", 572, 716, I),
    )  # fmt: skip


def test_activity_of_before_the_load_is_not_its_end() -> None:
    scene = unmarked().mapped(NEW, B_GGUF, 200).listened(NEW, 540)
    scene.file_row(B_GGUF, 190, added_pages=500).file_row(B_GGUF, 300, added_pages=500, opens=1)
    load = next(
        p for p in scene.mapped(NEW, B_GGUF, 200).only_request().phases if p.phase == "init"
    )
    assert ms(load.start_ns) == 200


def test_a_load_by_reading_without_calls() -> None:
    scene = unmarked(prompt_ms=100).opened(NEW, B_GGUF, 170).has_read(NEW, B_GGUF, 170, 171, 4096)
    scene.opened(NEW, B_GGUF, 190).has_read(NEW, B_GGUF, 200, 300, 50 * MIB)
    scene.has_read(NEW, B_GGUF, 300, 420, 50 * MIB).listened(NEW, 540)
    check(
        scene.only_request(),
        *BEFORE_LOAD, ("load", 200, 420, I), ("init", 420, 540, O), ("ready_gap", 540, 572, O),
        ("prefill", 572, 672, I), ("first_decode", 672, 716, O),
    )  # fmt: skip


def test_a_small_or_failed_map_is_no_load() -> None:
    scene = unmarked().mapped(NEW, B_GGUF, 180, length=MIB).mapped(NEW, B_GGUF, 185, flags=4)
    scene.opened(NEW, B_GGUF, 190).has_read(NEW, B_GGUF, 200, 420, 100 * MIB).listened(NEW, 540)
    assert ("load", 200, 420, I) in parts(scene.only_request().phases)


def test_a_health_check_that_passes_tells_readiness() -> None:
    scene = unmarked().mapped(NEW, B_GGUF, 200)
    for at, status in ((300, 503), (520, 200), (560, 200)):
        scene.request(NEW, at, headers=at, end=at, ports=(9_001, 40_002), status=status,
                      endpoint="/health", method="GET", generates=False)  # fmt: skip
    assert ("init", 200, 520, I) in parts(scene.only_request().phases)


def test_it_was_ready_when_it_came_to_rest() -> None:
    """The front looks at 300 in vain and at 560; the server has had nothing to do since 450."""
    scene = unmarked().mapped(NEW, B_GGUF, 200)
    for at, status in ((300, 503), (560, 200)):
        scene.request(NEW, at, headers=at, end=at, ports=(9_001, 40_002), status=status,
                      endpoint="/health", method="GET", generates=False)  # fmt: skip
    scene.wait(NEW, 162, 163, Wait.STORAGE).wait(NEW, 450, 559, Wait.LOCK)
    assert ("init", 200, 450, I) in parts(scene.only_request().phases)


def test_a_shell_that_executes_the_server_in_its_place_is_part_of_the_launch() -> None:
    scene = ended(two_models()).forked(NEW, 162, parent=FRONT).executed(NEW, 163, comm="sh")
    scene.executed(NEW, 180).call(NEW, "model_load", 200, 500).log(NEW, "model_loaded", 560)
    check(answered(scene).only_request(), ("queue", 100, 103, I), ("evict", 103, 163, O), *STARTED)


def test_a_server_that_executes_itself_anew_begins_there() -> None:
    """What it did before was another life's work."""
    scene = Scene().process(NEW).file(B_GGUF, "/models/b.gguf").forked(NEW, 10).executed(NEW, 11)
    scene.request(NEW, 20, token=30, end=40, ports=(9_000, 50_009)).executed(NEW, 163)
    scene.opened(NEW, B_GGUF, 195).call(NEW, "model_load", 200, 500).log(NEW, "model_loaded", 560)
    scene.accepted(NEW, 565, socket=0xABC).request(NEW, 170, token=716, socket=0xABC)
    assert last(scene)[0] == ("launch", 170, 200, O)


def test_the_process_that_starts_the_engines_others_is_part_of_the_launch() -> None:
    """A front, an API server and the engine's own process, which has the weights."""
    scene = ended(two_models()).file(B_GGUF, "/m/b.safetensors")
    scene.forked(400, 162, parent=FRONT).executed(400, 163, comm="vllm", engine="vllm")
    scene.forked(NEW, 180, parent=400).executed(NEW, 181, comm="VLLM::EngineCor", engine="vllm")
    scene.wait(400, 170, 500, Wait.NETWORK).wait(NEW, 182, 183, Wait.LOCK)
    scene.opened(NEW, B_GGUF, 199).has_read(NEW, B_GGUF, 200, 500, 100 * MIB)
    scene.log(400, "serving", 560).connected(FRONT, 571, local=40_001, remote=9_001)
    scene.request(FRONT, 100, token=716).request(400, 572, token=715, ports=(9_001, 40_001))
    check(
        scene.only_request(),
        ("queue", 100, 103, I), ("evict", 103, 163, O), ("launch", 163, 181, O),
        ("launch", 181, 200, O), ("load", 200, 500, I), ("init", 500, 560, O),
        ("ready_gap", 560, 572, O), ("prefill", 572, 716, I),
    )  # fmt: skip


LAUNCHER, ROUTER = 400, 401


def started_by_a_launcher(shard_listens: float = 502) -> Scene:
    """TGI: a launcher starts a shard, which has the weights, then a router, which asks it."""
    scene = ended(two_models()).file(B_GGUF, "/m/b.safetensors")
    scene.forked(LAUNCHER, 162, parent=FRONT).executed(LAUNCHER, 163, engine="tgi")
    scene.forked(NEW, 180, parent=LAUNCHER).executed(NEW, 181, engine="tgi")
    scene.opened(NEW, B_GGUF, 199).has_read(NEW, B_GGUF, 200, 500, 100 * MIB)
    scene.listened(NEW, shard_listens, port=0)
    scene.forked(ROUTER, 520, parent=LAUNCHER).executed(ROUTER, 521, engine="tgi")
    scene.connected(FRONT, 571, local=40_001, remote=9_001)
    return scene.request(FRONT, 100, token=716).request(
        ROUTER, 572, token=715, ports=(9_001, 40_001)
    )


BY_A_LAUNCHER = (
    ("queue", 100, 103, I), ("evict", 103, 163, O), ("launch", 163, 181, O),
    ("launch", 181, 200, O), ("load", 200, 500, I), ("init", 500, 560, O),
    ("ready_gap", 560, 572, O), ("prefill", 572, 716, I),
)  # fmt: skip


def test_a_router_beside_the_process_with_the_weights_says_that_it_serves() -> None:
    """What its launcher passes on comes later."""
    scene = started_by_a_launcher().log(ROUTER, "serving", 560).log(LAUNCHER, "serving", 561)
    check(scene.only_request(), *BY_A_LAUNCHER)


def test_a_router_beside_the_process_with_the_weights_begins_to_listen() -> None:
    """The process with the weights had listened for the router alone."""
    check(started_by_a_launcher().listened(ROUTER, 560).only_request(), *BY_A_LAUNCHER)


def test_the_engines_own_process_computed_not_one_that_was_started_later() -> None:
    """Another server is loaded for somebody else meanwhile."""
    scene = started_by_a_launcher().log(ROUTER, "serving", 560)
    scene.forked(OLD + 1, 600, parent=FRONT).executed(OLD + 1, 601, engine="vllm")
    scene.opened(OLD + 1, A_GGUF, 602).has_read(OLD + 1, A_GGUF, 603, 650, 100 * MIB)
    check(scene.only_request(), *BY_A_LAUNCHER)


@pytest.mark.parametrize("rest", [Wait.NETWORK, Wait.LOCK])
def test_a_wait_for_the_router_is_what_the_router_does_then_what_its_launcher_does(
    rest: Wait,
) -> None:
    scene = started_by_a_launcher().log(ROUTER, "serving", 560)
    scene.wait(NEW, 500, 550, rest).wait(LAUNCHER, 165, 180, Wait.TIMER)
    scene.wait(LAUNCHER, 490, 519, Wait.TIMER).wait(ROUTER, 540, 580, Wait.NETWORK)
    init = scene.only_request().phase_activity()["init"]
    assert init["sleep"] == 19_000_000


def test_an_engines_launcher_is_told_to_end_and_goes_last() -> None:
    """It ends the process with the weights when it comes to that."""
    scene = Scene().process(FRONT, "front").file(A_GGUF, "/m/a.safetensors").file(B_GGUF)
    scene.forked(LAUNCHER, 10, parent=FRONT).executed(LAUNCHER, 11, engine="tgi")
    scene.forked(OLD, 20, parent=LAUNCHER).executed(OLD, 21, engine="tgi")
    scene.opened(OLD, A_GGUF, 22).has_read(OLD, A_GGUF, 23, 24, 100 * MIB)
    scene.signalled(LAUNCHER, 103).signalled(OLD, 130).exited(OLD, 131, gone=132, since=20)
    scene.exited(LAUNCHER, 150, gone=160, since=10)
    check(started(scene).only_request(), ("queue", 100, 103, I), ("evict", 103, 163, O), *STARTED)


def test_the_old_models_own_memory_fit_pass_did_not_begin_its_end() -> None:
    """It was loaded while this request waited."""
    scene = Scene().process(FRONT).file(A_GGUF, "/models/a.gguf").file(B_GGUF, "/models/b.gguf")
    scene.forked(OLD, 104, parent=FRONT).executed(OLD, 105).call(OLD, "model_load", 106, 107)
    scene.call(OLD, "model_free", 108, 109).call(OLD, "model_load", 110, 120)
    scene.call(OLD, "context_free", 140, 145).exited(OLD, 150, gone=160, since=104)
    request = started(scene).only_request()
    assert ("evict", 140, 163, O) in parts(request.phases)


@pytest.mark.parametrize(("tokens", "end"), [(38, 140), (7, 160)])
def test_the_servers_log_tells_prefill(tokens: int, end: float) -> None:
    """Only the line of this prompt."""
    scene = Scene().process(NEW).file(B_GGUF).held(NEW, B_GGUF)
    scene.log(NEW, "prompt_eval", 161, ms=40.0, tokens=tokens)
    scene.request(NEW, 100, token=160, prompt_tokens=38)
    assert parts(scene.only_request().phases)[0] == ("prefill", 100, end, I)


def test_nothing_known_of_the_new_process_is_a_launch_until_it_served() -> None:
    request = unmarked().only_request()
    assert parts(request.phases)[-1] == ("prefill", 572, 716, I)
    assert sum(request.phase_totals().values()) == request.ttft_ns


def test_the_memory_fit_pass_is_part_of_the_launch() -> None:
    scene = ended(two_models()).forked(NEW, 162).executed(NEW, 163)
    scene.call(NEW, "model_load", 170, 180).call(NEW, "context_init", 181, 185)
    scene.call(NEW, "context_free", 186, 187).call(NEW, "model_free", 188, 189)
    request = answered(launched(scene).log(NEW, "model_loaded", 560)).only_request()
    assert ("launch", 163, 200, O) in parts(request.phases)
    assert "load" not in {p.phase for p in request.phases if ms(p.end_ns) <= 200}


def test_a_front_that_tries_again_is_served_by_the_last_try() -> None:
    scene = ended(two_models()).connected(FRONT, 510, local=40_001, remote=9_001)
    scene.request(NEW, 510, headers=511, end=511, ports=(9_001, 40_001), status=503,
                  outcome="error")  # fmt: skip
    request = started(scene).only_request()
    check(request, ("queue", 100, 103, I), ("evict", 103, 163, O), *STARTED)


# -- one server, restarted ------------------------------------------------------------------------


def restarted(accepted: float = 565) -> Scene:
    """The new server listens from 170 and takes connections once it is able to serve."""
    scene = ended(two_models())
    launched(scene).listened(NEW, 170).log(NEW, "model_loaded", 560)
    scene.accepted(NEW, accepted, socket=0xABC)
    return (
        scene.request(NEW, 180, token=716, socket=0xABC, prompt_tokens=38, cached_tokens=0)
        .call(NEW, "decode", 575, 640, value=32)
        .call(NEW, "decode", 641, 700, value=6)
    )


def test_a_request_in_the_backlog_of_a_server_that_starts() -> None:
    check(
        restarted().only_request(),
        ("launch", 180, 200, O), ("load", 200, 500, O), ("init", 500, 560, O),
        ("ready_gap", 560, 565, O), ("prefill", 565, 700, O), ("first_decode", 700, 716, O),
    )  # fmt: skip


def test_a_warm_up_before_the_backlog_is_taken_is_not_a_prefill() -> None:
    scene = ended(two_models())
    launched(scene).listened(NEW, 170).accepted(NEW, 565, socket=0xABC)
    scene.request(NEW, 180, token=716, socket=0xABC).call(NEW, "decode", 575, 700, value=38)
    assert ("init", 500, 550, I) in parts(scene.only_request().phases)


def test_a_restart_that_nobody_waits_for_is_a_start() -> None:
    scene = launched(ended(two_models())).log(NEW, "model_loaded", 560)
    report = scene.request(NEW, 900, token=950, ports=(9_001, 50_000)).report()
    (start,) = report.starts
    assert parts(start.phases) == [
        ("evict", 103, 163, O),
        ("launch", 163, 200, O),
        ("load", 200, 500, O),
        ("init", 500, 560, O),
    ]
    assert (start.outcome, start.model, start.endpoint) == ("ok", "b.gguf", "")
    assert not report.requests[0].switched


def test_a_start_that_was_not_seen_to_its_end() -> None:
    scene = Scene(end=400).file(B_GGUF).forked(NEW, 162).executed(NEW, 163)
    (start,) = scene.call(NEW, "model_load", 200, None).report().starts
    assert parts(start.phases) == [("launch", 163, 200, O), ("unexplained", 200, 400, I)]
    assert start.outcome == "incomplete"


@pytest.mark.parametrize("begin", [163, 100])
def test_a_load_at_or_before_its_process_is_no_start(begin: float) -> None:
    """Only a damaged recording says so."""
    scene = Scene().file(B_GGUF).forked(NEW, 50).executed(NEW, 163)
    report = scene.call(NEW, "model_load", begin, begin).report()
    assert all(start.phases for start in report.starts)


# -- a switch within one process ------------------------------------------------------------------


def switched_inside(scene: Scene) -> Scene:
    scene.file(B_GGUF, "/models/b.gguf").call(NEW, "context_free", 110, 120).call(
        NEW, "model_free", 121, 150
    )
    scene.call(NEW, "model_load", 160, 400).opened(NEW, B_GGUF, 165).mapped(NEW, B_GGUF, 170)
    return scene.call(NEW, "context_init", 410, 450).log(NEW, "model_loaded", 455)


SWITCHED_INSIDE = [("evict", 110, 160, O), ("load", 160, 400, O), ("init", 400, 455, O)]


def test_a_switch_within_a_process_that_nobody_waits_for_is_a_start() -> None:
    scene = switched_inside(Scene().process(NEW, "python"))
    report = scene.request(NEW, 900, token=950).report()
    (start,) = report.starts
    assert parts(start.phases) == SWITCHED_INSIDE
    assert (start.outcome, start.model) == ("ok", "b.gguf")
    assert not report.requests[0].switched


def test_a_first_start_and_a_switch_inside_are_two_starts() -> None:
    scene = Scene().forked(NEW, 1).executed(NEW, 2, comm="python").file(A_GGUF, "/models/a.gguf")
    scene.call(NEW, "model_load", 20, 60).opened(NEW, A_GGUF, 21).mapped(NEW, A_GGUF, 22)
    scene.call(NEW, "context_init", 61, 70).log(NEW, "model_loaded", 75)
    first, second = switched_inside(scene).report().starts
    assert parts(first.phases) == [
        ("launch", 2, 20, O), ("load", 20, 60, O), ("init", 60, 75, O)
    ]  # fmt: skip
    assert parts(second.phases) == SWITCHED_INSIDE
    assert (first.model, second.model) == ("a.gguf", "b.gguf")


def test_the_memory_fit_pass_is_no_switch() -> None:
    """It frees what it has loaded before anybody could be served."""
    scene = Scene().forked(NEW, 1).executed(NEW, 2).file(A_GGUF)
    scene.call(NEW, "model_load", 20, 60).call(NEW, "context_init", 61, 70)
    (start,) = switched_inside(scene).report().starts
    assert parts(start.phases)[0] == ("launch", 2, 160, O)


def in_process(*, frees: bool = True, answered_before: bool = False) -> Scene:
    """The process has model A, and loads B with the request in hand."""
    scene = Scene().process(NEW, "server").file(A_GGUF, size_bytes=400 * MIB).file(B_GGUF)
    scene.held(NEW, A_GGUF)
    if answered_before:
        scene.request(NEW, 10, token=20, end=50, ports=(8_080, 50_001), model="a")
    if frees:
        scene.call(NEW, "context_free", 110, 120).call(NEW, "model_free", 121, 150)
    scene.call(NEW, "model_load", 160, 400).opened(NEW, B_GGUF, 165).mapped(NEW, B_GGUF, 170)
    scene.call(NEW, "context_init", 410, 450)
    scene.call(NEW, "decode", 460, 600, value=38)
    return scene.request(NEW, 100, token=610, prompt_tokens=38, cached_tokens=0)


RELOADED = (
    ("load", 160, 400, O), ("init", 400, 450, I), ("prefill", 450, 600, O),
    ("first_decode", 600, 610, O),
)  # fmt: skip


@pytest.mark.parametrize("answered_before", [True, False])
def test_a_reload_within_the_process(answered_before: bool) -> None:
    request = in_process(answered_before=answered_before).report().requests[-1]
    check(request, ("queue", 100, 110, I), ("evict", 110, 160, O), *RELOADED)
    assert request.switched
    assert [f.path for f in request.files if f.is_weights] == [f"/models/{B_GGUF}.gguf"]


def test_a_reload_whose_making_room_was_not_seen() -> None:
    request = in_process(frees=False, answered_before=True).report().requests[-1]
    check(request, ("unexplained", 100, 160, I), *RELOADED)


def test_a_reload_after_somebody_elses_answer() -> None:
    scene = in_process().request(NEW, 10, token=20, end=105, ports=(8_080, 50_001), model="a")
    request = scene.report().requests[-1]
    check(
        request, ("queue", 100, 105, O), ("queue", 105, 110, I), ("evict", 110, 160, O), *RELOADED
    )


def test_a_request_that_comes_in_anothers_reload_is_queued() -> None:
    scene = in_process(answered_before=True)
    scene.request(NEW, 200, token=700, ports=(8_080, 50_002), prompt_tokens=10)
    scene.call(NEW, "decode", 620, 690, value=10)
    request = scene.report().requests[-1]
    assert parts(request.phases)[0] == ("queue", 200, 450, I)


def test_a_router_whose_server_is_asleep() -> None:
    """It has given its model up, and loads it again with the passed-on request in hand."""
    scene = Scene().process(FRONT, "front", engine="llama.cpp").process(NEW, "server", ppid=FRONT)
    scene.file(B_GGUF, "/models/b.gguf").call(NEW, "context_free", 10, 15)
    scene.call(NEW, "model_free", 16, 20)
    scene.request(FRONT, 100, token=612).connected(FRONT, 101, local=40_001, remote=9_001)
    scene.request(NEW, 102, token=610, ports=(9_001, 40_001), prompt_tokens=38, cached_tokens=0)
    scene.call(NEW, "model_load", 160, 400).opened(NEW, B_GGUF, 165).mapped(NEW, B_GGUF, 170)
    scene.call(NEW, "context_init", 410, 450).call(NEW, "decode", 460, 600, value=38)
    request = scene.only_request()
    assert request.switched
    assert [part[:3] for part in parts(request.phases)][-4:] == [
        ("load", 160, 400), ("init", 400, 450), ("prefill", 450, 600), ("first_decode", 600, 612)
    ]  # fmt: skip


def reads_on_demand(accepted: float, executed: float | None = None) -> Scene:
    """A server that runs, and reads its weights with the request of 100 ms in hand."""
    scene = Scene().process(NEW, "python").file(B_GGUF, "/models/b.gguf")
    if executed is not None:
        scene.forked(NEW, executed - 1).executed(NEW, executed, comm="python").listened(NEW, 50)
    scene.accepted(NEW, accepted, socket=0xABC).opened(NEW, B_GGUF, 1_590)
    scene.has_read(NEW, B_GGUF, 1_600, 1_700, 100 * MIB)
    scene.wait(NEW, accepted + 1, 1_589, Wait.TIMER)
    return scene.request(NEW, 100, token=1_800, socket=0xABC)


@pytest.mark.parametrize("executed", [None, 10])
def test_a_process_that_runs_is_not_being_started(executed: float | None) -> None:
    """It sleeps over the request before it reads."""
    request = reads_on_demand(101, executed).report().requests[-1]
    check(
        request,
        ("queue", 100, 101, I), ("unexplained", 101, 1_600, I), ("load", 1_600, 1_700, I),
        ("prefill", 1_700, 1_800, I),
    )  # fmt: skip
    assert request.verdict.cause == "unknown"
    assert request.verdict.activity == "sleep"
    assert "starting" not in request.verdict.explanation


def test_a_process_that_takes_a_request_late_is_not_being_started() -> None:
    """It was stopped by a signal: what kept it is not known."""
    request = reads_on_demand(1_100).only_request()
    assert parts(request.phases)[:2] == [
        ("unexplained", 100, 1_100, I),
        ("unexplained", 1_100, 1_600, I),
    ]
    assert request.phases[0].evidence[0].what == f"pid {NEW} had not yet taken the connection"


def test_weights_mapped_long_ago_and_read_now_are_a_load() -> None:
    scene = reads_on_demand(101)
    scene.opened(NEW, B_GGUF, 20).mapped(NEW, B_GGUF, 21).file(A_GGUF).opened(NEW, A_GGUF, 30)
    request = scene.mapped(NEW, A_GGUF, 31, address=0x7E00_0000_0000).report().requests[-1]
    assert request.switched
    assert parts(request.phases)[-2:] == [("load", 1_600, 1_700, I), ("prefill", 1_700, 1_800, I)]
    assert [f.path for f in request.files if f.is_weights] == ["/models/b.gguf"]


def test_reads_through_a_descriptor_older_than_the_recording_are_a_load() -> None:
    scene = Scene().process(NEW, "python").file(B_GGUF, "/models/b.gguf").held(NEW, B_GGUF)
    scene.accepted(NEW, 101, socket=0xABC).has_read(NEW, B_GGUF, 200, 300, 100 * MIB)
    request = scene.request(NEW, 100, token=400, socket=0xABC).report().requests[-1]
    assert ("load", 200, 300, I) in parts(request.phases)


def test_a_second_load_through_the_same_descriptor_begins_where_it_reads_again() -> None:
    """It was loaded through it before (a server puts its weights away to make room); a last look at
    the header is no load."""
    scene = Scene().process(NEW, "python").file(B_GGUF, "/models/b.gguf").opened(NEW, B_GGUF, 10)
    for begin in (20, 200):
        scene.has_read(NEW, B_GGUF, begin, begin + 1, MIB // 2, offset=0)
        scene.has_read(NEW, B_GGUF, begin + 1, begin + 60, 60 * MIB, offset=MIB // 2)
        scene.has_read(NEW, B_GGUF, begin + 60, begin + 90, 39 * MIB)
    scene.has_read(NEW, B_GGUF, 295, 296, 4096, offset=0)
    scene.accepted(NEW, 101, socket=0xABC)
    request = scene.request(NEW, 100, token=400, socket=0xABC).report().requests[-1]
    assert ("load", 200, 296, I) in parts(request.phases)


def test_pieces_read_out_of_order_are_one_load() -> None:
    scene = Scene().process(NEW, "python").file(B_GGUF, "/models/b.gguf").opened(NEW, B_GGUF, 110)
    for index, piece in enumerate((3, 1, 2, 0)):
        at = 200 + 20 * index
        scene.has_read(NEW, B_GGUF, at, at + 20, 25 * MIB, offset=piece * 25 * MIB)
    scene.accepted(NEW, 101, socket=0xABC)
    request = scene.request(NEW, 100, token=400, socket=0xABC).report().requests[-1]
    assert ("load", 200, 280, I) in parts(request.phases)


def test_a_look_at_the_header_of_mapped_weights_is_no_load() -> None:
    scene = Scene().process(NEW, "python").file(B_GGUF, "/models/b.gguf")
    scene.opened(NEW, B_GGUF, 20).mapped(NEW, B_GGUF, 21).accepted(NEW, 101, socket=0xABC)
    scene.opened(NEW, B_GGUF, 110).has_read(NEW, B_GGUF, 110, 111, 4096)
    assert not scene.request(NEW, 100, token=400, socket=0xABC).only_request().switched


# -- no switch ------------------------------------------------------------------------------------


def resident(token: float = 160) -> Scene:
    """The front passes a request on to a server that has its model."""
    scene = two_models().connected(FRONT, 101, local=40_001, remote=9_001)
    scene.request(FRONT, 100, token=token + 1, model="a")
    return scene.request(OLD, 102, token=token, ports=(9_001, 40_001), model="a", prompt_tokens=38)


def test_a_resident_model() -> None:
    request = resident().call(OLD, "decode", 105, 150, value=38).only_request()
    check(
        request,
        ("queue", 100, 102, O), ("prefill", 102, 150, O), ("first_decode", 150, 161, O),
    )  # fmt: skip
    assert not request.switched


@pytest.mark.parametrize(
    ("timings", "streamed", "end"),
    [
        ({}, True, 150),
        ({"prompt_ms": 29.5}, True, 140),
        ({}, False, 140),
        ({"prompt_ms": 45}, 1, 150),
    ],
)
def test_calls_that_do_not_count_their_tokens(
    timings: dict[str, float], streamed: bool, end: float
) -> None:
    scene = Scene().process(NEW, "server").file(A_GGUF).held(NEW, A_GGUF)
    scene.request(NEW, 100, token=160, timings=timings, streamed=streamed)
    scene.call(NEW, "decode", 110, 140).call(NEW, "decode", 141, 150).call(NEW, "decode", 151, 170)
    assert ("first_decode", end, 160, O) in parts(scene.only_request().phases)


@pytest.mark.parametrize(
    ("prompt", "cached", "end"),
    [(38, 0, 150), (38, 6, 140), (70, 32, 150), (38, 38, 150), (None, None, 150), (999, 0, 150)],
)
def test_the_last_prompt_token_is_counted(prompt: int | None, cached: int | None, end: int) -> None:
    scene = Scene().process(NEW).call(NEW, "decode", 105, 140, value=32)
    scene.call(NEW, "decode", 141, 150, value=6).call(NEW, "decode", 151, 155, value=1)
    scene.request(NEW, 100, token=160, prompt_tokens=prompt, cached_tokens=cached)
    assert ("prefill", 100, end, O) in parts(scene.only_request().phases)


def test_a_prompt_of_one_token() -> None:
    scene = Scene().process(NEW).call(NEW, "decode", 105, 110, value=1)
    scene.call(NEW, "decode", 111, 115, value=1).request(NEW, 100, token=120)
    assert parts(scene.only_request().phases)[0] == ("prefill", 100, 110, O)


@pytest.mark.parametrize(
    ("timings", "end"),
    [
        ({"prompt_ms": 40.0}, 140),
        ({"prompt_eval_duration_ns": 30e6}, 130),
        ({"prompt_ms": 1e12}, 160),
        ({"prompt_ms": 0.0}, 160),
    ],
)
def test_the_servers_own_figure_tells_prefill(timings: dict[str, float], end: float) -> None:
    request = Scene().process(NEW).request(NEW, 100, token=160, timings=timings).only_request()
    assert parts(request.phases)[0] == ("prefill", 100, end, I)
    assert sum(request.phase_totals().values()) == request.ttft_ns


def test_where_nothing_shows_who_computed_nothing_is_said() -> None:
    """It may be the front of something that no probe sees."""
    request = Scene().process(NEW).request(NEW, 100, token=160).only_request()
    check(request, ("unexplained", 100, 160, I))


def test_a_process_that_computed_itself_is_no_mere_front() -> None:
    scene = Scene().process(NEW).wait(NEW, 0, 101, Wait.NETWORK).wait(NEW, 158, 159, Wait.LOCK)
    check(scene.request(NEW, 100, token=160).only_request(), ("prefill", 100, 160, I))


def test_of_a_server_that_was_loaded_long_ago_who_was_busy_below_it_computed() -> None:
    """Its weights are no file that it holds any more; the front waited, one child computed."""
    scene = Scene().process(FRONT).process(OLD, ppid=FRONT).process(NEW, ppid=FRONT)
    scene.wait(FRONT, 0, 101, Wait.NETWORK).wait(FRONT, 102, 159, Wait.NETWORK)
    scene.wait(OLD, 0, 101, Wait.NETWORK).wait(OLD, 106, 159, Wait.NETWORK)
    scene.wait(NEW, 0, 103, Wait.PIPE).wait(NEW, 158, 170, Wait.PIPE)
    request = scene.request(FRONT, 100, token=160).only_request()
    check(request, ("prefill", 100, 160, I))
    assert request.activity_totals()["cpu"] == ns(158) - ns(103)


def test_who_spins_while_the_process_below_it_computes_did_not_compute() -> None:
    """vLLM 0.32 on a CPU: its engine core was as busy as its worker, for it polls a queue."""
    scene = Scene().process(FRONT).process(OLD, ppid=FRONT).process(NEW, ppid=OLD)
    scene.wait(FRONT, 0, 101, Wait.NETWORK).wait(FRONT, 102, 159, Wait.NETWORK)
    scene.wait(NEW, 0, 103, Wait.PIPE).wait(NEW, 158, 170, Wait.PIPE)  # OLD never waits
    request = scene.request(FRONT, 100, token=160).only_request()
    assert request.activity_totals() == {"cpu": ns(158) - ns(103), "idle": ns(105) - ns(100)}


def test_where_nobody_below_it_was_busy_nobody_is_named() -> None:
    scene = Scene().process(FRONT).process(NEW, ppid=FRONT)
    scene.wait(FRONT, 0, 101, Wait.NETWORK).wait(FRONT, 102, 159, Wait.NETWORK)
    scene.wait(NEW, 0, 101, Wait.PIPE).wait(NEW, 120, 170, Wait.PIPE)
    request = scene.request(FRONT, 100, token=160).only_request()
    check(request, ("unexplained", 100, 160, I))


def test_a_process_that_held_weights_computed() -> None:
    scene = Scene().process(NEW).file(B_GGUF).held(NEW, B_GGUF)
    check(scene.request(NEW, 100, token=160).only_request(), ("prefill", 100, 160, I))


# -- queued ---------------------------------------------------------------------------------------


def one_slot() -> Scene:
    """A server with one slot, which another request has from 20 to 130."""
    scene = Scene().process(NEW).request(NEW, 20, token=40, end=130, ports=(8_080, 50_001))
    scene.call(NEW, "decode", 135, 150, value=38)
    return scene.request(NEW, 100, token=160, prompt_tokens=38)


def last(scene: Scene) -> list[Part]:
    request = scene.report().requests[-1]
    assert sum(request.phase_totals().values()) == request.ttft_ns
    return parts(request.phases)


def test_queued_behind_the_same_model() -> None:
    scene = one_slot().log(NEW, "slot_start", 22).log(NEW, "slot_start", 131)
    assert last(scene)[:2] == [("queue", 100, 131, O), ("prefill", 131, 150, O)]


def test_queued_without_the_servers_word() -> None:
    assert last(one_slot())[:2] == [("queue", 100, 130, I), ("prefill", 130, 150, O)]


def test_a_slot_line_may_be_written_twice() -> None:
    scene = one_slot().log(NEW, "slot_start", 22).log(NEW, "slot_start", 22.1)
    assert last(scene.log(NEW, "slot_start", 131))[0] == ("queue", 100, 131, O)


def test_a_slot_of_its_own_beside_another_request() -> None:
    """Two slots: the other request happens to end before this one's first token."""
    scene = Scene().process(NEW).request(NEW, 20, token=40, end=130, ports=(8_080, 50_001))
    scene.log(NEW, "slot_start", 22).log(NEW, "slot_start", 103)
    scene.call(NEW, "decode", 105, 150, value=38).request(NEW, 100, token=160, prompt_tokens=38)
    assert last(scene)[:2] == [("queue", 100, 103, O), ("prefill", 103, 150, O)]


def test_the_third_waits_for_the_first_two() -> None:
    scene = Scene().process(NEW)
    scene.request(NEW, 20, token=40, end=130, ports=(8_080, 50_001))
    scene.request(NEW, 50, token=150, end=200, ports=(8_080, 50_002))
    for at in (22, 131, 202):
        scene.log(NEW, "slot_start", at)
    scene.call(NEW, "decode", 205, 250, value=38).request(NEW, 100, token=260, prompt_tokens=38)
    assert last(scene)[:2] == [("queue", 100, 202, O), ("prefill", 202, 250, O)]


def test_of_requests_that_came_together_the_first_answered_had_the_first_slot() -> None:
    """Which of them the server's threads took first is not told by the order of arrival."""
    scene = Scene().process(NEW)
    scene.request(NEW, 100.4, token=120, end=130, ports=(8_080, 50_001))
    scene.log(NEW, "slot_start", 101).log(NEW, "slot_start", 131)
    scene.call(NEW, "decode", 101, 119, value=38).call(NEW, "decode", 133, 150, value=38)
    scene.request(NEW, 100, token=160, prompt_tokens=38)
    mine = max(scene.report().requests, key=lambda r: r.ttft_ns or 0)
    assert parts(mine.phases)[:2] == [("queue", 100, 131, O), ("prefill", 131, 150, O)]


def test_where_nothing_says_when_it_could_serve_the_prompt_is_counted_from_the_end() -> None:
    """The server's own figure for the prompt; what is before the prompt belongs to its start."""
    scene = Scene().process(FRONT).forked(NEW, 110, parent=FRONT).executed(NEW, 110, ppid=FRONT)
    scene.file(B_GGUF).mapped(NEW, B_GGUF, 130).file_row(B_GGUF, 130)
    scene.file_row(B_GGUF, 180, added_pages=100)
    request = scene.request(FRONT, 100, token=260, timings={"prompt_ms": 40}).only_request()
    assert parts(request.phases)[-2:] == [("init", 180, 220, I), ("prefill", 220, 260, I)]


def test_who_hangs_up_may_have_had_the_slot_first() -> None:
    """Handed on together; the server worked for the one that had left until it noticed."""
    scene = Scene().process(NEW)
    scene.request(NEW, 99.8, token=None, end=130, ports=(8_080, 50_001))
    scene.log(NEW, "slot_start", 101).log(NEW, "slot_start", 131)
    scene.call(NEW, "decode", 101, 128, value=38).call(NEW, "decode", 133, 150, value=38)
    scene.request(NEW, 100, token=160, prompt_tokens=38)
    assert last(scene)[:2] == [("queue", 100, 131, O), ("prefill", 131, 150, O)]


def test_who_hangs_up_while_waiting_takes_nobodys_slot() -> None:
    scene = Scene().process(NEW)
    scene.request(NEW, 99.8, token=None, end=130, ports=(8_080, 50_001))
    scene.log(NEW, "slot_start", 121).call(NEW, "decode", 123, 150, value=38)
    scene.request(NEW, 100, token=160, prompt_tokens=38)
    assert last(scene)[:2] == [("queue", 100, 121, O), ("prefill", 121, 150, O)]


def test_a_request_from_before_recording_takes_nobodys_slot() -> None:
    scene = Scene().process(NEW)
    scene.request(NEW, 5, token=90, end=130, ports=(8_080, 50_001), notes=[BEGAN_BEFORE])
    scene.log(NEW, "slot_start", 131).call(NEW, "decode", 135, 150, value=38)
    scene.request(NEW, 100, token=160, prompt_tokens=38)
    assert last(scene)[0] == ("queue", 100, 131, O)


def test_slots_by_the_command_line() -> None:
    """Of two slots one was free; of one, none."""
    for slots, first in (("2", ("prefill", 100, 150, O)), ("1", ("queue", 100, 130, I))):
        argv = ["llama-server", "-np", slots]
        scene = Scene().process(NEW, argv=argv, engine="llama.cpp")
        scene.request(NEW, 20, token=40, end=130, ports=(8_080, 50_001))
        scene.call(NEW, "decode", 135, 150, value=38).request(NEW, 100, token=160)
        assert last(scene)[0] == first


def test_answers_in_the_same_batch_are_not_counted_as_prompt() -> None:
    """Each call has one token of the other answer."""
    scene = Scene().process(NEW).request(NEW, 20, token=40, end=300, ports=(8_080, 50_001))
    scene.log(NEW, "slot_start", 21).log(NEW, "slot_start", 101)
    scene.call(NEW, "decode", 105, 120, value=5).call(NEW, "decode", 121, 130, value=5)
    scene.call(NEW, "decode", 131, 140, value=3).call(NEW, "decode", 141, 145, value=2)
    scene.request(NEW, 100, token=160, prompt_tokens=10)
    assert ("prefill", 100, 140, O) in last(scene)


def beside_a_prompt() -> Scene:
    """Another prompt is in its call, from 90 to 130; that of 100 has its own from 131 to 150."""
    scene = Scene().process(NEW, argv=["server", "-np", "2"]).file(B_GGUF).held(NEW, B_GGUF)
    scene.request(NEW, 80, token=133, end=300, ports=(8_080, 50_001), prompt_tokens=300)
    scene.call(NEW, "decode", 90, 130, value=300).call(NEW, "decode", 131, 150, value=11)
    return scene.request(NEW, 100, token=152, prompt_tokens=10)


def test_a_free_slot_is_waited_for_while_the_call_for_another_goes_on() -> None:
    scene = beside_a_prompt().log(NEW, "slot_start", 91).log(NEW, "slot_start", 130.5)
    assert last(scene)[:2] == [("queue", 100, 130.5, O), ("prefill", 130.5, 150, O)]


def test_a_slot_line_that_comes_late_is_dated_before_its_call() -> None:
    """llama-server writes its log in a thread of its own."""
    scene = beside_a_prompt().log(NEW, "slot_start", 91).log(NEW, "slot_start", 140)
    assert last(scene)[:2] == [("queue", 100, 131, O), ("prefill", 131, 150, O)]


def test_without_the_log_the_call_under_way_for_others_is_a_queue() -> None:
    assert last(beside_a_prompt())[:2] == [("queue", 100, 130, O), ("prefill", 130, 150, O)]


def test_by_the_servers_own_figure_a_prompt_began_after_others() -> None:
    """Two calls of others: by its figure the prompt took 10 ms of what came since."""
    scene = Scene().process(NEW).file(B_GGUF).held(NEW, B_GGUF)
    scene.request(NEW, 80, token=600, end=700, ports=(8_080, 50_001), prompt_tokens=600)
    scene.call(NEW, "decode", 101, 130, value=300).call(NEW, "decode", 130, 159, value=300)
    scene.call(NEW, "decode", 160, 170, value=10)
    scene.request(NEW, 100, token=172, prompt_tokens=610, timings={"prompt_ms": 10})
    assert last(scene)[:2] == [("queue", 100, 160, I), ("prefill", 160, 170, O)]


def test_a_figure_that_leaves_time_in_which_nobody_computed_is_no_queue() -> None:
    scene = Scene().process(NEW).file(B_GGUF).held(NEW, B_GGUF)
    scene.call(NEW, "decode", 160, 170, value=10)
    scene.request(NEW, 100, token=172, prompt_tokens=10, timings={"prompt_ms": 10})
    assert last(scene)[0] == ("prefill", 100, 170, O)


def full_cache(scene: Scene, at: float, **counts: float) -> Scene:
    fact = {"tgid": NEW, "running": 1, "waiting": 1} | counts
    return scene.fact("engine_load", ns(at), fact)


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ({"for_capacity": 1}, "no room in the KV cache"),
        ({"cache_use": 0.97}, "no room in the KV cache"),
        ({"cache_use": 0.2}, "the engine had not admitted it"),
    ],
)
def test_waiting_for_the_kv_cache(counts: dict[str, float], reason: str) -> None:
    """The engine counts it as waiting; it goes on when an answer ends."""
    scene = Scene().process(NEW).file(B_GGUF).held(NEW, B_GGUF)
    scene.request(NEW, 10, token=20, end=90, ports=(8_080, 50_000))
    scene.request(NEW, 20, token=40, end=230, ports=(8_080, 50_001))
    full_cache(full_cache(scene, 150, **counts), 200, **counts)
    request = scene.request(NEW, 100, token=260).report().requests[-1]
    check(request, ("queue", 100, 230, I), ("prefill", 230, 260, I))
    assert reason in request.phases[0].evidence[0].what


def test_nobody_waiting_is_no_queue() -> None:
    scene = full_cache(Scene().process(NEW).file(B_GGUF).held(NEW, B_GGUF), 150, waiting=0)
    assert last(scene.request(NEW, 100, token=260)) == [("prefill", 100, 260, I)]


def test_the_engines_log_tells_its_counts_too() -> None:
    scene = Scene().process(NEW).file(B_GGUF).held(NEW, B_GGUF)
    scene.log(NEW, "engine_load", 200, running=1, waiting=1, cache_percent=98.4)
    request = scene.request(NEW, 100, token=260).only_request()
    assert parts(request.phases)[0] == ("queue", 100, 200, I)
    assert "98 %" in request.phases[0].evidence[0].what


def test_queued_behind_the_front() -> None:
    """A front that serves one at a time passes the second on when the first is done."""
    scene = two_models().connected(FRONT, 19, local=40_001, remote=9_001)
    scene.request(FRONT, 20, token=31, end=130, ports=(8_080, 50_001), model="a", prompt_bytes=9)
    scene.request(OLD, 22, token=30, end=129, ports=(9_001, 40_001), model="a", prompt_bytes=9)
    scene.connected(FRONT, 131, local=40_002, remote=9_001).request(
        FRONT, 100, token=161, model="a"
    )
    scene.request(OLD, 132, token=160, ports=(9_001, 40_002), model="a", prompt_tokens=38)
    scene.call(OLD, "decode", 135, 150, value=38)
    assert last(scene) == [
        ("queue", 100, 130, O),
        ("queue", 130, 132, O),
        ("prefill", 132, 150, O),
        ("first_decode", 150, 161, O),
    ]


def test_a_second_request_for_the_model_that_is_being_loaded() -> None:
    scene = router_switch().connected(FRONT, 573, local=40_002, remote=9_001)
    scene.request(FRONT, 300, token=721, ports=(8_080, 50_002), prompt_bytes=99)
    scene.request(NEW, 574, token=720, ports=(9_001, 40_002), prompt_bytes=99)
    first, second = scene.report().requests
    check(first, ("queue", 100, 103, I), ("evict", 103, 163, O), *STARTED)
    assert parts(second.phases)[:2] == [("queue", 300, 560, O), ("ready_gap", 560, 574, O)]
    assert second.switched


def test_the_second_of_two_that_come_before_the_switch_begins_waits_for_the_first() -> None:
    scene = router_switch().connected(FRONT, 573, local=40_002, remote=9_001)
    scene.request(FRONT, 101, token=721, ports=(8_080, 50_002), prompt_bytes=99)
    scene.request(NEW, 574, token=720, ports=(9_001, 40_002), prompt_bytes=99)
    first, second = scene.report().requests
    check(first, ("queue", 100, 103, I), ("evict", 103, 163, O), *STARTED)
    assert parts(second.phases)[:2] == [("queue", 101, 560, O), ("ready_gap", 560, 574, O)]


def test_a_switch_for_one_model_is_not_for_who_asked_for_another() -> None:
    """One server for both: what it loads next is for the later request."""
    scene = Scene().process(NEW, "server").file(B_GGUF)
    scene.request(NEW, 50, token=150, end=180, ports=(8_080, 50_001), model="a")
    scene.request(NEW, 100, token=700, model="b").call(NEW, "context_free", 181, 185)
    scene.call(NEW, "model_load", 190, 400).call(NEW, "context_init", 401, 500)
    second = scene.call(NEW, "decode", 501, 690, value=38).report().requests[1]
    assert ("load", 190, 400, O) in parts(second.phases)


# -- requests without a first token ---------------------------------------------------------------


def test_a_client_that_hangs_up_in_the_load() -> None:
    scene = launched(ended(two_models()))
    request = scene.request(FRONT, 100, end=300, outcome="cancelled").only_request()
    check(request, *BEFORE_LOAD, ("load", 200, 300, O))
    assert (request.outcome, request.ttft_ns) == ("cancelled", None)
    assert "200 ms until then, 100 ms went into loading" in request.verdict.explanation
    assert request.switched


@pytest.mark.parametrize(("exited", "told"), [(299, True), (301, False)])
def test_a_server_that_dies_is_told_from_a_client_that_hangs_up(exited: float, told: bool) -> None:
    """Its sockets are closed after it ended; one whose client left may end right after, too."""
    scene = launched(ended(two_models())).exited(FRONT, exited)
    request = scene.request(FRONT, 100, end=300, outcome="cancelled").only_request()
    assert ("the server's process ended before it had answered" in request.notes) == told
    assert "connection was closed" in request.verdict.explanation


@pytest.mark.parametrize(
    ("left", "phase", "since"),
    [(180, "launch", 163), (520, "init", 500), (565, "ready_gap", 560)],
)
def test_who_hangs_up_before_the_front_passed_him_on_waited_for_what_was_under_way(
    left: float, phase: str, since: float
) -> None:
    scene = launched(ended(two_models())).log(NEW, "model_loaded", 560)
    request = scene.request(FRONT, 100, end=left, outcome="cancelled").only_request()
    assert parts(request.phases)[-1] == (phase, since, left, I)
    assert "unexplained" not in request.phase_totals()


def test_after_one_who_hung_up_before_he_was_passed_on() -> None:
    """The front goes on with the load; who comes next waits for the same."""
    scene = launched(ended(two_models())).log(NEW, "model_loaded", 560)
    scene.request(FRONT, 100, end=210, outcome="cancelled", model="b", ports=(8_080, 50_007))
    request = answered(scene, front_at=150, model="b").report().requests[1]
    check(request, ("queue", 150, 560, O), *SERVED)
    assert "being loaded for an earlier request" in request.verdict.explanation
    assert "keep the model resident" in request.verdict.actions[0].change


def test_who_hangs_up_while_the_front_serves_another_was_queued() -> None:
    scene = router_switch()
    scene.request(FRONT, 110, end=400, outcome="cancelled", model="a", ports=(8_080, 50_007))
    left = scene.report().requests[1]
    check(left, ("queue", 110, 400, I))


def test_requests_that_the_old_model_took_before_it_had_to_go() -> None:
    """Who came later, but for the model that was there, is answered first."""
    scene = two_models().connected(FRONT, 110, local=40_009, remote=9_000)
    scene.request(FRONT, 110, token=120, end=140, ports=(8_080, 50_007), model="a")
    scene.request(OLD, 112, token=119, end=139, ports=(9_000, 40_009), model="a")
    scene.signalled(OLD, 143).exited(OLD, 150, gone=160)
    request = started(scene).report().requests[0]
    check(request, ("queue", 100, 140, O), ("queue", 140, 143, I), ("evict", 143, 163, O), *STARTED)
    assert "taken before it" in request.phases[0].evidence[0].what


def test_a_client_that_hangs_up_in_the_backlog_tells_what_it_waited_for() -> None:
    scene = ended(two_models())
    launched(scene).listened(NEW, 170)
    request = scene.request(NEW, 180, end=300, outcome="cancelled").only_request()
    assert parts(request.phases)[0][:2] == ("launch", 180)
    assert request.verdict.cause == "unknown"


def test_a_server_that_answers_503_while_it_loads() -> None:
    scene = ended(two_models())
    launched(scene).listened(NEW, 170).log(NEW, "model_loaded", 560)
    scene.request(NEW, 300, headers=301, end=302, status=503, outcome="error")
    (request,) = scene.report().requests
    check(request, ("load", 300, 302, O))
    assert "answered with HTTP status 503" in request.notes


def test_a_request_that_recording_did_not_see_the_end_of() -> None:
    request = Scene(end=500).process(FRONT).request(FRONT, 100).only_request()
    check(request, ("unexplained", 100, 500, I))


def test_a_request_that_ends_as_it_begins_has_no_phases() -> None:
    request = Scene().process(FRONT).request(FRONT, 100, end=100, outcome="error").only_request()
    check(request)


# -- what recording did not see -------------------------------------------------------------------


def unseen_back_end() -> Scene:
    """Over a Unix socket, or in a child by shared memory: no request is seen to reach NEW."""
    return launched(ended(two_models())).request(FRONT, 100, token=716, prompt_tokens=38)


def test_a_back_end_without_sockets_is_told_by_its_weights() -> None:
    scene = unseen_back_end().call(NEW, "decode", 575, 640, value=32)
    scene.call(NEW, "decode", 641, 700, value=6).call(NEW, "decode", 701, 712, value=1)
    check(
        scene.only_request(),
        ("queue", 100, 103, I), ("evict", 103, 163, O), ("launch", 163, 200, O),
        ("load", 200, 500, O), ("init", 500, 550, I), ("ready_gap", 550, 575, I),
        ("prefill", 575, 700, O), ("first_decode", 700, 716, O),
    )  # fmt: skip


def test_a_back_end_without_sockets_whose_work_is_not_seen() -> None:
    request = unseen_back_end().only_request()
    assert parts(request.phases)[-1] == ("prefill", 550, 716, I)
    assert {f.path for f in request.files if f.is_weights} == {"/models/b.gguf"}


def test_an_engines_child_by_its_files_and_log_lines() -> None:
    """An API server with the HTTP, a child with the weights, which exports no call."""
    scene = Scene().process(FRONT, "api").file(B_GGUF, "/hub/b-00001-of-00001.safetensors")
    scene.forked(NEW, 110, parent=FRONT).executed(NEW, 112, comm="VLLM::EngineCor")
    scene.opened(NEW, B_GGUF, 190).has_read(NEW, B_GGUF, 200, 300, 100 * MIB)
    scene.log(NEW, "load_end", 310, s=0.1).log(FRONT, "serving", 400)
    scene.request(FRONT, 105, token=500)
    check(
        scene.only_request(),
        ("queue", 105, 112, I), ("launch", 112, 200, O), ("load", 200, 310, O),
        ("init", 310, 400, O), ("prefill", 400, 500, I),
    )  # fmt: skip


def test_an_engines_child_that_tells_nothing_after_its_load() -> None:
    scene = Scene().process(FRONT, "api").file(B_GGUF, "/hub/b.safetensors")
    scene.forked(NEW, 110, parent=FRONT).executed(NEW, 112).opened(NEW, B_GGUF, 190)
    scene.has_read(NEW, B_GGUF, 200, 300, 100 * MIB).request(FRONT, 105, token=500)
    assert parts(scene.only_request().phases)[-2:] == [
        ("load", 200, 300, I),
        ("unexplained", 300, 500, I),
    ]


def test_all_shards_are_the_load() -> None:
    """The smallest comes first, the biggest last but one; what else is open is none of them."""
    scene = ended(two_models()).forked(NEW, 162, parent=FRONT).executed(NEW, 163)
    for number, size in enumerate((20, 60, 100, 30), 1):
        scene.file(20 + number, f"/m/b-0000{number}-of-00004.safetensors", size * MIB)
        at = 200 + 50 * number
        scene.opened(NEW, 20 + number, at).has_read(NEW, 20 + number, at, at + 40, size * MIB)
    scene.file(30, "/m/other.safetensors", 90 * MIB).opened(NEW, 30, 170)
    scene.has_read(NEW, 30, 171, 180, 4096).listened(NEW, 540)
    scene.connected(FRONT, 571, local=40_001, remote=9_001).request(FRONT, 100, token=716)
    request = scene.request(NEW, 572, token=715, ports=(9_001, 40_001)).only_request()
    assert ("load", 250, 440, I) in parts(request.phases)
    assert len([f for f in request.files if f.is_weights]) == 4


def test_shards_that_a_hub_names_by_their_hashes() -> None:
    scene = Scene().process(NEW)
    for number, size in enumerate((60, 100), 1):
        scene.file(20 + number, f"/hub/models--x/blobs/{number}f3c", size * MIB)
        scene.held(NEW, 20 + number)
    process = scene.timeline().process_at(NEW, ns(50))
    assert process is not None
    assert len(weights_of(scene.timeline(), process, None, ns(100))) == 2


def attached() -> Scene:
    """Recording begins with the request under way and the new process there."""
    scene = Scene().process(NEW, "server").file(B_GGUF).held(NEW, B_GGUF)
    scene.call(NEW, "context_init", 501, 530).call(NEW, "decode", 531, 550, value=2)
    scene.accepted(NEW, 565, socket=0xABC).call(NEW, "decode", 575, 700, value=38)
    return scene.request(NEW, 565, token=716, socket=0xABC, prompt_tokens=38, notes=[BEGAN_BEFORE])


def test_recording_that_began_in_the_load() -> None:
    request = attached().log(NEW, "model_loaded", 560).only_request()
    check(
        request,
        ("load", 0, 501, I), ("init", 501, 560, O), ("ready_gap", 560, 565, O),
        ("prefill", 565, 700, O), ("first_decode", 700, 716, O),
    )  # fmt: skip
    assert "it began before recording did: it waited at least this long" in request.notes


def test_recording_that_began_in_the_launch() -> None:
    scene = attached().call(NEW, "model_load", 200, 500)
    assert parts(scene.only_request().phases)[:2] == [
        ("launch", 0, 200, I),
        ("load", 200, 500, O),
    ]


def test_a_pid_that_had_another_life() -> None:
    """The new server has the pid of one that ended in this recording."""
    scene = Scene().process(NEW, "server").file(A_GGUF).held(NEW, A_GGUF)
    scene.call(NEW, "model_load", 5, 8).call(NEW, "decode", 12, 15, value=9)
    scene.request(NEW, 10, token=20, ports=(9_000, 50_001)).exited(NEW, 80, gone=85)
    ended(scene.process(FRONT).process(OLD).file(B_GGUF).held(OLD, A_GGUF))
    request = answered(launched(scene)).report().requests[-1]
    check(
        request,
        ("queue", 100, 103, I), ("evict", 103, 163, O), ("launch", 163, 200, O),
        ("load", 200, 500, O), ("init", 500, 550, I), ("ready_gap", 550, 572, O), *SERVED[1:],
    )  # fmt: skip


# -- who is behind whom ---------------------------------------------------------------------------


def test_requests_are_paired_by_body_and_model() -> None:
    scene = Scene().process(FRONT).process(OLD).process(NEW)
    for port in (40_001, 40_002):
        scene.connected(FRONT, 5, local=port, remote=9_001).connected(FRONT, 5, port, 9_002)
    scene.request(FRONT, 10, token=60, prompt_bytes=5, ports=(8_080, 50_001), model="b")
    scene.request(FRONT, 11, token=50, prompt_bytes=5, ports=(8_080, 50_002), model="a")
    scene.request(OLD, 12, token=49, prompt_bytes=5, ports=(9_001, 40_001), model="a")
    scene.request(NEW, 13, token=59, prompt_bytes=5, ports=(9_002, 40_002), model="b")
    served = requests_of(scene.timeline())
    assert [(s.front.model, s.server) for s in served] == [("b", NEW), ("a", OLD)]


def test_health_checks_are_no_requests() -> None:
    scene = Scene().process(NEW).request(NEW, 10, headers=11, end=12, generates=False)
    assert scene.report().requests == ()


def test_a_request_is_followed_through_two_fronts() -> None:
    scene = Scene().process(FRONT).process(OLD).process(NEW)
    scene.connected(FRONT, 5, local=40_001, remote=9_001).connected(OLD, 5, 40_002, 9_002)
    scene.request(FRONT, 10, token=60).request(OLD, 12, token=59, ports=(9_001, 40_001))
    scene.request(NEW, 14, token=58, ports=(9_002, 40_002))
    (served,) = requests_of(scene.timeline())
    assert (served.front.tgid, served.server) == (FRONT, NEW)


def test_a_connection_of_somebody_else_is_no_pair() -> None:
    scene = Scene().process(FRONT).process(NEW).connected(OLD, 5, local=40_001, remote=9_001)
    scene.request(FRONT, 10, token=60).request(NEW, 12, token=59, ports=(9_001, 40_001))
    (served,) = requests_of(scene.timeline())
    assert served.back is None


def test_evidence_names_source_and_figure() -> None:
    load = next(p for p in router_switch().only_request().phases if p.phase == "load")
    (evidence,) = load.evidence
    assert (evidence.source, evidence.value, evidence.unit) == ("call", ns(500) - ns(200), "ns")


def test_forwarded_requests_tell_a_connection_from_before() -> None:
    """A kept connection has no connect to be seen, but the request that goes over it."""
    scene = Scene().process(FRONT).process(OLD)
    scene.event(Kind.FORWARD, 11, FRONT, a=40_001 << 16 | 9_001)
    scene.request(FRONT, 10, token=60).request(OLD, 12, token=59, ports=(9_001, 40_001))
    (served,) = requests_of(scene.timeline())
    assert served.server == OLD
