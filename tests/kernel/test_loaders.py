"""The same probes without the kernel's BTF: bcc takes the types from headers, and the facts agree.

No package has headers of this kernel, so they are made from its BTF; `scripts/kernel-matrix` shows
the same with Debian's own headers.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import PIPE, Popen

import numpy as np
import pytest

from conftest import unsupported
from kernel.support import Recording, recording, start_recording
from lab.kernel_headers import write_headers
from ttftprof.errors import Unsupported
from ttftprof.events import Kind, Records
from ttftprof.kernel import headers, latecomers, session
from ttftprof.kernel.libbpf import BpfError, Pointer
from ttftprof.kernel.session import ProbeSession, ProbeState, Settings
from ttftprof.kernel.table import PROBES
from ttftprof.model import Report
from workloads.cache import drop_cache, make_model
from workloads.counted import FORKS, MMAPS, READS, Program, started
from workloads.scenarios import run_scenario

pytestmark = pytest.mark.kernel

MODEL_BYTES = 8 * (1 << 20) + 4099
# Edges that a workload has so many of, whatever the machine does meanwhile
EXACT = (
    Kind.EXEC,
    Kind.OPEN,
    Kind.MMAP,
    Kind.LISTEN,
    Kind.MARK_ENTER,
    Kind.MARK_EXIT,
    Kind.PROCESS_EXIT,
)
BY_LOADER = ("libbpf", "bcc")
TIMEOUT_S = 20


@pytest.fixture(scope="module", autouse=True)
def kernel_source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if headers.bcc_folder() is None:
        unsupported("no bcc: apt-get install python3-bpfcc")
    folder = write_headers(tmp_path_factory.mktemp("headers"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BCC_KERNEL_SOURCE", str(folder))
        yield folder


@dataclass(frozen=True)
class Seen:
    """One switch of models, as recorded under one loader."""

    report: Report
    events: Records
    weights_bytes: int

    def edges(self) -> dict[str, int]:
        counted = Counter(self.events["kind"].tolist())
        return {kind.name: counted[kind] for kind in EXACT}


def switched(loader: str, workdir: Path) -> Seen:
    started: list[Recording] = []
    path = workdir / f"{loader}.ttft"

    def before(pid: int) -> None:
        started.append(start_recording(path, "--pid", str(pid), "--loader", loader))

    def after(_pid: int) -> None:
        time.sleep(0.1)  # the answer's last bytes
        assert started[0].stop() == 0, started[0].output

    run = run_scenario("cold_mmap_short", workdir, before_switch=before, after=after)
    with started[0].reader() as reader:
        assert reader.complete
        assert not reader.lost()
        assert reader.meta["settings"]["loader"] == loader
        events = reader.stream("events")
    return Seen(started[0].report(), events, run.model_path.stat().st_size)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    workdir = tmp_path_factory.mktemp("switch")
    return {loader: switched(loader, workdir) for loader in BY_LOADER}


def without_pids(text: str) -> str:
    return re.sub(r"pid \d+", "pid", text)


def test_a_switch_of_models_gives_the_same_facts(seen: dict[str, Seen]) -> None:
    told = []
    for found in seen.values():
        [request] = found.report.requests
        weights = next(f for f in request.files if f.size_bytes == found.weights_bytes)
        told.append(
            {
                "edges": found.edges(),
                "request": (request.model, request.endpoint, request.streamed, request.outcome),
                "tokens": (request.prompt_tokens, request.switched),
                "phases": [(p.phase, p.basis) for p in request.phases],
                "evidence": [without_pids(e.what) for p in request.phases for e in p.evidence],
                "from storage": weights.bytes_from_storage,
                "access": (weights.access, weights.advice),
                "cause": request.verdict.cause,
            }
        )
    assert told[0] == told[1]
    assert told[0]["from storage"]


def test_what_threads_did_is_known_without_btf(seen: dict[str, Seen]) -> None:
    """Waits by reason, CPU by kind: every moment of both is told."""
    for found in seen.values():
        [request] = found.report.requests
        activities = request.activity_totals()
        assert sum(activities.values()) == request.ttft_ns
        assert activities.get("storage_wait", 0) > 0
        assert activities.get("unknown", 0) < request.ttft_ns // 50


def rows(loader: str, mode: str, model: Path) -> tuple[Records, Records, Program]:
    """The events of a counted program, and the last row of its file."""
    path = model.with_suffix(f".{loader}.ttft")
    drop_cache(model)
    with (
        started(mode, model) as program,
        recording(path, "--pid", str(program.pid), "--loader", loader) as seen,
    ):
        program.go()
    with seen.reader() as reader:
        files = reader.stream("files")
        return reader.stream("events"), files[files["ino"] == model.stat().st_ino], program


def test_prime_counts_are_exact_without_btf(tmp_path: Path) -> None:
    model = make_model(tmp_path / "counted.weights", MODEL_BYTES)
    events, file, _ = rows("bcc", "reads", model)
    assert int(file[-1]["reads"]) == READS
    assert np.count_nonzero(events["kind"] == Kind.READ) == READS
    events, file, _ = rows("bcc", "mmaps", model)
    assert int(file[-1]["mmaps"]) == MMAPS
    events, _, program = rows("bcc", "forks", model)
    forks = events[events["kind"] == Kind.FORK]
    assert len(forks) == FORKS
    assert set(forks["a"].tolist()) == {program.pid}


def held(loader: str, tgid: int) -> tuple[set[tuple[int, ...]], list[tuple[int, ...]]]:
    """The files a process is seen to hold, and its threads with what they wait for."""
    probes = ProbeSession(Settings(loader=loader, min_file_bytes=4096))
    try:
        probes.load()
        probes.attach()
        probes.seed([tgid])
        records = probes.events.drain()
        records = records[records["kind"] == Kind.HELD]
        names = ["dev", "ino", "a", "b", "flags"]
        files = {tuple(int(row[n]) for n in names) for row in records}
        slots = probes.threads[probes.threads["tgid"] == tgid]
        waits = [(int(s["tid"]), int(s["off_reason"]), int(s["off_syscall"])) for s in slots]
        return files, sorted(waits)
    finally:
        probes.close()


def test_what_a_process_holds_when_recording_begins_is_the_same(tmp_path: Path) -> None:
    model = make_model(tmp_path / "held.weights", MODEL_BYTES)
    with started("idle", model) as program, Path(f"/proc/{program.pid}/exe").open("rb"):
        for _ in range(5):
            by_btf, by_bcc = (held(loader, program.pid) for loader in BY_LOADER)
            if held(BY_LOADER[0], program.pid) == by_btf:
                break  # nobody read or evicted a page of these files meanwhile: they are counted
    assert by_btf == by_bcc
    assert by_btf[0]
    assert by_btf[1]


# -- what cannot be had ---------------------------------------------------------------------------


def test_probes_that_the_headers_do_not_describe_are_absent() -> None:
    """FUSE keeps its types to itself: said of a target with files there, and only then."""
    probes = ProbeSession(Settings(loader="bcc"))
    try:
        probes.load()
        probes.attach()
        absent = {s.name: s for s in probes.states_for(["fuse"])}["fuse"]
        assert absent == ProbeState(
            "fuse",
            "absent",
            "the kernel's headers do not describe fuse_req",
            "requests to the FUSE daemon are unknown",
        )
        others = probes.states_for(["ext4"])
        assert {s.state for s in others} == {"ok"}, others
    finally:
        probes.close()


def test_a_kernel_without_btf_is_fitted_by_its_headers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(session, "VMLINUX", tmp_path / "none")
    probes = ProbeSession(Settings())
    try:
        probes.load()
        assert probes.loader == "bcc"
    finally:
        probes.close()


def test_missing_headers_name_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session, "VMLINUX", tmp_path / "none")
    monkeypatch.setattr(headers, "has_headers", lambda: False)
    with pytest.raises(Unsupported) as raised:
        ProbeSession(Settings()).load()
    assert "BTF" in raised.value.message
    assert os.uname().release in raised.value.message
    assert f"apt-get install linux-headers-{os.uname().release}" in raised.value.next_step


def test_missing_bcc_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "bcc_folder", lambda: None)
    with pytest.raises(Unsupported) as raised:
        ProbeSession(Settings(loader="bcc")).load()
    assert "python3-bpfcc" in raised.value.next_step


def test_headers_of_another_kernel_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = write_headers(tmp_path)
    (broken / "include/generated").mkdir()
    (broken / "include/generated/utsrelease.h").write_text('#define UTS_RELEASE "5.4.0-1"\n')
    monkeypatch.setenv("BCC_KERNEL_SOURCE", str(broken))
    with pytest.raises(Unsupported, match=r"are of 5\.4\.0-1"):
        ProbeSession(Settings(loader="bcc")).load()


def test_headers_that_do_not_compile_are_told_by_the_compilers_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = write_headers(tmp_path)
    (broken / "include/linux/sched.h").write_text("#error not of this kernel\n")
    monkeypatch.setenv("BCC_KERNEL_SOURCE", str(broken))
    with pytest.raises(Unsupported) as raised:
        ProbeSession(Settings(loader="bcc")).load()
    assert "not of this kernel" in raised.value.message
    assert "exactly this kernel" in raised.value.next_step


READ = """
import sys
model = open(sys.argv[1], "rb", buffering=0)
sys.stdin.readline()
model.read()
"""


def test_a_module_that_comes_later_needs_no_types(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The hooks of the page cache are played as those of a module: at first there are none."""
    loaded, attach = tmp_path / "loaded", ProbeSession._attach_program

    def attach_program(self: ProbeSession, name: str, program: Pointer) -> None:
        if name.startswith("pagecache__") and not loaded.exists():
            raise BpfError("attach", errno.ENOENT)
        attach(self, name, program)

    monkeypatch.setattr(ProbeSession, "_attach_program", attach_program)
    monkeypatch.setattr(latecomers, "is_loaded", lambda _name, typed: loaded.exists() and not typed)
    probes = list(PROBES)
    number = [p.stem for p in probes].index("pagecache")
    own = frozenset({"ext4"})
    probes[number] = replace(probes[number], modules=("played",), filesystems=own)
    model = make_model(tmp_path / "model.gguf", MODEL_BYTES)
    drop_cache(model)
    found = ProbeSession(Settings(loader="bcc"), probes)
    reader = Popen([sys.executable, "-c", READ, str(model)], stdin=PIPE)
    try:
        found.load()
        found.attach()
        before = found.states_for(["ext4"])[number]
        found.seed([reader.pid])
        found.keep_helpers()
        loaded.touch()
        began = time.monotonic()
        while found.states_for(["ext4"])[number].state == "absent":
            assert time.monotonic() - began < TIMEOUT_S
            time.sleep(0.05)
            found.take_late(())
        after = found.states_for(["ext4"])[number]
        reader.communicate(b"go\n", timeout=TIMEOUT_S)
        pages = int(found.files["added_pages"].sum())
    finally:
        reader.kill()
        reader.wait()
        found.close()
    assert before.reason == "the module played was not loaded while recording ran"
    assert (after.state, after.lost) == ("ok", "")
    assert "as its module was loaded" in after.reason
    assert pages == -(-MODEL_BYTES // 4096)
