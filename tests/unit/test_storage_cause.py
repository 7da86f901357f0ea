"""Storage convicted and acquitted: which verdict the facts of a load get, and what is promised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttftprof.model import (
    STORAGE_VERDICTS,
    FileUse,
    InFlight,
    MemoryUse,
    MountUse,
    PathModel,
    Quantiles,
)
from ttftprof.storage_cause import StorageCause, acquit, convict

MS, KIB, MIB = 1_000_000, 1 << 10, 1 << 20
SIZE = 1_000 * MIB
# 2 ms and 100 MB/s: with 128 KiB of readahead two windows take 3.3 ms.
MODEL = PathModel(2 * MS, 100e6, 128 * KIB, 2.0, 79e6, None)
MOUNT = MountUse("/models", "nfs4", "rw,rsize=1048576", 128, None, None, None, None, None)


def use(**more: Any) -> FileUse:
    """Weights read from NFS by mmap, 128 KiB at a time, at 39 MB/s."""
    told = FileUse(
        path="/models/b.gguf", device="0:40", inode=1, fstype="nfs4", mount="/models",
        size_bytes=SIZE, bytes_from_storage=SIZE, bytes_from_cache=0, major_faults=None,
        minor_faults=None, storage_wait_ns=0, bytes_per_second=39e6,
        request_size_bytes=Quantiles(128 * KIB, 128 * KIB), in_flight=InFlight(1.0, 2),
        access="mmap", is_weights=True, sequential_share=1.0, path_model=MODEL,
        reclaimed_bytes=0, refaulted_bytes=0,
    )  # fmt: skip
    return replace(told, **more)


def verdict(
    *files: FileUse, mount: MountUse = MOUNT, memory: MemoryUse | None = None, waited_s: float = 25
) -> StorageCause:
    found = convict(files, [mount], memory, round(waited_s * 1e9))
    assert found
    return found


def test_mmap_that_waits_at_each_window_is_a_pattern() -> None:
    found = verdict(use())
    assert found.kind == "pattern"
    assert "128 KiB × 1.0 / 3.311 ms = 39.6 MB/s; measured 39.0 MB/s" in found.says
    assert "128 KiB × 2.0 = 79.0 MB/s: 13.27 s instead of 26.89 s" in found.says
    without_mmap, keep = found.actions
    assert "--no-mmap" in without_mmap.change
    assert without_mmap.expected_gain_ns == pytest.approx((SIZE / 39e6 - SIZE / 79e6) * 1e9)
    assert without_mmap.verify == "sudo ttftprof storage /models/b.gguf"
    assert keep.expected_gain_ns == 25_000 * MS


def test_random_advice_is_named() -> None:
    slow = use(
        advice=("MADV_RANDOM",), bytes_per_second=2e6, request_size_bytes=Quantiles(4096, 4096)
    )
    found = verdict(slow, waited_s=500)
    assert found.kind == "pattern"
    assert "MADV_RANDOM, which switches readahead off" in found.says
    assert "NUMA" in found.actions[0].change


def test_a_gain_is_no_more_than_what_was_waited() -> None:
    assert verdict(use(), waited_s=1).actions[0].expected_gain_ns == 1_000 * MS


def test_jumping_about_is_told_from_reading_in_order() -> None:
    found = verdict(use(access="read", sequential_share=0.2, bytes_per_second=10e6))
    assert found.kind == "pattern"
    assert "Only 20 % of its requests go on where another ended" in found.says


def test_readahead_too_small_for_the_path() -> None:
    """100 MB/s × 2 ms are 195 KiB: the next power of two keeps the link busy."""
    found = verdict(use(access="read", bytes_per_second=70e6))
    assert found.kind == "pattern"
    assert "Readahead of 128 KiB is too small" in found.says
    assert "measured, not assumed" in found.actions[0].change
    tried = "sudo ttftprof storage --try-readahead 128,256,1024 /models/b.gguf"
    assert found.actions[0].verify == tried
    gain_ns = found.actions[0].expected_gain_ns
    assert gain_ns == pytest.approx((SIZE / 70e6 - SIZE / 100e6) * 1e9)
    assert "raise the readahead of /models:" in found.actions[0].change
    shown = verdict(use(access="read", bytes_per_second=70e6, fstype="overlay"))
    assert "of device 0:40, on which the layer of /models lies:" in shown.actions[0].change


def test_a_link_that_is_reached_is_the_limit() -> None:
    narrow = replace(MOUNT, link="interface eth0", link_bytes_per_second=125e6, read_ahead_kb=4096)
    found = verdict(use(access="read", bytes_per_second=94e6), mount=narrow)
    assert found.kind == "hardware or link"
    assert "94 % of the 100 MB/s" in found.says
    assert "interface eth0 carries 125 MB/s" in found.says


@pytest.mark.parametrize(
    ("depth", "share"),
    [
        (8.0, 0.5),  # enough under way at a time for twice the link
        (3.0, 100e6 / (3 * 131072 / (2e-3 + 131072 / 200e6))),  # then the delay is the limit
    ],
)
def test_a_link_that_is_reached_gains_by_a_faster_one_what_the_model_says(
    depth: float, share: float
) -> None:
    model = replace(MODEL, latency_ns=2 * MS, link_bytes_per_second=100e6)
    slow = use(
        access="read",
        bytes_per_second=94e6,
        path_model=model,
        request_size_bytes=Quantiles(131072, 131072),
        in_flight=InFlight(depth, 9),
    )
    found = verdict(slow, mount=replace(MOUNT, read_ahead_kb=4096))
    assert found.kind == "hardware or link"
    assert found.actions[0].expected_gain_ns == pytest.approx((1 - share) * SIZE / 94e6 * 1e9)
    assert "a link of twice the rate would make it" in found.says


def test_without_figures_for_a_model_a_faster_link_promises_nothing() -> None:
    line = replace(MOUNT, link="interface eth0", link_bytes_per_second=125e6)
    found = verdict(use(access="read", bytes_per_second=110e6, path_model=None), mount=line)
    assert found.kind == "hardware or link"
    assert found.actions[0].expected_gain_ns is None


def test_a_line_rate_serves_where_no_burst_told_the_links() -> None:
    unknown = replace(MODEL, link_bytes_per_second=None, read_bytes_per_second=None)
    line = replace(MOUNT, link="interface eth0", link_bytes_per_second=125e6, read_ahead_kb=4096)
    fast = use(access="read", bytes_per_second=110e6, path_model=unknown)
    assert verdict(fast, mount=line).kind == "hardware or link"
    assert verdict(replace(fast, bytes_per_second=30e6), mount=line).kind == "unknown"


@pytest.mark.parametrize(
    ("memory", "told"),
    [
        (MemoryUse(8 << 30, 512 * MIB, "/ai"), "the control group /ai may use 537 MB"),
        (MemoryUse(8 << 30, None, None), "the machine has 8.59 GB"),
        (None, "for want of memory."),
    ],
)
def test_what_had_been_cached_before_convicts_memory(memory: MemoryUse | None, told: str) -> None:
    found = verdict(use(refaulted_bytes=SIZE // 2, reclaimed_bytes=SIZE), memory=memory)
    assert found.kind == "memory"
    assert told in found.says
    assert found.actions[0].expected_gain_ns == 12_500 * MS


def test_keeping_in_cache_is_advised_only_where_it_can_be() -> None:
    def keeps(found: StorageCause) -> bool:
        return any("page cache (enough memory" in action.change for action in found.actions)

    assert keeps(verdict(use()))
    assert not keeps(verdict(use(access="direct")))
    assert not keeps(verdict(use(), memory=MemoryUse(SIZE // 2, None, None)))


def test_what_was_dropped_is_no_want_of_memory() -> None:
    """More memory would keep nothing: the way it was read is told as ever."""
    found = verdict(use(refaulted_bytes=SIZE), memory=MemoryUse(64 << 30, None, None))
    assert found.kind == "pattern"
    assert "were dropped though memory was not short" in found.says
    assert "Mmap waits" in found.says
    assert "drop_caches" in found.actions[0].change
    assert found.actions[0].expected_gain_ns == 25_000 * MS
    assert not any("both models" in action.change for action in found.actions)


def test_what_was_reclaimed_before_the_request_is_want_of_memory() -> None:
    found = verdict(use(refaulted_bytes=SIZE, reclaimed_before_bytes=SIZE))
    assert found.kind == "memory"
    assert "dropped" not in found.says
    partly = verdict(use(refaulted_bytes=SIZE, reclaimed_before_bytes=SIZE // 4))
    assert partly.kind == "memory"
    assert "262 MB of these bytes" in partly.says
    assert "786 MB of these bytes" in partly.says


def test_a_link_slower_than_the_load_is_refuted() -> None:
    """No disk gives ten times the most it gives: without a limit there is no verdict on it."""
    slow = replace(
        MODEL,
        latency_ns=4_500_000,
        link_bytes_per_second=58.4e6,
        read_bytes_per_second=58.4e6,
    )
    fast = use(
        path_model=slow,
        bytes_per_second=539e6,
        request_size_bytes=Quantiles(4 * MIB, 4 * MIB),
        in_flight=InFlight(8.0, 9),
    )
    assert verdict(fast).kind == "unknown"
    narrow = replace(MOUNT, link="interface eth0", link_bytes_per_second=125e6)
    assert verdict(fast, mount=narrow).kind == "unknown"
    assert verdict(replace(fast, bytes_per_second=60e6)).kind == "hardware or link"


def test_requests_that_stand_in_line_are_no_pattern() -> None:
    """Eight of 4 MiB at a time took ten times what one takes: no other way of reading brings more,
    whatever rate the model has from other requests."""
    model = replace(MODEL, link_bytes_per_second=856e6, read_bytes_per_second=856e6)
    busy = use(
        path_model=model,
        bytes_per_second=526e6,
        request_size_bytes=Quantiles(4 * MIB, 4 * MIB),
        in_flight=InFlight(8.0, 9),
        requests=250,
    )
    slow = replace(MOUNT, requests=250, total_ns=250 * 60 * MS)
    found = verdict(busy, mount=slow)
    assert found.kind == "hardware or link"
    assert "each took 60.00 ms, and alone would have taken 9.974 ms at most." in found.says
    unqueued = replace(slow, total_ns=250 * 7 * MS)
    assert verdict(busy, mount=unqueued).kind == "pattern"
    one_by_one = replace(busy, in_flight=InFlight(1.0, 1))
    assert verdict(one_by_one, mount=slow).kind == "pattern"


def test_all_shards_count_together() -> None:
    first = use(path="/models/b-1-of-2.gguf")
    second = use(path="/models/b-2-of-2.gguf")
    other = use(path="/models/libx.so", is_weights=False)
    found = verdict(first, second, other)
    assert "26.55 s instead of 53.77 s" in found.says


def test_without_a_file_or_its_bytes_there_is_no_verdict() -> None:
    assert convict([], [], None, 5) is None
    assert convict([use(bytes_from_storage=None)], [], None, 5) is None


def test_storage_is_acquitted() -> None:
    cached = acquit([use(bytes_from_storage=0)], 0, 9 * MS)
    assert cached
    assert cached.kind == "cache worked"
    fast = acquit([use()], 30 * MS, 900 * MS)
    assert fast
    assert fast.kind == "not storage"
    assert (
        "1.05 GB of the weights came from it at 39.0 MB/s, and only 30.00 ms of 900.0 ms"
        in fast.says
    )
    assert acquit([use(bytes_from_storage=None)], 0, 9) is None


@pytest.mark.parametrize(
    ("cached", "kind"), [((0.0, 0), "unknown"), ((0.5, SIZE // 2), "cache worked")]
)
def test_a_cache_that_held_nothing_did_not_work(cached: tuple[float, int], kind: str) -> None:
    """Mapped past the page cache (DAX), or read by a device itself: nobody counts what came."""
    resident, came = cached
    weights = use(bytes_from_storage=0, bytes_from_cache=came, residency_before=resident)
    found = acquit([weights], 0, 9 * MS)
    assert found
    assert found.kind == kind


numbers = st.none() | st.floats(1, 1e12)
models = st.none() | st.builds(
    PathModel, st.integers(0, 10**10), numbers, st.just(4096), numbers, numbers, st.none()
)
uses = st.builds(
    use,
    bytes_from_storage=st.sampled_from([0, 1, 4096, SIZE]),
    bytes_per_second=numbers,
    request_size_bytes=st.none() | st.builds(Quantiles, st.floats(0, 1e9), st.floats(0, 1e9)),
    in_flight=st.none() | st.builds(InFlight, st.floats(0, 100), st.integers(0, 100)),
    access=st.sampled_from([None, "mmap", "read", "direct", "mixed"]),
    advice=st.sampled_from([(), ("MADV_RANDOM",), ("FADV_RANDOM",)]),
    refaulted_bytes=st.none() | st.integers(0, 2 * SIZE),
    reclaimed_bytes=st.none() | st.integers(0, SIZE),
    reclaimed_before_bytes=st.none() | st.integers(0, SIZE),
    sequential_share=st.none() | st.floats(0, 1),
    path_model=models,
)
mounts = st.builds(
    lambda kib, rate: replace(
        MOUNT, read_ahead_kb=kib, link=rate and "eth0", link_bytes_per_second=rate
    ),
    st.none() | st.integers(0, 1 << 20),
    numbers,
)
memories = st.none() | st.builds(
    MemoryUse, st.none() | st.integers(1, 10**12), st.none(), st.none()
)


@given(st.lists(uses, max_size=3), mounts, memories, st.integers(0, 10**12))
def test_every_verdict_is_within_its_bounds(
    files: list[FileUse], mount: MountUse, memory: MemoryUse | None, waited_ns: int
) -> None:
    found = convict(files, [mount], memory, waited_ns)
    if found is None:
        return
    assert found.kind in STORAGE_VERDICTS
    for action in found.actions:
        assert action.verify
        assert action.expected_gain_ns is None or 0 <= action.expected_gain_ns <= waited_ns


def test_another_model_from_storage_is_no_cache_that_worked() -> None:
    cached = use(path="/m/a.gguf", bytes_from_storage=0)
    other = use(path="/m/b.gguf", inode=2, is_weights=False, bytes_from_storage=SIZE)
    assert acquit([cached, other], 300 * MS, 1_000 * MS) == StorageCause("unknown")
    told = acquit([cached, other], 30 * MS, 1_000 * MS)
    assert told
    assert told.kind == "not storage"
    assert "0 B of the weights came from it, 1.05 GB of /m/b.gguf, and only" in told.says
    nameless = replace(other, path="/m/blobs/4711", bytes_from_storage=8 * MIB)
    assert acquit([cached, nameless], 300 * MS, 1_000 * MS) == StorageCause("unknown")
    second = use(path="/m/a-2.gguf", inode=3)
    assert acquit([cached, second], 300 * MS, 1_000 * MS) == StorageCause("unknown")


def test_a_header_or_a_library_from_storage_spoils_no_cache() -> None:
    cached = use(bytes_from_storage=0)
    for path, came in (("/m/b.gguf", 200 * KIB), ("/lib/libx.so", 5 * MIB)):
        other = use(path=path, inode=2, is_weights=False, bytes_from_storage=came)
        found = acquit([cached, other], 300 * MS, 1_000 * MS)
        assert found
        assert found.kind == "cache worked"


def test_what_others_read_meanwhile_is_no_cache_that_worked() -> None:
    read = use(bytes_from_storage=0, read_by_others_bytes=196_000_000)
    assert acquit([replace(read, read_by_others_bytes=0)], 0, 9 * MS) == StorageCause(
        "cache worked", "Storage is not to blame: not one byte of the weights came from it."
    )
    waited, told = acquit([read], 8 * MS, 9 * MS), acquit([read], 0, 9 * MS)
    assert waited == StorageCause("unknown")
    assert told
    assert told.kind == "not storage"
    assert "(and 196 MB for other programs meanwhile)" in told.says
