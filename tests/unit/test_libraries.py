"""Symbols in libraries: found where the loader puts them, and nothing trusted of a bad file."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ttftprof.engines.markers import SYMBOL_MARKS
from ttftprof.kernel.libbpf import BpfError
from ttftprof.sources import elf, libraries
from ttftprof.sources.elf import symbol_places
from ttftprof.sources.libraries import LibraryMarks, symbol_offsets

KNOWN = ("bpf_object__open_file", "bpf_map__fd")


def libbpf_path() -> Path:
    """The file of the one library that this program cannot do without."""
    ctypes.CDLL("libbpf.so.1")
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libbpf.so" in line:
            return Path(line.split(None, 5)[5])
    raise AssertionError("libbpf is loaded but not mapped")


@pytest.fixture(scope="module")
def library() -> bytes:
    return libbpf_path().read_bytes()


def test_an_offset_points_at_the_functions_code(library: bytes) -> None:
    loaded = ctypes.CDLL("libbpf.so.1")
    offsets = symbol_offsets(libbpf_path(), set(KNOWN))
    assert set(offsets) == set(KNOWN)
    for name, offset in offsets.items():
        address = ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value
        assert address is not None
        assert library[offset : offset + 16] == ctypes.string_at(address, 16)


def functions(path: Path) -> set[tuple[str, int]]:
    """(symbol, offset) of every function that a library defines, as a second reader has it."""
    with path.open("rb") as file:
        library = ELFFile(file)
        segments = [s for s in library.iter_segments() if s["p_type"] == "PT_LOAD"]
        found = set()
        table = library.get_section_by_name(".dynsym")
        assert isinstance(table, SymbolTableSection)
        for symbol in table.iter_symbols():
            at, kind = symbol["st_value"], symbol["st_info"]["type"]
            for s in segments:
                if kind == "STT_FUNC" and 0 < at - s["p_vaddr"] + 1 <= s["p_filesz"] and at:
                    found.add((symbol.name, at - s["p_vaddr"] + s["p_offset"]))
    return found


def test_a_second_reader_finds_the_same_in_every_library_mapped_here() -> None:
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    paths = [Path(name) for name in mapped if ".so" in name and Path(name).exists()]
    assert len(paths) > 5
    for path in paths:
        expected = functions(path)
        assert set(symbol_places(path, {name for name, _ in expected})) == expected, path


@pytest.mark.parametrize("style", ["gnu", "sysv", "both"])
def test_either_hash_table_serves(style: str, tmp_path: Path) -> None:
    path, names = tmp_path / "x.so", [f"call_{n}" for n in range(100)]
    source = "".join(f"int {name}(void) {{ return 1; }}\n" for name in names)
    command = ["clang", "-shared", f"-Wl,--hash-style={style}", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    expected = {(name, at) for name, at in functions(path) if name in names}
    assert len(expected) == 100
    assert set(symbol_places(path, [*names, "call_", "none"])) == expected


def test_unknown_names_are_left_out() -> None:
    assert symbol_offsets(libbpf_path(), {"llama_decode", "no such symbol", ""}) == {}
    assert symbol_offsets(libbpf_path(), set()) == {}


@pytest.mark.parametrize(
    "content", [b"", b"\x7f", b"\x7fELF", b"\x7fELF" + bytes(200), b"#!/bin/sh"]
)
def test_what_is_no_library_has_no_symbols(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(content)
    assert symbol_offsets(path, set(KNOWN)) == {}


def test_a_missing_file_has_no_symbols(tmp_path: Path) -> None:
    assert symbol_offsets(tmp_path / "gone.so", set(KNOWN)) == {}
    assert symbol_offsets(tmp_path, set(KNOWN)) == {}


def test_a_file_too_big_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elf, "MAX_LIBRARY_BYTES", 4096)
    assert symbol_offsets(libbpf_path(), set(KNOWN)) == {}


hostile = settings(
    max_examples=60, deadline=5_000, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@hostile
@given(cut=st.floats(0, 1))
def test_a_library_cut_short_does_no_harm(cut: float, library: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.so"
    path.write_bytes(library[: int(len(library) * cut)])
    assert set(symbol_offsets(path, set(KNOWN))) <= set(KNOWN)


@hostile
@given(
    flips=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255), st.booleans()),
        min_size=1, max_size=40,
    )
)  # fmt: skip
def test_a_damaged_library_does_no_harm(
    flips: list[tuple[float, int, bool]], library: bytes, tmp_path: Path
) -> None:
    """Bytes overwritten, half of them in the headers and tables at the beginning and the end."""
    damaged = bytearray(library)
    for where, value, early in flips:
        at = int(where * 4096) if early else len(library) - 1 - int(where * 4096)
        damaged[at] = value
    path = tmp_path / "damaged.so"
    path.write_bytes(damaged)
    assert set(symbol_offsets(path, set(KNOWN))) <= set(KNOWN)


# -- following a process --------------------------------------------------------------------------


@dataclass
class Probed:
    """Records what `LibraryMarks` asks for; refuses everything where told to."""

    refuse: bool = False
    attached: list[tuple[str, int, int, bool]] = field(default_factory=list)
    found: list[tuple[str, list[str]]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)

    def marks(self) -> LibraryMarks:
        return LibraryMarks(
            self._attach,
            lambda path, names: self.found.append((path, names)),
            lambda path, reason: self.refused.append((path, reason)),
        )

    def _attach(self, path: str, places: Sequence[tuple[int, int]]) -> None:
        if self.refuse:
            raise BpfError("attach", 1)
        for offset, cookie in places:
            self.attached += [(path, offset, cookie, on_return) for on_return in (False, True)]


def fake_proc(folder: Path, *maps: str) -> Path:
    """A /proc whose process 7 has these lines in maps, and this machine's files below its root."""
    root = folder / "7"
    root.mkdir(parents=True)
    (root / "maps").write_text("".join(f"{line}\n" for line in maps))
    (root / "root").symlink_to("/")
    return folder


def mapping(path: str, inode: int = 5, rights: str = "r-xp") -> str:
    return f"7f0000000000-7f0000001000 {rights} 00000000 08:01 {inode}    {path}"


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names of libbpf stand for those of an engine."""
    symbols = (KNOWN, ("bpf_map__name",), ("no_such_symbol",))
    rows = zip(SYMBOL_MARKS, symbols, strict=False)
    marks = tuple(type(m)(m.row, m.name, names, m.stack_int) for m, names in rows)
    monkeypatch.setattr(libraries, "SYMBOL_MARKS", marks)


@pytest.mark.usefixtures("marked")
def test_every_name_of_a_mark_is_probed_on_call_and_return(tmp_path: Path) -> None:
    probed = Probed()
    path = str(libbpf_path())
    marks = probed.marks()
    marks.scan(7, fake_proc(tmp_path, mapping(path)))
    assert probed.found == [(path, [SYMBOL_MARKS[0].name, SYMBOL_MARKS[1].name])]
    assert [on_return for *_, on_return in probed.attached] == [False, True] * 3
    assert {cookie & 0xFFFF for _, _, cookie, _ in probed.attached} == {1, 2}
    assert marks.attached == 3


@pytest.mark.usefixtures("marked")
def test_a_library_is_probed_once_whoever_maps_it(tmp_path: Path) -> None:
    probed = Probed()
    marks = probed.marks()
    path = str(libbpf_path())
    proc = fake_proc(tmp_path, mapping(path), mapping(path), mapping(path, inode=6))
    marks.scan(7, proc)
    marks.scan(7, proc)
    assert len(probed.found) == 2  # by its inode: the other one is another file


@pytest.mark.usefixtures("marked")
def test_a_library_that_an_upgrade_deleted_is_probed_by_its_mapping(tmp_path: Path) -> None:
    probed = Probed()
    proc = fake_proc(tmp_path, mapping("/usr/lib/old.so.1 (deleted)"))
    maps = proc / "7" / "map_files"
    maps.mkdir()
    (maps / "7f0000000000-7f0000001000").symlink_to(libbpf_path())
    marks = probed.marks()
    marks.scan(7, proc)
    assert marks.attached == 3
    assert {place[0] for place in probed.attached} == {str(maps / "7f0000000000-7f0000001000")}


@pytest.mark.usefixtures("marked")
@pytest.mark.parametrize(
    "line",
    [
        mapping("/usr/lib/libbpf.so.1", rights="r--p"),
        mapping("[vdso]"),
        mapping("/nonexistent/lib.so"),
        "7f0000000000-7f0000001000 rwxp 00000000 00:00 0",
        "",
        "garbage",
    ],
)
def test_other_mappings_are_passed_over(line: str, tmp_path: Path) -> None:
    probed = Probed()
    probed.marks().scan(7, fake_proc(tmp_path, line))
    assert (probed.found, probed.refused, probed.attached) == ([], [], [])


@pytest.mark.usefixtures("marked")
def test_a_refusal_is_told_and_not_repeated(tmp_path: Path) -> None:
    probed = Probed(refuse=True)
    marks = probed.marks()
    proc = fake_proc(tmp_path, mapping(str(libbpf_path())))
    marks.scan(7, proc)
    marks.scan(7, proc)
    assert len(probed.refused) == 1
    assert probed.refused[0][0] == str(libbpf_path())
    assert marks.attached == 0


def test_a_process_that_is_gone_is_nothing(tmp_path: Path) -> None:
    probed = Probed()
    probed.marks().scan(os.getpid(), tmp_path)
    assert probed.found == []


def test_drivers_are_probed_before_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their first call comes within milliseconds of the mapping, an engine's after its load."""
    order = []
    marks = LibraryMarks(lambda *_: None, lambda *_: None, lambda *_: None)
    monkeypatch.setattr(marks, "probe", lambda _path, shown: order.append(shown))
    names = ("/a/libtorch.so", "/b/libcuda.so.1 (deleted)", "/c/libllama.so", "/d/libamdhip64.so.6")
    marks.scan(7, fake_proc(tmp_path, *(mapping(n, inode=i) for i, n in enumerate(names))))
    assert order == [names[1], names[3], names[0], names[2]]


@pytest.mark.parametrize(
    ("forbidden", "said"),
    [("maps", "what pid 7 maps may not be read"), ("libx.so", "/lib/libx.so may not be read")],
)
def test_what_may_not_be_looked_at_is_not_said_to_have_nothing(
    forbidden: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a security module, which root is not above."""
    process = tmp_path / "7"
    (process / "root/lib").mkdir(parents=True)
    (process / "maps").write_text("10000-20000 r-xp 00000000 08:01 77 /lib/libx.so\n")
    (process / "root/lib/libx.so").write_bytes(b"no ELF file")

    def asked() -> str:
        marks = LibraryMarks(lambda *_: None, lambda *_: None, lambda *_: None)
        marks.scan(7, tmp_path)
        return marks.hidden

    assert asked() == ""
    opened = Path.open

    def refusing(path: Path, *arguments: Any, **named: Any) -> Any:
        if path.name == forbidden:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", refusing)
    assert asked() == f"{said}: Permission denied"
