"""What converters write of hybrid models beyond what all families have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import gguf
import torch

HYBRID_ARCHES = {
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "falcon_h1": "falcon-h1",
    "nemotron_h": "nemotron_h",
    "mamba2": "mamba2",
    "bamba": "granitehybrid",
}
HYBRID_INTERLEAVED = {"granitehybrid", "nemotron_h", "nemotron_h_moe"}
_NO_WEIGHT = re.compile(r"(A_log|\.D|dt_bias|e_score_correction_bias|expert_bias)\.weight$")


def hybrid_arch(config: Any) -> str:
    """What a file of the configuration says it is; empty for models without recurrent layers."""
    found = HYBRID_ARCHES.get(config.model_type, "")
    return found + "_moe" if found == "nemotron_h" and "moe" in config.layers_block_type else found


def write_hybrid(writer: gguf.GGUFWriter, config: Any) -> None:
    """The keys of recurrences, and lists in place of numbers of layers that have nothing of it."""
    c, arch = config, writer.arch
    if arch.startswith("lfm2"):
        writer.add_shortconv_l_cache(c.conv_L_cache)
        writer.add_layer_norm_rms_eps(c.norm_eps)
    elif arch.startswith("qwen3"):
        writer.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
        writer.add_ssm_state_size(c.linear_key_head_dim)
        writer.add_ssm_group_count(c.linear_num_key_heads)
        writer.add_ssm_time_step_rank(c.linear_num_value_heads)
        writer.add_ssm_inner_size(c.linear_value_head_dim * c.linear_num_value_heads)
        writer.add_full_attention_interval(4)
        if arch != "qwen3next":
            writer.add_rope_dimension_sections([2, 1, 1, 0])
    else:
        _write_mamba(writer, c)
    if arch == "mamba2":  # nothing is said of what it has not
        for key in ("key_length", "value_length", "head_count_kv"):
            del writer.kv_data[0][f"mamba2.attention.{key}"]
        writer.add_head_count(0)
        writer.add_feed_forward_length(0)
        writer.add_layer_norm_rms_eps(c.layer_norm_epsilon)
    if arch in ("falcon-h1", "mamba2"):
        return
    is_bamba = c.model_type == "bamba"
    types = c.layers_block_type if is_bamba or arch.startswith("nemotron") else c.layer_types
    if arch.startswith("qwen3"):
        writer.add_array(f"{arch}.attention.recurrent_layers", [t[0] == "l" for t in types])
        return
    attends = [kind in ("attention", "full_attention") for kind in types]
    writer.add_head_count_kv([c.num_key_value_heads * each for each in attends])
    if arch == "lfm2":
        width = 2 * c.intermediate_size // 3
        multiple = c.block_multiple_of
        writer.add_feed_forward_length(-(-width // multiple) * multiple)
    if arch == "lfm2moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(c.num_dense_layers)
    if arch.startswith("nemotron"):
        width = c.moe_intermediate_size if arch.endswith("moe") else c.intermediate_size
        writer.add_feed_forward_length([width * (kind in ("mlp", "moe")) for kind in types])
    if arch == "nemotron_h_moe":
        writer.add_expert_shared_feed_forward_length(c.moe_shared_expert_intermediate_size)
    if arch == "granitehybrid":
        if not is_bamba:
            writer.add_expert_shared_feed_forward_length(c.shared_intermediate_size)
        rotates = is_bamba or getattr(c, "position_embedding_type", None) == "rope"
        writer.add_rope_scaling_finetuned(rotates)


def _write_mamba(writer: gguf.GGUFWriter, config: Any) -> None:
    def of(*names: str) -> Any:
        return next(getattr(config, name) for name in names if hasattr(config, name))

    heads = of("mamba_n_heads", "mamba_num_heads", "num_heads")
    writer.add_ssm_conv_kernel(of("mamba_d_conv", "conv_kernel"))
    writer.add_ssm_state_size(of("mamba_d_state", "ssm_state_size", "state_size"))
    writer.add_ssm_group_count(of("mamba_n_groups", "n_groups"))
    writer.add_ssm_time_step_rank(heads)
    dims = of("mamba_d_head", "mamba_head_dim", "head_dim")
    writer.add_ssm_inner_size(getattr(config, "mamba_d_ssm", None) or heads * dims)


def hybrid_tensors(
    arch: str, config: Any, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors as the architecture's converter changes them, by names that its map knows."""
    found: dict[str, torch.Tensor] = {}
    for label, tensor in tensors.items():
        name, changed = _NO_WEIGHT.sub(r"\1", label), tensor.float()
        if arch in ("qwen35", "qwen35moe") and ".linear_attn." in name:
            changed = _tiled(config, name, changed)
        if arch == "falcon-h1":
            changed = _scaled(config, name, changed)
        if name.endswith("A_log"):
            changed = -changed.exp()
        if arch.startswith("qwen3"):
            if name.endswith("norm.weight") and "linear_attn.norm" not in name:
                changed = changed + 1
        elif name.endswith(("A_log", ".D")):
            changed = changed[:, None]
        elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            groups = getattr(config, "mamba_n_groups", None) or config.n_groups
            changed = changed.reshape(groups, -1)
        if name.endswith(("conv1d.weight", "conv.conv.weight")):
            changed = changed.squeeze(1)
        if name.endswith("in_proj_qkvz.weight"):
            found |= _apart(config, name, changed)
        elif not (name.endswith("lm_head.weight") and config.tie_word_embeddings):
            found[_renamed(arch, config, name)] = changed
    return found


def _renamed(arch: str, config: Any, name: str) -> str:
    name = re.sub(r"\.dt_bias$", ".dt_proj.bias", name)
    if arch.startswith("nemotron"):
        name = re.sub(r"^model\.(?!norm_f)", "backbone.", name).replace("dt_proj", "dt")
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        return re.sub(r"backbone(\.layers\.\d+)\.mixer\.experts", r"model\1.mlp.experts", name)
    if arch.startswith("lfm2"):
        return name.replace("expert_bias", "expert_bias.bias")
    if arch == "granitehybrid" and not getattr(config, "num_local_experts", 0):
        return name.replace(".mlp.shared_expert.", ".mlp.")
    return name


def _tiled(config: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Heads of values from key by key to the first of every key, the second of every key, ..."""
    groups = config.linear_num_key_heads
    each = config.linear_num_value_heads // groups
    keys = 2 * groups * config.linear_key_head_dim

    def turned(part: torch.Tensor) -> torch.Tensor:
        return part.unflatten(0, (groups, each, -1)).swapaxes(0, 1).flatten(0, 2)

    if "in_proj_qkv" in name or "conv1d" in name:
        return torch.cat((tensor[:keys], turned(tensor[keys:])))
    if "out_proj" in name:
        return turned(tensor.T).T.contiguous()
    return tensor if "norm" in name else turned(tensor)


def _apart(config: Any, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Queries, keys and values, and gates, which a checkpoint has group by group."""
    key, each = config.linear_key_head_dim, config.linear_num_value_heads
    values = each // config.linear_num_key_heads * config.linear_value_head_dim
    groups = tensor.unflatten(0, (config.linear_num_key_heads, -1))
    q, k, v, z = (part.flatten(0, 1) for part in groups.split([key, key, values, values], 1))
    return {name.replace("qkvz", "qkv"): torch.cat((q, k, v)), name.replace("qkvz", "z"): z}


def _scaled(config: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Falcon-H1's scalars, multiplied into the weights."""
    c = config
    inner, state = c.mamba_d_ssm, c.mamba_n_groups * c.mamba_d_state
    widths = torch.tensor([inner, inner, state, state, c.mamba_n_heads])
    rows = torch.tensor(c.ssm_multipliers).repeat_interleave(widths)[:, None]
    read = c.attention_in_multiplier
    for part, factor in (
        ("down_proj", c.mlp_multipliers[1]),
        ("gate_proj", c.mlp_multipliers[0]),
        ("k_proj", c.key_multiplier * read),
        ("q_proj", read),
        ("v_proj", read),
        ("o_proj", c.attention_out_multiplier),
        ("out_proj", c.ssm_out_multiplier),
        ("in_proj", c.ssm_in_multiplier * rows),
        ("lm_head", c.lm_head_multiplier),
        ("embed_tokens", c.embedding_multiplier),
    ):
        if f".{part}." in f".{name}":
            return tensor * factor
    return tensor
