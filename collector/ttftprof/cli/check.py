"""`ttftprof check`: fails a CI job when an experiment became slower than its baseline."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ttftprof.cli import output
from ttftprof.errors import UsageError
from ttftprof.model import PHASES

_EPILOG = """\b
Examples:
  ttftprof check today.bench --baseline main.bench --max-regression 10%
  ttftprof check today.bench --baseline main.bench --phase load --junit check.xml

\b
Exit codes: 0 no regression, 1 a regression, 2 wrong usage; with --undecided fail
also 1 where too few runs were made to tell.
"""
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("check", epilog=_EPILOG)
@click.argument("result", type=_FOLDER)
@click.option("--baseline", required=True, type=_FOLDER, help="The experiment to be held against.")
@click.option(
    "--max-regression",
    "limit",
    default="10%",
    show_default=True,
    metavar="SHARE",
    help="How much slower is still good, of the baseline's median.",
)
@click.option(
    "--phase",
    "phases",
    type=click.Choice(PHASES),
    multiple=True,
    metavar="PHASE",
    help="Check this phase instead of the TTFT (repeatable).",
)
@click.option(
    "--junit",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="OUT",
    help="Also write JUnit XML.",
)
@click.option(
    "--undecided",
    type=click.Choice(["pass", "fail"]),
    default="pass",
    show_default=True,
    help="What becomes of conditions with too few runs to tell.",
)
def command(
    result: Path,
    baseline: Path,
    limit: str,
    phases: tuple[str, ...],
    junit: Path | None,
    undecided: str,
) -> int:
    """Tell whether an experiment became slower than an earlier one; for CI.

    RESULT and the baseline are folders of `ttftprof bench`. Prints a Markdown table. A regression
    is slower by more than the limit and beyond chance: noise alone does not fail a job. What the
    baseline has and RESULT cannot tell, for instance because every run failed, fails it.
    """
    from ttftprof.cli.bench import need_scipy

    need_scipy()
    from ttftprof.experiment.evaluate import evaluate
    from ttftprof.experiment.gate import gate
    from ttftprof.reports import experiment_gate

    found = gate(evaluate(result), evaluate(baseline), _share(limit), phases or ("ttft",))
    if not found.checked:
        raise UsageError(f"{baseline} holds no run that counts", "run the baseline first")
    out = output.printable(sys.stdout)
    experiment_gate.write_markdown(found, out)
    out.flush()
    if junit is not None:
        with output.binary_file(junit) as file:
            experiment_gate.write_junit(found, file)
    too_few = undecided == "fail" and bool(found.undecided)
    return int(bool(found.regressed) or bool(found.absent) or too_few)


def _share(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 100:
        raise UsageError(f"--max-regression {text} is no share", "write 10% or 0.1")
    return value
