"""Drafts by a smaller model of the same vocabulary, batched over requests. Knows no target model.

Owns the forwards. How trees grow and what becomes of the draft's KV is the affair of
:mod:`paceline.proposers.base.drafter`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.cache.model_runner import ModelRunner
from paceline.config.speculative import ForwardingConfig
from paceline.planner.drafts import Prices
from paceline.proposers.base.drafter import Drafter
from paceline.proposers.base.estimates import Candidates, ranked
from paceline.proposers.base.growth import Growth
from paceline.proposers.base.native_growth import can_grow, grow
from paceline.request.span import Span
from paceline.sampling.logit_edits import SamplingRow

NAME = "draft_model"


class DraftModelProposer(Drafter):
    """See the module's docstring; the runner has a KV cache of its own, without prefix caching."""

    name = NAME

    def __init__(self, config: ForwardingConfig, runner: ModelRunner) -> None:
        super().__init__(config, runner.kv, runner.decoder.max_len)
        self._runner = runner

    @property
    def num_forwards(self) -> int:
        """Forwards of the draft model so far."""
        return self._runner.num_forwards

    def _draft(self, growths: list[Growth], spans: Sequence[Span], prices: Prices) -> None:
        if can_grow(self._runner, growths):
            grow(self.config, self._runner, growths, spans, None, prices, self._reserve)
        else:
            super()._draft(growths, spans, prices)

    def _candidates(
        self, spans: Sequence[Span], rows: Sequence[SamplingRow]
    ) -> Iterable[Candidates]:
        logits = self._runner.forward(self._runner.pack(spans)).logits
        if not rows:
            return ()
        return ranked(logits, rows, self.config, self._runner.decoder.pruned_head)
