"""The native library seen from Python. Every call releases the GIL while it works."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .config import ModelConfig

_LOAD_MODES = ("mmap", "populate", "random", "read", "pread", "direct", "lazy")


class Stamps(ctypes.Structure):
    """CLOCK_MONOTONIC ns of the calling thread's last load and decode."""

    first_touch_ns: int
    last_weight_ns: int
    decode_begin_ns: int
    decode_end_ns: int
    _fields_ = [
        ("first_touch_ns", ctypes.c_int64),
        ("last_weight_ns", ctypes.c_int64),
        ("decode_begin_ns", ctypes.c_int64),
        ("decode_end_ns", ctypes.c_int64),
    ]


class _ModelParams(ctypes.Structure):
    _fields_ = [
        ("load_mode", ctypes.c_int32),
        ("header_only", ctypes.c_int32),
        ("reserved", ctypes.c_int64 * 4),
    ]


class _ContextParams(ctypes.Structure):
    _fields_ = [
        ("kv_bytes", ctypes.c_int64),
        ("init_ns", ctypes.c_int64),
        ("ns_per_token", ctypes.c_int64),
        ("busy", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.c_void_p),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    ]


class Engine:
    """One model in one process: load, init, decode, free, in llama.cpp's own order of calls."""

    def __init__(self, library_path: str, config: ModelConfig, *, markers: bool) -> None:
        self._config = config
        self._busy = int(config.compute == "busy")
        self._library = ctypes.CDLL(library_path, use_errno=True)
        prefix = "llama" if markers else "plain"
        pointer = ctypes.c_void_p
        self._load = self._bind(
            f"{prefix}_model_load_from_file", pointer, [ctypes.c_char_p, _ModelParams]
        )
        self._init = self._bind(f"{prefix}_init_from_model", pointer, [pointer, _ContextParams])
        self._decode = self._bind(f"{prefix}_decode", ctypes.c_int32, [pointer, _Batch])
        self._free_model = self._bind(f"{prefix}_model_free", None, [pointer])
        self._free_context = self._bind(f"{prefix}_free", None, [pointer])
        self._spend = self._bind("work_spend", None, [ctypes.c_int64, ctypes.c_int32])
        self._stamps = self._bind("work_stamps", None, [ctypes.POINTER(Stamps)])
        self._models: list[int] = []
        self._context: int | None = None

    def _bind(self, name: str, result: Any, arguments: list[Any]) -> Any:
        function = getattr(self._library, name)
        function.restype = result
        function.argtypes = arguments
        return function

    def spend(self, duration_ns: int) -> None:
        self._spend(duration_ns, self._busy)

    def stamps(self) -> Stamps:
        out = Stamps()
        self._stamps(ctypes.byref(out))
        return out

    def fit_pass(self) -> None:
        self._free_model(self._load_file(self._config.path, header_only=True))

    def load(self) -> Stamps:
        """All files of the weights, by as many threads as configured; first and last touch."""
        paths = [self._config.path, *self._config.shards]
        if self._config.load_threads == 1:
            return _spanning([self._load_one(path) for path in paths])
        with ThreadPoolExecutor(self._config.load_threads) as pool:
            return _spanning(list(pool.map(self._load_one, paths)))

    def _load_one(self, path: str) -> Stamps:
        self._models.append(self._load_file(path, header_only=False))
        return self.stamps()

    def init(self) -> None:
        config = self._config
        params = _ContextParams(
            config.kv_bytes, config.init_ns, config.prefill_ns_per_token, self._busy, 0
        )
        self._context = self._init(self._models[0], params)

    def decode(self, n_tokens: int) -> Stamps:
        self._decode(self._context, _Batch(n_tokens=n_tokens))
        return self.stamps()

    def free(self) -> None:
        if self._context is not None:
            self._free_context(self._context)
        for model in self._models:
            self._free_model(model)
        self._context = None
        self._models.clear()

    def _load_file(self, path: str, *, header_only: bool) -> int:
        params = _ModelParams(_LOAD_MODES.index(self._config.load_mode), int(header_only))
        model: int | None = self._load(path.encode(), params)
        if model is None:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
        return model


def _spanning(loads: list[Stamps]) -> Stamps:
    first = min(stamps.first_touch_ns for stamps in loads)
    return Stamps(first_touch_ns=first, last_weight_ns=max(s.last_weight_ns for s in loads))
