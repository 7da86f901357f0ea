"""`ttftprof bench`: a controlled experiment, from a plan to a verdict."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from ttftprof.cli import output
from ttftprof.errors import NotPermitted, Unsupported, UsageError
from ttftprof.experiment import plan as plans
from ttftprof.experiment.plan import Plan

_EPILOG = """\b
Examples:
  ttftprof bench --example > plan.toml         a plan to start from, with every field
  sudo ttftprof bench plan.toml                run it, or go on where it was interrupted
  sudo ttftprof bench --url http://127.0.0.1:8080 --models small,large --runs 12
  sudo ttftprof bench plan.toml --vary readahead=128,1024 --expect lower
  ttftprof bench --report plan.bench           what its runs show so far
  ttftprof bench --report plan.bench --traffic monday.ttft
                                               what other policies would have made of it
"""


@click.command("bench", epilog=_EPILOG)
@click.argument("plan_file", metavar="[PLAN.toml]", required=False, type=click.Path(path_type=Path))
@click.option("--url", help="The server's address, http://HOST:PORT.")
@click.option("--models", metavar="A,B", help="The model that is measured, and the other one.")
@click.option("--command", help="Have the server started, restarted and ended by this command.")
@click.option("--scenarios", metavar="S,…", help="Which scenarios (--example lists them).")
@click.option("--runs", type=int, metavar="N", help="Runs of each scenario and variant.")
@click.option("--seed", type=int, metavar="N", help="Of the order of the runs.")
@click.option(
    "--vary",
    multiple=True,
    metavar="NAME=V1,V2",
    help="Vary one factor (repeatable: one at a time). The first value is the base. Values that "
    "hold commas are parted by | instead.",
)
@click.option(
    "--expect",
    metavar="lower|higher[:SHARE]",
    help="What the change is expected to do to the TTFT, said beforehand; e.g. lower:10%.",
)
@click.option("--no-record", is_flag=True, help="The client's times alone: no root, no phases.")
@click.option(
    "-o",
    "--output",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where the experiment is kept (default: NAME.bench).",
)
@click.option("--fresh", is_flag=True, help="Begin anew; what the folder held is renamed.")
@click.option(
    "--report",
    "report_only",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Run nothing: print what this experiment shows.",
)
@output.format_option("json: the schema ttftprof.experiment/1.")
@click.option(
    "--html",
    "page",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="OUT",
    help="Also write one self-contained HTML file, with plots.",
)
@click.option(
    "--traffic",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Play the requests of this recording again under other ways of keeping models in memory "
    "(repeatable), with the waits that were measured here.",
)
@click.option("--example", is_flag=True, help="Print a plan with every field, and end.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@output.WIDTH
@output.COLOR
def command(
    plan_file: Path | None,
    folder: Path | None,
    fresh: bool,
    report_only: Path | None,
    form: str,
    page: Path | None,
    traffic: tuple[Path, ...],
    example: bool,
    quiet: bool,
    width: int | None,
    color: str,
    **options: Any,
) -> int:
    """Run an experiment: the same requests, cold, warm and switched, again and again.

    Every run begins in a state that is made and verified, is recorded by the profiler, and is kept
    whether it went well or not. Interrupted, it goes on with the same command. The report gives
    medians and p95 with intervals, the phase that each slow start began with, and what a varied
    setting did.
    """
    output.checked_width(width)
    if example:
        click.echo(plans.EXAMPLE, nl=False)
        return 0
    if report_only is None:
        plan = _plan(plan_file, options)
        report_only = folder or Path(f"{plan.name}.bench")
        _run(plan, report_only, fresh, quiet)
    elif plan_file is not None:
        raise UsageError("--report and a plan contradict each other", "give one of them")
    _print(report_only, traffic, form, page, width, color)
    return 0


# -- the plan -------------------------------------------------------------------------------------


def _plan(path: Path | None, options: Mapping[str, Any]) -> Plan:
    """The plan of the file, with what the options say in its place."""
    if path is None and options["url"] is None and options["command"] is None:
        raise UsageError(
            "there is nothing to run: no plan and no --url",
            "ttftprof bench --example > plan.toml   or   --url http://… --models A,B",
        )
    raw: dict[str, Any] = {}
    source, text = "the options", ""
    if path is not None:
        raw, text = plans.read_toml(path)
        source = str(path)
        for table in ("experiment", "server", "vary"):
            if not isinstance(raw.get(table, {}), dict):
                raise UsageError(f"{path}: {table} must be a table", f"write [{table}]")
        raw.setdefault("experiment", {}).setdefault("name", path.stem)
    _override(raw, options)
    return plans.from_mapping(raw, source, text)


def _override(raw: dict[str, Any], options: Mapping[str, Any]) -> None:
    places = {
        "url": ("server", "url"),
        "command": ("server", "command"),
        "runs": ("experiment", "runs"),
        "seed": ("experiment", "seed"),
    }
    for name, (table, key) in places.items():
        if options[name] is not None:
            raw.setdefault(table, {})[key] = options[name]
    if options["models"] is not None:
        raw.setdefault("server", {})["models"] = _split(options["models"])
    if options["scenarios"] is not None:
        raw.setdefault("experiment", {})["scenarios"] = _split(options["scenarios"])
    if options["no_record"]:
        raw.setdefault("experiment", {})["record"] = False
    if options["vary"]:
        raw["vary"] = dict(_factor(text) for text in options["vary"])
    if options["expect"] is not None:
        direction, _, share = options["expect"].partition(":")
        raw["expect"] = [{"direction": direction, **({"at_least": share} if share else {})}]


def _factor(text: str) -> tuple[str, list[str]]:
    name, equals, values = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--vary {text!r} is no factor", "write --vary readahead=128,1024")
    return name, values.split("|") if "|" in values else values.split(",")


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


# -- running --------------------------------------------------------------------------------------


def _run(plan: Plan, folder: Path, fresh: bool, quiet: bool) -> None:
    from ttftprof.cli.bench_progress import watcher
    from ttftprof.experiment.runner import carry_out
    from ttftprof.experiment.schedule import slots_of
    from ttftprof.experiment.store import Store

    need_scipy()  # before the work, not after it
    if plan.record and os.geteuid() != 0:
        raise NotPermitted(
            "recording each run needs the kernel's probes, and those need root",
            "sudo ttftprof bench …, or --no-record for the client's times alone",
        )
    if fresh and folder.exists():
        Store.set_aside(folder, _aside(folder))
    if Store.exists(folder):
        store = Store.resume(folder, plan.public(), plan.digest())
    else:
        store = Store.create(folder, plan.public(), plan.digest(), slots_of(plan))
    with store, watcher(store, quiet) as progress:
        try:
            carry_out(plan, store, progress)
        except KeyboardInterrupt:
            left = len(store.left())
            progress.say(f"interrupted; {left} runs are left: the same command goes on from here")
            if not store.kept():
                raise


def need_scipy() -> None:
    """Raises `Unsupported` without it: it comes with the extra `bench` only."""
    if find_spec("scipy") is None:
        raise Unsupported(
            "the statistics need scipy, which is not installed",
            next_step="pip install 'ttftprof[bench]'",
        )


def _aside(folder: Path) -> Path:
    number = 1
    while (found := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return found


def _print(
    folder: Path,
    traffic: Sequence[Path],
    form: str,
    page: Path | None,
    width: int | None,
    color: str,
) -> None:
    need_scipy()
    from ttftprof.experiment.evaluate import evaluate

    experiment = evaluate(folder, traffic)
    out = output.printable(sys.stdout)
    if form == "json":
        from ttftprof.reports import experiment_json

        experiment_json.write(experiment, out)
    else:
        from ttftprof.reports import experiment_terminal

        colour = output.has_colour(color, out)
        experiment_terminal.write(experiment, out, width or output.width_of(out), colour)
    if page is not None:
        from ttftprof.reports import experiment_html

        with output.text_file(page) as file:
            experiment_html.write(experiment, file)
        with suppress(OSError):
            click.echo(f"wrote {page}; open it in a browser", err=True)
    out.flush()


__all__: Sequence[str] = ["command"]
