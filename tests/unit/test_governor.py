"""The budget of a recording: when something is given up, and that it is what costs most."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttftprof.clock import NS_PER_S
from ttftprof.governor import PYTHON, RECORDER, RELIEFS, SUSTAINED_NS, Decision, Governor
from ttftprof.kernel.session import ProbeObject

CPUS = 4
STEP_NS = 2 * NS_PER_S


def decisions(
    governor: Governor, rates: dict[str, float], seconds: int, start_ns: int = 0
) -> list[tuple[int, Decision]]:
    """What it decides while each part takes such a share of the machine."""
    found = []
    for ns in range(start_ns, start_ns + seconds * NS_PER_S + 1, STEP_NS):
        if not governor.is_due(ns):  # nothing is left to give up
            break
        spent = {name: round(rate * CPUS * ns) for name, rate in rates.items()}
        decision = governor.look(ns, spent)
        if decision is not None:
            found.append((ns, decision))
    return found


def test_within_its_budget_nothing_is_given_up() -> None:
    rates = {RECORDER: 0.005, "cpu__tick": 0.004}
    assert decisions(Governor(0.01, CPUS), rates, 60) == []


def test_a_short_burst_is_let_be() -> None:
    governor = Governor(0.01, CPUS)
    spent = {RECORDER: 0}
    for number in range(30):
        # Half a machine for the two seconds of each seventh look: 6 s together are never above 1 %
        # but for a burst that is over.
        spent = {RECORDER: spent[RECORDER] + (round(0.02 * CPUS * STEP_NS) if number == 3 else 0)}
        assert governor.look(number * STEP_NS, spent) is None


def test_the_dearest_goes_first_and_each_after_its_own_look() -> None:
    rates = {RECORDER: 0.004, PYTHON: 0.006, "cpu__tick": 0.002, "offcpu__switch": 0.03}
    found = decisions(Governor(0.01, CPUS), rates, 60)
    assert [d.relief.name for _, d in found] == [
        "Python stacks", "looks at the counters", "CPU samples",
    ]  # fmt: skip
    stamps = [ns for ns, _ in found]
    assert all(b - a > SUSTAINED_NS for a, b in pairwise(stamps))
    first = found[0][1]
    assert first.share == pytest.approx(0.042, rel=1e-3)
    assert first.own == pytest.approx(0.006, rel=1e-3)
    assert "4.2 % of the machine" in first.reason()


def test_what_saves_nothing_is_kept() -> None:
    """A recording whose required probes alone pass the budget keeps its optional ones."""
    assert decisions(Governor(0.01, CPUS), {"offcpu__switch": 0.5, PYTHON: 0.0}, 60) == []


def test_without_a_budget_it_never_looks() -> None:
    assert not Governor(None, CPUS).is_due(0)


@given(st.dictionaries(st.sampled_from([c for r in RELIEFS for c in r.costs]), st.floats(0, 0.2)))
def test_every_part_is_given_up_at_most_once(rates: dict[str, float]) -> None:
    governor, found = Governor(0.001, CPUS), []
    for start in range(0, 120, 10):
        if governor.is_due(start * NS_PER_S):
            found += decisions(governor, rates, 8, start * NS_PER_S)
    names = [d.relief.name for _, d in found]
    assert len(names) == len(set(names))


def test_every_program_that_may_be_dropped_is_there() -> None:
    probes = ProbeObject()
    try:
        wanted = {c for r in RELIEFS for c in r.costs} - {RECORDER, PYTHON}
        assert wanted <= set(probes.programs)
    finally:
        probes.close()
