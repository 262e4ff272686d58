"""Small models cut out of bigger ones: fewer layers, narrower feed-forwards. Knows no training."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from paceline.errors import TrainingError
from paceline.training.model_files import TrainableModel

Tensor = torch.Tensor
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")


def cut_model(model: TrainableModel, drop_layers: int = 0, mlp_width: int = 0) -> TrainableModel:
    """Drop layers and feed-forward channels of a model.

    Args:
        model: is left as it is.
        drop_layers: how many layers go. Those that stay are spread evenly, first and last included.
        mlp_width: feed-forward channels that stay, those with the largest product of input and
            output norms in each layer; 0 keeps all.

    Raises:
        TrainingError: nothing would be left, or the width exceeds the model's.
    """
    config = model.config
    if not 0 <= drop_layers < config.num_layers:
        raise TrainingError(
            f"drop_layers is {drop_layers}; the model has {config.num_layers} layers, so allowed "
            f"are 0 to {config.num_layers - 1}"
        )
    if not 0 <= mlp_width <= config.intermediate_size:
        raise TrainingError(
            f"mlp_width is {mlp_width}; allowed are 1 to {config.intermediate_size} (0: unchanged)"
        )
    if "num_hidden_layers" not in model.raw:
        raise TrainingError("this model's configuration is nested; it cannot be cut")
    kept = kept_layers(config.num_layers, config.num_layers - drop_layers)
    params = _keep_layers(model.params, kept)
    raw = {**model.raw, "num_hidden_layers": len(kept)} | _layer_types(model, kept)
    if mlp_width and mlp_width < config.intermediate_size:
        for index in range(len(kept)):
            params |= _narrow(params, f"model.layers.{index}.mlp.", mlp_width)
        raw["intermediate_size"] = mlp_width
    return TrainableModel(raw, {name: p.clone() for name, p in params.items()})


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


def _narrow(params: Mapping[str, Tensor], prefix: str, width: int) -> dict[str, Tensor]:
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
