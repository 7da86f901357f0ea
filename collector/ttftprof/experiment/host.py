"""The processes of an experiment: the server that it keeps, and the recorder of each run.

Guarantee: both end when the experiment does, however it ends.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ttftprof.caller import sudo_caller
from ttftprof.errors import TargetError
from ttftprof.parent import end_with_parent

_ARM_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0


class NotStarted(TargetError):
    """The server that was to be measured does not come up."""


class Keeper:
    """The process that starts, restarts and ends the server (see `keeper`)."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self.server_pid: int | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ttftprof.experiment.keeper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Ends the server that runs, if one does, and starts another; raises `NotStarted`."""
        caller = sudo_caller()
        order = {
            "start": list(command),
            "env": dict(env),
            "log": str(self._log),
            # Who called sudo: the server is theirs, as with `ttftprof record -- COMMAND`.
            "user": caller and [caller.uid, caller.gid, caller.groups],
        }
        answer = self._tell(order)
        if "error" in answer:
            raise NotStarted(
                f"the server cannot be started: {answer['error']}", "check server.command"
            )
        self.server_pid = int(answer["pid"])

    def stop(self) -> None:
        self._tell({"stop": True})
        self.server_pid = None

    def _tell(self, order: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise TargetError("the process that keeps the server has ended", "run it again")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends the server and the keeper."""
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RunRecorder:
    """`ttftprof record` beside one run."""

    def __init__(self, path: Path, target: Sequence[str], log: Path, longest_s: float) -> None:
        self.path = path
        self.trouble = ""
        self._ready = path.with_suffix(".ready")
        self._ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "ttftprof", "record", *target, "-o", str(path)]
        command += ["--force", "--quiet", "--ready-file", str(self._ready)]
        command += ["--duration", f"{longest_s:g}"]  # should we be killed beyond all help
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.PIPE,
                # It finishes its recording.
                preexec_fn=partial(end_with_parent, signal.SIGTERM),  # noqa: PLW1509 - one thread
            )

    def wait_armed(self) -> bool:
        """Whether every probe is armed; `trouble` says why not."""
        until = time.monotonic() + _ARM_TIMEOUT_S
        while not self._ready.exists():
            if self._process.poll() is not None:
                self._read_trouble()
                return False
            if time.monotonic() > until:
                self.trouble = f"the recorder was not armed within {_ARM_TIMEOUT_S:g} s"
                return False
            time.sleep(0.005)
        return True

    def stop(self) -> bool:
        """Ends the recording; whether it is whole."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        try:
            _, errors = self._process.communicate(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            self.trouble = "the recorder did not end"
        else:
            if self._process.returncode and not self.trouble:
                self.trouble = _last_line(errors)
        self._ready.unlink(missing_ok=True)
        return not self.trouble and self.path.exists()

    def _read_trouble(self) -> None:
        _, errors = self._process.communicate()
        self.trouble = _last_line(errors)


def _last_line(errors: bytes) -> str:
    """What the recorder said of its failure."""
    lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    told = next(
        (line for line in lines if line.startswith("ttftprof:")), lines[-1] if lines else ""
    )
    return told.removeprefix("ttftprof: ") or "the recorder failed without a word"
