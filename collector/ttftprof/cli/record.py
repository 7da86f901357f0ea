"""`ttftprof record`: watches a server while its model is switched, and writes what happened."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from ttftprof import target as targets
from ttftprof.caller import as_caller, become, sudo_caller
from ttftprof.clock import NS_PER_S, now_ns
from ttftprof.command_line import public_argv
from ttftprof.errors import (
    Interrupted,
    NotPermitted,
    OutputError,
    TargetError,
    Unsupported,
    UsageError,
)
from ttftprof.kernel import privilege
from ttftprof.kernel.libbpf import BpfError
from ttftprof.kernel.permission import check_permitted
from ttftprof.kernel.session import LOADERS, TEXT_RING_BYTES, ProbeSession, Settings
from ttftprof.plain import plain_lines
from ttftprof.recorder import STOP_SIGNALS, Limits, Progress, Recorder
from ttftprof.recording import LOOKED_AT, Writer
from ttftprof.sources.python_stacks import PythonStacks

if TYPE_CHECKING:
    from ttftprof.polled import PolledSession
    from ttftprof.polled.output import CommandOutput
    from ttftprof.polled.relay import Relay

UNKNOWN_CODE = 125  # of a command whose end was not told; as `timeout` and `docker run` have it

_Command = TypeVar("_Command", bound=Callable[..., Any])
_TARGET_OPTIONS = (
    click.option("--pid", type=int, help="Record this process and all below it."),
    click.option("--port", type=int, help="Record the server that listens on this TCP port."),
    click.option("--name", help="Record the server with this process name."),
    click.option("--unit", help="Record the processes of this systemd unit."),
    click.option("--container", help="Record the processes of this container (id or name)."),
    click.option("--cgroup", help="Record the processes of this control group."),
    click.argument("command_line", nargs=-1, type=click.UNPROCESSED),
)


def target_options(command: _Command) -> _Command:
    """What names the server, for every command that records; see `check_target`."""
    for option in reversed(_TARGET_OPTIONS):
        command = option(command)
    return command


@click.command(
    "record",
    context_settings={"ignore_unknown_options": False},
    epilog="\b\nExamples:\n  sudo ttftprof record\n"
    "  sudo ttftprof record --port 8080 --first-tokens 1\n"
    "  sudo ttftprof record -- llama-server -m model.gguf",
)
@target_options
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="File to write (default: ttftprof-DATE-TIME.ttft).",
)
@click.option("--force", is_flag=True, help="Replace the output file if it exists.")
@click.option("--duration", type=float, metavar="S", help="Stop after this many seconds.")
@click.option(
    "--first-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Stop once N requests have got their first token.",
)
@click.option(
    "--ready-file",
    type=click.Path(path_type=Path),
    help="Created once every probe is armed (for scripts).",
)
@click.option(
    "--min-file-mb",
    type=float,
    default=1.0,
    show_default=True,
    help="Files smaller than this are not followed one by one.",
)
@click.option(
    "--ring-kb",
    type=int,
    default=8192,
    show_default=True,
    help="Size of the kernel's buffers for events and texts, a power of two; less than 8192 makes "
    "only that for events smaller.",
)
@click.option(
    "--gpu-launches",
    is_flag=True,
    help="Mark every kernel launch too; costs microseconds thousands of times a second.",
)
@click.option(
    "--python-stacks/--no-python-stacks",
    default=True,
    show_default=True,
    help="What the server's Python code does while a request waits, by py-spy, 20 times a second.",
)
@click.option(
    "--native-stacks",
    is_flag=True,
    help="With them the native frames, 5 times a second; each look pauses the server.",
)
@click.option(
    "--overhead-budget",
    metavar="PERCENT|off",
    help="Of the machine: where recording costs more for seconds, its dearest optional parts are "
    "thinned or dropped, which the report says first.  [default: 1, or 10 without probes]",
)
@click.option(
    "--loader",
    type=click.Choice([*LOADERS, LOOKED_AT]),
    default="auto",
    show_default=True,
    help="How the probes are fitted to the kernel: by the types it carries (libbpf), or by its "
    "headers (bcc), which auto takes where it carries none; or no probes, but looks at /proc "
    "(proc), which auto takes where it may load none.",
)
@click.option(
    "--relay",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Without probes: listen on this port of the loopback and pass all on to the server, so "
    "that requests and first tokens are seen. Let the client send there.",
)
@click.option("-q", "--quiet", is_flag=True, help="No live line.")
def command(
    output: Path | None,
    force: bool,
    duration: float | None,
    first_tokens: int | None,
    ready_file: Path | None,
    min_file_mb: float,
    ring_kb: int,
    gpu_launches: bool,
    python_stacks: bool,
    native_stacks: bool,
    overhead_budget: str | None,
    loader: str,
    relay: int | None,
    quiet: bool,
    command_line: tuple[str, ...],
    **named: Any,
) -> int:
    """Record a server while it switches models.

    Name the server with ONE of the options below or a command after `--`; with none, the inference
    servers that run here are looked for. Start it before the switch, switch the model as usual,
    then press Ctrl-C. The server is not touched.

    Without root, /proc is looked at 50 times a second instead of the kernel's probes: less is seen,
    and the report says what.
    """
    if native_stacks and not python_stacks:
        raise UsageError("native frames come with the Python stacks", "leave one option out")
    check_target(named, command_line)
    is_probed = _is_probed(loader, relay)
    clear_ready(ready_file)
    path = output or Path(time.strftime("ttftprof-%Y%m%d-%H%M%S.ttft"))
    settings = replace(
        with_rings(ring_kb),
        min_file_bytes=_whole("--min-file-mb", min_file_mb, 1 << 20),
        loader=loader,
    )
    duration_ns = None if duration is None else _whole("--duration", duration, NS_PER_S)
    budget = _budget(overhead_budget or ("1" if is_probed else "10"))
    interrupts = Interrupts()
    said = None if is_probed else _output_of(command_line)
    child = Gate.spawn(command_line, said) if command_line else None
    try:
        # After the forks, whose processes would have its port, too.
        through = None if relay is None else _relay(relay)
        target = find_target(named, child)
        limits = Limits(
            duration_ns=duration_ns,
            first_tokens=first_tokens,
            command_pid=child.pid if child else None,
        )
        writer = Writer(path, overwrite=force)
        live = _LiveLine(enabled=not quiet and sys.stderr.isatty())
        python = PythonStacks(enabled=python_stacks, native=native_stacks)
        session = (
            ProbeSession(settings)
            if is_probed
            else _polled(settings, through, said, child.pid if child else 0)
        )
        recorder = Recorder(
            writer, target, session, limits, live.show, _say, gpu_launches, python, budget
        )
        return _record(recorder, writer, ready_file, child, live, interrupts)
    except BaseException:
        if child:
            child.kill()
        raise


# What looks at /proc brings a proxy with it, which a recorder with probes should not carry.


def _output_of(command_line: tuple[str, ...]) -> CommandOutput | None:
    from ttftprof.polled.output import CommandOutput

    return CommandOutput() if command_line else None


def _relay(port: int) -> Relay:
    from ttftprof.polled.relay import Relay

    return Relay(port)


def _polled(
    settings: Settings, through: Relay | None, said: CommandOutput | None, command_pid: int
) -> PolledSession:
    from ttftprof.polled import PolledSession

    return PolledSession(settings, through, said, command_pid)


def check_target(named: Mapping[str, Any], command_line: tuple[str, ...]) -> None:
    """Raises what stands against recording it, before anything begins."""
    chosen = [f"--{name}" for name, value in named.items() if value is not None]
    if len(chosen) + bool(command_line) > 1:
        raise UsageError(
            f"{' and '.join([*chosen, *(['a command'] if command_line else [])])} name two targets",
            "give one of them",
        )
    if any(value == "" for value in named.values()):
        raise UsageError(f"{chosen[0]} is empty", "an empty name would mean the whole machine")
    if command_line and shutil.which(command_line[0]) is None:
        raise TargetError(
            f"there is no command {command_line[0]!r}", "check its name, or give its whole path"
        )


def _is_probed(loader: str, relay: int | None) -> bool:
    """Whether the kernel's probes are used; where they may not be, says why. Raises what stands
    against what was asked for."""
    if loader == LOOKED_AT:
        return False
    try:
        check_permitted()
    except NotPermitted as refused:
        if loader != "auto":
            raise
        _say(f"{refused.message}; so /proc is looked at instead, which shows less")
        _say(f"for all of it: {refused.next_step}")
        return False
    if relay is not None:
        raise UsageError(
            "--relay is for recording without probes, which see the server's sockets themselves",
            "leave it out, or add --loader proc",
        )
    return True


class Interrupts:
    """From its making on, SIGINT, SIGTERM and the loss of the terminal only leave a mark, until the
    recorder takes them over: what was begun must be taken back in order."""

    def __init__(self) -> None:
        self.count = 0
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._mark)

    def _mark(self, _number: int, _frame: object) -> None:
        self.count += 1


def find_target(named: Mapping[str, Any], child: Gate | None) -> targets.Target:
    """The processes meant by the options of `target_options`, as of now."""
    if child:
        return replace(targets.by_pid(child.pid), how=f"the command {child.shown}")
    by: dict[str, Callable[[Any], targets.Target]] = {
        "pid": targets.by_pid,
        "port": targets.by_port,
        "name": targets.by_name,
        "unit": targets.by_unit,
        "container": targets.by_container,
        "cgroup": targets.by_cgroup,
    }
    for name, value in named.items():
        if value is not None:
            return by[name](value)
    return targets.discover()


def _whole(option: str, value: float, unit: int) -> int:
    """A number of the user's in whole units; what no clock or file can be is refused."""
    if not math.isfinite(value) or not 0 <= value * unit < 1 << 63:
        raise UsageError(f"{option} {value} makes no sense", "give a number that is not negative")
    return int(value * unit)


def _budget(text: str) -> float | None:
    """`--overhead-budget` as a share of the machine; None for no limit."""
    if text == "off":
        return None
    try:
        percent = float(text)
    except ValueError:
        percent = math.nan
    if not 0 < percent <= 100:
        raise UsageError(
            f"--overhead-budget {text} is no percentage of the machine", 'give 1, or "off"'
        )
    return percent / 100


_MAX_RING_KB = 256 << 10  # what a reader takes as one batch, columns.MAX_BATCH_BYTES


def with_rings(ring_kb: int) -> Settings:
    """The default settings, but for the sizes of the kernel's buffers. That for texts only grows:
    a request that no longer fits is lost whole. Raises `UsageError`."""
    size = ring_kb << 10
    if size < os.sysconf("SC_PAGE_SIZE") or size & (size - 1) or ring_kb > _MAX_RING_KB:
        raise UsageError(
            f"--ring-kb {ring_kb} is no power of two from one page to {_MAX_RING_KB}", "try 8192"
        )
    return Settings(event_ring_bytes=size, text_ring_bytes=max(size, TEXT_RING_BYTES))


def _record(
    recorder: Recorder,
    writer: Writer,
    ready_file: Path | None,
    child: Gate | None,
    live: _LiveLine,
    interrupts: Interrupts,
) -> int:
    try:
        arm(recorder, interrupts, ready_file, child, writer.path.resolve().parent)
    except BaseException:
        writer.discard()  # nothing was recorded
        raise
    writer.settle()
    _say(f"recording {recorder.target.how} to {shlex.quote(str(writer.path))}")
    for state in recorder.session.states.values():
        if state.state != "ok" and recorder.session.is_probed:
            _say(f"{state.name} is {state.state}: {state.reason}; {state.lost}")
    try:
        why = recorder.run()
        live.clear()
        recorder.finish(why)
    except OutputError:
        live.clear()
        writer.abandon()
        raise
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # all is safe: an impatient Ctrl-C is no failure
    path = shlex.quote(str(writer.path))
    survivors = recorder.survivors() if recorder.command_ended else ""
    if survivors:
        _say(f"what the command left running is left alone: {survivors}")
    _say(f"{why}; {recorder.progress.requests} request(s) in {path}")
    _say(f"next: ttftprof report {path}")
    return child.result(recorder.command_ended, recorder.command_status) if child else 0


def arm(
    recorder: Recorder,
    interrupts: Interrupts,
    ready_file: Path | None,
    child: Gate | None,
    folder: Path | None,
) -> None:
    """All probes on, root given up, and the command let go. Raises `Interrupted` if it was not to
    be any more; once that is announced, a signal ends a recording that was.

    `folder`: see `privilege.drop`.
    """

    def armed() -> None:
        if recorder.stopped:
            raise Interrupted("interrupted before recording began; nothing was written")
        _announce(ready_file)
        privilege.drop(folder, ends_command=child is not None)

    recorder.handle_signals()
    if interrupts.count:
        recorder.stop()
    try:
        recorder.arm(armed)
    except BpfError as error:
        raise Unsupported(
            f"the probes cannot be armed: {error}", next_step="`ttftprof doctor` tells more"
        ) from error
    if child and not child.release():
        if ready_file:
            ready_file.unlink(missing_ok=True)
        raise TargetError("the command was ended before it began", "start it again")


def clear_ready(ready_file: Path | None) -> None:
    """A file of an earlier run would say that the probes are armed. Raises `OutputError`."""
    if ready_file is None:
        return
    try:
        with as_caller():
            found = ready_file.lstat()
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise OutputError(
                    f"{ready_file} is there already, and is no file of yours",
                    "choose another --ready-file",
                )
            ready_file.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise OutputError(
            f"{ready_file} cannot be replaced: {error.strerror}", "choose another --ready-file"
        ) from error


def _announce(ready_file: Path | None) -> None:
    """A new file in the place of one that an earlier run left; root's power reaches no further than
    that of whoever called sudo, and no link is followed."""
    if ready_file is None:
        return
    clear_ready(ready_file)
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with as_caller():
            os.close(os.open(ready_file, flags, 0o644))
    except OSError as error:
        raise OutputError(
            f"{ready_file} cannot be created: {error.strerror}", "choose another --ready-file"
        ) from error


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone; the recording is not
        click.echo(f"ttftprof: {plain_lines(text)}", err=True)


class _LiveLine:
    """One line on the terminal, redrawn at most ten times a second."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._last_ns = 0

    def show(self, progress: Progress) -> None:
        now = now_ns()
        if not self._enabled or now - self._last_ns < NS_PER_S // 10:
            return
        self._last_ns = now
        seconds = (now - progress.started_ns) / NS_PER_S
        megabytes = progress.storage_bytes / 1e6
        self._write(
            f"\r\x1b[K● {seconds:6.1f} s  {progress.requests} request(s), "
            f"{progress.first_tokens} first token(s), {megabytes:,.0f} MB from storage, "
            f"{progress.stage}  (Ctrl-C ends)"
        )

    def clear(self) -> None:
        if self._enabled:
            self._write("\r\x1b[K")

    @staticmethod
    def _write(text: str) -> None:
        with suppress(OSError):  # as in _say
            sys.stderr.write(text)
            sys.stderr.flush()


class Gate:
    """A command that waits, already forked, until the probes are armed.

    Under sudo it runs as the user who called sudo, not as root.
    """

    GRACE_S = 5.0  # from SIGTERM to SIGKILL
    NOTICE_S = 1.0  # until the user is told what is waited for
    TEARDOWN_S = 60.0  # for what a process of many GB takes to go

    def __init__(self, pid: int, gate: int, shown: str) -> None:
        self.pid = pid
        self.shown = shown
        self._gate = gate
        self._is_released = False

    @classmethod
    def spawn(cls, command_line: tuple[str, ...], said: CommandOutput | None = None) -> Gate:
        """`said`: what its output goes through."""
        gate_r, gate_w = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(gate_w)
            for number, end in enumerate(said.ends if said else (), 1):
                os.dup2(end, number)
            _run_command(gate_r, command_line)
        os.close(gate_r)
        if said:
            said.handed_over()
        return cls(pid, gate_w, shlex.join(public_argv(command_line)))

    def release(self) -> bool:
        """Lets the command begin, if it has not yet. False if it is no more: someone ended it while
        it waited."""
        if self._is_released:
            return True
        try:
            os.write(self._gate, b"g")
        except BrokenPipeError:
            return False
        os.close(self._gate)
        self._is_released = True
        return True

    def kill(self) -> None:
        """Ends a command that was never released (or is still running after a failure)."""
        with suppress(ProcessLookupError, ChildProcessError):
            self._stop()

    def result(self, ended: bool, status: int | None = None) -> int:
        """The command's exit code. `ended`: it was seen to end, with `status` (waitpid(2)) if that
        was seen too. One that still runs is asked to end, which is no failure."""
        return self._code_of_ended(status) if ended else self._code_of_stopped()

    def _code_of_ended(self, status: int | None) -> int:
        """Its memory comes back before it is gone, which may take seconds."""
        waited = self._wait(self.NOTICE_S)
        if waited is None:
            _say(f"waiting for the command (pid {self.pid}) to give its memory back; Ctrl-C leaves")
            for number in STOP_SIGNALS:
                signal.signal(number, signal.default_int_handler)
            with suppress(KeyboardInterrupt):
                waited = self._wait(self.TEARDOWN_S)
        if waited is None:
            _say(
                f"pid {self.pid} has ended, but the kernel cannot let go of it (a file server that "
                "does not answer?); it is left behind"
            )
            waited = status
        return UNKNOWN_CODE if waited is None else _shell_code(waited)

    def _code_of_stopped(self) -> int:
        status = self._wait(0)
        if status is None:
            self._stop()
            return 0
        # Of the Ctrl-C that ended the recording, or of a signal to the whole group.
        told = os.WIFSIGNALED(status) and os.WTERMSIG(status) in STOP_SIGNALS
        return 0 if told else _shell_code(status)

    def _wait(self, limit_s: float) -> int | None:
        """The status once it ended, or None if it does not within the limit."""
        until_ns = now_ns() + int(limit_s * NS_PER_S)
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return status
            if now_ns() >= until_ns:
                return None
            time.sleep(0.01)

    def _stop(self) -> None:
        """SIGTERM, and SIGKILL to one that does not heed it."""
        os.kill(self.pid, signal.SIGTERM)
        if self._wait(self.GRACE_S) is None:
            os.kill(self.pid, signal.SIGKILL)
            if self._wait(self.TEARDOWN_S) is None:
                _say(f"pid {self.pid} does not end (state D?); it is left behind")


def _shell_code(status: int) -> int:
    """As a shell gives it: 128 and the signal for what a signal ended."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _run_command(gate: int, command_line: tuple[str, ...]) -> NoReturn:
    """The child: waits at the gate, then becomes the command, with signals as a shell gives it."""
    signal.set_wakeup_fd(-1)
    for number in (*STOP_SIGNALS, signal.SIGPIPE, signal.SIGXFSZ):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, signal.SIG_DFL)
    if os.read(gate, 1) != b"g":
        os._exit(125)
    try:
        caller = sudo_caller()
        if caller is not None:
            become(caller)
        os.execvp(command_line[0], command_line)
    except OSError as error:
        os.write(2, f"ttftprof: {command_line[0]}: {error.strerror}\n".encode())
    os._exit(126)
