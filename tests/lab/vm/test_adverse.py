"""What `record` and `doctor` did and said in the VM where somebody forbids what they need.

It was booted with lockdown=integrity and AppArmor, and with every setting that a hardened machine
has; the profiles are those of adverse.apparmor, the lockdown was raised last.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from conftest import VM_RESULTS
from ttftprof.analysis import analyse
from ttftprof.events import Kind
from ttftprof.model import Report
from ttftprof.recording import Reader

pytestmark = pytest.mark.vm

RESULTS = VM_RESULTS.parent / "adverse" / "results"
CALLS = 24  # of the library: see marked.c
MODEL_BYTES = 7 << 20
NOT_PERMITTED = 4


def said(name: str) -> str:
    return (RESULTS / f"{name}.said").read_text()


def code(name: str) -> int:
    return int(json.loads((RESULTS / f"{name}.ended").read_text())["code"])


def report(name: str) -> Report:
    found = analyse(RESULTS / f"{name}.ttft")
    assert found.complete
    return found


def model_of(name: str) -> dict[str, Any]:
    """What is known of the model's file."""
    with Reader(RESULTS / f"{name}.ttft") as reader:
        [model] = [f for _, f in reader.facts("file") if (f["path"] or "").endswith(".gguf")]
        return dict(model)


def checks(name: str) -> dict[str, dict[str, Any]]:
    told = json.loads((RESULTS / f"{name}.doctor.json").read_text())
    return {check["name"]: check for check in told["checks"]} | {"verdict": told["verdict"]}


def test_a_hardened_machine_under_lockdown_integrity_gives_all() -> None:
    """As Secure Boot has it; no unprivileged BPF, no perf events, no addresses, no ptrace."""
    settings = dict(
        line.split(" = ") for line in (RESULTS / "settings").read_text().splitlines() if line
    )
    assert settings == {
        "kernel.unprivileged_bpf_disabled": "2",
        "kernel.perf_event_paranoid": "4",
        "kernel.kptr_restrict": "2",
        "net.core.bpf_jit_harden": "2",
        "kernel.yama.ptrace_scope": "3",
    }
    assert code("integrity") == 0
    states = {s.name: s.state for s in report("integrity").sources}
    wanted = ("block", "cpu", "faults", "files", "marks", "offcpu", "pagecache", "process")
    assert {name: states[name] for name in wanted} == dict.fromkeys(wanted, "ok")
    found = checks("integrity")
    assert found["lockdown"]["found"] == "integrity"
    assert found["root"]["state"] == "ok"
    assert "will work here" in found["verdict"]
    assert found["kernel addresses"]["fix"] == "sysctl kernel.kptr_restrict=1"


def test_a_library_that_is_mapped_after_root_was_given_up_is_marked() -> None:
    """Debian's kernel opens perf events for CAP_SYS_ADMIN alone, which the recorder has no more."""
    with Reader(RESULTS / "integrity.ttft") as reader:
        events = reader.stream("events")
        files = reader.stream("files")
    loads = events[events["kind"] == Kind.MARK_ENTER]
    assert len(loads) == 2 * CALLS  # each loads a model and drops it
    row = files[files["ino"] == model_of("integrity")["ino"]][-1]
    assert int(row["opens"]) == CALLS + 1
    assert int(row["read_bytes"]) >= MODEL_BYTES


def test_a_profile_that_forbids_probes_is_named_with_the_remedy() -> None:
    assert code("denies-probes") == NOT_PERMITTED
    assert "no capability is missing" in said("denies-probes")
    assert "the AppArmor profile denies-probes" in said("denies-probes")
    assert "apparmor=unconfined" in said("denies-probes")
    assert "--loader proc" in said("denies-probes")
    found = checks("denies-probes")
    assert "the AppArmor profile denies-probes" in found["probes"]["found"]
    assert "apparmor=unconfined" in found["probes"]["fix"]
    assert found["root"]["state"] == "ok"


def test_what_it_names_instead_works() -> None:
    assert code("denies-probes-proc") == 0
    assert model_of("denies-probes-proc")["size_bytes"] == MODEL_BYTES
    states = {s.name: s.state for s in report("denies-probes-proc").sources}
    assert states["process"] == "degraded"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("denies-looks", " maps may not be read"),
        ("denies-files", "/run/hidden/libllama.so may not"),
    ],
)
def test_a_profile_that_forbids_looking_costs_the_calls_and_says_so(name: str, what: str) -> None:
    """Not that the target had no such library."""
    assert code(name) == 0
    [marks] = [s for s in report(name).sources if s.name == "marks"]
    assert marks.state == "absent"
    assert what in marks.reason
    assert f"the AppArmor profile {name}" in marks.reason
    assert marks.lost


def test_under_lockdown_confidentiality_it_goes_on_without_probes() -> None:
    assert code("confidentiality") == 0
    assert "lockdown in confidentiality mode" in said("confidentiality")
    assert "boot without lockdown=confidentiality" in said("confidentiality")
    assert model_of("confidentiality")["size_bytes"] == MODEL_BYTES
    states = {s.name: s.state for s in report("confidentiality").sources}
    assert states["block"] == "absent"
    found = checks("confidentiality")
    assert found["lockdown"]["state"] == "missing"
    assert "lockdown in confidentiality mode" in found["probes"]["found"]
    assert "`ttftprof record` looks at /proc instead" in found["verdict"]


def test_the_kernel_itself_says_that_it_was_locked_down() -> None:
    said_by_kernel = (RESULTS / "dmesg").read_text()
    assert "lockdown=integrity" in said_by_kernel
    assert "Kernel is locked down from command line" in said_by_kernel
    assert "Kernel is locked down from securityfs" in said_by_kernel
