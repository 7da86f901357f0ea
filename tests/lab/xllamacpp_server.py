"""A Python process with llama.cpp's server inside, by the package xllamacpp; run by itself.

    python xllamacpp_server.py PORT MODEL.gguf

It listens, and each line on its standard input names a model to switch to: the server object goes
and another is made, in the same process. A line on standard output tells when that is done:
`ready MODEL unloaded_ns loaded_ns`, stamped on CLOCK_MONOTONIC.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import xllamacpp


def serve(port: int, model: str) -> Any:
    """A running server, ready when this returns."""
    wanted = xllamacpp.CommonParams()
    wanted.model.path = model
    wanted.port = port
    wanted.n_ctx = 4096
    wanted.n_parallel = 1
    wanted.cpuparams.n_threads = 2
    wanted.fit_params = False  # one load a start: no rehearsal for the size of memory
    return xllamacpp.Server(wanted)


def main() -> None:
    port, model = int(sys.argv[1]), sys.argv[2]
    unloaded_ns = time.monotonic_ns()
    serving = [serve(port, model)]
    print("ready", model, unloaded_ns, time.monotonic_ns(), flush=True)
    for line in sys.stdin:
        model = line.strip()
        serving.clear()  # the one reference: the server ends here
        unloaded_ns = time.monotonic_ns()
        serving.append(serve(port, model))
        print("ready", model, unloaded_ns, time.monotonic_ns(), flush=True)


if __name__ == "__main__":
    main()
