"""Where a report goes: to a terminal of some width, into a pipe, or to a file.

A file is written whole or not at all: it takes its name once it is complete.
"""

from __future__ import annotations

import codecs
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar

import click

from ttftprof.errors import OutputError, UsageError

_Command = TypeVar("_Command", bound=Callable[..., Any])
_MOST_LINKS = 40  # as in the kernel, include/linux/namei.h
_MIN_WIDTH, _MAX_WIDTH, _PIPED_WIDTH = 60, 200, 100

WIDTH = click.option(
    "--width",
    type=int,
    metavar="COLUMNS",
    help="At least 60 (default: the terminal's, 100 into a pipe).",
)

COLOR = click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="auto: only on a terminal, and not if NO_COLOR is set.",
)


def format_option(help_text: str = "", *more: str) -> Callable[[_Command], _Command]:
    """`--format text|json` and `more`, as the parameter `form`."""
    return click.option(
        "--format",
        "form",
        type=click.Choice(["text", *more, "json"]),
        default="text",
        show_default=True,
        help=help_text or None,
    )


def schema_option(schema: Callable[[], dict[str, Any]]) -> Callable[[_Command], _Command]:
    """`--schema`: prints what holds of `--format json`, and ends."""

    def show(context: click.Context, _option: click.Parameter, is_wanted: bool) -> None:
        if is_wanted:
            click.echo(json.dumps(schema(), indent=2))
            context.exit()

    return click.option(
        "--schema",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Print the JSON Schema of --format json, and end.",
    )


def checked_width(width: int | None) -> None:
    """Raises `UsageError` for a width that no report is laid out for."""
    if width is not None and not _MIN_WIDTH <= width <= _MAX_WIDTH:
        raise UsageError(
            f"--width {width} is not between {_MIN_WIDTH} and {_MAX_WIDTH}",
            "leave --width out to use the terminal's",
        )


def width_of(out: TextIO) -> int:
    if not out.isatty():
        return _PIPED_WIDTH
    return min(max(shutil.get_terminal_size().columns, _MIN_WIDTH), _MAX_WIDTH)


def has_colour(choice: str, out: TextIO) -> bool:
    if choice != "auto":
        return choice == "always"
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return out.isatty() and not plain


# What the reports draw with, for terminals that know only ASCII: a character for a character.
_ASCII = str.maketrans(
    "░▒▓█╱╌═╏─┬├┤│└▁▂▃▄▅▆▇▏▎▍▌▋▊▉·…×→≤●µ±−—–’“”\N{NO-BREAK SPACE}",
    ".:%#/~=|-+||" + "|`" + "_.,-=+*" + "..::%%#" + '.~x><*u~---\'"" ',
)


def _as_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_ASCII)
    return text.encode("ascii", "replace").decode(), error.end


codecs.register_error("ttftprof", _as_ascii)


def printable(out: TextIO) -> TextIO:
    """Standard output that shows what its encoding lacks by what looks like it, or `?`."""
    reconfigure = getattr(out, "reconfigure", None)
    if reconfigure:
        reconfigure(errors="ttftprof")
    return out


@contextmanager
def text_file(path: Path) -> Iterator[TextIO]:
    """A text file, or standard output for "-". Raises `OutputError`."""
    if str(path) == "-":
        yield printable(sys.stdout)
        return
    with _replaced(path) as partial, partial.open("w", encoding="utf-8", newline="\n") as out:
        yield out


def say_written(page: Path) -> None:
    """Where a page is and how big, if it is a file."""
    if page.is_file():
        size = f"{page.stat().st_size / 1e6:.1f} MB"
        click.echo(f"wrote {page} ({size}); open it in a browser", err=True)


@contextmanager
def binary_file(path: Path) -> Iterator[BinaryIO]:
    """As `text_file`, for bytes."""
    if str(path) == "-":
        yield sys.stdout.buffer
        return
    with _replaced(path) as partial, partial.open("wb") as out:
        yield out


def _names_a_descriptor(path: Path) -> bool:
    """As /dev/stdout does: whoever opened its file would not see one that took its place."""
    return path.parent.resolve().is_relative_to("/proc") or (
        path.is_symlink() and _names_a_descriptor(path.parent / path.readlink())
    )


def _refuse_planted_links(path: Path) -> None:
    """The kernel's rule for links in a folder like /tmp (fs.protected_symlinks), whatever is set:
    those of another user are not followed. A file that takes its name by rename asks nobody."""
    for _ in range(_MOST_LINKS):
        if not path.is_symlink():
            return
        link, folder = path.lstat(), path.parent.stat()
        is_anyones = folder.st_mode & stat.S_ISVTX and folder.st_mode & stat.S_IWOTH
        if is_anyones and link.st_uid not in (os.geteuid(), folder.st_uid):
            raise OutputError(
                f"{path} is a link that another user made, in a folder that anyone may write to",
                "name another file",
            )
        path = path.parent / path.readlink()
    raise OutputError(f"{path} is a link that leads to itself", "name another file")


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """What to write to instead of `path`, which it then becomes: whole, or not at all. A device or
    a pipe is written as it is; a recording is never replaced by what is made of one."""
    from ttftprof.recording import is_recording

    _refuse_planted_links(path)
    if path.is_dir():
        raise OutputError(f"{path} is a folder", "name a file in it")
    if path.is_file() and is_recording(path):
        raise OutputError(
            f"{path} is a recording, which the output would replace", "name another file"
        )
    if path.exists() and (not path.is_file() or _names_a_descriptor(path)):
        yield path
        return
    path = path.resolve()
    # By a name that nobody can have put a link at.
    partial = path.with_name(f".{path.name}.{os.urandom(8).hex()}.part")
    try:
        partial.touch(exist_ok=False)
        yield partial
        partial.replace(path)
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror or error}",
            "choose a folder that exists, is writable and has room",
        ) from error
    finally:
        partial.unlink(missing_ok=True)
