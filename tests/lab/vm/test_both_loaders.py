"""The same reads under both loaders on a distribution's kernel: the same facts, and the kernel's.

scripts/vm-test records the reader twice, by libbpf with the kernel's BTF, and where no BTF is to
be seen, so that bcc is taken, with the headers that the distribution has for it. How many requests
a reading takes depends on the moment, so that each is held against the kernel's own count of it.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from conftest import VM_RESULTS as RESULTS
from lab.vm.guest import AGAIN
from ttftprof import storage_requests
from ttftprof.events import Kind, Records, Wait
from ttftprof.recording import Reader
from ttftprof.sources.mountstats import growth, parse_cifs_stats, parse_mountstats
from ttftprof.timeline import FileFacts, Timeline, build

pytestmark = pytest.mark.vm

# Where each loader's steps were noted, beside its recording
BY_LOADER = {
    "libbpf": (RESULTS / "steps.ttft", RESULTS),
    "bcc": (RESULTS / "bcc.ttft", RESULTS / "bcc"),
}
EDGES = (Kind.FORK, Kind.EXEC, Kind.OPEN, Kind.MMAP, Kind.MADVISE, Kind.LISTEN, Kind.PROCESS_EXIT)
COUNTERS = ("opens", "reads", "read_bytes", "mmaps", "added_pages", "readahead_pages")
# Of these a file is read in one step only, so that its counters are those of the step.
ALONE = ("over-mmap", "crypt-mmap", "raid-read", "few-read")
SPLIT_ERROR, ROUNDING_MS = 0.02, 1.0


@dataclass(frozen=True)
class Step:
    """One reading of a model as one loader saw it; `notes` is where the reader left its own."""

    notes: Path
    start_ns: int
    end_ns: int
    file: FileFacts
    reads: Records
    edges: dict[str, int]
    layers: tuple[str, ...]
    waited_ns: int


@dataclass(frozen=True)
class Seen:
    timeline: Timeline
    steps: dict[str, Step]


def seen_by(loader: str) -> Seen:
    path, notes = BY_LOADER[loader]
    with Reader(path) as reader:
        assert reader.complete
        assert not reader.lost()
        assert reader.meta["settings"]["loader"] == loader  # nobody asked for either
        timeline = build(reader)
        layers = {fact["path"]: tuple(fact["layers"]) for _, fact in reader.facts("file")}
        events = reader.stream("events")
    steps = {}
    for line in (notes / "steps").read_text().splitlines():
        told = json.loads(line)
        if told["name"] not in AGAIN:
            continue
        span = int(told["start_ns"]), int(told["end_ns"])
        file = next(f for f in timeline.files.values() if f.path == told["path"])
        own = events[(events["start_ns"] >= span[0]) & (events["start_ns"] < span[1])]
        kinds = Counter(own["kind"].tolist())
        steps[str(told["name"])] = Step(
            notes,
            *span,
            file,
            storage_requests.Traffic(timeline, *span).requests(file),
            {kind.name: kinds[kind] for kind in EDGES},
            layers[file.path],
            waited_ns(own, file),
        )
    assert set(steps) == set(AGAIN)
    return Seen(timeline, steps)


def waited_ns(events: Records, file: FileFacts) -> int:
    """How long threads waited for storage that this file lies on."""
    waits = events[(events["kind"] == Kind.OFFCPU) & (events["flags"] == Wait.STORAGE)]
    on_file = (waits["dev"] == file.dev) & (waits["ino"] == file.ino)
    return int(waits["duration_ns"][on_file].sum())


@pytest.fixture(scope="module")
def seen() -> dict[str, Seen]:
    return {loader: seen_by(loader) for loader in BY_LOADER}


def test_the_sources_are_the_same(seen: dict[str, Seen]) -> None:
    """Also FUSE, that is in no header: no file lies there."""
    states = [
        {s.name: (s.state, s.lost) for s in found.timeline.sources} for found in seen.values()
    ]
    assert states[0] == states[1]


@pytest.mark.parametrize("loader", BY_LOADER)
def test_either_follows_a_module_that_comes_while_it_records(
    loader: str, seen: dict[str, Seen]
) -> None:
    """SMB's; that its reads are then the kernel's is tested below."""
    [smb] = [s for s in seen[loader].timeline.sources if s.name == "smb"]
    assert smb.state == "ok"
    assert "s after recording began, as its module was loaded" in smb.reason


@pytest.mark.parametrize("name", AGAIN)
def test_a_reading_gives_the_same_facts(name: str, seen: dict[str, Seen]) -> None:
    told = []
    for found in seen.values():
        step, file = found.steps[name], found.steps[name].file
        reads = step.reads
        order = np.argsort(reads["offset"])
        ends = (reads["offset"] + reads["got_bytes"].astype("u8"))[order]
        begins = reads["offset"][order]
        told.append(
            {
                "file": (file.path, file.key, file.size_bytes, file.fstype, file.mount),
                "layers": step.layers,
                "edges": step.edges,
                "asked of": set(zip(reads["family"].tolist(), reads["dev"].tolist(), strict=True)),
                "bytes": int(reads["got_bytes"].sum()),
                "no byte twice": bool((begins[1:] >= ends[:-1]).all()),
                "failed": int(reads["failed"].sum()),
                "counters": [int(file.rows[-1][c]) for c in COUNTERS] if name in ALONE else [],
                "faults are seen": bool(file.rows[-1]["map_arounds"] + file.rows[-1]["faults"]),
            }
        )
    assert told[0] == told[1]
    assert told[0]["bytes"] == seen["bcc"].steps[name].file.size_bytes
    assert told[0]["no byte twice"]


@pytest.mark.parametrize("loader", BY_LOADER)
@pytest.mark.parametrize("name", ["nfs42-map", "nfs42-small"])
def test_either_names_the_file_that_threads_wait_for(
    name: str, loader: str, seen: dict[str, Seen]
) -> None:
    """A server answers each of a hundred requests; one that is asked once may be sooner than any
    wait that is kept."""
    assert seen[loader].steps[name].waited_ns > 0


@pytest.mark.parametrize("loader", BY_LOADER)
@pytest.mark.parametrize("name", ["nfs42-map", "nfs42-small"])
def test_either_counts_nfs_requests_as_the_kernel(
    name: str, loader: str, seen: dict[str, Seen]
) -> None:
    step = seen[loader].steps[name]
    before, after = (
        {m.point: m for m in parse_mountstats((step.notes / f"{name}.{end}").read_text())}
        for end in ("before", "after")
    )
    grown = growth(before["/run/nfs42"], after["/run/nfs42"])
    calls = grown.read_calls
    assert len(step.reads) == calls["operations"]
    assert int(step.reads["got_bytes"].sum()) == grown.bytes["server_read"]
    assert step.reads["split"].all()
    for part in ("queue", "wire", "execute"):
        got_ms = float(step.reads[f"{part}_ns"].sum()) / 1e6
        told_ms = calls[f"{part}_ms"]
        assert got_ms == pytest.approx(told_ms, rel=SPLIT_ERROR, abs=ROUNDING_MS), part


@pytest.mark.parametrize("loader", BY_LOADER)
def test_either_counts_smb_requests_as_the_kernel(loader: str, seen: dict[str, Seen]) -> None:
    step = seen[loader].steps["few-read"]
    [before], [after] = (
        parse_cifs_stats((step.notes / f"few-read.shares.{end}").read_text())
        for end in ("before", "after")
    )
    assert len(step.reads) == after.reads - before.reads
    assert int(step.reads["got_bytes"].sum()) == after.read_bytes - before.read_bytes
    assert step.reads["split"].all()
