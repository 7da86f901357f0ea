"""Folded stacks, `request;phase;activity;file nanoseconds`: for flame graph tools.

A line's number is exact; the numbers of a request add up to its wait. Storage waits are divided
among files by how long threads waited for each in that phase.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TextIO

from ttftprof import scale
from ttftprof.model import ACTIVITIES, PHASES, Report, Request
from ttftprof.reports import html_data
from ttftprof.reports.safe import plain
from ttftprof.storage_requests import waited_ns
from ttftprof.timeline import Timeline


def write(report: Report, timeline: Timeline, out: TextIO) -> None:
    for subject in html_data.subjects(report):
        for stack, ns in _stacks(subject, timeline):
            out.write(f"{';'.join(stack)} {ns}\n")


def _stacks(subject: Request, timeline: Timeline) -> Iterator[tuple[list[str], int]]:
    root = _frame(f"{html_data.title(subject)} {subject.model or ''}".strip())
    cells = subject.phase_activity()
    for phase in PHASES:
        for activity in ACTIVITIES:
            ns = cells.get(phase, {}).get(activity, 0)
            if not ns:
                continue
            files = _waited_for(subject, phase, timeline) if activity == "storage_wait" else {}
            if not files:
                yield [root, phase, activity], ns
                continue
            shares = scale.apportion(list(files.values()), ns)
            for path, share in zip(files, shares, strict=True):
                if share:
                    yield [root, phase, activity, _frame(path)], share


def _frame(name: str) -> str:
    """A frame can hold neither the separator nor, at its end, what looks like a count."""
    return plain(name, 200).replace(";", ":").replace(" ", "\N{NO-BREAK SPACE}")


def _waited_for(subject: Request, phase: str, timeline: Timeline) -> dict[str, int]:
    """{file: time that threads waited for it in a phase}, the longest first."""
    paths: dict[tuple[int, ...], str] = {f.key: f.path for f in timeline.files.values()}
    found = Counter[str]()
    for part in subject.phases:
        if part.phase == phase:
            for key, ns in waited_ns(timeline, part.start_ns, part.end_ns).items():
                found[paths.get(key, "file not followed")] += ns
    return dict(found.most_common())
