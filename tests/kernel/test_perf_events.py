"""Where the kernel opens events for CAP_SYS_ADMIN alone (Debian, Ubuntu), a helper that keeps it
opens them. This kernel refuses nobody, so the test refuses the recorder; scripts/vm-test shows the
same where Debian's kernel does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from ttftprof.events import Kind
from ttftprof.kernel import libbpf, perf_events
from ttftprof.kernel.libbpf import BpfError
from ttftprof.kernel.perf_events import Opener
from ttftprof.kernel.session import ProbeSession, Settings
from ttftprof.sources.libraries import symbol_offsets
from workloads.build import build_library

pytestmark = pytest.mark.kernel

CALLS, COOKIE, FIRST_CPU = 23, 7, 0
SYMBOL = "work_stamps"
CALL = f"""
import ctypes, sys
sys.stdin.readline()
room = ctypes.create_string_buffer(4096)
for _ in range({CALLS}):
    ctypes.CDLL(sys.argv[1]).{SYMBOL}(room)
"""


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProbeSession]:
    """A session that has given up what the kernel wants for events; its helper has not."""
    monkeypatch.setattr(perf_events, "are_for_admin_only", lambda: True)

    def cannot(*_: object) -> NoReturn:
        raise BpfError("many in one link", errno.EOPNOTSUPP)

    def refused(*_: object) -> None:
        ctypes.set_errno(errno.EACCES)

    def refuses(*_: object) -> NoReturn:
        raise BpfError("perf_event_open", errno.EACCES)

    session = ProbeSession(Settings())
    try:
        session.load()
        session.attach()
        session.keep_helpers()
        monkeypatch.setattr(libbpf, "link_uprobes", cannot)
        monkeypatch.setattr(libbpf.library(), "bpf_program__attach_uprobe_opts", refused)
        monkeypatch.setattr(libbpf, "open_clock_event", refuses)
        yield session
    finally:
        session.close()


def test_calls_of_a_library_that_comes_late_are_seen(probes: ProbeSession, tmp_path: Path) -> None:
    library = build_library(tmp_path)
    caller = subprocess.Popen(
        [sys.executable, "-c", CALL, str(library)], stdin=subprocess.PIPE, text=True
    )
    probes.seed([caller.pid])
    probes.attach_marks(str(library), [(symbol_offsets(library, {SYMBOL})[SYMBOL], COOKIE)])
    caller.communicate("go\n", timeout=60)
    assert caller.returncode == 0
    events = probes.events.drain()
    for kind in (Kind.MARK_ENTER, Kind.MARK_EXIT):
        assert int((events["kind"] == kind).sum()) == CALLS


def test_a_cpu_that_comes_on_is_looked_at(probes: ProbeSession) -> None:
    libbpf.library().bpf_link__destroy(probes._loaded.named_links.pop(f"tick {FIRST_CPU}"))
    del probes._tick_fds[FIRST_CPU]
    probes.follow_cpus()
    assert probes.states["cpu"].state == "ok"
    assert f"CPU {FIRST_CPU} is looked at since" in probes.states["cpu"].reason


def test_the_helper_says_what_it_was_refused_and_holds_nothing(tmp_path: Path) -> None:
    opener = Opener()
    try:
        with pytest.raises(BpfError) as told:
            opener.clock(cpu=100_000, hz=97)
        assert told.value.errno in (errno.EINVAL, errno.ENODEV)
        with pytest.raises(BpfError) as told:
            opener.uprobe(str(tmp_path / "none.so"), 0, False)
        assert told.value.errno == errno.ENOENT
        event = opener.clock(FIRST_CPU, 97)
        assert "perf_event" in str(Path(f"/proc/self/fd/{event}").readlink())
        os.close(event)
        [helper] = psutil.Process().children()
        assert all("perf_event" not in str(fd.readlink()) for fd in descriptors(helper.pid))
        status = Path(f"/proc/{helper.pid}/status").read_text()
        assert "CapEff:\t0000000000200000\n" in status  # CAP_SYS_ADMIN
    finally:
        opener.close()


def test_a_helper_that_was_killed_costs_only_what_it_was_for() -> None:
    opener = Opener()
    [helper] = psutil.Process().children()
    helper.kill()
    try:
        with pytest.raises(BpfError):
            opener.clock(FIRST_CPU, 97)
    finally:
        opener.close()


def descriptors(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/fd").iterdir())
