"""What befalls a machine while it is recorded: recording goes on, and says what is not in it."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from kernel.support import recording, run_to_end, start_recording
from ttftprof.analysis import analyse
from ttftprof.kernel import session
from ttftprof.kernel.session import ProbeSession, Settings
from ttftprof.recording import Reader
from workloads.cache import drop_cache, make_model
from workloads.counted import started

pytestmark = pytest.mark.kernel

NOBODY = 65534
TIMEOUT_S = 30
TTFTPROF = [sys.executable, "-m", "ttftprof"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "idle.weights", 4 << 20)


def run(
    *arguments: str, cwd: Path, before: Callable[[], Any] | None = None, program: str = ""
) -> subprocess.CompletedProcess[str]:
    """`ttftprof ARGUMENTS` in a process where `before` was called, or by a `program` of Python."""
    command = [sys.executable, "-c", program] if program else TTFTPROF
    return run_to_end([*command, *arguments], cwd, before=before)


# -- who may not ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "borrow",
    [lambda: os.setresuid(NOBODY, 0, 0), lambda: os.setresgid(NOBODY, 0, 0)],
    ids=["setuid", "setgid"],
)
@pytest.mark.parametrize("command", ["record", "report", "--version"])
def test_with_borrowed_rights_it_does_nothing(
    tmp_path: Path, borrow: Callable[[], None], command: str
) -> None:
    """What a set-user-ID program's process looks like: root's rights, another's user id."""
    done = run(command, cwd=tmp_path, before=borrow)
    assert done.returncode == 4
    assert "setuid or setgid" in done.stderr
    assert "\n  next: chmod ug-s" in done.stderr
    assert not list(tmp_path.iterdir())


# include/uapi/linux/seccomp.h and libseccomp's seccomp.h
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def forbid_bpf() -> None:
    """As Docker's default filter does: every bpf(2) of this process is refused with EPERM."""
    seccomp = ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(seccomp.seccomp_init(_ALLOW))
    number = seccomp.seccomp_syscall_resolve_name(b"bpf")
    refused = seccomp.seccomp_rule_add(rules, _ERRNO | errno.EPERM, number, 0)
    if refused or seccomp.seccomp_load(rules):
        os._exit(99)


def test_a_filter_that_forbids_bpf_is_named(tmp_path: Path) -> None:
    done = run("record", "-o", "a.ttft", "--", "true", cwd=tmp_path, before=forbid_bpf)
    assert done.returncode == 4, done.stderr
    assert "no capability is missing; in force on this process: a seccomp filter" in done.stderr
    assert "--security-opt seccomp=unconfined" in done.stderr
    assert not list(tmp_path.iterdir())
    told = run("doctor", cwd=tmp_path, before=forbid_bpf).stdout
    assert "a seccomp filter" in told
    assert "seccomp=unconfined" in told.replace("\n", "")
    looked = ("record", "--loader", "proc", "-q", "-o", "a.ttft", "--", "true")
    assert run(*looked, cwd=tmp_path, before=forbid_bpf).returncode == 0


# -- the target -------------------------------------------------------------------------------

DYING = """
import os, signal, socket
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    client = server.accept()[0]
    client.recv(65536)
    client.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Type: text/event-stream\\r\\n"
                   b"Transfer-Encoding: chunked\\r\\n\\r\\n")
    os.kill(os.getpid(), signal.SIGKILL)
"""
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: 27\r\n\r\n" + b'{"model":"m","stream":true}'
)


def test_a_server_that_is_killed_as_it_answers_leaves_what_was_seen(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DYING], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout
        port = int(server.stdout.readline())
        seen = start_recording(tmp_path / "a.ttft", "--pid", str(server.pid))
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(REQUEST)
            assert client.recv(65536)
            server.wait(TIMEOUT_S)
        assert seen.process.wait(TIMEOUT_S) == 0
        seen.stop()
    report = seen.report()
    (request,) = report.requests
    assert (report.complete, report.ended_because) == (True, "the target exited")
    assert (request.model, request.outcome, request.ttft_ns) == ("m", "cancelled", None)
    assert "the server's process ended before it had answered" in request.notes
    assert sum(request.phase_totals().values()) > 0


# A header that claims 2^63 - 1 tensors, and one that claims to be as long.
HOSTILE_WEIGHTS = {
    "a.gguf": b"GGUF\x03\0\0\0" + b"\xff" * 7 + b"\x7f" + b"\xff" * 4096,
    "b.safetensors": b"\xff" * 7 + b"\x7f{" + b'"a":' * 1000,
}
# `ttftprof`, which tells at its end what it opened.
AUDITED = """
import atexit, sys
opened = []
def note(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        opened.append(str(arguments[0]))
sys.addaudithook(note)
from ttftprof.cli import main
atexit.register(lambda: open("opened", "w").write("\\n".join(opened)))
main(sys.argv[1:])
"""


@pytest.mark.parametrize("loader", ["libbpf", "proc"])
def test_no_byte_of_weights_is_read_whatever_their_headers_claim(
    tmp_path: Path, loader: str
) -> None:
    """Not by a recording, nor by its report: so there is no header that could harm it."""
    for name, header in HOSTILE_WEIGHTS.items():
        (tmp_path / name).write_bytes(header.ljust(2 << 20, b"\xff"))
    load = "exec 3<a.gguf 4<b.safetensors; sleep 0.3; cat <&3 >&2; cat <&4 >&2; sleep 0.3"
    asked = (
        "record",
        "--loader",
        loader,
        "-q",
        "-o",
        "a.ttft",
        "--",
        "sh",
        "-c",
        f"({load}) 2>/dev/null",
    )
    assert run(*asked, cwd=tmp_path, program=AUDITED).returncode == 0
    opened = (tmp_path / "opened").read_text().splitlines()
    assert any(path.endswith("a.ttft") for path in opened)
    assert run("report", "a.ttft", cwd=tmp_path, program=AUDITED).returncode == 0
    opened += (tmp_path / "opened").read_text().splitlines()
    assert not [path for path in opened if path.endswith(tuple(HOSTILE_WEIGHTS))]
    with Reader(tmp_path / "a.ttft") as reader:
        followed = {Path(fact["path"]).name for _, fact in reader.facts("file")}
    assert followed >= set(HOSTILE_WEIGHTS)


WITHOUT_PY_SPY = """
import sys
import ttftprof.sources.python_stacks as stacks
from ttftprof.cli import main
stacks.find_py_spy = lambda: None
main(sys.argv[1:])
"""


def test_without_py_spy_all_else_is_recorded(tmp_path: Path) -> None:
    asked = ("record", "-q", "-o", "a.ttft", "--", sys.executable, "-c", "pass")
    done = run(*asked, cwd=tmp_path, program=WITHOUT_PY_SPY)
    assert done.returncode == 0, done.stderr
    report = analyse(tmp_path / "a.ttft")
    stacks = next(s for s in report.sources if s.name == "python_stacks")
    assert (report.complete, stacks.state) == (True, "absent")
    assert "pip install py-spy" in stacks.reason


# -- probes -----------------------------------------------------------------------------------


def test_nobody_else_can_detach_a_probe(tmp_path: Path, model: Path) -> None:
    """The kernel refuses it for these kinds of link, even to root: they go with the recorder."""
    lib = ctypes.CDLL("libbpf.so.1")
    with (
        started("idle", model) as program,
        recording(tmp_path / "a.ttft", "--pid", str(program.pid)) as seen,
    ):
        links = own_links(seen.process.pid)
        assert len(links) > 15
        fds = [lib.bpf_link_get_fd_by_id(identity) for identity in links]
        refusals = [-lib.bpf_link_detach(fd) for fd in fds if fd >= 0]
        for fd in fds:
            os.close(fd)
    assert len(refusals) == len(links)
    assert set(refusals) == {errno.EOPNOTSUPP}
    assert {s.state for s in seen.report().sources if s.name in ("process", "files")} == {"ok"}


def own_links(pid: int) -> list[int]:
    """Ids of the BPF links that a process holds."""
    found = []
    for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            lines = entry.read_text().splitlines()
            found += [int(line.split()[1]) for line in lines if line.startswith("link_id:")]
    return found


def test_its_helpers_may_be_killed(tmp_path: Path, model: Path) -> None:
    """Whose work is optional: statistics, and the probes of modules that come later."""
    with started("idle", model) as program:
        seen = start_recording(tmp_path / "a.ttft", "--pid", str(program.pid))
        time.sleep(0.3)
        helpers = psutil.Process(seen.process.pid).children()
        assert helpers
        for helper in helpers:
            helper.kill()
        time.sleep(1.2)  # it looks at its own cost once a second
        assert seen.process.poll() is None
        assert seen.stop() == 0, seen.output
    assert seen.report().complete


# -- containers -------------------------------------------------------------------------------

# What Podman's monitor is to us: a process of this name, whose command line tells of its child. The
# child has what a rootless container has: namespaces of users, processes and mounts, no root.
MONITOR = """
import subprocess, sys
open("/proc/self/comm", "w").write("conmon")
unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount", "--mount-proc"]
load = "echo $$; read go; cat \\"$0\\" > /dev/null; echo read; read end"
subprocess.run([*unshare, "sh", "-c", load, sys.argv[-1]])
"""
CONTAINER_ID = "7a8b9c0d" * 8


def test_a_rootless_container_is_recorded_from_outside(tmp_path: Path) -> None:
    """By the name that its monitor has; the file is the one that the container sees."""
    weights = make_model(tmp_path / "in the box.gguf", 4 << 20)
    monitor = tmp_path / "monitor.py"
    monitor.write_text(MONITOR)
    open_to_all(weights)
    words = ("-c", CONTAINER_ID, "-n", "ttft-box", str(weights))
    with subprocess.Popen(
        [sys.executable, "-I", str(monitor), *words],
        user=NOBODY, group=NOBODY, extra_groups=[],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as box:  # fmt: skip
        assert box.stdin
        assert box.stdout
        assert box.stdout.readline() == "1\n"  # of a process namespace
        drop_cache(weights)
        with recording(tmp_path / "a.ttft", "--container", "ttft-box") as seen:
            box.stdin.write("go\n")
            box.stdin.flush()
            assert box.stdout.readline() == "read\n"
            time.sleep(0.2)
        box.communicate("end\n")
    with seen.reader() as reader:
        facts = {f["path"]: f for _, f in reader.facts("file")}
        rows = reader.stream("files")
        lives = {f["comm"] for _, f in reader.facts("process")}
    assert facts[str(weights)]["size_bytes"] == 4 << 20
    read = rows[rows["ino"] == weights.stat().st_ino][-1]
    assert int(read["added_pages"]) * os.sysconf("SC_PAGE_SIZE") == 4 << 20
    assert "cat" in lives


def open_to_all(path: Path) -> None:
    """A file, and its folders below that of all temporary ones, to be found by anyone."""
    path.chmod(0o644)
    for folder in path.parents:
        if folder.stat().st_uid == 0 and "pytest" in str(folder):
            folder.chmod(0o755)


# -- processors -------------------------------------------------------------------------------


def ticks_of(probes: ProbeSession) -> int:
    return int(probes.threads["samples"].sum())


def test_a_cpu_that_comes_on_is_looked_at_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probes are armed while only the first CPU seems to be on; the target computes on the
    last one, which comes on, goes off and comes on again."""
    everyone = session.online_cpus()
    last = everyone[-1]
    if last == 0:
        pytest.skip("this machine has one CPU")
    online = [0]
    monkeypatch.setattr(session, "online_cpus", lambda: online)
    spinning = subprocess.Popen(
        ["taskset", "-c", str(last), sys.executable, "-c", "while True: pass"]
    )
    probes = ProbeSession(Settings())
    try:
        probes.load()
        probes.attach()
        probes.seed([spinning.pid])
        time.sleep(0.2)
        assert ticks_of(probes) == 0
        online[:] = everyone
        probes.follow_cpus()
        await_more_ticks(probes)
        online[:] = [0]
        probes.follow_cpus()
        time.sleep(0.05)
        before = ticks_of(probes)
        time.sleep(0.2)
        assert ticks_of(probes) == before
        online[:] = everyone
        probes.slow_ticks(97, "a test", "nothing")
        probes.follow_cpus()
        await_more_ticks(probes)
        state = probes.states["cpu"]
        assert f"CPU {last} is looked at since" in state.reason
        probes.follow_cpus(after_suspend=True)  # each, though none seems to have been off
        await_more_ticks(probes)
        assert state.reason.count("the machine was suspended") == 0
        assert probes.states["cpu"].reason.count("the machine was suspended") == len(everyone)
    finally:
        probes.close()
        spinning.kill()
        spinning.wait()


def await_more_ticks(probes: ProbeSession) -> None:
    before, until = ticks_of(probes), time.monotonic() + 10
    while ticks_of(probes) < before + 5:
        assert time.monotonic() < until
        time.sleep(0.01)


# -- clocks -----------------------------------------------------------------------------------

# `ttftprof`, on a machine that sleeps an hour a second after recording was prepared, and whose wall
# clock is set back by a minute half a second later.
JUMPING = """
import sys, time
import ttftprof.recorder as recorder
from ttftprof.cli import main
from ttftprof.clock import NS_PER_S, OtherClocks, boottime_ns, now_ns
def clocks():
    began = now_ns()
    slept = lambda: 3600 * NS_PER_S if now_ns() - began > NS_PER_S else 0
    was_set = lambda: -60 * NS_PER_S if now_ns() - began > 1.5 * NS_PER_S else 0
    return OtherClocks(
        lambda: boottime_ns() + slept(), lambda: time.time_ns() + slept() + was_set()
    )
recorder.OtherClocks = clocks
main(sys.argv[1:])
"""


def test_a_suspend_and_a_set_clock_are_told_and_cost_nothing(tmp_path: Path) -> None:
    asked = ("record", "-q", "-o", "a.ttft", "--", "sleep", "2")
    done = run(*asked, cwd=tmp_path, program=JUMPING)
    assert done.returncode == 0, done.stderr
    report = analyse(tmp_path / "a.ttft")
    assert report.complete
    slept, was_set = report.notes[-2:]
    assert "suspended for 3600 s" in slept
    assert "wall clock was set back by 60 s" in was_set
    assert 2e9 < report.end_ns - report.start_ns < 60e9
