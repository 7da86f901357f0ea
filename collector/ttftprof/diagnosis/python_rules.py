"""Rules on Python code: what most samples of the blamed phase found it busy with."""

from __future__ import annotations

from ttftprof.diagnosis.rules import Blamed, Finding, Rule, rule
from ttftprof.engines.python_code import CATEGORY_WORDS, IDLE, OTHER
from ttftprof.model import Action, Evidence, PythonShare, PythonTime

MIN_SHARE = 0.25
MIN_SAMPLES = 10
_SURE_ERRORS = 2  # a share counts where it would still be large so many errors lower

# category: (what to change, how to check, whether the change takes the whole share away)
_CHANGES: dict[str, tuple[str, str, bool]] = {
    "imports": (
        "keep the process alive between models instead of starting one for each; else make its "
        "imports cheaper: site-packages on a local disk, compiled once (python -m compileall), "
        "without packages that it does not need",
        "python -X importtime -c 'import PACKAGE' shows the slowest imports",
        True,
    ),
    "compile": (
        "keep the compiler's caches on a disk that outlives the process (TORCHINDUCTOR_CACHE_DIR, "
        "TRITON_CACHE_DIR, VLLM_CACHE_ROOT), or run without compiling (vLLM: --enforce-eager)",
        "record a second start: compile should be gone",
        True,
    ),
    "graph_capture": (
        "capture graphs for fewer batch sizes, or none (vLLM: --enforce-eager, SGLang: "
        "--disable-cuda-graph)",
        "record again: graph_capture should shrink; compare the decode rate too",
        True,
    ),
    "kv_cache": (
        "give the size of the KV cache instead of having it measured (vLLM: "
        "--kv-cache-memory-bytes)",
        "record again: kv_cache should shrink",
        False,
    ),
    "tokenizer": (
        "put a tokenizer.json into the model's folder, or the tokenizer is converted at every load",
        "record again: tokenizer should shrink",
        False,
    ),
    "hub": (
        "name the model by its local folder, or set HF_HUB_OFFLINE=1",
        "record again: hub should be gone",
        True,
    ),
    "model_build": (
        "have the weights put in place instead of initialising them first (transformers: "
        "low_cpu_mem_usage=True; torch: build on the meta device)",
        "record again: model_build should shrink",
        False,
    ),
}


def _busy_with(blamed: Blamed) -> Finding | None:
    time = next((t for t in blamed.facts.python if t.phase == blamed.phase), None)
    if time is None or time.samples < MIN_SAMPLES:
        return None
    told = [s for s in time.shares if s.category not in (IDLE, OTHER)]
    top = max(told, key=lambda s: s.share, default=None)
    if top is None or top.share - _SURE_ERRORS * top.error < MIN_SHARE:
        return None
    return Finding(_sentence(time, top), _actions(top), (_evidence(time, top),))


def _sentence(time: PythonTime, top: PythonShare) -> str:
    whose = f" ({', '.join(top.packages)})" if top.packages else ""
    return (
        f"{time.phase}: {percent(top)} of {time.samples} samples found its Python code "
        f"{CATEGORY_WORDS[top.category]}{whose}."
    )


def percent(share: PythonShare) -> str:
    """`71 ± 4 %`"""
    return f"{share.share * 100:.0f} ± {share.error * 100:.0f} %"


def _actions(top: PythonShare) -> tuple[Action, ...]:
    if top.category not in _CHANGES:
        return ()
    change, verify, whole = _CHANGES[top.category]
    return (Action(change, top.estimated_ns if whole else None, verify),)


def _evidence(time: PythonTime, top: PythonShare) -> Evidence:
    what = f"of {time.samples} samples in {time.phase}: {top.category}"
    return Evidence("python_stacks", what, round(top.samples), "samples")


PYTHON_RULES: tuple[Rule, ...] = (rule("python code", _busy_with),)
