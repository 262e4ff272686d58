"""Keys of configurations against transformers' own classes: what is absent, and what changes it."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.models.config import ModelConfig
from paceline.models.families import FAMILIES
from paceline.models.families.config_json import config_from_hf
from tests.arrays import assert_close
from tests.models.reference import (
    COMMON,
    FULL,
    HYBRIDS,
    MIXTURES,
    SLIDING,
    YARN,
    Driver,
    save_model,
    saved_model,
)
from tests.models.reference import (
    FAMILIES as MODELS,
)
from tests.models.test_families import TOKENS, want
from tests.models.test_hf_config import written

pytestmark = pytest.mark.usefixtures("one_thread")

ALL_MODELS = {**MODELS, **MIXTURES, **HYBRIDS}
CLASSES = sorted(name for name in FAMILIES if name in CONFIG_MAPPING)
OF_NO_MODEL = {"mamba2": ("head_dim",)}  # which stands for the width of heads that there are not


def whole(name: str) -> dict[str, Any]:
    """All that the family's class says where nothing is given."""
    raw = json.loads(CONFIG_MAPPING[name]().to_json_string(use_diff=False))
    assert isinstance(raw, dict)
    return raw


def theirs(name: str, raw: dict[str, Any]) -> dict[str, Any]:
    """What the class makes of a configuration."""
    given = copy.deepcopy(raw)
    for part in (given, given.get("text_config", {})):
        if "time_step_limit" in part:
            part["time_step_limit"] = (0.0, math.inf)
    config = CONFIG_MAPPING[name].from_dict(given)
    told = json.loads(config.to_json_string(use_diff=False))
    assert isinstance(told, dict)
    return told


def plain(config: ModelConfig) -> ModelConfig:
    """With one way to say that all layers slide."""
    all_slide = config.attention.sliding_layers and all(config.attention.sliding_layers)
    return config.with_traits({"attention.sliding_layers": ()}) if all_slide else config


def differing_defaults(name: str) -> list[str]:
    """Keys without which ours is another model than theirs. Sizes may be asked for instead."""
    raw = whole(name)
    part, found = raw.get("text_config", raw), []
    for key in [*part]:
        value = part.pop(key)
        if key != "model_type" and key not in OF_NO_MODEL.get(name, ()):
            try:
                ours, wanted = (plain(config_from_hf(each)) for each in (raw, theirs(name, raw)))
            except ModelLoadError as error:
                is_asked_for = "has no " in str(error) or "no head_dim" in str(error)
                found += [] if is_asked_for else [key]
            else:
                found += [key] if ours != wanted else []
        part[key] = value
    return found


@pytest.mark.parametrize("name", ["gpt_oss", "apertus", "ministral3", "qwen2_moe", "olmo_hybrid"])
def test_what_is_absent_is_as_in_transformers(name: str) -> None:
    assert differing_defaults(name) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_what_is_absent_is_as_in_transformers_in_every_family(name: str) -> None:
    # Bamba's layers and Gemma 4's are told in several ways, which are tried in tests of their own.
    assert set(differing_defaults(name)) <= {"layer_types", "per_layer_config"}


HALF = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights = False"),
        ("mamba2", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ("bamba", {"hidden_act": "gelu"}, "hidden_act = gelu"),
        ("nemotron-h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act = gelu"),
        ("phimoe", {"num_experts_per_tok": 4}, "num_experts_per_tok = 4"),
        ("llama", {"is_causal": False}, "is_causal = False"),
        ("gemma3", {"is_causal": None}, "is_causal = None"),
        ("deepseek-v2", {"norm_topk_prob": True, "routed_scaling_factor": 2.0}, "norm_topk_prob"),
        ("granite-hybrid-moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("granite-hybrid-moe", {"rope_parameters": HALF}, "partial_rotary_factor = 0.5"),
    ],
)
def test_what_would_change_logits_is_refused_by_name(
    tmp_path: Path, family: str, changes: dict[str, Any], words: str
) -> None:
    save_model(family, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(UnsupportedModelError, match=words):
        config_from_hf({**raw, **changes})


def test_weights_of_deepseek_v2_may_add_up_to_1(tmp_path: Path) -> None:
    """As DeepSeek's own code has it, where no factor is left out or kept."""
    save_model("deepseek-v2-lite", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"routed_scaling_factor": 1.0}
    for told in (False, True):
        experts = config_from_hf({**raw, "norm_topk_prob": told}).mlp.experts
        assert experts is not None
        assert experts.renormalise is told


def test_scalars_of_minicpm_are_1_where_they_are_absent(tmp_path: Path) -> None:
    """As OpenBMB's own class has it, which divides by the depth and by the width all the same."""
    save_model("minicpm", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    whole = {"scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 16}
    kept = {key: value for key, value in raw.items() if key not in whole}
    for absent in whole:
        told = {key: value for key, value in whole.items() if key != absent}
        assert config_from_hf({**kept, **told}) == config_from_hf({**kept, **told, absent: 1})
    config = config_from_hf(kept)
    assert config.multipliers.embedding == 1
    assert config.multipliers.residual == 1 / config.num_layers**0.5
    assert config.multipliers.logits_divisor == config.hidden_size


HARMLESS = {
    "names": "_name_or_path architectures id2label label2id problem_type transformers_version",
    "what a call returns": "output_attentions output_hidden_states return_dict use_cache "
    "output_router_logits num_logits_to_keep chunk_size_feed_forward mamba_chunk_size chunk_size "
    "use_mamba_kernels mamba_ssm_cache_dtype moe_shared_expert_overlap",
    "of training": "initializer_range attention_dropout attn_pdrop embd_pdrop resid_pdrop "
    "hidden_dropout residual_dropout embedding_dropout classifier_dropout router_aux_loss_coef "
    "router_jitter_noise input_jitter_noise z_loss_coefficient altup_coef_clip pretraining_tp "
    "rescale_prenorm_residual time_step_floor time_step_max time_step_rank linear_a_log_max "
    "linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min",
    "of rounding": "reorder_and_upcast_attn residual_in_fp32",
    "tokens that no text of ours holds": "pad_token_id eod_token_id sep_token_id",
    "of other models with these layers": "is_encoder_decoder is_decoder num_nextn_predict_layers "
    "mtp_layers_block_type summary_activation summary_first_dropout summary_proj_to_labels "
    "summary_type summary_use_proj",
    "worked out from others": "qk_head_dim",
}
"""Keys of transformers' classes that change no logits of a decoder, by why they do not."""
OF_FAMILIES = {
    "deepseek_v2": "mlp_bias",  # whose tensors are refused
    "gemma3_text": "attn_logit_softcapping _sliding_window_pattern",  # not read in transformers
    "gpt_oss": "hidden_act",
    "lfm2": "conv_bias",  # whose tensors are refused
    "lfm2_moe": "use_expert_bias",
    "mamba2": "time_step_min",
    "nemotron_h": "expand mamba_proj_bias n_shared_experts sliding_window time_step_limit",
}
LISTS = ("layer_types", "no_rope_layers", "moe_layers", "mlp_layer_types", "layers_block_type")
SLIDES = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}


def written_by(name: str) -> list[dict[str, Any]]:
    """Configurations of a class's models that tests have, with and without lists and windows."""
    found: list[dict[str, Any]] = []
    for own, options in ALL_MODELS.values():
        kind = getattr(transformers, own + "Config", None)
        if kind is not None and kind.model_type == name:
            raw = json.loads(kind(**{**COMMON, **options}).to_json_string(use_diff=False))
            slid = {key: value for key, value in SLIDES.items() if key in raw}
            for told in (raw, {**raw, **slid}):
                found += [told, {key: value for key, value in told.items() if key not in LISTS}]
    return found


def outcome(raw: dict[str, Any]) -> object:
    try:
        return config_from_hf(raw)
    except ModelLoadError as error:
        return str(error)


def unread(name: str) -> set[str]:
    """Keys of a class of which it makes no difference that they hold what nobody could mean."""
    told = written_by(name)
    assert told
    before = [outcome(raw) for raw in told]
    return {
        key
        for key in whole(name)
        if all(
            outcome({**raw, key: odd}) == was
            for raw, was in zip(told, before, strict=True)
            for odd in ("nonsense", {"not": "a value"}, False)
        )
    }


def check_keys(name: str) -> None:
    known = {*" ".join(HARMLESS.values()).split(), *OF_FAMILIES.get(name, "").split()}
    assert sorted(unread(name) - known) == []


@pytest.mark.parametrize("name", ["qwen2", "deepseek_v2", "gemma3_text", "nemotron_h"])
def test_every_key_is_read_or_known_to_be_harmless(name: str) -> None:
    check_keys(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CLASSES if written_by(name)])
def test_every_key_is_read_or_known_to_be_harmless_in_every_family(name: str) -> None:
    check_keys(name)


def beside(truncate: bool) -> dict[str, Any]:
    entries = {**YARN, "beta_fast": 4.0}
    sliding = {"rope_type": "default", "rope_theta": 100.0}
    return {FULL: entries, SLIDING: sliding, "truncate": truncate}


def within(truncate: bool) -> dict[str, Any]:
    told = beside(truncate)
    return {FULL: {**told[FULL], "truncate": told.pop("truncate")}, SLIDING: told[SLIDING]}


GROWING = {"rope_type": "default", "rope_theta": 300.0, "llama_4_scaling_beta": 0.5}
GROWING |= {"original_max_position_embeddings": 8}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("ministral3", {"rope_parameters": GROWING}),
        ("llama", {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}}),
        ("olmo3", {"rope_parameters": beside(truncate=False)}),
        ("olmo3", {"rope_parameters": within(truncate=False)}),
        ("gemma3", {"attn_logit_softcapping": 0.5}),
        ("mamba2", {"time_step_limit": (0.2, math.inf)}),
    ],
)
def test_keys_act_as_in_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """transformers 5.23 and 5.24: growth in one family alone, ``truncate`` beside layer types."""
    model = saved_model(family, tmp_path, **copy.deepcopy(changes))
    got = Driver.of(tmp_path, max_len=64).chunk(TOKENS)
    assert_close(got, want(model, TOKENS), atol=1e-4, rtol=1e-4)


def test_layers_of_gemma_4_may_have_numbers_with_zeros() -> None:
    """transformers 5.24 writes "05" where there are more than ten layers, older ones "5"."""
    raw = written("gemma4")
    told = {str(layer): raw["per_layer_config"][key] for layer, key in _layers(raw)}
    padded = {f"{int(key):02}": value for key, value in told.items()}
    read = [config_from_hf({**raw, "per_layer_config": each}) for each in (told, padded)]
    assert read[0] == read[1]
    assert len({heads.dim for heads in read[0].attention.layer_heads}) == 2


def _layers(raw: dict[str, Any]) -> list[tuple[int, str]]:
    return [(int(key), key) for key in raw["per_layer_config"]]
