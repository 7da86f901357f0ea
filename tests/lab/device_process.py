"""A process that uses GPU device files as a driver does, and stamps its slow requests.

    python device_process.py HOME COMPILER

Waits for a line on stdin; opens /dev/nvidiactl, /dev/nvidia0, /dev/kfd, /dev/dri/renderD128 and
/dev/nvidia9; makes SLOW requests to /dev/nvidia0 that take DELAY_S each and QUICK ones; uses kernel
caches under HOME; runs COMPILER. Prints {"requests": [[begin_ns, end_ns], …], "opens": [errno, …]}.

/dev/nvidia0 is expected to be a TUN device: TUNSETIFF copies its argument before all else, so a
request lasts as long as a page of it is missing, which userfaultfd(2) decides.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

SLOW, QUICK = 7, 11
DELAY_S = 0.005
TUNSETIFF = 0x400454CA
DEVICES = ("nvidiactl", "nvidia0", "kfd", "dri/renderD128", "nvidia9")
PAGE = 4096

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]
# linux/userfaultfd.h; the system call's number is that of every architecture but x86-64
SYS_USERFAULTFD = 323 if os.uname().machine == "x86_64" else 282
UFFDIO_API, UFFDIO_REGISTER, UFFDIO_COPY = 0xC018AA3F, 0xC020AA00, 0xC028AA03
API, MODE_MISSING = 0xAA, 1


def checked(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), what)
    return result


def ioctl(fd: int, request: int, fields: bytes) -> None:
    checked(LIBC.ioctl(fd, request, ctypes.create_string_buffer(fields)), f"ioctl {request:#x}")


class LatePages:
    """Pages that whoever touches them first waits for: DELAY_S each."""

    def __init__(self, count: int) -> None:
        self._fd = checked(LIBC.syscall(SYS_USERFAULTFD, os.O_CLOEXEC), "userfaultfd")
        self._memory = mmap.mmap(-1, count * PAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        ioctl(self._fd, UFFDIO_API, struct.pack("QQQ", API, 0, 0))
        span = struct.pack("QQQQ", self.address, count * PAGE, MODE_MISSING, 0)
        ioctl(self._fd, UFFDIO_REGISTER, span)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        zeros = ctypes.create_string_buffer(PAGE)
        while True:
            missing = struct.unpack_from("Q", os.read(self._fd, 32), 16)[0]
            time.sleep(DELAY_S)
            page = missing // PAGE * PAGE
            fields = struct.pack("QQQQq", page, ctypes.addressof(zeros), PAGE, 0, 0)
            ioctl(self._fd, UFFDIO_COPY, fields)


def opened(path: Path) -> tuple[int, int]:
    """(descriptor, 0) or (-1, errno)."""
    try:
        return os.open(path, os.O_RDWR), 0
    except OSError as error:
        return -1, error.errno or 0


# A kernel in each cache, as its owner names its folders.
CACHES = {
    "ComputeCache": ".nv/ComputeCache/0/a0f3",
    "Triton": ".triton/cache/x/k.cubin",
    "inductor": "torchinductor_root/ab/c.py",
    "vLLM": ".cache/vllm/torch_compile_cache/x/artifact",
    "DeepGEMM": ".cache/deep_gemm/cache/x/kernel.cubin",
    "FlashInfer": ".cache/flashinfer/90a/x/x.so",
}
MISSING = ".cache/miopen/3.0/x.ukdb"
PACKAGE = "site-packages/flashinfer/__init__.py"


def make_caches(home: Path) -> None:
    """As an earlier start left them."""
    for file in (*CACHES.values(), PACKAGE, ".nv/ComputeCache/0/index"):
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).write_bytes(bytes(1000))


def use_caches(home: Path) -> None:
    """As compilers of kernels do: in each one kernel is read, another compiled, kept and loaded; an
    index is updated; one cache has nothing; a package of a cache's name is none."""
    for kernel in CACHES.values():
        (home / kernel).read_bytes()
        compiled = home / f"{kernel}.tmp"
        compiled.write_bytes(bytes(10))
        compiled.rename(home / f"{kernel}.new").read_bytes()
    with (home / ".nv/ComputeCache/0/index").open("r+b"):
        pass
    (home / PACKAGE).read_bytes()
    with suppress(FileNotFoundError):
        (home / MISSING).read_bytes()


def main() -> None:
    sys.stdin.readline()
    found = {name: opened(Path("/dev") / name) for name in DEVICES}
    device, _ = found["nvidia0"]
    pages = LatePages(SLOW)
    requests = []
    for number in range(SLOW + QUICK):
        argument = pages.address + number % SLOW * PAGE
        begin = time.monotonic_ns()
        LIBC.ioctl(device, TUNSETIFF, argument)
        requests.append((begin, time.monotonic_ns()))
    use_caches(Path(sys.argv[1]))
    subprocess.run([sys.argv[2]], check=True)
    opens = [error for _, error in found.values()]
    print(json.dumps({"requests": requests, "opens": opens, "pid": os.getpid()}), flush=True)


if __name__ == "__main__":
    main()
