"""Rules on storage: convicted where it is what was waited for, else acquitted if it can be."""

from __future__ import annotations

from ttftprof.diagnosis.rules import Blamed, Finding, Rule, rule
from ttftprof.model import ACTIVITIES, Evidence, FileUse
from ttftprof.storage_cause import StorageCause, acquit, convict

_SUSPECTED = ("load", "init", "prefill")
_NOT_STORAGE = " ".join(a for a in ACTIVITIES if a != "storage_wait")


def _figures(blamed: Blamed) -> Finding | None:
    weights = blamed.weights
    if weights is None or not weights.bytes_from_storage:
        return None
    text = f"{weights.bytes_from_storage / 1e6:,.0f} MB of {weights.path} came from storage"
    if weights.bytes_per_second:
        text += f" at {weights.bytes_per_second / 1e6:,.0f} MB/s"
    if weights.request_size_bytes and weights.in_flight:
        text += (
            f", in requests of {weights.request_size_bytes.p50 / 1024:,.0f} KiB (median), "
            f"{weights.in_flight.mean:.1f} under way at a time"
        )
    return Finding(text + ".")


def _convicted(blamed: Blamed) -> Finding | None:
    facts = blamed.facts
    return _finding(blamed, convict(facts.files, facts.mounts, facts.memory, blamed.cell_ns))


def _acquitted(blamed: Blamed) -> Finding | None:
    """In words only where storage may be suspected."""
    facts = blamed.facts
    waited_ns = sum(row.get("storage_wait", 0) for row in facts.table.values())
    cause = acquit(facts.files, waited_ns, facts.ttft_ns)
    if cause is None or blamed.phase in _SUSPECTED:
        return _finding(blamed, cause)
    return Finding(storage=cause.kind)


def _finding(blamed: Blamed, cause: StorageCause | None) -> Finding | None:
    if cause is None:
        return None
    evidence = _evidence(blamed.weights) if blamed.weights else ()
    return Finding(cause.says, cause.actions, evidence, storage=cause.kind)


_NOTEWORTHY = 1.05  # from which more bytes came than were needed


def _evidence(weights: FileUse) -> tuple[Evidence, ...]:
    """What is known of: bytes and rate, the requests, the path they took, what left the cache."""
    model, sizes, depth = weights.path_model, weights.request_size_bytes, weights.in_flight
    times = weights.read_amplification or 1.0
    amplified = times if times >= _NOTEWORTHY else None
    asks = weights.readahead_asks
    ahead = (weights.readahead_bytes or 0) / asks if asks else None
    found = (
        ("files", "bytes of the weights from storage", weights.bytes_from_storage, "bytes"),
        ("files", "rate at which they came", weights.bytes_per_second, "bytes/s"),
        ("requests", "median size of a request", sizes.p50 if sizes else None, "bytes"),
        ("requests", "requests under way at once, mean", depth.mean if depth else None, ""),
        ("requests", "read ahead at a time, as the client was asked, mean", ahead, "bytes"),
        ("requests", "times that the client was asked to read ahead", asks, ""),
        ("requests", "requests that it made", weights.requests if asks else None, ""),
        ("model", "latency of a request", model.latency_ns if model else None, "ns"),
        ("model", "rate of the link", model.link_bytes_per_second if model else None, "bytes/s"),
        ("model", "the same bytes by 1 MiB reads", model.read_ns if model else None, "ns"),
        ("files", "had been in the page cache before", weights.refaulted_bytes or None, "bytes"),
        ("files", "bytes from storage for each that was needed", amplified, "times"),
    )
    return tuple(Evidence(*each) for each in found if each[2] is not None)


STORAGE_RULES: tuple[Rule, ...] = (
    rule("storage figures", _figures, activities="storage_wait"),
    rule("storage convicted", _convicted, activities="storage_wait"),
)
# Said last: what is to blame comes first.
ACQUITTALS: tuple[Rule, ...] = (rule("storage acquitted", _acquitted, activities=_NOT_STORAGE),)
