"""Log-probs of prompt tokens, taken chunk by chunk from the rows of a prefill."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cache.model_runner import ForwardResult
from paceline.engine.scheduler import Scheduled
from paceline.request.request import Request
from paceline.sampling.sampler import token_logprobs


def take_prompt_logprobs(items: Sequence[Scheduled], result: ForwardResult) -> None:
    """Extend the prompt's log-probs of the requests that want them."""
    for index, item in enumerate(items):
        if item.request.params.prompt_logprobs is not None:
            _take_chunk(item.request, item.num_tokens, result, index)


def _take_chunk(request: Request, num_tokens: int, result: ForwardResult, index: int) -> None:
    """Extend ``request.prompt_logprobs`` by the tokens of the request's chunk.

    The row of token ``i`` predicts token ``i + 1``; the first token has no log-prob. Tokens that
    are known already (after a preemption) are skipped.

    Args:
        num_tokens: rows of the chunk, which begins at ``request.num_computed``.
        index: which span of the forward it was.
    """
    start, wanted = request.num_computed, request.params.prompt_logprobs
    known = max(1, len(request.prompt_logprobs))
    end = min(start + num_tokens + 1, request.prompt_len)
    if not request.prompt_logprobs:
        request.prompt_logprobs.append(None)
    if end <= known:
        return
    assert start < known, "rows before this chunk are another request's"
    first = result.offsets[index] - start - 1
    rows, tokens = result.logits[first + known : first + end], request.token_ids[known:end]
    request.prompt_logprobs.extend(token_logprobs(rows, tokens, [wanted or 0] * len(tokens)))
