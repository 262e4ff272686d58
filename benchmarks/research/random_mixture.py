"""Makes GGUF files of real mixtures' shapes with random weights, fewer layers and no tokenizer.

What a step costs depends on shapes and formats and not on what the weights are, but for which
experts the rows choose: random weights spread them more evenly than text does. Tensors have the
formats that the files of these models have that people load: Q4_K with Q6_K for some, or MXFP4 for
the experts and Q8_0 for the rest. Blocks are random bytes under scales that make weights of a
deviation of about 0.02.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Type = gguf.GGMLQuantizationType
VOCAB = 32_000
TILE = 1 << 14
"""Blocks of random bytes that are made once; larger tensors repeat them."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Shape and formats of a model. Sizes as GGUF names them."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    per_token: int
    width: int
    expert_type: Type
    other_type: Type
    some_type: Type  # of half of the layers' value and down matrices, and of the head
    theta: float = 1e6
    biased: bool = False  # gpt-oss: biases, sinks and a window
    qk_norm: bool = False


SHAPES = {
    "qwen3-30b-a3b": Mixture(
        *("qwen3moe", 2048, 16, 32, 4, 128, 128, 8, 768, Type.Q4_K, Type.Q4_K, Type.Q6_K),
        qk_norm=True,
    ),
    "gpt-oss-20b": Mixture(
        *("gpt-oss", 2880, 12, 64, 8, 64, 32, 4, 2880, Type.MXFP4, Type.Q8_0, Type.Q8_0),
        *(150_000.0, True),
    ),
}


def q4_k(rng: np.random.Generator, count: int) -> np.ndarray:
    blocks = rng.integers(0, 256, (count, 144), np.uint8)
    blocks[:, :4] = np.array([1e-4, 7.5e-4], np.float16).view(np.uint8)
    return blocks


def q6_k(rng: np.random.Generator, count: int) -> np.ndarray:
    blocks = rng.integers(0, 256, (count, 210), np.uint8)
    blocks[:, 192:208] = rng.integers(5, 16, (count, 16), np.uint8)
    blocks[:, 208:] = np.array([1.1e-4], np.float16).view(np.uint8)
    return blocks


def q8_0(rng: np.random.Generator, count: int) -> np.ndarray:
    blocks = rng.integers(0, 256, (count, 34), np.uint8)
    blocks[:, :2] = np.array([2.7e-4], np.float16).view(np.uint8)
    return blocks


def mxfp4(rng: np.random.Generator, count: int) -> np.ndarray:
    blocks = rng.integers(0, 256, (count, 17), np.uint8)
    blocks[:, 0] = 127 - 7
    return blocks


BLOCKS: dict[Type, tuple[Callable[[np.random.Generator, int], np.ndarray], int]] = {
    Type.Q4_K: (q4_k, 256),
    Type.Q6_K: (q6_k, 256),
    Type.Q8_0: (q8_0, 32),
    Type.MXFP4: (mxfp4, 32),
}


def matrix(rng: np.random.Generator, kind: Type, shape: tuple[int, ...]) -> np.ndarray:
    """Random rows of a format, ``[..., bytes of a row]``."""
    make, block = BLOCKS[kind]
    per_row, rest = divmod(shape[-1], block)
    assert rest == 0, (kind, shape)
    count = per_row * int(np.prod(shape[:-1]))
    tile = make(rng, min(count, TILE))
    # An odd number of bytes further along each time, so that no two experts are equal.
    repeated = np.resize(tile, (count, tile.shape[1]))
    return repeated.reshape(*shape[:-1], per_row * tile.shape[1])


def tensors(m: Mixture, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray, Type | None]]:
    """Name, data and format (None: float32 as it is) of each tensor, in the order of a file."""

    def floats(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.02).astype(np.float32)

    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    yield "token_embd.weight", matrix(rng, m.other_type, (VOCAB, m.hidden)), m.other_type
    for index in range(m.layers):
        p = f"blk.{index}."
        some = m.some_type if index % 2 else m.other_type
        linears = {"attn_q": (q, m.hidden, m.other_type), "attn_k": (kv, m.hidden, m.other_type)}
        linears |= {"attn_v": (kv, m.hidden, some), "attn_output": (m.hidden, q, m.other_type)}
        for name, (n, k, kind) in linears.items():
            yield f"{p}{name}.weight", matrix(rng, kind, (n, k)), kind
            if m.biased:
                yield f"{p}{name}.bias", floats(n), None
        after = "post_attention_norm" if m.biased else "ffn_norm"
        for norm in ("attn_norm", after):
            yield f"{p}{norm}.weight", 1 + floats(m.hidden), None
        if m.qk_norm:
            for norm in ("attn_q_norm", "attn_k_norm"):
                yield f"{p}{norm}.weight", 1 + floats(m.head_dim), None
        yield f"{p}ffn_gate_inp.weight", floats(m.experts, m.hidden), None
        down = m.expert_type if m.biased or not index % 2 else m.some_type
        stacks = {"ffn_gate_exps": (m.width, m.hidden, m.expert_type)}
        stacks["ffn_up_exps"] = stacks["ffn_gate_exps"]
        stacks["ffn_down_exps"] = (m.hidden, m.width, down)
        for name, (n, k, kind) in stacks.items():
            yield f"{p}{name}.weight", matrix(rng, kind, (m.experts, n, k)), kind
            if m.biased:
                yield f"{p}{name}.bias", floats(m.experts, n), None
        if m.biased:
            yield f"{p}ffn_gate_inp.bias", floats(m.experts), None
            yield f"{p}attn_sinks.weight", floats(m.heads), None
    yield "output_norm.weight", 1 + floats(m.hidden), None
    yield "output.weight", matrix(rng, m.some_type, (VOCAB, m.hidden)), m.some_type


Tensors = Iterable[tuple[str, np.ndarray, Type | None]]


def save(out: Path, m: Any, kept: Tensors, context: int, vocab: int) -> gguf.GGUFWriter:
    """A writer of these tensors that knows the sizes which all shapes have; see :func:`finish`."""
    writer = gguf.GGUFWriter(out, m.architecture, use_temp_file=False)
    writer.add_block_count(m.layers)
    writer.add_context_length(context)
    writer.add_embedding_length(m.hidden)
    writer.add_feed_forward_length(m.width)
    writer.add_head_count(m.heads)
    writer.add_head_count_kv(m.kv_heads)
    writer.add_key_length(m.head_dim)
    writer.add_value_length(m.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(m.theta)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("no_vocab")
    for name, data, kind in kept:
        writer.add_tensor(name, data, raw_dtype=kind)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(m: Mixture, out: Path, seed: int = 0) -> None:
    """Write the file."""
    writer = save(out, m, tensors(m, np.random.default_rng(seed)), 4096, VOCAB)
    writer.add_expert_count(m.experts)
    writer.add_expert_used_count(m.per_token)
    writer.add_expert_feed_forward_length(m.width)
    if m.biased:
        writer.add_sliding_window(128)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    finish(writer)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("output", type=Path)
    parser.add_argument("--layers", type=int, help="instead of the shape's")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    write(replace(shape, layers=options.layers or shape.layers), options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
