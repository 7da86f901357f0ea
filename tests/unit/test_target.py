"""Who a user means: one process or an error that lists the candidates, never a guess."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ttftprof import target as targets
from ttftprof.errors import TargetError
from ttftprof.sources.conmon import contained
from ttftprof.sources.processes import ProcessFacts
from ttftprof.target import describe

Process = subprocess.Popen[bytes]


@contextmanager
def running(*command: str) -> Iterator[Process]:
    """In a session of its own; all of it is gone when the block ends."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def first_line(process: Process) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def sleeper(folder: Path, name: str) -> str:
    return str(shutil.copy("/bin/sleep", folder / name))


def await_name(pid: int, name: str) -> None:
    """Until the fork has become its program."""
    until = time.monotonic() + 30
    while Path(f"/proc/{pid}/comm").read_text().strip() != name:
        assert time.monotonic() < until
        time.sleep(0.005)


def refusal(error: pytest.ExceptionInfo[TargetError]) -> str:
    assert error.value.exit_code == 3
    assert error.value.next_step
    return error.value.message


# -- real processes ---------------------------------------------------------------------------


def test_a_pid_brings_all_below_it() -> None:
    with running("sh", "-c", "sleep 1000 & echo $!; wait") as parent:
        child = first_line(parent)
        found = targets.by_pid(parent.pid)
    assert found.roots == (parent.pid,)
    assert found.pids == {parent.pid, child}
    assert not found.successors


def test_a_pid_that_is_gone() -> None:
    with running("true") as gone:
        gone.wait()
    for pid in (gone.pid, 0, -1, 1 << 40):
        with pytest.raises(TargetError) as error:
            targets.by_pid(pid)
        assert f"no process {pid}" in refusal(error)


def test_a_threads_id_means_its_process() -> None:
    script = (
        "import threading, time; t = threading.Thread(target=time.sleep, args=(1000,)); t.start();"
        "print(t.native_id, flush=True); t.join()"
    )
    with running(sys.executable, "-c", script) as process:
        assert targets.by_pid(first_line(process)).roots == (process.pid,)


def test_a_port_names_its_listener() -> None:
    script = (
        "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen();"
        "print(s.getsockname()[1], flush=True); s.accept()"
    )
    with running(sys.executable, "-c", script) as server:
        assert targets.by_port(first_line(server)).roots == (server.pid,)


def test_a_port_that_nobody_listens_on() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(TargetError) as error:
            targets.by_port(port)
    assert f"port {port}" in refusal(error)


def test_a_name_is_the_program_and_outlives_it(tmp_path: Path) -> None:
    with running(sleeper(tmp_path, "my-model-srv"), "1000") as process:
        await_name(process.pid, "my-model-srv")
        found = targets.by_name("my-model-srv")
    assert found.roots == (process.pid,)
    assert found.successors == {"my-model-srv"}


def test_a_server_with_workers_of_its_name_is_one(tmp_path: Path) -> None:
    shell = str(shutil.copy(shutil.which("dash") or "/bin/sh", tmp_path / "forking-srv"))
    with running(shell, "-c", "(read x < /dev/zero) & echo $!; wait") as parent:
        child = first_line(parent)
        found = targets.by_name("forking-srv")
    assert found.roots == (parent.pid,)
    assert child in found.pids


def test_two_of_a_name_are_listed(tmp_path: Path) -> None:
    program = sleeper(tmp_path, "twin-srv")
    with running(program, "1000") as one, running(program, "1001") as two:
        for process in (one, two):
            await_name(process.pid, "twin-srv")
        with pytest.raises(TargetError) as error:
            targets.by_name("twin-srv")
    message = refusal(error)
    assert f"pid {one.pid}  {program} 1000" in message
    assert f"pid {two.pid}  {program} 1001" in message


def test_this_program_is_no_candidate_for_its_own_name() -> None:
    comm = Path("/proc/self/comm").read_text().strip()
    try:
        said = str(targets.by_name(comm).roots)
    except TargetError as error:
        said = error.message
    assert str(os.getpid()) not in re.findall(r"\d+", said)


# -- processes as /proc would show them -------------------------------------------------------


def process(
    pid: int, cgroup: str = "/", ppid: int = 1, engine: str | None = None, comm: str = "server"
) -> ProcessFacts:
    return ProcessFacts(pid, ppid, comm, f"/bin/{comm}", [comm], "/", cgroup, 1, engine)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> dict[int, ProcessFacts]:
    """The only processes of the machine."""
    known: dict[int, ProcessFacts] = {}

    def descendants(roots: set[int]) -> set[int]:
        below = {p for p, facts in known.items() if facts.ppid in roots}
        return roots if below <= roots else descendants(roots | below)

    monkeypatch.setattr(targets, "_processes", lambda: list(known.values()))
    monkeypatch.setattr(targets, "_all_pids", lambda: set(known))
    monkeypatch.setattr(targets, "is_alive", known.__contains__)
    monkeypatch.setattr(targets, "cgroup_paths", lambda pid: {0: known[pid].cgroup})
    monkeypatch.setattr(targets, "read_process", known.get)
    monkeypatch.setattr(targets, "descendants", descendants)
    return known


def test_a_unit_is_all_in_its_control_group(processes: dict[int, ProcessFacts]) -> None:
    processes[10] = process(10, "/system.slice/ollama.service")
    processes[11] = process(11, "/system.slice/ollama.service/runner", ppid=10)
    processes[12] = process(12, "/system.slice/ollama.service-extra")
    processes[13] = process(13, "/user.slice/user@1000.service/app.slice/llama@a.service")
    assert targets.by_unit("ollama").roots == (10,)
    assert targets.by_unit("ollama.service").pids == {10, 11}
    assert targets.by_unit("llama@a.service").roots == (13,)
    with pytest.raises(TargetError) as error:
        targets.by_unit("llama")
    assert "llama.service" in refusal(error)


@pytest.mark.parametrize("path", ["/docker/abc", "docker/abc", "docker/abc/"])
def test_a_control_group_and_what_is_below(processes: dict[int, ProcessFacts], path: str) -> None:
    processes[10] = process(10, "/docker/abc")
    processes[11] = process(11, "/docker/abc/init")
    processes[12] = process(12, "/docker/abcd")
    assert targets.by_cgroup(path).roots == (10, 11)


def test_a_child_that_ends_as_it_is_found_is_no_server(
    processes: dict[int, ProcessFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell starts one after another."""
    processes[10] = process(10, "/a")
    processes[11] = process(11, "/a", ppid=10)
    monkeypatch.setattr(targets, "is_alive", lambda pid: pid == 10 or bool(processes.pop(pid)))
    assert targets.by_cgroup("/a").roots == (10,)


def test_a_control_group_of_nobody(processes: dict[int, ProcessFacts]) -> None:
    processes[10] = process(10, "/a")
    with pytest.raises(TargetError) as error:
        targets.by_cgroup("/b")
    assert "/b" in refusal(error)


ID = "4f1c2d3e" * 8


@pytest.mark.parametrize(
    ("cgroup", "name"),
    [
        (f"/docker/{ID}", ID),
        (f"/docker/{ID}", ID[:12]),
        (f"/system.slice/docker-{ID}.scope", ID[:12]),
        (f"/machine.slice/libpod-{ID}.scope/container", ID),
        ("/lxc.payload.models/system.slice/x.service", "models"),
        ("/machine.slice/machine-models.scope", "models"),
    ],
)
def test_a_container_by_id_or_name(
    processes: dict[int, ProcessFacts], tmp_path: Path, cgroup: str, name: str
) -> None:
    processes[10] = process(10, cgroup)
    processes[11] = process(11, "/system.slice/docker.service")
    assert targets.by_container(name, tmp_path).roots == (10,)


def test_a_container_by_its_docker_name(processes: dict[int, ProcessFacts], tmp_path: Path) -> None:
    (tmp_path / ID).mkdir()
    config = {"Name": "/ollama", "ID": ID}
    (tmp_path / ID / "config.v2.json").write_text(json.dumps(config))
    processes[10] = process(10, f"/docker/{ID}")
    assert targets.by_container("ollama", tmp_path).roots == (10,)


@pytest.mark.parametrize("name", ["", "abc", "user.slice", "service", "foo", ID[:7]])
def test_a_container_of_no_such_name_is_not_guessed(
    processes: dict[int, ProcessFacts], tmp_path: Path, name: str
) -> None:
    processes[10] = process(10, f"/docker/{ID}")
    processes[11] = process(11, "/system.slice/foo.service")
    with pytest.raises(TargetError) as error:
        targets.by_container(name, tmp_path)
    refusal(error)


def watched_over(proc: Path, monitor: int, *words: str, comm: str = "conmon") -> None:
    """/proc of a process with a child, as Podman's conmon has the container's first process."""
    for pid, name, parent in ((monitor, comm, 1), (monitor + 1, "llama-server", monitor)):
        (proc / str(pid)).mkdir()
        fields = f"S {parent} " + "0 " * 30
        (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {fields}")
    (proc / str(monitor) / "cmdline").write_bytes("\0".join(["/usr/bin/conmon", *words]).encode())


def test_a_container_of_podmans_by_what_its_monitor_says(tmp_path: Path) -> None:
    """A rootless one on version 1 has no control group of its own."""
    watched_over(tmp_path, 20, "--api-version", "1", "-c", ID, "-u", ID, "-r", "crun", "-n", "llm")
    watched_over(tmp_path, 30, "-c", "0" * 64, "-n", "other")
    watched_over(tmp_path, 40, "-c", "1" * 64, "-n", "llm", comm="impostor")
    for name in ("llm", ID, ID[:12]):
        assert contained(name, tmp_path) == {ID: {21}}
    for name in ("", "ll", ID[:7], "conmon"):
        assert contained(name, tmp_path) == {}


def test_two_users_may_have_containers_of_one_name(
    processes: dict[int, ProcessFacts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched_over(tmp_path, 20, "-c", ID, "-n", "llm")
    watched_over(tmp_path, 30, "-c", "0" * 64, "-n", "llm")
    monkeypatch.setattr(targets, "contained", lambda name: contained(name, tmp_path))
    processes[21] = process(21, "/")
    with pytest.raises(TargetError) as error:
        targets.by_container("llm", tmp_path / "none")
    assert ID in refusal(error)
    assert targets.by_container(ID[:12], tmp_path / "none").roots == (21,)


def test_unreadable_docker_configurations_are_passed_over(
    processes: dict[int, ProcessFacts], tmp_path: Path
) -> None:
    for content in ("{", "[]", '{"Name": 7}'):
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "x" / "config.v2.json").write_text(content)
        with pytest.raises(TargetError):
            targets.by_container("ollama", tmp_path)


def test_the_only_inference_server_is_found_with_its_children(
    processes: dict[int, ProcessFacts],
) -> None:
    processes[10] = process(10, engine="ollama", comm="ollama")
    processes[11] = process(11, ppid=10, engine="ollama")
    processes[12] = process(12)
    found = targets.discover()
    assert found.roots == (10,)
    assert found.pids == {10, 11}
    assert "ollama" in found.how
    assert "pid 10" in found.how
    assert found.successors == {"ollama"}


def test_no_inference_server(processes: dict[int, ProcessFacts]) -> None:
    processes[10] = process(10)
    with pytest.raises(TargetError) as error:
        targets.discover()
    assert "no inference server" in refusal(error)


def test_two_inference_servers_are_not_chosen_from(processes: dict[int, ProcessFacts]) -> None:
    processes[10] = process(10, engine="ollama", comm="ollama")
    processes[20] = process(20, engine="vllm", comm="vllm")
    processes[21] = process(21, ppid=20, engine="vllm")
    with pytest.raises(TargetError) as error:
        targets.discover()
    message = refusal(error)
    assert "2 servers match" in message
    assert "pid 21" not in message


@pytest.mark.parametrize("comm", ["python3.12", "node", "bash", "java"])
def test_an_interpreters_name_makes_no_successor(
    processes: dict[int, ProcessFacts], comm: str
) -> None:
    processes[10] = process(10, comm=comm)
    assert not targets.by_name(comm).successors


def test_a_strangers_title_reaches_no_terminal_raw() -> None:
    facts = ProcessFacts(7, 1, "x", "/x", ["\x1b[2Jserver", "-m\na"], "/", "/", 1, None)
    assert describe(facts) == r"pid 7  \x1b[2Jserver -m a"


def test_a_long_command_line_is_cut_between_words() -> None:
    words = ["server", *[f"--option-{n}" for n in range(100)]]
    shown = describe(ProcessFacts(7, 1, "x", "/x", words, "/", "/", 1, None))
    assert len(shown) < 120
    assert shown.endswith(" …")
    assert set(shown.split()[2:-1]) <= set(words)
    wide = describe(ProcessFacts(7, 1, "x", "/x", ["s" * 500], "/", "/", 1, None))
    assert len(wide) < 120
