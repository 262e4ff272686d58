"""Model folders that are trained on: what is taken of them, and what is refused."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.core.errors import TrainingError, UnsupportedModelError
from paceline_lab.train.model_files import load_model, save_model
from tests.toy import toy_folder, toy_tensors

NAME = "model.layers.0.mlp.up_proj.weight"


def folder(path: Path, **tensors: torch.Tensor) -> Path:
    path.mkdir(exist_ok=True)
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


def test_a_tied_head_is_the_embedding_unless_another_is_stored(tmp_path: Path) -> None:
    embedding = toy_tensors()["model.embed_tokens.weight"]
    loaded = load_model(folder(tmp_path, **{"lm_head.weight": embedding.clone()}))
    assert set(loaded.params) == set(toy_tensors())
    assert loaded.config.tie_embeddings
    loaded = load_model(folder(tmp_path, **{"lm_head.weight": embedding + 1}))
    assert set(loaded.params) == {*toy_tensors(), "lm_head.weight"}
    assert not loaded.config.tie_embeddings


def test_a_tokenizer_that_cannot_be_read_is_not_a_place_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = folder(tmp_path / "from"), tmp_path / "to"
    target.mkdir()
    (source / "tokenizer.json").write_text("{}")
    real = Path.open

    def shut(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == source / "tokenizer.json":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", shut)
    with pytest.raises(TrainingError, match=r"cannot read .*/from/tokenizer\.json: Permission"):
        save_model(target, load_model(source), source, "float32", "")


def test_all_files_of_a_tokenizer_come_along(tmp_path: Path) -> None:
    source, target = folder(tmp_path / "from"), tmp_path / "to"
    target.mkdir()
    names = {
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        *("added_tokens.json", "chat_template.jinja", "chat_template.json"),
        "additional_chat_templates/tool_use.jinja",
    }
    (source / "additional_chat_templates").mkdir()
    for name in names:
        (source / name).write_text("{}")
    save_model(target, load_model(source), source, "float32", "")
    assert all((target / name).read_text() == "{}" for name in names)
