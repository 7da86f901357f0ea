"""Remote reads put together from records: splits, sizes, depth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttftprof import path_model, remote
from ttftprof.events import EVENT, Family, Kind, Records, RemoteFlag
from ttftprof.sources.mountstats import MountStats, ShareStats

MS = 1_000_000
DEV, INO = 0x2E, 77


def record(kind: Kind, start_ns: int, duration_ns: int, **fields: int) -> Any:
    one = np.zeros(1, EVENT)
    one["kind"], one["start_ns"], one["duration_ns"] = kind, start_ns, duration_ns
    for name, value in {"dev": DEV, "ino": INO, "tid": 5, "tgid": 5, **fields}.items():
        one[name] = value
    return one


def read(
    start_ms: float, took_ms: float, asked: int, at: int = 0, flags: int = Family.NFS, **more: int
) -> Any:
    got = 0 if flags & RemoteFlag.UNANSWERED else asked
    return record(
        Kind.REMOTE,
        round(start_ms * MS),
        round(took_ms * MS),
        a=asked << 32 | got,
        b=at,
        flags=flags,
        **more,
    )


def split(
    start_ms: float, queue_ms: float, wire_ms: float, sent: int = 1, by: int = 0, **more: int
) -> Any:
    execute = round((queue_ms + wire_ms) * MS)
    return record(
        Kind.REMOTE_SPLIT,
        round(start_ms * MS),
        round(wire_ms * MS),
        a=round(queue_ms * MS),
        b=by << 48 | execute,
        flags=sent,
        **more,
    )


def reads_of(*records: Any) -> Records:
    every = np.concatenate(records) if records else np.zeros(0, EVENT)
    return remote.reads_of({kind: every[every["kind"] == kind] for kind in Kind})


def test_each_read_gets_its_own_split() -> None:
    reads = reads_of(
        read(20, 9, 4096, at=8192, tid=6),
        read(10, 5, 4096),
        split(10, 1, 3),
        split(20, 2, 6, sent=3, tid=6),
        split(30, 9, 9),  # its read was lost
    )
    assert reads["start_ns"].tolist() == [10 * MS, 20 * MS]
    assert reads["queue_ns"].tolist() == [1 * MS, 2 * MS]
    assert reads["wire_ns"].tolist() == [3 * MS, 6 * MS]
    assert reads["split"].all()
    assert remote.totals(reads) == {
        "requests": 2,
        "queue_ns": 3 * MS,
        "wire_ns": 9 * MS,
        "total_ns": 14 * MS,
        "retransmits": 2,
    }


def test_what_is_not_known_is_none() -> None:
    reads = reads_of(read(0, 5, 4096, flags=Family.FUSE), read(1, 5, 4096, flags=Family.FUSE))
    totals = remote.totals(reads)
    assert totals["requests"] == 2
    assert totals["queue_ns"] is totals["wire_ns"] is totals["retransmits"] is None
    assert remote.sizes(reads_of()) is None
    assert remote.in_flight(reads_of()) is None
    assert path_model.fit(path_model.answered(reads_of())) is None
    assert remote.sequential_share(reads_of()) is None
    assert remote.busy_ns(reads_of()) == 0


def test_some_splits_lost_make_the_sums_unknown() -> None:
    reads = reads_of(read(0, 5, 4096), read(9, 5, 4096), split(0, 1, 3))
    assert remote.totals(reads)["queue_ns"] is None


def test_depth_counts_what_is_under_way() -> None:
    in_a_row = reads_of(*(read(10 * i, 10, 4096) for i in range(4)))
    depth = remote.in_flight(in_a_row)
    assert depth
    assert (depth.mean, depth.max) == (1.0, 1)
    together = reads_of(read(0, 10, 4096), read(5, 10, 4096), read(100, 5, 4096))
    depth = remote.in_flight(together)
    assert depth
    assert depth.max == 2
    assert depth.mean == pytest.approx(25 / 20)
    assert (depth.p50, depth.p95) == (1.0, 2.0)  # of 20 ms, 5 with two
    assert remote.busy_ns(together) == 20 * MS


def test_sequential_reads_follow_each_other() -> None:
    straight = reads_of(*(read(i, 1, 4096, at=4096 * i) for i in range(8)))
    assert remote.sequential_share(straight) == 1.0
    backwards = reads_of(*(read(i, 1, 4096, at=4096 * (8 - i)) for i in range(8)))
    assert remote.sequential_share(backwards) == 1 / 8


def test_unanswered_reads_belong_to_every_later_moment() -> None:
    reads = reads_of(read(0, 99, 4096, flags=Family.NFS | RemoteFlag.UNANSWERED), read(50, 1, 4096))
    assert len(remote.begun_within(reads, 40 * MS, 60 * MS)) == 2
    assert len(remote.begun_within(reads, 60 * MS, 70 * MS)) == 1


def test_bytes_by_connection() -> None:
    reads = reads_of(
        read(0, 9, 4096), split(0, 1, 3, by=1),
        read(10, 9, 8192), split(10, 1, 3, by=65535),
        read(20, 9, 4096), split(20, 1, 3, by=1),
        read(30, 9, 4096), split(30, 1, 3),  # of a kernel that does not number them
        read(40, 9, 4096),
    )  # fmt: skip
    assert reads["execute_ns"].tolist() == [4 * MS] * 4 + [0]
    found = [(c.number, c.requests, c.bytes) for c in remote.connections(reads)]
    assert found == [(0, 2, 8192), (65534, 1, 8192)]


def test_notes_say_what_went_wrong() -> None:
    reads = reads_of(
        read(0, 2500, 4096, flags=Family.NFS | RemoteFlag.UNANSWERED),
        read(0, 1, 4096, flags=Family.SMB | RemoteFlag.FAILED),
    )
    read_calls = {"operations": 20, "transmissions": 23}
    mounts = {
        "/nas": MountStats(
            "nas:/", "/nas", "nfs4", transports=({"sends": 9}, {"sends": 0}),
            operations={"READ": read_calls}, bytes={"server_read": 1},
        ),
        "/here": MountStats("localhost:/", "/here", "nfs4", bytes={"server_read": 4096}),
        "/wide": MountStats("nas:/", "/wide", "nfs4", pnfs="nfs_layout_flexfiles"),
    }  # fmt: skip
    shares = {n: ShareStats(n, 4096, 9, bad) for n, bad in (("\\\\nas\\m", 2), ("\\\\nas\\k", 0))}
    starved = record(Kind.REMOTE_STARVED, 0, 0)
    text = "\n".join(remote.notes(reads, mounts, shares, starved))
    assert "1 NFS read(s) were unanswered" in text
    assert "2.5 s" in text
    assert "1 remote read(s) ended with an error" in text
    assert "3 of 20 NFS reads were sent again" in text
    assert "1 of 2 connections carried requests (100 %, 0 %)" in text
    assert "LOCALIO" in text
    assert "\\\\nas\\m: 2 of 9 SMB reads failed" in text
    assert "nas\\k" not in text
    assert "pNFS (nfs_layout_flexfiles)" in text
    assert "1 SMB read(s) were cut to 64 KiB" in text
    assert remote.notes(reads_of(), {}, {}, starved[:0]) == []


def test_a_want_of_credits_cuts_the_threads_next_read() -> None:
    reads = reads_of(
        read(5, 1, 4096, flags=Family.SMB),
        read(30, 1, 65536, flags=Family.SMB),
        split(30, 3, 1),
        read(70, 1, 65536, flags=Family.SMB),
        split(70, 4, 1),
        read(12, 1, 4096, flags=Family.SMB, tid=6),
        read(11, 1, 4096, flags=Family.NFS),
    )
    # Short twice before one read: that is cut once. What came after the last is not known.
    starved = np.concatenate([record(Kind.REMOTE_STARVED, at * MS, 0) for at in (10, 20, 60, 80)])
    assert remote.cut_short(reads, starved)["start_ns"].tolist() == [30 * MS, 70 * MS]
    [note] = remote.notes(reads, {}, {}, starved)
    assert note.startswith("2 SMB read(s) were cut to 64 KiB")
    assert "waited 0.01 s" in note
    assert not len(remote.cut_short(reads, starved[:0]))
    many = reads_of(*(read(100 + i, 1, 4096, flags=Family.SMB) for i in range(20)))
    assert remote.notes(many, {}, {}, record(Kind.REMOTE_STARVED, 100 * MS, 0)) == []


def test_growth_is_from_start_to_end() -> None:
    stats = MountStats("nas:/", "/nas", "nfs4", age_s=5, bytes={"server_read": 10})
    later = MountStats("nas:/", "/nas", "nfs4", age_s=9, bytes={"server_read": 30})
    facts: list[dict[str, Any]] = [
        {"when": "start", **stats.as_fact()},
        {"when": "end", **later.as_fact()},
        {"when": "end"},  # malformed
        {"when": "end", "mount": "/x", "bytes": 7},
    ]
    assert remote.mounts_growth(facts)["/nas"].bytes == {"server_read": 20}
    assert set(remote.mounts_growth(facts)) == {"/nas"}
    assert remote.mounts_growth(facts[:1]) == {}
    share = {"share": "\\\\nas\\m", "reads": 2, "failed_reads": 0, "read_bytes": 100}
    grown = remote.shares_growth(
        [{"when": "start", **share}, {"when": "end", **share, "read_bytes": 160}, {"when": "end"}]
    )
    assert grown["\\\\nas\\m"].read_bytes == 60


def test_two_servers_at_one_place_in_two_namespaces_are_two_mounts() -> None:
    def fact(when: str, server: str, count: int) -> dict[str, Any]:
        stats = MountStats(f"{server}:/", "/models", "nfs4", bytes={"server_read": count})
        return {"when": when, **stats.as_fact()}

    begin = [fact("start", "nas", 10), fact("start", "other", 70)]
    for server, grown in (("nas", 20), ("other", 5)):
        before = next(f["bytes"]["server_read"] for f in begin if f["source"] == f"{server}:/")
        found = remote.mounts_growth([*begin, fact("end", server, before + grown)])
        assert found["/models"].bytes == {"server_read": grown}


_RAW = st.tuples(
    st.sampled_from([Kind.REMOTE, Kind.REMOTE_SPLIT]),
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 40),
    st.integers(0, 0xFFFF),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 64) - 1),
)


@given(st.lists(_RAW, max_size=30))
def test_any_records_give_sums_that_hold(raw: list[tuple[Kind, int, int, int, int, int]]) -> None:
    reads = reads_of(*(record(k, s, d, flags=f, a=a, b=b) for k, s, d, f, a, b in raw))
    assert len(reads) == sum(1 for r in raw if r[0] == Kind.REMOTE)
    assert (reads["end_ns"] >= reads["start_ns"]).all()
    assert remote.totals(reads)["requests"] == len(reads)
    depth = remote.in_flight(reads)
    if len(reads):
        assert depth
        assert 1 <= depth.max <= len(reads)
        assert remote.busy_ns(reads) <= int((reads["end_ns"] - reads["start_ns"]).sum())
    remote.notes(reads, {}, {}, np.zeros(0, EVENT))
    path_model.fit(path_model.answered(reads))
    remote.sequential_share(reads)
