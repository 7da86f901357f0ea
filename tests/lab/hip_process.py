"""A process that uses the tests' own HIP runtime as a server does, and stamps what it did.

    python hip_process.py LIBAMDHIP64

Waits for a line on stdin before it maps the library. Prints a JSON object:
{"spans": [[call, begin_ns, end_ns, bytes, result], …], "pid": …}. Nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

MIB = 1 << 20
TO_DEVICE, FROM_DEVICE = 1, 2


def main() -> None:
    sys.stdin.readline()
    hip = ctypes.CDLL(sys.argv[1])
    time.sleep(0.5)  # a library's own start; what comes sooner may be missed
    spans: list[tuple[str, int, int, int, int]] = []
    pointer = ctypes.c_void_p()
    where = ctypes.byref(pointer)

    def call(name: str, *arguments: Any, size: int = 0) -> None:
        begin = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        result = int(getattr(hip, name)(*arguments))
        end = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        spans.append((name, begin, end, size, result))

    def of(size: int) -> Any:
        return ctypes.c_size_t(size)

    call("hipGetDeviceCount", ctypes.byref(ctypes.c_int()))
    call("hipInit", 0)
    call("hipModuleLoadData", where, None)
    call("hipMalloc", where, of(100 * MIB + 1), size=100 * MIB + 1)
    call("hipMalloc", where, of(1 << 40), size=1 << 40)
    call("hipHostMalloc", where, of(3 * MIB), 0, size=3 * MIB)
    host = ctypes.c_void_p(pointer.value)
    call("hipMemcpy", None, host, of(2 * MIB + 7), TO_DEVICE, size=2 * MIB + 7)
    call("hipMemcpy", None, host, of(MIB), FROM_DEVICE, size=MIB)
    for name in ("hipMemcpyAsync", "hipMemcpyAsync_spt"):
        call(name, None, host, of(3 * MIB), TO_DEVICE, None, size=3 * MIB)
    call("hipMemcpyHtoD", None, host, of(11), size=11)
    call("hipStreamSynchronize", None)
    print(json.dumps({"spans": spans, "pid": os.getpid()}), flush=True)


if __name__ == "__main__":
    main()
