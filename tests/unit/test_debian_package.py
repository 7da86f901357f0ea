"""The Debian package asks for what the program imports, and lies where Debian looks."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from conftest import unsupported
from lab import debian_package
from lab.debian_package import PACKAGES, ROOT, build, control_of

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_dependency_is_a_package_of_debians_or_known_to_be_none() -> None:
    names = {requirement.partition(">=")[0] for requirement in PROJECT["dependencies"]}
    assert names == set(PACKAGES)
    depends = control_of(PROJECT, "1.2").split("Depends: ")[1].splitlines()[0].split(", ")
    assert "python3 (>= 3.11)" in depends
    assert "libbpf1" in depends
    assert "python3-numpy (>= 1.24)" in depends
    assert not [d for d in depends if "spy" in d or "nvidia" in d]


def test_a_requirement_of_another_form_is_no_guess() -> None:
    with pytest.raises(AssertionError, match="another form"):
        control_of({**PROJECT, "dependencies": ["click~=8.1"]}, "1.2")


def test_a_wheel_becomes_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if subprocess.run(["which", "dpkg-deb"], capture_output=True, check=False).returncode:
        unsupported("no dpkg-deb: it is part of Debian")
    wheel = tmp_path / "ttftprof-1.2-py3-none-any.whl"
    with ZipFile(wheel, "w") as packed:
        packed.writestr("ttftprof/__init__.py", "")
        packed.writestr("ttftprof-1.2.data/data/share/man/man1/ttftprof.1", ".TH X 1\n")
    monkeypatch.setattr(debian_package, "completion_of", lambda shell: shell.encode())
    package = build(wheel, tmp_path)
    assert package.name == "ttftprof_1.2_all.deb"
    listed = subprocess.run(
        ["dpkg-deb", "--contents", package], capture_output=True, text=True, check=True
    ).stdout
    found = {line.split()[5]: line.split()[:2] for line in listed.splitlines()}
    assert found["./usr/bin/ttftprof"] == ["-rwxr-xr-x", "root/root"]
    assert found["./usr/share/man/man1/ttftprof.1.gz"] == ["-rw-r--r--", "root/root"]
    assert found["./usr/lib/python3/dist-packages/ttftprof/__init__.py"][1] == "root/root"
    assert "./usr/share/bash-completion/completions/ttftprof" in found
    assert not [path for path in found if ".data" in path]
