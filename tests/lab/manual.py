"""docs/ttftprof.1, the manual page, from the help that the commands give themselves.

`PYTHONPATH=tests .venv/bin/python -m lab.manual` writes it; a test holds it against the commands.
Language: groff_man(7).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from ttftprof import __version__, errors
from ttftprof.cli import cli
from ttftprof.model import PHASES

PAGE = Path(__file__).parents[2] / "docs" / "ttftprof.1"
_VERBATIM = "\b"  # click's mark of a paragraph whose lines stay as they are
_OTHER_CODES = {
    0: "It worked; of record with a command, the code of the command.",
    130: errors.Interrupted.__doc__ or "",
}
_FILES = {
    "*.ttft": "A recording: one SQLite file, of mode 0600, that belongs to whoever called sudo. "
    "Prompts, answers and keys are not in it.",
    "*.ttft-wal": "Beside a recording that is being written, or whose recorder was killed: its "
    "last seconds. Keep it beside its recording; reading folds it in.",
}


def page() -> str:
    """The whole page."""
    context = click.Context(cli, info_name="ttftprof")
    return "\n".join([*_head(), *_commands(context), *_tail()]) + "\n"


def _head() -> Iterator[str]:
    yield f'.TH TTFTPROF 1 "" "ttftprof {__version__}" "User Commands"'
    yield from (".SH NAME", rf"ttftprof \- {_roff(_first_word_small(cli.help or ''))}")
    yield from (".SH SYNOPSIS", r".B ttftprof", r".RI [ OPTIONS ] \~ COMMAND \~[ ARGUMENTS ]")
    yield ".SH DESCRIPTION"
    yield from _paragraphs(
        "An eBPF profiler of local LLM servers. It splits the time to the first token into phases "
        f"({', '.join(PHASES)}) and says of each what the server waited for. The server is not "
        "restarted, patched or reconfigured."
    )
    yield from _paragraphs(cli.epilog or "")


def _commands(context: click.Context) -> Iterator[str]:
    yield from (".SH OPTIONS", *_options(cli))
    yield ".SH COMMANDS"
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        yield from (f".SS ttftprof {name} {_roff(_arguments(command))}".rstrip(),)
        yield from _paragraphs(command.help or "")
        yield from _options(command)
        yield from _paragraphs(command.epilog or "")


def _arguments(command: click.Command) -> str:
    """What its command line holds, in order: `[OPTIONS] FILE...`."""
    words = ["[OPTIONS]"] if any(isinstance(p, click.Option) for p in command.params) else []
    for argument in command.params:
        if isinstance(argument, click.Argument):
            word = argument.metavar or (argument.name or "").upper()
            if argument.metavar is None and argument.nargs == -1:
                word += "..."
            if not argument.required and not word.startswith("["):
                word = f"[{word}]"
            words.append(word)
    return " ".join(words)


def _options(command: click.Command) -> Iterator[str]:
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            names = ", ".join(rf"\fB{_roff(name)}\fR" for name in option.opts)
            other = "".join(rf" / \fB{_roff(name)}\fR" for name in option.secondary_opts)
            value = rf" \fI{_roff(_value(option))}\fR" if not option.is_flag else ""
            yield from (".TP", names + other + value, _roff(_told(option)))


def _value(option: click.Option) -> str:
    if option.metavar:
        return option.metavar
    if isinstance(option.type, click.Choice):
        return "|".join(map(str, option.type.choices))
    return re.sub(r" range$", "", option.type.name).upper()


def _told(option: click.Option) -> str:
    """Its help, with what holds where it is left out."""
    more = []
    if option.multiple:
        more.append("may be repeated")
    if option.required:
        more.append("required")
    elif option.show_default:
        value = option.default
        if option.secondary_opts:
            value = (option.opts if value else option.secondary_opts)[0].lstrip("-")
        more.append(f"default: {value}")
    text = (option.help or "").strip()
    return f"{text} [{'; '.join(more)}]".strip() if more else text


def _tail() -> Iterator[str]:
    yield ".SH EXIT STATUS"
    for code, text in sorted(_exit_codes().items()):
        yield from (".TP", rf"\fB{code}\fR", _roff(text))
    yield ".SH FILES"
    for name, text in _FILES.items():
        yield from (".TP", rf"\fI{_roff(name)}\fR", _roff(text))
    yield from (".SH SEE ALSO", r".BR bpf (2),", r".BR sudo (8)")


def _exit_codes() -> dict[int, str]:
    """Each code of the error family, by the first line of what its class says of itself."""
    family = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.TtftprofError) and kind is not errors.TtftprofError
    ]
    told = {kind.exit_code: (kind.__doc__ or "").splitlines()[0] for kind in family}
    return _OTHER_CODES | {errors.TtftprofError.exit_code: "Any other failure."} | told


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs of a help text; those that click leaves as they are stay so."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = paragraph.strip("\n").split("\n")
        if lines[0].strip() == _VERBATIM or lines[0].startswith(_VERBATIM):
            kept = [line.removeprefix(_VERBATIM) for line in lines]
            yield from (".PP", ".nf", *_quoted(line for line in kept if line.strip()), ".fi")
        elif paragraph.strip():
            yield from (".PP", _roff(" ".join(paragraph.split())))


def _quoted(lines: Iterable[str]) -> list[str]:
    return [_roff(line) for line in lines]


def _roff(text: str) -> str:
    """Plain text; what begins a line with a dot or a quote is no request."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-").replace("`", r"\(ga")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped


def _first_word_small(sentence: str) -> str:
    return (sentence[:1].lower() + sentence[1:]).rstrip(".")


if __name__ == "__main__":
    PAGE.write_text(page())
