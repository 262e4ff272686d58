"""Reference ops in torch: readable, run anywhere, and bitwise reproducible on the CPU.

With ``deterministic=True`` a row's result never depends on the other rows of the forward:

* float linears run in tiles of 16 rows (the batch is padded), so no kernel is chosen by row count;
* int8 linears accumulate 128 inputs in int32, exactly, and add such groups in ascending order;
* vectorised transcendental functions get flat pieces that are multiples of the vector width and
  too small to be split over threads, so that no element is ever computed by a scalar tail;
* attention is one call per class of key counts, in which each row is its own batch entry: its
  shape follows from the row's own position, and absent lanes read a slot that is always zero.
  No call holds a single problem, which alone the library would share out among its threads.

Everything else is sums over one row's last dimension, or correctly rounded arithmetic.
Knows nothing of requests, spans or sampling.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from paceline.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.models.ops.base import AttentionBatch, AttentionGroup, Tensor
from paceline.models.ops.tensor_kv import TensorKV

log = logging.getLogger(__name__)
REFERENCE_DTYPES = ("float32", "bfloat16", "int8")
"""From most bits to fewest."""
ROW_TILE = 16
SCALE_GROUP = 128  # 128 * 127 * 127 is below 2**24: exact in float32 too
PIECE = 16384  # elements; below the size at which torch splits an element-wise op over threads
LANES = 32  # elements per iteration of torch's widest element-wise loop
GATHER_ELEMENTS = 1 << 22  # upper bound on keys gathered by one attention call


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """W8A8: ``weight`` is int8 ``[in, out]`` (a transposed view), ``scale`` float32 ``[out]``;
    activations have a scale per :data:`SCALE_GROUP` inputs.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class FloatLinear:
    """``weight`` is ``[out, in]``, in oneDNN's blocked layout when ``blocked``."""

    weight: Tensor
    bias: Tensor | None
    blocked: bool


class ReferenceOps:
    """See the module's docstring. ``dtype`` is ``float32``, ``bfloat16`` or ``int8``."""

    name = "reference"

    def __init__(
        self, dtype: str = "float32", device: str = "cpu", deterministic: bool | None = None
    ) -> None:
        if dtype not in REFERENCE_DTYPES:
            raise ConfigError(f"dtype is {dtype!r}; allowed are {', '.join(REFERENCE_DTYPES)}")
        self.device = torch.device(device)
        on_cpu = self.device.type == "cpu"
        self.dtype = dtype
        self.deterministic = on_cpu if deterministic is None else deterministic
        self.identity = self.deterministic and on_cpu
        self.default_kv_dtype = "bfloat16" if dtype == "bfloat16" else "float32"
        tiled = self.deterministic and dtype != "int8"
        self.row_multiple = ROW_TILE if tiled else 1
        self._blocked = tiled and on_cpu and dtype == "float32" and _has_onednn()

    # --- weights -------------------------------------------------------------------------------

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> FloatLinear | Int8Linear:
        bias = None if bias is None else self.pack_vector(bias)
        if self.dtype == "int8":
            w = weight.to(self.device, torch.float32)
            scale = w.abs().amax(dim=1).div_(127.0).clamp_min_(1e-30)
            q = torch.round(w / scale[:, None]).to(torch.int8)
            return Int8Linear(q.t(), scale, bias)
        kind = torch.float32 if self.dtype == "float32" else torch.bfloat16
        w = weight.to(self.device, kind).contiguous()
        if self._blocked:
            w = torch.ops.mkldnn._reorder_linear_weight(w, ROW_TILE)
        return FloatLinear(w, bias, self._blocked)

    def pack_vector(self, weight: Tensor) -> Tensor:
        return weight.to(self.device, torch.float32).contiguous()

    def pack_embedding(self, weight: Tensor) -> Tensor:
        kind = torch.float32 if self.dtype == "float32" else torch.bfloat16
        return weight.to(self.device, kind).contiguous()

    def pack_head(self, weight: Tensor, embedding: Tensor | None) -> FloatLinear | Int8Linear:
        return self.pack_linear(weight, None)

    def kv_memory(self, config: ModelConfig, num_blocks: int, dtype: str) -> TensorKV:
        return TensorKV(config, num_blocks, dtype, self.device)

    def whole_forward(self, decoder: object, memory: object) -> None:
        return None

    # --- rows ----------------------------------------------------------------------------------

    def linear(self, x: Tensor, packed: FloatLinear | Int8Linear) -> Tensor:
        if isinstance(packed, Int8Linear):
            y = self._int8_linear(x, packed)
        elif not self.deterministic or x.shape[0] == ROW_TILE:
            y = self._float_linear(x, packed)
        else:
            y = torch.cat([self._float_linear(tile, packed) for tile in x.split(ROW_TILE)])
        return y if packed.bias is None else y.add_(packed.bias)

    def _float_linear(self, x: Tensor, packed: FloatLinear) -> Tensor:
        if packed.blocked:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed.weight, None, "none", [], "")
            return out
        return F.linear(x.to(packed.weight.dtype), packed.weight).float()

    def _int8_linear(self, x: Tensor, packed: Int8Linear) -> Tensor:
        y = x.new_zeros(x.shape[0], packed.weight.shape[1])
        for at in range(0, x.shape[1], SCALE_GROUP):
            part = x[:, at : at + SCALE_GROUP]
            scale = part.abs().amax(dim=1, keepdim=True).div_(127.0).clamp_min_(1e-30)
            q = torch.round(part / scale).to(torch.int8)
            y += self._int8_product(q, packed.weight[at : at + SCALE_GROUP]).mul_(scale)
        return y.mul_(packed.scale)

    def _int8_product(self, q: Tensor, weight: Tensor) -> Tensor:
        """Exact product ``[rows, in] x [in, out]`` of a group of inputs, as float32."""
        rows = q.shape[0]
        if self.device.type == "cuda":  # the CUDA kernel wants more than 16 rows
            q = F.pad(q, (0, 0, 0, max(0, 32 - rows)))
            return torch._int_mm(q, weight)[:rows].float()
        if _int8_is_exact():
            return torch._int_mm(q, weight).float()
        return q.float() @ weight.float()  # sums of a group's products are exact, in any order

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(ids, table).float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dim() == 1:
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        return F.rms_norm(x, (x.shape[-1],), None, eps) * weight

    def gated_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self._elementwise(ACTIVATIONS[activation], gate).mul_(up)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return self._elementwise(torch.tanh, x / cap).mul_(cap)

    def _elementwise(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if not self.deterministic:
            return function(x)
        flat = x.reshape(-1)
        count = flat.numel()
        if count % LANES:
            flat = F.pad(flat, (0, LANES - count % LANES))
        if count <= PIECE:
            done = function(flat)
        else:
            done = torch.cat([function(piece) for piece in flat.split(PIECE)])
        return done[:count].view(x.shape)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = cos.shape[-1]
        turned = x if width == x.shape[-1] else x[..., :width]
        first, second = turned.chunk(2, dim=-1)
        swapped = torch.cat((second, first), dim=-1)
        out = (turned * cos).add_(swapped.mul_(sin))
        return out if turned is x else torch.cat((out, x[..., width:]), dim=-1)

    # --- attention -----------------------------------------------------------------------------

    def attention(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        config: ModelConfig,
        batch: AttentionBatch,
    ) -> Tensor:
        keys, values = batch.cache[layer, 0], batch.cache[layer, 1]
        count = batch.write_slots.shape[0]
        keys.index_copy_(0, batch.write_slots, k[:count].to(keys.dtype))
        values.index_copy_(0, batch.write_slots, v[:count].to(values.dtype))
        sliding = config.is_sliding(layer)
        out = q.new_zeros(q.shape)
        for group in batch.groups:
            self._attend(out, q, keys, values, group, sliding, config)
        return out.view(q.shape[0], -1)

    def _attend(
        self,
        out: Tensor,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        group: AttentionGroup,
        sliding: bool,
        config: ModelConfig,
    ) -> None:
        lanes = group.slots.shape[1]
        kv_heads, head_dim = keys.shape[1:]
        mask = group.sliding_mask if sliding else group.mask
        assert mask is not None
        step = max(1, GATHER_ELEMENTS // (lanes * kv_heads * head_dim))
        for at in range(0, group.rows.shape[0], step):
            rows, slots = group.rows[at : at + step], group.slots[at : at + step]
            count = rows.shape[0]
            flat = slots.reshape(-1)
            shape = (count, lanes, kv_heads, head_dim)
            key = keys.index_select(0, flat).view(shape).transpose(1, 2)
            value = values.index_select(0, flat).view(shape).transpose(1, 2)
            # The query heads that share a KV head are the query rows of one attention problem.
            query = q.index_select(0, rows).view(count, kv_heads, -1, head_dim)
            seen = self._one_call(query, key.float(), value.float(), mask[at : at + step], config)
            out.index_copy_(0, rows, seen.reshape(count, -1, head_dim))

    def _one_call(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, config: ModelConfig
    ) -> Tensor:
        if not config.attention_softcap:
            return self._problems(query, key, value, mask, config.scale)
        # Capped scores go in as the additive mask of a call whose own scores are all zero. The dot
        # products sum over one row's last dimension: [r, kv, group, 1, d] * [r, kv, 1, lanes, d]
        scores = (query.unsqueeze(3) * key.unsqueeze(2)).sum(-1).mul_(config.scale)
        capped = self.softcap(scores, config.attention_softcap) + mask
        return self._problems(torch.zeros_like(query), key, value, capped, 1.0)

    def _problems(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        """Attention of ``[rows, kv_heads, ...]``, each row and KV head a problem of its own.

        The library gives each of its threads some of the problems, and one thread computes one by
        itself. With a single problem there are no such threads: then the matrix products inside
        are split among them, which changes bits. So a single problem is computed twice.
        """
        count = query.shape[0]
        if self.deterministic and count * query.shape[1] == 1:
            query, key, value, mask = (x.expand(2, -1, -1, -1) for x in (query, key, value, mask))
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        return seen[:count]


@cache
def _int8_is_exact() -> bool:
    """Whether the library's int8 product is: without VNNI it may saturate at 16 bits."""
    q = torch.full((1, 64), 127, dtype=torch.int8)
    exact = int(torch._int_mm(q, q.repeat(64, 1).t())[0, 0]) == 64 * 127 * 127
    if not exact:
        log.warning(
            "this CPU's int8 product saturates: int8 is computed exactly in float32, slowly"
        )
    return exact


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": F.gelu,
    "relu2": _relu2,
}


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())
