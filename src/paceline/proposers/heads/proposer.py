"""Drafts by a head: a small decoder over the target's hidden states (EAGLE-3, MTP).

Row i of a request is its token i + 1 with the target's hidden states at position i, so that the
head's KV holds a prefix of ``token_ids[1:]``. A drafted node reads, in their place, what the head
itself put out at the node's parent. The KV of drafted nodes is never kept: once tokens are
committed, their rows are read again, with the target's hidden states, in the forward that begins
the next tree. How trees grow is the affair of :mod:`paceline.proposers.base.drafter`.

Source: Li et al., EAGLE-3, arXiv 2503.01840.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from paceline.planner.drafts import Prices
from paceline.proposers.base.estimates import Candidates, ranked
from paceline.proposers.base.growth import DraftState, Growth
from paceline.proposers.base.native_growth import can_grow, grow
from paceline.proposers.heads.drafter import FeatureDrafter
from paceline.request.request import Request
from paceline.request.span import Span
from paceline.sampling.logit_edits import SamplingRow
from paceline.tensors.arrays import Floats


class HeadProposer(FeatureDrafter):
    """See the module's docstring.

    Args: those of :class:`~paceline.proposers.heads.drafter.FeatureDrafter`; the runner's one tap
        is what a node's children read.
    """

    rows_behind = 1

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._outputs: dict[int, Floats] = {}
        """By request: what the head put out at the nodes of its span, ``[nodes, hidden_size]``."""

    def finish(self, request: Request) -> None:
        super().finish(request)
        self._outputs.pop(request.request_id, None)

    def _kept(self, draft: DraftState, committed: Sequence[int]) -> Sequence[int]:
        return ()

    def _draft(self, growths: list[Growth], spans: Sequence[Span], prices: Prices) -> None:
        if can_grow(self._runner, growths):
            inputs = np.concatenate([self._features_of(span) for span in spans])
            grow(self.config, self._runner, growths, spans, inputs, prices, self._reserve)
        else:
            super()._draft(growths, spans, prices)

    def _candidates(
        self, spans: Sequence[Span], rows: Sequence[SamplingRow]
    ) -> Iterable[Candidates]:
        inputs = np.concatenate([self._inputs(span) for span in spans])
        result = self._runner.forward(self._runner.pack(spans), inputs=inputs)
        assert result.features is not None
        self._put_out(spans, result.features[:, 0])
        head = self._runner.decoder.pruned_head
        return ranked(result.logits, rows, self.config, head) if rows else ()

    def _inputs(self, span: Span) -> Floats:
        """What a span's nodes read beside their tokens, ``[nodes to compute, width]``."""
        if span.num_cached:  # drafted nodes
            outputs = self._outputs[span.request_id]
            return outputs[list(span.parents[span.num_cached :])]
        return self._features_of(span)

    def _put_out(self, spans: Sequence[Span], outputs: Floats) -> None:
        """Keep what the children of these spans' nodes will read.

        Of tokens that were read that is the last one's, which becomes node 0 of the draft's span.
        """
        first = 0
        for span in spans:
            last = first + len(span.token_ids) - span.num_cached
            if span.num_cached:
                known = self._outputs[span.request_id]
                self._outputs[span.request_id] = np.concatenate([known, outputs[first:last]])
            else:
                self._outputs[span.request_id] = outputs[last - 1 : last]
            first = last
