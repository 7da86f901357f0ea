"""The real llama-server's own figures against ours: load and prefill, within 3 % of each other."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernel.stalls import Stalls, watch_for_stalls
from kernel.support import Recording, recording
from lab.llama_server import LlamaServer, Reply
from lab.make_model import make_model
from lab.page_cache import drop_cache
from ttftprof.model import Phase, Request

pytestmark = [pytest.mark.kernel, pytest.mark.engine, pytest.mark.slow]

FIGURE_ERROR = 0.03
TRIES = 3  # where others use the cores, a log line or a hand-over comes late on either side
TELLING = ("-fit", "off", "-lv", "4")  # one load, and the lines that tell its edges
PROMPT = " ".join(f"word{n}" for n in range(32))  # a second or so: no hand-over matters
BEGINS, ENDS = "load_model: local path", "llama_context: constructing llama_context"
_STAMP = re.compile(r"^(?:\[\d+\] )?(\d+)\.(\d+)\.(\d+)\.(\d+) ")


@dataclass(frozen=True)
class Figures:
    """One duration as the server has it and as we have it."""

    own_ns: float
    ours: Phase
    stalled_ns: int  # the longest that a core stood still meanwhile, or a thread ready for one

    @property
    def agree(self) -> bool:
        apart_ns = abs(self.ours.duration_ns - self.own_ns)
        return apart_ns <= FIGURE_ERROR * self.own_ns + self.stalled_ns


@dataclass(frozen=True)
class Loaded:
    """What waited for the load, what was answered by it, and what the server's log held."""

    seen: Recording
    load: Request
    answer: Request
    reply: Reply
    log: str
    stalls: Stalls

    def figures(self) -> dict[str, Figures]:
        return {
            "load": self._figures(self.load, "load", logged_ns(self.log)),
            "prefill": self._figures(self.answer, "prefill", self.reply.timings["prompt_ms"] * 1e6),
        }

    def _figures(self, request: Request, phase: str, own_ns: float) -> Figures:
        (ours,) = (p for p in request.phases if p.phase == phase)
        span = ours.start_ns, ours.end_ns
        stalled_ns = max(self.stalls.longest_ns(*span), 2 * self.seen.longest_ready_ns(*span))
        return Figures(own_ns, ours, stalled_ns)


def logged_ns(log: str) -> int:
    """How long the last load took by the server's stamps; a router passes its child's on."""
    lines = log.splitlines()
    return stamp_ns(lines, ENDS) - stamp_ns(lines, BEGINS)


def stamp_ns(lines: Iterable[str], words: str) -> int:
    """The time, since its process was executed, at the head of the last line with these words."""
    line = [line for line in lines if words in line][-1]
    stamp = _STAMP.match(line)
    assert stamp, line
    minutes, seconds, ms, us = map(int, stamp.groups())
    return ((minutes * 60 + seconds) * 1_000_000 + ms * 1_000 + us) * 1_000


def restart(models: Path, path: Path) -> tuple[Recording, Reply]:
    """One server in the place of another, whose client comes when it is up."""
    with LlamaServer.single(models / "a.gguf") as first:
        first.chat("a", "hello")
        drop_cache(models / "big.gguf")
        with recording(path, "--port", str(first.port)) as seen:
            first.stop()
            log = path.with_suffix(".log")
            with LlamaServer.single(
                models / "big.gguf", extra=TELLING, log_path=log, port=first.port
            ) as second:
                reply = second.chat("big", PROMPT)
                time.sleep(0.2)
    return seen, reply


def switch(models: Path, path: Path) -> tuple[Recording, Reply]:
    """A router that evicts a model for the one that is asked for."""
    with LlamaServer.router(models, extra=TELLING, log_path=path.with_suffix(".log")) as server:
        server.chat("a", "hello")
        drop_cache(models / "big.gguf")
        with recording(path, "--pid", str(server.pid)) as seen:
            reply = server.chat("big", PROMPT)
            time.sleep(0.2)
    return seen, reply


def load_beside(models: Path, path: Path) -> tuple[Recording, Reply]:
    """A router that has room for both, and whose first model answers somebody meanwhile."""
    log = path.with_suffix(".log")
    with (
        LlamaServer.router(models, models_max=2, extra=TELLING, log_path=log) as server,
        ThreadPoolExecutor() as pool,
    ):
        server.chat("a", "hello")
        drop_cache(models / "big.gguf")
        with recording(path, "--pid", str(server.pid)) as seen:
            beside = pool.submit(server.chat, "a", "go on", 60)
            time.sleep(0.1)
            reply = server.chat("big", PROMPT)
            beside.result()
            time.sleep(0.2)
    return seen, reply


@pytest.fixture(scope="module")
def models(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a` of 60 MB, and `big` of 240."""
    folder = tmp_path_factory.mktemp("figures")
    (folder / "a.gguf").hardlink_to(models_dir / "a.gguf")
    make_model(folder / "big.gguf", size_mb=240, layers=6, seed=3)
    return folder


@pytest.mark.parametrize("way", [restart, switch, load_beside])
def test_load_and_prefill_agree_with_the_servers_own_figures(
    way: Callable[[Path, Path], tuple[Recording, Reply]], models: Path, tmp_path: Path
) -> None:
    """The load by the stamps of its log, the prefill by its answer."""
    for number in range(TRIES):
        found = loaded(way, models, tmp_path / f"{number}.ttft").figures()
        if all(figures.agree for figures in found.values()):
            break
    assert all(figures.agree for figures in found.values()), found


def loaded(
    way: Callable[[Path, Path], tuple[Recording, Reply]], models: Path, path: Path
) -> Loaded:
    with watch_for_stalls() as stalls:
        seen, reply = way(models, path)
    report = seen.report()
    answer = next(r for r in report.requests if r.first_token_ns is not None and r.model == "big")
    load = next((s for s in report.starts if s.model == "big.gguf"), answer)
    return Loaded(seen, load, answer, reply, path.with_suffix(".log").read_text(), stalls)
