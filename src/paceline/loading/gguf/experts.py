"""Mixtures of experts in GGUF files, told as a ``config.json`` would. Pure: reads no tensor.

The format keeps the matrices of all experts in one stack, ``ffn_{gate,up,down}_exps``; which layers
are mixtures shows in which have a router, ``ffn_gate_inp``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from paceline.models.families.fields import MOST_LAYERS

if TYPE_CHECKING:
    from paceline.loading.gguf.container import TensorInfo

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
_RENORMALISED = ("qwen3moe", "qwen3next", "qwen35moe", "lfm2moe")
"""Architectures whose weights add up to 1 where no key says so."""


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
        "norm_topk_prob": get("expert_weights_norm", architecture in _RENORMALISED),
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
