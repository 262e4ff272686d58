"""Drafts in the draft's own vocabulary for requests of another. Owns how candidates are ranked.

A shadow is a request whose tokens are the draft's, for the text of a real one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.cache.model_runner import ModelRunner
from paceline.config.speculative import ForwardingConfig
from paceline.proposers.base.drafter import Drafter, grammar_mask
from paceline.proposers.base.estimates import (
    LOGIT_BLUR,
    RANKED,
    Candidates,
    acceptance_estimates,
)
from paceline.proposers.draft_model.proposer import DraftModelProposer
from paceline.proposers.draft_model.translation import Translation
from paceline.proposers.draft_model.vocabulary import VocabularyPair
from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import Span
from paceline.sampling.logit_edits import SamplingRow
from paceline.sampling.sampler import rank_candidates
from paceline.tensors.arrays import Floats

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Shadow:
    """A request as the draft sees it; ``request.token_ids`` is the translation's view."""

    real: Request
    request: Request
    translation: Translation


class ShadowDrafter(DraftModelProposer):
    """A draft model for shadows.

    Args:
        config: how to draft, in tokens of the draft.
        runner: the draft model with a KV cache of its own, without prefix caching.
        pair: its vocabulary and the target's.
        direct_branching: most children of a node that is drafted as a token of the target.
    """

    _draft = Drafter._draft  # its candidates are not ranked by logits alone

    def __init__(
        self,
        config: ForwardingConfig,
        runner: ModelRunner,
        pair: VocabularyPair,
        direct_branching: int,
    ) -> None:
        super().__init__(config, runner)
        self._direct_branching = direct_branching
        self.shadows: dict[int, Shadow] = {}
        self._pair = pair
        self._draft_of = {old: new for new, old in pair.to_target.items()}
        shared = list(self._draft_of.items())
        ids = np.array(shared, np.int64).reshape(-1, 2)
        self._target_ids, self._draft_ids = ids.T

    def _candidates(
        self, spans: Sequence[Span], rows: Sequence[SamplingRow]
    ) -> Iterable[Candidates]:
        logits = self._runner.forward(self._runner.pack(spans)).logits
        head = self._runner.decoder.pruned_head
        if rows and head is not None:
            logits = head.by_token(logits)
        found: dict[int, Candidates] = {}
        is_direct = [self._translation(row).is_direct for row in rows]
        for kind, rank in ((True, self._rank_directly), (False, self._rank_texts)):
            at = [i for i, each in enumerate(is_direct) if each is kind]
            if at:
                found |= zip(at, rank(logits[at], [rows[i] for i in at]), strict=True)
        return [found[i] for i in range(len(rows))]

    def _translation(self, row: SamplingRow) -> Translation:
        return self.shadows[row.request.request_id].translation

    def _rank_directly(self, logits: Floats, rows: Sequence[SamplingRow]) -> Iterable[Candidates]:
        """By the target's rules and noise, among the tokens that both have."""
        whole = np.full((len(logits), len(self._pair.target.pieces)), -np.inf, np.float32)
        whole[:, self._target_ids] = logits[:, self._draft_ids]
        count = self._direct_branching
        rows = [self._real_row(row) for row in rows]
        tokens, scores = rank_candidates(whole, rows, max(count, RANKED))
        estimates = acceptance_estimates(rows, scores)[:, :count]
        for ranked, likely in zip(tokens[:, :count].tolist(), estimates.tolist(), strict=True):
            known = [place for place, token in enumerate(ranked) if token in self._draft_of]
            yield [self._draft_of[ranked[i]] for i in known], [likely[i] for i in known]

    def _real_row(self, row: SamplingRow) -> SamplingRow:
        real = self.shadows[row.request.request_id].real
        path = [self._pair.to_target[token] for token in row.path]
        return SamplingRow(real, path, row.params, grammar_mask(real, path))

    def _rank_texts(self, logits: Floats, rows: Sequence[SamplingRow]) -> Iterable[Candidates]:
        """By the draft's own logits, among the tokens that write what has to be written."""
        count = self.config.tree_branching
        plain = [SamplingRow(row.request, row.path, GREEDY, self._mask(row)) for row in rows]
        tokens, scores = rank_candidates(logits, plain, max(count, RANKED))
        # The target draws its token without regard to this order, the more evenly the hotter.
        heat = np.asarray([max(1.0, row.sampling.temperature / LOGIT_BLUR) for row in rows])
        estimates = acceptance_estimates(plain, scores / heat[:, None])[:, :count]
        return zip(tokens[:, :count].tolist(), estimates.tolist(), strict=True)

    def _mask(self, row: SamplingRow) -> bytes:
        written = self._pair.draft.written(row.path)
        return self._pair.mask(self._translation(row).pending[len(written) :])
