"""Model folders that are incomplete, damaged or made to harm, each with a clear error."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.models.checkpoint import Checkpoint, load_checkpoint
from paceline.models.decoder import Decoder
from paceline.models.ops.reference import ReferenceOps
from tests.models.reference import edit, save_folder

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(tmp_path / "tiny")


def decode_with(checkpoint: Checkpoint) -> Decoder:
    return Decoder(checkpoint.config, checkpoint.tensors, ReferenceOps("float32"), 32)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[" * 10**5, '{"model_type": "llama"}'])
def test_corrupt_config(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelLoadError):
        load_checkpoint(folder)


def test_missing_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load_checkpoint(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "x"}'])
def test_corrupt_generation_config(folder: Path, content: str) -> None:
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ModelLoadError):
        load_checkpoint(folder)


def test_unsupported_architecture(folder: Path) -> None:
    edit(folder / "config.json", model_type="mamba")
    with pytest.raises(
        UnsupportedModelError, match="'mamba' is not supported; supported are llama"
    ):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (None, r"neither model\.safetensors nor"),
        ("pytorch_model.bin", "pickled weights are never read"),
        ("model-q4.gguf", "give the path of that file"),
    ],
)
def test_folder_without_weights(folder: Path, other: str | None, words: str) -> None:
    (folder / "model.safetensors").unlink()
    if other:
        (folder / other).write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=words):
        load_checkpoint(folder)


def test_folder_without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_checkpoint(folder)
    assert load_checkpoint(folder, with_tokenizer=False).tokenizer is None


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.5, 0.9999])
@pytest.mark.parametrize("load_format", ["mmap", "memory"])
def test_truncated_weights(folder: Path, share: float, load_format: str) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelLoadError, match="not a complete safetensors file"):
        load_checkpoint(folder, load_format=load_format)


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<Q", 1 << 62),
        struct.pack("<Q", 4) + b"{{{{",
        struct.pack("<Q", 2) + b"[]",
        b"\x80\x04\x95",
    ],
    ids=["absurd-length", "not-json", "list", "pickle"],
)
def test_corrupt_weights(folder: Path, head: bytes) -> None:
    (folder / "model.safetensors").write_bytes(head + bytes(100))
    with pytest.raises(ModelLoadError, match="not a complete safetensors file"):
        load_checkpoint(folder)


def test_missing_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[NAME]
    save_file(tensors, folder / "model.safetensors")
    checkpoint = load_checkpoint(folder)
    assert NAME not in checkpoint.tensors
    assert checkpoint.tensors.get(NAME) is None
    with pytest.raises(ModelLoadError, match=f"no tensor {NAME}"):
        checkpoint.tensors[NAME]
    with pytest.raises(ModelLoadError, match=f"no tensor {NAME}"):
        decode_with(checkpoint)


def test_wrong_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[NAME] = tensors[NAME][:-1].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=rf"{NAME} has shape \(111, 64\).*\(112, 64\)"):
        decode_with(load_checkpoint(folder))


def test_absurd_sizes_fail_before_memory_is_taken(folder: Path) -> None:
    edit(folder / "config.json", hidden_size=1 << 16, intermediate_size=1 << 19, head_dim=4096)
    with pytest.raises(ModelLoadError, match="has shape"):
        decode_with(load_checkpoint(folder))


@pytest.mark.parametrize(
    "shard",
    [
        "../tiny/model.safetensors",
        "/etc/passwd",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "model.bin",
        "..",
        "",
        7,
        None,
        ["model.safetensors"],
    ],
)
def test_shard_names_stay_inside(folder: Path, shard: Any) -> None:
    index = {"weight_map": {NAME: shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="shards must be"):
        load_checkpoint(folder)


@pytest.mark.parametrize("index", ["", "{}", "[]", '{"weight_map": []}', '{"weight_map": {}}'])
def test_corrupt_index(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match=r"index\.json"):
        load_checkpoint(folder)


def test_missing_shards(folder: Path) -> None:
    names = [f"model-{i}-of-9.safetensors" for i in range(9)]
    index = {"weight_map": {str(i): name for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="lacks 9 of 9 shards: model-0-of-9"):
        load_checkpoint(folder)
