"""DFlash's head with gradients: blocks of tokens by one pass. Knows no data and no loss.

What it computes is the decoder's that drafts (:mod:`paceline.proposers.heads.dflash`), on another
backend. The block of row ``j`` of a text begins with the token that this row reads, ``j + 1``, and
goes on with mask tokens; it sees the target's features of positions 0 to ``j``, and no other block.
The ``k``-th of its masks, from 0, predicts what the ``k``-th row after ``j`` does.

Source: Chen et al., DFlash, arXiv 2602.06036. The tensors have the names of the speculators format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F

from paceline.backends.rows.rows import Rows
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.weights import Ends
from paceline.training.heads.batches import Batch, Grid
from paceline.training.ops import TrainingOps

Tensor = torch.Tensor
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
        self, batch: Batch, num_steps: int, chosen: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """As :class:`~paceline.training.heads.losses.Head` has it: a block for each of the rows."""
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
