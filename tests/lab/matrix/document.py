"""docs/KERNELS.md, made of the table of probes and of what kernels said that `kernels.py` booted.

python -m lab.matrix.document > docs/KERNELS.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lab.matrix.kernels import RESULTS, hooks
from ttftprof.kernel.session import MINIMUM
from ttftprof.kernel.table import PROBES, VARIANTS, Probe

LOADERS = {"btf": "", "headers": ", bcc"}
_WITHOUT_BTF = " without BTF"
_HEAD = f"""# Kernels

Made by `scripts/kernel-matrix`, which boots each of these kernels of Debian and Ubuntu in an
emulated machine, loads the probes, works a little and counts; and from `probes/` and
`kernel/table.py`, which say what a probe needs. Do not edit.

The oldest kernel is {MINIMUM}. One with BTF is met by libbpf; one without, or any by
`record --loader bcc`, by what bcc compiles of its headers: the same probes in the second dialect
of `probes/compat.bpf.h`, the same records. What is lost there is in the columns `bcc`; the one
`without BTF` is Debian's source of 6.1, built without, on which `record` and `report` were run, too
(`tests/unit/test_without_btf.py`).

`yes`: every hook is there and taken. `part`, `no`: see below what is lost. `–`: too old.
`fields by casts`: the kernel takes the build that reads what lies at an address in place
(`bpf_rdonly_cast`), with every hook that it takes of the plain one; elsewhere that one serves.
"""


@dataclass(frozen=True)
class Column:
    """One kernel under one loader; `refused`: why, by program that it does not take. `casts`: the
    same of the build with casts, None where the kernel has none or the loader does not use them."""

    title: str
    release: str
    machine: str
    loader: str
    refused: dict[str, str]
    runs: dict[str, int]
    records: dict[str, int]
    casts: dict[str, str] | None = None
    records_by_casts: dict[str, int] | None = None

    @property
    def version(self) -> tuple[int, int]:
        major, minor = re.findall(r"\d+", self.release)[:2]
        return int(major), int(minor)

    @property
    def is_too_old(self) -> bool:
        return self.version < tuple(map(int, MINIMUM.split(".")))


def columns() -> list[Column]:
    """Every kernel that was booted, oldest first, once by loader."""
    found = []
    for path in RESULTS.glob("*.json"):
        said = json.loads(path.read_text())
        by_loader = said["programs"] or {"btf": {}}
        casts = by_loader.pop("casts", None)
        for loader, programs in by_loader.items():
            version = ".".join(said["release"].split(".")[:2])
            arch = "" if said["machine"] == "x86_64" else " arm64"
            arch += "" if said.get("has_btf", True) or loader == "btf" else _WITHOUT_BTF
            found.append(
                Column(
                    f"{version}{arch}{LOADERS[loader]}",
                    said["release"],
                    said["machine"],
                    loader,
                    refused(programs),
                    {n: p["runs"] for n, p in programs.items()},
                    said["records"].get(loader, {}),
                    refused(casts) if casts and loader == "btf" else None,
                    said["records"].get("casts") if loader == "btf" else None,
                )
            )
    return sorted(found, key=lambda c: (c.version, c.machine != "x86_64", c.loader, c.title))


def refused(programs: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: said["refused"] for name, said in programs.items() if said["refused"]}


def cast_cell(column: Column) -> str:
    if column.is_too_old:
        return "–"
    return "yes" if column.casts is not None else "no"


def lacking(probe: Probe, column: Column) -> list[str]:
    """The programs of a probe that a kernel does not take; of several forms one is enough."""
    own = {name for name in column.runs if name.partition("__")[0] == probe.stem}
    refused = {name for name in own if name in column.refused}
    for variants in VARIANTS:
        forms = own & variants.keys()
        if forms and forms - refused:
            refused -= forms
        elif forms:
            refused -= set(sorted(forms)[1:])
    return sorted(refused)


def cell(probe: Probe, column: Column) -> str:
    if column.is_too_old:
        return "–"
    own = {name for name in column.runs if name.partition("__")[0] == probe.stem}
    missing = lacking(probe, column)
    if not missing:
        return "yes"
    others = own - set(missing) - {n for v in VARIANTS for n in v if set(v) & set(missing)}
    return "part" if others else "no"


def losses(column: Column) -> Iterator[str]:
    """What a user of this kernel does without."""
    by_cost: dict[str, list[str]] = {}
    for probe in PROBES:
        programs = lacking(probe, column)
        whole = cell(probe, column) == "no"
        for program in programs:
            cost = probe.cost_of_absence if whole else probe.cost_of(program)
            by_cost.setdefault(f"{probe.title}: {cost}", []).append(column.refused[program])
    for cost, reasons in by_cost.items():
        yield f"- {cost} ({'; '.join(dict.fromkeys(map(in_words, reasons)))})"


def in_words(reason: str) -> str:
    if found := re.search(r"struct (\w+)", reason):
        return f"the headers do not describe {found[1]}"
    return reason


def needs() -> Iterator[str]:
    """A row a probe: its hooks with the kernel that brought each."""
    by_program = hooks()
    for probe in PROBES:
        since = dict(probe.needs)
        own = {h for p, h in by_program.items() if p.partition("__")[0] == probe.stem}
        named = ", ".join(
            f"{hook} {since[hook]}" if hook in since else hook for hook in sorted(own | set(since))
        )
        yield f"| {probe.title} | {named or '–'} | {probe.cost_of_absence} |"


def document() -> str:
    found = columns()
    lines = [_HEAD, "## Which probes a kernel takes", ""]
    lines.append("| probe | " + " | ".join(c.title for c in found) + " |")
    lines.append("|---|" + "---|" * len(found))
    for probe in PROBES:
        lines.append(f"| {probe.title} | " + " | ".join(cell(probe, c) for c in found) + " |")
    lines.append("| fields by casts | " + " | ".join(map(cast_cell, found)) + " |")
    lines += ["", "## What is lost, by kernel", ""]
    for column in found:
        if column.is_too_old:
            lines += [
                f"**{column.title}** ({column.release}): refused, {MINIMUM} is the oldest",
                "",
            ]
        elif lost := list(losses(column)):
            lines += [f"**{column.title}** ({column.release})", "", *lost, ""]
        else:
            lines += [f"**{column.title}** ({column.release}): nothing", ""]
    lines += ["## What a probe needs", ""]
    lines += ["| probe | hooks, with the kernel that brought them | without it |", "|---|---|---|"]
    lines += needs()
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
