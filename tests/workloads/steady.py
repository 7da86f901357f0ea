"""A server that answers many requests at once, word by word at a steady pace, out of step.

    python -m workloads.steady STREAMS WORDS EVERY_S

It begins to answer when all streams have asked, so that they all run for the whole time; each piece
wakes the client. In a process of its own, so that nothing of it is in the client's times.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_WORD = {
    "id": "chatcmpl-0123456789abcdef",
    "model": "m",
    "created": 1,
    "choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}],
}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


PIECE = chunk(b"data: " + json.dumps(_WORD).encode() + b"\n\n")
END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


@contextmanager
def steady_server(streams: int, words: int, every_s: float) -> Iterator[tuple[str, int]]:
    """Its address."""
    command = [sys.executable, "-m", "workloads.steady", str(streams), str(words), str(every_s)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    )
    try:
        assert process.stdout
        yield "127.0.0.1", int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


async def _main(streams: int, words: int, every_s: float) -> None:
    waiting: list[asyncio.Future[int]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        gate: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiting.append(gate)
        if len(waiting) == streams:
            for number, one in enumerate(waiting):
                one.set_result(number)
            waiting.clear()
        number = await gate
        writer.write(HEAD)
        for word in range(words):
            await asyncio.sleep(every_s if word else every_s * (1 + number / streams))
            writer.write(PIECE)
        writer.write(END)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=2 * streams)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
