"""The lab itself: what other tests take for granted about models, cache and servers."""

import os
from pathlib import Path

import psutil
import pytest

from lab.llama_server import LlamaServer, ServerFailed
from lab.make_model import make_model
from lab.page_cache import StillCached, cached_bytes, drop_cache, fill_cache


def test_same_arguments_give_the_same_model(tmp_path: Path) -> None:
    for name in "one", "two":
        make_model(tmp_path / name, size_mb=8, layers=2, seed=3)
    make_model(tmp_path / "other", size_mb=8, layers=2, seed=4)
    contents = {name: (tmp_path / name).read_bytes() for name in ("one", "two", "other")}
    assert contents["one"] == contents["two"] != contents["other"]


@pytest.mark.parametrize("kind", ["q8_0", "f16"])
def test_model_has_the_size_asked_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    make_model(path, size_mb=20, layers=4, kind=kind)
    assert path.stat().st_size == pytest.approx(20e6, rel=0.03)


def test_impossible_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="larger model"):
        make_model(tmp_path / "model.gguf", size_mb=1, layers=64)
    assert not any(tmp_path.iterdir())


def test_cache_is_dropped_and_filled(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(5_000_001))
    pages = -(-5_000_001 // os.sysconf("SC_PAGESIZE")) * os.sysconf("SC_PAGESIZE")
    drop_cache(path)
    assert cached_bytes(path) == 0
    fill_cache(path)
    assert cached_bytes(path) == pages


@pytest.mark.engine
def test_router_switches_models_and_leaves_nothing_behind(models_dir: Path) -> None:
    with LlamaServer.router(models_dir) as server:
        assert server.child_pids == []
        cold = server.chat("a", "hello")
        (first_child,) = server.child_pids
        with pytest.raises(StillCached):
            drop_cache(models_dir / "a.gguf", timeout_s=0.1)
        drop_cache(models_dir / "b.gguf")
        server.chat("b", "hello")
        (second_child,) = server.child_pids
        assert first_child != second_child
        assert cached_bytes(models_dir / "b.gguf") > 0
        server.unload("b")
        assert server.status("b") == "unloaded"
        server.load("a")
        warm = server.chat("a", "hello")
        assert warm.text == cold.text
        assert warm.sent_ns < warm.headers_ns < warm.first_text_ns <= warm.end_ns
        with pytest.raises(ServerFailed, match="not found"):
            server.chat("absent", "hello")
        family = [server.pid, *server.child_pids]
    assert not any(psutil.pid_exists(pid) for pid in family)


@pytest.mark.engine
def test_single_server_is_restarted_on_its_port(models_dir: Path) -> None:
    port = 0
    pids = set()
    for name in "ab":
        with LlamaServer.single(models_dir / f"{name}.gguf", port=port) as server:
            assert server.chat(name, "hello").text
            assert port in (0, server.port)
            port = server.port
            pids.add(server.pid)
    assert len(pids) == 2


@pytest.mark.engine
def test_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"no model")
    server = LlamaServer.single(model, log_path=tmp_path / "log")
    with pytest.raises(ServerFailed, match=r"(?s)exited at its start.*invalid magic"), server:
        pass
