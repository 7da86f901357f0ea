"""The scenarios: the state in which a request finds the server, and what is done to it meanwhile.

A table; `runner` carries it out. The model that is measured is the same in all of them, so that
they can be compared with each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Resident = Literal["target", "other", "both", "nobody", "any"]
Cache = Literal["cold", "cached", "any"]
Drive = Literal["ask", "restart", "unknown", "too_long", "kill", "give_up"]
FAILURES = frozenset({"unknown", "too_long", "kill", "give_up"})


@dataclass(frozen=True, slots=True)
class Scenario:
    """`resident`, `cache`: what is made so, and verified, before the request.

    `switched`: whether the recording must show a load for it (None: either will do). `expects`: the
    outcomes that are a success; of a failure case, the classes that the failure may show as.
    """

    name: str
    about: str
    resident: Resident
    cache: Cache = "any"
    drive: Drive = "ask"
    switched: bool | None = None
    long_prompt: bool = False
    streams: int = 1
    idle: bool = False
    expects: frozenset[str] = frozenset({"ok"})

    @property
    def needs_other(self) -> bool:
        return self.resident in ("other", "both") or self.drive == "kill"

    @property
    def needs_start(self) -> bool:
        return self.drive == "restart"

    @property
    def is_failure(self) -> bool:
        return self.drive in FAILURES

    @property
    def needs_telling(self) -> bool:
        """Whether somebody must confirm that the model was loaded, or was not."""
        return self.switched is not None and not self.is_failure

    @property
    def has_just_answered(self) -> bool:
        """The measured model was the last to answer, a moment before."""
        return self.resident == "target" and not self.idle

    def with_streams(self, streams: int) -> Scenario:
        about = f"resident, {streams} requests at once" if streams > 1 else "resident, one request"
        return replace(self, name=f"concurrency-{streams}", about=about, streams=streams)


_REFUSALS = frozenset({"rejected", "failed"})

_ALL = (
    Scenario(
        "cold-switch",
        "the other model is resident, nothing of this one is in the page cache",
        "other",
        "cold",
        switched=True,
    ),
    Scenario(
        "re-switch",
        "switched away from a moment ago: its file is still in the page cache",
        "other",
        "cached",
        switched=True,
    ),
    Scenario("resident", "the model is loaded and has just answered", "target", switched=False),
    Scenario(
        "dual-resident", "both models are loaded, the other answered last", "both", switched=False
    ),
    Scenario(
        "idle-expired",
        "nobody asked for so long that the server gave the model up",
        "target",
        idle=True,
        switched=True,
    ),
    Scenario("long-prompt", "resident, a long prompt", "target", switched=False, long_prompt=True),
    Scenario("concurrency", "resident, several requests at once", "target", switched=False),
    Scenario("restart", "the server is restarted, the file cached", "any", "cached", "restart"),
    Scenario("cold-restart", "the server is restarted, the file not", "any", "cold", "restart"),
    Scenario(
        "unknown-model",
        "a model that the server does not have",
        "target",
        drive="unknown",
        expects=_REFUSALS,
    ),
    Scenario(
        "context-too-long",
        "a prompt longer than the context",
        "target",
        drive="too_long",
        expects=_REFUSALS,
    ),
    Scenario(
        "killed-mid-load",
        "the process that loads the model is killed meanwhile",
        "other",
        "cold",
        "kill",
        expects=frozenset({"gone", "failed", "refused", "rejected", "empty"}),
    ),
    Scenario(
        "client-timeout",
        "the client gives up while it waits for a switch",
        "other",
        "cold",
        "give_up",
        expects=frozenset({"timeout"}),
    ),
)
SCENARIOS = {scenario.name: scenario for scenario in _ALL}
