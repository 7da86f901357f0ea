"""The tightest memory limit of a process, from the files of both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttftprof.sources.memory import MemoryLimit, limit_of

NO_LIMIT = 9_223_372_036_854_771_712  # as version 1 writes it


def machine(folder: Path, version: int, path: str, files: dict[str, str]) -> Path:
    """A /proc with process 7 in the group `path`, and the groups' files."""
    proc, groups = folder / "proc", folder / "groups"
    (proc / "7").mkdir(parents=True)
    (proc / "self").mkdir()
    kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,memory"
    (proc / "self/mountinfo").write_text(f"30 1 0:26 / {groups} rw - {kind}\n")
    line = f"0::{path}" if version == 2 else f"9:cpu:/other\n5:memory:{path}"
    (proc / "7/cgroup").write_text(f"{line}\n")
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(f"{text}\n")
    return proc


def test_the_smallest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {
        "a/b/memory.max": "max",
        "a/memory.max": "1000",
        "a/memory.current": "900",
        "memory.max": "5000",
    }
    proc = machine(tmp_path, 2, "/a/b", files)
    assert limit_of(7, proc) == MemoryLimit(str(tmp_path / "groups/a"), 1000, 900)


def test_version_1(tmp_path: Path) -> None:
    files = {
        "a/memory.limit_in_bytes": "2000",
        "a/memory.usage_in_bytes": "1500",
        "memory.limit_in_bytes": str(NO_LIMIT),
    }
    found = limit_of(7, machine(tmp_path, 1, "/a", files))
    assert found == MemoryLimit(str(tmp_path / "groups/a"), 2000, 1500)


@pytest.mark.parametrize(
    ("path", "files"),
    [
        ("/", {}),
        ("/a", {"a/memory.max": "max"}),
        ("/a", {"a/memory.max": "what"}),
        ("/../../etc", {"memory.max": "1"}),
    ],
)
def test_without_a_limit_there_is_none(tmp_path: Path, path: str, files: dict[str, str]) -> None:
    assert limit_of(7, machine(tmp_path, 2, path, files)) is None


def test_a_process_that_is_gone_has_none(tmp_path: Path) -> None:
    assert limit_of(8, machine(tmp_path, 2, "/", {"memory.max": "5"})) is None
