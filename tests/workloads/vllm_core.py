"""vLLM's engine core: has the weights, admits requests while their tokens fit its KV cache.

A process that the API server forks and that names itself `VLLM::EngineCore`; with tensor
parallelism the weights are its workers' (`workers`). A request needs room for its prompt and its
answer; one that does not fit waits, first come, first served, until another has ended. /sleep gives
the weights' memory back: at level 1 they are kept in the host's memory and /wake_up copies them
from there, at level 2 it reads them again.
"""

from __future__ import annotations

import collections
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

from .config import ModelConfig, ServerConfig, load_config
from .engine import Engine, Stamps
from .logs import Log
from .oneself import name_oneself, own_counters, share_signals
from .wire import now_ns
from .workers import Workers


def core_main(config_path: Path, alias: str, channel: socket.socket) -> None:
    share_signals()
    name_oneself("VLLM::EngineCore")
    EngineCore(load_config(config_path), alias, channel, channel).run()
    os._exit(0)


class EngineCore:
    """`asked`: where requests come from; `told`: where what becomes of them goes to."""

    def __init__(
        self, config: ServerConfig, alias: str, asked: socket.socket, told: socket.socket
    ) -> None:
        self._model: ModelConfig = config.models[alias]
        self._asked, self._told = asked, told
        self._log = Log(enabled=config.logs)
        self._engine: Engine | Workers
        if self._model.tensor_parallel > 1:
            self._engine = Workers(config, self._model)
        else:
            self._engine = Engine(config.library_path, self._model, markers=config.markers)
        self._lock = threading.Lock()
        self._waiting: collections.deque[dict[str, Any]] = collections.deque()
        self._running = self._used_tokens = 0
        self._slept_at = 0  # the level

    def run(self) -> None:
        self._start()
        for line in self._asked.makefile("rb"):
            self._take(json.loads(line))

    def _start(self) -> None:
        engine = self._engine
        engine.spend(self._model.launch_ns // 2)
        self._say_loading()
        began_ns = now_ns()
        loaded = engine.load()
        self._say_loaded((now_ns() - began_ns) / 1e9)
        engine.init()
        self._say_ready((now_ns() - began_ns) / 1e9)
        self._say(**_loaded_at(loaded), counters=own_counters(), core_pid=os.getpid())

    def _say_loading(self) -> None:
        self._log.plain("INFO [gpu_model_runner.py:5040] Starting to load model b...")

    def _say_loaded(self, took_s: float) -> None:
        self._log.plain(f"INFO [default_loader.py:503] Loading weights took {took_s:.2f} seconds")

    def _say_ready(self, took_s: float) -> None:
        self._log.plain(
            "INFO [core.py:402] init engine (profile, create kv cache, warmup model) took"
            f" {took_s:.2f} s"
        )

    def _say_admitted(self, request: dict[str, Any]) -> None:
        """vLLM says nothing of it."""

    def _say(self, **fields: Any) -> None:
        self._told.sendall(json.dumps(fields).encode() + b"\n")

    def _take(self, request: dict[str, Any]) -> None:
        if request["act"] == "generate":
            request["came_ns"] = now_ns()
            with self._lock:
                self._waiting.append(request)
                self._admit()
            return
        act = self._sleep if request["act"] == "sleep" else self._wake
        self._tell(id=request["id"], done=act(request.get("level", 1)))

    def _sleep(self, level: int) -> dict[str, int]:
        began_ns = now_ns()
        self._slept_at = level
        if level == 1:
            self._engine.spend(self._model.nap_ns // 5)
        else:
            self._engine.free()
        took = (now_ns() - began_ns) / 1e9
        self._log.plain(f"INFO [abstract.py:222] It took {took:.6f} seconds to fall asleep.")
        return {}

    def _wake(self, _level: int) -> dict[str, int]:
        """One call brings back weights and cache: from outside, all of it is the load."""
        began_ns = now_ns()
        if self._slept_at == 1:
            self._engine.spend(self._model.nap_ns)
            loaded = Stamps(first_touch_ns=began_ns, last_weight_ns=now_ns())
        else:
            loaded = self._engine.load()
        self._engine.init()
        took = (now_ns() - began_ns) / 1e9
        tags = "{'weights', 'kv_cache'}"
        self._log.plain(
            f"INFO [abstract.py:250] It took {took:.6f} seconds to wake up tags {tags}."
        )
        return _loaded_at(loaded) | {"last_weight_ns": now_ns()}

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
            self._say_admitted(request)
            request["slot_ns"] = now_ns()
            threading.Thread(target=self._generate, args=(request,), daemon=True).start()
        self._say(counts=self.counts())

    def counts(self) -> dict[str, float]:
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


def _loaded_at(loaded: Stamps) -> dict[str, int]:
    return {"first_touch_ns": loaded.first_touch_ns, "last_weight_ns": loaded.last_weight_ns}


def _tokens(request: dict[str, Any]) -> int:
    return int(request["prompt_tokens"]) + int(request["max_tokens"])
