"""What a user sees while it records, and what ends it: the live line, first tokens, warnings."""

from __future__ import annotations

import http.client
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernel.support import start_recording
from workloads.cache import drop_cache, make_model

pytestmark = pytest.mark.kernel

MODEL_BYTES = 16 << 20
TIMEOUT_S = 20.0

# Answers each request by a stream, once it has read its model; before the first word and before the
# second it waits for as long as a file of their number is there.
SERVER = """
import http.server, os, sys, time

def pause(number):
    while os.path.exists(sys.argv[1] + number):
        time.sleep(0.01)

class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        with open(sys.argv[1], "rb") as model:
            while model.read(1 << 20):
                pass
        pause("0")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for word in ("one", "two"):
            chunk = '{"choices":[{"delta":{"content":"%s"}}]}' % word
            self.wfile.write(b"data: " + chunk.encode() + b"\\n\\n")
            pause("1")
        self.wfile.write(b"data: [DONE]\\n\\n")

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
print(server.server_port, flush=True)
server.serve_forever()
"""


@dataclass(frozen=True)
class Server:
    pid: int
    port: int
    model: Path

    def pauses(self) -> list[Path]:
        """The files that hold it up before each word."""
        return [self.model.with_name(self.model.name + number) for number in "01"]

    def ask(self) -> bytes:
        """One streamed request, to its end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        body = json.dumps({"model": "m", "stream": True, "messages": []})
        connection.request("POST", "/v1/chat/completions", body)
        answer = connection.getresponse().read()
        connection.close()
        return answer


@contextmanager
def serving(model: Path) -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(model)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield Server(process.pid, int(process.stdout.readline()), model)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(make_model(tmp_path / "m.gguf", MODEL_BYTES)) as started:
        yield started


class Terminal:
    """`record` on a terminal of its own; `shown` is all that it wrote there."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-m", "ttftprof", "record", *arguments])
        self.shown = ""

    def until(self, pattern: str) -> None:
        """Reads on until the pattern is there."""
        deadline = time.monotonic() + TIMEOUT_S
        while not re.search(pattern, self.shown):
            assert time.monotonic() < deadline, (pattern, self.shown)
            if select.select([self._fd], [], [], 0.1)[0]:
                self.shown += os.read(self._fd, 65536).decode()

    def press(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def end(self) -> int:
        """Its exit code, with the rest of what it shows read."""
        while True:
            try:
                more = os.read(self._fd, 65536)
            except OSError:  # the terminal's other end is closed
                break
            self.shown += more.decode()
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_the_live_line_shows_requests_bytes_and_the_phase(server: Server, tmp_path: Path) -> None:
    drop_cache(server.model)
    for pause in server.pauses():
        pause.touch()
    path = tmp_path / "a file.ttft"
    terminal = Terminal("--pid", str(server.pid), "-o", str(path))
    terminal.until(r"0 request\(s\), 0 first token\(s\), 0 MB from storage, waiting for a request")
    asked = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import http.client as h; c = h.HTTPConnection('127.0.0.1', "
            f"{server.port}); c.request('POST', '/v1/chat/completions', "
            '\'{"stream": true, "messages": []}\'); c.getresponse().read()',
        ]
    )
    terminal.until(
        r"1 request\(s\), 0 first token\(s\), [\d,]+ MB from storage, waiting for the first"
    )
    server.pauses()[0].unlink()
    terminal.until(r"1 request\(s\), 1 first token\(s\), 17 MB from storage, answering")
    server.pauses()[1].unlink()
    assert asked.wait(TIMEOUT_S) == 0
    terminal.press(b"\x03")
    assert terminal.end() == 0
    assert terminal.shown.index("recording --pid") < terminal.shown.index("0 request(s)")
    # The line is gone from the terminal before the last words.
    assert re.search(r"\r\x1b\[Kttftprof: interrupted; 1 request\(s\)", terminal.shown)
    assert f"next: ttftprof report '{path}'" in terminal.shown
    assert path.exists()


def test_it_ends_after_n_first_tokens(server: Server, tmp_path: Path) -> None:
    seen = start_recording(tmp_path / "a.ttft", "--pid", str(server.pid), "--first-tokens", "2")
    assert b"one" in server.ask()
    time.sleep(0.5)
    assert seen.process.poll() is None
    server.ask()
    assert seen.process.wait(TIMEOUT_S) == 0
    seen.stop()
    with seen.reader() as reader:
        assert reader.meta["ended_because"] == "2 first token(s) seen"
        answers = [fact for _, fact in reader.facts("exchange") if fact["generates"]]
    assert [a["outcome"] for a in answers] == ["ok", "ok"]  # the answer's end was waited for


@contextmanager
def disk(image: Path, point: Path) -> Iterator[Path]:
    """A small file system on a block device of its own."""
    image.write_bytes(b"")
    os.truncate(image, 64 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    point.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


@pytest.mark.parametrize("where", ["same", "other"])
def test_a_recording_on_the_disk_that_it_measures_says_so(tmp_path: Path, where: str) -> None:
    with disk(tmp_path / "image", tmp_path / "models") as models:
        with serving(make_model(models / "m.gguf", MODEL_BYTES)) as server:
            folder = models if where == "same" else tmp_path
            seen = start_recording(folder / "a.ttft", "--pid", str(server.pid))
            server.ask()
            assert seen.stop() == 0
        with seen.reader() as reader:
            measured = reader.meta.get("recording_on_measured_mount")
    warned = f"the recording lies on the disk it measures ({models})" in seen.output
    assert (warned, measured) == ((True, str(models)) if where == "same" else (False, None))
    assert seen.output.count("lies on the disk") == warned
