"""What this machine allows, what each missing thing costs, and the command that fixes it.

Each check looks and changes nothing; the probes are really loaded and attached for a moment, for
that is the only sure answer. A check never raises: what goes wrong is its finding.
"""

from __future__ import annotations

import ctypes as c
import errno
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttftprof.errors import NotPermitted, TtftprofError
from ttftprof.kernel import libbpf
from ttftprof.kernel.confinement import guards
from ttftprof.kernel.headers import bcc_folder, has_headers
from ttftprof.kernel.permission import NEEDED, check_permitted, effective_capabilities
from ttftprof.kernel.session import (
    MINIMUM,
    MINIMUM_KERNEL,
    OBJECT,
    OBJECT_WITHOUT_BTF,
    ProbeSession,
    ProbeState,
    Settings,
    kernel_function,
)
from ttftprof.kernel.table import PROBES, Probe
from ttftprof.kernel.types import VMLINUX, KernelTypes
from ttftprof.packages import (
    bcc_packages,
    header_packages,
    install_command,
    libbpf_packages,
)
from ttftprof.sources import drm, nvml
from ttftprof.sources.gpu import GpuAbsent, Vendor
from ttftprof.sources.processes import ProcessFacts, has_host_pids
from ttftprof.target import describe, running_servers

OK, DEGRADED, MISSING = "ok", "degraded", "missing"

ARCHITECTURES = ("x86_64", "aarch64")
_NR_CACHESTAT = 451  # include/uapi/asm-generic/unistd.h (the same everywhere)
_SMALL_RING_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `state`: ok, degraded (in part) or missing.

    `costs` is what a recording lacks without it, `fix` a command or a sentence. Where a `required`
    one is missing, nothing can be recorded.
    """

    name: str
    state: str
    found: str
    costs: str = ""
    fix: str = ""
    required: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the checks look; the defaults are this machine."""

    root: Path = Path("/")
    release: str = field(default_factory=platform.release)
    architecture: str = field(default_factory=platform.machine)
    euid: int = field(default_factory=os.geteuid)

    def read(self, path: str) -> str | None:
        """A small file below the root, stripped, or None if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    checks: tuple[Check, ...]

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Names of what keeps `record` from using its probes."""
        return tuple(k.name for k in self.checks if k.required and k.state == MISSING)

    @property
    def can_record(self) -> bool:
        return not self.obstacles

    @property
    def verdict(self) -> str:
        """One sentence: whether `record` works here, and what a recording will lack."""
        if self.obstacles:
            return (
                f"`ttftprof record` can use no probes here: {', '.join(self.obstacles)}. "
                f"`{self._without_probes}` looks at /proc instead, which shows less."
            )
        lacking = [k.name for k in self.checks if k.state == MISSING]
        partly = [k.name for k in self.checks if k.state == DEGRADED]
        if not lacking and not partly:
            return "`ttftprof record` will work here, and nothing will be missing."
        words = ["`ttftprof record` will work here."]
        if lacking:
            words.append(f"Missing: {', '.join(lacking)}.")
        if partly:
            words.append(f"In part: {', '.join(partly)}.")
        return " ".join(words)

    @property
    def _without_probes(self) -> str:
        """What records here; what is asked before anything is touched makes it go on by itself."""
        asked = {"root", "process ids", "lockdown"}.intersection(self.obstacles)
        return "ttftprof record" if asked else "ttftprof record --loader proc"

    def as_json(self) -> dict[str, Any]:
        """`ttftprof.doctor/1`."""
        names = ("name", "state", "found", "costs", "fix", "required")
        return {
            "schema": "ttftprof.doctor/1",
            "can_record": self.can_record,
            "verdict": self.verdict,
            "checks": [{n: getattr(k, n) for n in names} for k in self.checks],
        }


def examine(machine: Machine | None = None) -> Diagnosis:
    """Runs every check, in the order a person reads them."""
    here = machine or Machine()
    checks = [
        check_kernel(here),
        check_architecture(here),
        check_privileges(here),
        check_pid_namespace(here),
        check_lockdown(here),
        check_confinement(here),
        check_btf(here),
        check_libbpf(here),
        check_objects(OBJECT if VMLINUX.exists() else OBJECT_WITHOUT_BTF),
        *check_probes(here),
        check_jit(here),
        check_ticks(),
        check_fault_address(here),
        check_statistics(),
        check_tracefs(here),
        check_pressure(here),
        check_cachestat(),
        check_pidfd(),
        check_cgroups(here),
        check_gpu(here),
        check_pyspy(),
        check_servers(),
    ]
    return Diagnosis(tuple(checks))


# -- the kernel and the right to use it -------------------------------------------------------


def parse_release(release: str) -> tuple[int, int] | None:
    """(6, 18) of "6.18.44-fc", or None."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else None


def check_kernel(machine: Machine) -> Check:
    version = parse_release(machine.release)
    if version is None or version >= MINIMUM_KERNEL:
        return Check("kernel", OK, machine.release, required=True)
    return Check(
        "kernel",
        MISSING,
        f"{machine.release}, older than {MINIMUM}",
        "the probes are refused",
        f"boot a kernel {MINIMUM} or newer (a distribution's hardware-enablement or backports one)",
        required=True,
    )


def check_architecture(machine: Machine) -> Check:
    known = machine.architecture in ARCHITECTURES
    return Check(
        "architecture",
        OK if known else MISSING,
        machine.architecture,
        "" if known else "system calls of this machine are not known to the probes",
        "" if known else f"record on one of: {', '.join(ARCHITECTURES)}",
        required=True,
    )


def check_privileges(machine: Machine) -> Check:
    held = effective_capabilities(machine.read("proc/self/status") or "")
    lacking = sorted(NEEDED - held)
    if machine.euid != 0:
        return Check(
            "root",
            MISSING,
            f"user id {machine.euid}",
            "the kernel lets nobody else load probes",
            f"sudo {shlex.join(own_command())}",
            required=True,
        )
    if _in_user_namespace(machine):
        return Check(
            "root",
            MISSING,
            "root of a user namespace only (a rootless container)",
            "the kernel does not let this root load probes",
            "run ttftprof on the host, or in a container that is not rootless",
            required=True,
        )
    if lacking:
        return Check(
            "root",
            MISSING,
            f"root without {', '.join(lacking)} (a container?)",
            "the probes cannot be loaded, or not be tied to the server's files",
            "run on the host, or the container with --privileged --pid=host",
            required=True,
        )
    return Check("root", OK, "root, with all capabilities that matter", required=True)


def _in_user_namespace(machine: Machine) -> bool:
    mapping = (machine.read("proc/self/uid_map") or "").split()
    return bool(mapping) and mapping != ["0", "0", "4294967295"]


def own_command() -> list[str]:
    """How this program was called, without its options: for messages."""
    name = Path(sys.argv[0]).name
    return (
        ["ttftprof", "doctor"] if name != "__main__.py" else ["python", "-m", "ttftprof", "doctor"]
    )


def check_pid_namespace(machine: Machine) -> Check:
    if has_host_pids(machine.root / "proc"):
        return Check("process ids", OK, "those of the host", required=True)
    return Check(
        "process ids",
        MISSING,
        "a process namespace of its own (a container)",
        "the kernel's process ids are not the ones seen here, so nothing can be followed",
        "run on the host, or the container with --pid=host",
        required=True,
    )


def check_lockdown(machine: Machine) -> Check:
    text = machine.read("sys/kernel/security/lockdown")
    found = re.search(r"\[(\w+)\]", text or "")
    level = found[1] if found else "none"
    if level != "confidentiality":
        return Check("lockdown", OK, level, required=True)
    return Check(
        "lockdown",
        MISSING,
        level,
        "the kernel shows its memory to no probe",
        "boot without lockdown=confidentiality (integrity, which Secure Boot sets, is fine)",
        required=True,
    )


def check_confinement(machine: Machine) -> Check:
    """Nothing is missing while the probes load; if they do not, this is who may forbid it."""
    found = [guard.what for guard in guards(machine.root)]
    return Check("confinement", OK, "; ".join(found) or "none by seccomp, SELinux or AppArmor")


def check_btf(machine: Machine) -> Check:
    path = machine.root / "sys/kernel/btf/vmlinux"
    try:
        size = path.stat().st_size
    except OSError:
        return _without_btf(machine)
    return Check("BTF", OK, f"{size / (1 << 20):.1f} MiB, for the loader libbpf", required=True)


def _without_btf(machine: Machine) -> Check:
    """Then the probes are fitted to the kernel by its headers, compiled by bcc."""
    chosen = "no /sys/kernel/btf/vmlinux, so the loader is bcc"
    lacking, wanted = [], []
    if bcc_folder(machine.root / "usr") is None:
        lacking.append("its Python module")
        wanted.append(install_command(bcc_packages(), machine.root))
    if not has_headers(machine.root, machine.release):
        lacking.append(f"the headers of {machine.release}")
        wanted.append(install_command(header_packages(machine.release), machine.root))
    if wanted:
        return Check(
            "BTF",
            MISSING,
            f"{chosen}, and it lacks {' and '.join(lacking)}",
            "the probes cannot be fitted to this kernel",
            f"{'; '.join(wanted)}; for a kernel that you built, BCC_KERNEL_SOURCE=its source; "
            "or a kernel built with CONFIG_DEBUG_INFO_BTF=y",
            required=True,
        )
    return Check(
        "BTF",
        DEGRADED,
        f"{chosen}, which compiles the kernel's headers",
        "recording begins seconds later, and FUSE requests are unknown",
        "a distribution kernel (all since 2021 carry it)",
        required=True,
    )


# -- the loader and the probes ----------------------------------------------------------------


def check_libbpf(machine: Machine) -> Check:
    try:
        version = libbpf.library().libbpf_version_string().decode()
    except (TtftprofError, AttributeError) as error:
        return Check(
            "libbpf",
            MISSING,
            "libbpf.so.1 is not installed" if isinstance(error, TtftprofError) else "too old",
            "nothing loads the probes",
            install_command(libbpf_packages(), machine.root),
            required=True,
        )
    return Check("libbpf", OK, version, required=True)


def check_objects(path: Path) -> Check:
    if path.exists():
        return Check("probe objects", OK, f"{path.stat().st_size >> 10} KiB", required=True)
    return Check(
        "probe objects",
        MISSING,
        f"{path.name} was not built",
        "there is nothing to load",
        "scripts/setup in a checkout; else install the package with clang and libbpf-dev present",
        required=True,
    )


def try_probes() -> dict[str, ProbeState]:
    """Loads and attaches every probe, and takes all away again; what became of each.

    Raises `TtftprofError` or `BpfError` where nothing can be loaded.
    """
    check_permitted()
    session = ProbeSession(Settings(event_ring_bytes=_SMALL_RING_BYTES, text_ring_bytes=4096))
    try:
        session.load()
        session.attach()
        return session.states | session.if_needed
    finally:
        session.close()


def known_tracepoints(probes: Sequence[Probe] = PROBES) -> dict[str, bool]:
    """Whether this kernel's BTF has each tracepoint the probes need; without BTF, only a try
    tells."""
    if not VMLINUX.exists():
        return {n: True for probe in probes for n, _ in probe.needs}
    kernel = KernelTypes()
    try:
        return {
            n: kernel.has_tracepoint(n, probe.modules) for probe in probes for n, _ in probe.needs
        }
    finally:
        kernel.close()


def check_probes(
    machine: Machine,
    attempt: Callable[[], dict[str, ProbeState]] = try_probes,
    tracepoints: Callable[[], dict[str, bool]] = known_tracepoints,
) -> list[Check]:
    """A row a probe: by loading it, or without root by what the kernel's types promise."""
    try:
        present = tracepoints()
    except (TtftprofError, OSError) as error:
        return [_all_probes_refused(error, machine.root)]
    mounted = {fields[2] for fields in _mounts(machine)}
    if machine.euid != 0:
        return [_not_needed(p, mounted) or _promised(p, present) for p in PROBES]
    try:
        states = attempt()
    except (TtftprofError, OSError) as error:
        return [_all_probes_refused(error, machine.root)]
    return [_not_needed(p, mounted) or _tried(p, states[p.stem], present) for p in PROBES]


def _not_needed(probe: Probe, mounted: set[str]) -> Check | None:
    """A probe for file systems of which none is mounted is nothing to miss."""
    if not probe.filesystems or any(map(probe.serves, mounted)):
        return None
    return Check(_title(probe), OK, f"not needed: no {', '.join(sorted(probe.filesystems))} here")


def _all_probes_refused(error: Exception, root: Path) -> Check:
    fix = getattr(error, "next_step", "")
    if isinstance(error, NotPermitted) or getattr(error, "errno", 0) == errno.EPERM:
        remedies = [guard.remedy for guard in guards(root)]
        fix = "; ".join(remedies) or "run as root, on the host; see the rows above"
    return Check("probes", MISSING, str(error), "nothing can be recorded", fix, required=True)


def _absent_needs(probe: Probe, present: dict[str, bool]) -> list[str]:
    return [f"{n} (kernel {since})" for n, since in probe.needs if not present.get(n)]


def _promised(probe: Probe, present: dict[str, bool]) -> Check:
    absent = _absent_needs(probe, present)
    if not absent:
        return Check(_title(probe), OK, "should load (not tried)", required=probe.required)
    whole = len(absent) == len(probe.needs)
    found = f"no tracepoint {', '.join(absent)}"
    return _lacking(probe, absent, found, probe.cost_of_absence, whole)


def _tried(probe: Probe, state: ProbeState, present: dict[str, bool]) -> Check:
    if state.state == "ok":
        return Check(_title(probe), OK, "loaded and attached", required=probe.required)
    # A function may stand in for a tracepoint: what is missed the state says.
    missed = {name for name, _ in probe.needs if re.search(rf"\b{name}\b", state.reason)}
    absent = [n for n in _absent_needs(probe, present) if n.split()[0] in missed]
    return _lacking(probe, absent, state.reason, state.lost, state.state == "absent")


def _lacking(probe: Probe, absent: list[str], found: str, costs: str, whole: bool) -> Check:
    fix = f"a kernel with {', '.join(absent)}" if absent else "the reason is the kernel's own"
    return Check(
        _title(probe),
        MISSING if whole or probe.required else DEGRADED,
        found,
        costs,
        fix,
        probe.required,
    )


def _title(probe: Probe) -> str:
    return f"probe: {probe.title}"


def check_jit(machine: Machine) -> Check:
    value = machine.read("proc/sys/net/core/bpf_jit_enable")
    if value != "0":
        return Check("BPF compiler", OK, "on")
    return Check(
        "BPF compiler",
        DEGRADED,
        "off: probes are interpreted",
        "each probe costs the server several times as much",
        "sysctl net.core.bpf_jit_enable=1",
    )


# -- what the collector uses besides ----------------------------------------------------------


def _reason(error: Exception) -> str:
    """The system's word for it; `KeyError` is a machine whose call numbers are not known."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return "not known for this architecture" if isinstance(error, KeyError) else str(error)


def check_ticks(open_event: Callable[[int, int], int] = libbpf.open_clock_event) -> Check:
    try:
        os.close(open_event(0, 1))
    except (OSError, KeyError) as error:
        return Check(
            "CPU ticks",
            MISSING,
            f"perf_event_open: {_reason(error)}",
            "CPU time in page faults cannot be told from computing",
            "run as root; in a container allow perf_event_open (--privileged)",
        )
    return Check("CPU ticks", OK, "perf_event_open works")


def check_fault_address(
    machine: Machine,
    find: Callable[[str], tuple[int, int] | None] = kernel_function,
) -> Check:
    if find("handle_mm_fault"):
        return Check("kernel addresses", OK, "shown in /proc/kallsyms")
    hidden = machine.read("proc/sys/kernel/kptr_restrict") or "?"
    fix = "sysctl kernel.kptr_restrict=1" if hidden == "2" else "run as root"
    return Check(
        "kernel addresses",
        DEGRADED,
        f"hidden (kernel.kptr_restrict is {hidden})",
        "CPU time in page faults counts as other kernel time",
        fix,
    )


def check_statistics(enable: Callable[[], int] = libbpf.enable_stats) -> Check:
    try:
        os.close(enable())
    except (OSError, KeyError) as error:
        return Check(
            "BPF statistics",
            MISSING,
            _reason(error),
            "a recording does not say what the probes themselves cost",
            "run as root with CAP_SYS_ADMIN",
        )
    return Check("BPF statistics", OK, "the kernel times the probes in short windows")


def _mounts(machine: Machine) -> list[list[str]]:
    """[source, point, type, …] of every mount this process sees."""
    lines = (machine.read("proc/self/mounts") or "").splitlines()
    return [fields for fields in map(str.split, lines) if len(fields) > 2]


def check_tracefs(machine: Machine) -> Check:
    points = [fields[1] for fields in _mounts(machine) if fields[2] == "tracefs"]
    if points:
        return Check("tracefs", OK, points[0])
    return Check(
        "tracefs",
        MISSING,
        "not mounted",
        "record layouts of file-system tracepoints (NFS, SMB) cannot be looked up; the rest works",
        "mount -t tracefs tracefs /sys/kernel/tracing",
    )


def check_pressure(machine: Machine) -> Check:
    if machine.read("proc/pressure/memory"):
        return Check("pressure (PSI)", OK, "/proc/pressure")
    return Check(
        "pressure (PSI)",
        MISSING,
        "off",
        "the whole machine's shortage of memory and I/O is not told",
        "boot with psi=1, on a kernel with CONFIG_PSI=y",
    )


class _CachestatRange(c.Structure):
    _fields_ = (("offset", c.c_uint64), ("length", c.c_uint64))


def call_cachestat() -> int:
    """0, or the errno of cachestat(2) on a file of our own."""
    libc = c.CDLL(None, use_errno=True)
    whole, answer = _CachestatRange(0, 0), (c.c_uint64 * 5)()
    with tempfile.TemporaryFile() as file:
        failed = libc.syscall(_NR_CACHESTAT, file.fileno(), c.byref(whole), c.byref(answer), 0)
    return c.get_errno() if failed else 0


def check_cachestat(call: Callable[[], int] = call_cachestat) -> Check:
    number = call()
    if not number:
        return Check("cachestat", OK, "works")
    return Check(
        "cachestat",
        MISSING,
        os.strerror(number),
        "what of a file is cached before the server opens it must be asked by mapping it",
        "kernel 6.5 or newer; under seccomp, allow the call",
    )


def check_pidfd(open_pidfd: Callable[[int], int] = os.pidfd_open) -> Check:
    try:
        os.close(open_pidfd(os.getpid()))
    except OSError as error:
        return Check(
            "pidfd",
            MISSING,
            _reason(error),
            "a process that ends while it is looked up may be taken for another of its number",
            "kernel 5.3 or newer; under seccomp, allow pidfd_open",
        )
    return Check("pidfd", OK, "works")


def check_cgroups(machine: Machine) -> Check:
    base = machine.root / "sys/fs/cgroup"
    if (base / "cgroup.controllers").exists():
        return Check("control groups", OK, "v2")
    if (machine.root / "proc/self/cgroup").exists():
        return Check("control groups", OK, "v1 with v2" if (base / "unified").exists() else "v1")
    return Check(
        "control groups",
        MISSING,
        "none",
        "--unit, --container and --cgroup find nothing",
        "name the server with --pid, --port or --name",
    )


# -- devices, helpers, servers ----------------------------------------------------------------


def display_vendors(machine: Machine) -> set[str]:
    """PCI vendors ("0x10de") of the display and accelerator devices (class 03 and 12)."""
    vendors = set()
    for device in (machine.root / "sys/bus/pci/devices").glob("*"):
        try:
            kind = (device / "class").read_text().strip()
            if kind.startswith(("0x03", "0x12")):
                vendors.add((device / "vendor").read_text().strip())
        except OSError:
            continue
    return vendors


def ask_gpus() -> str:
    """Driver and devices of each make in one line, "" if there is none to ask. Raises `GpuAbsent`
    for a library that does not work."""
    vendors = [vendor for vendor in (nvml.find(), drm.find()) if vendor is not None]
    return _in_time(lambda: "; ".join(map(_describe_gpus, vendors)))


_DRIVER_ANSWERS_S = 10.0  # waking a driver takes seconds
_HANGS = "the driver does not answer"


def _in_time(ask: Callable[[], str], within_s: float = _DRIVER_ANSWERS_S) -> str:
    """What it answers. Raises what it raises, and `GpuAbsent` for a driver that hangs."""
    answers: list[str | Exception] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(within_s)
    answer = answers[0] if answers else GpuAbsent(_HANGS)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _describe_gpus(vendor: Vendor) -> str:
    devices = vendor.open()
    vendor.close()
    names = ", ".join(str(device["name"]) for device in devices)
    return f"{vendor.name}: driver {devices[0].get('driver') or 'unknown'}, {names}"


_NVIDIA = "0x10de"


def check_gpu(machine: Machine, ask: Callable[[], str] = ask_gpus) -> Check:
    cost = "GPU memory, load and copies are not sampled"
    try:
        found, reason = ask(), "NVML Shared Library Not Found"
    except GpuAbsent as absent:
        found, reason = "", absent.reason
    except ImportError:
        fix = "pip install nvidia-ml-py"
        return Check("GPU", MISSING, "the Python package of NVML is not installed", cost, fix)
    if found:
        return Check("GPU", OK, found)
    if _NVIDIA in display_vendors(machine):
        return Check("GPU", MISSING, f"NVIDIA, but {reason}", cost, _nvml_fix(reason, machine))
    return Check("GPU", OK, "none here, so nothing to sample")


def _nvml_fix(reason: str, machine: Machine) -> str:
    if reason == _HANGS:
        return "dmesg | grep NVRM tells why; a reboot mostly helps"
    if "Driver Not Loaded" in reason:
        return "modprobe nvidia (nvidia-smi tells more)"
    names = {"apt": "libnvidia-ml1", "dnf": "nvidia-driver-NVML", "pacman": "nvidia-utils"}
    return f"{install_command(names, machine.root)}; in a container: --gpus all"


def find_program(name: str) -> str | None:
    """A program beside this interpreter, or on PATH."""
    beside = str(Path(sys.executable).parent)
    return shutil.which(name, path=os.pathsep.join([beside, os.environ.get("PATH", "")]))


def check_pyspy(find: Callable[[str], str | None] = find_program) -> Check:
    path = find("py-spy")
    if path:
        return Check("py-spy", OK, path)
    return Check(
        "py-spy",
        MISSING,
        "not found",
        "Python servers (vLLM, SGLang, transformers) show no Python stacks",
        "pip install py-spy",
    )


def check_servers(find: Callable[[], Iterable[ProcessFacts]] = running_servers) -> Check:
    servers = list(find())
    name = "running servers"
    if len(servers) == 1:
        return Check(name, OK, f"{servers[0].engine}: {describe(servers[0])}")
    if not servers:
        return Check(
            name,
            MISSING,
            "none that ttftprof knows",
            "`record` needs to be told what to record",
            "start the server, or give --pid, --port, --name or a command",
        )
    listed = "\n".join(f"{s.engine}: {describe(s)}" for s in servers)
    return Check(
        name,
        DEGRADED,
        f"{len(servers)}:\n{listed}",
        "`record` needs to be told which",
        "give --pid, --port or --name",
    )
