"""A Python server that is busy in known places for known times, and says when it was in each.

    python python_server.py PORT FOLDER WEIGHTS

FOLDER gets a `site-packages` with small packages of real names, each of which spins or reads. A
request to `/v1/chat/completions` is answered with one streamed word after all stages; the stages'
begins (CLOCK_MONOTONIC) are in the line it then writes to FOLDER/stages. Everything private that
could leak (a prompt, locals, a folder's and a thread's name, a function and a file named by text)
holds the word CANARY.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CANARY = "kanarienvogel"
SPIN = """
import time
def spin(seconds, secret):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        hidden = secret + str(until)
"""
PACKAGES = {
    "torch/__init__.py": SPIN + f"spin({{seconds}}, {CANARY!r})\n",
    "tokenizers/__init__.py": SPIN + "encode = spin\n",
    "safetensors/torch.py": """
import os
def load_file(path, secret):
    with open(path, 'rb', buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        while file.read(1 << 16):
            pass
""",
    "safetensors/__init__.py": "",
    "transformers/__init__.py": "",
    "transformers/generation/__init__.py": "",
    "transformers/generation/utils.py": """
def generate(rounds, secret):
    total = 0
    for number in range(rounds):
        total += number * number
    return total
""",
}
IMPORT_S, ENCODE_S, ROUNDS = 0.8, 0.6, 12_000_000


def write_packages(folder: Path) -> None:
    site = folder / "site-packages"
    for name, source in PACKAGES.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.replace("{seconds}", str(IMPORT_S)))
    sys.path.insert(0, str(site))


def stages(prompt: str, weights: Path) -> dict[str, int]:
    """What a request goes through; when each stage began, and what processor time the last took."""
    sys.modules.pop("torch", None)
    began = {"imports": time.monotonic_ns()}
    importlib.import_module("torch")
    tokenizers: Any = importlib.import_module("tokenizers")
    began["tokenizer"] = time.monotonic_ns()
    tokenizers.encode(ENCODE_S, prompt)
    loader: Any = importlib.import_module("safetensors.torch")
    began["weights"] = time.monotonic_ns()
    loader.load_file(weights, prompt)
    model: Any = importlib.import_module("transformers.generation.utils")
    began["generate"], cpu_ns = time.monotonic_ns(), time.thread_time_ns()
    model.generate(ROUNDS, prompt)
    cpu_ns = time.thread_time_ns() - cpu_ns
    return {**began, "end": time.monotonic_ns(), "generate_cpu_ns": cpu_ns}


def disguised(name: str, path: str) -> Any:
    """A function of any name from a file of any name, that calls what it is given."""
    scope: dict[str, Any] = {}
    exec(compile("def f(call, *given):\n    return call(*given)\n", path, "exec"), scope)
    scope["f"].__code__ = scope["f"].__code__.replace(co_name=name, co_qualname=name)
    return scope["f"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path
    weights: Path

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        prompt = json.loads(body)["messages"][0]["content"]
        threading.current_thread().name = f"thread of {CANARY}"
        call = disguised(f"the {CANARY} sings", f"/home/{CANARY}/a {CANARY}.py")
        told = call(stages, prompt, self.weights)
        with (self.folder / "stages").open("a") as out:
            out.write(json.dumps(told) + "\n")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        chunk = {"choices": [{"delta": {"content": CANARY}}]}
        self.wfile.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the tests read what it writes."""


def main() -> None:
    port, Handler.folder, Handler.weights = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    write_packages(Handler.folder)
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
