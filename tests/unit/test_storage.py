"""What a request did with its files: bytes, residency, rates, request sizes, advice, faults."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ttftprof.events import Family, Kind, MmapFlag, ReadFlag, Wait, kernel_dev
from ttftprof.model import FileUse, Quantiles
from ttftprof.phases import StartUp
from ttftprof.storage import (
    counted,
    notes_of,
    read_beside,
    read_past_cache,
    unseen_beneath,
    uses_of,
)
from ttftprof.storage_cause import acquit
from ttftprof.timeline import Timeline
from unit.recordings import A_GGUF, B_GGUF, DEV, MIB, MS, NEW, OLD, PAGE, Scene, ns

PAGES = 100 * MIB // PAGE
ADDRESS = 0x7F00_0000_0000


def weights_only(timeline: Timeline, ino: int = B_GGUF) -> StartUp:
    process = timeline.process_at(NEW, ns(0))
    assert process is not None
    return StartUp(process, None, None, None, None, (timeline.files[DEV, ino],))


def used(scene: Scene, begin: float = 100, end: float = 500) -> FileUse:
    """What was done with B between two moments."""
    timeline = scene.timeline()
    files, _ = uses_of(timeline, weights_only(timeline), {NEW}, ns(begin), ns(end))
    return next(f for f in files if f.inode == B_GGUF)


def server() -> Scene:
    return Scene().process(NEW, "server").file(B_GGUF, "/models/b.gguf")


def growing(scene: Scene, **counters: int) -> Scene:
    """Counters of B that were 0 at 100 ms and grew to this by 300, where they stay."""
    scene.file_row(B_GGUF, 100, **dict.fromkeys(counters, 0))
    return scene.file_row(B_GGUF, 300, **counters)


# -- bytes ----------------------------------------------------------------------------------------


def test_what_entered_the_cache_came_from_storage() -> None:
    file = used(growing(server().mapped(NEW, B_GGUF, 150), added_pages=PAGES))
    assert file.bytes_from_storage == 100 * MIB
    assert file.is_weights
    assert (file.path, file.device, file.fstype, file.mount) == (
        "/models/b.gguf", "8:1", "ext4", "/",
    )  # fmt: skip


def test_what_lies_beneath_an_overlay_unseen_is_not_known_and_said_so() -> None:
    scene = Scene().process(NEW, "server")
    scene.file(B_GGUF, "/models/b.gguf", fstype="overlay", beneath_unseen=True)
    growing(scene.opened(NEW, B_GGUF, 140).mapped(NEW, B_GGUF, 150), faults=1)
    file = used(scene)
    unknown = (file.bytes_from_storage, file.bytes_from_cache, file.residency_before)
    assert unknown == (None, None, None)
    [note] = unseen_beneath(scene.timeline())
    assert note.startswith("/models/b.gguf lies in an overlay")
    assert unseen_beneath(server().timeline()) == []


def read_without_a_page(cached_pages: int = 0) -> Scene:
    """B, of which no page was in the cache at its opening nor came in, read whole."""
    scene = server().opened(NEW, B_GGUF, 140, cached_pages=cached_pages)
    return growing(scene, read_bytes=100 * MIB, reads=100)


def test_what_a_daemon_answered_past_the_cache_came_from_it() -> None:
    """As with mergerfs or sshfs and direct_io, or SMB with cache=none: no O_DIRECT was asked for,
    and yet the cache never held a byte."""
    scene = read_without_a_page()
    for at in range(100):
        scene.event(
            Kind.REMOTE, 150 + at, NEW, dev=DEV, ino=B_GGUF, duration_ns=MS, flags=Family.FUSE,
            a=MIB << 32 | MIB, b=at * MIB,
        )  # fmt: skip
    file = used(scene)
    assert (file.bytes_from_storage, file.bytes_from_cache) == (100 * MIB, 0)
    assert (file.access, file.requests, file.residency_before) == ("direct", 100, 0)
    assert file.bytes_per_second == pytest.approx(100 * MIB / 0.2)
    [note] = read_past_cache(scene.timeline())
    assert note.startswith("/models/b.gguf is read past the page cache, as ext4 has it: nothing")
    cause = acquit([file], 0, 400 * MS)
    assert cause
    assert cause.kind != "cache worked"


def test_a_cache_of_its_own_is_no_page_cache_that_worked() -> None:
    """As with ZFS, whose ARC or disks answer and nobody tells which: storage is not acquitted."""
    scene = read_without_a_page()
    file = used(scene)
    assert (file.bytes_from_storage, file.bytes_from_cache) == (None, None)
    [note] = read_past_cache(scene.timeline())
    assert note.endswith("how much of it came from storage is not known")
    assert acquit([file], 0, 400 * MS) is None


@pytest.mark.parametrize(
    "scene",
    [
        read_without_a_page(PAGES),
        growing(read_without_a_page(), cached_pages=PAGES),
        growing(read_without_a_page(), evicted_pages=PAGES),  # written and dropped since
        growing(server(), read_bytes=100 * MIB),  # opened nobody knows when
        growing(server().opened(NEW, B_GGUF, 140), read_bytes=MIB, direct_bytes=MIB),
    ],
)
def test_whose_pages_were_seen_is_not_read_past_the_cache(scene: Scene) -> None:
    assert used(scene).bytes_from_storage is not None
    assert read_past_cache(scene.timeline()) == []


def test_where_nobody_watches_the_page_cache_nothing_is_said_to_go_past_it() -> None:
    scene = read_without_a_page().source("pagecache", "absent")
    assert read_past_cache(scene.timeline()) == []
    assert used(scene).bytes_from_storage is None


def test_what_the_client_was_asked_to_read_ahead() -> None:
    file = used(growing(server(), added_pages=PAGES, readahead_asks=7, readahead_pages=PAGES))
    assert (file.readahead_asks, file.readahead_bytes) == (7, PAGES * PAGE)
    never = used(growing(server(), added_pages=PAGES))
    assert (never.readahead_asks, never.readahead_bytes) == (None, None)


def test_what_went_past_the_cache_came_from_storage_too() -> None:
    scene = growing(server(), direct_bytes=99 * MIB, read_bytes=100 * MIB, added_pages=MIB // PAGE)
    file = used(scene)
    assert file.bytes_from_storage == 100 * MIB
    assert (file.bytes_from_cache, file.access) == (0, "mixed")


def test_what_was_read_but_not_fetched_came_from_the_cache() -> None:
    file = used(growing(server(), read_bytes=100 * MIB, added_pages=10 * MIB // PAGE, reads=100))
    assert (file.bytes_from_storage, file.bytes_from_cache) == (10 * MIB, 90 * MIB)
    assert (file.reads, file.mmaps, file.access) == (100, 0, "read")


def test_readahead_beyond_what_was_read_is_no_negative_cache() -> None:
    assert used(growing(server(), read_bytes=PAGE, added_pages=32)).bytes_from_cache == 0


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_through_a_map_what_was_resident_came_from_the_cache(share: float) -> None:
    scene = server().opened(NEW, B_GGUF, 140, cached_pages=round(PAGES * share))
    file = used(scene.mapped(NEW, B_GGUF, 150))
    assert (file.residency_before, file.bytes_from_cache) == (share, round(share * 100 * MIB))


def test_bytes_of_another_time_are_not_this_requests() -> None:
    scene = server().file_row(B_GGUF, 50, added_pages=500).file_row(B_GGUF, 600, added_pages=500)
    assert used(scene.mapped(NEW, B_GGUF, 150)).bytes_from_storage == 0


def test_a_counter_is_shared_out_between_its_looks() -> None:
    scene = growing(server().mapped(NEW, B_GGUF, 150), added_pages=PAGES)
    assert used(scene, 100, 200).bytes_from_storage == 50 * MIB


@pytest.mark.parametrize("state", ["ok", "degraded", "absent"])
def test_without_its_probe_bytes_are_unknown_and_not_zero(state: str) -> None:
    scene = server().mapped(NEW, B_GGUF, 150).source("pagecache", state)
    known = None if state == "absent" else 0
    assert used(scene).bytes_from_storage == known


def test_what_others_read_meanwhile_is_told_apart() -> None:
    scene = growing(server().mapped(NEW, B_GGUF, 150), added_pages=PAGES // 4, foreign_pages=PAGES)
    file = used(scene)
    assert (file.bytes_from_storage, file.read_by_others_bytes) == (25 * MIB, 100 * MIB)
    assert used(scene, 150, 250).read_by_others_bytes == 50 * MIB
    assert notes_of([file]) == [
        "other programs read 105 MB of /models/b.gguf into the page cache meanwhile"
    ]
    assert not notes_of([used(growing(server(), foreign_pages=PAGES // 101))])
    assert not notes_of([replace(file, size_bytes=4 * MIB, read_by_others_bytes=65_536)])


@pytest.mark.parametrize(
    ("mapped", "counters", "times"),
    [
        (False, {"added_pages": PAGES, "read_bytes": 100 * MIB}, 1.0),
        # A page in 32 was asked for, the rest was read ahead.
        (False, {"added_pages": PAGES, "read_bytes": 100 * MIB // 32}, 32.0),
        # Half of it was in the cache.
        (False, {"added_pages": PAGES // 2, "read_bytes": 100 * MIB}, 1.0),
        # All of it twice, because it was evicted in between; a map shows no more than that.
        (False, {"added_pages": 2 * PAGES, "refaulted_pages": PAGES, "read_bytes": 200 * MIB}, 2.0),
        (True, {"added_pages": 2 * PAGES, "refaulted_pages": PAGES, "read_bytes": 4096}, 2.0),
        (False, {"direct_bytes": 100 * MIB, "read_bytes": 100 * MIB}, 1.0),
        (False, {"added_pages": 0, "read_bytes": 100 * MIB}, None),
    ],
)
def test_read_amplification(mapped: bool, counters: dict[str, int], times: float | None) -> None:
    scene = server().mapped(NEW, B_GGUF, 150) if mapped else server()
    assert used(growing(scene, **counters)).read_amplification == times


def mounted(scene: Scene, kind: str, source: str, **counters: Any) -> Scene:
    """B lies on a server, of which the kernel counted this at the beginning and the end."""
    scene.file(B_GGUF, "/nas/b.gguf", mount="/nas", source=source)
    for when, given in (("start", 0), ("end", 1)):
        scene.fact(kind, ns(0), {"when": when, **_times(counters, given)})
    return growing(scene, added_pages=PAGES)


def _times(counters: dict[str, Any], by: int) -> dict[str, Any]:
    return {
        name: value * by if isinstance(value, int)
        else _times(value, by) if isinstance(value, dict)
        else value
        for name, value in counters.items()
    }  # fmt: skip


@pytest.mark.parametrize(("given", "beside"), [(100, 0), (105, 0), (180, 80)])
def test_what_others_read_from_the_same_server_is_said(given: int, beside: int) -> None:
    count = given * MIB
    nfs = mounted(Scene(), "mountstats", "nas:/", mount="/nas", bytes={"server_read": count})
    share = {"share": "\\\\nas\\m", "read_bytes": count, "reads": 9, "failed_reads": 0}
    smb = mounted(Scene(), "smb_share", "//nas/m", **share)
    for scene, name in ((nfs, "/nas"), (smb, "\\\\nas\\m")):
        told = f"other programs read {beside * MIB / 1e6:,.0f} MB from {name} meanwhile, beside "
        notes = read_beside(scene.timeline())
        assert notes == ([f"{told}105 MB of the target"] if beside else [])
    assert read_beside(Scene().timeline()) == []


def test_readahead_that_another_gave_back_is_no_endless_count() -> None:
    """The kernel side takes it off the counter of whoever gives it back, here below 0."""
    scene = growing(server().mapped(NEW, B_GGUF, 150), foreign_pages=(1 << 64) - 3)
    assert used(scene).read_by_others_bytes == 0


# -- residency ------------------------------------------------------------------------------------


def test_the_open_tells_what_was_resident() -> None:
    scene = server().file_row(B_GGUF, 50, cached_pages=PAGES)
    scene.opened(NEW, B_GGUF, 140, cached_pages=PAGES // 2)
    assert used(scene.opened(NEW, B_GGUF, 160, cached_pages=PAGES)).residency_before == 0.5


def test_a_file_that_was_held_has_its_last_level() -> None:
    scene = server().held(NEW, B_GGUF, cached_pages=PAGES)
    scene.file_row(B_GGUF, 50, cached_pages=PAGES // 4)
    scene.file_row(B_GGUF, 200, cached_pages=PAGES)
    assert used(scene).residency_before == 0.25


def test_without_rows_it_is_what_it_was_when_recording_began() -> None:
    assert used(server().held(NEW, B_GGUF, cached_pages=PAGES)).residency_before == 1.0


def test_nothing_seen_is_unknown() -> None:
    assert used(server()).residency_before is None


def test_more_pages_than_the_file_has_are_all_of_it() -> None:
    assert used(server().opened(NEW, B_GGUF, 140, cached_pages=2 * PAGES)).residency_before == 1.0


def test_a_last_page_that_is_partly_filled_counts() -> None:
    scene = Scene().process(NEW).file(B_GGUF, size_bytes=PAGE + 1)
    assert used(scene.opened(NEW, B_GGUF, 140, cached_pages=2)).residency_before == 1.0


# -- rate -----------------------------------------------------------------------------------------


def test_the_rate_is_over_the_time_in_which_bytes_came() -> None:
    scene = growing(server().mapped(NEW, B_GGUF, 150), added_pages=PAGES)
    file = used(scene)
    assert file.bytes_per_second == pytest.approx(100 * MIB / 0.2)


def test_the_rate_over_time_adds_up_to_the_bytes() -> None:
    """From the first byte to the last, half of them in a tenth of the time."""
    scene = server()
    for at, pages in ((100, 0), (120, PAGES // 2), (200, PAGES), (400, PAGES)):
        scene.file_row(B_GGUF, at, added_pages=pages)
    rates = used(scene).rates
    spans = np.diff([at for at, _ in rates]) / 1e9
    assert (rates[0][0], rates[-1]) == (ns(100), (ns(200), 0.0))
    assert sum(rate * s for (_, rate), s in zip(rates, spans, strict=False)) == pytest.approx(
        100 * MIB
    )
    assert rates[0][1] > 2 * rates[-2][1]


def test_nothing_from_storage_has_no_rate() -> None:
    assert used(growing(server(), read_bytes=100 * MIB)).bytes_per_second is None


# -- block requests -------------------------------------------------------------------------------


def test_sizes_of_block_requests() -> None:
    scene = server()
    for number in range(100):
        scene.block(110 + number, 111 + number, B_GGUF, size=(128 if number < 90 else 512) << 10)
    sizes = used(scene).request_size_bytes
    assert sizes is not None
    assert (sizes.p50, sizes.p95) == (128 << 10, 512 << 10)


def test_requests_in_flight_are_averaged_over_the_busy_time() -> None:
    scene = server().block(110, 120, B_GGUF, in_flight=1).block(115, 125, B_GGUF, in_flight=2)
    in_flight = used(scene.block(200, 210, B_GGUF, in_flight=1)).in_flight
    assert in_flight is not None
    assert in_flight.mean == pytest.approx(30 / 25)
    assert in_flight.max == 2


def test_requests_of_other_files_and_times_do_not_count() -> None:
    scene = server().block(110, 120, A_GGUF).block(20, 30, B_GGUF).block(600, 610, B_GGUF)
    file = used(scene)
    assert (file.request_size_bytes, file.in_flight) == (None, None)


def test_requests_that_took_no_time_are_one_at_a_time() -> None:
    in_flight = used(server().block(110, 110, B_GGUF)).in_flight
    assert in_flight is not None
    assert in_flight.mean == 1.0


# -- waits ----------------------------------------------------------------------------------------


def test_waits_for_a_file_are_cut_to_the_interval_and_summed() -> None:
    scene = server().wait(NEW, 90, 120, Wait.STORAGE, ino=B_GGUF)
    scene.wait(NEW, 110, 130, Wait.STORAGE, tid=71, ino=B_GGUF)
    scene.wait(NEW, 490, 510, Wait.STORAGE, ino=B_GGUF)
    scene.wait(NEW, 200, 300, Wait.STORAGE, ino=A_GGUF).wait(NEW, 300, 400, Wait.LOCK, ino=B_GGUF)
    assert used(scene).storage_wait_ns == 50 * MS


def test_short_waits_are_added() -> None:
    scene = growing(server(), short_wait_ns=7 * MS).wait(NEW, 110, 120, Wait.STORAGE, ino=B_GGUF)
    assert used(scene).storage_wait_ns == 17 * MS


# -- access and advice ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mapped", "counters", "access"),
    [
        (True, {}, "mmap"),
        (True, {"read_bytes": MIB}, "mmap"),  # the header
        (True, {"read_bytes": 50 * MIB, "direct_bytes": 50 * MIB}, "mixed"),
        (False, {"read_bytes": 50 * MIB}, "read"),
        (False, {"read_bytes": 50 * MIB, "direct_bytes": 50 * MIB}, "direct"),
        (False, {"read_bytes": 60 * MIB, "direct_bytes": 50 * MIB}, "mixed"),
        (False, {}, None),
    ],
)
def test_the_way_of_access(mapped: bool, counters: dict[str, int], access: str | None) -> None:
    scene = growing(server(), **counters)
    if mapped:
        scene.mapped(NEW, B_GGUF, 150)
    assert used(scene).access == access


def test_a_failed_or_executable_map_is_no_access() -> None:
    scene = server().mapped(NEW, B_GGUF, 150, flags=MmapFlag.EXEC)
    scene.mapped(NEW, B_GGUF, 160, address=errno.ENODEV, flags=MmapFlag.FAILED)
    file = used(scene)
    assert (file.access, file.mmaps) == (None, 0)
    assert file.advice == ("mmap failed (ENODEV)",)


@pytest.mark.parametrize(
    ("counters", "told"),
    [({"read_bytes": 9}, "read()"), ({"read_bytes": 9, "direct_bytes": 9}, "O_DIRECT reads")],
)
def test_what_was_done_where_a_map_was_refused(counters: dict[str, int], told: str) -> None:
    scene = growing(server(), **counters)
    scene.mapped(NEW, B_GGUF, 160, address=errno.EACCES, flags=MmapFlag.FAILED)
    assert used(scene).advice == (f"mmap failed (EACCES), then {told}",)


def advised(at: float, offset: int, advice: int, pid: int = NEW) -> Scene:
    """B mapped from 150 ms, and advice given on an address."""
    scene = server().mapped(NEW, B_GGUF, 150, address=ADDRESS)
    return scene.event(Kind.MADVISE, at, pid, a=MIB, b=ADDRESS + offset, flags=advice)


@pytest.mark.parametrize(
    ("scene", "advice"),
    [
        (advised(160, 0, 1), ("MADV_RANDOM",)),
        (advised(160, 99 * MIB, 3), ("MADV_WILLNEED",)),
        (advised(160, 50 * MIB, 77), ("MADV_77",)),
        (advised(160, 100 * MIB, 1), ()),
        (advised(160, -MIB, 1), ()),
        (advised(160, 0, 1, pid=OLD), ()),
        (advised(600, 0, 1), ()),
    ],
)
def test_advice_on_an_address_belongs_to_the_file_mapped_there(
    scene: Scene, advice: tuple[str, ...]
) -> None:
    assert used(scene).advice == advice


def test_advice_on_the_file_itself() -> None:
    scene = server().mapped(NEW, B_GGUF, 150, flags=MmapFlag.POPULATE)
    for at, number in ((110, 2), (120, 2), (130, 3), (140, 0x100)):
        scene.event(Kind.FADVISE, at, NEW, dev=DEV, ino=B_GGUF, flags=number)
    assert used(scene).advice == (
        "FADV_SEQUENTIAL",
        "FADV_WILLNEED",
        "readahead()",
        "MAP_POPULATE",
    )


# -- faults ---------------------------------------------------------------------------------------


def faulting(scene: Scene) -> Scene:
    """100 major of 500 faults on B, as the file's and the thread's counters tell it."""
    growing(scene.mapped(NEW, B_GGUF, 150), added_pages=PAGES, faults=300, map_arounds=200)
    scene.thread_row(NEW, 100, maj_flt=1_000)
    return scene.thread_row(NEW, 300, maj_flt=1_100)


def test_faults_of_the_only_file_from_storage() -> None:
    file = used(faulting(server()))
    assert (file.major_faults, file.minor_faults) == (100, 400)


def test_faults_cannot_be_told_apart_where_two_files_came_from_storage() -> None:
    scene = faulting(server().file(A_GGUF))
    scene.file_row(A_GGUF, 100, added_pages=0).file_row(A_GGUF, 300, added_pages=5)
    file = used(scene)
    assert (file.major_faults, file.minor_faults) == (None, None)


def test_faults_are_unknown_where_nothing_counts_them_by_file() -> None:
    file = used(faulting(server()).source("faults", "absent"))
    assert (file.major_faults, file.minor_faults) == (None, None)


def test_counters_of_threads_are_summed_over_their_lives() -> None:
    scene = Scene().thread_row(NEW, 50, maj_flt=1_000).thread_row(NEW, 300, maj_flt=1_010)
    scene.thread_row(NEW, 200, tid=71, since=150, maj_flt=7)
    scene.thread_row(NEW, 300, tid=71, since=250, maj_flt=3)
    scene.thread_row(OLD, 300, maj_flt=99)
    timeline = scene.timeline()
    assert counted(timeline, {NEW}, "maj_flt", ns(50), ns(300)) == 20
    assert counted(timeline, {NEW, 9_999}, "maj_flt", ns(300), ns(400)) == 0


def test_what_was_reclaimed_before_the_request_is_told_apart() -> None:
    scene = server().mapped(NEW, B_GGUF, 150).file_row(B_GGUF, 50, reclaimed_pages=3)
    scene.file_row(B_GGUF, 100, reclaimed_pages=7).file_row(B_GGUF, 300, reclaimed_pages=12)
    file = used(scene)
    assert (file.reclaimed_before_bytes, file.reclaimed_bytes) == (7 * PAGE, 5 * PAGE)


# -- which files ----------------------------------------------------------------------------------


def listed(scene: Scene) -> list[int]:
    timeline = scene.timeline()
    files, _ = uses_of(timeline, weights_only(timeline), {NEW}, ns(100), ns(500))
    return [f.inode for f in files]


def grown(scene: Scene, ino: int, **counters: int) -> Scene:
    return scene.file_row(ino, 100).file_row(ino, 300, **counters)


def test_the_weights_come_first_then_what_cost_most() -> None:
    scene = server().file(20, "/lib/a.so").file(21, "/lib/b.so").file(22, "/lib/c.so")
    grown(grown(scene, 20, added_pages=5), 21, added_pages=50)
    assert listed(scene) == [B_GGUF, 21, 20]


def test_other_weights_count_if_a_good_part_was_read() -> None:
    scene = server().file(A_GGUF)
    assert listed(grown(scene, A_GGUF, read_bytes=5 * MIB)) == [B_GGUF]
    assert listed(grown(scene, A_GGUF, read_bytes=50 * MIB)) == [B_GGUF, A_GGUF]


def test_a_read_past_the_cache_is_a_read_of_the_file() -> None:
    scene = server().file(A_GGUF).has_read(NEW, A_GGUF, 110, 120, MIB, flags=ReadFlag.DIRECT)
    assert listed(grown(scene, A_GGUF, direct_bytes=MIB)) == [B_GGUF, A_GGUF]


@pytest.mark.parametrize(
    ("facts", "count"), [({"mount": "/nas", "fstype": "nfs4"}, 1), ({"mount": None}, 0)]
)
def test_mounts_of_the_used_files_once(facts: dict[str, Any], count: int) -> None:
    scene = Scene().process(NEW).file(B_GGUF, **facts).file(A_GGUF, **facts)
    grown(scene, A_GGUF, added_pages=5)
    timeline = scene.timeline()
    _, mounts = uses_of(timeline, weights_only(timeline), {NEW}, ns(100), ns(500))
    assert len(mounts) == count
    assert all((m.path, m.fstype, m.read_ahead_kb) == ("/nas", "nfs4", 128) for m in mounts)


def test_an_inode_on_two_file_systems_is_two_files() -> None:
    """Requests to a disk name no file system: they are the file's whose own lies on that disk."""
    other = kernel_dev(8, 16)
    scene = growing(server().mapped(NEW, B_GGUF, 150), added_pages=PAGES)
    scene.fact("file", ns(0), {"dev": other, "ino": B_GGUF, "path": "/else", "size_bytes": MIB})
    for dev, size in ((DEV, 64 << 10), (other, 4_096), (other, 4_096)):
        scene.record(Kind.BLOCK, ns(200), 1_000, dev=dev, ino=B_GGUF, a=size, flags=1)
    timeline = scene.timeline()
    found, _ = uses_of(timeline, weights_only(timeline), {NEW}, ns(100), ns(500))
    file = next(f for f in found if f.path == "/models/b.gguf")
    assert file.request_size_bytes == Quantiles(64 << 10, 64 << 10)
