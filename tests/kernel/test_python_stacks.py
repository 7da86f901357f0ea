"""py-spy beside the probes: a Python server whose stages are known, to the millisecond."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernel.file_systems import sh
from kernel.slow_fuse import mounted
from kernel.support import recording, start_recording
from lab.llama_server import free_port
from lab.page_cache import drop_cache
from ttftprof.engines.python_code import place_of
from ttftprof.model import Report, Request
from ttftprof.python_facts import Segment, read
from ttftprof.recording import Reader
from workloads.python_server import CANARY

pytestmark = pytest.mark.kernel

SERVER = Path(__file__).parents[1] / "workloads/python_server.py"
WEIGHTS_BYTES = 16 << 20
SLOW_BYTES, BYTES_PER_SECOND = 24 << 20, 40_000_000  # 0.6 s: 12 looks
STAGES = ("imports", "tokenizer", "weights", "generate")
SURE = 4  # standard errors
LATEST_NS = 700_000_000  # of 20 looks a second, none for so long: one in a million


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[bytes]
    port: int
    folder: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self) -> dict[str, int]:
        """One request; the stages it went through."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        message = {"role": "user", "content": f"Tell me of the {CANARY}."}
        body = json.dumps({"model": "m", "stream": True, "messages": [message]})
        connection.request("POST", "/v1/chat/completions", body)
        assert CANARY in connection.getresponse().read().decode()
        connection.close()
        stages: dict[str, int] = json.loads((self.folder / "stages").read_text().splitlines()[-1])
        return stages


@contextmanager
def python_server(
    tmp_path: Path,
    interpreter: Sequence[str] = (sys.executable,),
) -> Iterator[Server]:
    folder = folder_in(tmp_path)
    weights = weights_in(folder)
    if not weights.exists():
        weights.write_bytes(bytes(WEIGHTS_BYTES))
    port = free_port()
    command = [*interpreter, str(SERVER), str(port), str(folder), str(weights)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        wait_for(port)
        drop_cache(weights)
        yield Server(process, port, folder)
    finally:
        process.kill()
        process.wait(10)


def folder_in(tmp_path: Path) -> Path:
    folder = tmp_path / f"folder-of-{CANARY}"
    folder.mkdir(exist_ok=True)
    return folder


def weights_in(folder: Path) -> Path:
    return folder / "model.safetensors"


@contextmanager
def slow_weights(program: Path, tmp_path: Path) -> Iterator[None]:
    """The server's weights on storage that is slow on every machine."""
    weights = weights_in(folder_in(tmp_path))
    weights.touch()
    with mounted(
        program, tmp_path / "mnt", size_bytes=SLOW_BYTES, delay_us=100, rate=BYTES_PER_SECOND
    ) as daemon:
        sh("mount", "--bind", daemon.model, weights)
        try:
            yield
        finally:
            sh("umount", "--lazy", weights)


def wait_for(port: int) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.connect()
        except ConnectionRefusedError:
            time.sleep(0.01)
        else:
            connection.close()
            return
    raise AssertionError("the server does not listen")


def segments_of(path: Path) -> list[Segment]:
    with Reader(path) as reader:
        return [segment for own in read(reader).values() for segment in own]


@dataclass(frozen=True)
class Watched:
    path: Path
    report: Report
    stages: dict[str, int]

    @property
    def request(self) -> Request:
        (request,) = self.report.requests
        return request


@pytest.fixture(scope="module")
def watched(fuse_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = tmp_path_factory.mktemp("python")
    path = folder / "run.ttft"
    with slow_weights(fuse_binary, folder), python_server(folder) as server:
        with recording(path, "--pid", str(server.pid)) as seen:
            stages = server.ask()
            time.sleep(0.3)
        return Watched(path, seen.report(), stages)


def test_stacks_are_there_and_nothing_is_missed(watched: Watched) -> None:
    (source,) = [s for s in watched.report.sources if s.name == "python_stacks"]
    assert source.state == "ok", source
    assert watched.report.complete
    assert sum(watched.request.phase_totals().values()) == watched.request.ttft_ns


def test_shares_agree_with_what_the_server_did(watched: Watched) -> None:
    """Over the whole wait, within what so many samples can say."""
    stages, request = watched.stages, watched.request
    samples = sum(t.samples for t in request.python)
    covered = samples / 20 * 1e9 / (request.ttft_ns or 1)
    assert covered > 0.5
    found = dict.fromkeys(STAGES, 0.0)
    for share in (s for t in request.python for s in t.shares if s.category in found):
        found[share.category] += share.samples / samples
    begins = [stages[name] for name in STAGES] + [stages["end"]]
    first_ns = begins[-1] - round(samples / 20 * 1e9)  # what came before was not watched yet
    for name, begin, end in zip(STAGES, begins, begins[1:], strict=False):
        true = max(end - max(begin, first_ns), 0) / (begins[-1] - first_ns)
        error = (true * (1 - true) / samples) ** 0.5
        assert found[name] == pytest.approx(true, abs=SURE * error + 0.02), name


def test_stamps_lie_on_the_one_clock(watched: Watched) -> None:
    """A stage is first found after it began, and not late; py-spy's clock begins anywhere."""
    (segment,) = segments_of(watched.path)
    assert segment.clock_error_ns < 100_000_000
    for name in STAGES[1:]:
        numbers = {n for n, s in enumerate(segment.stacks) if place_of(s).category == name}
        begins = [
            int(begin)
            for spans in segment.threads.values()
            for begin, number in zip(spans.start_ns, spans.stack, strict=True)
            if int(number) in numbers
        ]
        late_ns = min(begins) - watched.stages[name]
        assert -segment.clock_error_ns - 1_000_000 <= late_ns <= LATEST_NS, name


def test_who_waited_for_the_weights_is_told(watched: Watched) -> None:
    waits = [w for t in watched.request.python for w in t.waits if w.category == "weights"]
    assert waits
    assert waits[0].frame.startswith("safetensors/torch.py:load_file:")
    used = next(f for f in watched.request.files if f.is_weights)
    # Besides the file's, there are waits for the tables in which the file system finds it.
    named_ns = sum(w.wait_ns for w in waits if (w.path or "").endswith("model.safetensors"))
    assert named_ns or used.storage_wait_ns < 1_000_000  # a disk may be there before it is asked
    assert named_ns <= used.storage_wait_ns * 1.05


def test_nothing_private_reaches_the_disk(watched: Watched) -> None:
    """But the folder of the model, whose path is the recording's to keep."""
    with Reader(watched.path) as reader:
        facts = [fact for _, fact in reader.facts("python_stacks")]
    assert facts
    assert CANARY not in json.dumps(facts)
    assert all(module != "" for fact in facts for module, _, _ in fact["frames"])
    assert ["?", "?", 2] in [frame for fact in facts for frame in fact["frames"]]
    raw = watched.path.read_bytes()
    assert f"Tell me of the {CANARY}".encode() not in raw
    assert f"the {CANARY} sings".encode() not in raw
    assert f"thread of {CANARY}".encode() not in raw


def test_the_server_is_never_stopped_for_a_look(tmp_path: Path) -> None:
    """Nobody traces it, and it does not stand still."""
    path = tmp_path / "run.ttft"
    traced: list[int] = []
    done = threading.Event()
    with (
        python_server(tmp_path) as server,
        recording(path, "--pid", str(server.pid)) as seen,
        ThreadPoolExecutor() as pool,
    ):
        watcher = pool.submit(watch_for_tracers, server.pid, done, traced)
        try:
            server.ask()
        finally:
            done.set()
        assert watcher.result() > 20
    assert traced == []
    (source,) = [s for s in seen.report().sources if s.name == "python_stacks"]
    assert source.state == "ok", source
    assert {segment.rate_hz for segment in segments_of(path)} == {20}


def watch_for_tracers(pid: int, done: threading.Event, traced: list[int]) -> int:
    """How often the process was looked at; who traced it then, if anybody, is added."""
    looks = 0
    while not done.wait(0.01):
        looks += 1
        status = Path(f"/proc/{pid}/status").read_text()
        tracer = int(status.split("TracerPid:")[1].split()[0])
        stopped = "State:\tt" in status or "State:\tT" in status
        if tracer or stopped:
            traced.append(tracer)
    return looks


def test_native_frames_where_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "native.ttft"
    with (
        python_server(tmp_path) as server,
        recording(path, "--pid", str(server.pid), "--native-stacks"),
    ):
        server.ask()
    frames = [frame for s in segments_of(path) for stack in s.stacks for frame in stack]
    assert any(module.endswith((".so", ".so.6", ".c")) for module, _, _ in frames)
    assert any(function == "load_file" or "spin" in function for _, function, _ in frames)


def test_an_interpreter_that_only_a_container_sees(tmp_path: Path) -> None:
    """Its path is another's on the host, and so are its process ids."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    program = hidden / Path(sys.executable).resolve().relative_to(sys.base_prefix)
    inside = f'mount --bind {sys.base_prefix} {hidden} && exec {program} "$@"'
    contained = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    path = tmp_path / "contained.ttft"
    with (
        python_server(tmp_path, [*contained, "sh", "-c", inside, "sh"]) as server,
        recording(path, "--port", str(server.port)) as seen,
    ):
        server.ask()
    assert not program.exists()
    (source,) = [s for s in seen.report().sources if s.name == "python_stacks"]
    assert source.state == "ok", source
    functions = {frame[1] for s in segments_of(path) for stack in s.stacks for frame in stack}
    assert {"spin", "load_file"} & functions


STARTS = """
import socket, sys, time
def prepare():
    until = time.monotonic() + 1.2
    while time.monotonic() < until:
        pass
prepare()
listener = socket.create_server(("127.0.0.1", 0))
time.sleep(2.5)
"""


def test_a_start_is_watched_until_it_listens(tmp_path: Path) -> None:
    path, script = tmp_path / "start.ttft", tmp_path / "starts.py"
    script.write_text(STARTS)
    started = start_recording(path, "--", sys.executable, str(script))
    assert started.process.wait(30) == 0
    (segment,) = segments_of(path)
    functions = {frame[1] for stack in segment.stacks for frame in stack}
    assert "prepare" in functions
    assert segment.end_ns - segment.start_ns < 3_000_000_000  # not to the end of its sleep


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_dies_under_the_look_is_no_failure(
    number: signal.Signals, tmp_path: Path
) -> None:
    path = tmp_path / "dies.ttft"
    with python_server(tmp_path) as server, recording(path, "--pid", str(server.pid)) as seen:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]})
        connection.request("POST", "/v1/chat/completions", body)
        time.sleep(1.0)
        server.process.send_signal(number)
        server.process.wait(10)
        assert seen.process.wait(20) == 0
    (source,) = [s for s in seen.report().sources if s.name == "python_stacks"]
    assert source.state == "ok", source
    assert segments_of(path)
