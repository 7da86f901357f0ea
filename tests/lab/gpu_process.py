"""A process that uses the tests' own libcuda as a server does, and stamps what it did.

    python gpu_process.py LIBCUDA WEIGHTS

Maps the library, says so in a line and waits for one on stdin; then: context, module, allocation,
copies (one of them out of the mapped WEIGHTS), graph capture, LAUNCHES of kernels, KV memory, one
that is refused. Prints a JSON object: {"spans": [[call, begin_ns, end_ns, bytes], …],
"pid": …}; launches are no spans of it. Nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any

MIB = 1 << 20
LAUNCHES = 97
PER_THREAD_STREAMS = 2  # CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip


def map_file(path: Path) -> tuple[int, int]:
    """(address, bytes) of the whole file, mapped and not touched."""
    size = path.stat().st_size
    fd = os.open(path, os.O_RDONLY)
    address = LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    os.close(fd)
    return int(address), size


def proc_address(cuda: Any, name: bytes, flags: int) -> Any:
    """The function that cuGetProcAddress gives for a name."""
    address, status = ctypes.c_void_p(), ctypes.c_int()
    wanted = ctypes.c_ulonglong(flags)
    cuda.cuGetProcAddress_v2(name, ctypes.byref(address), 12020, wanted, ctypes.byref(status))
    arguments = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(address.value or 0)


def main() -> None:
    cuda = ctypes.CDLL(sys.argv[1])
    print("mapped", flush=True)
    sys.stdin.readline()
    spans: list[tuple[str, int, int, int]] = []
    pointer = ctypes.c_void_p()
    where = ctypes.byref(pointer)

    def call(name: str, *arguments: Any, size: int = 0, function: Any = None) -> int:
        function = function or getattr(cuda, name)
        begin = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        result = int(function(*arguments))
        spans.append((name, begin, time.clock_gettime_ns(time.CLOCK_MONOTONIC), size))
        return result

    def bytes_of(count: int) -> Any:
        return ctypes.c_size_t(count)

    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", where, 0)
    call("cuModuleLoadData", where, None)
    call("cuLinkComplete", None, where, where)
    call("cuMemAlloc_v2", where, bytes_of(100 * MIB), size=100 * MIB)
    call("cuMemHostAlloc", where, bytes_of(3 * MIB), 0, size=3 * MIB)
    pinned = pointer.value
    for count in (1, 2 * MIB + 7, 3 * MIB):
        call("cuMemcpyHtoD_v2", None, ctypes.c_void_p(pinned), bytes_of(count), size=count)
    for name in ("cuMemcpyHtoDAsync_v2", "cuMemcpyHtoDAsync_v2_ptsz"):
        call(name, None, ctypes.c_void_p(pinned), bytes_of(MIB), None, size=MIB)
    for flags in (0, PER_THREAD_STREAMS):  # as the CUDA runtime finds what it calls
        found = proc_address(cuda, b"cuMemcpyHtoDAsync", flags)
        source, size = ctypes.c_void_p(pinned), bytes_of(5)
        call("cuMemcpyHtoDAsync", None, source, size, None, size=5, function=found)
    call("cuStreamSynchronize", None)
    address, size = map_file(Path(sys.argv[2]))
    call("cuMemcpyHtoD_v2", None, ctypes.c_void_p(address), bytes_of(size), size=size)
    call("cuStreamBeginCapture_v2", None, 0)
    time.sleep(0.02)
    call("cuStreamEndCapture", None, where)
    call("cuGraphInstantiateWithFlags", where, None, ctypes.c_ulonglong(0))
    for _ in range(LAUNCHES):
        cuda.cuLaunchKernel()
    call("cuMemCreate", where, bytes_of(500 * MIB), None, ctypes.c_ulonglong(0), size=500 * MIB)
    refused = call("cuMemAlloc", where, bytes_of(64 << 30), size=64 << 30)
    time.sleep(0.1)
    print(json.dumps({"spans": spans, "pid": os.getpid(), "refused": refused}), flush=True)


if __name__ == "__main__":
    main()
