"""States that are made and verified: page cache, read-ahead, GPU memory, the server's own word."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest

from ttftprof.experiment import state
from ttftprof.experiment.fingerprint import Load, differences, fingerprint
from ttftprof.experiment.messages import Answer
from ttftprof.experiment.plan import Plan, variants_of
from ttftprof.experiment.runner import RunResult, _Session
from ttftprof.experiment.scenarios import SCENARIOS
from ttftprof.experiment.state import GpuMemory, ServerApi
from ttftprof.sources.gpu import DeviceLost, GpuAbsent, Look, Vendor
from unit.experiment_samples import plan

SIZE = 8 << 20


@pytest.fixture
def weights(tmp_path: Path) -> str:
    path = tmp_path / "a.weights"
    path.write_bytes(os.urandom(SIZE + 4099))
    return str(path)


def test_the_page_cache_is_emptied_filled_and_told(weights: str) -> None:
    state.drop_files([weights])
    assert state.check_cache([weights], "cold").met
    cached = state.check_cache([weights], "cached")
    assert not cached.met
    assert cached.found == "0.0 % cached"
    state.fill_files([weights])
    assert state.check_cache([weights], "cached").met
    assert not state.check_cache([weights], "cold").met
    assert cached.how in ("cachestat", "mincore")


def test_a_half_cached_file_is_neither(weights: str) -> None:
    state.drop_files([weights])
    with Path(weights).open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no readahead
        os.preadv(file.fileno(), [bytearray(SIZE // 2)], 0)
    for wanted in ("cold", "cached"):
        check = state.check_cache([weights], wanted)
        assert not check.met
        assert check.found == "50.0 % cached"


def test_any_state_of_the_cache_will_do_and_is_told(weights: str) -> None:
    state.drop_files([weights])
    check = state.check_cache([weights], "any")
    assert (check.met, check.found) == (True, "0.0 % cached")


@pytest.mark.parametrize(
    ("told", "state_of_it", "met", "found"),
    [
        ([(0, 34), (12, 34)], "busted", True, "12 of 34 tokens"),  # a chat template's first
        ([(3, 40), (30, 40)], "busted", False, "30 of 40 tokens"),
        ([(200, 1000)], "busted", True, "200 of 1000 tokens"),
        ([(300, 1000)], "busted", False, "300 of 1000 tokens"),
        ([(33, 34), (32, 34)], "kept", True, "32 of 34 tokens"),
        ([(33, 34), (12, 34)], "kept", False, "12 of 34 tokens"),  # one slot had none
        ([(0, 34)], "kept, but just loaded", True, "0 of 34 tokens"),
        ([(None, 34)], "kept", False, "the server does not tell"),
    ],
)
def test_the_prompt_cache_is_missed_or_used_as_it_was_to_be(
    told: list[tuple[int | None, int | None]], state_of_it: str, met: bool, found: str
) -> None:
    busted, resident = state_of_it == "busted", state_of_it == "kept"
    check = state.check_prompt_cache([*told, (None, 7)], busted, resident)
    assert check is not None
    assert (check.met, check.found) == (met, found)


def test_a_prompt_with_a_beginning_of_its_own_needs_nobodys_word() -> None:
    for resident in (True, False):
        assert state.check_prompt_cache([(None, 34), (3, None)], True, resident) is None
    assert state.check_prompt_cache([(None, 34)], False, False) is None


def test_files_that_are_not_known_or_gone_are_a_state_not_had(tmp_path: Path) -> None:
    unknown = state.check_cache([], "cold")
    assert not unknown.met
    assert unknown.how == "name them in server.files"
    gone = state.check_cache([str(tmp_path / "gone")], "cold")
    assert not gone.met
    assert "No such file" in gone.found
    state.drop_files([str(tmp_path / "gone")])


def test_read_ahead_is_set_on_the_files_device_and_read_back(weights: str, tmp_path: Path) -> None:
    dev = Path(weights).stat().st_dev
    switch = tmp_path / f"class/bdi/{os.major(dev)}:{os.minor(dev)}/read_ahead_kb"
    switch.parent.mkdir(parents=True)
    switch.write_text("128\n")
    switches = state.readahead_switches([weights, weights], sysfs=tmp_path)
    assert switches == {str(switch): "128"}
    assert state.set_readahead(switches, "1024").met
    assert switch.read_text() == "1024"
    assert not state.set_readahead([str(tmp_path / "none/read_ahead_kb")], "64").met
    assert not state.set_readahead([], "64").met


class FakeGpu(Vendor):
    """Two devices; the second one's memory is as it is told."""

    name = "fake"

    def __init__(self) -> None:
        self.used = [500 << 20, 0]
        self.absent = self.lost = False

    def open(self) -> list[dict[str, Any]]:
        if self.absent:
            raise GpuAbsent("none here")
        return [{"index": 0, "name": "x"}, {"index": 1, "name": "y"}]

    def look(self, device: int, tick: int) -> Look:
        if self.lost:
            raise DeviceLost(device, "fell off the bus")
        return Look.of({"used_bytes": self.used[device]})

    def close(self) -> None: ...


def test_gpu_memory_is_back_when_every_device_is_where_it_began() -> None:
    gpu = FakeGpu()
    memory = GpuMemory(gpu)
    check = memory.check_base(0)
    assert check is not None
    assert check.met
    gpu.used[1] = 4 << 30
    check = memory.check_base(0)
    assert check is not None
    assert not check.met
    assert check.found == "+4295 MB"
    memory.rebase()
    check = memory.check_base(0)
    assert check is not None
    assert check.met


def test_a_device_that_tells_nothing_any_more_is_not_called_empty() -> None:
    gpu = FakeGpu()
    memory = GpuMemory(gpu)
    gpu.lost = True
    check = memory.check_base(0)
    assert check is not None
    assert (check.met, check.found) == (False, "device 0 does not tell any more")


def test_a_server_that_loads_at_its_start_is_held_against_the_time_before_it() -> None:
    gpu = FakeGpu()
    gpu.used = [0, 0]
    memory = GpuMemory(gpu)
    gpu.used[0] = 4 << 30  # it accepts connections when its model is loaded
    memory.rebase()
    check = memory.check_base(0, since_begin=True)
    assert check is not None
    assert not check.met
    gpu.used[0] = 0
    check = memory.check_base(0, since_begin=True)
    assert check is not None
    assert check.met


def test_where_nobody_knows_the_base_nothing_is_said_of_it() -> None:
    memory = GpuMemory(FakeGpu())
    memory.forget_base()
    assert memory.check_base(0) is None


def test_without_a_gpu_there_is_nothing_to_check() -> None:
    gpu = FakeGpu()
    gpu.absent = True
    assert GpuMemory(gpu).check_base(0) is None


# -- the server's word ----------------------------------------------------------------------------

Handle = Callable[[str, str, Any], Any]


@contextmanager
def api(handle: Handle) -> Iterator[ServerApi]:
    """A server whose answer to (method, path, body) is JSON, or None for a 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(None)

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            self.answer(json.loads(self.rfile.read(length)))

        def answer(self, body: Any) -> None:
            found = handle(self.command, self.path, body)
            data = json.dumps(found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        found = ServerApi(("127.0.0.1", server.server_port))
        found.recognise()
        yield found
    finally:
        server.shutdown()
        server.server_close()


def llama_router(loaded: set[str]) -> Handle:
    def handle(method: str, path: str, body: Any) -> Any:
        if (method, path) == ("GET", "/models"):
            status = {True: "loaded", False: "unloaded"}
            return {"data": [{"id": m, "status": {"value": status[m in loaded]}} for m in "ab"]}
        if (method, path) == ("POST", "/models/unload"):
            loaded.discard(body["model"])
            return {"success": True}
        return {"build_info": "b1-abc"} if path == "/props" else None

    return handle


def ollama(loaded: set[str]) -> Handle:
    def handle(method: str, path: str, body: Any) -> Any:
        if path == "/api/version":
            return {"version": "0.12.3"}
        if path == "/api/ps":
            return {"models": [{"name": f"{m}:latest"} for m in loaded]}
        if path == "/api/generate" and body["keep_alive"] == 0:
            loaded.discard(body["model"])
            return {"done": True}
        return None

    return handle


def llama_swap(loaded: set[str]) -> Handle:
    def handle(method: str, path: str, body: Any) -> Any:
        if path == "/running":
            return {"running": [{"model": m, "state": "ready"} for m in loaded]}
        if path.startswith("/api/models/unload/"):
            loaded.discard(path.rpartition("/")[2])
            return {"msg": "ok"}
        return None

    return handle


@pytest.mark.parametrize(
    ("make", "kind", "version"),
    [
        (llama_router, "llama-router", "llama.cpp b1-abc"),
        (ollama, "ollama", "ollama 0.12.3"),
        (llama_swap, "llama-swap", ""),
    ],
)
def test_each_server_is_recognised_asked_and_told(
    make: Callable[[set[str]], Handle], kind: str, version: str
) -> None:
    loaded = {"a", "b"}
    with api(make(loaded)) as found:
        assert (found.kind, found.version) == (kind, version)
        check = found.check_loaded("a", True)
        assert check is not None
        assert check.met
        assert found.unload("a")
        assert loaded == {"b"}
        check = found.check_loaded("a", True)
        assert check is not None
        assert (check.met, check.found) == (False, "unloaded")


def test_a_server_that_tells_nothing_is_not_believed_to_say_anything() -> None:
    with api(lambda *_: None) as found:
        assert found.kind == "plain"
        assert found.loaded() is None
        assert found.check_loaded("a", True) is None
        assert not found.unload("a")
    assert found.models() == []  # it is gone now


def test_gpu_memory_is_not_called_empty_where_a_model_stayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with api(llama_router({"a", "b"})) as router:
        runner = session(by_itself())
        runner._api, runner._gpu = router, GpuMemory(FakeGpu())
        monkeypatch.setattr(router, "unload", lambda model: model == "a")
        (check,) = runner._empty_gpu()
    assert (check.met, check.found) == (False, "b was not evicted")


# -- fingerprints ---------------------------------------------------------------------------------


def test_a_fingerprint_tells_models_and_mounts_apart(weights: str) -> None:
    one = fingerprint({"a": [weights]}, os.getpid(), "llama.cpp b1")
    assert one["engine"] == "llama.cpp b1"
    assert "python" in one["server's command"]
    assert one["content of a"].startswith(f"{SIZE + 4099} bytes, header ")
    assert one["mount of a"]
    assert fingerprint({"a": [weights]}, os.getpid(), "llama.cpp b1") == one
    data = bytearray(Path(weights).read_bytes())
    data[0] ^= 1
    Path(weights).write_bytes(data)
    assert fingerprint({"a": [weights]}, None, "")["content of a"] != one["content of a"]


def test_differences_are_told_by_group() -> None:
    base: Mapping[str, str] = {"kernel": "6.1", "mount": "rw"}
    found = differences({"x": [base, base], "y": [{**base, "mount": "ro"}, base]})
    assert found == {"mount": {"x": ("rw",), "y": ("ro", "rw")}}
    assert differences({"x": [base], "y": [base]}) == {}


def test_load_is_a_share_of_all_cores() -> None:
    load = Load()
    found = load.as_json()
    assert found["load"] >= 0
    assert found["busy"] is None or 0 <= found["busy"] <= 1


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["false"], "it ended with 1"),
        (["/no/such/program"], "it could not be run: FileNotFoundError"),
    ],
)
def test_a_restart_that_failed_is_no_restart(command: list[str], found: str) -> None:
    server = {"url": "http://127.0.0.1:1", "models": ["a", "b"], "restart": command}
    server["stderr_to"] = os.devnull
    made = plan(scenarios=["resident"], runs=6, server=server)
    (check,) = session(made)._service.start_again(variants_of(made)[0])
    assert (check.met, check.found) == (False, found)


def session(made: Plan) -> _Session:
    """One that has begun, with nothing behind it."""
    runner = _Session(made, cast(Any, None), cast(Any, None))
    runner._variant = runner._base
    return runner


def by_itself(**server: Any) -> Plan:
    """A plan for a server that commands start; nobody answers at its address."""
    given = {"url": "http://127.0.0.1:1", "models": ["a", "b"], "stderr_to": os.devnull}
    return plan(scenarios=["restart"], runs=6, server={**given, "restart": ["true"], **server})


@pytest.mark.parametrize(
    ("command", "met", "found"),
    [(["true"], True, "it ended with 0"), (["false"], False, "it ended with 1")],
)
def test_a_server_that_runs_by_itself_is_stopped_before_it_is_started_again(
    command: list[str], met: bool, found: str
) -> None:
    (check,) = session(by_itself(stop=command))._service.end()
    assert (check.what, check.met, check.found) == ("stop", met, found)


def test_a_server_that_still_answers_was_not_stopped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        made = by_itself(url=url, stop=["true"], ready_timeout_s=1)
        (check,) = session(made)._service.end()
    assert (check.met, check.found) == (False, "something still answers")


def test_a_router_that_is_restarted_has_its_models_evicted_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without server.stop there is no moment without it, in which GPU memory could be back."""
    gpu = FakeGpu()
    gpu.used = [0, 0]
    loaded = {"a", "b"}
    with api(llama_router(loaded)) as router:
        runner = session(by_itself())
        runner._api = runner._service.api = router
        runner._gpu = GpuMemory(gpu)
        gpu.used[0] = 4 << 30
        evict = router.unload

        def unload(model: str) -> bool:
            gone = evict(model)
            gpu.used[0] = 0 if not loaded else 2 << 30
            return gone

        monkeypatch.setattr(router, "unload", unload)
        monkeypatch.setattr(runner, "_await_answer", lambda *_: (Answer("ok"), 1))
        result = RunResult()
        runner._restart(SCENARIOS["restart"], result)
    checks = {check.what: check.met for check in result.checks}
    assert loaded == set()
    assert checks["GPU memory"]
    assert checks["restart"]
