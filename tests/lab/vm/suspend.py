"""A recording while the machine is suspended twice and a CPU goes off and comes on again.

Runs in the guest: `python -m lab.vm.suspend WORK`. First the kernel's own test of a suspend, which
stops everything down to the clocks and comes back after five seconds, then a real one (ACPI S3),
from which the clock's alarm wakes it. The target stamps itself; files come out by the console.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import time
from pathlib import Path

from lab.vm.guest import ALWAYS, apart, await_file
from ttftprof.cli import record

MODEL_BYTES, READ_BYTES = 7 << 20, 1 << 20
ASLEEP_S = 5
POWER = Path("/sys/power")
ALARM = Path("/sys/class/rtc/rtc0/wakealarm")
CPU = Path("/sys/devices/system/cpu/cpu1/online")


def clocks() -> dict[str, int]:
    return {
        "monotonic_ns": time.monotonic_ns(),
        "boottime_ns": time.clock_gettime_ns(time.CLOCK_BOOTTIME),
    }


def suspend(level: str) -> dict[str, object]:
    """What the clocks say before and after, and what the kernel says of it."""
    (POWER / "pm_test").write_text(level)
    before, refused = clocks(), ""
    if level == "none":
        ALARM.write_text("0")
        ALARM.write_text(f"+{ASLEEP_S}")
    try:
        (POWER / "state").write_text("mem")
    except OSError as error:
        refused = str(error)
    return {"level": level, "refused": refused, "before": before, "after": clocks()}


def read_now_and_then(model: Path, go: Path) -> None:
    """The target: it reads the file once a second or so, until it is killed."""
    await_file(go)
    fd = os.open(model, os.O_RDONLY)
    while True:
        for at in range(0, MODEL_BYTES, READ_BYTES):
            os.pread(fd, READ_BYTES, at)
        time.sleep(0.2)


def main(work: Path) -> None:
    model, path, armed = work / "model.gguf", work / "suspend.ttft", work / "armed"
    model.write_bytes(os.urandom(MODEL_BYTES))
    target = apart("target", lambda: read_now_and_then(model, armed))
    words = ["-o", str(path), *ALWAYS, "--pid", str(target), "--ready-file", str(armed)]
    recorder = apart("recorder", lambda: record.command.main(words, standalone_mode=False))
    await_file(armed)
    time.sleep(2)
    told: dict[str, object] = {"mem_sleep": (POWER / "mem_sleep").read_text().strip()}
    told["suspends"] = [suspended_and_awake("core"), suspended_and_awake("none")]
    CPU.write_text("0")
    time.sleep(2)
    CPU.write_text("1")
    time.sleep(3)
    told["cpus"] = Path("/sys/devices/system/cpu/online").read_text().strip()
    os.kill(recorder, signal.SIGINT)
    os.waitpid(recorder, 0)
    os.kill(target, signal.SIGKILL)
    for name, content in (
        ("suspend.ttft", path.read_bytes()),
        ("suspend.json", json.dumps(told).encode()),
        ("done", b"done"),
    ):
        print(f"\nfile {name} {base64.b64encode(content).decode()} end", flush=True)


def suspended_and_awake(level: str) -> dict[str, object]:
    told = suspend(level)
    print(json.dumps(told), file=sys.stderr, flush=True)
    time.sleep(2)
    return told


if __name__ == "__main__":
    main(Path(sys.argv[1]))
