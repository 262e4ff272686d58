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
    HYBRIDS,
    LATENT,
    LAYERED,
    NO_ATTENTION,
    PER_LAYER_KEYS,
    WITHOUT_ATTENTION,
    WITHOUT_ROTARY,
    dense_keys,
    expert_keys,
    head_keys,
    latent_keys,
    layered_keys,
    llama4_keys,
    mixture_type,
    recurrent_keys,
    yarn_keys,
)
from paceline.loading.gguf.names import HEADS
from paceline.models.config import ModelConfig
from paceline.models.families import GGUF_MODEL_TYPES, gguf_family
from paceline.models.families.config_json import config_from_hf
from paceline.models.layer_sizes import QUERY_GROWTH
from paceline.tensors.arrays import Array, floats
from paceline.text.gguf_tokenizer import end_ids, role_id

# In the largest models of these architectures the attention scale is taken from the width; the
# metadata does not say so, and every reader of the format goes by the number of layers.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Rotary factors, which the configuration tells."""
_PATTERN = "attention.sliding_window_pattern"
_FLOAT_TYPES = {0: "float32", 1: "float16", 30: "bfloat16"}


def architecture_of(container: GgufContainer) -> str:
    """The value of ``general.architecture``; ``UnsupportedModelError`` if it does not run here."""
    name = container.metadata.get("general.architecture")
    if name not in GGUF_MODEL_TYPES and name not in HEADS:
        raise UnsupportedModelError(
            f"GGUF architecture {str(name)[:40]!r} is not supported; supported: "
            f"{', '.join(GGUF_MODEL_TYPES)}, and as heads {', '.join(HEADS)}"
        )
    return str(name)


class _Keys:
    """Metadata under the architecture's prefix."""

    def __init__(self, container: GgufContainer, architecture: str) -> None:
        self._metadata = container.metadata
        if architecture in WITHOUT_ATTENTION:
            own = {f"{architecture}.{key}": value for key, value in NO_ATTENTION.items()}
            self._metadata = {**container.metadata, **own}
        self._listed = PER_LAYER_KEYS if architecture in LAYERED else ()
        self._prefix = architecture + "."
        self._is_hybrid = architecture in HYBRIDS

    def get(self, key: str, default: Any = None) -> Any:
        """One value; a list with one entry per layer counts as one if all are the same.

        Of keys that are read layer by layer besides, the first entry stands for all. Where the
        default is a number, so is the value.
        """
        value = self._one(key, default)
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        if is_number and not _is_finite(value):
            raise self._no_number(key, value, "a number")
        return value

    def _one(self, key: str, default: Any) -> Any:
        value = self._metadata.get(self._prefix + key, default)
        if isinstance(value, list) and self._is_hybrid:  # 0 where a layer has nothing of the kind
            value = [item for item in value if item] or value[:1]
        one = key in self._listed
        if isinstance(value, list) and value and (one or all(item == value[0] for item in value)):
            return value[0]
        if isinstance(value, list):
            raise UnsupportedModelError(
                f"{self._prefix}{key} differs between layers, which is not supported"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not _is_finite(value) or not value > 0:
            raise self._no_number(key, value, "a positive number")
        found: float = value
        return found

    def _no_number(self, key: str, value: object, wanted: str) -> ModelLoadError:
        return ModelLoadError(
            f"the GGUF metadata says {self._prefix}{key} = {str(value)[:40]}; it must be {wanted}"
        )

    def layers(self, key: str) -> Any:
        return self._metadata.get(self._prefix + key)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def hf_config_from_gguf(container: GgufContainer, read: Callable[[str], Array]) -> dict[str, Any]:
    """What a ``config.json`` of the model would say.

    Args:
        container: the parsed file.
        read: unpacks a stored tensor; some rotary factors are stored as one.

    Raises:
        ModelLoadError: a key is missing or out of bounds.
        UnsupportedModelError: the model is not one that Paceline runs.
    """
    architecture = architecture_of(container)
    keys = _Keys(container, architecture)
    heads = keys.number("attention.head_count")
    head_dim = int(keys.get("attention.key_length", 0) or keys.number("embedding_length") // heads)
    is_latent = architecture in LATENT
    if keys.get("attention.value_length", head_dim) != head_dim and not is_latent:
        raise UnsupportedModelError("keys and values of different sizes are not supported")
    if not keys.get("attention.causal", True) and architecture not in HEADS:
        raise UnsupportedModelError("models with bidirectional attention are not supported")
    biases = _biases(container)
    return {
        **_sizes(container, keys, head_dim),
        **_family_keys(keys, architecture, head_dim),
        **_experts(container, keys, architecture),
        **(latent_keys(keys.get, container.tensors) if is_latent else {}),
        **(
            layered_keys(keys.get, keys.layers, _layer_types(keys), container.tensors, read)
            if architecture in LAYERED
            else _rope(container, keys, head_dim, read)
        ),
        **dense_keys(
            keys.get, architecture, _layer_types(keys), container.tensors, container.metadata
        ),
        **(head_keys(container, architecture) if architecture in HEADS else {}),
        "attention_bias": biases["qkv_bias"] and (biases["o_bias"] or architecture == "glm4moe"),
        "use_qk_norm": any(name.endswith(".attn_q_norm.weight") for name in container.tensors),
        "mlp_bias": biases["mlp_bias"],
        "lm_head_bias": "output.bias" in container.tensors,
        **(llama4_keys(keys.get) if architecture == "llama4" else {}),
        **(
            recurrent_keys(keys.get, architecture, container.tensors, _num_layers(keys))
            if architecture in HYBRIDS
            else {}
        ),
    }


def config_from_gguf(container: GgufContainer, told: Mapping[str, Any]) -> ModelConfig:
    """The configuration, from what :func:`hf_config_from_gguf` told, which raises the same."""
    config = config_from_hf(told)
    biases = _biases(container)
    traits = {
        "attention.qkv_bias": biases["qkv_bias"] or config.attention.qkv_bias,
        "attention.o_bias": biases["o_bias"],
        "mlp.bias": biases["mlp_bias"],
    }
    return config.with_traits(traits)


def _experts(container: GgufContainer, keys: _Keys, architecture: str) -> dict[str, Any]:
    if not keys.get("expert_count", 0):
        return {}
    found = expert_keys(keys.get, architecture, container.tensors, _num_layers(keys))
    return {
        "model_type": mixture_type(GGUF_MODEL_TYPES[architecture], container.tensors),
        **found,
    }


def _sizes(container: GgufContainer, keys: _Keys, head_dim: int) -> dict[str, Any]:
    stored = container.tensors
    parts = ("ffn_down", "ffn_down_exps", "ssm_out")
    sample = next(filter(None, (stored.get(f"blk.0.{part}.weight") for part in parts)), None)
    heads = keys.number("attention.head_count")
    return {
        "model_type": {**GGUF_MODEL_TYPES, **HEADS}[architecture_of(container)],
        "vocab_size": _vocab_size(container, keys),
        "hidden_size": keys.get("embedding_length"),
        "intermediate_size": keys.get("feed_forward_length"),
        "num_hidden_layers": _num_layers(keys),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.get("context_length"),
        "rms_norm_eps": keys.get(
            "attention.layer_norm_rms_epsilon", keys.get("attention.layer_norm_epsilon")
        ),
        "sliding_window": keys.get("attention.sliding_window") or None,
        "tie_word_embeddings": "output.weight" not in container.tensors,
        "bos_token_id": role_id(container.metadata, "bos_token_id"),
        "eos_token_id": end_ids(container.metadata),
        "dtype": _FLOAT_TYPES.get(sample.type_code if sample else -1, "float32"),
    }


def _vocab_size(container: GgufContainer, keys: _Keys) -> int:
    """Rows of the embedding; heads may take that of their target instead."""
    embedding = container.tensors.get("token_embd.weight")
    if embedding is not None:
        return embedding.shape[0]
    if architecture_of(container) not in HEADS:
        raise ModelLoadError(f"{container.path} has no tensor token_embd.weight")
    tokens = container.metadata.get("tokenizer.ggml.tokens")
    return int(keys.number("vocab_size", len(tokens) if isinstance(tokens, list) else None))


def _num_layers(keys: _Keys) -> int:
    return int(keys.number("block_count")) - _layers_behind(keys)


def _layers_behind(keys: _Keys) -> int:
    """Layers for multi-token prediction, which the format counts among a model's blocks."""
    count, behind = keys.number("block_count"), keys.get("nextn_predict_layers", 0)
    if isinstance(behind, bool) or not isinstance(behind, int) or not 0 <= behind < count:
        raise ModelLoadError(
            f"the GGUF metadata say nextn_predict_layers = {str(behind)[:40]}; it must be a number "
            f"from 0 to {count - 1}, as block_count is {count}"
        )
    return behind


def _family_keys(keys: _Keys, architecture: str, head_dim: int) -> dict[str, Any]:
    """What only some families have."""
    if architecture in ("granite", "granitemoe", "granitehybrid"):
        return {
            "embedding_multiplier": keys.get("embedding_scale", 1.0),
            "residual_multiplier": keys.get("residual_scale", 1.0),
            "attention_multiplier": keys.get("attention.scale", head_dim**-0.5),
            "logits_scaling": keys.get("logit_scale", 1.0),
        }
    if architecture == "dflash":
        types = _layer_types(keys)
        return {"layer_types": types, "use_sliding_window": types is not None}
    if not architecture.startswith("gemma") or architecture in LAYERED:
        return {}
    scalar: float = head_dim
    if keys.get("attention.scale"):
        scalar = keys.number("attention.scale") ** -2
    elif keys.get("block_count") == _SCALED_BY_WIDTH[architecture]:
        scalar = keys.number("embedding_length") / keys.number("attention.head_count")
    found: dict[str, Any] = {"query_pre_attn_scalar": scalar}
    for key, name in (
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("rope.freq_base_swa", "rope_local_base_freq"),
    ):
        if keys.get(key) is not None:
            found[name] = keys.get(key)
    types, pattern = _layer_types(keys), keys.layers(_PATTERN)
    if types is not None:
        found["layer_types"] = types
    elif pattern is not None:
        found["sliding_window_pattern"] = pattern
    return found


def _layer_types(keys: _Keys) -> list[str] | None:
    """Which layers have a sliding window; None where there is no list of them."""
    pattern, kinds = keys.layers(_PATTERN), ("full_attention", "sliding_attention")
    if not isinstance(pattern, list):
        return None
    return [kinds[bool(slides)] for slides in pattern[: len(pattern) - _layers_behind(keys)]]


def _rope(
    container: GgufContainer, keys: _Keys, head_dim: int, read: Callable[[str], Array]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if architecture_of(container) in WITHOUT_ROTARY:
        return found
    if keys.get("rope.freq_base") is not None:
        found["rope_theta"] = keys.get("rope.freq_base")
    dim = int(keys.number("rope.dimension_count", head_dim))
    architecture = architecture_of(container)
    if architecture == "granitehybrid" and dim != head_dim:
        found["rotary_dim"] = dim  # its configurations have no share
    elif architecture not in LATENT:
        # The reader of this share rounds down; the half keeps a quotient's last bit from mattering.
        found["partial_rotary_factor"] = (dim + 0.5) / head_dim if dim != head_dim else 1.0
    trained = keys.get("rope.scaling.original_context_length")
    if trained is not None:
        found["original_max_position_embeddings"] = trained
    scaling = _stored_factors(container, keys, dim, read) or _scaling(keys, architecture in LATENT)
    if scaling.get("rope_type") == "yarn" and gguf_family(architecture).gguf.whole_ramps:
        scaling["truncate"] = False
    # Where a file has none, a family's default must not stand in for it.
    found["rope_scaling"] = scaling or {"rope_type": "default"}
    return found


def _stored_factors(
    container: GgufContainer, keys: _Keys, dim: int, read: Callable[[str], Array]
) -> dict[str, Any]:
    """Scalings that are stored as one divisor per frequency."""

    def factors(name: str) -> list[float] | None:
        info = container.tensors.get(name)
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
        raise ModelLoadError(f"{container.path} has one of {' and '.join(ROPE_TENSORS[1:])} alone")
    if short is None:
        return {}
    attention = keys.get("rope.scaling.attn_factor")
    entry = {"short_factor": short, "long_factor": long, "attention_factor": attention}
    return {"rope_type": "longrope", **entry}


def _scaling(keys: _Keys, is_latent: bool) -> dict[str, Any]:
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear"))
    if kind == "none" and factor is not None and keys.get("rope.scaling.type") is None:
        kind = "linear"  # files from before the type had a key
    if kind == "none" or not factor:
        return {}
    found: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        for name in ("beta_fast", "beta_slow"):
            found[name] = keys.get(f"rope.scaling.yarn_{name}")
        growth = yarn_keys(keys.get, is_latent)
        found |= growth
        extra = keys.number("rope.scaling.attn_factor", 1.0)
        if extra != 1.0:  # on top of the rule's own
            found["attention_factor"] = extra * _yarn_attention(keys, **growth)
        query_growth = keys.get("attention.temperature_scale")
        if query_growth is not None:  # of Ministral 3
            found[QUERY_GROWTH] = query_growth
    return found


def _yarn_attention(keys: _Keys, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """What YaRN's rule multiplies cosines and sines by."""
    log = math.log(max(keys.number("rope.scaling.factor"), 1.0))
    return (0.1 * mscale * log + 1.0) / (0.1 * mscale_all_dim * log + 1.0)


def _biases(container: GgufContainer) -> dict[str, bool]:
    """Biases are there or not; no key says so."""
    names = container.tensors
    ends = (name for name in names if name.endswith(".attn_output.weight"))
    first = next(ends, "blk.0.").partition("attn_output")[0]  # of the layers with attention
    return {
        "qkv_bias": f"{first}attn_q.bias" in names or f"{first}attn_qkv.bias" in names,
        "o_bias": f"{first}attn_output.bias" in names,
        "mlp_bias": "blk.0.ffn_down.bias" in names,
    }
