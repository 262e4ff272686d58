"""Which model gave the answers of traces: its fingerprint, what is refused, what is remarked on."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.api.llm import embedded_model
from paceline.core.errors import TraceError
from paceline.loading import checkpoint as checkpoint_module
from paceline.loading.checkpoint import load_checkpoint, model_fingerprint
from paceline_lab.trace.requests import answer_notes, check_model
from tests.arrays import arrays
from tests.loading.gguf_writing import convert

TARGET, DRAFT = (embedded_model(name) for name in ("target", "draft"))


def fingerprint(path: str | Path, load_format: str = "mmap") -> str:
    opened = load_checkpoint(path, load_format=load_format, with_tokenizer=False)
    return model_fingerprint(opened)


def changed(folder: Path, name: str) -> Path:
    """The embedded draft with one number of a tensor changed."""
    shutil.copytree(DRAFT, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[0] += 1.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_equal_models_have_equal_fingerprints_wherever_they_lie(tmp_path: Path) -> None:
    copy = shutil.copytree(DRAFT, tmp_path / "copy")
    assert fingerprint(DRAFT) == fingerprint(copy) == fingerprint(copy, "memory")
    opened = load_checkpoint(DRAFT)
    plain = dataclasses.replace(opened, tensors=arrays(load_file(f"{DRAFT}/model.safetensors")))
    assert model_fingerprint(plain) == model_fingerprint(plain)
    assert fingerprint(TARGET) != fingerprint(DRAFT)


@pytest.mark.parametrize("part", ["self_attn.v_proj", "mlp.down_proj"])
def test_trained_on_a_model_is_another_one(tmp_path: Path, part: str) -> None:
    path = changed(tmp_path / "other", f"model.layers.0.{part}.weight")
    assert fingerprint(path) != fingerprint(DRAFT)


def test_no_matrix_of_a_gguf_file_is_unpacked_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert("llama-biased", tmp_path / "model.gguf")
    opened = load_checkpoint(tmp_path / "model.gguf", with_tokenizer=False)

    def refused(self: object, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read whole")

    with monkeypatch.context() as patch:
        patch.setattr(type(opened.tensors), "__getitem__", refused)
        found = model_fingerprint(opened)
    assert found == fingerprint(tmp_path / "model.gguf", "memory")


def test_so_many_matrices_are_read_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, read = load_checkpoint(TARGET, with_tokenizer=False), []
    rows = type(opened.tensors).rows  # type: ignore[attr-defined]

    def counted(self: object, name: str, first: int, last: int) -> torch.Tensor:
        read.append(name)
        found: torch.Tensor = rows(self, name, first, last)
        return found

    monkeypatch.setattr(type(opened.tensors), "rows", counted)
    monkeypatch.setattr(checkpoint_module, "SAMPLED_MATRICES", 16)
    model_fingerprint(opened)
    assert len(set(read)) == len(read) == 16
    assert len({name.split(".")[2] for name in read}) > 4, "of many layers"
    assert len({name.split(".")[-2] for name in read}) > 3, "of many parts"


def test_another_models_answers_are_refused() -> None:
    opened = load_checkpoint(DRAFT)
    meta = {"model": "target", "model_fingerprint": fingerprint(TARGET)}
    with pytest.raises(TraceError, match=r"answers of target, .* draft, is another.*--cost"):
        check_model(meta, opened)
    check_model(meta | {"model_fingerprint": fingerprint(DRAFT)}, opened)
    check_model({"model": "target"}, opened)  # that do not say


def test_what_may_differ_is_remarked_on() -> None:
    meta = {"model": "target", "dtype": "int8"}
    assert answer_notes(meta, "target", "int8") == []
    assert answer_notes({}, "target", "int8") == []
    (dtype,) = answer_notes(meta, "target", "float32")
    assert "given in int8" in dtype
    assert "float32" in dtype
    (name,) = answer_notes(meta, "draft", "int8")
    assert "answers of target" in name
    # Whose fingerprint was compared may have another name.
    assert answer_notes(meta | {"model_fingerprint": "x"}, "renamed", "int8") == []
