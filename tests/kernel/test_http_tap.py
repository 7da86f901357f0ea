"""The HTTP tap on the running kernel: many streams, every way to read and write, every protocol."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kernel.support import Recording, recording, start_recording
from lab.llama_server import LlamaServer

pytestmark = pytest.mark.kernel

LAB = Path(__file__).parents[1] / "lab"
CANARIES = (b"CANARY", b"sk-")
TOKENS = 12
STAMP_ERROR_NS = 5_000_000  # a thread may lose its core between its own stamp and the call
TYPICAL_ERROR_NS = 100_000


def facts_of(seen: Recording) -> list[dict[str, Any]]:
    with seen.reader() as reader:
        return [fact for _, fact in reader.facts("exchange")]


def assert_no_word_was_kept(seen: Recording) -> None:
    """Neither in the recording nor in anything that lies beside it."""
    for path in seen.path.parent.glob(f"{seen.path.name}*"):
        for canary in CANARIES:
            assert canary not in path.read_bytes(), path


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
    """A server of many streams; `stamps`: by client port, (first, last) token of each request."""

    process: subprocess.Popen[str]
    port: int
    stamps: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def take(self, lines: Iterator[str]) -> None:
        for line in lines:
            port, first, last = map(int, line.split())
            self.stamps.setdefault(port, []).append((first, last))


@contextmanager
def serving(load: Path, gap_us: int) -> Iterator[Load]:
    process = subprocess.Popen(
        [str(load), "serve", str(TOKENS), str(gap_us)], stdout=subprocess.PIPE, text=True
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


@pytest.mark.parametrize(("streams", "requests", "gap_us"), [(64, 8, 5_000), (1000, 2, 100_000)])
def test_no_first_token_of_many_streams_is_missed(
    streams: int, requests: int, gap_us: int, load: Path, tmp_path: Path
) -> None:
    with (
        serving(load, gap_us) as server,
        recording(tmp_path / "many.ttft", "--pid", str(server.process.pid)) as seen,
    ):
        asked = subprocess.run(
            [str(load), "ask", str(server.port), str(streams), str(requests)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        time.sleep(0.3)
    with seen.reader() as reader:
        assert reader.lost() == {}
    facts = sorted(facts_of(seen), key=lambda f: f["start_ns"])
    assert len(facts) == len(asked.stdout.splitlines()) == streams * requests
    assert {(f["outcome"], *f["notes"]) for f in facts} == {("ok",)}
    assert {(f["prompt_tokens"], f["completion_tokens"]) for f in facts} == {(17, TOKENS)}
    by_port: dict[int, list[dict[str, Any]]] = {}
    for fact in facts:
        by_port.setdefault(fact["remote_port"], []).append(fact)
    errors = sorted(
        abs(fact[name] - stamp)
        for port, stamps in server.stamps.items()
        for fact, both in zip(by_port[port], stamps, strict=True)
        for name, stamp in zip(("first_token_ns", "last_token_ns"), both, strict=True)
    )
    assert len(errors) == 2 * streams * requests
    assert errors[len(errors) // 2] < TYPICAL_ERROR_NS
    assert errors[-len(errors) // 100] < STAMP_ERROR_NS, errors[-20:]
    assert_no_word_was_kept(seen)


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
