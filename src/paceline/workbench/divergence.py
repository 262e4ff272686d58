"""Two models' logits for the same positions, compared row by row in float64. Knows no models."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]


def log_softmax(logits: Logits, temperature: float = 1.0) -> Floats:
    """Log-probabilities at a temperature above 0, ``[n, vocab]``."""
    z = logits.astype(np.float64) / temperature
    z -= z.max(axis=1, keepdims=True)
    found: Floats = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    return found


def ranks(logits: Logits, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many tokens of each row are likelier than one token; equal ones by their ids.

    Args:
        logits: ``[n, vocab]``.
        tokens: ``[n]``.
    """
    own = np.take_along_axis(logits, tokens[:, None], axis=1)
    ids = np.arange(logits.shape[1])
    before = (logits > own) | ((logits == own) & (ids < tokens[:, None]))
    count: npt.NDArray[np.int64] = before.sum(axis=1)
    return count


def coupled_acceptance(log_p: Floats, log_q: Floats) -> Floats:
    """Chance that arg-max(log p + g) is arg-max(log q + g) for one standard Gumbel noise g.

    It is ``sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)``. The first of the two is the larger where
    ``p_j / q_j >= p_i / q_i``, so with tokens sorted by this ratio every inner sum is the rest of p
    over ``p_i`` plus what came of q over ``q_i``.

    Args:
        log_p, log_q: log-probabilities, ``[n, vocab]``.

    Returns:
        ``[n]``.
    """
    with np.errstate(invalid="ignore"):  # -inf minus -inf: a token that counts for nothing
        order = np.argsort(log_p - log_q, axis=1)
    p, q = (np.exp(np.take_along_axis(each, order, axis=1)) for each in (log_p, log_q))
    rest = np.cumsum(p[:, ::-1], axis=1)[:, ::-1]
    came = np.cumsum(q, axis=1) - q
    below = rest * q + came * p
    chances: Floats = np.divide(p * q, below, out=np.zeros_like(p), where=below > 0).sum(axis=1)
    return chances
