"""Nothing that came from outside is ever read by a shell: the package starts none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ttftprof

PACKAGE = Path(ttftprof.__file__).parent
SHELLS = {"system", "popen", "getoutput", "getstatusoutput", "create_subprocess_shell"}


def shells(source: str) -> Iterator[int]:
    """Lines of calls by which a shell would be started."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            is_known = name in SHELLS and owner in ("", "os", "subprocess", "asyncio")
            if is_known or any(k.arg == "shell" for k in node.keywords):
                yield node.lineno


@pytest.mark.parametrize(
    "source",
    ["os.system('x')", "subprocess.run('x', shell=True)", "from os import popen\npopen('x')"],
)
def test_a_shell_would_be_noticed(source: str) -> None:
    assert list(shells(source))


def test_no_shell_is_started() -> None:
    files = [*PACKAGE.rglob("*.py")]
    assert len(files) > 100
    found = {str(f.relative_to(PACKAGE)): [*shells(f.read_text())] for f in files}
    assert not {name: lines for name, lines in found.items() if lines}
