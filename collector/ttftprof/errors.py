"""One error family. Each error says what happened, what to do next, and its exit code.

`main` catches the family once; nothing else in the program prints a traceback on purpose.
"""

from __future__ import annotations

import resource


class TtftprofError(Exception):
    """Base of what a user may meet.

    `next_step` is a sentence or a command; `exit_code` is what the process returns.
    """

    exit_code = 1

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step


class UsageError(TtftprofError):
    """Arguments that contradict each other or make no sense."""

    exit_code = 2


class Interrupted(TtftprofError):
    """The user ended it before there was anything to keep."""

    exit_code = 130


class TargetError(TtftprofError):
    """No process, or more than one, answers to what the user asked for."""

    exit_code = 3


class NotPermitted(TtftprofError):
    """The kernel refuses: root or capabilities are missing, or a lockdown is in force."""

    exit_code = 4


class Unsupported(TtftprofError):
    """This kernel lacks a feature; `minimum_kernel` is the first that has it."""

    exit_code = 5

    def __init__(self, message: str, minimum_kernel: str = "", next_step: str = "") -> None:
        super().__init__(message, next_step)
        self.minimum_kernel = minimum_kernel


def too_many_files() -> TtftprofError:
    """What EMFILE and ENFILE mean, met wherever something is opened."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return TtftprofError(
        f"too many open files: the limit of this process is {soft}",
        "ulimit -n 1024 (in the shell that starts it), then again",
    )


class RecordingError(TtftprofError):
    """A recording cannot be written, or a file is no recording that can be read."""

    exit_code = 6


class OutputError(TtftprofError):
    """The output cannot be created or was lost (exists, disk full, not writable)."""

    exit_code = 7
