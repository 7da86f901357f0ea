"""text-generation-inference's router: the HTTP server, whose answers the shard computes.

After backends/v3/src/{lib,backend}.rs and router/src/server.rs of text-generation-inference 3.3.6:
it connects to the shard, asks for its Info, has it warm up, then has Python look up the tokenizer,
and listens. A /health asks the shard for its own.
"""

from __future__ import annotations

import argparse
import os
import queue
import socket
import threading
from pathlib import Path
from typing import Any

from . import wire
from .config import ServerConfig, load_config
from .grpc import Channel
from .tgi import line_of
from .vllm import Answers, ApiServer, EngineClient
from .wire import now_ns

CALL_TIMEOUT_S = 120.0
_BACKEND = "text_generation_router_v3: backends/v3/src/lib.rs:125"
_SERVER = "text_generation_router::server: router/src/server.rs:2302"


class Backend:
    """The shard as the router has it: a request waits in a queue, is prefilled, then decoded."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._turn = threading.Lock()
        self.counts: dict[str, float] = {"running": 0, "waiting": 0}
        channel = self._channel()
        info = channel.call({"call": "Info"})
        _say(_BACKEND, "Warming up model")
        channel.send({"call": "Warmup"})
        warm = channel.receive()
        limit = warm["max_supported_total_tokens"]
        _say(_BACKEND, f"Setting max batch total tokens to {limit}")
        _say(_BACKEND, "Using backend V3")
        moments = ("first_touch_ns", "last_weight_ns")
        self.started = {"counters": warm["counters"], **{name: info[name] for name in moments}}

    def ask(self, request_id: str, **fields: Any) -> Answers:
        answers: Answers = queue.SimpleQueue()
        arguments = (answers, fields["prompt_tokens"], fields["max_tokens"])
        threading.Thread(target=self._generate, args=arguments, daemon=True).start()
        return answers

    def end(self) -> None:
        """The launcher ends the shard."""

    def _channel(self) -> Channel:
        return Channel(wire.connect(self._path, 0, CALL_TIMEOUT_S))

    def _generate(self, answers: Answers, prompt_tokens: int, max_tokens: int) -> None:
        came_ns = now_ns()
        self.counts["waiting"] += 1
        with self._turn:
            self.counts["waiting"] -= 1
            self.counts["running"] = 1
            slot_ns = now_ns()
            channel = self._channel()
            told = channel.call({"call": "Prefill", "tokens": prompt_tokens})
            answers.put({"text": told.pop("text")})
            for index in range(1, max_tokens):
                channel.send({"call": "Decode", "index": index})
                answers.put(channel.receive())
            self.counts["running"] = 0
        waited = slot_ns - came_ns > 1_000_000
        answers.put({"done": {"waited_for_slot": waited, "slot_ns": slot_ns, **told}})


class Router(ApiServer):
    opening = None  # the first event has the first token

    def __init__(
        self, config: ServerConfig, config_path: Path, alias: str, shard_path: str
    ) -> None:
        self._shard_path = shard_path
        super().__init__(config, config_path, alias, routed=True)

    def _with_engine(self, _config_path: Path) -> EngineClient:
        backend = Backend(self._shard_path)
        self._import()
        return backend

    def _say_up(self) -> None:
        _say(_SERVER, "Connected")

    def _answer(self, connection: socket.socket, request: wire.Message) -> None:
        if request.path == "/info":
            info = {"model_id": self._alias, "router": "text-generation-router", "version": "3.3.6"}
            connection.sendall(wire.json_response(200, info))
            return
        if request.path == "/health":
            Channel(wire.connect(self._shard_path, 0, CALL_TIMEOUT_S)).call({"call": "Health"})
        super()._answer(connection, request)

    def _metrics(self) -> str:
        """The gauges that tell of waiting."""
        counts = self._core.counts
        return "".join(
            f"# TYPE {name} gauge\n{name} {value}\n\n"
            for name, value in (
                ("tgi_batch_current_size", counts["running"]),
                ("tgi_queue_size", counts["waiting"]),
            )
        )


def _say(target: str, text: str) -> None:
    os.write(1, line_of(target, text))


def main() -> None:
    parser = argparse.ArgumentParser(prog="text-generation-router")
    parser.add_argument("--config", required=True, type=Path)
    for name in ("--alias", "--hostname", "--master-shard-uds-path"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", required=True, type=int)
    options = parser.parse_args()
    config = load_config(options.config)
    path = options.master_shard_uds_path
    Router(config, options.config, options.alias, path).run(options.hostname, options.port)


if __name__ == "__main__":
    main()
