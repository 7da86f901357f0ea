"""`ttftprof record`: what of it needs no kernel."""

from __future__ import annotations

import pytest

from ttftprof import cli
from ttftprof.cli.record import with_rings
from ttftprof.errors import TtftprofError, Unsupported
from ttftprof.kernel.session import MINIMUM, Settings


def test_a_larger_ring_is_larger_for_texts_too() -> None:
    assert with_rings(8192) == Settings()
    assert with_rings(65536).event_ring_bytes == with_rings(65536).text_ring_bytes == 64 << 20
    assert with_rings(4).event_ring_bytes == 4096
    assert with_rings(4).text_ring_bytes == Settings().text_ring_bytes


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            Unsupported("no probe", minimum_kernel=MINIMUM, next_step="ask"),
            "ttftprof: no probe\n  needs: Linux 5.15 or newer\n  next: ask\n",
        ),
        (TtftprofError("two:\n  a\x1b[2J\n  b"), "ttftprof: two:\n  a\\x1b[2J\n  b\n"),
        (OSError(24, "Too many open files"), "ttftprof: too many open files: the limit of"),
    ],
)
def test_what_an_error_says(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    said: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli.cli, "main", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main(["record"])
    assert ended.value.code == getattr(error, "exit_code", 1)
    assert capsys.readouterr().err.startswith(said)
