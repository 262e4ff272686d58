"""The sampler's native kernels, where the extension was built: packs rows for them.

Owns what a request's parameters look like to the kernels, and keeps it with the request. Without
the extension :data:`kernels` is None, and :mod:`paceline.sampling.sampler` does the work itself.
Knows no rule of sampling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.backends.native.native import native_module, why_not_native
from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paceline.sampling.logit_edits import SamplingRow

SEED_MASK = 2**64 - 1
MOST_TOP_K = 2**31 - 1
KEPT_RULES = 4  # a request's own parameters and those of whoever drafts for it


kernels: Any = native_module() if why_not_native() is None else None


def packed(
    rows: Sequence[SamplingRow], vocab_size: int
) -> tuple[list[Any], list[list[int]], list[Sequence[int]], list[bytes | None]]:
    """Rules, tokens so far, path and mask of each row, as the kernels take them."""
    return (
        [rules(row.request, row.params or row.request.params) for row in rows],
        [row.request.token_ids for row in rows],
        [row.path for row in rows],
        [row.allowed(vocab_size) for row in rows],
    )


def rules(request: Request, params: SamplingParams) -> Any:
    """The request's rules under these parameters, which also count its tokens."""
    for known, found in request.sampling_rules:
        if known is params:
            return found
    new = _new_rules(request, params)
    request.sampling_rules.append((params, new))
    del request.sampling_rules[:-KEPT_RULES]
    return new


def _new_rules(request: Request, params: SamplingParams) -> Any:
    return kernels.SamplingRules(
        temperature=0.0 if params.is_greedy else params.temperature,
        top_k=min(params.top_k, MOST_TOP_K),
        top_p=params.top_p,
        log_min_p=math.log(params.min_p) if params.min_p else -math.inf,
        seed=request.seed & SEED_MASK,
        sample_index=request.sample_index,
        prompt_len=request.prompt_len,
        min_tokens=params.min_tokens,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bias_ids=list(params.logit_bias),
        biases=list(params.logit_bias.values()),
        allowed=None if params.allowed_token_ids is None else list(params.allowed_token_ids),
        banned=list(params.banned_token_ids),
        ending=[*request.eos_token_ids, *params.stop_token_ids],
    )
