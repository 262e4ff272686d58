"""Checkpoints of families that name or lay out their tensors in ways of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.errors import ConfigError, ModelLoadError, TrainingError, UnsupportedModelError
from paceline.loading.checkpoint import load_checkpoint
from paceline.models.families.config_json import config_from_hf
from paceline.models.families.layouts import halves
from paceline_lab.train.model_files import load_model
from tests.arrays import assert_close, same
from tests.loading.gguf_writing import IDS, write_gguf
from tests.models.reference import YARN, Driver, edit, make_model, save_model, saved_model
from tests.models.test_hf_config import written

TOKENS = torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(3)).tolist()


def close(driver: Driver, model: Any) -> None:
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0]
    assert_close(driver.chunk(TOKENS), expected, atol=1e-4, rtol=1e-4)


def test_halves() -> None:
    assert halves(2, 6, 4).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]


def test_fused_queries_keys_and_values_of_a_gguf_file(tmp_path: Path) -> None:
    """ChatGLM's own checkpoints have them so, and so have the files made of those."""
    model = make_model("glm")
    state = dict(model.state_dict())
    for index in range(model.config.num_hidden_layers):
        for kind in ("weight", "bias"):
            prefix = f"model.layers.{index}.self_attn."
            parts = [state.pop(f"{prefix}{name}_proj.{kind}") for name in "qkv"]
            fused = f"encoder.layers.{index}.self_attention.query_key_value.{kind}"
            state[fused] = torch.cat(parts)
    path = write_gguf(tmp_path / "model.gguf", model.config, state, metadata=IDS)
    close(Driver.of(path, max_len=64), model)


def test_rows_stay_rows_where_weights_are_taken_as_they_are_stored(tmp_path: Path) -> None:
    save_model("glm", tmp_path, "bfloat16")
    tensors = load_checkpoint(tmp_path, with_tokenizer=False).tensors
    name = "model.layers.1.self_attn.k_proj.weight"
    stored = tensors.as_stored(name)
    assert stored.format == "BF16"
    assert np.array_equal(stored.rows.view(np.uint16), tensors[name].view(np.uint16))
    original = load_file(tmp_path / "model.safetensors")[name]
    assert not same(tensors[name], original)
    assert same(tensors[name][:4], original[[0, 2, 4, 6]])


@pytest.mark.parametrize("family", ["glm4", "hunyuan"])
def test_missing_tensors_are_missed_by_name(tmp_path: Path, family: str) -> None:
    save_model(family, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"no tensor model\.layers\.0\.self_attn\.q_proj"):
        Driver.of(tmp_path)


def test_rows_that_make_no_heads(tmp_path: Path) -> None:
    save_model("glm", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    save_file({**tensors, name: tensors[name][:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="has 31 rows; the configuration needs 32"):
        Driver.of(tmp_path)


def test_a_name_and_its_other_form_at_once(tmp_path: Path) -> None:
    save_model("hunyuan", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    twice = {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}
    save_file({**tensors, **twice}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="appears twice"):
        load_checkpoint(tmp_path, with_tokenizer=False)


def test_a_scaling_of_olmo_3_is_not_that_of_sliding_layers() -> None:
    raw = written("olmo3")
    del raw["rope_parameters"]
    config = config_from_hf({**raw, "rope_theta": 700.0, "rope_scaling": YARN})
    assert config.positions.local_rope is not None
    assert (config.positions.rope.scaling, config.positions.local_rope.scaling) == (
        "yarn",
        "default",
    )
    assert config.positions.rope.theta == YARN["rope_theta"]
    assert config.positions.local_rope.theta == 700.0


def test_layers_without_rotary_are_listed_or_every_few() -> None:
    raw = written("smollm3")
    assert config_from_hf(raw).positions.rotary_layers == (True, True, True, False, True)
    raw["no_rope_layers"] = None
    changed = config_from_hf({**raw, "no_rope_layer_interval": 2})
    assert changed.positions.rotary_layers == (True, False, True, False, True)
    with pytest.raises(ModelLoadError, match="no_rope_layers"):
        config_from_hf({**raw, "no_rope_layers": [1, 0]})


def test_what_a_family_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="hunyuan_v1_dense models with use_cla"):
        config_from_hf({**written("hunyuan"), "use_cla": True})


@pytest.mark.parametrize("family", ["glm", "olmo2", "gpt2", "cohere2"])
def test_training_is_refused(tmp_path: Path, family: str) -> None:
    save_model(family, tmp_path)
    edit(tmp_path / "config.json", dtype="float32")
    with pytest.raises(TrainingError, match="like Llama's"):
        load_model(tmp_path)


def test_gpt2_as_it_was_first_published(tmp_path: Path) -> None:
    """Without a prefix, and with the causal masks as buffers."""
    model = saved_model("gpt2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 8, 8) for i in range(2)}
    save_file(bare | masks, tmp_path / "model.safetensors")
    close(Driver.of(tmp_path, max_len=64), model)


def test_weights_that_are_stored_the_other_way_round_keep_their_type(tmp_path: Path) -> None:
    save_model("gpt2", tmp_path, "bfloat16")
    tensors = load_checkpoint(tmp_path, with_tokenizer=False).tensors
    original = load_file(tmp_path / "model.safetensors")["transformer.h.0.mlp.c_fc.weight"]
    name = "model.layers.0.mlp.up_proj.weight"
    assert tensors.shape_of(name) == tuple(original.T.shape)
    assert tensors.as_stored(name).format == "BF16"
    assert same(tensors[name], original.T.contiguous())


def test_no_more_positions_than_were_learnt(tmp_path: Path) -> None:
    save_model("gpt2", tmp_path)
    with pytest.raises(ConfigError, match="give --max-model-len 128 or less"):
        Driver.of(tmp_path, max_len=129)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("cohere", "use_qk_norm"),
        ("stablelm", "qk_layernorm"),
        ("phi", "qk_layernorm"),
        ("gpt2", "add_cross_attention"),
        ("gpt2", "scale_attn_by_inverse_layer_idx"),
    ],
)
def test_traits_that_do_not_run_are_refused(family: str, key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"models with {key} are not supported"):
        config_from_hf({**written(family), key: True})
