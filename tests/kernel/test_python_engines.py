"""Real engines that are Python processes: xllamacpp (llama.cpp), `transformers serve`, vLLM."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kernel.support import Recording, recording
from lab.llama_server import Reply, free_port
from lab.page_cache import drop_cache
from lab.python_servers import (
    TRANSFORMERS,
    VLLM,
    VLLM_ENVIRONMENT,
    Switched,
    TransformersServer,
    VllmServer,
    XllamacppServer,
)
from ttftprof.model import FileUse, Phase, Report, Request
from ttftprof.phases import requests_of
from ttftprof.timeline import build

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

CLIENT_ERROR_NS = 2_000_000
LATE_CLIENT_NS = 25_000_000  # on busy cores
STORAGE_ERROR = 0.01
FIGURE_ERROR = 0.03  # against the server's own figures
FIGURE_NOISE_NS = 5_000_000
HAND_OVER_NS = 25_000_000  # of a request, on busy cores
ATTEMPTS = 5  # the client's own stamp comes late when others use the cores
PROMPT = "Say in one word what a page fault is."


def client_errors_ns(report: Report, replies: Sequence[Reply]) -> list[int]:
    """How far each TTFT lies from the client's own."""
    pairs = zip(answered(report), replies, strict=True)
    return [reply.off_ns(request.ttft_ns) for request, reply in pairs]


def answered(report: Report) -> list[Request]:
    return [r for r in report.requests if r.first_token_ns is not None]


def check_exact(request: Request, may_be_unexplained: float = 0.0) -> None:
    length_ns = request.ttft_ns or (request.end_ns or 0) - request.start_ns
    assert sum(request.phase_totals().values()) == length_ns
    assert sum(request.activity_totals().values()) == length_ns
    assert request.phase_totals().get("unexplained", 0) <= may_be_unexplained * length_ns


def weights(request: Request) -> FileUse:
    return next(f for f in request.files if f.is_weights)


def phase(request: Request, name: str) -> Phase:
    return next(p for p in request.phases if p.phase == name)


def close(one_ns: float, other_ns: float, noise_ns: int = FIGURE_NOISE_NS) -> bool:
    return abs(one_ns - other_ns) <= FIGURE_ERROR * other_ns + noise_ns


# -- xllamacpp ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    recording: Recording
    report: Report
    reply: Reply
    switched: Switched

    @property
    def hand_over_ns(self) -> int:
        """What may lie between the server's own stamps and what they are of, twice."""
        span = self.switched.begun_ns, self.reply.end_ns
        return HAND_OVER_NS + 2 * self.recording.longest_ready_ns(*span)


def switch_inside(models: Path, path: Path) -> Seen:
    with XllamacppServer([str(models / "a.gguf")]) as server:
        server.wait_switched()
        server.chat("a", "hello")
        drop_cache(models / "b.gguf")
        with recording(path, "--pid", str(server.pid)) as seen:
            switched = server.switch(models / "b.gguf")
            reply = server.chat("b", PROMPT)
            time.sleep(0.2)
    return Seen(seen, seen.report(), reply, switched)


def restart(models: Path, path: Path) -> Seen:
    port = free_port()
    with XllamacppServer([str(models / "a.gguf")], port=port) as first:
        first.wait_switched()
        first.chat("a", "hello")
        drop_cache(models / "b.gguf")
        with recording(path, "--port", str(port)) as seen:
            first.stop()
            with XllamacppServer([str(models / "b.gguf")], port=port) as second:
                switched = second.wait_switched()
                reply = second.chat("b", PROMPT)
                time.sleep(0.2)
    return Seen(seen, seen.report(), reply, switched)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("way", "phases"),
    [
        (switch_inside, {"evict", "load", "init"}),
        (restart, {"evict", "launch", "load", "init"}),
    ],
)
def test_xllamacpp(
    way: Callable[[Path, Path], Seen], phases: set[str], models_dir: Path, tmp_path: Path
) -> None:
    for attempt in range(ATTEMPTS):
        seen = way(models_dir, tmp_path / f"{attempt}.ttft")
        if client_errors_ns(seen.report, [seen.reply])[0] <= CLIENT_ERROR_NS:
            break
    report, (start,) = seen.report, seen.report.starts
    assert client_errors_ns(report, [seen.reply])[0] <= CLIENT_ERROR_NS
    assert not report.lost
    assert {s.name: s.state for s in report.sources}["marks"] == "ok"
    assert {start.engine, *(r.engine for r in report.requests)} == {"xllamacpp"}
    assert (start.model, start.outcome) == ("b.gguf", "ok")
    assert set(start.phase_totals()) == phases
    check_exact(start)
    used = weights(start)
    assert used.bytes_from_storage == pytest.approx(used.size_bytes, rel=STORAGE_ERROR)
    # the server's own stamps: from the moment it began to make its object to its being able
    made_ns = seen.switched.ready_ns - seen.switched.begun_ns
    load_begin_ns = phase(start, "load").start_ns
    assert 0 <= load_begin_ns - seen.switched.begun_ns <= seen.hand_over_ns
    own_ns = (start.end_ns or 0) - load_begin_ns
    assert close(own_ns + (load_begin_ns - seen.switched.begun_ns), made_ns, seen.hand_over_ns)
    check_answer(answered(report)[0], seen.reply, seen.hand_over_ns)


def check_answer(request: Request, reply: Reply, hand_over_ns: int) -> None:
    """Of a server that has its model: all is the prompt's, as its own figure says."""
    check_exact(request)
    assert not request.switched
    own_ns = reply.timings["prompt_ms"] * 1e6
    ours_ns = request.phase_totals()["prefill"]
    assert ours_ns >= own_ns * (1 - FIGURE_ERROR) - FIGURE_NOISE_NS
    assert ours_ns <= own_ns * (1 + FIGURE_ERROR) + hand_over_ns
    assert request.verdict.cause == "prefill"


# -- transformers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two folders of 92 MB."""
    script = Path(__file__).parents[1] / "lab/make_transformers_model.py"
    python = TRANSFORMERS.with_name("python")
    folders = [tmp_path_factory.mktemp("transformers") / name for name in "ab"]
    for seed, folder in enumerate(folders, start=1):
        subprocess.run([str(python), str(script), str(folder), "6", str(seed)], check=True)
    return folders


@pytest.mark.transformers
def test_transformers_serve(transformers_models: list[Path], tmp_path: Path) -> None:
    """A cold first model with what it imports late, a cold second, and that again."""
    a, b = transformers_models
    server = TransformersServer([], port=free_port())
    path = tmp_path / "transformers.ttft"
    for model in (a, b):
        drop_cache(model / "model.safetensors")
    with server, recording(path, "--pid", str(server.pid)) as seen:
        replies = [server.chat(str(model), PROMPT) for model in (a, b, b, b, b)]
        time.sleep(0.3)
    report = seen.report()
    assert {r.engine for r in report.requests} == {"transformers"}
    assert [r.model for r in report.requests] == [str(a), *[str(b)] * 4]
    assert [r.switched for r in report.requests] == [True, True, False, False, False]
    for request in report.requests:
        check_exact(request, may_be_unexplained=0.35 if request.switched else 0.0)
    errors = client_errors_ns(report, replies)
    assert min(errors) <= CLIENT_ERROR_NS, errors
    assert max(errors) <= LATE_CLIENT_NS, errors
    first, second, *warm = report.requests
    for request in (first, second):
        assert weights(request).bytes_from_storage == pytest.approx(
            weights(request).size_bytes, rel=STORAGE_ERROR
        )
        assert {"load", "prefill"} <= set(request.phase_totals())
        assert request.phase_activity()["load"].get("storage_wait", 0) > 0
    check_python(first)
    # What comes before its load is shorter than two looks: launch if both found it preparing.
    assert {"launch", "unexplained"} & set(second.phase_totals())
    assert second.verdict.cause in {"launch", "load"}
    for request in warm:
        assert set(request.phase_totals()) == {"prefill"}
        assert request.verdict.cause == "prefill"


FOUR_LOOKS_NS = 200_000_000  # for less there may be no look, as of a load from a fast disk


def check_python(request: Request) -> None:
    """What a first request pays for: transformers imports its models late."""
    assert request.verdict.cause == "launch"
    assert "importing Python modules (" in request.verdict.explanation
    shares = {(t.phase, s.category): s.share for t in request.python for s in t.shares}
    assert shares["launch", "imports"] > 0.5
    if request.phase_totals()["prefill"] > FOUR_LOOKS_NS:
        assert shares["prefill", "generate"] > 0.5
    waits = [w for t in request.python for w in t.waits if w.category == "weights"]
    if request.phase_activity()["load"].get("storage_wait", 0) > FOUR_LOOKS_NS:
        assert any((w.path or "").endswith("model.safetensors") for w in waits)


@pytest.mark.transformers
def test_transformers_starts(tmp_path: Path) -> None:
    """From its execution to its listening it imports, and is watched."""
    path = tmp_path / "start.ttft"
    port = free_port()
    command = [str(TRANSFORMERS), "serve", "--host", "127.0.0.1", "--port", str(port)]
    with recording(path, "--duration", "60", "--", *command, "--device", "cpu") as seen:
        server = TransformersServer([], port=port)
        # Its output is text and not bytes, which only the types see.
        server.process = seen.process  # type: ignore[assignment]
        server.wait_ready()
        seen.stop()
    with seen.reader() as reader:
        facts = [fact for _, fact in reader.facts("python_stacks")]
    assert sum(fact["samples"] for fact in facts) > 20
    modules = {module for fact in facts for module, _, _ in fact["frames"]}
    assert any(module.startswith("torch/") for module in modules)
    assert any(module.startswith("transformers/") for module in modules)


# -- vLLM -----------------------------------------------------------------------------------------

VLLM_STARTS_WITHIN_S = 500.0  # three processes import one after another
ASLEEP_S = 1.0


@pytest.fixture(scope="module")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("vllm") / "model"
    script = Path(__file__).parents[1] / "lab/make_transformers_model.py"
    subprocess.run([str(VLLM), str(script), str(model), "6", "1"], check=True)
    return model


@pytest.fixture(scope="module")
def running_vllm(vllm_model: Path) -> Iterator[VllmServer]:
    """One that was there, with its model in memory, before anybody records it."""
    server = VllmServer([str(vllm_model)], log_path=vllm_model.with_name("vllm.log"))
    with ended_with_all_below() as below:
        server.start()
        below.append(psutil.Process(server.pid))
        server.wait_ready(VLLM_STARTS_WITHIN_S)
        below.extend(psutil.Process(server.pid).children(recursive=True))
        server.chat(str(vllm_model), "hello")  # what it compiles late
        yield server


@contextmanager
def ended_with_all_below() -> Iterator[list[psutil.Process]]:
    """Ends the processes put into the list; those of vLLM do not always end with their parent."""
    below: list[psutil.Process] = []
    try:
        yield below
    finally:
        for process in below:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.vllm
@pytest.mark.long
def test_vllm_starts_and_answers(
    vllm_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """API server, engine core and worker: each holds up the launch in its time."""
    model = str(vllm_model)
    server = VllmServer([model], port=free_port())
    for name, value in VLLM_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    # It writes more than the pipe holds that nobody empties before the end.
    to_file = ["sh", "-c", 'exec "$@" >"$0" 2>&1', str(tmp_path / "vllm.log")]
    with (
        ended_with_all_below() as below,
        recording(tmp_path / "vllm.ttft", "--", *to_file, *server.command()) as seen,
    ):
        server.process = seen.process  # type: ignore[assignment]
        server.wait_ready(VLLM_STARTS_WITHIN_S)
        below.extend(psutil.Process(seen.process.pid).children(recursive=True))
        replies = [server.chat(model, f"{PROMPT} {number}") for number in range(3)]
        time.sleep(0.3)
    report = seen.report()
    assert not report.lost
    (start,) = report.starts
    assert {start.engine, *(r.engine for r in report.requests)} == {"vllm"}
    assert (start.model, start.outcome) == ("model.safetensors", "ok")
    assert set(start.phase_totals()) == {"launch", "load", "init"}
    assert [p.phase for p in start.phases].count("launch") == 3
    check_exact(start)
    assert start.verdict.cause == "launch"
    assert "importing Python modules (" in start.verdict.explanation
    activities = start.phase_activity()["launch"]
    assert activities.get("idle", 0) < 0.2 * sum(activities.values())
    check_all_prefill(answered(report), replies)
    with seen.reader() as reader:  # asked of its own metrics while a client waited
        assert all(fact["waiting"] == 0 for _, fact in reader.facts("engine_load"))
        assert any(reader.facts("engine_load"))


def check_all_prefill(requests: Sequence[Request], replies: Sequence[Reply]) -> None:
    for request in requests:
        check_exact(request)
        assert set(request.phase_totals()) == {"prefill"}
        assert request.verdict.cause == "prefill"
        assert not request.switched
    own = [p.off_ns(r.ttft_ns) for r, p in zip(requests, replies, strict=True)]
    assert min(own) <= CLIENT_ERROR_NS, own


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.parametrize("way", ["--pid", "--port"])
def test_vllm_attached(way: str, running_vllm: VllmServer, tmp_path: Path) -> None:
    """Whoever computes is told though nobody saw it load: alone, and with another beside it."""
    model, server = running_vllm.arguments[0], running_vllm
    target = {"--pid": server.pid, "--port": server.port}[way]
    with recording(tmp_path / "vllm.ttft", way, str(target)) as seen, ThreadPoolExecutor() as pool:
        replies = [server.chat(model, f"{PROMPT} {number}") for number in range(2)]
        ahead = pool.submit(server.chat, model, "go on " * 20, 60)
        time.sleep(0.3)
        replies += [server.chat(model, "beside"), ahead.result()]
        time.sleep(0.3)
    report = seen.report()
    assert not report.lost
    assert {r.engine for r in report.requests} == {"vllm"}
    alone, _, first, beside = report.requests
    check_all_prefill([*report.requests[:2], beside, first], replies)
    spent = alone.activity_totals()
    assert spent.get("cpu", 0) + spent.get("fault", 0) >= 0.7 * sum(spent.values())
    with seen.reader() as reader:
        timeline = build(reader)
    lives = [timeline.process_at(s.server, s.received_ns) for s in requests_of(timeline)]
    # not its engine core, which spins for it
    assert {life.argv[0] for life in lives if life is not None} == {"VLLM::Worker"}


@pytest.mark.vllm
@pytest.mark.long
def test_vllm_asleep(running_vllm: VllmServer, tmp_path: Path) -> None:
    """Without a GPU it has no weights to put away, but pauses all the same until it is woken."""
    model, server = running_vllm.arguments[0], running_vllm
    path = tmp_path / "asleep.ttft"
    with recording(path, "--port", str(server.port)) as seen, ThreadPoolExecutor() as pool:
        server.call("POST", "/sleep?level=1")
        waiting = pool.submit(server.chat, model, PROMPT)
        time.sleep(ASLEEP_S)
        server.call("POST", "/wake_up")
        waiting.result()
        time.sleep(0.3)
    (request,) = answered(seen.report())
    check_exact(request)
    assert [p.phase for p in request.phases] == ["queue", "load", "prefill"]
    assert request.phases[0].duration_ns == pytest.approx(ASLEEP_S * 1e9, rel=0.2)
    assert request.verdict.cause == "queue"
    assert "The engine was asleep" in request.verdict.explanation
    assert any("woken from sleep level 1" in note for note in request.notes)
