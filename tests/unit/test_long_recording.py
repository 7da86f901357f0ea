"""A long recording: what reports on it take grows with its length and no faster."""

from __future__ import annotations

import pytest

from lab.bench_report import Cost, measure_lengths

LONG, SHORT = 1_000_000, 300_000
COMMANDS = ("report --format json", "report --html")


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Cost]:
    found = measure_lengths(tmp_path_factory.mktemp("long"), (SHORT, LONG), COMMANDS)
    return {(cost.command, cost.events): cost for cost in found}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_report_holds_three_recordings(costs: dict[tuple[str, int], Cost], command: str) -> None:
    assert costs[command, LONG].of_raw < 3


@pytest.mark.parametrize("command", COMMANDS)
def test_a_report_takes_time_in_proportion(
    costs: dict[tuple[str, int], Cost], command: str
) -> None:
    ratio = costs[command, LONG].cpu_s / costs[command, SHORT].cpu_s
    assert ratio < 1.25 * LONG / SHORT
