"""Engines that are put to sleep and woken for a request, and engines of several processes."""

from __future__ import annotations

import pytest

from ttftprof.events import Wait
from ttftprof.model import Request
from ttftprof.phases import critical_processes, partition, requests_of
from unit.recordings import B_GGUF, FRONT, MIB, NEW, OLD, Scene
from unit.test_phases import I, O, check, parts

CORE, WORKER, OTHER_WORKER = 301, 302, 303
VLLM = ["python3", "-m", "vllm.entrypoints.openai.api_server"]
SPAWNED = ["python3", "-c", "•••", "--multiprocessing-fork"]


def nap(
    scene: Scene, pid: int, what: str, begin: float, end: float | None, status: int = 200
) -> Scene:
    """A front's call to an engine's API server; without `end` it is not answered."""
    port = 42_000 + int(begin)
    scene.connected(FRONT, begin, local=port, remote=9_000 + pid)
    return scene.request(
        pid, begin, headers=end, end=end, ports=(9_000 + pid, port), endpoint=what,
        generates=False, status=status if end else None, model=None, streamed=None,
    )  # fmt: skip


def two_engines() -> Scene:
    """OLD is awake, NEW asleep since before recording."""
    scene = Scene().process(FRONT, "front").file(B_GGUF, "/hub/b.safetensors")
    for pid in (OLD, NEW):
        scene.process(pid, "vllm", argv=VLLM, engine="vllm")
    return scene.process(CORE, "VLLM::EngineCor", ppid=NEW, engine="vllm").held(CORE, B_GGUF)


def served(scene: Scene) -> Request:
    scene.request(FRONT, 100, token=716).connected(FRONT, 501, local=40_001, remote=9_001)
    return scene.request(NEW, 502, token=715, ports=(9_001, 40_001)).only_request()


def test_one_engine_falls_asleep_and_the_other_wakes_up() -> None:
    scene = nap(two_engines(), OLD, "/sleep?level=2", 102, 300)
    request = served(nap(scene, NEW, "/wake_up", 303, 500))
    check(
        request,
        ("queue", 100, 102, O), ("evict", 102, 303, O), ("load", 303, 500, O),
        ("ready_gap", 500, 502, O), ("prefill", 502, 716, I),
    )  # fmt: skip
    assert request.switched
    held = {part.part: part.spent_ns for phase in request.phases for part in phase.parts}
    assert held["engine_sleep"] == 198_000_000
    assert held["engine_wake"] == 197_000_000
    (note,) = [note for note in request.notes if "woken" in note]
    assert note == (
        "the engine was woken from sleep in 0.20 s; another was put to sleep (level 2) in 0.20 s "
        "before"
    )


@pytest.mark.parametrize("level", [1, 2])
def test_how_deep_it_slept_is_told(level: int) -> None:
    scene = nap(two_engines(), NEW, f"/sleep?level={level}", 10, 20)
    request = served(nap(scene, NEW, "/wake_up", 101, 500))
    assert f"from sleep level {level} in 0.40 s" in " ".join(request.notes)
    way = {1: "copies its weights back", 2: "reads its weights again"}[level]
    assert way in request.verdict.explanation


def test_sglang_gives_its_memory_back_and_takes_it_again() -> None:
    scene = nap(two_engines(), OLD, "/release_memory_occupation", 102, 300)
    request = served(nap(scene, NEW, "/resume_memory_occupation", 303, 500))
    assert ("evict", 102, 303, O) in parts(request.phases)
    assert ("load", 303, 500, O) in parts(request.phases)


def test_memory_may_be_asked_back_in_parts() -> None:
    """/wake_up?tags=weights, weights read anew, /wake_up?tags=kv_cache."""
    scene = nap(nap(two_engines(), NEW, "/wake_up", 101, 200), NEW, "/wake_up", 450, 500)
    assert parts(served(scene).phases)[:3] == [
        ("queue", 100, 101, I),
        ("load", 101, 450, O),
        ("init", 450, 500, O),
    ]


def test_a_wake_that_was_under_way_is_the_load() -> None:
    request = served(nap(two_engines(), NEW, "/wake_up", 50, 500))
    assert parts(request.phases)[0] == ("load", 100, 500, O)


@pytest.mark.parametrize(("end", "status"), [(None, 200), (500, 500), (90, 200)])
def test_what_was_refused_or_unanswered_or_over_before_is_no_wake(
    end: float | None, status: int
) -> None:
    request = served(nap(two_engines(), NEW, "/wake_up", 80, end, status))
    assert "load" not in request.phase_totals()


def test_a_long_wait_before_the_wake_is_not_explained_by_it() -> None:
    request = served(nap(two_engines(), NEW, "/wake_up", 303, 500))
    assert parts(request.phases)[0] == ("unexplained", 100, 303, I)


@pytest.mark.parametrize(("slept_ms", "basis"), [(20, O), (None, I)])
def test_a_request_that_reached_a_sleeping_engine_waits_there(
    slept_ms: float | None, basis: str
) -> None:
    """As vLLM 0.32 did it: asleep, its server takes requests, and keeps them until it is woken."""
    scene = two_engines() if slept_ms is None else nap(two_engines(), NEW, "/sleep", 10, slept_ms)
    nap(scene, NEW, "/wake_up", 1_100, 1_112)
    request = scene.request(NEW, 100, token=1_249, ports=(9_301, 50_000)).only_request()
    check(
        request,
        ("queue", 100, 1_100, basis), ("load", 1_100, 1_112, O), ("prefill", 1_112, 1_249, I),
    )  # fmt: skip
    assert request.verdict.cause == "queue"
    assert "The engine was asleep, and takes requests" in request.verdict.explanation
    assert [a.change.split(" (")[0] for a in request.verdict.actions] == [
        "have the front wake an engine before it passes a request on"
    ]


# -- engines of several processes -----------------------------------------------------------------


def engine_of_four() -> Scene:
    """A front starts an API server, that a core, that two workers, each with a shard."""
    scene = Scene().process(FRONT, "front", engine="llama-swap")
    for number in (1, 2):
        scene.file(20 + number, f"/hub/b-0000{number}-of-00002.safetensors")
    scene.forked(NEW, 102, parent=FRONT).executed(NEW, 102, argv=VLLM, engine="vllm")
    scene.forked(CORE, 200, parent=NEW).executed(CORE, 200, "python3", argv=SPAWNED, ppid=NEW)
    for number, worker in enumerate((WORKER, OTHER_WORKER), 1):
        scene.forked(worker, 300 + number, parent=CORE).opened(worker, 20 + number, 349)
        scene.has_read(worker, 20 + number, 350, 400 + 50 * number, 100 * MIB)
        scene.log(worker, "load_end", 400 + 50 * number)
    scene.log(NEW, "serving", 560).request(FRONT, 100, token=716)
    scene.connected(FRONT, 571, local=40_001, remote=9_001)
    return scene.request(NEW, 572, token=715, ports=(9_001, 40_001))


def test_the_load_ends_with_the_last_worker() -> None:
    request = engine_of_four().only_request()
    check(
        request,
        ("queue", 100, 102, I), ("launch", 102, 200, O), ("launch", 200, 302, O),
        ("launch", 302, 350, O), ("load", 350, 500, O), ("init", 500, 560, O),
        ("ready_gap", 560, 572, O), ("prefill", 572, 716, I),
    )  # fmt: skip
    assert len([f for f in request.files if f.is_weights]) == 2


def test_a_server_that_listens_before_its_warm_up_is_able_after_it() -> None:
    """SGLang's HTTP server writes that it is up, then asks itself, then says that it is ready."""
    scene = Scene().process(FRONT, "front", engine="llama-swap").file(B_GGUF, "/hub/b.safetensors")
    scene.forked(NEW, 102, parent=FRONT).executed(NEW, 102, argv=["sglang"], engine="sglang")
    scene.forked(CORE, 200, parent=NEW).executed(CORE, 200, "python3", argv=SPAWNED, ppid=NEW)
    scene.opened(CORE, B_GGUF, 249).has_read(CORE, B_GGUF, 250, 300, 100 * MIB)
    scene.log(CORE, "load_end", 300).log(NEW, "serving", 400).log(NEW, "model_loaded", 560)
    scene.connected(FRONT, 571, local=40_001, remote=9_001).request(FRONT, 100, token=716)
    scene.wait(CORE, 350, 560, Wait.NETWORK).wait(NEW, 102, 390, Wait.PIPE)
    scene.wait(NEW, 401, 501, Wait.TIMER)
    request = scene.request(NEW, 572, token=715, ports=(9_001, 40_001)).only_request()
    assert ("init", 300, 560, O) in parts(request.phases)
    spent = request.phase_activity()["init"]
    assert {name: ns / 1e6 for name, ns in spent.items()} == {"cpu": 120, "idle": 40, "sleep": 100}


def without_logs(listened: float) -> Scene:
    """A front starts an engine of two processes; the one that serves listens at a moment."""
    scene = Scene().process(FRONT, "front", engine="llama-swap").file(B_GGUF, "/hub/b.safetensors")
    scene.forked(NEW, 102, parent=FRONT).executed(NEW, 102, argv=["sglang"], engine="sglang")
    scene.forked(CORE, 200, parent=NEW).executed(CORE, 200, "python3", argv=SPAWNED, ppid=NEW)
    scene.opened(CORE, B_GGUF, 249).has_read(CORE, B_GGUF, 250, 300, 100 * MIB)
    scene.listened(NEW, listened).request(FRONT, 100, token=716)
    scene.connected(FRONT, 571, local=40_001, remote=9_001)
    return scene.request(NEW, 572, token=715, ports=(9_001, 40_001))


def test_without_logs_the_engines_server_is_able_when_it_listens() -> None:
    request = without_logs(540).only_request()
    assert parts(request.phases)[-3:-1] == [("init", 300, 540, O), ("ready_gap", 540, 572, O)]


def test_a_server_that_refuses_after_it_listens_is_able_when_it_passes_a_check() -> None:
    """What it asks itself meanwhile is no check."""
    scene = nap(without_logs(400), NEW, "/health", 410, 411, status=503)
    scene.connected(NEW, 450, local=43_000, remote=9_001).request(
        NEW, 450, headers=451, end=451, ports=(9_001, 43_000), endpoint="/model_info",
        generates=False, status=200,
    )  # fmt: skip
    request = nap(scene, NEW, "/health", 550, 560).only_request()
    assert ("init", 300, 560, I) in parts(request.phases)


def test_a_worker_is_of_its_programs_engine() -> None:
    timeline = engine_of_four().timeline()
    found = [timeline.engine_of(pid) for pid in (CORE, WORKER, FRONT)]
    assert [engine.name for engine in found if engine] == ["vllm", "vllm", "llama-swap"]
    other = Scene().process(FRONT, "api", engine="vllm").forked(NEW, 1, parent=FRONT)
    assert other.executed(NEW, 2, "nvidia-smi").timeline().engine_of(NEW) is None


def test_each_process_of_a_start_holds_it_up_in_its_time() -> None:
    timeline = engine_of_four().timeline()
    (one,) = requests_of(timeline)
    found = partition(timeline, one, [one])
    critical = critical_processes(timeline, one, found)
    held = [t for p, t in zip(found, critical, strict=True) if p.phase in ("launch", "load")]
    assert held == [NEW, CORE, OTHER_WORKER, OTHER_WORKER]


def test_memory_that_processes_share_is_no_model() -> None:
    scene = Scene().process(FRONT, "api").file(50, "/dev/shm/psm_e79d3b7c", 900 * MIB)
    scene.forked(CORE, 10, parent=FRONT).executed(CORE, 10, comm="core").mapped(CORE, 50, 20)
    assert scene.report().starts == ()
