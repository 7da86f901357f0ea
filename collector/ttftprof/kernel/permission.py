"""Whether this process may record at all: asked before anything is touched, so that what is missing
is named and not guessed from a refused system call.
"""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from pathlib import Path

from ttftprof.errors import NotPermitted
from ttftprof.kernel.confinement import locked_down
from ttftprof.sources.processes import has_host_pids

# Numbers: include/uapi/linux/capability.h (the same everywhere).
CAPABILITIES = {
    "CAP_DAC_OVERRIDE": 1,
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_KILL": 5,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
}
NEEDED = frozenset({"CAP_BPF", "CAP_PERFMON", "CAP_SYS_PTRACE"})
_COVERED_BY_SYS_ADMIN = {"CAP_PERFMON", "CAP_BPF"}
_WHOLE_MACHINE = ["0", "0", "4294967295"]  # uid_map of the first user namespace


def effective_bits(status: str) -> int:
    """The effective set of a /proc/PID/status, a bit a capability."""
    found = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", status, re.MULTILINE)
    return int(found[1], 16) if found else 0


def names_of(bits: int) -> set[str]:
    """Those of `CAPABILITIES` that are in a set."""
    return {name for name, bit in CAPABILITIES.items() if bits >> bit & 1}


def effective_capabilities(status: str) -> set[str]:
    """Those of `CAPABILITIES` that a /proc/PID/status shows as effective."""
    held = names_of(effective_bits(status))
    return held | _COVERED_BY_SYS_ADMIN if "CAP_SYS_ADMIN" in held else held


def lacking_capabilities(proc: Path = Path("/proc")) -> list[str]:
    """Those that recording needs and this process has not; all of them in a user namespace, whose
    capabilities are not the machine's."""
    with suppress(FileNotFoundError):  # CONFIG_USER_NS=n: there is only the machine
        if (proc / "self/uid_map").read_text().split() != _WHOLE_MACHINE:
            return sorted(NEEDED)
    return sorted(NEEDED - effective_capabilities((proc / "self/status").read_text()))


def is_wsl(release: str = platform.release()) -> bool:
    """Whether this is the kernel of the Windows Subsystem for Linux, by its name."""
    return "microsoft" in release.lower()


def check_permitted() -> None:
    """Raises `NotPermitted` if this process cannot record, with what is missing and the remedy."""
    if os.geteuid() != 0:
        raise NotPermitted(
            "recording needs the kernel's probes, and those need root",
            "sudo ttftprof record …   (`ttftprof doctor` tells what works without)",
        )
    lacking = lacking_capabilities()
    if lacking:
        options = " ".join(f"--cap-add={name.removeprefix('CAP_')}" for name in lacking)
        raise NotPermitted(
            f"this root is without {', '.join(lacking)}: the kernel lets it load no probes, or not "
            "look at the server's files",
            f"record on the host; or give them back: to a container by {options}, to a systemd "
            "unit by CapabilityBoundingSet=",
        )
    if not has_host_pids():
        raise _own_pids()
    for guard in locked_down():  # else programs are refused one by one, as if they were wrong
        raise NotPermitted(f"{guard.what} shows its memory to no probe", guard.remedy)


def _own_pids() -> NotPermitted:
    what = "whose process ids are not the kernel's: nothing could be followed"
    if is_wsl():
        return NotPermitted(
            f"a distribution of WSL2 is a process namespace of its own, {what}",
            "run the server and `ttftprof record` on Linux itself or in a virtual machine; "
            "reports can be made here",
        )
    return NotPermitted(
        f"this is a process namespace of its own (a container), {what}",
        "record on the host, or run the container with --pid=host",
    )
