"""`record` and `report` on a kernel without BTF: a process that does a prime number of things, and
a switch of models by a server that stamps itself.

Runs in the guest: `python without_btf_guest.py WORK RESULTS`. WORK lies on a disk. Nobody names a
loader, and bcc compiles the kernel's headers there, which emulated takes minutes: once, for both
recordings.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from lab.vm.guest import ALWAYS, apart, await_file, told
from ttftprof.cli import doctor, record, report
from ttftprof.kernel import session
from ttftprof.kernel.headers import compiled_types
from workloads import counted
from workloads.cache import make_model
from workloads.scenarios import SCENARIOS, Scenario, ScenarioRun, run_scenario

MODES = ("reads", "mmaps", "opens", "forks", "faults")
COUNTED_BYTES = 8 * (1 << 20) + 4099
# Emulated, a page takes long: a small model.
SWITCH: Scenario = replace(SCENARIOS["cold_mmap_short"], weights_b_bytes=32 * (1 << 20) + 104729)


def recorder(results: Path, name: str, pid: int) -> int:
    """The pid of a recorder of a process, armed."""
    armed = results / f"{name}.armed"
    words = ["-o", str(results / f"{name}.ttft"), *ALWAYS, "--pid", str(pid)]
    words += ["--ready-file", str(armed)]
    began = time.monotonic()
    own = apart(name, lambda: record.command.main(words, standalone_mode=False))
    await_file(armed)
    print(f"{name}: armed after {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return own


def count(work: Path, results: Path) -> None:
    """A process of its own, that is there before it is recorded, and whose end ends that."""
    model = make_model(work / "counted.gguf", COUNTED_BYTES)
    go = results / "counts.go"

    def do() -> None:
        await_file(go)
        summaries = [counted.run_mode(mode, model) for mode in MODES]
        about = {"ino": model.stat().st_ino, "modes": summaries}
        (results / "counts.json").write_text(json.dumps(about))

    process = apart("counted", do)
    recording = recorder(results, "counts", process)
    go.touch()
    os.waitpid(process, 0)
    os.waitpid(recording, 0)


def switch(work: Path, results: Path) -> None:
    recordings: list[int] = []

    def stop(_pid: int) -> None:
        time.sleep(0.5)  # the answer's last bytes
        os.kill(recordings[0], 2)
        os.waitpid(recordings[0], 0)

    run = run_scenario(
        SWITCH,
        work,
        before_switch=lambda pid: recordings.append(recorder(results, "switch", pid)),
        after=stop,
    )
    (results / "switch.json").write_text(json.dumps(summary(run)))


def summary(run: ScenarioRun) -> dict[str, object]:
    """What the server and its client stamped themselves."""
    return {
        "truth": asdict(run.truth),
        "client": asdict(run.client),
        "weights": {
            "ino": run.model_path.stat().st_ino,
            "size_bytes": run.model_path.stat().st_size,
            "cached_before": run.residency_before,
        },
    }


def main(work: Path, results: Path) -> None:
    has_types = Path("/sys/kernel/btf/vmlinux").exists()
    about = {"release": platform.release(), "has_types": has_types}
    (results / "kernel.json").write_text(json.dumps(about))
    types = compiled_types()
    vars(session)["compiled_types"] = lambda: types
    count(work, results)
    switch(work, results)
    for name in ("counts", "switch"):
        path = str(results / f"{name}.ttft")
        os.waitpid(told(results / f"{name}.report.json", report.command, path), 0)
    os.waitpid(told(results / "doctor.json", doctor.command), 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
