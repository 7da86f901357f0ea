"""An experiment that is killed at any moment loses nothing that had ended, and doubles nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ttftprof.errors import OutputError, RecordingError, UsageError
from ttftprof.experiment.host import Keeper
from ttftprof.experiment.store import Slot, Store
from workloads.experiment import TESTS, Truth, truth_server

SLOTS = [Slot(i, 0, "resident", "as given", False) for i in range(1, 4)]
PLAN = {"name": "x", "runs": 3}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return truth_server(tmp_path_factory.mktemp("truth"))


def bench(folder: Path, plan: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ttftprof", "bench", str(plan), "-o", str(folder / "x.bench")]
    return subprocess.Popen(
        [*command, "--no-record", "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def kept(folder: Path) -> dict[int, str]:
    """{run: its result}; none while there is no experiment yet."""
    if not Store.exists(folder / "x.bench"):
        return {}
    with Store.read(folder / "x.bench") as store:
        found = store.kept()
    assert len({one.slot.run for one in found}) == len(found)
    return {one.slot.run: json.dumps(one.result) for one in found}


class Starter:
    """Starts benches as forks of one process, which costs a twentieth of starting Python anew."""

    _CODE = """
import os, sys
from ttftprof.cli import bench_progress, main
from ttftprof.experiment import runner, schedule, store
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        os.setsid()
        main(line.split())
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("ended", flush=True)
"""

    def __init__(self, plan: Path, folder: Path) -> None:
        self._order = f"bench {plan} -o {folder / 'x.bench'} --no-record --quiet\n"
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self) -> int:
        """The bench's pid."""
        assert self._process.stdin
        self._process.stdin.write(self._order)
        self._process.stdin.flush()
        return int(self._line())

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        assert self._line() == "ended\n"

    def _line(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline()

    def close(self) -> None:
        self._process.communicate("", timeout=10)


KILLS, BLOCKS = 20, 110


def count(folder: Path) -> int:
    """How many runs have ended."""
    if not Store.exists(folder / "x.bench"):
        return 0
    with Store.read(folder / "x.bench") as store:
        return len(store.slots()) - len(store.left())


@pytest.mark.slow
def test_killed_again_and_again_no_run_is_lost_or_doubled(truth: Truth, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    scenarios = "scenarios = ['resident', 'unknown-model']"
    experiment = f"runs = {BLOCKS}\nwarmups = 0\ngap_s = 0\n{scenarios}"
    plan.write_text(truth.plan(experiment, rest="[workload]\nprompt_tokens = 8\nmax_tokens = 2"))
    moments = random.Random(20)
    before: dict[int, str] = {}
    starter = Starter(plan, tmp_path)
    starts_within_s = 0.0  # as fast as this machine does it
    for number in range(KILLS):
        pid, began = starter.start(), time.monotonic()
        if number % 4 or not number:  # in the runs
            await_more(tmp_path, len(before) + moments.randrange(3))
            starts_within_s = starts_within_s or time.monotonic() - began
            time.sleep(moments.uniform(0, 0.03))
        else:  # while it starts
            time.sleep(moments.uniform(0, starts_within_s))
        starter.kill(pid)
        now = kept(tmp_path)
        assert before.items() <= now.items()  # what had ended is there, unchanged
        before = now
    starter.close()
    assert KILLS // 2 < len(before) < 2 * BLOCKS, "the kills did not fall into the runs"
    last = bench(tmp_path, plan)
    output, errors = last.communicate(timeout=60)
    assert last.returncode == 0, errors
    report = json.loads(output)
    assert report["runs"]["done"] == report["runs"]["scheduled"] == 2 * BLOCKS
    assert report["runs"]["interrupted"] <= KILLS
    after = kept(tmp_path)
    assert sorted(after) == list(range(1, 2 * BLOCKS + 1))
    assert before.items() <= after.items()
    assert servers_of(truth) == []


def await_more(folder: Path, than: int) -> None:
    """Until another run has ended."""
    until = time.monotonic() + 30
    while count(folder) <= than:
        assert time.monotonic() < until
        time.sleep(0.01)


def servers_of(truth: Truth) -> list[int]:
    """What is left of the server after a moment's grace."""
    for _ in range(100):
        left = [
            p.pid
            for p in psutil.process_iter(["cmdline"])
            if str(truth.config_path) in (p.info["cmdline"] or ())
        ]
        if not left:
            break
        time.sleep(0.05)
    return left


def test_ctrl_c_ends_it_with_what_there_is(truth: Truth, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(truth.plan("runs = 2000\nwarmups = 0\ngap_s = 0\nscenarios = ['resident']"))
    process = bench(tmp_path, plan)
    while len(kept(tmp_path)) < 2:
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "the same command goes on from here" in errors
    assert json.loads(output)["runs"]["done"] == len(kept(tmp_path)) >= 2
    assert servers_of(truth) == []


def test_a_signal_to_the_whole_group_leaves_no_server(truth: Truth, tmp_path: Path) -> None:
    """As `timeout` and a closed terminal send it: the keeper gets it as well."""
    plan = tmp_path / "plan.toml"
    plan.write_text(truth.plan("runs = 2000\nwarmups = 0\ngap_s = 0\nscenarios = ['resident']"))
    process = bench(tmp_path, plan)
    await_more(tmp_path, 1)
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert servers_of(truth) == []


def test_a_killed_keeper_takes_the_server_with_it(truth: Truth, tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "log")
    keeper.start(truth.command, {"PYTHONPATH": str(TESTS)})
    assert keeper.server_pid is not None
    os.kill(keeper.pid, signal.SIGKILL)
    assert servers_of(truth) == []
    keeper.close()


def test_a_run_is_kept_once(tmp_path: Path) -> None:
    with Store.create(tmp_path / "x", PLAN, "1", SLOTS) as store:
        attempt = store.begin(SLOTS[0])
        store.end(SLOTS[0], attempt, {"outcome": "ok"})
        assert [slot.run for slot in store.left()] == [2, 3]
        again = store.begin(SLOTS[0])
        with pytest.raises(OutputError):
            store.end(SLOTS[0], again, {"outcome": "ok"})
        assert store.interrupted() == 1


def test_two_cannot_write_at_once(tmp_path: Path) -> None:
    with (
        Store.create(tmp_path / "x", PLAN, "1", SLOTS),
        pytest.raises(OutputError, match="another ttftprof bench"),
    ):
        Store.resume(tmp_path / "x", PLAN, "1")


def test_another_plan_is_refused(tmp_path: Path) -> None:
    Store.create(tmp_path / "x", PLAN, "1", SLOTS).close()
    with pytest.raises(UsageError, match="another plan \\(other: runs\\)"):
        Store.resume(tmp_path / "x", {**PLAN, "runs": 4}, "2")
    Store.resume(tmp_path / "x", PLAN, "1").close()


def test_a_folder_that_is_no_experiment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no experiment"):
        Store.read(tmp_path)
    (tmp_path / "experiment.sqlite").write_bytes(b"not a database at all, but long enough" * 40)
    with pytest.raises(RecordingError):
        Store.read(tmp_path)


def told(folder: Path, plan: str) -> str:
    """What a bench that cannot run says; it ends at once and leaves nothing."""
    path = folder / "plan.toml"
    path.write_text(plan)
    process = bench(folder, path)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 3, errors
    assert "next: " in errors
    return errors


def test_a_server_that_ends_at_its_start_is_told_with_its_last_words(
    truth: Truth, tmp_path: Path
) -> None:
    plan = truth.plan("scenarios = ['resident']").replace("--config", "--konfig")
    errors = told(tmp_path, plan)
    assert "the server ended at its start: " in errors
    assert "--config" in errors  # argparse: the following arguments are required


def test_a_port_that_is_taken_is_not_measured(truth: Truth, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", truth.config.port)):
        assert "answers at" in told(tmp_path, truth.plan("scenarios = ['resident']"))


def test_an_unknown_model_is_told_before_any_run(truth: Truth, tmp_path: Path) -> None:
    plan = truth.plan("scenarios = ['resident']").replace("['a', 'b']", "['a', 'z']")
    assert "has no model 'z'" in told(tmp_path, plan)
    assert servers_of(truth) == []
