"""Builds probes/*.bpf.c into collector/ttftprof/kernel/objects/MACHINE/, where the loader looks.

Each source becomes an object; libbpf's static linker joins them into probes.bpf.o, the one that
is loaded, so that the kernel's types are read once and not per probe. hatchling runs this for
wheels and sdists, which get the objects of every machine, and editable installs; `python
hatch_build.py` does the same in place while a probe is being written. Only what is older than a
source, a header or this file is rebuilt; what lost its source is removed. An unpacked sdist needs
no compiler, until one of its sources is changed.

Everything is built in both dialects of compat.bpf.h; that for kernels without BTF lies in no_btf/,
and what bcc compiles for it there is copied as it is.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
PROBES = ROOT / "probes"
OBJECTS = ROOT / "collector/ttftprof/kernel/objects"
LINKED = "probes.bpf.o"
KERNEL_TYPES = "types.bcc.c"  # compiled by bcc where it records
# By folder below that of the machine
DIALECTS: dict[str, list[str]] = {"": [], "no_btf": ["-DNO_KERNEL_BTF"]}
# libbpf's names for the register layouts of PT_REGS_PARM and friends, by name of the machine
TARGET_ARCHES = {"x86_64": "x86", "aarch64": "arm64"}
# v3: atomics that return a value (kernel 5.12), which clang 14 does not emit by default
FLAGS = ["-O2", "-g", "-target", "bpf", "-mcpu=v3", "-Wall", "-Werror", "-I", str(PROBES)]
# The same objects wherever they are built
FLAGS.append(f"-ffile-prefix-map={ROOT}=.")


class ProbeBuildError(Exception):
    """The probes could not be built; the message says what to do."""


class ProbeBuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name in ("wheel", "sdist") and not came_built():
            # Objects know register layouts, but no Python ABI and no libc: one wheel serves all.
            for machine in [platform.machine()] if version == "editable" else TARGET_ARCHES:
                build_objects(machine)


def came_built() -> bool:
    """Whether this is an sdist as it was unpacked: every file in it has the same age."""
    objects = [OBJECTS / m / d / LINKED for m in TARGET_ARCHES for d in DIALECTS]
    oldest_ns = min(map(modified_ns, objects))
    sources = [Path(__file__), *PROBES.iterdir()]
    return (ROOT / "PKG-INFO").exists() and 0 < max(map(modified_ns, sources)) <= oldest_ns


def build_objects(machine: str) -> list[Path]:
    """Brings every object for `machine` up to date and returns those that were rebuilt."""
    if machine not in TARGET_ARCHES:
        raise ProbeBuildError(f"no probes for {machine}, only {', '.join(TARGET_ARCHES)}")
    built = [o for d in DIALECTS for o in build_dialect(machine, d)]
    types = OBJECTS / KERNEL_TYPES
    if modified_ns(types) < modified_ns(PROBES / KERNEL_TYPES):
        shutil.copyfile(PROBES / KERNEL_TYPES, types)
        built.append(types)
    return built


def build_dialect(machine: str, dialect: str) -> list[Path]:
    """One dialect's objects, brought up to date; those that were rebuilt."""
    folder = OBJECTS / machine / dialect
    linked = folder / LINKED
    sources = {folder / f"{s.name.removesuffix('.c')}.o": s for s in PROBES.glob("*.bpf.c")}
    stale = set(folder.glob("*.bpf.o")) - set(sources) - {linked}
    for left_over in stale:
        left_over.unlink()
    shared_ns = max(map(modified_ns, [Path(__file__), *PROBES.glob("*.h")]))
    outdated = [
        o for o, s in sorted(sources.items()) if modified_ns(o) <= max(shared_ns, modified_ns(s))
    ]
    flags = [f"-D__TARGET_ARCH_{TARGET_ARCHES[machine]}", *DIALECTS[dialect]]
    if outdated:
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda o: compile_probe(sources[o], o, flags), outdated))
    if sources and (stale or modified_ns(linked) < max(map(modified_ns, sources))):
        link_objects(sorted(sources), linked)
        outdated.append(linked)
    return outdated


def modified_ns(path: Path) -> int:
    """When `path` was last written; 0 if it is not there."""
    return path.stat().st_mtime_ns if path.exists() else 0


def link_objects(objects: list[Path], target: Path) -> None:
    """Joins probe objects with libbpf's linker; shared maps are declared weak in each."""
    try:
        lib = ctypes.CDLL("libbpf.so.1")
    except OSError as error:
        raise ProbeBuildError("libbpf.so.1 is not installed: apt-get install libbpf1") from error
    lib.bpf_linker__new.restype = ctypes.c_void_p
    partial = target.with_suffix(f".{os.getpid()}")
    linker = ctypes.c_void_p(lib.bpf_linker__new(str(partial).encode(), None))
    try:
        for source in objects:
            if lib.bpf_linker__add_file(linker, str(source).encode(), None):
                raise ProbeBuildError(f"{source.name} cannot be linked with the other probes")
        if lib.bpf_linker__finalize(linker):
            raise ProbeBuildError("the probes cannot be linked")
        partial.replace(target)
    finally:
        lib.bpf_linker__free(linker)
        partial.unlink(missing_ok=True)


def compile_probe(source: Path, target: Path, flags: list[str]) -> None:
    """Compiles one probe; `target` is replaced whole or left as it was."""
    clang = shutil.which("clang")
    if clang is None:
        raise ProbeBuildError("clang is not installed: apt-get install clang")
    partial = target.with_suffix(f".{os.getpid()}")
    try:
        run([clang, *FLAGS, *flags, "-c", str(source), "-o", str(partial)])
        if strip := shutil.which("llvm-strip"):
            run([strip, "--strip-debug", str(partial)])  # DWARF goes, BTF stays
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        hint = ""
        if "bpf/bpf_" in done.stderr and "file not found" in done.stderr:
            hint = "\nlibbpf's headers are not installed: apt-get install libbpf-dev"
        raise ProbeBuildError(f"{' '.join(command)} failed:\n{done.stderr}{hint}")


if __name__ == "__main__":
    try:
        for built in build_objects(platform.machine()):
            print(f"built {built.relative_to(ROOT)}")
    except ProbeBuildError as error:
        sys.exit(str(error))
