"""The report for people: timelines in the terminal, tables that add up, a verdict in words.

Guarantees: no line is wider than `width` (60 to 200 cells); foreign text is shown harmless; without
`colour` not a single escape is written; printed parts sum to the printed TTFT; what is not known
reads `n/a`. Losses and absences stand first.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ttftprof import scale
from ttftprof.model import Action, Evidence, FileUse, Report, Request, Verdict
from ttftprof.reports import python, tables, words
from ttftprof.reports.flame import Layout, flame
from ttftprof.reports.overview import Asked, legend, overview
from ttftprof.reports.safe import clip_middle, plain

_DETAILED_WITHOUT_CHOICE = 5
_DETAILED_OF_MANY = 3
_OVERVIEW_ROWS = 40
MOST_SHOWN = _OVERVIEW_ROWS  # of the requests of a recording, unless every one is asked for
_FILE_ROWS = 8
_MODEL_WIDTH = 48
_SHOWN_AS_ACTIVITY = frozenset({"storage", "fault", "copy", "transfer"})
_BOLD, _DIM = Style(bold=True), Style(dim=True)
_WARNING = Style(color="color(166)", bold=True)


def write(
    reports: Sequence[Report],
    out: TextIO,
    width: int,
    colour: bool,
    *,
    compact: bool = False,
    everything: bool = False,
) -> None:
    """Prints the reports: what is missing, an overview if there are several requests, the details.

    `compact`: the overview alone. `everything`: every request in detail and every file, however
    many there are.
    """
    page = Page(width, colour)
    several = len(reports) > 1
    for report in reports:
        _print_warnings(page, report, several)
    asked = [(report, told) for report in reports for told in words.told(report, everything)]
    if compact or len(asked) > 1:
        _print_overview(page, asked, several, everything)
    if not compact:
        chosen = _worth_detail(asked, everything)
        for report in reports:
            mine = [
                request for owner, request in asked if owner is report and id(request) in chosen
            ]
            _print_recording(page, report, mine, several, everything)
    out.write(page.text())


class Page:
    """Lines of one report, laid out by rich and kept as text."""

    def __init__(self, width: int, colour: bool) -> None:
        self.width, self.colour = width, colour
        self._text = io.StringIO()
        self._console = Console(
            file=self._text,
            width=width,
            force_terminal=colour,
            color_system="256" if colour else None,
            no_color=not colour,
            force_jupyter=False,
            force_interactive=False,
            legacy_windows=False,
            markup=False,
            emoji=False,
            highlight=False,
        )

    def add(self, *parts: RenderableType) -> None:
        for part in parts:
            self._console.print(part)

    def add_text(self, text: str, style: Style | None = None, indent: int = 0) -> None:
        """A paragraph, wrapped between words."""
        body = Text(text, style or "", overflow="fold")
        self.add(Padding(body, (0, 0, 0, indent)))

    def gap(self) -> None:
        self._console.print()

    def text(self) -> str:
        lines = self._text.getvalue().strip("\n").split("\n")
        if not self.colour:
            lines = [line.rstrip() for line in lines]
        return "\n".join(lines) + "\n"


# -- what stands first ----------------------------------------------------------------------------


def _print_warnings(page: Page, report: Report, several: bool) -> None:
    which = f"{plain(words.recording_name(report), _MODEL_WIDTH)}: " if several else ""
    for warning in words.warnings(report):
        page.add_text(f"! {which}{plain(warning)}", _WARNING)


def _print_overview(page: Page, asked: Sequence[Asked], several: bool, everything: bool) -> None:
    page.gap()
    shown = asked if everything else _slowest(asked, _OVERVIEW_ROWS)
    if not shown:
        return
    page.add(overview(shown, page.width, page.colour))
    page.add(legend(shown, page.width, page.colour))
    if len(shown) < len(asked):
        left = len(asked) - len(shown)
        page.add_text(f"{left} faster requests are not shown; --all shows them", _DIM)


def _slowest(asked: Sequence[Asked], number: int) -> list[Asked]:
    """The slowest few, in their original order."""
    slowest = sorted(asked, key=lambda pair: -words.waited_ns(pair[1]))[:number]
    kept = {id(request) for _, request in slowest}
    return [pair for pair in asked if id(pair[1]) in kept]


def _worth_detail(asked: Sequence[Asked], everything: bool) -> set[int]:
    """Identities of the requests to print in detail."""
    few = everything or len(asked) <= _DETAILED_WITHOUT_CHOICE
    return {id(r) for _, r in (asked if few else _slowest(asked, _DETAILED_OF_MANY))}


# -- one recording --------------------------------------------------------------------------------


def _print_recording(
    page: Page, report: Report, chosen: Sequence[Request], several: bool, everything: bool
) -> None:
    told = words.told(report, everything)
    if not chosen and told:
        return
    page.gap()
    if several:
        page.add(Text("─" * page.width, _DIM))
    page.add_text(_header(report), _BOLD)
    if not report.requests:
        _print_nothing_seen(page, report)
    turned_away = len(report.requests) + len(report.starts) - len(told)
    if turned_away:
        page.add_text(f"{turned_away} request(s) got an error and no text; --all lists them", _DIM)
    for request in chosen:
        page.gap()
        _print_request(page, report, request, everything)
    left = len(told) - len(chosen)
    page.gap()
    if left:
        slowest = f"the {len(chosen)} slowest of {len(told)} requests"
        page.add_text(f"{slowest} in detail; --all prints every one, --request ID a certain one")
    for note in report.notes:
        page.add_text(f"note: {plain(note)}")
    cost = _own_cost(report)
    if cost:
        page.add_text(cost, _DIM)


def _header(report: Report) -> str:
    host = report.host
    kernel = f"Linux {plain(host['kernel'], 40)}" if host.get("kernel") else "kernel not known"
    length_ns = report.end_ns - report.start_ns
    parts = [
        plain(words.recording_name(report), _MODEL_WIDTH),
        plain(words.engines(report), _MODEL_WIDTH),
        *([plain(host["node"], 40)] if host.get("node") else []),
        kernel,
        scale.duration(length_ns) if length_ns > 0 else "length not known",
        plain(report.ended_because, 80) or "end not known",
    ]
    return " · ".join(parts)


def _print_nothing_seen(page: Page, report: Report) -> None:
    working = [source.name for source in report.sources if source.had_work]
    partly = [source.name for source in report.sources if source.state == "degraded"]
    seen = ", ".join(map(plain, working)) or "nothing"
    in_part = f"; in part: {', '.join(map(plain, partly))}" if partly else ""
    page.add_text("no request for text was seen", indent=2)
    page.add_text(f"Sources that worked: {seen}{in_part}.", indent=2)
    are_requests_seen = all(s.state != "absent" for s in report.sources if s.name == "sockets")
    page.add_text(
        "Start `sudo ttftprof record` first, then send one request to the model you switch to, "
        "over plain HTTP to the server that was named; stop after its first token. "
        if are_requests_seen
        else "Sockets were not watched: record as root, or with `--relay PORT`, to which the "
        "client then sends. ",
        indent=2,
    )
    page.add_text("`ttftprof dump` shows every fact of this recording.", indent=2)


def _own_cost(report: Report) -> str:
    cpu_ns, rss_bytes = report.overhead.cpu_ns, report.overhead.max_rss_bytes
    length_ns = report.end_ns - report.start_ns
    parts = []
    if cpu_ns is not None:
        share = f" ({scale.tenth_percent(cpu_ns / length_ns)} of one core)" if length_ns > 0 else ""
        parts.append(f"{scale.duration(cpu_ns)} CPU{share}")
    if rss_bytes is not None:
        parts.append(f"{scale.size(rss_bytes)} of memory")
    return f"recorder's own cost: {', '.join(parts)}" if parts else ""


# -- one request ----------------------------------------------------------------------------------


def _print_request(page: Page, report: Report, request: Request, everything: bool) -> None:
    _print_title(page, request)
    if words.waited_ns(request):
        page.gap()
        page.add(*flame(request, report, Layout(page.width, page.colour)))
        page.gap()
        page.add(*tables.phase_activity(request, page.width, page.colour))
        _print_inferred(page, request)
        _print_parts(page, request)
        for line in python.lines(request):
            page.add_text(f"  {line}", _DIM)
    else:
        page.add_text("no time passed that could be split", indent=2)
    _print_files(page, request.files, everything)
    if request.mounts:
        page.gap()
        page.add(*tables.mounts(request.mounts, page.width))
    if request.gpu:
        page.gap()
        page.add(*tables.gpus(request.gpu, page.width))
    page.gap()
    _print_verdict(page, request.verdict)
    for note in request.notes:
        page.add_text(f"note: {plain(note)}", indent=2)


def _print_title(page: Page, request: Request) -> None:
    """`request 1  model-b  cold switch  TTFT 1.562 s  ● load / storage_wait 52 %`"""
    ended = words.outcome(request)
    waited = scale.duration(words.waited_ns(request))
    start = words.is_start(request)
    before = plain(request.id, 24) if start else f"request {plain(request.id, 24)}"
    after = [
        words.switch_kind(request),
        _ended(ended, waited, start),
        f"● {plain(words.cause(request.verdict), 40)}",
    ]
    model = plain(request.model) if request.model else "model not known"
    room = page.width - len("  ".join([before, *after])) - 2
    if room < min(Text(model).cell_len, 16):
        room += len(after[-1]) + 2
        after[-1] = "\n" + after[-1]
    title = "  ".join([before, clip_middle(model, max(min(room, _MODEL_WIDTH), 8)), *after])
    page.add_text(title.replace("  \n", "\n"), _BOLD)


def _ended(ended: str, waited: str, start: bool) -> str:
    if start:
        return f"{ended} after {waited}" if ended == "able to serve" else f"{ended}, {waited} seen"
    return f"{ended}, {waited} seen" if ended else f"TTFT {waited}"


def _print_inferred(page: Page, request: Request) -> None:
    """The rule behind each phase that no probe saw both edges of."""
    said: set[str] = set()
    for phase in request.phases:
        if phase.basis != "inferred" or phase.phase in said:
            continue
        said.add(phase.phase)
        rules = "; ".join(dict.fromkeys(plain(e.what, 120) for e in phase.evidence))
        page.add_text(f"~ {phase.phase} is inferred{': ' if rules else ''}{rules}", _DIM)


def _print_parts(page: Page, request: Request) -> None:
    """What a phase was spent on, where calls of the runtime show more than its activities."""
    for phase in request.phases:
        told = [part for part in phase.parts if part.part not in _SHOWN_AS_ACTIVITY]
        if told:
            spent = ", ".join(f"{part.part} {scale.duration(part.spent_ns)}" for part in told)
            page.add_text(f"  {phase.phase} holds: {spent}", _DIM)
        copies = [e for p in phase.parts if p.part == "transfer" for e in p.evidence]
        edges = [e for e in phase.evidence if e.source in ("gpu", "driver")]
        for what, evidence in (("copies", copies), ("memory", edges)):
            if evidence:
                page.add_text(f"  {phase.phase} {what}: {_quantities(evidence)}", _DIM)


def _quantities(evidence: Iterable[Evidence]) -> str:
    """`copied to the device 168 MB, storage was read while copying 35.00 ms`"""
    units: dict[str, Callable[[int], str]] = {
        "bytes": scale.size,
        "ns": scale.duration,
        "calls": str,
    }
    return ", ".join(
        f"{plain(e.what, 80)} {units[e.unit](e.value)}"
        for e in evidence
        if e.unit in units and isinstance(e.value, int)
    )


def _print_files(page: Page, used: Sequence[FileUse], everything: bool) -> None:
    """Weights first, then by what was read; the tail is summed up."""
    if not used:
        return
    ordered = words.by_importance(used)
    shown = ordered if everything else ordered[:_FILE_ROWS]
    page.gap()
    page.add(*tables.files(shown, page.width))
    waits = list(tables.storage_waits(shown, page.width))
    if waits:
        page.gap()
        page.add(*waits)
    rest = ordered[len(shown) :]
    if rest:
        read = _known_sum(f.bytes_from_storage for f in rest)
        page.add_text(f"and {len(rest)} more files, {scale.size(read)} from storage", _DIM)


def _known_sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _print_verdict(page: Page, verdict: Verdict) -> None:
    confidence = f"confidence {plain(verdict.confidence, 20)}"
    storage = f", storage: {plain(verdict.storage, 20)}" if verdict.storage else ""
    page.add_text(f"verdict: {plain(words.cause(verdict), 60)}{storage}, {confidence}", _BOLD)
    if verdict.explanation:
        page.add_text(plain(verdict.explanation), indent=2)
    for number, action in enumerate(verdict.actions, start=1):
        advice = Text(plain(action.change), overflow="fold")
        advice.append("\n" + _expectation(action))
        item = Table.grid(padding=(0, 1))
        item.add_row(f"{number}.", advice)
        page.add(Padding(item, (0, 0, 0, 2)))


def _expectation(action: Action) -> str:
    gain = action.expected_gain_ns
    expected = f"saves about {scale.estimate(gain)}" if gain is not None else "gain not modelled"
    return f"{expected}; to verify: {plain(action.verify)}" if action.verify else expected
