"""How far an experiment is, and how long it will take: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import mean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from ttftprof.experiment.runner import RunResult, Watcher
from ttftprof.experiment.store import Slot, Store


class Remaining:
    """How long what is left will take: each run as long as its like took so far."""

    def __init__(self, store: Store, gap_s: float) -> None:
        self._gap_s = gap_s
        self._took: dict[str, list[float]] = {}
        for one in store.kept():
            self.add(one.slot.scenario, float(one.result["wall_s"]))

    def add(self, scenario: str, seconds: float) -> None:
        self._took.setdefault(scenario, []).append(seconds)

    def seconds(self, left: Sequence[Slot]) -> float | None:
        """None before the first run has ended."""
        every = [seconds for own in self._took.values() for seconds in own]
        if not every:
            return None
        usual = mean(every)
        times = (mean(self._took.get(slot.scenario, [usual])) for slot in left)
        return sum(times) + self._gap_s * len(left)


def spoken(seconds: float | None) -> str:
    """`12 s`, `3 min 20 s`, `1 h 05 min`"""
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


@contextmanager
def watcher(store: Store, quiet: bool) -> Iterator[Watcher]:
    if quiet:
        yield Watcher()
        return
    remaining = Remaining(store, float(store.plan["gap_s"]))
    total, done = len(store.slots()), len(store.kept())
    if not sys.stderr.isatty():
        yield _Lines(remaining, total, done)
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]} left"),
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task("starting", total=total, completed=done, left="?")
        yield _Bar(remaining, bar, task)


def _name(slot: Slot) -> str:
    return f"{slot.scenario}, {slot.variant}{' (warm-up)' if slot.warmup else ''}"


def _came_to(result: RunResult) -> str:
    if not result.established:
        unmet = next(check for check in result.checks if not check.met)
        return f"left out: {unmet.what}: {unmet.found}, not {unmet.wanted}"
    if result.value_ns is not None:
        return f"{result.value_ns / 1e6:.0f} ms"
    return result.outcome


class _Bar(Watcher):
    def __init__(self, remaining: Remaining, bar: Progress, task: TaskID) -> None:
        self._remaining, self._bar, self._task = remaining, bar, task

    def begin(self, slot: Slot, left: Sequence[Slot]) -> None:
        shown = spoken(self._remaining.seconds(left))
        self._bar.update(self._task, description=_name(slot), left=shown)

    def end(self, slot: Slot, result: RunResult) -> None:
        self._remaining.add(slot.scenario, result.wall_s)
        self._bar.advance(self._task)
        if not result.established or not result.as_expected:
            self.say(f"run {slot.run}, {_name(slot)}: {_came_to(result)}")

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)


class _Lines(Watcher):
    def __init__(self, remaining: Remaining, total: int, done: int) -> None:
        self._remaining, self._total, self._done = remaining, total, done
        self._left = "?"

    def begin(self, slot: Slot, left: Sequence[Slot]) -> None:
        self._left = spoken(self._remaining.seconds(left))

    def end(self, slot: Slot, result: RunResult) -> None:
        self._remaining.add(slot.scenario, result.wall_s)
        self._done += 1
        self.say(
            f"[{self._done}/{self._total}, {self._left} left] {_name(slot)}: {_came_to(result)}"
        )

    def say(self, text: str) -> None:
        print(f"ttftprof: {text}", file=sys.stderr, flush=True)
