"""`ttftprof dump`: every recorded fact, for people and for tests."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ttftprof.errors import UsageError
from ttftprof.recording import Reader
from ttftprof.reports.dump import EVENT_NAMES, FORMATS, KINDS, Choice, dump


@click.command("dump")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--kind",
    "kinds",
    type=click.Choice([*KINDS, "all"]),
    multiple=True,
    help="What to show (repeatable; default: all).",
)
@click.option(
    "--event",
    "events",
    type=click.Choice(EVENT_NAMES, case_sensitive=False),
    multiple=True,
    metavar="KIND",
    help=f"Only events of this kind (repeatable): {', '.join(EVENT_NAMES)}.",
)
@click.option("--tgid", type=click.IntRange(0), metavar="N", help="Only what this process did.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True)
@click.option("--limit", type=click.IntRange(0), metavar="N", help="At most this many lines.")
def command(
    file: Path,
    kinds: tuple[str, ...],
    events: tuple[str, ...],
    tgid: int | None,
    form: str,
    limit: int | None,
) -> None:
    """Print every recorded fact, in the order things happened.

    A line's time is when it was over, in seconds, milliseconds and microseconds since the recording
    began; what took time says how long. `--format jsonl` gives absolute nanoseconds of
    CLOCK_MONOTONIC.
    """
    choice = Choice(_chosen(kinds, events), frozenset(events), tgid, limit)
    with Reader(file) as reader:
        dump(reader, sys.stdout, choice, form)


def _chosen(kinds: tuple[str, ...], events: tuple[str, ...]) -> frozenset[str]:
    if events:
        if set(kinds) - {"events", "all"}:
            raise UsageError(
                f"--event and --kind {kinds[0]} contradict each other", "give one of them"
            )
        return frozenset({"events"})
    if not kinds or "all" in kinds:
        return frozenset(KINDS)
    return frozenset(kinds)
