"""The recordings of the VM test: network mounts read in every way, a server that goes silent, and
some of the reads again by a recorder that sees no BTF; then what the doctors say of machine and
mounts.

Runs in the guest: `python guest.py READER RESULTS`. What records is forked from one process: under
emulation Python takes long to start, and a recorder gives up root. The kernel's own trace watches
the same reads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import click

from ttftprof.cli import doctor, record, storage
from ttftprof.kernel import session

TRACING = Path("/sys/kernel/tracing")
PREPARED_TIMEOUT_S = 240
SILENT_AFTER_S, SILENT_S, BACK_AFTER_S = 3.0, 4.0, 4.0
CLOCK_SET_BY_S = 3600
# Those whose files are there first come first; a reader waits for its file.
STEPS = (
    "nfs3-read,/run/nfs3/model.gguf,read,128",
    "nfs3-mmap,/run/nfs3/model.gguf,mmap,128",
    "nfs42-serve,/run/nfs42/model.gguf,serve,1024",
    "nfs42-mmap,/run/nfs42/model.gguf,mmap,128",
    "nfs42-map,/run/nfs42/part.gguf,map,128",
    "nfs42-map-4096,/run/nfs42/part.gguf,map,4096",
    "nfs42-small,/run/nfs42/part.gguf,small,128",
    "nfs42-small-4096,/run/nfs42/part.gguf,small,4096",
    "over-mmap,/run/over/few.gguf,mmap,128",
    "delay-some,/run/delay/model.gguf,some,128",
    "crypt-mmap,/run/crypt/model.gguf,mmap,128",
    "raid-read,/run/raid/model.gguf,read,128",
    "smb-read,/run/smb/model.gguf,read,4096",
    "smb-mmap,/run/smb/model.gguf,mmap,128",
    "few-read,/run/few/few.gguf,read,4096",
)
# Those that the other loader records too, of each kind of storage one: by name.
AGAIN = ("nfs42-map", "nfs42-small", "over-mmap", "crypt-mmap", "raid-read", "few-read")
# On the mounts of servers, and on an encrypted device.
EXAMINED = ("/run/nfs42/model.gguf", "/run/smb/model.gguf", "/run/crypt/model.gguf")

# Under emulation any recording is dear: nothing is to be dropped for that.
ALWAYS = ("--force", "-q", "--overhead-budget", "off")


def apart(name: str, what: Callable[[], object]) -> int:
    """The pid of a child that does this, and says at its end how long it took."""
    pid = os.fork()
    if pid:
        return pid
    began = time.monotonic()
    try:
        what()
    except BaseException:
        traceback.print_exc()
    finally:
        print(f"{name} took {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        os._exit(0)


def started(results: Path, name: str, *arguments: str) -> int:
    """The pid of a recorder."""
    words = ["-o", str(results / f"{name}.ttft"), *ALWAYS, *arguments]
    return apart(name, lambda: record.command.main(words, standalone_mode=False))


def told(path: Path, command: click.Command, *arguments: str) -> int:
    """The pid of a child that leaves in a file what a command says as JSON."""

    def tell() -> None:
        with path.open("w") as file:
            os.dup2(file.fileno(), sys.stdout.fileno())
        command.main([*arguments, "--format", "json"], standalone_mode=False)
        sys.stdout.flush()

    return apart(path.name, tell)


def await_file(path: Path) -> None:
    began = time.monotonic()
    while not path.exists():
        if time.monotonic() - began > PREPARED_TIMEOUT_S:
            sys.exit(f"{path} was not there in time")
        time.sleep(0.1)


def traced(on: bool) -> None:
    """guest.sh switches SMB's on, once its module is there."""
    (TRACING / "events/nfs/nfs_initiate_read/enable").write_text("1" if on else "0")


def silence_the_server(recorder: int) -> None:
    """Takes the network away while reads are recorded, ends the recording, and gives the network
    back after it: a reader that is being killed still has to close its file."""
    time.sleep(SILENT_AFTER_S)
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    # The machine is ours alone: its wall clock may be set.
    time.clock_settime(time.CLOCK_REALTIME, time.time() + CLOCK_SET_BY_S)
    time.sleep(SILENT_S)
    os.kill(recorder, signal.SIGINT)
    time.sleep(BACK_AFTER_S)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def main(reader: str, results: Path) -> None:
    await_file(results / "modules")
    (TRACING / "trace_clock").write_text("mono")
    (TRACING / "buffer_size_kb").write_text("4096")
    traced(True)
    # Emulated, loading all probes takes long: beside the other's, and before SMB's module comes.
    again = started_without_btf(reader, results)
    own_root = f"9p-mmap,{Path(reader).with_name('9p.gguf')},mmap,128"
    armed = ("--ready-file", str(results / "armed"))
    steps = ("--", reader, "steps", str(results), own_root, *STEPS)
    os.waitpid(started(results, "steps", *armed, *steps), 0)
    traced(False)
    (results / "trace").write_text((TRACING / "trace").read_text())

    ready = results / "hang.ready"
    hang = ("--", reader, "hang", "/run/nfs42/model.gguf")
    recorder = started(results, "hang", "--ready-file", str(ready), *hang)
    await_file(ready)
    examined = told(results / "doctor.json", doctor.command)
    silence_the_server(recorder)
    os.waitpid(recorder, 0)
    os.waitpid(examined, 0)
    limits = ("--quick", "--max-bytes", "8M", "--max-seconds", "3", "-q")
    os.waitpid(told(results / "storage.json", storage.command, *limits, *EXAMINED), 0)
    (results / "bcc/go.gguf").write_bytes(bytes(4096))
    os.waitpid(again, 0)


def started_without_btf(reader: str, results: Path) -> int:
    """The pid of a recorder of `AGAIN`, whose reads begin once bcc/go.gguf is there.

    It finds no types in the kernel, so that it has to take bcc by itself. What bcc makes of this
    kernel's headers was made on the host: emulated, that takes 100 s.
    """
    folder = results / "bcc"
    folder.mkdir()
    types = Path(reader).with_name("types.btf").read_bytes()
    wanted = [step for step in STEPS if step.partition(",")[0] in AGAIN]
    steps = (reader, "steps", str(folder), f"go,{folder / 'go.gguf'},read,128", *wanted)
    armed = ("--ready-file", str(folder / "armed"))
    words = ["-o", str(results / "bcc.ttft"), *ALWAYS, *armed, "--", *steps]

    def record_without_btf() -> None:
        hide("/sys/kernel/btf")
        vars(session)["compiled_types"] = lambda: types
        record.command.main(words, standalone_mode=False)

    return apart("bcc", record_without_btf)


def hide(folder: str) -> None:
    """Puts an empty folder in its place, for this process and those that it starts. Mounts that
    come later are seen: guest.sh has made all mounts shared."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, slave, recursive = 0x20000, 1 << 19, 1 << 14  # CLONE_NEWNS, MS_SLAVE, MS_REC
    failed = (
        libc.unshare(new_mounts)
        or libc.mount(None, b"/", None, ctypes.c_ulong(slave | recursive), None)
        or libc.mount(b"t", folder.encode(), b"tmpfs", ctypes.c_ulong(0), None)
    )
    if failed:
        raise OSError(ctypes.get_errno(), f"cannot hide {folder}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
