"""Python code of a request's phases in words, and as folded stacks for flame graph tools."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TextIO

from ttftprof import scale
from ttftprof.diagnosis.python_rules import percent
from ttftprof.engines.python_code import IDLE
from ttftprof.model import PythonShare, PythonStack, PythonTime, Report, Request
from ttftprof.reports import html_data
from ttftprof.reports.safe import plain

_SHARES, _STACKS, _WAITS = 5, 2, 2  # told of each phase
_LITTLE = 0.02
_FEWEST = 5  # fewer samples are not worth a line
_FRAMES = 3
_NAME = 120
# Frames through which every call of their library goes.
_PLUMBING = re.compile(
    r"Module\.(_wrapped)?_call_impl$|<frozen importlib|python3[^/]*/(threading|contextlib)\.py|"
    r"python3[^/]*/asyncio/|[:.](wrapper|decorate_context|inner|__call__)$"
)


def lines(request: Request) -> Iterator[str]:
    """What samples say of each phase: categories, the most frequent stacks, who waited."""
    for time in (t for t in request.python if t.samples >= _FEWEST):
        shares = [s for s in time.shares if s.share >= _LITTLE or s is time.shares[0]]
        told = ", ".join(_share(s) for s in shares[:_SHARES])
        watched = "" if time.covered >= 0.9 else f", {scale.percent(time.covered)} of it watched"
        yield f"{time.phase}, by {time.samples} samples{watched}: {told}"
        for stack in time.stacks[:_STACKS]:
            yield f"  {scale.percent(stack.samples / time.samples):>6} {_stack(stack)}"
        for wait in time.waits[:_WAITS]:
            of = f" for {plain(wait.path, _NAME)}" if wait.path else ""
            yield f"  {scale.duration(wait.wait_ns)} {wait.activity} in {plain(wait.frame)}{of}"


def _share(share: PythonShare) -> str:
    whose = f" ({', '.join(plain(p, 40) for p in share.packages)})" if share.packages else ""
    return f"{share.category} {percent(share)}{whose}"


def _stack(stack: PythonStack) -> str:
    """Its innermost frames that tell something, the innermost last."""
    telling = [frame for frame in stack.frames if not _PLUMBING.search(frame)] or stack.frames
    shown = " → ".join(plain(frame, _NAME) for frame in telling[-_FRAMES:])
    return f"{stack.category}: {'… → ' if len(telling) > _FRAMES else ''}{shown}"


def write_folded(report: Report, out: TextIO) -> None:
    """`request;phase;category;frame;… n`: n is the samples' weight in nanoseconds, 1/rate each."""
    for subject in html_data.subjects(report):
        root = _frame(f"{html_data.title(subject)} {subject.model or ''}".strip())
        for time in subject.python:
            for names, samples in _stacks(time):
                ns = round(samples * 1e9 / time.rate_hz)
                if ns:
                    out.write(f"{';'.join(map(_frame, (root, time.phase, *names)))} {ns}\n")


def _stacks(time: PythonTime) -> Iterator[tuple[tuple[str, ...], float]]:
    for stack in time.stacks:
        yield (stack.category, *stack.frames), stack.samples
    yield from (((IDLE,), s.samples) for s in time.shares if s.category == IDLE)


def _frame(name: str) -> str:
    """A frame can hold neither the separator nor, at its end, what looks like a count."""
    return plain(name, 200).replace(";", ":").replace(" ", "\N{NO-BREAK SPACE}")
