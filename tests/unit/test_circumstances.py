"""What is told of a wait beside its phases: cores, polls, loads of the same file, lost caches."""

from __future__ import annotations

import pytest

from ttftprof.events import Kind, Wait
from ttftprof.model import Request
from unit.recordings import (
    A_GGUF,
    B_GGUF,
    FRONT,
    MIB,
    NEW,
    OLD,
    PAGE,
    Scene,
    answered,
    launched,
    router_switch,
    two_models,
)


def only(scene: Scene) -> Request:
    return scene.report().requests[-1]


def noted(request: Request, words: str) -> bool:
    return any(words in note for note in request.notes)


# -- cores ----------------------------------------------------------------------------------------


def crowded(waited: float) -> Scene:
    """The prefill of a resident model: one thread, `waited` of 100 ms without a core."""
    scene = Scene().process(NEW, "server").process(OLD, "compiler")
    scene.wait(NEW, 0, 101, Wait.NETWORK).wait(NEW, 120, 120 + waited, Wait.RUNNABLE)
    scene.thread_row(NEW, 100, cpu_ns=0).thread_row(NEW, 200, cpu_ns=round((100 - waited) * 1e6))
    scene.thread_row(OLD, 100, cpu_ns=0).thread_row(OLD, 200, cpu_ns=round(waited * 1e6))
    scene.call(NEW, "decode", 102, 200, value=38)
    return scene.request(NEW, 100, token=201)


@pytest.mark.parametrize(("waited", "confidence"), [(5, "high"), (30, "medium"), (70, "low")])
def test_waiting_for_a_core_is_not_computing(waited: float, confidence: str) -> None:
    verdict = only(crowded(waited)).verdict
    assert (verdict.cause, verdict.confidence) == ("prefill", confidence)
    told = "waited for a free core" in verdict.explanation
    assert told is (confidence != "high")
    if told:
        assert "compiler (pid 200) ran meanwhile" in verdict.explanation
        assert "cores" in verdict.actions[0].change
        assert ("waiting for a core" in verdict.explanation) is told
        assert any(e.source == "scheduler" for e in verdict.evidence)


def test_crowding_is_noted_with_its_phase() -> None:
    assert noted(only(crowded(70)), "in prefill the server's threads waited for a free core 70 %")
    assert not only(crowded(5)).notes


def test_who_ran_is_not_guessed() -> None:
    scene = Scene().process(NEW).wait(NEW, 0, 101, Wait.NETWORK)
    scene.wait(NEW, 120, 180, Wait.RUNNABLE).call(NEW, "decode", 102, 200, value=38)
    verdict = only(scene.request(NEW, 100, token=201)).verdict
    assert "who ran instead was not recorded" in verdict.explanation


# -- fixed waits ----------------------------------------------------------------------------------


def looked(scene: Scene, *at: float) -> Scene:
    for number, moment in enumerate(at):
        port = 41_000 + number
        scene.connected(FRONT, moment, local=port, remote=9_001)
        scene.request(NEW, moment, headers=moment + 1, end=moment + 1, ports=(9_001, port),
                      status=503 if number + 1 < len(at) else 200, endpoint="/health",
                      method="GET", generates=False)  # fmt: skip
    return scene


def polled(engine: str, *looks: float) -> Scene:
    """Able to serve at 560; the front looks now and then, and passes the request on at the last."""
    scene = two_models().process(FRONT, "front", engine=engine)
    scene.signalled(OLD, 103).exited(OLD, 150, gone=160)
    looked(launched(scene).log(NEW, "model_loaded", 560), *looks)
    at = looks[-1] + 2
    scene.request(FRONT, 100, token=at + 85).connected(FRONT, at, local=40_001, remote=9_001)
    scene.request(NEW, at, token=at + 84, ports=(9_001, 40_001), prompt_tokens=38)
    return scene.call(NEW, "decode", at + 1, at + 65, value=38)


@pytest.mark.parametrize(
    ("engine", "named"),
    [("llama-swap", "once a second"), ("ollama", "every 250 ms"), ("none", "")],
)
def test_the_fronts_poll_is_named_with_its_quantum(engine: str, named: str) -> None:
    verdict = only(polled(engine, 413, 1_413, 2_413)).verdict
    assert verdict.cause == "ready_gap"
    assert "able to serve 1.85 s before the front passed the request on" in verdict.explanation
    assert "looked 3 times, 1.00 s apart" in verdict.explanation
    assert named in verdict.explanation
    assert {e.value for e in verdict.evidence} == {3, 1_000_000_000}


def test_of_versions_that_differ_the_one_that_the_looks_fit_is_named() -> None:
    explanation = only(polled("llama-swap", 413, 5_413)).verdict.explanation
    assert "before v220" in explanation
    assert "every 5 s" in explanation
    assert "once a second" not in explanation


@pytest.mark.parametrize(("engine", "named"), [("ollama", "at most 5.00 s"), ("none", "")])
def test_the_wait_after_the_old_process_is_named(engine: str, named: str) -> None:
    """The old runner ends at 160 ms, the next is executed a second later."""
    scene = two_models().process(FRONT, "front", engine=engine)
    scene.signalled(OLD, 103).exited(OLD, 150, gone=160)
    scene.forked(NEW, 1_159, parent=FRONT).executed(NEW, 1_160).opened(NEW, B_GGUF, 1_165)
    scene.call(NEW, "model_load", 1_170, 1_200).log(NEW, "model_loaded", 1_210)
    scene.request(FRONT, 100, token=1_300).connected(FRONT, 1_215, local=40_001, remote=9_001)
    scene.request(NEW, 1_216, token=1_299, ports=(9_001, 40_001))
    verdict = only(scene.call(NEW, "decode", 1_217, 1_280, value=38)).verdict
    assert verdict.cause == "evict"
    assert "gone 1.00 s before the next one was started" in verdict.explanation
    assert named in verdict.explanation
    assert verdict.actions[0].expected_gain_ns == 1_000_000_000


# -- the same file again --------------------------------------------------------------------------

SWAPPED = ["llama-server", "--model", "b.gguf", "-c", "4096"]


def again(*, before: list[str], now: list[str], gone: float = 160, status: int = 0) -> Scene:
    """B was loaded by OLD, and is loaded by NEW for the request at 100 ms."""
    scene = Scene().process(FRONT, "front").file(B_GGUF, "/models/b.gguf")
    scene.process(OLD, "llama-server", ppid=FRONT, argv=before, engine="llama.cpp")
    scene.held(OLD, B_GGUF, 25_600)
    scene.request(OLD, 10, token=20, end=30, ports=(9_000, 40_000))
    scene.event(Kind.PROCESS_EXIT, gone - 5, OLD, a=status).thread_ended(OLD, OLD, gone)
    started = launched(scene).process(NEW, "server", 163, argv=now, engine="llama.cpp")
    return answered(started.log(NEW, "model_loaded", 560))


def test_a_changed_context_size_loads_the_file_again() -> None:
    scene = again(before=[*SWAPPED[:-1], "8192"], now=SWAPPED).signalled(OLD, 103)
    request = only(scene)
    assert noted(request, "/models/b.gguf was loaded again: the server was started with other opt")
    assert noted(request, "-c 8192 → 4096")
    assert request.verdict.cause == "load"
    assert "had been loaded before" in request.verdict.explanation
    assert "same settings (-c)" in request.verdict.actions[0].change


def test_a_model_that_had_expired() -> None:
    scene = again(before=SWAPPED, now=SWAPPED, gone=80).signalled(OLD, 75)
    assert noted(only(scene), "unloaded after 0.1 s without a request")


def test_a_runner_that_its_scheduler_kills_had_expired() -> None:
    """Ollama sends no SIGTERM."""
    scene = again(before=SWAPPED, now=SWAPPED, gone=80, status=9)
    scene.event(Kind.SIGNAL, 75, OLD, flags=9, a=FRONT)
    assert noted(only(scene), "unloaded after 0.1 s without a request")


@pytest.mark.parametrize(
    ("status", "how"), [(11, "SIGSEGV"), (9, "SIGKILL"), (1 << 8, "exit code 1"), (31, "signal 31")]
)
def test_a_server_that_crashed(status: int, how: str) -> None:
    scene = again(before=SWAPPED, now=SWAPPED, gone=80, status=status)
    assert noted(only(scene), f"ended by itself ({how})")


def test_a_server_that_was_killed_when_it_did_not_end_had_been_asked() -> None:
    scene = again(before=SWAPPED, now=SWAPPED, status=9).signalled(OLD, 103).signalled(OLD, 140, 9)
    assert noted(only(scene), "was ended for this request")


def test_a_switch_back_is_no_reload() -> None:
    """Another model served somebody in between."""
    scene = again(before=SWAPPED, now=SWAPPED, gone=60)
    scene.process(400, "llama-server", ppid=FRONT).file(A_GGUF, "/models/a.gguf").held(400, A_GGUF)
    scene.request(400, 70, token=80, end=90, ports=(9_005, 40_009), model="a")
    assert not noted(only(scene), "was loaded again")


def test_the_first_load_of_a_file_is_no_reload() -> None:
    assert not noted(only(router_switch()), "was loaded again")


# -- what the server says of its load -------------------------------------------------------------


def told_of_its_load(load_ms: float) -> Request:
    """A router's switch; its answer has a figure for the load."""
    timings = {"load_duration_ns": load_ms * 1e6}
    scene = launched(two_models().signalled(OLD, 103).exited(OLD, 150, gone=160))
    return only(answered(scene.log(NEW, "model_loaded", 560), timings=timings))


def test_what_the_server_calls_its_load_is_split() -> None:
    words = "load_duration of 472.0 ms is not the load alone: evict 60.00 ms, launch 37.00 ms, load"
    assert noted(told_of_its_load(472), words)


@pytest.mark.parametrize("load_ms", [0, 19, 320])
def test_a_figure_for_the_load_that_is_one_needs_no_words(load_ms: float) -> None:
    assert not noted(told_of_its_load(load_ms), "load_duration")


@pytest.mark.parametrize("load_ms", [201, 120])
def test_of_a_resident_model_that_figure_is_what_it_waited_for(load_ms: int) -> None:
    """As long as it says: what the request then waited for a slot is no part of it."""
    scene = Scene().process(OLD, "server").file(A_GGUF).held(OLD, A_GGUF)
    scene.request(OLD, 90, token=101, end=300).log(OLD, "slot_start", 301)
    scene.request(OLD, 100, token=400, timings={"load_duration_ns": load_ms * 1e6})
    request = only(scene.call(OLD, "decode", 302, 390, value=38))
    words = f"load_duration of {load_ms}.0 ms is not the load alone: queue {load_ms}.0 ms"
    assert noted(request, words)


# -- launch, prefill, first decode ----------------------------------------------------------------


@pytest.mark.parametrize(("context_ms", "told_ms"), [(0, 760), (300, 460)])
def test_a_memory_fit_pass_that_takes_long_is_told(context_ms: int, told_ms: int) -> None:
    """But for the device's context, which whoever needs it first makes."""
    scene = Scene().process(FRONT).file(B_GGUF, "/models/b.gguf").forked(NEW, 162, parent=FRONT)
    scene.executed(NEW, 163).call(NEW, "model_load", 170, 900)
    scene.call(NEW, "context_init", 901, 910).call(NEW, "context_free", 911, 920)
    scene.call(NEW, "model_free", 921, 930).call(NEW, "model_load", 940, 1_000)
    scene.log(NEW, "model_loaded", 1_010).request(FRONT, 150, token=1_100)
    scene.connected(FRONT, 1_011, local=40_001, remote=9_001)
    scene.request(NEW, 1_012, token=1_099, ports=(9_001, 40_001))
    if context_ms:
        scene.driver_call(NEW, "cuDevicePrimaryCtxRetain", 200, 200 + context_ms)
    verdict = only(scene.call(NEW, "decode", 1_013, 1_090, value=38)).verdict
    assert verdict.cause == "launch"
    assert f"{told_ms} ms of it went into a first load" in verdict.explanation
    assert verdict.actions[0].expected_gain_ns == told_ms * 1_000_000


def test_processes_that_come_and_go_in_the_launch_are_counted() -> None:
    """Two ask for devices; a third outlives the launch."""
    scene = Scene().process(FRONT).file(B_GGUF, "/models/b.gguf").forked(NEW, 162, parent=FRONT)
    scene.executed(NEW, 163).forked(403, 164, parent=NEW).executed(403, 165)
    for pid in (401, 402):
        scene.forked(pid, 165, parent=NEW).executed(pid, 166).exited(pid, 180, gone=181, since=165)
    scene.call(NEW, "model_load", 900, 1_000).log(NEW, "model_loaded", 1_010)
    scene.request(FRONT, 150, token=1_100).connected(FRONT, 1_011, local=40_001, remote=9_001)
    scene.request(NEW, 1_012, token=1_099, ports=(9_001, 40_001))
    verdict = only(scene.call(NEW, "decode", 1_013, 1_090, value=38)).verdict
    assert verdict.cause == "launch"
    assert "2 other processes came and went" in verdict.explanation


def test_a_front_that_asks_late_whether_its_backend_is_up() -> None:
    """Up at 300 ms, asked and told to load at 2,163."""
    scene = Scene().process(FRONT, "local-ai", engine="localai").file(B_GGUF, "/models/b.gguf")
    scene.forked(NEW, 162, parent=FRONT).executed(NEW, 163, engine="localai").listened(NEW, 290)
    scene.wait(NEW, 300, 2_163, Wait.NETWORK).accepted(NEW, 2_163, socket=0xF00)
    scene.accepted(NEW, 2_164, socket=0xF40).call(NEW, "model_load", 2_170, 2_400)
    scene.call(NEW, "context_init", 2_401, 2_410).call(NEW, "decode", 2_420, 2_500, value=38)
    verdict = only(scene.request(FRONT, 150, token=2_510)).verdict
    assert verdict.cause == "launch"
    assert "was up 1.86 s before its front asked it to do anything" in verdict.explanation
    assert "LocalAI asks a backend" in verdict.explanation
    assert verdict.actions[0].expected_gain_ns == 1_863_000_000


def test_a_lazy_load_is_told_as_such() -> None:
    scene = Scene().process(NEW).file(B_GGUF, "/models/b.gguf").held(NEW, B_GGUF)
    scene.file_row(B_GGUF, 90).file_row(B_GGUF, 100).file_row(B_GGUF, 500, added_pages=25_600)
    scene.wait(NEW, 0, 101, Wait.NETWORK).wait(NEW, 110, 480, Wait.STORAGE, ino=B_GGUF)
    scene.call(NEW, "decode", 102, 500, value=38)
    request = only(scene.request(NEW, 100, token=510))
    assert (request.verdict.cause, request.verdict.activity) == ("prefill", "storage_wait")
    assert "a load in disguise: 105 MB of the weights" in request.verdict.explanation
    evidence = next(p for p in request.phases if p.phase == "prefill").evidence
    assert [e.value for e in evidence if e.source == "files"] == [25_600 * PAGE]


def test_a_few_pages_in_prefill_are_no_load() -> None:
    scene = Scene().process(NEW).file(B_GGUF, "/models/b.gguf").held(NEW, B_GGUF)
    scene.file_row(B_GGUF, 100).file_row(B_GGUF, 500, added_pages=MIB // PAGE)
    scene.call(NEW, "decode", 102, 500, value=38)
    assert "disguise" not in only(scene.request(NEW, 100, token=510)).verdict.explanation


def long_prompt_again(cached: int | None) -> Scene:
    """A model that had a long prompt before it was evicted gets it anew."""
    scene = Scene().process(FRONT).process(400, ppid=FRONT)
    scene.connected(FRONT, 9, local=40_007, remote=9_007)
    scene.request(FRONT, 10, token=20, end=30, ports=(8_080, 50_001), prompt_bytes=7)
    scene.request(400, 11, token=19, end=29, ports=(9_007, 40_007), prompt_bytes=7,
                  prompt_tokens=1_000)  # fmt: skip
    scene.file(A_GGUF, "/models/a.gguf").file(B_GGUF, "/models/b.gguf")
    scene.process(OLD, ppid=FRONT).held(OLD, A_GGUF).signalled(OLD, 103).exited(OLD, 150, gone=160)
    launched(scene).log(NEW, "model_loaded", 560).request(FRONT, 100, token=716)
    scene.connected(FRONT, 571, local=40_001, remote=9_001)
    scene.request(NEW, 572, token=715, ports=(9_001, 40_001), prompt_tokens=1_419,
                  cached_tokens=cached)  # fmt: skip
    return scene


@pytest.mark.parametrize(("cached", "lost"), [(0, True), (None, True), (900, False)])
def test_the_prompt_cache_that_a_switch_lost(cached: int | None, lost: bool) -> None:
    request = only(long_prompt_again(cached))
    assert noted(request, "lost the prompt cache: all 1,419 tokens") is lost


def test_a_lost_prompt_cache_is_told_once() -> None:
    scene = long_prompt_again(0).request(FRONT, 900, token=1_116, ports=(8_080, 50_009))
    scene.connected(FRONT, 901, local=40_011, remote=9_001)
    scene.request(NEW, 902, token=1_115, ports=(9_001, 40_011), prompt_tokens=1_419)
    told = [noted(request, "lost the prompt cache") for request in scene.report().requests]
    assert told == [False, True, False]


def test_tokens_without_text_are_counted() -> None:
    scene = Scene().process(NEW).call(NEW, "decode", 102, 110, value=38)
    for at in range(111, 411, 10):
        scene.call(NEW, "decode", at, at + 9, value=1)
    verdict = only(scene.request(NEW, 100, token=411, prompt_tokens=38)).verdict
    assert verdict.cause == "first_decode"
    assert "30 tokens were decoded before the first one" in verdict.explanation
