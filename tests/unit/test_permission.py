"""Who may record: what is missing is named, with a remedy that fits the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttftprof.errors import NotPermitted
from ttftprof.kernel import permission
from ttftprof.kernel.confinement import locked_down


def refusal(monkeypatch: pytest.MonkeyPatch, **here: object) -> NotPermitted:
    """What `check_permitted` says on a machine where these hold, and nothing else is amiss."""
    facts: dict[str, object] = {
        "lacking_capabilities": list,
        "has_host_pids": lambda: True,
        "is_wsl": lambda: False,
        "locked_down": lambda: iter(()),
    }
    for name, value in (facts | here).items():
        monkeypatch.setattr(permission, name, value)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(NotPermitted) as error:
        permission.check_permitted()
    assert error.value.exit_code == 4
    assert error.value.next_step
    return error.value


def test_missing_capabilities_are_named_with_the_options_that_give_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = refusal(monkeypatch, lacking_capabilities=lambda: ["CAP_BPF", "CAP_PERFMON"])
    assert "CAP_BPF, CAP_PERFMON" in error.message
    assert "--cap-add=BPF --cap-add=PERFMON" in error.next_step


def test_a_container_is_told_of_the_hosts_process_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--pid=host" in refusal(monkeypatch, has_host_pids=lambda: False).next_step


def test_a_kernel_that_is_locked_down_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before any probe is loaded: the kernel refuses them one by one, as if they were wrong."""
    (tmp_path / "sys/kernel/security").mkdir(parents=True)
    (tmp_path / "sys/kernel/security/lockdown").write_text("none integrity [confidentiality]\n")
    error = refusal(monkeypatch, locked_down=lambda: locked_down(tmp_path))
    assert "lockdown in confidentiality mode" in error.message
    assert "boot without lockdown=confidentiality" in error.next_step


def test_wsl_is_told_what_no_option_of_a_container_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    error = refusal(monkeypatch, has_host_pids=lambda: False, is_wsl=lambda: True)
    assert "WSL2" in error.message
    assert "virtual machine" in error.next_step
    assert "--pid=host" not in error.next_step


@pytest.mark.parametrize(
    ("release", "wsl"),
    [
        ("5.15.167.4-microsoft-standard-WSL2", True),
        ("4.4.0-19041-Microsoft", True),
        ("6.8.0-49-generic", False),
        ("6.1.0-28-cloud-amd64", False),
    ],
)
def test_wsl_is_known_by_its_kernels_name(release: str, wsl: bool) -> None:
    assert permission.is_wsl(release) == wsl


def test_a_kernel_without_user_namespaces_has_only_the_machine(tmp_path: Path) -> None:
    """CONFIG_USER_NS=n: no process has a uid_map."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text(f"CapEff:\t{(1 << 41) - 1:016x}\n")
    assert permission.lacking_capabilities(tmp_path) == []
