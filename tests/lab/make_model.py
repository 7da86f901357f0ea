"""Random-weight GGUF models that llama.cpp loads and runs like real ones of their size.

A plain llama architecture (RMSNorm, RoPE, grouped-query attention, SwiGLU) with a
SentencePiece vocabulary of bytes, characters and syllables, so that every prompt tokenizes. The
text is noise; load, warm-up, prefill and decode are real. The same arguments give the same bytes.

Output rows of control and byte tokens are zero, so that greedy decoding never ends early and
never emits half a UTF-8 character, which a server holds back and so delays its first text.
"""

import argparse
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

HEAD_DIM = 64
SPECIALS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
VOCABULARY_SIZE = 2048
CONTEXT_LENGTH = 8192
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
BYTES_PER_WEIGHT = {"q8_0": 34 / 32, "f16": 2.0}
FILE_TYPES = {
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
}
UNIFORM_INT8_DEVIATION = 73.9

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Tensor:
    name: str
    rows: int
    columns: int
    deviation: float | None  # None: a float32 vector of ones, as norms have
    zero_rows: int = 0


def make_models(folder: Path, *, size_mb: float, layers: int) -> Path:
    """Writes two, `a` and `b`, of the same shape; the folder."""
    for seed, name in enumerate("ab", start=1):
        make_model(folder / f"{name}.gguf", size_mb=size_mb, layers=layers, seed=seed)
    return folder


def make_model(
    path: Path, *, size_mb: float, layers: int = 4, seed: int = 1, kind: str = "q8_0"
) -> None:
    """Writes a model of about `size_mb` × 10⁶ bytes; `path` appears only when it is complete."""
    width, ff_width = widths_for(size_mb * 1e6 / BYTES_PER_WEIGHT[kind], layers)
    tensors = list(plan(width, ff_width, layers))
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    add_metadata(writer, f"random-{size_mb:g}mb-seed{seed}", width, ff_width, layers, kind)
    for tensor in tensors:
        declare(writer, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(data_of(tensor, seed, kind))
    writer.close()
    partial.replace(path)


def widths_for(weights: float, layers: int) -> tuple[int, int]:
    """The model width and feed-forward width that come closest to `weights` from below."""

    def outside_ff(width: int) -> int:
        attention = 2 * width * width + 2 * width * (width // 4)
        return layers * attention + 2 * VOCABULARY_SIZE * width

    width = 256
    while outside_ff(width + 256) + 7.5 * layers * (width + 256) ** 2 <= weights:
        width += 256
    ff_width = int((weights - outside_ff(width)) / (3 * layers * width)) // 32 * 32
    if ff_width < 32:
        raise ValueError(f"{layers} layers need a larger model")
    return width, ff_width


def plan(width: int, ff_width: int, layers: int) -> Iterator[Tensor]:
    deviation = 0.6 / width**0.5
    yield Tensor("token_embd.weight", VOCABULARY_SIZE, width, 0.02)
    for layer in range(layers):
        block = f"blk.{layer}."
        yield Tensor(block + "attn_norm.weight", 1, width, None)
        yield Tensor(block + "attn_q.weight", width, width, deviation)
        yield Tensor(block + "attn_k.weight", width // 4, width, deviation)
        yield Tensor(block + "attn_v.weight", width // 4, width, deviation)
        yield Tensor(block + "attn_output.weight", width, width, deviation)
        yield Tensor(block + "ffn_norm.weight", 1, width, None)
        yield Tensor(block + "ffn_gate.weight", ff_width, width, deviation)
        yield Tensor(block + "ffn_up.weight", ff_width, width, deviation)
        yield Tensor(block + "ffn_down.weight", width, ff_width, 0.6 / ff_width**0.5)
    yield Tensor("output_norm.weight", 1, width, None)
    silent = len(SPECIALS) + len(BYTES)
    yield Tensor("output.weight", VOCABULARY_SIZE, width, 4 * deviation, silent)


def vocabulary() -> list[str]:
    """Specials, bytes, then pieces from short to long."""
    consonants, vowels = "bcdfghjklmnpqrstvwxyz", "aeiou"
    open_syllables = ["".join(s) for s in product(consonants, vowels)]
    closed_syllables = ["".join(s) for s in product(consonants, vowels, consonants)]
    pieces = ["▁", *(chr(code) for code in range(0x21, 0x7F))]
    for syllables in open_syllables, closed_syllables:
        pieces += syllables
        pieces += ["▁" + s for s in syllables]
    return [*SPECIALS, *BYTES, *pieces][:VOCABULARY_SIZE]


def add_metadata(
    writer: gguf.GGUFWriter, name: str, width: int, ff_width: int, layers: int, kind: str
) -> None:
    writer.add_name(name)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ff_width)
    writer.add_head_count(width // HEAD_DIM)
    writer.add_head_count_kv(width // HEAD_DIM // 4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(VOCABULARY_SIZE)

    tokens = vocabulary()
    reserved = len(SPECIALS) + len(BYTES)
    kinds = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    # Longer pieces score higher, so the tokenizer merges syllables as it would words.
    writer.add_token_scores([0.0] * reserved + [10.0 * len(t) - 1000 for t in tokens[reserved:]])
    writer.add_token_types(
        [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL]
        + [kinds.BYTE] * len(BYTES)
        + [kinds.NORMAL] * (len(tokens) - reserved)
    )
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def declare(writer: gguf.GGUFWriter, tensor: Tensor, kind: str) -> None:
    rows, columns = tensor.rows, tensor.columns
    if tensor.deviation is None:
        writer.add_tensor_info(tensor.name, [columns], np.dtype(np.float32), 4 * columns)
    elif kind == "f16":
        shape, size = [rows, columns], 2 * rows * columns
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float16), size)
    else:  # the writer takes the shape of packed types in bytes
        shape = [rows, columns // 32 * 34]
        q8_0 = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor_info(
            tensor.name, shape, np.dtype(np.uint8), rows * shape[1], raw_dtype=q8_0
        )


def data_of(tensor: Tensor, seed: int, kind: str) -> Array:
    """The tensor as stored: uniform noise from a stream of its own."""
    if tensor.deviation is None:
        return np.ones(tensor.columns, np.float32)
    count = tensor.rows * tensor.columns
    stream = np.random.PCG64([seed, zlib.crc32(tensor.name.encode())])
    words = stream.random_raw((count + 7) // 8).astype("<u8")
    noise = words.view(np.int8)[:count].reshape(tensor.rows, tensor.columns)
    noise[: tensor.zero_rows] = 0
    step = tensor.deviation / UNIFORM_INT8_DEVIATION
    if kind == "f16":
        table = (np.arange(-128, 128, dtype=np.float32) * step).astype("<f2")
        values: Array = table[noise.astype(np.int16) + 128]
        return values
    blocks = np.empty((tensor.rows, tensor.columns // 32, 34), np.uint8)
    blocks[..., :2] = np.array([step], "<f2").view(np.uint8)
    blocks[..., 2:] = noise.view(np.uint8).reshape(tensor.rows, -1, 32)
    return blocks.reshape(tensor.rows, -1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make-model", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--size-mb", type=float, default=20, help="in 10^6 bytes (default 20)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--type", choices=sorted(BYTES_PER_WEIGHT), default="q8_0", dest="kind")
    arguments = parser.parse_args()
    try:
        make_model(
            arguments.out,
            size_mb=arguments.size_mb,
            layers=arguments.layers,
            seed=arguments.seed,
            kind=arguments.kind,
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
