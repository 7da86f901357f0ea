"""The kernel's counters of network mounts, parsed from files of real kernels and from anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttftprof.sources import mountstats
from ttftprof.sources.mounts import parse_mountinfo
from ttftprof.sources.mountstats import (
    BYTES,
    EVENTS,
    MountStats,
    from_fact,
    growth,
    parse_cifs_stats,
    parse_mountstats,
)

FIXTURES = Path(__file__).parent.parent / "fixtures"
SIZE = 64 << 20  # the file that was read between the two samples, over NFSv3


def fixture(name: str) -> str:
    return (FIXTURES / name).read_text()


@pytest.fixture
def before() -> list[MountStats]:
    return parse_mountstats(fixture("mountstats/6.1-before.txt"))


@pytest.fixture
def after() -> list[MountStats]:
    return parse_mountstats(fixture("mountstats/6.1-after.txt"))


def test_a_real_nfs42_mount(before: list[MountStats]) -> None:
    v42 = before[0]
    assert (v42.source, v42.point, v42.fstype) == ("127.0.0.1:/", "/run/m42", "nfs4")
    assert "vers=4.2" in v42.options
    assert v42.age_s == 11
    assert v42.pnfs is None
    assert v42.bytes["normal_read"] == v42.bytes["server_read"] == SIZE
    assert v42.bytes["pages_read"] == SIZE // 4096
    assert set(v42.bytes) == set(BYTES)
    assert set(v42.events) == set(EVENTS)
    assert v42.events["read_pages"] == 256
    assert v42.operations["READ"] == {
        "operations": 256,
        "transmissions": 256,
        "timeouts": 0,
        "sent_bytes": 47104,
        "received_bytes": 67135488,
        "queue_ms": 1252,
        "wire_ms": 4040,
        "execute_ms": 5762,
        "errors": 0,
    }
    assert "WRITE" not in v42.operations
    [transport] = v42.transports
    assert (transport["sends"], transport["receives"], transport["max_slots"]) == (275, 275, 2)


def test_only_network_mounts_are_kept(before: list[MountStats]) -> None:
    assert [m.point for m in before] == ["/run/m42", "/run/m3"]
    assert parse_mountstats(fixture("mountstats/6.18-no-nfs.txt")) == []


def test_what_a_read_costs_is_the_growth(before: list[MountStats], after: list[MountStats]) -> None:
    grown = growth(before[1], after[1])
    assert grown.bytes["server_read"] == SIZE
    assert grown.operations["READ"]["operations"] == 256
    assert "FSINFO" not in grown.operations
    idle = growth(before[0], after[0])
    assert idle.bytes["server_read"] == 0
    assert "READ" not in idle.operations


def test_read_plus_is_a_read_too(after: list[MountStats]) -> None:
    text = fixture("mountstats/6.1-after.txt")
    both = text.replace("READ_PLUS: 0 0 0 0 0 0 0 0 0", "READ_PLUS: 7 8 0 0 100 1 2 3 0")
    assert after[0].read_calls["operations"] == 256
    assert parse_mountstats(both)[0].read_calls["operations"] == 263
    assert parse_mountstats(both)[0].read_calls["transmissions"] == 264


def test_linux_612_reads_with_read_plus() -> None:
    v42 = next(m for m in parse_mountstats(fixture("mountstats/6.12-read-plus.txt")) if m.bytes)
    assert "READ" not in v42.operations
    assert v42.read_calls["operations"] == v42.operations["READ_PLUS"]["operations"] == 256
    assert v42.bytes["server_read"] == SIZE


def test_a_mount_made_meanwhile_counts_whole(after: list[MountStats]) -> None:
    assert growth(None, after[1]) is after[1]
    older = MountStats("other:/", after[1].point, "nfs", age_s=0)
    assert growth(older, after[1]) is after[1]
    younger = MountStats(after[1].source, after[1].point, "nfs", age_s=after[1].age_s + 1)
    assert growth(younger, after[1]) is after[1]


def test_several_connections_are_several_transports() -> None:
    lines = fixture("mountstats/6.1-after.txt").split("\n")
    at = next(i for i, line in enumerate(lines) if line.startswith("\txprt:"))
    lines.insert(at + 1, "\txprt:\ttcp 0 0 1 0 3 40 39 1 55 0 2 1 2")
    [two, _] = parse_mountstats("\n".join(lines))
    assert [t["sends"] for t in two.transports] == [275, 40]
    assert two.transports[1]["bad_xids"] == 1


def test_pnfs_is_noticed() -> None:
    text = fixture("mountstats/6.1-after.txt")
    layouts = text.replace("pnfs=not configured", "pnfs=nfs_layout_nfsv41_files")
    assert parse_mountstats(layouts)[0].pnfs == "nfs_layout_nfsv41_files"


def test_a_mount_point_with_spaces() -> None:
    text = "device nas:/a\\040b mounted on /mnt/a\\040b with fstype nfs4 statvers=1.1\n\tage:\t3\n"
    [mount] = parse_mountstats(text)
    assert (mount.source, mount.point, mount.age_s) == ("nas:/a b", "/mnt/a b", 3)


def test_a_fact_is_what_it_was_made_of(after: list[MountStats]) -> None:
    for mount in after:
        again = from_fact(mount.as_fact())
        assert again.operations == mount.operations
        assert again.bytes == mount.bytes
        assert again.transports == mount.transports
        assert again.events == {name: n for name, n in mount.events.items() if n}


def test_a_real_smb_share() -> None:
    [share] = parse_cifs_stats(fixture("mountstats/6.1-cifs-stats.txt"))
    assert share.share == "\\\\127.0.0.1\\model"
    assert (share.read_bytes, share.reads, share.failed_reads) == (SIZE, 17, 0)


def test_a_share_that_is_mounted_twice_counts_once() -> None:
    text = fixture("mountstats/6.1-cifs-stats.txt")
    [once] = parse_cifs_stats(text)
    own = text[text.index("\n1) ") :]
    [both] = parse_cifs_stats(text + own.replace("1) ", "2) ", 1))
    assert both.share == once.share
    assert (both.reads, both.read_bytes) == (2 * once.reads, 2 * once.read_bytes)


def test_sampling_reads_each_namespace_once(tmp_path: Path) -> None:
    for pid, namespace in (("7", "mnt:[1]"), ("8", "mnt:[1]"), ("self", "mnt:[2]")):
        (tmp_path / pid / "ns").mkdir(parents=True)
        (tmp_path / pid / "ns/mnt").symlink_to(namespace)
        (tmp_path / pid / "mountstats").write_text(fixture("mountstats/6.1-after.txt"))
    assert [m.point for m in mountstats.sample([7, 8], tmp_path)] == ["/run/m42", "/run/m3"]
    assert len(mountstats.sample([99], tmp_path)) == 2  # gone: this process's own
    assert mountstats.sample([99], tmp_path / "none") == []
    assert mountstats.sample_shares(tmp_path) == []


def test_mounts_of_real_kernels() -> None:
    old = {m.point: m for m in parse_mountinfo(fixture("mountinfo/6.1.txt"))}
    assert old["/run/m42"].fstype == "nfs4"
    assert old["/run/smb"].source == "//127.0.0.1/model"
    assert "rsize=262144" in old["/run/m3"].options
    lines = fixture("mountinfo/6.18.txt").splitlines()
    assert len(parse_mountinfo("\n".join(lines))) == len(lines)


_LINE = st.one_of(
    st.sampled_from(fixture("mountstats/6.1-after.txt").split("\n")),
    st.sampled_from(fixture("mountstats/6.1-cifs-stats.txt").split("\n")),
    st.text(max_size=60),
)


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A real file with lines taken out, put in, cut and repeated."""
    text = "\n".join(draw(st.lists(_LINE, max_size=40)))
    cut = draw(st.integers(0, len(text)))
    return text[:cut] + draw(st.text(max_size=8)) + text[cut + draw(st.integers(0, 5)) :]


@given(damaged())
def test_nothing_makes_the_parsers_fail(text: str) -> None:
    for mount in parse_mountstats(text):
        assert from_fact(mount.as_fact()).point == mount.point
        grown = growth(mount, mount)
        assert all(v == 0 for v in grown.bytes.values())
        assert grown.operations == {}
    for share in parse_cifs_stats(text):
        assert share.share
        assert share.read_bytes >= 0
    parse_mountinfo(text)


@given(st.binary(max_size=300))
def test_no_bytes_do_either(data: bytes) -> None:
    text = data.decode(errors="surrogateescape")
    parse_mountstats(text)
    parse_cifs_stats(text)
    parse_mountinfo(text)
