"""Writes GGUF files the way converters do: names from the gguf package, layouts as published."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from paceline.models.families.layouts import plain_expert_name
from tests.loading.gguf_gemma import (
    LAYERED,
    parameter_name,
    rope_factors,
    stacked_streams,
    write_layers,
)
from tests.loading.gguf_hybrids import (
    HYBRID_INTERLEAVED,
    hybrid_arch,
    hybrid_tensors,
    write_hybrid,
)
from tests.models.reference import RETOLD, make_model

ARCHES = {
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
    "gemma3_text": "gemma3",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "granitemoeshared": "granitemoe",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "internlm3": "llama",
    "olmo3": "olmo2",
    "glm": "chatglm",
    "hunyuan_v1_dense": "hunyuan-dense",
    "ministral3": "mistral3",
    "cohere": "command-r",
    "gpt_neox": "gptneox",
    "phi": "phi2",
    "gpt_oss": "gpt-oss",
    "llama4_text": "llama4",
}
NUMBERS = ("num_experts", "num_local_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk", "top_k_experts")
INTERLEAVED = {"llama", "granite", "granitemoe", "smollm3", "mistral3", "minicpm", "arcee"}
INTERLEAVED |= HYBRID_INTERLEAVED
YARN_KEYS = {
    "ARCH.rope.scaling.type": "yarn",
    "ARCH.rope.scaling.factor": 4.0,
    "ARCH.rope.scaling.original_context_length": 32,
}
_PLAIN = r"gate_inp|exp_probs|altup|ssm_(a|d|norm|conv1d)|shortconv\.conv|\.bias$"
IDS = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
SOFTCAPS = {"ARCH.attn_logit_softcapping": 5.0, "ARCH.final_logit_softcapping": 8.0}
GEMMA = {"ARCH.attention.scale": 20**-0.5}
GRANITE = {
    "ARCH.embedding_scale": 6.0,
    "ARCH.residual_scale": 0.3,
    "ARCH.attention.scale": 0.2,
    "ARCH.logit_scale": 3.0,
}
SLIDES = {"ARCH.attention.sliding_window_pattern": [True, True, False, True]}
# family -> metadata beyond the sizes
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biased": {},
    "llama-tied": {},
    "linear": {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": 2.0},
    "qwen2": {},
    "qwen2-yarn": YARN_KEYS,
    "qwen3": {},
    "phi3": {},
    "deepseek-v2-lite": {"ARCH.expert_gating_func": 1},
    "deepseek-v2": {**YARN_KEYS, "ARCH.rope.scaling.yarn_log_multiplier": 0.07},
    "deepseek-v3": {
        **YARN_KEYS,
        "ARCH.rope.scaling.yarn_log_multiplier": 0.05,
        "ARCH.expert_gating_func": 2,
    },
    "granite": GRANITE,
    "granite-moe": GRANITE,
    "granite-moe-shared": GRANITE,
    "gpt-oss": {
        "ARCH.rope.scaling.type": "yarn",
        "ARCH.rope.scaling.factor": 4.0,
        "ARCH.rope.scaling.original_context_length": 32,
        "ARCH.rope.scaling.yarn_beta_fast": 4.0,
    },
    "gemma2": {**GEMMA, **SOFTCAPS},
    "gemma3": {
        **GEMMA,
        "ARCH.rope.scaling.type": "linear",
        "ARCH.rope.scaling.factor": 4.0,
        "ARCH.rope.freq_base_swa": 100.0,
        "ARCH.attention.sliding_window_pattern": [True, False, True],
    },
    "smollm3": {},
    "olmo2": {},
    "olmo3": {**YARN_KEYS, **SLIDES},
    "glm": {},
    "glm4": {},
    "exaone4": SLIDES,
    "exaone4-full": {},
    "ernie4-5": {},
    "hunyuan-moe": {"ARCH.expert_shared_count": 1},
    "hunyuan": {},
    "seed-oss": {},
    "ministral3": {
        **YARN_KEYS,
        "ARCH.rope.scaling.yarn_log_multiplier": 1.0,
        "ARCH.attention.temperature_scale": 0.3,
    },
    "internlm3": {},
    "minicpm": {
        "ARCH.embedding_scale": 6.0,
        "ARCH.residual_scale": 0.3,
        "ARCH.logit_scale": 2.0,
    },
    "cohere": {"ARCH.logit_scale": 0.5},
    "cohere2": {"ARCH.logit_scale": 0.5, **SLIDES},
    "starcoder2": {},
    "nemotron": {},
    "arcee": {},
    "stablelm": {},
    "stablelm-parallel": {},
    "gpt-neox": {"ARCH.use_parallel_residual": True},
    "gpt-neox-serial": {"ARCH.use_parallel_residual": False},
    "gpt2": {},
    "phi": {},
    "apertus": {},
    "llama4-dense": {"ARCH.attention.sliding_window": 9},
    "llama4-dense-full": {"ARCH.attention.sliding_window": 0},
    "gemma3n": {},
    "gemma4": {},
    "gemma4-unified": {},
    "gemma4-inputs": {},
    "granite-hybrid": GRANITE,
    "granite-hybrid-moe": GRANITE,
}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (half, pair) to (pair, half)."""
    shape = weight.shape
    return (
        weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    )


def write_gguf(
    path: Path,
    config: Any,
    tensors: Mapping[str, torch.Tensor],
    qtype: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    other_types: Mapping[str, str] | None = None,
    shard_tensors: int = 0,
    stacks_heads: bool = True,
    arch: str = "",
) -> Path:
    """Convert a transformers configuration and its state dict.

    ``other_types`` are those of matrices, by their names in the file, that are not ``qtype``.
    With ``shard_tensors``, so many tensors go into each of several files. ``arch`` is that of
    the file, where the type of the configuration does not say it.
    """
    hybrid = hybrid_arch(config)
    arch = arch or hybrid or ARCHES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=shard_tensors)
    write_sizes(writer, config)
    if arch in LAYERED:
        write_layers(writer, config)
    if hybrid:
        write_hybrid(writer, config)
    for key, value in (metadata or {}).items():
        _write_value(writer, key.replace("ARCH", arch), value)
    names = gguf.get_tensor_name_map(
        {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[arch], config.num_hidden_layers
    )
    if arch == "llama4":
        tensors = {n: t.mT if ".experts." in n else t for n, t in tensors.items()}
    tensors = stacked_experts(stacked_streams(tensors), fused=arch in LAYERED)
    if hybrid:
        tensors = hybrid_tensors(arch, config, tensors)
    layers = range(config.num_hidden_layers)
    for key in ("alpha_p", "alpha_n", "beta", "eps") if arch == "apertus" else ():
        found = [tensors[f"model.layers.{i}.mlp.act_fn.{key}.weight"] for i in layers]
        writer.add_array(f"xielu.{key}", [float(each) for each in found])
    if stacks_heads:
        tensors = stacked_heads(config, tensors)
    for name, tensor in tensors.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".act_fn." in name:
            continue
        data = tensor.float().numpy()
        if arch in INTERLEAVED and ".q_proj." in name:
            data = interleaved(data, config.num_attention_heads)
        if arch in INTERLEAVED and ".k_proj." in name:
            data = interleaved(data, config.num_key_value_heads)
        if arch in ("gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
            data = data + 1
        if arch == "gpt2" and ".c_" in name and data.ndim == 2:
            data = np.ascontiguousarray(data.T)
        if "query_key_value" in name and arch == "gptneox":  # head by head
            by_head = data.reshape(config.num_attention_heads, 3, -1, *data.shape[1:])
            data = by_head.swapaxes(0, 1).reshape(data.shape)
        stored = parameter_name(name) or names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        stored += ".weight" if name.endswith(".sinks") else ""
        named = (other_types or {}).get(f"{stored}", qtype)
        is_matrix = data.ndim > 1 and not re.search(_PLAIN, stored)
        kind = gguf.GGMLQuantizationType[named if is_matrix else "F32"]
        packed = gguf.quants.quantize(data, kind)
        writer.add_tensor(stored, packed, raw_dtype=kind)
    if arch in LAYERED:
        extra_tensors = {**rope_factors(config), **(extra_tensors or {})}
    for name, data in (extra_tensors or {}).items():
        writer.add_tensor(name, data.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stacked_experts(tensors: Mapping[str, Any], fused: bool = False) -> dict[str, Any]:
    """A layer's experts in one stack for each kind of matrix; gates and ups ``fused`` or not."""
    found: dict[str, Any] = {}
    experts: dict[str, list[Any]] = {}
    if any(name.endswith(".experts.gate_up_proj_bias") for name in tensors):
        tensors = _outputs_first(tensors)
    for name, tensor in tensors.items():
        plain = plain_expert_name(name)
        match = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)(\..*)", plain)
        if match is not None:
            experts.setdefault(match[1] + match[3], []).append(tensor)
        elif "gate_up_proj" in plain and "expert" in plain and not fused:
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True):
                found[_weight(plain.replace("gate_up", part))] = half
        elif plain.endswith("shared_expert_gate.weight"):
            found[plain] = tensor[0]
        else:
            found[_weight(plain)] = tensor
    return {**found, **{name: torch.stack(each) for name, each in experts.items()}}


def _outputs_first(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The stacks of gpt-oss as other families have them, but gates and ups apart."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        plain = name.replace("_proj_bias", "_proj.bias")
        turned = name.endswith((".experts.gate_up_proj", ".experts.down_proj"))
        outputs_first = tensor.transpose(1, 2) if turned else tensor
        if "gate_up_proj" in name:
            for first, part in enumerate(("gate", "up")):
                found[plain.replace("gate_up", part)] = outputs_first[:, first::2]
        else:
            found[plain] = outputs_first
    return found


def stacked_heads(config: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The two halves of ``kv_b_proj`` head by head, that of the keys transposed."""
    found = dict(tensors)
    for name in tensors:
        if name.endswith(".kv_b_proj.weight"):
            sizes = (config.qk_nope_head_dim, config.v_head_dim)
            heads = found.pop(name).unflatten(0, (-1, sum(sizes)))
            keys, values = heads.split(sizes, dim=1)
            found[name.replace("kv_b", "k_b")] = keys.swapaxes(1, 2).contiguous()
            found[name.replace("kv_b", "v_b")] = values.contiguous()
    return found


def _weight(name: str) -> str:
    return name if name.endswith((".weight", ".bias")) else name + ".weight"


def _write_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    number = next(filter(None, (getattr(config, name, None) for name in NUMBERS)), None)
    if not number or writer.arch == "nemotron_h":  # whose configuration speaks of them all the same
        return
    writer.add_expert_count(number)
    used = next(filter(None, (getattr(config, name, None) for name in CHOSEN)))
    writer.add_expert_used_count(used)
    if hasattr(config, "moe_intermediate_size") or hasattr(config, "intermediate_size_mlp"):
        width = getattr(config, "moe_intermediate_size", config.intermediate_size)
        writer.add_expert_feed_forward_length(width)
    for name, write in (
        ("interleave_moe_layer_step", writer.add_interleave_moe_layer_step),
        ("n_shared_experts", writer.add_expert_shared_count),
        ("moe_num_shared_experts", writer.add_expert_shared_count),
        ("kv_lora_rank", writer.add_kv_lora_rank),
        ("q_lora_rank", writer.add_q_lora_rank),
        ("v_head_dim", writer.add_value_length_mla),
        ("qk_head_dim", writer.add_key_length_mla),
        ("n_group", writer.add_expert_group_count),
        ("topk_group", writer.add_expert_group_used_count),
        ("routed_scaling_factor", writer.add_expert_weights_scale),
        ("norm_topk_prob", writer.add_expert_weights_norm),
    ):
        if getattr(config, name, None) is not None:
            write(getattr(config, name))
    shared = getattr(config, "shared_expert_intermediate_size", None) or getattr(
        config, "shared_intermediate_size", None
    )
    if shared:
        writer.add_expert_shared_feed_forward_length(shared)


def write_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    config.allow_global_per_layer_attribute_access = True
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name("a tiny model")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    dense = [getattr(config, f"intermediate_size{end}", None) for end in ("_mlp", "")]
    writer.add_feed_forward_length(dense[0] or dense[1] or config.n_inner)
    _write_experts(writer, config)
    writer.add_head_count(config.num_attention_heads)
    latent = getattr(config, "kv_lora_rank", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    writer.add_head_count_kv(1 if latent else kv_heads)
    writer.add_key_length(latent + config.qk_rope_head_dim if latent else head_dim)
    writer.add_value_length(latent or head_dim)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for name in ("layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon"):
        if hasattr(config, name):
            writer.add_layer_norm_eps(getattr(config, name))
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        return
    rope = rope.get("full_attention", rope)
    stretch = rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2))
    writer.add_rope_freq_base(rope["rope_theta"] * stretch)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)


def _write_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


def tokenizer_metadata(tokenizer_json: Mapping[str, Any], kind: str, **more: Any) -> dict[str, Any]:
    """The vocabulary of a BPE ``tokenizer.json`` as metadata; SPM scores follow the merges."""
    model = tokenizer_json["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special = {token["content"] for token in tokenizer_json["added_tokens"] if token["special"]}
    types = [3 if token in special else 6 if token.startswith("<0x") else 1 for token in tokens]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    found = {"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": tokens}
    found["tokenizer.ggml.token_type"] = types
    if kind == "gpt2":
        found["tokenizer.ggml.merges"] = merges
    else:
        ranks = {}
        for rank, merge in enumerate(merges):
            ranks.setdefault(merge.replace(" ", ""), rank)
        found["tokenizer.ggml.scores"] = [-float(ranks.get(token, 0)) for token in tokens]
    return found | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def convert(family: str, path: Path, **options: Any) -> Any:
    model = make_model(family, **options.pop("changes", {}))
    metadata = {**IDS, **CASES.get(family, {}), **options.pop("metadata", {})}
    if family in RETOLD:
        options["arch"] = RETOLD[family](model.config)["model_type"]
    write_gguf(path, model.config, model.state_dict(), metadata=metadata, **options)
    return model
