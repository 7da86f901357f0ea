"""What is concluded from driver calls and samples of GPUs, from recordings told fact by fact."""

from __future__ import annotations

import io

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from ttftprof import gpu
from ttftprof.activities import process_activities
from ttftprof.events import Kind, Wait
from ttftprof.gpu_parts import common_ns, length, union
from ttftprof.model import Evidence, Part, Request
from ttftprof.reports import terminal
from ttftprof.reports.json import as_json, schema
from ttftprof.reports.words import warnings
from unit.recordings import GIB, MIB, MS, NEW, Scene, gpu_switch, ms, ns, router_switch


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


def test_a_copy_under_way_at_the_end_is_transfer_to_the_end() -> None:
    timeline = Scene(end=300).process(7, "x").wait(7, 10, 20, Wait.LOCK).driver_call(
        7, "cuMemcpyHtoDAsync", 100, None, size=9
    ).timeline()  # fmt: skip
    found = process_activities(timeline, 7, ns(90), ns(300))
    assert [(a.activity, ms(a.end_ns)) for a in found] == [("cpu", 100), ("transfer", 300)]


@pytest.mark.parametrize(
    ("name", "second", "counts"),
    [("hipMemcpy", 1, True), ("hipMemcpy", 2, False), ("hipMemcpyHtoD", 0, True),
     ("hipMemcpyAsync", 3, False), ("cuMemcpyHtoDAsync", 77, True), ("cuMemAlloc", 1, False)],
)  # fmt: skip
def test_only_copies_to_the_device_are_counted(name: str, second: int, counts: bool) -> None:
    timeline = Scene().process(7, "x").driver_call(7, name, 1, 2, 50, second).timeline()
    assert bool(timeline.gpu.copies(7)) == counts


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


def test_an_edge_of_memory() -> None:
    stamps = np.arange(8, dtype=np.int64) * 20
    used = np.array([900, 880, 500, 40, 0, 0, 30, 300], np.int64) * MIB
    edge = gpu.memory_edge(stamps, used, 900 * MIB)
    assert edge is not None
    assert (edge.fell_bytes, edge.back_ns, edge.rises_ns) == (900 * MIB, 60, 140)
    assert gpu.memory_edge(stamps, used, 40 * MIB) is None


def test_eviction_has_the_memorys_edges() -> None:
    scene = gpu_switch().gpu()
    for at, used in ((100, 4), (120, 4), (140, 1), (160, 0), (180, 0), (220, 3), (400, 3)):
        scene.gpu_row(at, used_bytes=used * GIB)
    (evict,) = [p for p in scene.only_request().phases if p.phase == "evict"]
    assert value(evict.evidence, "memory given back on GPU 0") == 4 * GIB
    assert value(evict.evidence, "it was back after") == ns(160) - evict.start_ns
    assert value(evict.evidence, "and used anew after another") == 60 * MS


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
    assert "PCIe 4.0 × 4, 25% of what" in request.verdict.explanation
    assert request.verdict.actions[0].expected_gain_ns == round(290 * MS * 0.75)


def test_a_link_that_only_rests_slowly_is_not_blamed() -> None:
    scene = slow_load().gpu_row(150, link_gen=1, link_width=16)
    request = scene.gpu_row(300, link_gen=4, link_width=16).only_request()
    assert "PCIe" not in request.verdict.explanation


def test_copies_out_of_a_mapped_file_are_pageable() -> None:
    assert "pageable" in slow_load().only_request().verdict.explanation
    pinned = slow_load().driver_call(
        NEW, "cuMemHostRegister", 203, 204, size=200 * MIB, second=0x7F00_0000_0000
    )  # fmt: skip
    assert "pageable" not in pinned.only_request().verdict.explanation


def slow_init() -> Scene:
    """The same switch with an init of 2 s."""
    scene = Scene().process(NEW, "server").file(12, "/models/b.gguf").executed(NEW, 163)
    scene.mapped(NEW, 12, 200).call(NEW, "model_load", 200, 300).log(NEW, "model_loaded", 2_300)
    return scene.request(NEW, 100, token=2_400).gpu(persistence=False)


def test_a_cold_context_and_persistence_off() -> None:
    scene = slow_init().driver_call(NEW, "cuDevicePrimaryCtxRetain", 310, 2_000)
    verdict = scene.only_request().verdict
    assert verdict.cause == "init"
    assert "persistence mode is off" in verdict.explanation
    assert any("nvidia-persistenced" in a.change for a in verdict.actions)


def test_a_cold_kernel_cache_is_said_with_its_gain() -> None:
    scene = slow_init().driver_call(NEW, "cuModuleLoadData", 310, 1_310)
    scene.cache_open(NEW, 1_300, "ComputeCache", write=True)
    verdict = scene.only_request().verdict
    assert "written to ComputeCache" in verdict.explanation
    assert verdict.actions[0].expected_gain_ns == 1_000 * MS


def test_kv_memory_that_was_refused_and_layers_on_the_cpu() -> None:
    scene = slow_init().driver_call(NEW, "cuMemAlloc", 400, 500, size=5 * GIB)
    scene.driver_call(NEW, "cuMemAlloc", 501, 600, size=5 * GIB, result=2)
    scene.log(NEW, "cpu_fallback", 250, layers=20, of=33)
    explanation = scene.only_request().verdict.explanation
    assert "5.4 GB of GPU memory" in explanation
    assert "1 more were refused" in explanation
    assert "Only 20 of 33 layers" in explanation


# -- lanes ----------------------------------------------------------------------------------------


def text(scene: Scene) -> str:
    out = io.StringIO()
    terminal.write([scene.report()], out, 100, False)
    return out.getvalue()


def test_lanes_only_where_there_is_something_to_show() -> None:
    assert "gpu" not in text(router_switch()).lower()
    scene = gpu_switch().gpu()
    for at in range(80, 900, 20):
        scene.gpu_row(at, used_bytes=at * MIB, busy_percent=at % 100)
    shown = text(scene)
    for label in ("gpu 0 memory", "gpu 0 busy", "to the GPU", "init holds: compile 10.00 ms"):
        assert label in shown, shown


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


def test_a_series_of_copies_sums_up_exactly() -> None:
    series = {s.name: s for s in gpu_switch().report().series}
    assert round(series["transfer_bytes"].values[-1]) == 160 * MIB
