"""Block layers on a real kernel: a delay of device-mapper, LUKS, RAID; recorded by scripts/vm-test.

The delay is long beside what emulation adds, so that it can be recovered; the rest is counts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest

from conftest import VM_RESULTS as RESULTS
from ttftprof import path_model, remote, storage_requests
from ttftprof.events import Records, dev_numbers
from ttftprof.recording import Reader
from ttftprof.timeline import FileFacts, Timeline, build

DELAY_NS = 1_000_000_000
TOLERANCE = 0.05
PAGE = 4096

pytestmark = pytest.mark.vm


@dataclass(frozen=True)
class Step:
    """One reading of a model below a layer; `reads` are what the layer was asked for."""

    file: FileFacts
    layers: tuple[str, ...]
    start_ns: int
    end_ns: int
    reads: Records


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    with Reader(RESULTS / "steps.ttft") as reader:
        return build(reader)


@pytest.fixture(scope="module")
def steps(timeline: Timeline) -> dict[str, Step]:
    with Reader(RESULTS / "steps.ttft") as reader:
        layers = {fact["path"]: tuple(fact["layers"]) for _, fact in reader.facts("file")}
    found = {}
    for line in (RESULTS / "steps").read_text().splitlines():
        told = json.loads(line)
        file = next(f for f in timeline.files.values() if f.path == told["path"])
        span = int(told["start_ns"]), int(told["end_ns"])
        reads = storage_requests.Traffic(timeline, *span).requests(file)
        found[str(told["name"])] = Step(file, layers[file.path], *span, reads)
    return found


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("delay-some", ["file system ext4", "volume device mapper slow (dm-1)", "loop loop0"]),
        ("crypt-mmap", ["file system ext4", "crypt LUKS2 secret (dm-0)", "loop loop1"]),
        ("raid-read", ["file system ext4", "raid md0", "loop loop2", "loop loop3"]),
    ],
)
def test_the_layers_are_named(name: str, kinds: list[str], steps: dict[str, Step]) -> None:
    layers = [layer for layer in steps[name].layers if layer != "file system tmpfs"]
    assert layers == kinds


def test_the_delay_that_was_set_is_recovered(steps: dict[str, Step]) -> None:
    """Every 32nd page is one request to the layer, and takes the delay."""
    step = steps["delay-some"]
    pages = step.reads[step.reads["asked_bytes"] == PAGE]
    assert len(pages) == step.file.size_bytes // PAGE // 32
    found = path_model.fit(path_model.answered(step.reads))
    assert found
    assert found.delay_ns == pytest.approx(DELAY_NS, rel=TOLERANCE)
    depth = remote.in_flight(pages)
    assert depth
    assert depth.max == 1


def test_waiting_for_the_layer_is_waiting_for_a_device(
    steps: dict[str, Step], timeline: Timeline
) -> None:
    step = steps["delay-some"]
    window = step.start_ns, step.end_ns
    split = storage_requests.wait_split(
        storage_requests.Traffic(timeline, *window),
        step.file,
        storage_requests.Whereabouts(step.reads),
        *window,
    )
    waited_ns = split.device_ns + split.client_ns
    assert waited_ns >= 0.9 * len(step.reads) * DELAY_NS
    assert split.device_ns >= 0.95 * waited_ns
    assert (split.queue_ns, split.wire_ns, split.server_ns) == (0, 0, 0)


@pytest.mark.parametrize("name", ["crypt-mmap", "raid-read"])
def test_a_layers_bytes_are_the_files_and_its_disks_are_left_out(
    name: str, steps: dict[str, Step]
) -> None:
    step = steps[name]
    assert int(step.reads["got_bytes"].sum()) == step.file.size_bytes
    [disk] = np.unique(step.reads["dev"]).tolist()
    assert dev_numbers(disk) == dev_numbers(step.file.dev)  # the layer's own number


def test_what_the_layer_was_asked_for_is_what_entered_the_cache(steps: dict[str, Step]) -> None:
    for name in ("delay-some", "crypt-mmap", "raid-read"):
        added = int(steps[name].file.rows["added_pages"][-1]) * PAGE
        assert int(steps[name].reads["got_bytes"].sum()) == added
