"""What `doctor` and `storage` say in the VM of its kernel and of its NFS, SMB and encrypted mounts.

They ran there after the recordings. Emulated rates say nothing, so none is compared.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from conftest import VM_RESULTS as RESULTS
from ttftprof.reports.storage import schema

pytestmark = pytest.mark.vm


@pytest.fixture(scope="module")
def doctor() -> dict[str, Any]:
    told: dict[str, Any] = json.loads((RESULTS / "doctor.json").read_text())
    return told


@pytest.fixture(scope="module")
def storage() -> dict[str, dict[str, Any]]:
    """What was found of each path."""
    told = json.loads((RESULTS / "storage.json").read_text())
    jsonschema.Draft202012Validator(schema()).validate(told)
    return {path["path"]: path for path in told["paths"]}


def test_doctor_tries_the_probes_of_what_is_mounted(doctor: dict[str, Any]) -> None:
    assert doctor["can_record"]
    checks = {check["name"]: check for check in doctor["checks"]}
    for title in ("NFS reads", "SMB reads", "reads of 9P, Ceph and AFS", "block requests"):
        assert checks[f"probe: {title}"]["found"] == "loaded and attached"
    assert checks["probe: FUSE reads"]["found"].startswith("not needed: no ")


def test_doctor_names_what_an_old_kernel_lacks_and_since_when_it_is_there(
    doctor: dict[str, Any],
) -> None:
    release = next(c["found"] for c in doctor["checks"] if c["name"] == "kernel")
    if not release.startswith("6.1."):
        pytest.skip("the VM does not run 6.1, whose lacks these are")
    lacking = {c["name"]: c for c in doctor["checks"] if c["state"] != "ok"}
    sockets = lacking["probe: HTTP sockets"]
    assert sockets["state"] == "degraded"
    assert sockets["costs"].startswith("answers by sendfile or io_uring are not seen")
    assert "sock_send_length (kernel 6.3)" in sockets["fix"]
    assert "sk_data_ready" not in sockets["fix"]  # a function stands in for it
    assert "kernel 6.5 or newer" in lacking["cachestat"]["fix"]
    # Functions are looked at where the tracepoints are missing.
    assert not {"probe: file page faults", "probe: page cache"} & set(lacking)


@pytest.mark.parametrize(
    ("point", "fstype", "source"),
    [
        ("/run/nfs42", "nfs4", "127.0.0.1:/"),
        ("/run/smb", "cifs", "//127.0.0.1/model"),
    ],
)
def test_storage_measures_a_mount(
    point: str, fstype: str, source: str, storage: dict[str, dict[str, Any]]
) -> None:
    found = storage[f"{point}/model.gguf"]
    assert (found["mount"]["path"], found["mount"]["fstype"]) == (point, fstype)
    assert found["mount"]["source"] == source
    assert found["not_measured"] is None
    measured = [m for m in found["measurements"] if m["method"] != "cached"]
    assert measured
    assert sum(m["bytes_read"] for m in measured) == found["bytes_read"] > 0
    assert found["verdict"]["verdict"]


def test_storage_leaves_a_cached_file_alone(storage: dict[str, dict[str, Any]]) -> None:
    found = storage["/run/crypt/model.gguf"]
    assert (found["bytes_read"], found["verdict"]["verdict"]) == (0, "cache worked")


def test_storage_shows_what_lies_under_a_file(storage: dict[str, dict[str, Any]]) -> None:
    kinds: dict[str, list[tuple[str, str]]] = {}
    for path, found in storage.items():
        layer, kinds[path] = found["stack"], []
        while layer:
            kinds[path].append((layer["kind"], layer["name"]))
            layer = layer["below"][0] if layer["below"] else None
    assert kinds["/run/crypt/model.gguf"][:2] == [
        ("file system", "ext4"),
        ("crypt", "LUKS2 secret (dm-0)"),
    ]
    for name, fstype in (("nfs42", "nfs4"), ("smb", "cifs")):
        assert kinds[f"/run/{name}/model.gguf"][0] == ("file system", fstype)
