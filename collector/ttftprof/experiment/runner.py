"""Carries a plan out: prepares each run, verifies its state, records it, asks, keeps the result.

Guarantees: a run is stored when it has ended and before the next begins; what could not be
established, or nobody could tell, is marked, not repaired in silence; a failed run is a result like
any other, one whose server did not start too; what was changed on the machine (read-ahead) is put
back at the end, or by the next `bench` of this folder.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ttftprof.clock import NS_PER_S, now_ns
from ttftprof.errors import TargetError, TtftprofError, UsageError
from ttftprof.experiment import state
from ttftprof.experiment.client import ask, wait_for_server
from ttftprof.experiment.digest import digest, weights_of
from ttftprof.experiment.fingerprint import Load, fingerprint
from ttftprof.experiment.host import NotStarted, RunRecorder
from ttftprof.experiment.messages import Answer, Ask, Limits, filler
from ttftprof.experiment.plan import (
    READAHEAD,
    REQUEST_PREFIX,
    Plan,
    Server,
    Variant,
    variants_of,
)
from ttftprof.experiment.scenarios import Scenario
from ttftprof.experiment.schedule import needs_restart
from ttftprof.experiment.service import Service, fill_in
from ttftprof.experiment.state import Check
from ttftprof.experiment.store import Slot, Store

_SETTLE_S = 0.1  # after arming; after the last answer, for its last bytes
_RETRY_S = 0.02
_PRIMINGS = 5  # of a prompt cache, at most
_TELLING_REST_S = 0.2
_MAX_CHUNKS = 2_000  # of an answer, whose stamps are kept
_UNKNOWN_MODEL = "ttftprof-no-such-model"
NEEDED = "the request needed"
"""The check by the recording: a load or none."""
_RETRIED = {"refused", "gone"}
NOT_STARTED = "not started"
"""The outcome of a run that had no server to ask."""


@dataclass(slots=True)
class RunResult:
    """What one run came to. `value_ns`: the client's TTFT (the median of several streams).

    `established`: every check was met. `as_expected`: the outcome is one that the scenario expects.
    `load`: how busy the machine was meanwhile; `rest`: in the gap before.
    """

    checks: list[Check] = field(default_factory=list)
    outcome: str = ""
    detail: str = ""
    as_expected: bool = False
    value_ns: int | None = None
    answers: list[dict[str, Any]] = field(default_factory=list)
    attempts: int = 1
    recovery: dict[str, Any] | None = None
    degraded: list[str] = field(default_factory=list)
    digest: dict[str, Any] | None = None
    fingerprint: dict[str, str] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0

    @property
    def established(self) -> bool:
        return all(check.met for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"established": self.established}


class Watcher:
    """Hears of the progress; does nothing by itself."""

    def begin(self, slot: Slot, left: Sequence[Slot]) -> None: ...

    def end(self, slot: Slot, result: RunResult) -> None: ...

    def say(self, text: str) -> None: ...


def carry_out(plan: Plan, store: Store, watcher: Watcher) -> None:
    """Runs what is left of the schedule. Raises `TtftprofError` if the server cannot be had."""
    with _session(plan, store, watcher) as session:
        rest: dict[str, Any] = {}
        while left := store.left():
            if session.interrupted:
                raise KeyboardInterrupt
            slot = left[0]
            watcher.begin(slot, left)
            attempt = store.begin(slot)
            result = session.run(slot)
            result.rest = rest
            store.end(slot, attempt, result.as_json())
            watcher.end(slot, result)
            if len(left) > 1:
                rest = _rest(plan.gap_s)


def _rest(seconds: float) -> dict[str, Any]:
    """Lets the machine cool; how busy it was although it should have rested, if long enough to
    tell."""
    load = Load()
    time.sleep(seconds)
    return load.as_json() if seconds >= _TELLING_REST_S else {}


@contextmanager
def _session(plan: Plan, store: Store, watcher: Watcher) -> Iterator[_Session]:
    session = _Session(plan, store, watcher)
    previous = {n: signal.signal(n, session.interrupt) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        session.open()
        yield session
    finally:
        for number in previous:  # what is put back and ended now is not to be cut short
            signal.signal(number, signal.SIG_IGN)
        session.close()
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Session:
    """One sitting: the server, its files, and the settings in force."""

    def __init__(self, plan: Plan, store: Store, watcher: Watcher) -> None:
        self._plan = plan
        self._store = store
        self._watcher = watcher
        self._server = plan.server
        self._key = _key_of(plan.server)
        log = Path(plan.server.stderr_to or store.folder / "server.log")
        self._service = Service(plan.server, self._key, log)
        self._api = self._service.api
        self._api_name = plan.server.api
        self._gpu = state.GpuMemory()
        self._scenarios = {scenario.name: scenario for scenario in plan.chosen()}
        self._variants = {variant.name: variant for variant in variants_of(plan)}
        self._base = next(iter(self._variants.values()))
        self._variant: Variant | None = None
        self._files: dict[str, tuple[str, ...]] = {}
        self._own = secrets.token_hex(8)  # of this sitting's prompts
        self._asked = 0
        self.interrupted = False

    def interrupt(self, _number: int, _frame: object) -> None:
        """Ends the sitting. Where the exception is lost (in a finaliser), the mark is not."""
        self.interrupted = True
        raise KeyboardInterrupt

    # -- the server and its settings ----------------------------------------------------------

    def open(self) -> None:
        self._restore()  # what an interrupted sitting left changed
        self._service.open()
        base = self._base
        self._service.start(base)
        self._variant = base
        if self._api_name == "auto":
            self._api_name = "ollama" if self._api.kind == "ollama" else "openai"
        self._service.check_models()
        self._watcher.say(
            f"server at {self._server.url}: {self._api.version or self._api.kind}, "
            f"asked by the {self._api_name} API"
        )
        if self._api.kind != "plain":
            for model in self._server.models:
                self._api.unload(model)
            self._gpu.rebase()
        elif self._service.is_kept:
            self._gpu.rebase()
        else:  # it may hold its model already, and evicts none
            self._gpu.forget_base()
        self._say_what_nobody_tells()
        self._apply(base)

    def _say_what_nobody_tells(self) -> None:
        """Before hours of runs that will not count."""
        if self._plan.record or self._api.kind != "plain":
            return
        only = self._api.models() == [self._server.target]
        untold = [
            scenario.name
            for scenario in self._scenarios.values()
            if scenario.needs_telling and not (only and scenario.has_just_answered)
        ]
        if untold:
            self._watcher.say(
                f"nobody can tell which model is loaded, so no run of {', '.join(untold)} will "
                "count: this server has no API for it; record the runs (as root, without "
                "record = false)"
            )

    def close(self) -> None:
        self._restore()
        self._service.close()

    def _extra(self) -> dict[str, Any]:
        """Fields of the request that this variant sets; and where a prompt is to be found in a
        cache, the one by which servers tell whether it was."""
        assert self._variant is not None
        tells = self._plan.workload.prompt_cache == "keep" and self._api_name == "openai"
        asked = {"stream_options.include_usage": True} if tells else {}
        return asked | {
            name.removeprefix(REQUEST_PREFIX): _typed(value)
            for name, value in self._variant.settings.items()
            if name.startswith(REQUEST_PREFIX)
        }

    def _have_server(self, variant: Variant, result: RunResult) -> None:
        """Has this variant's server running. One of ours that died between runs is started again,
        and that is told. Raises `NotStarted`."""
        before, self._variant = self._variant, None
        if before is None or _is_another_server(before, variant):
            self._service.start(variant)
        elif self._service.is_down():
            self._service.start(variant)
            result.degraded.append("the server had ended and was started again before this run")
        self._variant = variant

    def _apply(self, variant: Variant) -> list[Check]:
        """Makes those of this variant's settings that a running server takes the ones in force."""
        self._find_files(variant)
        self._fingerprint()  # reads headers now, not when a page cache has been prepared
        if READAHEAD in variant.settings:
            return [self._set_readahead(variant.settings[READAHEAD])]
        return []

    def _set_readahead(self, kb: str) -> Check:
        paths = [path for paths in self._files.values() for path in paths]
        switches = state.readahead_switches(paths)
        remembered = self._store.meta("restore") or {}
        self._store.set_meta("restore", {**switches, **remembered})
        return state.set_readahead(switches, kb)

    def _restore(self) -> None:
        for switch, value in (self._store.meta("restore") or {}).items():
            with suppress(OSError):
                Path(switch).write_text(value)
        self._store.set_meta("restore", {})

    # -- whose files --------------------------------------------------------------------------

    def _find_files(self, variant: Variant) -> None:
        """The weights of each model: named in the plan, or seen while it is loaded once."""
        if self._server.files:
            self._files = {
                model: tuple(fill_in(path, variant.settings) for path in paths)
                for model, paths in self._server.files.items()
            }
            return
        moving = any(needs_restart(name) for name in variant.settings)
        key = f"files of {variant.name}" if moving else "files"
        known = self._store.meta(key)
        if known is None:
            known = self._survey() if self._plan.record else {}
            self._store.set_meta(key, known)
        self._files = {model: tuple(paths) for model, paths in known.items()}

    def _survey(self) -> dict[str, list[str]]:
        """Records one load of every model."""
        self._watcher.say("looking which files each model is loaded from")
        path = self._store.folder / "runs" / "survey.ttft"
        if self._service.is_kept:
            self._service.start(self._variant or self._base)
        recorder = RunRecorder(path, self._service.to_record(), self._log("recorder.log"), 600)
        armed = recorder.wait_armed()
        if armed:
            time.sleep(_SETTLE_S)
            for model in [*self._server.models, *self._server.models[:1]]:
                self._api.unload(model)
                self._await_answer(model, self._plan.workload.prompt_tokens)
            time.sleep(_SETTLE_S)
        if not recorder.stop():
            raise TargetError(
                f"the server cannot be recorded: {recorder.trouble}",
                "name it with server.record (options of `ttftprof record`), or run with "
                "record = false for the client's times alone",
            )
        found = {model: list(state.weights_beside(p)) for model, p in weights_of(path).items()}
        for model in self._server.models:
            if model not in found:
                self._watcher.say(
                    f"no load of {model} was seen: its page cache cannot be controlled; name its "
                    "files in server.files"
                )
        return found

    def _log(self, name: str) -> Path:
        return self._store.folder / name

    # -- asking -------------------------------------------------------------------------------

    def _ask(
        self,
        model: str,
        tokens: int,
        limits: Limits | None = None,
        streams: int = 1,
        max_tokens: int | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Answer]:
        work = self._plan.workload
        self._asked += 1
        busted = work.prompt_cache == "bust"
        own = f"{self._own}/{self._asked}"
        asks = [
            Ask(
                model,
                filler(tokens, self._plan.seed, f"{own}/{n}" if busted else None),
                max_tokens or work.max_tokens,
                self._api_name,
                self._extra(),
                self._key,
            )
            for n in range(streams)
        ]
        wanted = limits or Limits(work.timeout_s, work.stall_s)
        return ask(asks, self._server.address, wanted, self._server.base_path, meanwhile)

    def _await_answer(self, model: str, tokens: int) -> tuple[Answer, int]:
        """Asks until it answers or `ready_timeout_s` is over; the last answer, and the tries.

        A server that starts refuses, or answers 503 while it loads: that is to be waited for.
        """
        until_ns = now_ns() + int(self._server.ready_timeout_s * NS_PER_S)
        tries = 0
        while True:
            (answer,) = self._ask(model, tokens)
            tries += 1
            starting = answer.outcome in _RETRIED or answer.status == 503
            if not starting or now_ns() > until_ns:
                return answer, tries
            time.sleep(_RETRY_S)

    def _bring_up(self, model: str, scenario: Scenario) -> Check:
        """Has the model loaded by asking it; where its prompt cache is to be kept, with the prompt
        that will be measured, as often at once as it will be."""
        work = self._plan.workload
        keeps = work.prompt_cache == "keep" and model == self._server.target
        tokens = self._tokens(scenario) if keeps else work.prompt_tokens
        answer, _ = self._await_answer(model, tokens)
        if keeps and scenario.streams > 1:
            self._prime_every_slot(model, tokens, scenario.streams)
        found = answer.outcome if answer.outcome == "ok" else f"{answer.outcome}: {answer.detail}"
        return Check(f"model {model} answers", "ok", found, answer.outcome == "ok", "a request")

    def _prime_every_slot(self, model: str, tokens: int, streams: int) -> None:
        """A quick answer may leave its slot to the next request, and another slot as it was."""
        for _ in range(_PRIMINGS):
            answers = self._ask(model, tokens, streams=streams)
            told = [(answer.cached_tokens, answer.prompt_tokens) for answer in answers]
            check = state.check_prompt_cache(told, busted=False, resident=True)
            if check is not None and check.met:
                return

    # -- one run ------------------------------------------------------------------------------

    def _tokens(self, scenario: Scenario) -> int:
        """How long the measured prompt is."""
        work = self._plan.workload
        return work.long_prompt_tokens if scenario.long_prompt else work.prompt_tokens

    def run(self, slot: Slot) -> RunResult:
        """One run, whatever happens in it."""
        result, began = RunResult(), time.monotonic()
        try:
            self._have_server(self._variants[slot.variant], result)
            result.checks += self._apply(self._variants[slot.variant])
            self._carry_out(slot, self._scenarios[slot.scenario], result)
        except NotStarted as error:  # the next variant's may
            result.outcome, result.detail = NOT_STARTED, error.message
            result.as_expected = False
        result.wall_s = time.monotonic() - began
        return result

    def _carry_out(self, slot: Slot, scenario: Scenario, result: RunResult) -> None:
        """From the preparation to the recovery. Raises `NotStarted`."""
        recorder = self._recorder(slot)
        try:
            result.checks += self._prepare(scenario)
            if recorder is not None and not recorder.wait_armed():
                result.degraded.append(f"not recorded: {recorder.trouble}")
            result.fingerprint = self._fingerprint()
            settle_s = _SETTLE_S if recorder is not None else 0.0
            time.sleep(settle_s)
            sent, began_ns = self._measure(scenario, result)
            time.sleep(settle_s)
        finally:
            whole = recorder.stop() if recorder is not None else False
        if recorder is not None and whole:
            self._digest(recorder.path, scenario, result, sent, began_ns)
        elif recorder is not None and not result.degraded:
            result.degraded.append(f"not recorded: {recorder.trouble}")
        result.checks += self._untold(scenario, result)
        if scenario.is_failure:
            self._recover(result)

    def _recorder(self, slot: Slot) -> RunRecorder | None:
        if not self._plan.record:
            return None
        work = self._plan.workload
        longest_s = 2 * work.timeout_s + work.idle_s + 4 * self._server.ready_timeout_s + 60
        path = self._store.recording(slot.run)
        return RunRecorder(path, self._service.to_record(), self._log("recorder.log"), longest_s)

    def _fingerprint(self) -> dict[str, str]:
        return fingerprint(self._files, self._service.pid(), self._api.version)

    # -- its state ----------------------------------------------------------------------------

    def _prepare(self, scenario: Scenario) -> list[Check]:
        """Brings the state about. What is checked last is checked in `_verify`."""
        target, other = self._server.target, self._server.other
        checks: list[Check] = []
        if scenario.resident == "other":
            assert other is not None
            if scenario.cache == "cached":
                checks.append(self._bring_up(target, scenario))
            if self._gpu.base and self._api.kind != "plain":
                checks += self._empty_gpu()
            checks.append(self._bring_up(other, scenario))
            told = self._api.check_loaded(target, False)
            if told is not None and not told.met:
                self._api.unload(target)
        elif scenario.resident == "both":
            assert other is not None
            checks += [self._bring_up(target, scenario), self._bring_up(other, scenario)]
        elif scenario.resident == "target":
            checks.append(self._bring_up(target, scenario))
        if scenario.idle:
            time.sleep(self._plan.workload.idle_s)
            checks += self._check_gpu()
        if scenario.drive != "restart":
            self._set_cache(scenario)
        return checks

    def _empty_gpu(self) -> list[Check]:
        """Has every model evicted by the server's own API, and its memory come back."""
        stuck = [model for model in self._server.models if not self._api.unload(model)]
        if stuck:
            words = f"{stuck[0]} was not evicted"
            return [Check("GPU memory", "back to base", words, False, f"{self._api.kind} API")]
        return self._check_gpu()

    def _check_gpu(self, since_begin: bool = False) -> list[Check]:
        check = self._gpu.check_base(since_begin=since_begin)
        return [] if check is None else [check]

    def _set_cache(self, scenario: Scenario) -> None:
        files = self._files.get(self._server.target, ())
        if scenario.cache == "cold":
            state.drop_files(files)
        elif scenario.cache == "cached":
            state.fill_files(files)

    def _verify(self, scenario: Scenario) -> list[Check]:
        """What holds at the moment before the request, by the kernel's and the server's word."""
        target, other = self._server.target, self._server.other
        checks: list[Check | None] = []
        files = self._files.get(target, ())
        if files or scenario.cache != "any":
            checks.append(state.check_cache(files, scenario.cache))
        if scenario.drive == "restart":
            if self._service.ends_before_it_starts:
                # One of ours is gone whole; its base may hold a model that it loaded at its start.
                checks += self._check_gpu(since_begin=self._service.is_kept)
        elif scenario.resident in ("other", "both") and other is not None:
            checks.append(self._api.check_loaded(other, True))
            checks.append(self._api.check_loaded(target, scenario.resident == "both"))
        elif scenario.resident == "target":
            checks.append(self._api.check_loaded(target, not scenario.idle))
        return [check for check in checks if check is not None]

    def _untold(self, scenario: Scenario, result: RunResult) -> list[Check]:
        """A model whose residency was brought about, but that nobody told of: neither the server
        nor the recording. One that has just answered, on a server without another, is there."""
        target = self._server.target
        told = any(check.what in (f"model {target}", NEEDED) for check in result.checks)
        if told or not scenario.needs_telling or not result.as_expected:
            return []
        wanted = "loaded" if scenario.switched is False else "unloaded"
        if scenario.has_just_answered and self._api.models() == [target]:
            how = "it has just answered, and the server names no other"
            return [Check(f"model {target}", wanted, "loaded", True, how)]
        found = "nobody tells"
        if self._plan.record:
            found = "not told by the server, nor by the recording"
        return [Check(f"model {target}", wanted, found, False, "")]

    # -- what is measured ---------------------------------------------------------------------

    def _measure(self, scenario: Scenario, result: RunResult) -> tuple[list[int], int | None]:
        """Drives the scenario; when each request was sent, and when a restart began."""
        load = Load()
        began_ns: int | None = None
        if scenario.drive == "restart":
            began_ns, answers = self._restart(scenario, result)
        else:
            result.checks += self._verify(scenario)
            answers = self._drive(scenario)
        result.load = load.as_json()
        self._settle(scenario, result, answers, began_ns)
        return [a.send_begin_ns for a in answers if a.send_begin_ns is not None], began_ns

    def _drive(self, scenario: Scenario) -> list[Answer]:
        work, target = self._plan.workload, self._server.target
        tokens = self._tokens(scenario)
        if scenario.drive == "unknown":
            return self._ask(_UNKNOWN_MODEL, tokens)
        if scenario.drive == "too_long":
            return self._ask(target, work.too_long_tokens)
        if scenario.drive == "give_up":
            return self._ask(target, tokens, Limits(work.give_up_s, work.stall_s))
        if scenario.drive == "kill":
            before = {process.pid for process in self._service.processes()}
            kill = partial(self._service.kill_the_loader, before, work.kill_after_s)
            return self._ask(target, tokens, meanwhile=kill)
        return self._ask(target, tokens, streams=scenario.streams)

    def _restart(self, scenario: Scenario, result: RunResult) -> tuple[int, list[Answer]]:
        """Ends and starts the server; from the order to start it until the first token."""
        assert self._variant is not None
        result.checks += self._service.end()
        self._set_cache(scenario)
        result.checks += self._verify(scenario)
        began_ns = now_ns()
        result.checks += self._service.start_again(self._variant)
        answer, result.attempts = self._await_answer(self._server.target, self._tokens(scenario))
        return began_ns, [answer]

    def _settle(
        self,
        scenario: Scenario,
        result: RunResult,
        answers: Sequence[Answer],
        began_ns: int | None,
    ) -> None:
        outcomes = [answer.outcome for answer in answers]
        worst = next((a for a in answers if a.outcome not in scenario.expects), answers[0])
        result.outcome, result.detail = worst.outcome, worst.detail
        result.as_expected = all(outcome in scenario.expects for outcome in outcomes)
        waits = [a.ttft_ns for a in answers if a.ttft_ns is not None]
        if began_ns is not None:
            waits = [a.first_token_ns - began_ns for a in answers if a.first_token_ns is not None]
        if waits and not scenario.is_failure:
            result.value_ns = int(median(waits))
        result.answers = [_as_json(answer) for answer in answers]
        if not scenario.is_failure and scenario.drive == "ask":
            told = [(answer.cached_tokens, answer.prompt_tokens) for answer in answers]
            busted = self._plan.workload.prompt_cache == "bust"
            resident = scenario.switched is False
            check = state.check_prompt_cache(told, busted, resident)
            result.checks += [check] if check is not None else []

    def _digest(
        self,
        path: Path,
        scenario: Scenario,
        result: RunResult,
        sent_ns: Sequence[int],
        began_ns: int | None,
    ) -> None:
        try:
            result.digest = digest(path, sent_ns, began_ns)
        except TtftprofError as error:
            result.degraded.append(f"the recording cannot be read: {error.message}")
            return
        lost = sum(result.digest["lost"].values())
        if lost:
            result.degraded.append(f"{lost} events were lost")
        switched = result.digest.get("switched")
        if switched is None:
            if result.outcome == "ok":
                result.degraded.append("the recording does not show the request")
        elif scenario.switched is not None and not self._is_told(scenario, result):
            words = {True: "a load", False: "no load"}
            result.checks.append(
                Check(
                    NEEDED,
                    words[scenario.switched],
                    words[bool(switched)],
                    bool(switched) == scenario.switched,
                    "the recording",
                )
            )

    @staticmethod
    def _is_told(scenario: Scenario, result: RunResult) -> bool:
        """Whether a load needs no proof: a failure may come before it, and a server that gave its
        model up may load it again in the same process, which only its own word tells."""
        by_api = any(check.how.endswith(" API") for check in result.checks)
        return scenario.is_failure or (scenario.idle and by_api)

    def _recover(self, result: RunResult) -> None:
        """How long it takes, after a failure, until the measured model answers again."""
        began_ns = now_ns()
        assert self._variant is not None
        if not wait_for_server(self._server.address, 0.5):
            self._service.start_again(self._variant)
        answer, tries = self._await_answer(self._server.target, self._plan.workload.prompt_tokens)
        until_ns = answer.first_token_ns or answer.end_ns or now_ns()
        result.recovery = {
            "outcome": answer.outcome,
            "detail": answer.detail,
            "ttft_ns": answer.ttft_ns,
            "after_ns": until_ns - began_ns,
            "attempts": tries,
        }


def _as_json(answer: Answer) -> dict[str, Any]:
    """Without words, which an answer does not hold; its stamps as steps from the first."""
    found = asdict(answer)
    chunks = answer.chunks[:_MAX_CHUNKS]
    origin = answer.send_begin_ns or 0
    found["chunks"] = [[ns - origin, size] for ns, size in chunks]
    found["chunks_left_out"] = len(answer.chunks) - len(chunks)
    found["ttft_ns"] = answer.ttft_ns
    return found


def _is_another_server(before: Variant, variant: Variant) -> bool:
    return any(
        before.settings.get(name) != value
        for name, value in variant.settings.items()
        if needs_restart(name)
    )


def _typed(value: str) -> Any:
    """A request field as JSON means it."""
    words: dict[str, Any] = {"true": True, "false": False, "on": True, "off": False}
    if value in words:
        return words[value]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(value)
    return value


def _key_of(server: Server) -> str:
    """The server's key, from where the plan says; it is sent, and kept nowhere."""
    if not server.api_key_env:
        return ""
    key = os.environ.get(server.api_key_env, "")
    if not key or not key.isprintable():
        raise UsageError(
            f"server.api_key_env names {server.api_key_env}, which is not set",
            f"set it (under sudo: sudo --preserve-env={server.api_key_env} ttftprof bench …)",
        )
    return key
