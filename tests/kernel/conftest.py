"""What several tests of the kernel side need made for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel.slow_fuse import compiled


@pytest.fixture(scope="module")
def fuse_binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("fuse"))
