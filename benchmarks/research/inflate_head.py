"""Widens an EAGLE-3 head as its target was widened (``inflate.py``): it drafts the same tokens.

The head reads the target's hidden states and, side by side, its embedding, each of which is
repeated in the widened target. A quantised head is written in its own numbers, unquantised.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from inflate import Shape, Tensors, inflated_config, ones, repeated, shares, widened_layer
from safetensors.torch import save_file

from paceline.models.weights import HEAD_TOKENS
from paceline.proposers.heads.checkpoint import LAYER_CONFIG, load_head
from paceline.tensors.torch_arrays import to_torch

PREFIX = "model.layers.0."
ENDS = ("model.embed_tokens.weight", "lm_head.weight")


def grouped(weight: torch.Tensor, parts: int, copies: int) -> torch.Tensor:
    """Columns that lie as repetitions of all parts, as all repetitions of each part."""
    return weight.view(len(weight), copies, parts, -1).transpose(1, 2).flatten(1)


def widened_head(small: Tensors, shape: Shape) -> Tensors:
    """All tensors of the head; raises ValueError for what EAGLE-3 heads seldom have."""
    n, large = shape.hidden, {}
    layer = {k.removeprefix(PREFIX): t for k, t in small.items() if k.startswith(PREFIX)}
    wide = widened_layer(layer, {}, shape, live=True)
    wide["hidden_norm.weight"] = repeated(layer["hidden_norm.weight"], shares(n), 0)
    for name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"):
        wide[name] = grouped(wide[name], 2, n)
    large = {PREFIX + name: tensor for name, tensor in wide.items()}
    for name in small.keys() - {PREFIX + name for name in layer}:
        tensor = small[name]
        if name == "fc.weight":
            taps = tensor.shape[1] // tensor.shape[0]
            large[name] = grouped(repeated(repeated(tensor, shares(n), 1), ones(n), 0), taps, n)
        elif name == "model.norm.weight":
            large[name] = repeated(tensor, shares(n), 0)
        elif name in ENDS:
            large[name] = repeated(tensor, ones(n), 1)
        elif name in (HEAD_TOKENS, "t2d"):
            large[name] = tensor
        else:
            raise ValueError(f"heads with {name} cannot be widened")
    return large


def write_widened_head(source: Path, out: Path, repetitions: int) -> Path:
    """The head of a folder with its hidden vector, its heads and its units repeated; returns
    the folder that it is written to."""
    head, shape = load_head(str(source)), Shape(*[repetitions] * 4, layers=1)
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    raw.pop("quantization_config", None)
    layer = raw.get(LAYER_CONFIG, raw)
    layer.setdefault("head_dim", layer["hidden_size"] // layer["num_attention_heads"])
    layer.update(inflated_config(layer, shape))
    stored = {**head.decoder.tensors, **head.fusion}
    small = {name: to_torch(array) for name, array in stored.items()}
    large = {name: tensor.contiguous() for name, tensor in widened_head(small, shape).items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(large, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    return out
