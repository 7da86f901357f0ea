"""A server on the tests' own GPU switches models; what the report says of it.

Its runners call the fake libcuda in llama.cpp's order. A model's plan says what takes long; the
library's own stamps, and the moments at which memory came back, are the truth.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernel.support import recording
from lab import fake_gpu
from lab.fake_gpu import MemoryBack, Stamp, State
from ttftprof.analysis import conclude
from ttftprof.diagnosis.gpu_rules import hints_of
from ttftprof.gpu_parts import common_ns, copy_spans, length, union
from ttftprof.gpu_rows import Valid
from ttftprof.model import Evidence, Part, Report, Request
from ttftprof.timeline import Timeline, build
from workloads.build import make_programs
from workloads.cache import drop_cache, make_model, warm_cache
from workloads.client import ChatRequest, chat
from workloads.config import ModelConfig, ServerConfig
from workloads.server import pick_port, router

pytestmark = pytest.mark.kernel

MS = 1_000_000
MIB = 1 << 20
FILE_BYTES = 48 * MIB + 7919
COPIES = 7  # pieces of the file, as the runner copies it
SLOW_MS = 1_200  # what each model is about
REST_NS = 300 * MS  # with all memory taken, before it can serve
RESTS_S = 2.5  # until the sampler rests, too
LOOKS = 80  # calls of NVML, in which a sampler has asked for everything
OLD_MB, NEW_MB, KV_MB = 5_000, 4_500, 3_000  # of the GPU's 8192

STAGES = ("cuInit", "cuModuleLoadData", "cuGraphInstantiateWithFlags", "cuStreamSynchronize")
STAGE_NS = 20 * MS  # each of them takes, as do others of gpu_llama.c
DECODES = 2  # of a warm-up

# (model, the phase in which its plan is slow, what is to be said of that)
ABOUT = {
    "compiled": (
        "init",
        "because ComputeCache did not have them; the next start should find them there.",
        "3.1 GB of GPU memory were taken for the KV cache and buffers, and 1 more were refused.",
        "Only 20 of 33 layers are on the GPU; the rest runs on the CPU.",
    ),
    "copied": (
        "load",
        "the link of GPU 0 ran as PCIe 4.0 × 4, 25 % of what it and the slot could do (4.0 × 16).",
        "50 MB were copied to the device straight out of a mapped file: pageable memory",
        "Only 20 of 33 layers are on the GPU; the rest runs on the CPU.",
    ),
    "woken": ("launch", "persistence mode is off: the driver wakes the GPU anew"),
}
COLD = "cold"  # is in no cache, and its start has all stages
MODELS = (*ABOUT, COLD)


@dataclass(frozen=True)
class Switch:
    """One model made resident in the place of another, as told by all who were there."""

    request: Request
    runner: int
    old: int  # the runner that was there before
    timeline: Timeline
    stamps: Sequence[Stamp]  # of the runner's calls
    paces: Sequence[tuple[int, dict[str, Any]]]  # how far apart looks were from then on
    back_ns: tuple[int, int]  # just before and after the old one's memory was given back

    def parts(self) -> dict[str, Part]:
        return {part.part: part for phase in self.request.phases for part in phase.parts}

    def told(self, what: str) -> list[Evidence]:
        return [e for phase in self.request.phases for e in phase.evidence if e.what == what]

    def called(self, *names: str) -> list[Stamp]:
        return [s for s in self.stamps if s.name in names]


def plans(folder: Path) -> dict[str, dict[str, object]]:
    kernel = folder / "home/.nv/ComputeCache/0/a0f3"
    kernel.parent.mkdir(parents=True)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_bytes(bytes(4 * MIB))
    # So long that a look at the link falls into them however dear it is: see `Pace`.
    slow_copies = f"cuMemcpyHtoD_v2={2.5 * SLOW_MS / COPIES}"
    return {
        "old": {"GPU_WEIGHTS_MB": OLD_MB},
        "compiled": {
            "GPU_WEIGHTS_MB": NEW_MB,
            "GPU_KV_MB": KV_MB,
            "GPU_KERNEL": kernel,
            "FAKE_CUDA_MS": f"cuModuleLoadData={SLOW_MS}",
        },
        "copied": {"GPU_WEIGHTS_MB": NEW_MB, "FAKE_CUDA_MS": slow_copies},
        "woken": {
            "GPU_WEIGHTS_MB": NEW_MB,
            "GPU_LAYERS": "33/33",
            "FAKE_CUDA_MS": f"cuDevicePrimaryCtxRetain={SLOW_MS}",
        },
        COLD: {
            "GPU_WEIGHTS_MB": NEW_MB,
            "GPU_KV_MB": 1_000,
            "GPU_LAYERS": "33/33",
            "GPU_GRAPH": 1,
            "GPU_TOKENIZER": tokenizer,
            "FAKE_CUDA_MS": " ".join(f"{name}={STAGE_NS / MS}" for name in STAGES),
        },
    }


def server_of(folder: Path) -> ServerConfig:
    models = {}
    for name, plan in plans(folder).items():
        weights = make_model(folder / f"{name}.gguf", FILE_BYTES)
        (drop_cache if name == COLD else warm_cache)(weights)
        lines = [f"{key}={value}\n" for key, value in ({"GPU_LAYERS": "20/33"} | plan).items()]
        weights.with_name(f"{weights.name}.plan").write_text("".join(lines))
        models[name] = ModelConfig(
            path=str(weights),
            init_ns=REST_NS,
            compute="sleep",
            warmup=name == COLD,
            kv_bytes=MIB,
        )
    return ServerConfig(
        models=models,
        library_path=str(fake_gpu.build("gpu_llama.c", folder / "engine", "libllama.so")),
        truth_path=str(folder / "truth.jsonl"),
        port=pick_port(),
        programs=str(make_programs(folder / "programs")),
    )


@pytest.fixture(scope="module")
def switches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Switch]:
    """One recording of a server that has `old`, then is asked for each of the others."""
    folder = tmp_path_factory.mktemp("switch")
    libraries = folder / "driver"
    fake_gpu.build("fake_nvml.c", libraries, "libnvidia-ml.so.1")
    cuda = fake_gpu.build("fake_cuda.c", libraries, "libcuda.so.1")
    state = State(folder / "state")
    state.link(4, 4, 4, 16)
    config = server_of(folder)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FAKE_GPU_STATE", str(state.path))
        environment.setenv("LD_LIBRARY_PATH", str(libraries))
        environment.setenv("GPU_DRIVER", str(cuda))
        environment.setenv("FAKE_CUDA_STAMPS", str(folder / "stamps"))
        with router(config, folder) as server, MemoryBack(state) as back:
            ask(config, "old")
            with recording(folder / "switch.ttft", "--pid", str(server.pid)) as recorded:
                fake_gpu.await_calls(state, LOOKS)
                for model in MODELS:
                    if model == COLD:
                        time.sleep(RESTS_S)
                    ask(config, model)
                    fake_gpu.await_calls(state, LOOKS)
    with recorded.reader() as reader:
        timeline = build(reader)
        paces = list(reader.facts("gpu_pace"))
    report = conclude(timeline, recorded.path)
    made = fake_gpu.stamps(folder / "stamps")
    runners = runners_of(Path(config.truth_path))
    order = ["old", *MODELS]
    return {
        model: Switch(
            request=request_of(report, model),
            runner=runners[model],
            old=runners[order[number]],
            timeline=timeline,
            stamps=[s for s in made if s.pid == runners[model]],
            paces=paces,
            back_ns=back.given[runners[order[number]]],
        )
        for number, model in enumerate(MODELS)
    }


def ask(config: ServerConfig, model: str) -> None:
    request = ChatRequest(config.port, model, model, prompt_tokens=5, max_tokens=2)
    assert chat(request).outcome == "ok"


def runners_of(truth: Path) -> dict[str, int]:
    lines = [json.loads(line) for line in truth.read_text().splitlines()]
    return {line["model"]: line["pid"] for line in lines if line["source"] == "runner"}


def request_of(report: Report, model: str) -> Request:
    (found,) = [request for request in report.requests if request.model == model]
    return found


@pytest.mark.parametrize("model", ABOUT)
def test_what_was_slow_is_said_with_its_reason(switches: dict[str, Switch], model: str) -> None:
    """Of the phase it was slow in; in the verdict, unless this machine made another one slower."""
    switch, (phase, *sentences) = switches[model], ABOUT[model]
    hints = hints_of(switch.timeline, switch.request.phases, switch.runner)
    said = " ".join(hint.says for hint in hints if hint.phase == phase)
    assert [s for s in sentences if s not in said] == []
    others = [ns for name, ns in switch.request.phase_totals().items() if name != phase]
    if max(others) < SLOW_MS * MS:
        verdict = switch.request.verdict
        assert verdict.cause == phase
        assert said in verdict.explanation
        assert verdict.actions


def test_layers_on_the_cpu_are_said_with_the_fit_and_what_was_refused(
    switches: dict[str, Switch],
) -> None:
    switch = switches["compiled"]
    hints = hints_of(switch.timeline, switch.request.phases, switch.runner)
    (told,) = [h for h in hints if h.phase == "init" and "layers are on the GPU" in h.says]
    evidence = {e.what: e.value for e in told.evidence}
    assert (evidence["layers on the GPU"], evidence["of the model's"]) == (20, 33)
    assert evidence["the server fitted the model to free memory"] == 0.05
    refused = switch.told("allocations refused: out of memory")[0].value
    assert evidence["refused: out of memory"] == refused


def test_nothing_is_said_of_what_was_not_slow(switches: dict[str, Switch]) -> None:
    said = {
        model: " ".join(
            hint.says for hint in hints_of(switch.timeline, switch.request.phases, switch.runner)
        )
        for model, switch in switches.items()
    }
    for words, model in (
        ("Kernels were compiled", "compiled"),
        ("taken for the KV cache", "compiled"),
        ("persistence mode", "woken"),
    ):
        assert [name for name, text in said.items() if words in text] == [model]
    assert "layers" not in said["woken"]
    assert "only looks whether the model fits" not in switches["woken"].request.verdict.explanation


@pytest.mark.parametrize("model", MODELS)
def test_memory_that_has_to_be_given_back_first(switches: dict[str, Switch], model: str) -> None:
    """The old model's falls when the driver gives it back, after its process is gone; the new one
    is refused until then, asks again and gets it."""
    switch = switches[model]
    held = OLD_MB if model == "compiled" else NEW_MB + (KV_MB if model == "copied" else 0)
    took = NEW_MB + {"compiled": KV_MB, COLD: 2_000}.get(model, 0)
    for what in ("memory given back on GPU 0", f"pid {switch.old} gave back"):
        assert [e.value for e in switch.told(what)] == [held * MIB]
    assert [e.value for e in switch.told(f"pid {switch.runner} took")] == [took * MIB]
    (evict,) = [p for p in switch.request.phases if p.phase == "evict"]
    (after,) = switch.told("it was back after")
    seen_ns = evict.start_ns + int(after.value or 0)
    samples = switch.timeline.gpu.of_device(0, Valid.USED)
    stamps = samples["ns"].astype(np.int64)
    (took_ns,) = samples["took_ns"][stamps == seen_ns].tolist()
    before_ns, after_ns = switch.back_ns
    assert before_ns <= seen_ns + took_ns
    assert not ((stamps > after_ns) & (stamps < seen_ns)).any()  # the first look that could see it


def test_a_request_that_waits_makes_the_sampler_look_more_often(
    switches: dict[str, Switch],
) -> None:
    """Before memory falls, so that its edges are told as exactly as by looks each 20 ms."""
    switch = switches[COLD]
    paces = [(ns, fact["memory_every_ns"] // MS) for ns, fact in switch.paces]
    start_ns, back_ns = switch.request.start_ns, switch.back_ns[0]
    before = [ms for ns, ms in paces if ns < start_ns]
    meanwhile = [ms for ns, ms in paces if start_ns <= ns < back_ns]
    assert (before[-1], meanwhile[:1]) == (40, [20])
    errors = [
        int(e.value or 0)
        for one in switches.values()
        for e in one.told("looked at before each of these no longer ago than")
    ]
    assert len(errors) == len(MODELS)
    assert 15 * MS < min(errors) < 30 * MS


@pytest.mark.parametrize("model", MODELS)
def test_allocations_that_were_refused_and_asked_for_again(
    switches: dict[str, Switch], model: str
) -> None:
    switch = switches[model]
    first_copy = switch.called("cuMemcpyHtoD_v2")[0]
    asked = [s for s in switch.called("cuMemAlloc_v2") if s.end_ns < first_copy.begin_ns]
    assert len(asked) >= 2
    refused = len(asked) - 1
    for what in ("allocations refused: out of memory", "of them asked for again and given"):
        assert [e.value for e in switch.told(what)] == [refused]
    (waited,) = switch.told("the longest wait for it")
    assert int(waited.value or 0) >= asked[-1].end_ns - asked[0].begin_ns


def test_the_use_of_the_gpu(switches: dict[str, Switch]) -> None:
    (use,) = switches["compiled"].request.gpu
    assert (use.memory_before_bytes, use.memory_after_bytes, use.transfer_bytes) == (
        OLD_MB * MIB, (NEW_MB + KV_MB) * MIB, FILE_BYTES
    )  # fmt: skip


def test_the_parts_of_a_start_agree_with_the_library_to_a_millisecond(
    switches: dict[str, Switch],
) -> None:
    """In every switch around what the library did, and in the best of them within 1 ms."""
    off: dict[str, list[int]] = {}
    for model, switch in switches.items():
        calls = {
            "context": switch.called("cuInit", "cuDevicePrimaryCtxRetain"),
            "compile": switch.called("cuModuleLoadData"),
        }
        if model == "compiled":
            calls["kv_alloc"] = switch.called("cuMemAlloc_v2")[-2:]
        for name, made in calls.items():
            part = switch.parts()[name]
            assert part.start_ns <= made[0].begin_ns <= made[-1].end_ns <= part.end_ns
            edges = made[0].begin_ns - part.start_ns, part.end_ns - made[-1].end_ns
            off.setdefault(name, []).append(max(edges))
    assert off.keys() == {"context", "compile", "kv_alloc"}
    assert {name: min(ns) for name, ns in off.items() if min(ns) >= MS} == {}


def test_a_load_of_cold_weights_is_storage_and_transfer(switches: dict[str, Switch]) -> None:
    """The runner copies out of a mapped file: it waits for storage inside its copies. How long
    both went on at once is no longer than the copies, and no shorter than their inside: the probe's
    span of a call holds the library's."""
    switch = switches[COLD]
    parts, copies = switch.parts(), switch.called("cuMemcpyHtoD_v2")
    told = {e.what: e.value for e in parts["transfer"].evidence}
    assert told["copied to the device"] == FILE_BYTES
    for name in ("storage", "transfer"):
        assert parts[name].spent_ns > 0
    (load,) = [p for p in switch.request.phases if p.phase == "load"]
    spent = sum(parts[name].spent_ns for name in ("storage", "transfer", "fault") if name in parts)
    assert spent <= load.end_ns - load.start_ns
    overlap_ns = int(told["storage was read while copying"] or 0)
    window = load.start_ns, load.end_ns
    blocks = switch.timeline.blocks.within(*window)
    asked = zip(blocks["start_ns"].tolist(), blocks["end_ns"].tolist(), strict=True)
    inside = union(((s.begin_ns, s.end_ns) for s in copies), window)
    outside = length(copy_spans(switch.timeline, switch.runner, window))
    assert 0 < common_ns(inside, union(asked, window)) <= overlap_ns <= outside


def test_an_init_has_all_its_stages(switches: dict[str, Switch]) -> None:
    """In the order in which the runner went through them, each around what it did."""
    switch = switches[COLD]
    parts = switch.parts()
    decoded = switch.called("cuStreamSynchronize")[:DECODES]
    made = {
        "compile": switch.called("cuModuleLoadData"),
        "graph_capture": switch.called(
            "cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags"
        ),
        "kv_alloc": switch.called("cuMemAlloc_v2")[-2:],
        "warmup": decoded,
    }
    for name, calls in made.items():
        assert parts[name].start_ns <= calls[0].begin_ns <= calls[-1].end_ns <= parts[name].end_ns
    between = made["compile"][-1].end_ns, made["graph_capture"][0].begin_ns
    tokenizer = parts["tokenizer"]
    assert between[0] <= tokenizer.start_ns < tokenizer.end_ns <= between[1]
    for name, least in (("tokenizer", 1), ("compile", 1), ("graph_capture", 2), ("warmup", 2)):
        assert parts[name].spent_ns >= least * STAGE_NS
    (init,) = [p for p in switch.request.phases if p.phase == "init"]
    assert {p.part for p in init.parts} == {*made, "tokenizer"}
