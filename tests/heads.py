"""Toy heads: decoders whose rows take hidden states in, with random weights."""

from __future__ import annotations

from typing import Any

import torch

from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from tests.arrays import arrays
from tests.toy import TOY, toy_tensors

HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"entry.kind": "eagle3", "num_layers": 1},
    "eagle3-normed": {"entry.kind": "eagle3", "num_layers": 2, "entry.norm_before_residual": True},
    "mtp": {"entry.kind": "mtp", "num_layers": 1},
    "eagle": {"entry.kind": "eagle", "num_layers": 2, "entry.bias": True},
}
"""What each kind of head changes of :data:`~tests.toy.TOY`."""


def head_config(name: str, **changes: Any) -> ModelConfig:
    return TOY.with_traits({"tie_embeddings": False, **HEADS[name], **changes})


def head_tensors(config: ModelConfig, seed: int = 1) -> dict[str, Any]:
    """Random weights, norms included."""
    generator = torch.Generator().manual_seed(seed)
    width, first = config.hidden_size, "model.layers.0."
    tensors = toy_tensors(seed, config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 2.0 / shape[-1] ** 0.5

    if config.entry.kind == "eagle3":
        for name in "qkv":
            weight = f"{first}self_attn.{name}_proj.weight"
            tensors[weight] = drawn(len(tensors[weight]), 2 * width)
        tensors[first + "hidden_norm.weight"] = torch.ones(width)
    else:
        tensors["model.eh_proj.weight"] = drawn(width, 2 * width)
    if config.entry.kind == "mtp":
        tensors |= {f"model.{name}.weight": torch.ones(width) for name in ("enorm", "hnorm")}
    if config.entry.kind == "eagle":
        tensors["model.eh_proj.bias"] = drawn(width)
        del tensors[first + "input_layernorm.weight"], tensors["model.norm.weight"]
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):  # constants would hide mistakes
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
    return tensors


def head_runner(
    name: str, ops: Any, kv_dtype: str = "auto", blocks: int = 40, **changes: Any
) -> ModelRunner:
    config = head_config(name, **changes)
    decoder = Decoder(config, arrays(head_tensors(config)), ops, config.max_position)
    kv_dtype = ops.default_kv_dtype if kv_dtype == "auto" else kv_dtype
    return ModelRunner(decoder, KVCache(ops.kv_memory(config, blocks, kv_dtype)))
