"""The layers of a model once more, in fewer bits, out of the checkpoint that it was loaded from.

Owns how packed linears become floats again. Knows no arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np

from paceline.backends.native.native import native_module
from paceline.loading.checkpoint import Checkpoint
from paceline.models.backend import Ops
from paceline.models.config import ModelConfig
from paceline.models.decoder_reader import DecoderReader
from paceline.models.shapes import Latent
from paceline.models.tensor_reader import TensorReader, packed_formats, packed_parts
from paceline.models.weights import Layer
from paceline.tensors.arrays import Array
from paceline.tensors.pages import give_back_freed


def read_layers(checkpoint: Checkpoint, config: ModelConfig, ops: Ops) -> list[Layer]:
    """The layers of ``config``, which may be fewer than the checkpoint has, packed by ``ops``."""
    tensors = checkpoint.tensors
    if checkpoint.packed is not None:
        tensors = _Unpacked(tensors, config)
    packing = TensorReader(tensors, config, ops)
    reader = DecoderReader(packing)
    layers = [reader.layer(index) for index in range(config.num_layers)]
    packing.log_rounding()
    give_back_freed()
    return layers


def _latent_shapes(c: ModelConfig, latent: Latent) -> dict[str, tuple[list[int], int]]:
    queries = c.num_heads * (latent.nope_dim + latent.rope_dim)
    first = [latent.first_widths(c.num_heads)[0], latent.key_dim]
    return {
        "qkv_a_proj": (first, c.hidden_size),
        "q_b_proj": ([queries], latent.q_rank),
        "k_b_proj": ([latent.rank], latent.nope_dim),
        "v_b_proj": ([latent.value_dim], latent.rank),
        "o_proj": ([c.hidden_size], c.num_heads * latent.value_dim),
    }


class _Unpacked(Mapping[str, Array]):
    """A packed folder's tensors, its linears as floats under their fused names."""

    def __init__(self, tensors: Mapping[str, Array], config: ModelConfig) -> None:
        self._tensors = tensors
        self._config = config

    def _shape(self, linear: str) -> tuple[list[int], int] | None:
        """Outputs of the stacked linears, and inputs; None of what is no packed linear."""
        c, experts, kind = self._config, self._config.mlp.experts, linear.rpartition(".")[2]
        layer = re.match(r"model\.layers\.(\d+)\.", linear)
        if layer is None:
            return None
        dim, kv_heads, has_values = c.heads_of(int(layer[1]))
        queries, keys = c.num_heads * dim, kv_heads * dim
        read = [queries, keys, keys][: (2 + has_values) if c.owns_kv(int(layer[1])) else 1]
        width = c.mlp_width(int(layer[1]))
        if experts is not None and ".experts." in linear:
            width = experts.width
        elif experts is not None and ".shared_expert." in linear:
            width = experts.shared_width
        shapes = {
            "qkv_proj": (read, c.hidden_size),
            "o_proj": ([c.hidden_size], queries),
            "gate_up_proj": ([width] * 2, c.hidden_size),
            "down_proj": ([c.hidden_size], width),
            **({} if c.mlp.gated else {"up_proj": ([width], c.hidden_size)}),
        }
        if c.layer_inputs:
            inner = c.layer_inputs.width
            shapes["per_layer_input_gate"] = ([inner], c.hidden_size)
            shapes["per_layer_projection"] = ([c.hidden_size], inner)
        if c.altup:
            shapes["linear_left"] = ([c.altup.rank], c.hidden_size)
            shapes["linear_right"] = ([c.hidden_size], c.altup.rank)
        if c.attention.latent:
            shapes |= _latent_shapes(c, c.attention.latent)
            kind = linear.split(".")[-2] if kind.isdigit() else kind
        return shapes.get(kind)

    def __getitem__(self, name: str) -> Array:
        linear, _, key = name.rpartition(".")
        shape = self._shape(linear)
        if shape is None or key != "weight":
            return self._tensors[name]
        outs, k = shape
        packed = native_module().Linear(packed_parts(self._tensors, linear, outs), None, k)
        rows: Array = packed.rows(np.arange(packed.n, dtype=np.int32))
        return rows

    def __contains__(self, name: object) -> bool:
        linear, _, key = str(name).rpartition(".")
        if self._shape(linear) is None:
            return name in self._tensors
        if key == "bias":
            return name in self._tensors
        return key == "weight" and bool(packed_formats(self._tensors, linear))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
