"""Small models cut out of bigger ones: fewer layers, narrower ones, heads of frequent tokens alone.

A small head makes a draft faster. A token that it lacks can never be drafted: where the target
emits one, the draft is rejected there. Knows no training loop and no files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import TrainingError
from paceline.models.config import ModelConfig
from paceline.models.pruned_head import HEAD_TOKENS, PrunedHead
from paceline.training import widths
from paceline.training.data import TokenArray
from paceline.training.model_files import TrainableModel

Tensor = torch.Tensor
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")


def cut_model(
    model: TrainableModel,
    drop_layers: int = 0,
    mlp_width: int = 0,
    drop_heads: int = 0,
    hidden_width: int = 0,
) -> TrainableModel:
    """Drop layers, attention heads and channels of a model.

    Args:
        model: is left as it is.
        drop_layers: how many layers go. Those that stay are spread evenly, first and last included.
        mlp_width: feed-forward channels of each layer that stay; 0 keeps all.
        drop_heads: how many query heads of each layer go: whole groups with the key and value head
            that they share, or as many of every group.
        hidden_width: channels of the residual stream that stay; 0 keeps all.

    Raises:
        TrainingError: nothing would be left, heads would be left in groups of several sizes, or a
            width exceeds the model's.
    """
    config = model.config
    _check(config, drop_layers, mlp_width, hidden_width)
    widths.check_drop_heads(config, drop_heads)
    check_flat(model)
    kept = kept_layers(config.num_layers, config.num_layers - drop_layers)
    params = _keep_layers(model.params, kept)
    raw = {**model.raw, "num_hidden_layers": len(kept)} | _layer_types(model, kept)
    for index in range(len(kept)):
        if drop_heads:
            prefix = f"model.layers.{index}.self_attn."
            params |= widths.drop_heads(params, prefix, config, drop_heads)
        if mlp_width:
            params |= widths.narrow_mlp(params, f"model.layers.{index}.mlp.", mlp_width)
    if hidden_width:
        params = widths.narrow_hidden(params, hidden_width, config.norm_plus_one)
    raw |= {
        "num_attention_heads": config.num_heads - drop_heads,
        "num_key_value_heads": widths.kv_heads_after(config, drop_heads),
        "head_dim": config.head_dim,
        "intermediate_size": mlp_width or config.intermediate_size,
        "hidden_size": hidden_width or config.hidden_size,
    }
    return TrainableModel(raw, {name: p.clone() for name, p in params.items()}, model.fixed)


def check_flat(model: TrainableModel) -> None:
    """Raise :class:`TrainingError` where sizes are not at the top of the configuration."""
    if "num_hidden_layers" not in model.raw:
        raise TrainingError("this model's configuration is nested; it cannot be cut")


def _check(config: ModelConfig, drop_layers: int, mlp_width: int, hidden_width: int) -> None:
    if not 0 <= drop_layers < config.num_layers:
        raise TrainingError(
            f"drop_layers is {drop_layers}; the model has {config.num_layers} layers, so allowed "
            f"are 0 to {config.num_layers - 1}"
        )
    for name, width, most in (
        ("mlp_width", mlp_width, config.intermediate_size),
        ("hidden_width", hidden_width, config.hidden_size),
    ):
        if not 0 <= width <= most:
            raise TrainingError(f"{name} is {width}; allowed are 1 to {most} (0: unchanged)")


def kept_layers(total: int, keep: int) -> list[int]:
    """``keep`` of ``total`` layer numbers, evenly spread, the first and (if two) the last too."""
    if keep == 1:
        return [0]
    return [round(i * (total - 1) / (keep - 1)) for i in range(keep)]


def _keep_layers(params: Mapping[str, Tensor], kept: list[int]) -> dict[str, Tensor]:
    number = {old: new for new, old in enumerate(kept)}
    out: dict[str, Tensor] = {}
    for name, p in params.items():
        match = _LAYER.match(name)
        if match is None:
            out[name] = p
        elif int(match[1]) in number:
            out[f"model.layers.{number[int(match[1])]}.{match[2]}"] = p
    return out


def _layer_types(model: TrainableModel, kept: list[int]) -> dict[str, Any]:
    """Which of the kept layers have a sliding window, written out where layers differ."""
    config = model.config
    if "layer_types" in model.raw:
        return {"layer_types": [model.raw["layer_types"][i] for i in kept]}
    if config.sliding_layers:
        kinds = ("full_attention", "sliding_attention")
        return {"layer_types": [kinds[config.sliding_layers[i]] for i in kept]}
    return {}


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
