"""What `record` and `doctor` do and say where somebody forbids what they need: lockdown, AppArmor.

Runs in the guest: `python adverse.py MADE RESULTS`; MADE holds what was built for it. All is forked
from one process, which is confined, or not, by what each part asks for. The lockdown is raised
last, for it cannot be lowered.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path

from lab.vm.guest import ALWAYS, told
from ttftprof import cli
from ttftprof.cli import doctor

CONFINE = Path("/proc/self/attr/current")
LOCKDOWN = Path("/sys/kernel/security/lockdown")
MODEL, MODEL_BYTES = Path("/run/model.gguf"), 7 << 20
HIDDEN = Path("/run/hidden")  # from the profile denies-files


def said(results: Path, name: str, profile: str, *arguments: str) -> int:
    """The pid of a child that records, in a profile; what it said and its exit code are kept."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        out = os.open(results / f"{name}.said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        confine(profile)
        os.dup2(out, 1)
        os.dup2(out, 2)
        cli.main(["record", "-o", str(results / f"{name}.ttft"), *ALWAYS, *arguments])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def confine(profile: str) -> None:
    if profile:
        fd = os.open(CONFINE, os.O_WRONLY)
        os.write(fd, f"changeprofile {profile}".encode())
        os.close(fd)


def recorded(results: Path, name: str, profile: str, made: Path, *options: str) -> None:
    """A recording of a command that reads a model, by a library that it maps when it runs."""
    words = (*options, "--", str(made / "marked"), str(made / "build/libllama.so"), str(MODEL))
    kept(results, name, os.waitpid(said(results, name, profile, *words), 0)[1])


def looked_at(results: Path, name: str, profile: str, made: Path, library: Path) -> None:
    """Three seconds of a process that has mapped a library."""
    words = [str(made / "marked"), str(library), str(MODEL), "stay"]
    server = os.posix_spawn(words[0], words, os.environ)
    recorder = said(results, name, profile, "--pid", str(server), "--duration", "3")
    kept(results, name, os.waitpid(recorder, 0)[1])
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)


def kept(results: Path, name: str, status: int) -> None:
    path = results / f"{name}.ended"
    path.write_text(json.dumps({"code": os.waitstatus_to_exitcode(status)}))
    print(name, path.read_text(), (results / f"{name}.said").read_text(), flush=True)


def examined(results: Path, name: str, profile: str) -> None:
    path = results / f"{name}.doctor.json"
    pid = os.fork()
    if pid == 0:
        confine(profile)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(told(path, doctor.command), 0)[1]))
    os.waitpid(pid, 0)


def main(made: Path, results: Path) -> None:
    MODEL.write_bytes(os.urandom(MODEL_BYTES))
    HIDDEN.mkdir()
    library = made / "build/libllama.so"
    shutil.copy(library, HIDDEN)
    recorded(results, "integrity", "", made)
    examined(results, "integrity", "")
    recorded(results, "denies-probes", "denies-probes", made)
    recorded(results, "denies-probes-proc", "denies-probes", made, "--loader", "proc")
    examined(results, "denies-probes", "denies-probes")
    looked_at(results, "denies-looks", "denies-looks", made, library)
    looked_at(results, "denies-files", "denies-files", made, HIDDEN / library.name)
    LOCKDOWN.write_text("confidentiality")
    recorded(results, "confidentiality", "", made)
    examined(results, "confidentiality", "")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
