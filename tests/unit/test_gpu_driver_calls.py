"""The table of driver calls, and how libraries of any path and version are probed by it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from lab import fake_gpu
from ttftprof.engines.driver_calls import (
    DRIVER_CALLS,
    DRIVER_LIBRARIES,
    FIRST_ROW,
    LAUNCH,
    calls_in,
    usual_paths,
)
from ttftprof.engines.kernel_caches import cache_of, is_bookkeeping, is_compiler
from ttftprof.engines.markers import MARK_NAMES
from ttftprof.sources import nvml
from ttftprof.sources.elf import symbol_places
from ttftprof.sources.libraries import LibraryMarks
from unit.trees import FIXTURES


def test_rows_are_unique_and_apart_from_the_engines() -> None:
    assert len(DRIVER_CALLS) == sum(len(library.calls) for library in DRIVER_LIBRARIES)
    assert max(MARK_NAMES) < FIRST_ROW <= min(DRIVER_CALLS)
    assert all(call.cookie & 0xFFFF == row for row, call in DRIVER_CALLS.items())


def test_rows_do_not_move() -> None:
    """Recordings name calls by their row."""
    known = {
        100: "cuInit",
        113: "cuMemAlloc",
        122: "cuMemcpyHtoD",
        200: "hipInit",
        216: "hipMemcpyHtoD",
    }
    assert {row: DRIVER_CALLS[row].name for row in known} == known


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("libcuda.so.1", "cuInit"), ("libcuda.so.570.86.10", "cuInit"), ("libcuda.so", "cuInit"),
        ("libamdhip64.so.6.2.60204", "hipInit"), ("libnvrtc.so.12", "nvrtcCompileProgram"),
    ],
)  # fmt: skip
def test_a_library_is_known_by_its_name(name: str, first: str) -> None:
    assert calls_in(name)[0].name == first


@pytest.mark.parametrize("name", ["libcudart.so.12", "libcuda.so.1.txt", "xlibcuda.so.1", ""])
def test_other_libraries_have_none(name: str) -> None:
    assert calls_in(name) == ()


def test_launches_only_when_asked_for() -> None:
    assert LAUNCH not in {call.group for call in calls_in("libcuda.so.1")}
    assert LAUNCH in {call.group for call in calls_in("libcuda.so.1", launches=True)}


# -- against the exports of real drivers ----------------------------------------------------------


def exports(library: str) -> set[str]:
    lines = (FIXTURES / f"driver/{library}.txt").read_text().splitlines()
    return {line for line in lines if not line.startswith("#")}


def probed(library_name: str) -> set[str]:
    return {symbol for call in calls_in(library_name, launches=True) for symbol in call.symbols}


# What stands out of the patterns below, and is left alone for a reason.
_NO_BYTES = r"Array|Pitch|3D|Mipmapped|Peer"  # sizes in structures or by shape, for images
_OTHER_WAY = r"DtoH|DtoD|DtoA|AtoH|AtoD|AtoA|HtoA|(From|To)(Array|Symbol)|2D|Param2D"
_GRAPHICS = r"cu(GL|VDPAU|EGL)"
_RECORDED = r"Graph(Add|Exec|Memcpy|MemAlloc)|Node"  # into a graph, not done
_ASKS = r"Get(DevicePointer|Flags)|Unregister"


@pytest.mark.parametrize(
    ("library", "name"), [("libcuda_555", "libcuda.so.1"), ("libamdhip64_5_2", "libamdhip64.so.5")]
)
def test_all_variants_that_a_real_driver_exports_are_probed(library: str, name: str) -> None:
    """Every begin, load, allocation, copy, capture and wait in it, for all kinds of streams."""
    apart = "|".join((_NO_BYTES, _OTHER_WAY, _GRAPHICS, _RECORDED, _ASKS))
    wanted = {symbol for symbol in exports(library) if not re.search(apart, symbol)}
    assert len(wanted) > 40
    left_out = wanted - probed(name)
    assert left_out <= {
        "hipCtxSynchronize",  # does nothing
        "hipInitActivityCallback", "hipExtLaunchKernel",
        "cuLaunch", "cuLaunchGrid", "cuLaunchGridAsync", "cuLaunchHostFunc",
        "cuLaunchHostFunc_ptsz", "cuLaunchCooperativeKernel", "cuLaunchCooperativeKernel_ptsz",
        "cuLaunchCooperativeKernelMultiDevice", "hipLaunchCooperativeKernel", "hipLaunchByPtr",
        "hipLaunchCooperativeKernelMultiDevice", "hipLaunchCooperativeKernel_spt",
    }, left_out  # fmt: skip


SINCE_CUDA_12_8 = {
    "cuMemcpyBatchAsync", "cuMemcpyWithAttributesAsync", "cuStreamBeginRecaptureToGraph",
}  # fmt: skip


def test_calls_are_spelt_as_real_drivers_do() -> None:
    for library, name, newer in (
        ("libcuda_555", "libcuda.so.1", SINCE_CUDA_12_8),
        ("libamdhip64_5_2", "libamdhip64.so.5", {"hiprtcCompileProgram"}),
    ):
        found = exports(library)
        unknown = {c.name for c in calls_in(name, True) if not found & set(c.symbols)}
        assert unknown == newer


def test_questions_to_nvml_are_spelt_as_the_real_library_does() -> None:
    """Those in the source of the sampler; the binding adds versions to some."""
    sources = "".join(p.read_text() for p in Path(nvml.__file__).parent.glob("nvml*.py"))
    asked = set(re.findall(r'"(nvml[A-Z]\w+)"', sources))
    asked |= {f"nvmlDeviceGetCurrPcieLink{what}" for what in ("Generation", "Width")}
    asked |= {f"nvmlDeviceGet{what}RunningProcesses_v3" for what in ("Compute", "Graphics")}
    assert len(asked) > 20
    assert {a for a in asked if a not in exports("libnvidia-ml_555")} == set()


class Probed:
    def __init__(self) -> None:
        self.places: list[tuple[str, int, int]] = []
        self.found: list[tuple[str, list[str]]] = []

    def attach(self, path: str, places: Sequence[tuple[int, int]]) -> None:
        self.places += [(path, offset, cookie) for offset, cookie in places]

    def marks(self, launches: bool = False) -> LibraryMarks:
        def found(path: str, names: list[str]) -> None:
            self.found.append((path, names))

        return LibraryMarks(self.attach, found, found, launches=launches)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_gpu.build("fake_cuda.c", tmp_path_factory.mktemp("cuda"), "libcuda.so.1")


def test_variants_are_found_and_an_address_is_probed_once(library: Path) -> None:
    probed = Probed()
    probed.marks().probe(library, shown="/in/a/container/libcuda.so.570.1")
    offsets = [offset for _, offset, _ in probed.places]
    assert len(set(offsets)) == len(offsets)
    rows = [DRIVER_CALLS[cookie & 0xFFFF].name for _, _, cookie in probed.places]
    assert rows.count("cuMemAlloc") == 1  # cuMemAlloc and cuMemAlloc_v2 are one address
    assert rows.count("cuMemcpyHtoDAsync") == 2  # _v2 and _v2_ptsz are two
    assert "cuLaunchKernel" not in rows
    assert probed.found[0][0] == "/in/a/container/libcuda.so.570.1"


def test_every_version_of_a_symbol_is_probed(tmp_path: Path) -> None:
    """hipInit@hip_4.2 for programs of then, hipInit@@hip_6.0 for those of now."""
    name = "libamdhip64.so.6"
    library = fake_gpu.build("fake_hip.c", tmp_path, name)
    places = symbol_places(library, {"hipInit", "hipMalloc"})
    assert sorted(symbol for symbol, _ in places) == ["hipInit", "hipInit", "hipMalloc"]
    assert len({offset for _, offset in places}) == 3
    probed = Probed()
    probed.marks().probe(library, shown=name)
    rows = [DRIVER_CALLS[cookie & 0xFFFF].name for _, _, cookie in probed.places]
    assert rows.count("hipInit") == 2


def test_a_library_met_by_two_paths_is_probed_once(library: Path, tmp_path: Path) -> None:
    """Before any process maps it, at its usual place; then as a process sees it."""
    probed = Probed()
    marks = probed.marks()
    marks.attach_drivers([str(tmp_path / "none.so"), str(library)])
    count = len(probed.places)
    other = tmp_path / "libcuda.so.1"
    other.hardlink_to(library)
    marks.probe(other, shown=str(other))
    assert len(probed.places) == count > 0


def test_launches_are_probed_when_asked_for(library: Path) -> None:
    probed = Probed()
    probed.marks(launches=True).probe(library, shown="libcuda.so.1")
    assert "cuLaunchKernel" in {DRIVER_CALLS[cookie & 0xFFFF].name for *_, cookie in probed.places}


def test_usual_paths_are_absolute() -> None:
    assert all(path.startswith("/") for path in usual_paths())


@pytest.mark.parametrize(
    ("path", "cache"),
    [
        ("/root/.nv/ComputeCache/3/a/x", "ComputeCache"),
        ("/home/u/.triton/cache/k/a.cubin", "Triton"),
        ("/tmp/torchinductor_u/ab/c.py", "inductor"),
        ("/home/u/.cache/vllm/torch_compile_cache/x", "vLLM"),
        ("/home/u/.cache/deep_gemm/x", "DeepGEMM"),
        ("/home/u/.cache/flashinfer/x", "FlashInfer"),
        ("/home/u/.cache/miopen/x", "MIOpen"),
        ("/home/u/notes.txt", ""),
    ],
)
def test_caches_by_their_folders(path: str, cache: str) -> None:
    assert cache_of(path) == cache


def test_what_a_hit_opens_for_writing_is_no_miss() -> None:
    assert is_bookkeeping("/root/.nv/ComputeCache/index")
    assert is_bookkeeping("/home/u/.triton/cache/k.lock")
    assert not is_bookkeeping("/home/u/.triton/cache/k.cubin")


@pytest.mark.parametrize("name", ["ptxas", "nvcc", "clang-18", "hipcc", "cicc", "clang++"])
def test_compilers(name: str) -> None:
    assert is_compiler(f"/usr/bin/{name}")
    assert not is_compiler("/usr/bin/python3")
