"""The report as one HTML file that opens anywhere: a timeline to explore, the tables to read.

Guarantees: the file is whole in itself and its own policy forbids it any connection and any script
but its own; foreign text reaches the page only escaped or as text; every number in the tables is
the JSON report's, rounded so that parts add up. Without JavaScript the tables remain.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, TextIO

import jinja2
from markupsafe import Markup, escape

from ttftprof import diff, scale
from ttftprof.diff import Comparison
from ttftprof.model import (
    ACTIVITIES,
    PHASES,
    FileUse,
    GpuUse,
    MountUse,
    Part,
    Phase,
    Report,
    Request,
)
from ttftprof.reports import diff_words, html_data, python, words
from ttftprof.reports.safe import clip_middle, plain

# What a file uses stands in those before it.
_SCRIPTS = (
    "vocabulary",
    "numbers",
    "data",
    "paint",
    "timeline",
    "lanes",
    "view",
    "drawing",
    "lane_drawing",
    "pointer",
    "hands",
    "told",
    "search",
    "page",
)
_DETAILED = 40  # requests of a recording whose tables are in the page
_LISTED = 1_000
_FILES = 40
_NAME = 200


def write(reports: Sequence[Report], out: TextIO) -> None:
    """Writes the page. `reports` in the order in which they are to be read."""
    _write([(report, None) for report in reports], (), out)


def write_comparison(comparisons: Sequence[Comparison], out: TextIO) -> None:
    """Writes the page of comparisons, all with the same base: what grew in each, then the waits
    with their timelines, which are aligned where the requests begin and move together."""
    waits = [comparisons[0].base, *(comparison.other for comparison in comparisons)]
    _write([(wait.report, wait.request) for wait in waits], comparisons, out)


def _write(
    shown: Sequence[tuple[Report, Request | None]],
    comparisons: Sequence[Comparison],
    out: TextIO,
) -> None:
    """`shown`: recordings, each with the request that is chosen at first: None for the slowest."""
    script, style = _script(), asset("report.css")
    reports = [report for report, _ in shown]
    names = ", ".join(plain(words.recording_name(report), 60) for report in reports[:3])
    page = template("report.html.j2").render(
        title=f"{names} · ttftprof",
        script=Markup(script),
        style=Markup(style),
        script_hash=inline_hash(script),
        style_hash=inline_hash(style),
        data=Markup(html_data.embedded(html_data.document(reports, linked=bool(comparisons)))),
        comparisons=[_comparison(comparison) for comparison in comparisons],
        recordings=[_recording(report, chosen) for report, chosen in shown],
        phases=PHASES,
        activities=ACTIVITIES,
    )
    out.write(page)


def _script() -> str:
    """The files of the timeline as one script, in a scope of its own."""
    parts = (asset(f"report/{name}.js") for name in _SCRIPTS)
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


def asset(name: str) -> str:
    return resources.files("ttftprof.reports").joinpath("assets", name).read_text("utf-8")


def inline_hash(text: str) -> str:
    """As a Content-Security-Policy names an inline element it trusts."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def prose(text: str) -> Markup:
    """Escaped; what stands between backticks as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "duration": scale.duration,
        "size": scale.size,
        "rate": scale.rate,
        "count": scale.count,
        "percent": scale.percent,
        "plain": plain,
        "prose": prose,
    }
    return environment.from_string(asset(name))


# -- one recording --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the list of requests; `bar`: (phase, x, width) in thousandths of the longest."""

    index: int
    title: str
    model: str
    kind: str
    waited_ns: int
    answered: bool
    cause: str
    bar: tuple[tuple[str, float, float], ...]


def _recording(report: Report, chosen: Request | None) -> dict[str, Any]:
    shown = html_data.subjects(report)
    order = sorted(
        range(len(shown)), key=lambda i: (shown[i] is not chosen, -words.waited_ns(shown[i]))
    )
    detailed = sorted(order[:_DETAILED])
    longest_ns = max(map(words.waited_ns, shown), default=0)
    rows = [_row(i, shown[i], longest_ns) for i in sorted(order[:_LISTED])]
    return {
        "name": _name(report, chosen),
        "facts": _facts(report),
        "warnings": [plain(warning) for warning in words.warnings(report)],
        "notes": [plain(note) for note in report.notes],
        "cost": _cost(report),
        "rows": rows,
        "not_listed": len(shown) - len(rows),
        "not_detailed": len(rows) - len(detailed),
        "subjects": [_subject(index, shown[index]) for index in detailed],
        "chosen": order[0] if order else -1,
    }


def _name(report: Report, chosen: Request | None) -> str:
    name = plain(words.recording_name(report), _NAME)
    return name if chosen is None else f"{name}, {html_data.title(chosen)}"


def _facts(report: Report) -> list[str]:
    host, length_ns = report.host, report.end_ns - report.start_ns
    return [
        plain(words.engines(report), 80),
        *([plain(host["node"], 60)] if host.get("node") else []),
        *([f"Linux {plain(host['kernel'], 60)}"] if host.get("kernel") else []),
        f"{scale.duration(max(length_ns, 0))} recorded",
        f"ended: {plain(report.ended_because, 120) or 'not known why'}",
    ]


def _cost(report: Report) -> str:
    cpu_ns, length_ns = report.overhead.cpu_ns, report.end_ns - report.start_ns
    if cpu_ns is None or length_ns <= 0:
        return ""
    share = f"{scale.tenth_percent(cpu_ns / length_ns)} of one core"
    return f"Recording itself took {scale.duration(cpu_ns)} of CPU time ({share})."


def _row(index: int, subject: Request, longest_ns: int) -> _Row:
    waited_ns = words.waited_ns(subject)
    start_ns = words.span(subject)[0]
    unit = max(longest_ns, 1) / 1000
    bar = tuple(
        (p.phase, round((p.start_ns - start_ns) / unit, 2), round(p.duration_ns / unit, 2))
        for p in subject.phases
        if p.duration_ns
    )
    return _Row(
        index=index,
        title=html_data.title(subject),
        model=_model(subject),
        kind=words.switch_kind(subject),
        waited_ns=waited_ns,
        answered=not words.unfinished(subject),
        cause=plain(words.cause(subject.verdict), 60),
        bar=bar,
    )


def _model(subject: Request) -> str:
    return clip_middle(plain(subject.model), 60) if subject.model else "model not known"


# -- one wait against another ---------------------------------------------------------------------


def _comparison(comparison: Comparison) -> dict[str, Any]:
    waits = (comparison.base, comparison.other)
    longest_ns = max(diff.length_ns(wait.request) for wait in waits)
    cells = diff_words.difference_us(comparison)
    return {
        "title": f"{diff_words.name_of(waits[1])} against {diff_words.name_of(waits[0])}",
        "lengths": [scale.duration(diff.length_ns(wait.request)) for wait in waits],
        "growth": diff_words.signed(comparison.growth_ns),
        "growth_ns": comparison.growth_ns,
        "finding": diff_words.finding(comparison),
        "rule": diff_words.rule(comparison),
        "rows": [(diff_words.name_of(wait), _row(0, wait.request, longest_ns)) for wait in waits],
        "columns": comparison.activities,
        "table": [
            (
                phase,
                phase == comparison.blamed,
                [(diff_words.signed_ms(us), us) for us in row],
                diff_words.signed_ms(sum(row)) or "0",
            )
            for phase, row in zip(comparison.phases, cells, strict=True)
        ],
        "totals": [diff_words.signed_ms(sum(c)) or "0" for c in zip(*cells, strict=True)],
        "whole": diff_words.signed_ms(sum(map(sum, cells))) or "0",
        "circumstances": [
            [
                "-" if text is None else clip_middle(plain(text), _NAME)
                for text in (c.name, c.base, c.other)
            ]
            for c in comparison.circumstances
        ],
    }


# -- one request ----------------------------------------------------------------------------------


def _subject(index: int, subject: Request) -> dict[str, Any]:
    moves = [(t, n) for t, n in words.CACHE_MOVES if any(getattr(f, n) for f in subject.files)]
    return {
        "index": index,
        "title": html_data.title(subject),
        "model": _model(subject),
        "endpoint": plain(subject.endpoint, 80),
        "kind": words.switch_kind(subject),
        "outcome": words.unfinished(subject),
        "what": "to start" if words.is_start(subject) else "to the first token",
        "waited_ns": words.waited_ns(subject),
        "ttft_ns": subject.ttft_ns,
        "tokens": _tokens(subject),
        "cause": plain(words.cause(subject.verdict), 80),
        "verdict": subject.verdict,
        "actions": [_action(a) for a in subject.verdict.actions],
        "phases": [_phase_row(p, subject) for p in subject.phases],
        "table": _table(subject),
        "python": _python(subject),
        "files": [_file(f, moves) for f in words.by_importance(subject.files)[:_FILES]],
        "file_moves": [title.replace("\n", " ") for title, _ in moves],
        "waits": _waits(subject),
        "files_left": max(len(subject.files) - _FILES, 0),
        "mounts": [_mount(m) for m in subject.mounts],
        "gpus": [_gpu(g) for g in subject.gpu],
        "notes": [plain(note) for note in subject.notes],
    }


def _tokens(subject: Request) -> str:
    if subject.prompt_tokens is None:
        return ""
    cached = f", {subject.cached_tokens:,} cached" if subject.cached_tokens else ""
    return f"{subject.prompt_tokens:,} prompt tokens{cached}"


def _action(action: Any) -> dict[str, str]:
    gain = action.expected_gain_ns
    return {
        "change": plain(action.change),
        "gain": "gain not modelled" if gain is None else f"saves about {scale.estimate(gain)}",
        "verify": plain(action.verify),
    }


def _phase_row(phase: Phase, subject: Request) -> dict[str, Any]:
    waited_ns = words.waited_ns(subject)
    return {
        "phase": phase.phase,
        "after_ns": phase.start_ns - subject.start_ns,
        "ns": phase.duration_ns,
        "share": scale.percent(phase.duration_ns / waited_ns) if waited_ns else scale.ABSENT,
        "basis": phase.basis,
        "evidence": [html_data.evidence_text(e) for e in phase.evidence],
        "parts": [_part_row(part, subject) for part in phase.parts],
    }


def _part_row(part: Part, subject: Request) -> dict[str, Any]:
    return {
        "part": plain(part.part, 40),
        "after_ns": part.start_ns - subject.start_ns,
        "ns": part.spent_ns,
        "basis": part.basis,
        "evidence": [html_data.evidence_text(e) for e in part.evidence],
    }


def _python(subject: Request) -> list[tuple[str, list[str]]]:
    """(phase and its categories, the stacks and waits in it)"""
    told: list[tuple[str, list[str]]] = []
    for line in python.lines(subject):
        if line.startswith(" "):
            told[-1][1].append(line.strip())
        else:
            told.append((line, []))
    return told


def _table(subject: Request) -> dict[str, Any] | None:
    """Phase × activity in ms, as printed everywhere: parts add up to the printed whole."""
    cells = subject.phase_activity()
    names = [name for name in PHASES if name in cells]
    columns = [name for name in ACTIVITIES if any(name in row for row in cells.values())]
    exact = [[cells[name].get(column, 0) for column in columns] for name in names]
    if not exact:
        return None
    shown = scale.round_table(exact, 1_000)
    most = max(map(max, exact)) or 1
    rows = [
        {
            "phase": name,
            "cells": [
                (scale.milliseconds(us) if ns else "", -(-9 * ns // most), ns)
                for us, ns in zip(shown_row, exact_row, strict=True)
            ],
            "total": scale.milliseconds(sum(shown_row)),
            "ns": sum(exact_row),
        }
        for name, shown_row, exact_row in zip(names, shown, exact, strict=True)
    ]
    totals = [scale.milliseconds(sum(column)) for column in zip(*shown, strict=True)]
    whole = sum(map(sum, shown))
    return {"columns": columns, "rows": rows, "totals": totals, "whole": scale.milliseconds(whole)}


def _file(file: FileUse, moves: Sequence[tuple[str, str]]) -> dict[str, Any]:
    sizes, depth = file.request_size_bytes, file.in_flight
    requests = f"{scale.block(sizes.p50)} / {scale.block(sizes.p95)}" if sizes else scale.ABSENT
    return {
        "path": clip_middle(plain(file.path), _NAME),
        "is_weights": file.is_weights,
        "cells": [
            scale.size(file.size_bytes),
            scale.size(file.bytes_from_storage),
            scale.size(file.bytes_from_cache),
            scale.percent(file.residency_before),
            plain(file.access or scale.ABSENT, 20),
            scale.duration(file.storage_wait_ns),
            scale.rate(file.bytes_per_second),
            requests,
            f"{depth.mean:.1f} / {depth.max}" if depth else scale.ABSENT,
            scale.count(file.major_faults),
            scale.count(file.minor_faults),
            *(scale.size(getattr(file, name)) for _, name in moves),
        ],
        "advice": ", ".join(plain(a, 60) for a in file.advice[:6]),
    }


def _waits(subject: Request) -> dict[str, Any] | None:
    """Storage waits by file and phase, with where the requests were; `bar`: (part, x, width) in
    thousandths of the longest wait."""
    waits = words.storage_waits(words.by_importance(subject.files))[:_FILES]
    if not waits:
        return None
    split = [(title.replace("\n", " "), spent) for title, spent in words.wait_split(waits)]
    longest_ns = max(share.storage_wait_ns for _, share in waits)
    rows = []
    for number, (file, share) in enumerate(waits):
        own = [(title, spent[number]) for title, spent in split]
        at, bar = 0.0, []
        for title, ns in own:
            width = ns * 1000 / longest_ns
            bar.append((title.split()[0], round(at, 2), round(width, 2)))
            at += width
        rows.append(
            {
                "path": clip_middle(plain(file.path), _NAME),
                "phase": share.phase,
                "from_storage": scale.size(share.bytes_from_storage),
                "ns": share.storage_wait_ns,
                "split": [ns for _, ns in own],
                "bar": bar,
            }
        )
    return {"titles": [title for title, _ in split], "rows": rows}


def _mount(mount: MountUse) -> dict[str, Any]:
    ahead = mount.read_ahead_kb
    return {
        "path": clip_middle(plain(mount.path), _NAME),
        "cells": [
            plain(mount.fstype, 30),
            scale.ABSENT if ahead is None else scale.block(ahead << 10),
            scale.count(mount.requests),
            scale.duration(mount.queue_ns),
            scale.duration(mount.wire_ns),
            scale.duration(mount.total_ns),
            scale.count(mount.retransmits),
        ],
        "options": clip_middle(plain(mount.options), _NAME),
    }


def _gpu(gpu: GpuUse) -> dict[str, Any]:
    return {
        "name": f"{words.gpu_number(gpu.label)} {plain(gpu.name, 60)}",
        "cells": [
            scale.size(gpu.memory_before_bytes),
            scale.size(gpu.memory_after_bytes),
            scale.duration(gpu.busy_ns),
            scale.size(gpu.transfer_bytes),
            plain(gpu.source, 40),
        ],
    }
