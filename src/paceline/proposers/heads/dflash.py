"""Drafts of a block of tokens by one pass of a head over the target's hidden states (DFlash).

The architecture, as the original repository (z-lab/dflash), vLLM and the speculators package (0.9,
``speculators.models.dflash``) have it:

* The target's hidden states of a few layers go through a linear (``fc``) and a norm
  (``hidden_norm``) to one vector per position. The original's ``target_layer_ids`` count the
  layers whose *output* is read, from 0 on; ``aux_hidden_state_layer_ids`` of the speculators layout
  counts as :mod:`paceline.models.taps` does.
* The layers are Qwen 3's. In every layer these vectors stand for the positions before the request's
  last token: its keys and values are made of them directly, at their own rotary positions, with no
  norm before the linear.
* The request's last token (the *anchor*), whose hidden states the target has yet to compute, and
  mask tokens after it are the *block*, of a fixed size. Each row sees all vectors before the block
  and the whole block; in layers with a sliding window it sees only the rows before it, unless the
  configuration says otherwise. The row of a mask predicts the token at its own position, the
  anchor's row none. With ``sample_from_anchor`` each row predicts the token that follows it.
* Embedding and head are the target's. A head of fewer tokens (``d2t``) comes with its own.

The head's KV holds the vectors' keys and values for a prefix of the request without its last token;
those of a block are never kept. How levels become a tree is the affair of
:mod:`paceline.proposers.base.parallel`.

Source: Chen et al., DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from paceline.planner.drafts import Prices
from paceline.proposers.base.estimates import Candidates, ranked
from paceline.proposers.base.growth import Growth
from paceline.proposers.base.parallel import ParallelDrafter, further_rows
from paceline.proposers.heads.checkpoint import Block
from paceline.proposers.heads.drafter import FeatureDrafter
from paceline.request.request import Request
from paceline.request.span import Span
from paceline.sampling.logit_edits import SamplingRow
from paceline.tensors.arrays import Floats


class DFlashProposer(ParallelDrafter, FeatureDrafter):
    """See the module's docstring.

    Args: those of :class:`~paceline.proposers.heads.drafter.FeatureDrafter`, and
        block: how the head was trained.
    """

    def __init__(self, *args: Any, block: Block) -> None:
        super().__init__(*args)
        self._block = block

    def _start(self, index: int, request: Request, nodes: int, depth: int) -> Growth | None:
        rows = self._block_rows(len(request.token_ids) - 1)
        return super()._start(index, request, nodes, min(depth, rows - self._block.first_row))

    def _block_rows(self, start: int) -> int:
        """Rows of a block that begins at a position: fewer than usual where the context ends."""
        return min(self._block.size, self.max_len - start)

    def _candidates(
        self, spans: Sequence[Span], rows: Sequence[SamplingRow]
    ) -> Iterable[Candidates]:
        logits = self._block_logits(spans)
        levels = [
            level
            for row in rows
            for level in further_rows(row, self._block.mask_token, self._num_levels(row))
        ]
        return ranked(logits, levels, self.config, self._runner.decoder.pruned_head)

    def _num_levels(self, row: SamplingRow) -> int:
        """Rows of its request's block that have logits."""
        return self._depths[row.request.request_id]

    def _block_logits(self, spans: Sequence[Span]) -> Floats:
        """Of the blocks that begin with the last tokens of the spans that are sampled."""
        known, blocks = list[Span](), list[Span]()
        for span in spans:
            tokens = span.token_ids
            if span.sample_rows:
                block, tokens = self._block_of(span), tokens[:-1]
                blocks += [block] if block.sample_rows else []
            if tokens:
                known.append(Span.chunk(span.request_id, span.start, tokens, sample=False))
        if known:
            features = np.concatenate([self._features_of(span) for span in known])
            self._runner.write_kv(self._runner.pack(known), features)
        if not blocks:
            return np.empty((0, self._runner.decoder.config.num_logits), np.float32)
        return self._runner.forward(self._runner.pack(blocks)).logits

    def _block_of(self, span: Span) -> Span:
        """The block that begins with a span's last token; no samples where there is no room."""
        request_id, known = span.request_id, len(span.token_ids) - 1
        start, first = span.start + known, self._block.first_row
        size = self._block_rows(start)
        if not self._kv.reserve(request_id, size - 1):
            self._depths[request_id] = 0
        tokens = [span.token_ids[-1], *[self._block.mask_token] * (size - 1)]
        samples = range(first, first + self._depths[request_id])
        return Span(request_id, start, tokens, range(-1, size - 1), samples)

    def _add_levels(
        self, growths: list[Growth], candidates: Iterable[Candidates], prices: Prices
    ) -> None:
        super()._add_levels(growths, candidates, prices)
        for growth in growths:
            self._forget_block(growth)

    def _forget_block(self, growth: Growth) -> None:
        """What was read last is the block's, and will be read as a position by itself."""
        self.rewind(growth.request, self.num_held(growth.request) - 1)
