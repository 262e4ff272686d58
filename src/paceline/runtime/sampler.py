"""The target's token as a deterministic function of logits, parameters, seed and position.

Because the noise belongs to (seed, position, token) and not to a stream, it does not matter which
forward a row was computed in or what was drafted. The native kernels do the work where they are
present; what is written here in numpy is the same function without them. Knows nothing of trees,
engines or tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from paceline.models.pruned_head import PrunedHead
from paceline.request import TokenLogprobs
from paceline.runtime import native
from paceline.runtime.filters import filter_rows, in_order, top_of_rows
from paceline.runtime.logit_edits import SamplingRow, edit_logits
from paceline.runtime.philox import token_noise

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def to_numpy(logits: torch.Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = logits.numpy(force=True)
    return array


def argmax_rows(logits: npt.NDArray[np.float32]) -> tuple[list[int], list[bool]]:
    """Lowest id of each row's maximum, and whether that maximum is a finite number."""
    if native.kernels:
        return native.argmax_rows(logits)
    tokens: list[int] = logits.argmax(axis=1).tolist()
    return tokens, [math.isfinite(logits.item(row, token)) for row, token in enumerate(tokens)]


def sample_tokens(
    logits: npt.NDArray[np.float32], rows: Sequence[SamplingRow], at: Sequence[int] | None = None
) -> tuple[list[int], list[bool]]:
    """The target's token for each row of ``[n, vocab]`` logits.

    Args:
        at: the row of ``logits`` that each of ``rows`` reads; None where they are in order.

    Returns:
        Token ids, and for each row whether its logits allowed one (False for NaN, infinite
        logits, or when every token is masked).
    """
    if native.kernels:
        return native.sample_tokens(logits, rows, at)
    logits = logits if at is None else logits[at]
    if all(row.is_plain_greedy for row in rows):
        return argmax_rows(logits)
    edited = edit_logits(logits, rows)
    tokens, valid = argmax_rows(edited)
    picked = [i for i, row in enumerate(rows) if valid[i] and not row.sampling.is_greedy]
    if picked:
        best = _perturbed(edited[picked], [rows[i] for i in picked]).argmax(axis=1)
        for index, token in zip(picked, best.tolist(), strict=True):
            tokens[index] = token
    return tokens, valid


def rank_candidates(
    logits: torch.Tensor, rows: Sequence[SamplingRow], k: int, head: PrunedHead | None = None
) -> tuple[Ints, Floats]:
    """The ``k`` likeliest tokens of each row, in the order in which a draft should try them.

    Greedy rows rank by logit. Sampled rows rank by the perturbed score with the very noise that
    the target will use, so that the first candidate is what the target emits if it agrees.

    Args:
        head: which token each column of the logits is; None where column i is token i.

    Returns:
        Token ids and scores (logit over temperature, plus noise when sampled), ``[n, k]`` each;
        missing candidates have score -inf. A row whose logits allow no token has no finite score.
    """
    k = min(k, logits.shape[1])
    is_plain = all(row.is_plain_greedy for row in rows)
    array = native.in_host_memory(logits) if is_plain else to_numpy(logits)
    if native.kernels and array is not None:
        return native.rank_candidates(array, rows, k, head)
    if head is not None:
        logits = head.by_token(logits)  # what edits and disturbs a token goes by its id
    if is_plain:
        best = torch.topk(logits, k, dim=1)
        return in_order(best.indices.cpu().numpy(), best.values.cpu().double().numpy())
    edited = edit_logits(to_numpy(logits), rows)
    scores = edited.astype(np.float64)
    sampled = [i for i, row in enumerate(rows) if not row.sampling.is_greedy]
    if sampled:
        scores[sampled] = _perturbed(edited[sampled], [rows[i] for i in sampled])
    return top_of_rows(scores, k)


def _perturbed(edited: npt.NDArray[np.float32], rows: Sequence[SamplingRow]) -> Floats:
    """Scores ``[n, vocab]``: logit over temperature, plus noise; -inf for what is filtered out."""
    temperatures = np.asarray([row.sampling.temperature for row in rows])
    scores: Floats = edited / temperatures[:, None]  # float32 over float64 is float64
    keep = filter_rows(scores, [row.sampling for row in rows])
    scores[~keep] = -np.inf
    at, tokens = np.nonzero(keep)
    seeds = np.asarray([row.request.seed & native.SEED_MASK for row in rows], dtype=np.uint64)
    positions = np.asarray([row.position for row in rows], dtype=np.uint64)
    samples = np.asarray([row.request.sample_index for row in rows], dtype=np.uint64)
    scores[at, tokens] += token_noise(seeds, positions, samples, at, tokens)
    return scores


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], top: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-softmax of raw logits ``[n, vocab]`` at the emitted tokens, with the ``top[i]`` best."""
    if native.kernels:
        return native.token_logprobs(to_numpy(logits.float()), token_ids, top)
    table = to_numpy(torch.log_softmax(logits.float(), dim=-1))
    found = []
    for values, token_id, count in zip(table, token_ids, top, strict=True):
        own = values[token_id]
        best: tuple[tuple[int, float], ...] = ()
        if count:
            ids, numbers = top_of_rows(values[None].astype(np.float64), min(count, len(values)))
            best = tuple(zip(ids[0].tolist(), numbers[0].tolist(), strict=True))
        rank = int((values > own).sum()) + 1
        found.append(TokenLogprobs(int(token_id), float(own), rank, best))
    return found
