"""GPU sources against libraries of the tests' own: the real binding, real uprobes, a real process.

The truth is what the process stamped around each of its calls.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernel.support import Recording, recording
from lab import device_process, fake_gpu, gpu_process
from lab.fake_gpu import State
from ttftprof.activities import process_activities
from ttftprof.engines.driver_calls import LAUNCH
from ttftprof.events import DeviceFlag
from ttftprof.gpu_facts import DriverSpan
from ttftprof.gpu_parts import cache_evidence, with_parts
from ttftprof.gpu_rows import Valid
from ttftprof.kernel.session import Settings
from ttftprof.model import Phase
from ttftprof.reports.words import warnings
from ttftprof.sources.gpu import NO_GPU
from ttftprof.timeline import Timeline, build
from workloads.cache import drop_cache, make_model

pytestmark = pytest.mark.kernel

PROCESS = fake_gpu.HERE / "gpu_process.py"
MIB = 1 << 20
MS = 1_000_000
WEIGHTS_BYTES = 48 * MIB
LOOKS = 80  # calls of NVML, in which a sampler has asked for everything
LAUNCHED = "cuLaunchKernel"
TRIES = 3  # two cores that others use: a span is exact when nobody was in its way
DELAYS_MS = {
    "cuInit": 30, "cuDevicePrimaryCtxRetain": 60, "cuModuleLoadData": 40, "cuLinkComplete": 50,
    "cuMemHostAlloc": 15, "cuMemCreate": 25, "cuGraphInstantiateWithFlags": 10,
}  # fmt: skip


@dataclass
class Run:
    """One process, as it and its library stamped its calls and as it was recorded; `calls` without
    launches."""

    truth: list[tuple[str, int, int, int]]  # call, begin, end, bytes
    inside: list[tuple[str, int, int]]  # the same calls, from within the library
    pid: int
    refused: int
    timeline: Timeline
    state: State
    path: Path
    calls: list[DriverSpan] = field(default_factory=list)
    policies: list[int] = field(default_factory=list)  # of the recorder's threads, while it ran

    def named(self, name: str) -> list[DriverSpan]:
        return [call for call in self.calls if call.name == name]


def record_process(libraries: Path, folder: Path, *options: str) -> Run:
    state = State(folder / "state")
    weights = make_model(folder / "weights.gguf", WEIGHTS_BYTES)
    drop_cache(weights)
    delays = " ".join(f"{name}={ms}" for name, ms in DELAYS_MS.items())
    stamps = folder / "stamps"
    program = [sys.executable, str(PROCESS), str(libraries / "libcuda.so.1"), str(weights)]
    process = subprocess.Popen(
        ["sh", "-c", '"$@"; read _', "sh", *program],  # recording goes on when it has ended
        env=os.environ
        | {"FAKE_GPU_STATE": str(state.path), "FAKE_CUDA_STAMPS": str(stamps)}
        | {"FAKE_CUDA_MS": delays},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    try:
        assert process.stdout.readline() == "mapped\n"
        with (
            fake_gpu.shown(libraries, state),
            recording(folder / "gpu.ttft", "--pid", str(process.pid), *options) as recorded,
        ):
            fake_gpu.await_calls(state, LOOKS)
            process.stdin.write("go\n")
            process.stdin.flush()
            output = process.stdout.readline()
            policies = policies_of(recorded.process.pid)
            fake_gpu.await_that(lambda: not state[fake_gpu.USED])
            fake_gpu.await_calls(state, LOOKS)
    finally:
        process.kill()
    told = json.loads(output)
    with recorded.reader() as reader:
        timeline = build(reader)
    spans = [tuple(span) for span in told["spans"]]
    inside = [(s.name, s.begin_ns, s.end_ns) for s in fake_gpu.stamps(stamps) if s.name != LAUNCHED]
    run = Run(spans, inside, told["pid"], told["refused"], timeline, state, recorded.path)
    run.calls = [c for c in timeline.gpu.calls[told["pid"]] if c.group != LAUNCH]
    run.policies = policies
    return run


def policies_of(pid: int) -> list[int]:
    """How the kernel schedules each thread; the first thread comes first."""
    tids = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    return [os.sched_getscheduler(tid) for tid in sorted(tids, key=lambda tid: tid != pid)]


@pytest.fixture(scope="module")
def runs(gpu_libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """The last of them with launches."""
    options: list[tuple[str, ...]] = [()] * (TRIES - 1) + [("--gpu-launches",)]
    return [record_process(gpu_libraries, tmp_path_factory.mktemp("run"), *own) for own in options]


def test_every_call_is_a_span_with_its_bytes_and_result(runs: list[Run]) -> None:
    for run in runs:
        seen = [(c.name, c.size_bytes) for c in run.calls]
        assert seen == [(base(name), size) for name, _, _, size in run.truth]
        assert [c.result for c in run.calls] == [0] * (len(run.calls) - 1) + [run.refused]
        assert run.refused == 2


def base(symbol: str) -> str:
    """The call that a symbol is a variant of."""
    return symbol.removesuffix("_ptsz").removesuffix("_v2")


def test_launches_are_recorded_only_when_asked_for(runs: list[Run]) -> None:
    for run, launches in zip(runs, [0, 0, gpu_process.LAUNCHES], strict=True):
        seen = [c for c in run.timeline.gpu.calls[run.pid] if c.group == LAUNCH]
        assert [c.name for c in seen] == [LAUNCHED] * launches
        capture, kv = run.named("cuGraphInstantiateWithFlags")[0], run.named("cuMemCreate")[0]
        assert all(capture.end_ns <= c.start_ns <= c.end_ns <= kv.start_ns for c in seen)


def test_spans_agree_with_process_and_library_to_a_millisecond(runs: list[Run]) -> None:
    """The probe's stamps lie between those of the process, outside, and the library's, inside; so
    in every run, and in the best of them near both."""
    off = []
    for run in runs:
        both = list(zip(run.calls, run.truth, run.inside, strict=True))
        for call, (_, begin, end, _), (name, first, last) in both:
            assert base(name) == call.name
            assert begin <= call.start_ns <= first <= last <= call.end_ns <= end
        off.append(
            [max(first - begin, end - last) for _, (_, begin, end, _), (_, first, last) in both]
        )
    best = np.array(off).min(axis=0)
    assert best.max() < MS, best.tolist()


def test_the_sum_of_what_was_copied_is_exact(runs: list[Run]) -> None:
    for run in runs:
        copied = sum(size for name, _, _, size in run.truth if "HtoD" in name)
        assert sum(c.size_bytes for c in run.timeline.gpu.copies(run.pid)) == copied
        assert copied == 1 + 2 * MIB + 7 + 3 * MIB + 2 * MIB + 2 * 5 + WEIGHTS_BYTES


def test_the_parts_of_a_start_agree_to_a_millisecond(runs: list[Run]) -> None:
    """Context, compiling, graph capture and KV memory, as the report gives them."""
    off: dict[str, list[int]] = {}
    for run in runs:
        at = {name: (begin, end) for name, begin, end, _ in run.truth}
        whole = Phase("init", run.truth[0][1], run.truth[-1][2], "observed")
        (phase,) = with_parts(run.timeline, [whole], [run.pid], ())
        parts = {part.part: part for part in phase.parts}
        hulls = {
            "context": (at["cuInit"][0], at["cuDevicePrimaryCtxRetain"][1]),
            "compile": (at["cuModuleLoadData"][0], at["cuLinkComplete"][1]),
            "graph_capture": (
                at["cuStreamBeginCapture_v2"][0],
                at["cuGraphInstantiateWithFlags"][1],
            ),
            "kv_alloc": (at["cuMemAlloc_v2"][0], at["cuMemAlloc"][1]),
        }
        assert parts.keys() == hulls.keys()
        for name, (begin, end) in hulls.items():
            part = parts[name]
            edges = max(abs(part.start_ns - begin), abs(part.end_ns - end))
            off.setdefault(name, []).append(edges)
        spent = sum(end - begin for begin, end in (at["cuModuleLoadData"], at["cuLinkComplete"]))
        off.setdefault("spent", []).append(abs(parts["compile"].spent_ns - spent))
    assert {name: min(times) for name, times in off.items() if min(times) >= MS} == {}


def test_one_address_with_two_names_is_one_call(runs: list[Run]) -> None:
    for run in runs:
        assert len(run.named("cuMemAlloc")) == 2  # one by each name


def test_faults_inside_a_copy_are_storage_and_not_transfer(runs: list[Run]) -> None:
    """A copy out of a cold mapped file waits for storage; only the rest of it is transfer."""
    transferred = []
    for run in runs:
        cold = max(run.named("cuMemcpyHtoD"), key=lambda c: c.size_bytes)
        parts = process_activities(run.timeline, run.pid, cold.start_ns, cold.end_ns)
        totals: dict[str, int] = {}
        for part in parts:
            totals[part.activity] = totals.get(part.activity, 0) + part.duration_ns
        length = cold.end_ns - cold.start_ns
        assert sum(totals.values()) == length
        (waits,) = [
            w for w in run.timeline.threads.waits_of(run.pid).by_thread() if w.tid == cold.tid
        ]
        inside = (waits.start_ns >= cold.start_ns) & (waits.end_ns <= cold.end_ns)
        stored = inside & (waits.reason == 1)
        waited = int((waits.end_ns - waits.start_ns)[stored].sum())
        assert waited > 0
        assert totals["storage_wait"] >= waited
        transferred.append(totals.get("transfer", 0))  # none if a slow disk left nothing of it
        assert "cpu" not in totals
        warm = [c for c in run.named("cuMemcpyHtoD") if c.size_bytes == 3 * MIB]
        quick = process_activities(run.timeline, run.pid, warm[0].start_ns, warm[0].end_ns)
        assert {part.activity for part in quick} <= {"transfer", "fault"}
    assert max(transferred) > 0


def test_memory_rises_with_the_allocations_and_falls_with_the_process(runs: list[Run]) -> None:
    for run in runs:
        assert [d["name"] for d in run.timeline.gpu.devices.values()] == ["Fake GPU"]
        rows = run.timeline.gpu.of_device(0, Valid.USED)
        assert set(rows["used_bytes"].tolist()) == {0, 100 * MIB, 600 * MIB}  # not what was refused
        at = {c.size_bytes: c.end_ns for c in run.calls if c.name in ("cuMemAlloc", "cuMemCreate")}
        for level, since_ns in ((100 * MIB, at[100 * MIB]), (600 * MIB, at[500 * MIB])):
            reached = rows[(rows["ns"] >= since_ns) & (rows["used_bytes"] == level)]
            assert len(reached)
        assert rows["used_bytes"][-1] == 0
        tgids = run.timeline.gpu.process_samples["tgid"]
        assert set(tgids.tolist()) == {run.pid}


def test_the_report_names_the_gpu_and_nothing_is_missed(runs: list[Run]) -> None:
    with_state = {s.name: s for s in runs[0].timeline.sources}
    assert (with_state["gpu"].state, with_state["gpu"].reason) == ("ok", "Fake GPU")


def test_the_sampler_alone_goes_before_threads_that_compute(runs: list[Run]) -> None:
    """In a recorder that has given up root by then."""
    for run in runs:
        assert run.policies[0] == os.SCHED_OTHER
        assert run.policies[1:].count(os.SCHED_RR) == 1


def test_the_samples_keep_their_schedule(runs: list[Run]) -> None:
    """±2 ms at the median, whatever the process did meanwhile; from its first memory on."""
    medians, latest = [], []
    for run in runs:
        rows = run.timeline.gpu.of_device(0, Valid.USED)
        rows = rows[np.flatnonzero(rows["used_bytes"])[0] :]
        steps = np.diff(rows["ns"].astype(np.int64)) - 20 * MS
        medians.append(int(np.median(np.abs(steps))))
        latest.append(int(rows["late_ns"].max()))
    assert min(medians) < 2 * MS, medians
    assert min(latest) < 500 * MS, latest


def test_calls_right_after_the_library_was_mapped(gpu_libraries: Path, tmp_path: Path) -> None:
    """At a path that nobody knew, calls of the first milliseconds are missing: the report says of
    how many, and from then on every single one is there. The process goes on until a while after a
    probe is in its code, which then has a breakpoint (or a call) where it had none."""
    code = (
        "import ctypes, sys, time\n"
        "sys.stdin.readline()\n"
        "cuda = ctypes.CDLL(sys.argv[1])\n"
        "print(time.monotonic_ns())\n"
        "code = lambda: ctypes.string_at(ctypes.cast(cuda.cuInit, ctypes.c_void_p).value, 5)\n"
        "without, left, until = code(), 100, time.monotonic() + 20\n"
        "while left and time.monotonic() < until:\n"
        "    cuda.cuInit(0)\n"
        "    time.sleep(0.001)\n"
        "    left -= code() != without\n"
    )
    stamps, library = tmp_path / "stamps", gpu_libraries / "libcuda.so.1"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(library)],
        env=os.environ | {"FAKE_CUDA_STAMPS": str(stamps)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with recording(tmp_path / "late.ttft", "--pid", str(process.pid)) as recorded:
        output, _ = process.communicate("go\n", timeout=30)
    with recorded.reader() as reader:
        gpu = build(reader).gpu
    (met,) = gpu.libraries
    assert (met.path, met.tgid, met.refused) == (str(library), process.pid, "")
    assert met.mapped_ns <= int(output) < met.probed_ns
    seen, made = gpu.calls[process.pid], fake_gpu.stamps(stamps)
    assert all(c.result == 0 for c in seen)
    for call, stamp in zip(seen, made[-len(seen) :], strict=True):
        assert call.start_ns <= stamp.begin_ns <= stamp.end_ns <= call.end_ns
    assert all(stamp.begin_ns < met.probed_ns for stamp in made[: -len(seen)])
    (note,) = [n for n in recorded.report().notes if n.startswith("calls into")]
    assert note == (
        f"calls into {library} in the first {met.unseen_ns / 1e6:.1f} ms after pid {process.pid} "
        "mapped it may be missing"
    )


def recorded_alone(script: str, path: Path) -> tuple[str, Recording]:
    """What a script with mounts of its own said, which goes on at a line, and its recording."""
    process = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with recording(path, "--pid", str(process.pid)) as recorded:
        output, _ = process.communicate("go\n", timeout=30)
    return output, recorded


def test_the_hip_runtime_of_a_container(tmp_path: Path) -> None:
    """Its library lies where only the container's mounts show it, and is mapped while recording."""
    fake_gpu.build("fake_hip.c", tmp_path / "image", "libamdhip64.so.6.2.60204")
    root = tmp_path / "rocm"
    root.mkdir()
    script = (
        f"mount -t tmpfs none {root} && cp {tmp_path}/image/* {root}/ && "
        f"exec {sys.executable} {fake_gpu.HERE / 'hip_process.py'} {root}/libamdhip64.so.6.2.60204"
    )
    output, recorded = recorded_alone(script, tmp_path / "hip.ttft")
    assert not list(root.iterdir())
    told = json.loads(output)
    with recorded.reader() as reader:
        timeline = build(reader)
    calls = timeline.gpu.calls[told["pid"]]
    assert [(c.name, c.size_bytes, c.result) for c in calls] == [
        (name.removesuffix("_spt"), size, result) for name, _, _, size, result in told["spans"]
    ]
    for call, (_, begin, end, _, _) in zip(calls, told["spans"], strict=True):
        assert begin <= call.start_ns <= call.end_ns <= end
    copies = timeline.gpu.copies(told["pid"])
    assert sum(c.size_bytes for c in copies) == 2 * MIB + 7 + 6 * MIB + 11


def test_no_gpu_is_one_line_and_no_warning(tmp_path: Path) -> None:
    # In a process of its own: other tests have loaded an NVML of theirs into this one.
    looks = (
        "from ttftprof.sources import drm, nvml; raise SystemExit(bool(nvml.find() or drm.find()))"
    )
    if subprocess.run([sys.executable, "-c", looks], check=False).returncode:
        pytest.skip("this machine has a GPU that can be asked")
    process = subprocess.Popen(["sleep", "30"])
    with recording(tmp_path / "none.ttft", "--pid", str(process.pid)) as recorded:
        time.sleep(0.3)
    process.kill()
    process.wait()
    report = recorded.report()
    (source,) = [s for s in report.sources if s.name == "gpu"]
    assert (source.state, source.reason) == ("absent", NO_GPU)
    assert not [w for w in warnings(report) if "gpu" in w]
    assert [n for n in report.notes if "GPU" in n] == [f"no GPU is shown: {NO_GPU}"]
    with recorded.reader() as reader:
        assert not len(reader.stream("gpu"))


# -- without symbols ------------------------------------------------------------------------------

# In a mount namespace of its own, where a TUN device plays the GPU.
MAKE_DEVICES = (
    "mount -t tmpfs none /dev && mkdir /dev/dri && mount -t tmpfs -o nodev none /dev/dri"
    " && mknod /dev/nvidiactl c 1 3 && mknod /dev/nvidia0 c 10 200"
    " && mknod /dev/kfd c 1 3 && mknod /dev/dri/renderD128 c 1 3"
)


@dataclass(frozen=True)
class DeviceRun:
    """A process that used device files, as it stamped its requests and as it was recorded."""

    told: dict[str, Any]
    timeline: Timeline


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> DeviceRun:
    folder = tmp_path_factory.mktemp("devices")
    device_process.make_caches(folder)
    (folder / "ptxas").symlink_to("/bin/true")
    program = [sys.executable, fake_gpu.HERE / "device_process.py", folder, folder / "ptxas"]
    script = f"{MAKE_DEVICES} && exec {shlex.join(map(str, program))}"
    output, recorded = recorded_alone(script, folder / "devices.ttft")
    with recorded.reader() as reader:
        return DeviceRun(json.loads(output), build(reader))


def test_opens_of_device_files_had_and_refused(devices: DeviceRun) -> None:
    events = devices.timeline.gpu.device_files
    opened = events[(events["flags"] & DeviceFlag.IOCTL) == 0]
    nvidia, kfd, dri = DeviceFlag.NVIDIA, DeviceFlag.KFD, DeviceFlag.DRI
    assert opened["flags"].tolist() == [nvidia, nvidia, kfd, dri, nvidia]
    null, tun = os.makedev(1, 3), os.makedev(10, 200)
    assert [os.makedev(d >> 20, d & 0xFFFFF) if d else 0 for d in opened["dev"].tolist()] == [
        null, tun, null, 0, 0
    ]  # fmt: skip
    assert [max(-r, 0) for r in opened["b"].astype(np.int64).tolist()] == devices.told["opens"]
    assert devices.told["opens"] == [0, 0, 0, errno.EACCES, errno.ENOENT]


def test_slow_requests_to_a_device_are_recorded_and_quick_ones_are_not(devices: DeviceRun) -> None:
    """Each is a span within the process's own stamps. A quick one that others on the machine made
    slow is slow."""
    events = devices.timeline.gpu.device_files
    requests = events[(events["flags"] & DeviceFlag.IOCTL) != 0]
    begins = requests["start_ns"].astype(np.int64)
    ends = begins + requests["duration_ns"].astype(np.int64)
    made = devices.told["requests"]
    at = [next(n for n, (begin, _) in reversed([*enumerate(made)]) if begin <= b) for b in begins]
    assert at[: device_process.SLOW] == list(range(device_process.SLOW))
    for number, begin, end in zip(at, begins, ends, strict=True):
        assert made[number][0] <= begin <= end <= made[number][1]
    assert len(at) < device_process.SLOW + device_process.QUICK
    assert (ends - begins).min() >= Settings().short_wait_ns
    delay_ns = round(device_process.DELAY_S * 1e9)
    assert (ends - begins)[: device_process.SLOW].min() >= delay_ns
    assert set(requests["dev"].tolist()) == {10 << 20 | 200}
    assert set(requests["a"].tolist()) == {device_process.TUNSETIFF}
    assert set(requests["b"].astype(np.int64).tolist()) == {-errno.EINVAL}


def test_without_symbols_the_context_is_told_by_the_device(devices: DeviceRun) -> None:
    made, pid = devices.told["requests"], devices.told["pid"]
    whole = Phase("init", made[0][0], made[-1][1], "observed")
    (phase,) = with_parts(devices.timeline, [whole], [pid], ())
    (context,) = [part for part in phase.parts if part.part == "context"]
    slow = made[: device_process.SLOW]
    delays_ns = round(device_process.SLOW * device_process.DELAY_S * 1e9)
    assert context.basis == "inferred"
    assert slow[0][0] <= context.start_ns <= context.end_ns <= made[-1][1]
    assert delays_ns <= context.spent_ns <= sum(end - begin for begin, end in made)


def test_kernel_caches_and_compilers(devices: DeviceRun) -> None:
    """Of every cache what was read, written and read back, and what was missing; an index is no
    kernel, and a package no cache."""
    gpu = devices.timeline.gpu
    used = [
        (name, *how)
        for name in device_process.CACHES
        for how in ((False, False, 1000), (True, False, 0), (False, False, 10))
    ]
    assert [(c.cache, c.write, c.missing, c.size_bytes) for c in gpu.cache_opens] == [
        *used,
        ("MIOpen", False, True, 0),
    ]
    window = devices.timeline.start_ns, devices.timeline.end_ns
    told = {e.what: e.value for e in cache_evidence(devices.timeline, window)}
    for name in device_process.CACHES:
        assert told[f"{name} hit: files read"] == told[f"{name} missed: files written"] == 1
        assert str(told[f"{name} at the next start"]).startswith("hit")
    assert told["MIOpen missed: not found"] == 1
    assert told["MIOpen at the next start"] == "miss: nothing was kept"
    assert [Path(compiler.path).name for compiler in gpu.compilers] == ["ptxas"]
    ended = devices.timeline.process_at(gpu.compilers[0].tgid, gpu.compilers[0].ns)
    assert ended is not None
    assert ended.parent_pid == devices.told["pid"]
