"""Everything a recording holds, one fact a line, decoded by the meanings of probes/events.h.

Nothing is concluded and nothing left out: a value without a name shows as its number. Rows come in
the order of the moment each was known (`start + duration` for what has one); batches are read as
they are printed, so a recording of any length takes little memory.
"""

from __future__ import annotations

import heapq
import json
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain, islice
from typing import Any, TextIO

import numpy as np

from ttftprof.events import (
    CONNECTION_BIT,
    FAMILY_MASK,
    CpuMode,
    DeviceFlag,
    Family,
    Kind,
    MmapFlag,
    ReadFlag,
    Records,
    RemoteFlag,
    Wait,
    dev_numbers,
)
from ttftprof.kernel.table import syscall_name
from ttftprof.recording import Reader

KINDS = ("events", "threads", "files", "facts", "meta", "sources", "lost")
EVENT_NAMES = tuple(kind.name.lower() for kind in Kind if kind != Kind.NONE)
FORMATS = ("text", "jsonl")

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """What to dump. Empty `events` means every kind of event; `tgid` leaves out what names none."""

    kinds: frozenset[str] = frozenset(KINDS)
    events: frozenset[str] = frozenset()
    tgid: int | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One fact. `ns` is when it was known, None for what has no time; `who` is tgid and tid."""

    kind: str
    name: str
    ns: int | None
    who: tuple[int, int] | None
    fields: Fields


def dump(reader: Reader, file: TextIO, choice: Choice | None = None, form: str = "text") -> None:
    """Writes the chosen facts to `file`. Raises `RecordingError` where the recording is damaged."""
    start_ns = _start_ns(reader)
    write = _as_text if form == "text" else _as_json
    for line in lines(reader, choice or Choice()):
        file.write(write(line, start_ns) + "\n")


def lines(reader: Reader, choice: Choice) -> Iterator[Line]:
    """The chosen facts: losses, sources and meta first, then everything else in time order."""
    return islice(chain(_untimed(reader, choice), _timed(reader, choice)), choice.limit)


def _start_ns(reader: Reader) -> int:
    start = reader.meta.get("start_ns", 0)
    return start if isinstance(start, int) else 0


# -- what has no time -------------------------------------------------------------------------


def _untimed(reader: Reader, choice: Choice) -> Iterator[Line]:
    if choice.tgid is not None:
        return
    if "lost" in choice.kinds:
        for place, count in reader.lost().items():
            yield Line("lost", place, None, None, {"count": count})
    if "sources" in choice.kinds:
        for source in reader.sources():
            facts = {"state": source.state, "reason": source.reason, "lost": source.lost}
            yield Line("source", source.name, None, None, facts)
    if "meta" in choice.kinds:
        for key, value in sorted(reader.meta.items()):
            yield Line("meta", key, None, None, {"value": value})


# -- what has one, merged ---------------------------------------------------------------------


def _timed(reader: Reader, choice: Choice) -> Iterator[Line]:
    paths = _Paths(reader)
    streams = []
    if "facts" in choice.kinds:
        streams.append(_facts(reader, choice))
    if "events" in choice.kinds:
        streams.append(_events(reader, choice, paths))
    if "files" in choice.kinds and choice.tgid is None:
        streams.append(_rows(reader, "files", choice, paths))
    if "threads" in choice.kinds:
        streams.append(_rows(reader, "threads", choice, paths))
    return heapq.merge(*streams, key=lambda line: line.ns or 0)


class _Paths:
    """Names of files by (dev, inode), from the facts about them."""

    def __init__(self, reader: Reader) -> None:
        self._paths = {
            (fact.get("dev"), fact.get("ino")): str(fact.get("path"))
            for _, fact in reader.facts("file")
        }

    def describe(self, dev: int, ino: int) -> Fields:
        if not dev and not ino:
            return {}
        known: Fields = {"dev": "{}:{}".format(*dev_numbers(dev)), "ino": ino}
        path = self._paths.get((dev, ino))
        return known | {"path": path} if path else known


def _facts(reader: Reader, choice: Choice) -> Iterator[Line]:
    """Facts are few and may be written long after their moment: sorted as a whole."""
    rows = [(ns, kind, fact) for kind in reader.fact_kinds() for ns, fact in reader.facts(kind)]
    rows.sort(key=lambda row: row[0])
    for ns, kind, fact in rows:
        tgid = fact.get("tgid", fact.get("pid"))
        if choice.tgid is None or tgid == choice.tgid:
            yield Line("fact", kind, ns, None, fact)


def in_order(
    batches: Iterable[Records], stamps: Callable[[Records], np.ndarray[Any, Any]]
) -> Iterator[Records]:
    """The same records sorted by stamp, as long as they run late by no more than a batch.

    The kernel stamps a record just before it takes its place in the ring, so that two batches, 20
    ms each, are more than enough to look ahead.
    """
    held: Records | None = None
    for batch in batches:
        if not len(batch):
            continue
        if held is None:
            held = batch
            continue
        both = np.concatenate([held, batch])
        settled = stamps(both) < stamps(batch).min()
        ready, held = both[settled], both[~settled]
        if len(ready):
            yield ready[np.argsort(stamps(ready), kind="stable")]
    if held is not None:
        yield held[np.argsort(stamps(held), kind="stable")]


def _ends(events: Records) -> np.ndarray[Any, Any]:
    ends: np.ndarray[Any, Any] = events["start_ns"] + events["duration_ns"]
    return ends


def _events(reader: Reader, choice: Choice, paths: _Paths) -> Iterator[Line]:
    wanted = [k.value for k in Kind if k.name.lower() in choice.events]
    for batch in in_order(reader.batches("events"), _ends):
        kept = np.ones(len(batch), bool)
        if wanted:
            kept &= np.isin(batch["kind"], wanted)
        if choice.tgid is not None:
            kept &= batch["tgid"] == choice.tgid
        rows = batch[kept]
        names = rows.dtype.names or ()
        for values in rows.tolist():
            yield event_line(dict(zip(names, values, strict=True)), paths.describe)


def _rows(reader: Reader, stream: str, choice: Choice, paths: _Paths) -> Iterator[Line]:
    make = _thread_line if stream == "threads" else _file_line
    for batch in in_order(reader.batches(stream), lambda rows: rows["ns"]):
        rows = batch if choice.tgid is None else batch[batch["tgid"] == choice.tgid]
        names = rows.dtype.names or ()
        for values in rows.tolist():
            row = dict(zip(names, values, strict=True))
            yield make({n: v if isinstance(v, int) else v.tolist() for n, v in row.items()}, paths)


# -- counters ---------------------------------------------------------------------------------


def _thread_line(row: Fields, paths: _Paths) -> Line:
    fields = _counters(row, {"off_ns", "off_reason", "off_syscall", "file_dev", "file_ino"})
    fields |= _by_name("short_ns", row["short_ns"], Wait)
    fields |= _by_name("short_count", row["short_count"], Wait)
    fields |= _by_name("samples", row["samples"], CpuMode)
    if row["off_ns"]:
        fields |= {"off_since_ns": row["off_ns"], "off_reason": _name(Wait, row["off_reason"])}
        fields |= _syscall(row["off_syscall"])
    fields |= paths.describe(row["file_dev"], row["file_ino"])
    return Line("thread", "counters", row["ns"], (row["tgid"], row["tid"]), fields)


def _file_line(row: Fields, paths: _Paths) -> Line:
    fields = paths.describe(row["dev"], row["ino"]) | _counters(row, {"dev", "ino"})
    return Line("file", "counters", row["ns"], None, fields)


def _counters(row: Fields, without: set[str]) -> Fields:
    """The plain numbers of a row that are not 0."""
    left_out = without | {"ns", "tid", "tgid"}
    return {n: v for n, v in row.items() if isinstance(v, int) and v and n not in left_out}


def _by_name(counter: str, values: Iterable[int], names: type[IntEnum]) -> Fields:
    return {f"{counter}.{_name(names, i)}": v for i, v in enumerate(values) if v}


# -- events -----------------------------------------------------------------------------------


def event_line(event: Fields, describe: Callable[[int, int], Fields]) -> Line:
    """One record of the ring, by the meaning its kind gives to the fields."""
    kind = event["kind"]
    decode = _DECODERS.get(kind, _raw)
    fields: Fields = {}
    if event["duration_ns"]:
        fields["duration_ns"] = event["duration_ns"]
    if kind in _WITH_FILE:
        fields |= describe(event["dev"], event["ino"])
    fields |= decode(event)
    end_ns = (event["start_ns"] + event["duration_ns"]) & (1 << 64) - 1
    return Line("event", _name(Kind, kind), end_ns, (event["tgid"], event["tid"]), fields)


def _name(names: type[IntEnum], value: int) -> str:
    try:
        return names(value).name.lower()
    except ValueError:
        return str(value)


def _syscall(value: int) -> Fields:
    """A call by its name; outside any call (-1, as a record carries it) nothing."""
    number = value - (1 << 64) if value >> 63 and value > 0 else value
    if number < 0:
        return {}
    return {"syscall": syscall_name(number) or number}


def _flags(value: int, names: type[IntEnum]) -> Fields:
    held = [flag.name.lower() for flag in names if value & flag]
    unknown = value & ~sum(names)
    return {"flags": "|".join([*held, *([hex(unknown)] if unknown else [])])} if value else {}


def _raw(event: Fields) -> Fields:
    return {n: event[n] for n in ("flags", "dev", "ino", "a", "b") if event[n]}


def _fork(event: Fields) -> Fields:
    return {"parent_tgid": event["a"], "parent_tid": event["b"]}


def _exec(event: Fields) -> Fields:
    return {"flags": "successor"} if event["flags"] & 1 else {}


def _thread_end(event: Fields) -> Fields:
    return {"cpu_ns": event["ino"], "minor_faults": event["a"], "major_faults": event["b"]}


def _process_exit(event: Fields) -> Fields:
    """`a` is a wait status, as in waitpid(2)."""
    number = event["a"] & 0x7F
    return {"signal": _signal(number)} if number else {"status": event["a"] >> 8 & 0xFF}


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _signal_sent(event: Fields) -> Fields:
    return {"signal": _signal(event["flags"]), "from_tgid": event["a"]}


def _offcpu(event: Fields) -> Fields:
    return {"reason": _name(Wait, event["flags"]), **_syscall(event["a"])}


def _open(event: Fields) -> Fields:
    direct = {"flags": "direct"} if event["flags"] & 1 else {}
    return {"size_bytes": event["a"], "cached_pages": event["b"], **direct}


def _held(event: Fields) -> Fields:
    how = "open" if event["flags"] & 1 else "mapped"
    times = {"times": event["flags"] >> 1} if event["flags"] > 1 else {}
    return {"how": how, **times, "size_bytes": event["a"], "cached_pages": event["b"]}


def _mmap(event: Fields) -> Fields:
    failed = event["flags"] & MmapFlag.FAILED
    result = {"errno": event["b"]} if failed else {"address": hex(event["b"])}
    return {"length_bytes": event["a"], **result, **_flags(event["flags"], MmapFlag)}


def _munmap(event: Fields) -> Fields:
    return {"length_bytes": event["a"], "address": hex(event["b"])}


# include/uapi/asm-generic/mman-common.h and include/uapi/linux/fadvise.h; readahead(2) has no
# number of its own, so the probe gives it one.
_MADVICE = {
    1: "random",
    2: "sequential",
    3: "willneed",
    4: "dontneed",
    14: "hugepage",
    22: "populate_read",
    23: "populate_write",
}
_FADVICE = {
    0: "normal",
    1: "random",
    2: "sequential",
    3: "willneed",
    4: "dontneed",
    5: "noreuse",
    0x100: "readahead",
}


def _madvise(event: Fields) -> Fields:
    advice = _MADVICE.get(event["flags"], event["flags"])
    return {"advice": advice, "length_bytes": event["a"], "address": hex(event["b"])}


def _fadvise(event: Fields) -> Fields:
    advice = _FADVICE.get(event["flags"], event["flags"])
    return {"advice": advice, "length_bytes": event["a"], "offset_bytes": event["b"]}


def _read(event: Fields) -> Fields:
    place = {"bytes": event["a"], "offset_bytes": event["b"]}
    return place | _flags(event["flags"], ReadFlag)


def _block(event: Fields) -> Fields:
    request = {"bytes": event["a"], "sector": event["b"], "in_flight": event["flags"]}
    disk = {"disk": "{}:{}".format(*dev_numbers(event["dev"]))}
    return disk | ({"ino": event["ino"]} if event["ino"] else {}) | request


def _remote(event: Fields) -> Fields:
    place = {"offset_bytes": event["b"]}
    sizes = {"asked_bytes": event["a"] >> 32, "got_bytes": event["a"] & 0xFFFFFFFF}
    return _family(event) | place | sizes | _flags(event["flags"] & ~FAMILY_MASK, RemoteFlag)


def _family(event: Fields) -> Fields:
    return {"family": _name(Family, event["flags"] & FAMILY_MASK)}


def _remote_split(event: Fields) -> Fields:
    number, total_ns = divmod(event["b"], 1 << CONNECTION_BIT)
    times = {"queue_ns": event["a"], "total_ns": total_ns, "times_sent": event["flags"]}
    return times | ({"connection": number - 1} if number else {})


def _remote_starved(event: Fields) -> Fields:
    return _family(event) | {"credits": event["a"], "in_flight": event["b"]}


def _listen(event: Fields) -> Fields:
    return {"port": event["a"]}


# include/net/tcp_states.h
_TCP_STATES = (
    "",
    "established",
    "syn_sent",
    "syn_recv",
    "fin_wait1",
    "fin_wait2",
    "time_wait",
    "close",
    "close_wait",
    "last_ack",
    "listen",
    "closing",
    "new_syn_recv",
)


def _ports(event: Fields) -> Fields:
    return {
        "socket": hex(event["ino"]),
        "local_port": event["a"] >> 16 & 0xFFFF,
        "remote_port": event["a"] & 0xFFFF,
    }


def _connection(event: Fields) -> Fields:
    number = event["flags"]
    known = 0 < number < len(_TCP_STATES)
    return {"state": _TCP_STATES[number] if known else number, **_ports(event)}


def _mark(event: Fields) -> Fields:
    from ttftprof.engines.driver_calls import DRIVER_CALLS
    from ttftprof.engines.markers import MARK_NAMES

    call = DRIVER_CALLS.get(event["flags"])
    if call is not None:
        return {"driver_call": call.name, "value": event["a"], "second": event["b"]}
    value = event["a"] - (1 << 64) if event["a"] >> 63 else event["a"]
    return {"mark": MARK_NAMES.get(event["flags"], event["flags"]), "value": value}


def _device(event: Fields) -> Fields:
    result = event["b"] - (1 << 64) if event["b"] >> 63 else event["b"]
    number = "{}:{}".format(*dev_numbers(event["dev"])) if event["dev"] else None
    flags = event["flags"]
    if flags & DeviceFlag.IOCTL:
        return {"device": number, "ioctl": event["a"], "result": result}
    family = flags & FAMILY_MASK
    known = {DeviceFlag.NVIDIA, DeviceFlag.KFD, DeviceFlag.DRI}
    name = DeviceFlag(family).name.lower() if family in known else family
    return {"family": name, "device": number, "result": result}


def _nothing(_event: Fields) -> Fields:
    return {}


_DECODERS: Mapping[int, Callable[[Fields], Fields]] = {
    Kind.FORK: _fork,
    Kind.EXEC: _exec,
    Kind.THREAD_END: _thread_end,
    Kind.PROCESS_EXIT: _process_exit,
    Kind.SIGNAL: _signal_sent,
    Kind.OFFCPU: _offcpu,
    Kind.OPEN: _open,
    Kind.MMAP: _mmap,
    Kind.MUNMAP: _munmap,
    Kind.MADVISE: _madvise,
    Kind.FADVISE: _fadvise,
    Kind.READ: _read,
    Kind.TOUCH: _nothing,
    Kind.BLOCK: _block,
    Kind.LISTEN: _listen,
    Kind.CONN: _connection,
    Kind.FORWARD: _ports,
    Kind.MARK_ENTER: _mark,
    Kind.MARK_EXIT: _mark,
    Kind.CONNECT: _ports,
    Kind.ACCEPT: _ports,
    Kind.HELD: _held,
    Kind.REMOTE: _remote,
    Kind.REMOTE_SPLIT: _remote_split,
    Kind.REMOTE_STARVED: _remote_starved,
    Kind.DEVICE: _device,
}
_WITH_FILE = frozenset(
    (
        Kind.OFFCPU,
        Kind.OPEN,
        Kind.MMAP,
        Kind.FADVISE,
        Kind.READ,
        Kind.TOUCH,
        Kind.HELD,
        Kind.REMOTE,
        Kind.REMOTE_SPLIT,
    )
)


# -- faces ------------------------------------------------------------------------------------


def _as_json(line: Line, start_ns: int) -> str:
    """`ns` is absolute (CLOCK_MONOTONIC); an event has its start and duration as recorded."""
    record: Fields = {"kind": line.kind, "name": line.name}
    if line.ns is not None:
        record["ns"] = line.ns
        record["since_start_ns"] = line.ns - start_ns
    if line.kind == "event" and line.ns is not None:
        duration = line.fields.get("duration_ns", 0)
        record |= {"start_ns": line.ns - duration, "duration_ns": duration}
    if line.who:
        record |= {"tgid": line.who[0], "tid": line.who[1]}
    record["fields"] = line.fields
    return json.dumps(record)


def _as_text(line: Line, start_ns: int) -> str:
    """`    12.345 678  event offcpu  4711/4712  duration=3.214ms reason=storage …`: seconds and
    milliseconds, then microseconds, since the recording began, at the end of what took time."""
    time = _since(line.ns - start_ns) if line.ns is not None else ""
    who = "{}/{}".format(*line.who) if line.who else ""
    title = f"{line.kind} {line.name}"
    shown = " ".join(_shown(n, v) for n, v in line.fields.items())
    head = f"{time:>13}  " if line.ns is not None else ""
    middle = f"{title:<19} {who:<13} " if line.ns is not None else f"{title}  "
    return (head + middle + shown).rstrip()


def _since(ns: int) -> str:
    sign, micros = ("-", -ns // 1000) if ns < 0 else ("", ns // 1000)
    return f"{sign}{micros // 1_000_000}.{micros // 1000 % 1000:03} {micros % 1000:03}"


def _shown(name: str, value: Any) -> str:
    base, _, rest = name.partition(".")
    if base.endswith("_ns") and isinstance(value, int) and not base.endswith("since_ns"):
        name = base.removesuffix("_ns") + (f".{rest}" if rest else "")
        return f"{name}={_duration(value)}"
    if isinstance(value, str):
        return f"{name}={_quoted(value)}"
    return f"{name}={json.dumps(value)}"


def _quoted(text: str) -> str:
    """As it is where it is one plain word, else as JSON: a control character moves no terminal."""
    plain = text.isprintable() and text and not set(text) & set(' "=')
    return text if plain else json.dumps(text)


def _duration(ns: int) -> str:
    if ns < 1_000_000:
        return f"{ns / 1e3:.3f}us"
    return f"{ns / 1e6:.3f}ms"
