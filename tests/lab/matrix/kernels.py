"""Which probes a kernel takes: boots it with nothing but `init.c` and the probes; keeps its answer.

    python -m lab.matrix.kernels MACHINE VMLINUZ MODULES FOLDER [HEADERS]

MODULES is the folder that holds `lib/modules/RELEASE`, HEADERS a folder that bcc takes for the
kernel's source. The result is a file of tests/fixtures/kernels; docs/KERNELS.md is made of those.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ttftprof.events import Kind, TextKind
from ttftprof.kernel.headers import compiled_types
from ttftprof.kernel.session import OBJECT, ProbeObject, Settings
from ttftprof.kernel.table import HANDLERS, PROBES, VARIANTS, call_tables

RESULTS = Path(__file__).parents[2] / "fixtures" / "kernels"
MODULES = ("virtio_pci", "virtio_blk", "ext4", "sunrpc", "nfs", "cifs", "fuse", "netfs")
BOOT_TIMEOUT_S = 280
_RECORD = re.compile(r"record (btf|casts|headers) (event|text) (\d+) (\d+)")
_LINE = re.compile(r"probe (btf|casts|headers) (\w+) (taken|refused) (\d+) (.*)")


@dataclass(frozen=True)
class Machine:
    """An emulated machine, and how programs for it are built."""

    qemu: tuple[str, ...]
    console: str
    compiler: tuple[str, ...]


MACHINES = {
    "x86_64": Machine(
        ("qemu-system-x86_64", "-machine", "q35", "-cpu", "max,la57=off"), "ttyS0", ("gcc",)
    ),
    "aarch64": Machine(
        ("qemu-system-aarch64", "-machine", "virt", "-cpu", "cortex-a72"),
        "ttyAMA0",
        ("aarch64-linux-gnu-gcc",),
    ),
}


def hooks() -> dict[str, str]:
    """The tracepoint, or the function with its `()`, of every program that has one."""
    names = ProbeObject()
    try:
        sections = {program: names.section(program) for program in names.programs}
    finally:
        names.close()
    parts = {program: section.partition("/") for program, section in sections.items()}
    ends = {"tp_btf": "", "fentry": "()", "kprobe": "()"}
    return {p: hook + ends[kind] for p, (kind, _, hook) in parts.items() if kind in ends}


def plan() -> str:
    """What init.c is to know of each program."""
    names = ProbeObject()
    programs = sorted({*names.programs, "files__held"})
    names.close()
    forms = {p: n for variants in VARIANTS for p, n in variants.items()}
    modules = {probe.stem: ",".join(probe.modules) or "-" for probe in PROBES}
    hook = {p: h for p, h in hooks().items() if not h.endswith("()")}
    before: dict[str, str] = {}
    for variants in VARIANTS:
        ordered = sorted(variants, key=lambda n: -variants[n])
        before |= dict(pairwise(reversed(ordered)))
    return "".join(
        f"{p} {hook.get(p, '-')} {forms.get(p, 0)} {modules[p.partition('__')[0]]} "
        f"{HANDLERS.get(p, -1)} {before.get(p, '-')}\n"
        for p in programs
    )


def boot(
    machine: str, vmlinuz: Path, modules: Path, folder: Path, headers: Path | None
) -> dict[str, object]:
    """What the kernel says of every program, by loader.

    Raises `RuntimeError` if it says nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    emulated = MACHINES[machine]
    pack(machine, modules, folder, headers)
    command = [
        *emulated.qemu,
        *("-accel", "tcg,thread=multi", "-smp", "2", "-m", "1G", "-nodefaults", "-no-reboot"),
        *("-display", "none", "-serial", "stdio", "-kernel", str(vmlinuz)),
        *("-initrd", str(folder / "initrd")),
        *("-drive", f"file={folder / 'disk'},format=raw,if=virtio,readonly=on"),
        *("-append", f"console={emulated.console} quiet panic=-1 mitigations=off apparmor=0"),
    ]
    done = subprocess.run(
        ["nice", *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=BOOT_TIMEOUT_S,
        check=False,
    )
    (folder / "console").write_text(done.stdout + done.stderr)
    return understood(machine, done.stdout)


def understood(machine: str, console: str) -> dict[str, object]:
    release = re.search(r"^kernel (\S+)", console, re.MULTILINE)
    if release is None or "done" not in console:
        raise RuntimeError(f"the VM did not finish:\n{console[-2000:]}")
    programs: dict[str, dict[str, dict[str, object]]] = {}
    for loader, name, state, runs, reason in _LINE.findall(console):
        refused = reason.strip() if state == "refused" else ""
        programs.setdefault(loader, {})[name] = {"runs": int(runs), "refused": refused}
    records: dict[str, dict[str, int]] = {}
    for loader, what, kind, count in _RECORD.findall(console):
        name = (Kind if what == "event" else TextKind)(int(kind)).name
        records.setdefault(loader, {})[f"{what} {name}"] = int(count)
    return {
        "release": release[1],
        "machine": machine,
        "has_btf": "\ntypes yes" in console,
        "programs": programs,
        "records": records,
    }


# -- what the VM is made of -----------------------------------------------------------------------


def pack(machine: str, modules: Path, folder: Path, headers: Path | None) -> None:
    """`initrd` and `disk` in `folder`."""
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("modules", "btf", "casts", "headers", "dev"):
        (tree / name).mkdir(parents=True)
    here = Path(__file__).parent
    build(machine, here / "init.c", tree / "init", "-lbpf", "-lelf", "-lz")
    for helper in ("uring_reads", "slow_fuse"):
        build(machine, here.parent / f"{helper}.c", tree / helper)
    [release] = [p.name for p in (modules / "lib/modules").iterdir()]
    copy_modules(modules, release, tree / "modules")
    (tree / "plan").write_text(plan())
    calls = b"".join(call_tables(machine))
    settings = Settings(own_tgid=0, min_file_bytes=4096).packed()
    (tree / "settings").write_bytes(settings[: -len(calls)] + calls)
    objects = OBJECT.parent.parent / machine
    shutil.copy(objects / OBJECT.name, tree / "btf")
    shutil.copy(objects / "casts" / OBJECT.name, tree / "casts")
    if headers is not None:
        os.environ["BCC_KERNEL_SOURCE"] = str(headers)
        (tree / "headers" / "types.btf").write_bytes(compiled_types(release))
        shutil.copy(objects / "no_btf" / OBJECT.name, tree / "headers")
    names = "\n".join(str(p.relative_to(tree)) for p in sorted(tree.rglob("*"))) + "\n"
    with (folder / "initrd").open("wb") as image:
        subprocess.run(
            ["busybox", "cpio", "-o", "-H", "newc"],
            cwd=tree,
            input=names.encode(),
            stdout=image,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    files = folder / "files"
    files.mkdir(exist_ok=True)
    (files / "model").write_bytes(os.urandom(4 << 20))
    (folder / "disk").unlink(missing_ok=True)
    make = ["mke2fs", "-q", "-t", "ext4", "-d", str(files), str(folder / "disk"), "16M"]
    subprocess.run(make, check=True)


def build(machine: str, source: Path, target: Path, *libraries: str) -> None:
    sysroot = os.environ.get("TTFTPROF_ARM64_LIBRARIES", "")
    paths = [f"-L{sysroot}"] if sysroot and machine == "aarch64" else []
    subprocess.run(
        [
            *MACHINES[machine].compiler,
            *("-O2", "-Wall", "-static", "-o", str(target), str(source)),
            *paths,
            *libraries,
        ],
        check=True,
    )


def copy_modules(root: Path, release: str, target: Path) -> None:
    """Those of `MODULES` and what they need, unpacked, named in the order of loading."""
    files: list[Path] = []
    for name in MODULES:
        shown = subprocess.run(
            ["modprobe", "-d", str(root), "-S", release, "--show-depends", name],
            capture_output=True,
            text=True,
            check=False,
        )
        for line in shown.stdout.splitlines():
            word, _, path = line.strip().partition(" ")
            if word == "insmod" and (found := Path(path.split()[0])) not in files:
                files.append(found)
    for number, file in enumerate(files, 100):
        content = file.read_bytes()
        if file.suffix == ".xz":
            content = lzma.decompress(content)
        elif file.suffix == ".zst":
            content = subprocess.run(
                ["zstd", "-qdc", str(file)], capture_output=True, check=True
            ).stdout
        name = file.name.split(".ko")[0]
        (target / f"{number}-{name}.ko").write_bytes(content)


def main() -> None:
    machine, *paths = sys.argv[1:]
    vmlinuz, modules, folder, *headers = map(Path, paths)
    found = boot(machine, vmlinuz, modules, folder, headers[0] if headers else None)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{found['release']}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
