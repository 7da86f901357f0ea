"""A Perfetto trace: ui.perfetto.dev and its trace processor. Needs the `perfetto` package.

Guarantees: the clock is declared CLOCK_MONOTONIC, tied to wall time where that is known; every
track is described before it is used; begins and ends balance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

from ttftprof.model import Report, Series
from ttftprof.reports import slices
from ttftprof.timeline import Timeline
from ttftprof.windows import Ints

_REALTIME, _MONOTONIC = 1, 3  # BuiltinClock of builtin_clock.proto
_SEQUENCE = 0x7474
_COUNTER_BASE = 1 << 40
_AT_ONCE = 4_096  # packets that are held


def write(report: Report, timeline: Timeline, out: BinaryIO) -> None:
    trace = _Trace(out)
    trace.clocks(report)
    tracks = list(slices.tracks(report, timeline))
    counters = slices.counters(report)
    for track in tracks:
        trace.describe(track)
    for number, (name, series) in enumerate(counters, _COUNTER_BASE):
        trace.describe_counter(number, name, series)
    for track in tracks:
        if isinstance(track.slices, slices.Runs) and track.slices.apart:
            for run in track.slices.make():
                trace.run(track.number, run)
        else:
            for ns, piece in slices.edges(track.slices):
                trace.edge(track.number, ns, (piece.name, piece.facts) if piece else None)
    for number, (_, series) in enumerate(counters, _COUNTER_BASE):
        for ns, value in zip(series.ns, series.values, strict=True):
            trace.count(number, ns, value)
    trace.flush()


class _Trace:
    """Packets, written some thousand at a time: traces one after another are one trace."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self._held = out, protos.Trace()

    def flush(self) -> None:
        self._out.write(self._held.SerializeToString())
        self._held = protos.Trace()  # one that is cleared keeps its memory

    def _packet(self, ns: int | None = None) -> Any:
        if len(self._held.packet) == _AT_ONCE:
            self.flush()
        return _packet(self._held, ns)

    def clocks(self, report: Report) -> None:
        packet = self._packet(report.start_ns)
        packet.sequence_flags = protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        snapshot = packet.clock_snapshot
        snapshot.primary_trace_clock = _MONOTONIC
        snapshot.clocks.add(clock_id=_MONOTONIC, timestamp=report.start_ns)
        if report.realtime_offset_ns is not None:
            wall_ns = max(report.start_ns + report.realtime_offset_ns, 0)
            snapshot.clocks.add(clock_id=_REALTIME, timestamp=wall_ns)

    def describe(self, track: slices.Track) -> None:
        packet = self._packet()
        descriptor = packet.track_descriptor
        descriptor.uuid, descriptor.name = track.number, track.name
        if track.parent is not None:
            descriptor.parent_uuid = track.parent

    def describe_counter(self, number: int, name: str, series: Series) -> None:
        packet = self._packet()
        descriptor = packet.track_descriptor
        descriptor.uuid, descriptor.name = number, name
        descriptor.counter.unit_name = series.unit

    def edge(self, track: int, ns: int, begins: slices.Named | None) -> None:
        _edge(self._packet(ns), track, begins)

    def run(self, track: int, run: slices.Run) -> None:
        """A begin and an end for each slice."""
        self.flush()
        stamps = np.column_stack([run.start_ns, run.end_ns]).reshape(-1)
        ends = np.full(len(run.what), len(run.named))
        what = np.column_stack([run.what, ends]).reshape(-1)
        if len(stamps):
            width = -(-max(int(stamps.max()).bit_length(), 1) // 7)
            models = [_model(track, begins, width) for begins in (*run.named, None)]
            self._out.write(_stamped(models, what, stamps, width))

    def count(self, track: int, ns: int, value: float) -> None:
        packet = self._packet(ns)
        event = packet.track_event
        event.type, event.track_uuid = protos.TrackEvent.TYPE_COUNTER, track
        event.double_counter_value = value


def _packet(trace: Any, ns: int | None) -> Any:
    packet = trace.packet.add()
    packet.trusted_packet_sequence_id = _SEQUENCE
    if ns is not None:
        packet.timestamp, packet.timestamp_clock_id = ns, _MONOTONIC
    return packet


def _edge(packet: Any, track: int, begins: slices.Named | None) -> None:
    """What begins, or the end (None) of what is open."""
    event = packet.track_event
    event.track_uuid = track
    if begins is None:
        event.type = protos.TrackEvent.TYPE_SLICE_END
        return
    event.type, event.name = protos.TrackEvent.TYPE_SLICE_BEGIN, begins[0]
    for name, value in begins[1].items():
        note = event.debug_annotations.add(name=name)
        if isinstance(value, str):
            note.string_value = value
        elif value >= 1 << 63:
            note.uint_value = value
        else:
            note.int_value = value


# -- many packets that differ in their stamps alone -----------------------------------------------

# https://protobuf.dev/programming-guides/encoding: seven bits a byte, the lowest first; all but the
# last byte have the eighth set, and so may those of a number that needs fewer.
_VARINT_BITS = 7
_MORE = 0x80
_TIMESTAMP = b"\x40"  # the tag of field 8, the first of a packet


def _model(track: int, begins: slices.Named | None, width: int) -> tuple[bytes, int]:
    """(a packet, where in it the `width` bytes of its stamp are)"""
    trace = protos.Trace()
    stamp = 1 << _VARINT_BITS * (width - 1)
    _edge(_packet(trace, stamp), track, begins)
    data = trace.SerializeToString()
    return data, data.index(_TIMESTAMP + _varints(np.array([stamp]), width).tobytes()) + 1


def _stamped(models: Sequence[tuple[bytes, int]], what: Ints, stamps: Ints, width: int) -> bytes:
    """A packet for each stamp, by the model that `what` names."""
    lengths = np.array([len(data) for data, _ in models])[what]
    begins = np.cumsum(lengths) - lengths
    out = np.empty(int(lengths.sum()), np.uint8)
    for number in np.unique(what).tolist():
        data = np.frombuffer(models[number][0], np.uint8)
        out[begins[what == number][:, None] + np.arange(len(data))] = data
    at = begins + np.array([at for _, at in models])[what]
    out[at[:, None] + np.arange(width)] = _varints(stamps, width)
    return out.tobytes()


def _varints(values: Ints, width: int) -> npt.NDArray[np.uint8]:
    """Each as so many bytes, a row a value."""
    digits = values[:, None] >> _VARINT_BITS * np.arange(width) & (_MORE - 1)
    digits[:, :-1] |= _MORE
    return digits.astype(np.uint8)
