"""Python stacks of the target's interpreters, taken by py-spy while somebody waits for them.

One `py-spy record` a process, switched on only while a request waits for its first token or a
process starts, in segments of bounded length. Its samples come on a clock of their own, whose
origin is sandwiched between the moment before it was started and the arrival of its output.

py-spy reads the interpreter's memory from outside; the server is not paused, unless native frames
are asked for. What is kept of a frame is a module's path within its library, a function's name and
a line: never a value, a folder of the user's, or a thread's name.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttftprof.clock import NS_PER_S, now_ns
from ttftprof.recording import Source
from ttftprof.sources.processes import PROC, is_alive

# Measured on a transformers server with nine Python threads: a sample costs py-spy 3 ms of CPU and
# the server nothing that shows; with native frames 35 ms, in which the server stands still.
RATE_HZ = 20
NATIVE_RATE_HZ = 5
SEGMENT_S = 20  # py-spy tells what it saw when it ends: so much a killed recorder loses
PROCESSES = 4  # sampled at a time, the newest first
START_LIMIT_NS = 300 * NS_PER_S  # a start that never listens is sampled no longer
LINGER_NS = NS_PER_S // 4  # two requests soon after another are one window
FORKED_NS = NS_PER_S // 10  # a child that lives so long without an exec is no helper
RETRY_NS = NS_PER_S
STOP_TIMEOUT_S = 3.0
MAX_OUTPUT_BYTES = 64 << 20
_GIVE_UP_AFTER = 3  # refusals of one process in a row

Segment = tuple[int, dict[str, Any]]  # its begin, the fact


class PySpyOutput(ValueError):
    """py-spy wrote something else than its trace."""


def find_py_spy() -> str | None:
    """The program: beside this interpreter (it is a dependency), else on PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


_INTERPRETER = re.compile(r"/python[\d.]*[a-z]*$")


def runs_python(pid: int, proc: Path = PROC) -> bool:
    """Whether a process is a Python interpreter, by its executable or its libpython."""
    try:
        exe = str((proc / str(pid) / "exe").readlink())
        if _INTERPRETER.search(exe.removesuffix(" (deleted)")):
            return True
        return b"/libpython" in (proc / str(pid) / "maps").read_bytes()
    except OSError:
        return False


# -- what is kept of a frame ----------------------------------------------------------------------

_LIBRARY = re.compile(r".*/(?:site|dist)-packages/")
_STANDARD = re.compile(r".*/lib(?:64)?/(python3\.\d+t?/)")
_PATH = re.compile(r"[\w./+-]{1,160}")
_INTERNAL = re.compile(r"<frozen [\w.]{1,80}>|<(?:string|stdin)>")
_FUNCTION = re.compile(r"[\w.<>]{1,120}")
_NATIVE_FUNCTION = re.compile(r"[\w.<>:~&*,()\[\] -]{1,200}")
_NATIVE_FILE = re.compile(r"\.so(\.[\d.]+)?$|\.(c|cc|cpp|cu|h|hpp|pyx|rs)$|^\[vdso\]$")
UNKNOWN = "?"


def module_path(path: str) -> str:
    """A source file's path within its library; of other files, the last part alone."""
    if _INTERNAL.fullmatch(path):
        return path
    for pattern, keep in ((_LIBRARY, 0), (_STANDARD, 1)):
        if match := pattern.match(path):
            kept = (match.group(1) if keep else "") + path[match.end() :]
            break
    else:
        kept = path.rsplit("/", 1)[-1]
    return kept if _PATH.fullmatch(kept) else UNKNOWN


def frame_of(name: str, path: str, line: int) -> tuple[str, str, int]:
    """(module path, function, line) as recorded; whatever may be more than a name becomes `?`.

    A function's name comes from the program's source, but a program can give it any text.
    """
    module = module_path(path)
    native = bool(_NATIVE_FILE.search(module))
    wanted = _NATIVE_FUNCTION if native else _FUNCTION
    known = wanted.fullmatch(name) and not name.startswith("0x")
    return module, name if known else UNKNOWN, max(line, 0)


# -- py-spy's trace -------------------------------------------------------------------------------

_THREAD = re.compile(r"thread \((\d+)\)")


@dataclass(slots=True)
class _Thread:
    """One thread of the trace while it is read: its open frames, root first, since when."""

    tid: int = 0
    stack: list[int] = field(default_factory=list)
    since_us: int = 0


@dataclass(slots=True)
class Trace:
    """A trace's content: spans of (thread, begin µs, length µs, stack) and what they number.

    `stacks[i]` lists frames, root first, by their number in `frames`.
    """

    frames: list[tuple[str, str, int]] = field(default_factory=list)
    stacks: list[list[int]] = field(default_factory=list)
    spans: list[tuple[int, int, int, int]] = field(default_factory=list)
    end_us: int = 0


def read_trace(events: Sequence[Mapping[str, Any]]) -> Trace:
    """Chrome trace events of `py-spy record --threads`, begins and ends of frames, as spans.

    An event tells what changed since the sample before; a stack holds until the next change. Raises
    `PySpyOutput` where they are none.
    """
    trace = Trace()
    frames: dict[tuple[str, str, int], int] = {}
    stacks: dict[tuple[int, ...], int] = {}
    threads: dict[int, _Thread] = {}

    def settle(thread: _Thread, until_us: int) -> None:
        """What the thread showed up to now."""
        if thread.stack and thread.tid and until_us > thread.since_us:
            key = tuple(thread.stack)
            number = stacks.setdefault(key, len(stacks))
            length = until_us - thread.since_us
            trace.spans.append((thread.tid, thread.since_us, length, number))
        thread.since_us = until_us

    try:
        for event in events:
            stamp = int(event["ts"])
            thread = threads.setdefault(int(event["tid"]), _Thread())
            if stamp != thread.since_us:
                settle(thread, stamp)
            trace.end_us = max(trace.end_us, stamp)
            name = str(event["name"])
            # The outermost frame is not of the program: it tells the thread.
            root = _THREAD.match(name) if not event["args"]["filename"] else None
            if root:
                thread.tid = int(root.group(1)) if event["ph"] == "B" else thread.tid
            elif event["ph"] == "B":
                path, line = str(event["args"]["filename"]), int(event["args"]["line"] or 0)
                kept = frame_of(name, path, line)
                thread.stack.append(frames.setdefault(kept, len(frames)))
            elif thread.stack:
                thread.stack.pop()
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise PySpyOutput(f"py-spy's trace makes no sense: {error!r}") from error
    trace.frames = list(frames)
    trace.stacks = [list(key) for key in stacks]
    return trace


@dataclass(frozen=True, slots=True)
class Output:
    """What one py-spy wrote: its trace, when that began to arrive, and how many samples it took."""

    events: Sequence[Mapping[str, Any]]
    arrived_ns: int
    samples: int
    errors: int


_COUNTS = re.compile(rb"Samples: (\d+) Errors: (\d+)")


def read_output(pieces: Iterable[tuple[int, bytes]]) -> Output | None:
    """The trace among py-spy's lines; None if it wrote none. `pieces`: (when it came, bytes)."""
    pending, began_ns, size = b"", 0, 0
    events: Sequence[Mapping[str, Any]] | None = None
    arrived_ns = samples = errors = 0
    for ns, data in pieces:
        size += len(data)
        if size > MAX_OUTPUT_BYTES:
            raise PySpyOutput("py-spy wrote more than fits in memory")
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = pending + lines[0]
            stamps = [began_ns if pending else ns, *[ns] * (len(lines) - 1)]
            pending = b""
        else:
            stamps = []
        for stamp, line in zip(stamps, lines, strict=True):
            if line.startswith(b"["):
                try:
                    events, arrived_ns = json.loads(line), stamp
                except ValueError as error:
                    raise PySpyOutput(f"py-spy's trace is cut short: {error}") from error
            elif counts := _COUNTS.search(line):
                samples, errors = int(counts[1]), int(counts[2])
        if rest and not pending:
            began_ns = ns
        pending += rest
    return None if events is None else Output(events, arrived_ns, samples, errors)


def segment_of(output: Output, pid: int, started_ns: int, native: bool) -> Segment | None:
    """The fact that a recording keeps; None where nothing was sampled.

    py-spy's clock begins after `started_ns`; its last stamp lies before its output arrived.
    """
    trace = read_trace(output.events)
    if not trace.spans:
        return None
    latest_ns = output.arrived_ns - trace.end_us * 1000
    origin_ns = (started_ns + max(latest_ns, started_ns)) // 2
    begin_us = min(begin for _, begin, _, _ in trace.spans)
    begin_ns = origin_ns + begin_us * 1000
    return begin_ns, {
        "pid": pid,
        "end_ns": origin_ns + trace.end_us * 1000,
        "clock_error_ns": max(latest_ns - started_ns, 0) // 2,
        "rate_hz": NATIVE_RATE_HZ if native else RATE_HZ,
        "samples": output.samples,
        "errors": output.errors,
        "native": native,
        "frames": trace.frames,
        "stacks": trace.stacks,
        # thread, begin after this fact's own, length (both in microseconds), stack
        "spans": [(tid, begin - begin_us, length, s) for tid, begin, length, s in trace.spans],
    }


# -- one process under observation ----------------------------------------------------------------

# What py-spy says when it cannot, and what to do about it.
_REFUSALS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"permission denied|operation not permitted|EPERM", re.IGNORECASE),
        "reading another process's memory is not permitted: record as root on the host, or give "
        "the container CAP_SYS_PTRACE",
    ),
    (
        re.compile(r"unsupported version of python:? *([\d.]*)", re.IGNORECASE),
        "this py-spy does not know the server's Python: pip install --upgrade py-spy",
    ),
    (
        re.compile(r"python version|python interpreter|interpreter address|python library"),
        "py-spy found no interpreter in the process",
    ),
)


def refusal_of(said: str) -> str:
    """Why py-spy could not sample, with the next step, from what it wrote to stderr."""
    for pattern, reason in _REFUSALS:
        if pattern.search(said):
            return reason
    return "py-spy could not read the process"


class _Run:
    """One py-spy on one process: ends by itself after a segment, when told, or with the process."""

    def __init__(self, program: str, pid: int, native: bool, done: Callable[[_Run], None]) -> None:
        self.pid = pid
        self.native = native
        self.segment: Segment | None = None
        self.refusal = ""
        self.cpu_ns = 0
        self.stopped = False
        self._done = done
        rate = NATIVE_RATE_HZ if native else RATE_HZ
        how = "--native" if native else "--nonblocking"
        command = [program, "record", "--pid", str(pid), "--format", "chrometrace", how]
        command += ["--idle", "--threads", "--rate", str(rate), "--duration", str(SEGMENT_S)]
        self.started_ns = now_ns()
        self._process = subprocess.Popen(
            [*command, "--output", "/dev/stdout"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # a Ctrl-C is the recorder's to hear
        )
        self._reaping = threading.Lock()  # once reaped, its pid may be another's
        self._thread = threading.Thread(target=self._follow, name=f"py-spy {pid}", daemon=True)
        self._thread.start()

    def stop(self, number: int = signal.SIGINT) -> None:
        self.stopped = True
        with self._reaping:
            if self._process.returncode is None:
                os.kill(self._process.pid, number)

    def join(self, timeout_s: float) -> bool:
        """Whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _follow(self) -> None:
        said: list[bytes] = []
        assert self._process.stderr is not None
        errors = threading.Thread(target=lambda: said.append(self._read_errors()), daemon=True)
        errors.start()
        try:
            output = read_output(self._pieces())
            if output is not None:
                self.segment = segment_of(output, self.pid, self.started_ns, self.native)
        except PySpyOutput as error:
            self.refusal = str(error)
            self.stop(signal.SIGKILL)
        errors.join()
        code = self._reap()
        if code > 0:
            self.refusal = refusal_of(b"".join(said).decode(errors="replace"))
        elif code < 0 and not self.refusal:
            self.refusal = f"py-spy was ended by signal {-code}"
        self._done(self)

    def _reap(self) -> int:
        """Its exit code; what it cost is kept."""
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with self._reaping:
            _, status, usage = os.wait4(self._process.pid, 0)
            self._process.returncode = os.waitstatus_to_exitcode(status)
        self.cpu_ns = round((usage.ru_utime + usage.ru_stime) * NS_PER_S)
        return self._process.returncode

    def _pieces(self) -> Iterator[tuple[int, bytes]]:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                yield now_ns(), data

    def _read_errors(self) -> bytes:
        assert self._process.stderr is not None
        with self._process.stderr as pipe:
            return pipe.read()[:4096]


class PythonStacks:
    """Switches py-spy on and off for the target's Python processes; the recorder drains it.

    None of its methods waits, but for `stop`.
    """

    def __init__(
        self,
        enabled: bool = True,
        native: bool = False,
        program: str | None = None,
        proc: Path = PROC,
    ) -> None:
        self._enabled = self._wanted = enabled
        self._dropped = ""  # why, if it was for its cost
        self._native = native
        self._program = program or find_py_spy()
        self._proc = proc
        self._starting: dict[int, int] = {}
        self._open_until_ns = 0
        self._runs: dict[int, _Run] = {}
        self._not_before_ns: dict[int, int] = {}
        self._refused: dict[int, int] = {}  # process: refusals in a row
        self._python: set[int] = set()
        self._other: dict[int, int] = {}  # process that runs no Python: when to look again
        self._ended: queue.SimpleQueue[_Run] = queue.SimpleQueue()
        self._refusals: dict[str, int] = {}
        self._segments = self._errors = self._samples = 0
        self._met_python = False
        self.cpu_ns = 0

    # -- when to look ---------------------------------------------------------------------------

    def process_starts(self, pid: int, forked: bool = False) -> None:
        """A process of the target was executed, or `forked` from one."""
        self.process_ends(pid)  # what it runs now may be something else
        self._starting[pid] = now_ns() + (FORKED_NS if forked else 0)

    def process_listens(self) -> None:
        """A server of the target listens: what started has started."""
        self._starting.clear()

    def process_ends(self, pid: int) -> None:
        self._python.discard(pid)
        for known in (self._starting, self._other, self._refused, self._not_before_ns):
            known.pop(pid, None)

    def _is_open(self, ns: int, waited_for: bool) -> bool:
        for pid, since_ns in list(self._starting.items()):
            if ns - since_ns > START_LIMIT_NS:
                del self._starting[pid]
        begun = [pid for pid, since_ns in self._starting.items() if since_ns <= ns]
        if waited_for or any(self._is_python(pid, ns) for pid in begun):
            self._open_until_ns = ns + LINGER_NS
        return ns < self._open_until_ns

    def _is_python(self, pid: int, ns: int) -> bool:
        if pid in self._python:
            return True
        if ns < self._other.get(pid, 0):
            return False
        if runs_python(pid, self._proc):
            self._python.add(pid)
            self._met_python = True
            return True
        self._other[pid] = ns + RETRY_NS  # its libpython may be on its way
        return False

    # -- looking --------------------------------------------------------------------------------

    def follow(self, members: Iterable[int], ns: int, waited_for: bool = False) -> None:
        """Starts and stops what the moment asks for.

        `waited_for`: whether a request waits for its first token.
        """
        if not self._enabled:
            return
        if not self._is_open(ns, waited_for):
            for run in self._runs.values():
                if not run.stopped:
                    run.stop()
            return
        for pid in sorted(members, reverse=True):
            if len(self._runs) >= PROCESSES:
                return
            if pid not in self._runs and self._may_look(pid, ns) and self._program:
                self._look(self._program, pid, ns)

    def _may_look(self, pid: int, ns: int) -> bool:
        if ns < self._not_before_ns.get(pid, 0) or self._refused.get(pid, 0) >= _GIVE_UP_AFTER:
            return False
        return self._is_python(pid, ns)

    def _look(self, program: str, pid: int, ns: int) -> None:
        try:
            self._runs[pid] = _Run(program, pid, self._native, self._ended.put)
        except OSError as error:
            reason = f"{program} cannot be run: {error.strerror}"
            self._refusals[reason] = self._refusals.get(reason, 0) + 1
            self._not_before_ns[pid] = ns + 60 * RETRY_NS

    def drain(self) -> list[Segment]:
        """Segments that have come to their end."""
        found: list[Segment] = []
        with suppress(queue.Empty):
            while True:
                self._take(self._ended.get_nowait(), found)
        return found

    def _take(self, run: _Run, found: list[Segment]) -> None:
        self._runs.pop(run.pid, None)
        self.cpu_ns += run.cpu_ns
        if run.segment is not None:
            self._segments += 1
            self._samples += run.segment[1]["samples"]
            self._errors += run.segment[1]["errors"]
            self._refused.pop(run.pid, None)
            found.append(run.segment)
        if run.refusal and is_alive(run.pid, self._proc):
            self._refused[run.pid] = self._refused.get(run.pid, 0) + 1
            self._not_before_ns[run.pid] = now_ns() + RETRY_NS
            # An interpreter that is not up yet is no refusal until it stays so.
            if self._refused[run.pid] >= _GIVE_UP_AFTER:
                self._refusals[run.refusal] = self._refusals.get(run.refusal, 0) + 1

    def drop(self, reason: str) -> None:
        """No more looks from now on; what py-spy has seen it still tells."""
        self._enabled = False
        self._dropped = reason
        for run in self._runs.values():
            run.stop()

    def stop(self) -> list[Segment]:
        """Ends every py-spy, by force after a while; what they had to tell."""
        self._enabled = False
        for run in self._runs.values():
            run.stop()
        until_ns = now_ns() + int(STOP_TIMEOUT_S * NS_PER_S)
        for run in list(self._runs.values()):
            if not run.join(max(until_ns - now_ns(), 0) / NS_PER_S):
                run.stop(signal.SIGKILL)
                run.join(1)
                self._refusals["py-spy did not end when asked to"] = 1
        return self.drain()

    def source(self) -> Source:
        """The state of this source, as a recording keeps it."""
        lost = "what Python code did during the wait is not shown"
        if not self._wanted:
            return Source("python_stacks", "absent", "switched off (--no-python-stacks)")
        if self._dropped:
            return Source("python_stacks", "degraded", self._dropped, lost)
        if self._refusals:
            reason = max(self._refusals, key=lambda said: self._refusals[said])
            return Source("python_stacks", "degraded" if self._segments else "absent", reason, lost)
        if not self._met_python:
            return Source("python_stacks", "absent", "no process of the target runs Python")
        if self._program is None:
            reason = "py-spy is not installed: pip install py-spy"
            return Source("python_stacks", "absent", reason, lost)
        if self._samples and self._errors > self._samples:
            reason = f"{self._errors} of its looks failed, {self._samples} stacks were read"
            return Source("python_stacks", "degraded", reason, lost)
        return Source("python_stacks", "ok", "", "")
