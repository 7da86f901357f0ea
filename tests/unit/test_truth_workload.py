"""The truth workload against itself: stamps, cache states, counts, and that it leaves nothing."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from workloads import counted, wire
from workloads.build import WorkloadError, build_library
from workloads.cache import drop_cache, make_model, residency, warm_cache
from workloads.client import ChatRequest, chat, chat_on
from workloads.config import MIB, MS, ModelConfig, ServerConfig
from workloads.scenarios import SCENARIOS, Scenario, ScenarioRun, run_scenario
from workloads.server import Server, router
from workloads.truth import PHASES, TruthError, _partition, await_truth

# The kernel tests run all scenarios, with the profiler beside them. Alone, one of each kind runs.
A_FEW = {
    "cold_mmap_short",
    "lazy_mmap",
    "random_mmap",
    "queued_switch",
    "single_restart_backlog",
    "ollama_expired",
    "vllm_cache_full",
}
LEFT_WITHIN_S = 30.0
ARRIVAL_SLACK_NS = 500 * MS  # from the client's own stamp to the server's socket; likewise
RECEIVE_SLACK_NS = 500 * MS  # the client's thread may wait for a core
LLAMA_NAMES = (
    "llama_model_load_from_file",
    "llama_init_from_model",
    "llama_decode",
    "llama_model_free",
    "llama_free",
)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("truth")


@pytest.fixture(scope="module")
def small_server(workdir: Path) -> Iterator[tuple[Server, ServerConfig]]:
    """A router over two small models, for tests of the server rather than of a scenario."""
    directory = workdir / "small"
    directory.mkdir()
    config = ServerConfig(
        models={
            name: ModelConfig(
                path=str(make_model(directory / name, 3 * MIB + 1)),
                init_ns=0,
                prefill_ns_per_token=MS // 10,
                launch_ns=0,
                parallel=2 if name == "b" else 1,
            )
            for name in ("a", "b")
        },
        library_path=str(build_library(workdir / "build")),
        truth_path=str(directory / "truth.jsonl"),
        health_quantum_ns=10 * MS,
    )
    with router(config, directory) as server:
        yield server, config


@pytest.mark.parametrize(
    "name", [n if n in A_FEW else pytest.param(n, marks=pytest.mark.long) for n in SCENARIOS]
)
def test_scenario_says_the_truth(name: str, workdir: Path) -> None:
    hooks: list[tuple[str, int]] = []
    run = run_scenario(
        name,
        workdir,
        before_switch=lambda pid: hooks.append(("before", pid)),
        after=lambda pid: hooks.append(("after", pid)),
    )
    assert hooks == [("before", run.server_pid), ("after", run.server_pid)]
    assert run.truth.complete
    _assert_partition(run)
    _assert_client_agrees(run)
    _assert_cache_state(run)
    # How fast this machine reads or starts a process decides which phase is longest.
    totals = run.truth.totals_ns
    assert 2 * totals[run.scenario.dominant] >= max(totals.values()), totals
    assert run.truth.switched == run.scenario.switches
    assert run.truth.prompt_tokens == run.scenario.prompt_tokens
    _assert_reads_fell_where_expected(run)
    assert not Path(f"/proc/{run.server_pid}").exists()
    assert not Path(f"/proc/{run.truth.runner_pid}").exists()
    _assert_nobody_is_left(run)


def test_an_engines_workers_end_with_it(workdir: Path) -> None:
    """They are forked, and told by nobody: each has to see the end of its core."""
    whole = SCENARIOS["vllm_two_workers"]
    small = replace(whole, name="two_small", cold=False, weights_b_bytes=4 * MIB)
    _assert_nobody_is_left(run_scenario(small, workdir))


def _assert_nobody_is_left(run: ScenarioRun) -> None:
    deadline = time.monotonic() + LEFT_WITHIN_S
    while left := _holders(run.truth_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def _holders(path: Path) -> list[str]:
    """Who has a file open that every process of a server has."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if link.readlink() == path:
                found.append(link.parts[2])
    return found


def _assert_partition(run: ScenarioRun) -> None:
    truth = run.truth
    edges = truth.edges
    assert edges[0].start_ns == truth.request_start_ns
    assert edges[-1].end_ns == truth.first_token_ns
    assert all(edge.duration_ns > 0 and edge.phase in PHASES for edge in edges)
    assert all(a.end_ns == b.start_ns for a, b in itertools.pairwise(edges))
    assert sum(truth.totals_ns.values()) == truth.ttft_ns


def _assert_client_agrees(run: ScenarioRun) -> None:
    truth, client = run.truth, run.client
    assert client.outcome == "ok"
    assert client.send_begin_ns is not None
    assert client.first_text_ns is not None
    assert 0 <= truth.request_start_ns - client.send_begin_ns < ARRIVAL_SLACK_NS
    assert 0 <= client.first_text_ns - truth.first_token_ns < RECEIVE_SLACK_NS
    if run.scenario.style == "router":  # the others tell no such figures, or others
        assert client.timings["prompt_n"] == run.scenario.prompt_tokens
        assert client.timings["prompt_ms"] <= truth.totals_ns["prefill"] / 1e6


def _assert_cache_state(run: ScenarioRun) -> None:
    """A cold file is read from storage whole and once, a warm one not at all."""
    size_bytes = run.model_path.stat().st_size * run.scenario.shards
    read_bytes = run.truth.at_end["storage_bytes"]
    if run.scenario.cold:
        assert run.residency_before == 0
    elif run.scenario.b.load_mode != "direct":
        assert run.residency_before == 1
    if run.scenario.cold or run.scenario.b.load_mode == "direct":
        assert 0.99 * size_bytes < read_bytes < 1.01 * size_bytes + MIB
    else:
        assert read_bytes < max(
            size_bytes / 8, 4 * MIB
        )  # the kernel may have taken back what lay idle


def _assert_reads_fell_where_expected(run: ScenarioRun) -> None:
    """Lazy weights come after the server is ready; random access faults once a page."""
    size_bytes, at_ready = run.model_path.stat().st_size, run.truth.at_ready
    if run.scenario.name == "lazy_mmap":
        assert at_ready["storage_bytes"] < MIB
    if run.scenario.name == "random_mmap":
        pages = -(-size_bytes // 4096)
        # The memory-fit pass has read the header and some pages of readahead behind it.
        assert pages - 64 <= at_ready["major_faults"] <= pages + 64


def test_streams_and_whole_answers_on_one_connection(
    small_server: tuple[Server, ServerConfig],
) -> None:
    server, _ = small_server
    with contextlib.closing(wire.connect("127.0.0.1", server.port, 10.0)) as sock:
        for index, stream in enumerate((True, False, True)):
            request = ChatRequest(
                server.port, "a", f"keep-{index}", prompt_tokens=7, max_tokens=5, stream=stream
            )
            result = chat_on(sock, request)
            assert result.outcome == "ok"
            assert result.texts == (5 if stream else 1)
            assert result.timings["predicted_n"] == 5
            assert result.headers_ns is not None
            assert result.first_text_ns is not None
            assert result.headers_ns <= result.first_text_ns


def test_role_chunk_is_no_token(small_server: tuple[Server, ServerConfig]) -> None:
    """Headers and the role leave before prefill; the first text only after it."""
    server, _ = small_server
    result = chat(ChatRequest(server.port, "a", "role", prompt_tokens=500))
    assert result.headers_ns is not None
    assert result.first_text_ns is not None
    assert result.first_text_ns - result.headers_ns > 30 * MS


def test_unknown_model_is_an_error(small_server: tuple[Server, ServerConfig]) -> None:
    server, _ = small_server
    assert chat(ChatRequest(server.port, "nobody", "bad")).outcome == "http_error"


def test_a_client_that_gives_up_is_no_complete_request(
    small_server: tuple[Server, ServerConfig],
) -> None:
    server, config = small_server
    # Long enough for the front to be sending when the kernel has learnt that nobody listens.
    request = ChatRequest(
        server.port, "a", "gone", prompt_tokens=2000, max_tokens=1000, timeout_s=0.05
    )
    assert chat(request).outcome == "timeout"
    assert chat(ChatRequest(server.port, "a", "next")).outcome == "ok"
    by_id = {truth.request_id: truth for truth in await_truth(config.truth_path, {"next"})}
    assert "gone" not in by_id or not by_id["gone"].complete
    assert by_id["next"].totals_ns["queue"] > 0


def test_two_slots_do_not_wait_for_each_other(
    small_server: tuple[Server, ServerConfig],
) -> None:
    server, config = small_server
    chat(ChatRequest(server.port, "b", "slots-warm"))
    requests = [ChatRequest(server.port, "b", f"slots-{n}", prompt_tokens=500) for n in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        assert [result.outcome for result in pool.map(chat, requests)] == ["ok", "ok"]
    ids = {request.request_id for request in requests}
    by_id = {truth.request_id: truth for truth in await_truth(config.truth_path, ids)}
    totals = [by_id[request.request_id].totals_ns for request in requests]
    longest_ns = min(spent["prefill"] for spent in totals)  # which one would have waited for
    assert all(spent["queue"] < longest_ns / 2 for spent in totals), totals


def test_log_lines_pass_through_the_front(small_server: tuple[Server, ServerConfig]) -> None:
    server, _ = small_server
    chat(ChatRequest(server.port, "b", "log-1"))
    chat(ChatRequest(server.port, "a", "log-2"))
    deadline = time.monotonic() + 10
    while True:
        text = server.log_path.read_text()
        found = (
            "evicting idle LRU name=b to make room for name=a" in text,
            any(line.startswith("[") and "load_tensors:" in line for line in text.splitlines()),
        )
        if all(found):
            break
        assert time.monotonic() < deadline, (found, text)
        time.sleep(0.01)


def test_killed_server_takes_its_runner_along(workdir: Path, tmp_path: Path) -> None:
    config = ServerConfig(
        models={"a": ModelConfig(path=str(make_model(tmp_path / "a", MIB)))},
        library_path=str(build_library(workdir / "build")),
        truth_path=str(tmp_path / "truth.jsonl"),
    )
    with router(config, tmp_path) as server:
        chat(ChatRequest(server.port, "a", "one"))
        (truth,) = await_truth(config.truth_path, {"one"})
        os.kill(server.pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while _runs(truth.runner_pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not _runs(truth.runner_pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_stamps_out_of_order_are_refused() -> None:
    with pytest.raises(TruthError, match="load ends 1 ns before"):
        _partition(0, [("launch", 5), ("load", 4)])


def test_library_exports_the_markers_or_none(workdir: Path) -> None:
    marked = ctypes.CDLL(str(build_library(workdir / "build")))
    plain = ctypes.CDLL(str(build_library(workdir / "build", markers=False)))
    assert all(hasattr(marked, name) for name in LLAMA_NAMES)
    assert not any(hasattr(plain, name) for name in LLAMA_NAMES)


def test_cache_is_dropped_and_warmed(tmp_path: Path) -> None:
    path = make_model(tmp_path / "weights", 5 * MIB + 11)
    warm_cache(path)
    assert residency(path) == 1
    drop_cache(path)
    assert residency(path) == 0


@pytest.mark.parametrize("mode", [mode for mode in counted.MODES if not mode.endswith("storm")])
def test_counted_program_counts_what_it_did(mode: str, tmp_path: Path) -> None:
    path = make_model(tmp_path / "file", 5 * MIB + 7)
    with counted.started(mode, path) as program:
        summary = program.go()
        assert Path(f"/proc/{program.pid}").exists()
    assert summary["pid"] == program.pid
    assert (
        summary["did"]
        == {
            "reads": {"opens": 1, "reads": 23, "read_bytes": 23 * 65537},
            "mmaps": {"opens": 1, "mmaps": 29, "munmaps": 29},
            "opens": {"opens": 37},
            "forks": {"forks": 31},
            "threads": {"threads": 1009, "opens": 1009, "sleeps": 1009},
            "preempted": {"sleeps": 41},
            "faults": {"file_pages": 997, "anonymous_pages": 499},
            "idle": {},
        }[mode]
    )
    assert summary["counted"]["read_calls"] == (23 if mode == "reads" else 0)
    assert summary["counted"]["major_faults"] == (997 if mode == "faults" else 0)
    if mode == "faults":
        assert 499 <= summary["counted"]["minor_faults"] <= 499 + 16


def test_counted_program_ends_with_its_parent(tmp_path: Path) -> None:
    with counted.started("idle", tmp_path) as program:
        pass
    assert program.process.returncode == 0


def test_command_line_lists_and_runs(workdir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "workloads", "resident_warm", "--workdir", str(workdir)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "resident_warm" in done.stdout
    assert "prefill=" in done.stdout


def test_nothing_stays_when_a_hook_fails(workdir: Path) -> None:
    pids: list[int] = []

    def fail(pid: int) -> None:
        pids.append(pid)
        raise RuntimeError("no profiler here")

    with pytest.raises(RuntimeError, match="no profiler"):
        run_scenario("resident_warm", workdir, before_switch=fail)
    assert not _runs(pids[0])


def test_workload_error_names_the_log(workdir: Path) -> None:
    refused = Scenario("refused", "weights that vanish", "load", weights_b_bytes=MIB + 1)

    def vanish(_: int) -> None:
        (workdir / f"b-{refused.weights_b_bytes}.weights").unlink()

    with pytest.raises(WorkloadError, match=r"server\.log"):
        run_scenario(refused, workdir, before_switch=vanish)
