"""What all scenarios of the truth server say together: printed after the tests, and on demand a
page (`scripts/truth`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import pytest

TABLE: pytest.StashKey[list[Row]] = pytest.StashKey()

_HEAD = """# The truth workload: our phases against the server's own stamps

Made by `scripts/truth` on {machine}. The server stamps its phases on the clock that we use, and is
told nothing of us. *Error*: of the phase that is furthest off, in % of the TTFT; *stood still*: the
longest that a core did not run meanwhile, or a thread that was ready, which moves stamps on either
side. *Less*: the same recording without the marked calls, without log lines, without both: `✓`
where the cause stays right, else what was blamed.

"""


@dataclass(frozen=True)
class Row:
    """One scenario. `less`: the cause named without some sources, None where it stays right."""

    name: str
    about: str
    ttft_ns: int
    cause: str
    worst_phase: str
    error_ns: int
    stalled_ns: int
    unexplained_ns: int
    less: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """Share of the TTFT, without what a stall explains."""
        return max(self.error_ns - self.stalled_ns, 0) / self.ttft_ns

    @property
    def raw_error(self) -> float:
        return self.error_ns / self.ttft_ns

    @property
    def unexplained(self) -> float:
        return self.unexplained_ns / self.ttft_ns


def summary(rows: Sequence[Row]) -> list[str]:
    worst = max(rows, key=lambda row: row.error)
    raw = max(rows, key=lambda row: row.raw_error)
    most = max(row.unexplained for row in rows)
    lines = [
        f"{len(rows)} scenarios; the phase that is furthest off: {_percent(_median(rows))} of the "
        f"TTFT at the median, {_percent(worst.error)} in the worst ({worst.name}) besides what a "
        f"core stood still ({_percent(raw.raw_error)} with it, {raw.name})",
        f"unexplained: {_percent(most)} at most",
    ]
    for less in rows[0].less:
        wrong = {row.name: row.less[less] for row in rows if row.less[less]}
        named = ", ".join(f"{name}: {cause}" for name, cause in wrong.items())
        lines.append(
            f"without {less}: the cause right in {len(rows) - len(wrong)} of {len(rows)}"
            + (f" ({named})" if wrong else "")
        )
    return lines


def _median(rows: Sequence[Row]) -> float:
    return median(row.raw_error for row in rows)


def page(rows: Sequence[Row], machine: str) -> str:
    told = "".join(f"- {line}\n" for line in summary(rows))
    head = ["scenario", "TTFT", "cause", "error", "phase", "stood still", "unexplained"]
    head += [f"less {less}" for less in rows[0].less]
    table = [head, ["---"] * len(head), *map(_cells, rows)]
    return (
        _HEAD.format(machine=machine)
        + told
        + "\n"
        + "".join(f"| {' | '.join(cells)} |\n" for cells in table)
    )


def _cells(row: Row) -> list[str]:
    return [
        f"`{row.name}`: {row.about}",
        f"{row.ttft_ns / 1e6:,.0f} ms",
        row.cause,
        _percent(row.raw_error),
        row.worst_phase,
        f"{row.stalled_ns / 1e6:.1f} ms",
        _percent(row.unexplained),
        *(cause or "✓" for cause in row.less.values()),
    ]


def _percent(share: float) -> str:
    return f"{share * 100:.2f} %"
