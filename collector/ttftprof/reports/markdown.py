"""A summary in Markdown, for an issue or a chat: requests, then each with its split and its files.

Guarantee: foreign text can start no link, image, HTML or heading; parts add up as printed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TextIO

from ttftprof import scale
from ttftprof.model import ACTIVITIES, PHASES, Report, Request
from ttftprof.reports import html_data, words
from ttftprof.reports.safe import plain

_DETAILED, _FILES = 10, 5


def write(report: Report, out: TextIO) -> None:
    out.write("\n".join(_lines(report)) + "\n")


def text(foreign: object) -> str:
    """With everything escaped that Markdown gives a meaning inside a line, addresses included."""
    shown = re.sub(r"([\\`*_\[\]<>#|~&@$])", r"\\\1", plain(foreign, 600))
    return re.sub(r"(?<=www)(?=\.)|:(?=//)", lambda m: "\\" + m[0], shown, flags=re.IGNORECASE)


def _lines(report: Report) -> Iterator[str]:
    yield f"## {text(words.recording_name(report))}"
    yield ""
    facts = [words.engines(report), *(report.host.get(k) for k in ("node", "kernel"))]
    yield " · ".join(text(fact) for fact in facts if fact)
    for warning in words.warnings(report):
        yield f"\n> **{text(warning)}**"
    subjects = html_data.subjects(report)
    if not subjects:
        yield "\nno request for text was seen"
        yield from _notes(report)
        return
    yield ""
    yield from _table(
        ["request", "model", "kind", "waited", "cause"],
        [
            [
                text(html_data.title(s)),
                text(s.model or "not known"),
                text(words.switch_kind(s)),
                _waited(s),
                text(words.cause(s.verdict)),
            ]
            for s in subjects
        ],
    )
    for subject in sorted(subjects, key=lambda s: -words.waited_ns(s))[:_DETAILED]:
        yield from _detail(subject)
    yield from _notes(report)


def _notes(report: Report) -> Iterator[str]:
    for number, note in enumerate(report.notes):
        yield f"{'' if number else chr(10)}- note: {text(note)}"


def _waited(subject: Request) -> str:
    ended, waited = words.unfinished(subject), scale.duration(words.waited_ns(subject))
    return f"{waited}, {ended}" if ended else waited


def _detail(subject: Request) -> Iterator[str]:
    yield f"\n### {text(html_data.title(subject))}, ms"
    yield ""
    cells = subject.phase_activity()
    names = [name for name in PHASES if name in cells]
    columns = [name for name in ACTIVITIES if any(name in row for row in cells.values())]
    shown = scale.round_table([[cells[n].get(c, 0) for c in columns] for n in names], 1_000)
    rows = [
        [text(name), *(scale.milliseconds(us) if us else "" for us in row), _sum(row)]
        for name, row in zip(names, shown, strict=True)
    ]
    totals = [_sum(column) for column in zip(*shown, strict=True)]
    whole = _sum([us for row in shown for us in row])
    if rows:
        yield from _table(
            ["phase", *map(text, columns), "total"], [*rows, ["**total**", *totals, f"**{whole}**"]]
        )
    if subject.verdict.explanation:
        yield f"\n{text(subject.verdict.explanation)}"
    for number, action in enumerate(subject.verdict.actions, 1):
        gain = action.expected_gain_ns
        saved = "" if gain is None else f" (saves about {scale.estimate(gain)})"
        yield f"{'' if number > 1 else chr(10)}{number}. {text(action.change)}{saved}"
    files = words.by_importance(subject.files)[:_FILES]
    if files:
        yield ""
        yield from _table(
            ["file", "size", "from storage", "cached before", "waited", "rate"],
            [
                [
                    text(file.path),
                    scale.size(file.size_bytes),
                    scale.size(file.bytes_from_storage),
                    scale.percent(file.residency_before),
                    scale.duration(file.storage_wait_ns),
                    scale.rate(file.bytes_per_second),
                ]
                for file in files
            ],
        )
    if subject.gpu:
        yield ""
        yield from _table(
            ["GPU", "memory before", "memory after", "busy", "transferred"],
            [
                [
                    text(f"{words.gpu_number(gpu.label)} {gpu.name}"),
                    scale.size(gpu.memory_before_bytes),
                    scale.size(gpu.memory_after_bytes),
                    scale.duration(gpu.busy_ns),
                    scale.size(gpu.transfer_bytes),
                ]
                for gpu in subject.gpu
            ],
        )


def _sum(parts_us: Sequence[int]) -> str:
    return scale.milliseconds(sum(parts_us))


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
