"""Restarts one server with another model, as systemd would; speaks lines of JSON.

stdin: {"model": NAME} stops the running server, if any, and executes the next on the same port.
stdout: {"pid": N} once the new one listens.  Everything ends when stdin does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from .config import load_config
from .oneself import on_sigterm
from .truth import TruthWriter
from .wire import now_ns

EXIT_TIMEOUT_S = 30.0


class Supervisor:
    def __init__(self, config_path: Path) -> None:
        config = load_config(config_path)
        self._config_path = config_path
        self._port = config.port
        self._truth = TruthWriter(config.truth_path)
        self._server: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        on_sigterm(self._leave)
        for line in sys.stdin:
            self._restart(json.loads(line)["model"])
        self._leave()

    def _leave(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait(EXIT_TIMEOUT_S)
        os._exit(0)

    def _restart(self, model: str) -> None:
        kill_ns = now_ns()
        if self._server is not None:
            self._server.terminate()
            self._server.wait(EXIT_TIMEOUT_S)
        reaped_ns = now_ns()
        command = [sys.executable, "-S", "-m", "workloads.runner", "--config"]
        command += [str(self._config_path), "--alias", model, "--port", str(self._port)]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        exec_ns = now_ns()
        assert self._server.stdout is not None
        self._server.stdout.readline()  # {"listening": PORT}
        self._truth.write(
            "restart",
            pid=self._server.pid,
            model=model,
            supervisor_pid=os.getpid(),
            kill_ns=kill_ns,
            reaped_ns=reaped_ns,
            exec_ns=exec_ns,
        )
        print(json.dumps({"pid": self._server.pid}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="workloads.supervisor")
    parser.add_argument("--config", required=True, type=Path)
    Supervisor(parser.parse_args().config).run()


if __name__ == "__main__":
    main()
