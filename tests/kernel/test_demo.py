"""`scripts/demo`, as a newcomer runs it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from lab.demo import MODELS
from lab.llama_server import ROOT
from ttftprof.analysis import analyse
from ttftprof.model import FileUse, Request

pytestmark = [pytest.mark.kernel, pytest.mark.engine, pytest.mark.slow]

TIMEOUT_S = 300
CLIENT_ERROR_MS = 50  # the client shares two cores with what it measures
STEMS = ("cold", "reswitch", "warm")


def weights(request: Request) -> FileUse:
    return next(f for f in request.files if f.path.endswith(f"{request.model}.gguf"))


def test_the_demo_shows_three_requests_and_where_their_time_went(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts/demo", tmp_path],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    clients = dict(re.findall(r"(\w+): first token after (\d+) ms", done.stderr))
    requests: dict[str, Request] = {}
    late_ms = []
    for stem in STEMS:
        assert f"\n{stem} · llama.cpp" in done.stdout
        report = analyse(tmp_path / f"{stem}.ttft")
        assert report.complete
        assert report.lost == {}
        (requests[stem],) = report.requests
        ttft_ns = requests[stem].ttft_ns
        assert ttft_ns == sum(p.duration_ns for p in requests[stem].phases)
        late_ms.append(int(clients[stem]) - ttft_ns / 1e6)
    assert min(late_ms) > -1  # a server has sent before its client has received
    assert min(late_ms) <= CLIENT_ERROR_MS  # who may have to wait for a core
    cold, reswitch, warm = (requests[stem] for stem in STEMS)
    size = (MODELS / f"{cold.model}.gguf").stat().st_size
    assert weights(cold).bytes_from_storage == pytest.approx(size, rel=0.01)
    assert weights(reswitch).bytes_from_storage == 0
    assert cold.phase_activity()["load"]["storage_wait"] > 0
    assert "load" not in warm.phase_totals()
