"""`ttftprof doctor`: what this machine allows, what is missing, what that costs, how to get it."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from typing import TextIO

import click
from rich.console import Console
from rich.text import Text

from ttftprof.doctor import DEGRADED, MISSING, OK, Check, Diagnosis, examine
from ttftprof.errors import Unsupported

_STATE_WIDTH, _LABEL_WIDTH = 10, 7
_STYLES = {OK: "green", DEGRADED: "yellow", MISSING: "red"}


@click.command("doctor")
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True
)
def command(form: str) -> int:
    """Say what this machine allows, what each missing thing costs, and how to get it.

    Nothing is changed. Exit code 0 if `record` can work here, 5 if not.
    """
    diagnosis = examine()
    if form == "json":
        click.echo(json.dumps(diagnosis.as_json(), indent=2))
    else:
        print_diagnosis(diagnosis, sys.stdout)
    return 0 if diagnosis.can_record else Unsupported.exit_code


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
