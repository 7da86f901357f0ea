"""The fronts: one port, at most one model resident, each model a child process executed anew.

As in llama-server's router mode: the old child is told to stop and waited for, the new one is
executed on a port of its own, its /health is polled at a fixed quantum, then the request is
forwarded and the reply relayed.  Requests are admitted first come, first served; one for another
model waits until the resident one is unused.  `llama_swap` and `ollama` do so in the manners of
those servers: what they override is what differs.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import re
import select
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import wire
from .config import ServerConfig, load_config
from .logs import Log
from .oneself import end_of_input, on_sigterm
from .truth import TruthWriter
from .wire import now_ns

READY_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 30.0
RELAY_TIMEOUT_S = 120.0
_TEXT = re.compile(rb'"content": ?"[^"]')
_TEXT_BYTES = 12  # the longest match less one: what a split may leave behind

# By engine: the module that stands in for its server, and the program's name.
_RUNNERS = {
    "llama.cpp": ("runner", "llama-server"),
    "vllm": ("vllm", "vllm"),
    "sglang": ("sglang", "sglang"),
    "tgi": ("tgi", "text-generation-launcher"),
    "localai": ("local_ai_backend", "llama-cpp-avx2"),
}


class SwitchError(Exception):
    """The new runner did not come up."""


@dataclass(frozen=True)
class Resident:
    """The one model that runs. `host`: an address, or the path of a Unix socket."""

    model: str
    host: str
    port: int
    process: subprocess.Popen[bytes]


@dataclass(frozen=True)
class Switch:
    """The front's stamps of one switch; the first two are None where nothing was resident."""

    kill_ns: int | None
    reaped_ns: int | None
    exec_ns: int
    ready_seen_ns: int


@dataclass(frozen=True)
class Admission:
    resident: Resident
    switch: Switch | None
    admitted_ns: int


class Switchboard:
    """Who may use the resident model, and who makes another one resident."""

    def __init__(self, config: ServerConfig, config_path: Path, log: Log) -> None:
        self._config = config
        self._config_path = config_path
        self._log = log
        self._turn = threading.Condition()
        self._line: collections.deque[object] = collections.deque()
        self._in_flight = 0
        self._resident: Resident | None = None

    @contextmanager
    def admitted(self, model: str) -> Iterator[Admission]:
        """Holds the model resident while the request is relayed."""
        admission = self._admit(model)
        try:
            yield admission
        finally:
            with self._turn:
                self._in_flight -= 1
                self._turn.notify_all()

    def stop(self) -> None:
        if self._resident is not None:
            self._resident.process.kill()
            self._resident.process.wait(EXIT_TIMEOUT_S)

    def _admit(self, model: str) -> Admission:
        ticket = object()
        with self._turn:
            self._line.append(ticket)
            self._turn.wait_for(lambda: self._line[0] is ticket and self._may_go(model))
        try:
            # The head of the line switches without the lock; the others wait behind its ticket.
            switch = None if self._is_resident(model) else self._switch(model)
            with self._turn:
                self._in_flight += 1
                assert self._resident is not None
                return Admission(self._resident, switch, now_ns())
        finally:
            with self._turn:
                self._line.remove(ticket)
                self._turn.notify_all()

    def idle(self) -> bool:
        with self._turn:
            return self._in_flight == 0 and not self._line

    def unload(self) -> None:
        """Ends the resident model with no successor, if nobody uses it."""
        with self._turn:
            if self._resident is None or self._in_flight or self._line:
                return
            self._evict("nobody")

    def _may_go(self, model: str) -> bool:
        return self._is_resident(model) or self._in_flight == 0

    def _is_resident(self, model: str) -> bool:
        resident = self._resident
        return resident is not None and resident.model == model and resident.process.poll() is None

    def _switch(self, model: str) -> Switch:
        old = self._resident
        if old is not None and old.process.poll() is not None:
            self._resident = None  # it ended by itself: there is nothing to evict
        kill_ns, reaped_ns = self._evict(model) if self._resident else (None, None)
        resident, exec_ns = self._spawn(model)
        self._resident = resident
        try:
            ready_seen_ns = self._await_ready(resident)
        except SwitchError:
            self.stop()
            self._resident = None
            raise
        return Switch(kill_ns, reaped_ns, exec_ns, ready_seen_ns)

    def _evict(self, successor: str) -> tuple[int, int]:
        old, self._resident = self._resident, None
        assert old is not None
        kill_ns = now_ns()
        old.process.terminate()
        self._log.line(
            f"srv  unload_lru: evicting idle LRU name={old.model} to make room for name={successor}"
        )
        reap(old.process)
        reaped_ns = now_ns()
        self._log.line(
            f"srv  operator(): instance name={old.model} exited with status"
            f" {old.process.returncode}"
        )
        return kill_ns, reaped_ns

    def _spawn(self, model: str) -> tuple[Resident, int]:
        host, port = self._config.host, wire.free_port(self._config.host)
        if self._config.unix_backend:
            host = f"{self._config.programs}/{model}.{port}.sock"
        self._say_spawning(model, port)
        process = subprocess.Popen(
            self._command(model, host, port),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        exec_ns = now_ns()  # Popen returns when the child's exec has succeeded
        arguments = (process, self._relayed_prefix(port))
        threading.Thread(target=_pass_stderr, args=arguments, daemon=True).start()
        return Resident(model, host, port, process), exec_ns

    def _command(self, model: str, host: str, port: int) -> list[str]:
        """A command line like llama-server's; Python takes what stands before the module."""
        config = self._config.models[model]
        module, program = _RUNNERS[config.engine]
        program = self._config.program(program)
        command = [program, "-S", "-m", f"workloads.{module}", "--config", str(self._config_path)]
        command += ["--alias", model, "--model", config.path, "--host", host, "--port", str(port)]
        command += ["--routed", "-c", str(config.context_tokens), "-np", str(config.parallel)]
        if self._config.wrapper_ns:
            wait = f"sleep {self._config.wrapper_ns / 1e9}; exec {shlex.join(command)}"
            return ["/bin/sh", "-c", wait]
        return command

    def _say_spawning(self, model: str, port: int) -> None:
        self._log.line(f"srv  load: spawning server instance with name={model} on port {port}")

    def _relayed_prefix(self, port: int) -> bytes:
        return b"[%d] " % port

    def _await_ready(self, resident: Resident) -> int:
        """Polls on an absolute schedule; when the first poll that found it ready returned."""
        deadline_ns = now_ns() + int(READY_TIMEOUT_S * 1e9)
        next_poll_ns = now_ns()
        while now_ns() < deadline_ns:
            if self._is_healthy(resident):
                return now_ns()
            if resident.process.poll() is not None:
                raise SwitchError(f"runner ended with {resident.process.returncode}")
            next_poll_ns += self._config.health_quantum_ns
            time.sleep(max(0, next_poll_ns - now_ns()) / 1e9)
        raise SwitchError("runner did not become ready in time")

    def _is_healthy(self, resident: Resident) -> bool:
        try:
            with wire.connect(resident.host, resident.port, 5.0) as sock:
                sock.sendall(b"GET /health HTTP/1.1\r\nHost: runner\r\nConnection: close\r\n\r\n")
                reply = wire.Reader(sock).read_message()
        except (OSError, wire.WireError):
            return False
        return reply is not None and reply.status == 200


class Front:
    def __init__(self, config: ServerConfig, board: Switchboard, log: Log) -> None:
        self._config = config
        self._log = log
        self._truth = TruthWriter(config.truth_path)
        self._board = board
        self._request_ids = itertools.count(1)

    def run(self) -> None:
        on_sigterm(self._leave)
        listener = wire.listen(
            self._config.host, self._config.port, kernel_stamps=self._config.kernel_stamps
        )
        threading.Thread(
            target=wire.accept_each, args=(listener, self._connection), daemon=True
        ).start()
        print(json.dumps({"listening": listener.getsockname()[1]}), flush=True)
        end_of_input()  # ends with whoever started this server
        self._leave()

    def _leave(self) -> None:
        self._board.stop()
        os._exit(0)

    def _connection(self, connection: socket.socket) -> None:
        wire.answer_each(connection, self._answer, kernel_stamps=self._config.kernel_stamps)

    def _answer(self, connection: socket.socket, request: wire.Message) -> None:
        if request.path == "/v1/chat/completions" and request.method == "POST":
            self._answer_chat(connection, request)
        elif request.path == "/health":
            connection.sendall(wire.json_response(200, {"status": "ok"}))
        elif request.path in ("/models", "/v1/models"):
            listed = [{"id": name} for name in self._config.models]
            connection.sendall(wire.json_response(200, {"object": "list", "data": listed}))
        else:
            connection.sendall(wire.json_response(404, {"error": "no such path"}))

    def _answer_chat(self, connection: socket.socket, request: wire.Message) -> None:
        body: dict[str, Any] = json.loads(request.body)
        model = str(body.get("model"))
        if model not in self._config.models:
            connection.sendall(wire.json_response(400, {"error": f"no model {model}"}))
            return
        request_id = request.headers.get("x-request-id") or f"r{next(self._request_ids)}"
        try:
            with self._board.admitted(model) as admission:
                self._relay(connection, request, request_id, admission)
        except SwitchError as error:
            connection.sendall(wire.json_response(500, {"error": str(error)}))

    def _relay(
        self,
        connection: socket.socket,
        request: wire.Message,
        request_id: str,
        admission: Admission,
    ) -> None:
        resident, switch = admission.resident, admission.switch
        with wire.connect(resident.host, resident.port, RELAY_TIMEOUT_S) as upstream:
            forward_ns = now_ns()
            upstream.sendall(self._forwarded(request, request_id))
            self._say_forwarding(resident)
            relay = self._relaying(upstream, connection, request, resident.model)
            try:
                relay.run()
            finally:
                self._truth.write(
                    "front",
                    request_id=request_id,
                    pid=os.getpid(),
                    model=resident.model,
                    runner_pid=resident.process.pid,
                    request_start_ns=request.first_byte_ns,
                    admitted_ns=admission.admitted_ns,
                    kill_ns=switch and switch.kill_ns,
                    reaped_ns=switch and switch.reaped_ns,
                    exec_ns=switch and switch.exec_ns,
                    ready_seen_ns=switch and switch.ready_seen_ns,
                    forward_ns=forward_ns,
                    first_token_ns=relay.first_token_ns,
                    complete=relay.complete,
                )

    def _forwarded(self, request: wire.Message, request_id: str) -> bytes:
        return forwarded(request.start_line, request.body, request_id)

    def _say_forwarding(self, resident: Resident) -> None:
        self._log.line(
            f"srv  proxy_reques: proxying request to model {resident.model} on port {resident.port}"
        )

    def _relaying(
        self,
        upstream: socket.socket,
        downstream: socket.socket,
        _request: wire.Message,
        _model: str,
    ) -> Relay:
        return Relay(upstream, downstream)


class Relay:
    """Passes one reply through unchanged; stamps just before the first generated text goes out."""

    def __init__(self, upstream: socket.socket, downstream: socket.socket) -> None:
        self._upstream = upstream
        self._downstream = downstream
        self.first_token_ns: int | None = None
        self.complete = False
        self._recent = b""

    def run(self) -> None:
        reply = b""
        while b"\r\n\r\n" not in reply:
            reply += self._recv()
        start, body = reply.split(b"\r\n\r\n", 1)
        chunked = b"chunked" in start
        remaining_bytes = -1 if chunked else _content_length(start) - len(body)
        data = reply
        while True:
            self._send(data)
            if self._ended(chunked, remaining_bytes):
                self.complete = True
                return
            data = self._recv()
            remaining_bytes -= len(data)

    def _recv(self) -> bytes:
        data = self._upstream.recv(1 << 16)
        if not data:
            raise wire.WireError("runner closed in the middle of a reply")
        return data

    def _send(self, data: bytes) -> None:
        self._recent = self._recent[-_TEXT_BYTES:] + data
        if self.first_token_ns is None and _TEXT.search(self._recent):
            self.first_token_ns = now_ns()
        self._downstream.sendall(data)

    def _ended(self, chunked: bool, remaining_bytes: int) -> bool:
        return self._recent.endswith(b"\r\n0\r\n\r\n") if chunked else remaining_bytes <= 0


def _content_length(start: bytes) -> int:
    found = re.search(rb"content-length: *(\d+)", start, re.IGNORECASE)
    return int(found.group(1)) if found else 0


def forwarded(start_line: str, body: bytes, request_id: str) -> bytes:
    headers = {
        "Host": "runner",
        "X-Request-Id": request_id,
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
    }
    lines = [start_line, *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def reap(process: subprocess.Popen[bytes]) -> None:
    """Woken by the exit itself: Popen.wait with a timeout would poll, in steps of up to 50 ms."""
    fd = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll(EXIT_TIMEOUT_S * 1000)
    finally:
        os.close(fd)
    process.kill()  # nothing, if it has ended
    process.wait()


def _pass_stderr(process: subprocess.Popen[bytes], prefix: bytes) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        os.write(2, prefix + line)


def run(board: type[Switchboard] = Switchboard, front: type[Front] = Front) -> None:
    """A front as its command line configures it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, type=Path)
    config_path = parser.parse_args().config
    config = load_config(config_path)
    log = Log(enabled=config.logs)
    front(config, board(config, config_path, log), log).run()


if __name__ == "__main__":
    run()
