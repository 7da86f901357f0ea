"""The collector's layouts and numbers against those of the C header, read from BTF."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile

from ttftprof.events import (
    CONTROL,
    CPU_MODES,
    EVENT,
    FAMILY_MASK,
    FILE_ROW,
    FILE_SLOT,
    LOST,
    TEXT,
    TEXT_PIECE,
    THREAD_ROW,
    THREAD_SLOT,
    WAIT_REASONS,
    CacheFlag,
    CpuMode,
    DeviceFlag,
    Kind,
    MmapFlag,
    ReadFlag,
    TextKind,
    Wait,
    dev_numbers,
    duration_end,
    kernel_dev,
)
from ttftprof.kernel.session import OBJECT, Settings
from ttftprof.kernel.table import HANDLERS, TABLE_SIZE, Call, call_tables

PROBES = Path(__file__).parents[2] / "probes"

# Everything of the header in one object: the probes' own BTF holds only what a map or a program's
# signature names, and never an enum that is used for its numbers alone.
EVERYTHING = """
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int s32;
typedef unsigned long long u64;
#include "events.h"
struct {
    struct event event;
    struct thread_slot thread_slot;
    struct file_slot file_slot;
    struct text text;
    struct control control;
    struct settings settings;
    enum event_kind event_kind;
    enum wait_reason wait_reason;
    enum mmap_flag mmap_flag;
    enum read_flag read_flag;
    enum device_flag device_flag;
    enum cache_flag cache_flag;
    enum cpu_mode cpu_mode;
    enum text_kind text_kind;
    enum text_size text_size;
    enum lost lost;
    enum syscall_class syscall_class;
    enum handler handler;
} everything;
"""

# Documentation/bpf/btf.rst: kinds by number, and what follows a type's 12-byte header.
STRUCT, ENUM = 4, 6
FOLLOWING = {1: 4, 3: 12, 14: 4, 17: 4}  # INT, ARRAY, VAR, DECL_TAG
PER_MEMBER = {4: 12, 5: 12, 6: 8, 13: 8, 15: 12, 19: 12}


@dataclass(frozen=True)
class CStruct:
    size: int
    offsets: dict[str, int]


@dataclass(frozen=True)
class Btf:
    """The structs and enums of one object, by name."""

    structs: dict[str, CStruct]
    enums: dict[str, dict[str, int]]


def read_btf(path: Path) -> Btf:
    with path.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".BTF")
        assert section is not None
        data = section.data()
    header, types_at, types_size, names_at, _ = struct.unpack_from("<4xIIIII", data)
    names = data[header + names_at :]

    def name(at: int) -> str:
        return str(names[at : names.index(b"\0", at)].decode())

    structs: dict[str, CStruct] = {}
    enums: dict[str, dict[str, int]] = {}
    for kind, name_at, size, members in types(data[header + types_at :][:types_size]):
        if kind == STRUCT:
            bits = {name(m): offset for m, _, offset in members}
            structs[name(name_at)] = CStruct(size, {n: b // 8 for n, b in bits.items()})
        elif kind == ENUM:
            enums[name(name_at)] = {name(m): value for m, value in members}
    return Btf(structs, enums)


def types(data: bytes) -> Iterator[tuple[int, int, int, list[tuple[int, ...]]]]:
    """(kind, offset of the name, size, members) of every type."""
    at = 0
    while at < len(data):
        name_at, info, size = struct.unpack_from("<III", data, at)
        kind, count = info >> 24 & 31, info & 0xFFFF
        at += 12 + FOLLOWING.get(kind, 0)
        width = PER_MEMBER.get(kind, 0)
        layout = "<III" if width == 12 else "<Ii"
        members = [struct.unpack_from(layout, data, at + width * n) for n in range(count)]
        yield kind, name_at, size, members if width else []
        at += width * count if width else 0


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> Btf:
    """The whole header, compiled for BPF as the probes are."""
    clang = shutil.which("clang")
    assert clang, "clang builds the probes; scripts/setup installs it"
    folder = tmp_path_factory.mktemp("btf")
    source, target = folder / "everything.c", folder / "everything.o"
    source.write_text(EVERYTHING)
    options = ["-O2", "-g", "-target", "bpf", "-I", str(PROBES)]
    subprocess.run([clang, *options, "-c", str(source), "-o", str(target)], check=True)
    return read_btf(target)


@pytest.fixture(scope="module")
def built() -> Btf:
    """What the object that is loaded says of itself."""
    return read_btf(OBJECT)


LAYOUTS = {
    "event": EVENT,
    "thread_slot": THREAD_SLOT,
    "file_slot": FILE_SLOT,
    "text": TEXT,
    "control": CONTROL,
}
# Of `settings` the collector writes a packed string, with these parts in order.
SETTINGS = np.dtype(
    [
        ("short_wait_ns", "<u8"),
        ("min_file_bytes", "<u8"),
        ("fault_begin", "<u8"),
        ("fault_end", "<u8"),
        ("own_tgid", "<u4"),
        ("ring_bytes", "<u4"),
        ("call_class", "u1", TABLE_SIZE),
        ("call_wait", "u1", TABLE_SIZE),
    ]
)


def layout(dtype: np.dtype[Any]) -> CStruct:
    assert dtype.fields is not None
    return CStruct(dtype.itemsize, {name: int(field[1]) for name, field in dtype.fields.items()})


@pytest.mark.parametrize("name", [*LAYOUTS, "settings"])
def test_layouts_agree_with_the_header(name: str, header: Btf) -> None:
    assert layout(LAYOUTS.get(name, SETTINGS)) == header.structs[name]


@pytest.mark.parametrize("name", ["thread_slot", "file_slot", "text", "control", "settings"])
def test_the_built_object_has_the_headers_layouts(name: str, header: Btf, built: Btf) -> None:
    assert built.structs[name] == header.structs[name]


def test_settings_are_written_where_the_kernel_reads_them() -> None:
    packed = Settings(short_wait_ns=7, min_file_bytes=11, own_tgid=13, event_ring_bytes=17).packed()
    (read,) = np.frombuffer(packed, SETTINGS)
    assert (read["short_wait_ns"], read["min_file_bytes"]) == (7, 11)
    assert (read["own_tgid"], read["ring_bytes"]) == (13, 17)
    assert (read["call_class"].tobytes(), read["call_wait"].tobytes()) == call_tables()


def test_an_event_and_its_ring_header_are_a_cache_line() -> None:
    assert EVENT.itemsize + 8 == 64


def members(numbers: dict[str, int], prefix: str) -> dict[str, int]:
    """An enum without its prefix and without the count that ends it."""
    return {name.removeprefix(prefix): value for name, value in numbers.items()}


@pytest.mark.parametrize(
    ("enum", "prefix", "ours", "counts"),
    [
        ("event_kind", "EVENT_", Kind, {}),
        ("wait_reason", "WAIT_", Wait, {"REASONS": WAIT_REASONS}),
        ("cpu_mode", "CPU_", CpuMode, {"MODES": CPU_MODES}),
        ("text_kind", "TEXT_", TextKind, {}),
        ("mmap_flag", "MMAP_", MmapFlag, {}),
        ("read_flag", "READ_", ReadFlag, {}),
        ("device_flag", "DEVICE_", DeviceFlag, {"FAMILY": FAMILY_MASK}),
        ("cache_flag", "CACHE_", CacheFlag, {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_numbers_agree_with_the_header(
    enum: str, prefix: str, ours: Any, counts: dict[str, int], header: Btf
) -> None:
    named = {member.name: int(member) for member in ours}
    assert named | counts == members(header.enums[enum], prefix)


def test_the_longest_text_agrees_with_the_header(header: Btf) -> None:
    sizes = header.enums["text_size"]
    assert max(sizes["TEXT_PIECE"], sizes["PATH_BYTES"]) == TEXT_PIECE


def test_classes_of_system_calls_agree_with_the_header(header: Btf) -> None:
    ours = {name: value for name, value in vars(Call).items() if name.isupper()}
    theirs = members(header.enums["syscall_class"], "CALL_")
    assert ours | {"NONE": 0, "CLASSES": max(ours.values()) + 1} == theirs


def test_every_kind_of_loss_has_its_words(header: Btf) -> None:
    places = members(header.enums["lost"], "LOST_")
    assert places.pop("KINDS") == CONTROL["lost"].shape[0]
    assert sorted(places.values()) == list(range(len(LOST)))


# Which program serves which slot of the header.
SERVES = {
    "OPEN": "files__open",
    "MMAP": "files__mmap",
    "MUNMAP": "files__munmap",
    "ADVISE": "files__advise",
    "FILE_READ": "files__read",
    "RECEIVE": "sockets__receive",
    "SEND": "sockets__send",
    "LOG": "logs__write",
    "CONNECTION": "sockets__connection",
    "DEVICE": "files__device",
}


def test_handlers_agree_with_the_header(header: Btf) -> None:
    slots = members(header.enums["handler"], "HANDLE_")
    assert slots.pop("HANDLERS") > max(HANDLERS.values())
    assert {SERVES[slot]: number for slot, number in slots.items()} == HANDLERS


@pytest.mark.parametrize("slot_and_row", [(THREAD_SLOT, THREAD_ROW), (FILE_SLOT, FILE_ROW)])
def test_rows_keep_the_slots_fields(slot_and_row: tuple[Any, Any]) -> None:
    slot, row = slot_and_row
    kept = [name for name in row.names if name != "ns"]
    assert row.names[0] == "ns"
    assert all(row[name] == slot[name] for name in kept)


@pytest.mark.parametrize("numbers", [(0, 0), (8, 1), (254, 0), (4095, (1 << 20) - 1)])
def test_device_numbers_come_back(numbers: tuple[int, int]) -> None:
    assert dev_numbers(kernel_dev(*numbers)) == numbers


def test_the_end_of_a_record() -> None:
    records = np.zeros(2, EVENT)
    records["start_ns"], records["duration_ns"] = (5, 7), (0, 10)
    assert duration_end(records).tolist() == [5, 17]
    assert duration_end(records).dtype == np.int64
