"""Probes that cannot be had: said, with their cost; and what cannot be done without."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ttftprof.errors import Unsupported
from ttftprof.events import Kind, Records, Wait, duration_end
from ttftprof.kernel import headers, libbpf, session, types
from ttftprof.kernel.libbpf import library
from ttftprof.kernel.session import ProbeSession, Settings, kernel_function
from ttftprof.kernel.table import PROBES, call_tables, syscall_name
from ttftprof.kernel.types import KernelTypes

pytestmark = pytest.mark.kernel


def loaded(probes: ProbeSession) -> ProbeSession:
    probes.load()
    probes.attach()
    return probes


def without_tracepoints(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    has = KernelTypes.has_tracepoint
    monkeypatch.setattr(
        KernelTypes,
        "has_tracepoint",
        lambda self, name, modules=(): name not in missing and has(self, name, modules),
    )


def test_this_kernel_has_every_probe() -> None:
    probes = loaded(ProbeSession(Settings()))
    try:
        assert {s.state for s in probes.states.values()} == {"ok"}
        assert set(probes.states) == {p.stem for p in PROBES}
    finally:
        probes.close()


def test_a_missing_tracepoint_degrades_its_probe_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    without_tracepoints(monkeypatch, "mm_filemap_fault", "sk_data_ready")
    probes = loaded(ProbeSession(Settings()))
    try:
        states = probes.states
        assert states["faults"].state == "degraded"
        assert "mm_filemap_fault" in states["faults"].reason
        assert states["faults"].lost
        assert states["sockets"].state == "degraded"
        assert states["pagecache"].state == "ok"
    finally:
        probes.close()


def test_a_kernel_before_5_18_gets_the_switch_hook_of_its_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = KernelTypes.arguments
    monkeypatch.setattr(
        KernelTypes,
        "arguments",
        lambda self, hook, modules=(): (
            3 if hook == "sched_switch" else arguments(self, hook, modules)
        ),
    )
    probes = loaded(ProbeSession(Settings()))
    try:
        assert probes.states["offcpu"].state == "ok"
        switches = [name for name in probes.program_counts() if name.startswith("offcpu__")]
        assert switches == ["offcpu__switch_before_5_18"]
    finally:
        probes.close()


def test_a_kernel_without_casts_gets_the_same_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before 6.2, or where the kernel does not compile programs."""
    with_casts = loaded(ProbeSession(Settings()))
    try:
        states, programs = with_casts.states, with_casts.program_counts().keys()
    finally:
        with_casts.close()
    monkeypatch.setattr(session, "is_compiled", lambda: False)
    monkeypatch.setattr(session, "OBJECT_WITH_CASTS", Path("/nonexistent"))
    without = loaded(ProbeSession(Settings()))
    try:
        assert without.states == states
        assert without.program_counts().keys() == programs
    finally:
        without.close()


def test_runs_that_the_kernel_skipped_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = loaded(ProbeSession(Settings()))
    real = session.fdinfo

    def told(fd: int) -> str:
        return real(fd).replace("recursion_misses:\t0", "recursion_misses:\t23")

    try:
        monkeypatch.setattr(session, "fdinfo", told)
        counts = probes.program_counts()
    finally:
        probes.close()
    assert {own.skipped for own in counts.values()} == {23}


SLEEP_NS = 500_000_000
# Sleeps, then works until it is told to end. Says when it went to sleep, when it was awake, when it
# ends, and how long it ran between the last two: others take its core as well.
SLEEPER = f"""
import select, sys, time
sys.stdin.readline()
slept = time.monotonic_ns()
time.sleep({SLEEP_NS} / 1e9)
awake, before = time.monotonic_ns(), time.thread_time_ns()
print("awake", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    pass
end, ran = time.monotonic_ns(), time.thread_time_ns() - before
print(slept, awake, end, ran, flush=True)
"""


def test_a_wait_whose_end_no_hook_told_is_known_all_the_same() -> None:
    """What a thread has run since says when it came back: to the point, but for what others ran."""
    waits, (slept_ns, awake_ns, end_ns, ran_ns) = woken_unseen()
    assert len(waits) == 1
    assert int(waits[0]["start_ns"]) >= slept_ns
    ended_ns = int(duration_end(waits)[0])
    others_ns = end_ns - awake_ns - ran_ns
    assert slept_ns + SLEEP_NS - 1_000_000 <= ended_ns < awake_ns + others_ns + ran_ns / 2


def woken_unseen() -> tuple[Records, list[int]]:
    """The sleep of a program that woke while no hook looked, and what the program said."""
    switch = "offcpu__switch"
    probes = loaded(ProbeSession(Settings()))
    sleeper = subprocess.Popen(
        [sys.executable, "-c", SLEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert sleeper.stdin is not None
        assert sleeper.stdout is not None
        probes.seed([sleeper.pid])
        sleeper.stdin.write("\n")
        sleeper.stdin.flush()
        await_wait(probes, sleeper.pid, Wait.TIMER)
        library().bpf_link__destroy(probes._loaded.named_links.pop(switch))
        assert sleeper.stdout.readline() == "awake\n"
        probes._attach_program(switch, probes._loaded.programs[switch])
        time.sleep(0.1)
        said, _ = sleeper.communicate("\n")
        waits = probes.events.drain()
    finally:
        probes.close()
        sleeper.kill()
        sleeper.wait()
    waits = waits[(waits["kind"] == Kind.OFFCPU) & (waits["tid"] == sleeper.pid)]
    return waits[waits["flags"] == Wait.TIMER], [int(word) for word in said.split()]


def await_wait(probes: ProbeSession, tid: int, reason: Wait) -> None:
    until = time.monotonic() + 10
    while True:
        slot = probes.threads[probes.threads["tid"] == tid]
        if int(slot["off_ns"].sum()) and slot["off_reason"].tolist() == [reason]:
            return
        assert time.monotonic() < until
        time.sleep(0.01)


def test_without_forks_nothing_can_be_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    without_tracepoints(monkeypatch, "sched_process_fork")
    with pytest.raises(Unsupported) as raised:
        ProbeSession(Settings()).load()
    assert "process tree" in raised.value.message
    assert raised.value.minimum_kernel
    assert raised.value.next_step


def test_no_btf_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Without:
        """libbpf, on a kernel that has no types."""

        def __getattr__(self, name: str) -> object:
            return getattr(libbpf.library(), name)

        def btf__load_vmlinux_btf(self) -> None:
            return None

    monkeypatch.setattr(types, "library", Without)
    with pytest.raises(Unsupported) as raised:
        ProbeSession(Settings(loader="libbpf")).load()
    assert "BTF" in raised.value.message
    assert "--loader bcc" in raised.value.next_step
    monkeypatch.setattr(session, "VMLINUX", tmp_path / "none")
    monkeypatch.setattr(headers, "bcc_folder", lambda: None)
    for wsl in (False, True):
        monkeypatch.setattr(session, "is_wsl", lambda wsl=wsl: wsl)
        with pytest.raises(Unsupported) as raised:
            ProbeSession(Settings()).load()
        assert "BTF" in raised.value.message
        assert "python3-bpfcc" in raised.value.next_step
        assert ("wsl --update" in raised.value.next_step) == wsl


def test_objects_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        session.ProbeObject.__init__, "__defaults__", (tmp_path / "none.bpf.o", None)
    )
    with pytest.raises(Unsupported) as raised:
        ProbeSession(Settings()).load()
    assert "not built" in raised.value.message


def test_closing_takes_every_program_away() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        loaded(ProbeSession(Settings())).close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1


def test_fault_handler_is_found() -> None:
    begin, end = kernel_function("handle_mm_fault") or (0, 0)
    assert 0 < end - begin < 1 << 16


def test_no_system_call_is_listed_twice() -> None:
    for machine in ("x86_64", "aarch64"):
        classes, waits = call_tables(machine)
        assert len(classes) == len(waits) == 512
    assert syscall_name(257, "x86_64") == "openat"
    assert syscall_name(56, "aarch64") == "openat"
