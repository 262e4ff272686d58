"""Token documents to equal windows, epoch after epoch. Knows no text, model or optimiser.

Each epoch shuffles the documents, joins them with a separator after each, and cuts the stream into
windows of ``seq_len`` predictions; then the windows are shuffled too, so that one batch does not
come from one file. Everything is a function of (documents, seed, window number): a run that
continues needs to know only how many windows it has seen.
"""

from __future__ import annotations

import numpy as np

from paceline.core.errors import TrainingError
from paceline.training.data import TokenArray, TokenDocuments


def pack(documents: TokenDocuments, order: np.ndarray, seq_len: int, separator: int) -> TokenArray:
    """Windows ``[n, seq_len + 1]`` over the documents in ``order``.

    A window's last token is the next one's first, so that every token but the very first is
    predicted exactly once. The stream starts with a separator, has one after each document, and
    is filled up with separators to a whole window.
    """
    pieces: list[TokenArray] = [np.array([separator], np.int32)]
    for index in order:
        pieces += [documents[int(index)], pieces[0]]
    stream = np.concatenate(pieces)
    count = window_count(documents, seq_len)
    padded = np.full(count * seq_len + 1, separator, np.int32)
    padded[: len(stream)] = stream
    starts = np.arange(count)[:, None] * seq_len
    windows: TokenArray = padded[starts + np.arange(seq_len + 1)[None]]
    return windows


def window_count(documents: TokenDocuments, seq_len: int) -> int:
    """Windows of one epoch; the same for every order."""
    predictions = len(documents.tokens) + len(documents)
    return max(1, -(-predictions // seq_len))


class Windows:
    """Training windows by number, without end: number n belongs to epoch ``n // per_epoch``.

    Raises:
        TrainingError: there are no documents.
    """

    def __init__(self, documents: TokenDocuments, seq_len: int, separator: int, seed: int) -> None:
        if not len(documents):
            raise TrainingError("the training texts hold no tokens")
        self._documents = documents
        self._seq_len = seq_len
        self._separator = separator
        self._seed = seed
        self._epoch = -1
        self._windows = np.zeros((0, seq_len + 1), np.int32)
        self.per_epoch = window_count(documents, seq_len)

    def take(self, start: int, count: int) -> TokenArray:
        """Windows ``start`` to ``start + count``, ``[count, seq_len + 1]``."""
        rows = [self._window(n) for n in range(start, start + count)]
        return np.stack(rows)

    def _window(self, number: int) -> TokenArray:
        epoch, index = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng((self._seed, epoch))
            order = rng.permutation(len(self._documents))
            packed = pack(self._documents, order, self._seq_len, self._separator)
            self._windows = packed[rng.permutation(len(packed))]
            self._epoch = epoch
        window: TokenArray = self._windows[index]
        return window
