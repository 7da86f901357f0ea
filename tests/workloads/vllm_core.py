"""vLLM's engine core: has the weights, admits requests while their tokens fit its KV cache.

A request needs room for its prompt and its answer; one that does not fit waits, first come, first
served, until another has ended. /sleep gives the weights' memory back, /wake_up loads them again.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

from .config import ModelConfig, ServerConfig, load_config
from .engine import Engine
from .logs import Log
from .oneself import own_counters
from .wire import now_ns


class EngineCore:
    def __init__(self, config: ServerConfig, alias: str, fd: int) -> None:
        self._config = config
        self._model: ModelConfig = config.models[alias]
        self._socket = socket.socket(fileno=fd)
        self._log = Log(enabled=config.logs)
        self._engine = Engine(config.library_path, self._model, markers=config.markers)
        self._lock = threading.Lock()
        self._waiting: collections.deque[dict[str, Any]] = collections.deque()
        self._running = self._used_tokens = 0

    def run(self) -> None:
        _exit_when_stdin_ends()
        self._start()
        for line in self._socket.makefile("rb"):
            self._take(json.loads(line))

    def _start(self) -> None:
        engine, model = self._engine, self._model
        engine.spend(model.launch_ns // 2)
        self._log.plain("INFO [gpu_model_runner.py:3] Starting to load model b...")
        began_ns = now_ns()
        loaded = engine.load()
        took = (now_ns() - began_ns) / 1e9
        self._log.plain(f"INFO [default_loader.py:291] Loading weights took {took:.2f} seconds")
        engine.init()
        took = (now_ns() - began_ns) / 1e9
        self._log.plain(
            "INFO [core.py:2] init engine (profile, create kv cache, warmup model) took"
            f" {took:.2f} seconds"
        )
        self._say(
            first_touch_ns=loaded.first_touch_ns,
            last_weight_ns=loaded.last_weight_ns,
            counters=own_counters(),
            core_pid=os.getpid(),
        )

    def _say(self, **fields: Any) -> None:
        self._socket.sendall(json.dumps(fields).encode() + b"\n")

    def _take(self, request: dict[str, Any]) -> None:
        if request["act"] == "generate":
            request["came_ns"] = now_ns()
            with self._lock:
                self._waiting.append(request)
                self._admit()
            return
        if request["act"] == "sleep":
            self._engine.free()
        else:
            self._engine.load()
            self._engine.init()
        self._tell(id=request["id"], done={})

    def _admit(self) -> None:
        """With the lock held: all that fit, in order."""
        room = self._model.cache_tokens
        while self._waiting:
            needs = _tokens(self._waiting[0])
            if room and self._used_tokens + needs > room:
                break
            request = self._waiting.popleft()
            self._used_tokens += needs
            self._running += 1
            request["slot_ns"] = now_ns()
            threading.Thread(target=self._generate, args=(request,), daemon=True).start()
        self._say(counts=self._counts())

    def _counts(self) -> dict[str, float]:
        room = self._model.cache_tokens
        use = self._used_tokens / room if room else 0.0
        return {"running": self._running, "waiting": len(self._waiting), "cache_use": use}

    def _generate(self, request: dict[str, Any]) -> None:
        stamps = self._engine.decode(request["prompt_tokens"])
        begin_ns, end_ns = stamps.decode_begin_ns, stamps.decode_end_ns
        self._engine.spend(self._model.sample_ns)
        self._tell(id=request["id"], text=" tok0")
        for index in range(1, request["max_tokens"]):
            self._engine.decode(1)
            self._tell(id=request["id"], text=f" tok{index}")
        with self._lock:
            self._used_tokens -= _tokens(request)
            self._running -= 1
            waited = request["slot_ns"] - request["came_ns"] > 1_000_000
            self._say(
                id=request["id"],
                done={
                    "waited_for_slot": waited,
                    "slot_ns": request["slot_ns"],
                    "prefill_begin_ns": begin_ns,
                    "prefill_end_ns": end_ns,
                    "counters": own_counters(),
                },
            )
            self._admit()

    def _tell(self, **fields: Any) -> None:
        with self._lock:
            self._say(**fields)


def _tokens(request: dict[str, Any]) -> int:
    return int(request["prompt_tokens"]) + int(request["max_tokens"])


def _exit_when_stdin_ends() -> None:
    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(prog="VLLM::EngineCore")
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--alias", required=True)
    parser.add_argument("--fd", required=True, type=int)
    options = parser.parse_args()
    EngineCore(load_config(options.config), options.alias, options.fd).run()


if __name__ == "__main__":
    main()
