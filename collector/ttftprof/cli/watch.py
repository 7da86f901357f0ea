"""`ttftprof watch`: stays beside a server, and tells of each request as it ends."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

import click
from rich.console import Console, Group
from rich.live import Live
from rich.rule import Rule
from rich.text import Text

from ttftprof.caller import as_caller
from ttftprof.cli import output
from ttftprof.cli.record import (
    Gate,
    Interrupts,
    arm,
    check_target,
    clear_ready,
    find_target,
    target_options,
)
from ttftprof.clock import NS_PER_S, now_ns
from ttftprof.errors import Interrupted, OutputError, TargetError, UsageError
from ttftprof.kernel.permission import check_permitted
from ttftprof.kernel.session import ProbeSession, Settings
from ttftprof.recorder import Limits, Progress, Recorder
from ttftprof.reports import json as json_report
from ttftprof.reports import live, watch_json
from ttftprof.reports.safe import clip
from ttftprof.target import Target
from ttftprof.watch import Ended, Slow, Watcher

_REDRAW_NS = NS_PER_S // 2
_LOOK_AGAIN_S = 1.0

_EPILOG = """\b
Examples:
  sudo ttftprof watch                              a line a request, until Ctrl-C
  sudo ttftprof watch --port 8080 --format json    one JSON object a request
  sudo ttftprof watch --prometheus 9464            metrics on http://127.0.0.1:9464
  sudo ttftprof watch --keep-slow 5 slow/          record what took 5 s or longer

\b
A line has when the request ended, its model, the time to its first token, whether that was a
switch, the phases of the wait as a bar, and the cause. `ttftprof report --help` says what the
phases are; what --keep-slow kept is a recording as any other.
"""


@click.command("watch", epilog=_EPILOG)
@target_options
@output.format_option(
    "json: one object a request and line, the request as in `report --format json`."
)
@output.schema_option(watch_json.schema)
@click.option(
    "--prometheus",
    "address",
    metavar="[HOST:]PORT",
    help="Serve histograms of TTFT and phases; on 127.0.0.1 unless a host is named.",
)
@click.option(
    "--keep-slow",
    type=(click.FloatRange(min=0), click.Path(path_type=Path)),
    metavar="S DIR",
    help="Keep a recording, in DIR, of each request that waited S seconds or longer.",
)
@click.option(
    "--ready-file",
    type=click.Path(path_type=Path),
    help="Created once every probe is armed (for scripts).",
)
@output.WIDTH
@output.COLOR
def command(
    form: str,
    address: str | None,
    keep_slow: tuple[float, Path] | None,
    ready_file: Path | None,
    width: int | None,
    color: str,
    command_line: tuple[str, ...],
    **named: Any,
) -> int:
    """Watch a server for as long as you like.

    Prints a line for each request as it ends, with its phases; a restarted server is waited for.
    Nothing is written to disk (but see --keep-slow), and memory does not grow. Name the server as
    for `record`. Ctrl-C ends it and prints totals.
    """
    output.checked_width(width)
    metrics = _Metrics(address) if address else None
    check_permitted()
    check_target(named, command_line)
    clear_ready(ready_file)
    slow = _slow(keep_slow)
    out = output.printable(sys.stdout)
    screen: Screen = JsonLines(out) if form == "json" else text_screen(out, width, color)
    watched = _Watched(screen, metrics, slow, ready_file, named)
    child = Gate.spawn(command_line) if command_line else None
    try:
        watched.run(child)
    except BaseException:
        if child:
            child.kill()
        raise
    finally:
        screen.close()
        if metrics:
            metrics.stop()
    screen.summary()
    return watched.code


def _slow(keep_slow: tuple[float, Path] | None) -> Slow | None:
    if keep_slow is None:
        return None
    seconds, folder = keep_slow
    try:
        with as_caller():
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{folder} cannot be made: {error.strerror}", "choose another folder for --keep-slow"
        ) from error
    return Slow(round(seconds * NS_PER_S), folder)


class _Metrics:
    """The page for Prometheus."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        if not (port.isascii() and port.isdigit()) or int(port) > 65535:
            raise UsageError(f"--prometheus {address!r} is no address", "give PORT or HOST:PORT")
        try:
            from ttftprof.reports.prometheus import Metrics
        except ImportError as error:
            raise UsageError(
                f"--prometheus needs the Python package prometheus-client ({error})",
                "pip install 'ttftprof[prometheus]'",
            ) from error
        self._metrics = Metrics()
        self._host, self._port = host.strip("[]") or "127.0.0.1", int(port)
        self._stop: Callable[[], None] = lambda: None
        self.add = self._metrics.add

    def serve(self) -> str:
        port, self._stop = self._metrics.serve(self._host, self._port)
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{port}/metrics"

    def stop(self) -> None:
        self._stop()


# -- one server after another ---------------------------------------------------------------------


class _Watched:
    """The server that was named, through its restarts."""

    def __init__(
        self,
        screen: Screen,
        metrics: _Metrics | None,
        slow: Slow | None,
        ready_file: Path | None,
        named: Mapping[str, Any],
    ) -> None:
        self._screen, self._metrics, self._slow = screen, metrics, slow
        self._ready_file, self._named = ready_file, named
        self._interrupts = Interrupts()
        self._is_armed = False
        self.code = 0  # of the command, where there was one
        self._requests = self._starts = 0

    def run(self, child: Gate | None) -> None:
        """Until somebody stops it, or what was named is gone for good."""
        target: Target | None = find_target(self._named, child)
        while target is not None:
            watcher = Watcher(self._tell, self._screen.say, self._slow)
            recorder, why = self._record(watcher, target, child)
            if watcher.is_worn and not recorder.command_ended:
                self._screen.say("the kernel's table of files was full: watching anew")
                target = self._still_there(child)
            elif why == "interrupted" or self._ends_with_its_process(child):
                self._screen.say(why)
                target = None
            else:
                target = self._await_return()
            if target is None and child:
                self.code = child.result(recorder.command_ended, recorder.command_status)

    def _ends_with_its_process(self, child: Gate | None) -> bool:
        return child is not None or self._named["pid"] is not None

    def _record(self, watcher: Watcher, target: Target, child: Gate | None) -> tuple[Recorder, str]:
        """(the recorder, why it ended)"""
        limits = Limits(command_pid=child.pid if child else None)

        def show(progress: Progress) -> None:
            watcher.step(progress)
            self._screen.show(progress)

        recorder = Recorder(
            watcher.rolling, target, ProbeSession(Settings()), limits, show, self._screen.say
        )
        watcher.follow(recorder)
        self._screen.say(f"watching {target.how}")
        folder = self._slow.folder if self._slow else None
        try:
            arm(recorder, self._interrupts, self._ready_file, child, folder)
        except Interrupted:
            if not self._is_armed:
                raise
            return recorder, "interrupted"  # between two servers, which is no failure
        why = "it failed"
        try:
            self._armed()
            why = recorder.run()
        finally:
            recorder.finish(why)
        watcher.drain()
        return recorder, why

    def _armed(self) -> None:
        """Once, for the first time: only now that root is given up may threads be started."""
        if self._metrics and not self._is_armed:
            self._screen.say(f"metrics on {self._metrics.serve()}")
        self._is_armed, self._ready_file = True, None

    def _still_there(self, child: Gate | None) -> Target | None:
        """The server, or the next one once this has gone meanwhile."""
        try:
            return find_target(self._named, child)
        except TargetError as gone:
            self._screen.say(gone.message)
            return None if self._ends_with_its_process(child) else self._await_return()

    def _await_return(self) -> Target | None:
        """The server once it runs again; None if somebody stops waiting first."""
        self._screen.say("the server is gone; waiting for it to come back")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            while True:
                with suppress(TargetError):
                    return find_target(self._named, None)
                time.sleep(_LOOK_AGAIN_S)
        except KeyboardInterrupt:
            return None

    def _tell(self, ended: Ended) -> None:
        if not ended.request.endpoint:
            self._starts += 1
            ended = ended.numbered(f"start {self._starts}")
        else:
            self._requests += 1
            ended = ended.numbered(str(self._requests))
        if self._metrics:
            self._metrics.add(ended.request)
        self._screen.tell(ended)


# -- where it is shown ----------------------------------------------------------------------------


class Screen(Protocol):
    def tell(self, ended: Ended) -> None: ...
    def say(self, text: str) -> None: ...
    def show(self, progress: Progress) -> None: ...
    def close(self) -> None: ...
    def summary(self) -> None: ...


class JsonLines:
    """For programs: an object a line; words for people go to standard error."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def tell(self, ended: Ended) -> None:
        json_report.write_line(watch_json.as_json(ended), self._out)
        self._out.flush()

    def say(self, text: str) -> None:
        with suppress(OSError):
            click.echo(f"ttftprof: {text}", err=True)

    def show(self, progress: Progress) -> None:
        """Nothing is shown between requests."""

    def close(self) -> None:
        """Every line is out already."""

    def summary(self) -> None:
        """Who reads the lines counts them."""


def text_screen(out: TextIO, width: int | None, color: str) -> Screen:
    colour = output.has_colour(color, out)
    console = Console(
        file=out,
        width=width or (None if out.isatty() else output.width_of(out)),
        color_system="256" if colour else None,
        no_color=not colour,
        force_terminal=out.isatty(),
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
    )
    return LiveLines(console, colour) if out.isatty() else Lines(console, colour)


class Lines:
    """A line a request, into a pipe or file."""

    def __init__(self, console: Console, colour: bool) -> None:
        self._console, self._colour = console, colour
        self._totals = live.Totals()
        self._began_ns = now_ns()
        for text in live.header(console.width, colour):
            self._print(text)

    def tell(self, ended: Ended) -> None:
        self._totals.add(ended)
        self._print(live.line(ended, self._console.width, self._colour))
        if ended.kept:
            self._print(Text(f"         kept: {ended.kept}"))

    def say(self, text: str) -> None:
        with suppress(OSError):
            click.echo(f"ttftprof: {text}", err=True)

    def show(self, progress: Progress) -> None:
        """Lines are all there is."""

    def close(self) -> None:
        """Every line is out already."""

    def summary(self) -> None:
        if self._totals.models:
            self._console.print()
            self._console.print(self._totals.table(self._console.width, everything=True))
        seconds = (now_ns() - self._began_ns) // NS_PER_S
        self._print(Text(f"{self._totals.sentence()} in {_span(seconds)}"))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)
        self._console.file.flush()


class LiveLines(Lines):
    """On a terminal: below the lines, totals and what is going on, redrawn in place."""

    def __init__(self, console: Console, colour: bool) -> None:
        super().__init__(console, colour)
        self._next_ns = 0
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def tell(self, ended: Ended) -> None:
        super().tell(ended)
        self._next_ns = 0

    def say(self, text: str) -> None:
        self._print(Text(f"ttftprof: {text}", "dim"))

    def show(self, progress: Progress) -> None:
        now = now_ns()
        if now < self._next_ns:
            return
        self._next_ns = now + _REDRAW_NS
        self._live.update(self._below(progress, now), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def _below(self, progress: Progress, now: int) -> Group:
        width = self._console.width
        parts: list[Any] = [Rule(style="dim", characters="─")]
        if self._totals.models:
            parts.append(self._totals.table(width))
        switches = list(self._totals.last_switches(width))
        if switches:
            parts += [Text("last switches", "dim"), *switches]
        status = (
            f"● {_span((now - self._began_ns) // NS_PER_S)}, {self._totals.sentence()}; "
            f"{progress.stage}  (Ctrl-C ends)"
        )
        return Group(*parts, Text(clip(status, width), "bold"))


def _span(seconds: int) -> str:
    """`42 s`, `3 min 5 s`, `2 h 3 min`, `5 d 2 h`"""
    for unit, part, length in (("d", "h", 86400), ("h", "min", 3600), ("min", "s", 60)):
        if seconds >= length:
            smaller = {"h": 3600, "min": 60, "s": 1}[part]
            return f"{seconds // length} {unit} {seconds % length // smaller} {part}"
    return f"{seconds} s"
