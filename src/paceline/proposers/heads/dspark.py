"""Drafts of a block by one pass, whose tokens depend on those drafted before them (DSpark).

Such a head is a DFlash head (:mod:`paceline.proposers.heads.dflash`) with a *Markov head*: to the
logits of a row it adds a product of two matrices of low rank, whose factor ``markov_w1`` has a row
for the token before the one that is predicted. So the candidates below a node are those of its
depth and its token, and a tree grows level by level, which takes that product and no forward.
Every row of the block predicts, unless the configuration says otherwise (``sample_from_anchor``,
or ``dspark_bonus_anchor`` of the original layout).

Of the Markov heads that the original repository (deepseek-ai/DeepSpec) and the speculators package
(0.9, ``speculators.models.dspark``) train, this is the one called ``vanilla``, the only one that
vLLM runs. The confidence head is not read: the planner calibrates estimates by what is accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from paceline.models.backend import Ops
from paceline.models.config import ModelConfig
from paceline.models.weights import WeightReader
from paceline.planner.drafts import FREE, Prices
from paceline.proposers.base.drafter import Drafter
from paceline.proposers.base.estimates import Candidates, ranked
from paceline.proposers.base.growth import Growth
from paceline.proposers.heads.checkpoint import MARKOV_AFTER, MARKOV_BEFORE
from paceline.proposers.heads.dflash import DFlashProposer
from paceline.request.span import Span
from paceline.sampling.logit_edits import SamplingRow
from paceline.tensors.arrays import Floats, floats


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

    def __init__(self, reader: WeightReader, shape: ModelConfig, ops: Ops, rank: int) -> None:
        before = reader.floats(f"{MARKOV_BEFORE}.weight", shape.vocab_size, rank)
        self._before: Floats = floats(before).copy()
        self._after = reader.linear([MARKOV_AFTER], MARKOV_AFTER, [shape.num_logits], rank, False)
        self._ops = ops

    def __call__(self, tokens: Sequence[int]) -> Floats:
        """``[len(tokens), columns of the logits]``, float32."""
        return self._ops.linear(self._before[list(tokens)], self._after)


class DSparkProposer(DFlashProposer):
    """See the module's docstring.

    Args: those of :class:`~paceline.proposers.heads.dflash.DFlashProposer`, and
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
