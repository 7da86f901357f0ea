"""Recording where the kernel's probes may not be used: by looks at /proc, a relay, and the output.

Held against a server that stamps its own phases, and against what the probes of another recorder
saw of the same switch.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kernel.stalls import watch_for_stalls
from kernel.support import Recording, run_to_end, start_recording
from ttftprof.analysis import analyse
from ttftprof.model import Report
from workloads.scenarios import run_scenario
from workloads.server import pick_port

pytestmark = pytest.mark.kernel

NOBODY = 65534
LOOKS = ("--loader", "proc")
# Both edges of a phase are known to a look, and the looker shares two cores with what it looks at.
LOOK_ERROR_NS = 2 * 20_000_000 + 40_000_000
PHASE_ERROR = 0.05  # of TTFT
RELAYED_NS = 5_000_000  # what the relay and the client's own stamps may add
ATTEMPTS = 3


def test_a_switch_by_looks_alone(tmp_path: Path) -> None:
    """The phases agree with the server's own stamps, and the bytes with the probes'."""
    for _ in range(ATTEMPTS):
        looked, probed, agrees = switched(tmp_path)
        if agrees:
            break
    assert agrees
    (ours,), (theirs,) = looked.requests, probed.requests
    assert (ours.model, ours.switched, ours.outcome) == ("b", True, "ok")
    assert sum(ours.phase_totals().values()) == ours.ttft_ns
    assert {phase.basis for phase in ours.phases} == {"inferred"}
    assert ours.verdict.confidence == "low"
    one, other = (max(r.files, key=lambda f: f.size_bytes) for r in (ours, theirs))
    assert (one.path, one.access, one.fstype) == (other.path, other.access, other.fstype)
    # What came between its opening and the first look at it counts as cached before.
    assert one.bytes_from_storage is not None
    # On a fast disk that may be most of it.
    unseen = min(2 * LOOK_ERROR_NS / theirs.phase_totals()["load"], 1)
    least_bytes = 0.9 * (1 - unseen) * other.size_bytes
    assert least_bytes <= one.bytes_from_storage <= other.size_bytes + 4096
    states = {s.name: s.state for s in looked.sources}
    assert (states["process"], states["marks"]) == ("degraded", "absent")


def switched(tmp_path: Path) -> tuple[Report, Report, bool]:
    """(by looks, by probes, whether the first agrees with the truth)."""
    relay = pick_port()
    started: list[Recording] = []

    def before(pid: int) -> None:
        asked = ("--pid", str(pid))
        looks = (*asked, *LOOKS, "--relay", str(relay))
        started.extend(
            start_recording(tmp_path / f"{name}.ttft", *options)
            for name, options in (("looks", looks), ("probes", asked))
        )

    def after(_pid: int) -> None:
        time.sleep(0.1)
        assert [recording.stop() for recording in started] == [0, 0]

    with watch_for_stalls() as stalls:
        run = run_scenario(
            "cold_mmap_short", tmp_path, before_switch=before, after=after, through=relay
        )
    looked, probed = (analyse(tmp_path / f"{name}.ttft") for name in ("looks", "probes"))
    truth, request = run.truth, looked.requests[0]
    stalled_ns = stalls.longest_ns(truth.request_start_ns, truth.first_token_ns)
    got, want = request.phase_totals(), truth.totals_ns
    allowed_ns = max(PHASE_ERROR * truth.ttft_ns, LOOK_ERROR_NS) + stalled_ns
    phases = all(abs(got.get(p, 0) - ns) <= allowed_ns for p, ns in want.items())
    assert request.ttft_ns is not None
    assert run.client.ttft_ns is not None
    ttft = abs(request.ttft_ns - run.client.ttft_ns) <= RELAYED_NS + stalled_ns
    return looked, probed, phases and ttft


# -- who may not ------------------------------------------------------------------------------


def record(
    *arguments: str, cwd: Path, under: Sequence[str] = (), user: int | None = None
) -> subprocess.CompletedProcess[str]:
    command = [*under, sys.executable, "-m", "ttftprof", "record", "-q", "-o", "a.ttft"]
    return run_to_end([*command, *arguments], cwd, user=user)


def open_to_all(folder: Path) -> None:
    folder.chmod(0o777)
    for parent in folder.parents:
        if str(parent).startswith("/tmp/pytest"):
            parent.chmod(0o755)


COMMAND = """
import sys, time
print("out", flush=True)
print("main: model loaded", file=sys.stderr)
time.sleep(0.3)
sys.exit(7)
"""


@pytest.mark.parametrize(
    ("under", "user", "reason", "remedy"),
    [
        ((), NOBODY, "need root", "sudo ttftprof record"),
        (("setpriv", "--bounding-set=-bpf,-sys_admin"), None, "CAP_BPF", "--cap-add=BPF"),
        (("unshare", "--pid", "--fork", "--mount-proc"), None, "process namespace", "--pid=host"),
    ],
    ids=["no root", "a container's root", "a namespace"],
)
def test_it_goes_on_with_less_and_says_so(
    under: tuple[str, ...], user: int | None, reason: str, remedy: str, tmp_path: Path
) -> None:
    open_to_all(tmp_path)
    done = record("--", sys.executable, "-c", COMMAND, cwd=tmp_path, under=under, user=user)
    assert done.returncode == 7  # the command's own
    assert reason in done.stderr
    assert remedy in done.stderr
    assert "shows less" in done.stderr
    assert done.stdout == "out\n"  # what the command writes goes where it would have gone
    assert "main: model loaded" in done.stderr
    report = analyse(tmp_path / "a.ttft")
    assert report.complete
    assert {s.name: s.state for s in report.sources}["logs"] == "degraded"
    with (tmp_path / "a.ttft").open("rb") as file:
        assert b"model loaded" not in file.read()  # a line is a fact, its words are not kept


def test_another_ones_server_is_followed_but_its_files_are_not(tmp_path: Path) -> None:
    open_to_all(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            asked = ("--pid", str(other.pid), "--duration", "0.5")
            done = record(*asked, cwd=tmp_path, user=NOBODY)
        finally:
            other.kill()
    assert done.returncode == 0, done.stderr
    assert re.search(r"the duration is over; 0 request", done.stderr)


def test_a_relay_beside_probes_is_refused(tmp_path: Path) -> None:
    done = record("--relay", str(pick_port()), "--pid", str(os.getpid()), cwd=tmp_path)
    assert done.returncode == 2
    assert "--loader proc" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_relay_on_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = record(*LOOKS, "--relay", port, "--pid", str(os.getpid()), cwd=tmp_path)
    assert done.returncode == 2
    assert "cannot be listened on" in done.stderr
