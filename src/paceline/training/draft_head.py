"""Heads with the most frequent tokens alone. Knows no training loop and no files.

A small head makes a draft faster. A token that it lacks can never be drafted: where the target
emits one, the draft is rejected there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import TrainingError
from paceline.models.config import ModelConfig
from paceline.models.pruned_head import HEAD_TOKENS, PrunedHead
from paceline.training.data import TokenArray
from paceline.training.model_files import TrainableModel
from paceline.training.surgery import check_flat


def keep_frequent(
    model: TrainableModel, tokens: TokenArray, count: int, always: Iterable[int]
) -> TrainableModel:
    """The model with a head of the ``count`` tokens most frequent in a text.

    Raises:
        TrainingError: as :func:`frequent_tokens` and :func:`prune_head`.
    """
    return prune_head(model, frequent_tokens(tokens, model.config.vocab_size, count, always))


def special_tokens(tokenizer: Any, config: ModelConfig) -> set[int]:
    """What ends or shapes a text, by the tokenizer's word and by the model's."""
    added = tokenizer.get_added_tokens_decoder()
    return {*config.eos_token_ids, *(i for i, token in added.items() if token.special)}


def frequent_tokens(
    tokens: TokenArray, vocab_size: int, count: int, always: Iterable[int]
) -> npt.NDArray[np.int64]:
    """The ``count`` tokens most frequent in ``tokens``, ascending; of equal ones the lower ids.

    Args:
        always: ids that are among them however rare they are, such as the end of a text.

    Raises:
        TrainingError: more than the vocabulary, or fewer than ``always``, are wanted.
    """
    occurrences = np.bincount(tokens, minlength=vocab_size)
    kept = sorted({token for token in always if 0 <= token < vocab_size})
    occurrences[kept] = len(tokens) + 1
    if not max(1, len(kept)) <= count <= vocab_size:
        raise TrainingError(
            f"draft_vocab_size is {count}; the vocabulary has {vocab_size} tokens, {len(kept)} of "
            f"them special, so allowed are {max(1, len(kept))} to {vocab_size} (0: all)"
        )
    return np.sort(np.argsort(-occurrences, kind="stable")[:count])


def prune_head(model: TrainableModel, token_ids: npt.NDArray[np.int64]) -> TrainableModel:
    """The model with a head of these tokens, ascending. Its embedding stays whole and of its own.

    Raises:
        TrainingError: the head is pruned already, or the configuration is nested.
    """
    check_flat(model)
    if model.config.draft_vocab_size:
        raise TrainingError(
            f"the head has {model.config.draft_vocab_size} of {model.config.vocab_size} tokens "
            "already; begin from the model that it was cut from, or leave draft_vocab_size away"
        )
    ids = torch.from_numpy(token_ids)
    if len(ids) == model.config.vocab_size:
        return model
    tied = model.params["model.embed_tokens.weight"]
    rows = model.params.get("lm_head.weight", tied)[ids].clone()
    offsets = PrunedHead(ids, model.config.vocab_size).offsets
    return TrainableModel(
        {**model.raw, "tie_word_embeddings": False, "draft_vocab_size": len(ids)},
        {**model.params, "lm_head.weight": rows},
        {**model.fixed, HEAD_TOKENS: offsets},
    )
