"""What a request wants to know of its prompt: log-probs of its tokens, or one vector of it all.

Both are taken chunk by chunk from the rows of a prefill. The vector's hidden states are what the
head reads, after the last norm. They are added one after another in the order of their positions,
in float64: how a prompt is cut into chunks changes no bit of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.cache.model_runner import ForwardResult
from paceline.engine.step import Scheduled
from paceline.request.request import Request
from paceline.sampling.sampler import token_logprobs

_Doubles = npt.NDArray[np.float64]


@dataclass(slots=True)
class Pooled:
    """What the leading tokens of a prompt have come to so far."""

    num_tokens: int
    vector: _Doubles
    """``[hidden_size]``: the sum of their states, perhaps weighted by position, the highest of each
    number, or the state of the first or last one."""


def take_pooled(items: Sequence[Scheduled], at: int) -> None:
    """Add the chunks of a step to what their prompts have come to; complete ones become vectors.

    Args:
        at: which of the step's hidden states are those after the last norm.
    """
    for item in items:
        if item.request.params.pooling is not None and not item.request.embedding:
            rows = item.features[: item.num_tokens, at]
            _take_chunk(item.request, rows)


def _take_chunk(request: Request, rows: npt.NDArray[np.float32]) -> None:
    """Add the rows of a chunk, which begins at ``request.num_computed``.

    Tokens that are in it already (after a preemption) are skipped.
    """
    start, before = request.num_computed, request.pooled
    known = 0 if before is None else before.num_tokens
    end = min(start + len(rows), request.prompt_len)
    if end <= known:
        return
    assert start <= known, "rows before this chunk are missing"
    added = rows[known - start : end - start].astype(np.float64)
    assert request.params.pooling is not None
    vector = _with_rows(request.params.pooling, before, added)
    request.pooled = Pooled(end, vector)
    if end == request.prompt_len:
        request.embedding = _normalised(vector)


def _with_rows(pooling: str, before: Pooled | None, rows: _Doubles) -> _Doubles:
    """What a prompt's tokens come to with the rows that follow those pooled before."""
    if pooling == "last":
        last: _Doubles = rows[-1].copy()
        return last
    if pooling == "cls":
        first: _Doubles = rows[0].copy()
        return first if before is None else before.vector
    if pooling == "max":
        highest: _Doubles = rows.max(axis=0)
        return highest if before is None else np.maximum(before.vector, highest)
    vector = np.zeros(rows.shape[1]) if before is None else before.vector.copy()
    start = 1 if before is None else before.num_tokens + 1
    for position, row in enumerate(rows, start):  # a sum over an axis may add in another order
        vector += position * row if pooling == "weightedmean" else row
    return vector


def _normalised(vector: _Doubles) -> bytes:
    """The vector of length 1, as float32 values, the lowest byte first. Zeros stay zeros.

    A sum has the direction of a mean.
    """
    length = float(np.sqrt(vector @ vector))
    return (vector / (length or 1.0)).astype("<f4").tobytes()


def take_prompt_logprobs(items: Sequence[Scheduled], result: ForwardResult) -> None:
    """Extend the prompt's log-probs of the requests that want them."""
    for index, item in enumerate(items):
        if item.request.params.prompt_logprobs is not None:
            _take_logprobs(item.request, item.num_tokens, result, index)


def _take_logprobs(request: Request, num_tokens: int, result: ForwardResult, index: int) -> None:
    """Extend ``request.prompt_logprobs`` by a chunk of ``num_tokens`` rows, the forward's span
    ``index``.

    The row of token ``i`` predicts token ``i + 1``; the first token has no log-prob. Tokens that
    are known already (after a preemption) are skipped.
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
