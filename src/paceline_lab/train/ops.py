"""The differentiable backend: one decoder definition serves training and inference.

Owns mixed precision and causal attention over dense ``[batch, time]`` rows. Knows no data, no loss
and no optimiser. A decoder is built anew from the trained tensors for every forward with gradients
(:func:`differentiable_decoder`), so that gradients flow through its packing to the tensors under
their checkpoint names, tied embeddings included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F

from paceline.backends.rows.reference import ACTIVATIONS
from paceline.backends.rows.row_ops import Tensor
from paceline.backends.rows.rows import Rows
from paceline.core.errors import UnsupportedModelError
from paceline.models.backend import Rounding, WeightPart
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.weights import HEAD_TOKENS

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """``weight`` is ``[out, in]`` in the compute dtype, but for routers; the master copy stays
    float32, as they do."""

    weight: Tensor
    bias: Tensor | None


class DenseBatch(Protocol):
    """Attention metadata of a forward whose rows are ``[size * time]``, time running fastest."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, config: ModelConfig
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """``size`` windows of ``time`` rows; a row sees the rows before it in its own window."""

    size: int
    time: int

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, config: ModelConfig) -> Tensor:
        queries, keys, values = (by_head(x, self.size, self.time) for x in (q, k, v))
        return attention(queries, keys, values, config, config.attention.is_sliding(layer), first=0)


class CachedBatch:
    """``size`` sequences that grow together; keys and values of earlier forwards are kept.

    Args:
        config: the decoder that runs over this batch.
        size: number of sequences.
        capacity: most positions of one sequence.
        dtype: precision of the kept keys and values.
    """

    def __init__(self, config: ModelConfig, size: int, capacity: int, dtype: torch.dtype) -> None:
        shape = (config.num_layers, 2, size, config.num_kv_heads, capacity, config.head_dim)
        self._cache = torch.zeros(shape, dtype=dtype)
        self.size = size
        self.length = 0
        self.time = 0

    def grow(self, time: int) -> Tensor:
        """Announce ``time`` rows per sequence; returns their positions ``[size * time]``."""
        self.length += self.time
        self.time = time
        assert self.length + time <= self._cache.shape[4]
        steps = torch.arange(self.length, self.length + time)
        return steps.repeat(self.size)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, config: ModelConfig) -> Tensor:
        start, stop = self.length, self.length + self.time
        queries, *fresh = (by_head(x, self.size, self.time) for x in (q, k, v))
        kept = self._cache[layer]
        kept[0, :, :, start:stop], kept[1, :, :, start:stop] = fresh
        keys, values = (x[:, :, :stop].to(queries.dtype) for x in kept)
        return attention(
            queries, keys, values, config, config.attention.is_sliding(layer), first=start
        )


def by_head(x: Tensor, size: int, time: int) -> Tensor:
    """``[size * time, heads, head_dim]`` to ``[size, heads, time, head_dim]``."""
    return x.reshape(size, time, *x.shape[1:]).transpose(1, 2)


def _by_row(x: Tensor) -> Tensor:
    """``[size, heads, time, head_dim]`` to ``[size * time, heads * head_dim]``."""
    return x.transpose(1, 2).flatten(0, 1).flatten(1)


def attention(
    q: Tensor, k: Tensor, v: Tensor, config: ModelConfig, sliding: bool, first: int
) -> Tensor:
    """Causal attention of queries at positions ``first`` and on, over keys at 0 and on.

    Args:
        q: ``[size, heads, time, head_dim]``.
        k, v: ``[size, kv_heads, first + time, head_dim]``.

    Returns:
        ``[size * time, heads * head_dim]``.
    """
    time = q.shape[2]
    plain = not sliding and not config.attention.softcap
    if plain and (first == 0 or time == 1):
        k, v = _every_head(q, k, v)
        causal = time > 1
        return _by_row(
            F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=config.attention_scale)
        )
    seen = _mask(first, time, config.attention.sliding_window if sliding else 0)
    return masked_attention(q, k, v, seen, config)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, config: ModelConfig) -> Tensor:
    """Attention of queries over those keys for which ``seen`` ``[time, keys]`` is true.

    Shapes are those of :func:`attention`.
    """
    k, v = _every_head(q, k, v)
    if not config.attention.softcap:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=config.attention_scale)
        return _by_row(out)
    scores = (q @ k.transpose(-1, -2)).float() * config.attention_scale
    capped = torch.tanh(scores / config.attention.softcap) * config.attention.softcap
    return _by_row(capped.masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype) @ v)


def _every_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values repeated: the fused kernels have no backward for grouped heads."""
    groups = q.shape[1] // k.shape[1]
    if groups == 1:
        return k, v
    return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)


def _mask(first: int, time: int, window: int) -> Tensor:
    rows = torch.arange(first, first + time)[:, None]
    keys = torch.arange(first + time)[None]
    seen = keys <= rows
    return seen & (rows - keys < window) if window else seen


class TrainingOps:
    """Backend with gradients. ``dtype`` is that of matrix products, ``float32`` or ``bfloat16``.

    Norms, the residual stream and the trained tensors stay float32 either way.
    """

    row_multiple = 1

    def __init__(self, dtype: str = "float32") -> None:
        self.dtype = dtype
        self.compute = COMPUTE_DTYPES[dtype]

    def join(self, arrays: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(arrays))

    def pack_linear(self, parts: Sequence[WeightPart], k: int, bias: Tensor | None) -> DenseLinear:
        bias = None if bias is None else bias.to(self.compute)
        weights = [part.read(0, part.num_outputs) for part in parts]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return DenseLinear(weight if parts[0].format else weight.to(self.compute), bias)

    def pack_vector(self, weight: Tensor) -> Tensor:
        packed: Tensor = torch.as_tensor(weight).float()
        return packed

    def pack_embedding(self, part: WeightPart, k: int) -> Tensor:
        table: Tensor = part.read(0, part.num_outputs)
        return table.float()

    def pack_head(
        self, part: WeightPart, k: int, embedding: Tensor | None, bias: Tensor | None = None
    ) -> DenseLinear:
        return self.pack_linear([part], k, bias)

    def roundings(self) -> Sequence[Rounding]:
        return ()

    def row_linear(self, x: Tensor, packed: DenseLinear) -> Tensor:
        return F.linear(x.to(packed.weight.dtype), packed.weight, packed.bias)

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(ids, table)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale * weight).to(x.dtype)

    def gated_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return torch.tanh(x.float() / cap) * cap

    def sigmoid(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = cos.shape[-1]
        turned, rest = x[..., :width], x[..., width:]
        first, second = turned.chunk(2, dim=-1)
        swapped = torch.cat((second, first), dim=-1)
        out = turned * cos.to(x.dtype) + swapped * sin.to(x.dtype)
        return torch.cat((out, rest), dim=-1) if rest.shape[-1] else out

    def attention(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        config: ModelConfig,
        batch: DenseBatch,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert sinks is None, "no model with attention sinks can be trained"
        return batch.attend(layer, q, k, v, config)

    def write_kv(self, layer: int, k: Tensor, v: Tensor, batch: Any) -> None:
        batch.write(layer, k, v)


def differentiable_decoder(
    config: ModelConfig, tensors: Mapping[str, Any], ops: TrainingOps, max_len: int
) -> Rows:
    """A decoder over ``tensors`` for one forward and backward.

    Packing copies (and, in bfloat16, rounds) the tensors, so a decoder is stale after an optimiser
    step. Building one costs about as much as reading the weights once.

    Raises:
        UnsupportedModelError: it has recurrent layers.
    """
    if config.recurrent is not None:
        raise UnsupportedModelError("models with recurrent layers cannot be trained")
    if HEAD_TOKENS in tensors:
        tensors = {**tensors, HEAD_TOKENS: tensors[HEAD_TOKENS].numpy(force=True)}
    return Rows(Decoder(config, tensors, cast(Any, ops), max_len))


def dense_hidden(decoder: Rows, tokens: Tensor) -> Tensor:
    """Final hidden rows ``[size * time, hidden]`` of the windows ``tokens`` ``[size, time]``."""
    size, time = tokens.shape
    positions = torch.arange(time).repeat(size)
    return decoder.hidden(tokens.reshape(-1), positions, PackedTexts(size, time))
