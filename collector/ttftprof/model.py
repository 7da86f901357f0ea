"""What the analysis concludes, as plain frozen values: the one thing every report prints.

`reports/json.py` writes exactly this as `ttftprof.report/1` (schema shipped with the package).
Times are CLOCK_MONOTONIC nanoseconds; a fact that is not known is None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import numpy.typing as npt

# Closed vocabularies, in the order they are drawn.
PHASES = (
    "queue",
    "evict",
    "launch",
    "load",
    "init",
    "ready_gap",
    "prefill",
    "first_decode",
    "unexplained",
)
ACTIVITIES = (
    "storage_wait",
    "fault",
    "cpu",
    "transfer",
    "gpu",
    "lock",
    "reclaim",
    "sleep",
    "idle",
    "unknown",  # nothing was recorded of the process that should have worked
)
BASES = ("observed", "inferred")
OUTCOMES = ("ok", "error", "timeout", "cancelled", "incomplete")
CONFIDENCES = ("high", "medium", "low")
STORAGE_VERDICTS = (
    "pattern",
    "hardware or link",
    "memory",
    "cache worked",
    "not storage",
    "unknown",
)
RATES = 32


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact behind a statement: which source saw what, how much."""

    source: str
    what: str
    value: float | int | str | None = None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """Something a phase was spent on: `spent_ns` of the time from `start_ns` to `end_ns`.

    Parts may overlap and leave gaps. `part`: context, compile, graph_capture, alloc; of init also
    kv_alloc, tokenizer, warmup; of load storage, fault, copy, transfer. Of an engine that is put to
    sleep and woken: engine_sleep (of evict), engine_wake (of load and init).
    """

    part: str
    start_ns: int
    end_ns: int
    spent_ns: int
    basis: str
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True)
class Phase:
    """One interval of the partition of [request start, first token]."""

    phase: str
    start_ns: int
    end_ns: int
    basis: str
    evidence: tuple[Evidence, ...] = ()
    parts: tuple[Part, ...] = ()

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Activity:
    """What the critical threads did in one interval; the intervals partition the same span."""

    activity: str
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True, eq=False)
class Activities(Sequence[Activity]):
    """Activities in order of time, as columns: a wait of a minute may have 100,000 of them.

    `start_ns`, `end_ns`: int64; `code`: uint8, the position in ACTIVITIES.
    """

    start_ns: npt.NDArray[np.int64]
    end_ns: npt.NDArray[np.int64]
    code: npt.NDArray[np.uint8]

    @classmethod
    def none(cls) -> Activities:
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint8))

    @classmethod
    def of(cls, activities: Iterable[Activity]) -> Activities:
        if isinstance(activities, Activities):
            return activities
        rows = [(a.start_ns, a.end_ns, ACTIVITIES.index(a.activity)) for a in activities]
        columns = np.array(rows, np.int64).reshape(-1, 3)
        return cls(columns[:, 0], columns[:, 1], columns[:, 2].astype(np.uint8))

    def __len__(self) -> int:
        return len(self.code)

    @overload
    def __getitem__(self, index: int) -> Activity: ...
    @overload
    def __getitem__(self, index: slice) -> Activities: ...
    def __getitem__(self, index: int | slice) -> Activity | Activities:
        if isinstance(index, slice):
            return Activities(self.start_ns[index], self.end_ns[index], self.code[index])
        name = ACTIVITIES[self.code[index]]
        return Activity(name, int(self.start_ns[index]), int(self.end_ns[index]))

    def __iter__(self) -> Iterator[Activity]:
        names = (ACTIVITIES[code] for code in self.code.tolist())
        return map(Activity, names, self.start_ns.tolist(), self.end_ns.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash((self.start_ns.tobytes(), self.end_ns.tobytes(), self.code.tobytes()))

    def durations_ns(self) -> dict[str, int]:
        """{activity: ns}, in the order in which they first occur."""
        return self.within(int(self.start_ns.min()), int(self.end_ns.max())) if len(self) else {}

    def within(self, start_ns: int, end_ns: int) -> dict[str, int]:
        """{activity: ns in an interval}, in the order in which they first occur in it."""
        overlap = np.minimum(self.end_ns, end_ns) - np.maximum(self.start_ns, start_ns)
        real = overlap > 0
        found, first = np.unique(self.code[real], return_index=True)
        totals = np.zeros(len(ACTIVITIES), np.int64)
        np.add.at(totals, self.code[real], overlap[real])
        return {ACTIVITIES[code]: int(totals[code]) for code in found[np.argsort(first)]}


@dataclass(frozen=True, slots=True)
class Quantiles:
    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class InFlight:
    """Requests under way at once, weighed by time, over the time in which at least one was."""

    mean: float
    max: int
    p50: float | None = None
    p95: float | None = None


@dataclass(frozen=True, slots=True)
class WaitSplit:
    """Where the requests for a file were while its threads waited; the parts sum to the wait.

    `queue`: handed over, not yet sent. `wire`: on the wire and in the server (NFS, SMB). `server`:
    with a daemon or server that gives no split (FUSE, 9P, Ceph). `device`: at the disk. `client`:
    no request was under way, so the machine's own work: submitting, decrypting, a throttle; and
    waits too short to be recorded.
    """

    queue_ns: int = 0
    wire_ns: int = 0
    server_ns: int = 0
    device_ns: int = 0
    client_ns: int = 0

    @property
    def total_ns(self) -> int:
        return self.queue_ns + self.wire_ns + self.server_ns + self.device_ns + self.client_ns

    def plus(self, other: WaitSplit) -> WaitSplit:
        return WaitSplit(
            queue_ns=self.queue_ns + other.queue_ns,
            wire_ns=self.wire_ns + other.wire_ns,
            server_ns=self.server_ns + other.server_ns,
            device_ns=self.device_ns + other.device_ns,
            client_ns=self.client_ns + other.client_ns,
        )


@dataclass(frozen=True, slots=True)
class PhaseShare:
    """What of a file's use fell into one phase."""

    phase: str
    bytes_from_storage: int | None
    storage_wait_ns: int
    wait_split: WaitSplit


@dataclass(frozen=True, slots=True)
class PathModel:
    """What the requests of a recording say of a storage path: rate = request size × depth /
    latency, at most the link's rate.

    `latency_ns`: of a request without its bytes' time on the link. `link_bytes_per_second`: what
    it gives at most; None if nothing tells it. `read_request_bytes` and
    `read_depth`: what 1 MiB reads in order make of the readahead in force; `read_bytes_per_second`
    and `read_ns` are the model's for these bytes read so. None without a link's rate or readahead.
    """

    latency_ns: int
    link_bytes_per_second: float | None
    read_request_bytes: int | None
    read_depth: float | None
    read_bytes_per_second: float | None
    read_ns: int | None


@dataclass(frozen=True, slots=True)
class FileUse:
    """What one request did with one file. `access`: mmap, read, direct, mixed.

    `requests`: asked of the disk, server or daemon. `sequential_share`: of them, those that went on
    where another ended. `evicted`, `reclaimed` (evicted because memory was short; `before`: while
    recording ran, but before this) and `refaulted` bytes (from storage although they had been in
    the cache while recording ran).
    `read_by_others_bytes`: other programs brought into the cache meanwhile. `rates`:
    (moment, bytes per second until the next moment), at most `RATES` of them. `path_model`: see
    there. `read_amplification`: bytes from storage for each that was needed, at least 1: what was
    read ahead in vain (known of read() only), and what came again after it was evicted.
    `readahead_asks`, `readahead_bytes`: how often and for how much the kernel asked the client of
    NFS or FUSE to read ahead, beside the `requests` that it made of it; None if it was never asked.
    """

    path: str
    device: str | None
    inode: int
    fstype: str | None
    mount: str | None
    size_bytes: int
    bytes_from_storage: int | None
    bytes_from_cache: int | None
    major_faults: int | None
    minor_faults: int | None
    storage_wait_ns: int
    bytes_per_second: float | None
    request_size_bytes: Quantiles | None
    in_flight: InFlight | None
    access: str | None
    advice: tuple[str, ...] = ()
    is_weights: bool = False
    reads: int = 0
    mmaps: int = 0
    residency_before: float | None = None
    requests: int | None = None
    sequential_share: float | None = None
    wait_split: WaitSplit | None = None
    by_phase: tuple[PhaseShare, ...] = ()
    evicted_bytes: int | None = None
    reclaimed_bytes: int | None = None
    reclaimed_before_bytes: int | None = None
    refaulted_bytes: int | None = None
    read_by_others_bytes: int | None = None
    rates: tuple[tuple[int, float], ...] = ()
    path_model: PathModel | None = None
    read_amplification: float | None = None
    readahead_asks: int | None = None
    readahead_bytes: int | None = None


def first_weights(files: Sequence[FileUse]) -> FileUse | None:
    """The first file of weights: as `storage.uses_of` orders them, the one most was read of."""
    return next((file for file in files if file.is_weights), None)


def weights_bytes(files: Iterable[FileUse]) -> int | None:
    """The size of all weights among them, shards together, each file once; None for none."""
    sizes = {file.path: file.size_bytes for file in files if file.is_weights}
    return sum(sizes.values()) if sizes else None


def file_of_load(files: Sequence[FileUse]) -> FileUse | None:
    """The file that a load is about: weights, else the one that most came of."""
    return first_weights(files) or (files[0] if files else None)


@dataclass(frozen=True, slots=True)
class Connection:
    """What one of a mount's connections to its server (nconnect) carried of a request's reads.
    `number`: the kernel's, as in /sys/kernel/sunrpc/xprt-switches/*/xprt-NUMBER-*."""

    number: int
    requests: int
    bytes: int


@dataclass(frozen=True, slots=True)
class MountUse:
    """A mount with files that a request used. `requests` and their times are those of its files;
    queue and wire are known of NFS and SMB, `connections` of NFS. `link`: the
    narrowest on the way to its storage, with its line rate: an upper bound."""

    path: str
    fstype: str
    options: str
    read_ahead_kb: int | None
    requests: int | None
    queue_ns: int | None
    wire_ns: int | None
    total_ns: int | None
    retransmits: int | None
    link: str | None = None
    link_bytes_per_second: float | None = None
    connections: tuple[Connection, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory that the server may use: the machine's, and the tightest limit of its control groups
    (`limit_of` names the group; None: no limit)."""

    host_bytes: int | None
    limit_bytes: int | None
    limit_of: str | None


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What a GPU did for one request. `label`: `GPU 0`, of an instance of it `GPU 0 MIG 1`."""

    index: int
    label: str
    name: str
    memory_before_bytes: int | None
    memory_after_bytes: int | None
    busy_ns: int | None
    transfer_bytes: int | None
    source: str


@dataclass(frozen=True, slots=True)
class Action:
    """Something to change, what it should gain by a stated model (None: no model), how to check."""

    change: str
    expected_gain_ns: int | None
    verify: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """`cause` is a phase or "unknown"; `share` of TTFT that phase × activity took, 0..1.

    `storage`, one of STORAGE_VERDICTS, judges the part of the weights' storage in it, whatever the
    cause; None where nothing is known of it.
    """

    cause: str
    activity: str | None
    share: float | None
    confidence: str
    explanation: str
    actions: tuple[Action, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    storage: str | None = None


@dataclass(frozen=True, slots=True)
class PythonShare:
    """One category of Python code in one phase, by samples. Several threads at once share one look.

    `share` of the phase's looks, true within `error` (one standard error); `estimated_ns` is that
    share of the phase's length. `packages`: whose code it was, the most frequent first.
    """

    category: str
    samples: float
    share: float
    error: float
    estimated_ns: int
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PythonStack:
    """A stack (`module:function`, outermost first) and in how many looks it held the phase up."""

    category: str
    frames: tuple[str, ...]
    samples: float


@dataclass(frozen=True, slots=True)
class PythonWait:
    """Code (`module:function:line`) that waited: for exactly so long, it alone by a sample."""

    activity: str
    category: str
    frame: str
    path: str | None
    wait_ns: int


@dataclass(frozen=True, slots=True)
class PythonTime:
    """What Python code did in one phase: `samples` looks, `rate_hz` a second while it was watched.

    `covered`: the part of the phase that was watched. Shares are of what was.
    """

    phase: str
    samples: int
    rate_hz: int
    covered: float
    shares: tuple[PythonShare, ...]
    stacks: tuple[PythonStack, ...] = ()
    waits: tuple[PythonWait, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One request a client made, with the partition of its wait.

    Without a first token `phases` end where the request ended or the recording did.
    """

    id: str
    engine: str | None
    model: str | None
    endpoint: str
    streamed: bool | None
    outcome: str
    start_ns: int
    first_token_ns: int | None
    end_ns: int | None
    switched: bool
    residency_before: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    phases: tuple[Phase, ...]
    activities: Sequence[Activity]
    files: tuple[FileUse, ...]
    mounts: tuple[MountUse, ...]
    gpu: tuple[GpuUse, ...]
    verdict: Verdict
    notes: tuple[str, ...] = ()
    memory: MemoryUse | None = None
    python: tuple[PythonTime, ...] = ()

    @property
    def ttft_ns(self) -> int | None:
        return None if self.first_token_ns is None else self.first_token_ns - self.start_ns

    def phase_totals(self) -> dict[str, int]:
        """{phase: ns}, every phase that occurs, in vocabulary order."""
        totals = dict.fromkeys(PHASES, 0)
        for phase in self.phases:
            totals[phase.phase] += phase.duration_ns
        return {name: ns for name, ns in totals.items() if ns}

    def activity_totals(self) -> dict[str, int]:
        spent = Activities.of(self.activities).durations_ns()
        return {name: spent[name] for name in ACTIVITIES if name in spent}

    def phase_activity(self) -> dict[str, dict[str, int]]:
        """{phase: {activity: ns}}: the two partitions laid over each other."""
        activities = Activities.of(self.activities)
        table: dict[str, dict[str, int]] = {}
        for phase in self.phases:
            for name, ns in activities.within(phase.start_ns, phase.end_ns).items():
                row = table.setdefault(phase.phase, {})
                row[name] = row.get(name, 0) + ns
        return table


@dataclass(frozen=True, slots=True)
class Series:
    """A counter over time: `values[i]` is its running total (or level) at `ns[i]`.

    `name`: storage_bytes (total), major_faults, minor_faults (totals), cached_bytes (level),
    transfer_bytes (total, to devices), gpu_… (levels of a device or of a process on it).
    `path` names the file or device it belongs to, None for all.
    """

    name: str
    unit: str
    path: str | None
    ns: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SourceState:
    name: str
    state: str
    reason: str = ""
    lost: str = ""

    @property
    def is_missed(self) -> bool:
        """Whether its state costs anything: a machine without a GPU does not miss it."""
        return self.state != "ok" and not (self.state == "absent" and not self.lost)

    @property
    def had_work(self) -> bool:
        """Whether it worked and could have seen something: a probe for file systems on which no
        file lies is ok, and says so as its reason."""
        return self.state == "ok" and not self.reason.startswith("no file lies on ")


@dataclass(frozen=True, slots=True)
class ProbeCost:
    """Measured in sampled windows of the recording (kernel statistics)."""

    name: str
    runs: int
    mean_ns: float


@dataclass(frozen=True, slots=True)
class Relief:
    """Recording cost `share` of the machine, more than its `budget`: `what` was done `how` from
    `ns` on, and `lost` is what that costs."""

    ns: int
    what: str
    how: str
    lost: str
    share: float
    budget: float


@dataclass(frozen=True, slots=True)
class Overhead:
    cpu_ns: int | None
    max_rss_bytes: int | None
    probes: tuple[ProbeCost, ...] = ()
    reliefs: tuple[Relief, ...] = ()


@dataclass(frozen=True, slots=True)
class Spans:
    """Intervals of one row of a drawing: parallel tuples, by start.

    `busy_ns` is how much of an interval its name took: all of it where it is exact, less where
    `condense` pooled neighbours (those share their start and end).
    """

    label: str
    start_ns: tuple[int, ...] = ()
    end_ns: tuple[int, ...] = ()
    name: tuple[str, ...] = ()
    busy_ns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ProcessTrack:
    """One life of a process, as far as it was recorded.

    `running`: threads on a CPU, mean of each interval between two stamps. `threads`: what each of
    the busiest did; `threads_left_out` did less. `calls`: the marked calls, by their name;
    `driver_calls`: those into a GPU driver. `python`: what Python code its threads were busy with,
    by samples: a row a thread, its names are the categories of `engines.python_code`.
    """

    tgid: int
    label: str
    argv: tuple[str, ...]
    start_ns: int
    end_ns: int
    running: Series
    threads: tuple[Spans, ...]
    threads_left_out: int
    calls: Spans
    driver_calls: Spans = Spans("driver calls")
    python: tuple[Spans, ...] = ()


@dataclass(frozen=True, slots=True)
class SizeTrack:
    """Requests to storage of one file by time and size, counted in cells.

    Cell i: `count[i]` requests of at most `size_bytes[i]` each (a class of sizes), together
    `total_bytes[i]`, began in [start_ns[i], start_ns[i] + quantum_ns).
    """

    path: str
    quantum_ns: int
    start_ns: tuple[int, ...]
    size_bytes: tuple[int, ...]
    count: tuple[int, ...]
    total_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """A moment worth a mark: a log line that means something."""

    ns: int
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Tracks:
    """What a drawing shows beside the requests; bounded, however long the recording.

    `storage`: bytes from storage as running totals; the name tells `mount_bytes` from `file_bytes`.
    """

    processes: tuple[ProcessTrack, ...] = ()
    storage: tuple[Series, ...] = ()
    sizes: tuple[SizeTrack, ...] = ()
    ticks: tuple[Tick, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """One recording, concluded."""

    tool: Mapping[str, Any]
    host: Mapping[str, Any]
    path: str
    start_ns: int
    end_ns: int
    complete: bool
    ended_because: str
    realtime_offset_ns: int | None
    sources: tuple[SourceState, ...]
    lost: Mapping[str, int]
    overhead: Overhead
    requests: tuple[Request, ...]
    series: tuple[Series, ...] = ()
    notes: tuple[str, ...] = field(default=())
    starts: tuple[Request, ...] = ()
    """Starts of a server that no request waited for (a restart with another model): no endpoint,
    no first token; `end_ns` is when it was able to serve, `model` the file it loaded."""
    tracks: Tracks = Tracks()
