"""From a parsed Hugging Face ``config.json`` to :class:`ModelConfig`. Pure: reads no file.

What differs between families comes from :data:`paceline.models.families.FAMILIES`. Configurations
are untrusted: every number has bounds, far beyond real models and far below absurd ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.models.config import LEARNT_KEYS, MASK_TOKEN_KEYS, XIELU, ModelConfig, PositionConfig
from paceline.models.families import FAMILIES
from paceline.models.families.family import Family, Layout
from paceline.models.families.fields import MOST_LAYERS, Fields, supported
from paceline.models.families.layers_json import (
    adjusted_width,
    dense_width,
    experts_from_hf,
    heads_from_hf,
    latent_from_hf,
    latent_scale,
    only_parts,
    per_layer_from_hf,
    recurrent_from_hf,
    rounded_root,
    scales_from_hf,
    with_layer_types,
    with_one_width,
)
from paceline.models.families.rope import (
    CHUNKED,
    FULL,
    SLIDING,
    extended_positions,
    rope_from_hf,
    still_rope_from_hf,
)
from paceline.tensors.arrays import BFLOAT16

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": BFLOAT16, "float16": np.dtype(np.float16)}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "relu2": "relu2",
}
_QUANTISED = ("quantization_config", "compression_config")  # the second is a former name
_HEADED = ("ForCausalLM", "ForConditionalGeneration")
_BASE = re.compile(r"(?!.*For).*Model")  # and not ForRewardModel


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a configuration, of old style or of transformers 5.

    Raises:
        UnsupportedModelError: the architecture, or a trait of it, is not one that Paceline runs.
        ModelLoadError: a number is missing, of the wrong type or out of bounds.
    """
    raw = with_layer_types(_text_part(raw))
    name, family = _family(raw)
    called = family.called(raw)
    fields = Fields(with_one_width(called) if family.per_layer else called, family.defaults)
    sizes = _sizes(fields, family)
    width = adjusted_width(fields, sizes["intermediate_size"])
    sizes["intermediate_size"] = dense_width(fields, family.experts, width)
    latent = latent_from_hf(fields) if family.latent else None
    window, sliding = _sliding(fields, family, sizes["num_layers"])
    heads = heads_from_hf(fields, sizes, sliding) if family.per_layer else ()
    rotated = latent.rope_dim if latent else sizes["head_dim"]
    full = heads[-1].dim if heads else rotated
    turns = {"partial": family.partial_rotary, "grows": family.grows}
    rope = rope_from_hf(fields, FULL, full, **turns)
    local = rope_from_hf(fields, SLIDING, rotated, **turns, unscaled=family.unscaled_windows)
    traits: dict[str, Any] = {}
    if latent:
        sizes |= {"num_kv_heads": 1, "head_dim": latent.key_dim}
        traits = {"attention.latent": latent, "attention.scale": latent_scale(latent, rope)}
    sizes["max_position"] = extended_positions(rope, sizes["max_position"])
    traits |= {
        "norms.eps": fields.number("rms_norm_eps", 1e-12, 0.1),
        "attention.sliding_window": window,
        "attention.sliding_layers": sliding,
        "mlp.activation": _activation(fields, family),
        "mlp.learnt": _learnt(fields, sizes["num_layers"]),
        "mlp.experts": experts_from_hf(fields, family.experts, sizes["num_layers"]),
        "recurrent": recurrent_from_hf(fields, family, sizes),
        "only_part": only_parts(fields) if family.single_parts else (),
        **_ends(fields, sizes["vocab_size"]),
    }
    traits |= _traits(fields, family, sizes, traits["dtype"])
    if heads:
        listed = Fields(called, family.defaults)
        traits |= per_layer_from_hf(listed, heads, sliding, DTYPES[traits["dtype"]])
    positions = PositionConfig(
        rope,
        local if window and local != rope else None,
        still_rope_from_hf(fields),
        _rotated(fields, family.rotates, sizes["num_layers"], window, sliding),
    )
    return ModelConfig(architecture=name, **sizes, positions=positions).with_traits(traits)


def _ends(fields: Fields, vocab_size: int) -> dict[str, Any]:
    """What is said of tokens, of the head and of the dtype."""
    bos, tied = fields.token_ids("bos_token_id", vocab_size), fields.flag("tie_word_embeddings")
    return {
        "tie_embeddings": tied,
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": fields.token_ids("eos_token_id", vocab_size),
        "dtype": _dtype(fields),
        "mask_token_id": _mask_token(fields, vocab_size),
        "draft_vocab_size": _draft_vocab_size(fields, vocab_size, tied),
    }


def _text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multimodal configuration."""
    text = raw.get("text_config")
    if text is None:
        return raw
    if not isinstance(text, Mapping):
        raise ModelLoadError("the model configuration says text_config, but it is not an object")
    shared = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", *_QUANTISED)
    return {**{key: raw[key] for key in shared if key in raw}, **text}


def _family(raw: Mapping[str, Any]) -> tuple[str, Family]:
    fields = Fields(raw)
    name = fields.text("model_type")
    if not name:
        raise UnsupportedModelError(
            "the model's config.json does not say what model it is: model_type is missing; it has "
            f"{', '.join(map(repr, list(raw)[:8])) or 'no key at all'}. Take the config.json that "
            "came with the weights"
        )
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"model type {name!r} is not supported; supported: "
            f"{', '.join(FAMILIES)} (SmolLM and Llama 2 and 3 are llama)"
        )
    heads = raw.get("architectures")
    if isinstance(heads, list) and heads and not any(_is_generator(str(h)) for h in heads):
        raise UnsupportedModelError(
            f"{', '.join(map(str, heads))[:80]} does not generate text; a model whose architecture "
            f"ends in {', '.join(_HEADED)} or Model is needed"
        )
    for key in _QUANTISED:
        if raw.get(key):
            kind = fields.mapping(key).get("quant_method", "unknown")
            raise UnsupportedModelError(
                f"the checkpoint is quantised ({str(kind)[:40]}); here its unquantised form is "
                "needed"
            )
    _refuse_by_name(raw, name, FAMILIES[name])
    return name, FAMILIES[name]


def _refuse_by_name(raw: Mapping[str, Any], name: str, family: Family) -> None:
    """Raise :class:`UnsupportedModelError` for a key that would make it another model."""
    # transformers 5.24 lets every family see later tokens where this key is there and not true.
    is_causal = raw.get("is_causal", True)
    if not is_causal:
        raise UnsupportedModelError(
            f"the model configuration says is_causal = {str(is_causal)[:40]}; models with "
            "bidirectional attention are not supported"
        )
    if raw.get("use_bidirectional_attention") not in (None, False, "vision"):  # which text is not
        raise UnsupportedModelError("models with bidirectional attention are not supported")
    if raw.get("clip_qkv") is not None:
        raise UnsupportedModelError("models that clip queries, keys and values are not supported")
    for key in family.refused:
        if raw.get(key):
            raise UnsupportedModelError(f"{name} models with {key} are not supported")
    rotary = raw.get("rope_parameters")
    values = {**(rotary if isinstance(rotary, Mapping) else {}), **raw}
    for key, only in family.only.items():
        if values.get(key) not in (None, only):
            raise UnsupportedModelError(
                f"{name} models with {key} = {str(values[key])[:40]} are not supported; only "
                f"{str(only).lower()} is"
            )


def _is_generator(architecture: str) -> bool:
    """Whether it is a model with a head for tokens, or the part of one below its head."""
    return architecture.endswith(_HEADED) or _BASE.fullmatch(architecture) is not None


def with_tied_embeddings(raw: Mapping[str, Any], tied: bool = True) -> dict[str, Any]:
    """The configuration of the same model with its embedding as head, or with one of its own."""
    text = _text_part(raw)
    key = _family(text)[1].keys.get("tie_word_embeddings", "tie_word_embeddings")
    if "text_config" in raw:
        return {**raw, "text_config": {**raw["text_config"], key: tied}}
    return {**raw, key: tied}


def layout_from_hf(raw: Mapping[str, Any]) -> Layout:
    """How the tensors of a configuration's family are named and laid out."""
    return _family(_text_part(raw))[1].layout


def _sizes(fields: Fields, family: Family) -> dict[str, Any]:
    heads = fields.integer("num_attention_heads", 1, 4096)
    kv_heads = fields.integer("num_key_value_heads", 1, heads, heads)
    hidden = fields.integer("hidden_size", 1, 1 << 17)
    if heads % kv_heads:
        raise fields.error("num_attention_heads", f"a multiple of num_key_value_heads = {kv_heads}")
    if fields.get("head_dim") is None and hidden % heads:
        wanted = f"a multiple of num_attention_heads = {heads}, as there is no head_dim"
        raise fields.error("hidden_size", wanted)
    head_dim = fields.integer("head_dim", 2, 4096, hidden // heads)
    if head_dim % 2:
        raise ModelLoadError(f"heads of odd size are not supported: head_dim = {head_dim}")
    return {
        "vocab_size": fields.integer("vocab_size", 1, 1 << 24),
        "hidden_size": hidden,
        "intermediate_size": fields.integer(
            family.dense_width, 1, 1 << 20, family.widening * hidden or None
        ),
        "num_layers": fields.integer("num_hidden_layers", 1, MOST_LAYERS),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_position": fields.integer("max_position_embeddings", 1, 1 << 27),
    }


def _mask_token(fields: Fields, vocab_size: int) -> int | None:
    """What a parallel draft reads for tokens that it does not know; None for other models."""
    ids = [token for name in MASK_TOKEN_KEYS for token in fields.token_ids(name, vocab_size)]
    return ids[0] if ids else None


def _draft_vocab_size(fields: Fields, vocab_size: int, tied: bool) -> int:
    """Rows of a pruned head; 0 where the head has every token, said or not."""
    rows = fields.integer("draft_vocab_size", 1, vocab_size, vocab_size)
    if rows == vocab_size:
        return 0
    if tied:
        wanted = (
            f"{vocab_size} with tie_word_embeddings: a head that has not every token is a matrix "
            "of its own"
        )
        raise fields.error("draft_vocab_size", wanted)
    return rows


def _activation(fields: Fields, family: Family) -> str:
    if family.clamped:
        for key, only in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
            if fields.number(key, 0.0, 1e9, only) != only:
                raise fields.error(key, f"{only} to be supported", UnsupportedModelError)
        return "clamped_swiglu"
    # Gemma's hidden_act is a former name, which says what the models were not trained with.
    name = fields.text("hidden_activation" if family.gemma else "hidden_act")
    ungated = not family.flags.get("mlp.gated", True)
    if name == XIELU and ungated:
        return XIELU
    return supported("activation", name, _ACTIVATIONS)


def _dtype(fields: Fields) -> str:
    name = (fields.text("dtype") or fields.text("torch_dtype") or "float32").removeprefix("torch.")
    supported("the checkpoint dtype", name, DTYPES)
    return name


def _sliding(fields: Fields, family: Family, num_layers: int) -> tuple[int, tuple[bool, ...]]:
    """The window (0: none) and, per layer, whether it applies (empty: to all)."""
    late, if_asked = family.slides == "late", family.slides == "if_asked"
    if family.slides == "never" or fields.get("sliding_window") is None:
        return 0, ()
    if (late or if_asked) and not fields.flag("use_sliding_window"):
        return 0, ()
    window = fields.integer("sliding_window", 1, 1 << 27)
    types = fields.get("layer_types")
    if family.slides == "always" or if_asked or (family.slides == "listed" and types is None):
        return window, ()
    if types is not None:
        slides = CHUNKED if family.slides == "rotated" else SLIDING
        kinds = fields.layer_kinds("layer_types", num_layers, FULL, slides)
        layers = tuple(kind == slides for kind in kinds)
    elif family.slides == "rotated":
        layers = _rotated(fields, family.rotates, num_layers, 0, ())
    elif late:
        first = fields.integer("max_window_layers", 0, 1 << 20)
        layers = tuple(index >= first for index in range(num_layers))
    else:
        pattern = fields.integer("sliding_window_pattern", 1, 1 << 20)
        layers = tuple((index + 1) % pattern != 0 for index in range(num_layers))
    if family.last_full:
        layers = (*layers[:-1], False)
    return (window, layers) if any(layers) else (0, ())


def _rotated(
    fields: Fields, rotates: str, num_layers: int, window: int, sliding: tuple[bool, ...]
) -> tuple[bool, ...]:
    """Per layer, whether it rotates heads; empty: all do."""
    is_still = rotates == "none"
    if rotates == "if_asked":
        is_still = fields.get("position_embedding_type") != "rope"
    if rotates == "with_theta":
        is_still = not fields.mapping("rope_parameters").get("rope_theta", fields.get("rope_theta"))
    if is_still:
        return (False,) * num_layers
    if rotates == "sliding" and fields.get("sliding_window") is not None:
        return sliding if window else (False,) * num_layers
    if rotates != "listed":
        return ()
    if fields.get("no_rope_layers"):
        return tuple(map(bool, fields.integers("no_rope_layers", num_layers, 0, 1)))
    interval = fields.integer("no_rope_layer_interval", 1, 1 << 20)
    return tuple((index + 1) % interval != 0 for index in range(num_layers))


def _learnt(fields: Fields, num_layers: int) -> tuple[tuple[float, ...], ...]:
    """What the activation of each layer has learnt, where no tensors say it."""
    if fields.get(LEARNT_KEYS[0]) is None:
        return ()
    columns = [fields.numbers(key, num_layers, -1e6, 1e6) for key in LEARNT_KEYS]
    return tuple(zip(*columns, strict=True))


def _traits(fields: Fields, family: Family, sizes: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The fields in which families differ and which no other reader sets."""
    traits: dict[str, Any] = dict(family.flags)
    if fields.flag("attention_bias"):
        traits.update(dict.fromkeys(family.biases, True))
    if fields.get("qkv_bias") is not None and "attention.qkv_bias" in family.flags:
        traits["attention.qkv_bias"] = fields.flag("qkv_bias")
    if family.mlp_bias:
        traits["mlp.bias"] = fields.flag("mlp_bias")
    for key, name in family.multipliers.items():
        traits[name] = fields.number(key, 1e-9, 1e9, 1.0)
    if family.gemma:
        # The reference rounds the factor to the dtype of the weights, and so do trained models.
        traits["multipliers.embedding"] = rounded_root(sizes["hidden_size"], DTYPES[dtype])
        traits["attention.scale"] = fields.number("query_pre_attn_scalar", 1e-9, 1e9) ** -0.5
        traits["multipliers.logits_softcap"] = fields.number(
            "final_logit_softcapping", 0.0, 1e9, 0.0
        )
    if family.caps_scores:
        traits["attention.softcap"] = fields.number("attn_logit_softcapping", 0.0, 1e9, 0.0)
    for key, names in family.switches.items():
        if fields.flag(key):
            traits.update(dict.fromkeys(names, True))
    if family.beside:
        traits |= scales_from_hf(fields, sizes["head_dim"])
    if family.logit_scale:
        traits["multipliers.logits_divisor"] = 1.0 / fields.number("logit_scale", 1e-9, 1e9, 1.0)
    if family.depth_scaled:
        traits |= _depth_scales(fields, sizes)
    return traits


def _depth_scales(fields: Fields, sizes: Mapping[str, Any]) -> dict[str, float]:
    """MiniCPM's scalars. In its own class each is 1 where the configuration does not say it."""
    base = fields.number("dim_model_base", 1e-9, 1e9, 1.0)
    return {
        "multipliers.embedding": fields.number("scale_emb", 1e-9, 1e9, 1.0),
        "multipliers.residual": (
            fields.number("scale_depth", 1e-9, 1e9, 1.0) / sizes["num_layers"] ** 0.5
        ),
        "multipliers.logits_divisor": sizes["hidden_size"] / base,
    }
