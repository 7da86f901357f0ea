"""Shells complete what the program knows, and `--version` tells what a bug report needs."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ttftprof import __version__
from ttftprof.cli import cli
from ttftprof.kernel.session import OBJECTS, object_build


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(cli, arguments, prog_name="ttftprof")
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_calls_back_by_the_programs_name(shell: str) -> None:
    script = printed("completion", shell)
    assert f"_TTFTPROF_COMPLETE={shell}_complete" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ttftprof re", {"record", "report"}),
        ("ttftprof record --fo", {"--force"}),
        ("ttftprof export --to spee", {"speedscope"}),
        ("ttftprof record --loader ", {"auto", "libbpf", "bcc", "proc"}),
    ],
)
def test_bash_is_offered_what_fits(line: str, offered: set[str], tmp_path: Path) -> None:
    """As the script asks for it: the words in the environment, the answers on a line each."""
    words = line.split(" ")
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    main = "from ttftprof.cli import cli; cli(prog_name='ttftprof')"
    done = subprocess.run(
        [sys.executable, "-c", main],
        env={**asked, "_TTFTPROF_COMPLETE": "bash_complete"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert {answer.partition(",")[2] for answer in done.stdout.split()} == offered


def test_the_version_names_the_builds_and_the_kernel() -> None:
    told = printed("--version")
    assert __version__ in told
    assert f"{platform.system()} {platform.release()} {platform.machine()}" in told
    builds = [object_build(path) for path in OBJECTS]
    assert all(builds)
    assert re.findall(r"\b[0-9a-f]{8}\b", told) == builds
    assert len(set(builds)) == len(OBJECTS)
