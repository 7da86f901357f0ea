"""SGLang's structure: an HTTP server with the tokenizer, a scheduler with the weights, and a
detokenizer.

After srt/entrypoints/{engine,http_server}.py and srt/managers of SGLang 0.5.23 (October 2026): the
server spawns `sglang::scheduler` and `sglang::detokenizer`; requests go from it to the scheduler,
what that makes of them to the detokenizer, and from there back (ZeroMQ there, lines of JSON over
sockets here). It listens once the scheduler is ready, sleeps 1 s, asks itself for /model_info and,
if that works, for a warm-up answer; until then /health says 503. Afterwards each /health runs a
request of its own, of which it looks for the outcome after 1 s.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from . import wire
from .config import load_config
from .oneself import name_oneself
from .vllm import ApiServer, Core, main
from .vllm_core import EngineCore
from .wire import now_ns

LOOK_S = 1.0
HEALTH_LOOK_S = 1.0


class Scheduler(EngineCore):
    """The same admission by room in a paged KV cache; what it says is SGLang's."""

    def _say_loading(self) -> None:
        self._line("Load weight begin. avail mem=21.30 GB")

    def _say_loaded(self, took_s: float) -> None:
        self._line(
            f"Load weight end. elapsed={took_s:.2f} s, type=LlamaForCausalLM, avail mem=20 GB"
        )

    def _say_ready(self, took_s: float) -> None:
        self._line(
            f"Capture target decode CUDA graph end. bs=[1, 2, 4], elapsed={took_s:.2f} s, "
            "mem usage=0.52 GB, avail mem=19.00 GB."
        )

    def _say_admitted(self, request: dict[str, Any]) -> None:
        counts = self.counts()
        self._line(
            f"Prefill batch, #new-seq: 1, #new-token: {request['prompt_tokens']}, #cached-token: 0,"
            f" token usage: {counts['cache_use']:.2f}, #running-req: {counts['running']},"
            f" #queue-req: {counts['waiting']}, #pending-token: 0, cuda graph: False, "
            "input throughput (token/s): 0.00"
        )

    def _line(self, text: str) -> None:
        self._log.plain(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}")


def scheduler_main(
    config_path: Path, alias: str, asked: socket.socket, told: socket.socket
) -> None:
    name_oneself("sglang::scheduler")
    Scheduler(load_config(config_path), alias, asked, told).run()
    os._exit(0)


def detokenizer_main(tokens: socket.socket, texts: socket.socket) -> None:
    name_oneself("sglang::detokenizer")
    for line in tokens.makefile("rb"):
        texts.sendall(line)
    os._exit(0)


def spawn_engine(config_path: Path, alias: str) -> Core:
    context = multiprocessing.get_context("spawn")
    context.set_executable(os.path.realpath("/proc/self/exe"))
    requests, asked = socket.socketpair()
    tokens_in, tokens_out = socket.socketpair()
    texts_in, texts_out = socket.socketpair()
    scheduler = context.Process(
        target=scheduler_main, args=(config_path, alias, asked, tokens_in), daemon=True
    )
    detokenizer = context.Process(target=detokenizer_main, args=(tokens_out, texts_in), daemon=True)
    scheduler.start()
    detokenizer.start()
    for theirs in (asked, tokens_in, tokens_out, texts_in):
        theirs.close()
    return Core([scheduler, detokenizer], requests, texts_out)


class HttpServer(ApiServer):
    start_engine = staticmethod(spawn_engine)
    _up = False

    def _become_ready(self, _accepts_ns: int) -> None:
        """What `_wait_and_warmup` does, in the main thread."""
        while not self._asks_itself("GET /model_info", b""):
            pass
        body = {"text": "The capital city of France is", "sampling_params": {"max_new_tokens": 8}}
        self._ask_itself("POST /generate", json.dumps(body).encode())
        ready_ns = now_ns()
        self._up = True
        self._log.plain(
            f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] The server is fired up and ready to roll!"
        )
        self._say_able({}, ready_ns)

    def _asks_itself(self, what: str, body: bytes) -> bool:
        time.sleep(LOOK_S)
        return self._ask_itself(what, body) == 200

    def _ask_itself(self, what: str, body: bytes) -> int:
        with wire.connect(self._host, self._port, 5.0) as sock:
            head = f"{what} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            sock.sendall(f"{head}Connection: close\r\n\r\n".encode() + body)
            reply = wire.Reader(sock).read_message()
        return reply.status if reply else 0

    def _answer(self, connection: socket.socket, request: wire.Message) -> None:
        if request.path == "/health":
            if self._up:
                self._ask_core("health", prompt_tokens=1, max_tokens=1)
                time.sleep(HEALTH_LOOK_S)
            connection.sendall(wire.json_response(200 if self._up else 503, {}))
        elif request.path == "/model_info":
            connection.sendall(wire.json_response(200, {"model_path": "m", "is_generation": True}))
        elif request.path == "/generate":
            self._ask_core("warm-up", prompt_tokens=6, max_tokens=8)
            answer = {"text": " Paris", "meta_info": {"prompt_tokens": 6, "completion_tokens": 8}}
            connection.sendall(wire.json_response(200, answer))
        else:
            super()._answer(connection, request)

    def _ask_core(self, what: str, **wanted: int) -> None:
        answers = self._core.ask(f"{what}-{threading.get_ident()}", act="generate", **wanted)
        while "done" not in answers.get():
            pass

    def _metrics(self) -> str:
        """The gauges of srt/observability/metrics_collector.py that tell of waiting."""
        labels, counts = f'engine_type="unified",model_name="{self._alias}"', self._core.counts
        return "".join(
            f"# TYPE {name} gauge\n{name}{{{labels}}} {value}\n"
            for name, value in (
                ("sglang:num_running_reqs", counts["running"]),
                ("sglang:num_queue_reqs", counts["waiting"]),
                ("sglang:token_usage", counts["cache_use"]),
            )
        )


if __name__ == "__main__":
    main(HttpServer)
