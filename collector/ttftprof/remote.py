"""Reads that a server or a FUSE daemon answered: by file and mount, their sizes, depth and split.

Pure. A read runs from its hand-over to the answer. Its split, where the transport tells it (NFS,
SMB): *queue* before it was sent, *wire* from sending to the answer (network and server); the rest
is the client's own work. Sums over reads that overlap exceed the time that passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ttftprof import scale
from ttftprof.events import CONNECTION_BIT, FAMILY_MASK, Family, Kind, Records, RemoteFlag
from ttftprof.grouping import distinct
from ttftprof.model import Connection, InFlight, Quantiles
from ttftprof.sources.mountstats import MountStats, ShareStats, from_fact, growth

# One read. `split` tells whether queue, wire, execute and sent are known; `connection`: the number
# of that which carried it, plus one; 0 if not known.
READ = np.dtype(
    [
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("tid", "<u4"),
        ("tgid", "<u4"),
        ("dev", "<u4"),
        ("family", "u1"),
        ("failed", "?"),
        ("unanswered", "?"),
        ("direct", "?"),
        ("split", "?"),
        ("ino", "<u8"),
        ("offset", "<u8"),
        ("asked_bytes", "<i8"),
        ("got_bytes", "<i8"),
        ("queue_ns", "<i8"),
        ("wire_ns", "<i8"),
        ("execute_ns", "<i8"),
        ("sent", "<i8"),
        ("connection", "<u2"),
    ]
)
FAMILY_NAMES = {
    Family.NFS: "NFS",
    Family.SMB: "SMB",
    Family.FUSE: "FUSE",
    Family.NETFS: "network file system",
}


def reads_of(events: Mapping[Kind, Records]) -> Records:
    """All remote reads as `READ`, oldest first: each record with its split, if there is one."""
    remote = events[Kind.REMOTE]
    found = np.zeros(len(remote), READ)
    for name in ("start_ns", "tid", "tgid", "dev", "ino"):
        found[name] = remote[name]
    found["end_ns"] = found["start_ns"] + remote["duration_ns"].astype(np.int64)
    flags = remote["flags"]
    found["family"] = flags & FAMILY_MASK
    for name in ("failed", "unanswered", "direct"):
        found[name] = (flags & RemoteFlag[name.upper()]) != 0
    found["offset"] = remote["b"]
    found["asked_bytes"] = remote["a"] >> np.uint64(32)
    found["got_bytes"] = remote["a"] & np.uint64(0xFFFFFFFF)
    _add_splits(found, events[Kind.REMOTE_SPLIT])
    ordered: Records = found[np.argsort(found["start_ns"], kind="stable")]
    return ordered


def _add_splits(found: Records, splits: Records) -> None:
    """A split carries the start, thread and file of its read."""
    names = ("start_ns", "tid", "dev", "ino")
    at = {key: i for i, key in enumerate(zip(*(found[n].tolist() for n in names), strict=True))}
    keys = zip(*(splits[n].tolist() for n in names), strict=True)
    places = np.array([at.get(key, -1) for key in keys], np.int64)
    known = places >= 0  # the read of the others was lost in a full ring
    places, splits = places[known], splits[known]
    found["split"][places] = True
    found["sent"][places] = splits["flags"]
    found["connection"][places] = splits["b"] >> np.uint64(CONNECTION_BIT)
    found["execute_ns"][places] = splits["b"] & np.uint64((1 << CONNECTION_BIT) - 1)
    for name, column in (("wire_ns", "duration_ns"), ("queue_ns", "a")):
        # A damaged file may hold anything; a time is none of the upper half of 64 bits.
        found[name][places] = np.maximum(splits[column].astype(np.int64), 0)


def on_file(reads: Records, dev: int, ino: int) -> Records:
    """Those of one file."""
    own: Records = reads[(reads["dev"] == dev) & (reads["ino"] == ino)]
    return own


def begun_within(reads: Records, start_ns: int, end_ns: int) -> Records:
    """Those handed over in [start, end), and those that were still unanswered then."""
    begun = (reads["start_ns"] >= start_ns) & (reads["start_ns"] < end_ns)
    hanging = reads["unanswered"] & (reads["start_ns"] < end_ns)
    found: Records = reads[begun | hanging]
    return found


def sizes(reads: Records) -> Quantiles | None:
    """Bytes asked for by a read."""
    if not len(reads):
        return None
    ordered = np.sort(reads["asked_bytes"]).astype(np.float64)
    # As np.percentile does, which takes far longer to begin than so few values to be ordered.
    at = np.array([0.50, 0.95]) * (len(ordered) - 1)
    p50, p95 = np.interp(at, np.arange(len(ordered)), ordered).tolist()
    return Quantiles(p50, p95)


def depths(reads: Records) -> tuple[Records, Records]:
    """(moments, reads under way from each to the next): a step function, parallel arrays."""
    stamps = np.concatenate([reads["start_ns"], reads["end_ns"]])
    steps = np.concatenate([np.ones(len(reads), np.int64), -np.ones(len(reads), np.int64)])
    # At one moment ends come before beginnings: what follows another is not beside it.
    order = np.lexsort((steps, stamps))
    return stamps[order], np.cumsum(steps[order])


def in_flight(reads: Records) -> InFlight | None:
    """Reads under way at once, averaged over the time in which at least one was."""
    if not len(reads):
        return None
    stamps, depth = depths(reads)
    spans, depth = np.diff(stamps), depth[:-1]
    under_way = depth > 0
    busy = int(spans[under_way].sum())
    if not busy:
        return InFlight(1.0, 1, 1.0, 1.0)
    mean = float((depth * spans).sum()) / busy
    p50, p95 = _weighed(depth[under_way], spans[under_way], (0.5, 0.95))
    return InFlight(mean, max(int(depth.max()), 1), p50, p95)


def _weighed(values: Records, weights: Records, shares: tuple[float, ...]) -> list[float]:
    """The values below which these shares of the weight lie."""
    order = np.argsort(values, kind="stable")
    upto = np.cumsum(weights[order])
    at = np.searchsorted(upto, np.array(shares) * upto[-1])
    return [float(values[order][min(int(i), len(order) - 1)]) for i in at]


def sequential_share(reads: Records) -> float | None:
    """Share of reads that began where an earlier one of the file ended (its first counts)."""
    if not len(reads):
        return None
    follow = 0
    order = np.lexsort((reads["ino"], reads["dev"]))
    dev, ino = reads["dev"][order], reads["ino"][order]
    edges = np.flatnonzero((dev[1:] != dev[:-1]) | (ino[1:] != ino[:-1])) + 1
    for own in (np.take(reads, of_one) for of_one in np.split(order, edges)):
        begins = own["offset"].astype(np.int64)
        ends, first = np.unique(begins + own["asked_bytes"], return_index=True)
        at = np.minimum(np.searchsorted(ends, begins), len(ends) - 1)
        ended_before = (ends[at] == begins) & (first[at] < np.arange(len(own)))
        follow += int(np.count_nonzero(ended_before | (begins == begins[0])))
    return follow / len(reads)


def busy_ns(reads: Records) -> int:
    """Time in which at least one read was under way."""
    if not len(reads):
        return 0
    stamps, depth = depths(reads)
    return int(np.diff(stamps)[depth[:-1] > 0].sum())


FEW_CUT = 0.05  # share of the SMB reads: a connection begins with few credits
TOTALS = ("requests", "queue_ns", "wire_ns", "total_ns", "retransmits")


def totals(reads: Records) -> dict[str, int | None]:
    """`TOTALS` of some reads; None if not known.

    `total_ns` sums each read's time from hand-over to answer.
    """
    split = reads[reads["split"]]
    known = len(split) > 0 and len(split) == np.count_nonzero(~reads["unanswered"])
    counted = reads[reads["family"] == Family.NFS]
    return {
        "requests": len(reads),
        "queue_ns": int(split["queue_ns"].sum()) if known else None,
        "wire_ns": int(split["wire_ns"].sum()) if known else None,
        "total_ns": int((reads["end_ns"] - reads["start_ns"]).sum()),
        "retransmits": int(np.maximum(counted["sent"] - 1, 0).sum()) if len(counted) else None,
    }


def connections(reads: Records) -> tuple[Connection, ...]:
    """What each connection carried of some answered reads, where that is known, by number."""
    found = []
    for number in distinct(reads["connection"][reads["connection"] != 0]).tolist():
        own = reads[reads["connection"] == number]
        found.append(Connection(number - 1, len(own), int(own["got_bytes"].sum())))
    return tuple(found)


# -- the kernel's own counters --------------------------------------------------------------------


def mounts_growth(facts: Iterable[Mapping[str, Any]]) -> dict[str, MountStats]:
    """{mount point: what its counters grew by} from the facts of kind `mountstats`.

    Empty if the end was not sampled (the recorder was killed). Malformed facts are left out.
    """
    first: dict[tuple[str, str], MountStats] = {}
    last: dict[str, MountStats] = {}
    for fact in facts:
        try:
            stats = from_fact(fact)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
        if fact.get("when") == "end":
            last[stats.point] = stats
        else:  # in another mount namespace another server may be mounted at the same place
            first[stats.point, stats.source] = stats
    return {p: growth(first.get((p, stats.source)), stats) for p, stats in last.items()}


def shares_growth(facts: Iterable[Mapping[str, Any]]) -> dict[str, ShareStats]:
    """{share: what its counters grew by} from the facts of kind `smb_share`."""
    first: dict[str, ShareStats] = {}
    last: dict[str, ShareStats] = {}
    for fact in facts:
        try:
            stats = ShareStats(
                str(fact["share"]),
                int(fact["read_bytes"]),
                int(fact["reads"]),
                int(fact["failed_reads"]),
            )
        except (KeyError, TypeError, ValueError):
            continue
        (last if fact.get("when") == "end" else first)[stats.share] = stats
    none = ShareStats("")
    return {
        share: ShareStats(
            share,
            now.read_bytes - first.get(share, none).read_bytes,
            now.reads - first.get(share, none).reads,
            now.failed_reads - first.get(share, none).failed_reads,
        )
        for share, now in last.items()
    }


def notes(
    reads: Records,
    mounts: Mapping[str, MountStats],
    shares: Mapping[str, ShareStats],
    starved: Records,
) -> list[str]:
    """What of the remote reads a person must know before the numbers: one sentence each."""
    found = []
    hanging = reads[reads["unanswered"]]
    if len(hanging):
        longest_s = float((hanging["end_ns"] - hanging["start_ns"]).max()) / 1e9
        who = " and ".join(sorted({family_name(int(f)) for f in hanging["family"]}))
        found.append(
            f"{len(hanging)} {who} read(s) were unanswered when recording ended, "
            f"the longest for {longest_s:.1f} s"
        )
    failed = int(np.count_nonzero(reads["failed"]))
    if failed:
        found.append(f"{failed} remote read(s) ended with an error")
    cut, asked = cut_short(reads, starved), np.count_nonzero(reads["family"] == Family.SMB)
    if len(cut) > FEW_CUT * asked:
        waited_s = float(cut["queue_ns"].sum()) / 1e9
        found.append(
            f"{len(cut)} SMB read(s) were cut to 64 KiB, as the server grants too few credits, and "
            f"waited {waited_s:.2f} s in all to be sent"
        )
    for point, stats in sorted(mounts.items()):
        found += _mount_notes(point, stats)
    found += [
        f"{name}: {share.failed_reads} of {share.reads} SMB reads failed"
        for name, share in sorted(shares.items())
        if share.failed_reads
    ]
    return found


def cut_short(reads: Records, starved: Records) -> Records:
    """The SMB reads that were made for want of credits as they are: of each shortage, the next of
    its thread."""
    asked = reads[reads["family"] == Family.SMB]
    found: list[Records] = []
    for tid in distinct(starved["tid"]):
        own = asked[asked["tid"] == tid]
        short_ns = starved["start_ns"][starved["tid"] == tid].astype(np.int64)
        after = distinct(np.searchsorted(own["start_ns"], short_ns))
        found.append(own[after[after < len(own)]])
    return np.concatenate(found) if found else asked[:0]


def _mount_notes(point: str, stats: MountStats) -> list[str]:
    found = []
    read = stats.read_calls
    again = read.get("transmissions", 0) - read.get("operations", 0)
    if again > 0:
        found.append(f"{point}: {again} of {read['operations']} NFS reads were sent again")
    if stats.pnfs or stats.events.get("pnfs_read"):
        found.append(
            f"{point} uses pNFS ({stats.pnfs or 'layouts'}): data comes from other servers"
        )
    elif stats.bytes.get("server_read") and not read.get("operations"):
        # LOCALIO reads the server's file system directly when the server is this machine.
        found.append(
            f"{point}: bytes came without READ calls (LOCALIO: the server is this machine)"
        )
    sent = [t.get("sends", 0) for t in stats.transports]
    if len(sent) > 1 and read.get("operations") and sum(sent):
        shares = ", ".join(scale.percent(count / sum(sent)) for count in sent)
        used = f"{sum(map(bool, sent))} of {len(sent)} connections"
        found.append(f"{point}: {used} carried requests ({shares})")
    return found


def family_name(family: int) -> str:
    """NFS, SMB, FUSE, …"""
    return FAMILY_NAMES.get(Family(family), "?") if family in set(Family) else "?"
