"""The real llama-server under test: started, asked, stopped, and never left behind.

    with LlamaServer.router(models_dir) as server:
        reply = server.chat("a", "hi", max_tokens=4)
        print(reply.ttft_ns)

Every wait is bounded. All stamps are CLOCK_MONOTONIC nanoseconds, as the kernel side's.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import psutil

from lab.core_waits import stood_ready_ns

ROOT = Path(__file__).resolve().parents[2]
BINARY = ROOT / ".engine/llama-server"
READY_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0


class ServerFailed(Exception):
    """The server did not start, answered with an error, or did so too late."""


@dataclass(frozen=True)
class Reply:
    """One streamed answer and its edges as its client saw them, each taken before parsing."""

    sent_ns: int  # just before the first byte was sent, on a connection already open
    headers_ns: int
    first_text_ns: int  # the first chunk with generated text had arrived; a role is no text
    end_ns: int
    text: str
    timings: dict[str, float]  # the server's own: prompt_n, prompt_ms, cache_n, predicted_n, …
    stood_ready_ns: int = 0  # how long its client stood ready for a core meanwhile

    @property
    def ttft_ns(self) -> int:
        return self.first_text_ns - self.sent_ns

    def off_ns(self, ttft_ns: int | None) -> int:
        """How far another's TTFT lies from its client's, besides what the client stood ready for.
        What a server receives and sends it does after its client sent and before it received."""
        late_ns = self.ttft_ns - (ttft_ns or 0)
        return max(late_ns - self.stood_ready_ns, -late_ns)


@dataclass
class LlamaServer:
    """A llama-server process; a context manager that stops it and all its children."""

    arguments: Sequence[str]
    host: str = "127.0.0.1"
    log_path: Path | None = None  # the server's own log; None discards it
    port: int = 0  # 0: a free one, chosen at the start
    process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    @classmethod
    def router(
        cls,
        models_dir: Path,
        *,
        models_max: int = 1,
        extra: Sequence[str] = (),
        log_path: Path | None = None,
        port: int = 0,
    ) -> Self:
        """Router mode: each `NAME.gguf` is model NAME, served by a child process of its own."""
        wanted = ["--models-dir", str(models_dir), "--models-max", str(models_max)]
        return cls([*wanted, *COMMON, *extra], log_path=log_path, port=port)

    @classmethod
    def single(
        cls,
        model: Path,
        *,
        extra: Sequence[str] = (),
        log_path: Path | None = None,
        port: int = 0,
    ) -> Self:
        """One server, one model: a switch is to stop this one and start another on its `port`."""
        wanted = ["--model", str(model), "--alias", model.stem]
        return cls([*wanted, *COMMON, *extra], log_path=log_path, port=port)

    @property
    def pid(self) -> int:
        if self.process is None:
            raise ServerFailed("the server is not running")
        return self.process.pid

    @property
    def child_pids(self) -> list[int]:
        """The processes below the server: in router mode one for each loaded model."""
        return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the process without waiting for it."""
        self.port = self.port or free_port(self.host)
        with (self.log_path or Path("/dev/null")).open("ab") as log:
            self.process = self.spawn(log)

    def spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        """The process, in a session of its own, so that `stop` finds all that it started."""
        if not BINARY.exists():
            raise ServerFailed("no llama-server here: run scripts/engine")
        command = [str(BINARY), *self.arguments, "--host", self.host, "--port", str(self.port)]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Waits until /health says ok; for a single server this includes the load."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process is None or self.process.poll() is not None:
                raise ServerFailed(f"the server exited at its start{self._log_tail()}")
            with suppress(OSError, ServerFailed, http.client.HTTPException):
                self.call("GET", "/health", timeout_s=1)
                return
            time.sleep(0.02)
        raise ServerFailed(f"the server is not ready after {timeout_s} s{self._log_tail()}")

    def stop(self) -> None:
        """Ends the server and every process it started, by force where asking does not help."""
        if self.process is None:
            return
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        # What is left of its session: children of a router that hung, or died before them.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_TIMEOUT_S)
        self.process = None

    def chat(
        self,
        model: str,
        prompt: str,
        max_tokens: int = 4,
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
        cache_prompt: bool = False,
    ) -> Reply:
        """One streamed chat completion, greedy; ServerFailed if no text came.

        Without `cache_prompt` the server processes the whole prompt, whatever it saw before.
        """
        request = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            **self.own_fields(cache_prompt),
        }
        body = json.dumps(request).encode()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.connect()
            before_ns = stood_ready_ns()
            sent_ns = time.monotonic_ns()
            connection.request("POST", "/v1/chat/completions", body, JSON_HEADERS)
            response = connection.getresponse()
            headers_ns = time.monotonic_ns()
            if response.status != http.client.OK:
                raise ServerFailed(f"{response.status}: {response.read()[:500]!r}")
            reply = read_reply(response, sent_ns, headers_ns)
            return replace(reply, stood_ready_ns=stood_ready_ns() - before_ns)
        finally:
            connection.close()

    def own_fields(self, cache_prompt: bool) -> dict[str, Any]:
        """What this server understands in a request beyond the common fields."""
        return {"cache_prompt": cache_prompt}

    def load(self, model: str) -> None:
        """Router mode: loads `model` and waits until it is there."""
        self.call("POST", "/models/load", {"model": model})
        self._wait_status(model, "loaded")

    def unload(self, model: str) -> None:
        """Router mode: unloads `model` and waits until its process has gone."""
        self.call("POST", "/models/unload", {"model": model})
        self._wait_status(model, "unloaded")

    def status(self, model: str) -> str:
        """Router mode: `unloaded`, `loading` or `loaded`."""
        for entry in self.call("GET", "/models")["data"]:
            if entry["id"] == model:
                return str(entry["status"]["value"])
        raise ServerFailed(f"the server knows no model {model}")

    def call(
        self, method: str, path: str, payload: object = None, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> Any:
        """A plain request; returns the answer's JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request(method, path, json.dumps(payload).encode(), JSON_HEADERS)
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise ServerFailed(f"{method} {path}: {response.status} {answer[:500]!r}")
        return json.loads(answer) if answer else None  # vLLM says it is well with no word

    def _wait_status(self, model: str, wanted: str) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while self.status(model) != wanted:
            if time.monotonic() > deadline:
                raise ServerFailed(f"{model} is still not {wanted}{self._log_tail()}")
            time.sleep(0.02)

    def _log_tail(self) -> str:
        if self.log_path is None or not self.log_path.exists():
            return ""
        return "\n" + self.log_path.read_text(errors="replace")[-2000:]


COMMON = ["--ctx-size", "4096", "--threads", "2", "--parallel", "1", "--metrics", "--slots"]
COMMON += ["--no-ui"]
JSON_HEADERS = {"Content-Type": "application/json"}


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def read_reply(response: http.client.HTTPResponse, sent_ns: int, headers_ns: int) -> Reply:
    first_text_ns = 0
    text = ""
    timings: dict[str, float] = {}
    arrived_ns = headers_ns
    for arrived_ns, event in server_sent_events(response):
        if "error" in event:
            raise ServerFailed(f"the stream ended in an error: {event['error']}")
        timings = event.get("timings", timings)
        for choice in event["choices"]:
            content = choice["delta"].get("content")
            if content and not first_text_ns:
                first_text_ns = arrived_ns
            text += content or ""
    if not first_text_ns:
        raise ServerFailed("the answer held no text")
    return Reply(sent_ns, headers_ns, first_text_ns, arrived_ns, text, timings)


def server_sent_events(
    response: http.client.HTTPResponse,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each event with the time at which the bytes that completed it had arrived.

    A server that has been silent for half a minute sends a comment, ":".
    """
    pending = b""
    while received := response.read1(1 << 16):
        arrived_ns = time.monotonic_ns()
        *events, pending = (pending + received).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data != b"[DONE]" and not event.startswith(b":"):
                yield arrived_ns, json.loads(data)
