"""The records of `probes/events.h` as numpy dtypes, and their vocabulary.

The C header is the truth: a test compares every field's offset with the BTF of the built objects.
All `*_ns` are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Records = npt.NDArray[Any]  # a structured array of one of the dtypes below

EVENT = np.dtype(
    [
        ("start_ns", "<u8"),
        ("duration_ns", "<u8"),
        ("tid", "<u4"),
        ("tgid", "<u4"),
        ("kind", "<u2"),
        ("flags", "<u2"),
        ("dev", "<u4"),
        ("ino", "<u8"),
        ("a", "<u8"),
        ("b", "<u8"),
    ]
)

WAIT_REASONS = 10
CPU_MODES = 3

THREAD_SLOT = np.dtype(
    [
        ("tid", "<u4"),
        ("tgid", "<u4"),
        ("since_ns", "<u8"),
        ("off_ns", "<u8"),
        ("off_reason", "<u4"),
        ("off_syscall", "<i4"),
        ("file_dev", "<u4"),
        ("enter_nr", "<u4"),
        ("file_ino", "<u8"),
        ("enter_ns", "<u8"),
        ("cpu_ns", "<u8"),
        ("min_flt", "<u8"),
        ("maj_flt", "<u8"),
        ("file_faults", "<u8"),
        ("map_arounds", "<u8"),
        ("opens", "<u8"),
        ("mmaps", "<u8"),
        ("forks", "<u8"),
        ("short_ns", "<u8", (WAIT_REASONS,)),
        ("short_count", "<u4", (WAIT_REASONS,)),
        ("samples", "<u4", (CPU_MODES,)),
        ("pad", "<u4"),
        ("asked_what", "<u8"),
        ("asked_where", "<u8"),
        ("asked_offset", "<u8"),
    ]
)

FILE_SLOT = np.dtype(
    [
        ("dev", "<u4"),
        ("pad", "<u4"),
        ("ino", "<u8"),
        ("since_ns", "<u8"),
        ("size_bytes", "<u8"),
        ("cached_pages", "<u8"),
        ("added_pages", "<u8"),
        ("foreign_pages", "<u8"),
        ("evicted_pages", "<u8"),
        ("reads", "<u8"),
        ("read_bytes", "<u8"),
        ("direct_bytes", "<u8"),
        ("sequential_reads", "<u8"),
        ("next_offset", "<u8"),
        ("faults", "<u8"),
        ("map_arounds", "<u8"),
        ("opens", "<u8"),
        ("mmaps", "<u8"),
        ("short_wait_ns", "<u8"),
        ("touch_jiffies", "<u8"),
        ("readahead_asks", "<u8"),
        ("readahead_pages", "<u8"),
        ("reclaimed_pages", "<u8"),
        ("refaulted_pages", "<u8"),
        ("run_bytes", "<u8"),
        ("run_start_ns", "<u8"),
        ("run_end_ns", "<u8"),
    ]
)

REMOTE_REQUEST = np.dtype(
    [
        ("start_ns", "<u8"),
        ("sent_ns", "<u8"),
        ("queue_ns", "<u8"),
        ("wire_ns", "<u8"),
        ("execute_ns", "<u8"),
        ("ino", "<u8"),
        ("offset", "<u8"),
        ("dev", "<u4"),
        ("bytes", "<u4"),
        ("tid", "<u4"),
        ("tgid", "<u4"),
        ("flags", "<u2"),
        ("times_sent", "<u2"),
        ("connection", "<u2"),
        ("pad", "<u2"),
    ]
)
REMOTE_KEY_BYTES = 24  # struct remote_key of probes/remote.bpf.h

TEXT_PIECE = 4096  # bytes of one at most
TEXT = np.dtype(
    [
        ("start_ns", "<u8"),
        ("end_ns", "<u8"),
        ("key", "<u8"),
        ("tid", "<u4"),
        ("tgid", "<u4"),
        ("dev", "<u4"),
        ("kind", "<u2"),
        ("flags", "<u2"),
        ("total", "<u4"),
        ("offset", "<u4"),
        ("skipped", "<u4"),
        ("length", "<u4"),
    ]
)

CONTROL = np.dtype(
    [
        ("threads_used", "<u4"),
        ("files_used", "<u4"),
        ("lost", "<u8", (8,)),
        ("events", "<u8"),
        ("texts", "<u8"),
        ("block_bytes", "<u8"),
        ("block_requests", "<u8"),
    ]
)

# What the recorder keeps of the slots, a row each time one changed: the stamp, then the fields.
_TRANSIENT = {
    *("pad", "enter_nr", "enter_ns", "asked_what", "asked_where", "asked_offset"),
    *("next_offset", "run_bytes", "run_start_ns", "run_end_ns"),
}


def _kept(dtype: np.dtype[Any]) -> np.dtype[Any]:
    fields: list[Any] = [("ns", "<u8")]
    for name in dtype.names or ():
        if name not in _TRANSIENT:
            kind = dtype[name]
            fields.append((name, kind.base.str, kind.shape) if kind.shape else (name, kind.str))
    return np.dtype(fields)


THREAD_ROW = _kept(THREAD_SLOT)
FILE_ROW = _kept(FILE_SLOT)


class Kind(IntEnum):
    """`enum event_kind`; the header says what each field means for each."""

    NONE = 0
    FORK = 1
    EXEC = 2
    THREAD_END = 3
    PROCESS_EXIT = 4
    SIGNAL = 5
    OFFCPU = 6
    OPEN = 7
    MMAP = 8
    MUNMAP = 9
    MADVISE = 10
    FADVISE = 11
    READ = 12
    TOUCH = 13
    BLOCK = 14
    LISTEN = 15
    CONN = 16
    FORWARD = 17
    MARK_ENTER = 18
    MARK_EXIT = 19
    CONNECT = 20
    ACCEPT = 21
    HELD = 22
    REMOTE = 23
    REMOTE_SPLIT = 24
    REMOTE_STARVED = 25
    DEVICE = 26


TCP_CLOSE = 7  # the state in `flags` of a CONN whose connection is gone; include/net/tcp_states.h


class Wait(IntEnum):
    """`enum wait_reason`: why a thread was off the CPU."""

    RUNNABLE = 0
    STORAGE = 1
    LOCK = 2
    TIMER = 3
    NETWORK = 4
    CHILD = 5
    PIPE = 6
    DEVICE = 7
    RECLAIM = 8
    OTHER = 9


class CpuMode(IntEnum):
    """`enum cpu_mode`: what a tick found a running thread doing."""

    USER = 0
    FAULT = 1
    KERNEL = 2


class TextKind(IntEnum):
    """`enum text_kind`: what a record of the text ring carries."""

    PATH = 1
    EXEC = 2
    RECEIVED = 3
    SENT = 4
    LOG = 5
    CACHE = 6
    SENT_HELD = 7
    LEFT = 8


class MmapFlag(IntEnum):
    POPULATE = 1
    EXEC = 2
    FAILED = 4
    WRITE = 8


class ReadFlag(IntEnum):
    DIRECT = 1
    IO_URING = 2
    RUN = 4


class DeviceFlag(IntEnum):
    """`enum device_flag`; the low four bits say whose device file was opened."""

    NVIDIA = 1
    KFD = 2
    DRI = 3
    IOCTL = 16


class CacheFlag(IntEnum):
    """`enum cache_flag`: how a file of a kernel cache was opened."""

    WRITE = 1
    MISSING = 2


class RemoteFlag(IntEnum):
    """`enum remote_flag`; its low four bits are a `Family`."""

    FAILED = 16
    UNANSWERED = 32
    DIRECT = 64


class Family(IntEnum):
    """Who a remote read was asked of."""

    NFS = 1
    SMB = 2
    FUSE = 3
    NETFS = 4


FAMILY_MASK = 0xF
# Of REMOTE_SPLIT's `b`: above it the number of the connection plus one, below nanoseconds.
CONNECTION_BIT = 48


# `enum lost`, in order; the words of the reports.
LOST = (
    "events ring full",
    "text ring full",
    "threads not followed",
    "files not followed",
    "block requests not followed",
    "remote requests not followed",
    "counters of ended threads",
    "io_uring reads not followed",
)
# Counted by the kernel for each program (see `kernel.libbpf.ProgramCounts`), whoever ran it.
SKIPPED_RUNS = "probe runs skipped"


def dev_numbers(dev: int) -> tuple[int, int]:
    """(major, minor) of the kernel's own dev_t, which is not the encoding of stat()."""
    return dev >> 20, dev & 0xFFFFF


def kernel_dev(major: int, minor: int) -> int:
    """The kernel's dev_t of a device number, as the records carry it."""
    return major << 20 | minor


def duration_end(records: Records) -> npt.NDArray[np.int64]:
    """`start_ns + duration_ns` of each record, int64."""
    ends: npt.NDArray[np.int64] = (records["start_ns"] + records["duration_ns"]).astype(np.int64)
    return ends
