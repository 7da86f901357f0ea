"""What the documents name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab.hardening import DOCUMENT, document, examples, named

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "collector/ttftprof"


def test_the_page_of_what_was_tried_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == document(), "PYTHONPATH=tests python -m lab.hardening"


def test_it_names_tests_that_are_there() -> None:
    assert len(named()) > 50
    for test in named():
        examples(test)


@pytest.mark.parametrize(
    ("test", "played"),
    [
        ("unit/recording.a_flipped_bit_is_an_error_or_a_wrong_value", 400),
        ("unit/damaged.flipped_bits_are_an_error_or_exact_reports", 40),  # 20, by two seeds
        ("unit/http.nothing_raises_and_every_exchange_makes_sense", 500),
        ("unit/analysis.any_facts_give_exact_partitions", 150),  # by an alias of its settings
        ("unit/metrics.no_page_makes_it_stumble", 100),  # hypothesis' own number
        ("kernel/chaos.nobody_else_can_detach_a_probe", 0),
    ],
)
def test_how_many_inputs_a_test_plays(test: str, played: int) -> None:
    assert examples(test) == played


def test_a_test_that_is_gone_is_noticed() -> None:
    with pytest.raises(LookupError):
        examples("unit/recording.no_such_thing")


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "README.md", "CHANGELOG.md"])
def test_files_that_a_document_names_are_there(name: str) -> None:
    """Paths from the checkout's root or the package's; NAME stands for what is new."""
    quoted = re.findall(r"`([\w./-]+/[\w.-]*|[\w-]+\.(?:py|c|h|md))`", (ROOT / name).read_text())
    meant = [path for path in quoted if "NAME" not in path and not path.startswith("/")]
    assert meant
    missing = [p for p in meant if not any((folder / p).exists() for folder in (ROOT, PACKAGE))]
    assert not missing
