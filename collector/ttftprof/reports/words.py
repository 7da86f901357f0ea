"""The sentences all reports share: how a request is called, what went missing and what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath

from ttftprof import scale
from ttftprof.model import FileUse, PhaseShare, Report, Request, Verdict
from ttftprof.reports.safe import plain

# What the analysis cannot know once events of a kind were lost (see events.LOST).
_COST_OF_LOSS = {
    "events ring full": "waits and file accesses are missing, sums of activities are too small; "
    "record with a larger --ring-kb",
    "text ring full": "requests, log lines or paths may be missing; record with a larger --ring-kb",
    "threads not followed": "what those threads waited for is in no sum",
    "files not followed": "bytes and faults of those files are in no row",
    "block requests not followed": "request sizes and depths are incomplete",
    "probe runs skipped": "a probe was due while it ran already, for this target or another "
    "program: counts may be too small by as many",
}
_COLD, _CACHED = 0.1, 0.9
# (title, field of `FileUse`): shown where any file has some.
CACHE_MOVES = (
    ("read by\nothers", "read_by_others_bytes"),
    ("evicted", "evicted_bytes"),
    ("refaulted", "refaulted_bytes"),
)
# (title, field of `WaitSplit`): shown where any wait has some.
WAIT_SPLIT = (
    ("queue", "queue_ns"),
    ("wire +\nserver", "wire_ns"),
    ("server", "server_ns"),
    ("device", "device_ns"),
    ("client", "client_ns"),
)


def told(report: Report, everything: bool = True) -> list[Request]:
    """What a report tells of, in order of time: requests, and starts that no request waited for.

    Without `everything`, requests that were refused before any text are left out: a client that
    asks again and again while its server loads makes many of them. One that is all there is stays.
    """
    everything |= len(report.requests) + len(report.starts) == 1
    asked = [r for r in report.requests if everything or not refused(r)]
    return sorted([*report.starts, *asked], key=lambda r: r.start_ns)


def refused(request: Request) -> bool:
    return request.outcome == "error" and request.first_token_ns is None


def by_importance(files: Sequence[FileUse]) -> list[FileUse]:
    """Weights first, then by what was read from storage."""
    return sorted(files, key=lambda f: (not f.is_weights, -(f.bytes_from_storage or 0)))


def storage_waits(files: Sequence[FileUse]) -> list[tuple[FileUse, PhaseShare]]:
    """What was waited for, by file and phase."""
    return [(file, share) for file in files for share in file.by_phase if share.storage_wait_ns]


def wait_split(waits: Sequence[tuple[FileUse, PhaseShare]]) -> list[tuple[str, list[int]]]:
    """(title, ns of each wait): where the requests were meanwhile; what none was in is left out."""
    parts = [(title, [getattr(s.wait_split, name) for _, s in waits]) for title, name in WAIT_SPLIT]
    return [(title, spent) for title, spent in parts if any(spent)]


def is_start(request: Request) -> bool:
    """A start of a server, not a request (see `Report.starts`)."""
    return not request.endpoint and request.id.startswith("start")


def recording_name(report: Report) -> str:
    return PurePath(report.path).stem or report.path or "recording"


def gpu_number(label: str) -> str:
    """`0` of GPU 0; `0:1` of an instance of it, where there is no room for more."""
    return plain(label.removeprefix("GPU ").replace(" MIG ", ":"), 12)


def engines(report: Report) -> str:
    """`llama-server`, or several joined; the target is not named where nothing was recognised."""
    found = sorted({request.engine for request in told(report) if request.engine})
    return " + ".join(found) if found else "engine not recognised"


def switch_kind(request: Request) -> str:
    """`cold switch`, `cached switch`, …, by how much of the weights the page cache held before."""
    noun = "start" if is_start(request) else "switch"
    return kind_of_switch(request.switched, request.residency_before, noun)


def kind_of_switch(switched: bool, residency: float | None, noun: str) -> str:
    if not switched:
        return "no switch"
    if residency is None:
        return noun
    if residency <= _COLD:
        return f"cold {noun}"
    return (
        f"cached {noun}" if residency >= _CACHED else f"{noun}, {scale.percent(residency)} cached"
    )


def cause(verdict: Verdict) -> str:
    """`load / storage_wait 52 %`"""
    text = verdict.cause
    if verdict.activity:
        text += f" / {verdict.activity}"
    return text if verdict.share is None else f"{text} {scale.percent(verdict.share)}"


def outcome(request: Request) -> str:
    """Why there is no first token, in words; empty if there is one."""
    if is_start(request):
        return "able to serve" if request.outcome == "ok" else "not seen to its end"
    if request.first_token_ns is not None:
        return ""
    words = {
        "ok": "answered without a first token",
        "error": "failed before a first token",
        "timeout": "timed out before a first token",
        "cancelled": "cancelled before a first token",
        "incomplete": "no first token while recorded",
    }
    return words.get(request.outcome, "no first token")


def unfinished(request: Request) -> str:
    """`outcome` of what did not come to what was waited for: a first token, or a server."""
    able = is_start(request) and request.outcome == "ok"
    return "" if able else outcome(request)


def span(request: Request) -> tuple[int, int]:
    """(start, end) of what the phases cover, the first token's time where there is one."""
    last = max((phase.end_ns for phase in request.phases), default=request.start_ns)
    end = request.first_token_ns if request.first_token_ns is not None else last
    return request.start_ns, max(end, last, request.start_ns)


def waited_ns(request: Request) -> int:
    """TTFT, or how long the client is known to have waited in vain."""
    start, end = span(request)
    return end - start


def warnings(report: Report) -> list[str]:
    """What went missing, with what that costs; empty when all is well. Stands first everywhere."""
    return [*_losses(report), *_incomplete(report), *_reliefs(report), *_absences(report)]


def _losses(report: Report) -> Iterable[str]:
    for place, number in report.lost.items():
        if number:
            cost = _COST_OF_LOSS.get(place, "what that hides is not known")
            yield f"lost {number:,} × {place}: {cost}"


def _incomplete(report: Report) -> Iterable[str]:
    if not report.complete:
        why = report.ended_because or "ttftprof was stopped before it could finish"
        yield f"recording is incomplete ({why}): what came after its last fact is unknown"


def _reliefs(report: Report) -> Iterable[str]:
    for relief in report.overhead.reliefs:
        after_s = (relief.ns - report.start_ns) / 1e9
        yield (
            f"recording took {scale.tenth_percent(relief.share)} of the machine, more than its "
            f"budget of {scale.tenth_percent(relief.budget)}: {relief.what} {relief.how} "
            f"from {after_s:.1f} s on: "
            f"{relief.lost}"
        )


def _absences(report: Report) -> Iterable[str]:
    for source in report.sources:
        if source.is_missed:
            parts = [part for part in (source.reason, source.lost) if part]
            yield f"{source.name} {source.state}" + (": " if parts else "") + "; ".join(parts)
