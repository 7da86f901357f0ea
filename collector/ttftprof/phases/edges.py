"""Moments, what they rest on, and the cutter that lays phases between them."""

from __future__ import annotations

from dataclasses import dataclass

from ttftprof.model import Evidence, Phase

OBSERVED, INFERRED = "observed", "inferred"


@dataclass(frozen=True, slots=True)
class Edge:
    """A moment and what it rests on."""

    ns: int
    basis: str
    evidence: Evidence


class Cutter:
    """Lays phases one behind the other over [start, end]."""

    def __init__(self, start_ns: int, end_ns: int, probed: bool = True) -> None:
        """`probed`: whether probes saw the edges; known to a look's distance, none is observed."""
        self._at = start_ns
        self._probed = probed
        self._end = end_ns
        self.phases: list[Phase] = []

    @property
    def at_ns(self) -> int:
        return self._at

    def until(self, phase: str, edge: Edge | None, basis: str = "") -> None:
        """`phase` lasts until this edge; nothing happens if it lies behind or is unknown."""
        if edge is None:
            return
        end = min(edge.ns, self._end)
        if end > self._at:
            basis = basis or edge.basis if self._probed else INFERRED
            found = Phase(phase, self._at, end, basis, (edge.evidence,))
            self.phases.append(found)
            self._at = end

    def rest(self, phase: str, basis: str, evidence: Evidence) -> None:
        self.until(phase, Edge(self._end, basis, evidence))
