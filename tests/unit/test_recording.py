"""A recording survives what happens to files: kills, full disks, cuts, flipped bits, strangers."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import unsupported
from ttftprof import recording
from ttftprof.columns import MAX_BATCH_BYTES, as_records, layout_of, length, pack, unpack
from ttftprof.errors import OutputError, RecordingError
from ttftprof.events import EVENT, FILE_ROW, THREAD_ROW, Records
from ttftprof.recording import APPLICATION_ID, VERSION, Reader, Source, Writer, filesystem_of

NOBODY = 65534
FLIPS = 400
LOG_FLIPS = 40
MEMORY_BOUND_BYTES = 64 << 20

Contents = dict[str, Any]


def records(count: int, dtype: np.dtype[Any] = EVENT, seed: int = 1) -> Records:
    """Rows of arbitrary bytes, which do not compress; only the stamps are such as clocks give."""
    rows = np.frombuffer(random.Random(seed).randbytes(count * dtype.itemsize), dtype).copy()
    rows["start_ns" if "start_ns" in (dtype.names or ()) else "ns"] >>= 2
    return rows


def write_sample(path: Path, batches: int = 12, complete: bool = True) -> Path:
    """A recording with something of everything in it."""
    writer = Writer(path)
    writer.set_meta("start_ns", 1_000)
    writer.set_source(Source("block", "degraded", "no tracepoint", "queue depth is unknown"))
    writer.set_lost("events ring full", 3)
    for number in range(batches):
        writer.add_batch("events", records(50 + number, seed=number))
        writer.add_batch("threads", records(5, THREAD_ROW, number))
        writer.add_batch("files", records(3, FILE_ROW, number))
        writer.add_fact("file", number, {"path": "/m/ä b.gguf", "ino": number})
        writer.commit()
    writer.close(complete)
    return path


def read_all(path: Path) -> Contents:
    with Reader(path) as reader:
        return {
            "meta": reader.meta,
            "complete": reader.complete,
            "sources": reader.sources(),
            "lost": reader.lost(),
            "facts": {kind: list(reader.facts(kind)) for kind in reader.fact_kinds()},
            **{stream: reader.stream(stream) for stream in recording.STREAMS},
        }


def refusal(path: Path) -> RecordingError:
    with pytest.raises(RecordingError) as caught:
        read_all(path)
    return caught.value


@contextmanager
def mounted(point: Path, *options: str) -> Iterator[Path]:
    """A mount made by the test, gone after it."""
    if os.geteuid() != 0:
        unsupported("mounting needs root")
    point.mkdir(exist_ok=True)
    subprocess.run(["mount", *options, str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


@contextmanager
def small_disk(point: Path, size: str) -> Iterator[Path]:
    with mounted(point, "-t", "tmpfs", "-o", f"size={size}", "tmpfs") as disk:
        yield disk


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    with mounted(folder, "--bind", str(folder)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        yield folder


@contextmanager
def as_nobody() -> Iterator[None]:
    if os.geteuid() != 0:
        unsupported("becoming another user needs root")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


# -- packed arrays ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [EVENT, THREAD_ROW, FILE_ROW], ids=["events", "threads", "files"])
@given(data=st.binary(max_size=4000), repeat=st.integers(1, 20))
def test_packed_arrays_come_back_as_they_were(
    dtype: np.dtype[Any], data: bytes, repeat: int
) -> None:
    whole = data * repeat
    count = len(whole) // dtype.itemsize
    rows = np.frombuffer(whole[: count * dtype.itemsize], dtype)
    codec, packed = pack(rows)
    assert np.array_equal(as_records(unpack(codec, packed, dtype, count), dtype), rows)


@given(
    codec=st.sampled_from(["columns", "columns+zlib", "lzma", ""]),
    data=st.binary(max_size=300),
    count=st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 6),
)
def test_arbitrary_bytes_are_an_array_or_an_error(codec: str, data: bytes, count: int) -> None:
    try:
        columns = unpack(codec, data, EVENT, count)
    except RecordingError:
        return
    assert length(columns) == count


def test_a_batch_that_swells_is_refused_before_it_does() -> None:
    codec, packed = pack(np.zeros(1_000_000, EVENT))
    assert codec == "columns+zlib"
    assert len(packed) < 300_000
    tracemalloc.start()
    try:
        for count in (100, MAX_BATCH_BYTES // EVENT.itemsize + 1):
            with pytest.raises(RecordingError, match="damaged"):
                unpack(codec, packed, EVENT, count)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# -- what was written is what is read ---------------------------------------------------------


def test_a_recording_holds_what_was_written(tmp_path: Path) -> None:
    contents = read_all(write_sample(tmp_path / "a.ttft", batches=3))
    assert contents["complete"]
    assert contents["meta"] == {"complete": True, "start_ns": 1_000}
    expected = np.concatenate([records(50 + n, seed=n) for n in range(3)])
    assert np.array_equal(contents["events"], expected)
    assert len(contents["threads"]) == 15
    assert contents["facts"] == {"file": [(n, {"path": "/m/ä b.gguf", "ino": n}) for n in range(3)]}
    assert contents["lost"] == {"events ring full": 3}
    assert contents["sources"] == [
        Source("block", "degraded", "no tracepoint", "queue depth is unknown")
    ]


def test_a_closed_recording_is_one_private_file(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "a.ttft")
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o600


def test_under_sudo_the_recording_belongs_to_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        unsupported("giving a file away needs root")
    monkeypatch.setenv("SUDO_UID", str(NOBODY))
    monkeypatch.setenv("SUDO_GID", str(NOBODY))
    status = write_sample(tmp_path / "a.ttft").stat()
    assert (status.st_uid, status.st_gid) == (NOBODY, NOBODY)


def test_a_stream_without_rows_is_empty_in_this_layout(tmp_path: Path) -> None:
    Writer(tmp_path / "a.ttft").close(complete=True)
    assert read_all(tmp_path / "a.ttft")["threads"].dtype == THREAD_ROW


def test_a_field_that_an_earlier_version_lacked_reads_as_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name in FILE_ROW.names or () if name != "mmaps"]
    earlier = np.dtype([(name, FILE_ROW[name]) for name in names])
    with monkeypatch.context() as then:
        then.setattr(recording, "STREAMS", {**recording.STREAMS, "files": earlier})
        writer = Writer(tmp_path / "a.ttft")
        writer.add_batch("files", records(4, earlier))
        writer.close(complete=True)
    rows = read_all(tmp_path / "a.ttft")["files"]
    assert rows.dtype == FILE_ROW
    assert np.array_equal(rows[names], records(4, earlier))
    assert not rows["mmaps"].any()


def test_a_recording_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.ttft")
    writer.add_batch("events", records(7))
    writer.commit()
    contents = read_all(tmp_path / "a.ttft")
    assert len(contents["events"]) == 7
    assert not contents["complete"]
    writer.close(complete=True)


def test_reading_may_stop_anywhere(tmp_path: Path) -> None:
    with Reader(write_sample(tmp_path / "a.ttft")) as reader:
        rows = reader.batches("events")
        next(rows)
    del rows  # a generator that complains now would fail the test


# -- kill -9 and the disk ---------------------------------------------------------------------

_ENDLESS_WRITER = """
import sys
import tracemalloc
from pathlib import Path
import numpy as np
from ttftprof import recording
from ttftprof.events import EVENT
recording._NO_WAL = set(sys.argv[2:])
writer = recording.Writer(Path(sys.argv[1]))
rng = np.random.default_rng(1)
total = 0
while True:
    batch = np.frombuffer(rng.bytes(500 * EVENT.itemsize), EVENT).copy()
    batch["start_ns"] >>= 2
    writer.add_batch("events", batch)
    writer.commit()
    total += len(batch)
    print(total, flush=True)
    for _ in range(150):  # more than the cache holds: reaches the file uncommitted
        writer.add_batch("events", batch)
    print("uncommitted", flush=True)
    writer._db.execute("ROLLBACK")
"""


def killed_recording(path: Path, after: int, *no_wal: str) -> int:
    """A recording whose writer was killed in a transaction; the rows it had committed."""
    with subprocess.Popen(
        [sys.executable, "-c", _ENDLESS_WRITER, str(path), *no_wal],
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout is not None
        committed = 0
        for line in writer.stdout:
            if line != "uncommitted\n":
                committed = int(line)
            elif committed >= after:
                break
        writer.send_signal(signal.SIGKILL)
    return committed


@pytest.mark.parametrize("log", ["wal", "journal"])
def test_kill_9_leaves_a_file_that_opens_with_every_committed_row(tmp_path: Path, log: str) -> None:
    path = tmp_path / "a.ttft"
    no_wal = [filesystem_of(tmp_path)] if log == "journal" else []
    committed = killed_recording(path, 2_000, *no_wal)
    assert path.with_name(f"a.ttft-{log}").stat().st_size
    contents = read_all(path)
    assert not contents["complete"]
    assert len(contents["events"]) in (committed, committed + 500)  # killed before it could say so


@pytest.mark.parametrize("log", ["wal", "journal"])
def test_the_log_of_a_killed_recorder_counts_in_a_read_only_folder_too(
    tmp_path: Path, log: str
) -> None:
    folder = tmp_path / "ro"
    folder.mkdir()
    no_wal = [filesystem_of(folder)] if log == "journal" else []
    committed = killed_recording(folder / "a.ttft", 1_000, *no_wal)
    for shared in folder.glob("*-shm"):
        shared.unlink()
    with read_only(folder):
        assert len(read_all(folder / "a.ttft")["events"]) >= committed


def test_a_recording_in_a_read_only_folder_reads(tmp_path: Path) -> None:
    folder = tmp_path / "ro"
    folder.mkdir()
    write_sample(folder / "a.ttft")
    with read_only(folder):
        assert read_all(folder / "a.ttft")["complete"]


def fill(writer: Writer, committed: list[int]) -> None:
    """Writes without end, and says how many rows of each batch were committed."""
    while True:
        writer.add_batch("events", records(200, seed=len(committed)))
        writer.commit()
        committed.append(200)


def test_a_full_disk_is_an_error_that_keeps_what_was_committed(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        writer = Writer(disk / "a.ttft")
        committed: list[int] = []
        with pytest.raises(OutputError, match="full") as caught:
            fill(writer, committed)
        writer.abandon()
        assert caught.value.exit_code == 7
        assert caught.value.next_step
        contents = read_all(disk / "a.ttft")
        assert len(contents["events"]) == sum(committed) > 0
        assert not contents["complete"]


def test_a_disk_full_from_the_start_is_an_error(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        (disk / "ballast").write_bytes(bytes(60 << 10))
        with pytest.raises(OutputError) as caught:
            Writer(disk / "a.ttft")
        assert caught.value.exit_code == 7


def test_a_recording_without_its_log_holds_what_was_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ttftprof.recording.FOLD_EVERY_S", 0.0)
    path = tmp_path / "a.ttft"
    writer = Writer(path)
    writer.add_batch("events", records(7))
    writer.commit()
    alone = tmp_path / "alone" / "a.ttft"
    alone.parent.mkdir()
    shutil.copyfile(path, alone)
    writer.close(complete=True)
    contents = read_all(alone)
    assert np.array_equal(contents["events"], records(7))
    assert not contents["complete"]
    assert "its log, a.ttft-wal, is not beside it" in contents["meta"]["ended_because"]
    assert "ended_because" not in read_all(path)["meta"]


def test_what_is_known_when_recording_begins_is_folded_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.ttft"
    writer = Writer(path)
    writer.set_meta("start_ns", 7)
    writer.settle()
    writer.commit()
    alone = tmp_path / "alone.ttft"
    shutil.copyfile(path, alone)
    writer.discard()
    assert read_all(alone)["meta"]["start_ns"] == 7


@pytest.mark.parametrize("bytes_there", [4096, 3 * 4096])
def test_half_a_recording_asks_for_its_log(tmp_path: Path, bytes_there: int) -> None:
    """Nothing was folded yet, or the fold was cut off."""
    path = tmp_path / "a b.ttft"
    writer = Writer(path)
    whole = path.read_bytes()
    writer.discard()
    assert len(whole) > bytes_there
    path.write_bytes(whole[:bytes_there])
    with pytest.raises(RecordingError) as caught:
        Reader(path)
    assert "its log, a b.ttft-wal, is not beside it" in caught.value.message
    assert "copy 'a b.ttft-wal'" in caught.value.next_step


def test_a_full_disk_says_where_the_rest_lies(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        writer = Writer(disk / "a.ttft")
        writer.settle()
        with pytest.raises(OutputError, match="full") as caught:
            fill(writer, [])
        assert f"{disk}/a.ttft-wal" in caught.value.next_step
        writer.abandon()


# -- the output -------------------------------------------------------------------------------


def refused_output(path: Path, overwrite: bool = False) -> OutputError:
    with pytest.raises(OutputError) as caught:
        Writer(path, overwrite)
    assert caught.value.exit_code == 7
    assert caught.value.next_step
    return caught.value


def test_an_existing_output_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.ttft"
    path.write_text("precious")
    assert "exists" in refused_output(path).message
    assert path.read_text() == "precious"
    folder = refused_output(tmp_path)
    assert folder.message.endswith("is a folder")
    assert "--force" not in folder.next_step


def test_force_replaces_the_output_and_what_a_killed_recorder_left_beside_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.ttft"
    killed_recording(path, 500)
    writer = Writer(path, overwrite=True)
    writer.add_batch("events", records(7))
    writer.close(complete=True)
    assert np.array_equal(read_all(path)["events"], records(7))
    assert list(tmp_path.iterdir()) == [path]


def test_force_replaces_no_file_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "a.ttft"
    writer = Writer(path)
    assert "being written by another recorder" in refused_output(path, overwrite=True).message
    writer.add_batch("events", records(7))
    writer.close(complete=True)
    assert np.array_equal(read_all(path)["events"], records(7))
    Writer(path, overwrite=True).discard()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("by_another", [False, True])
def test_a_file_that_goes_while_it_is_written_is_an_error(tmp_path: Path, by_another: bool) -> None:
    path = tmp_path / "a.ttft"
    writer = Writer(path)
    path.unlink()
    if by_another:
        path.write_text("precious")
    with pytest.raises(OutputError, match="removed or replaced while it was written"):
        writer.close(complete=True)
    assert not by_another or path.read_text() == "precious"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert "No such file or directory" in refused_output(tmp_path / "no" / "a.ttft").message


def test_an_output_that_is_a_folder_is_refused_even_by_force(tmp_path: Path) -> None:
    (tmp_path / "a.ttft").mkdir()
    refused_output(tmp_path / "a.ttft")
    refused_output(tmp_path / "a.ttft", overwrite=True)


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_at_the_output_is_not_followed(tmp_path: Path, dangling: bool) -> None:
    path, victim = tmp_path / "a.ttft", tmp_path / "victim"
    if not dangling:
        victim.write_text("precious")
    path.symlink_to(victim)
    refused_output(path)
    if not dangling:
        with pytest.raises(OutputError, match="no recording"):
            Writer(path, overwrite=True)
        assert path.is_symlink()
        assert victim.read_text() == "precious"
        return
    Writer(path, overwrite=True).close(complete=True)
    assert not path.is_symlink()
    assert not victim.exists()


def header_of(application: int) -> bytes:
    return b"SQLite format 3\0".ljust(68, b"\1") + application.to_bytes(4, "big")


@pytest.mark.parametrize(
    "other", [b"precious", b"SQLite format 3\0", header_of(0), header_of(7)], ids=repr
)
def test_force_replaces_no_file_of_another_program(tmp_path: Path, other: bytes) -> None:
    path = tmp_path / "a.ttft"
    path.write_bytes(other)
    with pytest.raises(OutputError) as error:
        Writer(path, overwrite=True)
    assert "no recording" in error.value.message
    assert error.value.next_step
    assert path.read_bytes() == other
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("was", [b"", header_of(APPLICATION_ID)], ids=["empty", "a damaged one"])
def test_force_replaces_what_is_empty_or_a_recording(tmp_path: Path, was: bytes) -> None:
    path = tmp_path / "a.ttft"
    path.write_bytes(was)
    Writer(path, overwrite=True).close(complete=True)
    with Reader(path) as reader:
        assert reader.complete


def test_a_recording_says_whose_it_is_before_it_is_folded(tmp_path: Path) -> None:
    """As kill -9 leaves it: all but the header may still be in the log beside the file."""
    writer = Writer(tmp_path / "a.ttft")
    assert (tmp_path / "a.ttft").read_bytes()[68:72] == APPLICATION_ID.to_bytes(4, "big")
    writer.close(complete=False)


def test_what_passes_is_replaced_and_the_last_stays(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.ttft")
    writer.add_batch("events", records(3))
    for count in (5, 2, 0, 4):
        writer.set_passing("events", records(count))
        writer.commit()
        with Reader(tmp_path / "a.ttft") as reader:
            assert len(reader.stream("events")) == 3 + count
    writer.close(complete=True)
    with Reader(tmp_path / "a.ttft") as reader:
        assert len(reader.stream("events")) == 3 + 4


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    with read_only(tmp_path / "ro"):
        assert "Read-only" in refused_output(tmp_path / "ro" / "a.ttft").message


def test_a_network_file_system_gets_no_write_ahead_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_NO_WAL", {filesystem_of(tmp_path)})
    writer = Writer(tmp_path / "a.ttft")
    writer.add_batch("events", records(7))
    writer.commit()
    assert not list(tmp_path.glob("*-wal"))
    writer.close(complete=True)
    assert len(read_all(tmp_path / "a.ttft")["events"]) == 7


# -- damage -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_sample(tmp_path_factory.mktemp("sample") / "a.ttft").read_bytes()


def reads_or_says_why(path: Path) -> bool:
    """Whether a damaged recording still reads; any other error than ours goes through."""
    try:
        read_all(path)
    except RecordingError:
        return False
    return True


def test_cut_anywhere_it_is_an_error(tmp_path: Path, sample: bytes) -> None:
    path = tmp_path / "cut.ttft"
    path.write_bytes(sample)
    cuts = range(len(sample) - 1024, 0, -1024)
    assert len(cuts) > 50
    for size in cuts:
        os.truncate(path, size)
        assert not reads_or_says_why(path), f"cut to {size} bytes it reads"


def test_a_flipped_bit_is_an_error_or_a_wrong_value(tmp_path: Path, sample: bytes) -> None:
    path = tmp_path / "flipped.ttft"
    generator = random.Random(7)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before, read = own_memory_bytes("VmRSS"), 0
    for _ in range(FLIPS):
        damaged = bytearray(sample)
        # Half of them where the structure is: the first pages hold the header and the schema.
        end = generator.choice([8192, len(sample)])
        damaged[generator.randrange(end)] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        read += reads_or_says_why(path)
    assert 0 < read < FLIPS
    assert own_memory_bytes("VmHWM") - before < MEMORY_BOUND_BYTES


def own_memory_bytes(field: str) -> int:
    """A size of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) << 10 for x in lines if x.startswith(f"{field}:"))


def test_flipped_bits_in_a_leftover_log_are_survived(tmp_path: Path) -> None:
    origin = tmp_path / "a.ttft"
    killed_recording(origin, 500)
    log = origin.with_name("a.ttft-wal").read_bytes()
    copy = tmp_path / "copy" / "a.ttft"
    copy.parent.mkdir()
    generator = random.Random(11)
    for _ in range(LOG_FLIPS):
        for leftover in copy.parent.iterdir():
            leftover.unlink()
        shutil.copyfile(origin, copy)
        damaged = bytearray(log)
        damaged[generator.randrange(len(log))] ^= 1 << generator.randrange(8)
        copy.with_name("a.ttft-wal").write_bytes(damaged)
        reads_or_says_why(copy)


HOSTILE = {
    "a fact nested too deep": f"INSERT INTO facts VALUES('x', 1, '{'[' * 100_000}')",
    "a fact that is no object": "INSERT INTO facts VALUES('x', 1, '[1]')",
    "a fact without a time": "INSERT INTO facts VALUES('x', 9e999, '{}')",
    "a loss that is no number": "INSERT INTO lost VALUES('x', '5 or more')",
    "meta that is no JSON": "INSERT INTO meta VALUES('x', '{')",
    "a batch without bytes": "INSERT INTO batches VALUES('events', 1, 1, 'columns', 'text')",
    "a batch of -1": "INSERT INTO batches VALUES('events', 1, -1, 'columns', x'')",
    "a batch of too many": "INSERT INTO batches VALUES('events', 1, 1 << 40, 'columns+zlib', x'')",
    "an unknown encoding": "INSERT INTO batches VALUES('events', 1, 0, 'lzma', x'')",
    "a layout with an unknown field": "UPDATE layouts SET layout = replace(layout, 'tid', 'tjd')",
    "a layout of objects": 'UPDATE layouts SET layout = \'[["tid", "|O", []]]\'',
    "a layout too wide": 'UPDATE layouts SET layout = \'[["tid", "<u8", [1000000000]]]\'',
    "a layout that is a word": "UPDATE layouts SET layout = '\"tid\"'",
    "a stream that no version had": "INSERT INTO layouts VALUES('x', '[]')",
    "a table that is gone": "DROP TABLE lost",
    "a view for a table": "DROP TABLE lost; CREATE VIEW lost AS WITH RECURSIVE t(place, count) AS "
    "(SELECT 'x', 1 UNION ALL SELECT place, count FROM t) SELECT * FROM t",
}


@pytest.mark.parametrize("statement", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_contents_are_an_error(tmp_path: Path, sample: bytes, statement: str) -> None:
    path = tmp_path / "a.ttft"
    path.write_bytes(sample)
    with sqlite3.connect(path) as db:
        db.executescript(statement)
    db.close()
    assert refusal(path).message.startswith((str(path), "a batch of", "the recording uses"))


# -- not ours, or not readable ----------------------------------------------------------------


def test_an_empty_file_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    (tmp_path / "a.ttft").touch()
    assert "is empty" in refusal(tmp_path / "a.ttft").message


@pytest.mark.parametrize("content", [b"x", b"SQLite format 3", b"\x7fELF" * 100, b"\0" * 5000])
def test_a_file_of_another_kind_is_not_ours(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.ttft").write_bytes(content)
    assert "is not a ttftprof recording" in refusal(tmp_path / "a.ttft").message


def stamped(path: Path, application: int, version: int) -> Path:
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA application_id={application}")
        db.execute(f"PRAGMA user_version={version}")
        db.execute("CREATE TABLE IF NOT EXISTS anything(x)")
    db.close()
    return path


def test_another_programs_database_is_not_ours(tmp_path: Path) -> None:
    path = stamped(tmp_path / "a.ttft", application=0x47504B47, version=VERSION)
    assert "of another program" in refusal(path).message


def test_a_newer_version_asks_for_an_update(tmp_path: Path) -> None:
    path = stamped(write_sample(tmp_path / "a.ttft"), APPLICATION_ID, VERSION + 1)
    error = refusal(path)
    assert "newer ttftprof" in error.message
    assert "upgrade" in error.next_step


@pytest.mark.parametrize("name", ["missing.ttft", "folder", "folder/below/a.ttft"])
def test_what_is_no_file_is_said_so(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    assert "does not exist or is no file" in refusal(tmp_path / name).message


def test_a_file_one_may_not_read_is_said_so(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "a.ttft")
    with as_nobody():
        error = refusal(path)
    assert "Permission denied" in error.message
    assert "chown" in error.next_step


def test_odd_names_are_no_obstacle(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "a b?mode=rw#ü%20.ttft")
    assert read_all(path)["complete"]


def test_the_layout_is_told_in_the_file(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "a.ttft")
    with sqlite3.connect(path) as db:
        layouts = dict(db.execute("SELECT stream, layout FROM layouts").fetchall())
    db.close()
    assert json.loads(layouts["events"]) == layout_of(EVENT)


def test_a_replaced_recording_comes_back_if_the_new_one_never_began(tmp_path: Path) -> None:
    path = tmp_path / "a.ttft"
    Writer(path).close(complete=True)
    before = path.read_bytes()
    Writer(path, overwrite=True).discard()
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.ttft"]


def test_a_replaced_recording_goes_once_the_new_one_began(tmp_path: Path) -> None:
    path = tmp_path / "a.ttft"
    Writer(path).close(complete=True)
    again = Writer(path, overwrite=True)
    again.settle()
    again.close(complete=True)
    assert [p.name for p in tmp_path.iterdir()] == ["a.ttft"]
    with Reader(path) as reader:
        assert reader.complete


def test_the_disk_is_not_waited_for_while_recording(tmp_path: Path) -> None:
    """An fsync makes ext4 write others' data, too, on the disk that may be the measured one."""
    script = f"""
from pathlib import Path
from ttftprof.recording import Writer
writer = Writer(Path({str(tmp_path / "quiet.ttft")!r}))
for number in range(50):
    writer.add_fact("process", number, {{}})
    writer._next_fold_s = 0.0
    writer.commit()
Path({str(tmp_path / "closing")!r}).touch()
writer.close(True)
"""
    trace = tmp_path / "trace"
    calls = ["strace", "-f", "-o", str(trace), "-e", "trace=fsync,fdatasync,openat"]
    subprocess.run([*calls, sys.executable, "-c", script], check=True)
    recording, closing = trace.read_text().split(str(tmp_path / "closing"))
    assert "quiet.ttft-wal" in recording
    assert "sync(" not in recording
    assert "sync(" in closing
