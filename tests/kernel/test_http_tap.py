"""The HTTP tap on the running kernel: many streams, every way to read and write, every protocol."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from kernel.support import Recording, recording, start_recording
from lab.core_waits import stood_ready_ns
from lab.llama_server import LlamaServer
from ttftprof.sources.http import (
    BEGAN_BEFORE,
    NO_TOKENS,
    NOT_STREAMED,
    TOKEN_INFERRED,
    Connection,
    Exchange,
)
from workloads.scripted import go, heard, scripted
from workloads.styles import DIALOGS, STYLES, UNSEEN
from workloads.transcripts import SERVERS, transcript

pytestmark = pytest.mark.kernel

LAB = Path(__file__).parents[1] / "lab"
LEAVES_AFTER_S = 0.1
CANARY = b"CANARY"  # in every prompt, answer and key here
TOKENS = 12
TIMEOUT_S = 10
RESIDENT_BYTES = 120_000_000
# A thread may lose its core between its own stamp and the call. So of a moment is asserted which
# two of the server's or the client's own stamps it lies between, and of the typical one that it is
# near.
TYPICAL_ERROR_NS = 100_000
NEAR_NS = 5_000_000
Span = tuple[int, int]  # before and after a call, CLOCK_MONOTONIC ns


def facts_of(seen: Recording) -> list[dict[str, Any]]:
    with seen.reader() as reader:
        return [fact for _, fact in reader.facts("exchange")]


def assert_no_word_was_kept(seen: Recording) -> None:
    """Neither in the recording nor in anything that lies beside it."""
    for path in seen.path.parent.glob(f"{seen.path.name}*"):
        assert CANARY not in path.read_bytes(), path


# -- many streams ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("http_load") / "http_load"
    subprocess.run(
        ["gcc", "-O2", "-Wall", "-o", str(program), str(LAB / "http_load.c")], check=True
    )
    return program


@dataclass
class Load:
    """A server of many streams; `sent`: by client port, (first, last) token of each request."""

    process: subprocess.Popen[str]
    port: int
    sent: dict[int, list[tuple[Span, Span]]] = field(default_factory=dict)

    def take(self, lines: Iterator[str]) -> None:
        for line in lines:
            port, *ns = map(int, line.split())
            self.sent.setdefault(port, []).append(((ns[0], ns[1]), (ns[2], ns[3])))


@contextmanager
def serving(load: Path, gap_us: int, wait_ms: int = 20, tokens: int = TOKENS) -> Iterator[Load]:
    process = subprocess.Popen(
        [str(load), "serve", str(tokens), str(gap_us), str(wait_ms)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    server = Load(process, int(process.stdout.readline()))
    reader = threading.Thread(target=server.take, args=(iter(process.stdout),))
    reader.start()
    try:
        yield server
    finally:
        process.kill()
        process.wait()
        reader.join()


def ask(load: Path, server: Load, streams: int, requests: int) -> int:
    """Asks over so many connections, so often on each; how many answers came."""
    done = subprocess.run(
        [str(load), "ask", str(server.port), str(streams), str(requests)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return len(done.stdout.splitlines())


@pytest.mark.parametrize(("streams", "requests", "gap_us"), [(64, 8, 5_000), (1000, 2, 100_000)])
def test_no_first_token_of_many_streams_is_missed(
    streams: int, requests: int, gap_us: int, load: Path, tmp_path: Path
) -> None:
    with (
        serving(load, gap_us) as server,
        recording(tmp_path / "many.ttft", "--pid", str(server.process.pid)) as seen,
    ):
        asked = ask(load, server, streams, requests)
        time.sleep(0.3)
    with seen.reader() as reader:
        assert reader.lost() == {}
    facts = sorted(facts_of(seen), key=lambda f: f["start_ns"])
    assert len(facts) == asked == streams * requests
    assert {(f["outcome"], *f["notes"]) for f in facts} == {("ok",)}
    assert {(f["prompt_tokens"], f["completion_tokens"]) for f in facts} == {(17, TOKENS)}
    by_port: dict[int, list[dict[str, Any]]] = {}
    for fact in facts:
        by_port.setdefault(fact["remote_port"], []).append(fact)
    pairs = [
        (fact[name], *span)
        for port, sent in server.sent.items()
        for fact, spans in zip(by_port[port], sent, strict=True)
        for name, span in zip(("first_token_ns", "last_token_ns"), spans, strict=True)
    ]
    assert len(pairs) == 2 * streams * requests
    assert [pair for pair in pairs if not pair[1] <= pair[0] <= pair[2]] == []
    assert median(ns - before for ns, before, _ in pairs) < TYPICAL_ERROR_NS
    assert_no_word_was_kept(seen)


def test_ten_thousand_requests_on_eight_connections(load: Path, tmp_path: Path) -> None:
    with (
        serving(load, gap_us=1, wait_ms=1, tokens=1) as server,
        recording(tmp_path / "long.ttft", "--pid", str(server.process.pid)) as seen,
    ):
        assert ask(load, server, 8, 1_250) == 10_000
        time.sleep(0.3)
    facts = facts_of(seen)
    with seen.reader() as reader:
        assert reader.lost() == {}
        assert reader.meta["own"]["max_rss_bytes"] < RESIDENT_BYTES
    assert len(facts) == 10_000
    assert {(f["completion_tokens"], f["first_token_ns"] is None) for f in facts} == {(1, False)}


_BUSY = """
import socket, sys, time
if sys.argv[1] == "unix":
    listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[2]); listener.listen()
else:
    listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1] if sys.argv[1] == "tcp" else 0, flush=True)
for requests in (2, 1):
    sock, _ = listener.accept()
    print("accepted", flush=True)
    for _ in range(requests):
        sys.stdin.readline()
        print(time.monotonic_ns(), flush=True)
        sock.recv(1 << 16)
        sock.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 15\\r\\n\\r\\n" + b'{"content":"x"}')
    sock.close()
sys.stdin.readline()
"""


@pytest.mark.parametrize("family", ["tcp", "unix"])
def test_a_request_begins_when_it_reaches_a_busy_server(family: str, tmp_path: Path) -> None:
    """Accepted but not read, waiting on a kept connection, and not even accepted."""
    path = str(tmp_path / "socket")
    with scripted(_BUSY, family, path) as server:
        port = int(heard(server))
        sent, read = [], []

        def connect() -> socket.socket:
            sock = socket.socket(socket.AF_UNIX if family == "unix" else socket.AF_INET)
            sock.settimeout(TIMEOUT_S)
            sock.connect(path if family == "unix" else ("127.0.0.1", port))
            return sock

        def send(sock: socket.socket) -> None:
            sent.append(time.monotonic_ns())
            sock.sendall(request_for("embeddings"))

        def answered(sock: socket.socket) -> None:
            """The server reads and answers what waits for it there."""
            time.sleep(0.05)
            go(server)
            read.append(int(heard(server)))
            assert sock.recv(100)

        with recording(tmp_path / "busy.ttft", "--pid", str(server.pid)) as seen:
            first = connect()
            assert heard(server) == "accepted"
            send(first)
            answered(first)
            send(first)
            second = connect()
            send(second)
            answered(first)
            assert heard(server) == "accepted"
            answered(second)
            first.close()
            second.close()
    starts = sorted(f["start_ns"] for f in facts_of(seen))
    assert len(starts) == len(sent)
    for start, *span in zip(starts, sent, read, strict=True):
        assert_within(start, span)


_MID_ANSWER = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sock, _ = listener.accept()
sock.recv(1 << 16)
sock.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Type: text/event-stream\\r\\n"
             b"Transfer-Encoding: chunked\\r\\n\\r\\n")
print("head", flush=True)
sys.stdin.readline()
for delta in ['"role":"assistant","content":null', '"content":"CANARY"', '"content":"x"']:
    event = b'data: {"choices":[{"delta":{' + delta.encode() + b"}}]}\\n\\n"
    if sys.argv[1] == "token" and "role" in delta:
        continue
    before = time.monotonic_ns()
    sock.sendall(b"%x\\r\\n%s\\r\\n" % (len(event), event))
    print(before, time.monotonic_ns(), flush=True)
    time.sleep(0.05)
sock.sendall(b"0\\r\\n\\r\\n")
sys.stdin.readline()
"""


@pytest.mark.parametrize("first", ["role", "token"])
def test_attached_after_the_head_of_an_answer(first: str, tmp_path: Path) -> None:
    """A router says 200 once the model is loaded, seconds before the first token. The beginning of
    an answer shows in its chunk with the role; without it, earlier text may have been missed."""
    process = subprocess.Popen(
        [sys.executable, "-c", _MID_ANSWER, first],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    try:
        port = int(process.stdout.readline())
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as sock:
            sock.sendall(request_for("embeddings"))
            assert process.stdout.readline() == "head\n"
            limit = ("--first-tokens", "1") if first == "role" else ()
            seen = start_recording(tmp_path / "mid.ttft", "--pid", str(process.pid), *limit)
            process.stdin.write("go\n")
            process.stdin.flush()
            while b"0\r\n\r\n" not in sock.recv(1 << 16):
                pass
            if limit:
                assert seen.process.wait(timeout=TIMEOUT_S) == 0
        assert seen.stop() == 0, seen.output
    finally:
        process.kill()
        stamps, _ = process.communicate()
    (fact,) = facts_of(seen)
    assert fact["notes"][0] == BEGAN_BEFORE
    assert (fact["method"], fact["outcome"]) == ("", "ok")
    assert_no_word_was_kept(seen)
    if first == "token":
        assert fact["first_token_ns"] is None
        return
    before, after = map(int, stamps.splitlines()[1].split())
    assert before <= fact["first_token_ns"] <= after
    (request,) = seen.report().requests
    assert "it began before recording did: it waited at least this long" in request.notes


_SHARED = """
import os, socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
for how in sys.argv[2:]:
    sock, _ = listener.accept()
    for _ in range(2):
        sock.recv(1 << 16)
        if how == "duplicate":
            os.close(os.dup(sock.fileno()))
        elif how == "forked":
            child = os.fork()
            if not child:
                os.close(sock.fileno())
                os._exit(0)
            os.waitpid(child, 0)
        time.sleep(0.2)
        sock.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 15\\r\\n\\r\\n" + b'{"content":"x"}')
    if how == "until-close":
        sock.recv(1 << 16)
        sock.sendall(b"HTTP/1.1 200 OK\\r\\n\\r\\n" + b'{"content":"x"}')
    sock.close()
"""


def test_a_unix_socket_ends_with_its_last_holder(tmp_path: Path) -> None:
    ways = ("plain", "duplicate", "forked", "until-close")
    path, waited = str(tmp_path / "socket"), []
    process = subprocess.Popen(
        [sys.executable, "-c", _SHARED, path, *ways], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        with recording(tmp_path / "shared.ttft", "--pid", str(process.pid)) as seen:
            for way in ways:
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.settimeout(TIMEOUT_S)
                    sock.connect(path)
                    for _ in range(3 if way == "until-close" else 2):
                        sent_ns = time.monotonic_ns()
                        sock.sendall(request_for("embeddings"))
                        assert sock.recv(1 << 16)
                        waited.append((sent_ns, time.monotonic_ns()))
    finally:
        process.kill()
        process.communicate()
    facts = sorted(facts_of(seen), key=lambda f: f["start_ns"])
    assert [(f["method"], f["outcome"], f["status"]) for f in facts] == [("POST", "ok", 200)] * 9
    for fact, (sent_ns, answered_ns) in zip(facts[:8], waited[:8], strict=True):
        assert sent_ns <= fact["start_ns"] <= fact["end_ns"] - 200_000_000
        assert fact["end_ns"] <= answered_ns


_SMALL_WRITES = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sock, _ = listener.accept()
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, int(sys.argv[1]))
event = b'data: {"choices":[{"delta":{"content":"CANARY"}}]}\\n\\n'
while sock.recv(1 << 16):
    time.sleep(0.005)
    sock.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Type: text/event-stream\\r\\n"
                 b"Transfer-Encoding: chunked\\r\\n\\r\\n")
    time.sleep(0.002)
    sock.sendall(b"%x\\r\\n%s\\r\\n0\\r\\n\\r\\n" % (len(event), event))
"""


@pytest.mark.parametrize("no_delay", [True, False])
def test_a_token_counts_when_it_leaves_the_machine(no_delay: bool, tmp_path: Path) -> None:
    """Without TCP_NODELAY the kernel holds it until the client acknowledges the head."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SMALL_WRITES, str(int(no_delay))],
        stdout=subprocess.PIPE,
        text=True,
    )
    came, stood_ready = [], []
    try:
        assert process.stdout
        port = int(process.stdout.readline())
        with (
            recording(tmp_path / "held.ttft", "--pid", str(process.pid)) as seen,
            socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as sock,
        ):
            for _ in range(20):
                before_ns = stood_ready_ns()
                sock.sendall(request_for("vllm_chat_stream"))
                while b"data:" not in sock.recv(1 << 16):
                    pass
                came.append(time.monotonic_ns())
                stood_ready.append(stood_ready_ns() - before_ns)
    finally:
        process.kill()
        process.communicate()
    facts = sorted(facts_of(seen), key=lambda f: f["start_ns"])
    assert [f["outcome"] for f in facts] == ["ok"] * 20
    late = [there - fact["first_token_ns"] for fact, there in zip(facts, came, strict=True)]
    assert min(late) >= 0  # nothing comes before it is sent
    late = [ns - ready for ns, ready in zip(late, stood_ready, strict=True)]
    assert sum(ns < NEAR_NS for ns in late) >= 18, late  # of 20: the whole machine may stand still
    held = [f for f in facts if any("TCP_NODELAY" in note for note in f["notes"])]
    assert bool(held) is not no_delay
    assert all(f["end_ns"] >= f["first_token_ns"] for f in facts)


# -- the real server ------------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("router", [True, False])
def test_first_tokens_ends_after_exactly_so_many(
    router: bool, models_dir: Path, tmp_path: Path
) -> None:
    """A router's request is one, though its runner serves it again behind it."""
    server = LlamaServer.router(models_dir) if router else LlamaServer.single(models_dir / "a.gguf")
    with server:
        if router:
            server.load("a")
        seen = start_recording(tmp_path / "n.ttft", "--pid", str(server.pid), "--first-tokens", "3")
        for asked in range(1, 4):
            time.sleep(0.3)  # a recorder that counts double would be gone by now
            assert seen.process.poll() is None, (asked, seen.stop(), seen.output)
            server.chat("a", f"number {asked}", max_tokens=2)
        assert seen.process.wait(timeout=10) == 0
    assert seen.stop() == 0
    assert "3 first token(s) seen" in seen.output
    with seen.reader() as reader:
        assert reader.meta["ended_because"] == "3 first token(s) seen"
    assert [r.model for r in seen.report().requests] == ["a"] * 3


# -- every way to read and write, every protocol ---------------------------------------------------


@dataclass
class Styles:
    """The server of `workloads.styles`, its recording, and what it said of its own answers."""

    process: subprocess.Popen[str]
    ports: dict[str, int]
    path: str
    said: list[dict[str, Any]] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)
    seen: Recording | None = None
    asked: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    """By name: the client's port, and when it sent each request."""

    def take(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.said.append(json.loads(line))

    def open(self, style: str) -> socket.socket:
        if style == "unix":
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(TIMEOUT_S)
            sock.connect(self.path)
            return sock
        return socket.create_connection(("127.0.0.1", self.ports[style]), TIMEOUT_S)

    def ask(self, style: str, *dialogs: str, name: str = "") -> None:
        """Asks one after another on one connection, and closes it."""
        with self.open(style) as sock:
            self.talk(sock, name or f"{style}:{dialogs[0]}", *dialogs)

    def talk(self, sock: socket.socket, name: str, *dialogs: str, port: int = 0) -> None:
        own = sock.getsockname()
        port = port or (own[1] if isinstance(own, tuple) else 0)
        _, stamps = self.asked.setdefault(name, (port, []))
        for dialog in dialogs:
            stamps.append(time.monotonic_ns())
            sock.sendall(request_for(dialog))
            hear_out(sock, dialog)

    def of(self, name: str) -> list[dict[str, Any]]:
        """The exchanges seen on a connection, oldest first."""
        port, _ = self.asked[name]
        return [f for f in self.facts if f["remote_port"] == port]

    def only(self, name: str) -> dict[str, Any]:
        (fact,) = self.of(name)
        return fact

    def writes(self, style: str, dialog: str, fact: dict[str, Any]) -> list[Span]:
        """When the server did each write of the answer that a fact tells of."""
        return next(
            said["writes"]
            for said in self.said
            if (said["style"], said["dialog"]) == (style, dialog)
            and fact["start_ns"] < said["writes"][0][0] < fact["end_ns"]
        )


def assert_within(ns: int, span: Sequence[int]) -> None:
    assert span[0] <= ns <= span[1]


def request_for(dialog: str) -> bytes:
    extra = f"X-Dialog: {dialog}\r\nAuthorization: Bearer sk-CANARY".encode()
    if dialog in SERVERS:
        line, _, rest = transcript(dialog)[0][1].partition(b"\r\n")
        return line + b"\r\n" + extra + b"\r\n" + rest
    method, path = {
        "head": ("HEAD", "/health"),
        "nothing": ("DELETE", "/models"),
        "websocket": ("GET", "/ws"),
        "embeddings": ("POST", "/v1/embeddings"),
    }.get(dialog, ("POST", "/v1/chat/completions"))
    body = b'{"model":"m","stream":true,"messages":"CANARY-prompt"}'
    if method != "POST":
        body = b""
    head = f"{method} {path} HTTP/1.1\r\n".encode() + extra
    return head + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def hear_out(sock: socket.socket, dialog: str) -> None:
    """Reads until all of the answer came."""
    left = sum(map(len, DIALOGS[dialog]))
    while left > 0:
        got = sock.recv(1 << 16)
        if not got:
            return
        left -= len(got)


def unread_parts(styles: Styles) -> None:
    """Connections that end early, in garbage or in what is no HTTP/1."""
    with styles.open("recv-send") as sock:  # the client hangs up while it waits
        styles.asked["cancelled"] = sock.getsockname()[1], [time.monotonic_ns()]
        sock.sendall(request_for("hang"))
        time.sleep(LEAVES_AFTER_S)
    with styles.open("recv-send") as sock:  # and between head and first token
        styles.talk(sock, "stalled", "stalled")
    with styles.open("recv-send") as sock:
        styles.asked["pipelined"] = sock.getsockname()[1], [time.monotonic_ns()]
        sock.sendall(request_for("vllm_chat_stream") + request_for("ollama_chat_stream"))
        hear_out(sock, "vllm_chat_stream")
        hear_out(sock, "ollama_chat_stream")
    with styles.open("recv-send") as sock:
        styles.asked["continue"] = sock.getsockname()[1], [time.monotonic_ns()]
        head, _, body = request_for("early").partition(b"\r\n\r\n")
        sock.sendall(head + b"\r\nExpect: 100-continue\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 100")
        sock.sendall(body)
        hear_out(sock, "early")
    with styles.open("recv-send") as sock:
        styles.asked["http/2"] = sock.getsockname()[1], []
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for version in ("TLSv1_2", "TLSv1_3"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
        with styles.open("tls") as plain:
            port = plain.getsockname()[1]
            with context.wrap_socket(plain) as sock:
                for _ in range(2):
                    styles.talk(sock, version, "vllm_chat_stream", port=port)
    for i, rubbish in enumerate(RUBBISH):
        with styles.open("recv-send") as sock, suppress(OSError):
            styles.asked[f"rubbish {i}"] = sock.getsockname()[1], []
            sock.settimeout(1)
            sock.sendall(rubbish)
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1)


RUBBISH = [
    bytes(range(256)) * 300,
    b"GET / HTTP/1.1\r\nX-Long: " + b"CANARY" * 1_700_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nX-Never-Ends: CANARY",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\nCANARY",
    b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 16 + b"\r\nCAN",
    b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 500000\r\n\r\n" + b'{"a":' * 100_000,
    b"\x16\x03\x01\xff\xff" + b"\x17\x03\x03\x00\x00" * 99,
    b"GET",
]
TWO = ("vllm_chat_stream", "ollama_chat_stream")
HOSTILE = ("deep", "huge-chunk", "huge-length", "cut-utf8")
SPECIAL = ("gzip", "brotli", "embeddings", "loading", "early", "head", "nothing", "until-close",
           "websocket")  # fmt: skip


@pytest.fixture(scope="module")
def styles(tmp_path_factory: pytest.TempPathFactory) -> Styles:
    """All conversations, in one recording; stopped."""
    folder = tmp_path_factory.mktemp("styles")
    process = subprocess.Popen(
        [sys.executable, "-m", "workloads.styles", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert process.stdout
    first = json.loads(process.stdout.readline())
    styles = Styles(process, first["ports"], first["path"])
    reader = threading.Thread(target=styles.take, args=(iter(process.stdout),))
    reader.start()
    try:
        with recording(folder / "styles.ttft", "--pid", str(process.pid)) as seen:
            for style in STYLES:
                styles.ask(style, "vllm_chat_stream", "vllm_chat_stream")
            styles.ask("unix", "vllm_chat_stream", "ollama_chat_stream")
            styles.ask("recv-send", *SERVERS, name="apis")
            for dialog in (*SPECIAL, *HOSTILE):
                styles.ask("recv-send", dialog)
            unread_parts(styles)
            time.sleep(0.3)
    finally:
        process.kill()
        process.wait()
        reader.join()
    styles.seen, styles.facts = seen, sorted(facts_of(seen), key=lambda f: f["start_ns"])
    return styles


def told(fact: dict[str, Any]) -> dict[str, Any]:
    """What a fact says of its exchange, but for the moments and the place."""
    place = ("socket", "tgid", "tid", "local_port", "remote_port", "request_bytes", "notes")
    return {k: v for k, v in fact.items() if not k.endswith("_ns") and k not in place}


def expected(dialog: str) -> dict[str, Any]:
    """What the parser makes of a transcript when it is given all of it."""
    ended: list[Exchange] = []
    connection = Connection(ended.append)
    for side, data in transcript(dialog):
        (connection.received if side == "r" else connection.sent)(0, data)
    connection.closed(0)
    fact = asdict(ended[0]) | {"timings": dict(ended[0].timings)}
    return told(json.loads(json.dumps(fact)))


def assert_told(facts: Sequence[dict[str, Any]], *wanted: dict[str, Any]) -> None:
    """They say this of their exchanges. How many chunks held text is unknown of a server so slow
    that the kernel could be asked for quiet before the last of them."""
    assert len(facts) == len(wanted)
    for fact, exchange in zip(facts, wanted, strict=True):
        unknown = {"text_chunks": None} if fact["text_chunks"] is None else {}
        assert told_of(fact, exchange) == exchange | told_of(unknown, exchange)


def told_of(fact: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fact.items() if name in names}


def token_write(dialog: str) -> int:
    """Which write of a dialog carries its first token."""
    moments: list[int] = []
    connection = Connection(lambda e: moments.append(e.first_token_ns or 0))
    for i, (side, data) in enumerate(transcript(dialog)):
        (connection.received if side == "r" else connection.sent)(i, data)
    return moments[0] - 1


@pytest.mark.parametrize("style", [s for s in STYLES if s not in UNSEEN and s != "uring"])
def test_every_way_to_read_and_write_shows_the_same(style: str, styles: Styles) -> None:
    dialog = "vllm_chat_stream"
    facts = styles.of(f"{style}:{dialog}")
    assert_told(facts, *[expected(dialog)] * 2)
    assert [f["notes"] for f in facts] == [[], []]
    writes = styles.writes(style, dialog, facts[1])
    assert_within(facts[1]["first_token_ns"], writes[token_write(dialog)])
    _, sent = styles.asked[f"{style}:{dialog}"]
    assert_within(facts[1]["start_ns"], (sent[1], writes[0][0]))


@pytest.mark.parametrize("style", UNSEEN)
def test_an_answer_sent_out_of_no_buffer_counts_from_its_first_byte(
    style: str, styles: Styles
) -> None:
    fact = styles.of(f"{style}:vllm_chat_stream")[0]
    assert (fact["model"], fact["status"]) == ("Qwen/Qwen3-0.6B", 200)
    assert TOKEN_INFERRED in fact["notes"]
    assert fact["response_bytes"] == sum(map(len, DIALOGS["vllm_chat_stream"]))
    writes = next(s["writes"] for s in styles.said if s["style"] == style)
    assert_within(fact["first_token_ns"], writes[1])


def test_io_uring_gives_inferred_requests(styles: Styles) -> None:
    facts = styles.of("uring:vllm_chat_stream")
    assert [(f["protocol"], f["generates"], f["outcome"]) for f in facts] == [
        ("unseen", True, "ok")
    ] * 2
    writes = styles.writes("uring", "vllm_chat_stream", facts[1])
    assert_within(facts[1]["first_token_ns"], writes[0])
    assert {f["response_bytes"] for f in facts} == {sum(map(len, DIALOGS["vllm_chat_stream"]))}


def test_a_unix_socket_shows_the_same(styles: Styles) -> None:
    facts = [f for f in styles.facts if f["local_port"] == 0]
    assert_told(facts, *map(expected, TWO))
    _, sent = styles.asked["unix:vllm_chat_stream"]
    for fact, ns, dialog in zip(facts, sent, TWO, strict=True):
        assert_within(fact["start_ns"], (ns, styles.writes("unix", dialog, fact)[0][0]))


def test_every_api_is_read_to_its_last_figure(styles: Styles) -> None:
    facts = styles.of("apis")
    assert_told(facts, *map(expected, SERVERS))
    for dialog, fact in zip(SERVERS, facts, strict=True):
        if fact["first_token_ns"] is None:
            assert dialog == "llama_error"
            continue
        writes = styles.writes("recv-send", dialog, fact)
        assert_within(fact["first_token_ns"], writes[token_write(dialog)])


@pytest.mark.parametrize(
    ("dialog", "wanted"),
    [
        ("gzip", {"status": 200, "outcome": "ok", "text_chunks": 2, "notes": ["compressed"]}),
        ("embeddings", {"prompt_tokens": 5, "outcome": "ok", "notes": [NO_TOKENS]}),
        ("loading", {"status": 503, "outcome": "error", "first_token_ns": None}),
        ("early", {"status": 200, "outcome": "ok", "notes": [NOT_STREAMED]}),
        ("head", {"status": 200, "outcome": "ok", "method": "HEAD", "first_body_ns": None}),
        ("nothing", {"status": 204, "outcome": "ok", "first_token_ns": None}),
        ("until-close", {"status": 200, "outcome": "cancelled", "text_chunks": 2}),
        ("websocket", {"status": 101, "notes": ["switched to another protocol"]}),
    ],
)
def test_what_is_special_is_said(dialog: str, wanted: dict[str, Any], styles: Styles) -> None:
    assert_told([styles.only(f"recv-send:{dialog}")], wanted)


def test_an_unreadable_coding_counts_from_its_first_byte(styles: Styles) -> None:
    fact = styles.only("recv-send:brotli")
    assert TOKEN_INFERRED in fact["notes"]
    assert_within(fact["first_token_ns"], styles.writes("recv-send", "brotli", fact)[1])


def test_clients_that_leave_are_cancelled(styles: Styles) -> None:
    for name in ("cancelled", "stalled"):
        fact = styles.only(name)
        assert (fact["outcome"], fact["first_token_ns"]) == ("cancelled", None)
    left, (_, (later_ns,)) = styles.only("cancelled"), styles.asked["continue"]
    assert left["start_ns"] + LEAVES_AFTER_S * 1e9 <= left["end_ns"] < later_ns


def test_pipelined_requests_are_two(styles: Styles) -> None:
    facts = styles.of("pipelined")
    assert_told(facts, *map(expected, TWO))
    assert facts[0]["first_token_ns"] < facts[1]["first_token_ns"]


def test_100_continue_is_no_answer(styles: Styles) -> None:
    fact = styles.only("continue")
    assert (fact["status"], fact["outcome"], fact["model"]) == (200, "ok", "m")


@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
def test_tls_gives_inferred_requests(version: str, styles: Styles) -> None:
    facts = styles.of(version)
    assert [(f["protocol"], f["generates"], f["model"]) for f in facts] == [("tls", True, None)] * 2
    _, sent = styles.asked[version]
    both = [s["writes"] for s in styles.said if s["style"] == "tls"]
    answers = both[:2] if version == "TLSv1_2" else both[2:]
    for fact, began_ns, writes in zip(facts, sent, answers, strict=True):
        assert "TLS" in fact["notes"][0]
        assert TOKEN_INFERRED in fact["notes"]
        assert_within(fact["start_ns"], (began_ns, writes[0][0]))
        assert_within(fact["first_token_ns"], writes[0])


def test_http2_is_said(styles: Styles) -> None:
    fact = styles.only("http/2")
    assert (fact["protocol"], fact["notes"]) == ("http/2", ["HTTP/2 is not read"])


def test_rubbish_does_no_harm(styles: Styles) -> None:
    assert styles.seen
    with styles.seen.reader() as reader:
        assert reader.lost() == {}
        assert reader.meta["complete"]
        assert reader.meta["own"]["max_rss_bytes"] < RESIDENT_BYTES
    for i in range(len(RUBBISH)):
        assert all(f["first_token_ns"] is None for f in styles.of(f"rubbish {i}"))
    for dialog in HOSTILE:
        assert styles.only(f"recv-send:{dialog}")["status"] == 200


def test_no_word_of_any_api_is_kept(styles: Styles) -> None:
    assert styles.seen
    assert_no_word_was_kept(styles.seen)
