"""What `watch` shows: a line a request, and totals that stay small however long it runs.

Guarantees: a line is never wider than asked; foreign text is harmless; phases are told apart by
their names and fills, not by colour alone.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ttftprof import scale
from ttftprof.clock import NS_PER_S
from ttftprof.model import PHASES, Request
from ttftprof.reports import flame, words
from ttftprof.reports.lanes import Window, blocks
from ttftprof.reports.safe import clip, clip_middle, plain
from ttftprof.watch import Ended

_TIME, _WAIT, _KIND, _CAUSE = 8, 9, 10, 30
_LEAST_BAR = 12
_REMEMBERED = 1_000
_MODELS = 50
_SHOWN_MODELS, _SHOWN_SWITCHES = 6, 3
OTHER = "other"
_DIM, _BOLD = Style(dim=True), Style(bold=True)


def model_of(request: Request) -> str:
    return model_name(request.model)


def model_name(model: str | None) -> str:
    """In at most 80 cells, with its end: models that are named by their paths differ there."""
    return clip_middle(plain(model), 80) if model else "unknown"


# -- a line ---------------------------------------------------------------------------------------


def header(width: int, colour: bool) -> Iterator[Text]:
    """What the columns are, and how the phases look."""
    model, bar, cause = _columns(width)
    titles = ("time", _TIME), ("model", model), ("TTFT".rjust(_WAIT), _WAIT), ("kind", _KIND)
    line = " ".join(title.ljust(cells) for title, cells in (*titles, ("phases", bar)))
    yield Text((f"{line} cause" if cause else line).rstrip(), _DIM)
    yield from flame.legend(PHASES, width, colour).split()


def line(ended: Ended, width: int, colour: bool) -> Text:
    """`14:03:21 model-a   2.684 s cold       ░▒▒init▒▒▒▓▓prefill▓▓▓▓ prefill / cpu 68 %`"""
    request = ended.request
    model, bar, cause = _columns(width)
    text = Text(f"{_clock(ended.wall_ns)} ", no_wrap=True)
    text.append(_fitted(clip_middle(model_of(request), model), model) + " ")
    text.append(scale.duration(words.waited_ns(request)).rjust(_WAIT), _BOLD)
    text.append(f" {_fitted(_kind(request), _KIND)} ")
    body = _bar(request, bar, colour)
    text.append_text(body)
    if cause:
        text.append(" " * (bar - body.cell_len + 1))
        text.append(clip(plain(words.cause(request.verdict)), cause))
    return text


def _columns(width: int) -> tuple[int, int, int]:
    """Cells of the model, the bar and the cause; the cause is left out where room is short."""
    model = min(max(width // 6, 8), 28)
    left = width - _TIME - model - _WAIT - _KIND - 4
    cause = min(_CAUSE, left - _LEAST_BAR - 1)
    return (model, left - cause - 1, cause) if cause >= 12 else (model, left, 0)


def _fitted(text: str, width: int) -> str:
    text = clip(text, width)
    return text + " " * (width - cell_len(text))


def _kind(request: Request) -> str:
    """`cold`, `cached`, `37 % cached` of a switch; how it ended where there was no first token."""
    if request.first_token_ns is None and not words.is_start(request):
        return request.outcome
    return words.switch_kind(request).replace(" switch", "") if request.switched else ""


def _bar(request: Request, width: int, colour: bool) -> Text:
    start_ns, end_ns = words.span(request)
    if end_ns <= start_ns:
        return Text()
    window = Window(start_ns, end_ns, width)
    lane = blocks([(p.phase, p.start_ns, p.end_ns) for p in request.phases], window)
    return flame.draw_blocks(lane, colour)


def _clock(wall_ns: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(wall_ns / NS_PER_S))


# -- totals ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _OfModel:
    requests: int = 0
    switches: int = 0
    slowest_ns: int = 0
    ttfts_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


@dataclass(slots=True)
class Totals:
    """What was seen since it began. Of models beyond the first `_MODELS` only a sum is kept, of
    TTFTs the last `_REMEMBERED` of each."""

    requests: int = 0
    starts: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    switches: deque[Ended] = field(default_factory=lambda: deque(maxlen=_SHOWN_SWITCHES))
    models: dict[str, _OfModel] = field(default_factory=dict)

    def add(self, ended: Ended) -> None:
        request = ended.request
        if request.switched:
            self.switches.append(ended)
        if words.is_start(request):
            self.starts += 1
            return
        self.requests += 1
        self.outcomes[request.outcome] += 1
        name = model_of(request)
        if name not in self.models and len(self.models) >= _MODELS:
            name = OTHER
        own = self.models.pop(name, None) or _OfModel()
        self.models[name] = own  # the one used last stands last
        own.requests += 1
        own.switches += request.switched
        if request.ttft_ns is not None:
            own.ttfts_ns.append(request.ttft_ns)
            own.slowest_ns = max(own.slowest_ns, request.ttft_ns)

    def table(self, width: int, everything: bool = False) -> Table:
        """A row a model, the one used last first."""
        titles = ("requests", "switches", "TTFT median", "95 %", "slowest")
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=_DIM)
        table.add_column("model", no_wrap=True)
        for title in titles:
            table.add_column(title, justify="right", no_wrap=True)
        rows = list(reversed(self.models.items()))
        for name, own in rows if everything else rows[:_SHOWN_MODELS]:
            table.add_row(
                Text(clip_middle(name, max(width - 60, 10))),
                f"{own.requests:,}",
                f"{own.switches:,}",
                scale.duration(_quantile(own.ttfts_ns, 0.5)),
                scale.duration(_quantile(own.ttfts_ns, 0.95)),
                scale.duration(own.slowest_ns or None),
            )
        return table

    def last_switches(self, width: int) -> Iterator[Text]:
        for ended in reversed(self.switches):
            request = ended.request
            told = [
                _clock(ended.wall_ns),
                clip_middle(model_of(request), 28),
                words.switch_kind(request),
                scale.duration(words.waited_ns(request)),
                plain(words.cause(request.verdict)),
            ]
            yield Text(clip("  ".join(told), width))

    def sentence(self) -> str:
        """`12 requests, 3 switches, 1 error`"""
        switches = sum(own.switches for own in self.models.values())
        parts = [_counted(self.requests, "request"), _counted(switches, "switch", "switches")]
        if self.starts:
            parts.append(_counted(self.starts, "start"))
        failed = {k: n for k, n in sorted(self.outcomes.items()) if k != "ok" and n}
        return ", ".join([*parts, *(f"{n} {name}" for name, n in failed.items())])


def _counted(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _quantile(values: Sequence[int], share: float) -> int | None:
    """The smallest value that at least this share of them does not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]
