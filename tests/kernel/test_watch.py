"""`ttftprof watch` beside real servers: the same numbers as a recording, and no growth."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kernel.stalls import watch_for_stalls
from kernel.support import (
    ARMED_TIMEOUT_S,
    STOP_TIMEOUT_S,
    RecorderFailed,
    longest_ready_ns,
    recording,
)
from lab.llama_server import LlamaServer, free_port
from lab.page_cache import drop_cache
from ttftprof.analysis import analyse
from ttftprof.kernel.permission import effective_bits, names_of
from ttftprof.kernel.privilege import KEPT
from ttftprof.kernel.session import FILES
from ttftprof.recording import Reader
from workloads.client import ChatRequest, chat
from workloads.scenarios import run_scenario

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

PROMPT = "Say in one word what a page fault is."
TOLD_WITHIN_S = 60.0  # on a busy machine; only what hangs takes longer
# Two recorders stamp the same moments one after the other, on two cores that a server uses too.
STAMPS_NS = 4_000_000
SHARE = 0.03
GROWTH_BYTES = 6 << 20
NOBODY = 65534
REQUESTS = 300


@dataclass
class Watching:
    """A `ttftprof watch --format json` that runs, and the lines it has written."""

    process: subprocess.Popen[str]
    lines: list[dict[str, Any]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def await_lines(self, number: int) -> list[dict[str, Any]]:
        until = time.monotonic() + TOLD_WITHIN_S
        while len(self.lines) < number:
            assert time.monotonic() < until, (self.lines, self.said)
            time.sleep(0.02)
        return self.lines

    def await_words(self, words: str, times: int = 1, within_s: float = TOLD_WITHIN_S) -> None:
        until = time.monotonic() + within_s
        while sum(words in line for line in self.said) < times:
            assert time.monotonic() < until, self.said
            time.sleep(0.02)

    @property
    def memory_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)


@contextmanager
def watching(tmp_path: Path, *arguments: str) -> Iterator[Watching]:
    """Watches while the block runs; ended as by Ctrl-C, without any failure."""
    ready = tmp_path / "ready"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "ttftprof", "watch", "--format", "json"]
    process = subprocess.Popen(
        [*command, "--ready-file", str(ready), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    seen = Watching(process)
    readers = [
        threading.Thread(
            target=_read, args=(process.stdout, lambda t: seen.lines.append(json.loads(t)))
        ),
        threading.Thread(target=_read, args=(process.stderr, seen.said.append)),
    ]
    for reader in readers:
        reader.start()
    try:
        until = time.monotonic() + ARMED_TIMEOUT_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > until:
                raise RecorderFailed(f"not armed: {seen.said}")
            time.sleep(0.01)
        yield seen
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_TIMEOUT_S) == 0, seen.said
    finally:
        for child in psutil.Process(process.pid).children() if process.poll() is None else []:
            child.kill()  # a command would hold the pipes open
        process.kill()
        for reader in readers:
            reader.join()


def _read(stream: Any, take: Any) -> None:
    for line in stream:
        take(line)


def close(one: int, other: int, whole: int, stood_ready_ns: int = 0) -> bool:
    """`stood_ready_ns`: how long who stamped one of them may have waited for a core."""
    return abs(one - other) <= max(STAMPS_NS, SHARE * whole) + stood_ready_ns


@pytest.mark.engine
def test_the_real_router_is_told_of_as_a_recording_tells(models_dir: Path, tmp_path: Path) -> None:
    """Both watch the same three requests; what is kept is a recording with the same numbers."""
    kept = tmp_path / "slow"
    with LlamaServer.router(models_dir) as server:
        server.chat("a", "hello")
        drop_cache(models_dir / "b.gguf")
        pid = str(server.pid)
        with (
            watching(tmp_path, "--pid", pid, "--keep-slow", "0", str(kept)) as seen,
            recording(tmp_path / "same.ttft", "--pid", pid) as recorded,
        ):
            for model in ("b", "a", "a"):
                server.chat(model, PROMPT)
            told = seen.await_lines(3)
    requests = recorded.report().requests
    assert [line["request"]["model"] for line in told] == ["b", "a", "a"]
    assert [line["request"]["id"] for line in told] == ["1", "2", "3"]
    assert [line["request"]["switched"] for line in told] == [True, True, False]
    for line, request in zip(told, requests, strict=True):
        ours, ttft_ns = line["request"], request.ttft_ns or 0
        assert sum(ours["totals"]["phase"].values()) == ours["ttft_ns"]
        assert sum(ours["totals"]["activity"].values()) == ours["ttft_ns"]
        assert close(ours["ttft_ns"], ttft_ns, ttft_ns)
        theirs = request.phase_totals()
        for phase in {*theirs, *ours["totals"]["phase"]}:
            got, want = ours["totals"]["phase"].get(phase, 0), theirs.get(phase, 0)
            assert close(got, want, ttft_ns), (phase, got, want)
        again = analyse(Path(line["kept"])).requests
        assert [r.ttft_ns for r in again if r.start_ns == ours["start_ns"]] == [ours["ttft_ns"]]
    cold = next(f for f in told[0]["request"]["files"] if f["path"].endswith("b.gguf"))
    assert cold["bytes_from_storage"] == pytest.approx(cold["size_bytes"], rel=0.01)


@pytest.mark.engine
def test_a_server_that_comes_back_is_watched_again_without_root(
    models_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named by its port: the next server there is the same one to its user. All probes are armed a
    second time by who has no more than `privilege.KEPT`, in every thread, and is not root."""
    monkeypatch.setenv("SUDO_UID", str(NOBODY))
    monkeypatch.setenv("SUDO_GID", str(NOBODY))
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents:
        if folder.stat().st_uid == 0 and folder.name.startswith("pytest"):
            folder.chmod(0o755)
    port, metrics = free_port(), free_port()
    options = ("--port", str(port), "--prometheus", str(metrics))
    with LlamaServer.single(models_dir / "a.gguf", port=port) as first:
        first.chat("a", "hello")
        with watching(tmp_path, *options) as seen:
            first.chat("a", PROMPT)
            seen.await_lines(1)
            powers = [powers_of(seen.process.pid)]
            first.stop()
            with LlamaServer.single(models_dir / "b.gguf", port=port) as second:
                second.chat("b", PROMPT)
                told = seen.await_lines(3)
                powers.append(powers_of(seen.process.pid))
                page = urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics").read().decode()
    assert powers == [{(NOBODY, "".join(sorted(KEPT)))}] * 2
    kinds = [(line["request"]["id"], line["request"]["model"]) for line in told]
    assert kinds[0] == ("1", "a")
    assert sorted(kinds[1:]) == [("2", "b"), ("start 1", "b.gguf")]
    start = next(line["request"] for line in told if line["request"]["id"] == "start 1")
    assert {"launch", "load", "init"} <= start["totals"]["phase"].keys()
    assert "call: llama_model_load returned" in "".join(evidence_of(start)), "marks are seen, too"
    assert start["verdict"]["confidence"]
    families = {f.name: f for f in text_string_to_metric_families(page)}
    counts = {
        (s.labels["model"], s.labels["switched"]): s.value
        for s in families["ttftprof_ttft_seconds"].samples
        if s.name.endswith("_count")
    }
    assert counts == {("a", "no"): 1, ("b", "no"): 1}
    sums = [s.value for s in families["ttftprof_ttft_seconds"].samples if s.name.endswith("_sum")]
    ttfts = [line["request"]["ttft_ns"] / 1e9 for line in told if line["request"]["ttft_ns"]]
    assert sum(sums) == pytest.approx(sum(ttfts))


def powers_of(pid: int) -> set[tuple[int, str]]:
    """{(user, names of its capabilities)} of all threads."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        status = (task / "status").read_text()
        user = re.search(r"^Uid:\s+(\d+)\s+(\d+)", status, re.MULTILINE)
        assert user
        bits = effective_bits(status)
        known = names_of(bits)
        assert bits.bit_count() == len(known), hex(bits)
        found.add((int(user[2]), "".join(sorted(known))))
    return found


def evidence_of(request: dict[str, Any]) -> Iterator[str]:
    for phase in request["phases"]:
        yield from (f"{e['source']}: {e['what']}" for e in phase["evidence"])


def test_a_full_table_of_files_is_begun_anew_and_the_command_goes_on(tmp_path: Path) -> None:
    """Files that the target opens take a slot each, for good; the command must notice nothing."""
    script = tmp_path / "opens.py"
    script.write_text(
        "import os, time\n"
        f"for n in range({FILES * 3 // 4 + 8}):\n"
        "    file = os.memfd_create('a')\n"
        f"    os.truncate(file, {2 << 20})\n"
        "    os.close(os.open(f'/proc/self/fd/{file}', os.O_RDONLY))\n"
        "    os.close(file)\n"
        "time.sleep(600)\n"
    )
    with watching(tmp_path, "--", sys.executable, str(script)) as seen:
        seen.await_words("table of files was full: watching anew", within_s=60)
        seen.await_words("watching the command", times=2)
        alive = [p for p in psutil.Process(seen.process.pid).children() if p.status() != "zombie"]
        # a helper that was just forked bears the command line of `watch`, which has this one in it
        (command,) = (p for p in alive if p.cmdline() == [sys.executable, str(script)])
    assert not command.is_running()
    assert not [line for line in seen.said if "lost" in line], seen.said


@pytest.mark.parametrize("name", ["warm_mmap_short", "slow_evict"])
def test_phases_agree_with_a_servers_own_stamps(name: str, tmp_path: Path) -> None:
    managers = []

    def before(pid: int) -> None:
        keep = ("--keep-slow", "0", str(tmp_path / "kept"))
        managers.append(watching(tmp_path, "--pid", str(pid), *keep))
        seen.append(managers[0].__enter__())

    def after(_pid: int) -> None:
        seen[0].await_lines(1)
        managers[0].__exit__(None, None, None)

    seen: list[Watching] = []
    with watch_for_stalls() as stalls:
        run = run_scenario(name, tmp_path, before_switch=before, after=after)
    (told,) = seen[0].lines
    got, want = told["request"]["totals"]["phase"], run.truth.totals_ns
    span = run.truth.request_start_ns, run.truth.first_token_ns
    with Reader(Path(told["kept"])) as reader:
        late_ns = max(stalls.longest_ns(*span), longest_ready_ns(reader, *span))
    for phase in {*got, *want}:
        assert close(got.get(phase, 0), want.get(phase, 0), run.truth.ttft_ns, late_ns), phase


def test_memory_does_not_grow_with_requests(tmp_path: Path) -> None:
    """Hundreds of requests; the second half of them takes no memory that the first had not."""
    seen: list[int] = []
    told: list[int] = []

    def ask(port: int, number: int) -> None:
        assert chat(ChatRequest(port, "a", f"many {number}", 2, 1, True)).outcome == "ok"

    def before(pid: int) -> None:
        port = next(
            c.laddr.port for c in psutil.Process(pid).net_connections() if c.status == "LISTEN"
        )
        with watching(tmp_path, "--pid", str(pid)) as watched:
            for number in range(REQUESTS):
                ask(port, number)
                if number in (REQUESTS // 3, REQUESTS - 1):
                    watched.await_lines(number + 1)
                    seen.append(watched.memory_bytes)
            told.append(len(watched.lines))

    run_scenario("resident_warm", tmp_path, before_switch=before)
    assert told == [REQUESTS]
    assert seen[1] - seen[0] < GROWTH_BYTES


@pytest.mark.engine
def test_a_terminal_shows_totals_below_the_lines(models_dir: Path, tmp_path: Path) -> None:
    """On a terminal the lines scroll above a part that is redrawn; a summary is what stays."""
    with LlamaServer.router(models_dir) as server:
        server.chat("a", "hello")
        ready = tmp_path / "ready"
        command = [sys.executable, "-m", "ttftprof", "watch", "--pid", str(server.pid)]
        main, terminal = pty.openpty()
        process = subprocess.Popen(
            [*command, "--ready-file", str(ready)],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "30"},
        )
        os.close(terminal)
        shown: list[str] = []
        reader = threading.Thread(target=_read_terminal, args=(main, shown))
        reader.start()
        try:
            until = time.monotonic() + ARMED_TIMEOUT_S
            while not ready.exists() and time.monotonic() < until:
                time.sleep(0.02)
            server.chat("b", PROMPT)
            while "last switches" not in "".join(shown) and time.monotonic() < until:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            assert process.wait(STOP_TIMEOUT_S) == 0
        finally:
            process.kill()
            process.wait()
            reader.join()
    text = "".join(shown)
    assert "last switches" in text
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    summary = plain[plain.rindex("model") :]
    assert "1 request, 1 switch in" in summary
    assert "\x1b[?25h" in text[text.rindex("\x1b[?25l") :]  # the cursor is back


def _read_terminal(main: int, shown: list[str]) -> None:
    while True:
        try:
            data = os.read(main, 1 << 16)
        except OSError:  # nobody holds the other end any more
            os.close(main)
            return
        shown.append(data.decode(errors="replace"))
