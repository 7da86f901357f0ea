"""LocalAI's llama.cpp backend: a gRPC server that has a model when it was told to load one.

After backend/cpp/llama-cpp/grpc-server.cpp of LocalAI 4.9: it listens once it is up, answers Health
at once, loads when it is told to, and streams tokens; the lines it logs are llama.cpp's.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

from . import wire
from .config import ServerConfig, load_config, server_options
from .engine import Engine
from .grpc import Channel, Message
from .logs import Log
from .oneself import end_of_input, on_sigterm, own_counters
from .truth import TruthWriter
from .wire import now_ns


class Backend:
    def __init__(self, config: ServerConfig, alias: str) -> None:
        self._config, self._alias = config, alias
        self._model = config.models[alias]
        self._log = Log(enabled=config.logs)
        self._truth = TruthWriter(config.truth_path)
        self._engine = Engine(config.library_path, self._model, markers=config.markers)

    def run(self, host: str, port: int) -> None:
        on_sigterm(lambda: os._exit(0))
        self._engine.spend(self._model.launch_ns)
        listener = wire.listen(host, port)
        arguments = (listener, self._connection)
        threading.Thread(target=wire.accept_each, args=arguments, daemon=True).start()
        end_of_input()
        os._exit(0)

    def _connection(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = Channel(connection)
        try:
            self._answer(channel, channel.accept())
        except (OSError, wire.WireError):
            pass
        finally:
            connection.close()

    def _answer(self, channel: Channel, asked: Message) -> None:
        if asked["call"] == "Health":
            channel.send({"message": "OK"})
        elif asked["call"] == "LoadModel":
            self._load()
            channel.send({"success": True})
        else:
            self._predict(channel, asked, now_ns())

    def _load(self) -> None:
        self._log.line(
            "load_tensors: loading model tensors, this can take a while... (mmap = true)"
        )
        loaded = self._engine.load()
        self._engine.init()
        if self._model.warmup:
            self._log.line("common_init_from_params: warming up the model with an empty run")
            self._engine.decode(2)
            self._engine.decode(1)
        self._truth.write(
            "runner",
            pid=os.getpid(),
            model=self._alias,
            first_touch_ns=loaded.first_touch_ns,
            last_weight_ns=loaded.last_weight_ns,
            ready_ns=now_ns(),
            counters=own_counters(),
        )

    def _predict(self, channel: Channel, asked: Message, received_ns: int) -> None:
        prompt = max(1, len(str(asked["prompt"]).split()))
        stamps = self._engine.decode(prompt)
        begin_ns, end_ns = stamps.decode_begin_ns, stamps.decode_end_ns
        self._engine.spend(self._model.sample_ns)
        count = int(asked["tokens"])
        for index in range(count):
            if index:
                self._engine.decode(1)
            channel.send({"text": f" tok{index}"})
        usage = {"prompt_tokens": prompt, "completion_tokens": count}
        channel.send({"done": usage | {"total_tokens": prompt + count}})
        self._say_served(
            request_id=asked["id"],
            received_ns=received_ns,
            slot_ns=received_ns,
            prefill_begin_ns=begin_ns,
            prefill_end_ns=end_ns,
            prompt_tokens=prompt,
        )

    def _say_served(self, **stamps: Any) -> None:
        who = {"pid": os.getpid(), "model": self._alias, "kind": "router"}
        rest = {"waited_for_slot": False, "first_token_ns": None, "complete": True}
        self._truth.write("served", **who, **stamps, **rest, counters=own_counters())


def main() -> None:
    options = server_options("workloads.local_ai_backend")
    Backend(load_config(options.config), options.alias).run(options.host, options.port)


if __name__ == "__main__":
    main()
