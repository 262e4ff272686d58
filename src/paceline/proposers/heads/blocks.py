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
*Markov head*, which adds to the logits of a row what the tokens before the one that is predicted
suggest. So the candidates below a node are those of its depth and its path, and a tree grows level
by level, which takes a product of low rank and no forward. Every row of the block predicts, unless
the configuration says otherwise (``sample_from_anchor``, or ``dspark_bonus_anchor`` of the original
layout).

DFlash 2 is a DFlash head whose layers have convolutions within the block
(:class:`~paceline.models.layer_sizes.LocalConv`), and whose *selector* stands where DSpark has a
Markov head: it chooses among the likeliest tokens of a row by the token before. All of a block is
seen in layers with a sliding window too, unless the configuration says otherwise.

Markov heads, the selector and the confidence head are described in
:mod:`paceline.proposers.heads.markov`. What the latter says of a node's likeliest child is that
child's estimate, before calibration. A head may have one of them alone.

A Domino head (SpecForge 0.2) is a DFlash head with a correction of its logits, which is described
there too, and drafts as a DSpark head does.

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
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.cache.model_runner import ForwardResult
from paceline.planner.drafts import FREE, Prices
from paceline.proposers.base import DraftBudget
from paceline.proposers.base.drafter import Drafter
from paceline.proposers.base.growth import Candidates, Growth, ranked
from paceline.proposers.base.parallel import MaskDrafter, ParallelDrafter, further_rows
from paceline.proposers.heads.checkpoint import Block
from paceline.proposers.heads.markov import Confidence, Correction
from paceline.proposers.heads.proposer import FeatureDrafter
from paceline.request.request import Request
from paceline.request.span import DraftTree, Span
from paceline.sampling.logit_edits import SamplingRow
from paceline.tensors.arrays import Floats


class DFlashProposer(ParallelDrafter, FeatureDrafter):
    """See the module's docstring.

    Args: those of :class:`~paceline.proposers.heads.proposer.FeatureDrafter`, and
        block: how the head was trained.
        confidence: the confidence head of a DSpark head; None for none.
    """

    def __init__(self, *args: Any, block: Block, confidence: Confidence | None = None) -> None:
        super().__init__(*args)
        self._block, self._confidence = block, confidence
        if confidence is not None:
            self._read_hidden()

    def _read_hidden(self) -> None:
        """Have forwards of blocks say what the head itself reads."""
        self._runner.taps = (self._runner.decoder.config.num_layers + 1,)

    def _start(self, index: int, request: Request, nodes: int, depth: int) -> Growth | None:
        rows = self._block_rows(len(request.token_ids) - 1)
        return super()._start(index, request, nodes, min(depth, rows - self._block.first_row))

    def _block_rows(self, start: int) -> int:
        """Rows of a block that begins at a position: fewer than usual where the context ends."""
        return min(self._block.size, self.max_len - start)

    def _candidates(
        self, spans: Sequence[Span], rows: Sequence[SamplingRow]
    ) -> Iterable[Candidates]:
        blocks, result = self._forward_blocks(spans)
        levels = [
            level
            for row in rows
            for level in further_rows(row, self._block.mask_token, self._num_levels(row))
        ]
        said = None
        if self._confidence is not None and blocks:
            hidden = hidden_of(blocks, result)
            rows_read = [own[block.sample_rows] for own, block in zip(hidden, blocks, strict=True)]
            said = self._confidence(np.concatenate(rows_read), None)
        return ranked(result.logits, levels, self.config, self._runner.decoder.pruned_head, said)

    def _num_levels(self, row: SamplingRow) -> int:
        """Rows of its request's block that have logits."""
        return self._depths[row.request.request_id]

    def _forward_blocks(self, spans: Sequence[Span]) -> tuple[list[Span], ForwardResult]:
        """The blocks that begin with the last tokens of the spans that are sampled."""
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
            none = np.empty((0, self._runner.decoder.config.num_logits), np.float32)
            return blocks, ForwardResult(none, (0,))
        return blocks, self._runner.forward(self._runner.pack(blocks))

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


def hidden_of(blocks: Sequence[Span], result: ForwardResult) -> list[Floats]:
    """What the head reads of each block's rows, ``[rows, hidden_size]``; without columns where the
    forward was not asked for it."""
    counts = [len(block.token_ids) for block in blocks]
    if result.features is None:
        return [np.empty((count, 0), np.float32) for count in counts]
    return np.split(result.features[:, 0], np.cumsum(counts, dtype=int)[:-1])


@dataclass(frozen=True, slots=True)
class _BlockRows:
    """What one forward said of a request's block.

    Attributes:
        logits: of the rows that predict, ``[levels, columns]``.
        hidden: of the same rows, ``[levels, hidden_size]``; without columns where they are not
            read.
        states: by the tokens of a path, what the Markov head hands to the rows below.
    """

    logits: Floats
    hidden: Floats
    states: dict[tuple[int, ...], Floats]


class DSparkProposer(DFlashProposer):
    """Of DSpark and DFlash 2: see the module's docstring.

    Args: those of :class:`~paceline.proposers.heads.blocks.DFlashProposer`, and
        markov: the Markov head, Domino's correction, or the selector.
    """

    def __init__(self, *args: Any, markov: Correction, **more: Any) -> None:
        super().__init__(*args, **more)
        self._markov = markov
        if markov.reads_hidden:
            self._read_hidden()
        self._blocks: dict[int, _BlockRows] = {}
        """By request, of the drafts that are being made."""

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        return Drafter.propose(self, requests, budget)

    def _candidates(
        self, spans: Sequence[Span], rows: Sequence[SamplingRow]
    ) -> Iterable[Candidates]:
        if not any(span.num_cached for span in spans):  # what was read last, and no drafted node
            self._read_blocks(spans)
            rows = [row for row in rows if self._num_levels(row)]
        if not rows:
            return ()
        blocks = [self._blocks[row.request.request_id] for row in rows]
        paths = [tuple(row.path) for row in rows]
        before = self._markov.rows_of([(row.path or row.request.token_ids)[-1] for row in rows])
        pairs = list(zip(blocks, paths, strict=True))
        hidden = np.stack([block.hidden[len(path)] for block, path in pairs])
        states = np.stack([block.states[path[:-1]] for block, path in pairs])
        latent, handed = self._markov.latent(before, hidden, states)
        for (block, path), state in zip(pairs, handed, strict=True):
            block.states[path] = state
        logits = np.stack([block.logits[len(path)] for block, path in pairs])
        corrected = [len(path) >= self._markov.first_level for path in paths]
        logits[corrected] = self._markov.corrected(logits[corrected], latent[corrected])
        said = None if self._confidence is None else self._confidence(hidden, before)
        return ranked(logits, rows, self.config, self._runner.decoder.pruned_head, said)

    def _read_blocks(self, spans: Sequence[Span]) -> None:
        blocks, result = self._forward_blocks(spans)
        sampled = 0
        for block, hidden in zip(blocks, hidden_of(blocks, result), strict=True):
            levels = len(block.sample_rows)
            self._blocks[block.request_id] = _BlockRows(
                self._markov.candidates(result.logits[sampled : sampled + levels]),
                hidden[block.sample_rows],
                {(): self._markov.first_state(block.token_ids[0], hidden[: block.sample_rows[0]])},
            )
            sampled += levels

    def _add_levels(
        self, growths: list[Growth], candidates: Iterable[Candidates], prices: Prices
    ) -> None:
        """Level by level; none takes a forward."""
        some = [growth for growth in growths if self._depths[growth.request.request_id]]
        Drafter._add_levels(self, some, candidates, FREE)
        self._blocks = {}
        for growth in growths:
            self._forget_block(growth)

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
