"""What converters write of Gemma 3n and 4 beyond what all families have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
import torch

LAYERED = ("gemma4", "gemma3n")
PARAMETERS = {
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "layer_scalar": "layer_output_scale.weight",
    "mlp.gate.scale": "ffn_gate_inp.scale",
    "mlp.gate.per_expert_scale": "ffn_down_exps.scale",
}


def write_layers(writer: gguf.GGUFWriter, config: Any) -> None:
    """The keys in which layers differ, in place of those that say one value."""
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    layers = _layers(config)
    full, rope = layers[-1].head_dim, config.rope_parameters
    writer.add_sliding_window_pattern(slides)
    writer.add_head_count_kv([layer.num_key_value_heads for layer in layers])
    for add, dim in ((writer.add_key_length, full), (writer.add_value_length, full)):
        add(dim)
    if writer.arch.startswith("gemma4"):
        writer.add_key_length_swa(config.head_dim)
        writer.add_value_length_swa(config.head_dim)
        writer.add_rope_dimension_count_swa(config.head_dim)
    writer.add_rope_dimension_count(full)
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    inputs = getattr(config, "hidden_size_per_layer_input", None)
    writer.add_embedding_length_per_layer_input(inputs or 0)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if writer.arch == "gemma3n":
        shares = torch.tensor(config.activation_sparsity_pattern)
        bounds = torch.distributions.normal.Normal(0, 1).icdf(shares)
        writer.add_activation_sparsity_scale(bounds.tolist())
        writer.add_altup_active_idx(config.altup_active_idx)
        writer.add_altup_num_inputs(config.altup_num_inputs)
        return
    count, width = config.num_hidden_layers, config.intermediate_size
    twice = config.num_kv_shared_layers if config.use_double_wide_mlp else 0
    if twice:
        writer.add_feed_forward_length([width] * (count - twice) + [2 * width] * twice)


def _layers(config: Any) -> list[Any]:
    count = config.num_hidden_layers
    if config.model_type == "gemma3n_text":
        return [config] * count
    return [config.per_layer_config[i] for i in range(count)]


def stacked_streams(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Linears of further streams in one stack for each kind."""
    found, stacks = dict(tensors), dict[str, list[torch.Tensor]]()
    for name in tensors:
        match = re.fullmatch(r"(model\.altup\w*_projections)\.\d+(\.weight)", name)
        if match:
            stacks.setdefault(match[1] + match[2], []).append(found.pop(name))
    return found | {name: torch.stack(each) for name, each in stacks.items()}


def rope_factors(config: Any) -> dict[str, np.ndarray]:
    """What the angles of a full layer's pairs are divided by; Gemma 3n has nothing of the kind."""
    if config.model_type == "gemma3n_text":
        return {}
    full = _layers(config)[-1].head_dim
    share = config.rope_parameters["full_attention"].get("partial_rotary_factor", 1.0)
    turned = int(full * share / 2)
    return {"rope_freqs.weight": np.array([1.0] * turned + [1e30] * (full // 2 - turned))}


def parameter_name(name: str) -> str | None:
    """How a parameter is stored that is no matrix's weight; None for all others."""
    for own, stored in PARAMETERS.items():
        if name.removesuffix(".weight").endswith(f".{own}"):
            return f"blk.{name.split('.')[2]}.{stored}"
    return None
