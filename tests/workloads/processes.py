"""Child programs of the workload: started by module name, ended by the end of their stdin."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from .build import WorkloadError

STOP_TIMEOUT_S = 10.0
_TESTS_DIR = Path(__file__).parents[1]
# Threads that allocate at once make the C library read how many CPUs there are, unless it is told.
_NO_READS_OF_ITS_OWN = {"MALLOC_ARENA_MAX": "2"}


@contextmanager
def started(
    module: str,
    *arguments: str,
    stderr: IO[bytes] | None = None,
    program: str = sys.executable,
) -> Iterator[subprocess.Popen[bytes]]:
    """A program of this package; it and all it started are gone when the block ends, however.

    `program`: what its command line begins with, see `build.make_programs`.
    """
    process = subprocess.Popen(
        [program, "-S", "-m", f"workloads.{module}", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, "PYTHONPATH": str(_TESTS_DIR), **_NO_READS_OF_ITS_OWN},
    )
    try:
        yield process
    finally:
        _stop(process)


def say(process: subprocess.Popen[bytes], **fields: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(fields).encode() + b"\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any]:
    """The next line of JSON that it prints."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    line = process.stdout.readline() if ready else b""
    if not line:
        raise WorkloadError(f"{process.args!r} said nothing; exit status {process.poll()}")
    answer: dict[str, Any] = json.loads(line)
    return answer


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The end of stdin ends a program, and its children's ends with it; kill is for a hung one."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_TIMEOUT_S)
    process.stdout.close()
