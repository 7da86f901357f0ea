"""What one wait has that another had not: phases, activities and the circumstances, side by side.

Pure. Both waits begin at 0: their request's start. The blame follows the rule of `diagnosis`: the
first phase that grew beyond noise, not the one that grew most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from ttftprof import diagnosis, scale
from ttftprof.model import (
    ACTIVITIES,
    PHASES,
    FileUse,
    MountUse,
    ProcessTrack,
    Report,
    Request,
    first_weights,
)

Cells = Mapping[str, Mapping[str, int]]
_CONTEXT_OPTIONS = ("--ctx-size", "-c", "--max-model-len", "--context-length", "--num-ctx")
_CHANGING = ("--port",)  # options that differ from one start to the next and mean nothing


@dataclass(frozen=True, slots=True)
class Wait:
    """One request of one recording."""

    report: Report
    request: Request


@dataclass(frozen=True, slots=True)
class Circumstance:
    """Something about the machine, the server or the request that is not the same; None: absent."""

    name: str
    base: str | None
    other: str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """`other` against `base`. `blamed`: the first phase that grew beyond `noise_ns`, if any did.

    `phases` and `activities` occur in either; cells of both are in `base_cells`, `other_cells`.
    """

    base: Wait
    other: Wait
    phases: tuple[str, ...]
    activities: tuple[str, ...]
    base_cells: Cells
    other_cells: Cells
    noise_ns: int
    blamed: str | None
    circumstances: tuple[Circumstance, ...]

    @property
    def growth_ns(self) -> int:
        return length_ns(self.other.request) - length_ns(self.base.request)

    def phase_growth_ns(self, phase: str) -> int:
        before, now = self.base_cells.get(phase, {}), self.other_cells.get(phase, {})
        return sum(now.values()) - sum(before.values())


def compare(base: Wait, other: Wait) -> Comparison:
    before, now = base.request.phase_activity(), other.request.phase_activity()
    cells = [row for table in (before, now) for row in table.values()]
    return Comparison(
        base=base,
        other=other,
        phases=tuple(name for name in PHASES if name in before or name in now),
        activities=tuple(name for name in ACTIVITIES if any(name in row for row in cells)),
        base_cells=before,
        other_cells=now,
        noise_ns=diagnosis.noise_ns(base.request),
        blamed=diagnosis.first_that_grew(other.request.phases, base.request),
        circumstances=tuple(_differences(circumstances(base), circumstances(other))),
    )


def length_ns(request: Request) -> int:
    """The time its phases cover: the TTFT where there is a first token."""
    return sum(phase.duration_ns for phase in request.phases)


def quickest(report: Report) -> Request | None:
    """The request to compare with: the one answered soonest."""
    return min(_answered(report), key=length_ns, default=None)


def slowest(report: Report) -> Request | None:
    """The request to explain: the longest wait that ended in a first token."""
    return max(_answered(report), key=length_ns, default=None)


def _answered(report: Report) -> list[Request]:
    return [r for r in report.requests if r.first_token_ns is not None and r.phases]


# -- circumstances --------------------------------------------------------------------------------


def circumstances(wait: Wait) -> dict[str, str]:
    """What may explain a difference, as text by name; what is not known is left out."""
    return dict(
        [
            *_of_host(wait.report),
            *_of_request(wait.request),
            *_of_storage(wait.request),
            *_of_server(wait),
        ]
    )


def _of_host(report: Report) -> Iterator[tuple[str, str]]:
    for name in ("node", "kernel", "machine", "cpus", "memory_bytes"):
        if report.host.get(name) is not None:
            yield name.replace("memory_bytes", "memory, bytes"), str(report.host[name])


def _of_request(request: Request) -> Iterator[tuple[str, str]]:
    facts = {
        "engine": request.engine,
        "model": request.model,
        "switched": "yes" if request.switched else "no",
        "prompt tokens": request.prompt_tokens,
        "cached tokens": request.cached_tokens,
    }
    yield from ((name, str(value)) for name, value in facts.items() if value is not None)


def _of_storage(request: Request) -> Iterator[tuple[str, str]]:
    weights = first_weights(request.files)
    if weights is None:
        return
    yield from _of_weights(weights)
    mount = next((m for m in request.mounts if m.path == weights.mount), None)
    if mount is not None:
        yield from _of_mount(mount)


def _of_weights(weights: FileUse) -> Iterator[tuple[str, str]]:
    yield "weights", weights.path
    yield "weights, bytes", str(weights.size_bytes)
    if weights.residency_before is not None:
        yield "weights in page cache before", scale.percent(weights.residency_before)
    if weights.access is not None:
        yield "weights read by", weights.access
    if weights.advice:
        yield "advice on weights", ", ".join(weights.advice)


def _of_mount(mount: MountUse) -> Iterator[tuple[str, str]]:
    yield "mount", mount.path
    yield "mount type", mount.fstype
    yield "mount options", mount.options
    if mount.read_ahead_kb is not None:
        yield "read-ahead, KiB", str(mount.read_ahead_kb)


def _of_server(wait: Wait) -> Iterator[tuple[str, str]]:
    server = serving(wait)
    if server is None:
        return
    yield "server", PurePath(server.argv[0]).name
    options = _options(server.argv[1:])
    context = next((options[name] for name in _CONTEXT_OPTIONS if name in options), None)
    if context is not None:
        yield "context size", context
    for name, value in options.items():
        if name not in (*_CHANGING, *_CONTEXT_OPTIONS):
            yield f"argument {name}", value


def serving(wait: Wait) -> ProcessTrack | None:
    """The process started last of those that lived at the first token: the model's own server."""
    _, end_ns = wait.request.start_ns, wait.request.first_token_ns or wait.request.start_ns
    alive = [p for p in wait.report.tracks.processes if p.argv and p.start_ns <= end_ns <= p.end_ns]
    return max(alive, key=lambda p: (p.start_ns, p.tgid), default=None)


def _options(argv: Sequence[str]) -> dict[str, str]:
    """{option: value}; a flag's value is "given", words that belong to none are "(words)"."""
    found: dict[str, str] = {}
    words: list[str] = []
    name: str | None = None
    for part in argv:
        if part.startswith("-") and not _is_number(part):
            option, equals, value = part.partition("=")
            found[option] = value if equals else "given"
            name = None if equals else option
        elif name is not None:
            found[name], name = part, None
        else:
            words.append(part)
    return found | ({"(words)": " ".join(words)} if words else {})


def _is_number(text: str) -> bool:
    return text.lstrip("-").replace(".", "", 1).isdigit()


def _differences(base: Mapping[str, str], other: Mapping[str, str]) -> Iterator[Circumstance]:
    for name in dict.fromkeys([*base, *other]):
        if base.get(name) != other.get(name):
            yield Circumstance(name, base.get(name), other.get(name))
