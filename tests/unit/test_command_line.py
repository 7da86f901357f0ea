"""What of a command line is written down, and what never."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttftprof.command_line import HIDDEN, MAX_ARGUMENTS, MAX_CHARACTERS, capped, public_argv

SECRET = "sk-Zq83hVt0verySecret"
PROMPT = "Tell me about my diagnosis"


@pytest.mark.parametrize(
    "argv",
    [
        ["llama-server", "--api-key", SECRET],
        ["llama-server", f"--api-key={SECRET}"],
        ["llama-server", "--hf-token", SECRET, "--port", "1"],
        ["llama-server", "-hft", SECRET],
        ["llama-server", f"--HF-TOKEN={SECRET}"],
        ["vllm", "serve", "--api-key", "first", SECRET],  # vLLM takes several
        ["koboldcpp", "--password", SECRET],
        ["env", f"HF_TOKEN={SECRET}", "llama-server"],
        ["env", f"HF_TOKEN=/{SECRET}", "llama-server"],
        ["env", f"HARMLESS={SECRET}"],
        ["sh", "-c", f"cd /srv && API_KEY={SECRET} llama-server"],
        ["sh", "-c", f"exec llama-server --api-key {SECRET} --port 1"],
        ["x", "--auth-credential", SECRET],
        ["x", "--api-key", f"-{SECRET}"],
        ["x", "--api-key", f"{SECRET} with spaces"],
        ["x", f"--api-key=={SECRET}="],
        ["x", "--header", f"Authorization: Bearer {SECRET}"],
        ["x", "--endpoint", f"https://user:{SECRET}@host/"],
        ["x", "--url", f"https://user:{SECRET}@host/"],
        ["x", "--webhook", f"https://host/services/{SECRET}"],
        ["curl", "-H", f"X-Key:{SECRET}", "http://127.0.0.1:8080/v1"],
        ["curl", f"-HX-Key:{SECRET}"],
        ["x", SECRET],
        [f"renamed: {SECRET}"],
    ],
)
def test_a_secret_is_never_shown(argv: list[str]) -> None:
    shown = public_argv(argv)
    assert SECRET not in " ".join(shown)
    assert len(shown) == len(argv)


@pytest.mark.parametrize(
    "prompt", [PROMPT, "diagnosis", "告诉我我的诊断", '{"prompt":"diagnosis"}']
)
@pytest.mark.parametrize(
    "before",
    [
        ["llama-cli", "-m", "x.gguf", "-p"],
        ["llama-cli", "-m", "x.gguf", "--prompt"],
        ["llama-cli", "-m", "x.gguf", "-no-cnv"],
        ["ollama", "run", "llama3"],
        ["llm"],
        ["curl", "-d"],
        ["curl", "--data-raw"],
        ["curl", "--json"],
        ["python3", "ask.py"],
        ["python3", "-c"],
        ["git", "commit", "-m"],
        ["notify", "--text"],
    ],
)
def test_a_prompt_is_never_shown(before: list[str], prompt: str) -> None:
    assert public_argv([*before, prompt])[-1] == HIDDEN
    if before[-1].startswith("--"):
        assert public_argv([*before[:-1], f"{before[-1]}={prompt}"])[-1] == f"{before[-1]}={HIDDEN}"


def test_a_value_stuck_to_a_short_option_is_hidden() -> None:
    assert public_argv(["llama-cli", f"-p{PROMPT}"]) == ["llama-cli", f"-p{HIDDEN}"]


@pytest.mark.parametrize(
    "argv",
    [
        ["llama-server", "-m", "/models/key.gguf", "--port", "8080"],
        ["llama-server", "-m", "/models/My Own Model.gguf"],
        ["llama-server", "--ctx-size", "4096", "-ngl", "99", "--alias", "tiny-a"],
        ["llama-server", "--metrics", "--slots", "--no-mmap", "-fit", "off", "-fa", "on"],
        ["llama-server", "-ctk", "q8_0", "--tensor-split", "3,1", "--override-kv", HIDDEN],
        ["llama-server", "--models-dir", "models", "--host", "127.0.0.1", "--temp", "-0.5"],
        ["vllm", "serve", "Qwen/Qwen2.5-7B", "--max-num-batched-tokens", "8192"],
        ["vllm", "serve", "m", "--tokenizer", "/models/t", "--data-parallel-size", "2"],
        ["vllm", "serve", "m", "--dtype=bfloat16", "--gpu-memory-utilization=0.9"],
        ["python3", "-m", "sglang.launch_server", "--model-path", "org/name"],
        ["/usr/bin/python3", "/usr/local/bin/vllm", "serve", "org/name", "--context-length", "4K"],
        ["ollama", "runner", "--model", "/blobs/sha256-2bada8", "--port", "41234"],
        ["ollama", "serve"],
        ["llama-swap", "--config", "config.yaml", "--listen", "localhost:8080"],
        ["llama-swap", "--listen", "[::1]:8080", "--proxy", "http://127.0.0.1:9000/v1"],
        ["VLLM::EngineCore"],
        ["x", "--no-auth", "--port", "1"],
        ["env", "OMP_NUM_THREADS=2", "MODELS=/srv/models", "llama-server"],
        [],
    ],
)
def test_what_tells_how_a_server_was_started_is_shown(argv: list[str]) -> None:
    assert public_argv(argv) == argv


@settings(deadline=None)
@given(
    st.sampled_from(["--api-key", "--hf-token", "--password", "-hft", "--MY-AUTH", "-p"]),
    st.text(min_size=12).filter(lambda s: not s.startswith("--") and "•" not in s),
    st.booleans(),
    st.lists(st.sampled_from(["-m", "x.gguf", "--port", "1"]), max_size=3),
)
def test_no_value_of_a_secret_option_is_shown(
    option: str, value: str, joined: bool, before: list[str]
) -> None:
    argv = [*before, f"{option}={value}"] if joined else [*before, option, value]
    assert not any(value in argument for argument in public_argv(["llama-server", *argv]))


@settings(deadline=None)
@given(st.lists(st.text(max_size=40), max_size=6))
def test_any_command_line_keeps_its_length(argv: list[str]) -> None:
    assert len(public_argv(argv)) == len(argv)


def test_a_long_command_line_is_cut_and_says_so() -> None:
    short = ["llama-server", *map(str, range(MAX_ARGUMENTS - 1))]
    assert capped(short) == short
    assert capped([*short, "a", "b"]) == [*short, "… (2 more)"]
    wide = ["server", "x" * (MAX_CHARACTERS - 6), "y", "z"]
    assert capped(wide) == [*wide[:2], "… (2 more)"]
    assert len(capped(["t" * 100_000])[0]) == MAX_CHARACTERS
    assert capped([]) == []
