"""A gate's result in Markdown, for a job's summary, and as JUnit XML, for a test dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, TextIO
from xml.etree import ElementTree as Tree

from ttftprof import scale
from ttftprof.experiment.gate import Checked, Gate
from ttftprof.reports.markdown import text
from ttftprof.reports.safe import plain

_MARKS = {"regressed": "❌", "improved": "✅", "same": "✅", "undecided": "❔", "absent": "❔"}


def write_markdown(gate: Gate, out: TextIO) -> None:
    out.write("\n".join(_lines(gate)) + "\n")


def _lines(gate: Gate) -> Iterator[str]:
    yield f"## ttftprof check: {_verdict(gate)}"
    yield ""
    yield (
        f"A regression is slower by more than {scale.percent(gate.limit)} of the baseline's "
        "median, and beyond chance."
    )
    yield ""
    yield "| | condition | what | baseline | here | change | 95 % interval | p |"
    yield "|---|---|---|---:|---:|---:|---:|---:|"
    for one in gate.checked:
        where = f"{one.scenario}, {one.variant}"
        cells = (text(where), one.metric, _ns(one.base_median), _ns(one.median), _change(one))
        p = "" if one.p is None else f"{one.p:.3f}" if one.p >= 0.001 else "<0.001"
        yield f"| {_MARKS[one.result]} {one.result} | {' | '.join((*cells, _interval(one), p))} |"
    for one in gate.checked:
        if one.why:
            yield f"\n> {text(f'{one.scenario}, {one.metric}: {one.why}')}"
    for name, (before, now) in gate.differences.items():
        yield f"\n> **not the same**: {text(name)}: {text(before)} → {text(now)}"


def _verdict(gate: Gate) -> str:
    if gate.regressed:
        return "regressed"
    if gate.absent:
        return "not told"
    if len(gate.undecided) == len(gate.checked):
        return "too few runs to say"
    in_doubt = any(one.why for one in gate.checked)
    return "no regression, as far as can be told" if in_doubt else "no regression"


def _ns(ns: float | None) -> str:
    return scale.ABSENT if ns is None else scale.duration(round(ns))


def _change(one: Checked) -> str:
    if one.shift is None:
        return scale.ABSENT
    shown = f"{one.shift.shift.value / 1e6:+.1f} ms"
    return shown if one.share is None else f"{shown} ({one.share * 100:+.0f} %)"


def _interval(one: Checked) -> str:
    interval = one.shift.shift.interval if one.shift else None
    if interval is None:
        return ""
    return f"{interval.low / 1e6:+.1f} to {interval.high / 1e6:+.1f} ms"


def write_junit(gate: Gate, out: BinaryIO) -> None:
    """A test case a condition and metric; what could not be told is skipped, not passed."""
    suite = Tree.Element(
        "testsuite",
        name="ttftprof",
        tests=str(len(gate.checked)),
        failures=str(len(gate.regressed)),
        skipped=str(len(gate.undecided)),
        errors=str(len(gate.absent)),
    )
    for one in gate.checked:
        case = Tree.SubElement(
            suite,
            "testcase",
            classname=plain(f"{one.scenario}, {one.variant}"),
            name=one.metric,
            time=f"{(one.median or 0) / 1e9:.6f}",
        )
        if one.result == "regressed":
            message = f"{_ns(one.base_median)} → {_ns(one.median)}, {_change(one)}"
            Tree.SubElement(case, "failure", message=message).text = _interval(one)
        elif one.result == "absent":
            Tree.SubElement(case, "error", message=plain(one.why))
        elif one.result == "undecided":
            Tree.SubElement(case, "skipped", message=plain(one.why))
    Tree.indent(suite)
    Tree.ElementTree(suite).write(out, encoding="utf-8", xml_declaration=True)
    out.write(b"\n")
