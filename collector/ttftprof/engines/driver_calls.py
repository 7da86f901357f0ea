"""Calls into GPU drivers worth a uprobe: rare ones, which begin or end a stage of a start-up.

A row names one call; its exported variants (`_v2`, per-thread streams `_ptds`/`_ptsz`/`_spt`) are
looked for in the library itself, and one exported address is probed once: what cuGetProcAddress
hands out is the address of an export (so in libcuda 535, 550 and 555, for each kind of stream and
version of CUDA). Signatures: cuda.h of CUDA 13.5, hip_runtime_api.h of ROCm 6, hsa.h, nvrtc.h.
Launches happen thousands of times a second and are only probed when asked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FIRST_ROW = 100  # rows below are those of `markers.SYMBOL_MARKS`
_SUFFIXES = ("", "_v2", "_v3", "_v4", "_ptds", "_ptsz", "_v2_ptds", "_v2_ptsz", "_spt")
# marks.bpf.c: which argument, counted from 1, goes into `a` and `b` of the event
_COOKIE_FIRST, _COOKIE_SECOND = 20, 24

# What the call is a part of.
CONTEXT, COMPILE, ALLOC, MAP, PIN, COPY = "context", "compile", "alloc", "map", "pin", "copy"
CAPTURE, CAPTURED, INSTANTIATE, LAUNCH = "capture", "captured", "instantiate", "launch"
WAIT = "wait"  # for what was given to the device: once or twice a token

# Meanings of the second argument that is kept.
SOURCE, ADDRESS, DIRECTION = "source", "address", "direction"
HOST_TO_DEVICE, ANY_DIRECTION = 1, 4  # of hipMemcpyKind
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY, hipErrorOutOfMemory


@dataclass(frozen=True, slots=True)
class DriverCall:
    """`bytes_at`: the argument, counted from 1, that is a number of bytes; 0: none is.

    `second_at`, `second`: another argument that is kept, and what it means.
    """

    row: int
    name: str
    group: str
    bytes_at: int = 0
    second_at: int = 0
    second: str = ""

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(self.name + suffix for suffix in _SUFFIXES)

    @property
    def cookie(self) -> int:
        return self.row | self.bytes_at << _COOKIE_FIRST | self.second_at << _COOKIE_SECOND


@dataclass(frozen=True, slots=True)
class DriverLibrary:
    """The calls of one library, whatever path or version its file has; `usual`: where it lies."""

    pattern: re.Pattern[str]
    usual: tuple[str, ...]
    calls: tuple[DriverCall, ...]


_Row = tuple[str, str] | tuple[str, str, int] | tuple[str, str, int, int, str]


def _library(first_row: int, pattern: str, usual: tuple[str, ...], *rows: _Row) -> DriverLibrary:
    calls = (DriverCall(first_row + number, *row) for number, row in enumerate(rows))
    return DriverLibrary(re.compile(pattern), usual, tuple(calls))


_LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib",
    "/usr/lib/wsl/lib", "/usr/local/nvidia/lib64", "/run/opengl-driver/lib",
    # where an operator's container, or GKE, put the driver of a host that has none itself
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu", "/run/nvidia/driver/usr/lib64",
    "/home/kubernetes/bin/nvidia/lib64",
)  # fmt: skip


def places_of(library_name: str) -> tuple[str, ...]:
    """Where a library of a GPU driver may lie."""
    return tuple(f"{folder}/{library_name}" for folder in _LIBRARY_FOLDERS)


# A row is never moved: recordings name calls by it. New ones go to the end of their library.
DRIVER_LIBRARIES = (
    _library(
        FIRST_ROW,
        r"libcuda\.so(\.[\d.]+)?",
        places_of("libcuda.so.1"),
        ("cuInit", CONTEXT),
        ("cuDevicePrimaryCtxRetain", CONTEXT),
        ("cuCtxCreate", CONTEXT),
        ("cuModuleLoad", COMPILE),
        ("cuModuleLoadData", COMPILE),
        ("cuModuleLoadDataEx", COMPILE),
        ("cuModuleLoadFatBinary", COMPILE),
        ("cuLibraryLoadData", COMPILE),
        ("cuLibraryLoadFromFile", COMPILE),
        ("cuLinkCreate", COMPILE),
        ("cuLinkAddData", COMPILE),
        ("cuLinkAddFile", COMPILE),
        ("cuLinkComplete", COMPILE),
        ("cuMemAlloc", ALLOC, 2),
        ("cuMemAllocManaged", ALLOC, 2),
        ("cuMemAllocAsync", ALLOC, 2),
        ("cuMemAllocFromPoolAsync", ALLOC, 2),
        ("cuMemCreate", ALLOC, 2),
        ("cuMemMap", MAP, 2),
        ("cuMemHostAlloc", PIN, 2),
        ("cuMemAllocHost", PIN, 2),
        ("cuMemHostRegister", PIN, 2, 1, ADDRESS),
        ("cuMemcpyHtoD", COPY, 3, 2, SOURCE),
        ("cuMemcpyHtoDAsync", COPY, 3, 2, SOURCE),
        ("cuStreamBeginCapture", CAPTURE),
        ("cuStreamBeginCaptureToGraph", CAPTURE),
        ("cuStreamEndCapture", CAPTURED),
        ("cuGraphInstantiate", INSTANTIATE),
        ("cuGraphInstantiateWithFlags", INSTANTIATE),
        ("cuGraphInstantiateWithParams", INSTANTIATE),
        ("cuLaunchKernel", LAUNCH),
        ("cuLaunchKernelEx", LAUNCH),
        ("cuGraphLaunch", LAUNCH),
        # From here the driver compiles or loads what it had put off (CUDA_MODULE_LOADING=LAZY).
        ("cuLibraryGetModule", COMPILE),
        ("cuKernelGetFunction", COMPILE),
        ("cuModuleGetFunction", COMPILE),
        ("cuFuncLoad", COMPILE),
        # Which way these go only the driver knows.
        ("cuMemcpy", COPY, 3, 2, SOURCE),
        ("cuMemcpyAsync", COPY, 3, 2, SOURCE),
        ("cuCtxSynchronize", WAIT),
        ("cuStreamSynchronize", WAIT),
        ("cuEventSynchronize", WAIT),
        # Since CUDA 12.8; how many bytes a batch has only lists in the caller's memory tell.
        ("cuMemcpyBatchAsync", COPY),
        ("cuMemcpyWithAttributesAsync", COPY, 3, 2, SOURCE),
        ("cuStreamBeginRecaptureToGraph", CAPTURE),
    ),
    _library(
        FIRST_ROW + 100,
        r"libamdhip64\.so(\.[\d.]+)?",
        (
            "/opt/rocm/lib/libamdhip64.so", "/usr/lib/x86_64-linux-gnu/libamdhip64.so.5",
            "/usr/lib/x86_64-linux-gnu/libamdhip64.so.6", "/usr/lib64/libamdhip64.so.6",
        ),
        ("hipInit", CONTEXT),
        ("hipCtxCreate", CONTEXT),
        ("hipDevicePrimaryCtxRetain", CONTEXT),
        ("hipModuleLoad", COMPILE),
        ("hipModuleLoadData", COMPILE),
        ("hipModuleLoadDataEx", COMPILE),
        ("hiprtcCompileProgram", COMPILE),
        ("hipMalloc", ALLOC, 2),
        ("hipMallocManaged", ALLOC, 2),
        ("hipMallocAsync", ALLOC, 2),
        ("hipExtMallocWithFlags", ALLOC, 2),
        ("hipMemCreate", ALLOC, 2),
        ("hipMemMap", MAP, 2),
        ("hipHostMalloc", PIN, 2),
        ("hipHostAlloc", PIN, 2),
        ("hipHostRegister", PIN, 2, 1, ADDRESS),
        ("hipMemcpyHtoD", COPY, 3, 2, SOURCE),
        ("hipMemcpyHtoDAsync", COPY, 3, 2, SOURCE),
        ("hipMemcpy", COPY, 3, 4, DIRECTION),
        ("hipMemcpyAsync", COPY, 3, 4, DIRECTION),
        ("hipMemcpyWithStream", COPY, 3, 4, DIRECTION),
        ("hipStreamBeginCapture", CAPTURE),
        ("hipStreamEndCapture", CAPTURED),
        ("hipGraphInstantiate", INSTANTIATE),
        ("hipGraphInstantiateWithFlags", INSTANTIATE),
        ("hipLaunchKernel", LAUNCH),
        ("hipModuleLaunchKernel", LAUNCH),
        ("hipGraphLaunch", LAUNCH),
        ("hipGetDeviceCount", CONTEXT),  # mostly the first call, which starts the runtime
        ("hipModuleGetFunction", COMPILE),
        ("hipMallocFromPoolAsync", ALLOC, 2),
        ("hipMallocHost", PIN, 2),
        ("hipMemAllocHost", PIN, 2),
        ("hipDeviceSynchronize", WAIT),
        ("hipStreamSynchronize", WAIT),
        ("hipEventSynchronize", WAIT),
    ),
    _library(
        FIRST_ROW + 200,
        r"libnvrtc\.so(\.[\d.]+)?",
        (),
        ("nvrtcCompileProgram", COMPILE),
    ),
    _library(
        FIRST_ROW + 210,
        r"libhiprtc\.so(\.[\d.]+)?",
        (),
        ("hiprtcCompileProgram", COMPILE),
    ),
    _library(
        FIRST_ROW + 220,
        r"libhsa-runtime64\.so(\.[\d.]+)?",
        ("/opt/rocm/lib/libhsa-runtime64.so.1", "/usr/lib/x86_64-linux-gnu/libhsa-runtime64.so.1"),
        ("hsa_init", CONTEXT),
    ),
)  # fmt: skip

DRIVER_CALLS = {call.row: call for library in DRIVER_LIBRARIES for call in library.calls}


def calls_in(library_name: str, launches: bool = False) -> tuple[DriverCall, ...]:
    """What to probe in a library of this file name; nothing in most."""
    for library in DRIVER_LIBRARIES:
        if library.pattern.fullmatch(library_name):
            return tuple(c for c in library.calls if launches or c.group != LAUNCH)
    return ()


def usual_paths() -> tuple[str, ...]:
    """Where driver libraries lie, so that they are probed before a process maps them: its first
    call may come within a millisecond of that."""
    return tuple(path for library in DRIVER_LIBRARIES for path in library.usual)
