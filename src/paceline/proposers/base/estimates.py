"""Which tokens a draft's logits name, in which order, and how likely each is to be the target's.

Owns the estimates of whatever drafts by the logits of a model. Knows no model and no tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.config.speculative import ForwardingConfig, SelfDraftConfig
from paceline.models.pruned_head import PrunedHead
from paceline.request.sampling_params import SamplingParams
from paceline.sampling.logit_edits import SamplingRow
from paceline.sampling.sampler import Logits, rank_candidates

RANKED = 8
"""Candidates that are ranked: how far the others lie behind is the evidence for the first."""
LOGIT_BLUR = 0.7

Doubles = npt.NDArray[np.float64]
Candidates = tuple[list[int], list[float]]
"""Tokens that may follow a node, best first, and how likely each is to be the target's."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """How alike the logits of a draft and of its target are.

    Attributes:
        sureness: how likely the first candidate is where it leads by far.
        blur: spread of the difference between the models' scores, greedy.
    """

    sureness: float = 0.9
    blur: float = LOGIT_BLUR


ANOTHER_MODEL = Likeness()
FEWER_LAYERS = Likeness(0.9, 1.2)
FEWER_BITS = {
    "int4": Likeness(0.99, 0.3),
    "int3": Likeness(0.99, 0.5),
    "int2": Likeness(0.99, 1.0),
}
"""Copies of a target by their precision: fitted to a model of 135 million weights, greedy."""
MORE_BITS = Likeness(0.99, 0.1)


def ranked(
    logits: Logits,
    rows: Sequence[SamplingRow],
    config: ForwardingConfig,
    head: PrunedHead | None,
) -> Iterable[Candidates]:
    """What may follow each row by its logits, as the target would rank them."""
    count = config.tree_branching
    tokens, scores = rank_candidates(logits, rows, num_ranked(config, logits.shape[1]), head)
    estimates = acceptance_estimates(rows, scores, likeness(config))[:, :count]
    return zip(tokens[:, :count].tolist(), estimates.tolist(), strict=True)


def num_ranked(config: ForwardingConfig, columns: int) -> int:
    """Candidates that are ranked of so many columns."""
    return min(columns, max(config.tree_branching, RANKED))


def likeness(config: ForwardingConfig) -> Likeness:
    """How alike a draft and its target are, as far as the draft's configuration says."""
    if not isinstance(config, SelfDraftConfig):
        return ANOTHER_MODEL
    if config.draft_layers is not None:
        return FEWER_LAYERS
    return FEWER_BITS.get(config.dtype, MORE_BITS)


def acceptance_estimates(
    rows: Sequence[SamplingRow], scores: Doubles, like: Likeness = ANOTHER_MODEL
) -> Doubles:
    """How likely each ranked candidate is to be the target's token.

    A prior: a softmax over the scores of the best candidates, whose sharpness and weight were
    fitted to a pair of trained models on code and prose, greedy and at temperatures 0.6, 0.8 and 1;
    for the first layers of a target, to the larger of these two, greedy and at 0.8.

    Args:
        rows: whose candidates these are.
        scores: ``[n, RANKED]``, descending, as the sampler ranks them; -inf where there is none.
        like: how alike the models are.

    Returns:
        ``[n, RANKED]``; NaN in rows whose scores are not numbers.
    """
    blur = np.asarray([blur_of(row.sampling, like.blur) for row in rows])[:, None]
    with np.errstate(invalid="ignore"):  # -inf minus -inf
        weights = np.exp((scores - scores[:, :1]) / blur)
        estimates: Doubles = like.sureness * weights / weights.sum(axis=1, keepdims=True)
    return estimates


def blur_of(params: SamplingParams, greedy: float) -> float:
    """Spread of the difference between the models' scores, in units of the score."""
    return greedy if params.is_greedy else greedy / min(LOGIT_BLUR, params.temperature)
