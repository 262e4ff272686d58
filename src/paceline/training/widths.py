"""Narrower models: what goes is what weighs least. Knows the names of parameters, no training.

Every function takes parameters under their checkpoint names and returns those that change. Weights
alone decide, so that the same model is always cut the same way; training mends what is lost.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.errors import TrainingError
from paceline.models.config import ModelConfig

Tensor = torch.Tensor
Params = Mapping[str, Tensor]

_WRITERS = ("o_proj", "down_proj")
_READERS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
_ENDS = ("embed_tokens", "lm_head")
_HEAD_NORMS = ("q_norm", "k_norm")


def narrow_mlp(params: Params, prefix: str, width: int) -> dict[str, Tensor]:
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


# --- attention heads ------------------------------------------------------------------------------


def check_drop_heads(config: ModelConfig, count: int) -> None:
    """Raise :class:`TrainingError` unless ``count`` heads can go and leave groups of one size."""
    allowed = _droppable(config)
    if count not in allowed:
        raise TrainingError(
            f"drop_heads is {count}; of {config.num_heads} heads that share {config.num_kv_heads} "
            f"key and value heads, allowed are {', '.join(map(str, allowed))}"
        )


def _droppable(config: ModelConfig) -> list[int]:
    group = config.num_heads // config.num_kv_heads
    return [n for n in range(config.num_heads) if n % group == 0 or n % config.num_kv_heads == 0]


def kv_heads_after(config: ModelConfig, count: int) -> int:
    """Key and value heads that are left when ``count`` heads go."""
    group = config.num_heads // config.num_kv_heads
    return config.num_kv_heads - (0 if count % group else count // group)


def drop_heads(params: Params, prefix: str, config: ModelConfig, count: int) -> dict[str, Tensor]:
    """Drop ``count`` query heads of a layer: whole groups with their key and value heads where that
    comes out even, otherwise as many of each group. Those with the largest product of value and
    output norms stay.
    """
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    group = heads // kv_heads
    rows = _attention_rows(params, prefix, config)
    out = params[prefix + "o_proj.weight"]  # [hidden, heads * dim]
    values = rows["v_proj.weight"].unflatten(0, (kv_heads, dim)).flatten(1).norm(dim=1)
    outputs = out.unflatten(1, (heads, dim)).transpose(0, 1).flatten(1).norm(dim=1)
    weight = outputs.view(kv_heads, group) * values[:, None]
    if count % group == 0:
        groups = weight.norm(dim=1).topk(kv_heads - count // group).indices.sort().values
        kept = (groups[:, None] * group + torch.arange(group)).flatten()
    else:
        groups = torch.arange(kv_heads)
        inside = weight.topk(group - count // kv_heads, dim=1).indices.sort(dim=1).values
        kept = (groups[:, None] * group + inside).flatten()
    picked = {"q_proj": _channels(kept, dim)}
    picked |= dict.fromkeys(("k_proj", "v_proj"), _channels(groups, dim))
    cut = {name: p[picked[name.partition(".")[0]]] for name, p in rows.items()}
    return {
        **_put_back(params, prefix, cut),
        prefix + "o_proj.weight": out[:, picked["q_proj"]],
    }


def _channels(heads: Tensor, dim: int) -> Tensor:
    return (heads[:, None] * dim + torch.arange(dim)).flatten()


def _attention_rows(params: Params, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """Query, key and value weights and biases by their own names, fused or not."""
    names = ("q_proj", "k_proj", "v_proj")
    sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    found: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        fused = params.get(f"{prefix}qkv_proj.{kind}")
        if fused is not None:
            parts = fused.split([size * config.head_dim for size in sizes])
            found |= {f"{name}.{kind}": part for name, part in zip(names, parts, strict=True)}
        else:
            each = {f"{name}.{kind}": params.get(f"{prefix}{name}.{kind}") for name in names}
            found |= {name: p for name, p in each.items() if p is not None}
    return found


def _put_back(params: Params, prefix: str, parts: Params) -> dict[str, Tensor]:
    """:func:`_attention_rows` undone."""
    if prefix + "qkv_proj.weight" not in params:
        return {prefix + name: p for name, p in parts.items()}
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in parts)
    return {
        f"{prefix}qkv_proj.{kind}": torch.cat([parts[f"{n}_proj.{kind}"] for n in "qkv"])
        for kind in kinds
    }


# --- the residual stream --------------------------------------------------------------------------


def narrow_hidden(params: Params, width: int, norm_plus_one: bool) -> dict[str, Tensor]:
    """Keep the channels of the residual stream with the largest product of what is written to them
    and what is read from them, the same ones in all layers.

    Every matrix counts alike: a channel's share of its squared weights. What is read is read
    through a norm, so a reader's columns are scaled by the norm before it.
    """
    hidden = params["model.norm.weight"].shape[0]
    written, read = torch.zeros(hidden), torch.zeros(hidden)
    for name, p in params.items():
        module, kind = name.split(".")[-2:]
        if kind != "weight" or p.dim() != 2:
            continue
        if module in _WRITERS:
            written += _shares(p.T)
        if module == "embed_tokens":
            written += _shares(p)
        if module in _READERS or module == "lm_head" or _is_tied_head(params, module):
            norm = params[_norm_before(params, name)] + float(norm_plus_one)
            read += _shares(p * norm)
    best = (written * read).topk(width).indices.sort().values
    return {name: _narrowed(name, p, best) for name, p in params.items()}


def _is_tied_head(params: Params, module: str) -> bool:
    return module == "embed_tokens" and "lm_head.weight" not in params


def _shares(matrix: Tensor) -> Tensor:
    """Each column's share of the squared weights."""
    squares = matrix.square().sum(dim=0)
    return squares / squares.sum().clamp_min(1e-30)


def _norm_before(params: Params, reader: str) -> str:
    layer = reader.partition(".self_attn.")[0]
    if layer != reader:
        return layer + ".input_layernorm.weight"
    layer = reader.partition(".mlp.")[0]
    if layer == reader:
        return "model.norm.weight"
    before = layer + ".pre_feedforward_layernorm.weight"
    return before if before in params else layer + ".post_attention_layernorm.weight"


def _narrowed(name: str, p: Tensor, best: Tensor) -> Tensor:
    module, kind = name.split(".")[-2:]
    if module in _WRITERS:  # weights [hidden, ...] and biases [hidden]
        return p[best]
    if kind == "weight" and module in (*_READERS, *_ENDS):
        return p[:, best]
    is_norm = module.endswith("norm") and module not in _HEAD_NORMS
    return p[best] if is_norm else p
