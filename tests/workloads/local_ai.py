"""LocalAI's manner: an HTTP front, and a gRPC backend of its own for each model.

After pkg/model/{loader,initializers,watchdog}.go of LocalAI 4.9: the backend that makes room is
told to end and waited for; the next one is executed and asked at once, then every 2 s, whether it
answers; only when it does it is told what to load. Tokens come back over gRPC. It is told to log in
JSON (LOCALAI_LOG_FORMAT=json).
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from . import wire
from .front import READY_TIMEOUT_S, Front, Relay, Resident, Switchboard, SwitchError, reap, run
from .grpc import Channel, opening
from .wire import now_ns

LOOK_S = 2.0
CALL_TIMEOUT_S = 60.0


class Loader(Switchboard):
    def _evict(self, _successor: str) -> tuple[int, int]:
        old, self._resident = self._resident, None
        assert old is not None
        self._say("INFO", "[WatchDog] evicting model", model=old.model, busy=False)
        kill_ns = now_ns()
        old.process.terminate()
        reap(old.process)
        reaped_ns = now_ns()
        self._say("DEBUG", "[WatchDog] LRU eviction complete", model=old.model)
        return kill_ns, reaped_ns

    def _say_spawning(self, model: str, _port: int) -> None:
        file = self._config.models[model].path
        self._say("INFO", "BackendLoader starting", modelID=model, backend="llama-cpp", model=file)

    def _relayed_prefix(self, _port: int) -> bytes:
        return b""

    def _await_ready(self, resident: Resident) -> int:
        deadline_ns = now_ns() + int(READY_TIMEOUT_S * 1e9)
        while not self._is_healthy(resident):
            if resident.process.poll() is not None or now_ns() > deadline_ns:
                raise SwitchError("grpc service not ready")
            time.sleep(LOOK_S)
        self._say("DEBUG", "GRPC Service Ready")
        with wire.connect(resident.host, resident.port, CALL_TIMEOUT_S) as sock:
            Channel(sock).call({"call": "LoadModel"})
        return now_ns()

    def _is_healthy(self, resident: Resident) -> bool:
        try:
            with wire.connect(resident.host, resident.port, CALL_TIMEOUT_S) as sock:
                return Channel(sock).call({"call": "Health"}) == {"message": "OK"}
        except (OSError, wire.WireError):
            return False

    def _say(self, level: str, text: str, **more: Any) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000000000Z")
        self._log.plain(json.dumps({"time": stamp, "level": level, "msg": text, **more}))


class Server(Front):
    def _forwarded(self, request: wire.Message, request_id: str) -> bytes:
        body: dict[str, Any] = json.loads(request.body)
        prompt = " ".join(message["content"] for message in body["messages"])
        asked = {"id": request_id, "prompt": prompt, "tokens": body.get("max_tokens", 8)}
        return opening({"call": "PredictStream", **asked})

    def _say_forwarding(self, resident: Resident) -> None:
        """LocalAI says nothing when it passes a request on."""

    def _relaying(
        self,
        upstream: socket.socket,
        downstream: socket.socket,
        _request: wire.Message,
        model: str,
    ) -> Relay:
        return EventsRelay(upstream, downstream, model)


class EventsRelay(Relay):
    """Makes an event of each message that comes."""

    def __init__(self, upstream: socket.socket, downstream: socket.socket, model: str) -> None:
        super().__init__(upstream, downstream)
        self._model = model

    def run(self) -> None:
        headers = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}
        self._downstream.sendall(wire.head(200, headers))
        self._pass_on({"role": "assistant", "content": ""}, None)
        channel = Channel(self._upstream)
        while "done" not in (told := channel.receive()):
            if self.first_token_ns is None:
                self.first_token_ns = now_ns()
            self._pass_on({"content": told["text"]}, None)
        self._pass_on({}, "stop", usage=told["done"])
        self._downstream.sendall(wire.chunk(b"data: [DONE]\n\n") + wire.chunk(b""))
        self.complete = True

    def _pass_on(self, delta: dict[str, Any], finish: str | None, **more: Any) -> None:
        choice = {"index": 0, "finish_reason": finish, "delta": delta}
        event = {"object": "chat.completion.chunk", "model": self._model, "choices": [choice]}
        self._downstream.sendall(wire.chunk(f"data: {json.dumps({**event, **more})}\n\n".encode()))


if __name__ == "__main__":
    run(Loader, Server)
