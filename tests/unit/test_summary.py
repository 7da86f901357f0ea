"""Many recordings in one table: the rows, the medians, and other tools that read them."""

from __future__ import annotations

import csv
import gc
import io
import json
import re
import runpy
from pathlib import Path

import duckdb
import pytest
from click.testing import CliRunner, Result

from lab.llama_server import ROOT
from ttftprof.analysis import analyse
from ttftprof.cli.summary import command
from ttftprof.fleet import NAMES, Unread, read_all, recordings
from ttftprof.model import ACTIVITIES, PHASES
from unit.recordings import MS, Scene, answered, ended, launched, router_switch, two_models

OFFSET_NS = 1_700_000_000 * 10**9
LATE, EARLY = 100, 40  # when the front took the request, of its first token at 716 ms


def switch(front_at: float) -> Scene:
    scene = answered(launched(ended(two_models())), front_at)
    return scene.meta(clock={"name": "CLOCK_MONOTONIC", "realtime_offset_ns": OFFSET_NS})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two recordings of a switch, one of them lossy, one of nothing, and two files of no use."""
    place = tmp_path / "recordings"
    (place / "deeper").mkdir(parents=True)
    switch(LATE).write(place / "late.ttft")
    switch(EARLY).loss("events ring full", 3).write(place / "deeper" / "early.ttft")
    two_models().write(place / "idle.ttft")
    (place / "empty.ttft").touch()
    (place / "other.ttft").write_bytes(b"not one of ours" * 100)
    return place


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)), catch_exceptions=False)


def test_rows_say_what_the_reports_say(folder: Path) -> None:
    paths = [folder / "late.ttft", folder / "deeper" / "early.ttft"]
    parts = list(read_all(paths, workers=2))
    for path, part in zip(paths, parts, strict=True):
        assert not isinstance(part, Unread)
        (row,) = (dict(zip(NAMES, values, strict=True)) for values in part)
        (request,) = analyse(path).requests
        assert row["recording"] == str(path)
        assert row["ttft_ns"] == request.ttft_ns
        assert row["ttft_ns"] == sum(row[f"{name}_ns"] for name in PHASES)
        assert row["ttft_ns"] == sum(row[f"activity_{name}_ns"] for name in ACTIVITIES)
        assert row["cause"] == request.verdict.cause
        assert row["weights_bytes"] == max(f.size_bytes for f in request.files)


def test_the_order_is_that_of_the_paths_however_many_work(folder: Path) -> None:
    paths = [folder / "late.ttft", folder / "empty.ttft", folder / "idle.ttft"] * 7
    assert list(read_all(paths, workers=3)) == list(read_all(paths, workers=1))


def test_a_folder_is_searched_and_nothing_is_read_twice(folder: Path) -> None:
    names = [p.name for p in recordings([folder, folder / "late.ttft"])]
    assert sorted(names) == ["early.ttft", "empty.ttft", "idle.ttft", "late.ttft", "other.ttft"]


def test_the_table(folder: Path) -> None:
    shown = run(folder, "--width", "160").stdout
    first, *rest = shown.splitlines()
    assert first.startswith("! not read: ")
    assert shown.count("! not read: ") == 2
    assert "! 1 recording(s) are cut off or lost events" in shown
    assert "3 recordings, 2 requests, 2 with a first token" in shown
    (row,) = [line for line in rest if "cold switch" in line]
    assert "646.0 ms" in row  # the median of 616 and 676
    assert "load 2/2" in row


def test_groups(folder: Path) -> None:
    shown = run(folder, "--by", "recording,kind", "--width", "200").stdout
    assert len([line for line in shown.splitlines() if "cold switch" in line]) == 2
    assert "load 1/1" in shown


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_asked_for(folder: Path, width: int) -> None:
    hostile = router_switch().request(100, 2000, token=2100, model="\x1b[31m<模型>" * 40)
    hostile.write(folder / "hostile.ttft")
    shown = run(folder, "--width", str(width)).stdout
    assert all(len(line) <= width for line in shown.splitlines())
    assert "\x1b" not in shown


def test_csv_and_json_have_every_request(folder: Path) -> None:
    done = run(folder, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    objects = [json.loads(line) for line in run(folder, "--format", "json").stdout.splitlines()]
    assert len(rows) == len(objects) == 2
    assert {int(row["ttft_ns"]) for row in rows} == {(716 - at) * MS for at in (LATE, EARLY)}
    assert [o["ttft_ns"] for o in objects] == [int(row["ttft_ns"]) for row in rows]
    assert done.stderr.count("not read: ") == 2


def asked(query: str) -> list[tuple[object, ...]]:
    answer = duckdb.sql(query)
    assert answer is not None
    return answer.fetchall()


def test_duckdb_reads_the_rows(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "fleet.parquet"
    assert "2 requests" in run(folder, "--parquet", target).stdout
    query = f"SELECT median(ttft_ns), count(began), bool_and(switched) FROM '{target}'"
    assert asked(query) == [(646 * MS, 2, True)]


def test_no_request_at_all_is_an_empty_table(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "none.parquet"
    run(folder / "idle.ttft", "--parquet", target)
    assert asked(f"SELECT count(*) FROM '{target}'") == [(0,)]


@pytest.mark.parametrize("engine", ["duckdb", "dask"])
def test_the_examples_of_the_documentation(
    engine: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (ROOT / "docs/FLEET.md").read_text()
    found = re.search(rf"<!-- example: {engine} -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found
    (tmp_path / "fleet").mkdir()
    run(folder, "--parquet", tmp_path / "fleet" / "one.parquet")
    run(folder / "late.ttft", "--parquet", tmp_path / "fleet" / "two.parquet")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "example.py").write_text(found[1])
    runpy.run_path("example.py")
    shown = capsys.readouterr().out
    assert "test" in shown  # the host
    assert "0.616" in shown  # the lossy recording is left out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--by", "colour"), "'colour' is none of"),
        (("--by", ","), "names nothing"),
        (("--parquet", "x", "--format", "csv"), "do not go together"),
    ],
)
def test_options_that_make_no_sense(folder: Path, arguments: tuple[str, ...], says: str) -> None:
    from ttftprof.errors import UsageError

    with pytest.raises(UsageError, match=re.escape(says)):
        run(folder, *arguments)


def test_nothing_to_read(tmp_path: Path) -> None:
    from ttftprof.errors import RecordingError, UsageError

    with pytest.raises(UsageError, match="no recording there"):
        run(tmp_path)
    with pytest.raises(RecordingError, match="none of the recordings"):
        run(tmp_path / "missing.ttft")


def test_memory_does_not_grow_with_the_recordings(folder: Path) -> None:
    """What is kept of a recording is its rows: of a thousand, less than one recording's size."""
    import tracemalloc

    paths = [folder / "late.ttft"] * 50
    for part in read_all(paths[:5], workers=1):
        del part
    tracemalloc.start()
    for part in read_all(paths, workers=1):
        del part
    gc.collect()  # garbage that waits for its collection is not kept
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < paths[0].stat().st_size * 5
