"""Builds probes/*.bpf.c into collector/ttftprof/kernel/objects/MACHINE/, where the loader looks.

All sources are compiled as one into probes.bpf.o, so that the kernel's types are read once and not
per probe. hatchling runs this for wheels and sdists, which get the objects of every machine, and
editable installs; `python hatch_build.py` does the same in place while a probe is being written.
Only what is older than a source, a header or this file is rebuilt. An unpacked sdist needs no
compiler, until one of its sources is changed.

Everything is built in each dialect of compat.bpf.h: for kernels that take casts in casts/, for
those without BTF in no_btf/. What bcc compiles for the latter is copied as it is.
"""

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
OBJECT = "probes.bpf.o"
KERNEL_TYPES = "types.bcc.c"  # compiled by bcc where it records
# By folder below that of the machine
DIALECTS: dict[str, list[str]] = {"": [], "casts": ["-DCASTS"], "no_btf": ["-DNO_KERNEL_BTF"]}
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
    objects = [OBJECTS / m / d / OBJECT for m in TARGET_ARCHES for d in DIALECTS]
    oldest_ns = min(map(modified_ns, objects))
    sources = [Path(__file__), *PROBES.iterdir()]
    return (ROOT / "PKG-INFO").exists() and 0 < max(map(modified_ns, sources)) <= oldest_ns


def build_objects(machine: str) -> list[Path]:
    """Brings every object for `machine` up to date and returns what was rebuilt."""
    if machine not in TARGET_ARCHES:
        raise ProbeBuildError(f"no probes for {machine}, only {', '.join(TARGET_ARCHES)}")
    remove_left_overs(machine)
    newest_ns = max(map(modified_ns, [Path(__file__), *PROBES.iterdir()]))
    objects = {OBJECTS / machine / d / OBJECT: flags for d, flags in DIALECTS.items()}
    built = [o for o in objects if modified_ns(o) <= newest_ns]
    architecture = f"-D__TARGET_ARCH_{TARGET_ARCHES[machine]}"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda o: compile_probes(o, [architecture, *objects[o]]), built))
    types = OBJECTS / KERNEL_TYPES
    if modified_ns(types) < modified_ns(PROBES / KERNEL_TYPES):
        shutil.copyfile(PROBES / KERNEL_TYPES, types)
        built.append(types)
    return built


def remove_left_overs(machine: str) -> None:
    """What former builds put there."""
    for folder in (OBJECTS / machine / d for d in DIALECTS):
        for left_over in set(folder.glob("*.bpf.o")) - {folder / OBJECT}:
            left_over.unlink()


def modified_ns(path: Path) -> int:
    """When `path` was last written; 0 if it is not there."""
    return path.stat().st_mtime_ns if path.exists() else 0


def compile_probes(target: Path, flags: list[str]) -> None:
    """Compiles all probes as one source; `target` is replaced whole or left as it was."""
    clang = shutil.which("clang")
    if clang is None:
        raise ProbeBuildError("clang is not installed: apt-get install clang")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}")
    sources = "".join(f'#include "{s.name}"\n' for s in sorted(PROBES.glob("*.bpf.c")))
    try:
        run([clang, *FLAGS, *flags, "-c", "-x", "c", "-", "-o", str(partial)], sources)
        if strip := shutil.which("llvm-strip"):
            run([strip, "--strip-debug", str(partial)])  # DWARF goes, BTF stays
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def run(command: list[str], given: str = "") -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
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
