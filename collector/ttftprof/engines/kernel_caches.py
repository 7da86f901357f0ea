"""Where compiled GPU kernels are kept, and who compiles them: names, of folders and programs.

probes/files.bpf.c sends the paths of opens in folders of these names; a new one needs its first
eight characters there.
"""

from __future__ import annotations

from pathlib import PurePath

# (a part of the path, the cache); the first that fits counts.
_CACHES = (
    ("/.nv/ComputeCache", "ComputeCache"),
    ("/torchinductor", "inductor"),
    ("/.triton", "Triton"),
    ("/.cache/vllm", "vLLM"),
    ("deep_gemm", "DeepGEMM"),
    ("flashinfer", "FlashInfer"),
    ("miopen", "MIOpen"),
    ("/.cache/triton", "Triton"),
    ("/.cache/torch", "torch"),
    ("/.cache/comgr", "comgr"),
)
COMPILERS = frozenset(
    {
        "nvcc", "cicc", "ptxas", "fatbinary", "nvlink", "cudafe++", "hipcc", "clang", "clang++",
        "lld", "ld.lld", "cc1plus", "amdclang++",
    }
)  # fmt: skip


def cache_of(path: str) -> str:
    """The cache that a path lies in; "" if in none."""
    return next((name for part, name in _CACHES if part in path), "")


def is_bookkeeping(path: str) -> bool:
    """An index or a lock, which a hit opens for writing too."""
    name = PurePath(path).name
    return name == "index" or name.endswith((".lock", ".lck"))


def is_compiler(path: str) -> bool:
    """Whether a program compiles kernels: by its name, a version behind it ("clang-18") or not."""
    name = PurePath(path).name
    return name in COMPILERS or name.split("-")[0] in COMPILERS
