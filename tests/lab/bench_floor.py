"""The floor of `bench`: programs that do nothing, on the hooks that `ttftprof record` attaches.

    python -m lab.bench_floor PID [--filter]

Prints `armed`, and stays until it is interrupted. `--filter`: each asks whether the thread is the
target's, which is the least that a profiler of one server among other programs can do.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import struct
import subprocess
import tempfile
from pathlib import Path

from ttftprof.kernel import libbpf
from ttftprof.kernel.session import ProbeObject, Settings, online_cpus
from ttftprof.kernel.table import PROBES
from ttftprof.kernel.types import KernelTypes

LAB = Path(__file__).parent
# With the filter these have a program of their own.
FOLLOWED = {"sched_process_fork", "sched_switch"}


def hooks() -> list[str]:
    """The tracepoints that a recording attaches to on this kernel."""
    kernel = KernelTypes()
    needs = [(name, probe.modules) for probe in PROBES for name, _ in probe.needs]
    found = {name for name, modules in needs if kernel.has_tracepoint(name, modules)}
    kernel.close()
    return sorted(found)


def built(target: Path, is_filtered: bool) -> Path:
    own = [name for name in hooks() if not (is_filtered and name in FOLLOWED)]
    options = [f"-DHOOKS={' '.join(f'HOOK({name})' for name in own)}"]
    options += ["-DFILTER"] if is_filtered else []
    command = ["clang", "-O2", "-g", "-target", "bpf", "-mcpu=v3", "-D__TARGET_ARCH_x86"]
    command += ["-I", str(LAB.parents[1] / "probes"), *options]
    subprocess.run([*command, "-c", str(LAB / "floor.bpf.c"), "-o", str(target)], check=True)
    return target


def attach(target: Path, tgid: int) -> None:
    """Loads all and attaches it for as long as this process lives."""
    lib = libbpf.library()
    opened = ProbeObject(target)
    settings = lib.bpf_object__find_map_by_name(opened.pointer, b".rodata")
    if settings:
        size = ctypes.c_size_t()
        at = lib.bpf_map__initial_value(settings, ctypes.byref(size))
        ctypes.memmove(at, struct.pack("<I", tgid), 4)
    libbpf.checked("load", lib.bpf_object__load(opened.pointer))
    for name, program in opened.programs.items():
        section = opened.section(name)
        if section == "perf_event":
            for cpu in online_cpus():
                fd = libbpf.open_clock_event(cpu, Settings().tick_hz)
                libbpf.attach_event(program, fd)
        elif section == "iter/task":
            libbpf.iterate(program)
        else:
            libbpf.present(section, lib.bpf_program__attach(program))


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_floor")
    parser.add_argument("pid", type=int)
    parser.add_argument("--filter", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        attach(built(Path(folder, "floor.o"), options.filter), options.pid)
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))
    print("armed", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
