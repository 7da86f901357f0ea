"""The manual page is what the commands say of themselves, and is packaged."""

from __future__ import annotations

import tomllib

import click
import pytest

from lab.manual import PAGE, page
from ttftprof.cli import cli

CONTEXT = click.Context(cli)
TEXT = PAGE.read_text()


def test_the_page_is_up_to_date() -> None:
    assert page() == TEXT, "PYTHONPATH=tests .venv/bin/python -m lab.manual"


@pytest.mark.parametrize("name", cli.list_commands(CONTEXT))
def test_every_command_and_option_is_in_it(name: str) -> None:
    command = cli.get_command(CONTEXT, name)
    assert command is not None
    section = TEXT.split(f".SS ttftprof {name}")[1].split("\n.SS ")[0]
    options = [o for p in command.params if isinstance(p, click.Option) for o in p.opts]
    assert not [o for o in options if rf"\fB{o.replace('-', chr(92) + '-')}\fR" not in section]


def test_no_line_is_taken_for_a_request_that_is_none() -> None:
    known = (".TH", ".SH", ".SS", ".PP", ".TP", ".nf", ".fi", ".B", ".BR", ".RI")
    wrong = [x for x in TEXT.splitlines() if x.startswith((".", "'")) and x.split()[0] not in known]
    assert not wrong


def test_it_goes_where_man_looks() -> None:
    project = tomllib.loads((PAGE.parents[1] / "pyproject.toml").read_text())
    shared = project["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-data"]
    assert shared == {str(PAGE.relative_to(PAGE.parents[1])): "share/man/man1/ttftprof.1"}
