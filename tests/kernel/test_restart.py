"""A server that is restarted is followed into its next life; another of the same name is not."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kernel.support import Recording, start_recording
from ttftprof.events import Kind
from ttftprof.target import by_cgroup, by_container

pytestmark = pytest.mark.kernel

NAME = "ttft-twin"
UNIFIED = Path("/sys/fs/cgroup/unified")
SETTLE_S = 0.4
TIMEOUT_S = 30
SLOW_TO_END = "trap 'sleep 1000; exit' TERM; while :; do sleep 0.05; done"
DEAF = "trap '' TERM; while :; do sleep 0.05; done"
QUIET = "while :; do sleep 0.05; done"


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A shell under a name of its own: what a server is to the recorder."""
    return str(shutil.copy("/bin/bash", tmp_path / NAME))


@contextmanager
def server(program: str, script: str = QUIET, cgroup: Path | None = None) -> Iterator[int]:
    enter = f"echo $$ > {shlex.quote(str(cgroup / 'cgroup.procs'))};" if cgroup else ""
    process = subprocess.Popen(
        ["sh", "-c", f'{enter} exec "$0" "$@"', program, "-c", script], start_new_session=True
    )
    await_name(process.pid)
    try:
        yield process.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def followed(path: Path, *arguments: str) -> Iterator[Recording]:
    seen = start_recording(path, *(arguments or ("--name", NAME)))
    try:
        yield seen
        assert seen.stop() == 0, seen.output
    finally:
        if seen.process.poll() is None:
            seen.process.kill()
            seen.process.communicate()


def await_name(pid: int) -> None:
    until = time.monotonic() + TIMEOUT_S
    while Path(f"/proc/{pid}/comm").read_text().strip() != NAME:
        assert time.monotonic() < until
        time.sleep(0.002)


def await_trap(pid: int) -> None:
    """Until SIGTERM would not end it any more."""
    until, bit = time.monotonic() + TIMEOUT_S, 1 << signal.SIGTERM - 1
    while not any(
        int(line.split()[1], 16) & bit
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith(("SigIgn", "SigCgt"))
    ):
        assert time.monotonic() < until
        time.sleep(0.002)


def end(pid: int) -> None:
    """Ends a server and reaps it."""
    os.killpg(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def processes(seen: Recording) -> set[int]:
    """Everyone that any record or fact names."""
    with seen.reader() as reader:
        found = {int(t) for s in ("events", "threads") for t in reader.stream(s)["tgid"]}
        facts = (f for kind in reader.fact_kinds() for _, f in reader.facts(kind))
        return found | {int(f[key]) for f in facts for key in ("tgid", "pid") if key in f}


def adopted(seen: Recording) -> set[int]:
    with seen.reader() as reader:
        found = reader.stream("events")
    return set(found[(found["kind"] == Kind.EXEC) & (found["flags"] == 1)]["tgid"].tolist())


def test_a_second_server_of_the_name_is_a_stranger(program: str, tmp_path: Path) -> None:
    with (
        server(program) as first,
        followed(tmp_path / "a.ttft") as seen,
        server(program) as second,
    ):
        time.sleep(SETTLE_S)
        end(first)
        time.sleep(SETTLE_S)
    assert first in processes(seen)
    assert second not in processes(seen)


def test_a_restarted_server_is_followed(program: str, tmp_path: Path) -> None:
    with server(program) as first, followed(tmp_path / "a.ttft") as seen:
        end(first)
        with server(program) as second:
            time.sleep(SETTLE_S)
    assert adopted(seen) == {second}


def test_a_restart_may_begin_while_the_old_server_ends(program: str, tmp_path: Path) -> None:
    """As where a script stops the old one and does not wait."""
    with server(program, SLOW_TO_END) as first, followed(tmp_path / "a.ttft") as seen:
        await_trap(first)
        os.kill(first, signal.SIGTERM)
        with server(program) as second:
            assert Path(f"/proc/{first}/stat").read_text().split()[2] not in "ZX"
            time.sleep(SETTLE_S)
    assert adopted(seen) == {second}


def test_a_server_that_heeds_no_signal_is_not_about_to_end(program: str, tmp_path: Path) -> None:
    with server(program, DEAF) as first, followed(tmp_path / "a.ttft") as seen:
        await_trap(first)
        os.kill(first, signal.SIGTERM)
        with server(program) as second:
            time.sleep(SETTLE_S)
    assert second not in processes(seen)


def test_two_servers_at_once_have_a_recording_each(program: str, tmp_path: Path) -> None:
    with (
        server(program) as first,
        server(program) as second,
        followed(tmp_path / "1.ttft", "--pid", str(first)) as one,
        followed(tmp_path / "2.ttft", "--pid", str(second)) as two,
    ):
        time.sleep(SETTLE_S)
    assert second not in processes(one)
    assert first not in processes(two)


@contextmanager
def control_group(path: Path) -> Iterator[Path]:
    """A real one, as systemd makes it for a unit."""
    made = [p for p in (*reversed(path.parents), path) if not p.exists()]
    for folder in made:
        folder.mkdir()
    try:
        yield path
    finally:
        for folder in reversed(made):
            until = time.monotonic() + TIMEOUT_S
            while folder.exists() and time.monotonic() < until:
                with suppress(OSError):  # a killed process has not left yet
                    folder.rmdir()
                time.sleep(0.01)


def test_a_unit_is_followed_into_its_next_life_and_no_other_unit(
    program: str, tmp_path: Path
) -> None:
    """Two units of one server program, both restarted: a fleet's usual day."""
    slice_ = UNIFIED / "ttft.slice"
    with (
        control_group(slice_ / "ttft-a.service") as a,
        control_group(slice_ / "ttft-b.service") as b,
        server(program, cgroup=a) as first,
        server(program, cgroup=b) as other,
        followed(tmp_path / "a.ttft", "--unit", "ttft-a") as seen,
    ):
        end(first)
        end(other)
        with server(program, cgroup=b) as stranger, server(program, cgroup=a) as second:
            time.sleep(SETTLE_S)
    assert adopted(seen) == {second}
    assert not {other, stranger} & processes(seen)
    with seen.reader() as reader:
        assert reader.meta["target"]["how"] == "--unit ttft-a.service"
        assert reader.meta["target"]["roots"] == [first]


IDENTITY = "4f1c2d3e" * 8
LAYOUTS = {
    "docker, cgroupfs": f"docker/{IDENTITY}",
    "docker, systemd": f"system.slice/docker-{IDENTITY}.scope",
    "podman": f"machine.slice/libpod-{IDENTITY}.scope/container",
    "podman, rootless": (
        f"user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{IDENTITY}.scope/container"
    ),
    "cri-o": (
        "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1234.slice/"
        f"crio-{IDENTITY}.scope"
    ),
}


@pytest.mark.parametrize("hierarchy", ["unified", "systemd"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_container_is_found_by_the_id_in_its_control_group(
    program: str, tmp_path: Path, layout: str, hierarchy: str
) -> None:
    """The recorder is run for one of them: they differ in the lookup only."""
    path = f"ttft-test/{LAYOUTS[layout]}"
    with (
        control_group(UNIFIED.parent / hierarchy / path) as group,
        server(program, cgroup=group) as pid,
    ):
        assert by_container(IDENTITY).roots == (pid,)
        assert by_container(IDENTITY[:12]).roots == (pid,)
        assert by_cgroup(path).roots == by_cgroup("ttft-test").roots == (pid,)
        if layout == "cri-o":
            with followed(tmp_path / "a.ttft", "--container", IDENTITY[:12]) as seen:
                time.sleep(SETTLE_S)
            assert pid in processes(seen)
            with followed(tmp_path / "b.ttft", "--cgroup", f"/{path}/") as seen:
                time.sleep(SETTLE_S)
            assert pid in processes(seen)
