"""The servers people run: how a process of each is recognised, from its own command line.

Recognition only names things; a server not listed here is followed just the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True, slots=True)
class Engine:
    """`programs`: base names of the executable or script; `arguments`: a pattern that one of the
    arguments must match (an interpreter's module, say), where the name alone says nothing."""

    name: str
    title: str
    programs: frozenset[str] = frozenset()
    arguments: re.Pattern[str] | None = None


def _engine(name: str, title: str, programs: str = "", arguments: str = "") -> Engine:
    pattern = re.compile(arguments) if arguments else None
    return Engine(name, title, frozenset(programs.split()), pattern)


# In order: a front end that starts another engine's server comes before that engine.
ENGINES: tuple[Engine, ...] = (
    _engine("llama-swap", "llama-swap", "llama-swap"),
    _engine("ollama", "Ollama", "ollama ollama_llama_server ollama-runner"),
    _engine("llama.cpp", "llama.cpp llama-server", "llama-server llama-server-impl server-llama"),
    _engine("llama-cpp-python", "llama-cpp-python", arguments=r"^llama_cpp\.server"),
    _engine("vllm", "vLLM", "vllm", r"^vllm\.entrypoints|^vllm$|(^|/)vllm$"),
    _engine("sglang", "SGLang", "sglang", r"^sglang\.launch_server|(^|/)sglang$"),
    _engine("tgi", "text-generation-inference", "text-generation-launcher text-generation-router"),
    _engine("transformers", "transformers serve", "transformers", r"(^|/)transformers(-cli)?$"),
    _engine("localai", "LocalAI", "local-ai"),
    _engine("lmstudio", "LM Studio", "lm-studio lms llmster"),
    _engine("koboldcpp", "KoboldCpp", "koboldcpp", r"koboldcpp\.py$"),
)


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
    return None


_INTERPRETER = re.compile(r"(python|pypy)[\d.]*$|uv$|pipx$")


# What ends in one of these holds weights; anything else may, if it is the biggest file mapped.
WEIGHT_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".onnx", ".ggml", ".npz")


def looks_like_weights(path: str) -> bool:
    """Whether a path names model weights: by suffix, or as a blob of Ollama or a hub cache."""
    lowered = path.lower()
    return lowered.endswith(WEIGHT_SUFFIXES) or "/blobs/sha256" in lowered or "/blobs/" in lowered
