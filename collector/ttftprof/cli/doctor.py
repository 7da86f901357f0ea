"""`ttftprof doctor`: what this machine allows, what is missing, what that costs, how to get it."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import TextIO

import click
from rich.console import Console
from rich.text import Text

from ttftprof.cli import output
from ttftprof.doctor import DEGRADED, MISSING, OK, Check, Diagnosis, examine
from ttftprof.errors import Unsupported

_STATE_WIDTH, _LABEL_WIDTH = 10, 7
_STYLES = {OK: "green", DEGRADED: "yellow", MISSING: "red"}


@click.command("doctor")
@output.format_option()
@click.option(
    "--cost",
    is_flag=True,
    help="Instead: load the probes, run a small program as target and as stranger, and say what "
    "each probe took (needs root, two seconds).",
)
def command(form: str, cost: bool) -> int:
    """Say what this machine allows, what each missing thing costs, and how to get it.

    Nothing is changed. Exit code 0 if `record` can use its probes here, 5 if not.
    """
    if cost:
        _print_costs(form)
        return 0
    diagnosis = examine()
    if form == "json":
        click.echo(json.dumps(diagnosis.as_json(), indent=2))
    else:
        print_diagnosis(diagnosis, sys.stdout)
    return 0 if diagnosis.can_record else Unsupported.exit_code


def _print_costs(form: str) -> None:
    from ttftprof import probe_cost

    costs = probe_cost.measure()
    if form == "json":
        click.echo(json.dumps([asdict(cost) for cost in costs], indent=2))
        return
    click.echo(f"{'':<26}{'to the target':>20}{'to a stranger':>20}")
    click.echo(f"{'program':<26}{'runs':>10}{'ns each':>10}{'runs':>10}{'ns each':>10}")
    for cost in (c for c in costs if c.target_runs or c.stranger_runs):
        target = f"{cost.target_runs:>10,}{_nanoseconds(cost.target_ns):>10}"
        stranger = f"{cost.stranger_runs:>10,}{_nanoseconds(cost.stranger_ns):>10}"
        click.echo(f"{cost.name:<26}{target}{stranger}")
    idle = [c.name for c in costs if not c.target_runs and not c.stranger_runs]
    for line in textwrap.wrap("did not run, or as part of syscalls__*: " + ", ".join(idle), 78):
        click.echo(line)
    click.echo("Of each run some 40 ns, two readings of the clock, are the measurement's own.")


def _nanoseconds(mean_ns: float | None) -> str:
    return "" if mean_ns is None else f"{mean_ns:,.0f}"


def print_diagnosis(diagnosis: Diagnosis, file: TextIO) -> None:
    """A row a check; below those that are not ok, what it costs and what fixes it."""
    console = Console(file=file, highlight=False)
    width = max(len(check.name) for check in diagnosis.checks) + 2
    for check in diagnosis.checks:
        for line in _lines(check, width, console.width):
            console.print(line, soft_wrap=True)
    console.print()
    for text in textwrap.wrap(diagnosis.verdict, console.width):
        console.print(Text(text, "bold"), soft_wrap=True)


def _lines(check: Check, name_width: int, width: int) -> Iterator[Text]:
    head = Text(f"{check.state:<{_STATE_WIDTH}}", _STYLES[check.state])
    head.append(f"{check.name:<{name_width}}", "default")
    found = _wrapped(check.found, width - len(head))
    for number, part in enumerate(found):
        yield head + Text(part) if number == 0 else Text(" " * len(head) + part)
    if check.state == OK:
        return
    for label, text in (("costs", check.costs), ("fix", check.fix)):
        for number, part in enumerate(_wrapped(text, width - _STATE_WIDTH - _LABEL_WIDTH)):
            shown = f"{label}:" if number == 0 else ""
            line = Text(" " * _STATE_WIDTH + f"{shown:<{_LABEL_WIDTH}}", "dim")
            yield line + Text(part, "default")


def _wrapped(text: str, width: int) -> list[str]:
    return [
        part
        for line in text.splitlines()
        for part in textwrap.wrap(line, max(width, 20), break_on_hyphens=False)
    ]
