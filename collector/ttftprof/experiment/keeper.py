"""Keeps the server of an experiment: starts it, ends it, and never leaves it behind.

A process of its own, so that server and restarts have one parent that can be recorded, and so that
the server ends with the experiment however that ends: when its standard input closes, or a signal
asks it to end, the keeper ends the server and itself; should it be killed, the kernel ends the
server. One JSON object a line goes in, one comes out for each.

    {"start": [argv], "env": {…}, "log": path, "user": [uid, gid, groups] | null}  → {"pid": n}
    {"stop": true}  → {"stopped": true}
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

from ttftprof.parent import end_with_parent

GRACE_S = 15.0


def _stop(process: subprocess.Popen[bytes] | None) -> None:
    """Asks it to end, then ends its whole session."""
    if process is None:
        return
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _start(order: dict[str, Any]) -> subprocess.Popen[bytes]:
    uid, gid, groups = order.get("user") or (None, None, None)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        # stdin is a pipe that this process holds: servers that watch theirs end with it
        return subprocess.Popen(
            order["start"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, **order.get("env", {})},
            start_new_session=True,
            user=uid,
            group=gid,
            extra_groups=groups,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - this process has one thread
        )
    finally:
        os.close(log)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a Ctrl-C is for the experiment, which tells us
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # a whole process group may be told
    server: subprocess.Popen[bytes] | None = None
    try:
        for line in sys.stdin:
            order = json.loads(line)
            _stop(server)
            server = None
            answer: dict[str, Any] = {"stopped": True}
            if "start" in order:
                try:
                    server = _start(order)
                    answer = {"pid": server.pid}
                except OSError as error:
                    answer = {"error": f"{order['start'][0]}: {error.strerror}"}
            print(json.dumps(answer), flush=True)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _stop(server)


if __name__ == "__main__":
    main()
