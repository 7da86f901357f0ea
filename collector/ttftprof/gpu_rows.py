"""The layouts in which samples of GPUs are recorded, whoever took them.

A row holds what one look at one device found; `valid` says which of its fields were looked at, the
others mean nothing. All `ns` are CLOCK_MONOTONIC.
"""

from __future__ import annotations

from enum import IntFlag

import numpy as np

GPU_ROW = np.dtype(
    [
        ("ns", "<u8"),
        ("late_ns", "<u4"),  # behind the schedule
        ("took_ns", "<u4"),  # the look itself
        ("device", "<u2"),  # `index` of the device's fact
        ("valid", "<u2"),  # `Valid`
        ("used_bytes", "<u8"),
        ("busy_percent", "|u1"),
        ("pstate", "|u1"),
        ("link_gen", "|u1"),
        ("link_width", "|u1"),
        ("core_mhz", "<u4"),
        ("memory_mhz", "<u4"),
        ("throttle", "<u8"),  # NVML's nvmlClocksEventReason… bits
        ("rx_bytes_per_s", "<u8"),
        ("tx_bytes_per_s", "<u8"),
        ("error_ns", "<u4"),  # of `ns`, where the driver's own stamp was brought to our clock
    ]
)

# A row each time the memory of one process on one device changed; 0 when it is gone.
GPU_PROCESS_ROW = np.dtype(
    [("ns", "<u8"), ("device", "<u2"), ("tgid", "<u4"), ("used_bytes", "<u8")]
)


class Valid(IntFlag):
    """Fields of a `GPU_ROW` that hold something."""

    USED = 1
    BUSY = 2
    PSTATE = 4
    LINK = 8
    CLOCKS = 16
    THROTTLE = 32
    RX = 64
    TX = 128
