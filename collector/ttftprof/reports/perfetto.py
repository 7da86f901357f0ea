"""A Perfetto trace: ui.perfetto.dev and its trace processor. Needs the `perfetto` package.

Guarantees: the clock is declared CLOCK_MONOTONIC, tied to wall time where that is known; every
track is described before it is used; begins and ends balance.
"""

from __future__ import annotations

from typing import Any, BinaryIO

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

from ttftprof.model import Report, Series
from ttftprof.reports import slices
from ttftprof.timeline import Timeline

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
        for ns, piece in slices.edges(track.slices):
            trace.edge(track.number, ns, piece)
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
        packet = self._held.packet.add()
        packet.trusted_packet_sequence_id = _SEQUENCE
        if ns is not None:
            packet.timestamp, packet.timestamp_clock_id = ns, _MONOTONIC
        return packet

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

    def edge(self, track: int, ns: int, piece: slices.Slice | None) -> None:
        packet = self._packet(ns)
        event = packet.track_event
        event.track_uuid = track
        if piece is None:
            event.type = protos.TrackEvent.TYPE_SLICE_END
        else:
            event.type, event.name = protos.TrackEvent.TYPE_SLICE_BEGIN, piece.name
            for name, value in piece.facts.items():
                note = event.debug_annotations.add(name=name)
                if isinstance(value, str):
                    note.string_value = value
                elif value >= 1 << 63:
                    note.uint_value = value
                else:
                    note.int_value = value

    def count(self, track: int, ns: int, value: float) -> None:
        packet = self._packet(ns)
        event = packet.track_event
        event.type, event.track_uuid = protos.TrackEvent.TYPE_COUNTER, track
        event.double_counter_value = value
