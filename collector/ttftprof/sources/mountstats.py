"""What the kernel itself counts of NFS and SMB mounts, read when recording begins and ends.

These counters are a mount's, whoever uses it; analysis compares their growth with the requests that
the probes saw. Formats: nfs(5) and `fs/nfs/super.c`, `net/sunrpc/{stats,xprtsock}.c` for
/proc/PID/mountstats (statvers 1.1); `fs/smb/client/cifs_debug.c` for /proc/fs/cifs/Stats.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttftprof.sources.mounts import legible, unescape
from ttftprof.sources.processes import PROC

# In the kernel's order: linux/nfs_iostat.h.
BYTES = (
    "normal_read", "normal_write", "direct_read", "direct_write", "server_read", "server_write",
    "pages_read", "pages_written",
)  # fmt: skip
EVENTS = (
    "inode_revalidate", "dentry_revalidate", "data_invalidate", "attribute_invalidate", "open",
    "lookup", "access", "update_page", "read_page", "read_pages", "write_page", "write_pages",
    "read_directory", "set_attributes", "flush", "fsync", "lock", "release", "congestion_wait",
    "truncate", "extend_write", "silly_rename", "short_read", "short_write", "delay", "pnfs_read",
    "pnfs_write",
)  # fmt: skip
# Of a TCP transport, after its port; UDP has no connection, RDMA has more behind.
TCP = (
    "binds", "connects", "connect_ticks", "idle_s", "sends", "receives", "bad_xids", "in_flight",
    "backlog", "max_slots", "sending", "pending",
)  # fmt: skip
UDP = (
    "binds", "sends", "receives", "bad_xids", "in_flight", "backlog", "max_slots", "sending",
    "pending",
)  # fmt: skip
OP = (
    "operations", "transmissions", "timeouts", "sent_bytes", "received_bytes", "queue_ms",
    "wire_ms", "execute_ms", "errors",
)  # fmt: skip

_DEVICE = re.compile(r"device (\S+) mounted on (\S+) with fstype (\S+)(?: statvers=(\S+))?$")
_LEVELS = frozenset({"idle_s", "max_slots", "port"})  # no running totals: a later value replaces


Counters = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class MountStats:
    """One NFS mount. `transports`: one for each connection (nconnect), in order.

    `operations`: by the name of the RPC, only those that were ever used.
    """

    source: str
    point: str
    fstype: str
    options: str = ""
    age_s: int = 0
    pnfs: str | None = None
    bytes: Counters = field(default_factory=dict)
    events: Counters = field(default_factory=dict)
    transports: tuple[Counters, ...] = ()
    operations: Mapping[str, Counters] = field(default_factory=dict)

    @property
    def read_calls(self) -> Counters:
        """Counters of the calls that read data: READ, and READ_PLUS, which NFSv4.2 may use."""
        found: dict[str, int] = {}
        for name in ("READ", "READ_PLUS"):
            for counter, value in self.operations.get(name, {}).items():
                found[counter] = found.get(counter, 0) + value
        return found

    def as_fact(self) -> dict[str, Any]:
        return {
            "mount": legible(self.point),
            "source": legible(self.source),
            "fstype": self.fstype,
            "options": self.options,
            "age_s": self.age_s,
            "pnfs": self.pnfs,
            "bytes": dict(self.bytes),
            "events": {name: n for name, n in self.events.items() if n},
            "transports": [dict(t) for t in self.transports],
            "operations": {name: dict(counts) for name, counts in self.operations.items()},
        }


def parse_mountstats(text: str) -> list[MountStats]:
    """The NFS mounts of a mountstats file, later ones on top; lines that make no sense are left
    out."""
    found: list[MountStats] = []
    lines: list[str] = []
    head: re.Match[str] | None = None
    for line in [*text.split("\n"), "device end mounted on / with fstype none"]:
        begins = _DEVICE.match(line)
        if not begins:
            lines.append(line)
            continue
        if head is not None and head[4] is not None:
            found.append(_mount(head, lines))
        head, lines = begins, []
    return found


def _mount(head: re.Match[str], lines: Iterable[str]) -> MountStats:
    values: dict[str, str] = {}
    transports: list[Counters] = []
    operations: dict[str, Counters] = {}
    in_operations = False
    for line in lines:
        name, colon, rest = line.strip().partition(":")
        rest = rest.strip()
        if name == "per-op statistics":
            in_operations = True
        elif not colon:
            continue
        elif in_operations:
            counts = _counters(OP, rest.split())
            if counts.get("operations") or counts.get("transmissions"):
                operations[name] = counts
        elif name == "xprt":
            transports.append(_transport(rest.split()))
        else:
            values.setdefault(name, rest)
    age = values.get("age", "")
    return MountStats(
        source=unescape(head[1]),
        point=unescape(head[2]),
        fstype=head[3],
        options=values.get("opts", ""),
        age_s=int(age) if _is_number(age) else 0,
        pnfs=_pnfs(values.get("nfsv4", "")),
        bytes=_counters(BYTES, values.get("bytes", "").split()),
        events=_counters(EVENTS, values.get("events", "").split()),
        transports=tuple(t for t in transports if t),
        operations=operations,
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 20


def _counters(names: Iterable[str], values: list[str]) -> dict[str, int]:
    """Names with their values, up to the first that is no number (old kernels write fewer)."""
    found: dict[str, int] = {}
    for name, value in zip(names, values, strict=False):
        if not _is_number(value):
            break
        found[name] = int(value)
    return found


def _transport(values: list[str]) -> dict[str, int]:
    if not values:
        return {}
    names = UDP if values[0] == "udp" else TCP
    return _counters(("port", *names), values[1:])


def _pnfs(nfsv4: str) -> str | None:
    """The layout driver in use, None without pNFS."""
    found = re.search(r"pnfs=([^,]+)", nfsv4)
    return None if not found or found[1] in ("not configured", "none") else found[1]


def growth(before: MountStats | None, after: MountStats) -> MountStats:
    """What a mount's counters grew by; without a `before` (mounted meanwhile) all of it.

    So is all of one that was mounted anew at the same place: its counters began at 0.
    """
    if before is None or before.source != after.source or after.age_s < before.age_s:
        return after
    operations = {
        name: _grown(before.operations.get(name, {}), counts)
        for name, counts in after.operations.items()
    }
    older = [*before.transports, *({} for _ in after.transports)]
    return MountStats(
        source=after.source,
        point=after.point,
        fstype=after.fstype,
        options=after.options,
        age_s=after.age_s,
        pnfs=after.pnfs,
        bytes=_grown(before.bytes, after.bytes),
        events=_grown(before.events, after.events),
        transports=tuple(_grown(o, t) for o, t in zip(older, after.transports, strict=False)),
        operations={n: c for n, c in operations.items() if c.get("operations")},
    )


def _grown(before: Counters, after: Counters) -> dict[str, int]:
    return {n: v if n in _LEVELS else max(v - before.get(n, 0), 0) for n, v in after.items()}


def from_fact(fact: Mapping[str, Any]) -> MountStats:
    """The inverse of `MountStats.as_fact`. Raises what a malformed fact makes it raise."""
    return MountStats(
        source=str(fact.get("source", "")),
        point=str(fact["mount"]),
        fstype=str(fact.get("fstype", "")),
        options=str(fact.get("options", "")),
        age_s=int(fact.get("age_s") or 0),
        pnfs=fact.get("pnfs"),
        bytes=_numbers(fact.get("bytes")),
        events=_numbers(fact.get("events")),
        transports=tuple(_numbers(t) for t in fact.get("transports") or ()),
        operations={str(n): _numbers(c) for n, c in (fact.get("operations") or {}).items()},
    )


def _numbers(fact: Mapping[str, Any] | None) -> dict[str, int]:
    return {str(name): int(value) for name, value in (fact or {}).items()}


# -- SMB ------------------------------------------------------------------------------------------

_SHARE = re.compile(r"\d+\) (\\\\.+?)\s*$")
_TRAFFIC = re.compile(r"(?:Bytes read|.*\bread): (\d+)", re.ASCII)
_TOTAL = re.compile(r"(\w+): (\d+) total (?:\(\w+\), )?(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class ShareStats:
    """One SMB share: bytes and calls of all its mounts since the module was loaded or reset."""

    share: str
    read_bytes: int = 0
    reads: int = 0
    failed_reads: int = 0

    def as_fact(self) -> dict[str, Any]:
        return {
            "share": self.share,
            "read_bytes": self.read_bytes,
            "reads": self.reads,
            "failed_reads": self.failed_reads,
        }


def parse_cifs_stats(text: str) -> list[ShareStats]:
    """The shares of a /proc/fs/cifs/Stats file; what makes no sense is left out. One that is
    mounted in two ways is listed twice there: its counts are added."""
    found: dict[str, ShareStats] = {}
    share, traffic, reads, failed = "", 0, 0, 0
    for line in [*text.split("\n"), "0) \\\\end"]:
        begins = _SHARE.match(line)
        if begins:
            if share:
                known = found.get(share, ShareStats(share))
                found[share] = ShareStats(
                    share,
                    known.read_bytes + traffic,
                    known.reads + reads,
                    known.failed_reads + failed,
                )
            share, traffic, reads, failed = begins[1], 0, 0, 0
        elif share and line.startswith("Bytes read"):
            moved = _TRAFFIC.match(line)
            traffic = int(moved[1][:20]) if moved else 0
        elif share and line.startswith("Reads:"):
            counted = _TOTAL.match(line)
            reads = int(counted[2][:20]) if counted else 0
            failed = int(counted[3][:20]) if counted else 0
    return list(found.values())


# -- sampler --------------------------------------------------------------------------------------


def sample(pids: Iterable[int], proc: Path = PROC) -> list[MountStats]:
    """The NFS mounts that these processes see, each once; of this process if all are gone."""
    found: dict[tuple[str, str], MountStats] = {}
    seen: set[str] = set()
    for who in [*map(str, pids), "self"]:
        try:
            namespace = str((proc / who / "ns/mnt").readlink())
            if namespace in seen or (who == "self" and seen):
                continue
            text = (proc / who / "mountstats").read_text(errors="surrogateescape")
        except OSError:
            continue
        seen.add(namespace)
        for mount in parse_mountstats(text):
            found[mount.point, mount.source] = mount
    return list(found.values())


def sample_shares(proc: Path = PROC) -> list[ShareStats]:
    """The SMB shares of this machine; none if the module is not loaded."""
    try:
        return parse_cifs_stats((proc / "fs/cifs/Stats").read_text(errors="replace"))
    except OSError:
        return []
