"""Reference ops in torch: readable, run anywhere, and bitwise reproducible on the CPU.

With ``deterministic=True`` a row's result never depends on the other rows of the forward:

* float linears run in tiles of 16 rows (the batch is padded), so no kernel is chosen by row count;
* linears of blocks sum the integer products of 16 or 32 inputs exactly and add such groups in
  ascending order: the specification of the native kernels, which differ by the rounding of fused
  multiply-adds;
* vectorised transcendental functions get flat pieces that are multiples of the vector width and
  too small to be split over threads, so that no element is ever computed by a scalar tail;
* attention is one call per class of key counts, in which each row is its own batch entry: its
  shape follows from the row's own position, and absent lanes read a slot that is always zero.
  No call holds a single problem, which alone the library would share out among its threads.

Everything else is sums over one row's last dimension, or correctly rounded arithmetic.
A forward (:class:`RowForward`) brings what it reads to the device and what it makes back. Knows
nothing of sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F

from paceline.backends.rows.row_batch import Batch, adapted_rows, build_batch
from paceline.backends.rows.row_ops import (
    AddedLayers,
    AddedPart,
    AttentionBatch,
    AttentionGroup,
    Tensor,
)
from paceline.backends.rows.rows import Rows
from paceline.backends.rows.tensor_memory import TensorKV, TensorStates, recurrent_batch
from paceline.backends.rows.tensor_memory import decode as decode_kv
from paceline.backends.rows.tensor_memory import encode as encode_kv
from paceline.config import REFERENCE_DTYPES
from paceline.core.errors import ConfigError
from paceline.models.backend import AdaptedLayers, LowRank, Rounding, StateSpan, Taps, WeightPart
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.threads import num_threads
from paceline.request.span import Span
from paceline.tensors import arrays
from paceline.tensors.arrays import FLOAT8_E4M3, STORED_FLOATS, Array, Floats, floats
from paceline.tensors.quantised_blocks import F8_BYTES, Decoded, decode, quantise_q8_0
from paceline.tensors.torch_arrays import to_torch

BLOCK_DTYPES = ("file", "int8")
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROW_TILE = 16
STRETCH = 32  # inputs that share an activation scale
PIECE = 16384  # elements; below the size at which torch splits an element-wise op over threads
LANES = 32  # elements per iteration of torch's widest element-wise loop
GATHER_ELEMENTS = 1 << 22  # upper bound on keys gathered by one attention call


@dataclass(frozen=True, slots=True)
class BlockLinear:
    """Integers ``codes`` int8 ``[groups, inputs of a group, out]`` with float32 ``scales`` and, in
    some formats, ``minima`` ``[groups, out]``; inputs are quantised with a scale per
    :data:`STRETCH`.
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None


@dataclass(frozen=True, slots=True)
class FloatLinear:
    """``weight`` is ``[out, in]``, in oneDNN's blocked layout when ``blocked``."""

    weight: Tensor
    blocked: bool


@dataclass(frozen=True, slots=True)
class StackedLinear:
    """Linears of the same inputs, one after another.

    ``orders`` says of each part which input each of its columns is of, int64 ``[k]``; None where
    they are in their order.
    """

    parts: Sequence[FloatLinear | BlockLinear]
    orders: Sequence[Tensor | None]
    bias: Tensor | None


class ReferenceOps:
    """See the module's docstring. ``dtype`` is one of :data:`REFERENCE_DTYPES`."""

    name = "reference"

    def __init__(
        self, dtype: str = "float32", device: str = "cpu", deterministic: bool | None = None
    ) -> None:
        if dtype not in REFERENCE_DTYPES:
            raise ConfigError(f"dtype is {dtype!r}; allowed: {', '.join(REFERENCE_DTYPES)}")
        torch.set_num_threads(num_threads())
        self.device, self._device = device, torch.device(device)
        on_cpu = self._device.type == "cpu"
        self.dtype = dtype
        self.deterministic = on_cpu if deterministic is None else deterministic
        self.identity = self.deterministic and on_cpu
        self.default_kv_dtype = "float16" if dtype in ("bfloat16", "float16") else "float32"
        tiled = self.deterministic and dtype != "int8"
        self.row_multiple = ROW_TILE if tiled else 1
        self._blocked = self.identity and torch.backends.mkldnn.is_available()

    # --- weights -------------------------------------------------------------------------------

    join = staticmethod(np.concatenate)

    def pack_linear(self, parts: Sequence[WeightPart], k: int, bias: Array | None) -> StackedLinear:
        packed = [self._packed(part, k) for part in parts]
        orders = [None if p.order is None else self._put(p.order).long() for p in parts]
        return StackedLinear(packed, orders, None if bias is None else self.pack_vector(bias))

    def _packed(self, part: WeightPart, k: int) -> FloatLinear | BlockLinear:
        floats = self._floats(part, k)
        if floats is None:
            return self._blocks(self._decoded(part))
        w = floats.to(self._device).contiguous()
        blocked = self._blocked and w.dtype == torch.float32
        if blocked:
            w = torch.ops.mkldnn._reorder_linear_weight(w, ROW_TILE)
        return FloatLinear(w, blocked)

    def _floats(self, part: WeightPart, k: int) -> Tensor | None:
        """``[n, k]`` of weights that stay floats; None where they are blocks or become them."""
        rows = part.read(0, part.num_outputs)
        if part.format in STORED_FLOATS:
            stored = np.ascontiguousarray(rows).view(STORED_FLOATS[part.format])
            return to_torch(arrays.floats(stored))
        if part.format == "F8_128":
            units = rows.reshape(len(rows), -1, F8_BYTES)
            values = arrays.as_bytes(units[..., 4:]).view(FLOAT8_E4M3).astype(np.float32)
            scaled = values * arrays.as_bytes(units[..., :4]).view(np.float32)
            return torch.from_numpy(scaled.reshape(len(rows), -1)[:, :k])
        return None if self.dtype in BLOCK_DTYPES else to_torch(rows).to(FLOATS[self.dtype])

    def _decoded(self, part: WeightPart) -> Decoded:
        """The part's integers and scales; floats as 8-bit blocks."""
        rows = part.read(0, part.num_outputs)
        if part.format is not None:
            return decode(part.format, rows)
        return decode("Q8_0", quantise_q8_0(arrays.floats(rows)))

    def _blocks(self, decoded: Decoded) -> BlockLinear:
        groups = decoded.scales.shape[1]
        codes = self._put(decoded.codes).to(torch.int8)
        by_group = codes.view(len(codes), groups, -1).permute(1, 2, 0).contiguous()
        return BlockLinear(
            by_group,
            self._put(decoded.scales).t().contiguous(),
            None if decoded.minima is None else self._put(decoded.minima).t().contiguous(),
        )

    def pack_vector(self, weight: Array) -> Tensor:
        return self._put(arrays.floats(weight)).contiguous()

    def _put(self, array: Array) -> Tensor:
        return to_torch(array).to(self._device)

    def pack_embedding(self, part: WeightPart, k: int) -> Tensor:
        table = self._floats(part, k)
        if table is None:
            table = torch.from_numpy(self._decoded(part).floats()[:, :k])
        if part.order is not None:
            order = to_torch(part.order).long()
            table = torch.empty_like(table).index_copy_(1, order, table)
        return table.to(self._device).contiguous()

    def pack_head(
        self, part: WeightPart, k: int, embedding: Tensor | None, bias: Array | None = None
    ) -> StackedLinear:
        return self.pack_linear([part], k, bias)

    def roundings(self) -> Sequence[Rounding]:
        return ()

    def kv_memory(self, config: ModelConfig, num_blocks: int, dtype: str) -> TensorKV:
        return TensorKV(config, num_blocks, dtype, self._device)

    def state_memory(
        self, config: ModelConfig, num_slots: int, num_lanes: int, num_nodes: int
    ) -> TensorStates:
        return TensorStates(config, num_slots, num_lanes, num_nodes, self._device)

    def forward(
        self, decoder: Decoder, memory: TensorKV, states: TensorStates | None = None
    ) -> RowForward:
        return RowForward(decoder, memory, states, self.row_multiple)

    @torch.inference_mode()
    def linear(self, x: Floats, packed: StackedLinear) -> Floats:
        rows = F.pad(self._put(x), (0, 0, 0, -len(x) % self.row_multiple))
        found: Floats = self.row_linear(rows, packed)[: len(x)].numpy(force=True)
        return found

    @torch.inference_mode()
    def embedded(self, token_ids: Sequence[int], packed: Tensor, multiplier: float) -> Floats:
        ids = torch.as_tensor(np.asarray(token_ids, np.int64), device=packed.device)
        found: Floats = (self.embedding(ids, packed) * multiplier).numpy(force=True)
        return found

    # --- rows ----------------------------------------------------------------------------------

    def row_linear(self, x: Tensor, packed: StackedLinear) -> Tensor:
        found = [
            self._part_linear(x if order is None else x.index_select(1, order), part)
            for part, order in zip(packed.parts, packed.orders, strict=True)
        ]
        y = found[0] if len(found) == 1 else torch.cat(found, dim=1)
        return y if packed.bias is None else y.add_(packed.bias)

    def _part_linear(self, x: Tensor, part: FloatLinear | BlockLinear) -> Tensor:
        if isinstance(part, BlockLinear):
            return self._block_linear(x, part)
        if not self.deterministic or len(x) == ROW_TILE:
            return self._float_linear(x, part)
        tiles = F.pad(x, (0, 0, 0, -len(x) % ROW_TILE)).split(ROW_TILE)
        return torch.cat([self._float_linear(tile, part) for tile in tiles])[: len(x)]

    def _float_linear(self, x: Tensor, packed: FloatLinear) -> Tensor:
        if packed.blocked:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed.weight, None, "none", [], "")
            return out
        return F.linear(x.to(packed.weight.dtype), packed.weight).float()

    def _block_linear(self, x: Tensor, packed: BlockLinear) -> Tensor:
        groups, inputs, outputs = packed.codes.shape
        rows = x.shape[0]
        x = F.pad(x, (0, groups * inputs - x.shape[1])).view(rows, -1, STRETCH)
        scale = x.abs().amax(dim=2, keepdim=True).div_(127.0).clamp_min_(1e-30)
        q = torch.round(x * (1.0 / scale)).view(rows, groups, inputs)
        y = x.new_zeros(rows, outputs)
        for group in range(groups):
            # Sums of so few products of integers of 8 bits are exact in float32, in any order.
            total = q[:, group] @ packed.codes[group].float()
            own = scale[:, group * inputs // STRETCH]
            y += total.mul_(own * packed.scales[group])
            if packed.minima is not None:
                y += packed.minima[group] * (own * q[:, group].sum(dim=1, keepdim=True))
        return y

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(ids, table).float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dim() == 1:
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        return F.rms_norm(x, (x.shape[-1],), None, eps) * weight

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def activation(self, x: Tensor, activation: str, learnt: Tensor | None) -> Tensor:
        return self.elementwise(activation_of(activation, learnt), x)

    def gated_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "clamped_swiglu":
            active = self.elementwise(_swish, gate.clamp(max=7.0))
            return active.mul_(up.clamp(-7.0, 7.0) + 1.0)
        return self.elementwise(ACTIVATIONS[activation], gate).mul_(up)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return self.elementwise(torch.tanh, x / cap).mul_(cap)

    def sigmoid(self, x: Tensor) -> Tensor:
        return self.elementwise(torch.sigmoid, x)

    def elementwise(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if not self.deterministic:
            return function(x)
        flat = x.reshape(-1).contiguous()  # of a column, reshape makes a view with gaps
        count = flat.numel()
        pieces = F.pad(flat, (0, -count % LANES)).split(PIECE)
        return torch.cat([function(piece) for piece in pieces])[:count].view(x.shape)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = cos.shape[-1]
        turned = x if width == x.shape[-1] else x[..., :width]
        first, second = turned.chunk(2, dim=-1)
        swapped = torch.cat((second, first), dim=-1)
        out = (turned * cos).add_(swapped.mul_(sin))
        return out if turned is x else torch.cat((out, x[..., width:]), dim=-1)

    # --- attention -----------------------------------------------------------------------------

    def write_kv(self, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        count = batch.write_slots.shape[0]
        for held, x in zip(batch.cache[layer], (k, v), strict=False):  # no values: they are keys
            held.index_copy_(0, batch.write_slots, encode_kv(x[:count], held.dtype))

    def attention(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        config: ModelConfig,
        batch: AttentionBatch,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if k is not None and v is not None:
            self.write_kv(layer, k, v, batch)
        keys, values = batch.cache[layer][0], batch.cache[layer][-1]
        sliding = config.attention.is_sliding(layer)
        out = q.new_zeros(q.shape)
        for group in batch.groups:
            self._attend(out, q, keys, values, group, sliding, config, sinks)
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
        sinks: Tensor | None,
    ) -> None:
        lanes = group.slots.shape[1]
        kv_heads, head_dim = keys.shape[1], q.shape[2]
        mask = group.sliding_mask if sliding else group.mask
        assert mask is not None
        step = max(1, GATHER_ELEMENTS // (lanes * kv_heads * head_dim))
        for at in range(0, group.rows.shape[0], step):
            rows, slots = group.rows[at : at + step], group.slots[at : at + step]
            count = rows.shape[0]
            flat = slots.reshape(-1)
            shape = (count, lanes, kv_heads, head_dim)
            key = decode_kv(keys.index_select(0, flat), head_dim).view(shape).transpose(1, 2)
            value = decode_kv(values.index_select(0, flat), head_dim).view(shape).transpose(1, 2)
            # The query heads that share a KV head are the query rows of one attention problem.
            query = q.index_select(0, rows).view(count, kv_heads, -1, head_dim)
            added = mask[at : at + step]
            if sinks is not None:
                key, value, added = _with_sinks(key, value, added, sinks)
            seen = self._one_call(query, key, value, added, config)
            out.index_copy_(0, rows, seen.reshape(count, -1, head_dim))

    def _one_call(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, config: ModelConfig
    ) -> Tensor:
        if not config.attention.softcap:
            return self._problems(query, key, value, mask, config.attention_scale)
        # Capped scores go in as the additive mask of a call whose own scores are all zero. The dot
        # products sum over one row's last dimension: [r, kv, group, 1, d] * [r, kv, 1, lanes, d]
        scores = (query.unsqueeze(3) * key.unsqueeze(2)).sum(-1).mul_(config.attention_scale)
        capped = self.softcap(scores, config.attention.softcap) + mask
        return self._problems(torch.zeros_like(query), key, value, capped, 1.0)

    def _problems(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        """Attention of ``[rows, kv_heads, ...]``, each row and KV head a problem of its own.

        The library gives each of its threads some of the problems, and one thread computes one by
        itself. With a single problem there are no such threads: then the matrix products inside
        are split among them, which changes bits. So a single problem is computed twice. So is the
        query of problems that have one: on some processors its products are other ones in a
        thread of the library than in ours.
        """
        count, queries = query.shape[0], query.shape[2]
        if self.deterministic and count * query.shape[1] == 1:
            query, key, value, mask = (x.expand(2, -1, -1, -1) for x in (query, key, value, mask))
        if self.deterministic and queries == 1:
            query = query.expand(-1, -1, 2, -1)
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        return seen[:count, :, :queries]


def _with_sinks(
    key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One more lane, whose key and value are zero and whose score is its head's own.

    Unseen lanes keep their number a multiple of 16: on some processors the products of others are
    different ones in a thread of the library than in ours.
    """
    count, kv_heads, lanes = key.shape[:3]
    shape = (count, kv_heads, len(sinks) // kv_heads)
    score = sinks.view(1, *shape[1:], 1).expand(*shape, 1)
    seen = torch.cat((mask.expand(*shape, lanes), score), dim=-1)
    seen = F.pad(seen, (0, 15), value=float("-inf"))
    return F.pad(key, (0, 0, 0, 16)), F.pad(value, (0, 0, 0, 16)), seen


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x * 1.702)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": F.gelu,
    "relu2": _relu2,
}


def activation_of(name: str, learnt: Tensor | None) -> Callable[[Tensor], Tensor]:
    """An activation by its name; ``learnt`` as :meth:`RowOps.activation` has it."""
    if learnt is None:
        return ACTIVATIONS[name]
    above, below, beta = learnt

    def xielu(x: Tensor) -> Tensor:
        positive, negative = x.clamp(min=0.0), x.clamp(max=0.0)
        bent = below * (negative.expm1() - negative)
        found: Tensor = above * positive * positive + bent + beta * x
        return found

    return xielu


class RowForward:
    """See :class:`~paceline.models.backend.Forward`."""

    grows_trees = False

    def __init__(
        self, decoder: Decoder, memory: TensorKV, states: TensorStates | None, row_multiple: int
    ) -> None:
        self._config, self._rows = decoder.config, Rows(decoder)
        self._memory, self._states, self._row_multiple = memory.layers, states, row_multiple
        self.chosen_experts: list[Array] = []

    experts_fetched = 0

    @property
    def experts_read(self) -> int:
        return sum(len(np.unique(ids)) for ids in self.chosen_experts)

    def pack(
        self,
        spans: Sequence[Span],
        block_tables: Sequence[Sequence[int]],
        states: Sequence[StateSpan] = (),
        adapters: Sequence[Any] = (),
    ) -> Batch:
        batch = build_batch(spans, block_tables, self._memory, self._row_multiple, self._config)
        if self._states is not None:
            batch.attention.recurrent = recurrent_batch(spans, states, self._states)
        if adapters:
            device = batch.input_ids.device
            found = adapted_rows(spans, adapters)
            batch.adapters = [(torch.tensor(rows, device=device), each) for rows, each in found]
        return batch

    def adapter(self, layers: AdaptedLayers) -> AddedLayers:
        return [
            {name: [self._added(each) for each in parts] for name, parts in layer.items()}
            for layer in layers
        ]

    def _added(self, part: LowRank) -> AddedPart:
        outputs = slice(part.first, part.first + len(part.up))
        pack = self._rows.ops.pack_linear
        down, up = (
            pack([WeightPart.stored(floats(each))], each.shape[1], None)
            for each in (part.down, part.up)
        )
        return AddedPart(outputs, down, up, part.scale)

    @torch.inference_mode()
    def logits(self, batch: Batch, taps: Taps, inputs: Floats | None) -> Floats:
        return _to_host(self._logits(batch, taps, inputs))

    @torch.inference_mode()
    def greedy(self, batch: Batch, taps: Taps, inputs: Floats | None) -> list[int]:
        logits = self._logits(batch, taps, inputs)
        if not len(logits):
            return []
        # Of equal ones torch may return any; a NaN counts as the largest.
        best = logits.amax(dim=1, keepdim=True)
        columns = torch.arange(logits.shape[1], device=logits.device)
        lowest = torch.where(logits == best, columns, logits.shape[1]).amin(dim=1)
        tokens: list[int] = torch.where(best[:, 0].isfinite(), lowest, -1).tolist()
        return tokens

    @torch.inference_mode()
    def write_kv(self, batch: Batch, inputs: Floats) -> None:
        self._rows.write_kv(batch.positions, self._padded(inputs, batch), batch.attention)

    def grow(self, *args: Any, **options: Any) -> NoReturn:
        raise NotImplementedError("trees grow in one call on the native kernels alone")

    def _logits(self, batch: Batch, taps: Taps, inputs: Floats | None) -> Tensor:
        read = None if inputs is None else self._padded(inputs, batch)
        hidden_states = dict[int, Tensor]()

        def take(layer: int, x: Tensor) -> None:
            if layer in taps.layers:
                hidden_states[layer] = x[: batch.num_rows]

        hidden = self._rows.hidden(
            batch.input_ids, batch.positions, batch.attention, read, take, batch.adapters
        )
        routed = [each.ids[: batch.num_rows] for each in self._rows.routed]
        self.chosen_experts = [ids.numpy(force=True) for ids in routed]
        for index, layer in enumerate(taps.layers):
            taps.features[:, index] = _to_host(hidden_states[layer])
        return self._of_sampled(hidden, batch)

    def _of_sampled(self, hidden: Tensor, batch: Batch) -> Tensor:
        count = len(batch.sample_rows)
        if count == 0:
            return hidden.new_empty(0, self._config.num_logits)
        if count == batch.num_rows:  # every row is wanted, and they are padded already
            return self._rows.logits(hidden)[:count]
        rows = torch.tensor(batch.sample_rows, device=hidden.device)
        padding = -count % self._row_multiple
        picked = F.pad(hidden.index_select(0, rows), (0, 0, 0, padding))
        return self._rows.logits(picked)[:count]

    def _padded(self, inputs: Floats, batch: Batch) -> Tensor:
        rows = np.zeros((len(batch.input_ids), inputs.shape[1]), np.float32)
        rows[: len(inputs)] = inputs
        return torch.from_numpy(rows).to(self._memory[0].device)


def _to_host(x: Tensor) -> Floats:
    array: Floats = x.float().numpy(force=True)
    return array
