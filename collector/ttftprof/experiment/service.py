"""The server that an experiment measures: started, ended, started again, and found among processes.

Either the experiment keeps it (`server.command`), or it runs by itself and commands of the plan
restart it. What a command was to do and did not is a `Check` that is not met.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ttftprof.command_line import public_argv
from ttftprof.errors import TargetError, TtftprofError
from ttftprof.experiment.client import wait_for_server
from ttftprof.experiment.host import Keeper, NotStarted
from ttftprof.experiment.plan import ARGV, COMMAND, ENV_PREFIX, MMAP, Server, Variant
from ttftprof.experiment.state import Check, ServerApi
from ttftprof.sources.processes import ProcessFacts, descendants, is_alive, read_process
from ttftprof.target import by_port

_LOOK_AGAIN_S = 0.3  # whether a server that is awaited still lives
_GONE_AGAIN_S = 0.02
_DOWN_S = 1.0  # how long a server of ours may refuse before it counts as ended
# Within which the process that loads is started: by a server that tells of its models always, once
# the one before has ended; by another perhaps never.
_LOADER_S, _SURE_LOADER_S = 2.0, 20.0
_DONE = "it ended with 0"  # how a command went that did what it was to do


class Service:
    """The server, and what it says of itself (`api`)."""

    def __init__(self, server: Server, key: str, log: Path) -> None:
        self._server = server
        self._log = log
        self._keeper: Keeper | None = None
        self.api = ServerApi(server.address, server.base_path, key)

    @property
    def is_kept(self) -> bool:
        """The experiment starts and ends it."""
        return self._keeper is not None

    def open(self) -> None:
        if not self._server.command:
            return
        if wait_for_server(self._server.address, 0.05):
            raise TargetError(
                f"something answers at {self._server.url} already",
                "end it, or leave out server.command to measure it as it runs",
            )
        self._keeper = Keeper(self._log)

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()

    def check_models(self) -> None:
        """Raises `TargetError` for one that the server does not have."""
        named = self.api.models()
        missing = [m for m in self._server.models if named and not _is_among(m, named)]
        if missing:
            raise TargetError(
                f"the server at {self._server.url} has no model {missing[0]!r}",
                f"it names: {', '.join(named[:12])}",
            )

    def start(self, variant: Variant) -> None:
        """Has the server of this variant running; one that we do not start must run already.
        Raises `NotStarted`."""
        if self._keeper is not None:
            self._keeper.start(self._command(variant), self._environment(variant))
        self._await(variant)
        self.api.recognise()  # it may be another engine

    def _await(self, variant: Variant) -> None:
        """Until it accepts connections; one of ours that has ended will not."""
        until = time.monotonic() + self._server.ready_timeout_s
        while not wait_for_server(self._server.address, _LOOK_AGAIN_S):
            own = self._keeper.server_pid if self._keeper is not None else None
            if own is not None and not is_alive(own):
                raise NotStarted(
                    f"the server ended at its start: {self._last_words()}",
                    f"see {self._log}; the command was: "
                    + " ".join(public_argv(self._command(variant))),
                )
            if time.monotonic() > until:
                raise NotStarted(
                    f"nothing answers at {self._server.url}",
                    f"see {self._log}"
                    if own is not None
                    else "start the server, or give server.command so that bench starts it",
                )

    def is_down(self) -> bool:
        """A server of ours has ended."""
        return self.is_kept and not wait_for_server(self._server.address, _DOWN_S)

    def _last_words(self) -> str:
        """The last line of its log that says anything."""
        with suppress(OSError):
            lines = self._log.read_text(errors="replace").splitlines()
            return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")
        return "it left no log"

    def _command(self, variant: Variant) -> list[str]:
        settings = variant.settings
        words = list(self._server.command)
        if COMMAND in settings:
            words = shlex.split(settings[COMMAND])
        words = [fill_in(word, settings) for word in words]
        words += shlex.split(settings.get(ARGV, ""))
        if settings.get(MMAP) == "off":
            words.append("--no-mmap")
        return words

    def _environment(self, variant: Variant) -> dict[str, str]:
        own = {
            n.removeprefix(ENV_PREFIX): v
            for n, v in variant.settings.items()
            if n.startswith(ENV_PREFIX)
        }
        return {**self._server.env, **own}

    # -- among the processes ----------------------------------------------------------------------

    def to_record(self) -> list[str]:
        """Options of `ttftprof record` that name it."""
        if self._server.record:
            return list(self._server.record)
        if self._keeper is not None:
            return ["--pid", str(self._keeper.pid)]
        return ["--port", str(self._server.address[1])]

    def pid(self) -> int | None:
        """The process that was started, or that listens."""
        if self._keeper is not None:
            return self._keeper.server_pid
        with suppress(TtftprofError):
            return min(by_port(self._server.address[1]).roots)
        return None

    def processes(self) -> list[ProcessFacts]:
        """The server and all below it."""
        root = self.pid()
        below = descendants({root}) if root is not None else set()
        return [p for p in map(read_process, below) if p is not None]

    def kill_the_loader(self, before: set[int], after_s: float) -> None:
        """Kills the youngest process of the server: the one that loads, where there is one. A
        server of several processes may take its time to start that one; `before`: who was there."""
        time.sleep(after_s)
        until = time.monotonic() + (_LOADER_S if self.api.kind == "plain" else _SURE_LOADER_S)
        while len(below := self.processes()) > 1 and before >= {p.pid for p in below}:
            if time.monotonic() > until:
                break  # it loads in a process that was there
            time.sleep(0.01)
        if not below or (len(below) < 2 and not (self._server.command or self._server.restart)):
            return  # nobody could start it again
        youngest = max(below, key=lambda p: (p.start_ticks, p.pid))
        with suppress(ProcessLookupError):
            os.kill(youngest.pid, signal.SIGKILL)

    # -- its end, and its next beginning ----------------------------------------------------------

    @property
    def ends_before_it_starts(self) -> bool:
        """Whether there is a moment without the server, or at least without its models, between
        its end and its start. `server.restart` alone leaves none: that the old process, and all
        memory with it, is gone is then told by the new one."""
        return bool(self._keeper or self._server.stop) or self.api.kind != "plain"

    def end(self) -> list[Check]:
        """As far as it can be ended before it is started again: a file that it maps stays in the
        page cache, and its models in the GPU."""
        if self._keeper is not None:
            self._keeper.stop()
        elif self._server.stop:
            found = self._run_command(self._server.stop)
            if found == _DONE and not self._is_gone():
                found = "something still answers"
            return [Check("stop", "the server ended", found, found == _DONE, "server.stop")]
        else:
            for model in self._server.models:
                self.api.unload(model)
        return []

    def _is_gone(self) -> bool:
        """Whether nobody accepts connections any more, within the time that a start may take."""
        until = time.monotonic() + self._server.ready_timeout_s
        while wait_for_server(self._server.address, _GONE_AGAIN_S):
            if time.monotonic() > until:
                return False
            time.sleep(_GONE_AGAIN_S)
        return True

    def start_again(self, variant: Variant) -> list[Check]:
        """Waits for nothing. What became of the plan's own command for it; a server of ours just
        starts."""
        if self._keeper is not None:
            self._keeper.start(self._command(variant), self._environment(variant))
        elif self._server.restart:
            before, found = self.pid(), self._run_command(self._server.restart)
            if found == _DONE and before is not None and before == self.pid():
                found = "the same process serves"
            met = found == _DONE
            return [Check("restart", "a server started again", found, met, "server.restart")]
        return []

    def _run_command(self, command: Sequence[str]) -> str:
        """How a command of the plan, to end or to start the server, ended, in words."""
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                check=False,
                timeout=self._server.ready_timeout_s,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"it could not be run: {type(error).__name__}"
        return f"it ended with {done.returncode}"


def fill_in(word: str, settings: Mapping[str, str]) -> str:
    """`{name}` replaced by the value of that factor; other braces stay."""
    for name, value in settings.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def _is_among(model: str, named: Sequence[str]) -> bool:
    return model in named or f"{model}:latest" in named
