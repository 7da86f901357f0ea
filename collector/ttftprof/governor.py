"""Holds a recording to its budget: where its own cost stays above it, the dearest part that it can
do without is thinned or dropped, and the recording says so.

Pure: costs in, a decision out. A cost is the recorder's processor time, its helpers', and that of
every kernel program, as the kernel's statistics tell it in their windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ttftprof import scale
from ttftprof.clock import NS_PER_S

BUDGET = 0.01  # of the machine
LOOK_NS = 2 * NS_PER_S  # the kernel's windows come as often
SUSTAINED_NS = 6 * NS_PER_S  # a switch may cost more for a while; what lasts may not
SLOWER = 4  # how many times as seldom
TICK_HZ = 61  # a prime, as the rate it takes the place of
RECORDER, PYTHON = "recorder", "py-spy"


@dataclass(frozen=True, slots=True)
class Relief:
    """A part that a recording can do without.

    `costs`: what of the spending is its own: program names, or RECORDER or PYTHON. `spares`: the
    share of that which is saved. `source`: the probe or source it belongs to; None for the
    recorder's own looks. `lost` completes "from then on, …".
    """

    name: str
    costs: tuple[str, ...]
    spares: float
    source: str | None
    how: str
    lost: str


RELIEFS = (
    Relief(
        "looks at the counters",
        (RECORDER,),
        1 - 1 / SLOWER,
        None,
        f"{SLOWER} times as seldom",
        "rates, faults and the page cache are known for longer intervals at a time",
    ),
    Relief(
        "Python stacks",
        (PYTHON,),
        1.0,
        "python_stacks",
        "dropped",
        "nothing is known of what Python code did",
    ),
    Relief(
        "CPU samples",
        ("cpu__tick",),
        0.75,
        "cpu",
        f"{TICK_HZ} a second",
        "the share of page faults in CPU time is less certain",
    ),
    Relief(
        "faults by file",
        ("faults__fault", "faults__around"),
        1.0,
        "faults",
        "dropped",
        "faults cannot be split by file",
    ),
    Relief(
        "which file is read",
        ("pagecache__get",),
        1.0,
        "pagecache",
        "dropped",
        "a wait in read() may be put down to the file read before",
    ),
    Relief(
        "layers above disks",
        ("block__submitted", "block__done"),
        1.0,
        "block",
        "dropped",
        "what device-mapper, LUKS and RAID layers cost is unknown",
    ),
    Relief(
        "acknowledgements",
        ("sockets__acknowledged",),
        1.0,
        "sockets",
        "dropped",
        "a first token counts from its write, even where the kernel holds it back",
    ),
    Relief(
        "io_uring reads",
        ("uring__submit", "uring__submit_sqe", "uring__complete", "uring__complete_result"),
        1.0,
        "uring",
        "dropped",
        "reads through io_uring are not counted",
    ),
)


@dataclass(frozen=True, slots=True)
class Decision:
    """Do `relief`: the whole cost `share` of the machine, over the last seconds, `own` of it."""

    relief: Relief
    share: float
    own: float
    budget: float

    def as_fact(self) -> dict[str, Any]:
        return {
            "what": self.relief.name,
            "how": self.relief.how,
            "lost": self.relief.lost,
            "share": self.share,
            "own_share": self.own,
            "budget": self.budget,
        }

    def reason(self) -> str:
        return (
            f"recording took {scale.tenth_percent(self.share)} of the machine, "
            f"its budget is {scale.tenth_percent(self.budget)}: "
            f"{self.relief.how}"
        )


class Governor:
    """Decides from the growth of `spent`. `budget`: a share of all CPUs, None for no limit."""

    def __init__(
        self, budget: float | None, cpus: int, reliefs: Iterable[Relief] = RELIEFS
    ) -> None:
        self.budget = budget
        self._cpus = cpus
        self._left = list(reliefs)
        self._looks: deque[tuple[int, Mapping[str, int]]] = deque()

    def is_due(self, ns: int) -> bool:
        """Whether it would look at the costs now."""
        if self.budget is None or not self._left:
            return False
        return not self._looks or ns - self._looks[-1][0] >= LOOK_NS

    def look(self, ns: int, spent: Mapping[str, int]) -> Decision | None:
        """`spent`: {what: ns of processor time so far}. One decision at a time; the next rests on
        what was spent after it."""
        self._looks.append((ns, spent))
        began_ns, before = self._looks[0]
        if self.budget is None or ns - began_ns < SUSTAINED_NS:
            return None
        self._looks.popleft()
        whole = (ns - began_ns) * self._cpus
        grown = {what: (now - before.get(what, 0)) / whole for what, now in spent.items()}
        share = sum(grown.values())
        if share <= self.budget:
            return None
        saved = {r.name: r.spares * sum(grown.get(c, 0.0) for c in r.costs) for r in self._left}
        relief = max(self._left, key=lambda r: saved[r.name], default=None)
        if relief is None or saved[relief.name] <= 0:
            return None
        self._left.remove(relief)
        self._looks.clear()
        return Decision(relief, share, sum(grown.get(c, 0.0) for c in relief.costs), self.budget)
