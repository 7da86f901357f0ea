"""A folder that `transformers` loads as a Llama: random weights, a token a printable character.

    .engine/transformers/bin/python tests/lab/make_transformers_model.py OUT LAYERS SEED

Run by the interpreter that has `safetensors` and `tokenizers`; torch is not asked. Deterministic.
A layer has 3.9 million parameters (15.7 MB). The model never ends an answer by itself.
"""

from __future__ import annotations

import json
import string
import sys
from pathlib import Path
from typing import Any

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 512, 1792, 8, 8
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


def make(out: Path, layers: int, seed: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(out)
    write_weights(out, vocabulary, layers, seed)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }
    (out / "config.json").write_text(json.dumps(config))


def write_tokenizer(out: Path) -> int:
    """Writes it; the number of tokens."""
    from tokenizers import Tokenizer, decoders, models

    characters = {c: number for number, c in enumerate(sorted(string.printable[:95]))}
    vocabulary = characters | {"<unk>": len(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(out / "tokenizer.json"))
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (out / "tokenizer_config.json").write_text(json.dumps(known | {"chat_template": TEMPLATE}))
    return len(vocabulary)


def write_weights(out: Path, vocabulary: int, layers: int, seed: int) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Any:
        return random.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)

    ones = np.ones(HIDDEN, np.float32)
    tensors = {
        "model.embed_tokens.weight": matrix(vocabulary, HIDDEN),
        "lm_head.weight": matrix(vocabulary, HIDDEN),
        "model.norm.weight": ones,
    }
    for number in range(layers):
        layer = f"model.layers.{number}"
        for name in "qkvo":
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = matrix(HIDDEN, HIDDEN)
        for name in ("gate", "up"):
            tensors[f"{layer}.mlp.{name}_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        tensors[f"{layer}.mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = ones
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
