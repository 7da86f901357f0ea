"""Runs the real `ttftprof record` beside a workload, and gives back what it concluded."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from ttftprof.analysis import analyse
from ttftprof.events import Kind, Wait
from ttftprof.model import Report
from ttftprof.recording import Reader
from ttftprof.reports.json import as_json, schema
from workloads.scripted import go, heard, scripted

SCHEMA = jsonschema.Draft202012Validator(schema())
# What a busy machine may take; only what hangs takes longer.
ARMED_TIMEOUT_S = 60
STOP_TIMEOUT_S = 60
RUN_TIMEOUT_S = 90


def run_to_end(
    command: Sequence[str],
    cwd: Path,
    *,
    user: int | None = None,
    env: Mapping[str, str] | None = None,
    before: Callable[[], Any] | None = None,
) -> subprocess.CompletedProcess[str]:
    """A command of ours that ends by itself, whatever befalls it, and never with a traceback.
    `user`: who runs it, in that group alone; `before`: called in its process."""
    done = subprocess.run(
        command,
        cwd=cwd,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        env=env,
        preexec_fn=before,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


class RecorderFailed(AssertionError):
    """The recorder did not do what the test needs; its output is the message."""


@dataclass
class Recording:
    """A recorder that runs (until `stop`), then its file."""

    path: Path
    process: subprocess.Popen[str]
    armed_after_s: float = 0.0
    output: str = ""

    def stop(self, number: int = signal.SIGINT) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.output, _ = self.process.communicate(timeout=STOP_TIMEOUT_S)
        return self.process.returncode

    def report(self) -> Report:
        """What it says; whatever a test records, its JSON satisfies the shipped schema."""
        report = analyse(self.path)
        SCHEMA.validate(as_json(report))
        return report

    def reader(self) -> Reader:
        return Reader(self.path)

    def longest_ready_ns(self, start_ns: int, end_ns: int) -> int:
        with self.reader() as reader:
            return longest_ready_ns(reader, start_ns, end_ns)


def longest_ready_ns(reader: Reader, start_ns: int, end_ns: int) -> int:
    """The longest that a thread of the target stood ready for a core in a span of time: what may
    lie between a server's own stamp of a moment and that moment."""
    events = reader.stream("events")
    waits = events[(events["kind"] == Kind.OFFCPU) & (events["flags"] == Wait.RUNNABLE)]
    begins = waits["start_ns"].astype(np.int64)
    ends = np.minimum(begins + waits["duration_ns"].astype(np.int64), end_ns)
    return int((ends - np.maximum(begins, start_ns)).max(initial=0))


def start_recording(path: Path, *arguments: str, through: Sequence[str] = ()) -> Recording:
    """`ttftprof record ARGUMENTS -o PATH`, armed when this returns; every probe at any cost, or
    what a slow machine's budget leaves out would be missing. `through`: a command that executes
    what follows it."""
    ready = path.with_suffix(".ready")
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "ttftprof", "record", *arguments]
    options = ["-o", str(path), "--ready-file", str(ready), "--force"]
    if "--overhead-budget" not in arguments:
        options += ["--overhead-budget", "off"]
    separator = command.index("--") if "--" in command else len(command)
    began = time.monotonic()
    process = subprocess.Popen(
        [*through, *command[:separator], *options, *command[separator:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not ready.exists():
        if process.poll() is not None:
            raise RecorderFailed(process.communicate()[0])
        if time.monotonic() - began > ARMED_TIMEOUT_S:
            process.kill()
            raise RecorderFailed(f"not armed: {process.communicate()[0]}")
        time.sleep(0.002)
    return Recording(path, process, time.monotonic() - began)


@contextmanager
def recording(path: Path, *arguments: str, through: Sequence[str] = ()) -> Iterator[Recording]:
    """Records while the block runs; stopped as by Ctrl-C."""
    started = start_recording(path, *arguments, through=through)
    try:
        yield started
        code = started.stop()
        if code != 0:
            raise RecorderFailed(f"exit code {code}: {started.output}")
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.communicate()


def recorded_script(
    script: str,
    path: Path,
    *arguments: object,
    group: Path | None = None,
    options: Sequence[str] = (),
) -> Recording:
    """The recording of a Python program that begins at a line on its input, says a line when it is
    done, and stays. `group`: a control group (v1) to put it in before; `options` are the
    recorder's."""
    with scripted(script, *arguments) as program:
        if group is not None:
            (group / "tasks").write_text(str(program.pid))
        with recording(path, "--pid", str(program.pid), *options) as seen:
            go(program)
            assert heard(program) == "done"
    return seen
