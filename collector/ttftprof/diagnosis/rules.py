"""What a verdict is drawn from, and the rules that draw it: each a row with a name and a test.

A rule looks at a blamed phase × activity and answers with what it found, or None. Rules say only
what the recording shows; a gain is promised only with the model that gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ttftprof.circumstances import Circumstances
from ttftprof.model import (
    Action,
    Activity,
    Evidence,
    FileUse,
    MemoryUse,
    MountUse,
    Phase,
    PythonTime,
    file_of_load,
)


@dataclass(frozen=True, slots=True)
class Hint:
    """Something about the GPU worth saying when `phase` is to blame."""

    phase: str
    says: str
    action: Action | None = None
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """What a verdict is drawn from."""

    ttft_ns: int
    phases: Sequence[Phase]
    activities: Sequence[Activity]
    files: Sequence[FileUse]
    mounts: Sequence[MountUse]
    table: dict[str, dict[str, int]]
    prompt_tokens: int | None
    cached_tokens: int | None
    sources_missing: int
    answered: bool
    outcome: str
    until: str = "to the first token"
    hints: Sequence[Hint] = ()
    python: Sequence[PythonTime] = ()
    known: Circumstances = field(default_factory=Circumstances)
    memory: MemoryUse | None = None


@dataclass(frozen=True, slots=True)
class Blamed:
    """The phase × activity that is to blame, with everything known around it."""

    facts: Facts
    phase: str
    activity: str

    @property
    def cell_ns(self) -> int:
        return self.facts.table.get(self.phase, {}).get(self.activity, 0)

    @property
    def phase_ns(self) -> int:
        return sum(self.facts.table.get(self.phase, {}).values())

    @property
    def weights(self) -> FileUse | None:
        """The file of weights, else the first file at all."""
        return file_of_load(self.facts.files)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rule adds to a verdict. `says`: sentences, each with its full stop.

    `at_most`: how sure a verdict can be that rests on this (None: no limit). `storage`: what it
    says of the part of storage, one of STORAGE_VERDICTS.
    """

    says: str = ""
    actions: tuple[Action, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    at_most: str | None = None
    storage: str | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One row. `phases` and `activities` it is asked about; empty means any."""

    name: str
    find: Callable[[Blamed], Finding | None]
    phases: frozenset[str] = frozenset()
    activities: frozenset[str] = frozenset()

    def look(self, blamed: Blamed) -> Finding | None:
        if self.phases and blamed.phase not in self.phases:
            return None
        if self.activities and blamed.activity not in self.activities:
            return None
        return self.find(blamed)


def rule(
    name: str, find: Callable[[Blamed], Finding | None], phases: str = "", activities: str = ""
) -> Rule:
    """A row; `phases` and `activities` are words separated by spaces."""
    return Rule(name, find, frozenset(phases.split()), frozenset(activities.split()))


def seconds(ns: float) -> str:
    return f"{ns / 1e9:.2f} s" if ns >= 1e9 else f"{ns / 1e6:.0f} ms"
