"""The plan of an experiment: a TOML file, or the options of the command line, checked whole.

Guarantee: what `from_mapping` returns can be carried out, as far as can be told without the server;
anything else is a `PlanError` that names every fault with its line and field, and what to write.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ttftprof.command_line import HIDDEN, public_argv
from ttftprof.errors import UsageError
from ttftprof.experiment.scenarios import SCENARIOS, Scenario
from ttftprof.model import PHASES

METRICS = ("ttft", *PHASES, "major_faults", "minor_faults", "storage_bytes", "storage_rate")
DIRECTIONS = ("lower", "higher")
APIS = ("auto", "openai", "ollama")
PROMPT_CACHE = ("bust", "keep")
READAHEAD, MMAP, ARGV, COMMAND = "readahead", "mmap", "argv", "command"
ENV_PREFIX, REQUEST_PREFIX = "env.", "request."
PLAIN = "as given"
"""The name of the only variant of an experiment that varies nothing."""


class PlanError(UsageError):
    """A plan that cannot be carried out; the message has a line for every fault."""


# -- values and their limits ----------------------------------------------------------------------

Check = Callable[[Any], Any]


class _Bad(Exception):
    """Why a value will not do, as the end of a sentence that begins with its field."""


def _whole(least: int, most: int = 1 << 31) -> Check:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _Bad(f"must be a whole number, not {value!r}")
        if not least <= value <= most:
            raise _Bad(f"is {value}; give a number from {least} to {most}")
        return value

    return check


def _seconds(least: float, most: float = 86_400.0) -> Check:
    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _Bad(f"must be a number of seconds, not {value!r}")
        if not math.isfinite(value) or not least <= value <= most:
            raise _Bad(f"is {value}; give seconds from {least:g} to {most:g}")
        return float(value)

    return check


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise _Bad(f"must be a text in quotes, not {value!r}")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Bad(f"must be true or false, not {value!r}")
    return value


def _one_of(names: Sequence[str]) -> Check:
    def check(value: Any) -> str:
        if value not in names:
            raise _Bad(f"is {value!r}; choose from {', '.join(names)}")
        return str(value)

    return check


def _list_of(check: Check, least: int = 0) -> Check:
    def check_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise _Bad(f"must be a list in [ ], not {value!r}")
        if len(value) < least:
            raise _Bad(f"has {len(value)} entries; give at least {least}")
        found = tuple(check(item) for item in value)
        if len(set(found)) != len(found):
            raise _Bad("names something twice")
        return found

    return check_all


def _words(value: Any) -> tuple[str, ...]:
    """A command: a list of its words, or one text that is split as a shell would."""
    if isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError as error:
            raise _Bad(f"is no command: {error}") from error
    if not isinstance(value, list | tuple) or not value:
        raise _Bad("must be a command: a text, or a list of its words")
    return tuple(_text(word) for word in value)


def _texts_by_name(value: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, Mapping):
        raise _Bad(f"must be a table, not {value!r}")
    found = {}
    for name, paths in value.items():
        listed = [paths] if isinstance(paths, str) else paths
        if not isinstance(listed, list):
            raise _Bad(f"of {name} must be a path or a list of paths, not {paths!r}")
        found[str(name)] = tuple(map(_text, listed))
    return found


def _text_by_name(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise _Bad(f"must be a table, not {value!r}")
    return {str(name): _text(item) for name, item in value.items()}


def _url(value: Any) -> str:
    text = _text(value)
    if "://" not in text:
        text = f"http://{text}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise _Bad(f"is {value!r}: {error}") from error
    if parts.scheme != "http":
        raise _Bad(
            f"is {value!r}; give the http:// address of the server itself "
            "(what is encrypted cannot be recorded)"
        )
    if not parts.hostname or parts.username or parts.password or parts.query:
        raise _Bad(f"is {value!r}; give it as http://HOST:PORT")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"http://{host}:{port or 80}{parts.path.rstrip('/')}"


def _share(value: Any) -> float:
    """`"15%"` or 0.15."""
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?\s*%", value):
        value = float(value.rstrip("% ")) / 100
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 10:
        raise _Bad(f'is {value!r}; give a share such as "15%" or 0.15')
    return float(value)


def _is(check: Check, default: Any = MISSING) -> Any:
    """A field of a plan: how its value is checked, and what it is if it is not given."""
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata={"check": check})
    return field(default=default, metadata={"check": check})


# -- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Server:
    """Who is asked, how it is started, and who is recorded.

    `command`: the experiment starts, restarts and ends the server itself. `restart`: a command that
    restarts one that runs by itself; `stop`: one that ends it before, without which the file that
    it maps stays in the page cache. `record`: options of `ttftprof record` that name the server; by
    default the process that listens on the address's port. `files`: each model's weights; those
    not named are found by watching the model being loaded once. `stderr_to`: the server's own log.
    `api_key_env`: the environment variable that holds its key.
    """

    url: str = _is(_url)
    models: tuple[str, ...] = _is(_list_of(_text, 1))
    api: str = _is(_one_of(APIS), "auto")
    measured: str = _is(_text, "")
    files: Mapping[str, tuple[str, ...]] = _is(_texts_by_name, {})
    command: tuple[str, ...] = _is(_words, ())
    restart: tuple[str, ...] = _is(_words, ())
    stop: tuple[str, ...] = _is(_words, ())
    env: Mapping[str, str] = _is(_text_by_name, {})
    record: tuple[str, ...] = _is(_words, ())
    api_key_env: str = _is(_text, "")
    ready_timeout_s: float = _is(_seconds(1), 120.0)
    stderr_to: str = _is(_text, "")

    @property
    def target(self) -> str:
        """The model whose first token is measured."""
        return self.measured or self.models[0]

    @property
    def other(self) -> str | None:
        """The model that is switched away from."""
        return next((name for name in self.models if name != self.target), None)

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 80

    @property
    def base_path(self) -> str:
        return urlsplit(self.url).path.rstrip("/")


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked. Prompts are generated filler of about so many tokens, one a word."""

    prompt_tokens: int = _is(_whole(1, 1_000_000), 34)
    long_prompt_tokens: int = _is(_whole(1, 1_000_000), 1024)
    too_long_tokens: int = _is(_whole(1, 4_000_000), 200_000)
    max_tokens: int = _is(_whole(1, 100_000), 8)
    concurrency: tuple[int, ...] = _is(_list_of(_whole(1, 1024), 1), (1, 4))
    prompt_cache: str = _is(_one_of(PROMPT_CACHE), "bust")
    idle_s: float = _is(_seconds(0), 330.0)
    timeout_s: float = _is(_seconds(0.05, 7200), 180.0)
    stall_s: float = _is(_seconds(0.05, 3600), 30.0)
    give_up_s: float = _is(_seconds(0.01, 3600), 0.3)
    kill_after_s: float = _is(_seconds(0, 600), 0.2)


@dataclass(frozen=True, slots=True)
class Factor:
    """What is varied: its values in the order given; the first is what the others are held to.

    `name`: readahead (KiB), mmap (on, off), argv (words added to the command), command (another
    one), env.NAME, request.FIELD, or a {placeholder} of the command or of a file's path.
    """

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Expectation:
    """What is expected of a value of a factor before it is tried."""

    direction: str = _is(_one_of(DIRECTIONS))
    metric: str = _is(_one_of(METRICS), "ttft")
    scenario: str = _is(_text, "")
    variant: str = _is(_text, "")
    at_least: float = _is(_share, 0.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole experiment. `runs`: of each scenario and variant, after `warmups` that do not count.

    `baseline`: the scenario that the others' causes are told against.
    """

    server: Server
    workload: Workload = field(default_factory=Workload)
    factors: tuple[Factor, ...] = ()
    expectations: tuple[Expectation, ...] = ()
    name: str = _is(_text, "experiment")
    seed: int = _is(_whole(0), 1)
    runs: int = _is(_whole(1, 10_000), 12)
    warmups: int = _is(_whole(0, 1000), 1)
    gap_s: float = _is(_seconds(0, 3600), 0.5)
    scenarios: tuple[str, ...] = _is(_list_of(_text, 1), ("cold-switch", "re-switch", "resident"))
    baseline: str = _is(_text, "resident")
    alpha: float = _is(_share, 0.05)
    record: bool = _is(_flag, True)

    def chosen(self) -> tuple[Scenario, ...]:
        """The scenarios, with the concurrency ladder written out."""
        found: list[Scenario] = []
        for name in self.scenarios:
            if name == "concurrency":
                found += [SCENARIOS[name].with_streams(n) for n in self.workload.concurrency]
            else:
                found.append(SCENARIOS[name])
        return tuple(found)

    def public(self) -> dict[str, Any]:
        """What may be written down: without what could be a secret in commands and environment."""
        found = asdict(self)
        server = found["server"]
        for name in ("command", "restart", "stop", "record"):
            server[name] = public_argv(["", *server[name]])[1:] if server[name] else []
        server["env"] = dict.fromkeys(server["env"], HIDDEN)
        return found

    def digest(self) -> str:
        """Tells whether two plans are the same, secrets included."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


# -- reading --------------------------------------------------------------------------------------


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """(what the file says, its text). Raises `PlanError`, with the line, if it is no TOML."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"{path} cannot be read: {error}", "ttftprof bench --example > plan.toml makes one"
        ) from error
    try:
        return tomllib.loads(text), text
    except tomllib.TOMLDecodeError as error:
        raise PlanError(
            f"{path} is no TOML: {error}", "ttftprof bench --example prints a plan to start from"
        ) from error


def from_mapping(raw: Mapping[str, Any], source: str, text: str = "") -> Plan:
    """The plan in parsed TOML (or made from options); `text` is searched for a fault's line."""
    reading = _Reading(source, text)
    known = {"experiment", "server", "workload", "vary", "expect"}
    for name in raw:
        if name not in known:
            reading.fault((name,), f"is no table of a plan; those are {', '.join(sorted(known))}")
    parts: dict[str, Any] = {
        "server": reading.table(Server, raw.get("server", {}), "server"),
        "workload": reading.table(Workload, raw.get("workload", {}), "workload"),
        "factors": reading.factors(raw.get("vary", {})),
        "expectations": reading.expectations(raw.get("expect", [])),
    }
    plan = reading.table(Plan, raw.get("experiment", {}), "experiment", parts)
    reading.settle()
    assert isinstance(plan, Plan)
    for place, what in _contradictions(plan):
        reading.fault(place, what)
    reading.settle()
    return plan


class _Reading:
    """Collects every fault of one plan."""

    def __init__(self, source: str, text: str) -> None:
        self._source = source
        self._lines = text.splitlines()
        self._faults: list[str] = []

    def fault(self, place: tuple[str, ...], what: str) -> None:
        line = self._line_of(place)
        where = f"{self._source} line {line}" if line else self._source
        self._faults.append(f"{where}: {'.'.join(place)} {what}")

    def settle(self) -> None:
        if self._faults:
            raise PlanError(
                "\n  ".join(self._faults),
                "correct the plan; ttftprof bench --example prints one with every field",
            )

    def table(
        self, kind: type[Any], raw: Any, name: str, parts: Mapping[str, Any] | None = None
    ) -> Any:
        """A dataclass from a table; None if it has faults, which are noted."""
        if not isinstance(raw, Mapping):
            self.fault((name,), f"must be a table, [{name}]")
            return None
        before = len(self._faults)
        own = {f.name: f for f in fields(kind) if "check" in f.metadata}
        for key in raw:
            if key not in own:
                self.fault((name, key), f"is not known; {name} has {', '.join(own)}")
        values = dict(parts or {})
        for key, spec in own.items():
            if key in raw:
                self._take(values, spec, raw[key], (name, key))
            elif spec.default is MISSING and spec.default_factory is MISSING:
                self.fault((name, key), f"is missing: write `{key} = …` under [{name}]")
        return kind(**values) if len(self._faults) == before else None

    def _take(
        self, values: dict[str, Any], spec: Field[Any], raw: Any, place: tuple[str, ...]
    ) -> None:
        try:
            values[spec.name] = spec.metadata["check"](raw)
        except _Bad as bad:
            self.fault(place, str(bad))

    def factors(self, raw: Any) -> tuple[Factor, ...]:
        if not isinstance(raw, Mapping):
            self.fault(("vary",), "must be a table, [vary]")
            return ()
        found = []
        for name, values in _flat(raw):
            try:
                found.append(Factor(name, _list_of(_value, 2)(values)))
            except _Bad as bad:
                self.fault(("vary", *name.split(".")), str(bad))
        return tuple(found)

    def expectations(self, raw: Any) -> tuple[Expectation, ...]:
        tables = [raw] if isinstance(raw, Mapping) else raw
        if not isinstance(tables, list):
            self.fault(("expect",), "must be a table, [[expect]]")
            return ()
        made = [self.table(Expectation, table, "expect") for table in tables]
        return tuple(one for one in made if one is not None)

    def _line_of(self, place: tuple[str, ...]) -> int | None:
        """The line that gives this field: `key =` below `[table]`, or the table's own."""
        table, *keys = place
        inside, at = False, None
        for number, line in enumerate(self._lines, 1):
            header = re.match(r"\s*\[\[?\s*([\w.-]+)", line)
            if header:
                inside = header[1] == table or header[1].startswith(f"{table}.")
                at = number if inside and at is None else at
            elif inside and keys and re.match(rf"\s*[\"']?{re.escape(keys[-1])}[\"']?\s*=", line):
                return number
        return at


def _flat(raw: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """{"env": {"X": …}} as env.X."""
    for name, value in raw.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _value(value: Any) -> str:
    """A value of a factor, as text; a list of words is a command line."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, list):
        return shlex.join(_text(word) for word in value)
    if not isinstance(value, str):
        raise _Bad(f"holds {value!r}; give numbers or texts")
    return value


# -- what contradicts itself ----------------------------------------------------------------------

Fault = tuple[tuple[str, ...], str]


def _contradictions(plan: Plan) -> Iterator[Fault]:
    yield from _of_scenarios(plan)
    for factor in plan.factors:
        yield from _of_factor(plan, factor)
    yield from _of_expectations(plan)
    server = plan.server
    if server.measured and server.measured not in server.models:
        yield (
            ("server", "measured"),
            f"is {server.measured!r}, which is not one of models",
        )
    for name in server.files:
        if name not in server.models:
            yield ("server", "files"), f"names {name!r}, which is not one of models"
    if not plan.record and not server.files:
        for scenario in plan.chosen() if _all_known(plan) else ():
            if scenario.cache != "any" and not scenario.is_failure:
                yield (
                    ("experiment", "scenarios"),
                    f"has {scenario.name}, whose files are not known unless a load is recorded: "
                    "name them in server.files",
                )
    if server.command and server.restart:
        yield ("server", "restart"), "and server.command both start the server: give one"
    if server.stop and not server.restart:
        yield ("server", "stop"), "ends what nothing starts again: give server.restart too"
    if not 0 < plan.alpha < 0.5:
        yield ("experiment", "alpha"), f"is {plan.alpha}; give 0.05, or less to be stricter"


def _of_scenarios(plan: Plan) -> Iterator[Fault]:
    place = ("experiment", "scenarios")
    if plan.baseline not in SCENARIOS:
        yield (
            ("experiment", "baseline"),
            f"is {plan.baseline!r}; choose from {', '.join(SCENARIOS)}",
        )
    for name in plan.scenarios:
        scenario = SCENARIOS.get(name)
        if scenario is None:
            yield place, f"has {name!r}; choose from {', '.join(SCENARIOS)}"
            continue
        if scenario.needs_other and plan.server.other is None:
            yield place, f"has {name}, which needs two models: name both in server.models"
        if scenario.needs_start and not (plan.server.command or plan.server.restart):
            yield (
                place,
                f"has {name}, which restarts the server: give server.command or server.restart",
            )


def _of_factor(plan: Plan, factor: Factor) -> Iterator[Fault]:
    place, name = ("vary", *factor.name.split(".")), factor.name
    if name == READAHEAD:
        bad = [v for v in factor.values if not re.fullmatch("[1-9][0-9]{0,6}", v)]
        if bad:
            yield place, f"has {bad[0]!r}; give KiB, as in [128, 1024]"
        return
    if name in (ARGV, COMMAND):
        yield from (
            (place, f"has {v!r}, which is no command") for v in factor.values if not _splits(v)
        )
    if name == MMAP and set(factor.values) - {"on", "off"}:
        yield place, 'takes the values ["on", "off"]'
    if name.startswith(REQUEST_PREFIX):
        return
    if not plan.server.command:
        yield place, "changes how the server is started: give server.command"
    elif not _is_start_factor(name) and not any(
        f"{{{name}}}" in word for word in _templates(plan.server)
    ):
        yield (
            place,
            f"is no known factor ({READAHEAD}, {MMAP}, {ARGV}, {COMMAND}, env.NAME, "
            f"request.FIELD), and {{{name}}} stands nowhere in server.command or server.files",
        )


def _splits(text: str) -> bool:
    try:
        shlex.split(text)
    except ValueError:
        return False
    return True


def _is_start_factor(name: str) -> bool:
    return name in (MMAP, ARGV, COMMAND) or name.startswith(ENV_PREFIX)


def _templates(server: Server) -> list[str]:
    return [*server.command, *(path for paths in server.files.values() for path in paths)]


def _of_expectations(plan: Plan) -> Iterator[Fault]:
    names = {scenario.name for scenario in plan.chosen()} if _all_known(plan) else set()
    variants = {variant.name for variant in variants_of(plan)[1:]}
    for one in plan.expectations:
        if one.scenario and names and one.scenario not in names:
            yield ("expect", "scenario"), f"is {one.scenario!r}; this plan has {_listed(names)}"
        if not plan.factors:
            yield ("expect", "variant"), "needs something that varies: add [vary]"
        elif one.variant and one.variant not in variants:
            yield ("expect", "variant"), f"is {one.variant!r}; this plan has {_listed(variants)}"


def _all_known(plan: Plan) -> bool:
    return all(name in SCENARIOS for name in plan.scenarios)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


# -- variants -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variant:
    """One setting of the factors: all at their first value but `changed`, if any."""

    name: str
    settings: Mapping[str, str]
    changed: str | None = None


def variants_of(plan: Plan) -> tuple[Variant, ...]:
    """The base, then each other value of each factor alone: one factor at a time."""
    base = {factor.name: factor.values[0] for factor in plan.factors}
    shown = ", ".join(f"{name}={value or '(none)'}" for name, value in base.items()) or PLAIN
    found = [Variant(shown, base)]
    for factor in plan.factors:
        for value in factor.values[1:]:
            name = f"{factor.name}={value or '(none)'}"
            found.append(Variant(name, {**base, factor.name: value}, factor.name))
    return tuple(found)


EXAMPLE = resources.files("ttftprof.experiment").joinpath("example.toml").read_text("utf-8")
"""A plan with every field: those that may be left out as comments."""
