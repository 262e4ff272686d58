"""One decoder for the Llama family tree. Families differ only in :class:`ModelConfig`'s flags.

The decoder maps rows to logits. It does not know requests, spans, sampling, or the device: all
arithmetic is the backend's (:mod:`paceline.models.ops`), all bookkeeping is the caller's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.ops.base import Ops, RowOps, Tensor
from paceline.models.pages import give_back_freed
from paceline.models.rope import RotaryTable
from paceline.models.taps import NO_TAPS, Taps
from paceline.models.weights import Layer, WeightReader


class Decoder:
    """Rows in, hidden rows out, and the head that turns hidden rows into logits.

    Args:
        config: the family's flags and sizes.
        tensors: weights under their Hugging Face names, or packed ones
            (:mod:`paceline.models.packed_folder`).
        ops: the device backend, which also decides the arithmetic's precision.
        max_len: positions that there can be; fixes length-dependent rotary scaling.

    Attributes:
        pruned_head: which token each column of the logits is; None where column i is token i.

    Raises:
        ModelLoadError: a tensor is missing or has another shape than the configuration says.
        UnsupportedModelError: a tensor is of a type that is no weight, or has no use.
    """

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], ops: Ops, max_len: int
    ) -> None:
        self.config = config
        self.ops = ops
        self.max_len = max_len
        reader = WeightReader(tensors, config, ops)
        self.embedding, self.head = reader.ends()
        self.pruned_head = reader.pruned_head()
        self.layers = [reader.layer(i) for i in range(config.num_layers)]
        self.norm = reader.norm("model.norm.weight", config.hidden_size)
        reader.check_all_used()
        reader.log_rounding()
        give_back_freed()
        self.rope = self._table(config.rope)
        self.local_rope = self._table(config.local_rope) if config.local_rope else self.rope

    def with_layers(self, layers: Sequence[Layer], ops: Ops) -> Decoder:
        """A decoder of other layers, at most as many, between the same embedding and head.

        Nothing is copied: it shares these, the norm and the rotary tables.

        Args:
            ops: the backend that packed ``layers``, of this one's kind.
        """
        other = copy.copy(self)
        other.config = self.config.first_layers(len(layers))
        other.layers, other.ops = list(layers), ops
        return other

    def _table(self, rope: RopeConfig) -> RotaryTable:
        return RotaryTable(rope, self.config.head_dim, self.max_len, self.ops.device)

    def reach(self, length: int) -> None:
        """Be ready for positions below ``length``; those of earlier calls stay."""
        self.rope.reach(length)
        self.local_rope.reach(length)

    @property
    def _rows(self) -> RowOps:
        return cast(RowOps, self.ops)

    def hidden(
        self, input_ids: Tensor, positions: Tensor, batch: Any, taps: Taps = NO_TAPS
    ) -> Tensor:
        """Run the layers, on a backend that computes on rows.

        Args:
            input_ids, positions: ``[rows]`` int64, padded to a multiple of ``ops.row_multiple``.
            batch: the backend's own attention metadata for these rows.
            taps: get the residual streams that they ask for.

        Returns:
            ``[rows, hidden_size]`` float32, after the final norm.
        """
        c, ops = self.config, self._rows
        x = ops.embedding(input_ids, self.embedding)
        if c.embedding_multiplier != 1.0:
            x = x * c.embedding_multiplier
        self.reach(self.max_len)  # all: asking a GPU for the last position would make it wait
        tables = [
            (table.cos[positions].unsqueeze(1), table.sin[positions].unsqueeze(1))
            for table in (self.rope, self.local_rope)[: 2 if c.local_rope else 1]
        ]
        for index, layer in enumerate(self.layers):
            cos, sin = tables[-1] if c.local_rope and c.is_sliding(index) else tables[0]
            taps.take(index, x)
            x = self._block(index, layer, x, cos, sin, batch)
        taps.take(len(self.layers), x)
        return ops.rms_norm(x, self.norm, c.norm_eps)

    def _block(
        self, index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, batch: Any
    ) -> Tensor:
        c, ops = self.config, self._rows
        rows = x.shape[0]
        qkv = ops.linear(ops.rms_norm(x, layer.input_norm, c.norm_eps), layer.qkv)
        heads = qkv.view(rows, -1, c.head_dim)  # queries, then keys, then values
        turned = c.num_heads + c.num_kv_heads
        qk, v = heads[:, :turned], heads[:, turned:]
        if layer.qk_norm is not None:
            qk = ops.rms_norm(qk, layer.qk_norm, c.norm_eps)
        qk = ops.rotary(qk, cos, sin)
        q, k = qk[:, : c.num_heads], qk[:, c.num_heads :]
        attended = ops.linear(ops.attention(index, q, k, v, c, batch), layer.o)
        if layer.post_attention_norm is not None:
            attended = ops.rms_norm(attended, layer.post_attention_norm, c.norm_eps)
        x = x + self._scaled(attended)
        gate_up = ops.linear(ops.rms_norm(x, layer.mlp_norm, c.norm_eps), layer.gate_up)
        mlp = ops.linear(ops.gated_activation(gate_up, c.activation), layer.down)
        if layer.post_mlp_norm is not None:
            mlp = ops.rms_norm(mlp, layer.post_mlp_norm, c.norm_eps)
        return x + self._scaled(mlp)

    def _scaled(self, branch: Tensor) -> Tensor:
        m = self.config.residual_multiplier
        return branch if m == 1.0 else branch * m

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden_size]`` (padded like the batch) to ``[rows, num_logits]`` float32."""
        c = self.config
        logits = self._rows.linear(hidden, self.head)
        if c.logits_divisor != 1.0:
            logits = logits / c.logits_divisor
        return self._rows.softcap(logits, c.logits_softcap) if c.logits_softcap else logits
