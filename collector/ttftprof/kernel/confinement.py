"""What may forbid the kernel's probes to a root that has every capability: seccomp filters, kernel
lockdown, SELinux, AppArmor. None of them says in its refusal that it was them.

Sources: proc(5) for Seccomp and attr/, kernel_lockdown(7), /sys/fs/selinux of selinux(8).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNCONFINED = re.compile(r"unconfined\b|.*:unconfined_t:|kernel$")


@dataclass(frozen=True, slots=True)
class Guard:
    """One that is in force on this process: `what` it is, and the `remedy` where it forbids too
    much."""

    what: str
    remedy: str


def guards(root: Path = Path("/")) -> list[Guard]:
    """Those in force on this process, which need not forbid anything."""
    looks = (_seccomp, locked_down, _selinux, _apparmor)
    return [guard for look in looks for guard in look(root)]


def _seccomp(root: Path) -> Iterator[Guard]:
    if re.search(r"^Seccomp:\s*2$", _read(root / "proc/self/status"), re.MULTILINE):
        yield Guard(
            "a seccomp filter (of a container or a systemd unit)",
            "to a container give --security-opt seccomp=unconfined, to a unit SystemCallFilter=bpf "
            "perf_event_open",
        )


def locked_down(root: Path = Path("/")) -> Iterator[Guard]:
    """The kernel itself, to everyone."""
    if "[confidentiality]" in _read(root / "sys/kernel/security/lockdown"):
        yield Guard(
            "kernel lockdown in confidentiality mode",
            "boot without lockdown=confidentiality (integrity, which Secure Boot sets, is fine)",
        )


def _selinux(root: Path) -> Iterator[Guard]:
    context = _read(root / "proc/self/attr/current")
    if _read(root / "sys/fs/selinux/enforce") == "1" and not _UNCONFINED.match(context):
        yield Guard(
            f"SELinux, which confines this process as {context or 'an unknown type'}",
            "run it from an unconfined root shell; `ausearch -m avc -ts recent` shows what was "
            "denied, `audit2allow` makes a rule of it",
        )


def _apparmor(root: Path) -> Iterator[Guard]:
    if (root / "sys/fs/selinux/enforce").exists():
        return  # the file below is then SELinux's
    attributes = root / "proc/self/attr"
    profile = _read(attributes / "apparmor/current") or _read(attributes / "current")
    name, _, mode = profile.partition(" ")
    if mode == "(enforce)":
        yield Guard(
            f"the AppArmor profile {name}",
            "run it outside of the profile (a container: --security-opt apparmor=unconfined); "
            "`journalctl -k -g apparmor=.DENIED` shows what was denied",
        )


def _read(path: Path) -> str:
    """Stripped; "" where it cannot be read: a security module that is not there has no files."""
    try:
        return path.read_text(errors="replace").strip("\0\n ")
    except OSError:
        return ""
