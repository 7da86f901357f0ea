"""Histograms for Prometheus: time to the first token, and its phases, by model and engine.

Needs the `prometheus-client` package. Guarantees: no content; no path, a model that is named by one
goes by its last part; at most `MODELS` models have series of their own, the rest are `other`; names
are harmless and short.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, start_http_server

from ttftprof import __version__
from ttftprof.clock import NS_PER_S
from ttftprof.engines.catalog import looks_like_weights
from ttftprof.errors import OutputError
from ttftprof.model import Request
from ttftprof.reports import words
from ttftprof.reports.live import OTHER, model_name
from ttftprof.reports.safe import plain

MODELS = 50
# From a warm answer of a small model to a cold load over a slow network.
_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_PHASE_BUCKETS_S = (0.001, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class Metrics:
    """What was seen since it began, in a registry of its own."""

    def __init__(self, models: int = MODELS) -> None:
        self.registry = CollectorRegistry()
        self._models: set[str] = set()
        self._most = models
        by = ("model", "engine")
        self._ttft = Histogram(
            "ttftprof_ttft_seconds",
            "Time from a request's first byte to its first token.",
            (*by, "switched"),
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self._phase = Histogram(
            "ttftprof_phase_seconds",
            "Time that a request or a start spent in a phase.",
            (*by, "phase"),
            buckets=_PHASE_BUCKETS_S,
            registry=self.registry,
        )
        self._requests = Counter(
            "ttftprof_requests", "Requests that ended.", (*by, "outcome"), registry=self.registry
        )
        self._starts = Counter(
            "ttftprof_starts",
            "Starts of a server that no request waited for.",
            by,
            registry=self.registry,
        )
        build = Info("ttftprof_build", "Which ttftprof this is.", registry=self.registry)
        build.info({"version": __version__})

    def add(self, request: Request) -> None:
        model, engine = self._model(request), plain(request.engine or "unknown", 40)
        if words.is_start(request):
            self._starts.labels(model, engine).inc()
        else:
            self._requests.labels(model, engine, request.outcome).inc()
        if request.ttft_ns is not None:
            switched = "yes" if request.switched else "no"
            self._ttft.labels(model, engine, switched).observe(request.ttft_ns / NS_PER_S)
        for phase, ns in request.phase_totals().items():
            self._phase.labels(model, engine, phase).observe(ns / NS_PER_S)

    def _model(self, request: Request) -> str:
        name = model_name(_without_folders(request.model) if request.model else None) or OTHER
        if name not in self._models and len(self._models) >= self._most:
            return OTHER
        self._models.add(name)
        return name

    def serve(self, host: str, port: int) -> tuple[int, Callable[[], None]]:
        """Serves until the function it returns is called; (the port, that function)."""
        try:
            server, thread = start_http_server(port, host, self.registry)
        except (OSError, OverflowError) as error:
            raise OutputError(
                f"no metrics can be served on {host}:{port}: {getattr(error, 'strerror', error)}",
                "choose a free address with --prometheus HOST:PORT",
            ) from error

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return int(server.server_port), stop


def _without_folders(model: str) -> str:
    """`/home/eve/m.gguf` is m.gguf; `owner/model`, as model hubs name them, stays."""
    folder, _, name = model.replace("\\", "/").rpartition("/")
    is_owner = bool(re.fullmatch(r"[\w-][\w.-]*", folder)) and not looks_like_weights(name)
    return model if is_owner and "\\" not in model else name or OTHER
