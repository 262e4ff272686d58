"""How a model makes a text's vector, as GGUF files and sentence-transformers' folders say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ModelLoadError
from paceline.loading.checkpoint import load_checkpoint
from paceline.models.pooling import folder_pooling, write_pooling
from tests.loading.gguf_writing import convert
from tests.models.reference import save_model

# What sentence-transformers 6.2.0 and 2.7.0 write.
NEW = "sentence_transformers.sentence_transformer.modules"
BASE = "sentence_transformers.base.modules"
OLD = "sentence_transformers.models"
MODES = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean",
    "weightedmean": "weightedmean",
    "lasttoken": "last",
}
FLAGS = ["cls_token", *(f"{m}_tokens" for m in ("max", "mean", "mean_sqrt_len", "weightedmean"))]
FLAGS += ["lasttoken"]


def write_modules(folder: Path, config: dict[str, Any], *types: str) -> Path:
    folder.mkdir(exist_ok=True)
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{t.rpartition('.')[2]}" if i else "", "type": t}
        for i, t in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for module in modules[1:]:
        (folder / module["path"]).mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("mode", "name"), MODES.items())
def test_one_mode(tmp_path: Path, mode: str, name: str) -> None:
    kinds = [f"{BASE}.transformer.Transformer", f"{NEW}.pooling.Pooling"]
    new = {"embedding_dimension": 64, "pooling_mode": mode, "include_prompt": True}
    kinds.append(f"{BASE}.normalize.Normalize")
    assert folder_pooling(write_modules(tmp_path, new, *kinds)) == name
    flags = {f"pooling_mode_{key}": key.startswith(mode) for key in FLAGS}
    if mode == "mean":
        flags["pooling_mode_mean_sqrt_len_tokens"] = False
    old = {"word_embedding_dimension": 64, **flags}
    kinds = [f"{OLD}.Transformer", f"{OLD}.Pooling"]
    assert folder_pooling(write_modules(tmp_path, old, *kinds)) == name


def test_what_is_not_one_of_them_is_named(tmp_path: Path) -> None:
    kinds = [f"{OLD}.Transformer", f"{OLD}.Pooling"]
    two = write_modules(tmp_path, {"pooling_mode": ["mean", "max"]}, *kinds)
    assert folder_pooling(two) == "mean+max"
    dense = write_modules(tmp_path, {"pooling_mode": "mean"}, *kinds, f"{OLD}.Dense")
    assert folder_pooling(dense) == "mean, then Dense"


def test_folders_that_say_less(tmp_path: Path) -> None:
    assert folder_pooling(tmp_path) == ""
    write_pooling(tmp_path, "last")  # a folder whose list of modules was not copied with it
    assert folder_pooling(tmp_path) == "last"
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.Transformer", "path": ""}]))
    assert folder_pooling(tmp_path) == ""


@pytest.mark.parametrize("listed", ['{"a": 1}', "[1]", '[{"type": "x.Pooling", "path": ".."}]'])
def test_a_damaged_list_of_modules(tmp_path: Path, listed: str) -> None:
    (tmp_path / "modules.json").write_text(listed)
    with pytest.raises(ModelLoadError, match=r"modules\.json"):
        folder_pooling(tmp_path)


def test_a_checkpoint_tells_its_folders(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    assert load_checkpoint(tmp_path).pooling == ""
    write_pooling(tmp_path, "cls")
    assert load_checkpoint(tmp_path).pooling == "cls"


@pytest.mark.parametrize(
    ("number", "name"),
    [(0, ""), (1, "mean"), (2, "cls"), (3, "last"), (4, "rank"), (9, "type 9")],
)
def test_a_checkpoint_tells_its_files(tmp_path: Path, number: int, name: str) -> None:
    convert("qwen3", tmp_path / "m.gguf", metadata={"ARCH.pooling_type": number})
    assert load_checkpoint(tmp_path / "m.gguf").pooling == name
