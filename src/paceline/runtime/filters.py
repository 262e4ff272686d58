"""Top-k, top-p and min-p on rows of logits, exactly. Knows no noise and no requests."""

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
