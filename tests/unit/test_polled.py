"""Looks at /proc, the relay and the command's output, each on real processes and sockets."""

from __future__ import annotations

import http.client
import json
import mmap
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from ttftprof.analysis import analyse
from ttftprof.clock import now_ns
from ttftprof.errors import UsageError
from ttftprof.events import LOST, Kind, TextKind, Wait
from ttftprof.kernel.session import Settings
from ttftprof.polled import PolledSession
from ttftprof.polled.files import Files
from ttftprof.polled.listeners import _listed, listeners
from ttftprof.polled.output import CommandOutput
from ttftprof.polled.relay import Relay
from ttftprof.polled.tasks import Tasks, Told
from ttftprof.polled.texts import MAX_BYTES, Texts
from ttftprof.sources.processes import cgroup_paths
from ttftprof.sources.requests import RequestTap, Seen
from workloads.scripted import go, heard, scripted

LOOK_S = 0.01
PATIENCE_S = 30.0
BIG = 1 << 20


def of(kind: Kind) -> Callable[[Told], bool]:
    return lambda event: event.kind == kind


def until(look: Callable[[], Sequence[Told]], wanted: Callable[[Told], bool]) -> list[Told]:
    """What was told up to the first event that is wanted."""
    told: list[Told] = []
    deadline = time.monotonic() + PATIENCE_S
    while not any(map(wanted, told)):
        assert time.monotonic() < deadline, told
        time.sleep(LOOK_S)
        told += look()
    return told


# -- processes --------------------------------------------------------------------------------

FAMILY = """
import os, subprocess, sys
print(flush=True); sys.stdin.readline()
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True); sys.stdin.readline()
child.kill(); child.wait()
print(flush=True); sys.stdin.readline()
"""


def test_a_child_is_followed_from_its_fork_to_its_end() -> None:
    tasks = Tasks()
    with scripted(FAMILY) as parent, subprocess.Popen(["sleep", "60"]) as stranger:
        heard(parent)
        tasks.begin(frozenset({parent.pid}), now_ns())
        began_ns = now_ns()
        go(parent)
        child = int(heard(parent))
        told = until(lambda: tasks.look(now_ns()), of(Kind.EXEC))
        (fork,) = (e for e in told if e.kind == Kind.FORK)
        assert (fork.tgid, fork.a) == (child, parent.pid)
        assert began_ns - 10_000_000 <= fork.ns <= now_ns()  # /proc counts in hundredths
        assert [e.tgid for e in told if e.kind == Kind.EXEC] == [child]
        assert set(tasks.of) == {parent.pid, child}
        go(parent)
        heard(parent)
        told = until(lambda: tasks.look(now_ns()), of(Kind.PROCESS_EXIT))
        assert {e.tgid for e in told if e.kind in (Kind.PROCESS_EXIT, Kind.THREAD_END)} == {child}
        stranger.kill()
    assert set(tasks.of) == {parent.pid}
    tasks.close()


def test_an_exec_in_the_same_place_is_told() -> None:
    tasks = Tasks()
    script = (
        "import os, sys; print(flush=True); sys.stdin.readline(); os.execlp(*['sleep'] * 2, '60')"
    )
    with scripted(script) as process:
        heard(process)
        tasks.begin(frozenset({process.pid}), now_ns())
        go(process)
        told = until(lambda: tasks.look(now_ns()), of(Kind.EXEC))
    assert [e.tgid for e in told if e.kind in (Kind.EXEC, Kind.FORK)] == [process.pid]
    tasks.close()


SLEEPS = {
    "time.sleep(0.3)": Wait.TIMER,
    "lock.acquire(timeout=0.3)": Wait.LOCK,
    "os.read(pipe, 1)": Wait.PIPE,
    "listener.accept()": Wait.NETWORK,
}
SLEEPER = """
import os, socket, sys, threading, time
lock = threading.Lock(); lock.acquire()
pipe, end = os.pipe()
listener = socket.create_server(("127.0.0.1", 0))
def wake():
    time.sleep(0.3)
    os.write(end, b"x")
    socket.create_connection(listener.getsockname())
print(flush=True); sys.stdin.readline()
threading.Thread(target=wake).start()
{call}
print(flush=True); sys.stdin.readline()
"""


@pytest.mark.parametrize(("call", "reason"), SLEEPS.items())
def test_why_a_thread_sleeps_is_told(call: str, reason: Wait) -> None:
    """By where in the kernel it sleeps; whoever may not be told that is told `other`."""
    tasks = Tasks()
    with scripted(SLEEPER.format(call=call)) as process:
        heard(process)
        tasks.begin(frozenset({process.pid}), now_ns())
        tasks.look(now_ns())
        go(process)
        told = until(
            lambda: tasks.look(now_ns()),
            lambda e: (
                e.kind == Kind.OFFCPU and e.tid == process.pid and e.duration_ns > 150_000_000
            ),
        )
    longest = max((e for e in told if e.tid == process.pid), key=lambda e: e.duration_ns)
    assert Wait(longest.flags) is reason
    assert 150_000_000 < longest.duration_ns < 5_000_000_000
    tasks.close()


def test_a_thread_that_runs_is_not_waiting_and_its_time_is_counted() -> None:
    script = "import sys\nprint(flush=True)\nsys.stdin.readline()\nwhile True: pass"
    tasks = Tasks()
    with scripted(script) as process:
        heard(process)
        tasks.begin(frozenset({process.pid}), now_ns())
        (thread,) = tasks.threads()
        deadline = time.monotonic() + PATIENCE_S
        while not thread.off_ns:
            assert time.monotonic() < deadline
            tasks.look(now_ns())
        go(process)
        until(lambda: tasks.look(now_ns()), of(Kind.OFFCPU))
        before = thread.cpu_ns
        deadline = time.monotonic() + PATIENCE_S
        while thread.cpu_ns < before + 50_000_000:
            assert time.monotonic() < deadline
            time.sleep(LOOK_S)
            tasks.look(now_ns())
        assert thread.off_ns == 0
    tasks.close()


ENDS_ASLEEP = """
import sys, threading
gate = threading.Lock(); gate.acquire()
thread = threading.Thread(target=gate.acquire); thread.start()
print(thread.native_id, flush=True); sys.stdin.readline()
gate.release(); thread.join()
print(flush=True); sys.stdin.readline()
"""


def test_a_thread_that_ends_before_the_next_look_had_waited_till_then() -> None:
    tasks = Tasks()
    with scripted(ENDS_ASLEEP) as process:
        tid = int(heard(process))
        tasks.begin(frozenset({process.pid}), now_ns())
        (thread,) = (thread for thread in tasks.threads() if thread.tid == tid)
        deadline = time.monotonic() + PATIENCE_S
        while not thread.off_ns:
            assert time.monotonic() < deadline
            tasks.look(now_ns())
        began_ns = thread.off_ns
        go(process)
        heard(process)
        while Path(f"/proc/{process.pid}/task/{tid}").exists():
            assert time.monotonic() < deadline
        told = [e for e in tasks.look(now_ns()) if e.tid == tid]
        assert [e.kind for e in told] == [Kind.OFFCPU, Kind.THREAD_END]
        assert (told[0].ns, Wait(told[0].flags)) == (began_ns, Wait.LOCK)
        assert told[0].ns + told[0].duration_ns == told[1].ns + told[1].duration_ns
    tasks.close()


THREADS = 30
MANY_THREADS = """
import sys, threading
for _ in range(int(sys.argv[1])):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print(flush=True); sys.stdin.readline()
"""


@pytest.mark.parametrize("takes_all", [True, False], ids=["it may take more", "it may not"])
def test_threads_beyond_the_limit_of_descriptors_are_counted(takes_all: bool) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    session = PolledSession(Settings())
    with scripted(MANY_THREADS, THREADS) as process, Path(os.devnull).open() as highest:
        heard(process)
        try:
            few = highest.fileno() + THREADS + 64
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
            if takes_all:
                session.load()
            session.seed([process.pid])
            told = {int(e["kind"]) for _ in range(3) for e in session.events.drain()}
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        lost = session.lost()[LOST.index("threads not followed")]
        followed = int((session.threads["since_ns"] != 0).sum())
        session.close()
    assert Kind.PROCESS_EXIT not in told
    assert followed + lost == THREADS + 1
    assert (lost == 0) is takes_all
    assert followed > 0


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            yield process
        finally:
            process.kill()


def own_group() -> str:
    """The name of the control group of this process; "" of the topmost."""
    return next(iter(cgroup_paths(os.getpid()).values()), "").split("/")[-1]


def test_a_server_that_is_started_anew_under_its_name_is_taken_in() -> None:
    tasks = Tasks()
    tasks.succeed(frozenset({"sleep"}), own_group())
    with sleeping() as first:
        tasks.begin(frozenset({first.pid}), now_ns())
        first.kill()
        with sleeping() as second:
            told = until(lambda: tasks.look(now_ns()), of(Kind.EXEC))
            assert {e.tgid for e in told if e.kind == Kind.EXEC} == {second.pid}
    tasks.close()


def test_a_server_beside_it_is_another_one() -> None:
    tasks = Tasks()
    tasks.succeed(frozenset({"sleep"}))
    with sleeping() as first, sleeping():
        tasks.begin(frozenset({first.pid}), now_ns())
        with sleeping():
            for _ in range(3):
                tasks.look(now_ns())
            assert set(tasks.of) == {first.pid}
    tasks.close()


def test_a_server_of_another_control_group_is_another_one() -> None:
    tasks = Tasks()
    tasks.succeed(frozenset({"sleep"}), "another.service")
    with sleeping() as first:
        tasks.begin(frozenset({first.pid}), now_ns())
        first.kill()
        with sleeping():
            until(lambda: tasks.look(now_ns()), of(Kind.PROCESS_EXIT))
            tasks.look(now_ns())
            assert not tasks.of
    tasks.close()


def test_a_new_server_is_taken_in_though_a_look_came_before_its_exec(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ttftprof.polled.tasks._YOUNG_NS", 60_000_000_000)
    tasks = Tasks()
    tasks.succeed(frozenset({"sleep"}))
    with sleeping() as first:
        tasks.begin(frozenset({first.pid}), now_ns())
        first.kill()
        with scripted(
            "import os, sys; print(flush=True); sys.stdin.readline(); "
            "os.execlp('sleep', 'sleep', '60')"
        ) as second:
            heard(second)
            until(lambda: tasks.look(now_ns()), of(Kind.PROCESS_EXIT))
            tasks.look(now_ns())
            assert not tasks.of
            go(second)
            until(lambda: tasks.look(now_ns()), lambda e: e.tgid == second.pid)
            assert set(tasks.of) == {second.pid}
    tasks.close()


def test_of_a_family_that_comes_at_once_all_are_taken_in(tmp_path: Path) -> None:
    """Whatever the order of their numbers: a grandchild may have a lower one than its parent."""
    for pid, parent in ((100, 1), (102, 101), (101, 103), (103, 100), (104, 1)):
        folder = tmp_path / str(pid)
        (folder / "task").mkdir(parents=True)
        rest = " ".join(["0"] * 17)
        (folder / "stat").write_text(f"{pid} (a b) c) S {parent} {rest} {pid * 10} 0\n")
        (folder / "cmdline").write_bytes(b"server\0" + str(pid).encode())
    late = [tmp_path / str(pid) for pid in (101, 102, 103, 104)]
    hidden = [path.rename(tmp_path / f"hidden{path.name}") for path in late]
    tasks = Tasks(tmp_path)
    tasks.begin(frozenset({100}), now_ns())
    for path, there in zip(late, hidden, strict=True):
        there.rename(path)
    told = tasks.look(now_ns())
    assert [e.tgid for e in told if e.kind == Kind.FORK] == [103, 101, 102]
    (tmp_path / "101/stat").write_text(f"101 (other) S 1 {' '.join(['0'] * 17)} 999 0\n")
    told = tasks.look(now_ns())  # its number is another's
    assert [(e.kind, e.tgid) for e in told] == [(Kind.PROCESS_EXIT, 101)]
    assert set(tasks.of) == {100, 102, 103}


# -- files ------------------------------------------------------------------------------------

READER = """
import mmap, os, sys
print(flush=True); sys.stdin.readline()
fd = os.open(sys.argv[1], os.O_RDONLY)
print(flush=True); sys.stdin.readline()
os.read(fd, 700_001)
print(flush=True); sys.stdin.readline()
held = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
print(flush=True); sys.stdin.readline()
"""


def test_a_file_is_followed_from_open_over_read_to_map(tmp_path: Path) -> None:
    path = tmp_path / "a b.weights"
    path.write_bytes(os.urandom(3 * BIG + 17))
    size, files = path.stat().st_size, Files(BIG)

    def look() -> list[Told]:
        return files.look([process.pid], now_ns())

    with scripted(READER, path) as process:
        heard(process)
        files.look([process.pid], now_ns(), first=True)
        steps = []
        for kind in (Kind.OPEN, Kind.READ, Kind.MMAP):
            go(process)
            heard(process)
            told = until(look, of(kind))
            steps.append(next(e for e in told if e.kind == kind))
        opened, read, mapped = steps
    assert {e.ino for e in steps} == {path.stat().st_ino}
    assert len({e.dev for e in steps}) == 1
    assert (opened.a, read.a, read.b) == (size, 700_001, 0)
    assert mapped.a == -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    (file,) = files.of.values()
    assert (file.size_bytes, file.reads, file.read_bytes) == (size, 1, 700_001)
    files.close()


def test_what_was_there_before_is_held_and_no_news(tmp_path: Path) -> None:
    path = tmp_path / "held"
    path.write_bytes(bytes(2 * BIG))
    with path.open("rb") as open_file, mmap.mmap(open_file.fileno(), 0, prot=mmap.PROT_READ):
        files = Files(BIG)
        first = files.look([os.getpid()], now_ns(), first=True)
        mine = [e for e in first if e.ino == path.stat().st_ino]
        assert {(e.kind, e.flags) for e in mine} == {(Kind.HELD, 1), (Kind.HELD, 0)}
        again = files.look([os.getpid()], now_ns())
        assert not [e for e in again if e.ino == path.stat().st_ino]
    files.close()


def test_a_process_that_is_gone_tells_nothing() -> None:
    done = subprocess.Popen(["true"])
    done.wait()
    files = Files(BIG)
    assert files.look([done.pid], now_ns()) == []
    files.forget(done.pid)
    files.close()


# -- sockets ----------------------------------------------------------------------------------


def test_who_listens_by_both_ways_and_a_second_tool() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        ports = {one.getsockname()[1]}
        found = listeners(os.getpid())
        assert ports <= set(found.values())
        assert silent.getsockname()[1] not in found.values()
        assert found[os.fstat(one.fileno()).st_ino] == one.getsockname()[1]
        assert found.items() >= {
            (os.fstat(one.fileno()).st_ino, one.getsockname()[1]),
        }
        mine = psutil.Process().net_connections(kind="tcp")
        theirs = {c.laddr.port for c in mine if c.status == psutil.CONN_LISTEN}
        assert ports <= theirs <= set(found.values())
        assert _listed(os.getpid())[os.fstat(one.fileno()).st_ino] in ports


WORDS = ["Once", " upon", " a", " time"]


class Answers(BaseHTTPRequestHandler):
    """Streams as llama-server does."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for word in WORDS:
            time.sleep(0.05)
            told = {"choices": [{"delta": {"content": word}}]}
            self.wfile.write(f"data: {json.dumps(told)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        """Nothing to be said."""


@contextmanager
def relayed(port: int | None) -> Iterator[tuple[Relay, Texts]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    relay, texts = Relay(number), Texts()
    relay.begin(lambda: None if port is None else (port, 4711), texts)
    try:
        yield relay, texts
    finally:
        relay.close()


def test_what_passes_the_relay_arrives_whole_and_is_stamped() -> None:
    seen: list[Seen] = []
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with relayed(server.server_port) as (relay, texts):
            connection = http.client.HTTPConnection("127.0.0.1", relay.port, timeout=10)
            body = json.dumps({"model": "m", "stream": True, "messages": []})
            sent_ns = now_ns()
            connection.request("POST", "/v1/chat/completions", body)
            response = connection.getresponse()
            first_line = response.readline()
            first_ns = now_ns()
            text = first_line + response.read()
            connection.close()
            tap = RequestTap(seen.append, lambda _: None, lambda *_: None)
            deadline = time.monotonic() + PATIENCE_S
            while not relay.events:
                assert time.monotonic() < deadline
                time.sleep(LOOK_S)
            for head, data in texts.drain(now_ns()):
                tap.take(head, data, int(head["kind"]) == TextKind.SENT)
            (closed,) = relay.events
            tap.closed(closed.ino, closed.ns)
        server.shutdown()
    told = "".join(
        json.loads(line[6:])["choices"][0]["delta"]["content"]
        for line in text.decode().splitlines()
        if line.startswith("data: {")
    )
    assert told == "".join(WORDS)
    (one,) = seen
    exchange = one.exchange
    assert (one.tgid, exchange.model, exchange.streamed, exchange.outcome) == (
        4711, "m", True, "ok",
    )  # fmt: skip
    assert sent_ns <= exchange.start_ns <= (exchange.first_token_ns or 0) <= first_ns
    assert (exchange.first_token_ns or 0) - exchange.start_ns >= 50_000_000


@pytest.mark.parametrize("port", [None, 1])
def test_where_no_server_is_the_relay_ends_the_connection(port: int | None) -> None:
    with relayed(port) as (relay, texts):
        client = socket.create_connection(("127.0.0.1", relay.port), timeout=10)
        with client, suppress(ConnectionError):
            assert client.recv(1) == b""
        assert list(texts.drain(now_ns())) == []


SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Answers(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"delta": {"content": "word"}}]}\\n\\n')
        self.wfile.write(b"data: [DONE]\\n\\n")
HTTPServer(("127.0.0.1", 0), Answers).serve_forever()
"""


def test_a_relay_before_a_command_passes_on_to_it_and_not_to_itself(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    record = [sys.executable, "-m", "ttftprof", "record", "-q", "-o", "a.ttft", "--loader", "proc"]
    stop = ["--relay", str(port), "--first-tokens", "1"]
    command = [*record, *stop, "--", sys.executable, "-S", "-c", SERVER]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as recorder:
        try:
            answer = ""
            deadline = time.monotonic() + 3 * PATIENCE_S
            while not answer:
                assert time.monotonic() < deadline
                time.sleep(LOOK_S)
                client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
                with suppress(ConnectionError, http.client.HTTPException):  # not there yet
                    client.request("POST", "/v1/chat/completions", '{"model": "m"}')
                    answer = client.getresponse().read().decode()
                client.close()
            assert "word" in answer
            assert recorder.wait(3 * PATIENCE_S) == 0
        finally:
            recorder.terminate()
    (request,) = analyse(tmp_path / "a.ttft").requests
    assert (request.model, request.outcome) == ("m", "ok")


def test_a_relay_says_that_its_port_is_taken() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UsageError, match="cannot be listened on"),
    ):
        Relay(taken.getsockname()[1])


def test_texts_that_nobody_takes_are_counted_as_lost() -> None:
    texts = Texts()
    piece = bytes(1 << 20)
    for _ in range((MAX_BYTES >> 20) + 3):
        texts.add(TextKind.SENT, now_ns(), piece)
    assert texts.lost == 3
    assert sum(len(data) for _, data in texts.drain(now_ns())) == MAX_BYTES
    texts.add(TextKind.SENT, now_ns(), piece)
    assert texts.lost == 3


def test_a_text_of_later_stays_for_the_next_look() -> None:
    texts = Texts()
    texts.add(TextKind.LOG, 10, b"early", tgid=7)
    texts.add(TextKind.LOG, 20, b"late", tgid=7)
    assert [data for _, data in texts.drain(10)] == [b"early"]
    ((head, data),) = texts.drain(20)
    assert (int(head["tgid"]), int(head["length"]), data) == (7, 4, b"late")


# -- a command's output -------------------------------------------------------------------------

TALKS = """
import os, subprocess, sys
sys.path[:0] = sys.argv[2:]
from ttftprof.polled.output import CommandOutput
said = CommandOutput()
child = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1]], stdout=said.ends[0], stderr=said.ends[1]
)
said.handed_over()
if "leave" in sys.argv[1]:
    os._exit(0)
child.wait()
import time
told = b""
while b"last" not in told:
    told += b"".join(data for _, data in said.drain())
    time.sleep(0.01)
print(len(told), flush=True)
"""


def talk(script: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", TALKS, script, *filter(None, sys.path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout, done.stderr


def test_a_commands_output_goes_where_it_would_and_is_told() -> None:
    out, err = talk(
        "import sys; print('o' * 99_999, flush=True); print('e', file=sys.stderr); print('last')"
    )
    *lines, length = out.splitlines()
    assert lines == ["o" * 99_999, "last"]
    assert err == "e\n"
    assert int(length) == 100_000 + 5 + 2


def test_a_server_that_outlives_the_recorder_keeps_its_output() -> None:
    out, _ = talk(
        "import time; time.sleep(0.5); print('leave', flush=True); print('still here', flush=True)"
    )
    assert out == "leave\nstill here\n"


def test_output_is_dated_when_it_is_written() -> None:
    said = CommandOutput()
    began_ns = now_ns()
    os.write(said.ends[1], b"")
    os.write(said.ends[1], b"load_tensors: loading\n")
    told: list[tuple[int, bytes]] = []
    deadline = time.monotonic() + PATIENCE_S
    while not told:
        assert time.monotonic() < deadline
        told += said.drain()
    ((ns, data),) = told
    assert data == b"load_tensors: loading\n"
    assert began_ns <= ns <= now_ns()
    said.handed_over()
    said.close()
