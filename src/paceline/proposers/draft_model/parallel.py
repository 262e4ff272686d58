"""Drafts of several tokens by one forward of a model that was trained for it (PARD).

It reads mask tokens, as :mod:`paceline.proposers.base.parallel` has them. Owns which token that is.

Source: An et al., PARD, arXiv 2504.18583.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.cache.model_runner import ModelRunner
from paceline.config.speculative import ForwardingConfig
from paceline.core.errors import ConfigError
from paceline.proposers.base import TargetInfo
from paceline.proposers.base.estimates import Candidates
from paceline.proposers.base.parallel import MaskDrafter
from paceline.proposers.draft_model.loading import check_goes_back, load_draft
from paceline.proposers.draft_model.proposer import DraftModelProposer
from paceline.request.span import Span
from paceline.sampling.logit_edits import SamplingRow


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


def build(config: ForwardingConfig, target: TargetInfo) -> ParallelDraftProposer:
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
