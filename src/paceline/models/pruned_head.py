"""Heads of drafts that have not every token. Owns how a checkpoint says which; knows no arithmetic.

``config.json`` says ``draft_vocab_size``, the rows of ``lm_head.weight``, and the tensor ``d2t``
how far beyond its row each row's token is: the form in which EAGLE-3 checkpoints have it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.models.config import ModelConfig
from paceline.tensors.arrays import Array, Floats

HEAD_TOKENS = "d2t"


@dataclass(frozen=True, slots=True)
class PrunedHead:
    """Which tokens a head has.

    Attributes:
        token_ids: int64, ascending: the token of each row of the head, and column of the logits.
        vocab_size: of the tokens that could be there.
    """

    token_ids: npt.NDArray[np.int64]
    vocab_size: int

    @staticmethod
    def of(offsets: Array, vocab_size: int) -> PrunedHead:
        """Read a stored ``d2t``.

        Raises:
            ModelLoadError: it has no integers, or tokens that do not ascend within the vocabulary.
        """
        if offsets.dtype not in (np.int64, np.int32):
            raise ModelLoadError(f"{HEAD_TOKENS} is of type {offsets.dtype}; it must be int64")
        ids = offsets.astype(np.int64) + np.arange(len(offsets))
        if ids[0] < 0 or ids[-1] >= vocab_size or (ids[1:] <= ids[:-1]).any():
            raise ModelLoadError(
                f"{HEAD_TOKENS} is damaged: the tokens of the head must ascend within 0 to "
                f"{vocab_size - 1}"
            )
        return PrunedHead(ids, vocab_size)

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """What is stored as ``d2t``."""
        return self.token_ids - np.arange(len(self.token_ids))

    def by_token(self, logits: Floats) -> Floats:
        """``[rows, columns]`` as ``[rows, vocab_size]``: -inf for tokens that are not there."""
        whole = np.full((len(logits), self.vocab_size), -np.inf, np.float32)
        whole[:, self.token_ids] = logits
        return whole


def check_whole_head(name: str, config: ModelConfig) -> None:
    """Raise :class:`UnsupportedModelError` unless the model can emit every token."""
    if config.draft_vocab_size:
        raise UnsupportedModelError(
            f"{name} has {config.draft_vocab_size} of {config.vocab_size} tokens in its head: it "
            "can only draft for another model; name it in the speculative configuration"
        )
