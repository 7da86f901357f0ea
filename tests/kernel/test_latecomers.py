"""Probes whose module is loaded while recording runs. This kernel has FUSE built in: it is hidden
until a file is there, and then taken for a module that was loaded. scripts/vm-test has a real one.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kernel.slow_fuse import mounted
from ttftprof.events import Kind
from ttftprof.kernel import latecomers, session
from ttftprof.kernel.session import ProbeSession, Settings
from ttftprof.kernel.table import PROBES
from ttftprof.kernel.types import KernelTypes

pytestmark = pytest.mark.kernel

TIMEOUT_S = 20
FUSE = [probe.stem for probe in PROBES].index("fuse")
READ = """
import os, sys
sys.stdin.readline()
fd = os.open(sys.argv[1], os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
for index in range(23):
    os.pread(fd, 4096, index << 17)
"""


@pytest.fixture
def load_fuse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """Until it is called, this kernel has no FUSE."""
    loaded, has = tmp_path / "loaded", KernelTypes.has_tracepoint
    monkeypatch.setattr(
        KernelTypes,
        "has_tracepoint",
        lambda self, name, modules=(): (
            (not name.startswith("fuse_") or loaded.exists()) and has(self, name, modules)
        ),
    )
    monkeypatch.setattr(session, "_MODULES", tmp_path)
    monkeypatch.setattr(
        latecomers, "is_loaded", lambda name, _typed: name == "fuse" and loaded.exists()
    )
    return loaded.touch


def until_attached(probes: ProbeSession, used: tuple[str, ...] = ()) -> None:
    began = time.monotonic()
    while probes.states_for(["fuse.slow"])[FUSE].state == "absent":
        assert time.monotonic() - began < TIMEOUT_S
        time.sleep(0.05)
        probes.take_late(used)


def test_reads_are_seen_once_the_module_is_there(
    load_fuse: Callable[[], None], fuse_binary: Path, tmp_path: Path
) -> None:
    probes = ProbeSession(Settings())
    try:
        probes.load()
        probes.attach()
        probes.keep_helpers()
        absent = probes.states_for(["fuse.slow"])[FUSE]
        with mounted(fuse_binary, tmp_path / "mnt", delay_us=100) as daemon:
            reader = subprocess.Popen(
                [sys.executable, "-c", READ, str(daemon.model)], stdin=subprocess.PIPE, text=True
            )
            probes.seed([reader.pid])
            load_fuse()
            until_attached(probes)
            reader.communicate("go\n", timeout=TIMEOUT_S)
            daemon.end()
        events = probes.events.drain()
        attached = probes.states_for(["fuse.slow"])[FUSE]
        counts = probes.program_counts()
    finally:
        probes.close()
    assert absent.state == "absent"
    assert "was not loaded" in absent.reason
    assert attached.state == "ok"
    assert "as its module was loaded" in attached.reason
    reads = events[events["kind"] == Kind.REMOTE]
    assert len(reads) == 23
    got = np.column_stack([reads["b"], reads["a"] & np.uint64(0xFFFFFFFF)])
    assert sorted(map(tuple, got.tolist())) == sorted(daemon.answered)
    assert {"fuse__send", "fuse__end"} <= set(counts)


def test_what_was_read_before_is_said_to_be_missing(load_fuse: Callable[[], None]) -> None:
    probes = ProbeSession(Settings())
    try:
        probes.load()
        probes.attach()
        probes.keep_helpers()
        load_fuse()
        until_attached(probes, used=("fuse.slow",))
        state = probes.states_for(["fuse.slow"])[FUSE]
    finally:
        probes.close()
    assert state.state == "degraded"
    assert "reads before that are not seen" in state.lost


def test_a_module_without_types_is_said_to_have_none(
    load_fuse: Callable[[], None], tmp_path: Path
) -> None:
    """It is there, so that nothing is waited for."""
    (tmp_path / "fuse").mkdir()
    probes = ProbeSession(Settings())
    try:
        probes.load()
        probes.attach()
        probes.keep_helpers()
        load_fuse()
        until = time.monotonic() + TIMEOUT_S
        state = absent = probes.states_for(["fuse.slow"])[FUSE]
        while state == absent and time.monotonic() < until:
            time.sleep(0.05)
            probes.take_late(())
            state = probes.states_for(["fuse.slow"])[FUSE]
    finally:
        probes.close()
    assert state.state == "absent"
    assert state.reason == "the module fuse carries no types (BTF)"
    assert "requests to the FUSE daemon are unknown" in state.lost
