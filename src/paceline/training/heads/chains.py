"""Heads of one layer that draft token after token, with gradients: what their kinds share.

A head's row ``j`` of a text reads token ``j + 1`` and the target's features of position ``j``, and
predicts token ``j + 2``. Its first step reads features of all rows. Every later step continues
chains: the chain of row ``j`` reads at step ``k``, from 0, the token ``j + k + 1`` and the output
of step ``k - 1``, and attends to the first step's rows up to ``j`` and to its own earlier steps,
which is what a draft's node sees when text is generated. Knows no data, no loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F

from paceline.backends.rows.reference import ACTIVATIONS
from paceline.models.config import ModelConfig
from paceline.models.rope import RotaryTable
from paceline.training.heads.batches import Batch, Grid
from paceline.training.ops import TrainingOps

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Chains:
    """Rows that continue, and what their steps have left for the next ones.

    Attributes:
        grid: of these rows.
        positions: int64 ``[rows]``, in their texts, of the first step.
        keys, values: of the first step of all rows of the texts, ``[texts, kv_heads, width, dim]``.
        own_keys, own_values: of the later steps, ``[texts, kv_heads, width, dim]`` each.
    """

    grid: Grid
    positions: Tensor
    keys: Tensor
    values: Tensor
    own_keys: list[Tensor] = field(default_factory=list)
    own_values: list[Tensor] = field(default_factory=list)

    @property
    def seen(self) -> Tensor:
        """Bool ``[texts, 1, width, keys]``: which rows of the first step each row attends to."""
        last = self.positions.new_zeros(self.grid.texts * self.grid.width)
        last = last.index_copy(0, self.grid.places, self.positions)
        columns = torch.arange(self.keys.shape[2])
        return (columns <= last[:, None]).view(self.grid.texts, 1, self.grid.width, -1)

    def of(self, grid: Grid, positions: Tensor) -> Chains:
        """The chains of other rows of the same texts, before their second step."""
        return Chains(grid, positions, self.keys, self.values)


class ChainHead(ABC):
    """A head over ``params``, for one forward and backward.

    Args:
        config: of its layer; the vocabulary is the target's.
        params: under their names in the checkpoint; others are left out.
        embedding: the target's, ``[vocab_size, hidden_size]``.
        max_len: positions that there can be.

    Attributes:
        layer: what the names of its layer's tensors begin with.
        last_norm: the name of the norm before the output matrix.
        norm_output: later steps read what the one before put out after that norm.
    """

    layer: ClassVar[str]
    last_norm: ClassVar[str]
    norm_output: ClassVar[bool]

    def __init__(
        self,
        config: ModelConfig,
        params: Mapping[str, Tensor],
        embedding: Tensor,
        ops: TrainingOps,
        max_len: int,
    ) -> None:
        self.config, self.ops, self.embedding = config, ops, embedding
        self._params = params
        self._rope = RotaryTable(config.positions.rope, config.head_dim, max_len, ops)
        self._rope.reach(max_len)

    def fused(self, features: Tensor) -> Tensor:
        """Features ``[rows, taps * hidden_size]`` to what rows read, ``[rows, hidden_size]``."""
        return features

    @abstractmethod
    def _enter(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream of rows, and what queries, keys and values are made of."""

    def steps(
        self, batch: Batch, num_steps: int, continued: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """What :class:`~paceline.training.heads.losses.Head` asks for.

        The first step is of all wanted rows, and those that are ``continued`` go on. Step ``k`` of
        a chain predicts what the first step of the ``k``-th row after it does.
        """
        x, chains = self.first(
            batch.tokens,
            self.fused(batch.features),
            batch.positions,
            batch.grid,
            batch.wanted,
            batch.wanted_grid,
        )
        out = self._norm(x, self.last_norm)
        yield torch.arange(len(x)), out
        if not len(continued):
            return
        x, places = (out if self.norm_output else x)[continued], batch.wanted[continued]
        chains = chains.of(batch.part(continued), batch.positions[places])
        for step in range(1, num_steps):
            inside = batch.left[continued] >= step
            tokens = batch.tokens[(places + step).clamp_max(len(batch.tokens) - 1)]
            x = self.next(tokens, x, chains)
            out = self._norm(x, self.last_norm)
            yield continued[inside] + step, out[inside]
            x = out if self.norm_output else x

    def first(
        self,
        tokens: Tensor,
        x: Tensor,
        positions: Tensor,
        grid: Grid,
        kept: Tensor,
        kept_grid: Grid,
    ) -> tuple[Tensor, Chains]:
        """The first step.

        Args:
            tokens: int64 ``[rows]``.
            x: ``[rows, hidden_size]``, of :meth:`fused`.
            grid: of these rows.
            kept: which of them are wanted; the others are there to be attended to.
            kept_grid: of those.

        Returns:
            The output of the wanted rows, before the final norm, and their chains.
        """
        stream, read = self._enter(tokens, x)
        keys, values = self._keys(read, positions), self._heads(read, "v")
        chains = Chains(kept_grid, positions[kept], grid.pad(keys), grid.pad(values))
        return self._after(
            stream[kept], self._attend(self._queries(read[kept], positions[kept]), chains)
        ), chains

    def next(self, tokens: Tensor, x: Tensor, chains: Chains) -> Tensor:
        """A further step of all chains: of what they read to outputs before the final norm."""
        stream, read = self._enter(tokens, x)
        positions = chains.positions + len(chains.own_keys) + 1
        chains.own_keys.append(chains.grid.pad(self._keys(read, positions)))
        chains.own_values.append(chains.grid.pad(self._heads(read, "v")))
        return self._after(stream, self._attend(self._queries(read, positions), chains))

    def _heads(self, read: Tensor, name: str) -> Tensor:
        x = self._linear(read, f"{self.layer}self_attn.{name}_proj")
        x = x.view(len(x), -1, self.config.head_dim)
        if self.config.attention.qk_norm and name != "v":
            x = self._norm(x, f"{self.layer}self_attn.{name}_norm")
        return x

    def _queries(self, read: Tensor, positions: Tensor) -> Tensor:
        return self._turned(self._heads(read, "q"), positions)

    def _keys(self, read: Tensor, positions: Tensor) -> Tensor:
        return self._turned(self._heads(read, "k"), positions)

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = (table[positions].unsqueeze(1) for table in (self._rope.cos, self._rope.sin))
        return self.ops.rotary(x, cos, sin)

    def _attend(self, q: Tensor, chains: Chains) -> Tensor:
        """Attention of queries ``[rows, heads, head_dim]``: ``[rows, heads * head_dim]``."""
        grid, c = chains.grid, self.config
        groups = c.num_heads // c.num_kv_heads
        queries = grid.pad(q) * c.attention_scale
        grouped = queries.unflatten(1, (c.num_kv_heads, groups))  # [texts, kv, groups, width, dim]
        flat = grouped.flatten(2, 3)
        shape = (grid.texts, c.num_kv_heads, groups, grid.width, -1)
        scores = (flat @ chains.keys.transpose(-1, -2)).view(shape)
        scores = scores.masked_fill(~chains.seen.unsqueeze(1), -torch.inf)
        own = [(grouped * key.unsqueeze(2)).sum(-1, keepdim=True) for key in chains.own_keys]
        weights = torch.cat((scores, *own), dim=-1).softmax(-1)
        prefix = chains.keys.shape[2]
        out = (weights[..., :prefix].flatten(2, 3) @ chains.values).view(shape)
        for step, value in enumerate(chains.own_values):
            out = out + weights[..., prefix + step, None] * value.unsqueeze(2)
        return grid.unpad(out.flatten(1, 2))

    def _after(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self._linear(attended, self.layer + "self_attn.o_proj")
        read = self._norm(x, self.layer + "post_attention_layernorm")
        gate, up = (self._linear(read, f"{self.layer}mlp.{name}_proj") for name in ("gate", "up"))
        return x + self._linear(
            ACTIVATIONS[self.config.mlp.activation](gate) * up, self.layer + "mlp.down_proj"
        )

    def _linear(self, x: Tensor, name: str) -> Tensor:
        kind = self.ops.compute
        return F.linear(x.to(kind), self._params[name + ".weight"].to(kind)).float()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self.ops.rms_norm(x, self._params[name + ".weight"], self.config.norms.eps)
