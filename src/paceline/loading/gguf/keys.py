"""What GGUF files of some families say beyond what all say, told as a ``config.json`` would.

* Mixtures of experts: the format keeps the matrices of all experts in one stack,
  ``ffn_{gate,up,down}_exps``; layers that have a router, ``ffn_gate_inp``, are mixtures.
* Latent attention: the architecture ``deepseek2`` stands for DeepSeek-V2 and V3, of which only V3
  has a bias for the choice of experts. Files have the matrices of all heads in stacks; older ones
  as checkpoints of Hugging Face's layout do.
* Families whose layers differ: Gemma 3n and 4.
* Hybrids: layers that have a convolution are recurrent; Falcon-H1's scalars are multiplied into the
  weights.
* Heads of llama.cpp, told as the `speculators` library tells them. The layers of the target that
  they read are counted by their inputs, as :class:`~paceline.models.backend.Taps` does (llama.cpp,
  ``src/models/eagle3.cpp``, ``dflash.cpp`` and its conversion).

What the format leaves to its readers comes from the families' defaults. Reads no tensor but rotary
factors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.models.config import LEARNT_KEYS
from paceline.models.families import gguf_architectures, gguf_family
from paceline.models.families.fields import MOST_LAYERS
from paceline.models.families.rope import FULL, SLIDING
from paceline.models.layer_sizes import DELTA, MAMBA2, SHORT_CONV

if TYPE_CHECKING:
    from paceline.loading.gguf.container import GgufContainer, TensorInfo
    from paceline.tensors.arrays import Array


EXPERT_BLOCK = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""Parts of a layer by their names in a file, and where they belong in a checkpoint."""
_OF_LLAMA = "mixtral"
_SHARED = {"granitemoe": "granitemoeshared"}
_SHARED_COUNTS = ("n_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_SCORES = {1: "softmax", 2: "sigmoid"}


def mixture_type(model_type: str, tensors: Collection[str]) -> str:
    """The ``model_type`` of a file with experts, whose architecture stands for several."""
    if model_type == "llama":
        return _OF_LLAMA
    return _SHARED.get(model_type, model_type) if _has(tensors, 0, "ffn_up_shexp") else model_type


def expert_keys(
    get: Callable[..., Any], architecture: str, tensors: Mapping[str, TensorInfo], num_layers: int
) -> dict[str, Any]:
    """What ``config.json`` says of the mixtures."""
    width = get("expert_feed_forward_length", get("feed_forward_length"))
    shared = get("expert_shared_feed_forward_length", 0)
    used, shared_count = get("expert_used_count"), get("expert_shared_count", 0)
    scores = _SCORES.get(get("expert_gating_func", 0))
    scale = get("expert_weights_scale", 0.0)
    layers = range(min(num_layers, MOST_LAYERS))  # more are refused by whoever reads this
    there = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    dense = [i for i in layers if str(i) in there and not _has(tensors, i, "ffn_gate_inp")]
    return {
        "num_experts": get("expert_count"),
        **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), used),
        **dict.fromkeys(_SHARED_COUNTS, shared_count),
        "n_group": get("expert_group_count", 1),
        "topk_group": get("expert_group_used_count", 1),
        "intermediate_size": get("feed_forward_length", width),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": shared,
        "shared_intermediate_size": shared,
        "norm_topk_prob": get("expert_weights_norm", gguf_family(architecture).gguf.renormalises),
        **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), 0),  # the list has all
        **({"mlp_only_layers": dense} if dense else {}),
        **({"scoring_func": scores} if scores else {}),
        **({"routed_scaling_factor": scale} if scale else {}),
    }


def llama4_keys(get: Callable[..., Any]) -> dict[str, Any]:
    """What ``config.json`` says otherwise of Llama 4, some of which the format leaves to readers.

    Maverick, the one with 128 experts, norms no queries and keys.
    """
    chunk = get("attention.sliding_window", 8192)
    return {
        "intermediate_size": get("expert_feed_forward_length"),
        "intermediate_size_mlp": get("feed_forward_length"),
        "n_shared_experts": 1,
        "sliding_window": chunk or None,
        "use_qk_norm": get("expert_count") != 128,
        **({} if chunk else {"no_rope_layer_interval": MOST_LAYERS + 1}),
        **({} if get("expert_count", 0) else {"moe_layers": []}),
    }


def _has(tensors: Collection[str], layer: int, part: str) -> bool:
    return f"blk.{layer}.{part}.weight" in tensors


LATENT = gguf_architectures(latent=True)
LATENT_BLOCK = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
}
"""Parts of a layer by their names in a file, and where they belong in a checkpoint."""


def latent_keys(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
    """What ``config.json`` says of the attention, and of the scores of experts."""
    rope_dim = get("rope.dimension_count", 0)
    key_dim = get("attention.key_length_mla", get("attention.key_length", 0))
    biased = any(".exp_probs_b." in name for name in tensors)
    limited = get("expert_group_count", 1) > 1
    return {
        "model_type": "deepseek_v3" if biased else "deepseek_v2",
        "topk_method": "group_limited_greedy" if limited else "greedy",
        "kv_lora_rank": get("attention.kv_lora_rank"),
        "q_lora_rank": get("attention.q_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_dim - rope_dim,
        "v_head_dim": get("attention.value_length_mla", get("attention.value_length")),
    }


def yarn_keys(get: Callable[..., Any], is_latent: bool) -> dict[str, Any]:
    """What YaRN says of the scores' growth.

    Files of latent attention tell a tenth of it, those of others all, and these leave ``mscale`` to
    be 1.
    """
    told = get("rope.scaling.yarn_log_multiplier", 0.0)
    growth = round((10 if is_latent else 1) * told, 6)
    mscale = growth if is_latent else 1.0
    return {"mscale": mscale, "mscale_all_dim": growth} if growth else {}


_WINDOW = "attention.sliding_window"


def dense_keys(
    get: Callable[..., Any],
    architecture: str,
    layer_types: list[str] | None,
    tensors: Collection[str],
    metadata: Mapping[str, Any],
) -> dict[str, Any]:
    """What the family's configuration says beyond what all have."""
    listed = {} if layer_types is None else {"layer_types": layer_types}
    if architecture == "olmo2" and get(_WINDOW):
        base = get("rope.freq_base_swa", get("rope.freq_base"))
        return {"model_type": "olmo3", "rope_local_base_freq": base, **listed}
    if architecture == "exaone4":
        return listed
    if architecture in ("command-r", "cohere2"):
        return {**listed, "logit_scale": get("logit_scale", 1.0)}
    if architecture == "stablelm":  # whose key for this is always true
        return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors}
    if architecture == "apertus":  # one list each, under keys without the architecture
        return {key: metadata.get(key.replace("_", ".", 1)) for key in LEARNT_KEYS}
    if architecture == "gptneox":
        return {"use_parallel_residual": get("use_parallel_residual", True)}
    if architecture == "minicpm" and get("embedding_scale") is None:  # of the first models' files
        return {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256}
    if architecture == "minicpm":
        return {
            "scale_emb": get("embedding_scale", 1.0),
            "scale_depth": get("residual_scale", 1.0) * max(get("block_count", 1), 1) ** 0.5,
            "dim_model_base": get("embedding_length", 1) / (get("logit_scale", 1.0) or 1.0),
        }
    return {}


LAYERED = gguf_architectures(per_layer=True)
"""Architectures of these families."""
PER_LAYER_KEYS = ("attention.head_count_kv", "feed_forward_length")
"""Keys that may have a value for each layer of theirs."""
LAYERED_TOP = {
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
    "altup_proj.weight": "model.altup_projections.weight",
    "altup_unembd_proj.weight": "model.altup_unembed_projections.weight",
}
LAYERED_BLOCK = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
"""Parts of a layer by their names in a file, and where they belong in a checkpoint."""
LAYERED_PARAMETERS = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "mlp.gate.scale",
    "ffn_down_exps.scale": "mlp.gate.per_expert_scale",
    "altup_correct_scale.weight": "altup.correct_output_scale",
}
"""The same of parameters that are no matrix's weight."""
_UNTURNED = 1e29  # what a pair's angle is divided by where it is not turned, or more
_ROPE_FACTORS = "rope_freqs.weight"


def layered_keys(
    get: Callable[..., Any],
    per_layer: Callable[[str], Any],
    layer_types: list[str] | None,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], Array],
) -> dict[str, Any]:
    """What the family's configuration says beyond what all have.

    Args:
        get: a value of the architecture's metadata, by its key, and what stands for a missing one.
        per_layer: the same of keys that may have a list.
        layer_types: which layers have a sliding window.
        tensors: those in the file.
        read: unpacks one.

    Raises:
        ModelLoadError: the file does not say which layers slide, or its lists do not fit.
    """
    if layer_types is None or len(layer_types) > MOST_LAYERS:
        raise ModelLoadError("the GGUF metadata do not say which layers have a sliding window")
    full, sliding = get("attention.key_length"), get("attention.key_length_swa")
    kv_heads, widths = (_listed(per_layer(key), layer_types, key) for key in PER_LAYER_KEYS)
    sizes = {FULL: full, SLIDING: sliding if sliding is not None else full}
    embedding = tensors.get("per_layer_token_embd.weight")
    scalar = get("final_logit_softcapping")
    own = _own(get, layer_types)
    raw = any(k == FULL and f"blk.{i}.attn_v.weight" not in tensors for i, k in own)
    return {
        "head_dim": sizes[SLIDING],
        "num_key_value_heads": kv_heads[0],
        "per_layer_config": {
            str(i): {"head_dim": sizes[kind], "num_key_value_heads": kv_heads[i]}
            for i, kind in enumerate(layer_types)
        },
        "layer_types": layer_types,
        "intermediate_size": widths,
        "attention_k_eq_v": raw,
        "num_kv_shared_layers": get("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": embedding.shape[0] if embedding else 1,
        **({} if scalar is None else {"final_logit_softcapping": scalar}),
        "rope_parameters": _rope(get, full, read if _ROPE_FACTORS in tensors else None),
        "enable_moe_block": bool(get("expert_count", 0)),
        "top_k_experts": get("expert_used_count"),
        **(_streams(get, per_layer, tensors) if get("altup.num_inputs") is not None else {}),
    }


def _streams(
    get: Callable[..., Any], per_layer: Callable[[str], Any], tensors: Mapping[str, TensorInfo]
) -> dict[str, Any]:
    """What Gemma 3n says of its residual streams, and of gates of which few stay."""
    low_rank, key = tensors.get("blk.0.laurel_l.weight"), "activation_sparsity_scale"
    bounds = per_layer(key)
    if not isinstance(bounds, list) or not all(isinstance(each, float) for each in bounds):
        raise ModelLoadError(f"the GGUF metadata have no list of numbers {key}")
    from statistics import NormalDist  # which is slow to import

    return {
        "altup_num_inputs": get("altup.num_inputs"),
        "altup_active_idx": get("altup.active_idx", 0),
        "laurel_rank": low_rank.shape[0] if low_rank else None,
        # The file has bounds in standard deviations, -inf where all gates stay.
        "activation_sparsity_pattern": [NormalDist().cdf(each) for each in bounds],
    }


def _own(get: Callable[..., Any], layer_types: list[str]) -> list[tuple[int, str]]:
    """Layers that have keys and values of their own."""
    shared = get("attention.shared_kv_layers", 0)
    count = len(layer_types) - shared if isinstance(shared, int) else 0
    return list(enumerate(layer_types))[: max(count, 0)]


def _listed(value: Any, layer_types: list[str], key: str) -> list[Any]:
    found = value if isinstance(value, list) else [value] * len(layer_types)
    if len(found) != len(layer_types):
        raise ModelLoadError(
            f"the GGUF metadata say {key} of {len(found)} layers; there are {len(layer_types)}"
        )
    return found


def _rope(
    get: Callable[..., Any], full: Any, read: Callable[[str], Array] | None
) -> dict[str, dict[str, Any]]:
    """Both kinds of layers; the pairs of full ones that turn are those whose factor is 1."""
    found: dict[str, dict[str, Any]] = {
        SLIDING: {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 1e4)},
        FULL: {"rope_type": "default", "rope_theta": get("rope.freq_base", 1e6)},
    }
    if read is None:
        return found
    factors = read(_ROPE_FACTORS)
    turned = int((factors == 1.0).sum())
    others = factors[turned:] >= _UNTURNED
    if 2 * len(factors) != full or (factors[:turned] != 1.0).any() or not others.all():
        raise UnsupportedModelError(
            f"tensor {_ROPE_FACTORS} is of another form than the factors of Gemma 4, which are 1 "
            f"for the first pairs of a head of {full} and at least {_UNTURNED:g} for the others"
        )
    # The reader of this share rounds down; the half keeps a quotient's last bit from mattering.
    found[FULL] |= {"rope_type": "proportional", "partial_rotary_factor": (2 * turned + 0.5) / full}
    return found


DELTA_HYBRIDS = gguf_architectures(recurrent=DELTA)
_CONVOLVED = gguf_architectures(recurrent=SHORT_CONV)
WITHOUT_ATTENTION = ("mamba2",)
_SINGLE_PARTS = gguf_architectures(single_parts=True)
WITHOUT_ROTARY = _SINGLE_PARTS
"""Architectures of these. Their files may have rotary keys all the same."""
HYBRIDS = (*DELTA_HYBRIDS, *_CONVOLVED, *gguf_architectures(recurrent=MAMBA2))
"""Architectures of these models. Lists of theirs say 0 for layers that have nothing of the kind."""
NO_ATTENTION = {
    "attention.head_count": 1,
    "attention.head_count_kv": 1,
    "attention.key_length": 2,
    "attention.value_length": 2,
    "feed_forward_length": 1,
}
"""What stands for the zeros in files of :data:`WITHOUT_ATTENTION`, which have no feed-forwards
either."""
RECURRENT_BLOCK = {
    "shortconv.in_proj": "linear_attn.in_proj",
    "shortconv.conv": "linear_attn.conv1d",
    "shortconv.out_proj": "linear_attn.out_proj",
    "ssm_in": "linear_attn.in_proj",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
}
"""Parts of a layer by their names in a file, and where they belong in a checkpoint."""
DELTA_BLOCK = {
    "ssm_in": "linear_attn.in_proj_qkvz",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
}
"""The same of what gated delta nets have under the names of other parts."""
RECURRENT_PARAMETERS = {
    "ssm_a": "linear_attn.A",
    "ssm_d": "linear_attn.D",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ffn_norm": "post_attention_layernorm.weight",  # of Falcon-H1
}
"""The same of parameters that are no matrix's weight."""
FLAT = ("ssm_a", "ssm_d", "ssm_norm")
"""Vectors that may be stored as matrices."""


def recurrent_keys(
    get: Callable[..., Any], architecture: str, tensors: Collection[str], num_layers: int
) -> dict[str, Any]:
    """What the family's configuration says beyond what all have.

    Args:
        get: a value of the architecture's metadata, by its key, and what stands for a missing one.
        tensors: names of those in the file.

    Raises:
        ModelLoadError: the sizes of the recurrence do not fit.
        UnsupportedModelError: the attention has a sliding window.
    """
    if get("attention.sliding_window"):
        raise UnsupportedModelError(
            f"GGUF files of {architecture} with attention.sliding_window are not supported"
        )
    layers = range(min(num_layers, MOST_LAYERS))  # more are refused by whoever reads this
    single = architecture in _SINGLE_PARTS
    found: dict[str, Any] = {"layer_types": [_kind(tensors, index, single) for index in layers]}
    if architecture in _CONVOLVED:
        return {
            **found,
            "conv_L_cache": get("shortconv.l_cache"),
            "conv_bias": _any(tensors, "shortconv.conv.bias"),
            "block_auto_adjust_ff_dim": False,
        }
    if architecture in DELTA_HYBRIDS:
        return found | _delta(get)
    found |= _mamba2(get, tensors)
    if architecture == "granitehybrid":
        found |= _granite(get)
    if architecture in WITHOUT_ATTENTION:
        found["head_dim"] = found["mamba_d_head"]  # what the family means by that
    if single:
        found |= {
            "n_routed_experts": get("expert_count", 0),
            "moe_shared_expert_intermediate_size": get("expert_shared_feed_forward_length", 0),
            "moe_latent_size": get("moe_latent_size", 0),
        }
    return found


def _kind(tensors: Collection[str], layer: int, single: bool) -> str:
    """Of a layer; of models whose layers have one part, also a feed-forward."""
    p = f"blk.{layer}."
    if p + "ssm_conv1d.weight" in tensors or p + "shortconv.conv.weight" in tensors:
        return "linear_attention"
    if single and p + "ffn_gate_inp.weight" in tensors:
        return "moe"
    return "mlp" if single and p + "ffn_up.weight" in tensors else "full_attention"


def _delta(get: Callable[..., Any]) -> dict[str, Any]:
    return {
        "linear_num_value_heads": get("ssm.time_step_rank"),
        "linear_num_key_heads": get("ssm.group_count"),
        "linear_key_head_dim": get("ssm.state_size"),
        "linear_value_head_dim": _value_dim(get),
        "linear_conv_kernel_dim": get("ssm.conv_kernel"),
    }


def _mamba2(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
    return {
        "mamba_n_heads": get("ssm.time_step_rank"),
        "mamba_n_groups": get("ssm.group_count"),
        "mamba_d_state": get("ssm.state_size"),
        "mamba_d_head": _value_dim(get),
        "mamba_d_conv": get("ssm.conv_kernel"),
        "mamba_conv_bias": _any(tensors, "ssm_conv1d.bias"),
        "mamba_rms_norm": _any(tensors, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # no file says otherwise
    }


def _granite(get: Callable[..., Any]) -> dict[str, Any]:
    width = get("expert_shared_feed_forward_length", get("feed_forward_length"))
    return {
        "num_local_experts": get("expert_count", 0),
        "position_embedding_type": "rope" if get("rope.scaling.finetuned", True) else "nope",
        **({} if get("expert_count", 0) else {"shared_intermediate_size": width}),
    }


def _value_dim(get: Callable[..., Any]) -> int:
    inner, heads = get("ssm.inner_size"), get("ssm.time_step_rank")
    if type(inner) is not int or type(heads) is not int or heads < 1 or inner % heads:
        raise ModelLoadError(
            f"the GGUF metadata say ssm.inner_size = {str(inner)[:40]}; it must be a multiple of "
            f"ssm.time_step_rank = {str(heads)[:40]}"
        )
    return inner // heads


def _any(tensors: Collection[str], part: str) -> bool:
    return any(name.endswith(f".{part}") for name in tensors)


_OTHERS = ("markov_w1.weight", "selector_hidden.weight", "hc_head_fn.weight")
"""Tensors of DSpark, DFlash 2 and DeepSeek's drafts, whose architecture is called like DFlash."""


def head_keys(container: GgufContainer, architecture: str) -> dict[str, Any]:
    """What a ``config.json`` of the head would say, apart from its layers."""
    metadata, tensors = container.metadata, container.tensors
    foreign = next((name for name in _OTHERS if name in tensors), None)
    if foreign is not None:
        raise UnsupportedModelError(
            f"{container.path} has {foreign}: it is a relative of DFlash that does not run here"
        )

    def value(*keys: str) -> Any:
        found = (metadata.get(f"{architecture}.{key}") for key in keys)
        return next((each for each in found if each is not None), None)

    rows = tensors.get("d2t")
    return {
        "speculators_model_type": architecture,
        "aux_hidden_state_layer_ids": value("target_layers", "extract_layers"),
        "draft_vocab_size": rows and rows.shape[0],
        "tie_word_embeddings": False,
        "block_size": value("block_size"),
        "mask_token_id": metadata.get("tokenizer.ggml.mask_token_id"),
        "norm_before_residual": value("norm_before_residual"),
        "norm_before_fc": value("norm_before_fc"),
        "final_logit_softcapping": value("final_logit_softcapping"),
        "output_multiplier": value("logit_scale"),
    }
