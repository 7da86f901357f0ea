"""The soak of scripts/soak, in a bounded form: switches as fast as the server can."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.soak import Look, grown, soak

pytestmark = [pytest.mark.kernel, pytest.mark.engine, pytest.mark.slow]

SWITCHES = 10


def test_many_switches_leave_the_recorder_as_it_was(models_dir: Path, tmp_path: Path) -> None:
    done = soak(models_dir, tmp_path / "soak.ttft", minutes=SWITCHES / 60, every_s=1)
    assert not done.faults
    assert len(done.looks) == SWITCHES + 1


def test_what_grows_is_named() -> None:
    looks = [Look(t, 70_000_000 + t * 2_000_000, 40, 3 + t // 10) for t in range(30)]
    assert [fault.split()[0] for fault in grown(looks)] == ["rss_bytes", "threads"]
