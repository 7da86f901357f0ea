"""The command line: one subcommand a file; errors are caught once, here."""

from __future__ import annotations

import errno
import importlib
import os
import select
import shlex
import sys
from typing import Any

import click

from ttftprof import __version__
from ttftprof.errors import (
    NotPermitted,
    OutputError,
    TtftprofError,
    Unsupported,
    too_many_files,
)
from ttftprof.plain import plain_lines

# name -> module; imported when asked for, so that `record` arms without loading the reports.
_COMMANDS = {
    "record": "ttftprof.cli.record",
    "watch": "ttftprof.cli.watch",
    "report": "ttftprof.cli.report",
    "diff": "ttftprof.cli.diff",
    "summary": "ttftprof.cli.summary",
    "bench": "ttftprof.cli.bench",
    "check": "ttftprof.cli.check",
    "export": "ttftprof.cli.export",
    "dump": "ttftprof.cli.dump",
    "doctor": "ttftprof.cli.doctor",
    "storage": "ttftprof.cli.storage",
    "completion": "ttftprof.cli.completion",
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _COMMANDS.get(cmd_name)
        if module is None:
            return None
        if cmd_name == "record":
            _import_numpy()
        command: click.Command = importlib.import_module(module).command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Also settles what becomes of the output; left to click, a closed pipe is a failure."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            if not _reader_is_gone():
                raise
            # The reader went away (`| head`): nothing to say, nothing wrong.
            _drop_output()
            return 0
        except SystemExit as left:
            # As above, met by rich, which calls it a failure.
            if not isinstance(left.__context__, BrokenPipeError):
                raise
            return 0
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            _drop_output()
            raise OutputError(
                f"the output cannot be written: {error.strerror}", "write it to another disk"
            ) from error
        return result


def _reader_is_gone() -> bool:
    """Whether it is standard output whose other end is closed, and not some other pipe."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(state & (select.POLLERR | select.POLLHUP) for _, state in poll.poll(0))


def _import_numpy() -> None:
    """Without the threads of its linear algebra, which nothing here uses: they take memory, and
    would keep what `privilege.drop` gives up. The environment stays as a command is to have it."""
    name = "OPENBLAS_NUM_THREADS"
    given = os.environ.get(name)
    os.environ[name] = "1"
    import numpy as np  # noqa: F401

    if given is None:
        del os.environ[name]
    else:
        os.environ[name] = given


def _open_closed_streams() -> None:
    """Started with one closed (`>&-`), nobody wants to read it; the number must not go to a file
    of ours, which would get what is said."""
    for number, mode in ((0, "r"), (1, "w"), (2, "w")):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            stream = open(number, mode, closefd=False)  # noqa: SIM115 - while it runs
            setattr(sys, ("stdin", "stdout", "stderr")[number], stream)


def _refuse_borrowed_rights() -> None:
    """A set-user-ID program runs for whoever starts it, and this one does what its user says."""
    (uid, effective_uid, _), (gid, effective_gid, _) = os.getresuid(), os.getresgid()
    if (uid, gid) != (effective_uid, effective_gid):
        raise NotPermitted(
            f"it was started setuid or setgid: by user {uid} with the rights of {effective_uid} "
            f"(group {gid}, {effective_gid})",
            f"chmod ug-s {shlex.quote(sys.executable)}, or what starts it; then sudo ttftprof …",
        )


def _tell(error: TtftprofError) -> None:
    """What happened, and below it what to do. Foreign names in it reach no terminal raw."""
    click.echo(f"ttftprof: {plain_lines(error.message)}", err=True)
    if isinstance(error, Unsupported) and error.minimum_kernel:
        click.echo(f"  needs: Linux {error.minimum_kernel} or newer", err=True)
    if error.next_step:
        click.echo(f"  next: {plain_lines(error.next_step)}", err=True)


def _drop_output() -> None:
    """What is still buffered goes nowhere, or the interpreter would complain of it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_version(context: click.Context, wanted: bool) -> None:
    """What a bug report needs: the program, which probes it would load, and into what."""
    if not wanted or context.resilient_parsing:
        return
    import platform

    from ttftprof.kernel.session import OBJECTS, object_build

    cast, plain, untyped = (object_build(path) or "not built" for path in OBJECTS)
    builds = f"probes {cast}, before Linux 6.2 {plain}, without BTF {untyped}"
    click.echo(f"ttftprof {__version__}, {builds}")
    click.echo(f"{platform.system()} {platform.release()} {platform.machine()}")
    click.echo(f"Python {platform.python_version()}")
    context.exit()


@click.command(
    cls=_Lazy,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with:  sudo ttftprof record   (switch the model, Ctrl-C)   "
    "then  ttftprof report FILE",
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=lambda context, _, wanted: _show_version(context, wanted),
    help="Show the versions of ttftprof, its probes and this kernel, and exit.",
)
def cli() -> None:
    """Where the first token went, after a local LLM server switched models."""


def main(arguments: list[str] | None = None) -> None:
    """Runs the program; a known error prints two lines and sets the exit code."""
    _open_closed_streams()
    try:
        _refuse_borrowed_rights()
        result: Any = cli.main(args=arguments, prog_name="ttftprof", standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except TtftprofError as error:
        _tell(error)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        _tell(too_many_files())
        sys.exit(TtftprofError.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
