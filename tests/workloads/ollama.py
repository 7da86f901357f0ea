"""Ollama's manner: a scheduler, and a llama-server of its own for each model's blob.

After server/sched.go and llm/llama_server.go of Ollama as of September 2026: a runner that makes
room is killed; then the scheduler looks every 250 ms, for at most 5 s, whether the GPUs' free
memory has risen, here `vram_lag_ns` after the runner's end; the next one is executed and asked for
/health at once and then every 250 ms; requests go to its /completion, answers come back as NDJSON.
A model that nobody has used for `keep_alive_ns` is unloaded.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

from . import wire
from .front import (
    READY_TIMEOUT_S,
    Front,
    Relay,
    Resident,
    Switchboard,
    SwitchError,
    forwarded,
    reap,
    run,
)
from .wire import now_ns

LOOK_S = 0.25
VRAM_TIMEOUT_NS = 5_000_000_000
PATHS = ("/api/chat", "/api/generate")


class Scheduler(Switchboard):
    def _evict(self, successor: str) -> tuple[int, int]:
        old, self._resident = self._resident, None
        assert old is not None
        if successor != "nobody":
            self._say("DEBUG", "sched.go:201", "resetting model to expire immediately to make room")
        kill_ns = now_ns()
        old.process.kill()
        reap(old.process)
        reaped_ns = now_ns()
        self._await_memory(kill_ns, reaped_ns)
        return kill_ns, reaped_ns

    def _await_memory(self, since_ns: int, gone_ns: int) -> None:
        if not self._config.vram_lag_ns:
            return
        while now_ns() - since_ns < VRAM_TIMEOUT_NS:
            time.sleep(LOOK_S)
            if now_ns() - gone_ns >= self._config.vram_lag_ns:
                took = (now_ns() - since_ns) / 1e9
                told = f"gpu VRAM free memory converged after {took:0.2f} seconds"
                self._say("DEBUG", "sched.go:888", told)
                return
        self._say("DEBUG", "sched.go:892", "gpu VRAM usage didn't recover within timeout")

    def _say_spawning(self, model: str, port: int) -> None:
        self._say("INFO", "llama_server.go:433", "starting llama-server")

    def _relayed_prefix(self, _port: int) -> bytes:
        return b""

    def _await_ready(self, resident: Resident) -> int:
        began_ns = now_ns()
        self._say("INFO", "llama_server.go:1295", "waiting for llama-server to start responding")
        while now_ns() - began_ns < READY_TIMEOUT_S * 1e9:
            if self._is_healthy(resident):
                took = (now_ns() - began_ns) / 1e9
                told = f"llama-server started in {took:0.2f} seconds"
                self._say("INFO", "llama_server.go:1390", told)
                return now_ns()
            if resident.process.poll() is not None:
                raise SwitchError("llama-server process has terminated")
            time.sleep(LOOK_S)
        raise SwitchError("timed out waiting for llama-server to start")

    def _say(self, level: str, source: str, text: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S")
        self._log.plain(f'time={stamp} level={level} source={source} msg="{text}"')


class Server(Front):
    """/api/chat and /api/generate."""

    _used_ns = 0

    def _answer(self, connection: socket.socket, request: wire.Message) -> None:
        if request.path in PATHS and request.method == "POST":
            self._answer_chat(connection, request)
            self._used_ns = now_ns()
            threading.Thread(target=self._expire, daemon=True).start()
        elif request.path == "/":
            connection.sendall(wire.json_response(200, {"status": "Ollama is running"}))
        else:
            connection.sendall(wire.json_response(404, {"error": "no such path"}))

    def _expire(self) -> None:
        keep_ns = self._config.keep_alive_ns
        if keep_ns:
            time.sleep(keep_ns / 1e9)
            if now_ns() - self._used_ns >= keep_ns:
                self._board.unload()

    def _forwarded(self, request: wire.Message, request_id: str) -> bytes:
        body: dict[str, Any] = json.loads(request.body)
        prompt = body.get("prompt") or " ".join(m["content"] for m in body["messages"])
        options = body.get("options") or {}
        asked = {"prompt": prompt, "stream": True, "n_predict": options.get("num_predict", 8)}
        data = json.dumps({**asked, "max_tokens": asked["n_predict"]}).encode()
        return forwarded("POST /completion HTTP/1.1", data, request_id)

    def _say_forwarding(self, resident: Resident) -> None:
        """Ollama says nothing when it passes a request on."""

    def _relaying(
        self,
        upstream: socket.socket,
        downstream: socket.socket,
        request: wire.Message,
        model: str,
    ) -> Relay:
        load_ns = now_ns() - request.first_byte_ns  # server/routes.go: until it has its runner
        is_chat = request.path == "/api/chat"
        return LinesRelay(upstream, downstream, model, chat=is_chat, load_ns=load_ns)


class LinesRelay(Relay):
    """Turns the runner's events into lines of JSON, one for each."""

    def __init__(
        self,
        upstream: socket.socket,
        downstream: socket.socket,
        model: str,
        *,
        chat: bool,
        load_ns: int,
    ) -> None:
        super().__init__(upstream, downstream)
        self._model, self._chat, self._load_ns = model, chat, load_ns

    def run(self) -> None:
        headers = {"Content-Type": "application/x-ndjson", "Transfer-Encoding": "chunked"}
        self._downstream.sendall(wire.head(200, headers))
        data = b""
        while not self.complete:
            data += self._recv()
            *events, data = data.split(b"\n\n")
            for event in events:
                told = event.partition(b"data: ")[2]
                if told.startswith(b"{"):
                    self._pass_on(json.loads(told))

    def _pass_on(self, told: dict[str, Any]) -> None:
        text, last = told["content"], told["stop"]
        said = {"message": {"role": "assistant", "content": text}} if self._chat else {}
        said = said or {"response": text}
        line: dict[str, Any] = {"model": self._model, **said, "done": last}
        if last:
            timings = told["timings"]
            line["load_duration"] = self._load_ns
            line["prompt_eval_count"] = timings["prompt_n"]
            line["prompt_eval_duration"] = round(timings["prompt_ms"] * 1e6)
            line["eval_count"] = timings["predicted_n"]
        if text and self.first_token_ns is None:
            self.first_token_ns = now_ns()
        if text or last:
            self._downstream.sendall(wire.chunk(json.dumps(line).encode() + b"\n"))
        if last:
            self._downstream.sendall(wire.chunk(b""))
            self.complete = True


if __name__ == "__main__":
    run(Scheduler, Server)
