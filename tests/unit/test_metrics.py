"""An engine's own counts: what a page tells, and when one is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttftprof.sources import metrics
from ttftprof.sources.metrics import EngineMetrics, counts_of

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="b"} 3.0
vllm:num_requests_waiting{engine="0",model_name="b"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="b",reason="capacity"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="b",reason="deferred"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="b"} 0.984
"""


@pytest.mark.parametrize(
    ("page", "counts"),
    [
        (VLLM, {"running": 3, "waiting": 2, "for_capacity": 1, "cache_use": 0.984}),
        (VLLM.replace("kv_cache", "gpu_cache"), counts_of(VLLM)),
        ("sglang:num_running_reqs{a=\"1\"} 4\nsglang:num_queue_reqs 2\nsglang:token_usage 9.7e-1\n",
         {"running": 4, "waiting": 2, "cache_use": 0.97}),
        ("tgi_queue_size 5\ntgi_batch_current_size 1\n", {"waiting": 5, "running": 1}),
        ('vllm:num_requests_waiting{engine="0"} 1\nvllm:num_requests_waiting{engine="1"} 2\n'
         'vllm:kv_cache_usage_perc{engine="0"} .5\nvllm:kv_cache_usage_perc{engine="1"} .25\n',
         {"waiting": 3, "cache_use": 0.5}),
        ("<html>not found</html>", {}),
        ("", {}),
    ],
)  # fmt: skip
def test_the_counts_of_a_page(page: str, counts: dict[str, float]) -> None:
    assert counts_of(page) == counts


@given(st.text())
def test_no_page_makes_it_stumble(page: str) -> None:
    assert all(isinstance(v, float) for v in counts_of(page).values())


@contextmanager
def asking(ask: Callable[[int, str], str | None]) -> Iterator[EngineMetrics]:
    source = EngineMetrics(ask)
    try:
        yield source
    finally:
        source.stop()


def until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "EVERY_S", 0.005)
    monkeypatch.setattr(metrics, "_first_ports", lambda pids: dict.fromkeys(pids, 8000))


def test_nobody_is_asked_while_nobody_waits() -> None:
    asked: list[int] = []

    def ask(port: int, _path: str) -> str:
        asked.append(port)
        return VLLM

    with asking(ask) as source:
        source.follow(7, "/metrics")
        time.sleep(0.03)
        assert not asked
        source.await_token(True)
        until(lambda: len(asked) > 1)
        source.await_token(False)
        count = len(asked)
        time.sleep(0.05)
        assert len(asked) <= count + 1  # one may have been under way
        samples = source.drain()
        assert {fact["tgid"] for _, fact in samples} == {7}
        assert samples[0][1]["waiting"] == 2
        assert source.drain() == []


def test_an_engine_that_refuses_is_not_asked_again() -> None:
    asked: list[int] = []

    def ask(port: int, _path: str) -> None:
        asked.append(port)

    with asking(ask) as source:
        source.follow(7, "/metrics")
        source.await_token(True)
        until(lambda: asked)
        time.sleep(0.03)
    assert len(asked) == 1


class _Page(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        assert "authorization" not in self.headers
        self.send_response(self.status if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(VLLM.encode())

    def log_message(self, *_arguments: object) -> None:
        """Nothing to say."""


@pytest.mark.parametrize(("status", "told"), [(200, True), (401, False)])
def test_a_page_over_http(status: int, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Page, "status", status)
    with HTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        page = metrics._page(server.server_port, "/metrics")
        thread.join()
    assert (page is not None and "kv_cache" in page) is told


def test_a_port_that_nobody_serves_has_no_page() -> None:
    assert metrics._page(1, "/metrics") is None
