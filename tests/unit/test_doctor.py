"""The doctor finds each thing that may be missing, says what it costs, and never breaks."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ttftprof import doctor
from ttftprof.cli.doctor import print_diagnosis
from ttftprof.doctor import Check, Diagnosis, Machine
from ttftprof.errors import NotPermitted, Unsupported
from ttftprof.kernel import headers, permission
from ttftprof.kernel.libbpf import BpfError
from ttftprof.kernel.session import ProbeState
from ttftprof.kernel.table import PROBES
from ttftprof.packages import install_command
from ttftprof.sources import drm
from ttftprof.sources.gpu import GpuAbsent
from ttftprof.sources.processes import ProcessFacts
from unit.trees import unpack

ALL = {name: True for probe in PROBES for name, _ in probe.needs}
NOBODY = 65534


def machine(
    tmp_path: Path, files: dict[str, str] | None = None, release: str = "6.18.1", euid: int = 0
) -> Machine:
    """A machine whose /proc and /sys hold these files only."""
    for name, content in (files or {}).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return Machine(tmp_path, release, "x86_64", euid)


def assert_helps(check: Check, state: str) -> None:
    """A finding that is not ok says what it costs and what to do."""
    assert check.state == state
    assert check.found
    assert check.costs
    assert check.fix


# -- the kernel and the right to use it -------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "expected"),
    [("6.18.44-fc", (6, 18)), ("5.4", (5, 4)), ("7.0-rc1", (7, 0)), ("weird", None)],
)
def test_release(release: str, expected: tuple[int, int] | None) -> None:
    assert doctor.parse_release(release) == expected


def test_an_old_kernel_is_told_from_a_new_one(tmp_path: Path) -> None:
    assert doctor.check_kernel(machine(tmp_path)).state == "ok"
    assert doctor.check_kernel(machine(tmp_path, release="unheard-of")).state == "ok"
    old = doctor.check_kernel(machine(tmp_path, release="5.10.0-28-amd64"))
    assert_helps(old, "missing")
    assert "5.15" in old.fix


def test_an_unknown_architecture(tmp_path: Path) -> None:
    assert_helps(doctor.check_architecture(Machine(tmp_path, "6.1", "riscv64", 0)), "missing")


STATUS = "Name:\tx\nCapEff:\t{:016x}\n"
INITIAL = "         0          0 4294967295\n"
EVERYTHING = (1 << 41) - 1


@pytest.mark.parametrize(
    ("bits", "held"),
    [
        (0, set()),
        (1 << 39, {"CAP_BPF"}),
        (1 << 21, {"CAP_SYS_ADMIN", "CAP_BPF", "CAP_PERFMON"}),
        (EVERYTHING, set(permission.CAPABILITIES)),
    ],
)
def test_capabilities(bits: int, held: set[str]) -> None:
    assert permission.effective_capabilities(STATUS.format(bits)) == held


def test_capabilities_of_an_unreadable_status() -> None:
    assert permission.effective_capabilities("") == set()


@pytest.mark.parametrize(
    ("bits", "uid_map", "euid", "says"),
    [
        (0, INITIAL, 1000, "user id 1000"),
        (EVERYTHING, "0 1000 1", 0, "user namespace"),
        (1 << 21, INITIAL, 0, "CAP_SYS_PTRACE"),
        (1 << 19 | 1 << 38, INITIAL, 0, "CAP_BPF"),
    ],
)
def test_privileges_that_do_not_do(
    tmp_path: Path, bits: int, uid_map: str, euid: int, says: str
) -> None:
    files = {"proc/self/status": STATUS.format(bits), "proc/self/uid_map": uid_map}
    check = doctor.check_privileges(machine(tmp_path, files, euid=euid))
    assert_helps(check, "missing")
    assert check.required
    assert says in check.found


def test_root_is_enough(tmp_path: Path) -> None:
    files = {"proc/self/status": STATUS.format(EVERYTHING), "proc/self/uid_map": INITIAL}
    assert doctor.check_privileges(machine(tmp_path, files)).state == "ok"


@pytest.mark.parametrize(
    ("inode", "state"), [(4026531836, "ok"), (4026532199, "missing"), (None, "ok")]
)
def test_a_process_namespace_of_its_own(tmp_path: Path, inode: int | None, state: str) -> None:
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    if inode:
        (tmp_path / "proc/self/ns/pid").symlink_to(f"pid:[{inode}]")
    check = doctor.check_pid_namespace(machine(tmp_path))
    assert check.state == state
    assert check.required


@pytest.mark.parametrize(
    ("text", "state", "found"),
    [
        ("none [integrity] confidentiality\n", "ok", "integrity"),
        ("none integrity [confidentiality]\n", "missing", "confidentiality"),
        (None, "ok", "none"),
    ],
)
def test_lockdown(tmp_path: Path, text: str | None, state: str, found: str) -> None:
    files = {"sys/kernel/security/lockdown": text} if text else None
    check = doctor.check_lockdown(machine(tmp_path, files))
    assert (check.state, check.found) == (state, found)


CONFINED = {
    "seccomp": ({"proc/self/status": "Name:\tx\nSeccomp:\t2\n"}, "seccomp", "SystemCallFilter="),
    "SELinux": (
        {
            "sys/fs/selinux/enforce": "1",
            "proc/self/attr/current": "system_u:system_r:container_t:s0:c1,c2\0",
        },
        "container_t:s0:c1,c2",
        "ausearch -m avc",
    ),
    "AppArmor": (
        {"proc/self/attr/current": "docker-default (enforce)\n"},
        "profile docker-default",
        "apparmor=unconfined",
    ),
    "AppArmor's own file": (
        {"proc/self/attr/apparmor/current": "snap.x.y (enforce)\n"},
        "profile snap.x.y",
        "apparmor=unconfined",
    ),
    "lockdown": (
        {"sys/kernel/security/lockdown": "none integrity [confidentiality]\n"},
        "lockdown",
        "boot without",
    ),
}
FREE = {
    "nothing": {},
    "no filter": {"proc/self/status": "Seccomp:\t0\n"},
    "SELinux, permissive": {
        "sys/fs/selinux/enforce": "0",
        "proc/self/attr/current": "system_u:system_r:container_t:s0",
    },
    "SELinux, unconfined": {
        "sys/fs/selinux/enforce": "1",
        "proc/self/attr/current": "unconfined_u:unconfined_r:unconfined_t:s0-s0:c0.c1023",
    },
    "AppArmor, unconfined": {"proc/self/attr/current": "unconfined\n"},
    "AppArmor, complaining": {"proc/self/attr/current": "x (complain)\n"},
}


@pytest.mark.parametrize(("files", "found", "remedy"), CONFINED.values(), ids=CONFINED)
def test_who_forbids_the_probes_is_named_with_the_remedy(
    tmp_path: Path, files: dict[str, str], found: str, remedy: str
) -> None:
    def denied() -> dict[str, ProbeState]:
        raise BpfError("load the probes", errno.EPERM)

    here = machine(tmp_path, files)
    assert found in doctor.check_confinement(here).found
    (check,) = doctor.check_probes(here, denied, lambda: ALL)
    assert_helps(check, "missing")
    assert remedy in check.fix


@pytest.mark.parametrize("files", FREE.values(), ids=FREE)
def test_what_confines_nobody_is_not_blamed(tmp_path: Path, files: dict[str, str]) -> None:
    assert doctor.check_confinement(machine(tmp_path, files)).found.startswith("none")


def test_btf(tmp_path: Path) -> None:
    assert_helps(doctor.check_btf(machine(tmp_path)), "missing")
    with_types = machine(tmp_path, {"sys/kernel/btf/vmlinux": "x" * 3000})
    assert doctor.check_btf(with_types).state == "ok"


def test_without_btf_headers_and_bcc_will_do(tmp_path: Path) -> None:
    release = {"etc/os-release": "ID=fedora\n"}
    wanted = doctor.check_btf(machine(tmp_path, release, release="6.1.0-x86_64"))
    assert_helps(wanted, "missing")
    assert "bcc, and it lacks its Python module and the headers of 6.1.0-x86_64" in wanted.found
    assert "dnf install python3-bcc; dnf install kernel-devel-6.1.0-x86_64" in wanted.fix
    found = {
        "usr/lib/python3.12/site-packages/bcc/libbcc.py": "",
        "lib/modules/6.1.0-x86_64/build/Makefile": "",
    }
    chosen = doctor.check_btf(machine(tmp_path, found, release="6.1.0-x86_64"))
    assert_helps(chosen, "degraded")
    assert "the loader is bcc" in chosen.found


DISTRIBUTIONS = [
    ("ID=debian", "6.1.0-9-amd64", "apt-get install python3-bpfcc", "linux-headers-6.1.0-9-amd64"),
    ("ID=ubuntu", "6.8.0-45-generic", "apt-get install python3-bpfcc",
     "linux-headers-6.8.0-45-generic"),
    ('ID=linuxmint\nID_LIKE="ubuntu debian"', "6.8.0-45-generic", "apt-get install python3-bpfcc",
     "linux-headers-6.8.0-45-generic"),
    ("ID=fedora", "6.8.9-300.fc40.x86_64", "dnf install python3-bcc",
     "kernel-devel-6.8.9-300.fc40.x86_64"),
    ('ID="rocky"\nID_LIKE="rhel centos fedora"', "5.14.0-427.el9.x86_64", "dnf install python3-bcc",
     "kernel-devel-5.14.0-427.el9.x86_64"),
    ("ID=opensuse-tumbleweed", "6.4.0-1-default", "zypper install python3-bcc",
     "kernel-default-devel"),
    ("ID=arch", "6.9.1-arch1-1", "pacman -S python-bcc", "linux-headers"),
    ("ID=arch", "6.6.30-1-lts", "pacman -S python-bcc", "linux-lts-headers"),
    ("ID=alpine", "6.6.30-0-lts", "apk add py3-bcc", "linux-lts-dev"),
    ("ID=alpine", "6.6.30-0-virt", "apk add py3-bcc", "linux-virt-dev"),
]  # fmt: skip


@pytest.mark.parametrize(("os_release", "release", "bcc", "package"), DISTRIBUTIONS)
def test_bcc_and_headers_are_named_as_the_distribution_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    os_release: str,
    release: str,
    bcc: str,
    package: str,
) -> None:
    """By `doctor`, and by `record` where it finds one of them missing."""
    here = machine(tmp_path, {"etc/os-release": f"{os_release}\n"}, release=release)
    installs = f"{bcc.rpartition(' ')[0]} {package}"
    assert f"{bcc}; {installs};" in doctor.check_btf(here).fix
    monkeypatch.setattr(headers, "install_command", partial(install_command, root=here.root))
    for folder, wanted in ((None, bcc), (tmp_path, installs)):
        monkeypatch.setattr(headers, "bcc_folder", lambda folder=folder: folder)
        monkeypatch.setattr(headers, "has_headers", lambda: False)
        with pytest.raises(Unsupported) as raised:
            headers.compiled_types(release)
        assert raised.value.next_step.startswith(f"{wanted} (")


# -- the loader and the probes ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "command"),
    [
        ("ID=debian\n", "apt-get install libbpf1"),
        ('ID=linuxmint\nID_LIKE="ubuntu debian"\n', "apt-get install libbpf1"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', "dnf install libbpf"),
        ('ID="opensuse-leap"\nID_LIKE="suse opensuse"\n', "apt-get install libbpf1"),
        ("ID=unheard-of\n", "apt-get install libbpf1"),
        (None, "apt-get install libbpf1"),
    ],
)
def test_the_install_command_is_the_distributions_own(
    tmp_path: Path, release: str | None, command: str
) -> None:
    here = machine(tmp_path, {"etc/os-release": release} if release else None)
    assert install_command({"apt": "libbpf1", "dnf": "libbpf"}, here.root) == command


def test_missing_objects(tmp_path: Path) -> None:
    assert_helps(doctor.check_objects(tmp_path / "probes.bpf.o"), "missing")
    (tmp_path / "probes.bpf.o").touch()
    assert doctor.check_objects(tmp_path / "probes.bpf.o").state == "ok"


def states(**changed: ProbeState) -> dict[str, ProbeState]:
    return {probe.stem: ProbeState(probe.stem, "ok") for probe in PROBES} | changed


def by_stem(checks: list[Check]) -> dict[str, Check]:
    return dict(zip((probe.stem for probe in PROBES), checks, strict=True))


MOUNTS = "nas:/models /m nfs4 ro 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n"


def test_every_probe_has_a_row(tmp_path: Path) -> None:
    checks = doctor.check_probes(machine(tmp_path), states, lambda: ALL)
    assert [check.state for check in checks] == ["ok"] * len(PROBES)
    assert [check.required for check in checks] == [probe.required for probe in PROBES]


def test_a_refused_probe_says_why_and_what_that_costs(tmp_path: Path) -> None:
    refused = ProbeState("block", "degraded", "invalid access to packet", "a queue depth")
    checks = doctor.check_probes(machine(tmp_path), lambda: states(block=refused), lambda: ALL)
    check = by_stem(checks)["block"]
    assert_helps(check, "degraded")
    assert check.found == "invalid access to packet"
    assert check.costs == "a queue depth"


def test_a_function_stands_in_for_a_tracepoint(tmp_path: Path) -> None:
    """What is missed is what the probe says, not each tracepoint that this kernel lacks."""
    lost = "answers by sendfile or io_uring are not seen"
    reason = "this kernel has no tracepoint sock_send_length"
    degraded = ProbeState("sockets", "degraded", reason, lost)
    present = ALL | {"sk_data_ready": False, "sock_send_length": False}
    checks = doctor.check_probes(
        machine(tmp_path), lambda: states(sockets=degraded), lambda: present
    )
    check = by_stem(checks)["sockets"]
    assert (check.state, check.costs) == ("degraded", lost)
    assert check.fix == "a kernel with sock_send_length (kernel 6.3)"


def test_a_missing_tracepoint_names_the_kernel_that_has_it(tmp_path: Path) -> None:
    here = machine(tmp_path, euid=1000)
    present = ALL | {"mm_filemap_fault": False, "mm_filemap_map_pages": False}
    checks = by_stem(doctor.check_probes(here, states, lambda: present))
    assert_helps(checks["faults"], "missing")
    assert "mm_filemap_fault (kernel 6.12)" in checks["faults"].fix
    assert checks["pagecache"].state == "ok"
    partly = ALL | {"mm_filemap_get_pages": False}
    checks = by_stem(doctor.check_probes(here, states, lambda: partly))
    assert_helps(checks["pagecache"], "degraded")


@pytest.mark.parametrize("euid", [0, 1000])
def test_a_file_systems_probe_is_missed_only_where_one_is_mounted(
    tmp_path: Path, euid: int
) -> None:
    present = dict.fromkeys(ALL, False) | {"sched_process_fork": True}
    absent = {
        p.stem: ProbeState(p.stem, "absent", "the module was not loaded", p.cost_of_absence)
        for p in PROBES
        if p.filesystems
    }
    here = machine(tmp_path, {"proc/self/mounts": MOUNTS}, euid=euid)
    checks = by_stem(doctor.check_probes(here, lambda: states(**absent), lambda: present))
    assert_helps(checks["nfs"], "missing")
    assert checks["smb"].state == "ok"
    assert "no cifs, smb3 here" in checks["smb"].found


def test_without_root_nothing_is_loaded(tmp_path: Path) -> None:
    def attempt() -> dict[str, ProbeState]:
        raise AssertionError("it was tried")

    checks = doctor.check_probes(machine(tmp_path, euid=1000), attempt, lambda: ALL)
    needed = {c.found for c in checks if not c.found.startswith("not needed")}
    assert needed == {"should load (not tried)"}


@pytest.mark.parametrize(
    "error",
    [
        NotPermitted("the kernel does not let this user load BPF programs", "sudo"),
        Unsupported("the kernel refuses the probes: …", "5.15", "`ttftprof doctor`"),
        BpfError("load", errno.EPERM),
    ],
    ids=["not permitted", "unsupported", "refused"],
)
def test_probes_that_all_fail_are_one_obstacle(tmp_path: Path, error: Exception) -> None:
    def attempt() -> dict[str, ProbeState]:
        raise error

    checks = doctor.check_probes(machine(tmp_path), attempt, lambda: ALL)
    assert [check.name for check in checks] == ["probes"]
    assert_helps(checks[0], "missing")
    assert not Diagnosis(tuple(checks)).can_record


# -- what the collector uses besides ----------------------------------------------------------


def raising(error: Exception) -> Callable[..., int]:
    def call(*_: object) -> int:
        raise error

    return call


def opened(*_: object) -> int:
    return os.open(os.devnull, os.O_RDONLY)


def test_calls_that_are_refused(tmp_path: Path) -> None:
    refused = raising(BpfError("perf_event_open", errno.EACCES))
    ticks = doctor.check_ticks(refused)
    assert_helps(ticks, "missing")
    assert ticks.found == "perf_event_open: Permission denied"
    assert_helps(doctor.check_ticks(raising(KeyError("riscv64"))), "missing")
    assert_helps(doctor.check_statistics(refused), "missing")
    assert_helps(doctor.check_pidfd(raising(OSError(errno.ENOSYS, "no"))), "missing")
    assert_helps(doctor.check_cachestat(lambda: errno.ENOSYS), "missing")
    assert_helps(doctor.check_fault_address(machine(tmp_path), lambda _: None), "degraded")


def test_calls_that_work_leave_no_descriptor(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert doctor.check_ticks(opened).state == "ok"
    assert doctor.check_statistics(opened).state == "ok"
    assert doctor.check_pidfd(opened).state == "ok"
    assert doctor.check_cachestat(lambda: 0).state == "ok"
    assert doctor.check_fault_address(machine(tmp_path), lambda _: (1, 2)).state == "ok"
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(("value", "fix"), [("2", "sysctl"), ("1", "root"), (None, "root")])
def test_hidden_addresses(tmp_path: Path, value: str | None, fix: str) -> None:
    here = machine(tmp_path, {"proc/sys/kernel/kptr_restrict": value} if value else None)
    assert fix in doctor.check_fault_address(here, lambda _: None).fix


def test_tracefs(tmp_path: Path) -> None:
    assert_helps(doctor.check_tracefs(machine(tmp_path)), "missing")
    mounts = "proc /proc proc rw 0 0\nt /sys/kernel/tracing tracefs rw 0 0\n"
    check = doctor.check_tracefs(machine(tmp_path, {"proc/self/mounts": mounts}))
    assert (check.state, check.found) == ("ok", "/sys/kernel/tracing")


def test_pressure(tmp_path: Path) -> None:
    assert_helps(doctor.check_pressure(machine(tmp_path)), "missing")
    here = machine(tmp_path, {"proc/pressure/memory": "some avg10=0.00"})
    assert doctor.check_pressure(here).state == "ok"


def test_jit(tmp_path: Path) -> None:
    assert doctor.check_jit(machine(tmp_path)).state == "ok"
    off = machine(tmp_path, {"proc/sys/net/core/bpf_jit_enable": "0\n"})
    assert_helps(doctor.check_jit(off), "degraded")


def test_control_groups(tmp_path: Path) -> None:
    assert_helps(doctor.check_cgroups(machine(tmp_path)), "missing")
    first = machine(tmp_path, {"proc/self/cgroup": "4:memory:/x"})
    assert doctor.check_cgroups(first).found == "v1"
    both = machine(tmp_path, {"sys/fs/cgroup/unified/cgroup.procs": ""})
    assert doctor.check_cgroups(both).found == "v1 with v2"
    second = machine(tmp_path, {"sys/fs/cgroup/cgroup.controllers": "memory"})
    assert doctor.check_cgroups(second).found == "v2"


# -- devices, helpers, servers ----------------------------------------------------------------


def nvml_says(answer: str | Exception) -> Callable[[], str]:
    def ask() -> str:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


def with_device(tmp_path: Path, vendor: str, kind: str = "0x030200") -> Machine:
    device = "sys/bus/pci/devices/0000:01:00.0"
    return machine(tmp_path, {f"{device}/vendor": vendor, f"{device}/class": kind})


def test_no_gpu_is_nothing_to_miss(tmp_path: Path) -> None:
    absent = nvml_says("")
    assert doctor.check_gpu(machine(tmp_path), absent).state == "ok"
    network_card = with_device(tmp_path, "0x10de", kind="0x020000")
    assert doctor.check_gpu(network_card, absent).state == "ok"


def test_a_gpu_without_its_library(tmp_path: Path) -> None:
    here = with_device(tmp_path, "0x10de")
    for answer, reason in (
        ("", "Library Not Found"),
        (GpuAbsent("Driver Not Loaded"), "Driver Not"),
    ):
        check = doctor.check_gpu(here, nvml_says(answer))
        assert_helps(check, "missing")
        assert reason in check.found
    assert "pip install" in doctor.check_gpu(here, nvml_says(ImportError("pynvml"))).fix


def test_a_driver_that_hangs_does_not_hang_the_doctor(tmp_path: Path) -> None:
    over = threading.Event()

    def asked() -> str:
        return doctor._in_time(lambda: str(over.wait()), within_s=0.01)

    check = doctor.check_gpu(with_device(tmp_path, "0x10de"), asked)
    over.set()
    assert_helps(check, "missing")
    assert (check.found, "NVRM" in check.fix) == ("NVIDIA, but the driver does not answer", True)
    with pytest.raises(ImportError):
        doctor._in_time(nvml_says(ImportError("pynvml")))
    assert doctor._in_time(lambda: "an answer") == "an answer"


def test_gpus_that_answer_or_are_of_another_make(tmp_path: Path) -> None:
    here = machine(tmp_path)
    assert "H200" in doctor.check_gpu(here, nvml_says("nvml: driver 570, H200")).found
    unpack("gpu/amdgpu", tmp_path)
    found = drm.find(tmp_path / "sys", tmp_path / "proc")
    assert found is not None
    told = doctor._describe_gpus(found)
    assert told == "drm: driver amdgpu, Radeon RX 7900 XTX"
    assert doctor.check_gpu(here, nvml_says(told)).state == "ok"


def test_pyspy() -> None:
    assert doctor.check_pyspy(lambda _: "/x/py-spy").found == "/x/py-spy"
    assert_helps(doctor.check_pyspy(lambda _: None), "missing")


def server(pid: int) -> ProcessFacts:
    argv = ["llama-server", "--port", "8080"]
    return ProcessFacts(pid, 1, "llama-server", "/x/llama-server", argv, "/", "/", 1, "llama.cpp")


def test_servers() -> None:
    assert_helps(doctor.check_servers(list), "missing")
    one = doctor.check_servers(lambda: [server(7)])
    assert one.state == "ok"
    assert "pid 7" in one.found
    assert_helps(doctor.check_servers(lambda: [server(7), server(8)]), "degraded")


# -- the whole --------------------------------------------------------------------------------

GOOD = Check("BTF", "ok", "5 MiB", required=True)
POOR = Check("tracefs", "missing", "not mounted", "layouts cannot be read", "mount -t tracefs …")
PART = Check("GPU", "degraded", "AMD [gfx]", "no samples", "none yet")
FATAL = Check("root", "missing", "user id 1000", "no probes", "sudo ttftprof doctor", True)


def test_the_verdict_says_whether_it_will_work() -> None:
    assert "nothing will be missing" in Diagnosis((GOOD,)).verdict
    lame = Diagnosis((GOOD, POOR, PART))
    assert lame.can_record
    assert lame.verdict.endswith("will work here. Missing: tracefs. In part: GPU.")
    dead = Diagnosis((GOOD, POOR, FATAL))
    assert not dead.can_record
    assert "can use no probes here: root. `ttftprof record` looks at /proc" in dead.verdict
    locked = Diagnosis((replace(FATAL, name="lockdown"), replace(FATAL, name="probes")))
    assert "here: lockdown, probes. `ttftprof record` looks at /proc" in locked.verdict
    old = Diagnosis((GOOD, replace(FATAL, name="kernel")))
    assert "`ttftprof record --loader proc` looks at /proc" in old.verdict


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_table_fits_and_is_plain_when_piped(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    long = Check("x", "missing", "a [bracket] " * 30, "costs " * 40, "do " * 50)
    out = io.StringIO()
    print_diagnosis(Diagnosis((GOOD, POOR, PART, FATAL, long)), out)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "\x1b" not in out.getvalue()
    assert lines == [line.rstrip() for line in lines]
    assert "AMD [gfx]" in out.getvalue()
    assert lines[-1].endswith("shows less.")


def run_doctor(*arguments: str, user: int | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ttftprof", "doctor", *arguments],
        cwd="/",
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_json_says_the_same_as_the_exit_code() -> None:
    done = run_doctor("--format", "json")
    report = json.loads(done.stdout)
    assert report["schema"] == "ttftprof.doctor/1"
    assert done.returncode == (0 if report["can_record"] else 5)
    assert {"kernel", "BTF", "tracefs", "GPU"} <= {check["name"] for check in report["checks"]}
    for check in report["checks"]:
        assert check["state"] in ("ok", "degraded", "missing")
        assert check["state"] == "ok" or (check["costs"] and check["fix"])


@pytest.mark.kernel
def test_on_this_kernel_every_probe_loads() -> None:
    done = run_doctor("--format", "json")
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    everywhere = {f"probe: {probe.title}" for probe in PROBES if not probe.filesystems}
    loaded = {c["name"] for c in report["checks"] if c["found"] == "loaded and attached"}
    assert everywhere <= loaded


@pytest.mark.kernel
def test_without_root_the_doctor_still_examines_everything() -> None:
    done = run_doctor(user=NOBODY)
    assert done.returncode == 5
    assert not done.stderr
    assert "can use no probes here: root" in done.stdout.replace("\n", " ")
    assert "sudo" in done.stdout
