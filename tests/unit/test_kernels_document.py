"""docs/KERNELS.md is what the table of probes and the booted kernels say."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.matrix.document import Column, cell, columns, document, lacking
from lab.matrix.kernels import hooks
from ttftprof.kernel.table import PROBES, VARIANTS, Probe

DOCUMENT = Path(__file__).parents[2] / "docs" / "KERNELS.md"
COLUMNS = columns()
MET = (
    *("process__fork", "process__exec", "process__exit", "process__signal", "cpu__tick"),
    *("syscalls__enter", "syscalls__exit", "sockets__state", "pagecache__add"),
    *("pagecache__delete", "block__issue", "block__complete", "marks__call", "marks__return"),
)
# What depends on the moment (a small read is told if it is slow); and FUSE, that is in no header.
CHANCY = {
    *("event OFFCPU", "event TOUCH", "event REMOTE", "event CONN", "event BLOCK"),
    *("event READ", "text LEFT", "text LOG"),
}
TOLD = {"event FORK", "event OPEN", "event MMAP", "event ACCEPT", "text RECEIVED", "text SENT"}
RECENT = [c for c in COLUMNS if not c.is_too_old]


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == document(), "PYTHONPATH=tests python -m lab.matrix.document"


@pytest.mark.parametrize("column", RECENT, ids=lambda c: c.title)
def test_a_hook_came_with_the_kernel_that_the_table_names(column: Column) -> None:
    """Every tracepoint is there from then on, and not before."""
    forms = {name for variants in VARIANTS for name in variants}
    by_program = hooks()
    wrong = []
    for probe in PROBES:
        since = {hook: tuple(map(int, v.split("."))) for hook, v in probe.needs}
        for program, hook in by_program.items():
            own = program.partition("__")[0] == probe.stem and program in column.runs
            if not own or hook not in since or program in forms:
                continue
            taken = program not in column.refused
            described = column.loader == "btf" or not probe.types
            if described and taken != (column.version >= since[hook]):
                wrong.append((program, hook, since[hook], column.refused.get(program)))
    assert not wrong


@pytest.mark.parametrize("column", RECENT, ids=lambda c: c.title)
def test_what_cannot_be_done_without_is_there(column: Column) -> None:
    for probe in PROBES:
        if probe.required:
            assert cell(probe, column) == "yes", lacking(probe, column)


@pytest.mark.parametrize("column", RECENT, ids=lambda c: c.title)
def test_the_probes_were_not_only_loaded_but_ran(column: Column) -> None:
    """All that the little work in the VM should meet; run by a tail call, none is counted."""
    assert {name: column.runs[name] > 0 for name in MET} == dict.fromkeys(MET, True)


@pytest.mark.parametrize("version", sorted({c.version for c in RECENT if c.loader == "headers"}))
def test_both_loaders_count_the_same_edges_on_a_kernel(version: tuple[int, int]) -> None:
    """The same work under both, also where there is no BTF."""
    same = [c for c in RECENT if c.version == version and c.machine == "x86_64"]
    found = {c.title: c.records for c in same}
    exact = [
        {kind: n for kind, n in records.items() if kind not in CHANCY} for records in found.values()
    ]
    assert len(exact) >= 2
    assert exact == [exact[0]] * len(exact)
    assert exact[0].keys() >= TOLD


CASTS_SINCE = (6, 2)


@pytest.mark.parametrize("column", [c for c in RECENT if c.loader == "btf"], ids=lambda c: c.title)
def test_the_build_with_casts_is_as_good_as_the_plain_one(column: Column) -> None:
    """Wherever the kernel has casts: the same hooks, and the same work gives the same edges."""
    assert (column.casts is not None) == (column.version >= CASTS_SINCE)
    if column.casts is None or column.records_by_casts is None:
        return
    assert column.casts == column.refused
    exact = [
        {kind: n for kind, n in records.items() if kind not in CHANCY}
        for records in (column.records, column.records_by_casts)
    ]
    assert exact[0] == exact[1]


def column(refused: dict[str, str], release: str = "6.1.0", loader: str = "btf") -> Column:
    runs = dict.fromkeys(hooks(), 1)
    return Column("6.1", release, "x86_64", loader, refused, runs, {})


def test_one_of_several_forms_is_enough() -> None:
    offcpu = next(p for p in PROBES if p.stem == "offcpu")
    assert cell(offcpu, column({"offcpu__switch": "another form"})) == "yes"
    both = column({"offcpu__switch": "x", "offcpu__switch_before_5_18": "x"})
    assert cell(offcpu, both) == "no"
    assert lacking(offcpu, both) == ["offcpu__switch"]


def test_what_is_lost_in_part_costs_less_than_all() -> None:
    block: Probe = next(p for p in PROBES if p.stem == "block")
    assert cell(block, column({"block__requeue": "no tracepoint"})) == "part"
    assert cell(block, column({}, release="5.10.0-1")) == "–"
