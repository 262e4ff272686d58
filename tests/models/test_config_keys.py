"""Keys of configurations against transformers' own classes: what is absent, and what changes it."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.models.config import ModelConfig
from paceline.models.hf_config import FAMILIES, config_from_hf
from tests.arrays import assert_close
from tests.models.reference import FULL, SLIDING, YARN, Driver, save_model
from tests.models.test_families import TOKENS, want
from tests.models.test_hf_config import written

pytestmark = pytest.mark.usefixtures("one_thread")

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
    all_slide = config.sliding_layers and all(config.sliding_layers)
    return dataclasses.replace(config, sliding_layers=()) if all_slide else config


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


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights = False"),
        ("mamba2", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ("bamba", {"hidden_act": "gelu"}, "hidden_act = gelu"),
        ("nemotron-h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act = gelu"),
        ("phimoe", {"num_experts_per_tok": 4}, "num_experts_per_tok = 4"),
    ],
)
def test_what_would_change_logits_is_refused_by_name(
    tmp_path: Path, family: str, changes: dict[str, Any], words: str
) -> None:
    save_model(family, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(UnsupportedModelError, match=words):
        config_from_hf({**raw, **changes})


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
    model = save_model(family, tmp_path, **copy.deepcopy(changes))
    got = Driver.of(tmp_path, max_len=64).chunk(TOKENS)
    assert_close(got, want(model, TOKENS), atol=1e-4, rtol=1e-4)


def test_layers_of_gemma_4_may_have_numbers_with_zeros() -> None:
    """transformers 5.24 writes "05" where there are more than ten layers, older ones "5"."""
    raw = written("gemma4")
    told = {str(layer): raw["per_layer_config"][key] for layer, key in _layers(raw)}
    padded = {f"{int(key):02}": value for key, value in told.items()}
    read = [config_from_hf({**raw, "per_layer_config": each}) for each in (told, padded)]
    assert read[0] == read[1]
    assert len({heads.dim for heads in read[0].layer_heads}) == 2


def _layers(raw: dict[str, Any]) -> list[tuple[int, str]]:
    return [(int(key), key) for key in raw["per_layer_config"]]
