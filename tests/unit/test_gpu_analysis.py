"""What is concluded from driver calls and samples of GPUs, from recordings told fact by fact."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from ttftprof.activities import process_activities
from ttftprof.analysis import conclude
from ttftprof.events import Kind, Wait
from ttftprof.gpu_memory import memory_edge
from ttftprof.gpu_parts import common_ns, length, union
from ttftprof.model import Evidence, Part, Report, Request
from ttftprof.reports import html, json, markdown, slices, terminal
from ttftprof.reports.json import as_json, schema
from ttftprof.reports.words import warnings
from unit.recordings import GIB, MIB, MS, NEW, OLD, Scene, gpu_switch, ms, ns, router_switch


def parts(request: Request, phase: str) -> dict[str, Part]:
    (found,) = [p for p in request.phases if p.phase == phase]
    return {part.part: part for part in found.parts}


def value(evidence: tuple[Evidence, ...], what: str) -> object:
    (found,) = [e.value for e in evidence if e.what == what]
    return found


# -- intervals ------------------------------------------------------------------------------------


def test_intervals_are_joined_and_cut() -> None:
    spans = [(5, 9), (0, 3), (2, 4), (9, 12), (20, 20), (18, 40)]
    assert union(spans, (1, 30)) == [(1, 4), (5, 12), (18, 30)]
    assert length([(1, 4), (5, 12)]) == 10
    assert union([], (0, 9)) == []


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [([(0, 10)], [(2, 4), (6, 20)], 6), ([(0, 4), (6, 9)], [(3, 7)], 2), ([], [(0, 9)], 0)],
)
def test_common_time(one: list[tuple[int, int]], other: list[tuple[int, int]], common: int) -> None:
    assert common_ns(one, other) == common_ns(other, one) == common


# -- parts ----------------------------------------------------------------------------------------


def test_a_start_up_is_split_into_its_parts() -> None:
    request = gpu_switch().only_request()
    launch, load, init = (parts(request, p) for p in ("launch", "load", "init"))
    assert (ms(launch["context"].start_ns), ms(launch["context"].end_ns)) == (165, 190)
    assert launch["context"].spent_ns == 25 * MS  # the two overlap
    assert load["alloc"].spent_ns == 2 * MS
    assert value(load["alloc"].evidence, "memory given") == 3 * GIB
    assert init["compile"].spent_ns == 10 * MS
    assert init["graph_capture"].spent_ns == 10 * MS
    assert init["kv_alloc"].spent_ns == 4 * MS
    assert value(init["kv_alloc"].evidence, "memory given") == GIB
    assert value(init["kv_alloc"].evidence, "refused: out of memory") == 1
    assert init["warmup"].spent_ns == 19 * MS
    assert all(p.basis == "observed" for p in (*launch.values(), *init.values()))


def test_the_report_with_parts_satisfies_its_schema() -> None:
    report = (
        gpu_switch().gpu().gpu_row(90, used_bytes=GIB).gpu_row(600, used_bytes=5 * GIB).report()
    )
    Draft202012Validator(schema()).validate(as_json(report))
    phases = as_json(report)["requests"][0]["phases"]
    assert {p["part"] for phase in phases for p in phase["parts"]} >= {"context", "kv_alloc"}


def test_calls_of_a_driver_are_no_calls_of_an_engine() -> None:
    """A process that only uses the driver held no model."""
    timeline = Scene().process(7, "x").driver_call(7, "cuInit", 1, 2).timeline()
    assert timeline.calls == ()
    assert [c.name for c in timeline.gpu.calls[7]] == ["cuInit"]


def test_calls_of_an_interval_are_found_whatever_overlaps() -> None:
    """One thread's long call spans those of another; one begins as the interval ends."""
    scene = Scene().process(7, "x")
    for begin, end, tid in ((0, 90, 8), (1, 2, 7), (10, 30, 7), (40, 60, 7), (70, 80, 7)):
        scene.driver_call(7, "cuMemcpyHtoD", begin, end, size=begin, tid=tid)
    gpu = scene.timeline().gpu
    assert [c.size_bytes for c in gpu.during(7, ns(20), ns(70))] == [0, 10, 40]
    assert [c.size_bytes for c in gpu.during(7, ns(85), ns(99))] == [0]
    assert gpu.during(7, ns(90), ns(99)) == gpu.during(9, 0, ns(99)) == []


def test_a_lost_return_swallows_nothing_after_it() -> None:
    scene = Scene().process(7, "x")
    scene.driver_call(7, "cuMemcpyHtoD", 1, None, size=5)
    scene.driver_call(7, "cuMemcpyHtoD", 3, 4, size=6).driver_call(7, "cuInit", 5, None)
    calls = scene.timeline().gpu.calls[7]
    assert [(c.name, c.size_bytes, c.result) for c in calls] == [
        ("cuMemcpyHtoD", 6, 0), ("cuInit", 0, None)
    ]  # fmt: skip


def test_context_without_symbols_is_inferred_from_the_device_file() -> None:
    scene = router_switch()
    scene.event(Kind.DEVICE, 165, NEW, flags=1, dev=195 << 20, b=9)
    for at in (166, 180):
        scene.event(Kind.DEVICE, at, NEW, flags=16, dev=195 << 20 | 255, duration_ns=5 * MS, a=70)
    scene.event(Kind.DEVICE, 188, NEW, flags=16, dev=10 << 20, duration_ns=5 * MS)
    context = parts(scene.only_request(), "launch")["context"]
    assert (context.basis, context.spent_ns) == ("inferred", 10 * MS)


def test_context_while_the_driver_was_not_probed_yet_is_inferred_too() -> None:
    """The first call began before its library was met; later ones are seen."""
    scene = router_switch().event(Kind.DEVICE, 165, NEW, flags=1, dev=195 << 20, b=9)
    for at in (166, 180, 192):
        scene.event(Kind.DEVICE, at, NEW, flags=16, dev=195 << 20 | 255, duration_ns=5 * MS, a=70)
    scene.driver_call(NEW, "cuMemAlloc", 190, 191, size=MIB)
    assert "context" not in parts(scene.only_request(), "launch")
    met = {"path": "/opt/libcuda.so.1", "marks": ["cuInit"], "tgid": NEW, "mapped_ns": ns(164)}
    scene.fact("library", ns(184), met)
    context = parts(scene.only_request(), "launch")["context"]
    assert (context.basis, context.spent_ns) == ("inferred", 10 * MS)


def test_compilers_and_caches() -> None:
    scene = router_switch().forked(900, 503, parent=NEW).event(Kind.EXEC, 503, 900)
    scene.fact("exec", ns(503), {"tgid": 900, "path": "/usr/local/cuda/bin/ptxas"})
    scene.exited(900, 540, gone=541)
    scene.cache_open(NEW, 542, "Triton", write=True).cache_open(NEW, 505, "ComputeCache")
    compiled = parts(scene.only_request(), "init")["compile"]
    assert compiled.spent_ns == 38 * MS
    assert value(compiled.evidence, "compilers run: ptxas") == 1
    assert value(compiled.evidence, "Triton missed: files written") == 1
    assert value(compiled.evidence, "ComputeCache hit: files read") == 1


def test_what_an_engine_says_of_its_stages_stands_where_no_call_was_seen() -> None:
    """vLLM tells how long it compiled and captured, when it has done so."""
    scene = (
        router_switch().log(NEW, "compiled", 525, s=0.02).log(NEW, "graphs_captured", 550, s=0.015)
    )
    found = parts(scene.only_request(), "init")
    spans = {name: (ms(part.start_ns), ms(part.end_ns), part.basis) for name, part in found.items()}
    assert spans["compile"] == (505, 525, "inferred")
    assert spans["graph_capture"] == (535, 550, "inferred")
    assert value(found["compile"].evidence, "the engine said how long it compiled") == 20 * MS
    called = parts(gpu_switch().log(NEW, "graphs_captured", 550, s=0.015).only_request(), "init")
    assert called["graph_capture"].spent_ns == 10 * MS


def test_what_was_written_first_and_read_back_is_no_hit() -> None:
    """Triton compiles, keeps what it compiled and loads it; another kernel it had from before."""
    scene = router_switch().driver_call(NEW, "cuModuleLoadData", 502, 512)
    scene.cache_open(NEW, 503, "Triton", ino=70).cache_open(NEW, 504, "Triton", write=True, ino=71)
    scene.cache_open(NEW, 505, "Triton", ino=71)
    found = parts(scene.only_request(), "init")["compile"].evidence
    assert value(found, "Triton missed: files written") == 1
    assert value(found, "Triton hit: files read") == 1


def test_memory_of_the_host_that_is_pinned_is_none_of_the_gpu() -> None:
    scene = router_switch().driver_call(NEW, "cuMemHostAlloc", 502, 512, size=GIB)
    told = parts(scene.only_request(), "init")["kv_alloc"].evidence
    assert value(told, "memory given") == 0
    assert value(told, "the host's memory pinned") == GIB


# -- transfer -------------------------------------------------------------------------------------


def copying() -> Scene:
    """One thread copies from 100 to 200 ms: it runs, waits for the device (110 to 130) and for the
    pages of its source (150 to 180); another waits for the device from 210 to 230."""
    return (
        Scene(end=300)
        .process(7, "x")
        .driver_call(7, "cuMemcpyHtoD", 100, 200, size=64 * MIB)
        .wait(7, 110, 130, Wait.DEVICE)
        .wait(7, 150, 180, Wait.STORAGE)
        .wait(7, 210, 230, Wait.DEVICE)
    )


def test_a_copy_is_transfer_but_for_its_waits_for_storage() -> None:
    timeline = copying().timeline()
    found = process_activities(timeline, 7, ns(90), ns(240))
    assert [(a.activity, ms(a.start_ns), ms(a.end_ns)) for a in found] == [
        ("cpu", 90, 100), ("transfer", 100, 150), ("storage_wait", 150, 180),
        ("transfer", 180, 200), ("cpu", 200, 210), ("gpu", 210, 230), ("cpu", 230, 240),
    ]  # fmt: skip


def test_waiting_for_the_device_is_gpu_but_in_a_load_it_is_transfer() -> None:
    """A driver spins while it waits: the call tells, not the scheduler."""
    scene = Scene(end=300).process(7, "x").wait(7, 10, 20, Wait.LOCK)
    scene.driver_call(7, "cuMemcpyHtoDAsync", 100, 101, size=64 * MIB)
    timeline = scene.driver_call(7, "cuStreamSynchronize", 110, 190).timeline()
    spans = [
        [
            (a.activity, ms(a.start_ns))
            for a in process_activities(timeline, 7, ns(90), ns(200), in_load)
        ]
        for in_load in (False, True)
    ]
    between = [("cpu", 90), ("transfer", 100), ("cpu", 101)]
    assert spans == [
        [*between, ("gpu", 110), ("cpu", 190)], [*between, ("transfer", 110), ("cpu", 190)]
    ]  # fmt: skip


def test_a_copy_under_way_at_the_end_is_transfer_to_the_end() -> None:
    timeline = Scene(end=300).process(7, "x").wait(7, 10, 20, Wait.LOCK).driver_call(
        7, "cuMemcpyHtoDAsync", 100, None, size=9
    ).timeline()  # fmt: skip
    found = process_activities(timeline, 7, ns(90), ns(300))
    assert [(a.activity, ms(a.end_ns)) for a in found] == [("cpu", 100), ("transfer", 300)]


@pytest.mark.parametrize(
    ("name", "second", "counts"),
    [("hipMemcpy", 1, True), ("hipMemcpy", 2, False), ("hipMemcpyHtoD", 0, True),
     ("hipMemcpyAsync", 3, False), ("cuMemcpyHtoDAsync", 77, True), ("cuMemAlloc", 1, False),
     ("cuMemcpy", 77, False), ("cuMemcpyAsync", 77, False)],
)  # fmt: skip
def test_only_copies_to_the_device_are_counted(name: str, second: int, counts: bool) -> None:
    timeline = Scene().process(7, "x").driver_call(7, name, 1, 2, 50, second).timeline()
    assert bool(timeline.gpu.copies(7)) == counts


def test_copies_that_may_go_either_way_are_told_apart() -> None:
    scene = gpu_switch().driver_call(NEW, "cuMemcpyAsync", 410, 411, size=5 * MIB)
    scene.driver_call(NEW, "cuMemcpyBatchAsync", 412, 413)
    transfer = parts(scene.wait(NEW, 165, 166, Wait.LOCK).only_request(), "load")["transfer"]
    assert value(transfer.evidence, "copied in a direction that is not told") == 5 * MIB
    assert value(transfer.evidence, "copies whose size is not told") == 1
    assert value(transfer.evidence, "copied to the device") == 160 * MIB


def test_overlap_of_storage_and_transfer_is_given() -> None:
    scene = gpu_switch().block(310, 330, ino=12).block(335, 360, ino=12)
    transfer = parts(scene.wait(NEW, 165, 166, Wait.LOCK).only_request(), "load")["transfer"]
    assert value(transfer.evidence, "copied to the device") == 160 * MIB
    assert value(transfer.evidence, "storage was read while copying") == 35 * MS
    assert transfer.spent_ns == 90 * MS


# -- devices --------------------------------------------------------------------------------------


def test_use_of_a_gpu() -> None:
    scene = gpu_switch().gpu().gpu_row(90, used_bytes=2 * GIB)
    for at, busy in ((100, 0), (300, 50), (500, 100), (900, 0)):
        scene.gpu_row(at, busy_percent=busy, used_bytes=5 * GIB)
    (use,) = scene.only_request().gpu
    assert (use.name, use.source) == ("Fake GPU", "nvml")
    assert (use.memory_before_bytes, use.memory_after_bytes) == (5 * GIB, 5 * GIB)
    assert use.busy_ns == 300 * MS
    assert use.transfer_bytes == 160 * MIB


def test_without_samples_the_calls_show_a_gpu_and_without_both_there_is_none() -> None:
    (use,) = gpu_switch().only_request().gpu
    assert (use.source, use.transfer_bytes, use.memory_before_bytes) == (
        "driver calls", 160 * MIB, None
    )  # fmt: skip
    assert router_switch().only_request().gpu == ()


def test_what_was_copied_is_not_guessed_for_one_of_two() -> None:
    uses = gpu_switch().gpu(0).gpu(1).only_request().gpu
    assert [use.transfer_bytes for use in uses] == [None, None]


def partitioned() -> Scene:
    """GPU 0 has two instances, 2 and 3 of the recording; the server is on the second."""
    scene = gpu_switch().gpu(0).gpu(1).gpu(2, parent=0, name="MIG 1g", total_bytes=GIB)
    scene.gpu(3, parent=0, name="MIG 1g", total_bytes=GIB)
    return scene.gpu_process(NEW, 220, GIB // 2, 0).gpu_process(NEW, 220, GIB // 2, 3)


def test_an_instance_of_a_partitioned_gpu_has_what_its_process_did() -> None:
    uses = partitioned().only_request().gpu
    assert [(use.index, use.transfer_bytes) for use in uses] == [
        (0, None), (1, None), (2, None), (3, 160 * MIB)
    ]  # fmt: skip
    scene = partitioned().gpu_row(90, 3, used_bytes=1).gpu_row(300, 3, used_bytes=GIB)
    assert "GPU 0 MIG 1" in {s.path for s in scene.report().series}
    shown = text(scene)
    assert "gpu 0:1 memory" in shown
    assert "0:1 MIG 1g" in shown


def test_an_edge_of_memory() -> None:
    stamps = np.arange(8, dtype=np.int64) * 20
    used = np.array([900, 880, 500, 40, 0, 0, 30, 300], np.int64) * MIB
    edge = memory_edge(0, stamps, used)
    assert edge is not None
    assert (edge.fell_bytes, edge.falls_ns, edge.back_ns, edge.rises_ns, edge.error_ns) == (
        900 * MIB, 40, 60, 140, 20
    )  # fmt: skip
    assert memory_edge(0, stamps[3:], used[3:]) is None


@pytest.mark.parametrize(("late", "error"), [(1, 20), (2, 25), (3, 25), (6, 20), (7, 25)])
def test_an_edge_is_as_exact_as_the_looks_at_it(late: int, error: int) -> None:
    """A look that came late counts where memory fell, was back or rose: not elsewhere."""
    stamps = np.arange(8, dtype=np.int64) * 20
    stamps[late:] += 5
    used = np.array([900, 900, 500, 40, 0, 0, 0, 300], np.int64) * MIB
    edge = memory_edge(0, stamps, used)
    assert edge is not None
    assert edge.error_ns == error


def given_back(scene: Scene) -> Scene:
    """4 GiB fall from 120 to 160 ms; 3 GiB are taken at 220 ms."""
    for at, used in ((80, 4), (100, 4), (120, 4), (140, 1), (160, 0), (180, 0), (220, 3), (400, 3)):
        scene.gpu_row(at, used_bytes=used * GIB)
    return scene


def test_eviction_has_the_memorys_edges() -> None:
    request = given_back(gpu_switch().gpu()).only_request()
    (evict,) = [p for p in request.phases if p.phase == "evict"]
    assert value(evict.evidence, "memory given back on GPU 0") == 4 * GIB
    assert value(evict.evidence, "it was back after") == ns(160) - evict.start_ns
    assert value(evict.evidence, "and used anew after another") == 60 * MS
    told = "looked at before each of these no longer ago than"
    assert value(evict.evidence, told) == 40 * MS


def test_the_terminal_tells_the_memorys_edges() -> None:
    shown = " ".join(text(given_back(gpu_switch().gpu())).split())
    assert "evict memory: memory given back on GPU 0 4.29 GB, it was back after 57.00 ms" in shown


def test_eviction_names_the_processes_where_the_driver_does() -> None:
    """The old model's memory falls in two steps, the new one's rises in two; one more rests."""
    scene = given_back(gpu_switch().gpu())
    for pid, at, used in (
        (OLD, 50, 4), (77, 60, 1), (OLD, 140, 1), (OLD, 160, 0), (NEW, 220, 1), (NEW, 300, 3),
    ):  # fmt: skip
        scene.gpu_process(pid, at, used * GIB)
    (evict,) = [p for p in scene.only_request().phases if p.phase == "evict"]
    told = {e.what: e.value for e in evict.evidence if e.source == "gpu" and "pid" in e.what}
    assert told == {f"pid {OLD} gave back": 4 * GIB, f"pid {NEW} took": 3 * GIB}


def test_memory_that_was_not_back_in_time_is_asked_for_again() -> None:
    scene = given_back(gpu_switch().gpu())
    for begin, result in ((204, 2), (210, 2), (220, 0)):
        scene.driver_call(NEW, "cuMemAlloc", begin, begin + 1, size=3 * GIB + 1, result=result)
    (evict,) = [p for p in scene.only_request().phases if p.phase == "evict"]
    assert value(evict.evidence, "allocations refused: out of memory") == 2  # not that of init
    assert value(evict.evidence, "of them asked for again and given") == 2
    assert value(evict.evidence, "the longest wait for it") == 17 * MS


def test_a_model_dropped_inside_its_process_has_its_edges_too() -> None:
    """Without an eviction of its own: they lie in the phase in which memory fell."""
    scene = given_back(slow_init())
    told = {
        p.phase for p in scene.only_request().phases for e in p.evidence if "given back" in e.what
    }
    (phase,) = [p for p in scene.only_request().phases if p.start_ns <= ns(140) < p.end_ns]
    assert told == {phase.phase} != {"evict"}


# -- what is said ---------------------------------------------------------------------------------


def slow_load() -> Scene:
    """All of the load is a copy."""
    scene = router_switch().gpu().driver_call(
        NEW, "cuMemcpyHtoD", 205, 495, size=100 * MIB, second=0x7F00_0000_0100
    )  # fmt: skip
    return scene.wait(NEW, 165, 166, Wait.LOCK)


def test_a_link_below_its_best_is_said_with_its_gain() -> None:
    scene = slow_load().gpu_row(150, link_gen=1, link_width=16)
    request = scene.gpu_row(300, link_gen=4, link_width=4).only_request()
    assert (request.verdict.cause, request.verdict.activity) == ("load", "transfer")
    assert "PCIe 4.0 × 4, 25 % of what" in request.verdict.explanation
    assert request.verdict.actions[0].expected_gain_ns == round(290 * MS * 0.75)
    told = {e.what: e.value for e in request.verdict.evidence}
    assert told["the same at its best"] == 4 * int(told["link of GPU 0 while copying"] or 0)


def test_a_link_that_only_rests_slowly_is_not_blamed() -> None:
    scene = slow_load().gpu_row(150, link_gen=1, link_width=16)
    request = scene.gpu_row(300, link_gen=4, link_width=16).only_request()
    assert "PCIe" not in request.verdict.explanation


@pytest.mark.parametrize(
    ("on", "said"), [({0: GIB}, False), ({1: GIB}, True), ({0: 1, 1: GIB}, True), ({}, False)]
)
def test_of_several_gpus_only_the_link_of_one_in_use_is_blamed(
    on: dict[int, int], said: bool
) -> None:
    """The other one rests, with a slow link."""
    scene = slow_load().gpu(1).gpu_row(300, 0, link_gen=4, link_width=16)
    for device, used in on.items():
        scene.gpu_process(NEW, 210, used, device)
    explanation = scene.gpu_row(300, 1, link_gen=1, link_width=16).only_request()
    assert ("the link of GPU 1 ran" in explanation.verdict.explanation) == said


def test_copies_out_of_a_mapped_file_are_pageable() -> None:
    assert "pageable" in slow_load().only_request().verdict.explanation
    assert evidence(slow_load())["copied out of a mapped file"] == 100 * MIB
    pinned = slow_load().driver_call(
        NEW, "cuMemHostRegister", 203, 204, size=200 * MIB, second=0x7F00_0000_0000
    )  # fmt: skip
    assert "pageable" not in pinned.only_request().verdict.explanation


def slow_init() -> Scene:
    """The same switch with an init of 2 s."""
    scene = Scene().process(NEW, "server").file(12, "/models/b.gguf").executed(NEW, 163)
    scene.mapped(NEW, 12, 200).call(NEW, "model_load", 200, 300).log(NEW, "model_loaded", 2_300)
    return scene.request(NEW, 100, token=2_400).gpu(persistence=False)


def evidence(scene: Scene) -> dict[str, object]:
    return {e.what: e.value for e in scene.only_request().verdict.evidence}


def test_a_cold_context_and_persistence_off() -> None:
    scene = slow_init().driver_call(NEW, "cuDevicePrimaryCtxRetain", 310, 2_000)
    verdict = scene.only_request().verdict
    assert verdict.cause == "init"
    assert "persistence mode is off" in verdict.explanation
    assert any("nvidia-persistenced" in a.change for a in verdict.actions)
    assert evidence(scene)["persistence mode"] == "off"
    assert evidence(scene)["time in making the context"] == 1_690 * MS


@pytest.mark.parametrize(("at", "is_blamed"), [(50, False), (2_350, True)])
def test_persistence_mode_counts_as_it_was(at: float, is_blamed: bool) -> None:
    """Turned on before the context was made, or after."""
    scene = slow_init().driver_call(NEW, "cuDevicePrimaryCtxRetain", 310, 2_000)
    scene.fact("gpu_persistence", ns(at), {"index": 0, "on": True})
    assert ("persistence mode is off" in scene.only_request().verdict.explanation) == is_blamed


def test_a_cold_kernel_cache_is_said_with_its_gain() -> None:
    scene = slow_init().driver_call(NEW, "cuModuleLoadData", 310, 1_310)
    scene.cache_open(NEW, 1_300, "ComputeCache", write=True)
    verdict = scene.only_request().verdict
    assert "because ComputeCache did not have them" in verdict.explanation
    assert "the next start should find them" in verdict.explanation
    assert verdict.actions[0].expected_gain_ns == 1_000 * MS
    assert evidence(scene)["ComputeCache missed: files written"] == 1
    assert evidence(scene)["ComputeCache at the next start"] == "hit"


@pytest.mark.parametrize(
    ("how", "next_start"),
    [
        ({"write": True}, "hit"),
        ({}, "hit"),
        ({"missing": True}, "miss: nothing was kept"),
        ({"write": True, "fstype": "overlay"}, "hit only in this container"),
        ({"write": True, "fstype": "tmpfs"}, "hit only until the machine restarts"),
    ],
)
def test_whether_the_next_start_would_be_a_hit(how: dict[str, Any], next_start: str) -> None:
    scene = router_switch().driver_call(NEW, "cuModuleLoadData", 502, 512)
    scene.cache_open(NEW, 505, "Triton", **how)
    found = parts(scene.only_request(), "init")["compile"].evidence
    assert str(value(found, "Triton at the next start")).startswith(next_start)


def test_kv_memory_that_was_refused_and_layers_on_the_cpu() -> None:
    scene = slow_init().driver_call(NEW, "cuMemAlloc", 400, 500, size=5 * GIB)
    scene.driver_call(NEW, "cuMemAlloc", 501, 600, size=5 * GIB, result=2)
    scene.log(NEW, "fit_end", 240, s=0.41).log(NEW, "cpu_fallback", 650, layers=20, of=33)
    explanation = scene.only_request().verdict.explanation
    assert "5.4 GB of GPU memory" in explanation
    assert "1 more were refused" in explanation
    assert "Only 20 of 33 layers" in explanation
    told = evidence(scene)
    assert (told["layers on the GPU"], told["of the model's"]) == (20, 33)
    assert told["the server fitted the model to free memory"] == 0.41
    assert told["refused: out of memory"] == 1
    assert told["memory of the GPUs it is on"] == 8 * GIB


def test_kv_memory_is_held_against_the_instance_that_it_is_on() -> None:
    """0.8 of its 2 GiB are much, and nothing beside those of the two whole GPUs."""
    scene = slow_init().gpu(1).gpu(2, parent=0, total_bytes=2 * GIB)
    scene.driver_call(NEW, "cuMemAlloc", 400, 500, size=8 * GIB // 10)
    assert "KV cache" not in scene.only_request().verdict.explanation
    scene.gpu_process(NEW, 500, GIB, 0).gpu_process(NEW, 500, GIB, 2)
    assert "KV cache" in scene.only_request().verdict.explanation
    assert evidence(scene)["memory of the GPUs it is on"] == 2 * GIB


def test_a_driver_that_refuses_leaves_the_model_on_the_cpu() -> None:
    scene = slow_init().driver_call(NEW, "cuInit", 310, 320, result=100)
    verdict = scene.only_request().verdict
    assert "could not use the GPU (cuInit failed with error 100)" in verdict.explanation
    assert evidence(scene)["cuInit failed"] == 100
    denied = slow_init().event(Kind.DEVICE, 310, NEW, flags=1, b=(1 << 64) - 13)
    assert "device files could not be opened" in denied.only_request().verdict.explanation
    had = denied.event(Kind.DEVICE, 311, NEW, flags=1, dev=195 << 20, b=7)
    assert "could not use" not in had.only_request().verdict.explanation


def test_a_device_that_is_too_hot_is_said_of_a_prefill() -> None:
    scene = hot_prefill(0x40)
    verdict = scene.only_request().verdict
    assert verdict.cause == "prefill"
    assert "ran below its clock in 100 % of the looks" in verdict.explanation
    capped = hot_prefill(0x04)  # at its power cap a busy device is meant to run
    assert "below its clock" not in capped.only_request().verdict.explanation


def hot_prefill(throttle: int) -> Scene:
    scene = Scene().process(NEW, "server").file(12, "/models/b.gguf").held(NEW, 12, 25_600)
    scene.request(NEW, 100, token=2_100).gpu()
    for at in range(100, 2_100, 100):
        scene.gpu_row(at, throttle=throttle)
    return scene


# -- lanes ----------------------------------------------------------------------------------------


def text(scene: Scene) -> str:
    out = io.StringIO()
    terminal.write([scene.report()], out, 100, False)
    return out.getvalue()


def sampled() -> Scene:
    """A switch on a GPU that tells all it can be asked."""
    scene = gpu_switch().gpu()
    for at in range(80, 900, 20):
        scene.gpu_row(
            at, used_bytes=at * MIB, busy_percent=at % 100, link_gen=4, link_width=16, pstate=2,
            core_mhz=1_500, memory_mhz=9_000, throttle=0x40 if at > 700 else 0,
            rx_bytes_per_s=at * 10**6, tx_bytes_per_s=at * 10**5,
        )  # fmt: skip
    return scene.gpu_process(OLD, 80, GIB).gpu_process(OLD, 150, 0).gpu_process(NEW, 220, 3 * GIB)


def test_lanes_only_where_there_is_something_to_show() -> None:
    assert "gpu" not in text(router_switch()).lower()
    shown = text(sampled().wait(NEW, 165, 166, Wait.LOCK))
    for label in (
        "gpu 0 memory", "gpu 0 busy", "gpu 0 link in", "gpu 0 clock", "gpu 0 slowed", "to the GPU",
        "init holds: compile 10.00 ms", "load copies: copied to the device 168 MB, storage was",
    ):  # fmt: skip
        assert label in shown, shown


def test_every_number_of_a_device_is_a_curve() -> None:
    series = {(s.name, s.path): s for s in sampled().report().series if "gpu" in s.name}
    assert series.keys() == {
        *((f"gpu_{name}", "GPU 0") for name in (
            "memory_bytes", "busy", "link_in", "link_out", "link_speed", "clock", "memory_clock",
            "pstate", "slowed",
        )),
        ("gpu_process_bytes", f"GPU 0 pid {OLD}"), ("gpu_process_bytes", f"GPU 0 pid {NEW}"),
    }  # fmt: skip
    assert series["gpu_link_in", "GPU 0"].values[0] == 80e6
    assert series["gpu_link_speed", "GPU 0"].values[0] == 16 * 1969e6
    assert set(series["gpu_slowed", "GPU 0"].values) == {0.0, 1.0}
    old = series["gpu_process_bytes", f"GPU 0 pid {OLD}"]
    assert [ms(stamp) for stamp in old.ns[:3]] == pytest.approx([80, 150, 150], abs=1e-5)
    assert old.values[:3] == (GIB, GIB, 0)  # a step, no slope


def test_what_a_device_does_not_tell_is_one_line() -> None:
    scene = gpu_switch().gpu()
    for call in ("nvmlDeviceGetClockInfo", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMigMode"):
        scene.fact("gpu_refused", ns(1), {"call": call, "device": 0, "reason": "Not Supported"})
    assert "GPU 0 does not tell its clocks, utilisation" in scene.report().notes


def test_calls_that_were_not_seen_are_said() -> None:
    """Of a driver that was probed late, or not at all; not of an engine's library."""
    scene = gpu_switch().gpu()
    late = {"tgid": NEW, "mapped_ns": ns(165), "marks": ["cuInit"]}
    for path, told in (
        ("/opt/libcuda.so.1", late),
        ("/usr/lib/libamdhip64.so.6", {"marks": ["hipInit"]}),  # probed before it was mapped
        ("/x/libnvrtc.so.12 (deleted)", {"marks": [], "reason": "attach: EPERM"}),
        ("/x/libllama.so", late | {"marks": ["decode"]}),
    ):
        scene.fact("library", ns(177), {"path": path, **told})
    assert [note for note in scene.report().notes if "calls into" in note] == [
        "calls into /opt/libcuda.so.1 in the first 12.0 ms after "
        f"pid {NEW} mapped it may be missing",
        "calls into /x/libnvrtc.so.12 (deleted) could not be seen (attach: EPERM)",
    ]


def test_late_samples_are_said() -> None:
    late = gpu_switch().gpu()
    for at in range(100, 400, 20):
        late.gpu_row(at, used_bytes=1, late_ns=7 * MS, took_ns=1)
    assert "samples of the GPU came 7 ms late at the median" in late.report().notes
    assert not any("late" in note for note in sampled().report().notes)


def test_traces_hold_driver_calls_and_parts() -> None:
    timeline = sampled().timeline()
    report = conclude(timeline, Path("switch.ttft"))
    tracks = {track.name: list(track.slices) for track in slices.tracks(report, timeline)}
    calls = tracks[f"driver calls of thread {NEW}"]
    copies = [piece for piece in calls if piece.name == "cuMemcpyHtoD"]
    assert [piece.facts["bytes"] for piece in copies] == [100 * MIB, 60 * MIB]
    (captured,) = tracks["graph_capture of request 1 b"]
    assert (ms(captured.start_ns), ms(captured.end_ns), captured.facts["in"]) == (520, 530, "init")
    assert {"gpu clock GPU 0", "gpu link in GPU 0"} <= {n for n, _ in slices.counters(report)}


def test_kernel_caches_and_device_files_are_ticks() -> None:
    scene = router_switch().cache_open(NEW, 505, "Triton", write=True)
    scene.cache_open(NEW, 506, "Triton", write=True).cache_open(NEW, 507, "Triton", missing=True)
    scene.event(Kind.DEVICE, 165, NEW, flags=1, dev=195 << 20, b=9)
    scene.event(Kind.DEVICE, 166, NEW, flags=2, b=(1 << 64) - 2)
    told = [t.text for t in scene.report().tracks.ticks if t.name in ("kernel_cache", "gpu_device")]
    assert told == [
        f"/dev/nvidia* opened, by pid {NEW}", f"/dev/kfd refused (error 2), by pid {NEW}",
        f"kernel cache Triton: first file written, by pid {NEW}",
        f"kernel cache Triton: first file not found, by pid {NEW}",
    ]  # fmt: skip


def test_no_gpu_is_one_line_and_costs_no_confidence() -> None:
    without = router_switch()
    told = router_switch().source("gpu", "absent", "no NVIDIA driver library")
    assert warnings(told.report()) == []
    assert told.only_request().verdict == without.only_request().verdict
    shown = text(told)
    assert shown.count("GPU") == 1
    assert "note: no GPU is shown: no NVIDIA driver library" in shown
    broken = router_switch().source("gpu", "absent", "NVML does not work", "memory is unknown")
    assert len(warnings(broken.report())) == 1


SHOWN: dict[str, Callable[[Report, io.StringIO], None]] = {
    "terminal": lambda report, out: terminal.write([report], out, 100, False),
    "json": json.write,
    "html": lambda report, out: html.write([report], out),
    "markdown": markdown.write,
}


def shown_as(form: str, report: Report) -> str:
    out = io.StringIO()
    SHOWN[form](report, out)
    return " ".join(out.getvalue().split())


@pytest.mark.parametrize("form", SHOWN)
def test_every_report_says_why_no_gpu_is_shown_and_has_no_lane_of_one(form: str) -> None:
    reason = "no NVIDIA driver library, no other device that renders"
    report = router_switch().source("gpu", "absent", reason).report()
    shown = shown_as(form, report)
    assert f"no GPU is shown: {reason}" in shown
    assert not [s for s in report.series if "gpu" in s.name or s.name == "transfer_bytes"]
    assert [r.gpu for r in report.requests] == [()]
    assert "GPU 0" not in shown


@pytest.mark.parametrize("form", SHOWN)
def test_every_report_shows_the_gpu_there_is(form: str) -> None:
    report = given_back(gpu_switch().gpu(name="Fake 9000")).report()
    assert "Fake 9000" in shown_as(form, report)


def test_a_series_of_copies_sums_up_exactly() -> None:
    series = {s.name: s for s in gpu_switch().report().series}
    assert round(series["transfer_bytes"].values[-1]) == 160 * MIB
