"""The arguments that the probes take by their place, against the trace formats of real kernels."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.matrix.kernels import hooks
from ttftprof.kernel import libbpf
from ttftprof.kernel.libbpf import BpfError
from ttftprof.kernel.session import ProbeObject, ProbeSession, Settings
from ttftprof.kernel.table import ON_ENTRY, PROBES, VARIANTS
from ttftprof.kernel.types import KernelTypes

ROOT = Path(__file__).parents[2]
FORMATS = sorted((ROOT / "tests/fixtures/tracefs").glob("*/*/*"))
SIZES = {"u16": 2, "u32": 4, "int": 4, "unsigned int": 4, "u64": 8, "unsigned long": 8,
         "long long": 8}  # fmt: skip
# What an argument is called in the trace, where that is another word.
FIELDS = {
    "handle": "fid", "tree": "tid", "session": "sesid", "bytes": "len", "error": "rc",
    "command": "cmd", "number": "mid", "request": "rreq_debug_id", "part": "rreq_debug_index",
    "position": "offset",
}  # fmt: skip
PAGES = {"nfs_aop_readahead": "nr_pages", "page_cache_ra_unbounded": "nr_to_read"}


def programs() -> dict[str, dict[str, list[tuple[str, str]]]]:
    """{hook: {program: (type, name) of its arguments that are no pointers}}."""
    found: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for source in sorted((ROOT / "probes").glob("*.bpf.c")):
        text = source.read_text()
        for hook, program, told in re.findall(
            r"TRACEPOINT\((\w+)\)\nint BPF_PROG\((\w+), ([^)]*)\)", text
        ):
            arguments = [one.split() for one in told.split(",") if "*" not in one]
            scalars = [(" ".join(words[:-1]), words[-1]) for words in arguments]
            found.setdefault(hook, {})[program] = scalars
    return found


def fields_of(file: Path) -> list[tuple[str, int]]:
    """(name, bytes) of the fields of an event, in order, without those that all events have."""
    own = file.read_text().split("\n\n")[1]
    return [
        (name, int(size)) for name, size in re.findall(r"(\w+);\s+offset:\d+;\s+size:(\d+);", own)
    ]


@pytest.mark.parametrize("file", FORMATS, ids=lambda f: f"{f.parts[-3]}-{f.name}")
def test_arguments_are_where_the_kernel_has_them(file: Path) -> None:
    """A trace's fields are written in the order of the hook's arguments, with their sizes."""
    hook, fields = file.name, fields_of(file)
    forms = programs()[hook]
    fitting = {p: a for p, a in forms.items() if len(forms) == 1 or len(a) == len(fields)}
    [(program, arguments)] = fitting.items()
    assert arguments
    places = []
    for kind, name in arguments:
        called = PAGES[hook] if name == "pages" else FIELDS.get(name, name)
        [place] = [at for at, (field, _) in enumerate(fields) if field == called]
        assert fields[place][1] == SIZES[kind], (program, name)
        places.append(place)
    assert places == sorted(places)
    if len(forms) > 1:  # the form with this number is the one that is loaded
        [expected] = [variants[program] for variants in VARIANTS if program in variants]
        assert expected == len(fields)


def test_both_kernels_formats_are_there() -> None:
    hooks = {name for probe in PROBES for name, _ in probe.needs}
    assert {file.name for file in FORMATS} <= hooks
    for kernel in ("6.1", "6.12"):
        have = {file.name for file in FORMATS if file.parts[-3] == kernel}
        assert {"smb3_read_enter", "smb3_read_done", "smb3_cmd_done", "rpc_stats_latency",
                "nfs_aop_readahead"} <= have  # fmt: skip


class Kernel(KernelTypes):
    """One that has every hook but some tracepoints."""

    def __init__(self, without: set[str]) -> None:
        self.without = without

    def has_module(self, name: str) -> bool:
        return True

    def arguments(self, tracepoint: str, modules: Iterable[str] = ()) -> int | None:
        forms = {n: v for variants in VARIANTS for n, v in variants.items()}
        [wanted, *_] = (forms.get(p, 0) for p, h in hooks().items() if h == tracepoint)
        return None if tracepoint in self.without else wanted

    def has_function(self, name: str, modules: Iterable[str] = ()) -> bool:
        return True


def left_out(without: set[str]) -> set[str]:
    """The programs that are not loaded on a kernel that lacks these tracepoints."""
    names = ProbeObject()
    try:
        return ProbeSession(Settings())._look_for_hooks(Kernel(without), names)
    finally:
        names.close()


def test_a_function_stands_in_for_a_missing_tracepoint_in_both_ways() -> None:
    """Whether by fentry or by a kprobe, the kernel says when it is attached."""
    entry, kprobe = (f"faults__fault{form}" for form in ON_ENTRY)
    assert {entry, kprobe} <= left_out(set())
    without = left_out({"mm_filemap_fault"})
    assert "faults__fault" in without
    assert not {entry, kprobe} & without


def test_a_kprobe_serves_where_fentry_cannot_be_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """arm64 before 6.4: it is loaded, and attaching it fails with ENOTSUPP."""
    tried = []

    def attach(_session: ProbeSession, name: str, _program: object) -> None:
        tried.append(name)
        if not name.endswith("_kprobe"):
            raise BpfError(f"attach {name}", 524)

    entry, kprobe = (f"faults__fault{form}" for form in ON_ENTRY)
    monkeypatch.setattr(ProbeSession, "_attach_program", attach)
    session = ProbeSession(Settings())
    session._object = SimpleNamespace(programs={entry: None, kprobe: None})  # type: ignore[assignment]
    session._attach_first([entry, kprobe])
    assert tried == [entry, kprobe]
    assert session.states["faults"].state == "ok"
    session._attach_first([entry])
    assert session.states["faults"].state == "degraded"
    assert session.states["faults"].lost == "faults cannot be split by file"


def test_a_tick_that_cannot_be_attached_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU that came on it is tried again once a second."""
    opened = []

    def open_event(_cpu: int, _hz: int) -> int:
        opened.append(os.open(os.devnull, os.O_RDONLY))
        return opened[-1]

    refusing = SimpleNamespace(bpf_program__attach_perf_event_opts=lambda *_: None)
    monkeypatch.setattr(libbpf, "open_clock_event", open_event)
    monkeypatch.setattr(libbpf, "last_words", str)
    monkeypatch.setattr(libbpf, "library", lambda: refusing)
    with pytest.raises(BpfError):
        ProbeSession(Settings())._attach_tick(libbpf.Pointer(), 1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])
