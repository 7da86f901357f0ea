"""How soon the recorder is armed, how little it takes, and what it says when it lost something."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from kernel.support import Recording, recorded_script, recording, start_recording
from ttftprof.events import LOST, Kind
from ttftprof.recorder import TEXT_GAP_NS
from workloads.cache import make_model
from workloads.counted import started
from workloads.pace import slowness

pytestmark = pytest.mark.kernel

ARMED_NS = 300_000_000
RESIDENT_BYTES = 100_000_000
IDLE_SHARE_OF_A_CORE = 0.01
IDLE_S = 5.0
ATTEMPTS = 4  # loading is CPU work of a tenth of a second on a machine that others use too


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "cost.weights", 8 << 20)


def arming_ns(seen: Recording) -> int:
    """How long arming took; on a core that others use too, the time it had of it."""
    with seen.reader() as reader:
        meta = reader.meta
    return min(int(meta["armed_ns"]) - int(meta["start_ns"]), int(meta["arm_cpu_ns"]))


def test_armed_in_under_300_ms(model: Path, tmp_path: Path) -> None:
    times = []
    with started("idle", model) as program:
        for attempt in range(ATTEMPTS):
            with recording(tmp_path / f"{attempt}.ttft", "--pid", str(program.pid)) as seen:
                pass
            times.append(arming_ns(seen))
    # Where other programs slow the machine, it is held against what they slow as well.
    assert min(times) < ARMED_NS or min(times) < eight_hooks_of_bpftrace_ns(), times


_EIGHT_HOOKS = " ".join(
    f"tracepoint:{name} {{ @ = count(); }}"
    for name in (
        "sched:sched_switch",
        "sched:sched_process_fork",
        "sched:sched_process_exec",
        "sched:sched_process_exit",
        "block:block_rq_issue",
        "block:block_rq_complete",
        "filemap:mm_filemap_add_to_page_cache",
    )
)


def eight_hooks_of_bpftrace_ns() -> int:
    """What bpftrace takes now, at best, to arm eight of some forty hooks, and to end."""
    took = []
    for _ in range(2):
        began_ns = time.monotonic_ns()
        script = _EIGHT_HOOKS + " tracepoint:raw_syscalls:sys_exit { exit(); }"
        subprocess.run(["bpftrace", "-e", script], capture_output=True, check=True)
        took.append(time.monotonic_ns() - began_ns)
    return min(took)


def test_idle_costs_under_one_percent_of_a_core(model: Path, tmp_path: Path) -> None:
    shares = []
    with started("idle", model) as program:
        for attempt in range(ATTEMPTS):
            seen = start_recording(tmp_path / f"{attempt}.ttft", "--pid", str(program.pid))
            recorder = psutil.Process(seen.process.pid)
            time.sleep(0.5)
            before, began = cpu_s(recorder), time.monotonic()
            time.sleep(IDLE_S)
            share = (cpu_s(recorder) - before) / (time.monotonic() - began)
            shares.append(share / slowness())
            resident = recorder.memory_info().rss
            assert seen.stop() == 0
            assert resident < RESIDENT_BYTES
            if shares[-1] < IDLE_SHARE_OF_A_CORE:
                break
    assert min(shares) < IDLE_SHARE_OF_A_CORE, shares


_STEADY = """
import os, sys, time
sys.stdin.readline()
until = time.monotonic() + 1.5
while time.monotonic() < until:
    os.close(os.open(sys.argv[1], os.O_RDONLY))
    time.sleep(0.0003)
print("done", flush=True)
sys.stdin.readline()
"""


def test_a_busy_target_is_looked_at_no_more_often(model: Path, tmp_path: Path) -> None:
    """Its rings are never empty; only one that fills up, and the first text, end a sleep early."""
    seen = recorded_script(_STEADY, tmp_path / "steady.ttft", model)
    with seen.reader() as reader:
        looks = np.unique(reader.stream("threads")["ns"].astype(np.int64))
        opens = np.count_nonzero(reader.stream("events")["kind"] == Kind.OPEN)
    assert opens > 300
    assert np.median(np.diff(looks)) > TEXT_GAP_NS / 2


def cpu_s(process: psutil.Process) -> float:
    """Of all its threads, as the scheduler counts it: to the nanosecond."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


_FAULTS = """
import mmap, sys, time
file = open(sys.argv[1], "rb")
sys.stdin.readline()
until = time.monotonic() + 9.5
while time.monotonic() < until:
    with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        for at in range(0, len(mapped), 4096):
            mapped[at]
print("done", flush=True)
sys.stdin.readline()
"""


def test_over_its_budget_a_recording_drops_what_it_can_and_says_so_first(
    model: Path, tmp_path: Path
) -> None:
    budget = ("--overhead-budget", "0.001")
    seen = recorded_script(_FAULTS, tmp_path / "over.ttft", model, options=budget)
    report = seen.report()
    (first, *_) = report.overhead.reliefs
    assert first.share > first.budget == pytest.approx(1e-5)
    assert "--overhead-budget off" in seen.output
    shown = subprocess.run(
        [sys.executable, "-m", "ttftprof", "report", str(seen.path)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert shown.startswith("! recording took ")
    assert first.what in " ".join(shown.split())


_STORM = """
import os, sys, threading
sys.stdin.readline()
r, w = os.pipe()
threads = [threading.Thread(target=lambda: [os.read(r, 1) for _ in range(20000)]) for _ in range(2)]
for t in threads: t.start()
for _ in range(40000): os.write(w, b"x")
for t in threads: t.join()
path = sys.argv[1]
for _ in range(3000):
    os.close(os.open(path, os.O_RDONLY))
"""


def test_a_ring_too_small_says_what_it_lost(model: Path, tmp_path: Path) -> None:
    storm = subprocess.Popen(
        [sys.executable, "-c", _STORM, str(model)], stdin=subprocess.PIPE, text=True
    )
    try:
        arguments = ["--pid", str(storm.pid), "--ring-kb", "4"]
        with recording(tmp_path / "small.ttft", *arguments) as seen:
            seen.process.send_signal(signal.SIGSTOP)  # so that nobody empties it in time
            storm.communicate("go\n", timeout=60)
            seen.process.send_signal(signal.SIGCONT)
    finally:
        storm.kill()
        storm.wait()
    with seen.reader() as reader:
        lost = reader.lost()
    assert lost[LOST[0]] > 0
    assert seen.report().lost[LOST[0]] == lost[LOST[0]]
    shown = subprocess.run(
        [sys.executable, "-m", "ttftprof", "report", str(seen.path)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"{lost[LOST[0]]:,}" in shown.splitlines()[0]


def test_every_recording_holds_its_own_cost(model: Path, tmp_path: Path) -> None:
    with (
        started("reads", model) as program,
        recording(tmp_path / "own.ttft", "--pid", str(program.pid)) as seen,
    ):
        program.go()
        time.sleep(0.3)
    overhead = seen.report().overhead
    assert overhead.cpu_ns
    assert overhead.max_rss_bytes
    assert overhead.max_rss_bytes < RESIDENT_BYTES
    assert {p.name for p in overhead.probes} >= {"offcpu__switch", "syscalls__exit"}
    assert json.dumps([p.mean_ns for p in overhead.probes])


def test_doctor_says_what_each_probe_costs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ttftprof", "doctor", "--cost", "--format", "json"],
        capture_output=True,
        text=True,
        check=True,
    )
    costs = {cost["name"]: cost for cost in json.loads(done.stdout)}
    for name in ("syscalls__enter", "syscalls__exit", "offcpu__switch", "pagecache__add"):
        assert costs[name]["target_runs"] > 100
        assert costs[name]["stranger_runs"] > 100
    # 20 rounds: a child each; every echo wakes a reader twice. Strangers come on top.
    assert costs["process__fork"]["target_runs"] >= 20
    assert costs["sockets__ready"]["target_runs"] >= 20 * 200 * 2
    # The filter comes first: a switch of a member's costs more than one of a stranger's.
    assert costs["offcpu__switch"]["target_ns"] > costs["offcpu__switch"]["stranger_ns"]
