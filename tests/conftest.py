"""Which tests can run here. With TTFTPROF_REQUIRE_KERNEL=1 (CI) what cannot run fails."""

import os
import platform
import shutil
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, settings

from lab.llama_server import BINARY
from lab.make_model import make_models
from lab.python_servers import TRANSFORMERS, VLLM

VM_RESULTS = Path(os.environ.get("TTFTPROF_VM_RESULTS", "nowhere"))
SPEEDSCOPE = Path(__file__).parents[1] / ".engine/speedscope/package/dist/release"
REQUIRED = os.environ.get("TTFTPROF_REQUIRE_KERNEL") == "1"

# An example that takes long says that the machine is busy, not that the code is wrong.
settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy machine")


def unsupported(reason: str) -> NoReturn:
    """Skips the test, or fails it where this machine should have had it."""
    if REQUIRED:
        pytest.fail(f"required here, but unsupported: {reason}", pytrace=False)
    pytest.skip(reason)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests marked `long`")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("long") and not item.config.getoption("--long"):
        pytest.skip("takes long: run scripts/test --long (or pytest --long)")
    if item.get_closest_marker("kernel"):
        if os.geteuid() != 0:
            unsupported("loading BPF programs needs root")
        if not Path("/sys/kernel/btf/vmlinux").exists():
            unsupported(f"kernel {platform.release()} has no BTF")
    if item.get_closest_marker("browser") and not shutil.which("chromedriver"):
        unsupported("no chromium: apt-get install chromium chromium-driver")
    if item.get_closest_marker("speedscope") and not SPEEDSCOPE.exists():
        unsupported("no speedscope: scripts/test fetches it")
    if item.get_closest_marker("engine") and not BINARY.exists():
        unsupported("no llama-server: run scripts/engine")
    if item.get_closest_marker("vm") and not (VM_RESULTS / "done").exists():
        unsupported("nothing was recorded in the VM: run scripts/vm-test")
    if item.get_closest_marker("transformers") and not TRANSFORMERS.exists():
        unsupported("no transformers serve: run scripts/engine --transformers")
    if item.get_closest_marker("vllm") and not VLLM.exists():
        unsupported("no vLLM: run scripts/engine --vllm")


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models `a` and `b`, 60 MB each, for the real engine."""
    return make_models(tmp_path_factory.mktemp("models"), size_mb=60, layers=6)
