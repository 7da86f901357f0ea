"""A front that keeps all its vLLM servers started and all but one of them asleep.

As people switch with vLLM's sleep mode (its blog, October 2025): POST /sleep?level=N to the one
that is awake, then POST /wake_up to the one that is wanted; both are answered when they are done. A
model that is wanted for the first time has its server started.
"""

from __future__ import annotations

from typing import Any

from .front import Front, Resident, Switch, Switchboard, SwitchError, run
from .wire import Reader, connect, now_ns

_TIMEOUT_S = 60.0


class Sleeper(Switchboard):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._asleep: dict[str, Resident] = {}

    def stop(self) -> None:
        super().stop()
        for resident in self._asleep.values():
            resident.process.kill()
            resident.process.wait()

    def _switch(self, model: str) -> Switch:
        wanted = self._asleep.pop(model, None)
        if wanted is None:
            return super()._switch(model)
        kill_ns, reaped_ns = self._evict(model) if self._resident else (None, None)
        woken_ns = now_ns()
        _post(wanted, "/wake_up")
        self._resident = wanted
        return Switch(kill_ns, reaped_ns, woken_ns, now_ns())

    def _evict(self, _successor: str) -> tuple[int, int]:
        old, self._resident = self._resident, None
        assert old is not None
        begun_ns = now_ns()
        _post(old, f"/sleep?level={self._config.sleep_level}")
        self._asleep[old.model] = old
        return begun_ns, now_ns()


def _post(resident: Resident, target: str) -> None:
    with connect(resident.host, resident.port, _TIMEOUT_S) as sock:
        sock.sendall(
            f"POST {target} HTTP/1.1\r\nHost: runner\r\nContent-Length: 0\r\n"
            "Connection: close\r\n\r\n".encode()
        )
        reply = Reader(sock).read_message()
    if reply is None or reply.status != 200:
        raise SwitchError(f"{target} was refused")


if __name__ == "__main__":
    run(Sleeper, Front)
