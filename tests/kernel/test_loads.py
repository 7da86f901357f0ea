"""Loads that a server does with a request in hand, however it reads: small reads, a file mapped
before, past the cache. A real server says when it began to load and when it was done."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernel.support import Recording, recording
from ttftprof.model import FileUse, Request
from workloads.cache import drop_cache, make_model
from workloads.server import pick_port

pytestmark = pytest.mark.kernel

MIB = 1 << 20
SIZE_BYTES = 96 * MIB
EDGE_NS = 15_000_000

# A request names what is done before it is answered; the stamps of a load go to standard output.
SERVER = """
import json, mmap, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
COMPUTES_S = 0.1
held = []

def map_(path):
    with open(path, "rb") as file:
        held.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))

def read(path, size, flags=0):
    buffer = mmap.mmap(-1, size)
    fd = os.open(path, os.O_RDONLY | flags)
    while os.readv(fd, [buffer]):
        pass
    os.close(fd)

def small(path):
    read(path, 16 << 10)

def big(path):
    read(path, 1 << 20)

def direct(path):
    read(path, 1 << 20, os.O_DIRECT)

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        began = time.monotonic_ns()
        for way, path in asked["messages"]:
            globals()[way](path)
        print(json.dumps([began, time.monotonic_ns()]), flush=True)
        until = time.monotonic() + COMPUTES_S
        while time.monotonic() < until:
            pass
        text = 'data: {"choices": [{"delta": {"content": "a"}}]}\\n\\ndata: [DONE]\\n\\n'.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Server:
    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port

    def ask(self, *steps: tuple[str, Path]) -> tuple[int, int]:
        """When it began and ended what it was asked to do, on CLOCK_MONOTONIC."""
        body = {"model": "m", "stream": True, "messages": [(way, str(path)) for way, path in steps]}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions", json.dumps(body).encode()
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
        assert self.process.stdout
        began, ended = json.loads(self.process.stdout.readline())
        return began, ended


@contextmanager
def serving() -> Iterator[Server]:
    port = pick_port()
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True
    )
    try:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)
            except urllib.error.HTTPError:
                break
            except OSError:
                time.sleep(0.02)
        yield Server(process, port)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    a, b = (make_model(folder / f"{name}.gguf", SIZE_BYTES) for name in "ab")
    return a, b


def last_request(seen: Recording) -> Request:
    report = seen.report()
    assert not report.lost
    return report.requests[-1]


def weights_of(request: Request) -> FileUse:
    [weights] = [f for f in request.files if f.is_weights]
    return weights


def check_load(seen: Recording, request: Request, began_ns: int, ended_ns: int) -> None:
    """The load is where the server was at it, but for what it stood ready for a core."""
    assert request.switched, [(p.phase, p.duration_ns) for p in request.phases]
    [load] = [p for p in request.phases if p.phase == "load"]
    edge_ns = EDGE_NS + seen.longest_ready_ns(began_ns - EDGE_NS, ended_ns + EDGE_NS)
    assert abs(load.start_ns - began_ns) <= edge_ns
    assert abs(load.end_ns - ended_ns) <= edge_ns


@pytest.mark.parametrize("cold", [True, False])
def test_a_load_by_small_reads(cold: bool, models: tuple[Path, Path], tmp_path: Path) -> None:
    """Reads of 16 KiB are too many to be recorded one by one."""
    _, model = models
    with (
        serving() as server,
        recording(tmp_path / "s.ttft", "--pid", str(server.process.pid)) as seen,
    ):
        if cold:
            drop_cache(model)
        else:
            model.read_bytes()
        began_ns, ended_ns = server.ask(("small", model))
        time.sleep(0.1)
    request = last_request(seen)
    check_load(seen, request, began_ns, ended_ns)
    weights = weights_of(request)
    assert weights.path == str(model)
    assert weights.residency_before == (0.0 if cold else 1.0)
    assert weights.bytes_from_storage == (SIZE_BYTES if cold else 0)


def test_a_read_of_what_was_mapped_before(models: tuple[Path, Path], tmp_path: Path) -> None:
    """The weights are those that are read, not those that were mapped last."""
    a, b = models
    with (
        serving() as server,
        recording(tmp_path / "s.ttft", "--pid", str(server.process.pid)) as seen,
    ):
        server.ask(("map_", b), ("map_", a))
        drop_cache(b)
        began_ns, ended_ns = server.ask(("big", b))
        time.sleep(0.1)
    request = last_request(seen)
    check_load(seen, request, began_ns, ended_ns)
    assert weights_of(request).path == str(b)
    assert request.verdict.storage != "cache worked"


def test_requests_past_the_cache_are_the_files(models: tuple[Path, Path], tmp_path: Path) -> None:
    _, model = models
    with (
        serving() as server,
        recording(tmp_path / "s.ttft", "--pid", str(server.process.pid)) as seen,
    ):
        began_ns, ended_ns = server.ask(("direct", model))
        time.sleep(0.1)
    request = last_request(seen)
    check_load(seen, request, began_ns, ended_ns)
    weights = weights_of(request)
    assert (weights.access, weights.bytes_from_storage) == ("direct", SIZE_BYTES)
    assert weights.requests
    assert weights.request_size_bytes
    assert 64 << 10 <= weights.request_size_bytes.p50 <= MIB
    assert weights.in_flight
    assert weights.in_flight.mean >= 1
    assert weights.wait_split
    assert weights.wait_split.device_ns > 0
