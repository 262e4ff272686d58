"""What GGUF files of some families say beyond what all say, told as a ``config.json`` would.

* Mixtures of experts: the format keeps the matrices of all experts in one stack,
  ``ffn_{gate,up,down}_exps``; layers that have a router, ``ffn_gate_inp``, are mixtures.
* Latent attention: the architecture ``deepseek2`` stands for DeepSeek-V2 and V3, of which only V3
  has a bias for the choice of experts. Files have the matrices of all heads in stacks; older ones
  as checkpoints of Hugging Face's layout do.
* Families whose layers differ: Gemma 3n and 4.
* Hybrids: layers that have a convolution are recurrent; Falcon-H1's scalars are multiplied into the
  weights.
* Assistants of Gemma 4, told as transformers tells them but for the part that has the layers'
  sizes, which is not apart. Files have no clusters of tokens (llama.cpp, ``conversion/gemma.py``).
* Other heads of llama.cpp, told as the `speculators` library tells them. The layers of the target
  that they read are counted by their inputs, as :class:`~paceline.models.backend.Taps` does
  (llama.cpp, ``src/models/eagle3.cpp``, ``dflash.cpp`` and its conversion).

What the format leaves to its readers comes from the families' defaults. Reads no tensor but rotary
factors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.loading.gguf.metadata import PER_LAYER_KEYS, WINDOWS, GgufMetadata
from paceline.loading.gguf.names import MARKOV, head_of
from paceline.models.config import LEARNT_KEYS
from paceline.models.families import GGUF_ASSISTANT, GGUF_MODEL_TYPES
from paceline.models.families.fields import MOST_LAYERS
from paceline.models.families.rope import FULL, SLIDING
from paceline.models.layer_sizes import DELTA, SHORT_CONV

if TYPE_CHECKING:
    from paceline.tensors.arrays import Array

_SHARED = {"granitemoe": "granitemoeshared"}
_SHARED_COUNTS = ("n_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_SCORES = {1: "softmax", 2: "sigmoid"}


def _mixture_type(of: GgufMetadata) -> str:
    """The ``model_type`` of a file with experts, whose architecture stands for several."""
    model_type = GGUF_MODEL_TYPES[of.architecture]
    if model_type == "llama":
        return "mixtral"
    return _SHARED.get(model_type, model_type) if of.has(0, "ffn_up_shexp") else model_type


def expert_keys(of: GgufMetadata) -> dict[str, Any]:
    """What ``config.json`` says of the mixtures; nothing where there are none."""
    if not of.get("expert_count", 0):
        return {}
    width = of.get("expert_feed_forward_length", of.get("feed_forward_length"))
    shared = of.get("expert_shared_feed_forward_length", 0)
    used, shared_count = of.get("expert_used_count"), of.get("expert_shared_count", 0)
    scores = _SCORES.get(of.get("expert_gating_func", 0))
    scale = of.get("expert_weights_scale", 0.0)
    there = {name.split(".")[1] for name in of.tensors if name.startswith("blk.")}
    dense = [i for i in of.layers if str(i) in there and not of.has(i, "ffn_gate_inp")]
    return {
        "model_type": _mixture_type(of),
        "num_experts": of.get("expert_count"),
        **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), used),
        **dict.fromkeys(_SHARED_COUNTS, shared_count),
        "n_group": of.get("expert_group_count", 1),
        "topk_group": of.get("expert_group_used_count", 1),
        "intermediate_size": of.get("feed_forward_length", width),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": shared,
        "shared_intermediate_size": shared,
        "norm_topk_prob": of.get("expert_weights_norm", of.family.gguf.renormalises),
        **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), 0),  # the list has all
        **({"mlp_only_layers": dense} if dense else {}),
        **({"scoring_func": scores} if scores else {}),
        **({"routed_scaling_factor": scale} if scale else {}),
    }


def llama4_keys(of: GgufMetadata) -> dict[str, Any]:
    """What ``config.json`` says otherwise of Llama 4, some of which the format leaves to readers.

    Maverick, the one with 128 experts, norms no queries and keys.
    """
    chunk = of.get("attention.sliding_window", 8192)
    return {
        "intermediate_size": of.get("expert_feed_forward_length"),
        "intermediate_size_mlp": of.get("feed_forward_length"),
        "n_shared_experts": 1,
        "sliding_window": chunk or None,
        "use_qk_norm": of.get("expert_count") != 128,
        **({} if chunk else {"no_rope_layer_interval": MOST_LAYERS + 1}),
        **({} if of.get("expert_count", 0) else {"moe_layers": []}),
    }


def latent_keys(of: GgufMetadata) -> dict[str, Any]:
    """What ``config.json`` says of the attention, and of the scores of experts."""
    rope_dim = of.get("rope.dimension_count", 0)
    key_dim = of.get("attention.key_length_mla", of.get("attention.key_length", 0))
    biased = any(".exp_probs_b." in name for name in of.tensors)
    limited = of.get("expert_group_count", 1) > 1
    return {
        "model_type": "deepseek_v3" if biased else "deepseek_v2",
        "topk_method": "group_limited_greedy" if limited else "greedy",
        "kv_lora_rank": of.get("attention.kv_lora_rank"),
        "q_lora_rank": of.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_dim - rope_dim,
        "v_head_dim": of.get("attention.value_length_mla", of.get("attention.value_length")),
    }


def yarn_keys(of: GgufMetadata) -> dict[str, Any]:
    """What YaRN says of the scores' growth.

    Files of latent attention tell a tenth of it, those of others all, and these leave ``mscale`` to
    be 1.
    """
    multiplier, is_latent = of.get("rope.scaling.yarn_log_multiplier", 0.0), of.family.latent
    growth = round((10 if is_latent else 1) * multiplier, 6)
    return {"mscale": growth if is_latent else 1.0, "mscale_all_dim": growth} if growth else {}


# In the largest models of these architectures the attention scale is taken from the width; the
# metadata does not say so, and every reader of the format goes by the number of layers.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
_GEMMA_KEYS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope_local_base_freq": "rope.freq_base_swa",
}


def dense_keys(of: GgufMetadata, head_dim: int) -> dict[str, Any]:
    """What the configuration of some dense families says beyond what all have."""
    listed = {} if of.layer_types is None else {"layer_types": of.layer_types}
    match of.architecture:
        case "granite" | "granitemoe" | "granitehybrid":
            return {
                "embedding_multiplier": of.get("embedding_scale", 1.0),
                "residual_multiplier": of.get("residual_scale", 1.0),
                "attention_multiplier": of.get("attention.scale", head_dim**-0.5),
                "logits_scaling": of.get("logit_scale", 1.0),
            }
        case "gemma2" | "gemma3":
            return _gemma_keys(of, head_dim) | listed
        case "dflash":
            return {**listed, "use_sliding_window": of.layer_types is not None}
        case "olmo2" if of.get("attention.sliding_window"):
            base = of.get("rope.freq_base_swa", of.get("rope.freq_base"))
            return {"model_type": "olmo3", "rope_local_base_freq": base, **listed}
        case "exaone4":
            return listed
        case "command-r" | "cohere2":
            return {**listed, "logit_scale": of.get("logit_scale", 1.0)}
        case "stablelm":  # whose key for this is always true
            return {"use_parallel_residual": not of.has(0, "ffn_norm")}
        case "apertus":  # one list each, under keys without the architecture
            return {key: of.whole.get(key.replace("_", ".", 1)) for key in LEARNT_KEYS}
        case "gptneox":
            return {"use_parallel_residual": of.get("use_parallel_residual", True)}
        case "minicpm" if of.get("embedding_scale") is None:  # of the first models' files
            return {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256}
        case "minicpm":
            depth = max(of.get("block_count", 1), 1) ** 0.5
            divisor = of.get("logit_scale", 1.0) or 1.0
            return {
                "scale_emb": of.get("embedding_scale", 1.0),
                "scale_depth": of.get("residual_scale", 1.0) * depth,
                "dim_model_base": of.get("embedding_length", 1) / divisor,
            }
    return {}


def _gemma_keys(of: GgufMetadata, head_dim: int) -> dict[str, Any]:
    scalar: float = head_dim
    if of.get("attention.scale"):
        scalar = of.number("attention.scale") ** -2
    elif of.get("block_count") == _SCALED_BY_WIDTH[of.architecture]:
        scalar = of.number("embedding_length") / of.number("attention.head_count")
    values = {name: of.get(key) for name, key in _GEMMA_KEYS.items()}
    hf_keys = {name: value for name, value in values.items() if value is not None}
    pattern = of.listed(WINDOWS)
    if of.layer_types is None and pattern is not None:
        hf_keys["sliding_window_pattern"] = pattern
    return {"query_pre_attn_scalar": scalar, **hf_keys}


_UNTURNED = 1e29  # what a pair's angle is divided by where it is not turned, or more
_ROPE_FACTORS = "rope_freqs.weight"


def layered_keys(of: GgufMetadata, read: Callable[[str], Array]) -> dict[str, Any]:
    """What the configuration of a family whose layers differ says beyond what all have.

    Args:
        read: unpacks a stored tensor.

    Raises:
        ModelLoadError: the file does not say which layers slide, or its lists do not fit.
    """
    types = of.layer_types
    if types is None or len(types) > MOST_LAYERS:
        raise ModelLoadError("the GGUF metadata do not say which layers have a sliding window")
    full, sliding = of.get("attention.key_length"), of.get("attention.key_length_swa")
    kv_heads, widths = (_by_layer(of, key, len(types)) for key in PER_LAYER_KEYS)
    sizes = {FULL: full, SLIDING: sliding if sliding is not None else full}
    embedding = of.tensors.get("per_layer_token_embd.weight")
    scalar = of.get("final_logit_softcapping")
    shared = of.get("attention.shared_kv_layers", 0)
    own = types[: max(len(types) - shared, 0)] if isinstance(shared, int) else []
    raw = any(kind == FULL and not of.has(i, "attn_v") for i, kind in enumerate(own))
    return {
        "head_dim": sizes[SLIDING],
        "num_key_value_heads": kv_heads[0],
        "per_layer_config": {
            str(i): {"head_dim": sizes[kind], "num_key_value_heads": kv_heads[i]}
            for i, kind in enumerate(types)
        },
        "layer_types": types,
        "intermediate_size": widths,
        "attention_k_eq_v": raw,
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": of.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": embedding.shape[0] if embedding else 1,
        **({} if scalar is None else {"final_logit_softcapping": scalar}),
        "rope_parameters": _layered_rope(of, full, read),
        "enable_moe_block": bool(of.get("expert_count", 0)),
        "top_k_experts": of.get("expert_used_count"),
        **(_streams(of) if of.get("altup.num_inputs") is not None else {}),
    }


def _streams(of: GgufMetadata) -> dict[str, Any]:
    """What Gemma 3n says of its residual streams, and of gates of which few stay."""
    low_rank, key = of.tensors.get("blk.0.laurel_l.weight"), "activation_sparsity_scale"
    bounds = of.listed(key)
    if not isinstance(bounds, list) or not all(isinstance(bound, float) for bound in bounds):
        raise ModelLoadError(f"the GGUF metadata have no list of numbers {key}")
    from statistics import NormalDist  # which is slow to import

    return {
        "altup_num_inputs": of.get("altup.num_inputs"),
        "altup_active_idx": of.get("altup.active_idx", 0),
        "laurel_rank": low_rank.shape[0] if low_rank else None,
        # The file has bounds in standard deviations, -inf where all gates stay.
        "activation_sparsity_pattern": [NormalDist().cdf(bound) for bound in bounds],
    }


def _by_layer(of: GgufMetadata, key: str, count: int) -> list[Any]:
    value = of.listed(key)
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise ModelLoadError(
            f"the GGUF metadata say {key} of {len(values)} layers; there are {count}"
        )
    return values


def _layered_rope(
    of: GgufMetadata, full: Any, read: Callable[[str], Array]
) -> dict[str, dict[str, Any]]:
    """Both kinds of layers; the pairs of full ones that turn are those whose factor is 1."""
    rope: dict[str, dict[str, Any]] = {
        SLIDING: {"rope_type": "default", "rope_theta": of.get("rope.freq_base_swa", 1e4)},
        FULL: {"rope_type": "default", "rope_theta": of.get("rope.freq_base", 1e6)},
    }
    if _ROPE_FACTORS not in of.tensors:
        return rope
    factors = read(_ROPE_FACTORS)
    turned = int((factors == 1.0).sum())
    others = factors[turned:] >= _UNTURNED
    if 2 * len(factors) != full or (factors[:turned] != 1.0).any() or not others.all():
        raise UnsupportedModelError(
            f"tensor {_ROPE_FACTORS} is of another form than the factors of Gemma 4, which are 1 "
            f"for the first pairs of a head of {full} and at least {_UNTURNED:g} for the others"
        )
    # The reader of this share rounds down; the half keeps a quotient's last bit from mattering.
    rope[FULL] |= {"rope_type": "proportional", "partial_rotary_factor": (2 * turned + 0.5) / full}
    return rope


def recurrent_keys(of: GgufMetadata) -> dict[str, Any]:
    """What the configuration of a family with recurrent layers says beyond what all have.

    Raises:
        ModelLoadError: the sizes of the recurrence do not fit.
        UnsupportedModelError: the attention has a sliding window.
    """
    if of.get("attention.sliding_window"):
        raise UnsupportedModelError(
            f"GGUF files of {of.architecture} with attention.sliding_window are not supported"
        )
    hf_keys: dict[str, Any] = {"layer_types": [_layer_type(of, index) for index in of.layers]}
    if of.family.recurrent == SHORT_CONV:
        return {
            **hf_keys,
            "conv_L_cache": of.get("shortconv.l_cache"),
            "conv_bias": of.has_any("shortconv.conv.bias"),
            "block_auto_adjust_ff_dim": False,
        }
    if of.family.recurrent == DELTA:
        return hf_keys | _delta(of)
    hf_keys |= _mamba2(of)
    if of.architecture == "granitehybrid":
        hf_keys |= _granite(of)
    if of.architecture == "mamba2":
        hf_keys["head_dim"] = hf_keys["mamba_d_head"]  # what the family means by that
    if of.family.single_parts:
        hf_keys |= {
            "n_routed_experts": of.get("expert_count", 0),
            "moe_shared_expert_intermediate_size": of.get("expert_shared_feed_forward_length", 0),
            "moe_latent_size": of.get("moe_latent_size", 0),
        }
    return hf_keys


def _layer_type(of: GgufMetadata, layer: int) -> str:
    """Of models whose layers have one part, a layer may also be a feed-forward."""
    if of.has(layer, "ssm_conv1d") or of.has(layer, "shortconv.conv"):
        return "linear_attention"
    if of.family.single_parts and of.has(layer, "ffn_gate_inp"):
        return "moe"
    return "mlp" if of.family.single_parts and of.has(layer, "ffn_up") else FULL


def _delta(of: GgufMetadata) -> dict[str, Any]:
    return {
        "linear_num_value_heads": of.get("ssm.time_step_rank"),
        "linear_num_key_heads": of.get("ssm.group_count"),
        "linear_key_head_dim": of.get("ssm.state_size"),
        "linear_value_head_dim": _value_dim(of),
        "linear_conv_kernel_dim": of.get("ssm.conv_kernel"),
    }


def _mamba2(of: GgufMetadata) -> dict[str, Any]:
    return {
        "mamba_n_heads": of.get("ssm.time_step_rank"),
        "mamba_n_groups": of.get("ssm.group_count"),
        "mamba_d_state": of.get("ssm.state_size"),
        "mamba_d_head": _value_dim(of),
        "mamba_d_conv": of.get("ssm.conv_kernel"),
        "mamba_conv_bias": of.has_any("ssm_conv1d.bias"),
        "mamba_rms_norm": of.has_any("ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # no file says otherwise
    }


def _granite(of: GgufMetadata) -> dict[str, Any]:
    count = of.get("expert_count", 0)
    width = of.get("expert_shared_feed_forward_length", of.get("feed_forward_length"))
    return {
        "num_local_experts": count,
        "position_embedding_type": "rope" if of.get("rope.scaling.finetuned", True) else "nope",
        **({} if count else {"shared_intermediate_size": width}),
    }


def _value_dim(of: GgufMetadata) -> int:
    inner, heads = of.get("ssm.inner_size"), of.get("ssm.time_step_rank")
    if type(inner) is not int or type(heads) is not int or heads < 1 or inner % heads:
        wanted = f"a multiple of ssm.time_step_rank = {str(heads)[:40]}"
        raise of.error("ssm.inner_size", inner, wanted)
    return inner // heads


_OTHERS = ("hc_head_fn.weight",)
"""Tensors of DeepSeek's drafts, whose architecture is called like DFlash."""
_DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def head_keys(of: GgufMetadata) -> dict[str, Any]:
    """What a ``config.json`` of a head would say, apart from its layers."""
    if of.architecture == GGUF_ASSISTANT:
        return {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "backbone_hidden_size": of.get("embedding_length_out"),
            "num_kv_shared_layers": 0,  # all of them, with the target's
        }
    foreign = next((name for name in _OTHERS if name in of.tensors), None)
    if foreign is not None:
        raise UnsupportedModelError(
            f"{of.path} has {foreign}: it is a relative of DFlash that does not run here"
        )
    layers, rows = of.listed("target_layers"), of.tensors.get("d2t")
    markov = of.tensors.get(MARKOV)
    return {
        "speculators_model_type": head_of(of.architecture, of.tensors),
        "markov_rank": markov and markov.shape[-1],
        "aux_hidden_state_layer_ids": of.listed("extract_layers") if layers is None else layers,
        "draft_vocab_size": rows and rows.shape[0],
        "tie_word_embeddings": False,
        "block_size": of.listed("block_size"),
        "mask_token_id": of.whole.get("tokenizer.ggml.mask_token_id"),
        "sample_from_anchor": of.listed("sample_from_anchor", markov is not None),
        "norm_before_residual": of.listed("norm_before_residual"),
        "norm_before_fc": of.listed("norm_before_fc"),
        "final_logit_softcapping": of.listed("final_logit_softcapping"),
        "output_multiplier": of.listed("logit_scale"),
        **{key: of.listed(key) for key in _DFLASH2_KEYS},
    }
