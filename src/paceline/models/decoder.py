"""One decoder for the Llama family tree. Families differ only in :class:`ModelConfig`'s flags.

The decoder maps rows to logits. It does not know requests, spans, sampling, or the device: all
arithmetic is the backend's (:mod:`paceline.models.ops`), all bookkeeping is the caller's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.entry import read_entry
from paceline.models.mixture import mixed
from paceline.models.ops.base import Ops, RowOps, Tensor
from paceline.models.pages import give_back_freed
from paceline.models.rope import RotaryTable
from paceline.models.taps import NO_TAPS, Taps
from paceline.models.weights import Ends, Layer, WeightReader


class Decoder:
    """Rows in, hidden rows out, and the head that turns hidden rows into logits.

    Args:
        config: the family's flags and sizes.
        tensors: weights under their Hugging Face names, or packed ones
            (:mod:`paceline.models.packed_folder`).
        ops: the device backend, which also decides the arithmetic's precision.
        max_len: positions that there can be; fixes length-dependent rotary scaling.
        lent: another decoder's embedding and head, of the same backend, which stand in for those
            that ``tensors`` has not. They are shared, not copied.

    Attributes:
        entry: how rows take hidden states in; None where they are tokens alone.
        pruned_head: which token each column of the logits is; None where column i is token i.

    Raises:
        ModelLoadError: a tensor is missing or has another shape than the configuration says.
        UnsupportedModelError: a tensor is of a type that is no weight, or has no use.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        ops: Ops,
        max_len: int,
        lent: Ends | None = None,
    ) -> None:
        self.config = config
        self.ops = ops
        self.max_len = max_len
        reader = WeightReader(tensors, config, ops)
        self.embedding, self.head = reader.ends_or_lent(lent) if lent else reader.ends()
        self.pruned_head = reader.pruned_head()
        self.entry = read_entry(reader, config)
        self.layers = [reader.layer(i) for i in range(config.num_layers)]
        last_norm = "model.norm.weight"
        self.norm = reader.norm(last_norm, config.hidden_size) if config.last_norm else None
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

    @property
    def ends(self) -> Ends:
        return Ends(self.embedding, self.head, self.config)

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
        self,
        input_ids: Tensor,
        positions: Tensor,
        batch: Any,
        taps: Taps = NO_TAPS,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Run the layers, on a backend that computes on rows.

        Args:
            input_ids, positions: ``[rows]`` int64, padded to a multiple of ``ops.row_multiple``.
            batch: the backend's own attention metadata for these rows.
            taps: get the residual streams that they ask for.
            inputs: ``[rows, hidden_size]`` float32 of the rows of a decoder that has an entry.

        Returns:
            ``[rows, hidden_size]`` float32, after the final norm.
        """
        c, ops = self.config, self._rows
        x, joined = self._enter(input_ids, inputs)
        tables = self._angles(positions)
        for index, layer in enumerate(self.layers):
            taps.take(index, x)
            read = self._normed(x, layer.input_norm) if index or joined is None else joined
            q, k, v = self._heads(layer, read, *tables[c.is_sliding(index)])
            x = self._attended(layer, x, ops.attention(index, q, k, v, c, batch))
            x = self._fed_forward(layer, x)
        taps.take(len(self.layers), x)
        x = self._normed(x, self.norm)
        taps.take(len(self.layers) + 1, x)
        return x

    def write_kv(self, positions: Tensor, inputs: Tensor, batch: Any) -> None:
        """Write the KV of rows ``[rows, hidden_size]`` that every layer reads unchanged."""
        tables = self._angles(positions)
        for index, layer in enumerate(self.layers):
            _, k, v = self._heads(layer, inputs, *tables[self.config.is_sliding(index)])
            self._rows.write_kv(index, k, v, batch)

    def _angles(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cosines and sines of the positions, of full layers and of sliding ones."""
        self.reach(self.max_len)  # all: asking a GPU for the last position would make it wait
        full, *local = [
            (table.cos[positions].unsqueeze(1), table.sin[positions].unsqueeze(1))
            for table in (self.rope, self.local_rope)[: 2 if self.config.local_rope else 1]
        ]
        return [full, *(local or [full])]

    def _enter(self, input_ids: Tensor, inputs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The residual stream that enters layer 0, and what it reads instead of its norm."""
        c, ops, entry = self.config, self._rows, self.entry
        x = ops.embedding(input_ids, self.embedding)
        if c.embedding_multiplier != 1.0:
            x = x * c.embedding_multiplier
        assert (entry is None) == (inputs is None), "inputs are for decoders that have an entry"
        if entry is None or inputs is None:
            return x, None
        normed = self._normed(inputs, entry.input_norm)
        joined = torch.cat((self._normed(x, entry.token_norm), normed), dim=1)
        if entry.join is not None:
            return ops.linear(joined, entry.join), None
        return normed if c.norm_before_residual else inputs, joined

    def _normed(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else self._rows.rms_norm(x, norm, self.config.norm_eps)

    def _heads(
        self, layer: Layer, read: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A layer's queries, keys and values ``[rows, heads, head_dim]``."""
        c, ops = self.config, self._rows
        qkv = ops.linear(read, layer.qkv)
        heads = qkv.view(len(read), -1, c.head_dim)  # queries, then keys, then values
        turned = c.num_heads + c.num_kv_heads
        qk, v = heads[:, :turned], heads[:, turned:]
        if layer.qk_norm is not None:
            qk = self._normed_heads(qk, layer.qk_norm)
        qk = ops.rotary(qk, cos, sin)
        return qk[:, : c.num_heads], qk[:, c.num_heads :], v

    def _normed_heads(self, qk: Tensor, norm: Tensor) -> Tensor:
        """Queries and keys ``[rows, heads + kv_heads, head_dim]`` after their norms."""
        c, ops = self.config, self._rows
        if not c.qk_norm_whole:
            return ops.rms_norm(qk, norm, c.norm_eps)
        sizes = (c.num_heads, c.num_kv_heads)
        normed = [
            ops.rms_norm(heads.flatten(1), weight.flatten(), c.norm_eps)
            for heads, weight in zip(qk.split(sizes, dim=1), norm.split(sizes), strict=True)
        ]
        return torch.cat(normed, dim=1).view(qk.shape)

    def _attended(self, layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
        """The residual stream after a layer's attention, with ``attended`` of its heads."""
        c, ops = self.config, self._rows
        attended = ops.linear(attended, layer.o)
        if layer.post_attention_norm is not None:
            attended = ops.rms_norm(attended, layer.post_attention_norm, c.norm_eps)
        return x + self._scaled(attended)

    def _fed_forward(self, layer: Layer, x: Tensor) -> Tensor:
        """The residual stream after a layer's feed-forward."""
        c, ops = self.config, self._rows
        read = ops.rms_norm(x, layer.mlp_norm, c.norm_eps)
        if layer.mixture is not None:
            assert c.experts is not None
            mlp = mixed(layer.mixture, read, c.experts, c.activation, ops)
        else:
            mlp = ops.gated_activation(ops.linear(read, layer.gate_up), c.activation)
            mlp = ops.linear(mlp, layer.down)
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
