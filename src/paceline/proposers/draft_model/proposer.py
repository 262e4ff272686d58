"""Drafts by a smaller model of the same vocabulary, batched over requests. Knows no target model.

Owns the forwards. How trees grow and what becomes of the draft's KV is the affair of
:mod:`paceline.proposers.base.drafter`.

A model that was trained for it (PARD: An et al., arXiv 2504.18583) drafts several tokens in one
forward: it reads mask tokens, as :mod:`paceline.proposers.base.parallel` has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.cache.model_runner import ModelRunner
from paceline.config.speculative import ForwardingConfig
from paceline.core.errors import ConfigError
from paceline.planner.drafts import Prices
from paceline.proposers.base import TargetInfo
from paceline.proposers.base.drafter import Drafter
from paceline.proposers.base.growth import Candidates, Growth, can_grow, grow, ranked
from paceline.proposers.base.parallel import MaskDrafter
from paceline.proposers.draft_model.loading import check_goes_back, load_draft
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


class ParallelDraftProposer(MaskDrafter, DraftModelProposer):
    """See the module's docstring.

    Args:
        config: how to draft.
        runner: the draft model with a KV cache of its own, without prefix caching.
        mask_token: what it reads where a token is not known.
    """

    def __init__(self, config: ForwardingConfig, runner: ModelRunner, mask_token: int) -> None:
        super().__init__(config, runner)
        self._mask_token = mask_token

    def _candidates(
        self, spans: Sequence[Span], rows: Sequence[SamplingRow]
    ) -> Iterable[Candidates]:
        """Of each row and, behind it, of the masks that follow it."""
        return super()._candidates(*self._masked(spans, rows))


def build_parallel_draft(config: ForwardingConfig, target: TargetInfo) -> ParallelDraftProposer:
    """Load the draft that a configuration names.

    Raises:
        ModelLoadError: it cannot be read.
        ConfigError: it does not fit to the target, or is no parallel draft.
    """
    runner = load_draft(config, target)
    check_goes_back(runner.decoder.config, "parallel_draft")
    return ParallelDraftProposer(config, runner, needed_mask_token(config, runner))


def needed_mask_token(config: ForwardingConfig, runner: ModelRunner) -> int:
    """What a draft reads where a token is not known; raises :class:`ConfigError` without any."""
    mask_token = runner.decoder.config.mask_token_id
    if mask_token is None:
        raise ConfigError(
            f"{config.model} is no parallel draft: its config.json has neither pard_token nor "
            'ptd_token_id. Use method "draft_model", or train one with '
            "paceline train draft --parallel"
        )
    return mask_token
