"""Who called sudo, by its environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conftest import unsupported
from ttftprof.caller import Caller, as_caller, sudo_caller

NOBODY = 65534


@pytest.fixture(autouse=True)
def root() -> None:
    if os.geteuid() != 0:
        unsupported("only root can have been called by sudo")


@pytest.mark.parametrize("uid", ["", "0", "abc", "-1", "\u00b2", str(2**32 - 1), "9" * 30, None])
def test_what_is_no_user_is_nobody(monkeypatch: pytest.MonkeyPatch, uid: str | None) -> None:
    if uid is None:
        monkeypatch.delenv("SUDO_UID", raising=False)
    else:
        monkeypatch.setenv("SUDO_UID", uid)
    monkeypatch.setenv("SUDO_GID", str(NOBODY))
    assert sudo_caller() is None


def test_the_name_and_group_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_UID", str(NOBODY))
    monkeypatch.delenv("SUDO_USER", raising=False)
    monkeypatch.setenv("SUDO_GID", "abc")
    assert sudo_caller() == Caller(NOBODY, NOBODY, "nobody")
    monkeypatch.setenv("SUDO_GID", "7")
    assert sudo_caller() == Caller(NOBODY, 7, "nobody")


def test_a_user_without_a_name_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_UID", "54321")
    monkeypatch.delenv("SUDO_GID", raising=False)
    caller = sudo_caller()
    assert caller == Caller(54321, 54321, "")
    assert caller.groups == [54321]


def test_roots_power_over_files_rests_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv("SUDO_UID", str(NOBODY))
    monkeypatch.setenv("SUDO_GID", str(NOBODY))
    before = os.getresuid(), os.getresgid(), os.getgroups()
    with pytest.raises(PermissionError), as_caller():
        (tmp_path / "a").touch()
    assert (os.getresuid(), os.getresgid(), os.getgroups()) == before
    (tmp_path / "a").touch()
