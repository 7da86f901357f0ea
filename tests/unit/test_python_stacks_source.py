"""What py-spy writes and what of it is kept; when it is switched on; how its failures are told."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ttftprof.cli.record import command
from ttftprof.clock import now_ns
from ttftprof.errors import UsageError
from ttftprof.sources import python_stacks
from ttftprof.sources.python_stacks import (
    START_LIMIT_NS,
    Output,
    PySpyOutput,
    PythonStacks,
    frame_of,
    module_path,
    read_output,
    read_trace,
    refusal_of,
    segment_of,
)

TID = 4711
ROOT = f"thread ({TID}): MainThread"


def event(kind: str, name: str, ts: int, path: str = "a.py", line: int = 1) -> dict[str, Any]:
    return {
        "args": {"filename": path, "line": line},
        "cat": "py-spy",
        "name": name,
        "ph": kind,
        "pid": 1,
        "tid": 140_000,
        "ts": ts,
    }


def trace_of_two() -> list[dict[str, Any]]:
    """main → one for 30 ms, then main → two → leaf for 50 ms."""
    return [
        event("B", ROOT, 1_000, path=""),
        event("B", "main", 1_000),
        event("B", "one", 1_000, line=7),
        event("E", "one", 31_000, line=7),
        event("B", "two", 31_000, line=8),
        event("B", "leaf", 31_000, line=9),
        event("E", "leaf", 81_000, line=9),
        event("E", "two", 81_000, line=8),
        event("E", "main", 81_000),
        event("E", ROOT, 81_000, path=""),
    ]


# -- frames ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("/home/u/v/lib/python3.12/site-packages/torch/serialization.py", "torch/serialization.py"),
        ("/usr/lib/python3/dist-packages/yaml/loader.py", "yaml/loader.py"),
        ("/usr/lib/python3.11/threading.py", "python3.11/threading.py"),
        ("/opt/py/lib/python3.13t/json/decoder.py", "python3.13t/json/decoder.py"),
        ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap>"),
        ("<string>", "<string>"),
        ("/home/alice/secret project/server.py", "server.py"),
        ("/usr/lib/x86_64-linux-gnu/libc.so.6", "libc.so.6"),
        ("<the prompt: tell me>", "?"),
        ("a file named like a sentence.py", "?"),
        ("", "?"),
        ("x" * 500 + ".py", "?"),
    ],
)
def test_a_path_is_kept_within_its_library(path: str, kept: str) -> None:
    assert module_path(path) == kept


@pytest.mark.parametrize(
    ("name", "path", "kept"),
    [
        ("Serve.__init__", "serve.py", "Serve.__init__"),
        ("make.<locals>.handler", "serve.py", "make.<locals>.handler"),
        ("the user's text", "serve.py", "?"),
        ("at::native::copy_(at::Tensor&)", "/x/libtorch_cpu.so", "at::native::copy_(at::Tensor&)"),
        ("at::native::copy_(at::Tensor&)", "serve.py", "?"),
        ("0x7f4333aefa10", "/x/libc.so.6", "?"),
    ],
)
def test_a_name_is_a_name_or_unknown(name: str, path: str, kept: str) -> None:
    assert frame_of(name, path, 3)[1] == kept


# -- the trace ------------------------------------------------------------------------------------


def test_spans_of_a_trace() -> None:
    trace = read_trace(trace_of_two())
    names = [[trace.frames[i][1] for i in stack] for stack in trace.stacks]
    assert names == [["main", "one"], ["main", "two", "leaf"]]
    assert trace.spans == [(TID, 1_000, 30_000, 0), (TID, 31_000, 50_000, 1)]
    assert trace.end_us == 81_000


def test_a_thread_without_python_frames_gives_no_span() -> None:
    assert read_trace([event("B", ROOT, 5, path=""), event("E", ROOT, 900, path="")]).spans == []


def test_two_threads_do_not_mix() -> None:
    other = [dict(e, tid=9, name=e["name"].replace(str(TID), "99")) for e in trace_of_two()]
    mixed = [e for pair in zip(trace_of_two(), other, strict=True) for e in pair]
    spans = read_trace(mixed).spans
    assert sorted(spans) == sorted([*read_trace(trace_of_two()).spans, *read_trace(other).spans])


@pytest.mark.parametrize(
    "events", [[{}], [{"ts": "x", "tid": 1}], [3], [event("B", "f", 1) | {"args": None}]]
)
def test_what_is_no_trace_is_refused(events: Any) -> None:
    with pytest.raises(PySpyOutput):
        read_trace(events)


SAID = b"py-spy> Sampling process\n\n" + json.dumps(trace_of_two()).encode() + b"\n"
SAID += b"\npy-spy> Wrote chrome trace to '/dev/stdout'. Samples: 12 Errors: 3\n"


@pytest.mark.parametrize("cut", [1, 2, 7, 100, len(SAID)])
def test_output_in_any_pieces(cut: int) -> None:
    pieces = [(at, SAID[at : at + cut]) for at in range(0, len(SAID), cut)]
    output = read_output(pieces)
    assert output is not None
    assert list(output.events) == trace_of_two()
    assert (output.samples, output.errors) == (12, 3)
    # the piece in which its line began
    assert output.arrived_ns == SAID.index(b"[{") // cut * cut


def test_no_trace_at_all() -> None:
    assert read_output([(1, b"py-spy> Sampling process\n")]) is None


def test_a_trace_cut_short_is_refused() -> None:
    with pytest.raises(PySpyOutput):
        read_output([(1, b'[{"args":\n')])


def test_output_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_stacks, "MAX_OUTPUT_BYTES", 1000)
    with pytest.raises(PySpyOutput):
        read_output((ns, b"x" * 100) for ns in range(50))


def test_the_clock_of_a_segment_is_sandwiched() -> None:
    started, true_origin = 5_000_000_000, 5_004_000_000
    arrived = true_origin + 81_000_000 + 2_000_000  # two ms after py-spy's last stamp
    found = segment_of(Output(trace_of_two(), arrived, 12, 3), 42, started, native=False)
    assert found is not None
    begin_ns, fact = found
    assert fact["clock_error_ns"] == 3_000_000
    assert abs(begin_ns - (true_origin + 1_000_000)) <= fact["clock_error_ns"]
    assert fact["spans"] == [(TID, 0, 30_000, 0), (TID, 30_000, 50_000, 1)]
    assert fact["end_ns"] - begin_ns == 80_000_000


def test_a_segment_without_samples_is_none() -> None:
    assert segment_of(Output([], 10, 0, 0), 42, 5, native=False) is None


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Error: Permission Denied: Try running again with elevated permissions", "CAP_SYS_PTRACE"),
        ("Error: Operation not permitted (os error 1)", "CAP_SYS_PTRACE"),
        ("Error: Unsupported version of Python: 3.19.0", "pip install --upgrade py-spy"),
        ("Error: Failed to find python version from target process", "no interpreter"),
        ("Error: something new", "could not read"),
    ],
)
def test_a_refusal_names_its_reason(said: str, words: str) -> None:
    assert words in refusal_of(said)


# -- switching on and off -------------------------------------------------------------------------


def fake_py_spy(folder: Path, before: str = "", after: str = "time.sleep(20)") -> str:
    """A program in Python that notes how it was asked, and what it does before and after that."""
    program = folder / "py-spy"
    noted = f"open({str(folder / 'asked')!r}, 'a').write(' '.join(sys.argv) + chr(10))"
    lines = [f"#!{sys.executable} -S", "import signal, sys, time", before, noted, after]
    program.write_text("\n".join(lines) + "\n")
    program.chmod(0o755)
    return str(program)


def process(proc: Path, pid: int, exe: str) -> int:
    folder = proc / str(pid)
    (folder / "task" / str(pid)).mkdir(parents=True)
    (folder / "exe").symlink_to(exe)
    (folder / "maps").write_text("")
    (folder / "stat").write_text(f"{pid} (x) S 1 1 1 0 -1 0 0")
    return pid


TELLS = f"""
def tell(*_):
    sys.stdout.write({SAID.decode()!r})
    sys.stdout.flush()
    sys.exit(0)
signal.signal(signal.SIGINT, tell)
"""
DEAF = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
REFUSES = "sys.exit('Error: Unsupported version of Python: 3.19')"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    process(folder, 10, "/usr/bin/python3.11")
    process(folder, 20, "/usr/local/bin/llama-server")
    return folder


@pytest.fixture
def stacks(tmp_path: Path, proc: Path) -> Iterator[PythonStacks]:
    made = PythonStacks(program=fake_py_spy(tmp_path, before=TELLS), proc=proc)
    yield made
    made.stop()


def asked(tmp_path: Path) -> list[str]:
    file = tmp_path / "asked"
    return file.read_text().splitlines() if file.exists() else []


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def test_it_looks_while_a_request_waits(stacks: PythonStacks, tmp_path: Path) -> None:
    now = now_ns()
    stacks.follow({10, 20}, now)
    assert asked(tmp_path) == []
    stacks.follow({10, 20}, now, waited_for=True)
    until(lambda: len(asked(tmp_path)) == 1)
    stacks.follow({10, 20}, now, waited_for=True)
    stacks.follow({10, 20}, now + 10_000_000_000)
    until(lambda: not stacks._runs or not stacks._ended.empty())
    segments = stacks.drain()
    (line,) = asked(tmp_path)
    assert "--pid 10 " in line
    assert "--nonblocking" in line
    ((_, fact),) = segments
    assert (fact["pid"], fact["samples"], fact["errors"]) == (10, 12, 3)
    assert stacks.source().state == "ok"


def test_it_looks_while_a_process_starts(stacks: PythonStacks, tmp_path: Path) -> None:
    stacks.process_starts(10)
    stacks.follow({10, 20}, now_ns())
    until(lambda: len(asked(tmp_path)) == 1)
    stacks.process_listens()
    stacks.follow({10, 20}, now_ns() + 10_000_000_000)
    assert stacks.stop()


@pytest.mark.parametrize("ended_by", ["exit", "limit", "no python"])
def test_a_start_that_is_none(ended_by: str, stacks: PythonStacks, tmp_path: Path) -> None:
    stacks.process_starts(20 if ended_by == "no python" else 10)
    if ended_by == "exit":
        stacks.process_ends(10)
    stacks.follow({10, 20}, now_ns() + (2 * START_LIMIT_NS if ended_by == "limit" else 0))
    assert stacks.stop() == []
    assert asked(tmp_path) == []


def test_a_child_that_soon_executes_something_else_is_no_start(
    stacks: PythonStacks, tmp_path: Path
) -> None:
    stacks.process_starts(10, forked=True)
    stacks.follow({10}, now_ns())
    assert stacks.stop() == []
    assert asked(tmp_path) == []


def test_libpython_tells_an_interpreter_of_another_name(proc: Path) -> None:
    assert not python_stacks.runs_python(20, proc)
    (proc / "20/maps").write_text("7f00-7f01 r-xp 00000000 00:00 1 /usr/lib/libpython3.12.so.1.0\n")
    assert python_stacks.runs_python(20, proc)
    assert not python_stacks.runs_python(99, proc)


def test_switched_off_it_never_looks(tmp_path: Path, proc: Path) -> None:
    stacks = PythonStacks(enabled=False, program=fake_py_spy(tmp_path, before=TELLS), proc=proc)
    stacks.follow({10}, now_ns(), waited_for=True)
    assert stacks.stop() == []
    assert asked(tmp_path) == []
    assert "--no-python-stacks" in stacks.source().reason
    assert not stacks.source().lost


def test_without_python_nothing_is_missed(stacks: PythonStacks) -> None:
    stacks.follow({20}, now_ns(), waited_for=True)
    assert (stacks.source().state, stacks.source().lost) == ("absent", "")


def test_without_py_spy_the_next_step_is_named(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_stacks, "find_py_spy", lambda: None)
    stacks = PythonStacks(proc=proc)
    stacks.follow({10}, now_ns(), waited_for=True)
    source = stacks.source()
    assert (source.state, source.reason) == (
        "absent",
        "py-spy is not installed: pip install py-spy",
    )
    assert source.lost


def test_a_program_that_cannot_be_run_is_told(tmp_path: Path, proc: Path) -> None:
    stacks = PythonStacks(program=str(tmp_path / "gone"), proc=proc)
    stacks.follow({10}, now_ns(), waited_for=True)
    assert stacks.stop() == []
    assert "cannot be run" in stacks.source().reason


def test_refusals_are_told_once_they_stay(tmp_path: Path, proc: Path) -> None:
    program = fake_py_spy(tmp_path, after=REFUSES)
    stacks = PythonStacks(program=program, proc=proc)
    for number in range(1, 6):
        # each look an hour after the one before: the pause between them is over
        stacks.follow({10}, now_ns() + number * 3_600_000_000_000, waited_for=True)
        until(lambda: bool(stacks.drain()) or not stacks._runs)
    assert len(asked(tmp_path)) == 3
    assert stacks.source().state == "absent"
    assert "upgrade" in stacks.source().reason


def test_one_that_does_not_end_is_ended_by_force(
    tmp_path: Path, proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_stacks, "STOP_TIMEOUT_S", 0.1)
    program = fake_py_spy(tmp_path, before=DEAF)
    stacks = PythonStacks(program=program, proc=proc)
    stacks.follow({10}, now_ns(), waited_for=True)
    until(lambda: len(asked(tmp_path)) == 1)
    began = time.monotonic()
    assert stacks.stop() == []
    assert time.monotonic() - began < 2
    assert stacks.source().state == "absent"


def test_native_frames_alone_are_refused() -> None:
    with pytest.raises(UsageError, match="native frames"):
        command.main(["--native-stacks", "--no-python-stacks", "--pid", "1"], standalone_mode=False)
