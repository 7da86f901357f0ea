"""An engine's own counts of running and waiting requests, from the metrics page it publishes.

Asked for over the loopback, only of engines known to have such a page, without any secret, and only
while a client waits for a first token: four times a second at most. An engine that refuses is not
asked again.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ttftprof.clock import now_ns
from ttftprof.sources.processes import listening_ports

EVERY_S = 0.25
TIMEOUT_S = 0.5
_MOST_BYTES = 1 << 20
_MOST_SAMPLES = 10_000

# Metric -> field of the fact; the labels that a series must have. Names of vLLM (v0 and v1), SGLang
# and text-generation-inference.
_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("vllm:num_requests_running", "running", ""),
    ("vllm:num_requests_waiting", "waiting", ""),
    ("vllm:num_requests_waiting_by_reason", "for_capacity", 'reason="capacity"'),
    ("vllm:kv_cache_usage_perc", "cache_use", ""),
    ("vllm:gpu_cache_usage_perc", "cache_use", ""),
    ("sglang:num_running_reqs", "running", ""),
    ("sglang:num_queue_reqs", "waiting", ""),
    ("sglang:token_usage", "cache_use", ""),
    ("tgi_batch_current_size", "running", ""),
    ("tgi_queue_size", "waiting", ""),
)
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{([^}]*)\})?\s+([-+]?[\d.]+(?:[eE][-+]?\d+)?)\b", re.M)


def counts_of(page: str) -> dict[str, float]:
    """{field: value} of what a page in Prometheus' text form tells; several engines are summed,
    the use of their caches is the fullest one's."""
    found: dict[str, float] = {}
    for name, labels, value in _LINE.findall(page):
        for gauge, field, wanted in _GAUGES:
            if name == gauge and wanted in labels:
                both = max if field == "cache_use" else _sum
                found[field] = both(found.get(field, 0.0), float(value))
    return found


def _sum(one: float, other: float) -> float:
    return one + other


class EngineMetrics:
    """Samples in a thread of its own, which sleeps while nobody waits.

    `ask(port, path)` gives a page, or None if there is none.
    """

    def __init__(self, ask: Callable[[int, str], str | None] | None = None) -> None:
        self._ask = ask or _page
        self._paths: dict[int, str] = {}  # pid -> path of its metrics
        self._ports: dict[int, int] = {}
        self._samples: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_MOST_SAMPLES)
        self._awaited = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, pid: int, path: str) -> None:
        """A process of an engine that has metrics at a path."""
        self._paths[pid] = path
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine metrics", daemon=True)
            self._thread.start()

    def forget(self, pid: int) -> None:
        self._paths.pop(pid, None)
        self._ports.pop(pid, None)

    def await_token(self, awaited: bool) -> None:
        """Whether a client waits for a first token now."""
        if awaited:
            self._awaited.set()
        else:
            self._awaited.clear()

    def drain(self) -> list[tuple[int, dict[str, Any]]]:
        """(stamp, fact) of every sample since the last call."""
        return [self._samples.popleft() for _ in range(len(self._samples))]

    def stop(self) -> None:
        self._ended.set()
        self._awaited.set()
        if self._thread is not None:
            self._thread.join(2 * TIMEOUT_S)

    def _run(self) -> None:
        while not self._ended.is_set():
            self._awaited.wait()
            for pid, path in list(self._paths.items()):
                if not self._ended.is_set():
                    self._sample(pid, path)
            self._ended.wait(EVERY_S)

    def _sample(self, pid: int, path: str) -> None:
        if pid not in self._ports:
            self._ports.update(_first_ports({pid}))
        port = self._ports.get(pid)
        if port is None:  # it does not listen yet, or leaves that to another of its processes
            return
        asked_ns = now_ns()
        page = self._ask(port, path)
        if page is None:
            self.forget(pid)
            return
        counts = counts_of(page)
        if "waiting" in counts:
            # What the page says was so at some moment between question and answer.
            self._samples.append(((asked_ns + now_ns()) // 2, {"tgid": pid, **counts}))


def _first_ports(pids: set[int]) -> Mapping[int, int]:
    return {pid: port for port, pid in sorted(listening_ports(pids).items(), reverse=True)}


def _page(port: int, path: str) -> str | None:
    import http.client  # with TLS and mail, 5 MB that few recordings need

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        page = response.read(_MOST_BYTES)
    except TimeoutError:
        return ""  # busy: ask again
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return page.decode(errors="replace") if response.status == 200 else None
