"""Bad input and faults of `record` on the real kernel: a clear error, its code, nothing lost."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import unsupported
from kernel.support import Recording, recording, run_to_end, start_recording
from ttftprof.cli.record import Gate
from ttftprof.events import Kind, Records
from ttftprof.recording import Reader
from workloads.cache import make_model
from workloads.counted import FORKS, READS, STORM_FORKS, started

pytestmark = pytest.mark.kernel

NOBODY = 65534
MIB = 1 << 20
TIMEOUT_S = 60  # what a busy machine may take; only what hangs takes longer
MAX_RSS_BYTES = 100 * MIB
SMALL_RING_KB = 4

Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Outcome:
    """How a `record` ended that was not to be stopped by the test."""

    code: int
    said: str

    @property
    def has_next_step(self) -> bool:
        return "\n  next: " in self.said


def record(*arguments: str, cwd: Path, user: int | None = None, env: Any = None) -> Outcome:
    """Runs `ttftprof record` in `cwd` to its end."""
    command = [sys.executable, "-m", "ttftprof", "record", *arguments]
    done = run_to_end(command, cwd, user=user, env=env)
    return Outcome(done.returncode, done.stderr)


@contextmanager
def running(*command: str) -> Iterator[Process]:
    """In a session of its own; it and all it started are gone when the block ends."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def sleeper() -> Iterator[Process]:
    with running("sleep", "1000") as process:
        yield process


@pytest.fixture
def busy() -> Iterator[Process]:
    """Forks, opens and waits without end."""
    with running("sh", "-c", "while :; do cat /bin/sh > /dev/null; done") as process:
        yield process


def events(path: Path) -> Records:
    with Reader(path) as reader:
        return reader.stream("events")


def of_kind(records: Records, kind: Kind) -> Records:
    found: Records = records[records["kind"] == kind]
    return found


def ending(path: Path) -> tuple[bool, str | None]:
    with Reader(path) as reader:
        return reader.complete, reader.meta.get("ended_because")


# -- who may, and whom ------------------------------------------------------------------------


PROBES = ("--loader", "libbpf")  # without, it goes on with less: test_without_probes.py


def test_without_root_it_names_sudo(sleeper: Process) -> None:
    asked = ("--pid", str(sleeper.pid), "-o", "a.ttft", *PROBES)
    outcome = record(*asked, cwd=Path("/"), user=NOBODY)
    assert outcome.code == 4
    assert "need root" in outcome.said
    assert "sudo ttftprof record" in outcome.said


@pytest.mark.parametrize(
    ("dropped", "named"),
    [
        ("-bpf,-perfmon,-sys_admin", {"CAP_BPF", "CAP_PERFMON"}),
        ("-perfmon,-sys_admin", {"CAP_PERFMON"}),
        ("-sys_ptrace", {"CAP_SYS_PTRACE"}),
        ("-sys_admin", set()),
    ],
)
def test_a_root_without_a_capability_is_told_which(
    tmp_path: Path, dropped: str, named: set[str]
) -> None:
    command = ["setpriv", f"--bounding-set={dropped}", sys.executable, "-m", "ttftprof", "record"]
    done = subprocess.run(
        [*command, *PROBES, "-o", "a.ttft", "-q", "--", "true"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert "Traceback" not in done.stderr
    if not named:  # what the two narrower ones give is enough
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 4
    assert set(re.findall(r"CAP_\w+", done.stderr)) == named
    for name in named:
        assert f"--cap-add={name.removeprefix('CAP_')}" in done.stderr
    assert not list(tmp_path.iterdir())


_IN_A_PID_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc")


def test_in_a_process_namespace_of_its_own_it_refuses(tmp_path: Path) -> None:
    done = subprocess.run(
        [*_IN_A_PID_NAMESPACE, sys.executable, "-m", "ttftprof", "record", *PROBES, "--", "true"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 4
    assert "--pid=host" in done.stderr
    assert not list(tmp_path.iterdir())


def test_no_such_process(tmp_path: Path) -> None:
    with running("true") as gone:
        gone.wait()
        outcome = record("--pid", str(gone.pid), cwd=tmp_path)
    assert outcome.code == 3
    assert f"there is no process {gone.pid}" in outcome.said
    assert outcome.has_next_step
    assert not list(tmp_path.iterdir())


def test_nobody_on_the_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, so that nobody else listens there; not listening
        port = taken.getsockname()[1]
        outcome = record("--port", str(port), cwd=tmp_path)
    assert outcome.code == 3
    assert f"nothing listens on TCP port {port}" in outcome.said
    assert "ss -ltnp" in outcome.said


@pytest.mark.parametrize("option", ["--name", "--unit", "--container", "--cgroup"])
def test_nobody_of_that_name(tmp_path: Path, option: str) -> None:
    outcome = record(option, "no-such-thing-here", cwd=tmp_path)
    assert outcome.code == 3
    assert "no-such-thing-here" in outcome.said
    assert outcome.has_next_step


def copy_of_sleep(path: Path) -> str:
    return str(shutil.copy("/bin/sleep", path))


def test_two_servers_of_one_name_are_listed_and_none_is_taken(tmp_path: Path) -> None:
    program = copy_of_sleep(tmp_path / "ttft-twin")
    with running(program, "1000") as one, running(program, "1000") as two:
        outcome = record("--name", "ttft-twin", cwd=tmp_path)
    assert outcome.code == 3
    assert "2 servers match --name ttft-twin" in outcome.said
    assert f"pid {one.pid} " in outcome.said
    assert f"pid {two.pid} " in outcome.said
    assert "--pid" in outcome.said


def test_two_inference_servers_are_listed_where_no_target_is_given(tmp_path: Path) -> None:
    program = copy_of_sleep(tmp_path / "llama-server")
    with running(program, "1000") as one, running(program, "1000") as two:
        outcome = record(cwd=tmp_path)
    assert outcome.code == 3
    assert f"pid {one.pid} " in outcome.said
    assert f"pid {two.pid} " in outcome.said


def test_a_name_of_its_own_is_not_itself(tmp_path: Path) -> None:
    """The recorder runs under the name of its interpreter too."""
    program = copy_of_sleep(tmp_path / Path(sys.executable).name)
    with running(program, "1000"):
        outcome = record("--name", Path(program).name, "--duration", "0", "-q", cwd=tmp_path)
    assert "ttftprof record" not in outcome.said.replace("ttftprof record, without", "")


def test_the_id_of_a_thread_means_its_process(tmp_path: Path) -> None:
    script = (
        "import threading, time; t = threading.Thread(target=time.sleep, args=(1000,)); t.start();"
        "print(t.native_id, flush=True); t.join()"
    )
    with running(sys.executable, "-c", script) as process:
        assert process.stdout is not None
        tid = int(process.stdout.readline())
        assert tid != process.pid
        record("--pid", str(tid), "--duration", "0.2", "-o", "a.ttft", cwd=tmp_path)
    with Reader(tmp_path / "a.ttft") as reader:
        assert reader.meta["target"]["roots"] == [process.pid]
        assert {int(t) for t in reader.stream("threads")["tid"]} >= {tid, process.pid}


# -- options that make no sense ---------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("--pid", "1", "--port", "80"),
        ("--pid", "1", "--", "true"),
        ("--duration", "nan", "--", "true"),
        ("--duration", "-1", "--", "true"),
        ("--duration", "1e300", "--", "true"),
        ("--min-file-mb", "inf", "--", "true"),
        ("--min-file-mb", "-1", "--", "true"),
        ("--ring-kb", "3", "--", "true"),
        ("--ring-kb", "-4", "--", "true"),
        ("--ring-kb", str(1 << 40), "--", "true"),
        ("--first-tokens", "0", "--", "true"),
        ("--pid", "one"),
    ],
    ids=" ".join,
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    outcome = record(*arguments, cwd=tmp_path)
    assert outcome.code == 2
    assert not list(tmp_path.iterdir())


# -- the output -------------------------------------------------------------------------------


def test_an_existing_output_is_kept_unless_forced(tmp_path: Path, sleeper: Process) -> None:
    path = tmp_path / "a.ttft"
    path.write_text("precious")
    arguments = ("--pid", str(sleeper.pid), "--duration", "0.1", "-o", "a.ttft")
    outcome = record(*arguments, cwd=tmp_path)
    assert outcome.code == 7
    assert "--force" in outcome.said
    outcome = record(*arguments, "--force", cwd=tmp_path)
    assert outcome.code == 7
    assert "no recording of ttftprof" in outcome.said
    assert outcome.has_next_step
    assert path.read_text() == "precious"
    path.unlink()
    for more in ((), ("--force",)):
        assert record(*arguments, *more, cwd=tmp_path).code == 0
        assert ending(path) == (True, "the duration is over")


@pytest.mark.parametrize("arguments", [("-o", "no/a.ttft"), ("--ready-file", "no/ready")])
def test_an_output_without_a_folder(
    tmp_path: Path, sleeper: Process, arguments: tuple[str, str]
) -> None:
    outcome = record("--pid", str(sleeper.pid), "--duration", "1", *arguments, cwd=tmp_path)
    assert outcome.code == 7
    assert "No such file or directory" in outcome.said
    assert outcome.has_next_step
    assert not list(tmp_path.iterdir())


@contextmanager
def small_disk(point: Path, size: str) -> Iterator[Path]:
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


def test_a_full_disk_ends_the_recording_and_keeps_it(tmp_path: Path, busy: Process) -> None:
    with small_disk(tmp_path / "disk", "512k") as disk:
        outcome = record("--pid", str(busy.pid), "-o", "a.ttft", "--duration", "20", cwd=disk)
        assert outcome.code == 7
        assert "is full" in outcome.said
        assert "what was recorded is in the file" in outcome.said
        assert ending(disk / "a.ttft") == (False, None)
        assert len(events(disk / "a.ttft"))
    assert busy.poll() is None


@pytest.mark.parametrize("size_kb", [4, 8, 20, 44, 64, 96])
def test_a_disk_full_before_it_is_armed_leaves_nothing(
    tmp_path: Path, sleeper: Process, size_kb: int
) -> None:
    """Or just enough for a recording: then it can be read."""
    with small_disk(tmp_path / "disk", f"{size_kb}k") as disk:
        arguments = ("--pid", str(sleeper.pid), "-o", "a.ttft", "--duration", "0.1")
        outcome = record(*arguments, cwd=disk)
        assert outcome.code == 7
        assert "is full" in outcome.said
        assert "nothing was recorded; choose an -o FILE on another disk" in outcome.said
        assert "recording --pid" not in outcome.said
        assert not list(disk.iterdir())


# -- ways to end ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_recording_complete(
    tmp_path: Path, sleeper: Process, number: signal.Signals
) -> None:
    seen = start_recording(tmp_path / "a.ttft", "--pid", str(sleeper.pid))
    assert seen.stop(number) == 0
    assert ending(seen.path) == (True, "interrupted")
    assert "Traceback" not in seen.output
    assert sleeper.poll() is None


def test_a_second_ctrl_c_does_no_harm(tmp_path: Path, busy: Process) -> None:
    seen = start_recording(tmp_path / "a.ttft", "--pid", str(busy.pid))
    for _ in range(20):
        seen.process.send_signal(signal.SIGINT)
        time.sleep(0.002)
        if seen.process.poll() is not None:
            break
    assert seen.stop() == 0  # it fails where that takes too long
    assert ending(seen.path) == (True, "interrupted")
    assert "Traceback" not in seen.output


def test_it_ends_with_its_target_and_has_all_of_it(tmp_path: Path) -> None:
    with running("sh", "-c", "read go; kill -TERM $$") as target:
        seen = start_recording(tmp_path / "a.ttft", "--pid", str(target.pid))
        assert target.stdin is not None
        target.stdin.write(b"go\n")
        target.stdin.flush()
        assert seen.process.wait(TIMEOUT_S) == 0
        seen.stop()
    assert ending(seen.path) == (True, "the target exited")
    exits = of_kind(events(seen.path), Kind.PROCESS_EXIT)
    own = exits[exits["tgid"] == target.pid]
    assert [int(status) for status in own["a"]] == [signal.SIGTERM]


def test_a_target_that_ends_before_it_is_seen_is_not_waited_for(tmp_path: Path) -> None:
    """As a shell that is told to end just when the recorder looks for it."""
    with running("sh", "-c", "sleep 0.2") as target:
        outcome = record("--pid", str(target.pid), "-o", "a.ttft", cwd=tmp_path)
    assert (outcome.code, ending(tmp_path / "a.ttft")) == (0, (True, "the target exited"))


def test_the_duration_counts(tmp_path: Path, sleeper: Process) -> None:
    arguments = ("--pid", str(sleeper.pid), "--duration", "0.7", "-o", "a.ttft")
    assert record(*arguments, cwd=tmp_path).code == 0
    with Reader(tmp_path / "a.ttft") as reader:
        length_s = (reader.meta["end_ns"] - reader.meta["armed_ns"]) / 1e9
        assert reader.complete
    assert 0.7 <= length_s < 5


def test_kill_9_leaves_a_recording_and_no_probe(tmp_path: Path, busy: Process) -> None:
    seen = start_recording(tmp_path / "a.ttft", "--pid", str(busy.pid))
    await_written(
        seen.path, lambda reader: bool((reader.stream("events")["kind"] == Kind.FORK).any())
    )
    programs = own_programs(seen.process.pid)
    assert len(programs) > 15
    assert all(map(program_exists, programs))
    seen.stop(signal.SIGKILL)
    assert ending(seen.path) == (False, None)
    assert len(of_kind(events(seen.path), Kind.FORK))
    with Reader(seen.path) as reader:
        assert reader.meta["armed_ns"]
        assert reader.facts("process")
        assert {s.name for s in reader.sources()} >= {"process", "offcpu", "gpu"}
    until = time.monotonic() + TIMEOUT_S
    while any(map(program_exists, programs)):
        assert time.monotonic() < until, "probes outlive the recorder"
        time.sleep(0.05)
    assert busy.poll() is None


def test_kill_9_leaves_word_of_what_was_lost(tmp_path: Path, busy: Process) -> None:
    arguments = ("--pid", str(busy.pid), "--ring-kb", str(SMALL_RING_KB))
    seen = start_recording(tmp_path / "a.ttft", *arguments)
    seen.process.send_signal(signal.SIGSTOP)
    time.sleep(0.5)  # the ring is full by then
    seen.process.send_signal(signal.SIGCONT)
    await_written(seen.path, lambda reader: bool(reader.lost()))  # states are, every second
    seen.stop(signal.SIGKILL)
    assert ending(seen.path) == (False, None)
    with Reader(seen.path) as reader:
        assert reader.lost()["events ring full"] > 0


def await_written(path: Path, holds: Callable[[Reader], bool]) -> None:
    """Until a recording that goes on has something in its file."""
    until = time.monotonic() + TIMEOUT_S
    while True:
        with Reader(path) as reader:
            if holds(reader):
                return
        assert time.monotonic() < until
        time.sleep(0.1)


def own_programs(pid: int) -> set[int]:
    """Ids of the BPF programs that a process holds."""
    ids = set()
    for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            lines = entry.read_text().splitlines()
            ids |= {int(line.split()[1]) for line in lines if line.startswith("prog_id:")}
    return ids


def program_exists(identity: int) -> bool:
    fd = ctypes.CDLL("libbpf.so.1").bpf_prog_get_fd_by_id(identity)
    if fd >= 0:
        os.close(fd)
    return bool(fd >= 0)


# -- where it is started from -------------------------------------------------------------------


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_failure(tmp_path: Path, sleeper: Process, closed: str) -> None:
    command = f"{sys.executable} -m ttftprof"
    line = f"{command} record --pid {sleeper.pid} --duration 0.1 -o a.ttft {closed}"
    done = subprocess.run(
        [
            "sh",
            "-c",
            f"{line} && {command} report a.ttft {closed} && {command} dump a.ttft {closed}",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert ending(tmp_path / "a.ttft") == (True, "the duration is over")
    assert [p.name for p in tmp_path.iterdir()] == ["a.ttft"]


def test_too_few_descriptors_are_named(tmp_path: Path, sleeper: Process) -> None:
    line = f"ulimit -n 20; exec {sys.executable} -m ttftprof record --pid {sleeper.pid} -o a.ttft"
    done = subprocess.run(
        ["sh", "-c", line],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "too many open files: the limit of this process is 20" in done.stderr
    assert "next: ulimit -n" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("uid", "runs_as"), [("abc", 0), (str(NOBODY), NOBODY)])
def test_a_command_runs_as_the_caller_if_there_is_one(
    tmp_path: Path, uid: str, runs_as: int
) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("SUDO_")} | {"SUDO_UID": uid}
    tmp_path.chmod(0o777)
    seen = record("-o", "a.ttft", "--", "sh", "-c", "exit $(id -u)", cwd=tmp_path, env=env)
    assert seen.code == runs_as % 256, seen.said


def test_a_stale_ready_file_is_taken_away_first(tmp_path: Path, sleeper: Process) -> None:
    ready = tmp_path / "ready"
    ready.touch()
    options = ("--pid", str(sleeper.pid), "--ready-file", "ready")
    assert record(*options, "-o", "no/a.ttft", cwd=tmp_path).code == 7
    assert not ready.exists()
    assert record(*options, "-o", "a.ttft", "--duration", "0.1", cwd=tmp_path).code == 0
    assert ready.exists()


@pytest.mark.parametrize("what", ["link", "dangling", "folder", "another's"])
def test_a_ready_file_that_is_no_file_of_yours_is_left_alone(
    tmp_path: Path, sleeper: Process, what: str
) -> None:
    ready, other = tmp_path / "ready", tmp_path / "other"
    if what == "folder":
        ready.mkdir()
    elif what == "another's":
        ready.touch()
        os.chown(ready, NOBODY, NOBODY)
    else:
        ready.symlink_to(other)
        if what == "link":
            other.write_text("precious")
    seen = record("--pid", str(sleeper.pid), "--ready-file", "ready", "-o", "a.ttft", cwd=tmp_path)
    assert seen.code == 7
    assert "no file of yours" in seen.said
    assert seen.has_next_step
    assert other.exists() == (what == "link")
    assert not (tmp_path / "a.ttft").exists()


def test_under_sudo_a_ready_file_is_made_only_where_the_caller_may(
    tmp_path: Path, sleeper: Process
) -> None:
    tmp_path.chmod(0o755)
    env = os.environ | {"SUDO_UID": str(NOBODY), "SUDO_GID": str(NOBODY)}
    options = ("--pid", str(sleeper.pid), "--ready-file", "ready", "-o", "a.ttft")
    seen = record(*options, cwd=tmp_path, env=env)
    assert seen.code == 7
    assert "ready cannot be created: Permission denied" in seen.said
    assert not list(tmp_path.iterdir())


# -- a command --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 128 + 9)]
)
def test_a_commands_exit_code_is_passed_on(tmp_path: Path, script: str, code: int) -> None:
    assert record("-o", "a.ttft", "--", "sh", "-c", script, cwd=tmp_path).code == code
    assert ending(tmp_path / "a.ttft") == (True, "the command ended")


def test_an_exit_code_is_not_lost_to_a_long_farewell(tmp_path: Path) -> None:
    """2 GiB take the kernel a while to take back, after the exit was seen."""
    script = (
        "import mmap, os; heap = mmap.mmap(-1, 2 << 30, mmap.MAP_PRIVATE | 0x8000); os._exit(3)"
    )
    assert record("-o", "a.ttft", "--", sys.executable, "-c", script, cwd=tmp_path).code == 3
    assert ending(tmp_path / "a.ttft") == (True, "the command ended")


def test_what_a_command_leaves_running_is_recorded_on(tmp_path: Path) -> None:
    """A server that puts itself into the background; what it does then is there."""
    script = "(sleep 5; exec cat /bin/true) > /dev/null & exit 7"
    seen = record("-o", "a.ttft", "--", "sh", "-c", script, cwd=tmp_path)
    assert seen.code == 7
    assert re.search(r"what it started runs on \(pid \d+", seen.said)
    assert "left alone" not in seen.said
    assert ending(tmp_path / "a.ttft") == (True, "the command ended")
    with Reader(tmp_path / "a.ttft") as reader:
        executed = [fact["path"] for _, fact in reader.facts("exec")]
    assert any(path.endswith("/cat") for path in executed)


def test_ctrl_c_leaves_alone_what_a_command_put_into_the_background(tmp_path: Path) -> None:
    path = tmp_path / "a.ttft"
    script = "sleep 1000 > /dev/null 2>&1 & echo $! > pid"
    seen = start_recording(path, "--", "sh", "-c", f"cd {tmp_path}; {script}")
    try:
        until = time.monotonic() + TIMEOUT_S
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(0.3)
        assert seen.process.poll() is None
        assert seen.stop() == 0
        server = int((tmp_path / "pid").read_text())
        assert f"left alone: pid {server}" in seen.output
        os.kill(server, 0)
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert ending(path) == (True, "interrupted")


# Its parent is told of a traced process's end only once the tracer has let go of it.
_HELD_BY_A_TRACER = """
import ctypes, os, time
libc, parent = ctypes.CDLL(None), os.getpid()
ready, told = os.pipe()
if os.fork() == 0:
    libc.ptrace(0x4206, parent, None, None)  # PTRACE_SEIZE
    os.write(told, b"x")
    time.sleep(1000)
os.read(ready, 1)
os._exit(3)
"""


def test_a_command_that_cannot_go_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one whose memory waits for a file server that is gone. Its code is known all the same."""
    monkeypatch.setattr(Gate, "NOTICE_S", 0.1)
    monkeypatch.setattr(Gate, "TEARDOWN_S", 0.3)
    tracers = set(children_named(_HELD_BY_A_TRACER))
    gate = Gate.spawn((sys.executable, "-c", _HELD_BY_A_TRACER))
    assert gate.release()
    try:
        await_zombie(gate.pid)
        assert gate.result(ended=True, status=3 << 8) == 3
        assert gate.result(ended=True, status=None) == 125
        said = capsys.readouterr().err
        assert "Ctrl-C leaves" in said
        assert "left behind" in said
    finally:
        for tracer in set(children_named(_HELD_BY_A_TRACER)) - tracers:
            if tracer != gate.pid:
                os.kill(tracer, signal.SIGKILL)
        os.waitpid(gate.pid, 0)


def children_named(argument: str) -> list[int]:
    return [
        p.pid for p in psutil.process_iter(["cmdline"]) if argument in (p.info["cmdline"] or ())
    ]


def await_zombie(pid: int) -> None:
    until = time.monotonic() + TIMEOUT_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("after_s", [0, 0.02, 0.05, 0.1, 0.2])
def test_ctrl_c_while_it_arms_takes_everything_back(
    tmp_path: Path, after_s: float, times: int
) -> None:
    """The terminal sends it to the command too. `after_s`: since the file was made."""
    path = tmp_path / "a.ttft"
    command = [sys.executable, "-m", "ttftprof", "record", "-o", str(path), "--", "sleep", "1000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.001)
    time.sleep(after_s)
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.005)
    _, said = process.communicate(timeout=TIMEOUT_S)
    assert "Traceback" not in said
    if process.returncode == 130:
        assert "interrupted before recording began; nothing was written" in said
        assert not list(tmp_path.iterdir())
    else:  # it was armed by then
        assert (process.returncode, ending(path)) == (0, (True, "interrupted"))
    until = time.monotonic() + TIMEOUT_S
    while living := living_in_group(process.pid):  # the command is gone with it, and every helper
        assert time.monotonic() < until, living
        time.sleep(0.02)


def living_in_group(group: int) -> list[int]:
    """Its processes, but for those that only wait to be reaped by whoever took them over."""
    living = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):  # gone meanwhile
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process.pid)
    return living


def test_a_command_that_is_ended_before_it_began(tmp_path: Path) -> None:
    path = tmp_path / "a.ttft"
    command = [sys.executable, "-m", "ttftprof", "record", "-o", str(path), "--", "sleep", "1000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + TIMEOUT_S
    while not (waiting := psutil.Process(process.pid).children()):
        assert time.monotonic() < until
        time.sleep(0.001)
    waiting[0].kill()
    _, said = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 3
    assert "the command was ended before it began" in said
    assert "\n  next: " in said
    assert not list(tmp_path.iterdir())


def test_a_command_is_seen_from_its_first_instruction(tmp_path: Path) -> None:
    record("-o", "a.ttft", "--", "sh", "-c", "/bin/true; /bin/true", cwd=tmp_path)
    with Reader(tmp_path / "a.ttft") as reader:
        executed = [Path(fact["path"]).name for _, fact in reader.facts("exec")]
        assert reader.meta["target"]["how"] == "the command sh -c '•••'"
    assert executed[0] == "sh"
    assert executed.count("true") == 2


def test_an_executed_process_is_described_once(tmp_path: Path) -> None:
    record("-o", "a.ttft", "--", "sh", "-c", "sleep 0.5; :", cwd=tmp_path)
    with Reader(tmp_path / "a.ttft") as reader:
        described = Counter(fact["comm"] for _, fact in reader.facts("process"))
    assert (described["sh"], described["sleep"]) == (1, 1)


def test_what_a_server_holds_in_many_maps_is_said_once(tmp_path: Path) -> None:
    script = (
        "import mmap, sys; f = open(sys.argv[1], 'rb'); "
        "m = [mmap.mmap(f.fileno(), 4096, mmap.MAP_SHARED, mmap.PROT_READ, offset=o << 13) "
        "for o in range(17)]; print(flush=True); sys.stdin.read()"
    )
    model = make_model(tmp_path / "m.weights", 4 * MIB)
    with running(sys.executable, "-c", script, str(model)) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with recording(tmp_path / "a.ttft", "--pid", str(holder.pid)) as seen:
            pass
    held = of_kind(events(seen.path), Kind.HELD)
    held = held[held["ino"] == model.stat().st_ino]
    assert sorted(held["flags"].tolist()) == [
        2 * 17,
        2 * 18 + 1,
    ]  # a map keeps a descriptor of its own


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    outcome = record("--", "no-such-command-here", cwd=tmp_path)
    assert outcome.code == 3
    assert "no-such-command-here" in outcome.said
    assert outcome.has_next_step
    assert not list(tmp_path.iterdir())


def test_a_command_that_cannot_be_executed(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELFnothing")
    broken.chmod(0o755)
    outcome = record("-o", "a.ttft", "--", str(broken), cwd=tmp_path)
    assert outcome.code == 126
    assert "Exec format error" in outcome.said


def test_a_command_that_ignores_sigterm_is_ended_all_the_same(tmp_path: Path) -> None:
    script = "trap '' TERM; while :; do read -t 1 x < /dev/null; done"
    began = time.monotonic()
    outcome = record("-o", "a.ttft", "--duration", "0.5", "--", "bash", "-c", script, cwd=tmp_path)
    assert outcome.code == 0
    assert time.monotonic() - began < 15
    assert ending(tmp_path / "a.ttft") == (True, "the duration is over")


def test_a_command_gets_the_signals_a_shell_would_give_it(tmp_path: Path) -> None:
    record("-o", "a.ttft", "--", "cp", "/proc/self/status", "status", cwd=tmp_path)
    ignored = next(
        line for line in (tmp_path / "status").read_text().splitlines() if line.startswith("SigIgn")
    )
    assert int(ignored.split()[1], 16) == 0


def test_secrets_and_prompts_of_a_command_line_stay_out_of_the_recording(tmp_path: Path) -> None:
    """Nor do prompts, of the command or of a child of it, which needs no option to be one."""
    line = (
        "/bin/true --api-key sesame-line; HF_TOKEN=sesame-environment /bin/true sesame 'a sesame'"
    )
    command = ("sh", "-c", line, "sesame", "--api-key", "sesame-open", "--hf-token=sesame-shut")
    outcome = record("-o", "a.ttft", "--", *command, cwd=tmp_path)
    assert "sesame" not in outcome.said
    assert b"sesame" not in (tmp_path / "a.ttft").read_bytes()
    with Reader(tmp_path / "a.ttft") as reader:
        facts = [reader.meta, *(f for k in reader.fact_kinds() for _, f in reader.facts(k))]
    assert "sesame" not in str(facts)


# -- loss and load ----------------------------------------------------------------------------


def test_a_ring_too_small_loses_events_and_says_how_many(tmp_path: Path) -> None:
    """And the end of the target, whose event is lost too, still ends the recording.

    The recorder is held still meanwhile, so that what 64 records cannot hold is lost for certain.
    """
    with started("forks", make_model(tmp_path / "m", 4 * MIB)) as program:
        arguments = ("--pid", str(program.pid), "--ring-kb", str(SMALL_RING_KB))
        seen = start_recording(tmp_path / "a.ttft", *arguments)
        seen.process.send_signal(signal.SIGSTOP)
        program.go()
    seen.process.send_signal(signal.SIGCONT)
    assert seen.process.wait(TIMEOUT_S) == 0
    seen.stop()
    found = events(seen.path)
    with Reader(seen.path) as reader:
        lost = reader.lost()["events ring full"]
    assert ending(seen.path) == (True, "the target exited")
    assert not (of_kind(found, Kind.PROCESS_EXIT)["tgid"] == program.pid).any()
    # A fork, an exit and the end of a thread for each child: kept or lost, none is forgotten.
    kept = sum(len(of_kind(found, k)) for k in (Kind.FORK, Kind.PROCESS_EXIT, Kind.THREAD_END))
    assert kept < 3 * FORKS <= kept + lost


@pytest.mark.slow
def test_10_000_children_are_all_there_and_memory_stays_bounded(tmp_path: Path) -> None:
    with (
        started("forkstorm", make_model(tmp_path / "m", 4 * MIB)) as program,
        recording(tmp_path / "a.ttft", "--pid", str(program.pid)) as seen,
    ):
        program.go()
    found = events(seen.path)
    with Reader(seen.path) as reader:
        assert reader.complete
        assert reader.lost() == {}
        assert 10 * MIB < reader.meta["own"]["max_rss_bytes"] < MAX_RSS_BYTES
    forks = of_kind(found, Kind.FORK)
    assert len(forks) == STORM_FORKS
    assert {int(parent) for parent in forks["a"]} == {program.pid}
    exits = of_kind(found, Kind.PROCESS_EXIT)
    assert sorted(exits["tgid"].tolist()) == sorted(forks["tgid"].tolist())


# -- strangers --------------------------------------------------------------------------------


def child_with_pid(wanted: int, command: list[str]) -> int | None:
    """Starts a command under a certain process id, if the kernel gives it."""
    for _ in range(200):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(wanted - 1))
        pid = os.fork()
        if pid == 0:
            if os.getpid() != wanted:
                os._exit(0)
            os.execvp(command[0], command)
        if pid == wanted:
            return pid
        os.waitpid(pid, 0)
    return None


def test_a_stranger_that_gets_a_targets_number_is_not_followed(tmp_path: Path) -> None:
    if not Path("/proc/sys/kernel/ns_last_pid").exists():
        unsupported("this kernel cannot be told the next process id")
    script = "sleep 1000 & echo $!; wait; read end"
    with running("sh", "-c", script) as target:
        assert target.stdout is not None
        child = int(target.stdout.readline())
        with recording(tmp_path / "a.ttft", "--pid", str(target.pid)) as seen:
            os.kill(child, signal.SIGKILL)
            await_gone(child)
            gone_ns = time.monotonic_ns()
            work = "for i in 1 2 3 4 5; do cat /bin/sh > /dev/null; done"
            stranger = child_with_pid(child, ["sh", "-c", work])
            if stranger is None:
                pytest.fail("the number was never free")
            os.waitpid(stranger, 0)
    found = events(seen.path)
    own = found[found["tgid"] == child]
    assert len(of_kind(own, Kind.PROCESS_EXIT)) == 1
    assert (own["start_ns"] + own["duration_ns"]).max() <= gone_ns
    assert not len(of_kind(own, Kind.EXEC))
    assert not len(of_kind(found, Kind.FORK)[of_kind(found, Kind.FORK)["a"] == child])


def await_gone(pid: int) -> None:
    until = time.monotonic() + TIMEOUT_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_two_recordings_at_once_hold_no_fact_of_each_other(tmp_path: Path) -> None:
    models = [make_model(tmp_path / name, 8 * MIB) for name in ("one.gguf", "two.gguf")]
    with (
        started("reads", models[0]) as one,
        started("forks", models[1]) as two,
        recording(tmp_path / "1.ttft", "--pid", str(one.pid)) as first,
        recording(tmp_path / "2.ttft", "--pid", str(two.pid)) as second,
    ):
        together = [threading.Thread(target=program.go) for program in (one, two)]
        for thread in together:
            thread.start()
        for thread in together:
            thread.join()
    forks = of_kind(events(second.path), Kind.FORK)
    assert len(forks) == FORKS
    assert reads_of(first, models[0]) == READS
    assert tgids(first) == {one.pid}
    assert tgids(second) == {two.pid, *(int(tgid) for tgid in forks["tgid"])}
    for seen, other in ((first, models[1]), (second, models[0])):
        assert other.name.encode() not in seen.path.read_bytes()
        assert other.stat().st_ino not in inodes(seen)


def tgids(seen: Recording) -> set[int]:
    """Who did what was recorded. A request to the disk for a followed file (libc, say) is recorded
    whoever made it, for the target may wait for it."""
    with seen.reader() as reader:
        rows = [reader.stream("events"), reader.stream("threads")]
        rows[0] = rows[0][rows[0]["kind"] != Kind.BLOCK]
        found = {int(tgid) for some in rows for tgid in some["tgid"]}
        facts = {
            int(fact["tgid" if "tgid" in fact else "pid"])
            for kind in reader.fact_kinds()
            for _, fact in reader.facts(kind)
            if "tgid" in fact or "pid" in fact
        }
    return found | facts


def inodes(seen: Recording) -> set[int]:
    with seen.reader() as reader:
        return {int(ino) for ino in reader.stream("files")["ino"]}


def reads_of(seen: Recording, model: Path) -> int:
    with seen.reader() as reader:
        rows = reader.stream("files")
    return int(rows[rows["ino"] == model.stat().st_ino][-1]["reads"])
