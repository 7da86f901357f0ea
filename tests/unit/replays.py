"""A scene as a recorder would write it, look by look, on a clock of ours."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from ttftprof import rolling, watch
from ttftprof.recording import STREAMS, Reader
from ttftprof.rolling import Rolling
from unit.recordings import ARMED_NS, Scene


class Clock:
    """Stands where the probes were armed, until somebody moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = ARMED_NS
        for module in (rolling, watch):
            monkeypatch.setattr(module, "now_ns", self)

    def __call__(self) -> int:
        return self.ns


class Replay:
    """Writes a scene into `memory` as the clock goes on."""

    def __init__(self, scene: Scene, clock: Clock, memory: Rolling) -> None:
        self._clock, self._memory = clock, memory
        self._before_ns = 0
        with (
            tempfile.TemporaryDirectory() as folder,
            Reader(scene.write(Path(folder) / "scene.ttft")) as reader,
        ):
            for key, value in reader.meta.items():
                memory.set_meta(key, value)
            for source in reader.sources():
                memory.set_source(source)
            self._streams = {name: reader.stream(name) for name in STREAMS}
            self._facts = [
                (int(fact.get("end_ns") or stamp), kind, stamp, fact)
                for kind in reader.fact_kinds()
                for stamp, fact in reader.facts(kind)
            ]
            self.end_ns = int(reader.meta["end_ns"])

    def to(self, ns: int) -> None:
        """One look at the kernel: all that is over by then."""
        before_ns, self._before_ns = self._before_ns, ns
        self._clock.ns = ns
        for name, records in self._streams.items():
            is_events = name == "events"
            over = records["start_ns"] + records["duration_ns"] if is_events else records["ns"]
            self._memory.add_batch(name, records[(over > before_ns) & (over <= ns)])
        for over_ns, kind, stamp, fact in self._facts:
            if before_ns < over_ns <= ns:
                self._memory.add_fact(kind, stamp, fact)
        self._memory.commit()
