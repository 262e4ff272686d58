"""Heads with gradients: EAGLE-3 and MTP, which draft token after token, and DFlash's blocks.

A chained head's row ``j`` of a text reads token ``j + 1`` and the target's features of position
``j``, and predicts token ``j + 2``. Its first step reads features of all rows. Every later step
continues chains: the chain of row ``j`` reads at step ``k``, from 0, the token ``j + k + 1`` and
the output of step ``k - 1``, and attends to the first step's rows up to ``j`` and to its own
earlier steps, which is what a draft's node sees when text is generated.

DFlash drafts a block of tokens by one pass. The block of row ``j`` begins with the token that this
row reads, ``j + 1``, and goes on with mask tokens; it sees the target's features of positions 0 to
``j``, and no other block. The ``k``-th of its masks, from 0, predicts what the ``k``-th row after
``j`` does.

What they compute is what drafts (:mod:`paceline.proposers.heads`), on another backend. The tensors
have the names of the speculators format. Knows no data and no loss.

Sources: Li et al., EAGLE-3, arXiv 2503.01840; DeepSeek-AI, DeepSeek-V3, arXiv 2412.19437, with one
layer for every depth: Cai et al., FastMTP, arXiv 2509.18362; Chen et al., DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F

from paceline.backends.rows.reference import ACTIVATIONS
from paceline.backends.rows.rows import Rows
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.rope import RotaryTable
from paceline.models.weights import Ends
from paceline_lab.train.heads.features import Grid, HeadBatch
from paceline_lab.train.ops import TrainingOps

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
        self, batch: HeadBatch, num_steps: int, continued: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """What :class:`~paceline_lab.train.heads.losses.TrainableHead` asks for.

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


EAGLE3_LAYER = "layers.0."
ATTENTION = EAGLE3_LAYER + "self_attn."


class Eagle3(ChainHead):
    """Its layer reads tokens beside what ``fc`` makes of features, which is its residual stream."""

    layer = EAGLE3_LAYER
    last_norm = "norm"
    norm_output = False

    def fused(self, features: Tensor) -> Tensor:
        return self._linear(features, "fc")

    def _enter(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self._norm(F.embedding(tokens, self.embedding), EAGLE3_LAYER + "input_layernorm")
        return x, torch.cat((embedded, self._norm(x, EAGLE3_LAYER + "hidden_norm")), dim=-1)


MTP_LAYER = "mtp_layers.0."


class Mtp(ChainHead):
    """A linear makes tokens and the target's output after its last norm the residual stream."""

    layer = MTP_LAYER
    last_norm = MTP_LAYER + "final_layernorm"
    norm_output = True

    def _enter(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self._norm(F.embedding(tokens, self.embedding), MTP_LAYER + "token_layernorm")
        joined = torch.cat((embedded, self._norm(x, MTP_LAYER + "hidden_layernorm")), dim=-1)
        stream = self._linear(joined, MTP_LAYER + "input_proj")
        return stream, self._norm(stream, MTP_LAYER + "input_layernorm")


FUSION, FUSED_NORM = "fc.weight", "hidden_norm.weight"
LAST_NORM = "norm.weight"


class Blocks:
    """Attention of blocks to their own rows and to features of their texts.

    Args:
        known: grid of the rows that features are of.
        grid: of the blocks.
        last: int64 ``[blocks]``, the position in its text of the last features that each sees.
        size: rows of a block; those of all blocks lie one after another.
    """

    def __init__(self, known: Grid, grid: Grid, last: Tensor, size: int) -> None:
        self._known, self._grid, self._size = known, grid, size
        self._rows = grid.spread(size)
        self._keys_values: list[tuple[Tensor, Tensor]] = []
        whole = last.new_zeros(grid.texts * grid.width).index_copy(0, grid.places, last)
        seen = torch.arange(known.width) <= whole[:, None]
        self._seen = seen.view(grid.texts, 1, 1, grid.width, 1, -1)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep a layer's keys and values of the features; layers come in order."""
        assert layer == len(self._keys_values)
        self._keys_values.append((self._known.pad(k), self._known.pad(v)))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, config: ModelConfig) -> Tensor:
        keys, values = self._keys_values[layer]  # [texts, kv, known, dim]
        kv, width = config.num_kv_heads, keys.shape[2]
        queries = self._by_block(q * config.attention_scale).unflatten(1, (kv, -1))
        own_keys, own_values = (self._by_block(x).unsqueeze(2) for x in (k, v))
        shape = queries.shape[:-1]  # [texts, kv, groups, blocks, size]
        scores = (queries.flatten(2, 4) @ keys.transpose(-1, -2)).view(*shape, width)
        scores = scores.masked_fill(~self._seen, -torch.inf)
        own = queries @ own_keys.transpose(-1, -2)  # [..., size, size]
        weights = torch.cat((scores, own), dim=-1).softmax(-1)
        of_known = weights[..., :width].flatten(2, 4) @ values
        out = of_known.view(*shape, -1) + weights[..., width:] @ own_values
        return self._rows.unpad(out.flatten(1, 2).flatten(2, 3))

    def _by_block(self, x: Tensor) -> Tensor:
        """``[rows, heads, dim]`` to ``[texts, heads, blocks, size, dim]``."""
        padded = self._rows.pad(x)
        return padded.view(*padded.shape[:2], self._grid.width, self._size, -1)


class DFlash:
    """The head over ``params``.

    Args:
        config: of its layers; the vocabulary is the target's.
        params: ``fc``, ``hidden_norm``, the layers and ``norm``, under their names in the
            checkpoint; others are left out.
        embedding: the target's, ``[vocab_size, hidden_size]``.
        max_len: positions that there can be.
        size: rows of a block.
        mask_token: what all of them but the first read.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Mapping[str, Tensor],
        embedding: Tensor,
        ops: TrainingOps,
        max_len: int,
        size: int,
        mask_token: int,
    ) -> None:
        self._params, self._ops, self._eps = params, ops, config.norms.eps
        self._size, self._mask_token = size, mask_token
        own = {n: p for n, p in params.items() if n.startswith("layers.") or n == LAST_NORM}
        tensors = {f"model.{name}": p for name, p in own.items()}
        lent = Ends(embedding, None, config)
        self._decoder = Rows(Decoder(config, tensors, cast(Any, ops), max_len, lent))

    def steps(
        self, batch: HeadBatch, num_steps: int, chosen: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """See :class:`~paceline_lab.train.heads.losses.TrainableHead`; a block for each row."""
        places, size = batch.wanted[chosen], self._size
        last = batch.positions[places]
        blocks = Blocks(batch.grid, batch.part(chosen), last, size)
        self._decoder.write_kv(batch.positions, self._fused(batch.features), blocks)
        tokens = torch.full((len(chosen), size), self._mask_token)
        tokens[:, 0] = batch.tokens[places]
        positions = last[:, None] + 1 + torch.arange(size)
        x = self._decoder.hidden(tokens.flatten(), positions.flatten(), blocks)
        x = x.view(len(chosen), size, -1)
        for step in range(min(num_steps, size - 1)):
            inside = batch.left[chosen] >= step
            yield chosen[inside] + step, x[inside, step + 1]

    def _fused(self, features: Tensor) -> Tensor:
        kind = self._ops.compute
        fused = F.linear(features.to(kind), self._params[FUSION].to(kind)).float()
        return self._ops.rms_norm(fused, self._params[FUSED_NORM], self._eps)
