"""Drafts of several tokens by one forward of a head over the target's hidden states (P-EAGLE).

Such a head is an EAGLE-3 head (:mod:`paceline.proposers.heads.proposer`), of one layer or several,
that was trained for masks: behind the known tokens, each with the target's hidden states at the
position before, come mask tokens, all with one trained vector (``mask_hidden``) in place of hidden
states, which goes through the same norms and ``fc``. A row sees all rows before it. The
configuration names the mask token ``mask_token_id`` in the speculators layout, ``pard_token`` or
``ptd_token_id`` in the original one, as vLLM and the speculators package (0.9,
``speculators.models.peagle``) have it.

Source: P-EAGLE, arXiv 2602.01469.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from paceline.proposers.base.estimates import Candidates, ranked
from paceline.proposers.base.parallel import MaskDrafter
from paceline.proposers.heads.drafter import FeatureDrafter
from paceline.request.span import Span
from paceline.sampling.logit_edits import SamplingRow
from paceline.tensors.arrays import Floats


class PEagleProposer(MaskDrafter, FeatureDrafter):
    """See the module's docstring.

    Args: those of :class:`~paceline.proposers.heads.drafter.FeatureDrafter`, and
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
