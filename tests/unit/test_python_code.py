"""From a stack to what it is busy with: stacks as real servers show them."""

from __future__ import annotations

import pytest

from ttftprof.engines.python_code import CATEGORIES, CATEGORY_WORDS, IDLE, ROWS, place_of
from ttftprof.python_facts import Stack

THREAD = ("python3.11/threading.py:Thread._bootstrap", "python3.11/threading.py:Thread.run")
POOL = (*THREAD, "python3.11/concurrent/futures/thread.py:_worker")
WORK = (*POOL, "python3.11/concurrent/futures/thread.py:_WorkItem.run")
LOOP = (
    "serve.py:<module>",
    "uvicorn/server.py:Server.run",
    "python3.11/asyncio/base_events.py:BaseEventLoop.run_forever",
    "python3.11/asyncio/base_events.py:BaseEventLoop._run_once",
)
MESSAGE = (
    "vllm/distributed/device_communicators/shm_broadcast.py:MessageQueue.dequeue",
    "python3.11/contextlib.py:_GeneratorContextManager.__enter__",
    "vllm/distributed/device_communicators/shm_broadcast.py:MessageQueue.acquire_read",
)
IMPORT = "<frozen importlib._bootstrap>:_find_and_load"
INFERENCE = (*THREAD, "transformers/cli/serving/utils.py:InferenceThread._run")
GENERATE = (*INFERENCE, "transformers/generation/utils.py:GenerationMixin.generate")
FROM_PRETRAINED = "transformers/modeling_utils.py:PreTrainedModel.from_pretrained"


def stack(*frames: str) -> Stack:
    """`module:function`, outermost first."""
    parted = (frame.rpartition(":") for frame in frames)
    return tuple((module, function, 1) for module, _, function in parted)


@pytest.mark.parametrize(
    ("frames", "category", "package"),
    [
        ((*LOOP, "python3.11/selectors.py:EpollSelector.select"), "idle", ""),
        (POOL, "idle", ""),
        (
            ("vllm/entrypoints/openai/api_server.py:<module>", "uvloop/__init__.py:run",
             "python3.11/asyncio/runners.py:Runner.run"),
            "idle", "",
        ),
        # Python 3.10: no classes in names
        ((*LOOP[:-1], "python3.10/asyncio/base_events.py:_run_once"), "idle", ""),
        (("uvloop/__init__.py:run", "python3.10/asyncio/runners.py:run"), "idle", ""),
        (
            (*THREAD, "anyio/_backends/_asyncio.py:WorkerThread.run",
             "python3.11/queue.py:Queue.get", "python3.11/threading.py:Condition.wait"),
            "idle", "",
        ),
        (
            (*THREAD, "tqdm/_monitor.py:TMonitor.run", "python3.11/threading.py:Event.wait",
             "python3.11/threading.py:Condition.wait"),
            "idle", "",
        ),
        ((*THREAD, "python3.11/threading.py:Timer.run", "python3.11/threading.py:Event.wait"),
         "idle", ""),
        ((*INFERENCE, "python3.11/queue.py:Queue.get", "python3.11/threading.py:Condition.wait"),
         "idle", ""),
        ((*LOOP, "uvicorn/protocols/http/h11_impl.py:H11Protocol.data_received"),
         "server", "uvicorn"),
        (("serve.py:<module>", IMPORT, "torch/__init__.py:<module>"), "imports", "torch"),
        (("serve.py:<module>", IMPORT, "<frozen importlib._bootstrap_external>:get_data"),
         "imports", "the standard library"),
        (
            ("serve.py:<module>", IMPORT, "transformers/__init__.py:<module>", IMPORT,
             "torch/_inductor/lowering.py:<module>"),
            "imports", "torch",
        ),
        # an import inside a load is an import, a load at the top of an imported module a load
        ((*WORK, FROM_PRETRAINED, IMPORT, "accelerate/__init__.py:<module>"),
         "imports", "accelerate"),
        (("uvicorn/main.py:main", IMPORT, "app.py:<module>", FROM_PRETRAINED),
         "weights", "transformers"),
        ((*WORK, FROM_PRETRAINED, "safetensors/torch.py:load_file"), "weights", "safetensors"),
        ((*WORK, "torch/serialization.py:load"), "weights", "torch"),
        (
            (*WORK, FROM_PRETRAINED,
             "transformers/models/llama/modeling_llama.py:LlamaForCausalLM.__init__",
             "torch/nn/modules/linear.py:Linear.__init__"),
            "model_build", "torch",
        ),
        (
            (*WORK, "transformers/models/auto/tokenization_auto.py:AutoTokenizer.from_pretrained",
             "transformers/tokenization_utils_base.py:PreTrainedTokenizerBase.from_pretrained"),
            "tokenizer", "transformers",
        ),
        ((*WORK, "transformers/utils/hub.py:cached_file", "huggingface_hub/file_download.py:get",
          "httpx/_client.py:Client.get", "python3.11/ssl.py:SSLSocket.read"), "hub", "httpx"),
        ((*WORK, "huggingface_hub/file_download.py:hf_hub_download"), "hub", "huggingface_hub"),
        (
            (*GENERATE, "torch/nn/modules/module.py:Module._call_impl",
             "torch/nn/modules/linear.py:Linear.forward"),
            "generate", "torch",
        ),
        (
            (*GENERATE, "torch/_dynamo/eval_frame.py:_fn",
             "torch/_inductor/compile_fx.py:compile_fx_inner",
             "python3.11/concurrent/futures/_base.py:Future.result",
             "python3.11/threading.py:Condition.wait"),
            "compile", "torch",
        ),
        (
            ("vllm/v1/engine/core.py:EngineCoreProc.run_engine_core",
             "vllm/v1/worker/gpu_worker.py:Worker.determine_available_memory",
             "vllm/v1/worker/gpu_model_runner.py:GPUModelRunner.profile_run"),
            "kv_cache", "vllm",
        ),
        (
            ("vllm/v1/engine/core.py:EngineCoreProc.run_engine_core",
             "vllm/v1/worker/gpu_model_runner.py:GPUModelRunner.capture_model"),
            "graph_capture", "vllm",
        ),
        # vLLM 0.32 on a CPU: a worker with nothing to do, its core that waits for it, a step
        (
            ("vllm/v1/executor/multiproc_executor.py:WorkerProc.worker_busy_loop", *MESSAGE,
             "vllm/distributed/device_communicators/shm_broadcast.py:SpinCondition.wait",
             "zmq/sugar/poll.py:Poller.poll"),
            "idle", "",
        ),
        (
            ("vllm/v1/engine/core.py:EngineCore.step",
             "vllm/v1/executor/multiproc_executor.py:FutureWrapper._wait_for_response",
             "vllm/v1/executor/multiproc_executor.py:MultiprocExecutor.collective_rpc.<locals>"
             ".get_response", *MESSAGE, "vllm/distributed/utils.py:sched_yield"),
            "idle", "",
        ),
        (
            ("vllm/v1/worker/gpu_model_runner.py:GPUModelRunner._model_forward",
             "vllm/compilation/decorators.py:_support_torch_compile.<locals>.__call__",
             "vllm/model_executor/models/llama.py:LlamaModel.forward",
             "vllm/ir/ops/layernorm.py:fused_add_rms_norm"),
            "generate", "vllm",
        ),
        (("vllm/v1/engine/core.py:run", "torch/cuda/__init__.py:_lazy_init"), "device", "torch"),
        (
            ("vllm/v1/engine/core.py:run",
             "vllm/model_executor/model_loader/default_loader.py:DefaultModelLoader.load_model"),
            "weights", "vllm",
        ),
        # A layer copies its part out of the mapped file, or makes room for it.
        (
            ("vllm/model_executor/model_loader/default_loader.py:DefaultModelLoader.load_weights",
             "vllm/model_executor/models/llama.py:LlamaModel.load_weights",
             "vllm/model_executor/layers/linear.py:QKVParallelLinear.weight_loader_v2",
             "vllm/model_executor/parameter.py:_ColumnvLLMParameter.load_qkv_weight"),
            "weights", "vllm",
        ),
        (
            ("vllm/model_executor/model_loader/utils.py:process_weights_after_loading",
             "vllm/model_executor/layers/linear.py:UnquantizedLinearMethod"
             ".process_weights_after_loading"),
            "weights", "vllm",
        ),
        (
            ("vllm/model_executor/model_loader/base_loader.py:BaseModelLoader.load_model",
             "vllm/model_executor/models/llama.py:LlamaMLP.__init__",
             "vllm/model_executor/layers/linear.py:UnquantizedLinearMethod.create_weights"),
            "model_build", "vllm",
        ),
        (("serve.py:<module>", "serve.py:spin"), "other", "serve.py"),
        (("sitecustom.py:<module>", "yaml/__init__.py:<module>"), "imports", "yaml"),
    ],
)  # fmt: skip
def test_place_of_a_stack(frames: tuple[str, ...], category: str, package: str) -> None:
    place = place_of(stack(*frames))
    assert (place.category, place.package) == (category, package)


def test_an_empty_stack_is_idle_or_other_but_no_error() -> None:
    assert place_of(()).category in CATEGORIES


def test_every_category_is_known_and_has_words() -> None:
    assert {row.category for row in ROWS} < set(CATEGORIES)
    assert set(CATEGORY_WORDS) == set(CATEGORIES)
    assert CATEGORIES[-1] == IDLE
