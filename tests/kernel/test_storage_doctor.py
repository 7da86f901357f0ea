"""`ttftprof storage` on real file systems: the set rate is recovered, the cache is put back, every
end is clean. Needs e2fsprogs, xfsprogs, btrfs-progs and mount's losetup."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from conftest import unsupported
from kernel.file_systems import mounted, overlay, sh
from ttftprof.reports.storage import schema
from ttftprof.residency import PAGE, absent, drop, how_to_ask, read_back, state_of
from ttftprof.stack import stack_of
from ttftprof.weights import open_weights
from workloads.cache import make_model

pytestmark = pytest.mark.kernel

MIB = 1 << 20
ATTEMPTS = 3  # on a shared machine a reader is not always run when its bytes are there
SCHEMA = jsonschema.Draft202012Validator(schema())
BLKIO = Path("/sys/fs/cgroup/blkio")


def cold(path: Path, size_mb: int) -> Path:
    make_model(path, size_mb * MIB)
    os.sync()
    fd = os.open(path, os.O_RDONLY)
    left = drop(fd, [(0, size_mb * MIB)], how_to_ask(fd))
    os.close(fd)
    assert left == 0
    return path


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "ttftprof", "storage", *map(str, arguments)]


def doctor(*arguments: str | Path) -> dict[str, Any]:
    """What the command found of one path."""
    done = subprocess.run(
        command(*arguments, "--format", "json"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    SCHEMA.validate(document := json.loads(done.stdout))
    (path,) = document["paths"]
    assert isinstance(path, dict)
    return path


def absent_of(path: Path) -> list[tuple[int, int]]:
    fd = os.open(path, os.O_RDONLY)
    try:
        return absent(fd, path.stat().st_size, how_to_ask(fd))
    finally:
        os.close(fd)


def warm(path: Path, *ranges: tuple[int, int]) -> None:
    """Brings exactly these ranges into the cache."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no readahead beyond them
    read_back(fd, ranges)
    os.close(fd)


# -- the stack -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_stack_and_measurement_of_a_file_system(kind: str, tmp_path: Path) -> None:
    with mounted(kind, tmp_path) as (point, device):
        model = cold(point / "m.gguf", 64)
        found = doctor("--quick", model)
        after = absent_of(model)
    kinds = []
    layer = found["stack"]
    while layer:
        kinds.append((layer["kind"], layer["name"]))
        layer = layer["below"][0] if layer["below"] else None
    assert kinds[:2] == [("file system", kind), ("loop", device.name)]
    assert found["mount"]["path"] == str(point)
    assert found["bytes_read"] <= 64 * MIB
    measured = [m for m in found["measurements"] if m["method"] != "cached"]
    assert all(m["bytes_per_second"] for m in measured), measured
    assert sum(m["bytes_read"] for m in measured) == found["bytes_read"]
    assert after == [(0, 64 * MIB)]


def test_readahead_is_the_file_systems_own_on_btrfs(tmp_path: Path) -> None:
    with mounted("btrfs", tmp_path) as (point, _):
        (point / "m").write_bytes(bytes(PAGE))
        readahead = stack_of(str(point / "m")).readahead
        assert readahead is not None
        assert readahead.read_ahead_file is not None
        assert readahead.name == "btrfs"
        assert readahead.read_ahead_kb == int(readahead.read_ahead_file.read_text())


def test_a_cached_file_is_left_alone_behind_overlayfs(tmp_path: Path) -> None:
    """Its pages are those of the file beneath."""
    with overlay(tmp_path) as (lower, merged):
        model = cold(lower / "m.gguf", 16)
        warm(model, (0, 16 * MIB))
        found = doctor("--quick", merged / "m.gguf")
        assert found["bytes_read"] == 0
        assert found["verdict"]["verdict"] == "cache worked"
        assert changed_bytes([], absent_of(model)) <= PRESSED_OUT_BYTES


def test_overlay_leads_to_the_file_system_below(tmp_path: Path) -> None:
    with overlay(tmp_path) as (lower, merged):
        (lower / "m.gguf").write_bytes(bytes(4 * MIB))
        found = doctor("--stack-only", merged / "m.gguf")
    assert found["stack"]["facts"]["the file is in"] == str(lower)
    assert found["stack"]["below"][0]["facts"]["type"] == stack_of(str(lower)).fstype


def test_a_path_in_another_mount_namespace(tmp_path: Path) -> None:
    inside, outside = tmp_path / "models", tmp_path / "store"
    inside.mkdir()
    outside.mkdir()
    (outside / "m.gguf").write_bytes(os.urandom(2 * MIB))
    (outside / "link.gguf").symlink_to(inside / "m.gguf")
    script = f"mount --bind {outside} {inside} && echo up && exec sleep 60"
    holder = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "up\n"
        found = doctor("--stack-only", "--pid", str(holder.pid), inside / "link.gguf")
        assert found["path"] == str(inside / "m.gguf")
        assert found["mount"]["path"] == str(inside)
        assert "bind mount" in found["stack"]["notes"][0]
    finally:
        holder.kill()
        holder.communicate()
    gone = subprocess.run(
        command("--pid", str(holder.pid), inside), capture_output=True, check=False
    )
    assert gone.returncode == 3


# -- the rate --------------------------------------------------------------------------------------


@contextmanager
def throttled(device: Path, limit: int, what: str = "bps") -> Iterator[Path]:
    """A control group whose members read so many bytes (or requests: iops) per second at most."""
    if not (BLKIO / f"blkio.throttle.read_{what}_device").exists():
        unsupported("no blkio control group (v1)")
    group = BLKIO / f"ttftprof-{os.getpid()}"
    group.mkdir()
    number = (Path("/sys/class/block") / device.name / "dev").read_text().strip()
    setting = group / f"blkio.throttle.read_{what}_device"
    setting.write_text(f"{number} {limit}")
    try:
        yield group
    finally:
        setting.write_text(f"{number} 0")  # none: what still waits for an answer has it
        wait_until(lambda: not (group / "tasks").read_text())
        group.rmdir()


def inside(group: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    script = 'echo $$ > "$0/tasks" && exec "$@"'
    return subprocess.run(
        ["sh", "-c", script, str(group), *arguments], capture_output=True, text=True, check=True
    )


@pytest.mark.slow
def test_the_rate_of_a_throttled_device_is_recovered(tmp_path: Path) -> None:
    """Within 5 %, by every way of reading; and dd agrees."""
    rate = 32_000_000
    with mounted("ext4", tmp_path) as (point, device), throttled(device, rate) as group:
        (Path("/sys/block") / device.name / "queue/read_ahead_kb").write_text("512")
        model = cold(point / "m.gguf", 256)
        for _ in range(ATTEMPTS):
            done = inside(group, command("--quick", model, "--format", "json"))
            (found,) = json.loads(done.stdout)["paths"]
            rates = {
                f"{m['method']} {m['streams']}": m["bytes_per_second"]
                for m in found["measurements"]
                if m["method"] in ("read", "direct", "mmap")
            }
            if all(abs(measured / rate - 1) <= 0.05 for measured in rates.values()):
                break
        dd = inside(group, ["dd", f"if={model}", "iflag=direct", "of=/dev/null", "bs=1M",
                            "count=128"])  # fmt: skip
    assert len(rates) == 5
    for way, measured in rates.items():
        assert measured == pytest.approx(rate, rel=0.05), (way, rates)
    assert found["verdict"]["ceiling_bytes_per_second"] == pytest.approx(rate, rel=0.05)
    assert found["verdict"]["verdict"] == "at the ceiling"
    assert found["verdict"]["confidence"] == "high"
    seconds = float(dd.stderr.rsplit("copied, ", 1)[1].split(" s,")[0])
    assert 128 * MIB / seconds == pytest.approx(rate, rel=0.05)


@pytest.mark.slow
def test_small_requests_are_convicted_and_the_advice_holds(tmp_path: Path) -> None:
    """200 requests a second: mmap with 32 KiB of readahead gets 6.5 MB/s, whatever the disk gives.

    The model says so, the sweep finds a better value, and with it set the predicted gain is there.
    """
    with mounted("ext4", tmp_path) as (point, device), throttled(device, 200, "iops") as group:
        setting = Path("/sys/block") / device.name / "queue/read_ahead_kb"
        setting.write_text("32")
        model = cold(point / "m.gguf", 256)
        arguments = ["--quick", "--max-seconds", "12", "--format", "json"]
        done = inside(group, command(*arguments, "--try-readahead", "512", model))
        (found,) = json.loads(done.stdout)["paths"]
        setting.write_text("512")
        (after,) = json.loads(inside(group, command(*arguments, model)).stdout)["paths"]
    mapped, swept = (m for m in found["measurements"] if m["method"] == "mmap")
    assert mapped["bytes_per_second"] == pytest.approx(200 * 32 * 1024, rel=0.1)
    assert mapped["model_bytes_per_second"] == pytest.approx(mapped["bytes_per_second"], rel=0.25)
    assert found["verdict"]["verdict"] == "pattern"
    best = next(a for a in found["verdict"]["actions"] if "readahead" in a["change"])
    assert "is 512 KiB" in best["change"]
    now = next(m for m in after["measurements"] if m["method"] == "mmap")
    assert now["bytes_per_second"] == pytest.approx(swept["bytes_per_second"], rel=0.25)
    gain_s = 256 * MIB * (1 / mapped["bytes_per_second"] - 1 / now["bytes_per_second"])
    assert best["expected_gain_ns"] / 1e9 == pytest.approx(gain_s, rel=0.25)


@pytest.mark.slow
def test_storage_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with mounted("ext4", tmp_path) as (point, device), throttled(device, 4096) as group:
        model = cold(point / "m.gguf", 16)
        done = inside(group, command("--quick", "--max-seconds", "1", model, "--format", "json"))
    (found,) = json.loads(done.stdout)["paths"]
    assert "no answer" in found["notes"][0]
    assert found["verdict"]["verdict"] == "unknown"
    assert "no answer" in found["measurements"][-1]["not_measured"]


def test_this_programs_own_ceiling(tmp_path: Path) -> None:
    """Reading from the page cache by its threads is far above what storage is measured at."""
    found = doctor("--quick", cold(tmp_path / "m.gguf", 128))
    own = next(m for m in found["measurements"] if m["method"] == "cached")
    assert own["bytes_per_second"] > 1e8


# -- the cache and the settings are put back -------------------------------------------------------


# The kernel may drop pages that nobody used for a while (DAMON does, a few at a time).
PRESSED_OUT_BYTES = 2 << 20


def changed_bytes(before: list[tuple[int, int]], after: list[tuple[int, int]]) -> int:
    """How many bytes are in one of the two lists of ranges and not in the other."""
    pages = [{at for lo, hi in ranges for at in range(lo, hi, PAGE)} for ranges in (before, after)]
    return len(pages[0] ^ pages[1]) * PAGE


def test_a_half_cached_file_stays_half_cached(tmp_path: Path) -> None:
    model = cold(tmp_path / "m.gguf", 96)
    warm(model, (0, 20 * MIB), (40 * MIB + 3 * PAGE, 70 * MIB + PAGE), (95 * MIB, 96 * MIB))
    before = absent_of(model)
    assert before[0] == (20 * MIB, 40 * MIB + 3 * PAGE)
    found = doctor("--quick", model)
    assert changed_bytes(before, absent_of(model)) <= PRESSED_OUT_BYTES
    assert found["bytes_read"] > 0
    pages = found["cache"]["before"]["cached_pages"] - found["cache"]["after"]["cached_pages"]
    assert abs(pages) * PAGE <= PRESSED_OUT_BYTES
    again = doctor("--quick", "--evict", model)
    assert again["bytes_read"] > found["bytes_read"]
    assert changed_bytes(before, absent_of(model)) <= PRESSED_OUT_BYTES


def test_a_file_that_is_nearly_all_cached_is_judged_only_once_it_is_dropped(
    tmp_path: Path,
) -> None:
    model = cold(tmp_path / "m.gguf", 128)
    warm(model, (4 * MIB, 128 * MIB))
    found = doctor("--quick", model)
    assert 0 < found["bytes_read"] <= 8 * MIB
    verdict = found["verdict"]
    assert (verdict["verdict"], verdict["ceiling_bytes_per_second"]) == ("unknown", None)
    assert "--evict" in verdict["actions"][0]["verify"]
    again = doctor("--quick", "--evict", model)["verdict"]
    assert again["verdict"] != "unknown"
    assert again["ceiling_bytes_per_second"] > 0
    assert changed_bytes([(0, 4 * MIB)], absent_of(model)) <= PRESSED_OUT_BYTES


def test_a_cached_file_is_left_alone_and_acquits_storage(tmp_path: Path) -> None:
    model = cold(tmp_path / "m.gguf", 16)
    warm(model, (0, 16 * MIB))
    found = doctor(model)
    assert found["bytes_read"] == 0
    assert found["verdict"]["verdict"] == "cache worked"
    assert changed_bytes([], absent_of(model)) <= PRESSED_OUT_BYTES


def test_pages_that_a_process_maps_are_not_measured(tmp_path: Path) -> None:
    import mmap

    model = cold(tmp_path / "m.gguf", 16)
    with model.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as held:
        assert sum(held[at] for at in range(0, len(held), PAGE)) > 0
        found = doctor("--evict", "--quick", model)
        assert not any(m["bytes_per_second"] for m in found["measurements"])
        assert "cannot be dropped" in found["measurements"][0]["not_measured"]
        assert absent_of(model) == []


def slow_run(group: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    """The doctor in a throttled group, so that it lasts."""
    script = 'echo $$ > "$0/tasks" && exec "$@"'
    return subprocess.Popen(
        ["sh", "-c", script, str(group), *command(*arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(holds: Any, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "it did not come to it"
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_readahead_is_put_back_whatever_ends_it(number: signal.Signals, tmp_path: Path) -> None:
    with mounted("ext4", tmp_path) as (point, device), throttled(device, 16_000_000) as group:
        model = cold(point / "m.gguf", 96)
        setting = Path("/sys/block") / device.name / "queue/read_ahead_kb"
        setting.write_text("512")
        run = slow_run(group, "--quick", "--try-readahead", "1024", model)
        wait_until(lambda: setting.read_text() == "1024\n")
        run.send_signal(number)
        out, _ = run.communicate(timeout=60)
        wait_until(lambda: setting.read_text() == "512\n")
        if number != signal.SIGKILL:
            assert run.returncode == 128 + number
            assert "ended early" in out
            assert absent_of(model) == [(0, 96 * MIB)]


def test_a_sweep_finds_what_was_set(tmp_path: Path) -> None:
    with mounted("ext4", tmp_path) as (point, device):
        model = cold(point / "m.gguf", 256)
        setting = Path("/sys/block") / device.name / "queue/read_ahead_kb"
        setting.write_text("128")
        found = doctor("--quick", "--try-readahead", "16,4096", model)
        assert setting.read_text() == "128\n"
    mapped = {m["read_ahead_kb"]: m for m in found["measurements"] if m["method"] == "mmap"}
    assert set(mapped) == {128, 16, 4096}
    assert mapped[16]["read_ahead_set"]
    assert mapped[16]["bytes_per_second"] < mapped[4096]["bytes_per_second"]


def test_readahead_that_cannot_be_written(tmp_path: Path) -> None:
    model = cold(tmp_path / "m.gguf", 96)
    script = 'mount -o remount,bind,ro /sys && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh",
         *command("--quick", "--try-readahead", "4096", model, "--format", "json")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (found,) = json.loads(done.stdout)["paths"]
    tried = [m for m in found["measurements"] if m["not_measured"]]
    assert len(tried) == 2
    assert all("Read-only file system" in m["not_measured"] for m in tried)


# -- files that change, and what is no file --------------------------------------------------------


@pytest.mark.parametrize("change", ["delete", "replace", "truncate"])
def test_a_file_that_changes_meanwhile(change: str, tmp_path: Path) -> None:
    with mounted("ext4", tmp_path) as (point, device), throttled(device, 16_000_000) as group:
        model = cold(point / "m.gguf", 64)
        run = slow_run(group, "--quick", model, "--format", "json")
        wait_until(lambda: absent_of(model) != [(0, 64 * MIB)])
        if change == "delete":
            model.unlink()
        elif change == "replace":
            (point / "new").write_bytes(bytes(PAGE))
            (point / "new").rename(model)
        else:
            os.truncate(model, MIB)
        out, err = run.communicate(timeout=90)
    assert run.returncode == 0, err
    (found,) = json.loads(out)["paths"]
    said = " ".join(found["notes"])
    assert {"delete": "was deleted", "replace": "was deleted", "truncate": "size"}[change] in said
    if change == "truncate":
        assert any("shorter" in (m["not_measured"] or "") for m in found["measurements"])
    else:
        assert all(m["bytes_per_second"] for m in found["measurements"])


def test_strange_paths_and_bad_ones(tmp_path: Path) -> None:
    strange = tmp_path / os.fsdecode(b"a b\xff\n\x1b[31m")
    strange.mkdir()
    cold(strange / "m.gguf", 2)
    assert doctor(strange)["size_bytes"] == 2 * MIB
    text = subprocess.run(command(strange / "m.gguf"), capture_output=True, check=True).stdout
    assert b"\x1b" not in text
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").touch()
    for bad, code in (
        (tmp_path / "nothing", 2),
        (tmp_path / "fifo", 2),
        (tmp_path / "empty", 2),
        (Path("/dev/null"), 2),
        (Path("/" + "x/" * 2040), 2),
    ):
        done = subprocess.run(command(bad), capture_output=True, text=True, check=False)
        assert done.returncode == code, (bad, done.stderr)
        assert "Traceback" not in done.stderr
    several = subprocess.run(
        command(tmp_path / "nothing", strange), capture_output=True, text=True, check=False
    )
    assert several.returncode == 2
    assert "2.10 MB" in several.stdout


def test_a_file_in_memory_has_nothing_to_measure(tmp_path: Path) -> None:
    sh("mount", "-t", "tmpfs", "t", tmp_path)
    try:
        (tmp_path / "m.gguf").write_bytes(bytes(4 * MIB))
        found = doctor(tmp_path / "m.gguf")
    finally:
        sh("umount", tmp_path)
    assert "no storage" in found["not_measured"]
    assert found["measurements"] == []


def test_another_users_file_is_not_judged_blindly(tmp_path: Path) -> None:
    """Who neither owns a file nor may write it is not told what is cached of it."""
    model = cold(tmp_path / "m.gguf", 8)
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/tmp") and folder.is_relative_to("/tmp"):
            folder.chmod(0o755)
    done = subprocess.run(
        command("--quick", model), capture_output=True, text=True, check=False, user="nobody"
    )
    assert done.returncode == 4, done.stderr


def test_shards_are_measured_as_one(tmp_path: Path) -> None:
    for part in (1, 2, 3):
        cold(tmp_path / f"m-{part:05}-of-00003.gguf", 24)
    found = doctor("--quick", tmp_path)
    assert found["files"] == 3
    assert found["size_bytes"] == 72 * MIB
    assert found["bytes_read"] > 48 * MIB
    with open_weights(str(tmp_path)) as weights:
        for file in weights.files:
            fd = file.reopen()
            assert state_of(fd, file.size_bytes).cached_pages == 0
            os.close(fd)
