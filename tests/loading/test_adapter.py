"""Folders that PEFT writes: what is read of them, and what is refused, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.errors import ModelLoadError, NoAdapterError, UnsupportedModelError
from paceline.loading.adapter import load_adapter
from paceline.models.backend import AdaptedLayers
from paceline.models.layer_sizes import Experts
from tests.adapters import adapter_folder, adapter_tensors
from tests.toy import HYBRIDS, TOY, toy_tensors

NAME = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"
HIDDEN = TOY.hidden_size


def read(folder: Path, tensors: dict[str, Any] | None = None, **settings: Any) -> AdaptedLayers:
    """An adapter of the toy, as it is written and read."""
    tensors = adapter_tensors(toy_tensors()) if tensors is None else tensors
    return load_adapter(adapter_folder(folder, tensors, **settings), TOY, {})


def low_rank(out: int, width: int, rank: int = 4, name: str = NAME) -> dict[str, torch.Tensor]:
    return {name.format("A"): torch.ones(rank, width), name.format("B"): torch.ones(out, rank)}


def test_each_linear_is_where_its_outputs_are(tmp_path: Path) -> None:
    first, second = read(tmp_path)
    q, kv, width = 32, 16, TOY.intermediate_size
    ups = [(each.first, len(each.up)) for each in first["qkv"]]
    assert ups == [(0, q), (q, kv), (q + kv, kv)]
    assert [(each.first, len(each.up)) for each in second["gate_up"]] == [
        (0, width),
        (width, width),
    ]
    assert [each.down.shape for each in second["down"]] == [(4, width)]
    assert {each.scale for parts in first.values() for each in parts} == {2.0}


def test_scales_follow_patterns_and_the_root_of_the_rank(tmp_path: Path) -> None:
    tensors = low_rank(32, HIDDEN, 9) | low_rank(16, HIDDEN, name=NAME.replace("q_proj", "v_proj"))
    patterns = {
        "rank_pattern": {"q_proj": 9},
        "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 6},
    }
    _, layer = read(tmp_path / "plain", tensors, **patterns)
    assert [each.scale for each in layer["qkv"]] == [6 / 9, 8 / 4]
    _, layer = read(tmp_path / "root", tensors, use_rslora=True, **patterns)
    assert [each.scale for each in layer["qkv"]] == [6 / 3, 8 / 2]


def test_fused_linears_of_a_family_are_read(tmp_path: Path) -> None:
    tensors = low_rank(64, HIDDEN, name=NAME.replace("q_proj", "qkv_proj"))
    tensors |= low_rank(88, HIDDEN, name=NAME.replace("self_attn.q_proj", "mlp.gate_up_proj"))
    _, layer = read(tmp_path, tensors)
    assert [(each.first, len(each.up)) for each in layer["qkv"]] == [(0, 64)]
    assert [(each.first, len(each.up)) for each in layer["gate_up"]] == [(0, 88)]


def test_an_adapter_of_a_model_without_its_head(tmp_path: Path) -> None:
    """peft 0.21.2 names the layers so where it wraps what ``AutoModel`` loads."""
    tensors = low_rank(HIDDEN, HIDDEN, name=NAME.replace("model.model.model.", "model.model."))
    empty, layer = read(tmp_path, tensors)
    assert (list(empty), list(layer)) == ([], ["qkv"])


def test_names_and_rows_are_those_of_the_familys_layout(tmp_path: Path) -> None:
    """GLM's rows of a head are rotated by pairs that follow one another."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    up = torch.arange(32.0).repeat(4, 1).T.contiguous()
    tensors = {name.format("A"): torch.ones(4, HIDDEN), name.format("B"): up}
    folder = adapter_folder(tmp_path, tensors)
    (layer, _) = load_adapter(folder, TOY, {"model_type": "glm"})
    assert layer["qkv"][0].up[:8, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_weights_are_of_the_folder_as_it_was(tmp_path: Path) -> None:
    _, layer = read(tmp_path)
    before = np.array(layer["o"][0].up)
    adapter_folder(tmp_path, adapter_tensors(toy_tensors(), seed=3))
    assert np.array_equal(layer["o"][0].up, before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora = True.*length of weights"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = .*modules"),
        ({"bias": "all"}, "bias = all.*biases"),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [1]}, "embeddings are the same"),
        ({"layer_replication": [[0, 1]]}, "layers stay"),
        ({"peft_type": "IA3"}, "type 'IA3'; LORA"),
        ({"init_lora_weights": "pissa"}, "pissa.*model's own weights"),
    ],
)
def test_what_is_more_than_additions_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 0},
        {"r": "8"},
        {"r": 4096},
        {"lora_alpha": float("inf")},
        {"lora_alpha": None},
        {"rank_pattern": [3]},
        {"rank_pattern": {"q_proj": -1}},
        {"alpha_pattern": {"(": 2}},
    ],
)
def test_settings_that_are_none_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        read(tmp_path, **settings)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("model.embed_tokens", "embeddings and heads are the same for all requests"),
        ("lm_head", "embeddings and heads are the same for all requests"),
        ("model.layers.7.self_attn.q_proj", "no such linear"),
        ("model.layers.0.block_sparse_moe.gate", "target_modules can be down_proj, gate_proj"),
    ],
)
def test_other_targets_are_refused(module: str, message: str, tmp_path: Path) -> None:
    name = f"base_model.model.{module}.lora_{{}}.weight"
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, low_rank(32, HIDDEN, name=name))


def test_embeddings_have_tensors_of_their_own(tmp_path: Path) -> None:
    name = "base_model.model.model.embed_tokens.lora_embedding_A"
    with pytest.raises(UnsupportedModelError, match="embeddings and heads are the same"):
        read(tmp_path, {name: torch.ones(4, 48)})
    name = NAME.format("magnitude_vector")
    with pytest.raises(UnsupportedModelError, match=r"magnitude_vector\.weight; only lora_A"):
        read(tmp_path, {name: torch.ones(4, 48)})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            low_rank(64, 64),
            r"has shape \(4, 64\); of this model .* would be \(4, 32\)",
        ),
        (low_rank(48, HIDDEN), r"has shape \(48, 4\)"),
        (low_rank(32, HIDDEN, rank=8), r"has shape \(8, 32\)"),
        ({NAME.format("A"): torch.ones(4, 32)}, "one of two tensors"),
        ({}, "has no tensors of an adapter"),
    ],
)
def test_adapters_of_other_models_are_refused(
    tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path, tensors)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    tensors = {name: each.to(torch.int8) for name, each in low_rank(32, HIDDEN).items()}
    with pytest.raises(UnsupportedModelError, match="int8; allowed:"):
        read(tmp_path, tensors)


def test_weights_are_numbers(tmp_path: Path) -> None:
    tensors = low_rank(32, HIDDEN)
    tensors[NAME.format("B")][3, 1] = float("nan")
    with pytest.raises(ModelLoadError, match=r"lora_B\.weight in .* has NaN or infinite"):
        read(tmp_path, tensors)


def test_a_folder_without_an_adapter_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(NoAdapterError, match=r"adapter_config\.json and adapter_model"):
        load_adapter(tmp_path, TOY, {})
    adapter_folder(tmp_path, {}).joinpath("adapter_model.safetensors").rename(tmp_path / "x.bin")
    with pytest.raises(ModelLoadError, match="pickled weights are never read"):
        load_adapter(tmp_path, TOY, {})


def test_experts_and_recurrences_cannot_be_adapted(tmp_path: Path) -> None:
    mixture = TOY.with_traits({"mlp.experts": Experts(5, 2, 20)})
    folder = adapter_folder(tmp_path, adapter_tensors(toy_tensors(), targets=("gate_proj",)))
    with pytest.raises(UnsupportedModelError, match="target_modules can be k_proj, o_proj"):
        load_adapter(folder, mixture, {})
    tensors = adapter_tensors(toy_tensors(), targets=("q_proj",))
    folder = adapter_folder(tmp_path / "hybrid", tensors)
    with pytest.raises(UnsupportedModelError, match="no such linear"):
        load_adapter(folder, HYBRIDS["delta"], {})


def test_outputs_have_one_addition(tmp_path: Path) -> None:
    tensors = low_rank(64, HIDDEN, name=NAME.replace("q_proj", "qkv_proj")) | low_rank(32, HIDDEN)
    with pytest.raises(ModelLoadError, match="some outputs of a linear twice"):
        read(tmp_path, tensors)
