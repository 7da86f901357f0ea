"""text-generation-inference's shard: the process with the weights, asked over gRPC.

After server/text_generation_server/{cli,server}.py of text-generation-inference 3.3.6: it takes up
the weights, then binds and listens on a Unix socket and says so; Warmup makes the KV cache and the
graphs, Prefill gives a batch's first token, Decode one more. Everything is done one at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

from . import wire
from .config import ServerConfig, load_config
from .engine import Engine
from .grpc import Channel, Message
from .oneself import end_of_input, own_counters, share_signals


class Shard:
    def __init__(self, config: ServerConfig, alias: str) -> None:
        self._model = config.models[alias]
        self._engine = Engine(config.library_path, self._model, markers=config.markers)
        self._step = threading.Lock()  # of its one event loop
        self._loaded: dict[str, int] = {}

    def run(self, path: str) -> None:
        self._engine.spend(self._model.launch_ns // 2)
        loaded = self._engine.load()
        self._loaded = {
            "first_touch_ns": loaded.first_touch_ns,
            "last_weight_ns": loaded.last_weight_ns,
        }
        listener = wire.listen(path, 0)
        say(f"Server started at unix://{path}")
        arguments = (listener, self._connection)
        threading.Thread(target=wire.accept_each, args=arguments, daemon=True).start()
        end_of_input()
        os._exit(0)

    def _connection(self, connection: socket.socket) -> None:
        channel = Channel(connection)
        try:
            asked = channel.accept()
            while True:
                with self._step:
                    told = self._answer(asked)
                channel.send(told)
                asked = channel.receive()
        except (OSError, wire.WireError):
            connection.close()

    def _answer(self, asked: Message) -> Message:
        answers = {
            "Health": self._health,
            "Info": self._info,
            "Warmup": self._warmup,
            "Prefill": self._prefill,
            "Decode": self._decode,
        }
        return answers[asked["call"]](asked)

    def _health(self, _asked: Message) -> Message:
        return {}

    def _info(self, _asked: Message) -> Message:
        return {"dtype": "torch.float16", "device_type": "cpu", **self._loaded}

    def _warmup(self, _asked: Message) -> Message:
        self._engine.init()
        return {"max_supported_total_tokens": 16_000, "counters": own_counters()}

    def _prefill(self, asked: Message) -> Message:
        stamps = self._engine.decode(asked["tokens"])
        begin_ns, end_ns = stamps.decode_begin_ns, stamps.decode_end_ns
        self._engine.spend(self._model.sample_ns)
        stamps_of = {"prefill_begin_ns": begin_ns, "prefill_end_ns": end_ns}
        return {"text": " tok0", **stamps_of, "counters": own_counters()}

    def _decode(self, asked: Message) -> Message:
        self._engine.decode(1)
        return {"text": f" tok{asked['index']}"}


def say(text: str) -> None:
    """One line of JSON, as loguru serializes it."""
    record: dict[str, Any] = {"level": {"name": "INFO", "no": 20}, "message": text}
    os.write(1, json.dumps({"text": f"{text}\n", "record": record}).encode() + b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="text-generation-server")
    parser.add_argument("act", choices=("download-weights", "serve"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--config", type=Path)
    for name in ("--uds-path", "--logger-level", "--alias"):
        parser.add_argument(name)
    parser.add_argument("--json-output", action="store_true")
    options = parser.parse_args()
    share_signals()
    if options.act == "serve":
        Shard(load_config(options.config), options.alias).run(f"{options.uds_path}-0")
    elif options.model.exists():
        say("Files are already present on the host. Skipping download.")


if __name__ == "__main__":
    main()
