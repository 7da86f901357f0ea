"""Storage convicted or acquitted, from what one request did with its weights.

Pure. A gain is what the model of the path gives, rate = request size × depth / latency (see
`PathModel`), whose figures come from the recording itself; where they are not known, none is
promised. No readahead is recommended: the model names one, `ttftprof storage` measures it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ttftprof import scale
from ttftprof.engines.catalog import looks_like_weights
from ttftprof.model import Action, FileUse, MemoryUse, MountUse, PathModel, file_of_load
from ttftprof.path_model import IN_LINE

BETTER = 1.25  # the least gain worth advice
REACHED = 0.8  # of a link's rate: what protocol headers leave
TAKES_PART = 0.1  # share of the wait from which storage is no longer acquitted
THRASHED = 0.1  # share of the bytes that had been in the cache already
LITTLE_BYTES = 1 << 20  # of less nothing is made
FEW = 2.0  # requests under way at once that leave a path idle between them
SMALL_BYTES = 256 << 10
MODEL_BYTES = 8 << 20  # from storage: a file of any name of which so much came may be a model
SWITCH_BACK = "switch back and forth under ttftprof record: no bytes should be refaulted"
IN_ORDER = 0.5  # share of requests that go on where another ended, from which reading is in order


@dataclass(frozen=True, slots=True)
class StorageCause:
    """`kind` is one of STORAGE_VERDICTS; `says`: sentences, or nothing."""

    kind: str
    says: str = ""
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, slots=True)
class _Load:
    """What a verdict is drawn from: the weights (all shards together) and their way."""

    weights: FileUse
    mount: MountUse | None
    memory: MemoryUse | None
    bytes: int
    thrashed: int  # of them, had been in the cache until memory was short
    dropped: int  # of them, had been in the cache until somebody dropped them
    size_bytes: int
    spent_ns: int | None  # in which the bytes came
    waited_ns: int  # of the blamed cell

    @property
    def model(self) -> PathModel | None:
        """None if this very load shows it to be wrong."""
        model = self.weights.path_model
        return None if model and self.exceeds(model.link_bytes_per_second) else model

    @property
    def rate(self) -> float | None:
        return self.bytes / self.spent_ns * 1e9 if self.spent_ns else None

    @property
    def read_ns(self) -> int | None:
        """What the model gives for all bytes by 1 MiB reads in order."""
        rate = self.model.read_bytes_per_second if self.model else None
        return round(self.bytes / rate * 1e9) if rate else None

    @property
    def link(self) -> float | None:
        """The most the path gives: by the model, else the line rate of its link."""
        if self.model and self.model.link_bytes_per_second:
            return self.model.link_bytes_per_second
        line = self.mount.link_bytes_per_second if self.mount else None
        return None if self.exceeds(line) else line

    def exceeds(self, link: float | None) -> bool:
        """Whether the bytes came faster than a link can give, by more than the rates scatter."""
        return bool(link and self.rate and self.rate > BETTER * link)

    @property
    def request_ns(self) -> float | None:
        """What a request took, in the mean."""
        mount = self.mount
        return (
            mount.total_ns / mount.requests if mount and mount.requests and mount.total_ns else None
        )

    @property
    def alone_ns(self) -> float | None:
        """What it would have taken at most with no other under way: the model's delay, and its
        bytes at no more than the rate of this load."""
        use, rate = self.weights, self.rate
        if self.model is None or rate is None or not use.requests or not use.bytes_from_storage:
            return None
        return self.model.latency_ns + use.bytes_from_storage / use.requests / rate * 1e9

    @property
    def stood_in_line(self) -> bool:
        """Whether requests took so much longer than alone that more at once had brought no more."""
        took_ns, alone_ns, depth = self.request_ns, self.alone_ns, self.weights.in_flight
        if took_ns is None or alone_ns is None or depth is None:
            return False
        return depth.mean >= FEW and took_ns >= IN_LINE * alone_ns

    @property
    def is_random(self) -> bool:
        return any("RANDOM" in advice for advice in self.weights.advice)

    def gain_ns(self, then_ns: float | None) -> int | None:
        """Waiting that is left out if the bytes came within `then_ns`."""
        if then_ns is None or self.spent_ns is None:
            return None
        return max(min(self.waited_ns, round(self.spent_ns - then_ns)), 0)


def convict(
    files: Sequence[FileUse],
    mounts: Sequence[MountUse],
    memory: MemoryUse | None,
    waited_ns: int,
) -> StorageCause | None:
    """Why storage was waited for, `waited_ns` in the phase to blame; None without a file."""
    load = _load(files, mounts, memory, waited_ns)
    if load is None:
        return None
    finds = (find(load) for find in (_memory, _pattern, _readahead, _link))
    found = next((f for f in finds if f is not None), StorageCause("unknown"))
    says, drops = _dropped(load)
    return StorageCause(
        found.kind,
        " ".join(s for s in (says, found.says.strip()) if s),
        (*drops, *found.actions, *_keep_cached(load)),
    )


def acquit(files: Sequence[FileUse], waited_ns: int, whole_ns: int) -> StorageCause | None:
    """Why storage is not to blame, where something else is; `waited_ns` of `whole_ns` was spent
    waiting for it. None where that is not known, or it took too large a part."""
    weights = file_of_load(files)
    if weights is None or not weights.is_weights or not whole_ns:
        return None
    if weights.bytes_from_storage is None:
        return None
    shards = [f for f in files if f.is_weights]
    from_storage = sum(f.bytes_from_storage or 0 for f in shards)
    by_others = sum(f.read_by_others_bytes or 0 for f in shards)
    beside = [f for f in files if not f.is_weights and _may_be_a_model(f)]
    if not from_storage and not by_others and not beside:
        if all(f.residency_before == 0 and not f.bytes_from_cache for f in shards):
            return StorageCause("unknown")  # nor from the cache: by a way that nobody counts
        return StorageCause(
            "cache worked",
            "Storage is not to blame: not one byte of the weights came from it.",
        )
    if waited_ns >= TAKES_PART * whole_ns:
        return StorageCause("unknown")
    came = f"{scale.size(from_storage)} of the weights came from it"
    if from_storage and weights.bytes_per_second:
        came += f" at {scale.rate(weights.bytes_per_second)}"
    if by_others:
        came += f" (and {scale.size(by_others)} for other programs meanwhile)"
    came += "".join(f", {scale.size(f.bytes_from_storage)} of {f.path}" for f in beside)
    waited = f"{scale.duration(waited_ns)} of {scale.duration(whole_ns)}"
    return StorageCause(
        "not storage", f"Storage is not to blame: {came}, and only {waited} was waiting for it."
    )


def _may_be_a_model(file: FileUse) -> bool:
    """Whether so much of it came from storage as does of weights, more than a header."""
    least = LITTLE_BYTES if looks_like_weights(file.path) else MODEL_BYTES
    return (file.bytes_from_storage or 0) >= least


def _load(
    files: Sequence[FileUse],
    mounts: Sequence[MountUse],
    memory: MemoryUse | None,
    waited_ns: int,
) -> _Load | None:
    weights = file_of_load(files)
    if weights is None or not weights.bytes_from_storage:
        return None
    shards = [f for f in files if f.is_weights] or [weights]
    rates = [(f.bytes_from_storage or 0, f.bytes_per_second) for f in shards]
    known = all(rate for came, rate in rates if came)
    return _Load(
        weights=weights,
        mount=next((m for m in mounts if m.path == weights.mount), None),
        memory=memory,
        bytes=sum(came for came, _ in rates),
        thrashed=sum(_thrashed(f) for f in shards),
        dropped=sum((f.refaulted_bytes or 0) - _thrashed(f) for f in shards),
        size_bytes=sum(f.size_bytes for f in shards),
        spent_ns=round(sum(came / rate for came, rate in rates if rate) * 1e9) if known else None,
        waited_ns=waited_ns,
    )


# -- memory ----------------------------------------------------------------------------------------


def _thrashed(file: FileUse) -> int:
    """Bytes that came again, at most those that had been reclaimed."""
    reclaimed = (file.reclaimed_bytes or 0) + (file.reclaimed_before_bytes or 0)
    return min(file.refaulted_bytes or 0, reclaimed)


def _memory(load: _Load) -> StorageCause | None:
    if load.thrashed < max(THRASHED * load.bytes, LITTLE_BYTES):
        return None
    share = load.thrashed / load.bytes
    allowed = _allowed(load.memory)
    says = (
        f"{scale.size(load.thrashed)} of these bytes had been in the page cache while recording "
        f"ran, and were evicted for want of memory{f' ({allowed})' if allowed else ''}."
    )
    change = (
        f"make room for the cache of both models ({scale.size(load.size_bytes)} for this one"
        f"{f'; {allowed}' if allowed else ''}), or load without keeping a copy in the cache "
        "(O_DIRECT, where the server has it)"
    )
    gain = round(load.waited_ns * min(share, 1.0))
    return StorageCause("memory", says, (Action(change, gain, SWITCH_BACK),))


def _dropped(load: _Load) -> tuple[str, tuple[Action, ...]]:
    """What is to be said and done where somebody dropped the cache; more memory keeps nothing."""
    if load.dropped < max(THRASHED * load.bytes, LITTLE_BYTES):
        return "", ()
    says = (
        f"{scale.size(load.dropped)} of these bytes had been in the page cache while recording "
        "ran, and were dropped though memory was not short."
    )
    change = (
        "find who drops the page cache (drop_caches, posix_fadvise with DONTNEED, or a program "
        "that writes the file anew); more memory would not help"
    )
    gain = round(load.waited_ns * min(load.dropped / load.bytes, 1.0))
    return says, (Action(change, gain, SWITCH_BACK),)


def _allowed(memory: MemoryUse | None) -> str:
    if memory is None:
        return ""
    if memory.limit_bytes is not None:
        return f"the control group {memory.limit_of} may use {scale.size(memory.limit_bytes)}"
    if memory.host_bytes is not None:
        return f"the machine has {scale.size(memory.host_bytes)}"
    return ""


def _fits(load: _Load) -> bool:
    """Whether the weights can stay in the cache; taken for granted where nothing is known."""
    memory = load.memory
    known = [b for b in (memory.limit_bytes, memory.host_bytes) if b] if memory else []
    return not known or load.size_bytes < min(known)


def _keep_cached(load: _Load) -> list[Action]:
    if load.weights.access == "direct" or not _fits(load):
        return []
    return [
        Action(
            "keep the weights in the page cache (enough memory; read the file once after boot), or "
            "on faster storage",
            load.waited_ns,
            "switch back and forth: the second switch should show 0 bytes from storage",
        )
    ]


# -- pattern ---------------------------------------------------------------------------------------


def _pattern(load: _Load) -> StorageCause | None:
    """Few small requests where 1 MiB reads in order would have had more under way."""
    use, spent_ns, read_ns = load.weights, load.spent_ns, load.read_ns
    if load.stood_in_line:
        return None
    if spent_ns is not None and read_ns is not None:
        led_astray = load.is_random or _jumps(use) or use.access != "read"
        guilty = spent_ns >= BETTER * read_ns and led_astray
    else:
        guilty = load.is_random or (use.access == "mmap" and _few_and_small(use))
    if not guilty:
        return None
    says = f"{_why_slow(load)}{_present_model(load)}{_read_model(load)}"
    return StorageCause("pattern", says, (_read_in_order(load),))


def _jumps(use: FileUse) -> bool:
    return use.sequential_share is not None and use.sequential_share < IN_ORDER


def _few_and_small(use: FileUse) -> bool:
    sizes, depth = use.request_size_bytes, use.in_flight
    small = sizes is not None and sizes.p50 < SMALL_BYTES
    return small and depth is not None and depth.mean < FEW


def _why_slow(load: _Load) -> str:
    use = load.weights
    if load.is_random:
        given = next(a for a in use.advice if "RANDOM" in a)
        return f"The server advised {given}, which switches readahead off."
    if _jumps(use):
        follow = scale.percent(use.sequential_share)
        return f"Only {follow} of its requests go on where another ended: little is read ahead."
    if use.access == "direct":
        return (
            "It is read past the page cache (O_DIRECT, or as the mount has it), so nothing is read "
            "ahead."
        )
    return "Mmap waits at the end of every readahead window before the next one is asked for."


def _present_model(load: _Load) -> str:
    """`4 KiB × 1.0 at a time / 2.1 ms = 2.0 MB/s, measured 1.9 MB/s`."""
    use, model = load.weights, load.model
    if model is None or use.request_size_bytes is None or use.in_flight is None:
        return ""
    size, link = use.request_size_bytes.p50, model.link_bytes_per_second
    latency_ns = model.latency_ns + (size / link * 1e9 if link else 0)
    if latency_ns <= 0:
        return ""
    rate = size * use.in_flight.mean / latency_ns * 1e9
    return (
        f" Model, request size × depth / latency: {scale.block(size)} × {use.in_flight.mean:.1f} / "
        f"{scale.duration(round(latency_ns))} = {scale.rate(rate)}; measured "
        f"{scale.rate(load.rate)}."
    )


def _read_model(load: _Load) -> str:
    model = load.model
    if model is None or model.read_depth is None or load.read_ns is None:
        return ""
    return (
        f" 1 MiB reads in order would make it {scale.block(model.read_request_bytes)} × "
        f"{model.read_depth:.1f} = {scale.rate(model.read_bytes_per_second)}: "
        f"{scale.duration(load.read_ns)} instead of {scale.duration(load.spent_ns)}."
    )


def _read_in_order(load: _Load) -> Action:
    change = "load without mmap (llama-server: --no-mmap)"
    if load.is_random:
        change = (
            "the server told the kernel to expect random access: turn off its NUMA option, or load "
            "without mmap (llama-server: --no-mmap)"
        )
    elif _jumps(load.weights):
        change = "read the file once from beginning to end before the load, or load without mmap"
    elif load.weights.access == "direct":
        change = "load through the page cache, or with more direct requests under way at a time"
    return Action(change, load.gain_ns(load.read_ns), _measure(load))


def _measure(load: _Load, options: str = "") -> str:
    """The command that measures both ways on this very file."""
    return f"sudo ttftprof storage {options}{shlex.quote(load.weights.path)}"


def _readahead(load: _Load) -> StorageCause | None:
    """Reads in order that leave the link idle, because the windows read ahead are too small."""
    model, rate, link = load.model, load.rate, load.link
    kib = load.mount.read_ahead_kb if load.mount else None
    if model is None or rate is None or link is None or kib is None or load.stood_in_line:
        return None
    # With two windows under way the link stays busy from rate × latency on.
    needed_kib = 1 << max(round(link * model.latency_ns / 1e9) // 1024 - 1, 0).bit_length()
    if load.weights.access == "direct" or rate * BETTER > link or needed_kib <= kib:
        return None
    at = load.mount.path if load.mount else ""
    if load.weights.fstype == "overlay":  # whose own readahead counts for nothing
        at = f"device {load.weights.device}, on which the layer of {at} lies"
    says = (
        f"Readahead of {kib} KiB is too small for this path:{_present_model(load)} With "
        f"{needed_kib} KiB the link would be busy all the time: {scale.rate(link)}."
    )
    change = (
        f"raise the readahead of {at}: by the model {needed_kib} KiB fill the path; the best value "
        "is measured, not assumed"
    )
    tried = dict.fromkeys((kib, needed_kib, 4 * needed_kib))
    verify = _measure(load, f"--try-readahead {','.join(map(str, tried))} ")
    return StorageCause(
        "pattern", says, (Action(change, load.gain_ns(load.bytes / link * 1e9), verify),)
    )


# -- hardware or link ------------------------------------------------------------------------------


def _link(load: _Load) -> StorageCause | None:
    rate, link, mount = load.rate, load.link, load.mount
    if rate is not None and link is not None and rate >= REACHED * link:
        says = f"That is {scale.percent(min(rate / link, 1.0))} of the {scale.rate(link)} it gives"
    elif load.stood_in_line and load.request_ns and load.alone_ns:
        says = (
            f"Its requests stood in line: each took {scale.duration(round(load.request_ns))}, and "
            f"alone would have taken {scale.duration(round(load.alone_ns))} at most"
        )
    else:
        return None
    name, line = (mount.link, mount.link_bytes_per_second) if mount else (None, None)
    if line and name:
        says += f" ({name} carries {scale.rate(line)} at most)"
    says += "."
    then_ns = _at_twice_the_rate(load)
    if then_ns is not None:
        says += (
            f" By the model, a link of twice the rate would make it {scale.duration(then_ns)} "
            f"instead of {scale.duration(load.spent_ns)}."
        )
    change = (
        "a disk or link of twice the rate, or a copy on local storage as fast: the way it is read "
        "is not the limit"
    )
    gain_ns = load.gain_ns(then_ns)
    return StorageCause("hardware or link", says, (Action(change, gain_ns, _measure(load)),))


def _at_twice_the_rate(load: _Load) -> int | None:
    """What the bytes would take over a link of twice the rate, read as they were: requests of this
    size, so many at a time, each with the path's delay. None without the figures."""
    model, use, link = load.model, load.weights, load.link or load.rate
    sizes, depth = use.request_size_bytes, use.in_flight
    if model is None or link is None or sizes is None or depth is None or load.spent_ns is None:
        return None
    size, at_once, delay_s = sizes.p50, depth.mean, model.latency_ns / 1e9
    now, then = (min(r, size * at_once / (delay_s + size / r)) for r in (link, 2 * link))
    return round(load.spent_ns * now / then)
