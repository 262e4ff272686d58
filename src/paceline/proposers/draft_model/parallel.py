"""Drafts of several tokens by one forward of a model that was trained for it (PARD).

Behind the tokens that the draft lacks it reads mask tokens, one for each further token; the row of
each predicts what stands there, whatever stands before it. The KV of masks is never kept. Owns the
masks; how such levels become a tree is the affair of :mod:`paceline.proposers.base.parallel`.

Source: An et al., PARD, arXiv 2504.18583.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.config import SpeculativeConfig
from paceline.errors import ConfigError
from paceline.proposers.base import TargetInfo
from paceline.proposers.base.estimates import Candidates
from paceline.proposers.base.parallel import ParallelDrafter, further_rows
from paceline.proposers.draft_model.loading import load_draft
from paceline.proposers.draft_model.proposer import DraftModelProposer
from paceline.runtime.logit_edits import SamplingRow
from paceline.runtime.model_runner import ModelRunner
from paceline.span import Span


class ParallelDraftProposer(ParallelDrafter, DraftModelProposer):
    """See the module's docstring.

    Args:
        config: how to draft.
        runner: the draft model with a KV cache of its own, without prefix caching.
        mask_token: what it reads where a token is not known.
    """

    def __init__(self, config: SpeculativeConfig, runner: ModelRunner, mask_token: int) -> None:
        super().__init__(config, runner)
        self._mask_token = mask_token

    def _candidates(
        self, spans: Sequence[Span], rows: Sequence[SamplingRow]
    ) -> Iterable[Candidates]:
        """Of each row and, behind it, of the masks that follow it."""
        owners = iter(rows)
        packed, ranked = list[Span](), list[SamplingRow]()
        for span in spans:
            if span.sample_rows:
                row = next(owners)
                span = self._with_masks(span)
                ranked += further_rows(row, self._mask_token, len(span.sample_rows))
            packed.append(span)
        return super()._candidates(packed, ranked)

    def _with_masks(self, span: Span) -> Span:
        """The span, then as many masks as the draft may have further tokens and there is room."""
        known, request_id = len(span.token_ids), span.request_id
        masks = self._depths[request_id] - 1
        if not self._kv.reserve(request_id, masks):
            masks = 0
        self._depths[request_id] = 1 + masks
        tokens = [*span.token_ids, *[self._mask_token] * masks]
        rows = range(known - 1, known + masks)
        return Span(request_id, span.start, tokens, range(-1, len(tokens) - 1), rows)


def build(config: SpeculativeConfig, target: TargetInfo) -> ParallelDraftProposer:
    """Load the draft that a configuration names.

    Raises:
        ModelLoadError: it cannot be read.
        ConfigError: it does not fit to the target, or is no parallel draft.
    """
    runner = load_draft(config, target)
    return ParallelDraftProposer(config, runner, needed_mask_token(config, runner))


def needed_mask_token(config: SpeculativeConfig, runner: ModelRunner) -> int:
    """What a draft reads where a token is not known; raises :class:`ConfigError` without any."""
    mask_token = runner.decoder.config.mask_token_id
    if mask_token is None:
        raise ConfigError(
            f"{config.model} is no parallel draft: its config.json has neither pard_token nor "
            'ptd_token_id. Use method "draft_model", or train one with '
            "paceline train draft --parallel"
        )
    return mask_token
