"""The servers people run: how a process of each is recognised, from its own command line.

Recognition only names things; a server not listed here is followed just the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import Any

MS = 1_000_000


@dataclass(frozen=True, slots=True)
class FixedWait:
    """A wait that a front makes by the clock, whether or not there is anything to wait for.

    It looks again every `quantum_ns`, the first time `first_ns` after it began to wait, and gives
    up after `most_ns` (None: not before its time-out for the whole load). `checked` says where it
    was read.
    """

    phase: str
    says: str
    quantum_ns: int
    first_ns: int
    most_ns: int | None
    checked: str


@dataclass(frozen=True, slots=True)
class Engine:
    """`programs`: base names of the executable or script; `arguments`: a pattern that one of the
    arguments must match (an interpreter's module, say), where the name alone says nothing;
    `titles`: what its processes call themselves in place of a command line.

    `waits`: several of one phase are those of different versions.

    `context`, `slots`, `loading`: the options that say how big a context is, how many requests are
    served at once, how weights are read. `metrics`: the path of its own counts, if it has one.
    """

    name: str
    title: str
    programs: frozenset[str] = frozenset()
    arguments: re.Pattern[str] | None = None
    titles: re.Pattern[str] | None = None
    context: tuple[str, ...] = ()
    slots: tuple[str, ...] = ()
    loading: tuple[str, ...] = ()
    waits: tuple[FixedWait, ...] = ()
    metrics: str = ""

    @property
    def telling(self) -> tuple[str, ...]:
        """The options whose change makes a server load again what it had."""
        return (*self.context, *self.slots, *self.loading)


def _engine(
    name: str, title: str, programs: str = "", arguments: str = "", titles: str = "", **more: Any
) -> Engine:
    words = {k: tuple(v.split()) for k, v in more.items() if k in ("context", "slots", "loading")}
    return Engine(
        name,
        title,
        frozenset(programs.split()),
        re.compile(arguments) if arguments else None,
        re.compile(titles) if titles else None,
        **{**more, **words},
    )


_OLLAMA_WAITS = (
    FixedWait(
        "evict",
        "Ollama waits after an unload until the GPU's free memory has risen",
        250 * MS, 250 * MS, 5_000 * MS, "server/sched.go, September 2026",
    ),
    FixedWait(
        "ready_gap",
        "Ollama asks its runner every 250 ms whether it is ready",
        250 * MS, 0, None, "llm/llama_server.go, September 2026",
    ),
)  # fmt: skip
_SWAP_WAITS = (
    FixedWait(
        "ready_gap",
        "llama-swap first looks 250 ms after it started a server, then once a second",
        1_000 * MS, 250 * MS, None, "internal/process/process_command.go, v220 to v250",
    ),
    FixedWait(
        "ready_gap",
        "llama-swap before v220 first looks 250 ms after it started a server, then every 5 s",
        5_000 * MS, 250 * MS, None, "proxy/process.go, v100 to v219",
    ),
)  # fmt: skip
_SGLANG_WAITS = (
    FixedWait(
        "init",
        "SGLang sleeps 1 s before it first asks its own HTTP server for a warm-up, and 1 s between "
        "tries",
        1_000 * MS, 1_000 * MS, 120_000 * MS, "srt/entrypoints/http_server.py, 0.4.0 to 0.5.23",
    ),
    FixedWait(
        "ready_gap",
        "SGLang answers a health check by a run of its own, of which it looks for the outcome once "
        "a second",
        1_000 * MS, 1_000 * MS, None, "srt/entrypoints/http_server.py, 0.5.0 to 0.5.23",
    ),
)  # fmt: skip
_TGI_WAITS = (
    FixedWait(
        "init",
        "TGI's launcher looks every 100 ms whether its shards are ready, then starts the router",
        100 * MS, 100 * MS, None, "launcher/src/main.rs, 2.0 to 3.3.6",
    ),
)  # fmt: skip
_LOCALAI_WAITS = (
    FixedWait(
        "launch",
        "LocalAI asks a backend that it started at once and then every 2 s whether it answers",
        2_000 * MS, 0, 40_000 * MS, "pkg/model/initializers.go, 4.9",
    ),
)  # fmt: skip

# The options of llama.cpp's server, whoever starts it.
_LLAMA_OPTIONS = {
    "context": "-c --ctx-size -ctk -ctv --cache-type-k --cache-type-v",
    "slots": "-np --parallel",
    "loading": "-ngl --n-gpu-layers --gpu-layers --no-mmap --mlock --direct-io --load-mode --numa",
}

# In order: a front end that starts another engine's server comes before that engine.
ENGINES: tuple[Engine, ...] = (
    _engine("llama-swap", "llama-swap", "llama-swap", waits=_SWAP_WAITS),
    _engine(
        "ollama", "Ollama", "ollama ollama_llama_server ollama-runner", waits=_OLLAMA_WAITS,
        **_LLAMA_OPTIONS | {"context": "--ctx-size --kv-cache-type -c", "slots": "--parallel -np"},
    ),
    _engine(
        "llama.cpp", "llama.cpp llama-server", "llama-server llama-server-impl server-llama",
        **_LLAMA_OPTIONS,
    ),
    _engine(
        "llama-cpp-python", "llama-cpp-python", arguments=r"^llama_cpp\.server",
        context="--n_ctx --type_k --type_v", loading="--n_gpu_layers --use_mmap --use_mlock",
    ),
    _engine("xllamacpp", "xllamacpp", arguments=r"^xllamacpp|(^|/)xllamacpp[\w-]*\.py$",
            **_LLAMA_OPTIONS),
    _engine(
        "vllm", "vLLM", "vllm", r"^vllm\.entrypoints|^vllm$|(^|/)vllm$", r"^VLLM::",
        context="--max-model-len --kv-cache-dtype --gpu-memory-utilization",
        slots="--max-num-seqs", loading="--load-format --safetensors-load-strategy",
        metrics="/metrics",
    ),
    _engine(
        "sglang", "SGLang", "sglang", r"^sglang\.launch_server|(^|/)sglang$", r"^sglang::",
        context="--context-length --mem-fraction-static", slots="--max-running-requests",
        loading="--load-format", metrics="/metrics", waits=_SGLANG_WAITS,
    ),
    _engine(
        "tgi", "text-generation-inference",
        "text-generation-launcher text-generation-router text-generation-server",
        r"(^|/)text-generation-server$",
        context="--max-total-tokens --max-input-tokens", slots="--max-concurrent-requests",
        metrics="/metrics", waits=_TGI_WAITS,
    ),
    _engine("transformers", "transformers serve", "transformers",
            r"(^|/)transformers(-cli)?$|^transformers\.", loading="--device --dtype"),
    # Its backends are llama.cpp behind gRPC, one binary for each kind of processor, by way of the
    # loader that they bring along.
    _engine(
        "localai", "LocalAI", "local-ai llama-cpp-avx llama-cpp-avx2 llama-cpp-avx512 "
        "llama-cpp-fallback llama-cpp-grpc", r"(^|/)llama-cpp-(avx\w*|fallback|grpc)$",
        context="--context-size", waits=_LOCALAI_WAITS,
    ),
    _engine("lmstudio", "LM Studio", "lm-studio lms llmster"),
    _engine("koboldcpp", "KoboldCpp", "koboldcpp", r"koboldcpp\.py$", context="--contextsize",
            loading="--gpulayers --usemlock --nommap"),
)  # fmt: skip
_BY_NAME = {engine.name: engine for engine in ENGINES}


def engine_named(name: str | None) -> Engine | None:
    return _BY_NAME.get(name or "")


def recognise(exe: str, argv: Sequence[str]) -> Engine | None:
    """The engine a process belongs to, by its executable and arguments, or None."""
    names = {PurePosixPath(exe).name} | ({PurePosixPath(argv[0]).name} if argv else set())
    # Only an interpreter's arguments say what runs; those of an editor say what is read.
    runs = argv[1:4] if any(_INTERPRETER.match(name) for name in names) else []
    for engine in ENGINES:
        if names & engine.programs:
            return engine
        if engine.arguments and any(engine.arguments.search(a) for a in runs):
            return engine
        if engine.titles and argv and engine.titles.match(argv[0]):
            return engine
    return None


def option_of(argv: Sequence[str], names: Sequence[str]) -> str | None:
    """The last value given for one of these options: `-c 4096`, `--ctx-size=4096`; "" for a bare
    flag, None where it is not given."""
    value: str | None = None
    for argument, after in zip_longest(argv, argv[1:], fillvalue="-"):
        name, equals, joined = argument.partition("=")
        if name in names:
            value = joined if equals else ("" if after.startswith("-") else after)
    return value


_INTERPRETER = re.compile(r"(python|pypy)[\d.]*$|uv$|pipx$|ld(-linux[\w.-]*)?\.so")


# What multiprocessing has a fresh interpreter execute (Lib/multiprocessing/spawn.py, since 3.4).
_SPAWNED = "--multiprocessing-fork"


def is_workers(argv: Sequence[str]) -> bool:
    """Whether a command line is that of a Python program's worker: it says nothing of the program,
    and a name that the process gives itself may never be seen."""
    return _SPAWNED in argv


# What ends in one of these holds weights; anything else may, if it is the biggest file mapped.
WEIGHT_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".onnx", ".ggml", ".npz")


def looks_like_weights(path: str) -> bool:
    """Whether a path names model weights: by suffix, or as a blob of Ollama or a hub cache."""
    lowered = path.lower()
    return lowered.endswith(WEIGHT_SUFFIXES) or "/blobs/sha256" in lowered or "/blobs/" in lowered
