"""AMD by sysfs and other devices by DRM's fdinfo, in whole recordings.

No such device is here: the recorder's own mounts show it a machine that has one, as its files are
documented (tests/fixtures/gpu), and the tests move its numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kernel.support import Recording, recording
from ttftprof.gpu_rows import Valid
from ttftprof.sources.gpu_schedule import PERIOD_NS
from ttftprof.timeline import Timeline, build
from unit.trees import unpack
from workloads.scripted import heard, scripted

pytestmark = pytest.mark.kernel

MIB = 1 << 20
FIXTURE_PID = 70
LASTS_S = 15 * PERIOD_NS / 1e9
WAITS = "import sys; print('runs', flush=True); sys.stdin.read()"


@dataclass(frozen=True)
class Card:
    """One of the fixtures, what it is called; where its memory stands, and how so many MiB are
    written there; whether that is the memory of a process."""

    name: str
    shown: str
    file: str
    text: Callable[[int], str]
    by_process: bool


CARDS = (
    Card(
        "amdgpu",
        "Radeon RX 7900 XTX",
        "sys/devices/pci0000:00/0000:03:00.0/mem_info_vram_used",
        lambda mib: f"{mib * MIB}\n",
        by_process=False,
    ),
    Card(
        "xe",
        "intel 0xe20b",
        f"proc/{FIXTURE_PID}/fdinfo/21",
        lambda mib: (
            "drm-driver:\txe\ndrm-client-id:\t3\ndrm-pdev:\t0000:04:00.0\n"
            f"drm-resident-vram0:\t{mib} MiB\n"
        ),
        by_process=True,
    ),
)


def with_mounts(root: Path, pid: int) -> Sequence[str]:
    """A command that shows what it executes the devices of `root`, and its process's files as those
    of `pid`. Folders of /sys/class stay as they are."""
    real = root / "real"
    real.mkdir()
    process = root / f"proc/{FIXTURE_PID}"
    mounts = (
        f"mount --bind /sys {real} && mount -t tmpfs none /sys/class"
        f" && ln -s {real}/class/* /sys/class/ && rm -f /sys/class/drm"
        f" && ln -s {root}/sys/class/drm /sys/class/drm"
        f" && mount --bind {process}/fd /proc/{pid}/fd"
        f" && mount --bind {process}/fdinfo /proc/{pid}/fdinfo"
    )
    return ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh"]


@dataclass(frozen=True)
class Run:
    card: Card
    recorded: Recording
    pid: int
    written: list[tuple[int, int, int]]  # (ns before, ns after, MiB)


@pytest.fixture(scope="module", params=CARDS, ids=lambda card: card.name)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    card: Card = request.param
    folder = tmp_path_factory.mktemp(card.name)
    unpack(f"gpu/{card.name}", folder)
    written = []
    with (
        scripted(WAITS) as program,
        recording(
            folder / "drm.ttft",
            "--pid",
            str(program.pid),
            through=with_mounts(folder, program.pid),
        ) as recorded,
    ):
        assert heard(program) == "runs"
        for mib in (4_000, 300, 5_000):
            before = time.monotonic_ns()
            overwrite(folder / card.file, card.text(mib))
            written.append((before, time.monotonic_ns(), mib))
            time.sleep(LASTS_S)
        (folder / "sys/class/drm").rename(folder / "sys/class/gone")
        time.sleep(LASTS_S)
    return Run(card, recorded, program.pid, written)


def overwrite(path: Path, text: str) -> None:
    """At once, and in the same file, as the kernel does it: its reader keeps a descriptor."""
    old = path.stat().st_size
    with path.open("r+b", buffering=0) as file:
        file.write(text.encode().ljust(max(old, 64), b"\n"))


def timeline_of(run: Run) -> Timeline:
    with run.recorded.reader() as reader:
        return build(reader)


def test_memory_follows_what_the_device_says(run: Run) -> None:
    """Of the device and of the process on it, with the next look."""
    gpu = timeline_of(run).gpu
    rows = gpu.of_device(0, Valid.USED)
    begins = rows["ns"].astype(np.int64)
    ends = begins + rows["took_ns"]
    until = [before for before, _, _ in run.written[1:]] + [int(ends[-1]) + 1]
    for (_, since_ns, mib), until_ns in zip(run.written, until, strict=True):
        levels = rows["used_bytes"][(begins > since_ns) & (ends < until_ns)].tolist()
        assert set(levels) == {mib * MIB}
    of_process = gpu.process_samples
    assert set(of_process["tgid"].tolist()) == {run.pid}
    held = [used // MIB for used in of_process["used_bytes"].tolist()]
    assert held[-3:] == [mib for _, _, mib in run.written] or not run.card.by_process


def test_the_report_shows_the_device_and_that_it_went(run: Run) -> None:
    (device,) = timeline_of(run).gpu.devices.values()
    assert (device["source"], device["name"]) == ("drm", run.card.shown)
    report = run.recorded.report()
    shown = {s.name: s for s in report.series if s.path == "GPU 0"}
    assert {"gpu_memory_bytes", "gpu_clock", "gpu_link_speed"} <= shown.keys()
    assert {4_000.0 * MIB, 300.0 * MIB, 5_000.0 * MIB} <= set(shown["gpu_memory_bytes"].values)
    (source,) = [s for s in report.sources if s.name == "gpu"]
    assert source.state == "degraded"
    assert source.reason == "GPU 0 was lost while recording (it is gone from sysfs)"
