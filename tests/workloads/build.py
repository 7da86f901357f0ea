"""Builds the native half on demand: libllama.so (llama.cpp's names) and libplain.so (nobody's)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parent / "native" / "weights.c"
BUILD_TIMEOUT_S = 60
PROGRAMS = (
    *("llama-server", "ollama", "llama-swap", "vllm", "sglang"),
    *("local-ai", "llama-cpp-avx2"),
    *("text-generation-launcher", "text-generation-router", "text-generation-server"),
)


class WorkloadError(Exception):
    """The workload itself could not do its part; says nothing about the profiler."""


def build_library(build_dir: Path, *, markers: bool = True) -> Path:
    """The shared library in `build_dir`, compiled if it is missing or older than its source."""
    library = build_dir / ("libllama.so" if markers else "libplain.so")
    if library.exists() and library.stat().st_mtime_ns > SOURCE.stat().st_mtime_ns:
        return library
    build_dir.mkdir(parents=True, exist_ok=True)
    fresh = library.with_suffix(f".{os.getpid()}.tmp")
    _compile(fresh, library.name, [] if markers else ["-DPLAIN_NAMES"])
    fresh.replace(library)
    return library


def make_programs(folder: Path) -> Path:
    """A folder of links to this Python under the names of engines, which are told by them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        link = folder / name
        if not link.is_symlink():
            link.symlink_to(Path(sys.executable).resolve())
    return folder


def _compile(output: Path, soname: str, extra: list[str]) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise WorkloadError("the truth workload needs a C compiler: apt-get install gcc")
    flags = ["-O2", "-g", "-Wall", "-Wextra", "-shared", "-fPIC", "-fvisibility=hidden"]
    command = [compiler, *flags, f"-Wl,-soname,{soname}", *extra, "-o", str(output), str(SOURCE)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise WorkloadError(f"{' '.join(command)} failed:\n{done.stderr}")
