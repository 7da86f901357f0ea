"""What the packages that ttftprof may need are called, and the command that installs one here."""

from __future__ import annotations

import platform
import re
from pathlib import Path

Packages = dict[str, str]

# By a distribution's ID, or the ID_LIKE that stands for it, up to a dash (os-release(5)).
_MANAGERS = {
    "debian": ("apt-get install", "apt"),
    "ubuntu": ("apt-get install", "apt"),
    "fedora": ("dnf install", "dnf"),
    "rhel": ("dnf install", "dnf"),
    "suse": ("zypper install", "zypper"),
    "opensuse": ("zypper install", "zypper"),
    "arch": ("pacman -S", "pacman"),
    "alpine": ("apk add", "apk"),
}


def install_command(packages: Packages, root: Path = Path("/")) -> str:
    """The command that installs a package here. `packages`: its name by package manager."""
    try:
        release = (root / "etc/os-release").read_text()
    except OSError:
        release = ""
    words = re.findall(r"^ID(?:_LIKE)?=(.*)$", release, re.MULTILINE)
    for name in " ".join(words).replace('"', "").split():
        command, manager = _MANAGERS.get(name.split("-")[0], ("", ""))
        if manager in packages:
            return f"{command} {packages[manager]}"
    return f"apt-get install {packages['apt']}"


def libbpf_packages() -> Packages:
    """libbpf.so.1."""
    return {
        "apt": "libbpf1",
        "dnf": "libbpf",
        "zypper": "libbpf1",
        "pacman": "libbpf",
        "apk": "libbpf",
    }


def bcc_packages() -> Packages:
    """bcc's Python module. (What PyPI calls bcc is another thing.)"""
    return {
        "apt": "python3-bpfcc",
        "dnf": "python3-bcc",
        "zypper": "python3-bcc",
        "pacman": "python-bcc",
        "apk": "py3-bcc",
    }


def header_packages(release: str = platform.release()) -> Packages:
    """The headers of the kernel that runs."""
    flavour = re.search(r"[a-z]+$", release)
    named = flavour[0] if flavour else ""
    of_arch = f"linux-{named}-headers" if named in {"lts", "zen", "hardened"} else "linux-headers"
    return {
        "apt": f"linux-headers-{release}",
        "dnf": f"kernel-devel-{release}",
        "zypper": f"kernel-{named or 'default'}-devel",
        "pacman": of_arch,
        "apk": f"linux-{named or 'lts'}-dev",
    }
