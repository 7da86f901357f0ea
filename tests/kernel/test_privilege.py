"""After the probes are attached the recorder is root no more."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from kernel.support import start_recording
from workloads.cache import make_model
from workloads.counted import started

pytestmark = pytest.mark.kernel

NOBODY = 65534
SCRIPT = """
import json, os, subprocess, sys
from pathlib import Path
from ttftprof.kernel.privilege import drop, held
drop(Path(sys.argv[1]))
child = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
caps = {line.split()[0]: line.split()[1] for line in child.splitlines() if line.startswith("Cap")}
try:
    os.seteuid(0)
    back = True
except PermissionError:
    back = False
print(json.dumps({
    "held": sorted(held()), "uids": os.getresuid(), "gids": os.getresgid(),
    "groups": os.getgroups(), "child": caps, "back": back,
    "fdinfo": Path("/proc/self/fdinfo/0").read_text() != "",
    "maps": Path(f"/proc/{os.getppid()}/maps").read_text() != "",
}))
"""
CAP_SYS_ADMIN = 1 << 21
LEFT_BITS = 1 << 39 | 1 << 2 | 1 << 38 | 1 << 19
LEFT = ["CAP_BPF", "CAP_DAC_READ_SEARCH", "CAP_PERFMON", "CAP_SYS_PTRACE"]
FOR_CHILDREN = 1 << 2 | 1 << 19


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "idle.weights", 4 << 20)


def dropped(folder: Path, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_under_sudo_it_goes_on_as_the_caller(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    seen = dropped(tmp_path, SUDO_UID=str(NOBODY), SUDO_GID=str(NOBODY))
    assert seen["held"] == LEFT
    assert seen["uids"] == seen["gids"] == [NOBODY] * 3
    assert seen["groups"] == [NOBODY]
    assert not seen["back"]
    assert int(seen["child"]["CapEff:"], 16) == FOR_CHILDREN
    assert seen["fdinfo"]
    assert seen["maps"]


def test_where_the_caller_may_not_write_root_stays_without_its_powers(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    seen = dropped(tmp_path, SUDO_UID=str(NOBODY), SUDO_GID=str(NOBODY))
    assert seen["held"] == LEFT
    assert seen["uids"] == [0] * 3
    bounding = int(seen["child"]["CapBnd:"], 16)
    assert bounding & CAP_SYS_ADMIN == 0
    assert int(seen["child"]["CapEff:"], 16) == bounding


def test_under_sudo_it_still_ends_with_the_program_that_started_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    waiting = (
        "import signal, sys, time; from pathlib import Path;"
        "from ttftprof.kernel.privilege import drop; from ttftprof.parent import end_with_parent;"
        "end_with_parent(signal.SIGTERM); drop(Path(sys.argv[1])); print('left', flush=True);"
        "time.sleep(60)"
    )
    parent = (
        "import subprocess, sys;"
        f"child = subprocess.Popen([sys.executable, '-c', {waiting!r}, sys.argv[1]],"
        " stdout=subprocess.PIPE, stderr=subprocess.DEVNULL);"
        "print(child.pid, child.stdout.readline().decode())"
    )
    done = subprocess.run(
        [sys.executable, "-c", parent, tmp_path],
        env={**os.environ, "SUDO_UID": str(NOBODY), "SUDO_GID": str(NOBODY)},
        capture_output=True,
        text=True,
        check=True,
    )
    pid, word = done.stdout.split()
    assert word == "left"
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(pid)).wait(10)


@pytest.mark.parametrize("uid", ["", "0", "-1", "root"])
def test_without_a_caller_root_keeps_its_name(tmp_path: Path, uid: str) -> None:
    seen = dropped(tmp_path, SUDO_UID=uid, SUDO_GID="0")
    assert seen["held"] == LEFT
    assert seen["uids"] == [0] * 3


def statuses(pid: int) -> list[dict[str, str]]:
    """/proc/PID/task/*/status of every thread."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        found.append({name: value.strip() for name, _, value in (x.partition(":") for x in lines)})
    return found


def statuses_without_root(pid: int) -> list[dict[str, str]]:
    """Those of a recorder that is just ready: right after, it gives up one thing after another."""
    end = time.monotonic() + 10
    while (found := statuses(pid))[0]["NoNewPrivs"] == "0" and time.monotonic() < end:
        time.sleep(0.01)
    return found


def test_a_recorder_is_root_no_more(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its helpers have CAP_SYS_ADMIN and nothing else, and end with it."""
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents:
        if folder.stat().st_uid == 0 and folder.name.startswith("pytest"):
            folder.chmod(0o755)
    monkeypatch.setenv("SUDO_UID", str(NOBODY))
    monkeypatch.setenv("SUDO_GID", str(NOBODY))
    with started("idle", model) as program:
        seen = start_recording(tmp_path / "a.ttft", "--pid", str(program.pid))
        threads = statuses_without_root(seen.process.pid)
        helpers = psutil.Process(seen.process.pid).children()
        helped = [status for helper in helpers for status in statuses(helper.pid)]
        time.sleep(2.5)
        assert seen.stop() == 0, seen.output
    assert helpers
    assert not any(helper.is_running() for helper in helpers)
    assert len(threads) == 1
    assert {thread["Uid"].split()[1] for thread in threads} == {str(NOBODY)}
    assert {int(thread["CapEff"], 16) for thread in threads} == {LEFT_BITS}
    assert {int(status["CapEff"], 16) for status in helped} == {CAP_SYS_ADMIN}
    assert {int(status["CapBnd"], 16) for status in helped} == {CAP_SYS_ADMIN}
    recording = (tmp_path / "a.ttft").stat()
    assert (recording.st_uid, stat.S_IMODE(recording.st_mode)) == (NOBODY, 0o600)
    assert [p.name for p in tmp_path.glob("a.ttft*")] == ["a.ttft"]
    assert any(probe.runs for probe in seen.report().overhead.probes)
