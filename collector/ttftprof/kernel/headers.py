"""The types of a kernel that carries no BTF, compiled from its headers.

bcc compiles `types.bcc.c` with its own clang, and libbpf places the fields of the probes by what
comes out. bcc has no call that gives out the object it made, and the kernel, to which it hands the
types, may refuse them (clang 14 leaves a structure undescribed that is only passed by value): they
are found in memory. A child process does it: the compiler takes 200 MB, which are gone with it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ttftprof.errors import Unsupported
from ttftprof.kernel import libbpf
from ttftprof.packages import bcc_packages, header_packages, install_command

SOURCE = Path(__file__).parent / "objects" / "types.bcc.c"
# Layout: struct btf_header of include/uapi/linux/btf.h; version 1, no flags, 24 bytes.
_HEADER = struct.Struct("<HBBIIIII")
_BEGIN = struct.pack("<HBBII", 0xEB9F, 1, 0, _HEADER.size, 0)
# The kernel itself is compiled so since 6.19; no warning is ours.
_FLAGS = ["-fms-extensions", "-Wno-everything"]
_MARK = b"\0kernel_types\0"  # a name that only these types have
# Where distributions keep Python modules that are no part of an environment
_SYSTEM_MODULES = ("lib/python3/dist-packages", "lib*/python3*/site-packages")
_SILENT = "the compiler ended without a word"


def compiled_types(release: str = platform.release()) -> bytes:
    """A kernel's types as raw BTF. Raises `Unsupported`, with what to install."""
    modules = bcc_folder()
    if modules is None:
        raise Unsupported(
            "bcc's Python module is not installed",
            next_step=f"{install_command(bcc_packages())} (pip has another bcc)",
        )
    if not has_headers():
        raise Unsupported(
            f"the headers of this kernel ({release}) are not installed",
            next_step=f"{install_command(header_packages(release))} (of a kernel that you built: "
            "BCC_KERNEL_SOURCE=its source)",
        )
    if (others := headers_release()) not in (None, release):
        raise Unsupported(
            f"the headers are of {others}, and the kernel is {release}: structures differ",
            next_step=install_command(header_packages(release)),
        )
    with tempfile.TemporaryFile() as result, tempfile.TemporaryFile() as words:
        pid = os.fork()
        if pid == 0:
            _compile_in_child(modules, result.fileno(), words.fileno())
        os.waitpid(pid, 0)
        result.seek(0)
        types = result.read()
        words.seek(0)
        said = words.read().decode(errors="replace")
    if not types:
        raise Unsupported(
            f"bcc cannot compile this kernel's types: {_first_error(said)}",
            next_step="headers of exactly this kernel are needed: "
            f"{install_command(header_packages(release))}",
        )
    return types


def bcc_folder(root: Path = Path("/usr")) -> Path | None:
    """Where the system's Python modules with bcc among them lie."""
    for pattern in _SYSTEM_MODULES:
        for folder in sorted(root.glob(pattern)):
            if (folder / "bcc" / "libbcc.py").is_file():
                return folder
    return None


def has_headers(root: Path = Path("/"), release: str = platform.release()) -> bool:
    """Whether bcc finds headers: installed ones, or those in the kernel (CONFIG_IKHEADERS)."""
    if "BCC_KERNEL_SOURCE" in os.environ:
        return True
    modules = root / "lib/modules" / release
    return (
        (modules / "build").is_dir()
        or (root / "sys/kernel/kheaders.tar.xz").exists()
        or any(modules.rglob("kheaders.ko*"))
    )


def headers_release(root: Path = Path("/"), release: str = platform.release()) -> str | None:
    """Of which kernel the headers are that bcc would take; None if they do not say."""
    build = os.environ.get("BCC_KERNEL_SOURCE") or root / "lib/modules" / release / "build"
    try:
        said = (Path(build) / "include/generated/utsrelease.h").read_text()
    except OSError:
        return None
    found = re.search(r'UTS_RELEASE "(.+)"', said)
    return found[1] if found else None


def _compile_in_child(modules: Path, result: int, words: int) -> None:
    """Writes the types, or what stands against them; never returns."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        os.dup2(words, 1)
        os.dup2(words, 2)
        os.write(result, _compile(modules))
        os._exit(0)
    except Exception as error:
        os.write(words, f"error: {error}\n".encode())
    finally:
        os._exit(1)


def _compile(modules: Path) -> bytes:
    sys.path.append(str(modules))
    import bcc

    compiler: Any = bcc  # it declares no types
    compiled = compiler.BPF(text=SOURCE.read_text(), cflags=_FLAGS)
    found = _types_in_memory()
    del compiled  # it had to live until here
    return found


def _types_in_memory() -> bytes:
    for memory in _own_memory():
        at = memory.find(_BEGIN)
        while at >= 0:
            *_, type_bytes, _, text_bytes = _HEADER.unpack_from(memory, at)
            types = memory[at : at + _HEADER.size + type_bytes + text_bytes]
            if _MARK in types and libbpf.has_struct(types, "task_struct"):
                return types
            at = memory.find(_BEGIN, at + 1)
    raise ValueError("no types came with it: this bcc is too old, or was built without them")


def _own_memory() -> Iterator[bytes]:
    """What this process has written itself, region by region."""
    for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
        span, access, _, _, inode, *name = line.split()
        if access.startswith("rw") and inode == "0" and name != ["[stack]"]:
            begin, end = (int(address, 16) for address in span.split("-"))
            yield ctypes.string_at(begin, end - begin)


def _first_error(said: str) -> str:
    errors = [line for line in said.splitlines() if "error:" in line]
    return errors[0].partition("error: ")[2] if errors else _SILENT
