"""Models cut out of bigger ones: fewer layers, less feed-forward, a head of frequent tokens. And
mixtures of experts grown out of dense ones.

Weights alone decide what goes, so that the same model is always cut the same way; training mends
what is lost.

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

from paceline.core.errors import TrainingError
from paceline.models.config import ModelConfig
from paceline.models.pruned_head import HEAD_TOKENS, PrunedHead
from paceline.training.configs import ModelShape
from paceline.training.data import TokenArray
from paceline.training.model_files import ROUTER, TrainableModel

Tensor = torch.Tensor
ROUTER_DEVIATION = 0.02
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")


def cut_model(model: TrainableModel, drop_layers: int = 0, mlp_width: int = 0) -> TrainableModel:
    """Drop layers and feed-forward channels of a model.

    Args:
        model: is left as it is.
        drop_layers: how many layers go. Those that stay are spread evenly, first and last included.
        mlp_width: feed-forward channels of each layer that stay; 0 keeps all.

    Raises:
        TrainingError: nothing would be left, the width exceeds the model's, or it has experts.
    """
    config = model.config
    _check(config, drop_layers, mlp_width)
    check_flat(model)
    kept = kept_layers(config.num_layers, config.num_layers - drop_layers)
    params = _keep_layers(model.params, kept)
    raw = {**model.raw, "num_hidden_layers": len(kept)} | _layer_types(model, kept)
    if mlp_width:
        raw["intermediate_size"] = mlp_width
        for index in range(len(kept)):
            params |= _narrow_mlp(params, f"model.layers.{index}.mlp.", mlp_width)
    return TrainableModel(raw, {name: p.clone() for name, p in params.items()}, model.fixed)


def upcycle(model: TrainableModel, shape: ModelShape, seed: int) -> TrainableModel:
    """A mixture of experts that are copies of a dense model's feed-forward layers.

    It says what the dense model says, until training makes its experts differ: sparse upcycling
    (Komatsuzaki et al., 2022), with router weights of a normal distribution and the weights of a
    token's experts adding up to 1.

    Args:
        shape: of it count the number of experts and how many a token chooses.

    Raises:
        TrainingError: the model is not one of Qwen3's form.
    """
    check_dense(model, "mixture", "num_experts")
    generator = torch.Generator().manual_seed(seed)
    params: dict[str, Tensor] = {}
    for name, param in model.params.items():
        layer, is_inside, part = name.partition(".mlp.")
        if not is_inside:
            params[name] = param
            continue
        if layer + ROUTER not in params:
            router = torch.empty(shape.num_experts, model.config.hidden_size)
            params[layer + ROUTER] = router.normal_(0.0, ROUTER_DEVIATION, generator=generator)
        for expert in range(shape.num_experts):
            params[f"{layer}.mlp.experts.{expert}.{part}"] = param.clone()
    raw = {**model.raw, **shape.mixture_keys(model.config.intermediate_size)}
    return TrainableModel(raw, params, model.fixed)


def check_dense(model: TrainableModel, becomes: str, option: str) -> None:
    """
    Args:
        becomes: what it is to be made, by an option.

    Raises:
        TrainingError: the model is not one of Qwen3's form.
    """
    kind = model.raw.get("model_type")
    if kind != "qwen3":
        raise TrainingError(
            f"a model of type {kind} cannot be turned into a {becomes}; one of type "
            f"qwen3 can, such as paceline train lm writes without {option}"
        )


def check_flat(model: TrainableModel) -> None:
    """Raise :class:`TrainingError` where sizes are not at the top of the configuration."""
    if "num_hidden_layers" not in model.raw:
        raise TrainingError("this model's configuration is nested; it cannot be cut")


def _check(config: ModelConfig, drop_layers: int, mlp_width: int) -> None:
    if config.mlp.experts is not None and (drop_layers or mlp_width):
        raise TrainingError("a mixture of experts cannot be cut; begin from a dense model")
    if not 0 <= drop_layers < config.num_layers:
        raise TrainingError(
            f"drop_layers is {drop_layers}; the model has {config.num_layers} layers; allowed: "
            f"0 to {config.num_layers - 1}"
        )
    most = config.intermediate_size
    if not 0 <= mlp_width <= most:
        raise TrainingError(f"mlp_width is {mlp_width}; allowed: 1 to {most} (0: unchanged)")


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


def _narrow_mlp(params: Mapping[str, Tensor], prefix: str, width: int) -> dict[str, Tensor]:
    """Keep the feed-forward channels with the largest product of input and output norms."""
    down = params[prefix + "down_proj.weight"]  # [hidden, channels]
    fused = prefix + "gate_up_proj.weight"
    if fused in params:
        halves = params[fused].chunk(2)
    else:
        halves = (params[prefix + "gate_proj.weight"], params[prefix + "up_proj.weight"])
    weight = down.norm(dim=0) * halves[0].norm(dim=1) * halves[1].norm(dim=1)
    best = weight.topk(width).indices.sort().values
    out = {prefix + "down_proj.weight": down[:, best]}
    if fused in params:
        out[fused] = torch.cat([half[best] for half in halves])
    else:
        out[prefix + "gate_proj.weight"] = halves[0][best]
        out[prefix + "up_proj.weight"] = halves[1][best]
    for part in ("gate_proj.bias", "up_proj.bias"):
        if prefix + part in params:
            out[prefix + part] = params[prefix + part][best]
    return out


def _layer_types(model: TrainableModel, kept: list[int]) -> dict[str, Any]:
    """Which of the kept layers have a sliding window, written out where layers differ."""
    config = model.config
    if "layer_types" in model.raw:
        return {"layer_types": [model.raw["layer_types"][i] for i in kept]}
    if config.attention.sliding_layers:
        kinds = ("full_attention", "sliding_attention")
        return {"layer_types": [kinds[config.attention.sliding_layers[i]] for i in kept]}
    return {}


def keep_frequent(
    model: TrainableModel, tokens: TokenArray, count: int, always: Iterable[int]
) -> TrainableModel:
    """The model with a head of the ``count`` tokens most frequent in a text."""
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
            f"them special; allowed: {max(1, len(kept))} to {vocab_size} (0: all)"
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
            "already; begin from the model that it was cut from, or leave draft_vocab_size out"
        )
    ids = torch.from_numpy(token_ids)
    if len(ids) == model.config.vocab_size:
        return model
    tied = model.params["model.embed_tokens.weight"]
    rows = model.params.get("lm_head.weight", tied)[ids].clone()
    offsets = torch.from_numpy(PrunedHead(token_ids, model.config.vocab_size).offsets)
    return TrainableModel(
        {**model.raw, "tie_word_embeddings": False, "draft_vocab_size": len(ids)},
        {**model.params, "lm_head.weight": rows},
        {**model.fixed, HEAD_TOKENS: offsets},
    )
