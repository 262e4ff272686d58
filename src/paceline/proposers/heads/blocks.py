"""Drafts of several tokens by one pass of a head over the target's hidden states.

DFlash (Chen et al., arXiv 2602.06036) drafts a block of tokens. The architecture, as the original
repository (z-lab/dflash), vLLM and the speculators package (0.9, ``speculators.models.dflash``)
have it:

* The target's hidden states of a few layers go through a linear (``fc``) and a norm
  (``hidden_norm``) to one vector per position. The original's ``target_layer_ids`` count the
  layers whose *output* is read, from 0 on; ``aux_hidden_state_layer_ids`` of the speculators layout
  counts as :mod:`paceline.models.backend` does.
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

In a DSpark head a block's tokens depend on those drafted before them: it is a DFlash head with a
*Markov head*: to the logits of a row it adds a product of two matrices of low rank, whose factor
``markov_w1`` has a row for the token before the one that is predicted. So the candidates below a
node are those of its depth and its token, and a tree grows level by level, which takes that product
and no forward. Every row of the block predicts, unless the configuration says otherwise
(``sample_from_anchor``, or ``dspark_bonus_anchor`` of the original layout).

Of the Markov heads that the original repository (deepseek-ai/DeepSpec) and the speculators package
(0.9, ``speculators.models.dspark``) train, this is the one called ``vanilla``, the only one that
vLLM runs. The confidence head is not read: the planner calibrates estimates by what is accepted.

A P-EAGLE head (arXiv 2602.01469) is an EAGLE-3 head (:mod:`paceline.proposers.heads.proposer`), of
one layer or several, that was trained for masks: behind the known tokens, each with the target's
hidden states at the position before, come mask tokens, all with one trained vector
(``mask_hidden``) in place of hidden states, which goes through the same norms and ``fc``. A row
sees all rows before it. The configuration names the mask token ``mask_token_id`` in the speculators
layout, ``pard_token`` or ``ptd_token_id`` in the original one, as vLLM and the speculators package
(0.9, ``speculators.models.peagle``) have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from paceline.models.backend import Ops
from paceline.models.config import ModelConfig
from paceline.models.tensor_reader import TensorReader
from paceline.planner.drafts import FREE, Prices
from paceline.proposers.base.drafter import Drafter
from paceline.proposers.base.growth import Candidates, Growth, ranked
from paceline.proposers.base.parallel import MaskDrafter, ParallelDrafter, further_rows
from paceline.proposers.heads.checkpoint import MARKOV_AFTER, MARKOV_BEFORE, Block
from paceline.proposers.heads.proposer import FeatureDrafter
from paceline.request.request import Request
from paceline.request.span import Span
from paceline.sampling.logit_edits import SamplingRow
from paceline.tensors.arrays import Floats, floats


class DFlashProposer(ParallelDrafter, FeatureDrafter):
    """See the module's docstring.

    Args: those of :class:`~paceline.proposers.heads.proposer.FeatureDrafter`, and
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


class Markov:
    """What the token before adds to the logits of a token.

    Args:
        reader: of the two matrices.
        shape: of the head's layers.
        ops: computes the second factor.
        rank: of the product.

    Raises:
        ModelLoadError: a matrix is missing or of another shape.
    """

    def __init__(self, reader: TensorReader, shape: ModelConfig, ops: Ops, rank: int) -> None:
        before = reader.floats(f"{MARKOV_BEFORE}.weight", shape.vocab_size, rank)
        self._before: Floats = floats(before).copy()
        self._after = reader.linear([MARKOV_AFTER], MARKOV_AFTER, [shape.num_logits], rank, False)
        self._ops = ops

    def __call__(self, tokens: Sequence[int]) -> Floats:
        """``[len(tokens), columns of the logits]``, float32."""
        return self._ops.linear(self._before[list(tokens)], self._after)


class DSparkProposer(DFlashProposer):
    """See the module's docstring.

    Args: those of :class:`~paceline.proposers.heads.blocks.DFlashProposer`, and
        markov: the Markov head.
    """

    def __init__(self, *args: Any, markov: Markov, **more: Any) -> None:
        super().__init__(*args, **more)
        self._markov = markov
        self._logits: dict[int, Floats] = {}
        """By request, of the drafts that are being made: of its block, ``[levels, columns]``."""

    def _candidates(
        self, spans: Sequence[Span], rows: Sequence[SamplingRow]
    ) -> Iterable[Candidates]:
        if not any(span.num_cached for span in spans):  # what was read last, and no drafted node
            logits = self._block_logits(spans)
            counts = {row.request.request_id: self._num_levels(row) for row in rows}
            parts = np.split(logits, np.cumsum([*counts.values()], dtype=int))[:-1]
            self._logits = dict(zip(counts, parts, strict=True))
            rows = [row for row in rows if self._num_levels(row)]
        if not rows:
            return ()
        tokens = [(row.path or row.request.token_ids)[-1] for row in rows]
        levels = [self._logits[row.request.request_id][len(row.path)] for row in rows]
        logits = np.stack(levels) + self._markov(tokens)
        return ranked(logits, rows, self.config, self._runner.decoder.pruned_head)

    def _add_levels(
        self, growths: list[Growth], candidates: Iterable[Candidates], prices: Prices
    ) -> None:
        """Level by level; none takes a forward."""
        some = [growth for growth in growths if self._depths[growth.request.request_id]]
        Drafter._add_levels(self, some, candidates, FREE)
        self._logits = {}
        for growth in growths:
            self._forget_block(growth)
            growth.tree = growth.finished(self.name)

    def _reserve(self, growth: Growth, drafted: int) -> bool:
        return True  # nodes have no KV


class PEagleProposer(MaskDrafter, FeatureDrafter):
    """See the module's docstring.

    Args: those of :class:`~paceline.proposers.heads.proposer.FeatureDrafter`, and
        mask_input: what is read with a mask, fused, ``[1, hidden_size]``.
    """

    rows_behind = 1

    def __init__(self, *args: Any, mask_input: Floats) -> None:
        super().__init__(*args)
        mask_token = self._runner.decoder.config.mask_token_id
        assert mask_token is not None
        self._mask_token, self._mask_input = mask_token, mask_input

    def _candidates(
        self, spans: Sequence[Span], rows: Sequence[SamplingRow]
    ) -> Iterable[Candidates]:
        masked, levels = self._masked(spans, rows)
        inputs = list[Floats]()
        for known, span in zip(spans, masked, strict=True):
            masks = len(span.token_ids) - len(known.token_ids)
            inputs += [self._features_of(known), np.repeat(self._mask_input, masks, axis=0)]
        result = self._runner.forward(self._runner.pack(masked), inputs=np.concatenate(inputs))
        return ranked(result.logits, levels, self.config, self._runner.decoder.pruned_head)
