"""The configuration in a GGUF file's metadata, told in Hugging Face terms and read as such.

So that bounds and family flags exist once, in :mod:`paceline.models.families.config_json`. Knows
the keys of the format and where its conventions differ from those of ``config.json``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.loading.gguf.container import GgufContainer
from paceline.loading.gguf.keys import (
    dense_keys,
    expert_keys,
    head_keys,
    latent_keys,
    layered_keys,
    llama4_keys,
    recurrent_keys,
    yarn_keys,
)
from paceline.loading.gguf.metadata import GgufMetadata
from paceline.loading.gguf.names import HEADS
from paceline.models.config import ModelConfig
from paceline.models.families import GGUF_MODEL_TYPES
from paceline.models.families.config_json import config_from_hf
from paceline.models.layer_sizes import QUERY_GROWTH
from paceline.tensors.arrays import Array, floats
from paceline.text.gguf_tokenizer import end_ids, role_id

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Rotary factors, which the configuration tells."""
_FLOAT_TYPES = {0: "float32", 1: "float16", 30: "bfloat16"}


def hf_config_from_gguf(container: GgufContainer, read: Callable[[str], Array]) -> dict[str, Any]:
    """What a ``config.json`` of the model would say.

    Args:
        container: the parsed file.
        read: unpacks a stored tensor; some rotary factors are stored as one.

    Raises:
        ModelLoadError: a key is missing or out of bounds.
        UnsupportedModelError: the model is not one that Paceline runs.
    """
    of = GgufMetadata(container)
    family, is_head = of.family, of.architecture in HEADS
    heads = of.number("attention.head_count")
    head_dim = int(of.get("attention.key_length", 0) or of.number("embedding_length") // heads)
    if of.get("attention.value_length", head_dim) != head_dim and not family.latent:
        raise UnsupportedModelError("keys and values of different sizes are not supported")
    if not of.get("attention.causal", True) and not is_head:
        raise UnsupportedModelError("models with bidirectional attention are not supported")
    biases = _biases(of)
    has_o_bias = biases["attention.o_bias"] or of.architecture == "glm4moe"
    return {
        **_sizes(of, head_dim),
        **expert_keys(of),
        **(latent_keys(of) if family.latent else {}),
        **(layered_keys(of, read) if family.per_layer else _rope(of, head_dim, read)),
        **dense_keys(of, head_dim),
        **(head_keys(of) if is_head else {}),
        "attention_bias": biases["attention.qkv_bias"] and has_o_bias,
        "use_qk_norm": of.has_any("attn_q_norm.weight"),
        "mlp_bias": biases["mlp.bias"],
        "lm_head_bias": "output.bias" in of.tensors,
        **(llama4_keys(of) if of.architecture == "llama4" else {}),
        **(recurrent_keys(of) if family.recurrent else {}),
    }


def config_from_gguf(container: GgufContainer, hf_config: Mapping[str, Any]) -> ModelConfig:
    """The configuration, from what :func:`hf_config_from_gguf` told, which raises the same."""
    config, biases = config_from_hf(hf_config), _biases(GgufMetadata(container))
    biases["attention.qkv_bias"] |= config.attention.qkv_bias
    return config.with_traits(biases)


def _sizes(of: GgufMetadata, head_dim: int) -> dict[str, Any]:
    parts = ("ffn_down", "ffn_down_exps", "ssm_out")
    samples = filter(None, (of.tensors.get(f"blk.0.{part}.weight") for part in parts))
    sample, heads = next(samples, None), of.number("attention.head_count")
    return {
        "model_type": {**GGUF_MODEL_TYPES, **HEADS}[of.architecture],
        "vocab_size": _vocab_size(of),
        "hidden_size": of.get("embedding_length"),
        "intermediate_size": of.get("feed_forward_length"),
        "num_hidden_layers": of.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": of.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": of.get("context_length"),
        "rms_norm_eps": of.get(
            "attention.layer_norm_rms_epsilon", of.get("attention.layer_norm_epsilon")
        ),
        "sliding_window": of.get("attention.sliding_window") or None,
        "tie_word_embeddings": "output.weight" not in of.tensors,
        "bos_token_id": role_id(of.whole, "bos_token_id"),
        "eos_token_id": end_ids(of.whole),
        "dtype": _FLOAT_TYPES.get(sample.type_code if sample else -1, "float32"),
    }


def _vocab_size(of: GgufMetadata) -> int:
    """Rows of the embedding; heads may take that of their target instead."""
    embedding = of.tensors.get("token_embd.weight")
    if embedding is not None:
        return embedding.shape[0]
    if of.architecture not in HEADS:
        raise ModelLoadError(f"{of.path} has no tensor token_embd.weight")
    tokens = of.whole.get("tokenizer.ggml.tokens")
    return int(of.number("vocab_size", len(tokens) if isinstance(tokens, list) else None))


def _rope(of: GgufMetadata, head_dim: int, read: Callable[[str], Array]) -> dict[str, Any]:
    if of.family.single_parts:  # whose files may have rotary keys all the same
        return {}
    rope: dict[str, Any] = {}
    if of.get("rope.freq_base") is not None:
        rope["rope_theta"] = of.get("rope.freq_base")
    dim = int(of.number("rope.dimension_count", head_dim))
    if of.architecture == "granitehybrid" and dim != head_dim:
        rope["rotary_dim"] = dim  # its configurations have no share
    elif not of.family.latent:
        # The reader of this share rounds down; the half keeps a quotient's last bit from mattering.
        rope["partial_rotary_factor"] = (dim + 0.5) / head_dim if dim != head_dim else 1.0
    trained = of.get("rope.scaling.original_context_length")
    if trained is not None:
        rope["original_max_position_embeddings"] = trained
    scaling = _stored_factors(of, dim, read) or _scaling(of)
    if scaling.get("rope_type") == "yarn" and of.family.gguf.whole_ramps:
        scaling["truncate"] = False
    # Where a file has none, a family's default must not stand in for it.
    rope["rope_scaling"] = scaling or {"rope_type": "default"}
    return rope


def _stored_factors(of: GgufMetadata, dim: int, read: Callable[[str], Array]) -> dict[str, Any]:
    """Scalings that are stored as one divisor per frequency."""

    def factors(name: str) -> list[float] | None:
        info = of.tensors.get(name)
        if info is None:
            return None
        if info.shape != (dim // 2,):
            raise ModelLoadError(f"tensor {name} has shape {info.shape}, not ({dim // 2},)")
        values: list[float] = floats(read(name)).tolist()
        return values

    both, short, long = map(factors, ROPE_TENSORS)
    if both is not None:  # the rule of Llama 3, worked out by the converter
        entry = {"short_factor": both, "long_factor": both, "attention_factor": 1.0}
        return {"rope_type": "longrope", "factor": 1.0, **entry}
    if (short is None) != (long is None):
        raise ModelLoadError(f"{of.path} has one of {' and '.join(ROPE_TENSORS[1:])} alone")
    if short is None:
        return {}
    attention = of.get("rope.scaling.attn_factor")
    entry = {"short_factor": short, "long_factor": long, "attention_factor": attention}
    return {"rope_type": "longrope", **entry}


def _scaling(of: GgufMetadata) -> dict[str, Any]:
    said = of.get("rope.scaling.type")
    factor = of.get("rope.scaling.factor", of.get("rope.scale_linear"))
    if said == "none" or not factor:
        return {}
    if said is None:
        said = "linear"  # files from before the type had a key
    scaling: dict[str, Any] = {"rope_type": said, "factor": factor}
    if said == "yarn":
        for name in ("beta_fast", "beta_slow"):
            scaling[name] = of.get(f"rope.scaling.yarn_{name}")
        growth = yarn_keys(of)
        scaling |= growth
        extra = of.number("rope.scaling.attn_factor", 1.0)
        if extra != 1.0:  # on top of the rule's own
            scaling["attention_factor"] = extra * _yarn_attention(of, **growth)
        query_growth = of.get("attention.temperature_scale")
        if query_growth is not None:  # of Ministral 3
            scaling[QUERY_GROWTH] = query_growth
    return scaling


def _yarn_attention(of: GgufMetadata, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """What YaRN's rule multiplies cosines and sines by."""
    log = math.log(max(of.number("rope.scaling.factor"), 1.0))
    return (0.1 * mscale * log + 1.0) / (0.1 * mscale_all_dim * log + 1.0)


def _biases(of: GgufMetadata) -> dict[str, bool]:
    """The model's traits that say which biases there are; no key says so."""
    names = of.tensors
    ends = (name for name in names if name.endswith(".attn_output.weight"))
    first = next(ends, "blk.0.").partition("attn_output")[0]  # of the layers with attention
    return {
        "attention.qkv_bias": f"{first}attn_q.bias" in names or f"{first}attn_qkv.bias" in names,
        "attention.o_bias": f"{first}attn_output.bias" in names,
        "mlp.bias": "blk.0.ffn_down.bias" in names,
    }
