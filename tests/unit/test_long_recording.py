"""A long recording: what reports on it take grows with its length and no faster.

`scripts/bench report` tells it of each report and export alone, as a straight line through three
lengths. Here all are made by one process, whose peak is that of the greediest.
"""

from __future__ import annotations

import pytest

from lab.bench_report import ALL_AT_ONCE, Cost, measure_lengths

LONG, SHORT = 1_000_000, 300_000


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Cost, Cost]:
    short, long = measure_lengths(tmp_path_factory.mktemp("long"), (SHORT, LONG), (ALL_AT_ONCE,))
    return short, long


def test_no_report_holds_three_recordings(costs: tuple[Cost, Cost]) -> None:
    assert costs[1].of_raw < 3


def test_reports_take_time_in_proportion(costs: tuple[Cost, Cost]) -> None:
    """Machines are shared, so with room; what grew with the square would take eleven times."""
    short, long = costs
    assert long.cpu_s / short.cpu_s < 1.5 * LONG / SHORT
