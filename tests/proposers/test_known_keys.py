"""Heads whose configuration says more than is known, or that they are for another target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigError, UnsupportedModelError
from paceline.proposers.heads import build
from paceline.proposers.heads.checkpoint import load_head
from paceline.proposers.heads.known_keys import check_keys
from tests.proposers import dflash
from tests.proposers.heads import (
    TAPS,
    as_original,
    head_config,
    head_options,
    head_tensors,
    target_info,
    write_head,
)
from tests.proposers.mtp import info, mtp_options, mtp_tensors, qwen, with_mtp
from tests.proposers.parallel_heads import dflash2_config, dspark_config, peagle_config
from tests.toy import TOY, toy_runner

CONFIGS = {
    "eagle3": head_config(),
    "peagle": peagle_config(),
    "dflash": dflash.dflash_config(),
    "dspark": dspark_config(),
    "dflash2": dflash2_config(),
}
FLAGS = ("norm_output", "norm_before_fc", "fc_norm")
PARTS = {"eagle3": "eagle_config", "peagle": "eagle_config"}


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """In an original layout, with all that transformers writes of layers."""
    layer = config.pop("transformer_layer_config")
    whole = transformers.AutoConfig.for_model(layer["model_type"]).to_dict()
    return {**whole, **layer, **{key: config[key] for key in config if key[:11] != "speculators"}}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_key_that_is_not_known_is_named_wherever_it_stands(kind: str, tmp_path: Path) -> None:
    config, part = CONFIGS[kind], PARTS.get(kind, "dflash_config")
    layer = config["transformer_layer_config"]
    for where, changed in (
        ("", config | {"drift_correction": True}),
        (f"{part}.", config | {part: {"drift_correction": "linear"}}),
        (
            "transformer_layer_config.",
            config | {"transformer_layer_config": layer | {"drift_correction": 0.5}},
        ),
    ):
        folder = write_head(tmp_path / f"{len(where)}", changed, {})
        with pytest.raises(UnsupportedModelError, match=rf"says {where}drift_correction = "):
            load_head(str(folder))
    check_keys(config | {"drift_correction": None, "other": False, part: {"more": []}}, kind, "x")


@pytest.mark.parametrize("kind", CONFIGS)
def test_all_that_transformers_writes_of_layers_is_known(kind: str) -> None:
    config = CONFIGS[kind]
    layer = config["transformer_layer_config"]
    for model_type in ("llama", "qwen2", "qwen3", "mistral", "gpt_oss", "deepseek_v3", "qwen3_moe"):
        whole = transformers.AutoConfig.for_model(model_type).to_dict() | layer
        check_keys(config | {"transformer_layer_config": whole}, kind, "x")
        check_keys(flat({**config, "transformer_layer_config": whole}), kind, "x")


USUAL = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "use_aux_hidden_state": True,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": None,
    "eagle_aux_hidden_state_layer_ids": list(TAPS),
}
"""What NVIDIA's Model Optimizer says of an ordinary EAGLE-3 head."""


@pytest.mark.parametrize("key", [*USUAL, "logit_scale"])
def test_what_would_compute_otherwise_is_named(key: str, tmp_path: Path) -> None:
    config, tensors = as_original(head_config(), head_tensors())
    config["eagle_config"] = USUAL
    load_head(str(write_head(tmp_path, config, tensors)))
    if key == "eagle_aux_hidden_state_layer_ids":
        return
    config["eagle_config"] = {**USUAL, key: 2 if key[-5:] in ("_step", "ayers", "scale") else None}
    if config["eagle_config"][key] is None:
        config["eagle_config"][key] = not USUAL[key]
    write_head(tmp_path, config, tensors)
    with pytest.raises(UnsupportedModelError, match=rf"with {key} = .*; supported: "):
        load_head(str(tmp_path))


@pytest.mark.parametrize("flag", ["norm_output", "norm_before_residual", "norm_before_fc"])
def test_flags_count_in_the_part_for_eagle_too(flag: str, tmp_path: Path) -> None:
    config, tensors = as_original(head_config(), head_tensors())
    config["eagle_config"] = {**USUAL, flag: True}
    head = load_head(str(write_head(tmp_path, config, tensors)))
    shown = replace(head.decoder.config.entry, norm_before_residual=False) != (
        head.decoder.config.entry
    )
    found = {"norm_before_residual": shown, **{f: getattr(head, f) for f in FLAGS}}
    assert [name for name, value in found.items() if value] == [flag]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_target_layers": 7}, f"one with 7 layers, and the target here has {TOY.num_layers}"),
        ({"target_hidden_size": 64}, "one with 64 numbers per hidden state, .* here has 32"),
    ],
)
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_head_for_another_target_names_both(
    kind: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    tensors = head_tensors() if kind == "eagle3" else dflash.dflash_tensors()
    folder = str(write_head(tmp_path, CONFIGS[kind] | fields, tensors))
    config: SpeculativeConfig = head_options(kind, model=folder)
    with pytest.raises(ConfigError, match=words):
        build(config, target_info(toy_runner()))
    own = {"num_target_layers": TOY.num_layers, "target_hidden_size": TOY.hidden_size}
    write_head(tmp_path, CONFIGS[kind] | own, tensors)
    build(config, target_info(toy_runner()))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_theta": 5e5}, r"one with 500000 as rope_theta, and the target here has 10000"),
        ({"num_hidden_layers": 5}, "one with 5 layers, and the target here has 2"),
    ],
)
def test_another_models_mtp_layer_names_both(
    fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = with_mtp(tmp_path, qwen(mtp_tensors()), **fields)
    with pytest.raises(ConfigError, match=words):
        build(mtp_options(model=str(folder)), info(toy_runner(), None))
