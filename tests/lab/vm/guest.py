"""The recordings of the VM test: network mounts read in every way, a server that goes silent, and
some of the reads again by the other loader; then what the doctors say of machine and mounts.

Runs in the guest: `python guest.py READER RESULTS`. What records is forked from one process: under
emulation Python takes long to start, and a recorder gives up root. The kernel's own trace watches
the same reads.
"""

from __future__ import annotations

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
    # Emulated, loading all probes takes long: it is done in this silence.
    began, again = time.monotonic(), started_by_bcc(reader, results)
    examined = told(results / "doctor.json", doctor.command)
    silence_the_server(recorder)
    os.waitpid(recorder, 0)
    os.waitpid(examined, 0)
    limits = ("--quick", "--max-bytes", "8M", "--max-seconds", "3", "-q")
    os.waitpid(told(results / "storage.json", storage.command, *limits, *EXAMINED), 0)
    await_file(results / "bcc/armed")
    print(f"armed by bcc after {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    (results / "bcc/go.gguf").write_bytes(bytes(4096))
    os.waitpid(again, 0)


def started_by_bcc(reader: str, results: Path) -> int:
    """The pid of a recorder of `AGAIN`, whose reads begin once bcc/go.gguf is there.

    What bcc makes of this kernel's headers was made on the host: emulated, that takes 100 s.
    """
    folder = results / "bcc"
    folder.mkdir()
    types = Path(reader).with_name("types.btf").read_bytes()
    vars(session)["compiled_types"] = lambda: types
    wanted = [step for step in STEPS if step.partition(",")[0] in AGAIN]
    steps = (reader, "steps", str(folder), f"go,{folder / 'go.gguf'},read,128", *wanted)
    armed = ("--ready-file", str(folder / "armed"))
    return started(results, "bcc", "--loader", "bcc", *armed, "--", *steps)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
