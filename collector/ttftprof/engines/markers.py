"""Markers inside servers: exported symbols worth a uprobe, and log lines worth a stamp.

Symbols are found by name in whatever library a process maps; log lines by pattern as they are
written to stdout or stderr. Both are evidence of an edge; a missing one costs confidence only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

COOKIE_STACK_INT = 0x10000  # marks.bpf.c: keep the first field of a struct passed by value


@dataclass(frozen=True, slots=True)
class SymbolMark:
    """One call to mark. `row` is its id in the recording; names are tried in order, all found are
    probed (an old and a new name never both do the work). Rows of one name may call one another."""

    row: int
    name: str
    symbols: tuple[str, ...]
    stack_int: bool = False

    @property
    def cookie(self) -> int:
        return self.row | (COOKIE_STACK_INT if self.stack_int else 0)


# llama.cpp's C API (include/llama.h). The renamed ones kept their old symbol as a wrapper that
# calls the new one: spans nest, and the analysis takes the outermost.
SYMBOL_MARKS: tuple[SymbolMark, ...] = (
    SymbolMark(
        1,
        "model_load",
        (
            "llama_model_load_from_file",
            "llama_model_load_from_splits",
            "llama_load_model_from_file",
        ),
    ),
    SymbolMark(2, "context_init", ("llama_init_from_model", "llama_new_context_with_model")),
    SymbolMark(3, "decode", ("llama_decode",), stack_int=True),
    SymbolMark(4, "encode", ("llama_encode",), stack_int=True),
    SymbolMark(5, "model_free", ("llama_model_free", "llama_free_model")),
    SymbolMark(6, "context_free", ("llama_free",)),
    # What llama_decode and, since 2026, llama_process come down to; a server that is linked into
    # one library calls these alone. How many tokens is inside a C++ vector: not read.
    SymbolMark(7, "decode", ("_ZN13llama_context6decodeERK15llama_batch_ext",)),
    SymbolMark(8, "encode", ("_ZN13llama_context6encodeERK15llama_batch_ext",)),
)
MARK_NAMES = {mark.row: mark.name for mark in SYMBOL_MARKS}


@dataclass(frozen=True, slots=True)
class LogMark:
    """One line that means something. Named groups of the pattern become the mark's values:
    numbers as numbers, `model` as a short string; nothing else of the line is kept.

    `versions` says for which builds the wording was checked; `line` is such a line.
    """

    name: str
    versions: str
    pattern: re.Pattern[bytes]
    line: bytes


def _log(name: str, versions: str, pattern: bytes, line: bytes) -> LogMark:
    return LogMark(name, versions, re.compile(pattern), line)


_LLAMA = "llama.cpp b4500 to b10434"
_ROUTER = "llama.cpp b7000 to b10434"
_OLLAMA = "Ollama 0.5 to September 2026"
_OLLAMA_NOW = "Ollama June to September 2026 (llama-server as its runner)"
_SWAP = "llama-swap v150 to v250"
# Read in 0.8.0, 0.9.0, 0.11.0, 0.14.0, 0.18.0, 0.24.0; 0.32 was run.
_VLLM = "vLLM 0.8.0 to 0.32"
_VLLM_V0 = "vLLM 0.8.0 to 0.11.0, its first engine (VLLM_USE_V1=0)"
_SGLANG = "SGLang 0.4.0 to 0.5.23"
_SGLANG_GRAPHS = "SGLang 0.4.0 to 0.5.12"
_SGLANG_GRAPHS_NOW = "SGLang 0.5.13 to 0.5.23"
_TGI = "text-generation-inference 2.0 to 3.3.6"
_LOCALAI = "LocalAI 3.9 to 4.9"
_LOCALAI_JSON = f"{_LOCALAI}, LOCALAI_LOG_FORMAT=json"
_UVICORN = "uvicorn 0.20 to 0.38"

# What the names mean to the analysis:
#   load_begin, load_end   the weights are about to be, or were, taken up
#   model_loaded           the process is able to serve
#   serving                its HTTP server is up; of engines that load before they serve, the same
#   slot_start             a request was given its slot
#   evicting, spawning, front_ready   what a front does about a switch
#   expired                a model was unloaded because nobody used it
#   engine_load            how many requests run and wait, and how full the KV cache is
# The others are shown on the timeline, and as evidence.
LOG_MARKS: tuple[LogMark, ...] = (
    _log(
        "fit_begin", _LLAMA, rb"fitting params to (?:free|device) memory",
        b"common_init_result: fitting params to device memory, for bugs during this step try ...",
    ),
    _log(
        "fit_end", _LLAMA,
        rb"fitting params to (?:free|device) memory took (?P<s>[\d.]+) seconds",
        b"common_fit_params: fitting params to free memory took 0.41 seconds",
    ),
    _log(
        "load_begin", _LLAMA, rb"load_tensors: loading model tensors",
        b"load_tensors: loading model tensors, this can take a while... (mmap = true)",
    ),
    _log(
        "context_begin", _LLAMA,
        rb"llama_context: constructing llama_context|llama_new_context_with_model:",
        b"llama_context: constructing llama_context",
    ),
    _log(
        "warmup", _LLAMA, rb"warming up the model with an empty run",
        b"common_init_from_params: warming up the model with an empty run - please wait ...",
    ),
    _log(
        "model_loaded", _LLAMA,
        rb"(?:main|srv\s+\w+|load_model|llama_server): *(?:\|[^|]*\| *)?model loaded",
        b"main: model loaded",
    ),
    _log(
        "listening", _LLAMA, rb"server is listening on|starting the main loop",
        b"main: server is listening on http://127.0.0.1:8080 - starting the main loop",
    ),
    # Not every line of launch_slot_ means a start: it also tells of what it refuses.
    _log(
        "slot_start", _LLAMA, rb"launch_slot_\w*: .*\|\s*processing task",
        b"slot launch_slot_: id  0 | task 12 | processing task, is_child = 0",
    ),
    _log(
        "slot_start", "ik_llama.cpp; llama.cpp before b3000",
        rb"launch_slot_with_task\] slot is processing task",
        b'INFO [   launch_slot_with_task] slot is processing task | tid="13" id_slot=0 id_task=3',
    ),
    _log(
        "prompt_eval", _LLAMA,
        rb"prompt eval time =\s*(?P<ms>[\d.]+) ms /\s*(?P<tokens>\d+) tokens",
        b"prompt eval time =     269.91 ms /    34 tokens (    7.94 ms per token,   125.97 tok/s)",
    ),
    _log(
        "evicting", _ROUTER, rb"evicting idle LRU name=(?P<model>\S+) to make room",
        b"srv  unload_lru: evicting idle LRU name=a to make room for name=b",
    ),
    _log(
        "spawning", _ROUTER,
        rb"spawning server instance with name=(?P<model>\S+) on port (?P<port>\d+)",
        b"srv  load: spawning server instance with name=b on port 54021",
    ),
    _log(
        "instance_exited", _ROUTER, rb"instance name=(?P<model>\S+) exited",
        b"srv  operator(): instance name=a exited with status 0",
    ),
    _log(
        "proxying", _ROUTER,
        rb"proxying request to model (?P<model>\S+) on port (?P<port>\d+)",
        b"srv  proxy_reques: proxying request to model b on port 54021",
    ),
    _log(
        "full_reprocess", _LLAMA, rb"forcing full prompt re-processing",
        b"slot update_slots: id  0 | task 9 | forcing full prompt re-processing due to lack of ...",
    ),
    _log(
        "cpu_fallback", _LLAMA, rb"offloaded (?P<layers>\d+)/(?P<of>\d+) layers to GPU",
        b"load_tensors: offloaded 12/33 layers to GPU",
    ),
    _log(
        "spawning", _OLLAMA, rb'msg="starting (?:llama[- ]server|runner)"',
        b'time=2026-09-02T16:52:34.600Z level=INFO source=llama_server.go:433 '
        b'msg="starting llama-server" cmd="/usr/lib/ollama/llama-server --model ..."',
    ),
    _log(
        "evicting", _OLLAMA,
        rb"resetting model to expire immediately to make room",
        b'level=DEBUG source=sched.go:201 msg="resetting model to expire immediately to make room"',
    ),
    _log(
        "expired", _OLLAMA, rb"timer expired, expiring to unload|runner expired event received",
        b'level=DEBUG source=sched.go:340 msg="timer expired, expiring to unload"',
    ),
    _log(
        "front_ready", _OLLAMA,
        rb"(?:llama-server|llama runner) started in (?P<s>[\d.]+) seconds",
        b'level=INFO source=llama_server.go:1390 msg="llama-server started in 0.75 seconds"',
    ),
    _log(
        "vram_back", _OLLAMA,
        rb"gpu VRAM free memory converged after (?P<s>[\d.]+) seconds",
        b'level=DEBUG source=sched.go:888 msg="gpu VRAM free memory converged after 0.50 seconds"',
    ),
    _log(
        "vram_not_back", _OLLAMA, rb"gpu VRAM usage didn\'t recover within timeout",
        b'level=DEBUG source=sched.go:892 msg="gpu VRAM usage didn\'t recover within timeout"',
    ),
    _log(
        "spawning", _SWAP, rb"<(?P<model>[^>]+)> Executing start command",
        b"[DEBUG] <b> Executing start command: llama-server --port 9001 -m b.gguf, env: ",
    ),
    _log(
        "front_ready", _SWAP, rb"<(?P<model>[^>]+)> Health check passed on",
        b"[INFO] <b> Health check passed on http://localhost:9001/health",
    ),
    _log(
        "expired", _SWAP, rb"<(?P<model>[^>]+)> Unloading model, TTL of",
        b"[INFO] <a> Unloading model, TTL of 300s reached",
    ),
    _log(
        "load_begin", _VLLM, rb"Starting to load model",
        b"(EngineCore pid=9) INFO 10-04 17:03:51 [gpu_model_runner.py:3] Starting to load model b",
    ),
    _log(
        "load_end", _VLLM, rb"Loading weights took (?P<s>[\d.]+) seconds",
        b"(EngineCore pid=9) INFO 10-04 17:04:02 [loader.py:291] Loading weights took 9.81 seconds",
    ),
    _log(
        "compiled", _VLLM, rb"torch\.compile (?:takes|took) (?P<s>[\d.]+) s",
        b"INFO 10-04 17:04:20 [monitor.py:34] torch.compile takes 17.32 s in total",
    ),
    _log(
        "graphs_captured", _VLLM, rb"Graph capturing finished in (?P<s>[\d.]+) secs",
        b"INFO 10-04 17:04:40 [gpu_model_runner.py:4] Graph capturing finished in 18 secs",
    ),
    _log(
        "engine_ready", _VLLM,
        rb"init engine \(profile, create kv cache, warmup model\) took (?P<s>[\d.]+) s",
        b"INFO 10-04 17:04:41 [core.py:2] init engine (profile, create kv cache, warmup model) took"
        b" 39.20 seconds",
    ),
    _log(
        "fell_asleep", _VLLM, rb"It took (?P<s>[\d.]+) seconds to fall asleep",
        b"(EngineCore pid=9) INFO 10-04 17:05:10 [abstract.py:3] It took 10.570000 seconds to fall"
        b" asleep.",
    ),
    _log(
        "woke_up", _VLLM, rb"It took (?P<s>[\d.]+) seconds to wake up",
        b"(EngineCore pid=9) INFO 10-04 17:05:22 [abstract.py:3] It took 2.190000 seconds to wake "
        b"up tags {'weights', 'kv_cache'}.",
    ),
    _log(
        "engine_load", _VLLM,
        rb"Running: (?P<running>\d+) reqs, Waiting: (?P<waiting>\d+) reqs, "
        rb".*?[GC]PU KV cache usage: (?P<cache_percent>[\d.]+)%",
        b"(APIServer pid=1) INFO 10-04 17:04:44 [loggers.py:273] Engine 000: Avg prompt throughput:"
        b" 1055.3 tokens/s, Avg generation throughput: 0.3 tokens/s, Running: 3 reqs, Waiting: 2"
        b" reqs, GPU KV cache usage: 98.4%, Prefix cache hit rate: 0.0%",
    ),
    _log(
        "engine_load", _VLLM_V0,
        rb"Running: (?P<running>\d+) reqs, Swapped: \d+ reqs, Pending: (?P<waiting>\d+) reqs, "
        rb"GPU KV cache usage: (?P<cache_percent>[\d.]+)%",
        b"INFO 03-04 17:04:44 [metrics.py:481] Avg prompt throughput: 1055.3 tokens/s, Avg "
        b"generation throughput: 0.3 tokens/s, Running: 3 reqs, Swapped: 0 reqs, Pending: 2 reqs, "
        b"GPU KV cache usage: 98.4%, CPU KV cache usage: 0.0%.",
    ),
    _log(
        "load_begin", _SGLANG, rb"Load weight begin",
        b"[2026-09-02 10:00:01 TP0] Load weight begin. avail mem=21.30 GB",
    ),
    # A second such line, of weights that are put in place after the graphs, has no "elapsed=".
    _log(
        "load_end", _SGLANG, rb"Load weight end\. (?:elapsed|type)=",
        b"[2026-09-02 10:00:09 TP0] Load weight end. elapsed=8.02 s, type=Qwen3ForCausalLM",
    ),
    _log(
        "graphs_begin", _SGLANG_GRAPHS, rb"Capture (?:cuda|cpu|npu) graph begin",
        b"[2026-04-02 10:00:10 TP0] Capture cuda graph begin. This can take up to several minutes.",
    ),
    _log(
        "graphs_begin", _SGLANG_GRAPHS_NOW,
        rb"Capture (?:target|draft) \w+ [A-Z]+ graph begin",
        b"[2026-10-02 10:00:10 TP0] Capture target decode CUDA graph begin. backend=full, "
        b"num_tokens_per_req=1, avail mem=3.10 GB",
    ),
    _log(
        "graphs_captured", _SGLANG,
        rb"Capture .{0,20}graph end\..*?(?:Time elapsed: |elapsed=)(?P<s>[\d.]+) s",
        b"[2026-10-02 10:00:29 TP0] Capture target decode CUDA graph end. bs=[1, 2, 4], "
        b"elapsed=18.71 s, mem usage=0.52 GB, avail mem=2.58 GB.",
    ),
    # Its HTTP server is up before; requests of others wait for nothing then but its own warm-up.
    _log(
        "model_loaded", _SGLANG, rb"The server is fired up and ready to roll",
        b"[2026-09-02 10:00:31] The server is fired up and ready to roll!",
    ),
    _log(
        "engine_load", _SGLANG,
        rb"Decode batch.*#running-req: (?P<running>\d+).*?token usage: (?P<cache_use>[\d.]+)"
        rb".*#queue-req: (?P<waiting>\d+)",
        b"[2026-09-02 10:01:00 TP0] Decode batch. #running-req: 4, #token: 812, token usage: 0.97,"
        b" gen throughput (token/s): 88.1, #queue-req: 2",
    ),
    # Written when the batch is put together: what waited until then goes on.
    _log(
        "engine_load", _SGLANG,
        rb"Prefill batch.*?token usage: (?P<cache_use>[\d.]+)"
        rb".*#running-req: (?P<running>\d+), #queue-req: (?P<waiting>\d+)",
        b"[2026-10-02 10:01:00 TP0] Prefill batch, #new-seq: 1, #new-token: 34, #cached-token: 0, "
        b"token usage: 0.02, #running-req: 1, #queue-req: 2, #pending-token: 0, cuda graph: False",
    ),
    _log(
        "serving", _UVICORN, rb"Application startup complete",
        b"INFO:     Application startup complete.",
    ),
    _log(
        "shard_spawned", _TGI, rb"text_generation_launcher: Starting shard",
        b"2026-01-02T10:00:03.000000Z  INFO shard-manager: text_generation_launcher: Starting "
        b"shard rank=0",
    ),
    _log(
        "shard_ready", _TGI, rb"text_generation_launcher: Shard ready in (?P<s>[\d.]+)s",
        b"2026-01-02T10:00:20.000000Z  INFO shard-manager: text_generation_launcher: Shard ready in"
        b" 17.201s rank=0",
    ),
    # A shard's own word for it, which its launcher says again in another form.
    _log(
        "load_end", _TGI, rb'"text":\s?"Server started at unix:',
        b'{"text": "Server started at unix:///tmp/text-generation-server-0\\n", "record": '
        b'{"message": "Server started at unix:///tmp/text-generation-server-0"}}',
    ),
    _log(
        "warmup", _TGI, rb"text_generation_router(?:_v\d)?(?:::\w+)*: \S+ Warming up model",
        b"2026-01-02T10:00:21.000000Z  INFO text_generation_router_v3: backends/v3/src/lib.rs:125: "
        b"Warming up model",
    ),
    _log(
        "serving", _TGI, rb"text_generation_router(?:::\w+)*: \S+ Connected",
        b"2026-01-02T10:00:31.000000Z  INFO text_generation_router::server: router/src/server.rs:"
        b"2302: Connected",
    ),
    # The same with --json-output: the message comes before what says whose it is.
    _log(
        "shard_spawned", _TGI, rb'"Starting shard".*"target":"text_generation_launcher"',
        b'{"timestamp":"2026-01-02T10:00:03.000000Z","level":"INFO","fields":{"message":"Starting '
        b'shard"},"target":"text_generation_launcher","span":{"rank":0,"name":"shard-manager"}}',
    ),
    _log(
        "shard_ready", _TGI,
        rb'"Shard ready in (?P<s>[\d.]+)s".*"target":"text_generation_launcher"',
        b'{"timestamp":"2026-01-02T10:00:20.000000Z","level":"INFO","fields":{"message":"Shard '
        b'ready in 17.201s"},"target":"text_generation_launcher","span":{"rank":0}}',
    ),
    _log(
        "warmup", _TGI, rb'"Warming up model".*"target":"text_generation_router',
        b'{"timestamp":"2026-01-02T10:00:21.000000Z","level":"INFO","message":"Warming up model",'
        b'"target":"text_generation_router_v3","filename":"backends/v3/src/lib.rs"}',
    ),
    _log(
        "serving", _TGI, rb'"Connected".*"target":"text_generation_router',
        b'{"timestamp":"2026-01-02T10:00:31.000000Z","level":"INFO","message":"Connected",'
        b'"target":"text_generation_router::server","filename":"router/src/server.rs"}',
    ),
    _log(
        "spawning", _LOCALAI, rb"BackendLoader starting.*modelID=\"?(?P<model>[^\s\"]+)",
        b'Sep 02 10:00:01 INFO  BackendLoader starting modelID="b" backend="llama-cpp" '
        b'model="b.gguf"',
    ),
    _log(
        "spawning", _LOCALAI_JSON,
        rb'"msg":\s?"BackendLoader starting".*"modelID":\s?"(?P<model>[^"]+)',
        b'{"time":"2026-09-02T10:00:01Z","level":"INFO","msg":"BackendLoader starting","modelID":'
        b'"b","backend":"llama-cpp","model":"b.gguf"}',
    ),
    _log(
        "evicting", _LOCALAI,
        rb"\[WatchDog\] (?:LRU )?evicting model.*\bmodel=\"?(?P<model>[^\s\"]+)",
        b'Sep 02 10:00:00 INFO  [WatchDog] evicting model model="a" busy=false',
    ),
    _log(
        "evicting", _LOCALAI_JSON,
        rb'"msg":\s?"\[WatchDog\] (?:LRU )?evicting model".*"model":\s?"(?P<model>[^"]+)',
        b'{"time":"2026-09-02T10:00:00Z","level":"INFO","msg":"[WatchDog] evicting model","model":'
        b'"a","busy":false}',
    ),
    _log(
        "expired", _LOCALAI, rb"\[WatchDog\] Address is idle for too long",
        b'Sep 02 10:00:00 WARN  [WatchDog] Address is idle for too long, killing it address="127.0'
        b'.0.1:43211"',
    ),
    # The same words in either form.
    _log(
        "front_ready", _LOCALAI, rb"GRPC Service Ready",
        b"Sep 02 10:00:03 DEBUG GRPC Service Ready",
    ),
)  # fmt: skip

# A router prints its child's lines behind "[port] ", LocalAI as what its backend's stderr said: the
# child's own write was stamped already.
_RELAYED = re.compile(rb"^\s*\[\d{2,5}\] |GRPC std(?:err|out)\b")
_COLOURS = re.compile(rb"\x1b\[[\d;]*m")  # vLLM and TGI write them to files and pipes, too


def find_log_marks(chunk: bytes) -> list[tuple[str, dict[str, Any]]]:
    """(name, values) of every marker line in one write; relayed lines are left out."""
    found: list[tuple[str, dict[str, Any]]] = []
    for line in _COLOURS.sub(b"", chunk).split(b"\n"):
        if len(line) < 8 or _RELAYED.search(line):
            continue
        for mark in LOG_MARKS:
            match = mark.pattern.search(line)
            if match:
                found.append((mark.name, _values(match)))
    return found


def _values(match: re.Match[bytes]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, raw in match.groupdict().items():
        if raw is None:
            continue
        text = raw[:128].decode("utf-8", errors="replace")
        if name == "model":
            values[name] = text
        else:
            try:
                values[name] = float(text) if "." in text else int(text)
            except ValueError:
                continue
    return values
