"""Makes GGUF files of hybrids' real shapes with random weights and no tokenizer, and of a dense
model of as many bytes in the same formats.

The shapes are those of Qwen3.5, whose layers are gated delta nets but for each fourth; the formats
those of its Q4_K_M files: Q4_K, with Q6_K for half of the layers' value and down matrices and for
the embedding, which is the head too. The dense model has the hybrid's attention in every layer,
without gates, and so wide a feed-forward that both files have the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from research.random_mixture import Type, finish, matrix, save

INTERVAL = 4
"""Each so-manyth layer is attention."""
KERNEL = 4
CONTEXT = 40_960
LINEAR, SOME = Type.Q4_K, Type.Q6_K
BYTES = {kind: gguf.GGML_QUANT_SIZES[kind] for kind in (LINEAR, SOME)}


@dataclass(frozen=True, slots=True)
class Hybrid:
    """Shape of a model. Sizes as GGUF names them; ``key_heads`` 0: it is dense."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    key_heads: int
    value_heads: int
    state: int
    vocab: int = 248_320
    architecture: str = "qwen35"
    theta: float = 1e7

    def is_recurrent(self, index: int) -> bool:
        return self.key_heads > 0 and (index + 1) % INTERVAL != 0


SHAPES = {
    "qwen3.5-0.8b": Hybrid(1024, 24, 8, 2, 256, 3584, 16, 16, 128),
    "qwen3.5-2b": Hybrid(2048, 24, 8, 2, 256, 6144, 16, 16, 128),
    "qwen3.5-4b": Hybrid(2560, 32, 16, 4, 256, 9216, 16, 32, 128),
}
Linears = dict[str, tuple[int, int, Type]]


def mixer(m: Hybrid, index: int) -> Linears:
    """The matrices of a layer's delta net or attention: outputs, inputs and format."""
    some = SOME if index % 2 else LINEAR
    if m.is_recurrent(index):
        keys, values = m.key_heads * m.state, m.value_heads * m.state
        return {
            "attn_qkv": (2 * keys + values, m.hidden, some),
            "attn_gate": (values, m.hidden, LINEAR),
            "ssm_beta": (m.value_heads, m.hidden, LINEAR),
            "ssm_alpha": (m.value_heads, m.hidden, LINEAR),
            "ssm_out": (m.hidden, values, LINEAR),
        }
    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    return {
        "attn_q": (q * (2 if m.key_heads else 1), m.hidden, LINEAR),
        "attn_k": (kv, m.hidden, LINEAR),
        "attn_v": (kv, m.hidden, some),
        "attn_output": (m.hidden, q, LINEAR),
    }


def feed_forward(m: Hybrid, index: int) -> Linears:
    return {
        "ffn_gate": (m.width, m.hidden, LINEAR),
        "ffn_up": (m.width, m.hidden, LINEAR),
        "ffn_down": (m.hidden, m.width, SOME if index % 2 else LINEAR),
    }


def num_bytes(linears: Linears) -> float:
    return sum(n * k * BYTES[kind][1] / BYTES[kind][0] for n, k, kind in linears.values())


def dense(m: Hybrid) -> Hybrid:
    """The dense model, whose feed-forward makes up for what its layers lack."""
    other = replace(m, key_heads=0, value_heads=0, architecture="qwen3")
    layers = range(m.layers)
    lacking = sum(num_bytes(mixer(m, i)) - num_bytes(mixer(other, i)) for i in layers)
    each = sum(num_bytes(feed_forward(replace(m, width=256), i)) for i in layers)
    return replace(other, width=m.width + 256 * round(lacking / each))


def vectors(m: Hybrid, index: int, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """Norms, and what a delta net has beside matrices: decays of 0.4 to 0.999 a token."""

    def floats(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.02).astype(np.float32)

    yield "attn_norm.weight", 1 + floats(m.hidden)
    after = "post_attention_norm" if m.key_heads else "ffn_norm"
    yield f"{after}.weight", 1 + floats(m.hidden)
    if not m.is_recurrent(index):
        yield "attn_q_norm.weight", 1 + floats(m.head_dim)
        yield "attn_k_norm.weight", 1 + floats(m.head_dim)
        return
    channels = (2 * m.key_heads + m.value_heads) * m.state
    yield "ssm_conv1d.weight", 20 * floats(channels, KERNEL)
    yield "ssm_dt.bias", floats(m.value_heads)
    yield "ssm_a", -np.geomspace(0.0015, 1.3, m.value_heads, dtype=np.float32)
    yield "ssm_norm.weight", 1 + floats(m.state)


def tensors(m: Hybrid, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray, Type | None]]:
    """Name, data and format (None: float32 as it is) of each tensor, in the order of a file."""
    yield "token_embd.weight", matrix(rng, SOME, (m.vocab, m.hidden)), SOME
    for index in range(m.layers):
        for name, (n, k, kind) in (mixer(m, index) | feed_forward(m, index)).items():
            yield f"blk.{index}.{name}.weight", matrix(rng, kind, (n, k)), kind
        for name, data in vectors(m, index, rng):
            yield f"blk.{index}.{name}", data, None
    yield "output_norm.weight", np.ones(m.hidden, np.float32), None


def write(m: Hybrid, out: Path, seed: int = 0) -> None:
    """Write the file."""
    writer = save(out, m, tensors(m, np.random.default_rng(seed)), CONTEXT, m.vocab)
    if m.key_heads:
        writer.add_rope_dimension_count(m.head_dim // 4)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_ssm_conv_kernel(KERNEL)
        writer.add_ssm_state_size(m.state)
        writer.add_ssm_group_count(m.key_heads)
        writer.add_ssm_time_step_rank(m.value_heads)
        writer.add_ssm_inner_size(m.value_heads * m.state)
        writer.add_full_attention_interval(INTERVAL)
    finish(writer)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("output", type=Path)
    parser.add_argument("--dense", action="store_true", help="the dense model of as many bytes")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    write(dense(shape) if options.dense else shape, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
