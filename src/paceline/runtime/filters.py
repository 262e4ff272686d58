"""Top-k, top-p and min-p on rows of logits, exactly and without sorting the vocabulary.

Each row is judged by its best few tokens, and by more of them only where those were too few to
tell. A row's survivors never depend on the other rows. Knows no noise and no requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.sampling_params import SamplingParams

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def filter_rows(z: Floats, params: Sequence[SamplingParams]) -> npt.NDArray[np.bool_]:
    """Which tokens survive top-k, then top-p, then min-p; ``z`` is ``[n, vocab]``, logit over T."""
    keep = z > -np.inf
    vocab = z.shape[1]
    top_k = np.asarray([p.top_k if 0 < p.top_k < vocab else vocab for p in params])
    top_p = np.asarray([p.top_p for p in params])
    min_p = np.asarray([p.min_p for p in params])
    pending = np.flatnonzero((top_k < vocab) | (top_p < 1.0) | (min_p > 0.0))
    if not len(pending):
        return keep
    bounded = top_k[top_k < vocab]
    width = min(vocab, max(256, int(bounded.max()) + 1 if len(bounded) else 0))
    while len(pending):
        done = _filter_within(
            z[pending], keep, pending, top_k[pending], top_p[pending], min_p[pending], width
        )
        pending = pending[~done]
        width = vocab if width * 8 >= vocab else width * 8
    return keep


def _filter_within(
    z: Floats,
    keep: npt.NDArray[np.bool_],
    at: Ints,
    top_k: Ints,
    top_p: Floats,
    min_p: Floats,
    width: int,
) -> npt.NDArray[np.bool_]:
    """Filter rows by their ``width`` best tokens; False where those were too few to tell."""
    vocab = z.shape[1]
    ids, values = top_of_rows(z, width)
    peak = values[:, :1]
    in_k = np.arange(width) < top_k[:, None]
    weights = np.where(in_k, np.exp(values - peak), 0.0)
    before = np.cumsum(weights, axis=1)
    # Sequential sums, so that the width, which other rows decide too, cannot change them.
    total = before[:, -1:].copy()
    whole = top_k >= vocab
    total[whole, 0] = np.exp(z[whole] - peak[whole]).sum(axis=1)
    before -= weights
    in_p = (before < top_p[:, None] * total) | (top_p >= 1.0)[:, None]
    with np.errstate(divide="ignore"):
        in_min = values >= peak + np.log(min_p)[:, None]
    chosen = in_k & in_p & in_min & (values > -np.inf)
    count = chosen.sum(axis=1)
    last = values[np.arange(len(at)), np.maximum(count, 1) - 1]
    done: npt.NDArray[np.bool_] = (last > values[:, -1]) | (width == vocab)
    for row in np.flatnonzero(done):
        keep[at[row]] = False
        keep[at[row], ids[row, : count[row]]] = True
    return done


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
