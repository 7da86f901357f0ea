"""vLLM's structure: an API server with the HTTP, and an engine-core process with the weights.

After vllm/v1 of vLLM 0.32 (October 2026), a real one of which was watched on a CPU: the API server
forks `VLLM::EngineCore` and talks to it over a Unix socket (ZeroMQ there, lines of JSON here),
listens when the engine is up, logs "Application startup complete", and answers /health, /metrics,
/v1/chat/completions, /sleep, /wake_up and /is_sleeping. Model weights, scheduling and the KV cache
are the core's: `vllm_core`, and with tensor parallelism its workers'.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import queue
import socket
import threading
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar, Protocol

from . import wire
from .config import ServerConfig, load_config, server_options
from .logs import Log
from .oneself import end_of_input, on_sigterm
from .truth import TruthWriter
from .vllm_core import core_main
from .wire import now_ns

IMPORTS_SHARE = 0.5  # of what a launch costs; the rest is the core's


Answers = queue.SimpleQueue[dict[str, Any]]


class EngineClient(Protocol):
    """What an HTTP server has of the engine behind it. `started`: how that came to be able."""

    started: dict[str, Any]
    counts: dict[str, float]

    def ask(self, request_id: str, **fields: Any) -> Answers: ...
    def end(self) -> None: ...


class Core:
    """The API server's end of the engine: its processes, how they are asked and what they tell.

    `asked` and `told` may be the same socket.
    """

    def __init__(
        self, processes: list[BaseProcess], asked: socket.socket, told: socket.socket
    ) -> None:
        self._processes = processes
        self._asked, self._lines = asked, told.makefile("rb")
        self._lock = threading.Lock()
        self._waiting: dict[str, Answers] = {}
        self.counts: dict[str, float] = {"running": 0, "waiting": 0, "cache_use": 0}
        self.started: dict[str, Any] = json.loads(self._lines.readline())
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, request_id: str, **fields: Any) -> Answers:
        """What the core says of this request, in order."""
        answers: Answers = queue.SimpleQueue()
        with self._lock:
            self._waiting[request_id] = answers
            self._asked.sendall(json.dumps({"id": request_id, **fields}).encode() + b"\n")
        return answers

    def end(self) -> None:
        """All of it: whoever waits on the channel of one that is killed ends by itself."""
        for process in self._processes:
            process.kill()
            process.join()

    def _listen(self) -> None:
        for line in self._lines:
            told = json.loads(line)
            self.counts = told.pop("counts", self.counts)
            answers = self._waiting.get(told.get("id", ""))
            if answers is not None:
                answers.put(told)
        os._exit(1)  # as the real one does when its engine died


def fork_core(config_path: Path, alias: str) -> Core:
    ours, theirs = socket.socketpair()
    os.set_inheritable(ours.fileno(), False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_core_alone, args=(config_path, alias, theirs, ours))
    process.start()
    theirs.close()
    return Core([process], ours, ours)


def _core_alone(
    config_path: Path, alias: str, channel: socket.socket, other_end: socket.socket
) -> None:
    """Its channel has to end with the API server: nobody else may hold the other end."""
    other_end.close()
    core_main(config_path, alias, channel)


class ApiServer:
    start_engine = staticmethod(fork_core)
    # The event before any token's, None if there is none.
    opening: ClassVar[dict[str, Any] | None] = {"role": "assistant", "content": ""}

    def __init__(
        self, config: ServerConfig, config_path: Path, alias: str, *, routed: bool
    ) -> None:
        self._config, self._alias, self._routed = config, alias, routed
        self._log = Log(enabled=config.logs)
        self._truth = TruthWriter(config.truth_path)
        self._ids = itertools.count(1)
        self._core = self._with_engine(config_path)

    def _with_engine(self, config_path: Path) -> EngineClient:
        self._import()
        return self.start_engine(config_path, self._alias)

    def _import(self) -> None:
        until_ns = now_ns() + int(self._config.models[self._alias].launch_ns * IMPORTS_SHARE)
        while now_ns() < until_ns:  # imports keep a core busy
            pass

    def run(self, host: str, port: int) -> None:
        on_sigterm(self._leave)
        listener = wire.listen(host, port)
        self._host, self._port = host, port
        self._say_up()
        accepts_ns = now_ns()
        threading.Thread(
            target=wire.accept_each, args=(listener, self._connection), daemon=True
        ).start()
        self._become_ready(accepts_ns)
        end_of_input()
        self._leave()

    def _say_up(self) -> None:
        self._log.plain("INFO:     Application startup complete.")

    def _become_ready(self, accepts_ns: int) -> None:
        self._say_able(self._core.started, accepts_ns)

    def _say_able(self, loaded: dict[str, Any], ready_ns: int) -> None:
        """To the truth, anew whenever the weights have come back."""
        told = {"pid": os.getpid(), "model": self._alias, "ready_ns": ready_ns}
        self._truth.write("runner", **self._core.started | loaded | told)

    def _leave(self) -> None:
        self._core.end()
        os._exit(0)

    def _connection(self, connection: socket.socket) -> None:
        wire.answer_each(connection, self._answer)

    def _answer(self, connection: socket.socket, request: wire.Message) -> None:
        if request.path == "/v1/chat/completions":
            self._answer_chat(connection, request)
        elif request.path == "/metrics":
            connection.sendall(text(self._metrics()))
        elif request.path == "/sleep":
            level = int(request.target.partition("level=")[2] or 1)
            self._nap("sleep", level)
            connection.sendall(wire.json_response(200, {"status": "sleeping", "level": level}))
        elif request.path == "/wake_up":
            self._say_able(self._nap("wake_up", 0), now_ns())
            connection.sendall(wire.json_response(200, {"status": "awake", "tags": None}))
        elif request.path in ("/health", "/is_sleeping"):
            connection.sendall(wire.json_response(200, {}))
        else:
            connection.sendall(wire.json_response(404, {"error": "no such path"}))

    def _nap(self, act: str, level: int) -> dict[str, Any]:
        answers = self._core.ask(f"admin-{next(self._ids)}", act=act, level=level)
        done: dict[str, Any] = answers.get()["done"]
        return done

    def _metrics(self) -> str:
        """The gauges of vllm/v1/metrics/loggers.py that tell of waiting."""
        labels = f'engine="0",model_name="{self._alias}"'
        counts = self._core.counts
        return "".join(
            f"# TYPE {name} gauge\n{name}{{{labels}{more}}} {value}\n"
            for name, more, value in (
                ("vllm:num_requests_running", "", counts["running"]),
                ("vllm:num_requests_waiting", "", counts["waiting"]),
                (
                    "vllm:num_requests_waiting_by_reason",
                    ',reason="capacity"',
                    counts["waiting"],
                ),
                ("vllm:kv_cache_usage_perc", "", counts["cache_use"]),
            )
        )

    def _answer_chat(self, connection: socket.socket, request: wire.Message) -> None:
        body: dict[str, Any] = json.loads(request.body)
        prompt = sum(len(str(m["content"]).split()) for m in body["messages"])
        request_id = request.headers.get("x-request-id") or f"v{next(self._ids)}"
        wanted = {"prompt_tokens": prompt, "max_tokens": int(body.get("max_tokens", 8))}
        answers = self._core.ask(request_id, act="generate", **wanted)
        headers = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}
        opening = event(self.opening) if self.opening else b""
        connection.sendall(wire.head(200, headers) + opening)
        first_token_ns, told = 0, {}
        while "done" not in (told := answers.get()):
            data = event({"content": told["text"]})
            first_token_ns = first_token_ns or now_ns()
            connection.sendall(data)
        usage = {"prompt_tokens": prompt, "completion_tokens": wanted["max_tokens"]}
        connection.sendall(event({}, finish="length") + event(None, usage=usage))
        connection.sendall(wire.chunk(b"data: [DONE]\n\n") + wire.chunk(b""))
        self._truth.write(
            "served",
            request_id=request_id,
            pid=os.getpid(),
            model=self._alias,
            kind="router" if self._routed else "single",
            request_start_ns=request.first_byte_ns,
            received_ns=request.first_byte_ns,
            prompt_tokens=prompt,
            first_token_ns=first_token_ns,
            complete=True,
            **told["done"],
        )


def event(delta: dict[str, Any] | None, finish: str | None = None, **more: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    event = {"object": "chat.completion.chunk", "choices": choices, **more}
    return wire.chunk(f"data: {json.dumps(event)}\n\n".encode())


def text(body: str) -> bytes:
    headers = {"Content-Type": "text/plain; version=0.0.4", "Content-Length": str(len(body))}
    return wire.head(200, headers) + body.encode()


def main(kind: type[ApiServer] = ApiServer) -> None:
    options = server_options(kind.__name__)
    config = load_config(options.config)
    server = kind(config, options.config, options.alias, routed=options.routed)
    server.run(options.host, options.port)


if __name__ == "__main__":
    main()
