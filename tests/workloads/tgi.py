"""text-generation-inference's launcher: starts what it consists of, one after the other.

After launcher/src/main.rs of text-generation-inference 3.3.6: `text-generation-server
download-weights` looks whether the weights are there; `text-generation-server serve` (the shard)
takes them up and binds a Unix socket; when that is seen, `text-generation-router` is started, has
the shard warm up, and listens. Each of these ends is looked for every 100 ms. What the shard says
is one JSON object a line, which the launcher says again in its own form; the router's lines it
passes on as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import threading
import time
from pathlib import Path
from typing import IO

from .config import ServerConfig, load_config, server_options
from .oneself import end_of_input, on_sigterm

LOOK_S = 0.1
LAUNCHER = "text_generation_launcher"


def line_of(target: str, text: str) -> bytes:
    """As the tracing crate's text form has it, in colour, whatever it writes to."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime())
    return (
        f"\x1b[2m{stamp}\x1b[0m \x1b[32m INFO\x1b[0m \x1b[2m{target}\x1b[0m\x1b[2m:\x1b[0m {text}\n"
    ).encode()


class Launcher:
    def __init__(self, config: ServerConfig, config_path: Path, options: argparse.Namespace):
        self._config, self._options = config, options
        self._model = config.models[options.alias].path
        self._socket = f"{config.programs}/tgi-{options.port}"
        self._shared = ["--config", str(config_path), "--alias", options.alias]
        self._told_to_end, self._shutdown = threading.Event(), threading.Event()

    def run(self) -> None:
        on_sigterm(self._told_to_end.set)
        threading.Thread(target=self._end_with_the_front, daemon=True).start()
        self._download()
        ready: queue.SimpleQueue[None] = queue.SimpleQueue()
        manager = threading.Thread(target=self._manage_shard, args=(ready,), daemon=True)
        manager.start()
        while ready.empty():
            time.sleep(LOOK_S)
        router = self._start_router()
        while not self._told_to_end.is_set():
            time.sleep(LOOK_S)
        self._terminate("webserver", router)
        self._shutdown.set()
        manager.join()
        os._exit(0)

    def _download(self) -> None:
        self._say(f"Starting check and download process for {self._model}")
        look = self._start("text-generation-server", "tgi_shard", "download-weights", self._model)
        self._relay(look, as_json=True)
        while look.poll() is None:
            time.sleep(LOOK_S)
        self._say(f"Successfully downloaded weights for {self._model}")

    def _manage_shard(self, ready: queue.SimpleQueue[None]) -> None:
        """In a thread of its own, which looks by itself and is looked at by the main thread."""
        self._say("Starting shard", span="shard-manager: ")
        began = time.monotonic()
        command = ["tgi_shard", "serve", self._model, "--uds-path", self._socket]
        command += ["--logger-level", "INFO", "--json-output", *self._shared]
        shard = self._start("text-generation-server", *command)
        self._relay(shard, as_json=True)
        while not Path(f"{self._socket}-0").exists():
            time.sleep(LOOK_S)
        self._say(f"Shard ready in {time.monotonic() - began:.9f}s", span="shard-manager: ")
        ready.put(None)
        while not self._shutdown.is_set():
            time.sleep(LOOK_S)
        self._terminate("shard", shard)

    def _start_router(self) -> subprocess.Popen[bytes]:
        self._say("Starting Webserver")
        command = ["tgi_router", "--hostname", self._options.host, "--port"]
        command += [str(self._options.port), "--master-shard-uds-path", f"{self._socket}-0"]
        router = self._start("text-generation-router", *command, *self._shared)
        self._relay(router, as_json=False)
        return router

    def _start(self, program: str, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [self._config.program(program), "-S", "-m", f"workloads.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )

    def _relay(self, child: subprocess.Popen[bytes], *, as_json: bool) -> None:
        assert child.stdout is not None
        relay = self._say_again if as_json else self._pass_on
        threading.Thread(target=relay, args=(child.stdout,), daemon=True).start()

    def _say_again(self, lines: IO[bytes]) -> None:
        for line in lines:
            self._say(json.loads(line)["text"].rstrip())

    def _pass_on(self, lines: IO[bytes]) -> None:
        for line in lines:
            os.write(1, line)

    def _say(self, text: str, span: str = "") -> None:
        os.write(1, line_of(f"{span}{LAUNCHER}", text))

    def _terminate(self, name: str, child: subprocess.Popen[bytes]) -> None:
        self._say(f"Terminating {name}")
        child.terminate()
        self._say(f"Waiting for {name} to gracefully shutdown")
        while child.poll() is None:
            time.sleep(LOOK_S)
        self._say(f"{name} terminated")

    def _end_with_the_front(self) -> None:
        """As does what this process started, whose stdin ends with it."""
        end_of_input()
        os._exit(0)


def main() -> None:
    options = server_options("workloads.tgi")
    os.dup2(2, 1)  # its log goes to stdout, of which the workload's fronts keep nothing
    Launcher(load_config(options.config), options.config, options).run()


if __name__ == "__main__":
    main()
