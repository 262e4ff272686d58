"""The target's token as a deterministic function of logits, parameters, seed and position.

Because the noise belongs to (seed, position, token) and not to a stream, it does not matter which
forward a row was computed in or what was drafted. The native kernels do the work where they are
present, on rows as :func:`packed` makes them; what is written here in numpy is the same function
without them. Knows nothing of trees, engines or tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.backends.native.native import native_module, why_not_native
from paceline.models.weights import PrunedHead
from paceline.request.request import Request, TokenLogprobs
from paceline.request.sampling_params import SamplingParams
from paceline.sampling.logit_edits import SamplingRow, edit_logits

U64 = npt.NDArray[np.uint64]
Logits = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
kernels: Any = native_module() if why_not_native() is None else None
SEED_MASK = 2**64 - 1
MOST_TOP_K = 2**31 - 1
KEPT_RULES = 4  # a request's own parameters and those of whoever drafts for it
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10


def argmax_rows(logits: Logits) -> tuple[list[int], list[bool]]:
    """Lowest id of each row's maximum, and whether that maximum is a finite number."""
    if kernels:
        found: tuple[list[int], list[bool]] = kernels.argmax_rows(logits)
        return found
    tokens: list[int] = logits.argmax(axis=1).tolist()
    return tokens, [math.isfinite(logits.item(row, token)) for row, token in enumerate(tokens)]


def sample_tokens(
    logits: Logits, rows: Sequence[SamplingRow], at: Sequence[int] | None = None
) -> tuple[list[int], list[bool]]:
    """The target's token for each row of ``[n, vocab]`` logits.

    Args:
        at: the row of ``logits`` that each of ``rows`` reads; None where they are in order.

    Returns:
        Token ids, and for each row whether its logits allowed one (False for NaN, infinite
        logits, or when every token is masked).
    """
    if kernels:
        found: tuple[list[int], list[bool]]
        found = kernels.sample_tokens(logits, *packed(rows, logits.shape[1]), at)
        return found
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
    logits: Logits, rows: Sequence[SamplingRow], k: int, head: PrunedHead | None = None
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
    if kernels:
        columns = (None, 0) if head is None else (head.token_ids, head.vocab_size)
        own = packed(rows, columns[1] or logits.shape[1])
        ranked: tuple[Ints, Floats] = kernels.rank_candidates(logits, *own, k, *columns)
        return ranked
    if head is not None:
        logits = head.by_token(logits)  # what edits and disturbs a token goes by its id
    if all(row.is_plain_greedy for row in rows):
        return top_of_rows(logits.astype(np.float64), k)
    edited = edit_logits(logits, rows)
    scores = edited.astype(np.float64)
    sampled = [i for i, row in enumerate(rows) if not row.sampling.is_greedy]
    if sampled:
        scores[sampled] = _perturbed(edited[sampled], [rows[i] for i in sampled])
    return top_of_rows(scores, k)


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


def token_noise(
    seeds: U64,
    positions: U64,
    sample_indices: U64,
    rows: npt.NDArray[np.int64],
    token_ids: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise of (row, token) pairs.

    Args:
        seeds, positions, sample_indices: one entry per row.
        rows, token_ids: the pairs, sorted by row and then by token.

    Returns:
        ``-log(-log(u))`` in float64, ``[pairs]``.
    """
    blocks = token_ids >> 2
    first = np.empty(len(rows), dtype=bool)
    first[:1] = True
    np.not_equal(blocks[1:], blocks[:-1], out=first[1:])
    first[1:] |= rows[1:] != rows[:-1]
    owner = rows[first]
    words = philox(
        seeds[owner],
        positions[owner],
        blocks[first].astype(np.uint64),
        sample_indices[owner],
        np.zeros(len(owner), dtype=np.uint64),
    )
    x = np.stack(words)[token_ids & 3, np.cumsum(first) - 1]
    u = (x.astype(np.float64) + 0.5) * 2.0**-32
    noise: npt.NDArray[np.float64] = -np.log(-np.log(u))
    return noise


def philox(key: U64, c0: U64, c1: U64, c2: U64, c3: U64) -> tuple[U64, U64, U64, U64]:
    """Four 32-bit words per counter, as uint64 arrays: Philox4x32-10, which has no state to lose.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

    Args:
        key: 64-bit keys, low word first, ``[n]``.
        c0, c1, c2, c3: the words of the counters, ``[n]`` each, below 2**32.
    """
    k0, k1 = key & _LOW, key >> _SHIFT
    c0, c1, c2, c3 = c0.copy(), c1.copy(), c2.copy(), c3.copy()
    for turn in range(_ROUNDS):
        c0 *= _M0  # now the products: high word left, low word right
        c2 *= _M1
        c1 ^= c2 >> _SHIFT
        c1 ^= (k0 + np.uint64(turn * _W0)) & _LOW
        c3 ^= c0 >> _SHIFT
        c3 ^= (k1 + np.uint64(turn * _W1)) & _LOW
        c2 &= _LOW
        c0 &= _LOW
        c0, c1, c2, c3 = c1, c2, c3, c0
    return c0, c1, c2, c3


def _perturbed(edited: npt.NDArray[np.float32], rows: Sequence[SamplingRow]) -> Floats:
    """Scores ``[n, vocab]``: logit over temperature, plus noise; -inf for what is filtered out."""
    temperatures = np.asarray([row.sampling.temperature for row in rows])
    scores: Floats = edited / temperatures[:, None]  # float32 over float64 is float64
    keep = filter_rows(scores, [row.sampling for row in rows])
    scores[~keep] = -np.inf
    at, tokens = np.nonzero(keep)
    seeds = np.asarray([row.request.seed & SEED_MASK for row in rows], dtype=np.uint64)
    positions = np.asarray([row.position for row in rows], dtype=np.uint64)
    samples = np.asarray([row.request.sample_index for row in rows], dtype=np.uint64)
    scores[at, tokens] += token_noise(seeds, positions, samples, at, tokens)
    return scores


def token_logprobs(
    logits: Logits, token_ids: Sequence[int], top: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-softmax of raw logits ``[n, vocab]`` at the emitted tokens, with the ``top[i]`` best."""
    if kernels:
        entries = kernels.token_logprobs(logits, token_ids, top)
        return [TokenLogprobs(token, *each) for token, each in zip(token_ids, entries, strict=True)]
    shifted = logits - logits.max(axis=1, keepdims=True)
    table = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
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


def named_logprobs(logits: Logits, token_ids: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    """Log-softmax of raw logits ``[n, vocab]`` at the same tokens in each row, as (id, logprob)."""
    found = []
    for values in logits.astype(np.float64):  # a row's bits are its own matter
        highest = values.max()
        total = highest + np.log(np.exp(values - highest).sum())
        numbers = (values[list(token_ids)] - total).astype(np.float32).tolist()
        found.append(tuple(zip(token_ids, numbers, strict=True)))
    return found


def filter_rows(z: Floats, params: Sequence[SamplingParams]) -> npt.NDArray[np.bool_]:
    """Which tokens survive top-k, then top-p, then min-p; ``z`` is ``[n, vocab]``, logit over T."""
    keep = z > -np.inf
    for row, wish in enumerate(params):
        if 0 < wish.top_k < z.shape[1] or wish.top_p < 1.0 or wish.min_p > 0.0:
            survivors = _survivors(z[row], wish)
            keep[row] = False
            keep[row, survivors] = True
    return keep


def _survivors(z: Floats, params: SamplingParams) -> Ints:
    vocab = len(z)
    (ids,), (values,) = top_of_rows(z[None], vocab)
    count = params.top_k if 0 < params.top_k < vocab else vocab
    weights = np.exp(values - values[0])
    before = np.cumsum(weights)  # sums in order, as the native kernels have them
    total = before[count - 1] if count < vocab else np.exp(z - values[0]).sum()
    before -= weights
    keep = values > -np.inf
    keep[count:] = False
    if params.top_p < 1.0:
        keep &= before < params.top_p * total
    if params.min_p > 0.0:
        keep &= values >= values[0] + np.log(params.min_p)
    survivors: Ints = ids[keep]
    return survivors


def top_of_rows(z: Floats, k: int) -> tuple[Ints, Floats]:
    """The k largest of each row, by value descending and id ascending (ties at the edge aside)."""
    if k < z.shape[1]:
        ids = np.argpartition(-z, k - 1, axis=1)[:, :k]
    else:
        ids = np.broadcast_to(np.arange(z.shape[1]), z.shape)
    return in_order(ids, np.take_along_axis(z, ids, axis=1))


def in_order(ids: Ints, values: Floats) -> tuple[Ints, Floats]:
    """Sort each row by value descending and id ascending."""
    order = np.lexsort((ids, -values), axis=1)
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(values, order, axis=1)
