"""What is known of servers: recognition, what of a command line is shown, and what lines mean."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttftprof.engines.catalog import ENGINES, looks_like_weights, option_of, recognise
from ttftprof.engines.markers import (
    LOG_MARKS,
    MARK_NAMES,
    SYMBOL_MARKS,
    LogMark,
    find_log_marks,
)

PYTHON = "/usr/bin/python3.11"
SECRET = "sk-Zq83hVt0verySecret"


@pytest.mark.parametrize(
    ("exe", "argv", "engine"),
    [
        ("/opt/llama.cpp/build/bin/llama-server", ["llama-server", "-m", "x.gguf"], "llama.cpp"),
        ("/usr/lib/ld.so", ["/opt/bin/llama-server", "--port", "1"], "llama.cpp"),
        ("/usr/local/bin/ollama", ["ollama", "serve"], "ollama"),
        ("/usr/local/bin/ollama", ["/usr/local/bin/ollama", "runner", "--port", "1"], "ollama"),
        ("/usr/bin/llama-swap", ["llama-swap", "--config", "llama-server.yaml"], "llama-swap"),
        (PYTHON, [PYTHON, "-m", "vllm.entrypoints.openai.api_server"], "vllm"),
        (PYTHON, [PYTHON, "/opt/venv/bin/vllm", "serve", "Qwen/Qwen3-8B"], "vllm"),
        (PYTHON, ["python3", "-m", "sglang.launch_server", "--port", "1"], "sglang"),
        (PYTHON, ["python3", "/opt/venv/bin/transformers", "serve"], "transformers"),
        (PYTHON, ["python3", "-m", "llama_cpp.server"], "llama-cpp-python"),
        (PYTHON, ["python3", "koboldcpp.py", "--model", "x"], "koboldcpp"),
        ("/usr/bin/text-generation-launcher", ["text-generation-launcher"], "tgi"),
        (PYTHON, ["VLLM::EngineCore"], "vllm"),
        (PYTHON, ["VLLM::Worker_TP0"], "vllm"),
        (PYTHON, ["sglang::scheduler_TP0"], "sglang"),
        (PYTHON, ["python3", "/opt/venv/bin/sglang", "serve", "--model-path", "m"], "sglang"),
        (PYTHON, ["python3", "/opt/conda/bin/text-generation-server", "serve", "m"], "tgi"),
        ("/usr/local/bin/text-generation-router", ["text-generation-router"], "tgi"),
        ("/backends/llama-cpp/llama-cpp-avx2", ["/backends/llama-cpp/llama-cpp-avx2"], "localai"),
        (
            "/backends/llama-cpp/lib/ld.so",
            ["/b/llama-cpp/lib/ld.so", "/b/llama-cpp/llama-cpp-fallback", "--addr", "127.0.0.1:1"],
            "localai",
        ),
        (PYTHON, ["python3", "-m", "xllamacpp.server"], "xllamacpp"),
        ("/usr/bin/local-ai", ["local-ai", "run"], "localai"),
        ("/opt/llmster", ["llmster"], "lmstudio"),
        ("/usr/lib/ollama/llama-server", ["/usr/lib/ollama/llama-server", "-c", "1"], "llama.cpp"),
        (PYTHON, ["python3", "serve.py", "--model", "vllm-is-not-me"], None),
        ("/usr/bin/bash", ["bash", "-c", "true"], None),
        ("", [], None),
    ],
)
def test_a_server_is_recognised_by_its_command_line(
    exe: str, argv: list[str], engine: str | None
) -> None:
    found = recognise(exe, argv)
    assert (found.name if found else None) == engine


def test_engines_have_names_of_their_own() -> None:
    assert len({e.name for e in ENGINES}) == len(ENGINES)


@pytest.mark.parametrize(
    ("path", "weights"),
    [
        ("/models/Qwen3-8B-Q4_K_M.gguf", True),
        ("/models/MODEL.GGUF", True),
        ("/hub/model-00001-of-00002.safetensors", True),
        ("/root/.ollama/models/blobs/sha256-2bada8a7450677000f678be90653b85d364de7db", True),
        ("/root/.cache/huggingface/hub/models--a--b/blobs/0123456789abcdef", True),
        ("/usr/lib/x86_64-linux-gnu/libstdc++.so.6", False),
        ("/models/tokenizer.json", False),
        ("inode 17", False),
        ("", False),
    ],
)
def test_weights_are_told_by_their_path(path: str, weights: bool) -> None:
    assert looks_like_weights(path) is weights


# -- log lines ------------------------------------------------------------------------------------

Marks = list[tuple[str, dict[str, Any]]]


@pytest.mark.parametrize(
    ("line", "marks"),
    [
        # b10434
        (b"0.01.634.099 I srv  llama_server: model loaded", [("model_loaded", {})]),
        (
            b"0.01.642.918 I slot launch_slot_: id  0 | task 0 | processing task, is_child = 0",
            [("slot_start", {})],
        ),
        (
            b"0.02.088.630 I slot print_timing: id  0 | task 0 | prompt eval time =     358.30 ms /"
            b"    23 tokens (   15.58 ms per token,    64.19 tokens per second)",
            [("prompt_eval", {"ms": 358.3, "tokens": 23})],
        ),
        (
            b"0.00.033.857 I srv          load: spawning server instance with name=a on port 33675",
            [("spawning", {"model": "a", "port": 33675})],
        ),
        (b"0.00.033.886 I srv          load: spawning server instance with args:", []),
        (
            b"0.14.1 W srv  ensure_model: evicting idle LRU name=model-a to make room for name=b",
            [("evicting", {"model": "model-a"})],
        ),
        (
            b"0.15.9 I srv    operator(): instance name=model-a exited with status 0",
            [("instance_exited", {"model": "model-a"})],
        ),
        (
            b"0.16.2 I srv  proxy_reques: proxying request to model model-b on port 48403",
            [("proxying", {"model": "model-b", "port": 48403})],
        ),
        (
            b"load_tensors: loading model tensors, this can take a while... (load_mode = none)",
            [("load_begin", {})],
        ),
        (
            b"common_fit_params: fitting params to device memory ...",
            [("fit_begin", {})],
        ),
        (
            b"common_fit_params: fitting params to free memory took 1.07 seconds",
            [("fit_begin", {}), ("fit_end", {"s": 1.07})],
        ),
        # the generation before: mmap and direct_io named one by one
        (
            b"load_tensors: loading model tensors, this can take a while... "
            b"(mmap = true, direct_io = false)",
            [("load_begin", {})],
        ),
        (b"main: model loaded", [("model_loaded", {})]),
        (b"main: server is listening on http://127.0.0.1:8080", [("listening", {})]),
        (b"main: server is listening on http://127.0.0.1:8080 - starting the main loop",
         [("listening", {})]),
        # b4500
        (
            b"load_tensors: loading model tensors, this can take a while... (mmap = true)",
            [("load_begin", {})],
        ),
        (b"llama_new_context_with_model: n_ctx      = 4096", [("context_begin", {})]),
        (b"llama_context: constructing llama_context", [("context_begin", {})]),
        (
            b"common_init_from_params: warming up the model with an empty run - please wait ...",
            [("warmup", {})],
        ),
        (
            b"load_tensors: offloaded 0/33 layers to GPU",
            [("cpu_fallback", {"layers": 0, "of": 33})],
        ),
        (
            b"slot update_slots: id  0 | task 9 | forcing full prompt re-processing due to lack of "
            b"cache data",
            [("full_reprocess", {})],
        ),
        # SGLang 0.4.0, 0.5.3, 0.5.23
        (
            b"[2026-09-02 10:00:09 TP0] Load weight end. type=LlamaForCausalLM, "
            b"dtype=torch.bfloat16, avail mem=5.10 GB",
            [("load_end", {})],
        ),
        (
            b"[2026-09-02 10:00:30] Load weight end. Committed real weights after CUDA graph "
            b"capture in 1.20 s",
            [],
        ),
        (
            b"[2026-09-02 10:00:29] Capture cuda graph end. Time elapsed: 18.71 s. mem usage=0.5 "
            b"GB. avail mem=2.58 GB.",
            [("graphs_captured", {"s": 18.71})],
        ),
        (
            b"[2026-10-02 10:00:10] Capture target verify CPU graph begin. backend=full, "
            b"num_tokens_per_req=4, avail mem=3.10 GB",
            [("graphs_begin", {})],
        ),
        (
            b"[2026-09-02 10:01:00] Prefill batch. #new-seq: 1, #new-token: 7, #cached-token: 0, "
            b"cache hit rate: 0.00%, token usage: 0.91, #running-req: 3, #queue-req: 5",
            [("engine_load", {"cache_use": 0.91, "running": 3, "waiting": 5})],
        ),
        (
            b"[2026-10-02 10:01:00] Decode batch [41], #running-req: 2, full token usage: 0.97, "
            b"swa token usage: 0.10, cuda graph: True, gen throughput (token/s): 8.10, "
            b"#queue-req: 1",
            [("engine_load", {"running": 2, "cache_use": 0.97, "waiting": 1})],
        ),
        # vLLM 0.32, on a CPU
        (
            b"\x1b[0;36m(EngineCore pid=9)\x1b[0;0m INFO 11-30 00:51:02 [core.py:402] init engine "
            b"(profile, create kv cache, warmup model) took 4.31 s (compilation: 1.02 s)",
            [("engine_ready", {"s": 4.31})],
        ),
        (
            b"(APIServer pid=1) INFO 11-30 00:52:02 [loggers.py:341] Engine 000: Avg prompt "
            b"throughput: 9.1 tokens/s, Avg generation throughput: 3.9 tokens/s, Running: 1 reqs, "
            b"Waiting: 0 reqs, Preemptions: 2, CPU KV cache usage: 0.4%, Prefix cache hit rate: 0%",
            [("engine_load", {"running": 1, "waiting": 0, "cache_percent": 0.4})],
        ),
        # text-generation-inference, in colour as it writes by itself
        (
            b"\x1b[2m2026-01-02T10:00:31.000000Z\x1b[0m \x1b[32m INFO\x1b[0m "
            b"\x1b[2mtext_generation_router::server\x1b[0m\x1b[2m:\x1b[0m "
            b"\x1b[2mrouter/src/server.rs\x1b[0m\x1b[2m:\x1b[0m\x1b[2m2302:\x1b[0m Connected",
            [("serving", {})],
        ),
        # LocalAI 3.9, 4.1, 4.9: in colour, as text, as JSON
        (
            b"\x1b[90mSep 02 10:00:01\x1b[0m \x1b[34mINFO \x1b[0m BackendLoader starting "
            b'\x1b[36mmodelID\x1b[0m="b" \x1b[36mbackend\x1b[0m="llama-cpp" ',
            [("spawning", {"model": "b"})],
        ),
        (
            b'time=2026-09-02T10:00:01.000Z level=INFO msg="BackendLoader starting" modelID=b '
            b"backend=llama-cpp model=b.gguf",
            [("spawning", {"model": "b"})],
        ),
        (
            b'time=2026-09-02T10:00:01.000Z level=INFO msg="[WatchDog] LRU evicting model" '
            b"model=a lastUsed=2026-09-02T09:58:00.000Z busy=false",
            [("evicting", {"model": "a"})],
        ),
        (
            b'{"time":"2026-09-02T10:00:03Z","level":"DEBUG","msg":"GRPC Service Ready",'
            b'"caller":{"file":"/build/pkg/model/initializers.go","L":163}}',
            [("front_ready", {})],
        ),
        (
            b'{"time":"2026-09-02T10:00:03Z","level":"WARN","msg":"[WatchDog] Skipping eviction '
            b'for busy model","model":"a","reason":"model has active API calls"}',
            [],
        ),
        # nothing
        (b"I like model loaded pasta", []),
        (b"", []),
        (b"\x00\xff" * 40, []),
    ],
)  # fmt: skip
def test_a_line_means_what_it_says(line: bytes, marks: Marks) -> None:
    assert find_log_marks(line + b"\n") == marks


@pytest.mark.parametrize("mark", LOG_MARKS, ids=lambda m: f"{m.name}: {m.versions}")
def test_every_pattern_has_a_line_that_it_matches(mark: LogMark) -> None:
    found = dict(find_log_marks(mark.line + b"\n"))
    assert mark.versions
    assert set(found[mark.name]) == set(mark.pattern.groupindex)


@pytest.mark.parametrize(
    "line",
    [
        b"srv  launch_slot_: failed to launch slot with task, id_task = 12",
        b"slot launch_slot_: id  0 | task 12 | Failed to initialize samplers",
        b"slot launch_slot_: id  3 | task -1 | sampler chain: logits -> penalties -> dist",
    ],
)
def test_a_slot_that_was_not_given_is_no_start(line: bytes) -> None:
    assert find_log_marks(line + b"\n") == []


@pytest.mark.parametrize(
    ("argv", "names", "value"),
    [
        (["x", "-c", "4096"], ("-c", "--ctx-size"), "4096"),
        (["x", "--ctx-size=4096"], ("-c", "--ctx-size"), "4096"),
        (["x", "-c", "1", "--ctx-size", "2"], ("-c", "--ctx-size"), "2"),
        (["x", "--no-mmap"], ("--no-mmap",), ""),
        (["x", "--no-mmap", "--port", "1"], ("--no-mmap",), ""),
        (["x", "--no-mmap"], ("-c",), None),
        ([], ("-c",), None),
    ],
)
def test_the_value_of_an_option(argv: list[str], names: tuple[str, ...], value: str | None) -> None:
    assert option_of(argv, names) == value


def test_fixed_waits_are_waits() -> None:
    waits = [wait for engine in ENGINES for wait in engine.waits]
    assert {wait.phase for wait in waits} <= {"evict", "launch", "init", "ready_gap"}
    assert all(wait.quantum_ns > 0 and wait.says and wait.checked for wait in waits)


@pytest.mark.parametrize("port", [b"80", b"8080", b"48403"])
def test_what_a_router_relays_was_stamped_at_its_source(port: bytes) -> None:
    assert find_log_marks(b"[" + port + b"] 0.01.634.099 I srv  llama_server: model loaded\n") == []


@pytest.mark.parametrize(
    "said",
    [b'"msg":"GRPC stderr","id":"b-127.0.0.1:1","line":"', b'GRPC stderr id="b-1" line="'],
)
def test_what_localai_relays_was_stamped_at_its_source(said: bytes) -> None:
    assert find_log_marks(said + b'load_tensors: loading model tensors, this can take"') == []


def test_one_write_may_hold_many_lines() -> None:
    own, relayed = b"main: model loaded\r\n", b"[48403] main: model loaded\n"
    names = [name for name, _ in find_log_marks(own + relayed + b"noise\n" + own)]
    assert names == ["model_loaded", "model_loaded"]


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_no_bytes_make_it_stumble(chunk: bytes) -> None:
    known = {mark.name for mark in LOG_MARKS}
    assert {name for name, _ in find_log_marks(chunk)} <= known


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_of_a_line_only_numbers_and_a_short_name_are_kept(noise: bytes) -> None:
    line = b"evicting idle LRU name=" + noise + b"x" * 300 + b" to make room"
    for _, values in find_log_marks(line):
        for key, value in values.items():
            assert isinstance(value, (int, float)) or (key == "model" and len(value) <= 128)


def test_calls_are_numbered_once() -> None:
    assert len(MARK_NAMES) == len(SYMBOL_MARKS)
    assert all(mark.cookie & 0xFFFF == mark.row for mark in SYMBOL_MARKS)
    symbols = [symbol for mark in SYMBOL_MARKS for symbol in mark.symbols]
    assert len(set(symbols)) == len(symbols)
