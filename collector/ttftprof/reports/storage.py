"""What `ttftprof storage` found: the stack as a tree, the ceilings as a table, a verdict; or JSON.

JSON is `ttftprof.storage/1`: one object, pure ASCII; what was not measured is null and says why.
The schema lies beside this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.cells import cell_len
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ttftprof import __version__, scale
from ttftprof.ceilings import Measured, describe
from ttftprof.model import Action
from ttftprof.reports.json import load_schema, write_line
from ttftprof.reports.safe import clip, clip_path, plain
from ttftprof.reports.tables import Column, banded
from ttftprof.reports.terminal import Page
from ttftprof.residency import CacheState
from ttftprof.stack import Layer, Stack, safe_options
from ttftprof.storage_verdict import Conclusion, model_rate

SCHEMA_NAME = "ttftprof.storage/1"
_BAR_WIDTH = 12
_BOLD, _DIM = Style(bold=True), Style(dim=True)
_WARNING = Style(color="#D55E00", bold=True)


@dataclass(frozen=True, slots=True)
class PathReport:
    """One PATH of the command: what it stands for, its stack, and what was measured.

    `not_measured` says why nothing was (then `results` is empty); `notes` what happened meanwhile.
    """

    asked: str
    path: str
    chosen: str
    size_bytes: int
    files: int
    stack: Stack
    before: CacheState | None = None
    after: CacheState | None = None
    results: Sequence[Measured] = ()
    bytes_read: int = 0
    conclusion: Conclusion | None = None
    not_measured: str = ""
    notes: tuple[str, ...] = ()


# -- text ------------------------------------------------------------------------------------------


def write(report: PathReport, out: TextIO, width: int, colour: bool) -> None:
    """Prints one path's report; no line is wider than `width`."""
    page = Page(width, colour)
    page.add_text(_title(report), _BOLD)
    if report.chosen:
        page.add_text(plain(report.chosen), _DIM, 2)
    for text in _tree(report.stack, width):
        page.add(text)
    if report.not_measured:
        page.gap()
        page.add_text(f"not measured: {plain(report.not_measured)}", _WARNING)
    if report.results:
        page.gap()
        page.add(*banded(*_columns(report.results), width))
        for remark in _remarks(report.results):
            page.add_text(remark, _DIM)
        page.add_text(_footnote(report), _DIM)
    for note in report.notes:
        page.add_text(f"! {plain(note)}", _WARNING)
    if report.conclusion:
        page.gap()
        _print_conclusion(page, report.conclusion)
    out.write(page.text())


def _title(report: PathReport) -> str:
    parts = [clip_path(plain(report.path), 80), scale.size(report.size_bytes)]
    if report.files > 1:
        parts.append(f"{report.files} shards")
    if report.before:
        parts.append(f"{scale.percent(report.before.share)} in the page cache")
    return "  ".join(parts)


def _tree(stack: Stack, width: int) -> Iterator[Text]:
    governing = stack.readahead
    for layer, prefix, inner in _indented(stack.top):
        yield _layer_line(layer, prefix, layer is governing, width)
        for note in (*layer.notes, *(stack.notes if layer is stack.top else ())):
            yield Text(clip(f"{inner}  {plain(note)}", width), _DIM)


def _indented(top: Layer) -> Iterator[tuple[Layer, str, str]]:
    """(layer, what stands before its line, and before the lines that belong to it)."""
    left: list[tuple[Layer, str, str]] = [(top, "  ", "  ")]
    while left:
        layer, prefix, inner = left.pop()
        yield layer, prefix, inner
        for number, lower in enumerate(reversed(layer.below)):
            last = number == 0
            left.append(
                (lower, f"{inner}{'└' if last else '├'} ", f"{inner}{' ' if last else '│'} ")
            )


def _layer_line(layer: Layer, prefix: str, governs: bool, width: int) -> Text:
    line = Text(prefix, _DIM)
    line.append(f"{layer.kind} ", _DIM)
    line.append(plain(layer.name), _BOLD)
    shown = [f"{name} {plain(value)}" for name, value in layer.facts if value and name != "type"]
    if layer.read_ahead_kb is not None:
        shown.insert(0, f"readahead {layer.read_ahead_kb} KiB{' (this file’s)' if governs else ''}")
    if layer.line_rate is not None:
        shown.append(f"line rate {scale.rate(layer.line_rate)}")
    for text in shown:
        line.append("  ")
        line.append(text)
    if cell_len(line.plain) > width:
        line.truncate(width, overflow="ellipsis")
    return line


def _columns(results: Sequence[Measured]) -> tuple[Column, list[Column]]:
    most = max((m.bytes_per_second or 0.0 for m in results if m.way.method != "cached"), default=0)
    first = Column("streams × request", [describe(m.way) for m in results], right=False)
    columns = [
        Column("MB/s", [_megabytes(m.bytes_per_second) for m in results]),
        Column("", [bar(m.bytes_per_second, most) for m in results], right=False),
        Column("model\nMB/s", [_megabytes(model_rate(m, results)) for m in results]),
        Column("requests\nper s", [_per_second(m) for m in results]),
        Column("latency\np50", [scale.duration(m.latency_p50_ns) for m in results]),
        Column("latency\np95", [scale.duration(m.latency_p95_ns) for m in results]),
    ]
    return first, columns


def _remarks(results: Sequence[Measured]) -> list[str]:
    """What is to be said of cells, once for all it is true of."""
    said: dict[str, list[str]] = {}
    for measured in results:
        for remark in (measured.not_measured, *measured.notes):
            if remark:
                said.setdefault(plain(remark), []).append(describe(measured.way))
    return [f"{', '.join(ways)}: {remark}" for remark, ways in said.items()]


def bar(rate: float | None, most: float) -> str:
    """The rate as eighths of cells; full at the most that storage gave."""
    if not rate or most <= 0:
        return ""
    eighths = max(1, round(min(rate / most, 1.0) * _BAR_WIDTH * 8))
    part = " ▏▎▍▌▋▊▉"[eighths % 8].strip()
    return "█" * (eighths // 8) + part


def _megabytes(rate: float | None) -> str:
    if rate is None:
        return scale.ABSENT
    return f"{rate / 1e6:,.0f}" if rate >= 1e7 else f"{rate / 1e6:.2f}"


def requests_per_second(measured: Measured) -> float | None:
    if not measured.requests or not measured.elapsed_ns:
        return None
    return measured.requests / measured.elapsed_ns * 1e9


def _per_second(measured: Measured) -> str:
    rate = requests_per_second(measured)
    return scale.ABSENT if rate is None else f"{rate:,.0f}"


def _footnote(report: PathReport) -> str:
    text = f"{scale.size(report.bytes_read)} read from storage"
    if report.before and report.after:
        before, after = report.before.cached_pages, report.after.cached_pages
        unit = "pages in the page cache"
        text += (
            f"; {before:,} {unit} before and after"
            if before == after
            else f"; {before:,} {unit} before, {after:,} after"
        )
    return (
        f"{text}. model = request size × depth / (latency of a 4 KiB read + the request's bytes at "
        "the ceiling), at most the ceiling."
    )


def _print_conclusion(page: Page, conclusion: Conclusion) -> None:
    page.add_text(f"verdict: {conclusion.verdict}, confidence {conclusion.confidence}", _BOLD)
    for sentence in conclusion.sentences:
        page.add_text(plain(sentence), indent=2)
    for number, action in enumerate(conclusion.actions, start=1):
        item = Table.grid(padding=(0, 1))
        advice = f"{plain(action.change)}\n{_gain(action)}"
        item.add_row(f"{number}.", Text(advice, overflow="fold"))
        page.add(Padding(item, (0, 0, 0, 2)))


def _gain(action: Action) -> str:
    gain = action.expected_gain_ns
    saved = f"saves about {scale.duration(gain)} of a cold load; " if gain is not None else ""
    return f"{saved}to verify: {plain(action.verify)}"


# -- JSON ------------------------------------------------------------------------------------------


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) that every output of `write_json` satisfies."""
    return load_schema("storage")


def write_json(reports: Sequence[PathReport], out: TextIO) -> None:
    """One line: all paths."""
    document = {
        "schema": SCHEMA_NAME,
        "tool": {"name": "ttftprof", "version": __version__},
        "paths": [as_json(report) for report in reports],
    }
    write_line(document, out)


def as_json(report: PathReport) -> dict[str, Any]:
    """One path as plain dicts, lists, strings, numbers and None."""
    mount = report.stack.mount
    readahead = report.stack.readahead
    line = report.stack.line_rate
    return {
        "asked": _text(report.asked),
        "path": _text(report.path),
        "chosen": _text(report.chosen) or None,
        "size_bytes": report.size_bytes,
        "files": report.files,
        "mount": mount
        and {
            "path": _text(mount.point),
            "fstype": mount.fstype,
            "source": _text(mount.source),
            "options": _text(safe_options(mount)),
            "device": "{}:{}".format(*mount.dev),
        },
        "read_ahead_kb": readahead.read_ahead_kb if readahead else None,
        "line_bytes_per_second": line[0] if line else None,
        "stack": _layer_json(report.stack.top),
        "cache": {"before": _cache(report.before), "after": _cache(report.after)},
        "bytes_read": report.bytes_read,
        "measurements": [_measured_json(m, report.results) for m in report.results],
        "not_measured": _text(report.not_measured) or None,
        "verdict": _conclusion_json(report.conclusion),
        "notes": [_text(note) for note in report.notes],
    }


def _text(text: str) -> str:
    """Bytes of a path that are no UTF-8 written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _layer_json(layer: Layer) -> dict[str, Any]:
    return {
        "kind": layer.kind,
        "name": _text(layer.name),
        "facts": {name: _text(value) for name, value in layer.facts},
        "read_ahead_kb": layer.read_ahead_kb,
        "line_bytes_per_second": layer.line_rate,
        "notes": [_text(note) for note in layer.notes],
        "below": [_layer_json(lower) for lower in layer.below],
    }


def _cache(state: CacheState | None) -> dict[str, Any] | None:
    if state is None:
        return None
    return {
        "cached_pages": state.cached_pages,
        "total_pages": state.total_pages,
        "source": state.how,
    }


def _measured_json(measured: Measured, results: Sequence[Measured]) -> dict[str, Any]:
    way = measured.way
    return {
        "method": way.method,
        "streams": way.streams,
        "request_bytes": way.request_bytes,
        "read_ahead_kb": measured.read_ahead_kb,
        "read_ahead_set": way.read_ahead_kb is not None,
        "bytes_read": measured.bytes_read,
        "elapsed_ns": measured.elapsed_ns,
        "bytes_per_second": measured.bytes_per_second,
        "model_bytes_per_second": model_rate(measured, results),
        "requests": measured.requests,
        "requests_per_second": requests_per_second(measured),
        "latency_ns": {
            "mean": measured.latency_mean_ns,
            "p50": measured.latency_p50_ns,
            "p95": measured.latency_p95_ns,
        },
        "major_faults": measured.major_faults,
        "cpu_ns": measured.cpu_ns,
        "not_measured": _text(measured.not_measured) or None,
        "notes": [_text(note) for note in measured.notes],
    }


def _conclusion_json(conclusion: Conclusion | None) -> dict[str, Any] | None:
    if conclusion is None:
        return None
    ceiling = conclusion.ceiling
    return {
        "verdict": conclusion.verdict,
        "confidence": conclusion.confidence,
        "ceiling_bytes_per_second": ceiling.bytes_per_second if ceiling else None,
        "explanation": [_text(sentence) for sentence in conclusion.sentences],
        "actions": [
            {
                "change": _text(action.change),
                "expected_gain_ns": action.expected_gain_ns,
                "verify": _text(action.verify),
            }
            for action in conclusion.actions
        ],
    }
