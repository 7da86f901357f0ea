"""A Debian package of the wheel, by dpkg-deb: `python -m lab.debian_package WHEEL FOLDER`.

The program lies where Debian's own Python looks, and what it imports comes from Debian's packages:
one package for every architecture, as the wheel is. What Debian has not (py-spy, NVML's binding)
the program does without, and its doctor says what that costs.
"""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Debian's package by the name that a requirement of pyproject.toml has; None: it has none.
PACKAGES: dict[str, str | None] = {
    "click": "python3-click",
    "jinja2": "python3-jinja2",
    "numpy": "python3-numpy",
    "nvidia-ml-py": None,
    "psutil": "python3-psutil",
    "py-spy": None,
    "rich": "python3-rich",
}
SYSTEM = ("libbpf1",)
# The extras, and what kernels without BTF need
SUGGESTED = ("python3-bpfcc", "python3-prometheus-client", "python3-scipy")
_REQUIREMENT = re.compile(r"([\w.-]+)>=([\d.]+)$")
_LAUNCHER = """#!/usr/bin/python3
import sys

from ttftprof.cli import main

sys.exit(main())
"""
# Paths of the completion scripts that distributions load, by shell
_COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/ttftprof",
    "zsh": "usr/share/zsh/vendor-completions/_ttftprof",
    "fish": "usr/share/fish/vendor_completions.d/ttftprof.fish",
}
# What Debian's Python policy has a package do with its byte code
_SCRIPTS = {
    "postinst": '#!/bin/sh\nset -e\n[ "$1" != configure ] || py3compile -p ttftprof\n',
    "prerm": "#!/bin/sh\nset -e\npy3clean -p ttftprof\n",
}


def build(wheel: Path, folder: Path) -> Path:
    """Writes the package into `folder`; its path. Raises CalledProcessError."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = wheel.name.split("-")[1]
    package = folder / f"ttftprof_{version}_all.deb"
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        tree.chmod(0o755)
        _fill(tree, wheel)
        control = tree / "DEBIAN"
        control.mkdir()
        (control / "control").write_text(control_of(project, version))
        for script, text in _SCRIPTS.items():
            _write(control / script, text, executable=True)
        command = ["dpkg-deb", "--root-owner-group", "--build", str(tree), str(package)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return package


def control_of(project: dict[str, Any], version: str) -> str:
    """The control file; deb-control(5)."""
    python = project["requires-python"].removeprefix(">=")
    needs = [f"python3 (>= {python})", *SYSTEM, *_packages(project["dependencies"])]
    fields = {
        "Package": "ttftprof",
        "Version": version,
        "Architecture": "all",
        "Maintainer": "the authors of ttftprof",
        "Section": "utils",
        "Priority": "optional",
        "Depends": ", ".join(needs),
        "Suggests": ", ".join(SUGGESTED),
        "Description": project["description"],
    }
    return "".join(f"{name}: {value}\n" for name, value in fields.items())


def _packages(requirements: list[str]) -> list[str]:
    found = []
    for requirement in requirements:
        parts = _REQUIREMENT.match(requirement)
        assert parts, f"{requirement} has another form than NAME>=VERSION"
        package = PACKAGES[parts[1]]
        if package is not None:
            found.append(f"{package} (>= {parts[2]})")
    return found


def _fill(tree: Path, wheel: Path) -> None:
    modules = tree / "usr/lib/python3/dist-packages"
    modules.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(modules)
    (data,) = modules.glob("*.data")
    page = gzip.compress((data / "data/share/man/man1/ttftprof.1").read_bytes(), mtime=0)
    _write(tree / "usr/share/man/man1/ttftprof.1.gz", page)
    shutil.rmtree(data)
    _write(tree / "usr/bin/ttftprof", _LAUNCHER, executable=True)
    for shell, path in _COMPLETIONS.items():
        _write(tree / path, completion_of(shell))
    documents = tree / "usr/share/doc/ttftprof"
    _write(documents / "copyright", (ROOT / "LICENSE").read_bytes())
    changes = gzip.compress((ROOT / "CHANGELOG.md").read_bytes(), mtime=0)
    _write(documents / "changelog.gz", changes)


def completion_of(shell: str) -> bytes:
    """The completion script, as the program itself prints it."""
    command = [sys.executable, "-m", "ttftprof", "completion", shell]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout


def _write(path: Path, content: bytes | str, executable: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(0o755 if executable else 0o644)


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), Path(sys.argv[2])))
