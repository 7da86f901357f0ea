"""Tensor parallelism as vLLM has it: the engine core forks a worker a rank, and all do each step.

After vllm/v1/executor/multiproc_executor.py of vLLM 0.32: the weights are the workers', each with
its part of them; the core tells all of them what to do and goes on when the last is done. Lines of
JSON over a socket stand for the queue in shared memory.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import BinaryIO

from .config import ModelConfig, ServerConfig
from .engine import Engine, Stamps
from .oneself import name_oneself, share_signals

STAMPS = ("first_touch_ns", "last_weight_ns", "decode_begin_ns", "decode_end_ns")


class Workers:
    """What `Engine` does, done by all workers at once."""

    def __init__(self, config: ServerConfig, model: ModelConfig) -> None:
        context = multiprocessing.get_context("fork")
        self._channels: list[tuple[socket.socket, BinaryIO]] = []
        self._step = threading.Lock()
        for rank in range(model.tensor_parallel):
            ours, theirs = socket.socketpair()
            cores = [ours, *(channel for channel, _ in self._channels)]
            arguments = (config, _part(model, rank), rank, theirs, cores)
            context.Process(target=_work, args=arguments, daemon=True).start()
            theirs.close()
            self._channels.append((ours, ours.makefile("rb")))

    def load(self) -> Stamps:
        return self._all("load")

    def init(self) -> None:
        self._all("init")

    def decode(self, n_tokens: int) -> Stamps:
        return self._all("decode", n_tokens)

    def free(self) -> None:
        self._all("free")

    def spend(self, duration_ns: int) -> None:
        self._all("spend", duration_ns)

    def _all(self, act: str, *arguments: int) -> Stamps:
        with self._step:
            for channel, _ in self._channels:
                channel.sendall(json.dumps([act, *arguments]).encode() + b"\n")
            told = [json.loads(lines.readline()) for _, lines in self._channels]
        first, last = STAMPS[::2], STAMPS[1::2]
        return Stamps(
            **{name: min(t[name] for t in told) for name in first},
            **{name: max(t[name] for t in told) for name in last},
        )


def _part(model: ModelConfig, rank: int) -> ModelConfig:
    first, *rest = [model.path, *model.shards][rank :: model.tensor_parallel]
    return replace(model, path=first, shards=tuple(rest))


def _work(
    config: ServerConfig,
    model: ModelConfig,
    rank: int,
    channel: socket.socket,
    cores: Sequence[socket.socket],
) -> None:
    """Ends with the core, however that ends: its ends of the channels are nobody else's."""
    for inherited in cores:
        os.close(inherited.detach())
    share_signals()
    name_oneself(f"VLLM::Worker_TP{rank}")
    engine = Engine(config.library_path, model, markers=config.markers)
    for line in channel.makefile("rb"):
        act, *arguments = json.loads(line)
        stamps = getattr(engine, act)(*arguments) or Stamps()
        told = {name: getattr(stamps, name) for name in STAMPS}
        channel.sendall(json.dumps(told).encode() + b"\n")
    os._exit(0)
