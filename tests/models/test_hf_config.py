"""Configurations: what transformers writes is understood, what an attacker writes is refused."""

from __future__ import annotations

import json
from operator import attrgetter
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.models.config import ModelConfig
from paceline.models.families.config_json import config_from_hf
from paceline.models.layer_sizes import RopeConfig
from tests.models.reference import COMMON, FAMILIES

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def read(**changes: Any) -> ModelConfig:
    return config_from_hf({**LLAMA, **changes})


def written(family: str, **changes: Any) -> dict[str, Any]:
    """What the reference writes to disk for this family."""
    name, options = FAMILIES[family]
    config = getattr(transformers, name + "Config")(**{**COMMON, **options, **changes})
    raw = json.loads(config.to_json_string(use_diff=False))
    assert isinstance(raw, dict)
    return raw


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes(family: str) -> None:
    raw = written(family)
    config = config_from_hf(raw)
    assert config.vocab_size == 300
    assert (config.num_heads, config.num_kv_heads) == (4, raw["num_key_value_heads"])
    assert config.head_dim == raw.get("head_dim", 16)
    assert config.num_layers == raw.get("num_hidden_layers", raw.get("n_layer"))
    assert config.intermediate_size == 112
    assert config.tie_embeddings is raw["tie_word_embeddings"]
    assert config.bos_token_id == 1
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        (
            "llama",
            {
                "mlp.activation": "silu",
                "attention.qkv_bias": False,
                "attention.sliding_window": 0,
                "attention_scale": 0.25,
            },
        ),
        ("llama-biased", {"attention.qkv_bias": True, "attention.o_bias": True, "mlp.bias": True}),
        ("mistral", {"attention.sliding_window": 11, "attention.sliding_layers": ()}),
        (
            "qwen2",
            {"attention.qkv_bias": True, "attention.o_bias": False, "attention.sliding_window": 0},
        ),
        ("qwen2-late", {"attention.sliding_window": 9, "attention.sliding_layers": (False, True)}),
        (
            "qwen3",
            {
                "attention.qk_norm": True,
                "attention.qkv_bias": False,
                "head_dim": 32,
                "attention.sliding_window": 0,
            },
        ),
        ("phi3", {"attention.sliding_window": 13, "norms.eps": 1e-5}),
        (
            "granite",
            {
                "multipliers.embedding": 6.0,
                "multipliers.residual": 0.3,
                "attention_scale": 0.2,
                "multipliers.logits_divisor": 3.0,
            },
        ),
        (
            "gemma2",
            {
                "norms.plus_one": True,
                "norms.after": True,
                "attention.qk_norm": False,
                "mlp.activation": "gelu_tanh",
                "multipliers.embedding": 8.0,
                "attention_scale": 20**-0.5,
                "attention.softcap": 5.0,
                "multipliers.logits_softcap": 8.0,
                "attention.sliding_layers": (True, False),
                "positions.local_rope": None,
            },
        ),
        (
            "gemma3",
            {
                "attention.qk_norm": True,
                "multipliers.logits_softcap": 0.0,
                "attention.sliding_layers": (True, False, True),
                "positions.rope": RopeConfig(1e6, "linear", 4.0, 16),
                "positions.local_rope": RopeConfig(100.0, "default", 1.0, 16),
            },
        ),
    ],
)
def test_flags(family: str, flags: dict[str, Any]) -> None:
    config = config_from_hf(written(family))
    assert {name: attrgetter(name)(config) for name in flags} == flags


def test_old_style_gemma3() -> None:
    """The sparse configurations of the first multimodal checkpoints."""
    raw = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }
    config = config_from_hf(raw)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.positions.rope == RopeConfig(1e6, "linear", 8.0, 256)
    assert config.positions.local_rope == RopeConfig(1e4, "default", 1.0, 256)
    assert [i for i, slides in enumerate(config.attention.sliding_layers) if not slides] == [
        5,
        11,
        17,
        23,
        29,
    ]
    assert config.eos_token_ids == (1, 106)
    assert config.tie_embeddings
    assert config.multipliers.embedding == torch.tensor(2560**0.5).bfloat16().item()


def test_old_style_names() -> None:
    config = read(torch_dtype="torch.float16", rope_theta=5e5, num_key_value_heads=None)
    assert config.dtype == "float16"
    assert config.positions.rope.theta == 5e5
    assert config.num_kv_heads == 4
    assert read(dtype="bfloat16", torch_dtype="float32").dtype == "bfloat16"


def test_former_name_of_longrope() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = config_from_hf(
        {**LLAMA, "model_type": "phi3", "rope_scaling": {"type": "su", **factors}}
    )
    assert config.positions.rope.scaling == "longrope"
    assert dict(config.positions.rope.params)["original_max_position_embeddings"] == 4096


def test_ids_outside_the_vocabulary_are_left_out() -> None:
    config = read(bos_token_id=400, eos_token_id=[2, 320, 2, -1, 5])
    assert config.bos_token_id is None
    assert config.eos_token_ids == (2, 5)
    assert read(eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "bloom"}, "supported: llama, mistral, ministral"),
        ({"model_type": None}, "model_type is missing; it has 'model_type', "),
        ({"model_type": "llama4"}, "'llama4' is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "does not generate text"),
        ({"architectures": ["LlamaForRewardModel"]}, "ForConditionalGeneration or Model is needed"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"hidden_act": "relu"}, "activation 'relu' is not supported; supported: silu, swish"),
        ({"hidden_act": "quick_gelu"}, "activation 'quick_gelu'"),
        ({"hidden_act": "gelu_10"}, "activation 'gelu_10'"),
        ({"hidden_act": "xielu"}, "activation 'xielu'"),
        ({"rope_scaling": {"type": "magic"}}, "rope scaling 'magic'"),
        ({"dtype": "float8_e4m3fn"}, "float8"),
        ({"use_bidirectional_attention": True}, "bidirectional"),
        ({"is_causal": False}, "bidirectional"),  # as transformers 5.24.0 makes any model's masks
        ({"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["x", "y"]}, "'x'"),
    ],
)
def test_unsupported(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        read(**changes)


HUGE = 10**12
BAD = [
    ("hidden_size", 0),
    ("hidden_size", HUGE),
    ("hidden_size", "64"),
    ("hidden_size", True),
    ("hidden_size", None),
    ("hidden_size", 63.5),
    ("hidden_size", 66),
    ("vocab_size", -1),
    ("vocab_size", HUGE),
    ("num_hidden_layers", 10**6),
    ("num_attention_heads", 3),
    ("num_key_value_heads", 3),
    ("num_key_value_heads", 8),
    ("num_key_value_heads", 0),
    ("head_dim", 7),
    ("head_dim", 0),
    ("intermediate_size", HUGE),
    ("max_position_embeddings", HUGE),
    ("max_position_embeddings", float("nan")),
    ("rms_norm_eps", float("inf")),
    ("rms_norm_eps", 0),
    ("rms_norm_eps", []),
    ("rope_theta", 0.0),
    ("rope_theta", -5.0),
    ("rope_theta", "1e4"),
    ("rope_scaling", {"type": "linear"}),
    ("rope_scaling", {"type": "linear", "factor": 0}),
    ("rope_scaling", {"type": "linear", "factor": float("nan")}),
    ("rope_scaling", {"type": "llama3", "factor": 8.0}),
    ("rope_scaling", {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
    ("rope_scaling", {"type": "longrope", "short_factor": [0.0] * 8, "long_factor": [1.0] * 8}),
    ("rope_scaling", {"type": 7}),
    ("rope_scaling", "linear"),
    ("partial_rotary_factor", 0.5),
    ("tie_word_embeddings", "yes"),
    ("eos_token_id", "2"),
    ("eos_token_id", [2.5]),
    ("bos_token_id", {"a": 1}),
    ("attention_bias", 1),
    ("dtype", 3),
    ("text_config", [1]),
]


@pytest.mark.parametrize(("key", "value"), BAD, ids=[f"{k}={str(v)[:30]}" for k, v in BAD])
def test_bad_numbers_name_their_key(key: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=key.split("_")[0]):
        read(**{key: value})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)
WIDE = ("llama3", "gemma3", "phi3-long", "gemma4", "gemma4-inputs")
KEYS = sorted({key for family in WIDE for key in written(family)} | {"rope_scaling"})


@given(
    family=st.sampled_from(sorted(FAMILIES)),
    changes=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3),
)
def test_anything_else_is_a_clear_error(family: str, changes: dict[str, Any]) -> None:
    """Either a configuration with usable sizes, or our own error; never another exception."""
    try:
        config = config_from_hf({**_WRITTEN[family], **changes})
    except ModelLoadError:
        return
    assert config.num_heads % config.num_kv_heads == 0
    widest = max(config.heads_of(layer).dim for layer in range(config.num_layers))
    assert config.head_dim % 2 == widest % 2 == 0
    assert 0 < config.positions.rope.dim <= widest


_WRITTEN = {family: written(family) for family in FAMILIES}
