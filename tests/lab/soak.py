"""One recorder beside a real llama-server that switches its model again and again.

What must stay flat is looked at after each switch: the recorder's memory, descriptors and threads.
At the end the recording must hold every first token, exact sums, and no loss.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from kernel.support import recording
from lab.llama_server import LlamaServer, ServerFailed
from lab.make_model import make_model
from ttftprof.analysis import analyse

MIB = 1 << 20
MODEL_MB = 60
SETTLED = 5  # switches after which caches of the recorder are full
MAX_GROWTH = 0.10  # of its memory, from then to the end, by the fitted line


@dataclass(frozen=True, slots=True)
class Look:
    """The recorder after a switch."""

    seconds: float
    rss_bytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Soaked:
    """What was seen; `faults` is empty if all went well."""

    looks: Sequence[Look]
    ttft_errors_ns: Sequence[int]
    recording_bytes: int
    cpu_share: float
    faults: Sequence[str]


def soak(models: Path, output: Path, minutes: float, every_s: float) -> Soaked:
    """Switches between models a and b until the time is over. Raises if the recorder fails."""
    replies, looks, faults = [], [], []
    with LlamaServer.router(models) as server:
        server.chat("a", "hello")
        with recording(output, "--pid", str(server.pid)) as seen:
            process = psutil.Process(seen.process.pid)
            began = time.monotonic()
            for number, model in enumerate(itertools.cycle("ba")):
                due = began + number * every_s
                if due > began + minutes * 60:
                    break
                time.sleep(max(0.0, due - time.monotonic()))
                try:
                    replies.append(server.chat(model, "Say in one word what a page fault is."))
                except (ServerFailed, OSError, ValueError) as error:
                    faults.append(f"switch {number} failed: {error}")
                looks.append(look(process, began))
                show(looks)
            cpu = process.cpu_times()
            share = (cpu.user + cpu.system) / (time.monotonic() - began)
    report = analyse(output)
    faults += [f"lost {count} × {place}" for place, count in report.lost.items() if count]
    if not report.complete:
        faults.append("the recording is incomplete")
    if len(report.requests) != len(replies):
        faults.append(f"{len(replies)} requests were made, {len(report.requests)} recorded")
    errors = []
    for request, reply in zip(report.requests, replies, strict=False):
        if request.ttft_ns is None:
            faults.append(f"request {request.id} has no first token")
            continue
        errors.append(reply.ttft_ns - request.ttft_ns)
        for parts in (request.phases, request.activities):
            if sum(part.duration_ns for part in parts) != request.ttft_ns:
                faults.append(f"the parts of request {request.id} do not add up")
    faults += grown(looks)
    size = output.stat().st_size
    return Soaked(looks, errors, size, share, faults)


def look(process: psutil.Process, began: float) -> Look:
    with process.oneshot():
        rss, threads = process.memory_info().rss, process.num_threads()
    return Look(time.monotonic() - began, rss, process.num_fds(), threads)


def grown(looks: Sequence[Look]) -> list[str]:
    """What did not stay flat, by a straight line through the looks after the first few."""
    later = looks[SETTLED:]
    if len(later) < SETTLED:
        return []
    faults = []
    for name in ("rss_bytes", "descriptors", "threads"):
        values = np.array([getattr(seen, name) for seen in later], float)
        slope, base = np.polyfit([seen.seconds for seen in later], values, 1)
        begin, end = base + slope * later[0].seconds, base + slope * later[-1].seconds
        if end > begin * (1 + MAX_GROWTH):
            faults.append(f"{name} grew from {begin:,.0f} to {end:,.0f}")
    return faults


def show(looks: Sequence[Look]) -> None:
    last = looks[-1]
    print(
        f"[soak] {last.seconds:7.0f} s  switch {len(looks)}: {last.rss_bytes / MIB:.1f} MiB, "
        f"{last.descriptors} descriptors, {last.threads} threads",
        file=sys.stderr,
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=10, metavar="SECONDS")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models").mkdir()
        for seed, model in enumerate("ab", start=1):
            target = folder / "models" / f"{model}.gguf"
            make_model(target, size_mb=MODEL_MB, layers=6, seed=seed)
        output = folder / "soak.ttft"
        done = soak(folder / "models", output, arguments.minutes, arguments.every)
    errors_ms = np.abs(done.ttft_errors_ns) / 1e6
    first, last = done.looks[0], done.looks[-1]
    print(
        f"{len(done.looks)} switches in {last.seconds / 60:.1f} min: memory "
        f"{first.rss_bytes / MIB:.1f} → {last.rss_bytes / MIB:.1f} MiB, descriptors "
        f"{first.descriptors} → {last.descriptors}, threads {first.threads} → {last.threads}; "
        f"{100 * done.cpu_share:.2f} % of a core; {done.recording_bytes / MIB:.1f} MiB recorded; "
        f"TTFT within {np.median(errors_ms):.1f} ms of the client's at the median, "
        f"{errors_ms.max():.1f} ms at worst"
    )
    for fault in done.faults:
        print(f"fault: {fault}")
    sys.exit(bool(done.faults))


if __name__ == "__main__":
    main()
