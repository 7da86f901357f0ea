"""What `record` saw and `report` said on a kernel that carries no BTF, against what was true.

`scripts/kernel-matrix without-btf` builds that kernel, records there with nothing but what a
user would type, and keeps the recordings (tests/fixtures/without_btf). They are read here by the
present code; the reports were made there.
"""

from __future__ import annotations

import json
import lzma
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.golden import kept
from lab.matrix.without_btf import KEPT, NAMES
from ttftprof.analysis import analyse
from ttftprof.events import Kind, Records
from ttftprof.model import Report
from ttftprof.recording import Reader
from workloads.counted import ANONYMOUS_PAGES, FILE_PAGES, FORKS, MMAPS, OPENS, READ_BYTES, READS

PAGE_BYTES = 4096
PHASE_ERROR = 0.03  # of TTFT: the worst that the truth workload allows anywhere


def told(name: str) -> Any:
    return json.loads((KEPT / f"{name}.json").read_text())


def reported(name: str) -> Any:
    return json.loads(lzma.decompress((KEPT / f"{name}.report.json.xz").read_bytes()))


@pytest.fixture(scope="module")
def recordings() -> Iterator[dict[str, Path]]:
    with kept(KEPT / "counts.ttft.xz") as counts, kept(KEPT / "switch.ttft.xz") as switch:
        yield {"counts": counts, "switch": switch}


@pytest.fixture(scope="module")
def switch(recordings: dict[str, Path]) -> Report:
    return analyse(recordings["switch"])


def during(records: Records, mode: dict[str, Any], column: str = "start_ns") -> Records:
    found: Records = records[
        (records[column] >= mode["start_ns"]) & (records[column] <= mode["end_ns"])
    ]
    return found


def test_the_kernel_had_no_types_and_nobody_chose_a_loader(recordings: dict[str, Path]) -> None:
    assert told("kernel")["has_types"] is False
    for path in recordings.values():
        with Reader(path) as reader:
            assert reader.complete
            assert not reader.lost()
            assert reader.meta["settings"]["loader"] == "bcc"
            assert reader.meta["host"]["kernel"] == told("kernel")["release"]


def test_a_prime_number_of_everything_is_that_number(recordings: dict[str, Path]) -> None:
    about = told("counts")
    modes = {mode["mode"]: mode for mode in about["modes"]}
    with Reader(recordings["counts"]) as reader:
        events = reader.stream("events")
        rows = reader.stream("files")
    by_mode = {name: during(events, mode) for name, mode in modes.items()}
    of_kind = {
        name: Counter(found[found["ino"] == about["ino"]]["kind"].tolist())
        for name, found in by_mode.items()
    }
    assert of_kind["reads"][Kind.READ] == READS
    reads = by_mode["reads"][by_mode["reads"]["kind"] == Kind.READ]
    assert int(reads["a"].sum()) == modes["reads"]["did"]["read_bytes"] == READS * READ_BYTES
    assert of_kind["mmaps"][Kind.MMAP] == MMAPS
    assert of_kind["opens"][Kind.OPEN] == OPENS
    forks = by_mode["forks"][by_mode["forks"]["kind"] == Kind.FORK]
    assert len(forks) == FORKS
    last = rows[rows["ino"] == about["ino"]][-1]
    assert int(last["reads"]) == READS
    assert int(last["mmaps"]) == MMAPS + of_kind["faults"][Kind.MMAP]


def test_faults_are_those_that_the_kernel_counted(recordings: dict[str, Path]) -> None:
    """Major and minor ones of the process while it touched a prime number of pages."""
    [mode] = [mode for mode in told("counts")["modes"] if mode["mode"] == "faults"]
    with Reader(recordings["counts"]) as reader:
        threads = reader.stream("threads")
    own = threads[threads["tgid"] == mode["pid"]]
    before = own[own["ns"] <= mode["start_ns"]][-1]
    after = own[own["ns"] >= mode["end_ns"]][0]
    assert mode["counted"]["major_faults"] == FILE_PAGES
    assert int(after["maj_flt"]) - int(before["maj_flt"]) == FILE_PAGES
    assert int(after["min_flt"]) - int(before["min_flt"]) >= ANONYMOUS_PAGES


def test_a_switch_is_the_servers_own(switch: Report) -> None:
    """A request by HTTP, and its TTFT as the client and the server stamped it."""
    about = told("switch")
    truth, client = about["truth"], about["client"]
    [request] = [r for r in switch.requests if r.switched]
    assert (request.model, request.outcome, request.streamed) == ("b", "ok", True)
    assert request.ttft_ns is not None
    assert client["send_begin_ns"] <= truth["request_start_ns"] < request.start_ns
    first_token_ns = request.start_ns + request.ttft_ns
    assert truth["edges"][-1]["start_ns"] <= first_token_ns <= client["first_text_ns"]
    wanted = Counter({edge["phase"]: edge["end_ns"] - edge["start_ns"] for edge in truth["edges"]})
    found = request.phase_totals()
    assert sum(found.values()) == request.ttft_ns
    for phase, ns in wanted.items():
        assert found.get(phase, 0) == pytest.approx(ns, abs=PHASE_ERROR * request.ttft_ns), phase


def test_the_weights_came_from_storage_to_the_page(switch: Report) -> None:
    weights = told("switch")["weights"]
    [request] = [r for r in switch.requests if r.switched]
    [file] = [f for f in request.files if f.size_bytes == weights["size_bytes"]]
    assert weights["cached_before"] == 0
    pages = -(-weights["size_bytes"] // PAGE_BYTES)
    assert file.bytes_from_storage == pytest.approx(weights["size_bytes"], abs=PAGE_BYTES)
    assert pages * PAGE_BYTES >= file.bytes_from_storage
    assert file.access == "mmap"


@pytest.mark.parametrize("name", NAMES)
def test_the_report_was_the_same_there(name: str, recordings: dict[str, Path]) -> None:
    """Made on that kernel, of that recording."""
    there, here = reported(name), analyse(recordings[name])
    assert [r["ttft_ns"] for r in there["requests"]] == [r.ttft_ns for r in here.requests]
    sources = {s["name"]: s["state"] for s in there["sources"]}
    assert sources == {s.name: s.state for s in here.sources}


def test_doctor_names_the_loader(recordings: dict[str, Path]) -> None:
    checks = {check["name"]: check for check in told("doctor")["checks"]}
    assert told("doctor")["can_record"]
    assert "so the loader is bcc" in checks["BTF"]["found"]
    assert checks["probe: page cache"]["found"] == "loaded and attached"
