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
GUMBEL_MAX = 22.9
"""No noise value is larger: u is at most 1 - 2**-33."""
FIRST_CANDIDATES = 32
FEW_SURVIVORS = 256  # per row; with fewer than these the bound costs more than it saves


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
        best = _Perturbed(edited[picked], [rows[i] for i in picked], 1).best()
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
    array = native.in_host_memory(logits) if native.kernels else None
    if array is not None:
        return native.rank_candidates(array, rows, k, head)
    if head is not None:
        logits = head.by_token(logits)  # what edits and disturbs a token goes by its id
    if all(row.is_plain_greedy for row in rows):
        best = torch.topk(logits, k, dim=1)
        return in_order(best.indices.cpu().numpy(), best.values.cpu().double().numpy())
    edited = edit_logits(to_numpy(logits), rows)
    tokens = np.zeros((len(rows), k), dtype=np.int64)
    scores = np.full((len(rows), k), -np.inf)
    greedy = [i for i, row in enumerate(rows) if row.sampling.is_greedy]
    if greedy:
        tokens[greedy], scores[greedy] = top_of_rows(edited[greedy].astype(np.float64), k)
    sampled = [i for i, row in enumerate(rows) if not row.sampling.is_greedy]
    if sampled:
        perturbed = _Perturbed(edited[sampled], [rows[i] for i in sampled], k)
        tokens[sampled], scores[sampled] = perturbed.top(k)
    return tokens, scores


def _scaled(edited: npt.NDArray[np.float32], rows: Sequence[SamplingRow]) -> Floats:
    temperatures = np.asarray([row.sampling.temperature for row in rows])
    scaled: Floats = edited / temperatures[:, None]  # float32 over float64 is float64
    return scaled


class _Perturbed:
    """Scores z/T + noise of the survivors that can be among the best ``k`` of their row."""

    def __init__(
        self, edited: npt.NDArray[np.float32], rows: Sequence[SamplingRow], k: int
    ) -> None:
        self._scaled = _scaled(edited, rows)
        keep = filter_rows(self._scaled, [row.sampling for row in rows])
        self._seeds = np.asarray([r.request.seed & native.SEED_MASK for r in rows], dtype=np.uint64)
        self._positions = np.asarray([r.position for r in rows], dtype=np.uint64)
        self._samples = np.asarray([r.request.sample_index for r in rows], dtype=np.uint64)
        if np.count_nonzero(keep) > FEW_SURVIVORS * len(rows):
            masked = np.where(keep, self._scaled, -np.inf)
            keep &= masked >= (self._lower_bound(masked, k) - GUMBEL_MAX)[:, None]
        self._rows, self._tokens = np.nonzero(keep)
        self._scores = self._score(self._rows, self._tokens)
        self._starts = np.searchsorted(self._rows, np.arange(len(rows)))

    def _score(self, rows: Ints, tokens: Ints) -> Floats:
        noise = token_noise(self._seeds, self._positions, self._samples, rows, tokens)
        return self._scaled[rows, tokens] + noise

    def _lower_bound(self, masked: Floats, k: int) -> Floats:
        """A score that the k-th best of each row is sure to reach: that of known candidates."""
        width = min(max(k, FIRST_CANDIDATES), masked.shape[1])
        ids = np.sort(np.argpartition(-masked, width - 1, axis=1)[:, :width], axis=1)
        rows = np.repeat(np.arange(len(masked)), width)
        scores = self._score(rows, ids.ravel()).reshape(ids.shape)
        scores[np.take_along_axis(masked, ids, axis=1) == -np.inf] = -np.inf
        bound: Floats = np.partition(scores, width - k, axis=1)[:, width - k]
        return bound

    def best(self) -> Ints:
        """The winner of each row; the lowest id of equal scores."""
        peaks = np.maximum.reduceat(self._scores, self._starts)
        winners = np.flatnonzero(self._scores == peaks[self._rows])
        first = np.searchsorted(self._rows[winners], np.arange(len(self._starts)))
        return self._tokens[winners[first]]

    def top(self, k: int) -> tuple[Ints, Floats]:
        """The k best of each row in order; rows with fewer survivors end in score -inf."""
        count = len(self._starts)
        tokens, scores = np.zeros((count, k), dtype=np.int64), np.full((count, k), -np.inf)
        ends = [*self._starts[1:].tolist(), len(self._rows)]
        for row, (start, end) in enumerate(zip(self._starts.tolist(), ends, strict=True)):
            order = np.argsort(-self._scores[start:end], kind="stable")[:k]
            tokens[row, : len(order)] = self._tokens[start:end][order]
            scores[row, : len(order)] = self._scores[start:end][order]
        return tokens, scores


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], top: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-softmax of raw logits ``[n, vocab]`` at the emitted tokens, with the ``top[i]`` best."""
    array = native.in_host_memory(logits.float()) if native.kernels else None
    if array is not None:
        return native.token_logprobs(array, token_ids, top)
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
