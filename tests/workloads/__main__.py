"""python -m workloads [NAME...] [--workdir DIR]: run scenarios (default all), print the truth."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from .scenarios import SCENARIOS, ScenarioRun, run_scenario


def _describe(run: ScenarioRun) -> str:
    totals = " ".join(
        f"{phase}={total_ns / 1e6:.1f}"
        for phase, total_ns in run.truth.totals_ns.items()
        if total_ns
    )
    client_ms, server_ms = run.client.ttft_ns / 1e6, run.truth.ttft_ns / 1e6
    return f"{run.scenario.name:24} ttft={server_ms:.1f} client={client_ms:.1f} ms: {totals}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="workloads")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SCENARIOS))
    parser.add_argument(
        "--workdir", type=Path, help="keeps model files and stamps (default: temporary)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="workloads-") as temporary:
        for name in options.names or SCENARIOS:
            print(_describe(run_scenario(name, options.workdir or Path(temporary))), flush=True)


if __name__ == "__main__":
    main()
