"""Rules on waiting for storage: what the requests looked like, what would make them fewer."""

from __future__ import annotations

from collections.abc import Iterator

from ttftprof.diagnosis.rules import Blamed, Finding, Rule, rule
from ttftprof.model import Action, FileUse

WHOLE_PATTERN_BYTES = 1 << 20  # a request of this size costs storage about one latency


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


def _requests_too_small(blamed: Blamed) -> Finding | None:
    return Finding(actions=tuple(_pattern_actions(blamed)))


def _pattern_actions(blamed: Blamed) -> Iterator[Action]:
    weights, waited = blamed.weights, blamed.cell_ns
    if weights is None:
        return
    if any("RANDOM" in a for a in weights.advice):
        yield Action(
            "the server told the kernel to expect random access, which switches readahead off: "
            "turn off its NUMA option, or load without mmap (llama-server: --no-mmap)",
            _gain_of_bigger_requests(weights, waited),
            "record again: the median request size should grow",
        )
    elif weights.access == "mmap" and _small_requests(weights):
        yield Action(
            "load without mmap (llama-server: --no-mmap), or raise read_ahead_kb of the mount",
            _gain_of_bigger_requests(weights, waited),
            "record again: bigger requests, more of them under way",
        )
    yield Action(
        "keep the weights in the page cache (enough memory; read the file once after boot), or "
        "on faster storage",
        waited,
        "switch back and forth: the second switch should show 0 bytes from storage",
    )


def _small_requests(weights: FileUse) -> bool:
    sizes = weights.request_size_bytes
    return sizes is not None and sizes.p50 < WHOLE_PATTERN_BYTES / 4


def _gain_of_bigger_requests(weights: FileUse, waited_ns: int) -> int | None:
    """rate = request size × depth / latency: with the latency unchanged, requests of 1 MiB would
    need that many times fewer waits."""
    sizes = weights.request_size_bytes
    if sizes is None or not sizes.p50 or sizes.p50 >= WHOLE_PATTERN_BYTES:
        return None
    return round(waited_ns * (1 - sizes.p50 / WHOLE_PATTERN_BYTES))


STORAGE_RULES: tuple[Rule, ...] = (
    rule("storage figures", _figures, activities="storage_wait"),
    rule("request pattern", _requests_too_small, activities="storage_wait"),
)
