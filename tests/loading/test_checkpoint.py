"""Opening models: folders, shards, files and hub ids."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.errors import ConfigError, ModelLoadError
from paceline.core.installation import install_command
from paceline.loading.checkpoint import load_checkpoint
from tests.arrays import same
from tests.models.reference import edit, make_model, save_folder

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(tmp_path / "tiny")


@pytest.mark.parametrize("load_format", ["mmap", "memory"])
def test_folder(folder: Path, load_format: str) -> None:
    checkpoint = load_checkpoint(str(folder), load_format=load_format)
    stored = load_file(folder / "model.safetensors")
    assert set(checkpoint.tensors) == set(stored)
    assert len(checkpoint.tensors) == len(stored)
    assert all(same(checkpoint.tensors[name], stored[name]) for name in stored)
    assert checkpoint.name == "tiny"
    assert checkpoint.config.architecture == "qwen3"
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.encode("the")


def test_memory_does_not_need_the_file_any_more(folder: Path) -> None:
    checkpoint = load_checkpoint(folder, load_format="memory")
    (folder / "model.safetensors").unlink()
    assert checkpoint.tensors[NAME].shape == (112, 64)


def test_shards(folder: Path) -> None:
    truth = load_file(folder / "model.safetensors")
    make_model("qwen3").save_pretrained(folder, max_shard_size="40KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert len(list(folder.glob("*.safetensors"))) > 3
    tensors = load_checkpoint(folder).tensors
    assert set(tensors) == set(truth)
    assert all(same(tensors[name], truth[name]) for name in truth)


@pytest.mark.parametrize("load_format", ["mmap", "memory"])
def test_the_index_says_which_of_two_tensors_counts(folder: Path, load_format: str) -> None:
    truth = load_file(folder / "model.safetensors")
    other = {NAME: torch.zeros_like(truth[NAME])}
    save_file(other, folder / "a.safetensors")
    save_file({**other, "t2d": torch.ones(1)}, folder / "z.safetensors")
    index = folder / "model.safetensors.index.json"
    where = {"absent": "a.safetensors", **dict.fromkeys(truth, "model.safetensors")}
    where |= {"t2d": "z.safetensors", "model.norm.weight": "z.safetensors"}  # the last is wrong
    index.write_text(json.dumps({"weight_map": where}))
    tensors = load_checkpoint(folder, load_format=load_format).tensors
    assert set(tensors) == {*truth, "t2d"}
    assert all(same(tensors[name], truth[name]) for name in truth)


def test_end_tokens_are_those_of_both_files(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=[2, 9])
    edit(folder / "generation_config.json", eos_token_id=[9, 5, 10**6], temperature=0.7)
    checkpoint = load_checkpoint(folder)
    assert checkpoint.config.eos_token_ids == (2, 9, 5)
    assert checkpoint.generation["temperature"] == 0.7


@pytest.mark.parametrize("keys", [("dtype",), ("torch_dtype",), ()])
def test_dtype_of_a_file_that_does_not_say(folder: Path, keys: tuple[str, ...]) -> None:
    tensors = {name: t.bfloat16() for name, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    edit(folder / "config.json", **{"dtype": None, **dict.fromkeys(keys, "float16")})
    assert load_checkpoint(folder).config.dtype == ("float16" if keys else "bfloat16")


def test_tied_matrix_under_either_name(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors")
    edit(folder / "config.json", tie_word_embeddings=True)
    for load_format in ("mmap", "memory"):
        got = load_checkpoint(folder, load_format=load_format).tensors
        assert same(got["model.embed_tokens.weight"], tensors["lm_head.weight"])


# --- what is a model -----------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["/no/such/folder", "nothing", "a/b/c", "", "x" * 5000, "a\0b"])
def test_nothing_there(source: str) -> None:
    with pytest.raises(ModelLoadError):
        load_checkpoint(source)


def test_a_path_is_never_taken_for_a_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelLoadError, match="there is no model"):
        load_checkpoint(Path("org/name"))
    with pytest.raises(ConfigError, match=re.escape(f"huggingface_hub: {install_command()}")):
        load_checkpoint("org/name")


class FakeHub:
    def __init__(self, answer: Path | Exception) -> None:
        self.answer = answer
        self.asked: list[Any] = []

    def snapshot_download(self, name: str, allow_patterns: list[str]) -> str:
        self.asked.append((name, allow_patterns))
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def test_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(folder)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    checkpoint = load_checkpoint("some-org/tiny.model")
    assert checkpoint.name == "some-org/tiny.model"
    ((name, patterns),) = hub.asked
    assert name == "some-org/tiny.model"
    assert not {"*", "*.py", "*.bin"} & set(patterns)


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(ConnectionError("offline\nmore"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(ModelLoadError, match=r"no folder org/name.*ConnectionError: offline$"):
        load_checkpoint("org/name")


def test_a_lone_safetensors_file(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="give the folder"):
        load_checkpoint(folder / "model.safetensors")


def test_unknown_load_format(folder: Path) -> None:
    with pytest.raises(ConfigError, match="mmap, memory"):
        load_checkpoint(folder, load_format="pickle")
