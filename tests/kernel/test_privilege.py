"""After the probes are attached the recorder is root no more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.kernel

NOBODY = 65534
SCRIPT = """
import json, os, subprocess, sys
from pathlib import Path
from ttftprof.privilege import drop, held
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
LEFT = ["CAP_BPF", "CAP_DAC_READ_SEARCH", "CAP_PERFMON", "CAP_SYS_PTRACE"]
FOR_CHILDREN = 1 << 2 | 1 << 19


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
    assert bounding & 1 << 21 == 0
    assert int(seen["child"]["CapEff:"], 16) == bounding


@pytest.mark.parametrize("uid", ["", "0", "-1", "root"])
def test_without_a_caller_root_keeps_its_name(tmp_path: Path, uid: str) -> None:
    seen = dropped(tmp_path, SUDO_UID=uid, SUDO_GID="0")
    assert seen["held"] == LEFT
    assert seen["uids"] == [0] * 3
