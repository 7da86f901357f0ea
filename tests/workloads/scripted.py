"""A Python program of a few lines that goes on at a line and says one when it is done."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def scripted(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """The running program; it is gone when the block ends."""
    program = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield program
    finally:
        program.kill()
        program.communicate()


def go(program: subprocess.Popen[str]) -> None:
    assert program.stdin
    program.stdin.write("go\n")
    program.stdin.flush()


def heard(program: subprocess.Popen[str]) -> str:
    """The next line it says, which is waited for."""
    assert program.stdout
    return program.stdout.readline().strip()
