"""Of many requests a report concludes only those that it shows, and shows the same."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from ttftprof.analysis import analyse, every, only, slowest
from ttftprof.reports import terminal
from ttftprof.reports.terminal import MOST_SHOWN
from unit.recordings import FRONT, router_switch


def crowded(path: Path) -> Path:
    """A switch, and 60 requests for the same model: some refused, some never answered."""
    scene = router_switch()
    for number in range(60):
        at = 2_000 + 100 * number
        token = None if number % 10 == 3 else at + 20 + number
        outcome = "error" if number % 20 == 3 else "ok" if token else "incomplete"
        scene.request(FRONT, at, token=token, prompt_tokens=40, outcome=outcome)
    return scene.write(path)


@pytest.mark.parametrize("compact", [False, True])
def test_what_is_not_shown_of_many_is_not_concluded_and_changes_nothing(
    compact: bool, tmp_path: Path
) -> None:
    path = crowded(tmp_path / "a.ttft")
    few, whole = (analyse(path, False, choice) for choice in (slowest(MOST_SHOWN), every))
    assert [r.id for r in few.requests] == [r.id for r in whole.requests]
    concluded = [r for r in few.requests if r.phases]
    assert len(concluded) == MOST_SHOWN < len(whole.requests)
    texts = []
    for report in (few, whole):
        out = io.StringIO()
        terminal.write([report], out, 100, False, compact=compact)
        texts.append(out.getvalue())
    assert texts[0] == texts[1]


def test_a_request_alone_is_held_against_the_same_one(tmp_path: Path) -> None:
    path = crowded(tmp_path / "a.ttft")
    whole = analyse(path, False)
    switched = next(r for r in whole.requests if r.switched)
    assert ", with the model resident: " in switched.verdict.explanation
    alone = analyse(path, False, only(switched.id))
    assert next(r for r in alone.requests if r.phases) == switched
