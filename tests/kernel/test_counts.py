"""Prime counts show as such, and agree with what the kernel tells by other ways."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kernel.support import Recording, recording
from ttftprof.events import LOST, Kind, Records, Wait
from ttftprof.recorder import ACTIVE_LOOKS
from workloads.cache import make_model
from workloads.counted import (
    ANONYMOUS_PAGES,
    FILE_PAGES,
    FORKS,
    MMAPS,
    READS,
    SLEEPS,
    STORM_THREADS,
    THREADS,
    Program,
    started,
)
from workloads.scripted import go, heard, scripted

pytestmark = pytest.mark.kernel

MODEL_BYTES = 8 * (1 << 20) + 4099
UNSEEN = 8  # switches before the first look and after the last


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "counted.weights", MODEL_BYTES)


def record(mode: str, model: Path) -> tuple[Recording, dict[str, dict[str, int]], Program]:
    """Runs one counted program under the recorder; its summary with it."""
    path = model.with_suffix(".ttft")
    with started(mode, model) as program, recording(path, "--pid", str(program.pid)) as seen:
        summary = program.go()
    return seen, summary, program


def events(seen: Recording, kind: Kind) -> Records:
    with seen.reader() as reader:
        assert reader.complete
        assert not reader.lost()
        found = reader.stream("events")
    wanted: Records = found[found["kind"] == kind]
    return wanted


def last_file_row(seen: Recording, model: Path) -> Records:
    with seen.reader() as reader:
        rows = reader.stream("files")
    last: Records = rows[rows["ino"] == model.stat().st_ino][-1]
    return last


def thread_growth(seen: Recording, pid: int, counter: str) -> int:
    """How much a counter of the program's thread grew while it was recorded."""
    with seen.reader() as reader:
        rows = reader.stream("threads")
    own = rows[rows["tid"] == pid][counter]
    return int(own[-1] - own[0])


def test_23_reads_are_23_reads(model: Path) -> None:
    seen, summary, _ = record("reads", model)
    row = last_file_row(seen, model)
    assert int(row["reads"]) == READS
    assert int(row["read_bytes"]) == summary["did"]["read_bytes"]
    reads = events(seen, Kind.READ)
    assert len(reads) == READS
    assert int(reads["a"].sum()) == summary["did"]["read_bytes"]
    assert np.all(np.diff(reads["b"].astype(np.int64)) > 0)


def test_29_mmaps_are_29_mmaps(model: Path) -> None:
    seen, _, _ = record("mmaps", model)
    maps = events(seen, Kind.MMAP)
    maps = maps[maps["ino"] == model.stat().st_ino]
    assert len(maps) == MMAPS
    assert set(maps["a"].tolist()) == {MODEL_BYTES}
    unmaps = events(seen, Kind.MUNMAP)
    assert Counter(unmaps["b"].tolist()) == Counter(maps["b"].tolist())
    assert int(last_file_row(seen, model)["mmaps"]) == MMAPS


def test_31_forks_are_31_processes(model: Path) -> None:
    seen, _, program = record("forks", model)
    forks = events(seen, Kind.FORK)
    assert len(forks) == FORKS
    assert set(forks["a"].tolist()) == {program.pid}
    children = set(forks["tgid"].tolist())
    exits = events(seen, Kind.PROCESS_EXIT)
    assert children <= set(exits["tgid"].tolist())


_ENDS_AT_ONCE = """
#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
static volatile int here;
static void *last(void *unused)
{
	__sync_fetch_and_add(&here, 1);
	while (here < 2)
		;
	return unused;
}
int main(void)
{
	char go;
	if (read(0, &go, 1) != 1)
		return 1;
	for (int i = 0; i < 499; i++) {
		pthread_t thread;
		if (!fork()) {
			pthread_create(&thread, 0, last, 0);
			last(0);
			pthread_exit(0);
		}
		wait(0);
	}
	(void)!write(1, "done\\n", 5);
	pause();
}
"""


def test_a_process_whose_threads_end_at_once_ends_once(tmp_path: Path) -> None:
    source, program = tmp_path / "ends.c", tmp_path / "ends"
    source.write_text(_ENDS_AT_ONCE)
    subprocess.run(["gcc", "-O2", "-pthread", "-o", str(program), str(source)], check=True)
    process = subprocess.Popen([str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin
    assert process.stdout
    try:
        with recording(tmp_path / "ends.ttft", "--pid", str(process.pid)) as seen:
            process.stdin.write(b"g")
            process.stdin.flush()
            assert process.stdout.readline() == b"done\n"
    finally:
        process.kill()
        process.communicate()
    ended = Counter(events(seen, Kind.PROCESS_EXIT)["tgid"].tolist())
    assert len(ended) == 499
    assert set(ended.values()) == {1}


def last_rows(seen: Recording, pid: int) -> Records:
    """The last row of every thread that began and ended while it was recorded."""
    with seen.reader() as reader:
        rows = reader.stream("threads")
    rows = rows[(rows["tgid"] == pid) & (rows["tid"] != pid)]
    rows = rows[np.argsort(rows["ns"], kind="stable")]
    lives = rows[["tid", "since_ns"]]
    _, last = np.unique(lives[::-1], return_index=True)
    found: Records = rows[::-1][last]
    return found


def test_1009_threads_of_a_millisecond_are_counted_each(model: Path) -> None:
    seen, _, program = record("threads", model)
    ends = events(seen, Kind.THREAD_END)
    ends = ends[ends["tid"] != program.pid]
    assert len(ends) == THREADS
    rows = last_rows(seen, program.pid)
    assert len(rows) == THREADS
    assert int(last_file_row(seen, model)["opens"]) == THREADS
    # A few of them more: libc's malloc counts the processors when it has many arenas, and threads
    # that come to it at once all do.
    opens = Counter(rows["opens"].tolist())
    assert set(opens) <= {1, 2}
    assert opens[2] <= 8
    waits = events(seen, Kind.OFFCPU)
    recorded = np.count_nonzero((waits["flags"] == Wait.TIMER) & (waits["tid"] != program.pid))
    slept = int(rows["short_count"][:, Wait.TIMER].sum()) + int(recorded)
    assert 0.9 * THREADS < slept <= THREADS  # a timer that fires at once puts nobody to sleep


def test_threads_that_nobody_looked_at_in_time_are_counted_as_lost(model: Path) -> None:
    """The recorder is held still while more threads end than the kernel keeps for it."""
    path = model.with_suffix(".ttft")
    with (
        started("threadstorm", model) as program,
        recording(path, "--pid", str(program.pid)) as seen,
    ):
        seen.process.send_signal(signal.SIGSTOP)
        program.go()
        seen.process.send_signal(signal.SIGCONT)
    with seen.reader() as reader:
        lost = reader.lost()
    assert set(lost) == {LOST[6]}
    known = last_rows(seen, program.pid)
    assert len(known) < STORM_THREADS <= len(known) + lost[LOST[6]]


def test_switches_are_sleeps_and_preemptions_as_the_kernel_counts_them(model: Path) -> None:
    path = model.with_suffix(".ttft")
    with (
        started("preempted", model) as program,
        recording(path, "--pid", str(program.pid)) as seen,
    ):
        before = switches(program.pid)
        program.go()
        after = switches(program.pid)
    waits = events(seen, Kind.OFFCPU)
    with seen.reader() as reader:
        rows = reader.stream("threads")
    own = rows[rows["tid"] == program.pid]
    short = own["short_count"][-1].astype(int) - own["short_count"][0].astype(int)
    counted = short + np.bincount(waits[waits["tid"] == program.pid]["flags"], minlength=len(short))
    preempted, slept = (b - a for a, b in zip(before, after, strict=True))
    assert preempted > 2 * UNSEEN
    assert counted[Wait.RUNNABLE] == pytest.approx(preempted, abs=UNSEEN)
    assert int(counted.sum()) - counted[Wait.RUNNABLE] == pytest.approx(slept, abs=UNSEEN)
    # One that is preempted on its way to sleep, until its time is over, never sleeps.
    assert SLEEPS - UNSEEN <= counted[Wait.TIMER] <= SLEEPS


_EXEC = """
import os, sys, threading
sys.stdin.readline()
threading.Thread(target=os.execv, args=(sys.argv[1], [sys.argv[1], "0.3"])).start()
threading.Event().wait()
"""


def test_whichever_thread_calls_exec_is_the_first_from_then_on(tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", _EXEC, shutil.which("sleep") or ""], stdin=subprocess.PIPE, text=True
    )
    with recording(tmp_path / "exec.ttft", "--pid", str(program.pid)) as seen:
        program.communicate("go\n", timeout=60)
    waits = events(seen, Kind.OFFCPU)
    slept = waits[(waits["flags"] == Wait.TIMER) & (waits["duration_ns"] > 250_000_000)]
    assert slept["tid"].tolist() == [program.pid]


def switches(pid: int) -> tuple[int, int]:
    """(preemptions, sleeps) of a process's first thread, as /proc tells them."""
    text = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return int(fields["nonvoluntary_ctxt_switches"]), int(fields["voluntary_ctxt_switches"])


def test_faults_agree_with_getrusage_and_proc(model: Path) -> None:
    seen, summary, program = record("faults", model)
    counted = summary["counted"]
    row = last_file_row(seen, model)
    assert int(row["added_pages"]) == FILE_PAGES
    assert int(row["faults"]) == FILE_PAGES
    assert thread_growth(seen, program.pid, "maj_flt") == pytest.approx(
        counted["major_faults"], abs=2
    )
    # The program's own reading of its counters and of the summary costs some minor faults.
    assert thread_growth(seen, program.pid, "min_flt") == pytest.approx(
        counted["minor_faults"], abs=64
    )
    assert counted["major_faults"] >= FILE_PAGES
    assert counted["minor_faults"] >= ANONYMOUS_PAGES


def test_block_bytes_agree_with_proc_io(model: Path) -> None:
    seen, summary, _ = record("faults", model)
    blocks = events(seen, Kind.BLOCK)
    blocks = blocks[blocks["ino"] == model.stat().st_ino]
    assert int(blocks["a"].sum()) == FILE_PAGES * 4096
    assert summary["counted"]["storage_bytes"] == FILE_PAGES * 4096


def test_two_servers_at_once_stay_apart(tmp_path: Path) -> None:
    one = make_model(tmp_path / "one.weights", MODEL_BYTES)
    two = make_model(tmp_path / "two.weights", MODEL_BYTES)
    with started("reads", one) as first, started("reads", two) as second:
        with (
            recording(tmp_path / "1.ttft", "--pid", str(first.pid)) as seen_one,
            recording(tmp_path / "2.ttft", "--pid", str(second.pid)) as seen_two,
        ):
            first.go()
            second.go()
        for seen, own, other in ((seen_one, first, two), (seen_two, second, one)):
            with seen.reader() as reader:
                found = reader.stream("events")
                rows = reader.stream("files")
            assert set(found["tgid"].tolist()) <= {own.pid} | kernel_workers(found)
            assert other.stat().st_ino not in set(rows["ino"].tolist())
            assert other.stat().st_ino not in set(found["ino"].tolist())


def kernel_workers(found: Records) -> set[int]:
    """Kernel threads that issue a file's block requests on the program's behalf."""
    return set(found[found["kind"] == Kind.BLOCK]["tgid"].tolist())


READS_ON = """
import os, sys, time
fd = os.open(sys.argv[1], os.O_RDONLY)
sys.stdin.readline()
began = time.monotonic()
while time.monotonic() < began + 2:
    os.pread(fd, 65536, 0)
print(f"done {time.monotonic() - began}", flush=True)
sys.stdin.readline()
"""


def test_what_goes_on_moving_is_looked_at_less_often(model: Path) -> None:
    """Five times each 20 ms, then each 50: edges bear stamps of their own."""
    path = model.with_suffix(".ttft")
    with (
        scripted(READS_ON, model) as program,
        recording(path, "--pid", str(program.pid)) as seen,
    ):
        go(program)
        took_ms = 1000 * float(heard(program).removeprefix("done "))
    with seen.reader() as reader:
        rows = reader.stream("files")
    looks = np.unique(rows["ns"][rows["ino"] == model.stat().st_ino])
    assert 5 < len(looks) <= ACTIVE_LOOKS + took_ms / 50 + 8
