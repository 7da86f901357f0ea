"""A port of our own in front of the server's: what passes it is stamped, and passed on as it came.

Where no probe sees the server's sockets, the client sends here instead. Only loopback is listened
on: who can reach the relay can reach the server.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ttftprof.clock import now_ns
from ttftprof.errors import UsageError
from ttftprof.events import TCP_CLOSE, Kind, TextKind
from ttftprof.polled.tasks import Told
from ttftprof.polled.texts import Texts

_PIECE = 64 << 10
Server = tuple[int, int]  # port, pid


class Relay:
    """Listens from its making on, and passes on from `begin` to `close`."""

    def __init__(self, port: int) -> None:
        """Raises UsageError if the port is taken."""
        self.port = port
        self.events: deque[Told] = deque()
        self._numbers = itertools.count(1)
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind(("127.0.0.1", port))
            self._listener.listen(128)  # whoever comes before `begin` waits
        except OSError as error:
            self._listener.close()
            raise UsageError(
                f"--relay {port}: this port cannot be listened on ({error.strerror})",
                "choose a free one, above 1023",
            ) from error
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def begin(self, server: Callable[[], Server | None], texts: Texts) -> None:
        """`server`: where to pass on to, asked for each connection; None refuses it."""
        self._server, self._texts = server, texts
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._loop is not None and self._thread is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(asyncio.start_server(self._pass, sock=self._listener))
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _pass(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """One connection, both ways, until either side ends it."""
        found = self._server()
        try:
            if found is None:
                raise ConnectionRefusedError
            port, pid = found
            server, to_server = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            to_client.transport.abort()  # as a server that is not there yet
            return
        key = next(self._numbers)
        near = to_server.get_extra_info("sockname")[1]
        told = {"key": key, "tgid": pid, "tid": pid, "dev": port << 16 | near}
        both = (
            self._copy(client, to_server, TextKind.RECEIVED, told),
            self._copy(server, to_client, TextKind.SENT, told),
        )
        ways = [asyncio.ensure_future(way) for way in both]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if ways[0].done() and not ways[1].done():
                await asyncio.wait(ways, timeout=None if client.at_eof() else 0)
        finally:
            for way in ways:
                way.cancel()
            to_server.close()
            to_client.close()
            closed = Told(
                Kind.CONN, now_ns(), pid, pid, flags=TCP_CLOSE, ino=key, a=told["dev"]
            )  # fmt: skip
            self.events.append(closed)

    async def _copy(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        kind: TextKind,
        told: dict[str, int],
    ) -> None:
        with suppress(ConnectionError):
            while data := await source.read(_PIECE):
                self._texts.add(kind, now_ns(), data, **told)
                sink.write(data)
                await sink.drain()
            if sink.can_write_eof():
                sink.write_eof()
