"""llama-swap's manner: a proxy that runs other servers by their command lines.

After internal/process/process_command.go of llama-swap as of September 2026: the old server gets
SIGTERM and is waited for; the new one is executed, left alone for 250 ms, then asked for /health
once, and again a second after each refusal; then the request is passed on unchanged.
"""

from __future__ import annotations

import time

from .front import READY_TIMEOUT_S, Front, Resident, Switchboard, SwitchError, reap, run
from .wire import now_ns

FIRST_LOOK_S = 0.25
NEXT_LOOK_S = 1.0


class Swap(Switchboard):
    def _evict(self, _successor: str) -> tuple[int, int]:
        old, self._resident = self._resident, None
        assert old is not None
        self._log.plain(f"[DEBUG] [{old.model}] sending stop signal with timeout 10s")
        kill_ns = now_ns()
        old.process.terminate()
        reap(old.process)
        reaped_ns = now_ns()
        self._log.plain(f"[DEBUG] <{old.model}> process stopped by llama-swap")
        return kill_ns, reaped_ns

    def _say_spawning(self, model: str, port: int) -> None:
        path = self._config.models[model].path
        command = f"llama-server --port {port} -m {path}"
        self._log.plain(f"[DEBUG] <{model}> Executing start command: {command}, env: ")

    def _relayed_prefix(self, _port: int) -> bytes:
        return b""

    def _await_ready(self, resident: Resident) -> int:
        deadline_ns = now_ns() + int(READY_TIMEOUT_S * 1e9)
        time.sleep(FIRST_LOOK_S)
        while now_ns() < deadline_ns:
            if self._is_healthy(resident):
                url = f"http://{resident.host}:{resident.port}/health"
                self._log.plain(f"[INFO] <{resident.model}> Health check passed on {url}")
                return now_ns()
            if resident.process.poll() is not None:
                raise SwitchError("upstream command exited prematurely")
            time.sleep(NEXT_LOOK_S)
        raise SwitchError("health check timed out")


class Proxy(Front):
    def _say_forwarding(self, resident: Resident) -> None:
        """llama-swap logs a request when it is answered, not when it is passed on."""


if __name__ == "__main__":
    run(Swap, Proxy)
