"""bpftrace, watching the same program at the same time, counts the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from conftest import unsupported
from kernel.support import Recording, recording
from ttftprof.events import Kind, Wait, duration_end
from workloads.cache import make_model
from workloads.counted import Program, started

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

MODEL_BYTES = 8 * (1 << 20) + 4099
READY_TIMEOUT_S = 30

# Page-cache insertions and faults of one inode; forks and bytes read of one process.
SCRIPT = """
tracepoint:filemap:mm_filemap_add_to_page_cache /args->i_ino == INODE/ { @added = count(); }
tracepoint:filemap:mm_filemap_fault /args->i_ino == INODE/ { @faults = count(); }
tracepoint:sched:sched_process_fork /args->parent_pid == PID/ { @forks = count(); }
tracepoint:syscalls:sys_exit_pread64 /pid == PID/ { @reads = sum(args->ret); }
BEGIN { printf("ready\\n"); }
"""


@contextmanager
def bpftrace(pid: int, inode: int) -> Iterator[dict[str, int]]:
    """Filled with bpftrace's counts once the block is left."""
    if shutil.which("bpftrace") is None:
        unsupported("bpftrace is not installed")
    script = SCRIPT.replace("INODE", str(inode)).replace("PID", str(pid))
    tool = subprocess.Popen(
        ["bpftrace", "-f", "json", "-e", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert tool.stdout
    counts: dict[str, int] = {}
    try:
        for line in tool.stdout:
            if "ready" in line:
                break
        yield counts
        tool.send_signal(2)
        out, _ = tool.communicate(timeout=READY_TIMEOUT_S)
    finally:
        tool.kill()
        tool.communicate()
    for line in out.splitlines():
        fact = json.loads(line) if line.strip() else {}
        if fact.get("type") == "map":
            counts.update({name.lstrip("@"): int(value) for name, value in fact["data"].items()})


def watched(mode: str, folder: Path) -> tuple[Recording, dict[str, int], Program, int]:
    model = make_model(folder / "watched.weights", MODEL_BYTES)
    inode = model.stat().st_ino
    with (
        started(mode, model) as program,
        bpftrace(program.pid, inode) as counts,
        recording(folder / f"{mode}.ttft", "--pid", str(program.pid)) as seen,
    ):
        program.go()
    return seen, counts, program, inode


def test_faults_and_insertions(tmp_path: Path) -> None:
    seen, counts, _, inode = watched("faults", tmp_path)
    with seen.reader() as reader:
        rows = reader.stream("files")
    row = rows[rows["ino"] == inode][-1]
    assert int(row["faults"]) == counts["faults"] > 0
    assert int(row["added_pages"]) == counts["added"] > 0


def test_forks(tmp_path: Path) -> None:
    seen, counts, program, _ = watched("forks", tmp_path)
    with seen.reader() as reader:
        events = reader.stream("events")
    forks = events[(events["kind"] == Kind.FORK) & (events["a"] == program.pid)]
    assert len(forks) == counts["forks"] > 0


def test_reads(tmp_path: Path) -> None:
    seen, counts, _, inode = watched("reads", tmp_path)
    with seen.reader() as reader:
        rows = reader.stream("files")
    assert int(rows[rows["ino"] == inode][-1]["read_bytes"]) == counts["reads"] > 0


def test_storage_waits_end_after_a_request_did(tmp_path: Path) -> None:
    """Pages are asked for one at a time: a request each, and one is done before a wait ends."""
    model = make_model(tmp_path / "watched.weights", MODEL_BYTES)
    inode = model.stat().st_ino
    with (
        started("faults", model) as program,
        recording(tmp_path / "faults.ttft", "--pid", str(program.pid)) as seen,
    ):
        program.go()
    with seen.reader() as reader:
        events = reader.stream("events")
        rows = reader.stream("files")
    row = rows[rows["ino"] == inode][-1]
    waits = events[(events["kind"] == Kind.OFFCPU) & (events["flags"] == Wait.STORAGE)]
    waits = waits[(waits["tgid"] == program.pid) & (waits["ino"] == inode)]
    blocks = events[(events["kind"] == Kind.BLOCK) & (events["ino"] == inode)]
    assert int(blocks["a"].sum()) == int(row["added_pages"]) * os.sysconf("SC_PAGE_SIZE") > 0
    assert len(waits) + int(row["short_wait_ns"]) > 0
    # Done by then: more requests with each wait.
    done = np.searchsorted(np.sort(duration_end(blocks)), duration_end(waits), side="right")
    assert (np.diff(done, prepend=0) > 0).all()
