"""Kernel records read window by window: the same as if all of them had been in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.long_recording import write_long
from ttftprof import recording, windows
from ttftprof.analysis import analyse
from ttftprof.columns import Columns, joined, of_records
from ttftprof.events import EVENT, Kind, Records
from ttftprof.recording import Reader
from ttftprof.windows import LONG_NS

TENTH_NS = LONG_NS // 10
KINDS = [Kind.OFFCPU, Kind.BLOCK, Kind.OPEN]

# (start, length) in tenths of what is long, and the kind
told = st.tuples(st.integers(0, 300), st.integers(0, 200), st.sampled_from(KINDS))


def records_of(page: list[tuple[int, int, Kind]], first: int) -> Records:
    """Each with a number of its own as its thread."""
    records = np.zeros(len(page), EVENT)
    for number, (start, length, kind) in enumerate(page):
        records["start_ns"][number] = start * TENTH_NS
        records["duration_ns"][number] = length * TENTH_NS
        records["kind"][number], records["tid"][number] = kind, first + number
    return records


def paged(pages: list[list[tuple[int, int, Kind]]]) -> list[Records]:
    firsts = np.cumsum([0, *map(len, pages)]).tolist()
    return [records_of(page, first) for page, first in zip(pages, firsts, strict=False)]


def numbers(columns: Columns) -> list[int]:
    starts = columns["start_ns"]
    assert (starts[1:] >= starts[:-1]).all()
    return sorted(columns["tid"].tolist())


def expected(source: list[Records], wanted: np.ndarray[Any, Any]) -> list[int]:
    every = np.concatenate(source)
    return sorted(every["tid"][wanted & (every["kind"] == Kind.OFFCPU)].tolist())


@settings(deadline=None)
@given(
    st.lists(st.lists(told, max_size=6), min_size=1, max_size=6),
    st.integers(0, 320), st.integers(0, 320), st.sampled_from([0, 1 << 20]),
)  # fmt: skip
def test_a_window_holds_what_reaches_into_it(
    pages: list[list[tuple[int, int, Kind]]], begin: int, length: int, kept_bytes: int
) -> None:
    source = paged(pages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "_KEPT_BYTES", kept_bytes)
        waits = windows.read([of_records(page) for page in source]).bulky[Kind.OFFCPU]
        start_ns, end_ns = begin * TENTH_NS, (begin + length) * TENTH_NS
        within, begun = waits.within(start_ns, end_ns), waits.begun(start_ns, end_ns)
    every = np.concatenate(source)
    starts = every["start_ns"].astype(np.int64)
    ends = starts + every["duration_ns"].astype(np.int64)
    assert numbers(within) == expected(source, (starts < end_ns) & (ends > start_ns))
    assert numbers(begun) == expected(source, (starts < end_ns) & (starts >= start_ns))


@settings(deadline=None)
@given(st.lists(st.lists(told, max_size=6), min_size=1, max_size=6))
def test_all_windows_hold_each_record_once(pages: list[list[tuple[int, int, Kind]]]) -> None:
    source = paged(pages)
    found = windows.read([of_records(page) for page in source])
    waits = found.bulky[Kind.OFFCPU]
    every = np.concatenate(source)
    own = sorted(every["tid"][every["kind"] == Kind.OFFCPU].tolist())
    assert sorted(n for w in waits.windows() for n in numbers(waits.begun(*w))) == own
    assert numbers(waits.everything()) == own
    assert len(waits) == len(own)
    assert np.concatenate(list(waits.records()))["tid"].tolist() == own
    others = every[~np.isin(every["kind"], windows.BULKY)]
    assert found.rest["tid"].tolist() == others["tid"].tolist()


def test_a_part_of_the_windows_is_spread_over_all() -> None:
    source = paged([[(second * 10, 1, Kind.BLOCK)] for second in range(20)])
    blocks = windows.read([of_records(page) for page in source]).bulky[Kind.BLOCK]
    found = [number for w in blocks.windows(0.25) for number in numbers(blocks.begun(*w))]
    assert found == [0, 4, 8, 12, 16]


def test_stamps_that_no_clock_showed_are_left_out_and_counted() -> None:
    records = paged([[(1, 1, Kind.OFFCPU), (2, 1, Kind.BLOCK), (3, 1, Kind.OPEN)]])[0]
    records["start_ns"][0], records["duration_ns"][1] = 1 << 63, 1 << 62
    found = windows.read([of_records(records)])
    assert found.impossible == 2
    assert [len(windowed) for windowed in found.bulky.values()] == [0, 0]
    assert len(found.rest) == 1


def test_a_report_is_the_same_however_the_recording_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one page, or in many of which one is kept."""
    path = write_long(tmp_path / "long.ttft", 60_000, requests=7)
    whole = analyse(path)
    monkeypatch.setattr(recording, "_PAGE_RECORDS", 1)
    monkeypatch.setattr(windows, "_KEPT_BYTES", 0)
    assert analyse(path) == whole


def test_pages_can_be_read_once_the_recording_is_closed_and_gone(tmp_path: Path) -> None:
    path = write_long(tmp_path / "long.ttft", 40_000)
    with Reader(path) as reader:
        pages, every = reader.pages("events"), reader.stream("events")
    path.unlink()
    assert len(pages) > 1
    whole = joined(list(pages), EVENT)
    assert all(np.array_equal(whole[name], every[name]) for name in EVENT.names or ())
