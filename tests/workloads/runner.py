"""One process that serves one model: a router's child, or a server of its own.

As in llama-server the main thread loads and computes, connection threads speak HTTP and wait for
it.  A router's child listens at once and answers 503 on /health until it is able to serve; a
server of its own listens at once too, but accepts nobody before then, so that early requests lie
in the kernel's listen backlog.

It ends on SIGTERM (frees, waits as configured, exits) or when its stdin ends, which is how no
runner outlives the process that started it, however that one died.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

from . import wire
from .config import ModelConfig, ServerConfig, load_config, server_options
from .engine import Engine
from .logs import Log
from .oneself import end_of_input, on_sigterm, own_counters
from .truth import TruthWriter
from .wire import now_ns

REQUEST_TIMEOUT_S = 120.0


@dataclass
class Job:
    """A request on its way through a slot; `events` carries its texts, None at the end."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    received_ns: int
    waited_for_slot: bool = False
    slot_ns: int = 0
    prefill_begin_ns: int = 0
    prefill_end_ns: int = 0
    predicted_ms: float = 0.0
    cancelled: bool = False
    events: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)

    @property
    def prefill_ms(self) -> float:
        return (self.prefill_end_ns - self.prefill_begin_ns) / 1e6


class Slots:
    """The jobs that wait and the slots that take them."""

    def __init__(self, count: int) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._count = count
        self._lock = threading.Lock()
        self._unfinished = 0

    def put(self, job: Job) -> None:
        with self._lock:
            job.waited_for_slot = self._unfinished >= self._count
            self._unfinished += 1
        self._jobs.put(job)

    def take(self) -> Job | None:
        job = self._jobs.get()
        if job is not None:
            job.slot_ns = now_ns()
        return job

    def done(self) -> None:
        with self._lock:
            self._unfinished -= 1

    def close(self) -> None:
        """What is queued is still served; then every slot ends."""
        for _ in range(self._count):
            self._jobs.put(None)


class Runner:
    def __init__(self, config: ServerConfig, name: str, *, routed: bool) -> None:
        self._config = config
        self._name = name
        self._routed = routed
        self._model: ModelConfig = config.models[name]
        self._log = Log(enabled=config.logs)
        self._truth = TruthWriter(config.truth_path)
        self._slots = Slots(self._model.parallel)
        self._ready = threading.Event()
        self._task_ids = itertools.count()
        self._kernel_stamps = config.kernel_stamps and not routed
        self._main_ns = now_ns()

    def run(self, host: str, port: int) -> None:
        on_sigterm(self._stop)
        _exit_when_stdin_ends()
        listener = wire.listen(host, port, kernel_stamps=self._kernel_stamps)
        print(json.dumps({"listening": port or listener.getsockname()[1]}), flush=True)
        if self._routed:
            _thread(wire.accept_each, listener, self._connection)
        engine = self._start()
        self._become_ready()
        if not self._routed:
            _thread(wire.accept_each, listener, self._connection)
        self._serve_slots(engine)
        listener.close()
        self._tear_down(engine)

    def _start(self) -> Engine:
        """launch, load, init, in this order and with nothing else in between."""
        model = self._model
        engine = Engine(self._config.library_path, model, markers=self._config.markers)
        self._log.line(f"srv    load_model: loading model '{model.path}'")
        engine.spend(model.launch_ns)
        if model.fit_pass:
            engine.fit_pass()
        mapped = "false" if model.load_mode in ("read", "pread", "direct") else "true"
        self._log.line(
            f"load_tensors: loading model tensors, this can take a while... (mmap = {mapped})"
        )
        loaded = engine.load()
        self._first_touch_ns, self._last_weight_ns = loaded.first_touch_ns, loaded.last_weight_ns
        engine.init()
        if model.warmup:
            self._log.line("common_init_from_params: warming up the model with an empty run")
            engine.decode(2)
            engine.decode(1)
        return engine

    def _become_ready(self) -> None:
        ready_ns = now_ns()
        self._ready.set()
        self._log.line("main: model loaded")
        self._truth.write(
            "runner",
            pid=os.getpid(),
            model=self._name,
            main_ns=self._main_ns,
            first_touch_ns=self._first_touch_ns,
            last_weight_ns=self._last_weight_ns,
            ready_ns=ready_ns,
            counters=own_counters(),
        )

    def _serve_slots(self, engine: Engine) -> None:
        extra = [_thread(self._serve_slot, engine) for _ in range(self._model.parallel - 1)]
        self._serve_slot(engine)
        for thread in extra:
            thread.join()

    def _serve_slot(self, engine: Engine) -> None:
        while (job := self._slots.take()) is not None:
            self._compute(engine, job)
            self._slots.done()
            job.events.put(None)

    def _compute(self, engine: Engine, job: Job) -> None:
        task = next(self._task_ids)
        self._log.line(f"slot launch_slot_: id  0 | task {task} | processing task")
        self._prefill(engine, job)
        for _ in range(self._model.silent_tokens):
            engine.decode(1)
        engine.spend(self._model.sample_ns)
        job.events.put(" tok0")
        self._log_prefill(job)
        for index in range(1, job.max_tokens):
            if job.cancelled:
                break
            engine.decode(1)
            job.events.put(f" tok{index}")
        job.predicted_ms = (now_ns() - job.prefill_end_ns) / 1e6

    def _prefill(self, engine: Engine, job: Job) -> None:
        done = 0
        while done < job.prompt_tokens:
            size = min(self._model.batch_tokens, job.prompt_tokens - done)
            stamps = engine.decode(size)
            job.prefill_begin_ns = job.prefill_begin_ns or stamps.decode_begin_ns
            job.prefill_end_ns = stamps.decode_end_ns
            done += size

    def _log_prefill(self, job: Job) -> None:
        rate = job.prompt_tokens / max(job.prefill_ms, 1e-6)
        self._log.line(
            f"prompt eval time = {job.prefill_ms:10.2f} ms / {job.prompt_tokens:5d} tokens"
            f" ({1 / rate:8.2f} ms per token, {rate * 1000:8.2f} tokens per second)"
        )

    def _stop(self) -> None:
        if not self._ready.is_set():
            os._exit(0)
        self._slots.close()

    def _tear_down(self, engine: Engine) -> None:
        self._log.line("srv    operator(): cleaning up before exit...")
        engine.free()
        engine.spend(self._model.evict_delay_ns)
        # Idle keep-alive connections have threads of their own; nothing they hold needs saving.
        os._exit(0)

    def _connection(self, connection: socket.socket) -> None:
        connection.settimeout(REQUEST_TIMEOUT_S)
        wire.answer_each(connection, self._answer, kernel_stamps=self._kernel_stamps)

    def _answer(self, connection: socket.socket, request: wire.Message) -> None:
        if request.path in ("/v1/chat/completions", "/completion") and request.method == "POST":
            self._answer_chat(connection, request, read_ns=now_ns())
        elif request.path == "/health":
            connection.sendall(self._health())
        elif request.path in ("/models", "/v1/models"):
            connection.sendall(wire.json_response(200, {"data": [{"id": self._name}]}))
        else:
            connection.sendall(wire.json_response(404, {"error": "no such path"}))

    def _health(self) -> bytes:
        if self._ready.is_set():
            return wire.json_response(200, {"status": "ok"})
        return wire.json_response(503, {"error": {"message": "Loading model", "code": 503}})

    def _answer_chat(self, connection: socket.socket, request: wire.Message, read_ns: int) -> None:
        if not self._ready.is_set():
            connection.sendall(self._health())
            return
        # A routed request is received when its first byte is readable, one from the backlog when
        # it is read: it had been lying there.
        received_ns = request.first_byte_ns if self._routed else read_ns
        body = json.loads(request.body)
        job = Job(
            request_id=request.headers.get("x-request-id") or f"p{os.getpid()}-{read_ns}",
            prompt_tokens=max(1, _count_tokens(body)),
            max_tokens=max(1, int(body.get("max_tokens", 8))),
            received_ns=received_ns,
        )
        self._slots.put(job)
        kind = Completion if request.path == "/completion" else Reply
        reply = kind(connection, job, self._name)
        first_token_ns: int | None = None
        try:
            first_token_ns = reply.stream() if body.get("stream") else reply.whole()
        except OSError:
            job.cancelled = True
        finally:
            self._write_truth(job, request, first_token_ns)

    def _write_truth(self, job: Job, request: wire.Message, first_token_ns: int | None) -> None:
        self._truth.write(
            "served",
            request_id=job.request_id,
            pid=os.getpid(),
            model=self._name,
            kind="router" if self._routed else "single",
            request_start_ns=request.first_byte_ns,
            received_ns=job.received_ns,
            waited_for_slot=job.waited_for_slot,
            slot_ns=job.slot_ns,
            prefill_begin_ns=job.prefill_begin_ns,
            prefill_end_ns=job.prefill_end_ns,
            prompt_tokens=job.prompt_tokens,
            first_token_ns=first_token_ns,
            complete=not job.cancelled,
            counters=own_counters(),
        )


@dataclass(frozen=True)
class Reply:
    """The two shapes of an answer; both return when the first text was about to be sent."""

    connection: socket.socket
    job: Job
    model: str

    def stream(self) -> int:
        headers = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}
        self.connection.sendall(wire.head(200, headers))
        self._send_event({"role": "assistant", "content": None}, None)
        first_token_ns = 0
        count = 0
        while (text := self.job.events.get()) is not None:
            data = self._event({"content": text}, None)
            first_token_ns = first_token_ns or now_ns()
            self.connection.sendall(data)
            count += 1
        self._send_event({}, "length", **self._closing(count))
        self.connection.sendall(wire.chunk(b"data: [DONE]\n\n") + wire.chunk(b""))
        return first_token_ns

    def whole(self) -> int:
        texts: list[str] = []
        while (text := self.job.events.get()) is not None:
            texts.append(text)
        message = {"role": "assistant", "content": "".join(texts)}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        closing = self._closing(len(texts))
        payload = {"object": "chat.completion", **self._names(), "choices": [choice], **closing}
        data = wire.json_response(200, payload)
        first_token_ns = now_ns()
        self.connection.sendall(data)
        return first_token_ns

    def _send_event(self, delta: dict[str, Any], finish: str | None, **more: Any) -> None:
        self.connection.sendall(self._event(delta, finish, **more))

    def _event(self, delta: dict[str, Any], finish: str | None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        event = {"object": "chat.completion.chunk", **self._names(), "choices": [choice], **more}
        return wire.chunk(f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode())

    def _names(self) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.job.request_id}", "model": self.model}

    def _closing(self, predicted: int) -> dict[str, Any]:
        job = self.job
        timings = {
            "cache_n": 0,
            "prompt_n": job.prompt_tokens,
            "prompt_ms": job.prefill_ms,
            "predicted_n": predicted,
            "predicted_ms": job.predicted_ms,
        }
        usage = {
            "prompt_tokens": job.prompt_tokens,
            "completion_tokens": predicted,
            "total_tokens": job.prompt_tokens + predicted,
        }
        return {"timings": timings, "usage": usage}


class Completion(Reply):
    """The same on llama-server's own endpoint."""

    def _event(self, delta: dict[str, Any], finish: str | None, **more: Any) -> bytes:
        event = {"content": delta.get("content") or "", "stop": finish is not None, **more}
        return wire.chunk(f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode())


def _count_tokens(body: dict[str, Any]) -> int:
    """One word is one token."""
    if "prompt" in body:
        return len(str(body["prompt"]).split())
    return sum(len(str(message.get("content", "")).split()) for message in body["messages"])


def _thread(target: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def _exit_when_stdin_ends() -> None:
    def watch() -> None:
        end_of_input()
        os._exit(0)

    _thread(watch)


def main() -> None:
    options = server_options("workloads.runner", needs_host=False)
    config = load_config(options.config)
    runner = Runner(config, options.alias, routed=options.routed)
    runner.run(options.host or config.host, options.port)


if __name__ == "__main__":
    main()
