"""`ttftprof storage`: what lies under a model file, and what that path gives when it is read."""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import replace

import click

from ttftprof.ceilings import ALIGN, Interrupted, Limits, Session, signals_raise
from ttftprof.cli import output
from ttftprof.clock import NS_PER_S, now_ns
from ttftprof.errors import NotPermitted, TtftprofError, Unsupported, UsageError
from ttftprof.reports import storage as report
from ttftprof.reports.safe import clip, plain
from ttftprof.scale import size
from ttftprof.stack import Stack, stack_of
from ttftprof.storage_verdict import Seen, judge
from ttftprof.weights import OpenFile, Weights, open_path, open_weights, shown

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MIN_WIDTH, _MAX_WIDTH = 60, 200
_MAX_READ_AHEAD_KB = 1 << 20


def _size(_ctx: click.Context, _parameter: click.Parameter, value: str) -> int:
    """`512M`, `1GiB`, plain bytes."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", value, re.IGNORECASE)
    if match is None or not match[0].isascii():
        raise click.BadParameter(f"{value!r} is no size; try 512M or 1G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _read_aheads(_ctx: click.Context, _parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Comma-separated KiB."""
    if not re.fullmatch(r"(\s*[0-9]{1,8}\s*(,|$))*", value) or value.endswith(","):
        raise click.BadParameter(f"{value!r} is no list of KiB; try 128,1024,4096")
    found = tuple(dict.fromkeys(int(part) for part in value.split(",") if part.strip()))
    if not all(4 <= kb <= _MAX_READ_AHEAD_KB for kb in found):
        raise click.BadParameter(f"readahead must be 4 to {_MAX_READ_AHEAD_KB} KiB")
    return found


@click.command(
    "storage",
    epilog="Examples:  sudo ttftprof storage model.gguf        sudo ttftprof storage --pid 1234 "
    "/models        sudo ttftprof storage --try-readahead 128,1024,4096 model.gguf",
)
@click.argument("paths", nargs=-1, required=True, metavar="PATH…")
@click.option(
    "--pid", type=click.IntRange(1), help="PATH is as this process sees it (a container)."
)
@click.option("--stack-only", is_flag=True, help="Show what lies under PATH; read nothing.")
@click.option("--quick", is_flag=True, help="Only the measurements that decide the verdict.")
@click.option(
    "--max-bytes",
    callback=_size,
    default="1G",
    show_default=True,
    metavar="SIZE",
    help="Read at most this much of each PATH.",
)
@click.option(
    "--max-seconds",
    type=click.FloatRange(0.5, 3600),
    default=30.0,
    show_default=True,
    help="Measure each PATH for at most this long.",
)
@click.option(
    "--try-readahead",
    callback=_read_aheads,
    default="",
    metavar="KIB,…",
    help="Also measure with these readaheads; the old value is put back.",
)
@click.option(
    "--evict", is_flag=True, help="Measure cached parts too: they are dropped for it and read back."
)
@click.option("--force", is_flag=True, help="Measure on ZFS too, whose cache cannot be put back.")
@output.format_option()
@click.option("-q", "--quiet", is_flag=True, help="No progress line.")
def command(
    paths: tuple[str, ...],
    pid: int | None,
    stack_only: bool,
    quick: bool,
    max_bytes: int,
    max_seconds: float,
    try_readahead: tuple[int, ...],
    evict: bool,
    force: bool,
    form: str,
    quiet: bool,
) -> int:
    """Show what lies under a model file, and measure what that path gives.

    PATH is a model file, or a folder (its biggest model is taken). The file is read, within the
    limits below; the page cache is left as it was found. Nothing is written.
    """  # fmt: skip
    limits = Limits(
        max_bytes=max_bytes,
        max_ns=int(max_seconds * NS_PER_S),
        evict=evict,
        quick=quick,
        read_aheads_kb=try_readahead,
    )
    doctor = _Doctor(pid, limits, stack_only, force, _Progress(quiet))
    done: list[report.PathReport] = []
    try:
        with signals_raise():
            code = _examine_all(doctor, paths, done, as_text=form == "text")
    except Interrupted as interruption:
        code = 128 + interruption.number
    if form == "json":
        report.write_json(done, sys.stdout)
    return code


def _examine_all(
    doctor: _Doctor, paths: tuple[str, ...], done: list[report.PathReport], as_text: bool
) -> int:
    """Examines the paths in turn; of several, a bad one does not keep the rest from their turn."""
    code = 0
    for path in paths:
        try:
            done.append(doctor.examine(path))
        except TtftprofError as error:
            if len(paths) == 1:
                raise
            code = code or error.exit_code
            _say(f"{error.message} (next: {error.next_step})" if error.next_step else error.message)
            continue
        if as_text:
            _print(done[-1], first=len(done) == 1)
        if doctor.interrupted:
            return 128 + doctor.interrupted
        code = code or doctor.exit_code
    return code


def _print(found: report.PathReport, first: bool) -> None:
    if not first:
        sys.stdout.write("\n")
    columns = shutil.get_terminal_size((100, 24)).columns
    width = min(max(columns, _MIN_WIDTH), _MAX_WIDTH)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    report.write(found, sys.stdout, width, colour)
    sys.stdout.flush()


def _say(text: str) -> None:
    click.echo(f"ttftprof: {text}", err=True)


class _Progress:
    """What is being done: a line on a terminal, nothing elsewhere."""

    def __init__(self, quiet: bool) -> None:
        self._live = not quiet and sys.stderr.isatty()
        self.quiet = quiet
        self._last_ns = 0

    def show(self, text: str) -> None:
        if self._live and now_ns() - self._last_ns > NS_PER_S // 10:
            self._last_ns = now_ns()
            sys.stderr.write(f"\r\x1b[K● {clip(text, 76)}  (Ctrl-C ends)")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


class _Doctor:
    """Examines one path after the other with the same settings.

    `interrupted` is the signal that ended the last measurement, 0 if none did; `exit_code` what
    its outcome asks for.
    """

    def __init__(
        self, pid: int | None, limits: Limits, stack_only: bool, force: bool, progress: _Progress
    ) -> None:
        self._pid, self._limits, self._force = pid, limits, force
        self._stack_only, self._progress = stack_only, progress
        self.interrupted = 0
        self.exit_code = 0

    def examine(self, asked: str) -> report.PathReport:
        self.exit_code = 0
        with open_weights(asked, self._pid) as weights:
            file = weights.files[0]
            found = report.PathReport(
                asked=asked,
                path=file.path,
                chosen=weights.chosen,
                size_bytes=weights.size_bytes,
                files=len(weights.files),
                stack=self._stack(file),
            )
            why = self._why_not(found)
            if why:
                return replace(found, not_measured=why)
            return self._measure(weights, found)

    def _stack(self, file: OpenFile) -> Stack:
        try:
            return stack_of(file.path, file.mount_id, self._pid)
        except OSError as error:
            raise NotPermitted(
                f"the mounts of process {self._pid or 'self'} cannot be read: {error.strerror}",
                "sudo ttftprof storage …",
            ) from error

    def _why_not(self, found: report.PathReport) -> str:
        """Why nothing is measured, '' if it is."""
        if self._stack_only:
            return "only the stack was asked for"
        if found.stack.in_memory:
            return f"{found.stack.fstype} keeps its files in memory: there is no storage to measure"
        if found.size_bytes == 0:
            self.exit_code = UsageError.exit_code
            return "the file is empty"
        if found.stack.is_zfs and not self._force:
            self.exit_code = Unsupported.exit_code
            return (
                "this is ZFS: its cache (ARC) cannot be asked or put back, so figures may be the "
                "ARC's; --force measures all the same"
            )
        return ""

    def _measure(self, weights: Weights, found: report.PathReport) -> report.PathReport:
        try:
            session = Session(weights, found.stack, self._limits, self._progress.show)
        except OSError as error:
            raise NotPermitted(
                f"{shown(found.path)} cannot be read, or what the page cache holds of it not be "
                f"asked: {error.strerror}",
                "sudo ttftprof storage …   (--stack-only needs no rights)",
            ) from error
        try:
            return self._measured(session, weights, found)
        finally:
            self._progress.clear()
            session.close()

    def _measured(
        self, session: Session, weights: Weights, found: report.PathReport
    ) -> report.PathReport:
        if not session.space():
            why = self._no_space(session, found)
            seen = Seen(found.stack, found.size_bytes, session.before, ())
            return replace(found, before=session.before, not_measured=why, conclusion=judge(seen))
        self._announce(found)
        notes: tuple[str, ...] = ()
        try:
            session.run()
        except Interrupted as interruption:
            self.interrupted = interruption.number
            notes = (f"ended early by {interruption}; everything was put back",)
        seen = Seen(
            found.stack, found.size_bytes, session.before, session.results, self._limits.evict
        )
        return replace(
            found,
            before=session.before,
            after=session.after,
            results=tuple(session.results),
            bytes_read=session.bytes_read,
            conclusion=judge(seen),
            notes=(*notes, *session.notes, *self._what_happened(weights, found.asked)),
        )

    def _no_space(self, session: Session, found: report.PathReport) -> str:
        if found.size_bytes < ALIGN:
            return f"it is too small: every measurement takes at least {ALIGN >> 20} MiB of its own"
        if self._limits.evict or session.before.share < 0.5:
            return "no part of the file that is not cached is long enough to measure on"
        return (
            "it is in the page cache, and was not evicted; --evict measures it (and reads it back)"
        )

    def _announce(self, found: report.PathReport) -> None:
        if self._progress.quiet:
            return
        most = min(self._limits.max_bytes, found.size_bytes)
        _say(
            f"reading up to {size(most)} of {shown(found.path)}, for at most "
            f"{self._limits.max_ns / NS_PER_S:g} s; what it brings into the page cache leaves again"
        )
        layer = found.stack.readahead
        if self._limits.read_aheads_kb and layer and layer.read_ahead_file:
            _say(
                f"{layer.read_ahead_file} is {layer.read_ahead_kb} now and is changed in between, "
                "for all who read from it; it is put back, also if this is killed"
            )

    def _what_happened(self, weights: Weights, asked: str) -> list[str]:
        """Whether the files are still what the path names."""
        notes = []
        for file in weights.files:
            now = os.fstat(file.fd)
            if now.st_nlink == 0:
                notes.append(f"{plain(file.path)} was deleted meanwhile: this is the deleted file")
            elif now.st_size != file.size_bytes:
                notes.append(f"{plain(file.path)} changed its size meanwhile")
        if not notes and len(weights.files) == 1 and not weights.chosen:
            notes += self._replaced(weights.files[0], asked)
        return notes

    def _replaced(self, file: OpenFile, asked: str) -> list[str]:
        try:
            fd = open_path(asked, self._pid)
        except OSError:
            return [f"{shown(asked)} is gone meanwhile: this is the file it was"]
        now = os.fstat(fd)
        os.close(fd)
        if (now.st_dev, now.st_ino) == (file.device, file.inode):
            return []
        return [f"{shown(asked)} names another file now: this is the one it named before"]
