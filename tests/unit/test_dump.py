"""Every recorded fact is dumped once, decoded by its kind, in the order things happened."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttftprof.events import (
    EVENT,
    FILE_ROW,
    THREAD_ROW,
    Family,
    Kind,
    MmapFlag,
    ReadFlag,
    Records,
    RemoteFlag,
    Wait,
    kernel_dev,
)
from ttftprof.kernel.table import SYSCALLS
from ttftprof.recording import Reader, Source, Writer
from ttftprof.reports.dump import EVENT_NAMES, KINDS, Choice, dump, event_line, in_order

START_NS = 1_000_000_000
MS = 1_000_000
DEV, INO = kernel_dev(8, 1), 4711
PATH = "/models/a b.gguf"
NONE = (1 << 64) - 1


def event(kind: int, start_ms: float = 0, duration_ns: int = 0, **fields: int) -> dict[str, int]:
    row = dict.fromkeys(EVENT.names or (), 0)
    row |= {"kind": kind, "start_ns": START_NS + int(start_ms * MS), "duration_ns": duration_ns}
    return row | {"tgid": 100, "tid": 101} | fields


def packed(*events: dict[str, int]) -> Records:
    return np.array([tuple(row[n] for n in EVENT.names or ()) for row in events], EVENT)


def nowhere(_dev: int, _ino: int) -> dict[str, Any]:
    return {}


def decoded(kind: int, **fields: int) -> dict[str, Any]:
    return event_line(event(kind, **fields), nowhere).fields


# -- decoding ---------------------------------------------------------------------------------

CASES: list[tuple[Kind, dict[str, int], dict[str, Any]]] = [
    (Kind.FORK, {"a": 7, "b": 8}, {"parent_tgid": 7, "parent_tid": 8}),
    (Kind.EXEC, {}, {}),
    (Kind.EXEC, {"flags": 1}, {"flags": "successor"}),
    (
        Kind.THREAD_END,
        {"a": 3, "b": 2, "ino": 99},
        {"cpu_ns": 99, "minor_faults": 3, "major_faults": 2},
    ),
    (Kind.PROCESS_EXIT, {"a": 7 << 8}, {"status": 7}),
    (Kind.PROCESS_EXIT, {"a": 0}, {"status": 0}),
    (Kind.PROCESS_EXIT, {"a": 9}, {"signal": "SIGKILL"}),
    (Kind.PROCESS_EXIT, {"a": 11 | 0x80}, {"signal": "SIGSEGV"}),
    (Kind.SIGNAL, {"flags": 15, "a": 55}, {"signal": "SIGTERM", "from_tgid": 55}),
    (Kind.SIGNAL, {"flags": 99, "a": 55}, {"signal": "99", "from_tgid": 55}),
    (Kind.OFFCPU, {"flags": Wait.STORAGE, "a": 0}, {"reason": "storage", "syscall": "read"}),
    (Kind.OFFCPU, {"flags": Wait.RUNNABLE, "a": NONE}, {"reason": "runnable"}),
    (Kind.OFFCPU, {"flags": 77, "a": 500}, {"reason": "77", "syscall": 500}),
    (Kind.OPEN, {"a": 10, "b": 3}, {"size_bytes": 10, "cached_pages": 3}),
    (Kind.OPEN, {"flags": 1}, {"size_bytes": 0, "cached_pages": 0, "flags": "direct"}),
    (
        Kind.MMAP,
        {"a": 4096, "b": 0x7F00, "flags": MmapFlag.POPULATE | MmapFlag.WRITE},
        {"length_bytes": 4096, "address": "0x7f00", "flags": "populate|write"},
    ),
    (
        Kind.MMAP,
        {"a": 4096, "b": 12, "flags": MmapFlag.FAILED | 64},
        {"length_bytes": 4096, "errno": 12, "flags": "failed|0x40"},
    ),
    (Kind.MUNMAP, {"a": 1, "b": 16}, {"length_bytes": 1, "address": "0x10"}),
    (
        Kind.MADVISE,
        {"a": 1, "b": 16, "flags": 3},
        {"advice": "willneed", "length_bytes": 1, "address": "0x10"},
    ),
    (
        Kind.FADVISE,
        {"a": 1, "b": 2, "flags": 0x100},
        {"advice": "readahead", "length_bytes": 1, "offset_bytes": 2},
    ),
    (Kind.FADVISE, {"flags": 77}, {"advice": 77, "length_bytes": 0, "offset_bytes": 0}),
    (
        Kind.READ,
        {"a": 131072, "b": 5, "flags": ReadFlag.DIRECT | ReadFlag.IO_URING},
        {"bytes": 131072, "offset_bytes": 5, "flags": "direct|io_uring"},
    ),
    (Kind.TOUCH, {}, {}),
    (
        Kind.BLOCK,
        {"a": 4096, "b": 8, "flags": 32, "dev": DEV, "ino": INO},
        {"disk": "8:1", "ino": INO, "bytes": 4096, "sector": 8, "in_flight": 32},
    ),
    (Kind.LISTEN, {"a": 8080}, {"port": 8080}),
    (
        Kind.CONN,
        {"ino": 0xFFFF888800000000, "a": 8080 << 16 | 51000, "flags": 7},
        {
            "state": "close",
            "socket": "0xffff888800000000",
            "local_port": 8080,
            "remote_port": 51000,
        },
    ),
    (
        Kind.CONN,
        {"flags": 99},
        {"state": 99, "socket": "0x0", "local_port": 0, "remote_port": 0},
    ),
    *(
        (kind, {"ino": 1, "a": 1 << 16 | 2}, {"socket": "0x1", "local_port": 1, "remote_port": 2})
        for kind in (Kind.FORWARD, Kind.CONNECT, Kind.ACCEPT)
    ),
    (Kind.MARK_ENTER, {"flags": 3, "a": 512}, {"mark": "decode", "value": 512}),
    (Kind.MARK_EXIT, {"flags": 999, "a": NONE}, {"mark": 999, "value": -1}),
    (
        Kind.HELD,
        {"a": 10, "b": 3, "flags": 1},
        {"how": "open", "size_bytes": 10, "cached_pages": 3},
    ),
    (Kind.HELD, {}, {"how": "mapped", "size_bytes": 0, "cached_pages": 0}),
    (
        Kind.REMOTE,
        {"flags": Family.NFS | RemoteFlag.FAILED, "a": 262144 << 32 | 1000, "b": 5},
        {
            "family": "nfs",
            "offset_bytes": 5,
            "asked_bytes": 262144,
            "got_bytes": 1000,
            "flags": "failed",
        },
    ),
    (
        Kind.REMOTE_SPLIT,
        {"flags": 2, "a": 30, "b": 100},
        {"queue_ns": 30, "total_ns": 100, "times_sent": 2},
    ),
    (
        Kind.REMOTE_SPLIT,
        {"flags": 1, "a": 30, "b": 8 << 48 | 100},
        {"queue_ns": 30, "total_ns": 100, "times_sent": 1, "connection": 7},
    ),
    (
        Kind.REMOTE_STARVED,
        {"flags": Family.SMB, "a": 0, "b": 512},
        {"family": "smb", "credits": 0, "in_flight": 512},
    ),
    (
        Kind.MARK_ENTER,
        {"flags": 122, "a": 1 << 20, "b": 4096},
        {"driver_call": "cuMemcpyHtoD", "value": 1 << 20, "second": 4096},
    ),
    (
        Kind.DEVICE,
        {"flags": 1, "dev": 195 << 20 | 255, "b": 7},
        {"family": "nvidia", "device": "195:255", "result": 7},
    ),
    (
        Kind.DEVICE,
        {"flags": 3, "b": (1 << 64) - 2},
        {"family": "dri", "device": None, "result": -2},
    ),
    (
        Kind.DEVICE,
        {"flags": 16, "dev": 195 << 20, "a": 0x46, "b": 0},
        {"device": "195:0", "ioctl": 0x46, "result": 0},
    ),
]


@pytest.mark.parametrize(("kind", "given", "expected"), CASES, ids=lambda v: getattr(v, "name", ""))
def test_an_event_is_decoded_by_its_kind(
    kind: Kind, given: dict[str, int], expected: dict[str, Any]
) -> None:
    assert decoded(kind, **given) == expected


def test_every_kind_is_decoded() -> None:
    assert {kind for kind, _, _ in CASES} == set(Kind) - {Kind.NONE}
    assert set(EVENT_NAMES) == {kind.name.lower() for kind in Kind} - {"none"}


def test_every_known_system_call_has_its_name() -> None:
    for call in SYSCALLS:
        if call.x86_64 is not None:
            shown = decoded(Kind.OFFCPU, a=call.x86_64)["syscall"]
            assert isinstance(shown, str)


def test_what_no_version_knows_is_shown_as_it_is() -> None:
    line = event_line(event(999, flags=1, dev=2, ino=3, a=4, b=5), nowhere)
    assert line.name == "999"
    assert line.fields == {"flags": 1, "dev": 2, "ino": 3, "a": 4, "b": 5}


@given(data=st.binary(min_size=56, max_size=56))
def test_any_record_is_some_line(data: bytes) -> None:
    row = dict(zip(EVENT.names or (), np.frombuffer(data, EVENT)[0].tolist(), strict=True))
    line = event_line(row, nowhere)
    assert json.dumps(line.fields)


# -- order ------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(0, 999), max_size=20), max_size=12),
    st.integers(0, 900),
)
def test_records_late_by_less_than_a_batch_come_in_order(
    batches: list[list[int]], lateness: int
) -> None:
    """Batch n holds stamps from 1000 n − lateness on, in any order."""
    made = [
        packed(*(event(Kind.TOUCH, start_ns=1000 * (n + 1) + s - lateness) for s in stamps))
        for n, stamps in enumerate(batches)
    ]
    ordered = [
        int(r) for batch in in_order(made, lambda rows: rows["start_ns"]) for r in batch["start_ns"]
    ]
    assert ordered == sorted(int(s) for batch in made for s in batch["start_ns"])


# -- the whole --------------------------------------------------------------------------------


def thread_row(ns: int, **counters: int) -> Records:
    rows = np.zeros(1, THREAD_ROW)
    rows["ns"], rows["tid"], rows["tgid"], rows["since_ns"] = ns, 101, 100, START_NS
    rows["short_ns"][0][Wait.LOCK], rows["short_count"][0][Wait.LOCK] = 2500, 3
    for name, value in counters.items():
        rows[name] = value
    return rows


def file_row(ns: int) -> Records:
    rows = np.zeros(1, FILE_ROW)
    rows["ns"], rows["dev"], rows["ino"], rows["reads"] = ns, DEV, INO, 23
    return rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two batches; an off-CPU interval that began before all else and ended after the opens."""
    path = tmp_path / "a.ttft"
    writer = Writer(path)
    writer.set_meta("start_ns", START_NS)
    writer.set_source(Source("block", "degraded", "no tracepoint", "depth is unknown"))
    writer.set_lost("events ring full", 3)
    writer.add_fact("file", START_NS + 5 * MS, {"dev": DEV, "ino": INO, "path": PATH, "tgid": 100})
    writer.add_fact("exchange", START_NS + MS // 2, {"tgid": 200, "endpoint": "/v1/x"})
    file = {"dev": DEV, "ino": INO}
    writer.add_batch(
        "events",
        packed(
            event(Kind.OPEN, 1.25, **file),
            event(Kind.FORK, 2, tgid=200, tid=200, a=100, b=101),
            event(Kind.OFFCPU, -1, 4 * MS + 500, flags=Wait.STORAGE, a=0, **file),
        ),
    )
    writer.add_batch("events", packed(event(Kind.PROCESS_EXIT, 6, a=9)))
    writer.add_batch("threads", thread_row(START_NS + 4 * MS, min_flt=7))
    writer.add_batch("files", file_row(START_NS + 4 * MS + 1))
    writer.close(complete=True)
    return path


def text(path: Path, form: str = "text", **choice: Any) -> list[str]:
    out = io.StringIO()
    with Reader(path) as reader:
        dump(reader, out, Choice(**choice), form)
    return out.getvalue().splitlines()


def objects(path: Path, **choice: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text(path, "jsonl", **choice)]


def test_the_whole_dump(path: Path) -> None:
    assert text(path) == [
        "lost events ring full  count=3",
        'source block  state=degraded reason="no tracepoint" lost="depth is unknown"',
        "meta complete  value=true",
        "meta start_ns  value=1000000000",
        "    0.000 500  fact exchange                     tgid=200 endpoint=/v1/x",
        '    0.001 250  event open          100/101       dev=8:1 ino=4711 path="/models/a b.gguf" '
        "size_bytes=0 cached_pages=0",
        "    0.002 000  event fork          200/200       parent_tgid=100 parent_tid=101",
        "    0.003 000  event offcpu        100/101       duration=4.000ms dev=8:1 ino=4711 "
        'path="/models/a b.gguf" reason=storage syscall=read',
        "    0.004 000  thread counters     100/101       since_ns=1000000000 min_flt=7 "
        "short.lock=2.500us short_count.lock=3",
        '    0.004 000  file counters                     dev=8:1 ino=4711 path="/models/a b.gguf" '
        "reads=23",
        "    0.005 000  fact file                         dev=8388609 ino=4711 "
        'path="/models/a b.gguf" tgid=100',
        "    0.006 000  event process_exit  100/101       signal=SIGKILL",
    ]


def test_jsonl_has_absolute_times_and_exact_values(path: Path) -> None:
    [wait] = objects(path, kinds=frozenset({"events"}), events=frozenset({"offcpu"}))
    assert wait == {
        "kind": "event",
        "name": "offcpu",
        "ns": START_NS + 3 * MS + 500,
        "since_start_ns": 3 * MS + 500,
        "start_ns": START_NS - MS,
        "duration_ns": 4 * MS + 500,
        "tgid": 100,
        "tid": 101,
        "fields": {
            "duration_ns": 4 * MS + 500,
            "dev": "8:1",
            "ino": INO,
            "path": PATH,
            "reason": "storage",
            "syscall": "read",
        },
    }
    stamps = [line["ns"] for line in objects(path) if "ns" in line]
    assert stamps == sorted(stamps)
    assert len(stamps) == 8


@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_alone(path: Path, kind: str) -> None:
    found = {line["kind"] for line in objects(path, kinds=frozenset({kind}))}
    assert found == {kind if kind in ("meta", "lost") else kind.removesuffix("s")}


def test_one_process_alone(path: Path) -> None:
    lines = objects(path, tgid=200)
    assert [(line["kind"], line["name"]) for line in lines] == [
        ("fact", "exchange"),
        ("event", "fork"),
    ]


def test_a_limit(path: Path) -> None:
    assert text(path, limit=3) == text(path)[:3]
    assert text(path, limit=0) == []


def test_a_control_character_moves_no_terminal(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.ttft")
    writer.add_fact("exec", 1, {"tgid": 1, "path": "/tmp/\x1b[2Jx\ny"})
    writer.close(complete=True)
    [line] = text(tmp_path / "a.ttft", kinds=frozenset({"facts"}))
    assert "\\u001b" in line


def test_a_stamp_before_the_start_is_negative(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.ttft")
    writer.set_meta("start_ns", START_NS)
    writer.add_fact("mark", START_NS - 1_500_000, {})
    writer.close(complete=True)
    [line] = text(tmp_path / "a.ttft", kinds=frozenset({"facts"}))
    assert line.split("  ")[-2].endswith("-0.001 500") or "-0.001 500" in line


# -- the program ------------------------------------------------------------------------------


def run(*arguments: str, command: str = "dump") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ttftprof", command, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_dumps(path: Path) -> None:
    assert run(str(path)).stdout.splitlines() == text(path)
    assert run(str(path), "--kind", "all").stdout.splitlines() == text(path)
    forks = run(str(path), "--event", "FORK", "--event", "open", "--format", "jsonl").stdout
    assert [json.loads(line)["name"] for line in forks.splitlines()] == ["open", "fork"]
    done = run(str(path), "--kind", "lost", "--kind", "sources", "--limit", "1")
    assert done.stdout == "lost events ring full  count=3\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--kind", "nonsense"), 2),
        (("--event", "nonsense"), 2),
        (("--event", "fork", "--kind", "meta"), 2),
        (("--tgid", "-1"), 2),
    ],
)
def test_options_that_make_no_sense(path: Path, arguments: tuple[str, ...], code: int) -> None:
    done = run(str(path), *arguments)
    assert done.returncode == code
    assert not done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("content", [b"", b"no recording"])
def test_a_file_that_is_no_recording(tmp_path: Path, content: bytes) -> None:
    other = tmp_path / "other"
    other.write_bytes(content)
    done = run(str(other))
    assert done.returncode == 6
    assert "next: " in done.stderr


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "long.ttft"
    writer = Writer(path)
    for n in range(40):
        writer.add_batch("events", packed(*(event(Kind.TOUCH, n + s / 100) for s in range(100))))
    writer.close(complete=True)
    dumping = subprocess.Popen(
        [sys.executable, "-m", "ttftprof", "dump", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert dumping.stdout is not None
    assert dumping.stderr is not None
    dumping.stdout.readline()
    dumping.stdout.close()
    assert dumping.stderr.read() == b""
    dumping.stderr.close()
    assert dumping.wait(30) == 0


def test_a_full_disk_under_the_output_is_an_error(path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ttftprof", "dump", str(path)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 7
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_the_shell(shell: str) -> None:
    done = run(shell, command="completion")
    assert done.returncode == 0
    assert "_TTFTPROF_COMPLETE" in done.stdout
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)
    assert run("tcsh", command="completion").returncode == 2
