"""What several tests of the kernel side need made for them."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from kernel.slow_fuse import compiled
from kernel.truth_table import TABLE, page, summary
from lab import fake_gpu


@pytest.fixture(scope="module")
def fuse_binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("fuse"))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """The truth workload's figures, good or bad; on demand as a page, too."""
    rows = config.stash.get(TABLE, [])
    if not rows:
        return
    terminalreporter.section("truth workload")
    for line in summary(rows):
        terminalreporter.write_line(line)
    path = os.environ.get("TTFTPROF_TRUTH_PAGE")
    if path:
        machine = f"Linux {platform.release()}, {os.cpu_count()} cores"
        Path(path).write_text(page(rows, machine))


@pytest.fixture(scope="session")
def gpu_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both libraries, as a container might have one: none of the usual paths."""
    folder = tmp_path_factory.mktemp("driver")
    fake_gpu.build("fake_nvml.c", folder, "libnvidia-ml.so.1")
    fake_gpu.build("fake_cuda.c", folder, "libcuda.so.1")
    return folder
