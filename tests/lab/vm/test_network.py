"""NFS and SMB on a real kernel: what scripts/vm-test recorded in its VM against the kernel's count.

Every step read its model (64 MiB, or a smaller one) once, from a cold cache, between two samples
of the kernel's counters (mountstats, and the SMB module's) and under the kernel's own trace.
Emulated time is slow, so only counts, bytes, sums and shares are compared.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import pytest

from conftest import VM_RESULTS as RESULTS
from ttftprof import remote, storage
from ttftprof.analysis import analyse
from ttftprof.events import Family, Kind, Records, Wait
from ttftprof.model import Report
from ttftprof.recording import Reader
from ttftprof.sources.mountstats import (
    MountStats,
    growth,
    parse_cifs_stats,
    parse_mountstats,
)
from ttftprof.timeline import FileFacts, Timeline, build

SIZES = {"model": 64 << 20, "part": 16 << 20, "few": 4 << 20}
CREDIT_BYTES = 64 << 10  # what one of SMB's credits is good for
SPLIT_ERROR = 0.02
ROUNDING_MS = 1.0  # mountstats gives whole milliseconds
NFS_STEPS = (
    "nfs42-mmap",
    "nfs42-map",
    "nfs42-map-4096",
    "nfs42-small",
    "nfs42-small-4096",
    "nfs3-read",
    "nfs3-mmap",
    "nfs42-serve",
)
SMB_STEPS = ("smb-read", "smb-mmap")
# Of the first part of a step's name: where its file is seen, and how it is asked for.
MOUNTS = {
    "nfs42": ("/run/nfs42", Family.NFS),
    "nfs3": ("/run/nfs3", Family.NFS),
    "smb": ("/run/smb", Family.SMB),
    "few": ("/run/few", Family.SMB),
    "over": ("/run/over", Family.NFS),  # an overlay of /run/nfs42
    "9p": ("/", Family.NETFS),
}

pytestmark = pytest.mark.vm


@dataclass(frozen=True)
class Step:
    """One reading of the model; `reads` are the remote reads that began in it."""

    name: str
    mount: str
    file: FileFacts
    start_ns: int
    end_ns: int
    reads: Records

    @property
    def size(self) -> int:
        return SIZES[Path(self.file.path).stem]

    @property
    def asked_of(self) -> str:
        """The mount whose server is asked."""
        return "/run/nfs42" if self.mount == "/run/over" else self.mount

    def grown(self) -> MountStats:
        """What the kernel counted for the mount meanwhile."""
        before, after = (
            {m.point: m for m in parse_mountstats((RESULTS / f"{self.name}.{end}").read_text())}
            for end in ("before", "after")
        )
        return growth(before[self.asked_of], after[self.asked_of])


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    with Reader(RESULTS / "steps.ttft") as reader:
        return build(reader)


@pytest.fixture(scope="module")
def report() -> Report:
    return analyse(RESULTS / "steps.ttft")


@pytest.fixture(scope="module")
def steps(timeline: Timeline) -> dict[str, Step]:
    found = {}
    for line in (RESULTS / "steps").read_text().splitlines():
        told = json.loads(line)
        start_ns, end_ns = int(told["start_ns"]), int(told["end_ns"])
        where = told["name"].partition("-")[0]
        if where not in MOUNTS:
            continue  # a layer's: see test_layers
        mount, family = MOUNTS[where]
        reads = remote.begun_within(timeline.remote, start_ns, end_ns)
        file = next(f for f in timeline.files.values() if f.path == told["path"])
        found[told["name"]] = Step(
            told["name"], mount, file, start_ns, end_ns, reads[reads["family"] == family]
        )
    assert {*NFS_STEPS, *SMB_STEPS, "few-read", "over-mmap", "9p-mmap"} <= set(found)
    return found


# -- the recording --------------------------------------------------------------------------------


def test_nothing_was_lost(timeline: Timeline) -> None:
    assert timeline.complete
    assert not timeline.lost
    states = {s.name: s for s in timeline.sources}
    for name in ("nfs", "smb", "fuse", "netfs", "process", "files", "offcpu", "block", "uring"):
        assert states[name].state == "ok", states[name]
    assert "no file lies on fuse" in states["fuse"].reason
    assert all(s.reason for s in timeline.sources if s.state != "ok")


def test_what_linux_61_has_no_tracepoints_for_is_taken_from_its_functions(
    timeline: Timeline,
) -> None:
    if not timeline.meta["host"]["kernel"].startswith("6.1."):
        pytest.skip("the recording is not of 6.1, whose lack of tracepoints this is about")
    states = {s.name: s for s in timeline.sources}
    assert states["faults"].state == states["pagecache"].state == "ok"
    assert states["sockets"].state == "degraded"  # nothing stands for sock_send_length
    assert states["sockets"].lost.startswith("answers by sendfile or io_uring are not seen")


FIXTURES = Path(__file__).parents[2] / "fixtures/tracefs/6.1"


def test_the_kernels_trace_formats_are_those_of_the_fixtures(timeline: Timeline) -> None:
    if not timeline.meta["host"]["kernel"].startswith("6.1."):
        pytest.skip("the recording is not of 6.1, whose lack of tracepoints this is about")

    def told(folder: Path) -> dict[str, str]:
        """{event: its fields}, without the number that every boot gives anew."""
        files = [file for file in folder.glob("*/*") if file.is_file()]
        return {f.name: f.read_text().partition("format:")[2] for f in files}

    assert told(RESULTS / "formats") == told(FIXTURES)


# -- NFS ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NFS_STEPS)
def test_nfs_bytes_and_calls_are_the_kernels(name: str, steps: dict[str, Step]) -> None:
    step, grown = steps[name], steps[name].grown()
    calls = grown.read_calls
    assert int(step.reads["got_bytes"].sum()) == grown.bytes["server_read"] == step.size
    assert len(step.reads) == calls["operations"]
    assert int(step.reads["sent"].sum()) == calls["transmissions"]
    assert step.reads["split"].all()
    assert not step.reads["failed"].any()


@pytest.mark.parametrize("name", NFS_STEPS)
def test_nfs_split_adds_up_to_the_kernels(name: str, steps: dict[str, Step]) -> None:
    reads, calls = steps[name].reads, steps[name].grown().read_calls
    for part in ("queue", "wire", "execute"):
        got_ms = float(reads[f"{part}_ns"].sum()) / 1e6
        told_ms = calls[f"{part}_ms"]
        assert got_ms == pytest.approx(told_ms, rel=SPLIT_ERROR, abs=ROUNDING_MS), part
    # Hand-over to answer holds the RPC whole, and little besides.
    own_ms = float((reads["end_ns"] - reads["start_ns"]).sum()) / 1e6
    assert calls["execute_ms"] - ROUNDING_MS <= own_ms <= calls["execute_ms"] * 1.1


@pytest.mark.parametrize("name", NFS_STEPS)
def test_nfs_reads_name_file_mount_and_thread(
    name: str, steps: dict[str, Step], timeline: Timeline
) -> None:
    step = steps[name]
    file = step.file
    assert set(step.reads["ino"].tolist()) == {file.ino}
    assert set(step.reads["dev"].tolist()) == {file.dev}
    assert file.mount == step.mount
    assert file.fstype == ("nfs4" if step.mount == "/run/nfs42" else "nfs")
    assert set(step.reads["tgid"].tolist()) <= set(timeline.processes)
    # Together the reads cover the file, each byte once.
    ends = step.reads["offset"] + step.reads["got_bytes"].astype("u8")
    assert sorted(step.reads["offset"].tolist())[1:] == sorted(ends.tolist())[:-1]


def test_the_recorders_own_samples_agree(timeline: Timeline, steps: dict[str, Step]) -> None:
    for mount in ("/run/nfs42", "/run/nfs3"):
        mine = [s.grown() for s in steps.values() if s.asked_of == mount]
        whole = timeline.mounts[mount]
        assert whole.bytes["server_read"] == sum(g.bytes["server_read"] for g in mine)
        calls = sum(g.read_calls["operations"] for g in mine)
        assert whole.read_calls["operations"] == calls
        # Each call of the client's readahead, as the kernel counts them.
        files = {s.file.key: s.file for s in steps.values() if s.asked_of == mount}
        rows = [file.rows[-1] for file in files.values()]
        assert sum(int(row["readahead_asks"]) for row in rows) == whole.events["read_pages"]
        for counter in ("readahead_pages", "added_pages"):
            pages = sum(int(row[counter]) for row in rows)
            assert pages * 4096 == whole.bytes["server_read"]


def test_every_connection_is_seen(timeline: Timeline, report: Report) -> None:
    assert len(timeline.mounts["/run/nfs42"].transports) == 1
    both = timeline.mounts["/run/nfs3"].transports
    assert len(both) == 2
    assert all(t["sends"] for t in both)
    told = "/run/nfs3: 2 of 2 connections carried requests ("
    assert any(note.startswith(told) for note in report.notes)


@pytest.mark.parametrize("name", ["nfs3-read", "nfs3-mmap", "nfs42-map"])
def test_bytes_are_told_by_connection(name: str, steps: dict[str, Step]) -> None:
    """Of each of which mountstats says how many requests it sent, of any kind."""
    step = steps[name]
    found = remote.connections(step.reads)
    sent = sorted(t["sends"] for t in step.grown().transports)
    assert len(found) == len(sent)
    carried = sorted(c.requests for c in found)
    assert all(reads <= sends for reads, sends in zip(carried, sent, strict=True))
    assert sum(carried) == len(step.reads)
    assert sum(c.bytes for c in found) == step.size


# -- overlayfs on NFS -----------------------------------------------------------------------------


def test_a_file_of_an_overlay_is_the_servers_beneath(
    timeline: Timeline, steps: dict[str, Step]
) -> None:
    step, grown = steps["over-mmap"], steps["over-mmap"].grown()
    assert (step.file.fstype, step.file.mount) == ("overlay", "/run/over")
    assert set(step.reads["ino"].tolist()) == {step.file.ino}
    assert set(step.reads["dev"].tolist()) == {step.file.dev} == {steps["nfs42-map"].file.dev}
    assert int(step.reads["got_bytes"].sum()) == grown.bytes["server_read"] == step.size
    assert len(step.reads) == grown.read_calls["operations"]
    [use] = [
        use
        for use in storage.uses_of(timeline, None, timeline.processes, 0, timeline.end_ns)[0]
        if use.path == step.file.path
    ]
    assert use.bytes_from_storage == step.size
    assert use.residency_before == 0


# -- a second tool --------------------------------------------------------------------------------

_NFS_LINE = re.compile(r" (\d+\.\d{6}): nfs_initiate_read: .* offset=(\d+) count=(\d+)")
_SMB_LINE = re.compile(r" (\d+\.\d{6}): smb3_read_enter: .* offset=0x([0-9a-f]+) len=0x([0-9a-f]+)")


def traced(step: Step) -> Counter[tuple[int, int]]:
    """(offset, bytes) of each read in the kernel's trace of a step."""
    found: Counter[tuple[int, int]] = Counter()
    for line in (RESULTS / "trace").read_text().splitlines():
        if nfs := _NFS_LINE.search(line):
            stamp, read = nfs[1], (int(nfs[2]), int(nfs[3]))
        elif smb := _SMB_LINE.search(line):
            stamp, read = smb[1], (int(smb[2], 16), int(smb[3], 16))
        else:
            continue
        if step.start_ns <= round(float(stamp) * 1e9) < step.end_ns:
            found[read] += 1
    return found


@pytest.mark.parametrize("name", [*NFS_STEPS, *SMB_STEPS])
def test_sizes_are_those_of_the_kernels_trace(name: str, steps: dict[str, Step]) -> None:
    reads = steps[name].reads
    ours = Counter(zip(reads["offset"].tolist(), reads["asked_bytes"].tolist(), strict=True))
    assert ours == traced(steps[name])


@pytest.mark.parametrize("how", ["map", "small"])
def test_readahead_changes_sizes_and_depth(how: str, steps: dict[str, Step]) -> None:
    found = []
    for name in (f"nfs42-{how}", f"nfs42-{how}-4096"):
        size, depth = remote.sizes(steps[name].reads), remote.in_flight(steps[name].reads)
        assert size
        assert depth
        found.append((size.p50, depth))
    (narrow, shallow), (wide, deep) = found
    assert narrow == 128 << 10  # the readahead
    assert wide == 256 << 10  # rsize bounds it
    # How many the emulation has under way at once, and for how long, is its own affair.
    assert shallow.max <= 2
    assert deep.max > shallow.max


@pytest.mark.parametrize("name", ["nfs42-map", "nfs42-map-4096"])
def test_the_report_has_the_sizes_of_the_kernels_trace(
    name: str, report: Report, steps: dict[str, Step]
) -> None:
    """The distribution that a load is reported with, at a readahead of 128 KiB and of 4 MiB."""
    step = steps[name]
    [start] = [s for s in report.starts if step.start_ns <= s.start_ns < step.end_ns]
    [weights] = [f for f in start.files if f.is_weights]
    assert weights.path == "/run/nfs42/part.gguf"
    assert weights.request_size_bytes
    sizes = [size for (_, size), times in traced(step).items() for _ in range(times)]
    told = (weights.request_size_bytes.p50, weights.request_size_bytes.p95)
    assert told == tuple(np.percentile(sizes, [50, 95]).tolist())
    assert weights.requests == len(sizes)
    # What the client was asked to read ahead, beside what it then sent.
    assert weights.readahead_asks == step.grown().events["read_pages"]
    assert weights.readahead_bytes == step.size
    assert told[0] == (256 << 10 if name.endswith("4096") else 128 << 10)


# -- SMB ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SMB_STEPS, "few-read"])
def test_smb_bytes_and_calls_are_the_kernels(name: str, steps: dict[str, Step]) -> None:
    step, reads = steps[name], steps[name].reads
    [before], [after] = (
        parse_cifs_stats((RESULTS / f"{name}.shares.{end}").read_text())
        for end in ("before", "after")
    )
    assert int(reads["got_bytes"].sum()) == after.read_bytes - before.read_bytes == step.size
    assert len(reads) == after.reads - before.reads
    file = step.file
    assert file.fstype == "cifs"
    assert set(reads["ino"].tolist()) == {file.ino}
    assert set(reads["dev"].tolist()) == {file.dev}
    assert reads["split"].all()
    took = reads["end_ns"] - reads["start_ns"]
    assert (reads["queue_ns"] + reads["wire_ns"] <= took).all()
    assert (reads["wire_ns"] > 0).all()


def test_smbs_module_came_while_recording_ran(timeline: Timeline) -> None:
    [smb] = [s for s in timeline.sources if s.name == "smb"]
    assert smb.state == "ok"
    assert "s after recording began, as its module was loaded" in smb.reason
    [nfs] = [s for s in timeline.sources if s.name == "nfs"]
    assert nfs.reason == ""


def test_a_server_that_grants_few_credits_is_seen(
    timeline: Timeline, report: Report, steps: dict[str, Step]
) -> None:
    """It grants 8: the client keeps them, and asks for no more than one is good for."""
    starved = timeline.of_kind(Kind.REMOTE_STARVED)
    few, many = steps["few-read"].reads, steps["smb-read"].reads
    assert set(few["asked_bytes"].tolist()) == {CREDIT_BYTES}
    assert int(many["asked_bytes"].max()) > CREDIT_BYTES
    assert len(remote.cut_short(few, starved)) == len(few)
    assert len(remote.cut_short(many, starved)) < len(many) / 2  # its credits grow
    every = len(remote.cut_short(timeline.remote, starved))
    told = f"{every} SMB read(s) were cut to 64 KiB, as the server grants too few credits"
    assert any(note.startswith(told) for note in report.notes)


# -- 9P -------------------------------------------------------------------------------------------


def test_reads_of_the_vms_own_root_are_seen(steps: dict[str, Step]) -> None:
    """The guest's root lies on 9P, whose reads go through the kernel's netfs library."""
    reads, file = steps["9p-mmap"].reads, steps["9p-mmap"].file
    assert file.fstype == "9p"
    assert set(reads["ino"].tolist()) == {file.ino}
    assert int(reads["got_bytes"].sum()) == file.size_bytes
    assert not reads["failed"].any()
    assert sorted(reads["offset"].tolist())[0] == 0


# -- in the report --------------------------------------------------------------------------------


def test_the_split_lies_in_the_load_of_the_server(report: Report, steps: dict[str, Step]) -> None:
    step = steps["nfs42-serve"]
    [start] = [s for s in report.starts if step.start_ns <= s.start_ns < step.end_ns]
    calls = step.grown().read_calls
    [load] = [p for p in start.phases if p.phase == "load"]
    begun = step.reads["start_ns"]
    assert ((begun >= load.start_ns) & (begun < load.end_ns)).all()
    assert start.phase_activity()["load"].get("storage_wait", 0) > 0
    [weights] = [f for f in start.files if f.is_weights]
    assert (weights.path, weights.mount) == ("/run/nfs42/model.gguf", "/run/nfs42")
    assert weights.bytes_from_storage == step.size
    assert weights.request_size_bytes
    assert weights.request_size_bytes.p50 == 256 << 10
    assert weights.in_flight
    assert weights.in_flight.max > 1
    # Of the time that its thread waited, all was the client's, in a queue, or the server's.
    [share] = [share for share in weights.by_phase if share.phase == "load"]
    split = share.wait_split
    assert share.bytes_from_storage == pytest.approx(step.size, rel=0.01)  # it ends within a tick
    assert share.storage_wait_ns == sum(astuple(split)) > 0
    assert (split.server_ns, split.device_ns) == (0, 0)
    assert split.wire_ns > 0
    assert split.wire_ns <= remote.busy_ns(step.reads)
    assert split.queue_ns <= int(step.reads["queue_ns"].sum())
    assert (split.wire_ns + split.queue_ns) >= 0.5 * share.storage_wait_ns
    [mount] = [m for m in start.mounts if m.path == "/run/nfs42"]
    assert mount.requests == calls["operations"]
    assert mount.retransmits == 0
    assert sum(c.bytes for c in mount.connections) == step.size
    assert mount.queue_ns is not None
    assert mount.wire_ns is not None
    assert mount.queue_ns / 1e6 == pytest.approx(calls["queue_ms"], rel=SPLIT_ERROR, abs=1)
    assert mount.wire_ns / 1e6 == pytest.approx(calls["wire_ms"], rel=SPLIT_ERROR, abs=1)


def test_a_server_gone_silent_leaves_reads_unanswered() -> None:
    report = analyse(RESULTS / "hang.ttft")
    with Reader(RESULTS / "hang.ttft") as reader:
        timeline = build(reader)
    file = next(f for f in timeline.files.values() if f.path == "/run/nfs42/model.gguf")
    hanging = timeline.remote[timeline.remote["unanswered"]]
    answered = timeline.remote[~timeline.remote["unanswered"]]
    assert len(hanging) >= 1
    assert len(answered) >= 1
    assert set(hanging["ino"].tolist()) == {file.ino}
    assert int((hanging["end_ns"] - hanging["start_ns"]).max()) > 1_000_000_000
    assert any("NFS read(s) were unanswered" in note for note in report.notes)
    # Its reader was still waiting for them, and it is known for what.
    (tgid,) = {life.tgid for life in timeline.threads.lives}
    (waits,) = timeline.threads.waits_of(tgid).by_thread()
    last = waits.start_ns.argmax()
    assert waits.reason[last] == Wait.STORAGE
    assert (waits.dev[last], waits.ino[last]) == file.key
    assert waits.end_ns[last] - waits.start_ns[last] > 1_000_000_000


def test_a_wall_clock_that_was_set_is_told() -> None:
    """By guest.py, while the server was silent."""
    told = [n for n in analyse(RESULTS / "hang.ttft").notes if "wall clock" in n]
    assert len(told) == 1
    assert "set forward by 3600 s" in told[0]
    assert "suspended" not in told[0]
