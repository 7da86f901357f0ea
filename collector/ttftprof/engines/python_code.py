"""What Python code is busy with, by where it stands: data, from module and function to category.

A stack belongs to the category of the frame nearest its end that a row knows: an import inside a
`from_pretrained` is an import, a load at the top of an imported module is a load. Module paths are
those within a library (`torch/serialization.py`); the standard library's begin with `python3.`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from ttftprof.python_facts import Frame, Stack

IDLE, OTHER = "idle", "other"
CATEGORIES = (
    "imports",
    "compile",
    "graph_capture",
    "device",
    "kv_cache",
    "weights",
    "model_build",
    "tokenizer",
    "hub",
    "generate",
    "server",
    OTHER,
    IDLE,
)
CATEGORY_WORDS = {
    "imports": "importing Python modules",
    "compile": "compiling kernels and graphs",
    "graph_capture": "capturing device graphs",
    "device": "setting up the device and its process groups",
    "kv_cache": "measuring memory and making the KV cache",
    "weights": "reading weights",
    "model_build": "building the model's modules",
    "tokenizer": "loading or running the tokenizer and its template",
    "hub": "reading configuration or asking the model hub",
    "generate": "running the model",
    "server": "handling HTTP and the event loop",
    OTHER: "other Python code",
    IDLE: "no Python code: every thread waited for work",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A frame is of `category` if both patterns match from the beginning of its names."""

    category: str
    module: str
    function: str = ""


_compiled = cache(re.compile)  # of recordings without Python, none of eighty


# Read in order for each frame. Names as of torch 2.13, transformers 5, vLLM 0.32 and SGLang 0.5;
# most of them are years old.
ROWS: tuple[Row, ...] = (
    Row("imports", r"<frozen importlib|<frozen zipimport>|python3[^/]*/(importlib|zipimport)"),
    Row("imports", r"python3[^/]*/(pkgutil|pydoc)\.py"),
    Row("imports", r"transformers/utils/import_utils\.py"),
    Row("compile", r"torch/_inductor/(compile_fx|codecache|async_compile|graph|scheduler)"),
    Row("compile", r"torch/_inductor/(codegen|runtime|select_algorithm|cpp_builder)"),
    Row("compile", r"torch/_dynamo/(convert_frame|symbolic_convert|output_graph|eval_frame)"),
    Row("compile", r"torch/(_functorch|_export|export|fx)/", r"(?!<module>)"),
    Row("compile", r"torch/(utils/cpp_extension|_higher_order_ops|jit/_script|jit/_trace)"),
    Row("compile", r"triton/(compiler|runtime|backends)/", r"(?!<module>)"),
    Row("compile", r"(tilelang|tvm|numba|flashinfer/jit|deep_gemm/jit)/", r"(?!<module>)"),
    Row("compile", r"vllm/compilation/", r"(?!<module>)"),
    Row("graph_capture", r"torch/cuda/graphs\.py", r"(?!<module>)"),
    Row("graph_capture", r"vllm/v1/", r".*(capture_model|_capture_cudagraphs|capture_graph)"),
    Row("graph_capture", r"sglang/srt/.*cuda_graph_runner\.py", r"(?!<module>)"),
    Row("device", r"torch/(cuda|xpu|mps)/__init__\.py", r"_lazy_init|init|set_device|_lazy_call"),
    Row("device", r"torch/distributed/(distributed_c10d|rendezvous)\.py", r"(?!<module>)"),
    Row("device", r"vllm/distributed/parallel_state\.py", r"(?!<module>)"),
    Row("kv_cache", r"vllm/v1/", r".*(kv_cache|determine_available_memory|profile_run)"),
    Row("kv_cache", r"sglang/srt/(mem_cache|model_executor)/", r".*(memory_pool|kv_cache)"),
    Row("tokenizer", r"(tokenizers|sentencepiece|tiktoken|mistral_common|jinja2)/"),
    Row("tokenizer", r"transformers/(tokenization_|convert_slow|processing_utils|utils/chat_temp)"),
    Row("tokenizer", r"transformers/models/[^/]+/(tokenization_|processing_)"),
    Row("model_build", r"torch/nn/init\.py"),
    Row("model_build", r"torch/nn/modules/", r".*(__init__|reset_parameters)$"),
    Row("model_build", r"transformers/(models|integrations)/.*\.py", r".*__init__$"),
    Row("model_build", r"transformers/modeling_utils\.py", r".*(__init__|init_weights|post_init)$"),
    Row("model_build", r"vllm/model_executor/(models|layers)/", r".*(__init__|create_weights)$"),
    Row("weights", r"safetensors/|torch/serialization\.py|gguf/|runai_model_streamer/"),
    Row("weights", r"transformers/(modeling_utils|core_model_loading|modeling_gguf|conversion_m)"),
    Row("weights", r"accelerate/(utils/modeling|big_modeling|hooks)"),
    Row("weights", r"(vllm/model_executor|sglang/srt)/model_loader/"),
    # Layers copy them out of the mapped file: there the load waits for storage.
    Row(
        "weights",
        r"vllm/model_executor/(models|layers)/",
        r"(.*\.)?(weight_loader|load_|_load_|process_weights)",
    ),
    Row("weights", r"torch/nn/modules/module\.py", r".*(load_state_dict|_apply|\.to|convert)$"),
    Row("hub", r"huggingface_hub/(file_download|hf_api|_snapshot|hf_file_system|utils/_http)"),
    Row("hub", r"(requests|urllib3|httpx2?|httpcore2?|modelscope)/"),
    Row("hub", r"transformers/(configuration_utils|utils/hub|dynamic_module_utils)"),
    Row("hub", r"transformers/models/auto/configuration_auto"),
    Row("generate", r"transformers/generation/", r"(?!.*from_pretrained)"),
    Row("generate", r"(torch/nn/modules|transformers/models)/", r".*(forward|_call_impl)$"),
    Row("generate", r"vllm/(model_executor/(models|layers)|ir/ops)/", r"(?!<module>)"),
    Row("generate", r"vllm/v1/(worker|sample|executor)/", r".*(execute_model|sample)"),
    Row("generate", r"sglang/srt/(model_executor|managers)/", r".*(forward|run_batch)"),
    Row("generate", r"(llama_cpp|ctransformers|exllamav2|exllamav3)/"),
    Row("server", r"(uvicorn|fastapi|starlette|h11|httptools|aiohttp|gunicorn|anyio|uvloop)/"),
    Row("server", r"(pydantic|pydantic_core|sse_starlette|openai|zmq|flask|werkzeug)/"),
    Row("server", r"python3[^/]*/(asyncio|http/server|socketserver|wsgiref)"),
)

# A thread that stands in one of these, called from one of those, waits for work.
_WAITS = re.compile(
    r"python3[^/]*/(threading|queue|selectors|socket|multiprocessing/(connection|queues|popen_\w+))"
    r"\.py|(zmq|uvloop)/"
    # vLLM 0.32: its processes spin, then poll, for a message in memory that they share.
    r"|vllm/distributed/(device_communicators/shm_broadcast|utils)\.py|python3[^/]*/contextlib\.py"
)
_LOOPS: tuple[Row, ...] = (
    Row(IDLE, r"python3[^/]*/concurrent/futures/(thread|process)\.py", r".*_worker|.*\.run$"),
    Row(IDLE, r"python3[^/]*/asyncio/(base_events|unix_events|runners)\.py"),
    Row(IDLE, r"python3[^/]*/(socketserver|sched|logging/handlers|asyncore)\.py"),
    Row(IDLE, r"anyio/_backends/", r"WorkerThread\.run|run$"),
    Row(IDLE, r"tqdm/_monitor\.py"),
    Row(IDLE, r"transformers/cli/serving/", r".*\._?run$"),
    Row(IDLE, r"torch/_inductor/compile_worker/"),
    Row(
        IDLE,
        r"vllm/v1/(engine|executor)/",
        r".*(busy_loop|process_input|process_output|monitor|get_response)",
    ),
    Row(IDLE, r"sglang/srt/managers/", r".*(event_loop|recv)"),
)
# A pool's worker and uvloop take their work in C: the loop itself is the innermost frame. Of
# Python before 3.11, and by an older py-spy, functions have no class in their names.
_LOOPS_IN_C: tuple[Row, ...] = (
    Row(IDLE, r"python3[^/]*/concurrent/futures/thread\.py", r"_worker$"),
    Row(IDLE, r"python3[^/]*/asyncio/(base_events|runners)\.py", r"(.*\.)?(_run_once|run)$"),
)


@dataclass(frozen=True, slots=True)
class Place:
    """What a stack is busy with: its category, and the package (or file) that it concerns."""

    category: str
    package: str


def place_of(stack: Stack) -> Place:
    """The category of a stack, by the frame nearest its end that the tables know."""
    if _is_idle(stack):
        return Place(IDLE, "")
    for frame in reversed(stack):
        row = _first(ROWS, frame)
        if row is not None:
            return Place(row.category, _package(stack, frame, row.category))
    if _module_body(stack):
        return Place("imports", _package(stack, stack[-1], "imports"))
    return Place(OTHER, _name(stack[-1]) if stack else "")


def _is_idle(stack: Stack) -> bool:
    """Nothing but waiting, called by nothing but a loop that hands out work."""
    callers = list(_without_waits(stack))
    waits = len(callers) < len(stack)
    if not callers:
        return waits
    if _first(_LOOPS, callers[0]) is None:
        return False
    return waits or _first(_LOOPS_IN_C, callers[0]) is not None


def _without_waits(stack: Stack) -> Iterator[Frame]:
    """The frames from the innermost that is no wait outwards."""
    inside = True
    for frame in reversed(stack):
        inside = inside and bool(_WAITS.match(frame[0]))
        if not inside:
            yield frame


def _first(rows: Sequence[Row], frame: Frame) -> Row | None:
    module, function, _ = frame
    for row in rows:
        if _compiled(row.module).match(module) and _compiled(row.function).match(function):
            return row
    return None


def _module_body(stack: Stack) -> bool:
    """A module's own code runs, and that module is no script: it is being imported."""
    return any(f[1] == "<module>" and "/" in f[0] for f in stack[1:])


def _package(stack: Stack, frame: Frame, category: str) -> str:
    """Of an import, the package whose code the interpreter had got to; else the frame's own."""
    if category != "imports":
        return _name(frame)
    named = (f for f in reversed(stack) if not f[0].startswith(("<", "python3", "?")))
    return next((_name(f) for f in named if "/" in f[0]), "the standard library")


def _name(frame: Frame) -> str:
    return frame[0].split("/", 1)[0]
