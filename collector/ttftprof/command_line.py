"""What of a command line may be written down: its shape, never what people put into it.

An argument is shown only if it is of a kind that cannot hold a prompt or a secret: the name of an
option, a number, a path, an address, a word of a server's own vocabulary, the name of a model where
one belongs. Everything else is blotted out, known as a secret or not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ttftprof.engines.catalog import ENGINES, recognise

HIDDEN = "•••"
MAX_ARGUMENTS, MAX_CHARACTERS = 128, 8192


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# One dash: short, or it is a short option with its value stuck on (-pTell me).
_OPTION = re.compile(
    r"--[A-Za-z][\w.-]{0,47}|-[A-Za-z]{1,4}|-[A-Za-z][0-9]|-no-[a-z]{2,5}|-ctxcp", re.ASCII
)
# Their values are hidden whatever they look like. Not of them: --max-tokens, --tokenizer,
# --data-parallel-size, --ctx-size's long form.
_SECRET = re.compile(
    r"key|token(?!s\b|i[sz]er)|secret|passw|auth|credential|cookie|header|prompt|message"
    r"|data\b(?!-parallel)|json|(?<!con)text|query|input|system\b|grammar|template(?!-file)",
    re.IGNORECASE,
)
# llama.cpp's short forms of --hf-token, --prompt and --system-prompt; curl's of --data,
# --header and --user
_SHORT_SECRETS = frozenset({"-hft", "-p", "-sys", "-d", "-H", "-u"})
# Options whose value names a model, a device or a place: any single token is shown.
_NAMING = re.compile(
    r"--.*(?:model|alias|name|repo|path|dir|file|host|bind|address|device|dtype|type|quant\w*"
    r"|backend|format|mode|parser|policy|revision|lora|mmproj|url)"
)
# The same of the servers we know; elsewhere -m may be a message.
_SHORT_NAMING = _words("-m -a -M -hf -hfr -hff -mu -md -dev -sm -mg -ctk -ctv")
# What a server is told to do; the next word is what it does it to.
_VERBS = _words("serve run runner load stop")
_WORDS = _words("""
    on off auto true false yes no none all default enabled disabled distribute isolate
    numactl layer row f32 f16 bf16 float16 bfloat16 float32 half q8_0 q5_1 q5_0 q4_1 q4_0
    iq4_nl fp8 awq gptq cpu cuda
""")
_PROGRAMS = frozenset().union(*(engine.programs for engine in ENGINES))
_TOKEN = re.compile(r"(?!.*://.*@)[A-Za-z0-9][\w.:/+@=-]{0,127}", re.ASCII)
_ASSIGNMENT = re.compile(r"[A-Z_][A-Z0-9_]{0,47}", re.ASCII)
_INTERPRETER = re.compile(r"(?:.*/)?(?:python|pypy)[\d.]*")
_NUMBER = re.compile(
    r"[-+]?[\d._]{1,20}(?:e[-+]?\d{1,3})?[KMGT]?i?B?|\d{1,9}(?:[,:-]\d{1,9}){1,64}", re.I | re.ASCII
)
_PATH = re.compile(r"(?:\.{0,2}|~)/[\x21-\x7e]{0,4000}")
_MODEL_FILE = re.compile(r"\S{1,400}\.(?:gguf|safetensors|ggml|onnx|pth?|bin)", re.IGNORECASE)
_SPACED_FILE = re.compile(r"[^\n]{1,400}\.(?:gguf|safetensors)", re.IGNORECASE)
_SCRIPT = re.compile(r"[\w./-]{1,200}\.(?:py|sh|toml|ya?ml|json|service)", re.ASCII)
_HOST = r"(?:localhost|\d{1,3}(?:\.\d{1,3}){3}|\[?[\da-f]*:[\da-f:]*:[\da-f]*\]?)(?::\d{1,5})?"
_ADDRESS = re.compile(_HOST, re.IGNORECASE)
_URL = re.compile(r"(?:https?|tcp)://(?:[\w-]{1,63}\.?){1,8}(?::\d{1,5})?/?(?:v1/?)?", re.ASCII)
_HARMLESS = (_NUMBER, _PATH, _MODEL_FILE, _SCRIPT, _ADDRESS, _URL)


def public_argv(argv: Sequence[str]) -> list[str]:
    """`argv`, as many arguments as before, with what may be a prompt or a secret blotted out."""
    if not argv:
        return []
    ours = recognise("", argv) is not None
    shown = [_program(argv[0])]
    before = ""  # the option, verb or `-m` of an interpreter that this argument may belong to
    hiding = first = False
    for at, argument in enumerate(argv[1:], 1):
        # A secret may begin with a dash; two dashes are an option again.
        if hiding and not argument.startswith("--" if first else "-"):
            shown.append(HIDDEN)
            first = False
        elif argument.startswith("-") and not _NUMBER.fullmatch(argument):
            option, equals, value = argument.partition("=")
            hiding = first = _is_secret(option) and not equals
            before = "" if equals else option
            shown.append(_option(option, equals, value, ours))
        else:
            hiding = False
            verb = ours and at <= 3 and argument in _VERBS
            module = before == "-m" and bool(_INTERPRETER.fullmatch(argv[0]))
            named = module or _names_something(before, ours)
            shown.append(argument if verb else _value(argument, named))
            before = argument if verb else ""
    return shown


def capped(argv: Sequence[str]) -> list[str]:
    """The first `MAX_ARGUMENTS`, of `MAX_CHARACTERS` in all; a last word tells how many were left
    out. Nothing bounds what a process says of itself."""
    kept: list[str] = []
    left = MAX_CHARACTERS
    for argument in argv[:MAX_ARGUMENTS]:
        if len(argument) > left:
            break
        left -= len(argument)
        kept.append(argument)
    if not kept and argv:
        kept.append(argv[0][:left])
    out = len(argv) - len(kept)
    return [*kept, f"… ({out} more)"] if out else kept


def _program(argument: str) -> str:
    """A program's path, or the title a process gave itself, which may go on with arguments."""
    head, blank, _ = argument.partition(" ")
    return f"{head} {HIDDEN}" if blank else argument


def _is_secret(option: str) -> bool:
    return option in _SHORT_SECRETS or bool(_SECRET.search(option))


def _names_something(option: str, ours: bool) -> bool:
    if option in _VERBS or option in _SHORT_NAMING:
        return ours
    return bool(_NAMING.fullmatch(option))


def _option(option: str, equals: str, value: str, ours: bool) -> str:
    if not _OPTION.fullmatch(option):
        return HIDDEN if option.startswith("--") else option[:2] + HIDDEN
    if not equals:
        return option
    hide = _is_secret(option)
    return f"{option}={HIDDEN if hide else _value(value, _names_something(option, ours))}"


def _value(argument: str, named: bool) -> str:
    """An argument that is no option; `named`: a model's name or the like is expected here."""
    if named and (_TOKEN.fullmatch(argument) or _SPACED_FILE.fullmatch(argument)):
        return argument
    if (
        argument in _WORDS
        or argument in _PROGRAMS
        or any(kind.fullmatch(argument) for kind in _HARMLESS)
    ):
        return argument
    name, equals, value = argument.partition("=")
    if not equals or not _ASSIGNMENT.fullmatch(name):
        return HIDDEN
    harmless = not _is_secret(name) and any(k.fullmatch(value) for k in (_NUMBER, _PATH))
    return argument if harmless else f"{name}={HIDDEN}"
