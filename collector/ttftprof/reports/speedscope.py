"""speedscope's file format: a profile per request, phases as frames, activities within them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any, TextIO

from ttftprof.model import ACTIVITIES, PHASES, Report, Request
from ttftprof.reports import html_data, words
from ttftprof.reports.safe import plain

_FRAMES = (*PHASES, *ACTIVITIES)


def write(report: Report, out: TextIO) -> None:
    subjects = [s for s in html_data.subjects(report) if s.phases]
    document = {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": plain(words.recording_name(report), 200),
        "exporter": "ttftprof",
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": name} for name in _FRAMES]},
        "profiles": [_profile(subject) for subject in subjects],
    }
    json.dump(document, out, separators=(",", ":"))
    out.write("\n")


def _profile(subject: Request) -> dict[str, Any]:
    start_ns, end_ns = words.span(subject)
    name = f"{html_data.title(subject)} {subject.model or ''}".strip()
    return {
        "type": "evented",
        "name": plain(name, 200),
        "unit": "nanoseconds",
        "startValue": 0,
        "endValue": end_ns - start_ns,
        "events": list(chain.from_iterable(_events(subject))),
    }


def _events(subject: Request) -> Iterator[list[dict[str, Any]]]:
    for phase in subject.phases:
        frame, first = PHASES.index(phase.phase), phase.start_ns - subject.start_ns
        yield [{"type": "O", "frame": frame, "at": first}]
        for activity in subject.activities:
            begin = max(activity.start_ns, phase.start_ns) - subject.start_ns
            end = min(activity.end_ns, phase.end_ns) - subject.start_ns
            if end > begin:
                inner = _FRAMES.index(activity.activity, len(PHASES))
                yield [
                    {"type": "O", "frame": inner, "at": begin},
                    {"type": "C", "frame": inner, "at": end},
                ]
        yield [{"type": "C", "frame": frame, "at": phase.end_ns - subject.start_ns}]
