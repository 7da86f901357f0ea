"""Figures of `bench` as tables: for a terminal, and for docs/COST.md, between its markers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lab.bench_report import Cost, linear
from lab.bench_tools import TOOLS
from lab.bench_workloads import TITLES
from lab.gpu_floor import Floor
from ttftprof import scale

_ALONE = ("armed", "report", "drain", "python", "client", "gpu")
COST_PAGE = Path(__file__).parents[2] / "docs/COST.md"
Row = Mapping[str, Any]


def shown(what: str, rows: Sequence[Row]) -> str:
    """The tables of one workload, as Markdown."""
    if what == "armed":
        return _armed(rows)
    if what == "report":
        return _report(rows)
    if what == "drain":
        return _drain(rows[0])
    if what == "python":
        return _python(rows)
    if what == "client":
        return _client(rows)
    if what == "gpu":
        return _gpu(rows)
    return _slowdown({what: rows}) + "\n" + _own_cost({what: rows})


def write(figures: Mapping[str, Sequence[Row]]) -> None:
    """Puts the kept figures into docs/COST.md, each table between its markers."""
    compared = {what: figures[what] for what in TITLES if what in figures}
    parts = {"slowdown": _slowdown(compared), "own": _own_cost(compared)} if compared else {}
    parts |= {"tools": "\n".join(f"- **{tool.name}**: {tool.about}" for tool in TOOLS) + "\n"}
    parts |= {w: shown(w, figures[w]) for w in _ALONE if w in figures}
    text = COST_PAGE.read_text()
    for name, table in parts.items():
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if end:
            text = f"{before}<!-- {name} -->\n{table}{end}{after}"
    COST_PAGE.write_text(text)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _slowdown(figures: Mapping[str, Sequence[Row]]) -> str:
    """Workloads × tools: ratio of the fastest; median of pairs (quartiles)."""
    names = [tool.name for tool in TOOLS]

    def cell(rows: Sequence[Row], name: str) -> str:
        row = next((r for r in rows if r["tool"] == name), None)
        if row is None:
            return ""
        if row["refused"]:
            return "refused"
        low, high = row["ratio_quartiles"]
        return f"**{row['fastest_ratio']:.2f}**; {row['ratio']:.2f} ({low:.2f}–{high:.2f})"

    rows = (
        [TITLES[what], f"{_first(found)['bare_ms']:.0f}", *(cell(found, name) for name in names)]
        for what, found in figures.items()
    )
    refused = [
        f"- {row['tool']} on {TITLES[what]}: {row['refused']}\n"
        for what, found in figures.items()
        for row in found
        if row["refused"]
    ]
    table = _table(["watched / bare", "bare, ms", *names], rows)
    return table + "".join(["\n", *refused] if refused else [])


def _first(rows: Sequence[Row]) -> Row:
    """That of the first tool, whose pairs are most."""
    return next((row for row in rows if row["tool"] == TOOLS[0].name), rows[0])


def _own_cost(figures: Mapping[str, Sequence[Row]]) -> str:
    """Tools: medians over the workloads, the worst of them for memory, all that was lost."""
    rows = []
    for tool in TOOLS:
        own = [r for found in figures.values() for r in found if r["tool"] == tool.name]
        own = [r for r in own if not r["refused"]]
        if own:
            switch = next((r for r in own if r["workload"] == "switch"), None)
            rows.append([
                tool.name,
                scale.tenth_percent(switch['cpu_share']) if switch else "",
                scale.percent(max(r['cpu_share'] for r in own)),
                f"{max(r['peak_mb'] for r in own):.0f}",
                f"{max(r['file_kb'] for r in own):,.0f}",
                f"{sum(r['lost'] for r in own):,d}",
            ])  # fmt: skip
    head = [
        "tool",
        "CPU at a switch",
        "CPU at most",
        "memory, MB",
        "file at most, kB",
    ]
    return _table([*head, "lost"], rows)


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _armed(rows: Sequence[Row]) -> str:
    head = ["tool", "armed after, s: median", "least", "most", "memory then, MB", "rounds"]
    lines = [
        [row["tool"], *(f"{row[n]:.2f}" for n in ("median_s", "least_s", "most_s")),
         f"{row['resident_mb']:.0f}", str(row["rounds"])]
        if row["rounds"] else [row["tool"], "refused", "", "", "", "0"]
        for row in rows
    ]  # fmt: skip
    refused = [f"- {row['tool']}: {row['refused']}\n" for row in rows if row["refused"]]
    return _table(head, lines) + "".join(["\n", *refused] if refused else [])


def _report(rows: Sequence[Row]) -> str:
    costs = [Cost(**row) for row in rows]
    lines = [
        [c.command, c.shape, f"{c.events:,d}", f"{c.cpu_s:.2f}", f"{c.wall_s:.2f}",
         f"{c.peak_bytes / 1e6:.0f}"]
        for c in costs
    ]  # fmt: skip
    table = _table(["command", "recording", "records", "CPU, s", "wall, s", "peak, MB"], lines)
    return table + "\n" + "".join(f"{line}\n" for line in linear(costs))


def _drain(row: Row) -> str:
    return _table(
        ["records", "drained / CPU s", "drained and written / CPU s", "bytes a record", "lost"],
        [[f"{row['records']:,d}", f"{row['drained_per_cpu_s'] / 1e6:.1f} million",
          f"{row['kept_per_cpu_s'] / 1e6:.1f} million", f"{row['bytes_a_record']:.1f}",
          f"{row['lost']:,d}"]],
    )  # fmt: skip


def _client(rows: Sequence[Row]) -> str:
    head = ["streams at once", "median share of a core", "least", "most", "rounds"]
    lines = [
        [str(row["streams"]), *(scale.tenth_percent(row[n]) for n in ("median", "least", "most")),
         str(row["rounds"])]
        for row in rows
    ]  # fmt: skip
    return _table(head, lines)


def _gpu(rows: Sequence[Row]) -> str:
    head = [
        "GPUs",
        "traffic of the link",
        "cores",
        "memory",
        "share of a core, median",
        "least",
        "most",
    ]
    head += ["all asked every", "only wakes, in C", "only wakes, in Python", "wakes and calls"]
    head += ["off the schedule, median", "late, median", "late, 95 %"]
    lines = [
        [str(row["devices"]), "counted" if row["counted"] else "measured by a call",
         "taken" if row["cores_taken"] else "free", "moves" if row["moves"] else "rests",
         *(f"{row[name]:.2%}".replace("%", " %") for name in ("median", "least", "most")),
         scale.duration(row["all_every_ns"]),
         *(f"{row['floor'][one.name]:.2%}".replace("%", " %") for one in fields(Floor)),
         *(scale.duration(row[f"{name}_ns"]) for name in ("off_median", "late_median", "late_p95"))]
        for row in rows
    ]  # fmt: skip
    return _table(head, lines)


def _python(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        low, high = row["cpu_quartiles"]
        cpu = f"{row['cpu_ratio']:.3f} ({low:.3f}–{high:.3f})"
        lines.append([row["tool"], cpu, f"{row['ttft_ratio']:.3f}", str(row["pairs"])])
    return _table(["recorded with", "CPU of the same work / bare", "TTFT / bare", "pairs"], lines)
