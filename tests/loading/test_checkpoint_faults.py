"""Model folders that are incomplete, damaged or made to harm, each with a clear error."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.backends.native.native import why_not_native
from paceline.backends.native.packing import Packer
from paceline.backends.rows.reference import ReferenceOps
from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.disk.packed_folder import write_packed
from paceline.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.models.decoder import Decoder
from paceline.proposers.ngram_model import read_tables
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
    with pytest.raises(UnsupportedModelError, match="'mamba' is not supported; supported: llama"):
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


def test_folder_without_tokenizer(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert load_checkpoint(folder, with_tokenizer=False).tokenizer is None
    assert not caplog.text
    assert load_checkpoint(folder).tokenizer is None
    assert "has no tokenizer.json" in caplog.text


@pytest.mark.parametrize(
    "name", ["tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json", "vocab.txt"]
)
def test_a_tokenizer_of_another_kind_is_not_none(folder: Path, name: str) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / name).write_text("{}")
    assert load_checkpoint(folder, with_tokenizer=False).tokenizer is None
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json; save the model's fast"):
        load_checkpoint(folder)


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


POINTER = b"""version https://git-lfs.github.com/spec/v1
oid sha256:4665a5ea423c2713d436b5ee50593a9640e0018c1550b5a0002f74190d6caea8
size 267862680
"""


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs(folder: Path, name: str) -> None:
    (folder / name).write_bytes(POINTER)
    with pytest.raises(ModelLoadError, match=f"{name} is .* a pointer of Git LFS .*git lfs pull"):
        load_checkpoint(folder)


def test_a_pointer_of_git_lfs_in_place_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(POINTER)
    with pytest.raises(ModelLoadError, match="git lfs pull"):
        load_checkpoint(path)
    with pytest.raises(ModelLoadError, match="git lfs pull"):
        read_tables(path)


# --- what would be misread -----------------------------------------------------------------------


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Add, replace or (None) remove tensors; a double underscore stands for a dot."""
    stored = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        stored.pop(name.replace("__", "."), None)
        if tensor is not None:
            stored[name.replace("__", ".")] = tensor
    save_file(stored, folder / "model.safetensors")


@pytest.mark.parametrize("backend", [ReferenceOps, Packer])
@pytest.mark.parametrize("name", [NAME, "model.embed_tokens.weight", "model.norm.weight"])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"),
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
    ],
)
def test_types_that_are_no_weights(
    folder: Path, name: str, kind: torch.dtype, said: str, backend: Any
) -> None:
    if backend is Packer and why_not_native() is not None:
        pytest.skip(str(why_not_native()))
    stored = load_file(folder / "model.safetensors")[name]
    change(folder, **{name: stored.to(kind)})
    checkpoint = load_checkpoint(folder)
    with pytest.raises(UnsupportedModelError, match=f"{name} is of type {said}, .* quantised"):
        Decoder(checkpoint.config, checkpoint.tensors, backend("int8"), 32)


@pytest.mark.parametrize(
    "name",
    [
        NAME + "_scale_inv",
        NAME + "_scale",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.mlp.gate.weight",
        "model.layers.2.mlp.up_proj.weight",
        "lm_head.bias",
        "d2t",
        "score.weight",
    ],
)
def test_tensors_without_a_use_are_named(folder: Path, name: str) -> None:
    change(folder, **{name: torch.ones(4)})
    with pytest.raises(UnsupportedModelError, match=f"no use for 1 of .* tensors: {name};"):
        decode_with(load_checkpoint(folder))


def test_many_tensors_without_a_use_are_counted(folder: Path) -> None:
    change(folder, **{f"x{i}": torch.ones(1) for i in range(9)})
    with pytest.raises(UnsupportedModelError, match=r"no use for 9 of .*: x0, x1, x2, x3, \.\.\.;"):
        decode_with(load_checkpoint(folder))


def test_a_checkpoint_with_something_left_is_not_converted(folder: Path) -> None:
    change(folder, score__weight=torch.ones(1))
    if why_not_native() is not None:
        pytest.skip(str(why_not_native()))
    with pytest.raises(UnsupportedModelError, match=r"score\.weight"):
        write_packed(load_checkpoint(folder), folder / "out", Packer("int8"))
    assert not (folder / "out" / "config.json").exists()


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "model.layers.0.self_attn.masked_bias",
        "t2d",
        "vision_tower.encoder.weight",
        "model.multi_modal_projector.linear_1.weight",
        "mtp.fc.weight",
        "v_head.summary.weight",
    ],
)
@pytest.mark.parametrize("load_format", ["mmap", "memory"])
def test_harmless_tensors_are_passed_over(folder: Path, name: str, load_format: str) -> None:
    change(folder, **{name: torch.ones(4)})
    assert decode_with(load_checkpoint(folder, load_format=load_format)).layers


def test_a_tensor_under_two_names(folder: Path) -> None:
    change(folder, **{f"language_model.{NAME}": torch.ones(112, 64)})
    with pytest.raises(ModelLoadError, match=f"{NAME} appears twice"):
        load_checkpoint(folder)


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
