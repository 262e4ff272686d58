"""Model folders that are trained on: what is taken of them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.training.model_files import load_model
from tests.toy import toy_folder, toy_tensors

NAME = "model.layers.0.mlp.up_proj.weight"


def folder(path: Path, **tensors: torch.Tensor) -> Path:
    toy_folder(path)
    save_file({**toy_tensors(), **tensors}, path / "model.safetensors")
    return path


def test_what_is_computed_anew_is_not_trained(tmp_path: Path) -> None:
    inv_freq = {"model.rotary_emb.inv_freq": torch.ones(4), "t2d": torch.ones(4).bool()}
    assert set(load_model(folder(tmp_path, **inv_freq)).params) == set(toy_tensors())


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    quantised = {NAME: toy_tensors()[NAME].to(torch.float8_e4m3fn)}
    with pytest.raises(UnsupportedModelError, match=f"{NAME} is of type F8_E4M3"):
        load_model(folder(tmp_path, **quantised))


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    embedding = toy_tensors()["model.embed_tokens.weight"]
    loaded = load_model(folder(tmp_path, **{"lm_head.weight": embedding.clone()}))
    assert set(loaded.params) == set(toy_tensors())
    with pytest.raises(ModelLoadError, match="tie_word_embeddings"):
        load_model(folder(tmp_path, **{"lm_head.weight": embedding + 1}))
